//! The thread that moves memory. Making host memory and copying take seconds; the agent answers the daemon and the program
//! meanwhile.
//!
//! The thread owns the [`Mover`]. The agent alone gives it tasks, which it carries out in order. What the agent must know for its own
//! answers stands in a snapshot, which is up to date whenever no task is left. A move that is not wanted any more is called off: it ends
//! at its next look, with everything as it was.

use std::{
    collections::VecDeque,
    io,
    path::{Path, PathBuf},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use gpumux_wire::{Daemon, Shim, message::Piece, socket};
use rustix::net::SocketFlags;

use crate::{
    ground::{guard, lease, own::OwnFd, wake},
    memory::{
        elastic, ipc, space,
        swap::{Away, Mover},
    },
    rescue::Rescue,
};

/// Enough for the driver library.
const STACK: usize = 2 << 20;

/// What the thread is to do.
enum Task {
    /// An order of the daemon about memory.
    Order(Daemon),
    /// The session has ended: everything comes back, unless a daemon listens there again.
    Rescue(PathBuf),
}

/// What the thread does at the moment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Doing {
    Nothing,
    /// Making host memory and closing the gate.
    Closing,
    /// Moving memory to the host.
    Leaving,
    /// Sharing memory with other processes.
    Sharing,
    Other,
}

/// A piece of shared memory for another process, by the request's name.
pub(crate) type Made = (u64, Option<(Piece, OwnFd)>);

struct State {
    started: bool,
    /// The thread has failed, and carries out nothing any more.
    ended: bool,
    tasks: VecDeque<Task>,
    doing: Doing,
    /// Where host memory is made, and whether it is overwritten after use.
    rules: (Option<String>, bool),
    away: Away,
    /// Bytes of host memory that are kept.
    keeps: u64,
    made: Option<Made>,
}

/// What the agent and the thread share.
pub(crate) struct MoverThread {
    state: Mutex<State>,
    changed: Condvar,
    /// The move to the host that is under way is not wanted any more.
    called_off: AtomicBool,
}

impl Default for MoverThread {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                started: false,
                ended: false,
                tasks: VecDeque::new(),
                doing: Doing::Nothing,
                rules: (None, false),
                away: Away::No,
                keeps: 0,
                made: None,
            }),
            changed: Condvar::new(),
            called_off: AtomicBool::new(false),
        }
    }
}

impl State {
    fn rests(&self) -> bool {
        self.doing == Doing::Nothing && self.tasks.is_empty()
    }
}

// ---- The agent's side ----------------------------------------------------------------------------

impl MoverThread {
    fn lock(&self) -> MutexGuard<'_, State> {
        guard::lock(&self.state)
    }

    /// Where host memory is made from the next task on, and whether it is overwritten after use.
    pub(crate) fn set_rules(&self, location: Option<String>, scrub: bool) {
        self.lock().rules = (location, scrub);
    }

    /// Bytes of host memory that are kept.
    pub(crate) fn keeps(&self) -> u64 {
        self.lock().keeps
    }

    /// Whether memory is on the host, and nothing is left to do.
    pub(crate) fn is_out(&self) -> bool {
        let state = self.lock();
        state.rests() && state.away == Away::Out
    }

    /// Whether all memory is on the device, the program may touch it, and nothing is left to do.
    pub(crate) fn is_here(&self) -> bool {
        let state = self.lock();
        state.rests() && state.away == Away::No
    }

    /// Whether nothing but sharing memory is under way.
    pub(crate) fn shares(&self) -> bool {
        let state = self.lock();
        state.doing == Doing::Sharing && state.tasks.is_empty()
    }

    /// A piece of shared memory that was requested.
    pub(crate) fn take_made(&self) -> Option<Made> {
        self.lock().made.take()
    }

    /// It could not be sent now.
    pub(crate) fn put_back(&self, made: Made) {
        self.lock().made = Some(made);
    }

    /// Has an order carried out. The answer is sent when that is done.
    pub(crate) fn obey(&'static self, rescue: &'static Rescue, order: Daemon) {
        let mut state = self.lock();
        if let Err(why) = self.ensure_started(&mut state, rescue) {
            drop(state);
            return refuse(&order, &why);
        }
        if matches!(order, Daemon::Resume { .. } | Daemon::Quiesce { .. }) {
            // A gate that is not closed yet needs not be, or is closed by the later order.
            let closes = |it: &Task| matches!(it, Task::Order(Daemon::Quiesce { .. }));
            state.tasks.retain(|it| !closes(it));
        }
        if matches!(order, Daemon::Resume { .. }) && state.doing == Doing::Closing {
            self.call_off();
        }
        state.tasks.push_back(Task::Order(order));
        drop(state);
        self.changed.notify_all();
    }

    /// The session has ended: calls off what is under way, has all memory brought back, and waits for that, or for a daemon that
    /// listens there. Whether all memory is back.
    pub(crate) fn bring_back(&self, socket: &Path) -> bool {
        let mut state = self.lock();
        state.made = None;
        if !state.started {
            return true;
        }
        state.tasks.clear();
        if matches!(state.doing, Doing::Closing | Doing::Leaving) {
            self.call_off();
        }
        state.tasks.push_back(Task::Rescue(socket.to_owned()));
        self.changed.notify_all();
        while !state.rests() && !state.ended {
            state = wait(&self.changed, state);
        }
        // A piece that was made meanwhile is for the session that has ended.
        state.made = None;
        state.away == Away::No
    }

    fn call_off(&self) {
        self.called_off.store(true, Ordering::Release);
    }

    fn ensure_started(
        &'static self,
        state: &mut State,
        rescue: &'static Rescue,
    ) -> Result<(), String> {
        if state.ended {
            return Err("the thread that moves its memory has failed".into());
        }
        if !state.started {
            let thread = thread::Builder::new()
                .name("gpumux-mover".to_owned())
                .stack_size(STACK);
            let started: io::Result<_> = guard::without_signals(|| {
                thread.spawn(move || {
                    let _ended = Ended(self);
                    guard::enter(|| self.run(rescue));
                })
            });
            started
                .map_err(|error| format!("no thread can be made to move its memory: {error}"))?;
            state.started = true;
        }
        Ok(())
    }
}

