//! `gpumux doctor`: what of gpumux works on this machine, and why the rest does not.

mod controls;
mod sandbox;
pub(crate) mod scratch;

use std::{fs, path::Path, process::ExitCode};

use gpumux_cuda::Device;
use gpumux_daemon::{client::ClientError, paths};
use gpumux_rm::branches::{Architecture, Evidence, evidence};
use serde::Serialize;

use super::client;
use crate::{emulated::Server, libraries, output};
use controls::Control;
use sandbox::{Files, Sandbox};

const EXAMPLES: &str = "\
Examples:
  gpumux doctor
  gpumux doctor --json | jq '.devices[].controls[] | select(.works | not)'
  gpumux emu -- gpumux doctor       the same on the emulated device

On each device it starts a program of its own for a few seconds and issues every control on it. \
No other program is touched.

Exit codes:
  0    timeslice, freeze and thaw work on every device
  1    they do not, or there is no device";

/// Test which controls work on each device, and print why one does not
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print JSON: driver, libraries, daemon, sandboxes, and per device the controls with `works` and `reason`
    #[arg(long)]
    json: bool,
}

/// What was found.
#[derive(Serialize)]
struct Report {
    driver: Driver,
    /// What stands between programs and the driver.
    sandboxes: Vec<Sandbox>,
    libraries: Vec<Finding>,
    daemon: Finding,
    devices: Vec<Examined>,
    /// Why there is no device, if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl Report {
    fn is_healthy(&self) -> bool {
        !self.devices.is_empty() && self.devices.iter().all(Examined::usable)
    }
}

