//! What the device takes: controls, preemption, calls. Here it only has to work; `bench/fidelity.py` collects the
//! times, on an emulated and on a real device.
//!
//! `GPUMUX_TIMINGS=FILE` appends one JSON object a line, `{"case", "mode", "values"}` or `{"device"}`;
//! `GPUMUX_TIMINGS_SECONDS` is how long each distribution is measured.

use std::{
    env,
    fs::OpenOptions,
    io::Write,
    thread,
    time::{Duration, Instant},
};

use gpumux_rm::Controls;
use gpumux_tests::{
    Node, Options, PATIENCE, Process, Puppet, Session,
    cuda::{Runtime, program},
    wait_for,
};
use gpumux_wire::Daemon;
use serde_json::{Value, json};

fn seconds() -> f64 {
    let asked = env::var("GPUMUX_TIMINGS_SECONDS").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(0.5)
}

fn note(row: &Value) {
    let Some(file) = env::var_os("GPUMUX_TIMINGS") else {
        return;
    };
    let file = OpenOptions::new().create(true).append(true).open(file);
    writeln!(file.expect("GPUMUX_TIMINGS names a file"), "{row}").expect("room for a line");
}

/// What is measured on.
struct Bench(Puppet);

impl Bench {
    /// A batch program that is in its measurement.
    fn start_batch(&self, name: &str, arguments: &str) -> (Process, Session, Box<dyn Controls>) {
        let ready = self.0.node.dir().join(name);
        let batch = self.0.start(&format!(
            "gpumux workload batch --kernel-us 10000 --seconds 600 --ready-file {} {arguments}",
            ready.display()
        ));
        wait_for("the batch program", PATIENCE, || {
            ready.exists().then_some(())
        });
        batch
    }

    /// Runs the latency program, with its group's slice and perhaps hints: its report.
    fn latency(&self, mode: &str, slice: Option<u64>, hints: bool, arguments: &str) -> Value {
        let seconds = seconds();
        let (process, session, controls) = self.0.start(&format!(
            "gpumux workload latency --json --seconds {seconds} {arguments}"
        ));
        if let Some(slice) = slice {
            controls.set_timeslice(slice).unwrap();
        }
        if hints {
            session.send(&Daemon::Hints {
                contended: u64::MAX,
                automatic: false,
            });
        }
        let report = process.finish().ok().json();
        assert!(report["calls"].as_u64() > Some(0), "{mode}: {report:#}");
        let quantiles = ["p50_us", "p90_us", "p99_us", "p999_us", "max_us"];
        let values: Value = quantiles
            .map(|it| (it.to_owned(), report[it].clone()))
            .into_iter()
            .collect::<serde_json::Map<_, _>>()
            .into();
        note(&json!({"case": "preemption", "mode": mode, "values": values}));
        report
    }
}

/// The slice of a group that shall give way, and of one that shall not, in µs.
const SHORT: u64 = 1;
const LONG: u64 = 1_000_000;

/// A small latency program (10 kernels of 10 µs) beside kernels of 10 ms.
#[test]
fn preemption() {
    let bench = Bench(Puppet::new());
    let rate = "--period-us 5000";
    let alone = bench.latency("alone", None, false, rate);
    note(&json!({"device": alone["device"]}));
    let work = format!("{rate} --iterations {}", alone["iterations"]);
    {
        let (mut batch, _session, controls) = bench.start_batch("full", "");
        bench.latency("driver's time slicing", None, false, &work);
        controls.set_timeslice(SHORT).unwrap();
        bench.latency("1 s and 1 µs", Some(LONG), false, &work);
        let hinting = format!("{work} --hint manual --prepare-us 300");
        bench.latency("1 s and 1 µs, hints", Some(LONG), true, &hinting);
        assert!(batch.poll().is_none(), "{}", batch.err());
    }
    let (mut batch, _session, controls) = bench.start_batch("narrow", "--blocks 1 --threads 32");
    controls.set_timeslice(SHORT).unwrap();
    bench.latency("1 s and 1 µs, one warp", Some(LONG), false, &work);
    assert!(batch.poll().is_none(), "{}", batch.err());
}

/// Controls on a group that is busy with full-size kernels, which it survives.
#[test]
fn controls() {
    const ROUNDS: usize = 30;
    let bench = Bench(Puppet::new());
    let (mut batch, _session, controls) = bench.start_batch("busy", "");
    let mut times: [Vec<Duration>; 4] = Default::default();
    for round in 0..ROUNDS {
        let timed = |pull: &dyn Fn()| {
            let begin = Instant::now();
            pull();
            begin.elapsed()
        };
        let slice = [SHORT, 2048][round % 2];
        times[0].push(timed(&|| controls.set_timeslice(slice).unwrap()));
        times[1].push(timed(&|| {
            assert_eq!(controls.timeslice().unwrap(), slice);
        }));
        times[2].push(timed(&|| controls.freeze().unwrap()));
        times[3].push(timed(&|| controls.thaw().unwrap()));
    }
    assert!(batch.poll().is_none(), "{}", batch.err());
    for (mode, mut times) in ["set timeslice", "get timeslice", "freeze", "thaw"]
        .into_iter()
        .zip(times)
    {
        times.sort_unstable();
        let us = |part: usize| times[(ROUNDS * part / 100).min(ROUNDS - 1)].as_secs_f64() * 1e6;
        let values = json!({"p50_us": us(50), "p99_us": us(99)});
        note(&json!({"case": "control", "mode": mode, "values": values}));
    }
}

