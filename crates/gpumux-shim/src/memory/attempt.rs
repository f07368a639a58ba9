//! The driver has no memory although the accounting has room: it is asked again, within a bound.
//!
//! There are two causes. The driver frees the memory of a process only some time after its end; the daemon has noticed the end, and memory
//! is there soon. Or others use more than the accounting knows of, which the daemon notices by its next looks.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use gpumux_wire::{Shim, message::LEAVING};

use crate::{
    ground::{
        driver::CUresult,
        lease::{self, ANSWER},
    },
    memory::{space, vmm::OUT_OF_MEMORY},
};

/// How often in a session, and after which pause, memory is asked for again that the accounting may have wrong: the daemon compares it with
/// the driver every second, and believes what it sees twice.
const TRIES: u32 = 5;
const NOTICED: Duration = Duration::from_millis(700);
/// After which pause, and for how long, memory of processes that have ended is asked for again. The daemon expects it for 5 s.
const SOON: Duration = Duration::from_millis(20);
const LEAVES: Duration = Duration::from_secs(10);

/// What gives no memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    ByAccounting,
    ByDriver(CUresult),
}

impl Refused {
    /// What the program gets.
    pub(crate) const fn error(self) -> CUresult {
        match self {
            Self::ByAccounting => OUT_OF_MEMORY,
            Self::ByDriver(error) => error,
        }
    }
}

/// What the daemon answers when the driver has no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// A caller that can't wait gets an answer at once.
    None,
    /// Others may use it.
    Others,
    /// A process that has ended.
    Ended,
    /// There is no daemon.
    Unmanaged,
}

/// Of a moment; none: the caller waits as long as is usual.
fn left(until: Option<Instant>) -> Duration {
    until.map_or(ANSWER, |it| it.saturating_duration_since(Instant::now()))
}

fn cause(until: Option<Instant>) -> Cause {
    let left = left(until);
    if left.is_zero() {
        return Cause::None;
    }
    match lease::ask_within(left, |ticket| Shim::Missing { ticket }) {
        Some((0, _)) => Cause::None,
        Some((LEAVING, _)) => Cause::Ended,
        Some(_) => Cause::Others,
        None => Cause::Unmanaged,
    }
}

/// The attempts of one request.
#[derive(Default)]
struct Attempts {
    first: Option<Instant>,
    session: u32,
    /// In this session.
    made: u32,
}

impl Attempts {
    /// One has found no memory. Whether there may be another. That a session was lost shows nothing about memory: the next one has all
    /// attempts, but no request takes longer than a daemon's answer may.
    fn may_follow(&mut self, now: Instant, session: u32, cause: Cause) -> bool {
        if std::mem::replace(&mut self.session, session) != session {
            self.made = 0;
        }
        match cause {
            Cause::None => return false,
            Cause::Unmanaged => {}
            Cause::Others | Cause::Ended => self.made += 1,
        }
        now < *self.first.get_or_insert(now) + ANSWER && self.made < TRIES
    }
}

/// Takes memory and has it made, until then at the latest. What was granted is given back between two attempts, all of it: the
/// accounting can be corrected, and a grant of a daemon that was lost, which another program may have used meanwhile, is asked for again.
pub(crate) fn in_time<T>(
    until: Option<Instant>,
    mut attempt: impl FnMut() -> Result<T, Refused>,
) -> Result<T, Refused> {
    let mut attempts = Attempts::default();
    loop {
        let found = attempt();
        if !matches!(found, Err(Refused::ByDriver(OUT_OF_MEMORY))) {
            return found;
        }
        space::trim();
        let cause = cause(until);
        if !attempts.may_follow(Instant::now(), lease::session(), cause) {
            return found;
        }
        match cause {
            Cause::None => return found,
            Cause::Unmanaged if until.is_some() || !lease::await_return() => return found,
            Cause::Unmanaged => {}
            Cause::Ended => sleep(SOON),
            Cause::Others => sleep(NOTICED.min(left(until))),
        }
    }
}

/// Has the driver make memory that was granted; again while it frees that of processes that have ended. Not inside the gate.
pub(crate) fn make<T>(
    until: Option<Instant>,
    mut make: impl FnMut() -> Result<T, CUresult>,
) -> Result<T, Refused> {
    let mut first = None;
    loop {
        let made = make();
        if !matches!(made, Err(OUT_OF_MEMORY)) {
            return made.map_err(Refused::ByDriver);
        }
        let last = *first.get_or_insert_with(Instant::now) + LEAVES;
        if Instant::now() >= last || cause(until) != Cause::Ended {
            return made.map_err(Refused::ByDriver);
        }
        sleep(SOON);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ground::driver::SUCCESS;

    #[test]
    fn lost_sessions_use_up_no_attempts() {
        let (mut attempts, begin) = (Attempts::default(), Instant::now());
        let mut after = |s: u32, session, cause| {
            attempts.may_follow(begin + Duration::from_secs(s.into()), session, cause)
        };
        // Each ends before the daemon's looks can help: the next one's daemon is asked, or there is none yet.
        for s in 0..100 {
            assert!(after(s, s, Cause::Others), "{s}");
            assert!(after(s, s, Cause::Unmanaged), "{s}");
        }
        let in_session = [100; 6].map(|session| after(101, session, Cause::Others));
        assert_eq!(in_session, [true, true, true, true, false, false]);
        let mut endless = Attempts::default();
        let bound = (0..).find(|s: &u32| {
            let now = begin + Duration::from_secs((*s).into());
            !endless.may_follow(now, *s, Cause::Unmanaged)
        });
        assert_eq!(bound.map(u64::from), Some(ANSWER.as_secs()));
        assert!(!Attempts::default().may_follow(begin, 1, Cause::None));
    }

    /// Without a daemon nothing is known to come, and no error but the lack of memory is asked about.
    #[test]
    fn attempt_that_cannot_be_repeated_is_made_once() {
        let mut attempts = 0;
        let mut fails = |error| {
            let made = make(None, || {
                attempts += 1;
                Err::<(), _>(error)
            });
            assert_eq!(made, Err(Refused::ByDriver(error)));
        };
        fails(OUT_OF_MEMORY);
        fails(SUCCESS + 999);
        assert_eq!(attempts, 2);
        let refused = in_time(None, || Err::<(), _>(Refused::ByAccounting));
        assert_eq!(refused.map_err(Refused::error), Err(OUT_OF_MEMORY));
    }
}
