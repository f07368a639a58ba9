//! Frees the process's channel groups when no daemon controls them any more.
//!
//! A daemon may have died, or stand still, with this process frozen or at a timeslice of 1 µs. A thread of its own
//! watches the daemon's lease (see [`gpumux_wire::lease`]), apart from the agent, which waits for memory to come back. When the
//! session has ended, or the lease expired, every group gets a timeslice that two groups can share
//! a device with, and only then runs again: two running groups at 1 µs would switch without end and run neither. What
//! fails is tried again. Groups whose memory is away stay frozen until it is back.

use std::{
    collections::BTreeMap,
    io,
    sync::{Condvar, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use gpumux_rm::{Controls, RmControls, capture::GroupId, control_file};
use gpumux_wire::lease::{LOOK, Leased};

use crate::{
    ground::{control_files::Kind, guard},
    process::{Agent, Process},
    work::{copies, permits},
};

/// The shortest timeslice, in µs, with which a group runs without a daemon: a switch takes up to 185 µs (H100 and H200,
/// driver 580.159.04), so that two such groups use most of the device.
const LEAST_TIMESLICE: u64 = 500;

/// Looks between two rounds of freeing while the daemon only stands still: a control that it was about to use when it
/// was stopped may still come.
const AGAIN: u32 = 5;

/// Enough for two controls.
const STACK: usize = 256 << 10;

/// A group's controls, and the timeslice in µs that its driver library gave it.
type GroupControls = (Box<dyn Controls>, u64);

/// What controls the groups.
#[derive(Debug)]
enum Phase {
    /// A daemon; one of revision 0 has no lease.
    Managed(Option<Leased>),
    /// The session has ended, or is about to.
    Ended {
        /// The daemon may only stand still.
        stalled: bool,
        /// The lease that expired, until the daemon renews it.
        expired: Option<Leased>,
        /// Looks since all groups were free.
        looks: u32,
    },
}

impl Phase {
    /// Whether a daemon that stood still goes on. Returned once for each time that its lease expired.
    fn is_over(&mut self) -> bool {
        let Self::Ended { expired, .. } = self else {
            return false;
        };
        expired.take_if(|lease| lease.is_renewed()).is_some()
    }
}

struct State {
    phase: Phase,
    /// The groups that the daemon has, and whether each has been freed since the phase ended.
    groups: BTreeMap<GroupId, bool>,
    /// Their memory is away or on its way.
    away: bool,
    watched: bool,
}

/// What the agent and the thread that watches the lease share.
pub(crate) struct Rescue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for Rescue {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                phase: Phase::Ended {
                    stalled: false,
                    expired: None,
                    looks: 0,
                },
                groups: BTreeMap::new(),
                away: false,
                watched: false,
            }),
            changed: Condvar::new(),
        }
    }
}

