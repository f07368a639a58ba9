//! What the page says of a program's work, however it reaches the driver.

mod support;

use std::{process::Command, time::Instant};

use gpumux_wire::{
    Shim,
    page::{Page, Work},
};
use support::{Connection, Listener, PATIENCE, Place, Tenant, example};

/// A program, a daemon's side of its session, and the page.
struct Run {
    app: Tenant,
    _session: Connection,
    _listener: Listener,
    page: Page,
    _place: Place,
}

/// The program, with the stand-in as the only `libcuda.so.1`.
fn command(place: &Place, way: &str) -> Command {
    let libraries = place.dir();
    let link = libraries.join("libcuda.so.1");
    if !link.exists() {
        std::os::unix::fs::symlink(example("libfake_cuda.so"), link).unwrap();
    }
    let mut command = place.command(example("cuda_app"));
    command
        .arg(way)
        .env("LD_LIBRARY_PATH", libraries)
        .env_remove("GPUMUX_HOOKS");
    command
}

/// A program with one context `c`.
fn run(way: &str, change: impl FnOnce(&mut Command)) -> Run {
    let place = Place::new();
    let listener = place.listen();
    let mut command = command(&place, way);
    change(&mut command);
    let mut app = Tenant::start(&mut command);
    app.tell("context c");
    let (session, _, page) = listener.session();
    assert!(matches!(session.packet(), Shim::Group { .. }));
    Run {
        app,
        _session: session,
        _listener: listener,
        page,
        _place: place,
    }
}

impl Run {
    fn tell(&mut self, command: &str) {
        assert_eq!(self.app.tell(command), "0", "{command}");
    }

    fn work(&self, slot: u32) -> Work {
        self.page.slot(slot).unwrap().work()
    }

