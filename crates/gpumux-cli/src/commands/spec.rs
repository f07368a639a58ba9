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
    /// Who may take the GPU for a latency tenant before its work arrives: auto (the program, its owner, the library where it foresees work), manual, off
    #[arg(long, value_parser = hints())]
    hints: Option<Hints>,
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
            hints: self.hints,
            ..SpecChange::default()
        }
    }
}
