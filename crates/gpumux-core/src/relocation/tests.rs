use proptest::{collection::vec, prelude::*, sample::subsequence};

use super::*;

const GIB: u64 = 1 << 30;

fn gpu(number: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{number}"),
        number,
        name: "H100".into(),
        memory: 80 * GIB,
        instance: false,
        trouble: None,
    }
}

fn process(pid: u32, devices: &[&str]) -> Process {
    Process {
        pid,
        devices: devices.iter().map(|it| (*it).to_owned()).collect(),
        unmanaged: false,
    }
}

/// A tenant of one process on GPU 0 that can go to GPU 1.
fn facts() -> Facts {
    Facts {
        processes: vec![process(7, &["GPU-0"])],
        in_group: false,
        shares: false,
        under_way: false,
        confined: None,
        gpus: (0..3).map(gpu).collect(),
        target: "GPU-1".into(),
        needs: 10 * GIB,
        free: 20 * GIB,
        unkept: None,
    }
}

/// What stands in the way after this change.
fn refused(change: impl FnOnce(&mut Facts)) -> String {
    let mut facts = facts();
    change(&mut facts);
    plan(&facts).expect_err("it is refused").to_string()
}

#[test]
fn tenant_on_one_gpu_can_go_to_another() {
    let expected = Plan {
        from: "GPU-0".into(),
        to: "GPU-1".into(),
        pids: vec![7],
        bytes: 10 * GIB,
    };
    assert_eq!(plan(&facts()), Ok(expected));
    let mut two = facts();
    two.processes.push(process(9, &["GPU-0"]));
    // It is connected, and has no context.
    two.processes.push(process(8, &[]));
    assert_eq!(plan(&two).unwrap().pids, [7, 8, 9]);
}

#[test]
fn each_refusal_names_what_stands_in_the_way() {
    let it = refused(|it| it.processes.clear());
    assert!(it.contains("no connected process"), "{it}");
    let it = refused(|it| it.under_way = true);
    assert!(it.contains("being moved"), "{it}");
    let it = refused(|it| it.target = "GPU-0".into());
    assert_eq!(it, "the tenant is on GPU 0 already");
    let it = refused(|it| it.target = "GPU-7".into());
    assert!(it.contains("GPU-7 is no device"), "{it}");
    let it = refused(|it| it.gpus[1].trouble = Some("GPU is lost".into()));
    assert!(it.ends_with("GPU is lost"), "{it}");
    let it = refused(|it| it.gpus[1].name = "H200".into());
    assert!(it.contains("GPU 0 is H100 and GPU 1 is H200"), "{it}");
    let it = refused(|it| it.gpus[1].memory = 40 * GIB);
    assert!(it.contains("of one kind"), "{it}");
    let it = refused(|it| it.gpus[1].instance = true);
    assert!(it.contains("MIG"), "{it}");
    let it = refused(|it| it.in_group = true);
    assert!(it.contains("MPS group"), "{it}");
    let it = refused(|it| it.shares = true);
    assert!(it.contains("cuIpc"), "{it}");
    let it = refused(|it| it.processes = vec![process(7, &["GPU-0", "GPU-2"])]);
    assert!(it.contains("process 7 works on 2 GPUs"), "{it}");
    let it = refused(|it| it.processes.push(process(8, &["GPU-2"])));
    assert!(it.contains("different GPUs"), "{it}");
    let it = refused(|it| it.processes[0].unmanaged = true);
    assert!(it.contains("process 7 has channel groups"), "{it}");
    let it = refused(|it| it.processes[0].pid = 0);
    assert!(it.contains("no pid"), "{it}");
    let it = refused(|it| it.confined = Some(["GPU-0", "GPU-2"].map(str::to_owned).into()));
    assert!(it.contains("`--gpu 0,2,1`"), "{it}");
    let it = refused(|it| it.unkept = Some("70% is guaranteed to other".into()));
    assert!(it.contains("GPU 1 cannot keep its guarantees: 70%"), "{it}");
    let it = refused(|it| it.needs = 30 * GIB);
    assert!(
        it.contains("has 20.0 GiB free, and the tenant needs 30.0 GiB"),
        "{it}"
    );
}

#[test]
fn visible_devices_are_read_as_the_driver_does() {
    let gpus: Vec<Gpu> = (0..3).map(gpu).collect();
    let seen = |list| visible(list, &gpus);
    assert_eq!(seen(None), ["GPU-0", "GPU-1", "GPU-2"]);
    assert_eq!(seen(Some("2, GPU-0")), ["GPU-2", "GPU-0"]);
    assert_eq!(seen(Some("1,7,0")), ["GPU-1"]);
    assert_eq!(seen(Some("1,1")), ["GPU-1"]);
    for none in ["", "-1", "MIG-x", "NoDevFiles"] {
        assert_eq!(seen(Some(none)), [""; 0], "{none}");
    }
}

/// The driver's states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Locked,
    Off,
}

/// Processes, each with its state and whether it is on the other device. Some calls fail, by their number.
struct Driver {
    processes: Vec<(State, bool)>,
    fail: Vec<usize>,
    calls: usize,
}

impl Driver {
    fn new(processes: usize, fail: &[usize]) -> Self {
        Self {
            processes: vec![(State::Running, false); processes],
            fail: fail.to_vec(),
            calls: 0,
        }
    }

    fn call(
        &mut self,
        process: usize,
        from: State,
        to: State,
        exchanged: bool,
    ) -> Result<(), &'static str> {
        self.calls += 1;
        let it = &mut self.processes[process];
        if it.0 != from {
            return Err("illegal state");
        }
        if self.fail.contains(&self.calls) {
            return Err("it fails");
        }
        *it = (to, it.1 ^ exchanged);
        Ok(())
    }
}

