//! `gpumux`: the command line. Parses, calls one command, and turns its result into an exit code.

mod background;
mod commands;
mod emulated;
mod fingerprint;
mod libraries;
mod output;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::commands::{
    cdi, completions, daemon, demo, doctor, dra, emu, explain, fleet, hint, man, memory, profile,
    ps, run, set, sim, top, trace, workload,
};

const EXAMPLES: &str = "\
Examples:
  gpumux demo                                     see it work; needs no GPU
  gpumux run --class latency -- python serve.py   takes the GPU at once when it has work
  gpumux run --class batch -- python train.py     gets what is left
  gpumux ps                                       who shares the GPU
  gpumux top                                      watch them, and change them
  gpumux explain train                            why it gets what it gets
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
    Hint(hint::Args),
    Memory(memory::Args),
    /// Move a tenant's memory to the host
    Sleep(memory::Move),
    /// Bring a tenant's memory back
    Wake(memory::Move),
    Explain(explain::Args),
    Profile(profile::Args),
    Top(top::Args),
    Trace(trace::Args),
    Doctor(doctor::Args),
    Demo(demo::Args),
    Daemon(daemon::Args),
    Cdi(cdi::Args),
    Dra(dra::Args),
    Emu(emu::Args),
    Sim(sim::Args),
    Fleet(fleet::Args),
    /// Run a latency or batch load through the CUDA driver API
    Workload(Box<workload::Args>),
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
        Command::Hint(args) => hint::run(&args),
        Command::Memory(args) => memory::run(&args),
        Command::Sleep(args) => memory::sleep(&args),
        Command::Wake(args) => memory::wake(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Daemon(args) => daemon::run(args),
        Command::Cdi(args) => cdi::run(&args),
        Command::Dra(args) => dra::run(args),
        Command::Emu(args) => emu::run(args),
        Command::Sim(args) => sim::run(&args),
        Command::Fleet(args) => fleet::run(&args),
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

    /// All that `--help` says, a chapter per command.
    fn chapter(command: &mut clap::Command, text: &mut String) {
        let name = command.get_bin_name().unwrap_or_default().to_owned();
        let help = command.render_long_help().to_string();
        let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
        *text += &format!("\n## {name}\n```text\n{}\n```\n", lines.join("\n").trim());
        for own in command
            .get_subcommands_mut()
            .filter(|own| !own.is_hide_set())
        {
            if own.get_name() != "help" {
                chapter(own, text);
            }
        }
    }

    #[test]
    fn the_commands_in_the_book_are_up_to_date() {
        let mut text = String::from(
            "<!-- Made from the commands: UPDATE_DOCS=1 cargo test -p gpumux-cli book -->\n# Commands\n",
        );
        let mut command = Cli::command().term_width(100);
        command.build();
        chapter(&mut command, &mut text);
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/commands.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(file, &text).unwrap();
        }
        assert_eq!(
            std::fs::read_to_string(file).unwrap(),
            text,
            "run `UPDATE_DOCS=1 cargo test -p gpumux-cli book`"
        );
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