impl Rescue {
    fn lock(&self) -> MutexGuard<'_, State> {
        guard::lock(&self.state)
    }

    /// A daemon has welcomed the process; it knows no group yet. From here on no control is used, until the session
    /// has ended or the lease expired.
    ///
    /// # Errors
    /// When no thread can be made that would watch the lease.
    pub(crate) fn begin(
        &'static self,
        process: &'static Process,
        agent: &'static Agent,
        lease: Option<Leased>,
    ) -> io::Result<()> {
        let mut state = self.lock();
        if lease.is_some() && !state.watched {
            let watcher = thread::Builder::new()
                .name("gpumux-lease".to_owned())
                .stack_size(STACK);
            guard::without_signals(|| {
                watcher.spawn(move || guard::enter(|| self.watch(process, agent)))
            })?;
            state.watched = true;
        }
        state.phase = Phase::Managed(lease);
        state.groups.clear();
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The daemon is about to know this group.
    pub(crate) fn know(&self, group: GroupId) {
        self.lock().groups.insert(group, false);
    }

    /// The group is gone.
    pub(crate) fn forget(&self, group: GroupId) {
        self.lock().groups.remove(&group);
    }

    /// Whether the session is over, because its lease has expired.
    pub(crate) fn has_expired(&self) -> bool {
        matches!(self.lock().phase, Phase::Ended { .. })
    }

    /// Waits before the next attempt to reach the daemon: no longer than until one that stood still goes on. The processes that it
    /// controls again have short timeslices, and would get next to nothing beside those that it does not. Whether it goes on.
    pub(crate) fn pause(&self, longest: Duration) -> bool {
        let deadline = Instant::now() + longest;
        loop {
            if self.lock().phase.is_over() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            thread::sleep(left.min(LOOK));
        }
    }

    /// Memory is about to be moved away: the groups stay frozen from here on, unless they have been freed already.
    /// Whether they have not.
    pub(crate) fn begin_move(&self) -> bool {
        let mut state = self.lock();
        state.away |= matches!(state.phase, Phase::Managed(_));
        state.away
    }

    /// Memory was moved; whether some is away now.
    pub(crate) fn end_move(&self, away: bool) {
        self.lock().away = away;
    }

    /// The session has ended: frees the groups, unless their memory is away.
    pub(crate) fn end(&self, process: &Process) {
        let mut state = self.lock();
        if let Phase::Managed(_) = state.phase {
            state.end(false);
        }
        drop(state);
        self.changed.notify_all();
        self.free(process);
    }

    /// Frees all groups that are not free yet, unless a daemon controls them or their memory is away. Whether all are free.
    pub(crate) fn free(&self, process: &Process) -> bool {
        // Not under the lock: the holder of the picture takes the lock too.
        let controls = all_controls(process);
        let mut state = self.lock();
        if state.away || matches!(state.phase, Phase::Managed(_)) {
            return false;
        }
        // A group that is gone needs nothing.
        state.groups.retain(|group, _| controls.contains_key(group));
        for (group, is_free) in &mut state.groups {
            *is_free = *is_free || controls.get(group).is_some_and(set_free);
        }
        state.groups.values().all(|is_free| *is_free)
    }

    /// Watches the lease, and frees the groups once it has expired, for the rest of the process's life.
    fn watch(&self, process: &'static Process, agent: &'static Agent) {
        loop {
            let mut state = self.lock();
            let pause = match &mut state.phase {
                Phase::Managed(None) => None,
                Phase::Managed(Some(lease)) => {
                    if lease.look() {
                        // First the daemon can see it: it uses no control after that.
                        agent.page.expire();
                        state.expire();
                        agent.wake();
                    }
                    Some(LOOK)
                }
                Phase::Ended { stalled, looks, .. } => {
                    *looks += 1;
                    if *stalled && *looks % AGAIN == 0 {
                        state
                            .groups
                            .values_mut()
                            .for_each(|is_free| *is_free = false);
                    }
                    Some(LOOK)
                }
            };
            let ended = match &state.phase {
                Phase::Ended { stalled, .. } => Some(*stalled),
                Phase::Managed(_) => None,
            };
            drop(state);
            let free = ended.is_some() && self.free(process);
            let state = self.lock();
            // Nothing is left to do until a daemon comes.
            let rests = ended == Some(false) && free;
            match pause.filter(|_| !rests) {
                Some(pause) => drop(self.changed.wait_timeout(state, pause)),
                None => drop(self.changed.wait(state)),
            }
        }
    }
}

impl State {
    /// The lease has expired.
    fn expire(&mut self) {
        let before = self.end(true);
        if let (Phase::Managed(lease), Phase::Ended { expired, .. }) = (before, &mut self.phase) {
            *expired = lease;
        }
    }

    /// Returns what controlled the groups until now.
    fn end(&mut self, stalled: bool) -> Phase {
        permits::release();
        copies::release();
        let ended = Phase::Ended {
            stalled,
            expired: None,
            looks: 0,
        };
        self.groups
            .values_mut()
            .for_each(|is_free| *is_free = false);
        std::mem::replace(&mut self.phase, ended)
    }
}

/// Gives a group a timeslice that others can live with, makes sure of it, and lets it run. Whether all of that worked;
/// otherwise it stays frozen if it was.
fn set_free((controls, timeslice_us): &GroupControls) -> bool {
    let timeslice = (*timeslice_us).max(LEAST_TIMESLICE);
    controls.set_timeslice(timeslice).is_ok()
        && controls
            .timeslice()
            .is_ok_and(|found| found >= LEAST_TIMESLICE)
        && controls.thaw().is_ok()
}

