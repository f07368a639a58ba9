use proptest::prelude::*;

use super::*;

fn profile(name: &str, slices: u32, memory_slices: u32, most: u32, starts: &[u32]) -> MigProfile {
    MigProfile {
        name: name.into(),
        slices,
        memory_slices,
        memory_bytes: u64::from(memory_slices) * (10 << 30),
        most,
        starts: starts.into(),
        ..MigProfile::default()
    }
}

/// As an H100, of this number, without an instance.
pub(crate) fn gpu(index: u32) -> MigGpu {
    let each = [0, 1, 2, 3, 4, 5, 6];
    MigGpu {
        uuid: format!("GPU-0f1e2d3c-0000-0000-0000-{index:012}"),
        index,
        name: "NVIDIA H100 80GB HBM3".into(),
        profiles: vec![
            profile("1g.10gb", 1, 1, 7, &each),
            profile("1g.10gb+me", 1, 1, 1, &each),
            profile("1g.20gb", 1, 2, 4, &[0, 2, 4, 6]),
            profile("2g.20gb", 2, 2, 3, &[0, 2, 4]),
            profile("3g.40gb", 3, 4, 2, &[0, 4]),
            profile("4g.40gb", 4, 4, 1, &[0]),
            profile("7g.80gb", 7, 8, 1, &[0]),
        ],
        ..MigGpu::default()
    }
}

/// Makes a GPU instance as the driver does: only where there is room. Its number.
fn make(gpu: &mut MigGpu, place: &Place) -> Option<u32> {
    let room = offers(gpu, &BTreeSet::new());
    let (_, profile) = room.iter().find(|(offer, _)| offer.place == *place)?;
    let taken = |id: &u32| gpu.instances.iter().all(|it| it.gpu_instance != *id);
    let id = (0..).find(taken)?;
    let instance = MigInstance {
        gpu_instance: id,
        profile: profile.name.clone(),
        start: place.start,
        memory_slices: profile.memory_slices,
        slices: profile.slices,
        compute_instances: Vec::new(),
    };
    gpu.instances.push(instance);
    Some(id)
}

/// Makes an instance in a place.
pub(crate) fn make_at(gpu: &mut MigGpu, place: &Place) -> bool {
    make(gpu, place).is_some()
}

/// Makes an instance in one of the places that there are, if there is room.
pub(crate) fn make_nth(gpu: &mut MigGpu, at: usize) {
    let place = offers(&self::gpu(gpu.index), &BTreeSet::new())[at]
        .0
        .place
        .clone();
    make(gpu, &place);
}

fn find(gpu: &mut MigGpu, id: u32) -> &mut MigInstance {
    let found = gpu.instances.iter_mut().find(|it| it.gpu_instance == id);
    found.expect("it is listed")
}

/// As real drivers, the same one for an instance that is made anew in its place.
fn make_compute(gpu: &mut MigGpu, id: u32) {
    let device = format!("MIG-{}-{id}", gpu.index);
    find(gpu, id).compute_instances.push(MigCompute {
        compute_instance: 0,
        device,
    });
}

#[test]
fn gpu_offers_all_that_others_leave() {
    let mut gpu = gpu(0);
    let none = BTreeSet::new();
    assert_eq!(offers(&gpu, &none).len(), 25);
    let place = |gpu: &MigGpu, profile: &str, start| {
        let all = offers(gpu, &BTreeSet::new());
        let mut places = all.into_iter().map(|(offer, _)| offer.place);
        places.find(|it| it.profile == profile && it.start == start)
    };
    let at_3 = place(&gpu, "1g.10gb", 3).unwrap();
    make(&mut gpu, &at_3).unwrap();
    // Of a claim: everything is offered, and the counters bound it.
    let own = BTreeSet::from([at_3.clone()]);
    assert_eq!(offers(&gpu, &own).len(), 25);
    // Of others: what it leaves.
    let all = offers(&gpu, &none);
    assert!(all.iter().all(|(offer, _)| !offer.place.overlaps(&at_3)));
    assert!(all.iter().all(|(offer, _)| offer.slices_free == 6));
    let most = |name: &str| {
        let mut found = all.iter().filter(|(_, profile)| profile.name == name);
        found.next().map(|(offer, _)| offer.most)
    };
    assert_eq!((most("1g.10gb"), most("3g.40gb")), (Some(6), Some(2)));
    assert_eq!((most("4g.40gb"), most("7g.80gb")), (None, None));
}

