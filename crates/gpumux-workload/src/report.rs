//! What a workload found: one JSON object, or one line for people.

use std::{fmt, time::Duration};

use hdrhistogram::Histogram;
use serde::Serialize;

/// The result of one workload. Units are in the names.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// `latency`, `batch`, …
    pub workload: &'static str,
    /// What the user called it.
    pub name: String,
    /// The device's product name.
    pub device: String,
    /// Length of the measurement.
    pub seconds: f64,
    /// Requests (`latency`), kernels (`batch`) or launches (`launch`) that were completed.
    pub calls: u64,
    /// Calls per second.
    pub rate: f64,
    /// Driver errors after the start; the first one ends the workload.
    pub errors: u64,
    /// The first driver error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Work per thread and kernel: give it to `--iterations` so that others do the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iterations: Option<u32>,
    /// What one kernel takes alone, if it was measured at the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_us: Option<f64>,
    /// Requests that began late because the one before took too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub late: Option<u64>,
    /// `latency`: one request; `batch` and `sweep`: from one completion to the next; `launch`: one launch call.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub times: Option<Quantiles>,
    /// `batch` and `latency`: calls completed in each full second since the start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub per_second: Vec<u64>,
    /// `batch` with `--tamper`: controls that the program undid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undone: Option<u64>,
    /// `check`, `memory` and `sweep`: what was verified.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub verified: Option<Verified>,
}

/// Where the times lie, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)] // the names say all
pub struct Quantiles {
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    pub max_us: f64,
    pub mean_us: f64,
}

/// The outcome of `check`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Elements looked at.
    pub elements: u64,
    /// Rounds that the kernel made.
    pub rounds: u32,
    /// Elements that were wrong.
    pub mismatches: u64,
    /// Whether the device's own sum was right.
    pub sum_matches: bool,
}

impl Report {
    /// Whether everything that was asked for happened as it should.
    pub fn succeeded(&self) -> bool {
        self.errors == 0
            && self
                .verified
                .is_none_or(|it| it.mismatches == 0 && it.sum_matches)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.name, self.device)?;
        if self.calls > 0 {
            let Self {
                calls,
                seconds,
                rate,
                ..
            } = self;
            write!(f, ": {calls} calls in {seconds:.2} s ({rate:.1}/s)")?;
        }
        if let Some(it) = self.times {
            let Quantiles {
                p50_us,
                p99_us,
                max_us,
                ..
            } = it;
            write!(
                f,
                ", p50 {p50_us:.1} µs, p99 {p99_us:.1} µs, max {max_us:.1} µs"
            )?;
        }
        if let Some(us) = self.kernel_us {
            write!(f, ", one kernel alone {us:.1} µs")?;
        }
        if let Some(iterations) = self.iterations {
            write!(f, ", {iterations} iterations")?;
        }
        if let Some(it) = self.verified {
            let Verified {
                elements,
                rounds,
                mismatches,
                sum_matches,
            } = it;
            write!(
                f,
                ", {mismatches} of {elements} elements wrong after {rounds} rounds"
            )?;
            if !sum_matches {
                f.write_str(", sum wrong")?;
            }
        }
        if let Some(error) = &self.error {
            write!(f, ", ended by an error: {error}")?;
        }
        Ok(())
    }
}

/// Collects times.
pub struct Times(Histogram<u64>);

impl Times {
    /// From 1 ns to one hour, to three digits.
    ///
    /// # Panics
    /// Never: the bounds are valid.
    pub fn new() -> Self {
        Self(Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("valid bounds"))
    }

    /// Adds one; longer than the range counts as its end.
    pub fn record(&mut self, time: Duration) {
        self.0
            .saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// How many were added.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Where they lie; nothing when there are none.
    pub fn quantiles(&self) -> Option<Quantiles> {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e3;
        (!self.0.is_empty()).then(|| Quantiles {
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: self.0.max() as f64 / 1e3,
            mean_us: self.0.mean() / 1e3,
        })
    }
}

impl Default for Times {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_in_microseconds_to_three_digits() {
        let mut times = Times::new();
        assert_eq!(times.quantiles(), None);
        for us in 1..=1000 {
            times.record(Duration::from_micros(us));
        }
        let it = times.quantiles().unwrap();
        for (got, expected) in [
            (it.p50_us, 500.0),
            (it.p90_us, 900.0),
            (it.p99_us, 990.0),
            (it.p999_us, 999.0),
            (it.max_us, 1000.0),
            (it.mean_us, 500.5),
        ] {
            assert!(
                (got / expected - 1.0).abs() < 2e-3,
                "{got} is not {expected}"
            );
        }
        times.record(Duration::from_secs(7200));
        assert_eq!(times.count(), 1001);
    }

    #[test]
    fn json_has_units_and_only_what_was_measured() {
        let mut report = Report {
            workload: "latency",
            times: Some(Quantiles::default()),
            late: Some(0),
            ..Report::default()
        };
        let json = serde_json::to_value(&report).unwrap();
        assert!(json["p999_us"].is_number() && json["late"].is_number());
        assert!(json.get("mismatches").is_none() && json.get("error").is_none());
        assert!(report.succeeded());
        report.verified = Some(Verified {
            mismatches: 1,
            sum_matches: true,
            ..Verified::default()
        });
        assert!(!report.succeeded());
        assert_eq!(serde_json::to_value(&report).unwrap()["mismatches"], 1);
    }
}
