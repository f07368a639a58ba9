mod calls;

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use crate::layout::{
    Alloc21, Alloc64, ChannelAllocHead, Control, Free, GroupAlloc, TimesliceParams, Variant,
    XferCmd, cmd, escape,
};

const CLIENT: u32 = 0xc1d0_001a;
const DEVICE: u32 = 0x5c00_0002;
const SUBDEVICE: u32 = 0x5c00_0003;
const GROUP: u32 = 0x5c00_0015;
const HOPPER: u32 = 0xc86f;

fn alloc(parent: u32, object: u32, class: u32, engine: u32) -> Call {
    let client = CLIENT;
    Call::Alloc {
        client,
        parent,
        object,
        class,
        engine,
    }
}

fn client(handle: u32) -> Call {
    let class = class::ROOT_CLIENT;
    Call::Alloc {
        client: 0,
        parent: 0,
        object: handle,
        class,
        engine: 0,
    }
}

/// What libcuda does up to and including one compute group with two channels.
fn context() -> Capture {
    let mut capture = Capture::default();
    for call in [
        client(CLIENT),
        alloc(CLIENT, DEVICE, class::DEVICE, 0),
        alloc(DEVICE, SUBDEVICE, class::SUBDEVICE, 0),
        alloc(DEVICE, GROUP, class::CHANNEL_GROUP, engine::GR0),
        alloc(GROUP, GROUP + 1, HOPPER, engine::GR0),
        alloc(GROUP, GROUP + 2, HOPPER, engine::GR0),
    ] {
        capture.apply(1, &call);
    }
    capture
}

fn set(group: u32, us: u64) -> Call {
    Call::SetTimeslice {
        client: CLIENT,
        group,
        us,
    }
}

#[test]
fn a_context_is_ready_when_its_library_has_set_the_slice() {
    let mut capture = context();
    let id = capture.groups().next().unwrap();
    let schedule = Call::Schedule {
        client: CLIENT,
        group: GROUP,
    };
    assert_eq!(capture.apply(1, &schedule), []);
    assert!(!capture.group(id).unwrap().ready);
    assert_eq!(capture.apply(1, &set(GROUP, 3000)), [Event::Ready(id)]);
    let seen = capture.group(id).unwrap();
    assert_eq!(
        (seen.file, seen.engine, seen.timeslice_us),
        (1, engine::GR0, 3000)
    );
    assert_eq!(
        seen.group,
        Group {
            client: CLIENT,
            subdevice: SUBDEVICE,
            group: GROUP,
            channels: vec![GROUP + 1, GROUP + 2],
        }
    );
    assert_eq!(
        capture.apply(1, &set(GROUP, 9)),
        [Event::TimesliceTouched(id)]
    );
    let seen = capture.group(id).unwrap();
    assert_eq!(
        (seen.timeslice_us, seen.touched),
        (3000, 1),
        "the slice to give back stays"
    );
}

#[test]
fn a_copy_group_is_ready_when_scheduled() {
    let mut capture = context();
    let made = capture.apply(1, &alloc(DEVICE, 0x50, class::CHANNEL_GROUP, engine::COPY0));
    let [Event::Made(id)] = made[..] else {
        panic!("{made:?}")
    };
    let schedule = Call::Schedule {
        client: CLIENT,
        group: 0x50,
    };
    assert_eq!(capture.apply(1, &schedule), [Event::Ready(id)]);
    assert_eq!(capture.group(id).unwrap().timeslice_us, 1024);
}

#[test]
fn channels_come_and_go_under_any_parent_that_free_names() {
    let mut capture = context();
    let id = capture.groups().next().unwrap();
    let free = |object| Call::Free {
        client: CLIENT,
        object,
    };
    assert_eq!(capture.apply(1, &free(GROUP + 1)), [Event::Channels(id)]);
    assert_eq!(capture.group(id).unwrap().group.channels, [GROUP + 2]);
    assert_eq!(capture.apply(1, &free(0x77)), [], "not ours");
    assert_eq!(capture.apply(1, &free(DEVICE)), [Event::Gone(id)]);
    assert_eq!(capture.objects(), 1, "the client stays");
}

#[test]
fn every_architecture_s_channels_are_known() {
    for (class, name) in class::CHANNELS {
        let mut capture = context();
        let id = capture.groups().next().unwrap();
        let events = capture.apply(1, &alloc(GROUP, 0x99, class, 0));
        assert_eq!(events, [Event::Channels(id)], "{name}");
    }
}

