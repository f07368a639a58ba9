//! When requests come: random processes and recorded traces.

use rand::Rng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Exp1, Gamma};
use serde::{Deserialize, Serialize};

use crate::gpu::Nanos;

/// When requests come. Rates are per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Arrival {
    /// At equal distances.
    Periodic {
        /// How many per second.
        rate: f64,
    },
    /// At random, independent of each other.
    Poisson {
        /// How many per second.
        rate: f64,
    },
    /// With gamma-distributed distances: in bursts if `cv` is above 1.
    Gamma {
        /// How many per second.
        rate: f64,
        /// Standard deviation of the distances over their mean.
        cv: f64,
    },
    /// At random for a while, then not at all for a while.
    OnOff {
        /// How many per second while on.
        rate: f64,
        /// How long it is on.
        on_s: f64,
        /// How long it is off.
        off_s: f64,
    },
    /// The next comes when one is complete.
    Closed {
        /// Pause between a completion and the next request.
        #[serde(default)]
        think_us: f64,
        /// Standard deviation of the pause over its mean.
        #[serde(default)]
        think_cv: f64,
        /// Requests in flight. A program that submits ahead has 2 or more.
        #[serde(default = "one")]
        depth: usize,
    },
    /// As in a trace that [`Scenario::add_trace`](crate::Scenario::add_trace) brought, over and over.
    Trace {
        /// Its name.
        name: String,
        /// How many times faster than recorded.
        #[serde(default = "recorded")]
        speed: f64,
    },
}

fn one() -> usize {
    1
}

fn recorded() -> f64 {
    1.0
}

/// A request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Seconds since the trace's first request.
    pub at_s: f64,
    /// Tokens that it brings.
    pub context: u64,
    /// Tokens that it makes.
    pub generated: u64,
}

/// Nanoseconds of this many seconds.
pub(crate) fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9).round().clamp(0.0, 1e18) as Nanos
}

/// The arrivals of one tenant; not used for closed loops.
#[derive(Clone, Debug)]
pub(crate) struct Arrivals<'a> {
    process: &'a Arrival,
    trace: &'a [Request],
    start_s: f64,
    /// Seconds since the start at which the last one came.
    last_s: f64,
    count: usize,
}

impl<'a> Arrivals<'a> {
    /// Begins at a random point of the process's period, so that tenants of a kind don't march in step.
    pub(crate) fn new(
        process: &'a Arrival,
        trace: &'a [Request],
        start_s: f64,
        rng: &mut StdRng,
    ) -> Self {
        let phase = match *process {
            Arrival::Periodic { rate } => rng.random::<f64>() / rate,
            Arrival::OnOff { on_s, off_s, .. } => -rng.random::<f64>() * (on_s + off_s),
            _ => 0.0,
        };
        Self {
            process,
            trace,
            start_s: start_s + phase,
            last_s: (-phase).max(0.0),
            count: 0,
        }
    }

    /// When the next request comes, and its tokens if it is one of a trace.
    pub(crate) fn next(&mut self, rng: &mut StdRng) -> Option<(Nanos, Request)> {
        let mut request = Request {
            at_s: 0.0,
            context: 0,
            generated: 0,
        };
        self.last_s = match *self.process {
            // Summing distances would drift.
            Arrival::Periodic { rate } => (self.count + 1) as f64 / rate,
            Arrival::Poisson { rate } => self.last_s + exponential(rng) / rate,
            Arrival::Gamma { rate, cv } => {
                let shape = 1.0 / (cv * cv);
                let distance = Gamma::new(shape, 1.0 / (shape * rate)).ok()?;
                self.last_s + distance.sample(rng)
            }
            Arrival::OnOff { rate, on_s, off_s } => {
                let period = on_s + off_s;
                let before = (self.last_s / period).floor();
                // Count only time that is on, then put the pauses back in.
                let on = before * on_s + (self.last_s - before * period).min(on_s);
                let on = on + exponential(rng) / rate;
                (on / on_s).floor() * period + on % on_s
            }
            Arrival::Closed { .. } => return None,
            Arrival::Trace { speed, .. } => {
                let last = self.trace.last()?;
                // Goes on with the first request a mean distance after the last one.
                let length = last.at_s * (1.0 + 1.0 / self.trace.len() as f64) + 1e-3;
                let (round, at) = (self.count / self.trace.len(), self.count % self.trace.len());
                request = self.trace[at];
                (round as f64 * length + request.at_s) / speed
            }
        };
        self.count += 1;
        Some((nanos(self.start_s + self.last_s), request))
    }
}