    fn await_idle(&self, slot: u32) {
        let deadline = Instant::now() + PATIENCE;
        while !matches!(self.work(slot), Work::Idle(_)) {
            assert!(Instant::now() < deadline, "{:?}", self.work(slot));
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn end(self) {
        assert_eq!(self.app.end(), (vec![], Some(0)));
    }
}

#[test]
fn every_way_to_the_driver_is_seen() {
    for way in ["dlsym", "proc", "linked"] {
        let mut run = run(way, |_| ());
        assert_eq!(run.work(0), Work::Idle(0), "{way}: counted from the start");
        run.tell("stream s");
        run.tell("launch s");
        assert_eq!(run.work(0), Work::Busy(1), "{way}");
        run.tell("launch s");
        run.tell("launch 0");
        run.tell("sync s");
        assert_eq!(
            run.work(0),
            Work::Busy(3),
            "{way}: the default stream is another"
        );
        run.tell("sync 0");
        assert_eq!(run.work(0), Work::Idle(3), "{way}");
        run.tell("launch s");
        run.tell("launch 0");
        run.tell("sync-context");
        assert_eq!(run.work(0), Work::Idle(5), "{way}");
        run.end();
    }
}

#[test]
fn an_event_proves_what_came_before_it() {
    let mut run = run("dlsym", |_| ());
    for command in [
        "stream s",
        "event e",
        "event f",
        "launch s",
        "record e s",
        "launch s",
    ] {
        run.tell(command);
    }
    run.tell("sync-event e");
    assert_eq!(run.work(0), Work::Busy(2), "the second launch came later");
    run.tell("record e s");
    run.tell("sync-event e");
    assert_eq!(run.work(0), Work::Idle(2));
    // An event that was recorded elsewhere since proves nothing here any more.
    run.tell("stream t");
    for command in ["launch s", "record f s", "record f t", "sync-event f"] {
        run.tell(command);
    }
    assert_eq!(run.work(0), Work::Busy(3));
    run.end();
}

#[test]
fn silence_is_looked_into() {
    let mut run = run("proc", |_| ());
    run.tell("stream s");
    for launches in 1..4 {
        run.tell("launch s");
        run.tell("launch 0");
        assert_eq!(run.work(0), Work::Busy(2 * launches));
        run.tell("finish s");
        run.tell("finish 0");
        run.await_idle(0);
    }
    run.end();
}

#[test]
fn captures_are_neither_counted_nor_spoiled() {
    let mut run = run("dlsym", |_| ());
    for command in [
        "stream s",
        "stream t",
        "launch s",
        "capture t",
        "launch t",
        "launch t",
    ] {
        run.tell(command);
    }
    assert_eq!(run.work(0), Work::Busy(1), "only what is not captured");
    // Time for the poller to do what it must not; it has work to ask about.
    std::thread::sleep(std::time::Duration::from_millis(100));
    run.tell("end-capture t");
    run.tell("finish s");
    run.await_idle(0);
    run.tell("spoiled");
    run.end();
}

#[test]
fn what_a_destroyed_stream_has_left_is_waited_for() {
    let mut run = run("dlsym", |_| ());
    for command in [
        "stream s",
        "stream t",
        "launch s",
        "launch t",
        "destroy s",
        "sync t",
    ] {
        run.tell(command);
    }
    assert_eq!(run.work(0), Work::Busy(2), "its work goes on");
    run.tell("finish s");
    run.await_idle(0);
    run.tell("spoiled");
    // Its place serves another.
    for command in ["stream u", "launch u", "sync u"] {
        run.tell(command);
    }
    assert_eq!(run.work(0), Work::Idle(3));
    run.end();
}

#[test]
fn contexts_are_told_apart() {
    let mut run = run("dlsym", |_| ());
    run.tell("context d");
    run.tell("stream s");
    run.tell("launch s");
    assert_eq!((run.work(0), run.work(1)), (Work::Idle(0), Work::Busy(1)));
    run.tell("current c");
    run.tell("launch 0");
    run.tell("sync-context");
    assert_eq!((run.work(0), run.work(1)), (Work::Idle(1), Work::Busy(1)));
    // A stream keeps its context, whichever is current.
    run.tell("launch s");
    run.tell("sync s");
    assert_eq!((run.work(0), run.work(1)), (Work::Idle(1), Work::Idle(2)));
    run.end();
}

#[test]
fn destroyed_green_context_leaves_no_work_of_its_own() {
    let mut run = run("dlsym", |_| ());
    for command in ["green g", "from-green d g", "current d", "launch 0"] {
        run.tell(command);
    }
    assert_eq!(run.work(0), Work::Busy(1));
    run.tell("destroy-green g");
    assert_eq!(run.work(0), Work::Idle(1), "its default stream is gone");
    run.end();
}

#[test]
fn detached_context_is_forgotten_when_it_is_gone() {
    let mut run = run("dlsym", |_| ());
    for command in ["context d", "stream s", "launch s", "attach e", "detach d"] {
        run.tell(command);
    }
    assert_eq!(run.work(1), Work::Busy(1), "another attachment is left");
    assert_eq!(run.app.tell("detach c"), "201");
    run.tell("detach d");
    assert_eq!(run.work(1), Work::Idle(1));
    run.end();
}

#[test]
fn more_streams_than_places() {
    let mut run = run("dlsym", |_| ());
    for number in 0..600 {
        run.tell(&format!("stream s{number}"));
        run.tell(&format!("launch s{number}"));
        run.tell(&format!("sync s{number}"));
        assert_eq!(run.work(0), Work::Idle(number + 1));
    }
    run.tell("launch s0");
    assert_eq!(run.work(0), Work::Busy(601));
    run.end();
}

#[test]
fn hooks_can_be_left_out() {
    for way in ["dlsym", "proc", "linked"] {
        let mut run = run(way, |command| _ = command.env("GPUMUX_HOOKS", "0"));
        run.tell("stream s");
        run.tell("launch s");
        assert_eq!(run.work(0), Work::Unknown);
        run.end();
    }
}

#[test]
fn calls_can_be_watched() {
    let mut run = run("proc", |command| _ = command.env("GPUMUX_TRACE", "calls"));
    run.tell("stream s");
    run.tell("launch s");
    run.tell("sync s");
    let (lines, code) = run.app.end();
    assert_eq!(code, Some(0));
    let position = |start: &str| {
        let is = |line: &String| line.starts_with(start) && line.ends_with(" = 0");
        lines
            .iter()
            .position(is)
            .unwrap_or_else(|| panic!("{start}: {lines:#?}"))
    };
    assert!(
        position("gpumux: call: cuLaunchKernel(") < position("gpumux: call: cuStreamSynchronize(")
    );
}
