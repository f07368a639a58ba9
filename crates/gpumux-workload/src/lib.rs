//! Programs that load a device through the CUDA driver API, the same on a real and on the emulated one.
//!
//! `gpumux workload latency|batch|check|sweep|launch|calls|idle|fault`: [`Args`] is their command line, [`main`] runs one and
//! prints its [`Report`], [`run`] only runs it. The kernels are in [`kernels`].

use std::{
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool},
};

use signal_hook::consts::{SIGINT, SIGTERM};

pub mod gate;
pub mod kernels;
pub mod pace;
pub mod report;

mod args;
mod calls;
mod hints;
mod loops;
mod memory;
mod probes;
mod sweep;
mod switch;
mod tamper;
mod tasks;

pub use args::*;
pub use gate::Gate;
pub use report::Report;

/// Runs a workload and prints what it found.
///
/// # Errors
/// When it could not start, or standard output is closed.
pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    use std::io::Write as _;

    match &args.command {
        Command::Tasks(args) => {
            tasks::tasks(args)?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Calls(args) => {
            calls::calls(args)?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Switch(args) => {
            switch::switch(args)?;
            return Ok(ExitCode::SUCCESS);
        }
        _ => {}
    }
    let report = run(&args.command)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        writeln!(out, "{report}")?;
    }
    Ok(if report.succeeded() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs a workload to its end. Takes over SIGTERM and SIGINT.
///
/// # Errors
/// When it cannot start: no driver, not enough memory, no other process at the barrier. Driver errors after the
/// start are part of the report.
pub fn run(command: &Command) -> anyhow::Result<Report> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // A second signal ends a process that waits for a device which never answers.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    match command {
        Command::Latency(args) => loops::latency(args, &stop),
        Command::Batch(args) => loops::batch(args, &stop),
        Command::Launch(args) => loops::launch(args, &stop),
        Command::Sweep(args) => sweep::sweep(args, &stop),
        Command::Check(args) => probes::check(args, &stop),
        Command::Memory(args) => memory::memory(args, &stop),
        Command::Idle(args) => probes::idle(args, &stop),
        Command::Fault(args) => probes::fault(args, &stop),
        Command::Hints(args) => hints::probe(args, &stop),
        Command::Tasks(_) | Command::Calls(_) | Command::Switch(_) => {
            anyhow::bail!("it reports by its answers")
        }
    }
}