/// The controls of all groups. They hold descriptors that last no longer than they do.
fn all_controls(process: &Process) -> BTreeMap<GroupId, GroupControls> {
    let picture = process.picture();
    let controls = |id| {
        let seen = picture.group(id)?;
        let (file, kind) = picture.descriptor(seen.file)?;
        let file = file.try_clone_to_owned().ok()?;
        let file = control_file(file, kind == Kind::Emulated).ok()?;
        let controls: Box<dyn Controls> = Box::new(RmControls::of(seen.engine, file, seen.group));
        Some((controls, seen.timeslice_us))
    };
    let groups = picture.groups();
    let found = groups
        .into_iter()
        .filter_map(|(id, _)| Some((id, controls(id)?)));
    found.collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gpumux_rm::{Cause, ControlFailure};

    use super::*;

    /// Records what is done with it. A set may fail, or come to nothing.
    #[derive(Clone, Default)]
    struct Fake {
        calls: Arc<Mutex<Vec<String>>>,
        found: u64,
        set_fails: bool,
    }

    impl Fake {
        fn act(&self, what: &str) {
            guard::lock(&self.calls).push(what.to_owned());
        }
    }

    impl Controls for Fake {
        fn set_timeslice(&self, us: u64) -> Result<(), ControlFailure> {
            self.act(&format!("slice {us}"));
            (!self.set_fails)
                .then_some(())
                .ok_or_else(|| ControlFailure::new("set_timeslice", Cause::Refused, "busy"))
        }
        fn timeslice(&self) -> Result<u64, ControlFailure> {
            self.act("read");
            Ok(self.found)
        }
        fn freeze(&self) -> Result<(), ControlFailure> {
            unreachable!("nothing is frozen without a daemon")
        }
        fn thaw(&self) -> Result<(), ControlFailure> {
            self.act("thaw");
            Ok(())
        }
    }

    fn freed(fake: Fake, own: u64) -> (bool, String) {
        let calls = Arc::clone(&fake.calls);
        let done = set_free(&(Box::new(fake), own));
        let calls = guard::lock(&calls).join(", ");
        (done, calls)
    }

    #[test]
    fn group_runs_only_with_a_timeslice_that_was_read_back() {
        let fake = |found, set_fails| Fake {
            found,
            set_fails,
            ..Fake::default()
        };
        let well = freed(fake(2048, false), 2048);
        assert_eq!(well, (true, "slice 2048, read, thaw".into()));
        // One that the program made too short is made longer.
        let short = freed(fake(500, false), 1);
        assert_eq!(short, (true, "slice 500, read, thaw".into()));
        let without_effect = freed(fake(1, false), 2048);
        assert_eq!(without_effect, (false, "slice 2048, read".into()));
        let failed = freed(fake(2048, true), 2048);
        assert_eq!(failed, (false, "slice 2048".into()));
    }

    #[test]
    fn pause_ends_once_when_the_expired_lease_is_renewed() {
        let _alone = crate::ground::guard::alone();
        let (lease, file) = gpumux_wire::lease::Lease::create().unwrap();
        let rescue = Rescue::default();
        let is_over = || rescue.lock().phase.is_over();
        rescue.lock().phase = Phase::Managed(Some(Leased::open(&file).unwrap()));
        lease.renew();
        assert!(!is_over(), "it is in force");
        rescue.lock().expire();
        assert!(is_over(), "it was renewed after the last look");
        lease.renew();
        assert!(
            !is_over(),
            "a daemon that does not answer now is looked for as any other"
        );
        rescue.lock().phase = Phase::Managed(Some(Leased::open(&file).unwrap()));
        rescue.lock().end(false);
        lease.renew();
        assert!(!is_over(), "the session ended in another way");
        let before = Instant::now();
        assert!(!rescue.pause(LOOK));
        assert!(before.elapsed() >= LOOK);
    }

    #[test]
    fn memory_does_not_move_once_the_lease_has_expired() {
        let _alone = crate::ground::guard::alone();
        let rescue = Rescue::default();
        assert!(!rescue.begin_move(), "without a session");
        rescue.lock().phase = Phase::Managed(None);
        assert!(rescue.begin_move());
        rescue.lock().expire();
        assert!(rescue.begin_move(), "it was on its way already");
        rescue.end_move(false);
        assert!(!rescue.begin_move());
    }
}
