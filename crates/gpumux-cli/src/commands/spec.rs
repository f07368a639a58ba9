//! The spec of a tenant, as flags; the same for `run` and `set`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use gpumux_core::{Class, Hints, MemoryPolicy};
use gpumux_daemon::api::types::SpecChange;

use crate::units::{self, OrNone, Usage};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SpecArgs {
    /// latency: takes the GPU at once when it has work; standard: a weighted share; batch: what is left
    #[arg(long, value_parser = class())]
    pub(crate) class: Option<Class>,
    /// Share of each device's compute that it always gets when it has work, such as 50% or 0.5
    #[arg(long, value_name = "SHARE", value_parser = units::share, allow_negative_numbers = true)]
    guaranteed: Option<f64>,
    /// Share of each device's compute that it never exceeds while others have work, such as 80% or 0.8
    #[arg(long, value_name = "SHARE", value_parser = units::share, allow_negative_numbers = true)]
    limit: Option<f64>,
    /// Weight among its equals when capacity is left over, 0.001 to 1000
    #[arg(long, value_parser = units::weight, allow_negative_numbers = true)]
    weight: Option<f64>,
    /// How long a request may take, such as 20ms (a number alone is in ms), or none: a latency tenant then waits up to a tenth of it for others, which spares them many switches if it launches kernel by kernel
    #[arg(long, value_name = "TIME", value_parser = units::objective, allow_negative_numbers = true)]
    latency_objective: Option<OrNone>,
    /// What may take the GPU for a latency tenant before its work arrives: auto (the program, its owner, the library where it predicts work), manual, off
    #[arg(long, value_parser = hints())]
    hints: Option<Hints>,
    /// Memory of each device that it always gets when it asks for it, such as 8GiB (8G, 8Gi), or 0
    #[arg(long, value_name = "SIZE", value_parser = units::size, allow_negative_numbers = true)]
    memory_guaranteed: Option<u64>,
    /// Memory of each device that it never exceeds, such as 40GiB, or none
    #[arg(long, value_name = "SIZE", value_parser = units::size_or_none, allow_negative_numbers = true)]
    memory_limit: Option<OrNone>,
    /// When the device has no room for its memory: swap-others moves others' to the host, wait waits a while, fail fails as CUDA does
    #[arg(long, value_name = "POLICY", value_parser = memory_policy())]
    memory_policy: Option<MemoryPolicy>,
    /// Move its memory to the host after so long without work, such as 30s or 5min, or never; it comes back with the next work
    #[arg(long, value_name = "TIME", value_parser = units::seconds_or_never, allow_negative_numbers = true)]
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
    ///
    /// # Errors
    /// When a guarantee is above its limit.
    pub(crate) fn change(&self) -> Result<SpecChange, Usage> {
        let memory_limit = self.memory_limit.flatten();
        units::consistent(
            (self.guaranteed, self.limit),
            (self.memory_guaranteed, memory_limit),
        )?;
        Ok(SpecChange {
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
        })
    }
}
