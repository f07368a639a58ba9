//! The promise of a tenant, as flags; the same for `run` and `set`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use gpumux_core::{Class, Hints, MemoryPolicy, parse_bytes, parse_with_unit};
use gpumux_daemon::api::types::SpecChange;

/// A value, or none: whatever was set before does not hold any more.
type OrNone = Option<u64>;

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SpecArgs {
    /// latency: takes the GPU at once when it has work; standard: a weighted share; batch: what is left
    #[arg(long, value_parser = class())]
    pub(crate) class: Option<Class>,
    /// Share of each device's compute that it always gets when it wants it, 0 to 1
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    guaranteed: Option<f64>,
    /// Share of each device's compute that it never exceeds while others want it, 0 to 1
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    limit: Option<f64>,
    /// Weight among its equals when capacity is left over, 0.001 to 1000
    #[arg(long, allow_negative_numbers = true)]
    weight: Option<f64>,
    /// How long a request may take, in ms, or none: a latency tenant then waits up to a tenth of it for others, which spares them many switches if it launches kernel by kernel
    #[arg(long, value_name = "MS", value_parser = objective, allow_negative_numbers = true)]
    latency_objective: Option<OrNone>,
    /// Who may take the GPU for a latency tenant before its work arrives: auto (the program, its owner, the library where it foresees work), manual, off
    #[arg(long, value_parser = hints())]
    hints: Option<Hints>,
    /// Memory of each device that it always gets when it wants it, such as 8GiB, or 0
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory_guaranteed: Option<u64>,
    /// Memory of each device that it never exceeds, such as 40GiB, or none
    #[arg(long, value_name = "BYTES", value_parser = limit)]
    memory_limit: Option<OrNone>,
    /// When the device has no room for its memory: swap-others moves others' to the host, wait waits a while, fail fails as CUDA does
    #[arg(long, value_name = "POLICY", value_parser = memory_policy())]
    memory_policy: Option<MemoryPolicy>,
    /// Move its memory to the host after so long without work, such as 30s, or never; it comes back with the next work
    #[arg(long, value_name = "TIME", value_parser = patience)]
    sleep_after: Option<OrNone>,
}

fn memory_policy() -> impl TypedValueParser<Value = MemoryPolicy> {
    PossibleValuesParser::new(MemoryPolicy::ALL.map(MemoryPolicy::name)).map(|name| {
        MemoryPolicy::ALL
            .into_iter()
            .find(|it| it.name() == name)
            .unwrap_or_default()
    })
}

/// Bytes as people write them.
fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| format!("`{text}` is no size: use one such as 512MiB or 8GiB"))
}

/// A time as people write it, in seconds.
fn seconds(text: &str) -> Result<u64, String> {
    let units = [("", 1), ("s", 1), ("m", 60), ("h", 3600)];
    parse_with_unit(text, &units)
        .ok_or_else(|| format!("`{text}` is no time: use one such as 30s or 5m"))
}

/// A limit of memory.
fn limit(text: &str) -> Result<OrNone, String> {
    match text {
        "none" => Ok(None),
        "0" => Err("0 is no limit that a program could live with: use a size, or none".into()),
        size => bytes(size).map(Some).map_err(|error| error + ", or none"),
    }
}

/// A time to wait before a tenant is put to sleep.
fn patience(text: &str) -> Result<OrNone, String> {
    match text {
        "never" => Ok(None),
        time => seconds(time)
            .map(Some)
            .map_err(|error| error + ", or never"),
    }
}

/// Milliseconds as µs.
fn objective(text: &str) -> Result<OrNone, String> {
    if text == "none" {
        return Ok(None);
    }
    let ms: f64 = text
        .parse()
        .map_err(|_| format!("{text} is not a number of milliseconds, or none"))?;
    match ms.is_finite() && ms > 0.0 {
        true => Ok(Some((ms * 1e3) as u64)),
        false => Err(format!(
            "{text} ms is no objective: use a time above 0, such as 20"
        )),
    }
}

fn hints() -> impl TypedValueParser<Value = Hints> {
    PossibleValuesParser::new(Hints::ALL.map(Hints::name)).map(|name| {
        Hints::ALL
            .into_iter()
            .find(|it| it.name() == name)
            .unwrap_or_default()
    })
}

fn class() -> impl TypedValueParser<Value = Class> {
    PossibleValuesParser::new(Class::ALL.map(Class::name)).try_map(|name| name.parse::<Class>())
}

impl SpecArgs {
    /// What changes; the rest stays.
    pub(crate) fn change(&self) -> SpecChange {
        SpecChange {
            class: self.class,
            guaranteed: self.guaranteed,
            limit: self.limit,
            weight: self.weight,
            latency_objective_us: self.latency_objective,
            hints: self.hints,
            memory_guaranteed: self.memory_guaranteed,
            memory_limit: self.memory_limit,
            memory_policy: self.memory_policy,
            sleep_after_s: self.sleep_after,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_read_as_people_write_them() {
        for (text, value) in [
            ("0", 0),
            ("8GiB", 8 << 30),
            ("1.5 MiB", 3 << 19),
            ("40GB", 40_000_000_000),
        ] {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for (text, value) in [("30s", 30), ("5m", 300), ("2h", 7200), ("7", 7)] {
            assert_eq!(seconds(text), Ok(value), "{text}");
        }
        for wrong in ["", "GiB", "-1GiB", "8 giga", "1e99GiB", "1.2.3"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_was_set_can_be_cleared() {
        assert_eq!(limit("none"), Ok(None));
        assert_eq!(limit("1GiB"), Ok(Some(1 << 30)));
        assert!(limit("0").unwrap_err().contains("none"));
        assert!(limit("much").unwrap_err().ends_with("8GiB, or none"));
        assert_eq!(patience("never"), Ok(None));
        assert_eq!(patience("30s"), Ok(Some(30)));
        assert!(patience("none").unwrap_err().ends_with("5m, or never"));
        assert_eq!(objective("none"), Ok(None));
        assert_eq!(objective("20"), Ok(Some(20_000)));
    }
}