fn exponential(rng: &mut StdRng) -> f64 {
    Exp1.sample(rng)
}

/// A factor with mean 1 and this coefficient of variation.
pub(crate) fn spread(cv: f64, rng: &mut StdRng) -> f64 {
    if cv <= 0.0 {
        return 1.0;
    }
    let shape = 1.0 / (cv * cv);
    Gamma::new(shape, 1.0 / shape).map_or(1.0, |gamma| gamma.sample(rng))
}

/// Reads a trace: CSV with the columns `TIMESTAMP,ContextTokens,GeneratedTokens`, where a time is
/// `YYYY-MM-DD HH:MM:SS.fraction` or a number of seconds. Requests are put in order of time.
///
/// # Errors
/// The line's number and what is wrong with it.
pub fn parse_trace(csv: &str) -> Result<Vec<Request>, (usize, String)> {
    let mut requests = Vec::new();
    for (number, line) in csv.lines().enumerate() {
        let line = line.trim_start_matches('\u{feff}').trim();
        if line.is_empty() || (number == 0 && line.starts_with("TIMESTAMP")) {
            continue;
        }
        let wrong = |problem: String| (number + 1, problem);
        let mut columns = line.split(',');
        let mut column = |name: &str| {
            let missing = || wrong(format!("no {name}"));
            columns.next().map(str::trim).ok_or_else(missing)
        };
        let (time, context, generated) = (
            column("TIMESTAMP")?,
            column("ContextTokens")?,
            column("GeneratedTokens")?,
        );
        let tokens = |text: &str| {
            text.parse::<u32>()
                .map(u64::from)
                .map_err(|_| wrong(format!("`{text}` is no number of tokens")))
        };
        requests.push(Request {
            at_s: seconds(time).ok_or_else(|| wrong(format!("`{time}` is no time")))?,
            context: tokens(context)?,
            generated: tokens(generated)?,
        });
    }
    requests.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    let Some(first) = requests.first().map(|request| request.at_s) else {
        return Err((1, "no requests".to_owned()));
    };
    for request in &mut requests {
        request.at_s -= first;
    }
    Ok(requests)
}

/// Seconds since some fixed day.
fn seconds(time: &str) -> Option<f64> {
    if let Ok(seconds) = time.parse::<f64>() {
        return (seconds.is_finite() && seconds.abs() < 1e12).then_some(seconds);
    }
    let (date, clock) = time.split_once([' ', 'T'])?;
    let date: Vec<i64> = numbers(date, '-')?;
    let [year, month, day] = date[..] else {
        return None;
    };
    let clock: Vec<f64> = numbers(clock.trim_end_matches('Z'), ':')?;
    let [hours, minutes, seconds] = clock[..] else {
        return None;
    };
    if !(1..=12).contains(&month) || !(0..=9999).contains(&year) {
        return None;
    }
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    // A leap second is the 60th.
    let whole = hours.fract() == 0.0 && minutes.fract() == 0.0;
    let clock = (0.0..24.0).contains(&hours)
        && (0.0..60.0).contains(&minutes)
        && (0.0..61.0).contains(&seconds);
    if !(1..=days).contains(&day) || !whole || !clock {
        return None;
    }
    // Counts years from March, so that a leap day is the last one.
    let (year, month) = match month > 2 {
        true => (year, month - 3),
        false => (year - 1, month + 9),
    };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = 365 * year + leap_days + (153 * month + 2) / 5 + day;
    Some(days as f64 * 86_400.0 + hours * 3600.0 + minutes * 60.0 + seconds)
}