#[test]
fn foreign_group_shows_as_the_parent_of_a_channel() {
    for seen_dup in [false, true] {
        let mut capture = context();
        // A second device with its subdevice, made before and after.
        capture.apply(1, &alloc(CLIENT, 0x80, class::DEVICE, 0));
        capture.apply(1, &alloc(0x80, 0x81, class::SUBDEVICE, 0));
        if seen_dup {
            let dup = Call::Dup {
                client: CLIENT,
                parent: 0x80,
                object: 0x90,
                client_src: 0xc1d0_0001,
                object_src: 0x5c00_0015,
            };
            assert_eq!(capture.apply(1, &dup), []);
        }
        let events = capture.apply(1, &alloc(0x90, 0x91, HOPPER, 0));
        let [Event::Made(id), Event::Channels(_)] = events[..] else {
            panic!("{events:?}")
        };
        let seen = capture.group(id).unwrap();
        assert_eq!((seen.engine, seen.shared), (engine::GR0, true));
        assert_eq!(
            (seen.group.group, &seen.group.channels[..]),
            (0x90, &[0x91][..])
        );
        if seen_dup {
            assert_eq!(seen.group.subdevice, 0x81);
        }
        assert!(!seen.ready);
        capture.settle(id);
        assert!(capture.group(id).unwrap().ready);
        assert_eq!(
            capture.apply(1, &set(0x90, 5)),
            [Event::TimesliceTouched(id)]
        );
    }
}

#[test]
fn a_duplicate_of_a_known_group_is_a_group() {
    let mut capture = context();
    let dup = Call::Dup {
        client: CLIENT,
        parent: DEVICE,
        object: 0x90,
        client_src: CLIENT,
        object_src: GROUP,
    };
    let events = capture.apply(1, &dup);
    let [Event::Made(id)] = events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(capture.group(id).unwrap().engine, engine::GR0);
}

#[test]
fn clients_of_several_files_and_devices_stay_apart() {
    let mut capture = context();
    let first = capture.groups().next().unwrap();
    let other = 0xc1d0_0020;
    let alloc = |parent, object, class, engine| Call::Alloc {
        client: other,
        parent,
        object,
        class,
        engine,
    };
    capture.apply(2, &client(other));
    // The same handles as the first client's, and two devices.
    capture.apply(2, &alloc(other, DEVICE, class::DEVICE, 0));
    capture.apply(2, &alloc(DEVICE, 0x21, class::SUBDEVICE, 0));
    capture.apply(2, &alloc(other, 0x30, class::DEVICE, 0));
    capture.apply(2, &alloc(0x30, 0x31, class::SUBDEVICE, 0));
    capture.apply(2, &alloc(DEVICE, GROUP, class::CHANNEL_GROUP, engine::GR0));
    capture.apply(
        2,
        &alloc(0x30, GROUP + 9, class::CHANNEL_GROUP, engine::GR0),
    );
    let groups: Vec<_> = capture
        .groups()
        .map(|id| capture.group(id).unwrap())
        .collect();
    assert_eq!(groups.iter().map(|g| g.file).collect::<Vec<_>>(), [1, 2, 2]);
    assert_eq!(
        groups.iter().map(|g| g.group.subdevice).collect::<Vec<_>>(),
        [SUBDEVICE, 0x21, 0x31]
    );
    assert_eq!(capture.close(2).len(), 2);
    assert_eq!(capture.groups().collect::<Vec<_>>(), [first]);
    assert_eq!(capture.close(1), [Event::Gone(first)]);
    assert_eq!(capture.objects(), 0);
}

#[test]
fn calls_in_a_client_that_was_not_seen_mean_nothing() {
    let mut capture = Capture::default();
    let group = alloc(DEVICE, GROUP, class::CHANNEL_GROUP, engine::GR0);
    assert_eq!(capture.apply(1, &group), []);
    assert_eq!(capture.objects(), 0);
}

#[test]
fn memory_is_bounded() {
    let mut capture = context();
    for object in 0x1_0000..0x1_0000 + 2 * MAX_FOREIGN as u32 {
        let dup = Call::Dup {
            client: CLIENT,
            parent: DEVICE,
            object,
            client_src: 1,
            object_src: 1,
        };
        capture.apply(1, &dup);
    }
    assert!(capture.objects() <= MAX_FOREIGN + 10);
    capture.apply(
        1,
        &Call::Free {
            client: CLIENT,
            object: CLIENT,
        },
    );
    assert_eq!((capture.objects(), capture.foreign), (0, 0));
}

