//! Work that a process left behind in a group, and how long its files are held for it.

use std::os::{
    fd::{AsRawFd, RawFd},
    unix::fs::MetadataExt,
};

use super::*;

/// A file that stands for held memory. A process that another test starts has it, too, for a moment: so what counts is whether this one
/// has it.
struct Held {
    fd: RawFd,
    reader: io::PipeReader,
}

impl Held {
    fn is_open(&self) -> bool {
        let inode = |fd: RawFd| std::fs::metadata(format!("/proc/self/fd/{fd}")).map(|it| it.ino());
        inode(self.fd).is_ok_and(|own| own == inode(self.reader.as_raw_fd()).unwrap())
    }
}

/// Two members of a group, of which the second ends at work and the first has none, beside a tenant of this class. Also a
/// file that says whether the memory is held.
fn left_behind(beside: Class) -> (Bench, Held) {
    left_behind_by(beside, |_| {})
}

/// The same; before its end, the second does something.
fn left_behind_by(beside: Class, act: impl FnOnce(&mut Engine)) -> (Bench, Held) {
    let mut bench = Bench::new();
    bench.add(1, beside);
    for n in [2, 3] {
        bench.member(n, 50, "team");
        let (_, file) = Page::create().unwrap();
        let page = Arc::new(Page::open(file).unwrap());
        bench.meet(n.into(), TenantId(n.into()), page);
    }
    bench.pages[1].slot(2).unwrap().complete(1);
    let (reader, writer) = io::pipe().unwrap();
    let fd = writer.as_raw_fd();
    act(&mut bench.engine);
    let left = Left::Session(SessionId(3));
    assert!(bench.engine.hold(&left, vec![writer.into()]).is_none());
    bench.engine.leave(SessionId(3), false);
    bench.engine.forget(TenantId(3));
    (bench, Held { fd, reader })
}

/// Whether the memory is held still, after this time.
fn held_after(bench: &mut Bench, seconds: u64, file: &Held) -> bool {
    bench.run(Micros::from_secs(seconds));
    bench.dead.try_iter().for_each(drop);
    file.is_open()
}

#[test]
fn work_left_by_a_member_is_held_until_its_group_had_time() {
    let (mut bench, file) = left_behind(Class::Batch);
    assert!(held_after(&mut bench, 3, &file), "half of 3 s");
    assert!(!held_after(&mut bench, 3, &file));
    // No other member of the group had work.
    let had = bench.domain(2).received_us;
    assert!((2_000_000..2_600_000).contains(&had), "{had}");
    bench.run(Micros::from_secs(1));
    assert_eq!(bench.domain(2).received_us, had, "it has none any more");
}

#[test]
fn work_left_by_a_member_that_exits_is_held_as_long() {
    // It frees its part of the group, as the driver library does.
    let (mut bench, file) = left_behind_by(Class::Batch, |engine| {
        engine.place(TenantId(3), "team".into());
        engine.gone(SessionId(3), 3);
    });
    assert!(held_after(&mut bench, 3, &file), "half of 3 s");
    assert!(!held_after(&mut bench, 3, &file));
}

#[test]
fn work_of_the_last_member_is_held_for_new_members() {
    let (mut bench, file) = left_behind(Class::Standard);
    bench.engine.leave(SessionId(2), false);
    assert!(held_after(&mut bench, 1, &file));
    bench.member(4, 50, "team");
    assert!(held_after(&mut bench, 20, &file), "it got no time");
    bench.engine.leave(SessionId(1), false);
    assert!(held_after(&mut bench, 1, &file));
    assert!(!held_after(&mut bench, 2, &file));
}

#[test]
fn deferred_release_waits_for_higher_classes_within_a_bound() {
    let (mut bench, file) = left_behind(Class::Standard);
    assert!(held_after(&mut bench, 20, &file));
    bench.run(Micros::from_millis(10_500));
    assert!(!held_after(&mut bench, 0, &file));
    let left: Vec<u32> = (bench.engine.give_up("team").iter())
        .filter(|it| it.ended_at_work())
        .map(|it| it.pid)
        .collect();
    assert_eq!(left, [1003], "a fault now may be of its making");

    let mut hold = || {
        let team = Left::Group("team".into());
        bench.engine.hold(&team, Vec::new()).is_none()
    };
    let held = std::iter::repeat_with(&mut hold).take_while(|held| *held);
    assert_eq!(held.count(), 48, "not of any number");

    let (mut bench, file) = left_behind(Class::Standard);
    bench.engine.leave(SessionId(2), false);
    assert!(held_after(&mut bench, 1, &file));
    assert!(
        !held_after(&mut bench, 2, &file),
        "nobody is left to be hurt"
    );
    let none = bench.engine.hold(&Left::Group("team".into()), Vec::new());
    assert!(none.is_some(), "there is no such group any more");
}

/// The last member ends in its turn: nothing plans its group any more, so its timeslice must let others run. The bench's hardware
/// finds two groups that may run for 1 µs each.
#[test]
fn work_of_the_last_member_stops_no_other_group() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(4, Class::Batch);
    bench.add(5, Class::Batch);
    bench.member(2, 50, "team");
    let runs = |bench: &Bench| {
        let group = bench.hardware().groups[&50];
        !group.frozen && group.slice == 1
    };
    while !runs(&bench) {
        bench.run(Micros::from_millis(1));
    }
    let (_, file) = io::pipe().unwrap();
    let left = Left::Session(SessionId(2));
    assert!(bench.engine.hold(&left, vec![file.into()]).is_none());
    bench.engine.leave(SessionId(2), false);
    bench.engine.forget(TenantId(2));
    // Others join a group of the same name that another server has made.
    bench.member(3, 60, "team");
    bench.run(Micros::from_secs(10));
    assert!(bench.domain(4).received_us > 0);
}

/// The last member ends while its group is frozen: the hardware runs no channel of the group before that member's are enabled
/// again, so a process that joins would wait until its files are closed.
#[test]
fn frozen_work_of_the_last_member_stops_no_new_member() {
    for earlier in [false, true] {
        frozen_work_stops_no_new_member(earlier);
    }
}

/// `earlier`: another member was killed at work before.
fn frozen_work_stops_no_new_member(earlier: bool) {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(4, Class::Batch);
    bench.add(5, Class::Batch);
    bench.member(2, 50, "team");
    let becomes = |bench: &mut Bench, frozen: bool| {
        (0..5_000).any(|_| {
            bench.run(Micros::from_millis(1));
            bench.hardware().groups[&50].frozen == frozen
        })
    };
    let kill = |bench: &mut Bench, n: u64| {
        let (_, file) = io::pipe().unwrap();
        let left = Left::Session(SessionId(n));
        assert!(bench.engine.hold(&left, vec![file.into()]).is_none());
        bench.engine.leave(SessionId(n), false);
    };
    if earlier {
        bench.member(6, 50, "team");
        kill(&mut bench, 6);
        bench.engine.forget(TenantId(6));
        bench.run(Micros::from_secs(4));
    }
    assert!(becomes(&mut bench, true), "not its quantum");
    kill(&mut bench, 2);
    bench.engine.forget(TenantId(2));
    bench.run(Micros::from_millis(1));
    assert!(bench.hardware().groups[&50].frozen, "nothing plans it");
    bench.member(3, 50, "team");
    assert!(becomes(&mut bench, false), "its quantum");
}
