//! `gpumux dra`: the Kubernetes DRA driver of a node.

use std::process::ExitCode;

pub(crate) use gpumux_dra::Args;

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    crate::bounded_log::start();
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
