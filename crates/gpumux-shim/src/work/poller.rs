//! The poller: a thread that asks the driver about outstanding streams while the program is silent.

use std::{
    sync::{Once, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use super::streams::{
    FREE, GROUPS, HANDLES, ORPHAN, POLLER_WANTED, SLOW, STATES, Seen, ask, places, settle, slow,
};
use crate::{
    ground::{
        context::{is_capturing_anywhere, relax_captures},
        gate, guard, wake,
    },
    work::{hints, hold, permits},
};

/// How often the poller looks while the program submits work.
const BUSY_TICK: Duration = Duration::from_millis(8);

/// Its first and longest pause while the program is silent: with work outstanding, and with none.
const SILENT_TICK: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(16));

const IDLE_TICK: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(32));

/// How long the process's exit waits for memory that is away to come back.
const EXIT_AWAKE: Duration = Duration::from_secs(5);

/// How long it waits for the poller to leave libcuda.
const EXIT_WAIT: Duration = Duration::from_millis(100);

/// Finds out by our events what is done.
pub(super) fn reap(seen: Seen) {
    let done = |place: usize| STATES[place].done.load(Ordering::Acquire);
    for (place, upto) in permits::reap(done) {
        STATES[place].finish((upto, 0), seen);
    }
}

/// Keeps this library's threads from calling the driver when the process ends. To be called when the driver has been loaded
/// and used: handlers run in the reverse order of their registration, and this one must come before libcuda's own.
pub(crate) fn guard_exit() {
    static REGISTERED: Once = Once::new();
    extern "C" fn exiting() {
        hold::exit(Instant::now() + EXIT_WAIT);
        gate::leave(EXIT_AWAKE);
        if let Some(mut slow) = guard::lock_by(&SLOW, Instant::now() + EXIT_WAIT) {
            slow.exiting = true;
        }
    }
    // SAFETY: the handler is never unloaded.
    REGISTERED.call_once(|| unsafe {
        libc::atexit(exiting);
    });
}

/// Starts the poller when the first stream has appeared. Called by the agent.
///
/// It is a thread of its own because libcuda may keep it waiting for the device: the agent
/// must be free to thaw the very group that libcuda waits for.
pub(crate) fn start_poller(started: &mut bool) {
    if *started || !POLLER_WANTED.load(Ordering::Acquire) {
        return;
    }
    *started = true;
    // Without it, groups become idle by the program's own synchronisation only.
    let _ = thread::Builder::new()
        .name("gpumux-poll".to_owned())
        .spawn(|| {
            guard_exit();
            relax_captures();
            wake::be_punctual();
            hints::become_server();
            let (mut tick, mut before) = (BUSY_TICK, (0, Instant::now()));
            loop {
                thread::park_timeout(hints::until_due().map_or(tick, |due| due.min(tick)));
                if hints::serve() {
                    continue;
                }
                let longer =
                    |(first, most): (Duration, Duration)| (tick * 3 / 2).clamp(first, most);
                let found = look(&mut before);
                let outstanding = !matches!(found, Look::Idle);
                let pause = match found {
                    Look::Submitting => BUSY_TICK,
                    Look::Asked if tick == BUSY_TICK => SILENT_TICK.0,
                    Look::Asked => longer(SILENT_TICK),
                    Look::Idle => {
                        hold::prepare_all();
                        longer(IDLE_TICK)
                    }
                };
                tick = permits::hasten(pause, outstanding);
                // Where nothing came that a hold was kept for, the wait before it was the last.
                settle(hold::account_all(), Seen::Waited);
            }
        });
}

/// What the poller found.
enum Look {
    /// No work is outstanding.
    Idle,
    /// The program has submitted work since the last look.
    Submitting,
    /// The driver was asked about what is outstanding.
    Asked,
}

/// Looks after outstanding streams, if the program has submitted nothing since the last look, or others want the device. `before`: how much it
/// had submitted, and since when it is so much.
fn look(before: &mut (u64, Instant)) -> Look {
    let (started, outstanding) = places().fold((0u64, false), |(sum, any), (handle, state)| {
        let started = state.started.load(Ordering::Acquire);
        (
            sum.wrapping_add(started),
            any || handle != FREE && !state.is_idle(),
        )
    });
    let submits = before.0 != started;
    if submits {
        *before = (started, Instant::now());
    }
    let watched = permits::is_watched();
    // Where others want the device, looks come so soon that most are between two launches.
    let seen = match watched && before.1.elapsed() < BUSY_TICK {
        true => Seen::Between,
        false => Seen::Waited,
    };
    if !outstanding {
        if watched && seen == Seen::Waited {
            settle(GROUPS.load(Ordering::Acquire), seen);
        }
        return Look::Idle;
    }
    if watched {
        reap(seen);
    } else if submits {
        return Look::Submitting;
    }
    slow(|slow| {
        for ((handle, state), slot) in places().zip(&HANDLES) {
            if handle == FREE || slow.exiting || is_capturing_anywhere() {
                continue;
            }
            ask(handle, state, seen);
            if handle == ORPHAN && state.is_clean() {
                slot.store(FREE, Ordering::Release);
            }
        }
    });
    Look::Asked
}
