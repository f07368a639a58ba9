//! `gpumux move`: moves a tenant to another GPU. And the process that calls the driver for that, which a daemon starts.

use std::{
    io::{BufRead, Write},
    process::ExitCode,
    time::Duration,
};

use gpumux_core::relocation::{self, Checkpoints, Gpu};
use gpumux_cuda::{
    Driver, Error,
    checkpoint::{self, State, Uuid},
};
use gpumux_daemon::relocation::{LOCK, Report, Task};

use super::client;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux run --gpu all --name train -- python train.py
  gpumux move train --gpu 1

The tenant goes on where it was interrupted, with the same addresses and handles. Its program must see both GPUs, which are of one kind, and \
use one of them. Not moved are tenants in MPS groups, and programs with managed memory, cuIpc or peer access. Needs driver 580 or newer.";

/// Move a tenant to another GPU of this node
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps` names it
    name: String,
    /// Where it shall be: a number as nvidia-smi has it, or a UUID
    #[arg(long, value_name = "GPU")]
    gpu: String,
    #[command(flatten)]
    printed: output::Printed,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (name, gpu) = (&args.name, &args.gpu);
    let moved = client::about(name, async |client| client.relocate(name, gpu).await)?;
    args.printed.print(&moved, || {
        let took = moved.out_s + moved.driver_s + moved.back_s;
        let to: String = moved.to.chars().take(12).collect();
        format!(
            "{name}: on {to} after {took:.2} s (out {:.2} s, driver {:.2} s, back {:.2} s)\n",
            moved.out_s, moved.driver_s, moved.back_s
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The process that calls the driver: its task comes on the standard input, its reports go to the standard output.
pub(crate) fn help() -> anyhow::Result<ExitCode> {
    let mut lines = std::io::stdin().lock().lines();
    let Some(task) = lines.next().transpose()? else {
        return Ok(ExitCode::FAILURE);
    };
    let task: Task = serde_json::from_str(&task)?;
    let mut calls = match Calls::new(&task) {
        Ok(calls) => calls,
        Err(why) => {
            report(&Report::Unable(why));
            return Ok(ExitCode::FAILURE);
        }
    };
    if task.recover {
        report(&calls.recover());
        return Ok(ExitCode::SUCCESS);
    }
    report(&Report::Ready);
    // Without that word, nothing is done. After it, all is, whatever becomes of the daemon.
    if lines.next().transpose()?.as_deref() == Some("go") {
        let outcome = relocation::carry_out(&mut calls, task.pids.len());
        report(&outcome.into());
    }
    Ok(ExitCode::SUCCESS)
}

/// The daemon may be gone.
fn report(report: &Report) {
    if let Ok(line) = serde_json::to_string(report) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

/// The driver's calls for the processes of a task.
struct Calls {
    driver: &'static Driver,
    processes: Vec<Process>,
}

struct Process {
    pid: i32,
    /// For each device that it sees the one that takes its place; none to go on where it is.
    pairs: Vec<(Uuid, Uuid)>,
}

impl Calls {
    fn new(task: &Task) -> Result<Self, String> {
        let driver = Driver::get().map_err(|error| error.to_string())?;
        let mut processes = Vec::new();
        for pid in &task.pids {
            let pid = i32::try_from(*pid).map_err(|_| format!("{pid} is no process"))?;
            let state = checkpoint::state(driver, pid).map_err(|error| match error {
                Error::Missing(_) => {
                    "it has no checkpoint calls: driver 580 or newer is needed".into()
                }
                error => format!("process {pid}: {error}"),
            })?;
            if state != State::Running && !task.recover {
                return Err(format!("process {pid} is {state:?} for another checkpoint"));
            }
            let blind = || {
                let list = visible(pid).unwrap_or_default();
                format!(
                    "process {pid} does not see both GPUs: its CUDA_VISIBLE_DEVICES is `{list}`"
                )
            };
            let pairs = match task.recover {
                true => Vec::new(),
                false => pairs(pid, task).ok_or_else(blind)?,
            };
            processes.push(Process { pid, pairs });
        }
        Ok(Self { driver, processes })
    }

    /// Lets all processes go on where they are.
    fn recover(&mut self) -> Report {
        let mut stuck = None;
        for process in &self.processes {
            let (driver, pid) = (self.driver, process.pid);
            let recovered = match checkpoint::state(driver, pid) {
                Ok(State::Locked) => checkpoint::unlock(driver, pid),
                Ok(State::Checkpointed) => checkpoint::restore(driver, pid, &[])
                    .and_then(|()| checkpoint::unlock(driver, pid)),
                Ok(State::Running | State::Failed) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = recovered {
                stuck = Some(format!("process {pid} does not go on: {error}"));
            }
        }
        let why = "the process that called the driver has ended, or was late";
        stuck.map_or_else(|| Report::Back(why.into()), Report::Stuck)
    }
}

impl Checkpoints for Calls {
    type Error = Error;

    fn lock(&mut self, process: usize) -> Result<(), Error> {
        let patience: Duration = LOCK;
        checkpoint::lock(self.driver, self.processes[process].pid, patience)
    }

    fn checkpoint(&mut self, process: usize) -> Result<(), Error> {
        checkpoint::checkpoint(self.driver, self.processes[process].pid)
    }

    fn restore(&mut self, process: usize, exchanged: bool) -> Result<(), Error> {
        let process = &self.processes[process];
        let pairs: &[(Uuid, Uuid)] = match exchanged {
            true => &process.pairs,
            false => &[],
        };
        checkpoint::restore(self.driver, process.pid, pairs)
    }

    fn unlock(&mut self, process: usize) -> Result<(), Error> {
        checkpoint::unlock(self.driver, self.processes[process].pid)
    }
}

/// What the process was started with.
fn visible(pid: i32) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|it| {
        let text = std::str::from_utf8(it).ok()?;
        text.strip_prefix("CUDA_VISIBLE_DEVICES=")
            .map(str::to_owned)
    })
}

/// The list of pairs for a process; none: it does not see both GPUs.
fn pairs(pid: i32, task: &Task) -> Option<Vec<(Uuid, Uuid)>> {
    let gpus: &[Gpu] = &task.gpus;
    let seen = relocation::visible(visible(pid).as_deref(), gpus);
    let pairs = relocation::pairs(&seen, &task.from, &task.to)?;
    let pairs = pairs
        .iter()
        .map(|(old, new)| Some((uuid(old)?, uuid(new)?)));
    pairs.collect()
}

/// The bytes of a UUID as NVML writes it.
fn uuid(text: &str) -> Option<Uuid> {
    let hex: String = text.strip_prefix("GPU-")?.split('-').collect();
    let mut bytes = [0; 16];
    if hex.len() != 32 || !hex.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_read_as_nvml_writes_them() {
        let text = "GPU-00010203-0405-0607-0809-0a0b0c0d0eff";
        let mut expected: Uuid = std::array::from_fn(|at| at as u8);
        expected[15] = 0xff;
        assert_eq!(uuid(text), Some(expected));
        for wrong in [
            "",
            "GPU-",
            "MIG-00010203-0405-0607-0809-0a0b0c0d0eff",
            "GPU-0001",
        ] {
            assert_eq!(uuid(wrong), None, "{wrong}");
        }
    }
}