/// Answers an order that cannot be carried out.
fn refuse(order: &Daemon, why: &str) {
    match *order {
        Daemon::Quiesce { op, .. }
        | Daemon::SwapOut { op, .. }
        | Daemon::SwapIn { op }
        | Daemon::Take { op, .. }
        | Daemon::DropHost { op } => {
            let reason = why.to_owned();
            lease::tell(Shim::Busy { op, reason });
        }
        Daemon::Serve { op, .. } => lease::tell(Shim::Piece { op, piece: None }),
        _ => {}
    }
}

fn wait<'a>(changed: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    changed.wait(state).unwrap_or_else(PoisonError::into_inner)
}

// ---- The thread's side ---------------------------------------------------------------------------

/// The thread ends only by a panic: the agent waits for it no more.
struct Ended(&'static MoverThread);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_all();
        wake::agent();
    }
}

impl MoverThread {
    fn run(&'static self, rescue: &'static Rescue) {
        let mut mover = Mover::new(&self.called_off);
        loop {
            match self.next(&mut mover) {
                Task::Order(order) => self.carry_out(&mut mover, rescue, &order),
                Task::Rescue(path) => {
                    let connect = || socket::connect(&path, SocketFlags::NONBLOCK);
                    mover.rescue(|| OwnFd::new(connect).is_ok());
                    mover.resume();
                }
            }
            let mut state = self.lock();
            (state.away, state.keeps) = (mover.away(), mover.keeps());
            state.doing = Doing::Nothing;
            drop(state);
            self.changed.notify_all();
            // It may have waited for that.
            wake::agent();
        }
    }

