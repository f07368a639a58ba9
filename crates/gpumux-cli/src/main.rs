//! `gpumux`: the command line. Parses, calls one command, and turns its result into an exit code.

mod background;
mod commands;
mod emulated;
mod libraries;
mod output;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::commands::{
    completions, daemon, demo, doctor, dra, emu, man, ps, run, set, sim, workload,
};

const EXAMPLES: &str = "\
Examples:
  gpumux demo                                     see it work; needs no GPU
  gpumux run --class latency -- python serve.py   takes the GPU at once when it has work
  gpumux run --class batch -- python train.py     gets what is left
  gpumux ps                                       who shares the GPU
  gpumux doctor                                   what works on this machine

Exit codes:
  0    success
  1    failure; the message says what to do
  2    wrong usage
  125  `run` or `emu` could not start the program (see their help)
  126  the program cannot be executed
  127  the program was not found
  else the program's own";

/// Share GPUs between unmodified programs.
#[derive(Parser)]
#[command(name = "gpumux", version, after_help = EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Ps(ps::Args),
    Set(set::Args),
    Doctor(doctor::Args),
    Demo(demo::Args),
    Daemon(daemon::Args),
    Dra(dra::Args),
    Emu(emu::Args),
    Sim(sim::Args),
    /// Run a latency or batch load through the CUDA driver API
    Workload(workload::Args),
    Completions(completions::Args),
    Man(man::Args),
    #[command(hide = true)]
    Background(background::Args),
    #[command(hide = true)]
    Scratch(doctor::scratch::Args),
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let failure = match command {
        Command::Run(_) | Command::Emu(_) => commands::CANNOT_START,
        _ => 1,
    };
    let result = match command {
        Command::Run(args) => run::run(args),
        Command::Ps(args) => ps::run(&args),
        Command::Set(args) => set::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Daemon(args) => daemon::run(args),
        Command::Dra(args) => dra::run(args),
        Command::Emu(args) => emu::run(args),
        Command::Sim(args) => sim::run(&args),
        Command::Workload(args) => workload::run(&args),
        Command::Completions(args) => completions::run(&args, &mut Cli::command()),
        Command::Man(args) => man::run(&args, Cli::command()),
        Command::Background(args) => background::run(args),
        Command::Scratch(args) => doctor::scratch::run(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("gpumux: {}", output::with_causes(&error));
        ExitCode::from(failure)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
