//! The spec of a tenant, as flags; the same for `run` and `set`.

use clap::{
    Arg, ArgGroup, ArgMatches, Command, Error, FromArgMatches,
    builder::{PossibleValuesParser, TypedValueParser, ValueParser},
    error::ErrorKind,
};
use gpumux_core::{Field, Kind, SpecChange};
use serde_json::Value;

use crate::units::{self, Usage};

/// The group of all flags of the spec.
pub(crate) const GROUP: &str = "spec";

/// The names of all flags of the spec, as clap has them.
fn keys() -> impl Iterator<Item = &'static str> {
    SpecChange::FIELDS.iter().map(|field| field.key)
}

/// What the flags name: a flag for each field of the spec.
#[derive(Clone, Debug)]
pub(crate) struct SpecArgs(SpecChange);

impl SpecArgs {
    /// What changes; the rest stays.
    ///
    /// # Errors
    /// When a guarantee is above its limit.
    pub(crate) fn change(&self) -> Result<SpecChange, Usage> {
        let change = &self.0;
        units::consistent(
            (change.guaranteed, change.limit),
            (change.memory_guaranteed, change.memory_limit.flatten()),
        )?;
        Ok(change.clone())
    }
}

impl clap::Args for SpecArgs {
    fn augment_args(command: Command) -> Command {
        command
            .args(SpecChange::FIELDS.iter().map(flag))
            .group(ArgGroup::new(GROUP).args(keys()).multiple(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SpecArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let named = SpecChange::FIELDS.iter().filter_map(|field| {
            let value = matches.get_one::<Value>(field.key)?;
            Some((field.key.to_owned(), value.clone()))
        });
        serde_json::from_value(Value::Object(named.collect()))
            .map(Self)
            .map_err(|error| Error::raw(ErrorKind::InvalidValue, error))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0 = Self::from_arg_matches(matches)?.0.after(&self.0);
        Ok(())
    }
}

fn flag(field: &Field) -> Arg {
    let flag = Arg::new(field.key).long(field.flag).help(field.help);
    let (name, parser) = match field.kind {
        Kind::Name(name, names) => {
            let names = PossibleValuesParser::new(names).map(Value::from);
            return flag.value_name(name).value_parser(names);
        }
        Kind::Weight => ("WEIGHT", parser(units::weight)),
        Kind::Share => ("SHARE", parser(units::share)),
        Kind::Size => ("SIZE", parser(units::size)),
        Kind::SizeOrNone => ("SIZE", parser(units::size_or_none)),
        Kind::Objective => ("TIME", parser(units::objective)),
        Kind::SecondsOrNever => ("TIME", parser(units::seconds_or_never)),
    };
    flag.value_name(name)
        .value_parser(parser)
        .allow_negative_numbers(true)
}

/// Reads a flag as the API's number, or `null`.
fn parser<T, E>(read: fn(&str) -> Result<T, E>) -> ValueParser
where
    T: Into<Value> + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
{
    ValueParser::new(move |text: &str| read(text).map(T::into))
}

#[cfg(test)]
mod tests {
    use clap::Args as _;

    use super::*;

    #[test]
    fn flag_of_every_field_reads_the_words_of_its_change() {
        let words = [
            "class batch",
            "guaranteed 20%",
            "limit 50%",
            "weight 2",
            "latency objective 20.0 ms",
            "hints off",
            "memory guaranteed 8.0 GiB",
            "memory limit none",
            "memory policy wait",
            "sleep after never",
        ];
        assert_eq!(words.len(), SpecChange::FIELDS.len());
        let flags = words.iter().flat_map(|it| {
            let text = it.replace(" GiB", "GiB").replace(" ms", "ms");
            let (name, value) = text.rsplit_once(' ').expect("a name and a value");
            [format!("--{}", name.replace(' ', "-")), value.to_owned()]
        });
        let command = SpecArgs::augment_args(Command::new("set"));
        let matches = command
            .try_get_matches_from(["set".to_owned()].into_iter().chain(flags))
            .unwrap();
        let change = SpecArgs::from_arg_matches(&matches).unwrap().change();
        assert_eq!(change.unwrap().to_string(), words.join(", "));
    }
}
