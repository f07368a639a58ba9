//! The promise of a tenant, as flags; the same for `run` and `set`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use gpumux_core::{Class, Hints};
use gpumux_daemon::api::types::SpecChange;

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
    /// How long a request may take, in ms: a latency tenant then waits up to a tenth of it for others, which spares them many switches if it launches kernel by kernel
    #[arg(long, value_name = "MS", value_parser = objective, allow_negative_numbers = true)]
    latency_objective: Option<u64>,
    /// Who may take the GPU for a latency tenant before its work arrives: auto (the program, its owner, the library where it foresees work), manual, off
    #[arg(long, value_parser = hints())]
    hints: Option<Hints>,
}

/// Milliseconds as µs.
fn objective(text: &str) -> Result<u64, String> {
    let ms: f64 = text
        .parse()
        .map_err(|_| format!("{text} is not a number of milliseconds"))?;
    match ms.is_finite() && ms > 0.0 {
        true => Ok((ms * 1e3) as u64),
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
        }
    }
}
