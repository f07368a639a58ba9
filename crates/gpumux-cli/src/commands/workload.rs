//! `gpumux workload`: the load generators, as programs for tenants.

use std::process::ExitCode;

pub(crate) use gpumux_workload::Args;

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    gpumux_workload::main(args)
}