/// A program's memory: one block at one address.
fn memory(at: u64, bytes: &[u8]) -> impl Fn(u64, &mut [u8]) -> bool + '_ {
    move |address, out| {
        let Some(from) = address.checked_sub(at) else {
            return false;
        };
        let Some(block) = bytes.get(from as usize..) else {
            return false;
        };
        let Some(block) = block.get(..out.len()) else {
            return false;
        };
        out.copy_from_slice(block);
        true
    }
}

/// Calls over few handles, so that they meet.
fn any_call() -> impl Strategy<Value = Call> {
    let client = prop_oneof![Just(1u32), Just(2), 0u32..4];
    let handle = || 0u32..12;
    let class = prop_oneof![
        Just(class::ROOT_CLIENT),
        Just(class::DEVICE),
        Just(class::SUBDEVICE),
        Just(class::CHANNEL_GROUP),
        Just(HOPPER),
    ];
    (client, handle(), handle(), class, 0..12u32, 0..9).prop_map(
        |(client, parent, object, class, engine, what)| match what {
            0..5 => Call::Alloc {
                client,
                parent,
                object,
                class,
                engine,
            },
            5 => Call::Dup {
                client,
                parent,
                object,
                client_src: engine % 4,
                object_src: engine,
            },
            6 => Call::Free { client, object },
            7 => Call::Schedule {
                client,
                group: object,
            },
            _ => Call::SetTimeslice {
                client,
                group: object,
                us: engine.into(),
            },
        },
    )
}

proptest! {
    #[test]
    fn any_calls_leave_a_consistent_picture(
        calls in proptest::collection::vec((0..3u64, any_call()), 0..200),
    ) {
        let mut capture = Capture::default();
        let mut alive = std::collections::BTreeSet::new();
        for (file, call) in &calls {
            for event in capture.apply(*file, call) {
                match event {
                    Event::Made(id) => prop_assert!(alive.insert(id), "{id:?} made twice"),
                    Event::Gone(id) => prop_assert!(alive.remove(&id), "{id:?} gone twice"),
                    Event::Ready(id) | Event::Channels(id) | Event::TimesliceTouched(id) => {
                        prop_assert!(alive.contains(&id), "{event:?} of no group");
                    }
                }
            }
            let listed: std::collections::BTreeSet<_> = capture.groups().collect();
            prop_assert_eq!(&listed, &alive);
            for id in listed {
                prop_assert!(capture.group(id).is_some(), "a group without its client");
            }
            let foreign = capture
                .objects
                .values()
                .filter(|object| matches!(object.kind, Kind::Foreign))
                .count();
            prop_assert_eq!(foreign, capture.foreign);
        }
        for file in 0..3 {
            capture.close(file);
        }
        prop_assert_eq!(capture.objects(), 0, "closing the files leaves nothing");
        prop_assert_eq!(capture.groups().count(), 0);
    }

    #[test]
    fn freeing_a_parent_frees_all_below(
        calls in proptest::collection::vec(any_call(), 0..100),
        (client, object) in (1..3u32, 0..12u32),
    ) {
        let mut capture = Capture::default();
        for call in &calls {
            capture.apply(1, call);
        }
        capture.apply(1, &Call::Free { client, object });
        prop_assert_eq!(capture.children((client, object)).count(), 0);
        prop_assert!(!capture.objects.contains_key(&(client, object)));
        if client == object {
            prop_assert_eq!(capture.of_client(client).count(), 0);
        }
    }

    #[test]
    fn any_bytes_decode_to_a_call_or_nothing(
        nr in prop_oneof![
            Just(escape::ALLOC), Just(escape::CONTROL), Just(escape::FREE),
            Just(escape::DUP_OBJECT), Just(escape::XFER_CMD), any::<u8>(),
        ],
        arg in proptest::collection::vec(any::<u8>(), 0..64),
        memory_bytes in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        let mut capture = context();
        if let Some(call) = Call::decode(Variant::default(), nr, &arg, memory(0, &memory_bytes)) {
            prop_assert!(Call::may_matter(nr));
            capture.apply(1, &call);
        }
    }
}
