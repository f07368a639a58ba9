//! The log of commands that serve: on standard error, as `GPUMUX_LOG` asks for, with a bound for each kind of line, so
//! that no user can fill the disk by what it makes a daemon report.

use std::{
    collections::HashMap,
    io::{self, IsTerminal},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tracing::{Event, Subscriber, callsite::Identifier};
use tracing_subscriber::{
    EnvFilter, Layer, fmt, layer::Context, layer::SubscriberExt, util::SubscriberInitExt,
};

/// Lines of one kind that are written within a [`PERIOD`].
const LINES: u32 = 200;
/// The period of a bound.
const PERIOD: Duration = Duration::from_secs(10);

/// Starts the log.
pub(crate) fn start() {
    let filter = EnvFilter::try_from_env("GPUMUX_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    tracing_subscriber::registry()
        .with(filter)
        .with(Bound::default())
        .with(lines)
        .init();
}

/// Leaves out lines of a kind (a place in the code) that come too often.
#[derive(Default)]
struct Bound(Mutex<HashMap<Identifier, Lines>>);

/// The lines of one kind.
#[derive(Clone, Copy)]
struct Lines {
    began: Instant,
    count: u32,
}

/// What becomes of a line.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Written,
    LeftOut,
    /// Written, after so many that were left out.
    After(u32),
}

impl Lines {
    fn count(&mut self, now: Instant) -> Fate {
        if now.saturating_duration_since(self.began) >= PERIOD {
            let left_out = self.count.saturating_sub(LINES);
            (self.began, self.count) = (now, 1);
            return match left_out {
                0 => Fate::Written,
                count => Fate::After(count),
            };
        }
        self.count = self.count.saturating_add(1);
        match self.count <= LINES {
            true => Fate::Written,
            false => Fate::LeftOut,
        }
    }
}

impl<S: Subscriber> Layer<S> for Bound {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let now = Instant::now();
        let new = Lines {
            began: now,
            count: 0,
        };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = all.entry(event.metadata().callsite()).or_insert(new);
        match lines.count(now) {
            Fate::Written => true,
            Fate::LeftOut => false,
            Fate::After(count) => {
                // Not an event: it would be counted itself.
                eprintln!("{count} more lines like the next one were left out");
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_kind_beyond_the_bound_are_left_out_and_counted() {
        let start = Instant::now();
        let mut lines = Lines {
            began: start,
            count: 0,
        };
        for _ in 0..LINES {
            assert_eq!(lines.count(start), Fate::Written);
        }
        for _ in 0..7 {
            assert_eq!(lines.count(start + PERIOD / 2), Fate::LeftOut);
        }
        assert_eq!(lines.count(start + PERIOD), Fate::After(7));
        assert_eq!(lines.count(start + PERIOD), Fate::Written);
        assert_eq!(lines.count(start + PERIOD * 2), Fate::Written);
    }
}