    /// The next task. Until there is one, host memory that was used is overwritten, if it is to be.
    fn next(&self, mover: &mut Mover) -> Task {
        let mut scrubs = true;
        let mut state = self.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                state.doing = match task {
                    Task::Order(Daemon::Quiesce { .. }) => Doing::Closing,
                    Task::Order(Daemon::SwapOut { .. }) => Doing::Leaving,
                    Task::Order(Daemon::Serve { .. } | Daemon::Unshared { .. }) => Doing::Sharing,
                    _ => Doing::Other,
                };
                self.called_off.store(false, Ordering::Release);
                let (location, scrub) = state.rules.clone();
                mover.set_rules(location, scrub);
                return task;
            }
            if scrubs {
                drop(state);
                scrubs = mover.scrub();
                state = self.lock();
            } else {
                state = wait(&self.changed, state);
            }
        }
    }

    /// Carries out an order, and sends what came of it.
    fn carry_out(&self, mover: &mut Mover, rescue: &Rescue, order: &Daemon) {
        let busy = |op, reason| Shim::Busy { op, reason };
        let keeps = |mover: &Mover| {
            let bytes = mover.keeps();
            lease::tell(Shim::Keeps { bytes });
        };
        let (op, moved) = match *order {
            Daemon::Quiesce { op, least, host } => {
                let quiet = mover.quiesce(least, host);
                keeps(mover);
                return lease::tell(match quiet {
                    Ok(idle) => Shim::Quiet { op, idle },
                    Err(why) => busy(op, why),
                });
            }
            Daemon::Resume { .. } => return mover.resume(),
            Daemon::SwapOut { op, least, host } => {
                let moved = match rescue.begin_move() {
                    true => mover.out(least, host),
                    false => Err("the daemon's lease has expired".into()),
                };
                rescue.end_move(mover.away() == Away::Out);
                (op, moved)
            }
            Daemon::SwapIn { op } => {
                let moved = mover.back();
                rescue.end_move(mover.away() == Away::Out);
                (op, moved)
            }
            Daemon::Take {
                op,
                ref device,
                bytes,
            } => {
                let taken = match rescue.begin_move() {
                    true => elastic::take(device, bytes),
                    false => Err("the daemon's lease has expired".into()),
                };
                rescue.end_move(mover.away() == Away::Out);
                (op, taken)
            }
            Daemon::DropHost { op } => {
                mover.drop_host();
                (op, Ok(()))
            }
            Daemon::Serve { op, token, index } => {
                let made = ipc::serve(token, index);
                self.lock().made = Some((op, made));
                return;
            }
            Daemon::Unshared { token } => return ipc::unshared(token),
            _ => return,
        };
        space::tell_with(space::Space::holds);
        keeps(mover);
        lease::tell(match moved {
            Ok(()) => Shim::Moved { op },
            Err(why) => busy(op, why),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that has started and takes no task: what the agent does to its queue is seen there.
    fn waiting() -> (&'static MoverThread, &'static Rescue) {
        let thread: &'static MoverThread = Box::leak(Box::default());
        thread.lock().started = true;
        (thread, Box::leak(Box::default()))
    }

    fn quiesce(op: u64) -> Daemon {
        let (least, host) = (0, 0);
        Daemon::Quiesce { op, least, host }
    }

    fn tasks(thread: &MoverThread) -> Vec<&'static str> {
        let state = thread.lock();
        let name = |it: &Task| match it {
            Task::Order(Daemon::Quiesce { .. }) => "close",
            Task::Order(Daemon::Resume { .. }) => "open",
            Task::Order(Daemon::SwapOut { .. }) => "out",
            Task::Order(_) => "other",
            Task::Rescue(_) => "rescue",
        };
        state.tasks.iter().map(name).collect()
    }

    #[test]
    fn resume_calls_off_gates_that_are_not_closed_yet() {
        let (thread, rescue) = waiting();
        let off = || thread.called_off.load(Ordering::Acquire);
        thread.obey(rescue, quiesce(1));
        thread.obey(rescue, Daemon::DropHost { op: 2 });
        thread.obey(rescue, Daemon::Resume { op: 0 });
        assert_eq!(tasks(thread), ["other", "open"]);
        assert!(!off(), "it does nothing yet");
        // A copy under way is not called off by it: the daemon has no way back then.
        thread.lock().doing = Doing::Leaving;
        thread.obey(rescue, Daemon::Resume { op: 0 });
        assert!(!off());
        thread.lock().doing = Doing::Closing;
        thread.obey(rescue, Daemon::Resume { op: 0 });
        assert!(off());
    }

    #[test]
    fn later_order_to_close_replaces_one_that_waits() {
        let (thread, rescue) = waiting();
        (1..=3).for_each(|op| thread.obey(rescue, quiesce(op)));
        let mut mover = Mover::new(&thread.called_off);
        let next = thread.next(&mut mover);
        assert!(matches!(next, Task::Order(Daemon::Quiesce { op: 3, .. })));
        // One that is under way is carried out, and answered.
        thread.obey(rescue, quiesce(4));
        assert!(!thread.called_off.load(Ordering::Acquire));
        assert_eq!(tasks(thread), ["close"]);
    }

    #[test]
    fn next_task_is_not_called_off_with_the_one_before() {
        let (thread, rescue) = waiting();
        thread.call_off();
        thread.obey(rescue, quiesce(1));
        let mut mover = Mover::new(&thread.called_off);
        assert!(matches!(thread.next(&mut mover), Task::Order(_)));
        assert!(!thread.called_off.load(Ordering::Acquire));
        assert!(!thread.is_here(), "it is at work");
    }

    #[test]
    fn end_of_a_session_waits_until_memory_is_back() {
        let (thread, rescue) = waiting();
        thread.lock().doing = Doing::Leaving;
        thread.obey(rescue, Daemon::SwapIn { op: 1 });
        let agent = thread::spawn(|| thread.bring_back(Path::new("/nowhere")));
        while tasks(thread) != ["rescue"] {
            thread::yield_now();
        }
        assert!(thread.called_off.load(Ordering::Acquire));
        assert!(!agent.is_finished());
        let mut mover = Mover::new(&thread.called_off);
        assert!(matches!(thread.next(&mut mover), Task::Rescue(_)));
        assert!(!agent.is_finished());
        thread.lock().doing = Doing::Nothing;
        thread.changed.notify_all();
        agent.join().unwrap();
        // One that has failed is not waited for.
        thread.lock().ended = true;
        thread.bring_back(Path::new("/nowhere"));
    }

    #[test]
    fn memory_of_a_session_that_has_ended_is_not_sent() {
        let (thread, _) = waiting();
        thread.lock().ended = true;
        thread.put_back((1, None));
        thread.bring_back(Path::new("/nowhere"));
        assert!(thread.take_made().is_none());
    }
}
