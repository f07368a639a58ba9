//! `gpumux`: the command line. Parses, calls one command, and turns its result into an exit code.

mod background;
mod bounded_log;
mod commands;
mod elf;
mod emulated;
mod fingerprint;
mod frameworks;
mod keeper;
mod libraries;
mod logs;
mod names;
mod output;
mod signals;
mod units;

use std::process::ExitCode;

use clap::{
    CommandFactory, Parser, Subcommand,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::commands::{
    cdi, client, completions, daemon, demo, doctor, dra, emu, events, explain, fleet, hint,
    inspect, kill, logs as show_logs, man, memory, notice, page, profile, ps, relocate, run, set,
    sim, stop, top, trace, wait, workload,
};

const EXAMPLES: &str = "\
Examples:
  gpumux demo                                     see it work; needs no GPU
  gpumux run --class latency -- python serve.py   takes the GPU at once when it has work
  gpumux run --class batch -- python train.py     gets what is left
  gpumux ps                                       the tenants that share the GPU
  gpumux top                                      watch them, and change them
  gpumux explain train                            why it receives what it receives
  gpumux run -d -- python train.py                in the background: see stop, kill, wait, logs
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
    Stop(stop::Args),
    Kill(kill::Args),
    Wait(wait::Args),
    Logs(show_logs::Args),
    Ps(ps::Args),
    Events(events::Args),
    Inspect(inspect::Args),
    Set(set::Args),
    Hint(hint::Args),
    Memory(memory::Args),
    /// Move a tenant's memory to the host
    #[command(after_help = memory::SLEEP)]
    Sleep(memory::Move),
    /// Bring a tenant's memory back
    #[command(after_help = memory::WAKE)]
    Wake(memory::Move),
    #[command(name = "move")]
    Move(relocate::Args),
    Explain(explain::Args),
    Profile(profile::Args),
    Top(top::Args),
    Page(page::Args),
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
    Notice(notice::Args),
    #[command(hide = true)]
    Scratch(doctor::scratch::Args),
    /// Receives connections for a daemon, which starts it
    #[command(hide = true, name = gpumux_daemon::receiver::COMMAND)]
    Receiver,
    /// Looks into a process of a user for a daemon, which starts it
    #[command(hide = true, name = gpumux_daemon::examine::COMMAND)]
    Examine,
    /// Calls the driver's checkpoint functions for a daemon, which starts it
    #[command(hide = true, name = gpumux_daemon::relocation::COMMAND)]
    Relocate,
}

fn main() -> ExitCode {
    let command = Cli::try_parse()
        .unwrap_or_else(|error| refuse(error))
        .command;
    let failure = match command {
        Command::Run(_) | Command::Emu(_) => commands::CANNOT_START,
        _ => 1,
    };
    let result = match command {
        Command::Run(args) => run::run(args),
        Command::Stop(args) => stop::run(&args),
        Command::Kill(args) => kill::run(&args),
        Command::Wait(args) => wait::run(&args),
        Command::Logs(args) => show_logs::run(&args),
        Command::Ps(args) => ps::run(&args),
        Command::Events(args) => events::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Set(args) => set::run(&args),
        Command::Hint(args) => hint::run(&args),
        Command::Memory(args) => memory::run(&args),
        Command::Sleep(args) => memory::sleep(&args),
        Command::Wake(args) => memory::wake(&args),
        Command::Move(args) => relocate::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Page(args) => page::run(&args),
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
        Command::Notice(args) => notice::run(&args),
        Command::Scratch(args) => doctor::scratch::run(&args),
        Command::Receiver => daemon::receive(),
        Command::Examine => daemon::examine(),
        Command::Relocate => relocate::help(),
    };
    result.unwrap_or_else(|error| {
        if let Some(units::Usage(message)) = error.downcast_ref() {
            let mut command = Cli::command();
            // Its usage, not that of all commands.
            command.build();
            let name = std::env::args().nth(1).unwrap_or_default();
            let own = command.find_subcommand_mut(&name).cloned();
            own.unwrap_or(command)
                .error(ErrorKind::ValueValidation, message)
                .exit();
        }
        eprintln!("gpumux: {}", output::with_causes(&error));
        ExitCode::from(failure)
    })
}

/// Prints what is wrong with the arguments, or the help that was asked for, and ends.
fn refuse(mut error: clap::Error) -> ! {
    // The tip to write an unknown flag behind `--` would make it an argument of the program, or one too many.
    if error.kind() == ErrorKind::UnknownArgument {
        error.remove(ContextKind::Suggested);
    }
    suggest(&mut error, std::env::args().nth(1).as_deref());
    error.exit()
}

/// Adds the command that `first`, the first argument, is most like, where clap finds none: it compares short words too strictly.
fn suggest(error: &mut clap::Error, first: Option<&str>) {
    let known = error.get(ContextKind::SuggestedSubcommand).is_some();
    let typed = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(typed)) if !known && first == Some(typed) => typed.clone(),
        _ => return,
    };
    let cli = Cli::command();
    let shown = cli.get_subcommands().filter(|it| !it.is_hide_set());
    let names: Vec<&str> = shown.map(clap::Command::get_name).collect();
    if let Some(other) = client::similar(&typed, &names) {
        let names = ContextValue::Strings(vec![other.into()]);
        error.insert(ContextKind::SuggestedSubcommand, names);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistyped_command_has_a_suggestion() {
        for (typed, expected) in [("rnu", Some("'run'")), ("pss", Some("'ps'")), ("xyz", None)] {
            let mut error = Cli::try_parse_from(["gpumux", typed]).err().unwrap();
            suggest(&mut error, Some(typed));
            let text = error.to_string();
            match expected {
                Some(name) => assert!(text.contains(name), "{text}"),
                None => assert!(!text.contains("similar"), "{text}"),
            }
        }
        let mut nested = Cli::try_parse_from(["gpumux", "fleet", "rnu"])
            .err()
            .unwrap();
        suggest(&mut nested, Some("fleet"));
        assert!(!nested.to_string().contains("'run'"), "{nested}");
    }

    /// All that `--help` says, a chapter per command.
    fn chapter(command: &mut clap::Command, text: &mut String) {
        let name = command
            .get_bin_name()
            .unwrap_or(command.get_name())
            .to_owned();
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
