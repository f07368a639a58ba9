//! `gpumux completions`: what a shell needs to complete our commands.

use std::process::ExitCode;

use clap_complete::Shell;

const EXAMPLES: &str = "\
Examples:
  gpumux completions bash > ~/.local/share/bash-completion/completions/gpumux
  gpumux completions zsh > ~/.zfunc/_gpumux
  gpumux completions fish > ~/.config/fish/completions/gpumux.fish";

/// Print the completions for a shell
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Which shell
    shell: Shell,
}

pub(crate) fn run(args: &Args, command: &mut clap::Command) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "gpumux", &mut script);
    crate::output::print(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