/// The kernel's driver.
#[derive(Debug, PartialEq, Serialize)]
struct Driver {
    version: Option<String>,
    /// `open`, `closed`, `emulated`, `hidden` or `none`.
    module: &'static str,
    /// What this means for gpumux, where it is not simply fine.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// One thing that is there or not.
#[derive(Serialize)]
struct Finding {
    name: &'static str,
    works: bool,
    reason: String,
}

/// One device with what its controls did.
#[derive(Serialize)]
struct Examined {
    index: u32,
    name: String,
    uuid: String,
    emulated: bool,
    /// NVIDIA's name of its kind, if the controls are known for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    architecture: Option<&'static str>,
    /// How well the controls were known for it before they were tried; none on the emulated device.
    #[serde(skip_serializing_if = "Option::is_none")]
    evidence: Option<Evidence>,
    controls: Vec<Control>,
}

impl Examined {
    fn usable(&self) -> bool {
        let works = |name| {
            self.controls
                .iter()
                .any(|control| control.name == name && control.works)
        };
        controls::NEEDED.into_iter().all(works)
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let emulated = Server::here().is_some();
    let driver = driver(emulated);
    let (devices, problem) = match examine(&driver) {
        Ok(devices) => (devices, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let report = Report {
        driver,
        sandboxes: sandbox::detect(&Files::read()),
        libraries: [libraries::SHIM, libraries::EMULATED].map(library).into(),
        daemon: daemon(),
        devices,
        problem,
    };
    match args.json {
        true => output::json(&report)?,
        false => output::print(&text(&report))?,
    }
    Ok(ExitCode::from(u8::from(!report.is_healthy())))
}

fn examine(driver: &Driver) -> Result<Vec<Examined>, gpumux_cuda::Error> {
    let emulated = driver.module == "emulated";
    let version = driver.version.as_deref().unwrap_or_default();
    let mut devices = Vec::new();
    for index in 0..Device::count()? as u32 {
        let device = Device::get(index)?;
        let capability = device.compute_capability()?;
        devices.push(Examined {
            index,
            name: device.name()?,
            uuid: device.uuid()?,
            emulated,
            architecture: Architecture::of(capability).map(|it| it.name),
            evidence: (!emulated).then(|| evidence(version, driver.module == "open", capability)),
            controls: controls::try_all(index, emulated),
        });
    }
    Ok(devices)
}

fn driver(emulated: bool) -> Driver {
    if emulated {
        return Driver {
            version: None,
            module: "emulated",
            note: None,
        };
    }
    match fs::read_to_string("/proc/driver/nvidia/version") {
        Ok(text) => driver_from(&text),
        Err(_) => unseen(Path::new("/dev/nvidiactl").exists()),
    }
}

/// The driver where the kernel's files say nothing of it, as in gVisor.
fn unseen(usable: bool) -> Driver {
    let (module, note) = match usable {
        true => (
            "hidden",
            "a sandbox hides the driver's version; gpumux goes by that of libcuda",
        ),
        false => ("none", "no NVIDIA kernel driver is loaded"),
    };
    Driver {
        version: None,
        module,
        note: Some(note.into()),
    }
}

/// From the first line of `/proc/driver/nvidia/version`, which names the open module as such and then the
/// version.
fn driver_from(text: &str) -> Driver {
    let line = text.lines().next().unwrap_or_default();
    let version = line
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'));
    let open = line.contains("Open Kernel Module");
    Driver {
        version: version.map(str::to_owned),
        module: if open { "open" } else { "closed" },
        note: (!open).then(|| "gpumux was only measured with the open kernel module".to_owned()),
    }
}

fn library(name: &'static str) -> Finding {
    match libraries::find(name) {
        Ok(path) => Finding {
            name,
            works: true,
            reason: path.display().to_string(),
        },
        Err(error) => Finding {
            name,
            works: false,
            reason: error.to_string(),
        },
    }
}

fn daemon() -> Finding {
    let finding = |works, reason| Finding {
        name: "daemon",
        works,
        reason,
    };
    match client::block(async |client| client.status().await) {
        Ok(status) => finding(
            true,
            format!(
                "version {} runs in {}",
                status.version,
                paths::find().display()
            ),
        ),
        Err(ClientError::NoDaemon { .. }) => {
            finding(true, "none runs; `gpumux run` starts one".into())
        }
        Err(error) => finding(false, error.to_string()),
    }
}

fn text(report: &Report) -> String {
    let driver = &report.driver;
    let version = driver.version.as_deref().unwrap_or_default();
    let mut text = format!("driver  {} {version}", driver.module)
        .trim_end()
        .to_owned()
        + "\n";
    text += &driver
        .note
        .iter()
        .map(|note| format!("        {note}\n"))
        .collect::<String>();
    for sandbox in &report.sandboxes {
        let Sandbox {
            name,
            shown_by,
            effect,
            way_out,
        } = sandbox;
        text += &format!("{name}  {shown_by}\n        {effect}\n");
        if !report.is_healthy() || !report.daemon.works {
            text += &format!("        way out: {way_out}\n");
        }
    }
    for finding in report.libraries.iter().chain([&report.daemon]) {
        let verdict = if finding.works { "ok " } else { "BAD" };
        text += &format!("{verdict}  {}: {}\n", finding.name, finding.reason);
    }
    for device in &report.devices {
        let Examined {
            index, name, uuid, ..
        } = device;
        text += &format!("\ndevice {index}: {name} {uuid}\n");
        if let Some(evidence) = device.evidence {
            let kind = device.architecture.unwrap_or("other GPUs");
            text += &format!("  controls on {kind}: {}\n", evidence.describe());
        }
        let rows: Vec<_> = device.controls.iter().map(row).collect();
        text += &output::table(&rows);
        if !device.usable() {
            text += "  instead of the controls, gpumux schedules launches: a running kernel is not interrupted\n";
        }
    }
    if let Some(problem) = &report.problem {
        text += &format!("\nno device: {problem}\n");
    }
    text
}

fn row(control: &Control) -> Vec<String> {
    let works = if control.works {
        "works"
    } else {
        "does not work"
    };
    vec![
        format!("  {}", control.name),
        works.into(),
        control.reason.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn way_out_is_named_only_where_something_is_wrong() {
        let control = |name| Control {
            name,
            works: true,
            reason: String::new(),
        };
        let mut report = Report {
            driver: driver_from(""),
            sandboxes: vec![Sandbox {
                name: "container",
                shown_by: "/.dockerenv is there".into(),
                effect: "programs are tenants if they reach the daemon",
                way_out: "mount its socket",
            }],
            libraries: Vec::new(),
            daemon: Finding {
                name: "daemon",
                works: true,
                reason: String::new(),
            },
            devices: vec![Examined {
                index: 0,
                name: String::new(),
                uuid: String::new(),
                emulated: true,
                architecture: None,
                evidence: None,
                controls: controls::NEEDED.map(control).into(),
            }],
            problem: None,
        };
        let way_out = "way out: mount its socket";
        assert!(!text(&report).contains(way_out));
        report.daemon.works = false;
        assert!(text(&report).contains(way_out));
        report.daemon.works = true;
        report.devices[0].controls[0].works = false;
        assert!(text(&report).contains(way_out));
    }

    #[test]
    fn kernel_module_is_known_by_its_version_line() {
        let open = driver_from(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\nGCC version: 12.2.0\n",
        );
        assert_eq!(
            (open.module, open.version.as_deref()),
            ("open", Some("580.159.04"))
        );
        assert_eq!(open.note, None);
        let closed = driver_from(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
        );
        assert_eq!(
            (closed.module, closed.version.as_deref()),
            ("closed", Some("535.129.03"))
        );
        assert!(closed.note.is_some());
    }
}