fn numbers<T: std::str::FromStr>(text: &str, separator: char) -> Option<Vec<T>> {
    text.split(separator)
        .map(|number| number.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn mean_distance(process: &Arrival, count: usize) -> f64 {
        let mut rng = StdRng::seed_from_u64(7);
        let mut arrivals = Arrivals::new(process, &[], 0.0, &mut rng);
        let last = (0..count).filter_map(|_| arrivals.next(&mut rng)).last();
        last.map_or(0, |(at, _)| at) as f64 / 1e9 / count as f64
    }

    #[test]
    fn rates_are_kept_in_the_mean() {
        for (process, rate) in [
            (Arrival::Periodic { rate: 50.0 }, 50.0),
            (Arrival::Poisson { rate: 50.0 }, 50.0),
            (
                Arrival::Gamma {
                    rate: 50.0,
                    cv: 2.0,
                },
                50.0,
            ),
            (
                Arrival::OnOff {
                    rate: 100.0,
                    on_s: 0.3,
                    off_s: 0.3,
                },
                50.0,
            ),
        ] {
            let distance = mean_distance(&process, 20_000);
            assert!(
                (distance * rate - 1.0).abs() < 0.05,
                "{process:?}: {distance}"
            );
        }
    }

    #[test]
    fn pauses_are_kept() {
        let mut rng = StdRng::seed_from_u64(1);
        let process = Arrival::OnOff {
            rate: 1000.0,
            on_s: 0.1,
            off_s: 0.4,
        };
        let mut arrivals = Arrivals::new(&process, &[], 0.0, &mut rng);
        let times = (0..1000).filter_map(|_| arrivals.next(&mut rng));
        let times: Vec<f64> = times.map(|(at, _)| at as f64 / 1e9).collect();
        let pauses = times.windows(2).filter(|pair| pair[1] - pair[0] >= 0.4);
        let length = times[999] - times[0];
        let periods = pauses.count() as f64 * 0.5 / length;
        assert!(
            (periods - 1.0).abs() < 0.15,
            "a pause in {periods} of the periods"
        );
    }

    #[test]
    fn a_trace_is_read_across_midnight_and_repeats() {
        let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
            2023-12-31 23:59:59.5000000,4808,10\n2024-01-01 00:00:01.5,3180,8\n";
        let trace = parse_trace(csv).expect("sound");
        assert_eq!(
            trace[1],
            Request {
                at_s: 2.0,
                context: 3180,
                generated: 8
            }
        );
        let process = Arrival::Trace {
            name: String::new(),
            speed: 2.0,
        };
        let mut rng = StdRng::seed_from_u64(0);
        let mut arrivals = Arrivals::new(&process, &trace, 1.0, &mut rng);
        let times: Vec<f64> = (0..3)
            .filter_map(|_| arrivals.next(&mut rng))
            .map(|(at, _)| at as f64 / 1e9)
            .collect();
        assert_eq!(times[..2], [1.0, 2.0]);
        assert!(times[2] > 2.0);
    }

    #[test]
    fn a_bad_line_is_named() {
        for (csv, line) in [
            ("", 1),
            ("1,2,3\nyesterday,1,1", 2),
            ("1,2", 1),
            ("1,-2,3", 1),
            ("2023-13-01 00:00:00,1,1", 1),
            ("2024-02-29 00:00:00,1,1\n2023-02-29 00:00:00,1,1", 2),
            ("2023-04-31 00:00:00,1,1", 1),
            ("2023-02-31 25:61:00,1,1", 1),
            ("2023-02-01 25:00:00,1,1", 1),
            ("2023-02-01 00:60:00,1,1", 1),
            ("2023-02-01 00:00:-1,1,1", 1),
            ("2023-02-01 00:NaN:00,1,1", 1),
        ] {
            assert_eq!(parse_trace(csv).expect_err(csv).0, line, "{csv}");
        }
    }
}