#[test]
fn instance_is_a_claims_if_its_record_named_the_place_before() {
    let mut gpus = vec![gpu(0)];
    let place = offers(&gpus[0], &BTreeSet::new())[0].0.place.clone();
    assert_eq!(next(&place, false, &gpus), Next::Make);
    let id = make(&mut gpus[0], &place).unwrap();
    assert_eq!(next(&place, true, &gpus), Next::Remake(id));
    make_compute(&mut gpus[0], id);
    let compute = gpus[0].instances[0].compute_instances[0].clone();
    assert_eq!(next(&place, true, &gpus), Next::Use(id, compute));
    let Next::Blocked(why) = next(&place, false, &gpus) else {
        panic!("another's instance")
    };
    assert!(why.contains("1g.10gb at memory slice 0 of GPU-"), "{why}");
    assert!(why.contains("GPU instance 0 (1g.10gb at 0)"), "{why}");
    // NVML may list it as a device later.
    let listed = std::mem::take(&mut gpus[0].instances[0].compute_instances[0].device);
    assert!(matches!(next(&place, true, &gpus), Next::Blocked(_)));
    let claims = Offer {
        recorded: true,
        ..offers(&gpu(0), &BTreeSet::new())[0].0.clone()
    };
    assert_eq!(
        removal(&claims, &listed, &gpus),
        Some((id, Some(String::new())))
    );
    gpus[0].instances[0].compute_instances[0].device = listed;
    // Someone divided it: it is not used, and not removed.
    make_compute(&mut gpus[0], id);
    assert!(matches!(next(&place, true, &gpus), Next::Blocked(_)));
    assert_eq!(removal(&claims, "", &gpus), None);
    // The GPU is not in MIG mode any more.
    assert!(matches!(next(&place, true, &[]), Next::Blocked(_)));
    assert_eq!(removal(&claims, "", &[]), None);
}

/// What the driver remembers of a claim.
#[derive(Clone, Debug)]
struct Record {
    offer: Offer,
    device: String,
    ready: bool,
}

/// A step towards an instance. False: it cannot go on.
fn prepare_step(record: &mut Record, gpus: &mut [MigGpu]) -> bool {
    let place = record.offer.place.clone();
    if !record.offer.recorded {
        let blocked = matches!(next(&place, false, gpus), Next::Blocked(_));
        record.offer.recorded = !blocked;
        return !blocked;
    }
    let gpu = |gpus: &[MigGpu]| gpus.iter().position(|it| it.uuid == place.gpu).unwrap();
    let at = gpu(gpus);
    match next(&place, true, gpus) {
        Next::Blocked(_) => return false,
        Next::Remake(half) => gpus[at].instances.retain(|it| it.gpu_instance != half),
        Next::Make => {
            let made = make(&mut gpus[at], &place);
            // Refused: what comes there is another's.
            let Some(id) = made else {
                record.offer.recorded = false;
                return false;
            };
            make_compute(&mut gpus[at], id);
        }
        Next::Use(_, found) => {
            (record.device, record.ready) = (found.device, true);
        }
    }
    true
}

#[derive(Clone, Debug)]
enum Op {
    /// A claim gets a place, and this much of preparing is done before a crash; `half`: the last instance lacks its compute instance.
    Prepare {
        place: usize,
        steps: u32,
        half: bool,
    },
    /// A claim goes; `half`: only its compute instance has gone before a crash.
    Unprepare { claim: usize, half: bool },
    /// Someone makes an instance where there is room, and no claim has named the place.
    Other { place: usize, whole: bool },
    /// Someone removes one of those.
    OtherGoes(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        (0usize..50, 0u32..5, any::<bool>()).prop_map(|(place, steps, half)| Op::Prepare {
            place,
            steps,
            half
        }),
        (0usize..8, any::<bool>()).prop_map(|(claim, half)| Op::Unprepare { claim, half }),
        (0usize..50, any::<bool>()).prop_map(|(place, whole)| Op::Other { place, whole }),
        (0usize..8).prop_map(Op::OtherGoes),
    ];
    prop::collection::vec(op, 1..40)
}