/// Latency of a program of 0.7 ms while controls are issued for a neighbour, which is idle or waits for the device.
#[test]
fn neighbours() {
    type Pull = fn(&dyn Controls);
    const PAUSE: Duration = Duration::from_micros(1500);
    const FREEZE: Pull = |controls| {
        controls.freeze().unwrap();
        thread::sleep(PAUSE);
        controls.thaw().unwrap();
    };
    const SLICE: Pull = |controls| controls.set_timeslice(SHORT).unwrap();
    let bench = Bench(Puppet::new());
    let kernels = "--kernels 70 --period-us 2500";
    let alone = bench.latency("0.7 ms alone", None, false, kernels);
    let work = format!("{kernels} --iterations {}", alone["iterations"]);
    let measure = |state: &str, controls: Box<dyn Controls>| {
        bench.latency(&format!("0.7 ms, one {state}"), Some(LONG), false, &work);
        for (name, pull) in [("freeze and thaw", FREEZE), ("slice", SLICE)] {
            let mode = format!("0.7 ms, one {state}, {name}");
            thread::scope(|scope| {
                let measured = scope.spawn(|| bench.latency(&mode, Some(LONG), false, &work));
                while !measured.is_finished() {
                    pull(&*controls);
                    thread::sleep(PAUSE);
                }
            });
        }
    };
    let start_idle = || {
        let ready = bench.0.node.dir().join("idle");
        let _ = std::fs::remove_file(&ready);
        let idle = format!(
            "gpumux workload idle --seconds 600 --ready-file {}",
            ready.display()
        );
        let started = bench.0.start(&idle);
        wait_for("the idle program", PATIENCE, || {
            ready.exists().then_some(())
        });
        started
    };
    {
        let (_idle, _session, controls) = start_idle();
        measure("idle", controls);
    }
    let (mut batch, _session, controls) = bench.start_batch("waiting", "");
    controls.set_timeslice(SHORT).unwrap();
    {
        let (_idle, _session, controls) = start_idle();
        measure("idle beside one that waits", controls);
    }
    measure("waiting", controls);
    assert!(batch.poll().is_none(), "{}", batch.err());
}

/// Virtual memory, copies, launches.
#[test]
fn calls() {
    let Some(program) = program("timings", Runtime::Static130) else {
        return;
    };
    let bench = Bench(Puppet::new());
    let mut command = bench
        .0
        .node
        .on_device([program.path.to_str().expect("a plain path")]);
    let finished = Process::start(&mut command).finish().ok();
    let mut rows = 0;
    for line in finished.out.lines().filter(|line| line.starts_with('{')) {
        let row: Value = serde_json::from_str(line).expect("one JSON object a line");
        let values = row["values"].as_object().expect("values");
        assert!(values.values().all(|it| it.as_f64() > Some(0.0)), "{row}");
        note(&row);
        rows += 1;
    }
    assert!(
        rows > 10 && finished.out.ends_with("done\n"),
        "{finished:#?}"
    );
}

/// What `bench/switch.py` computes with.
#[test]
fn switch_workload_stamps_requests_and_its_neighbour() {
    // Their kernels are interpreted.
    let node = Node::with(Options {
        profile: "hardware.sms = 2",
        ..Options::default()
    });
    let barrier = node.dir().join("barrier");
    let start = |class: &str, arguments: &str| {
        let work = format!(
            "gpumux workload switch {arguments} --seconds 1 --barrier 2:{}",
            barrier.display()
        );
        Process::start(&mut node.tenant(class, &work))
    };
    let neighbour = start(
        "--class batch",
        "--neighbour --kernel-us 200 --registers 4 --shared 1KiB --preemption thread-block",
    );
    let requests = start("--class latency", "--touch 4KiB --request-us 10");
    let (found, neighbour) = (
        requests.finish().ok().json(),
        neighbour.finish().ok().json(),
    );
    let times = |rows: &Value| -> Vec<Vec<u64>> {
        serde_json::from_value(rows.clone()).expect("rows of times")
    };
    let requests = times(&found["requests"]);
    assert!(!requests.is_empty() && !times(&found["compared"]).is_empty());
    for request in requests {
        let [submitted, first, last, seen] = request[..] else {
            panic!("{request:?}");
        };
        assert!(
            submitted < seen && first <= last && first > 0,
            "{request:?}"
        );
    }
    let ran = times(&neighbour["ran"]);
    assert!(ran.len() > 1, "{ran:?}");
    assert!(ran.iter().all(|it| it[0] <= it[1]), "{ran:?}");
    assert!(ran.windows(2).all(|it| it[0][1] <= it[1][0]), "{ran:?}");
}
