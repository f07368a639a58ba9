//! What holds for all work, slices and controls.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Op {
    Submit {
        stream: usize,
        group: usize,
        work: Work,
    },
    WaitFor {
        stream: usize,
        group: usize,
        back: usize,
    },
    Freeze(usize),
    Thaw(usize),
    Slice(usize, u64),
    Release(usize),
    Abort(usize),
    Pass(Nanos),
}

fn op() -> impl Strategy<Value = Op> {
    let work = prop_oneof![
        (1..200u32, 0..400_000u64).prop_map(|(sms, duration)| Work::Kernel { sms, duration }),
        (0..50_000_000u64).prop_map(|bytes| Work::Copy { bytes }),
        (0..500_000u64).prop_map(|timeout| Work::Hold { timeout }),
        Just(Work::Record),
        Just(Work::Host),
    ];
    prop_oneof![
        6 => (0..4usize, 0..5usize, work)
            .prop_map(|(stream, group, work)| Op::Submit { stream, group, work }),
        1 => (0..4usize, 0..5usize, 0..8usize)
            .prop_map(|(stream, group, back)| Op::WaitFor { stream, group, back }),
        1 => (0..5usize).prop_map(Op::Freeze),
        2 => (0..5usize).prop_map(Op::Thaw),
        1 => (0..5usize, 1..3000u64).prop_map(|(group, us)| Op::Slice(group, us)),
        2 => (0..8usize).prop_map(Op::Release),
        1 => (0..5usize).prop_map(Op::Abort),
        4 => (0..1_000_000u64).prop_map(Op::Pass),
    ]
}

/// Runs the operations, passing time in steps of at most `step`.
fn run(ops: &[Op], step: Nanos) -> (Vec<Event>, Vec<Received>) {
    let mut gpu = Gpu::new(Hardware::default());
    let groups = [
        Engine::Compute,
        Engine::Compute,
        Engine::Compute,
        Engine::HostToDevice,
        Engine::HostToDevice,
    ]
    .map(|engine| gpu.add_group(engine));
    let streams = [(); 4].map(|()| gpu.add_stream());
    let mut works = Vec::new();
    let mut events = Vec::new();
    for op in ops {
        match *op {
            Op::Submit {
                stream,
                group,
                work,
            } => {
                works.push(gpu.submit(groups[group], streams[stream], work).unwrap());
            }
            Op::WaitFor {
                stream,
                group,
                back,
            } => {
                if let Some(at) = works.len().checked_sub(back + 1) {
                    let work = Work::Wait(works[at]);
                    works.push(gpu.submit(groups[group], streams[stream], work).unwrap());
                }
            }
            Op::Freeze(group) => gpu.freeze(groups[group]).unwrap(),
            Op::Thaw(group) => gpu.thaw(groups[group]).unwrap(),
            Op::Slice(group, us) => gpu.set_timeslice(groups[group], Timeslice(us)).unwrap(),
            Op::Release(back) => {
                if let Some(at) = works.len().checked_sub(back + 1) {
                    gpu.release(works[at]);
                }
            }
            Op::Abort(group) => gpu.abort(groups[group]).unwrap(),
            Op::Pass(time) => {
                let end = gpu.now + time;
                while gpu.now < end {
                    let promised = gpu.next_event();
                    let to = end.min(gpu.now.saturating_add(step));
                    let new = gpu.advance(to);
                    if let Some(first) = new.first() {
                        assert!(promised.unwrap() <= first.at, "came before it was due");
                    }
                    events.extend(new);
                }
            }
        }
    }
    let received = groups.map(|group| gpu.received(group).unwrap()).into();
    (events, received)
}

proptest! {
    /// How often the model is asked changes nothing, and no event comes unannounced.
    #[test]
    fn steps_do_not_matter(ops in prop::collection::vec(op(), 1..60), step in 1_000..200_000u64) {
        let whole = run(&ops, Nanos::MAX);
        prop_assert!(whole.0.is_sorted_by_key(|event| event.at));
        prop_assert_eq!(run(&ops, step), whole);
    }

    /// Whatever was done to them, thawed groups finish their work.
    #[test]
    fn thawed_work_completes(ops in prop::collection::vec(op(), 1..60)) {
        let mut ops = ops;
        ops.extend((0..5).flat_map(|group| [Op::Slice(group, 2000), Op::Thaw(group)]));
        ops.extend([Op::Pass(SECOND); 2]);
        let hosts = ops.iter().any(|op| matches!(op, Op::Submit { work: Work::Host, .. }));
        let aborts = ops.iter().any(|op| matches!(op, Op::Abort(_)));
        let submitted = ops.iter().filter(|op| matches!(op, Op::Submit { .. })).count();
        let (events, _) = run(&ops, Nanos::MAX);
        if !hosts && !aborts {
            let done = events.iter().filter(|event| event.kind == EventKind::Done).count();
            prop_assert!(done >= submitted);
        }
    }
}