proptest! {
    /// Whenever the driver is killed, and whatever others do: theirs stays, each claim that is ready has an instance of its own, and
    /// nothing of a claim that has gone is left.
    #[test]
    fn crash_costs_no_instance_and_leaves_none(ops in ops()) {
        let mut gpus = vec![gpu(0), gpu(1)];
        let none = BTreeSet::new();
        let places: Vec<Offer> = gpus.iter().flat_map(|it| offers(it, &none)).map(|it| it.0).collect();
        let mut claims: Vec<Record> = Vec::new();
        let mut others: Vec<Place> = Vec::new();
        for op in ops {
            match op {
                Op::Prepare { place, steps, half } => {
                    let offer = places[place % places.len()].clone();
                    // As the counters and the book have it.
                    let on_gpu = || claims.iter().map(|it| &it.offer).filter(|it| it.place.gpu == offer.place.gpu);
                    let alike = on_gpu().filter(|it| it.place.profile == offer.place.profile).count();
                    let slices: u32 = on_gpu().map(|it| it.slices).sum();
                    if on_gpu().any(|it| it.place.overlaps(&offer.place))
                        || alike >= offer.most as usize
                        || slices + offer.slices > offer.slices_free
                    {
                        continue;
                    }
                    let mut record = Record { offer, device: String::new(), ready: false };
                    let before = gpus.clone();
                    let going = (0..steps).all(|_| prepare_step(&mut record, &mut gpus));
                    let own = at(&record.offer.place, &gpus).map(|it| it.gpu_instance);
                    if half && record.offer.recorded && let Some(own) = own {
                        let gpu = gpus.iter_mut().find(|it| it.uuid == record.offer.place.gpu).unwrap();
                        find(gpu, own).compute_instances.clear();
                        (record.ready, record.device) = (false, String::new());
                    }
                    if !going {
                        prop_assert_eq!(&gpus, &before, "what is refused has made nothing");
                        continue;
                    }
                    if record.offer.recorded {
                        claims.push(record);
                    }
                }
                Op::Unprepare { claim, half } if !claims.is_empty() => {
                    let claim = claim % claims.len();
                    let record = claims[claim].clone();
                    if let Some((id, device)) = removal(&record.offer, &record.device, &gpus) {
                        let gpu = gpus.iter_mut().find(|it| it.uuid == record.offer.place.gpu).unwrap();
                        let found = find(gpu, id).compute_instances.first().map(|it| it.device.clone());
                        prop_assert_eq!(found, device);
                        find(gpu, id).compute_instances.clear();
                        if !half {
                            gpu.instances.retain(|it| it.gpu_instance != id);
                        }
                    }
                    if half {
                        continue;
                    }
                    prop_assert!(at(&record.offer.place, &gpus).is_none(), "{record:?}");
                    claims.remove(claim);
                }
                Op::Other { place, whole } => {
                    let place = places[place % places.len()].place.clone();
                    if claims.iter().all(|it| it.offer.place != place) {
                        let gpu = gpus.iter_mut().find(|it| it.uuid == place.gpu).unwrap();
                        if let Some(id) = make(gpu, &place) {
                            if whole {
                                make_compute(gpu, id);
                            }
                            others.push(place);
                        }
                    }
                }
                Op::OtherGoes(other) if !others.is_empty() => {
                    let place = others.remove(other % others.len());
                    let id = at(&place, &gpus).unwrap().gpu_instance;
                    let gpu = gpus.iter_mut().find(|it| it.uuid == place.gpu).unwrap();
                    gpu.instances.retain(|it| it.gpu_instance != id);
                }
                _ => {}
            }
            for place in &others {
                prop_assert!(at(place, &gpus).is_some(), "another's {place} was removed");
            }
            // After a crash each claim either gets ready or is kept from it by others' instances only.
            for record in &mut claims {
                let (mut again, mut world) = (record.clone(), gpus.clone());
                let steps = (0..6).all(|_| prepare_step(&mut again, &mut world));
                let blocked = others.iter().any(|it| it.gpu == record.offer.place.gpu);
                prop_assert!(again.ready && steps || blocked, "{record:?}");
            }
            let own: BTreeSet<Place> = claims.iter().map(|it| it.offer.place.clone()).collect();
            let left = gpus.iter().flat_map(|gpu| gpu.instances.iter().map(|it| Place::of(gpu, it)));
            for place in left {
                prop_assert!(own.contains(&place) || others.contains(&place), "{place} is no one's");
            }
        }
    }
}
