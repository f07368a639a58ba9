//! `gpumux dra`: the Kubernetes DRA driver of a node.

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use tracing_subscriber::EnvFilter;

pub(crate) use gpumux_dra::Args;

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_env("GPUMUX_LOG").unwrap_or_else(|_| EnvFilter::new("info")),
        )
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    if let Some(check) = args.check {
        gpumux_dra::check(&args.into(), check)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.print_slices {
        println!("{}", gpumux_dra::slices_json(args.into())?);
        return Ok(ExitCode::SUCCESS);
    }
    gpumux_dra::run(args.into())?;
    Ok(ExitCode::SUCCESS)
}
