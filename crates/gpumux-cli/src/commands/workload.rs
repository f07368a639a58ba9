//! `gpumux workload`: the load generators, as programs for tenants.

use std::process::ExitCode;

pub(crate) use gpumux_workload::Args as WorkloadArgs;

/// Run a latency or batch load through the CUDA driver API
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    workload: WorkloadArgs,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    gpumux_workload::main(&args.workload)
}