impl Checkpoints for Driver {
    type Error = &'static str;

    fn lock(&mut self, process: usize) -> Result<(), Self::Error> {
        self.call(process, State::Running, State::Locked, false)
    }

    fn checkpoint(&mut self, process: usize) -> Result<(), Self::Error> {
        self.call(process, State::Locked, State::Off, false)
    }

    fn restore(&mut self, process: usize, exchanged: bool) -> Result<(), Self::Error> {
        self.call(process, State::Off, State::Locked, exchanged)
    }

    fn unlock(&mut self, process: usize) -> Result<(), Self::Error> {
        self.call(process, State::Locked, State::Running, false)
    }
}

#[test]
fn one_failed_call_leaves_all_processes_together() {
    for processes in 1..4 {
        let mut whole = Driver::new(processes, &[]);
        assert_eq!(carry_out(&mut whole, processes), Outcome::Moved);
        assert_eq!(whole.processes, vec![(State::Running, true); processes]);
        for fails in 1..=whole.calls {
            let mut driver = Driver::new(processes, &[fails]);
            let outcome = carry_out(&mut driver, processes);
            let moved = match &outcome {
                Outcome::Moved => true,
                Outcome::Back(why) => {
                    assert!(why.ends_with("it fails"), "{why}");
                    false
                }
                Outcome::Stuck(why) => panic!("call {fails} of {processes}: {why}"),
            };
            let expected = vec![(State::Running, moved); processes];
            assert_eq!(driver.processes, expected, "call {fails}: {outcome:?}");
        }
    }
}

proptest! {
    /// Whatever calls fail: what is reported is true.
    #[test]
    fn outcome_tells_where_the_processes_are(processes in 1..5usize, fail in vec(1..40usize, 0..6)) {
        let mut driver = Driver::new(processes, &fail);
        let outcome = carry_out(&mut driver, processes);
        let all = |moved| driver.processes.iter().all(|it| *it == (State::Running, moved));
        match outcome {
            Outcome::Moved => prop_assert!(all(true)),
            Outcome::Back(_) => prop_assert!(all(false)),
            Outcome::Stuck(_) => prop_assert!(fail.len() > 1 && !all(true)),
        }
    }

    /// The driver takes a list of pairs only if it names every visible device once on either side.
    #[test]
    fn pairs_are_a_permutation_that_swaps_two(
        seen in subsequence((0..8u32).collect::<Vec<_>>(), 0..8).prop_shuffle(),
        from in 0..8u32,
        to in 0..8u32,
    ) {
        let name = |number: &u32| format!("GPU-{number}");
        let visible: Vec<String> = seen.iter().map(name).collect();
        let (from, to) = (name(&from), name(&to));
        let found = pairs(&visible, &from, &to);
        prop_assert_eq!(found.is_some(), visible.contains(&from) && visible.contains(&to));
        let Some(found) = found else { return Ok(()) };
        let (old, new): (Vec<String>, Vec<String>) = found.iter().cloned().unzip();
        prop_assert_eq!(&old, &visible);
        let sorted = |mut all: Vec<String>| { all.sort(); all };
        prop_assert_eq!(sorted(old), sorted(new));
        prop_assert!(found.contains(&(from.clone(), to.clone())));
        // The same list again brings it back.
        let back = |it: &String| found.iter().find(|(old, _)| old == it).map(|(_, new)| new.clone());
        for (old, new) in &found {
            let again = back(new);
            prop_assert_eq!(again.as_ref(), Some(old));
        }
    }

    /// A plan is made only where nothing that is known stands in the way, and it names what is.
    #[test]
    fn plan_keeps_its_conditions(
        processes in vec((0..5u32, subsequence(vec![0, 1, 2u32], 0..=3), any::<bool>()), 0..4),
        flags in vec(any::<bool>(), 3),
        confined in proptest::option::of(subsequence(vec![0, 1, 2u32], 1..=3)),
        odd in proptest::option::of(0..3usize),
        target in 0..4u32,
        needs in 0..4 * GIB,
        free in 0..4 * GIB,
    ) {
        let name = |number: &u32| format!("GPU-{number}");
        let mut facts = Facts {
            processes: processes.iter().map(|(pid, devices, unmanaged)| Process {
                pid: *pid,
                devices: devices.iter().map(name).collect(),
                unmanaged: *unmanaged,
            }).collect(),
            in_group: flags[0],
            shares: flags[1],
            under_way: flags[2],
            confined: confined.map(|it| it.iter().map(name).collect()),
            gpus: (0..3).map(gpu).collect(),
            target: name(&target),
            needs,
            free,
            unkept: None,
        };
        if let Some(odd) = odd {
            facts.gpus[odd].name = "H200".into();
        }
        let Ok(plan) = plan(&facts) else { return Ok(()) };
        prop_assert!(plan.from != plan.to && plan.to == facts.target && needs <= free);
        prop_assert!(!facts.in_group && !facts.shares && !facts.under_way);
        prop_assert!(facts.confined.is_none_or(|it| it.contains(&plan.to)));
        for process in &facts.processes {
            prop_assert!(!process.unmanaged && plan.pids.contains(&process.pid) && process.pid != 0);
            prop_assert!(process.devices.iter().all(|it| *it == plan.from));
        }
        let kind = |uuid: &String| facts.gpus.iter().find(|it| it.uuid == *uuid).map(|it| &it.name);
        prop_assert_eq!(kind(&plan.from), kind(&plan.to));
    }
}
