//! Lists that are read, and means of what is printed.

use std::path::Path;

use anyhow::Context;
use gpumux_fleet::{
    model::{Models, NodeSpec},
    trace,
};

use crate::units;

/// Where there is nothing to take the mean of.
pub(super) const NONE: &str = "-";

/// The rows of a CSV file.
pub(super) fn rows<T: for<'a> serde::Deserialize<'a>>(file: &Path) -> anyhow::Result<Vec<T>> {
    let rows = trace::table(&units::text_of(file)?);
    rows.with_context(|| format!("in {}", file.display()))
}

pub(super) fn load_nodes(file: &Path) -> anyhow::Result<(Vec<NodeSpec>, Models)> {
    let mut models = Models::default();
    let nodes = trace::nodes(&units::text_of(file)?, &mut models);
    let nodes = nodes.with_context(|| format!("in {}", file.display()))?;
    anyhow::ensure!(
        nodes.iter().any(|node| node.gpus > 0),
        "no node of {} has a GPU: nothing can be placed",
        file.display()
    );
    Ok((nodes, models))
}

/// The mean of what each has; none if one has none.
pub(super) fn mean<T>(all: &[T], value: impl Fn(&T) -> Option<f64>) -> Option<f64> {
    let values: Vec<f64> = all.iter().map(value).collect::<Option<_>>()?;
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}
