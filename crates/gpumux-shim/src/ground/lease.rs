//! What the program's threads ask the daemon, through the agent.
//!
//! Every question has an answer within a bound: the daemon's, or *none*, when there is no daemon or it does
//! not answer; then the program goes on unmanaged.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use gpumux_wire::{Shim, message::ELASTIC};

use crate::ground::{guard, wake};

/// How long the first question waits for the session.
const CONNECT: Duration = Duration::from_secs(2);
/// How long after the loss of its daemon a program waits for memory until there is one again: a daemon that was killed starts
/// within seconds, and only it can move the memory of others.
const RETURN: Duration = Duration::from_secs(10);
/// How long an answer may take: the daemon itself waits at most 300 s for room.
pub(crate) const ANSWER: Duration = Duration::from_secs(330);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    /// The agent has not said.
    Unknown,
    Up,
    Down,
}

struct State {
    link: Link,
    /// When the last session ended, or the first could not begin.
    lost: Option<Instant>,
    outbox: VecDeque<Shim>,
    /// By ticket; none yet.
    answers: HashMap<u32, Option<(u64, u64)>>,
    tickets: u32,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// The sessions that there were, with this one.
static SESSIONS: AtomicU32 = AtomicU32::new(0);
/// Its daemon's revision.
static REVISION: AtomicU32 = AtomicU32::new(0);
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Option<State>> {
    guard::lock(&STATE)
}

fn state(guard: &mut Option<State>) -> &mut State {
    guard.get_or_insert_with(|| State {
        link: Link::Unknown,
        lost: None,
        outbox: VecDeque::new(),
        answers: HashMap::new(),
        tickets: 0,
    })
}

impl State {
    /// For how long its daemon, if there was one lately, may still come back.
    fn may_return(&self, now: Instant) -> Option<Duration> {
        let left = RETURN.saturating_sub(now.duration_since(self.lost?));
        (!left.is_zero()).then_some(left)
    }
}

/// The state once it is known whether there is a session.
fn settled() -> MutexGuard<'static, Option<State>> {
    let mut guard = lock();
    let deadline = Instant::now() + CONNECT;
    while state(&mut guard).link == Link::Unknown && Instant::now() < deadline {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = CHANGED.wait_timeout(guard, left);
        guard = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    guard
}

/// Whether a daemon manages this process's memory, or one that did, or has made its tenant, may come back; waits for the first
/// session's beginning.
pub(crate) fn is_managed() -> bool {
    let expects = |it: &State| it.link == Link::Up || it.may_return(Instant::now()).is_some();
    session() > 0 || expects(state(&mut settled()))
}

/// The session's number: each has another. 0: there was none.
pub(crate) fn session() -> u32 {
    SESSIONS.load(Ordering::Acquire)
}

/// Whether there is a session that manages this process's memory; waits for the first one's beginning.
pub(crate) fn await_link() -> bool {
    state(&mut settled()).link == Link::Up
}

/// What the program needs only a daemon can give, and none is there: waits for one, if one was there until lately. Whether it is back.
pub(crate) fn await_return() -> bool {
    if !wake::has_agent() {
        return false;
    }
    let mut guard = lock();
    loop {
        let it = state(&mut guard);
        if it.link == Link::Up {
            return true;
        }
        let Some(left) = it.may_return(Instant::now()) else {
            return false;
        };
        let waited = CHANGED.wait_timeout(guard, left);
        guard = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Asks, and waits for the answer: two numbers. None: no daemon manages this process.
pub(crate) fn ask(question: impl FnOnce(u32) -> Shim) -> Option<(u64, u64)> {
    ask_within(ANSWER, question)
}

/// The same, but a daemon that takes longer than this has answered zeros, and forgets the question.
pub(crate) fn ask_within(wait: Duration, question: impl FnOnce(u32) -> Shim) -> Option<(u64, u64)> {
    if !wake::has_agent() {
        return None;
    }
    let mut guard = settled();
    let it = state(&mut guard);
    if it.link != Link::Up {
        return None;
    }
    it.tickets = it.tickets.wrapping_add(1);
    let ticket = it.tickets;
    it.answers.insert(ticket, None);
    it.outbox.push_back(question(ticket));
    drop(guard);
    wake::agent();
    let deadline = Instant::now() + wait;
    let mut guard = lock();
    loop {
        let it = state(&mut guard);
        match it.answers.get(&ticket) {
            Some(Some(answer)) => {
                let answer = *answer;
                it.answers.remove(&ticket);
                return Some(answer);
            }
            Some(None) if Instant::now() < deadline => {}
            Some(None) if wait < ANSWER && it.link == Link::Up => {
                it.answers.remove(&ticket);
                drop(guard);
                if knows(ELASTIC) {
                    tell(Shim::Cancel { ticket });
                }
                return Some((0, 0));
            }
            // The session has ended, or the daemon is silent.
            _ => {
                it.answers.remove(&ticket);
                return None;
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = CHANGED.wait_timeout(guard, left);
        guard = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Tells, without waiting.
pub(crate) fn tell(what: Shim) {
    let mut guard = lock();
    let it = state(&mut guard);
    if it.link == Link::Up {
        it.outbox.push_back(what);
        drop(guard);
        wake::agent();
    }
}

// ---- The agent's side ----------------------------------------------------------------------------

/// There is no daemon for a first session; `lately`: one has made this process's tenant.
pub(crate) fn expect(lately: bool) {
    state(&mut lock()).lost = lately.then(Instant::now);
}

/// There is a session, which hears these first; or none.
pub(crate) fn set_up(up: bool, first: Vec<Shim>) {
    let mut guard = lock();
    let it = state(&mut guard);
    if it.link == Link::Up {
        it.lost = Some(Instant::now());
    }
    it.link = if up { Link::Up } else { Link::Down };
    SESSIONS.fetch_add(up.into(), Ordering::AcqRel);
    it.outbox = first.into();
    if !up {
        it.answers.clear();
    }
    drop(guard);
    CHANGED.notify_all();
}

/// The daemon of the session that begins has this revision.
pub(crate) fn set_revision(revision: u32) {
    REVISION.store(revision, Ordering::Release);
}

/// Whether it knows what this revision added.
pub(crate) fn knows(revision: u32) -> bool {
    REVISION.load(Ordering::Acquire) >= revision
}

/// What is to be sent next.
pub(crate) fn next() -> Option<Shim> {
    state(&mut lock()).outbox.pop_front()
}

/// It could not be sent now.
pub(crate) fn put_back(packet: Shim) {
    state(&mut lock()).outbox.push_front(packet);
}

/// The daemon has answered. Whether the question still waits for it.
pub(crate) fn answered(ticket: u32, answer: (u64, u64)) -> bool {
    let mut guard = lock();
    let waiting = state(&mut guard).answers.get_mut(&ticket);
    let waits = waiting.map(|it| *it = Some(answer)).is_some();
    drop(guard);
    CHANGED.notify_all();
    waits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_daemon_may_return_for_a_while() {
        let lost = Instant::now();
        let mut guard = None;
        let state = state(&mut guard);
        assert_eq!(state.may_return(lost), None, "there was none");
        state.lost = Some(lost);
        let second = Duration::from_secs(1);
        assert_eq!(state.may_return(lost + second), Some(RETURN - second));
        assert_eq!(state.may_return(lost + RETURN), None);
    }
}
