//! issues every control on a program of our own.
//!
//! The program runs under the shim like any tenant, but its session socket is ours: we take
//! its control file as a daemon would, and watch from its output whether it makes progress.

use std::{
    io::{self, BufRead, BufReader},
    os::fd::{AsFd, OwnedFd},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use gpumux_rm::{
    Cause, ControlFailure, Controls, Group, Interleave, PreemptionMode, RmControls, control_file,
    layout::engine,
};
use gpumux_wire::{Daemon, PROTOCOL, Shim, socket};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags, SocketFlags},
};
use serde::Serialize;

use crate::{libraries, output};

/// The controls without which gpumux cannot schedule.
pub(super) const NEEDED: [&str; 3] = ["timeslice", "freeze", "thaw"];

/// How long the program may take to make its context, on a machine whose driver sleeps.
const START: Duration = Duration::from_secs(20);
/// How long a thawed program may take to make progress.
const PROGRESS: Duration = Duration::from_secs(3);
/// What may still come out after a freeze: kernels that were done before it.
const SETTLE: Duration = Duration::from_millis(100);
/// How long a frozen program is watched: many of its kernels.
const STILL: Duration = Duration::from_millis(400);

/// What one control did.
#[derive(Serialize)]
pub(super) struct Control {
    pub(super) name: &'static str,
    pub(super) works: bool,
    pub(super) reason: String,
}

impl Control {
    fn new(name: &'static str, outcome: Result<String, String>) -> Self {
        let works = outcome.is_ok();
        let reason = outcome.unwrap_or_else(|why| why);
        Self {
            name,
            works,
            reason,
        }
    }
}

/// All controls on the device with this ordinal.
pub(super) fn try_all(device: u32, emulated: bool) -> Vec<Control> {
    match Scratch::start(device, emulated) {
        Ok(scratch) => scratch.try_all(),
        Err(error) => NEEDED
            .into_iter()
            .map(|name| {
                Control::new(
                    name,
                    Err(format!("not tried: {}", output::with_causes(&error))),
                )
            })
            .collect(),
    }
}

/// The program, its controls, and a line for each kernel it finished.
struct Scratch {
    controls: Box<dyn Controls>,
    /// Thaw once, however often the others froze.
    once: Box<dyn Controls>,
    kernels: Receiver<String>,
    // In this order: while the program lives, its shim would miss a daemon that is gone.
    _program: Program,
    _session: OwnedFd,
    _dir: tempfile::TempDir,
}

/// A process that is gone when this is dropped.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Scratch {
    fn start(device: u32, emulated: bool) -> anyhow::Result<Self> {
        let shim = libraries::find(libraries::SHIM)?;
        let dir = tempfile::Builder::new()
            .prefix("gpumux-doctor-")
            .tempdir()?;
        let path = dir.path().join("session.sock");
        let listener = socket::listen(&path, 1)?;
        let mut program = Command::new(std::env::current_exe()?)
            .args(["scratch", "--device", &device.to_string()])
            .env("LD_PRELOAD", libraries::first("LD_PRELOAD", &shim))
            .env("GPUMUX_SOCKET", &path)
            .env_remove("GPUMUX_TENANT")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("cannot start a program to try the controls on")?;
        let out = program.stdout.take().context("its output is piped")?;
        let (send, kernels) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(out).lines().map_while(Result::ok);
            for line in lines {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let program = Program(program);
        let (session, controls, once) = receive(&listener, emulated)?;
        Ok(Self {
            controls,
            once,
            kernels,
            _program: program,
            _session: session,
            _dir: dir,
        })
    }

    fn try_all(self) -> Vec<Control> {
        let freeze = self.freeze();
        let thaw = match &freeze {
            Ok(_) => self.thaw(),
            Err(_) => Err("not tried, because freezing does not work".into()),
        };
        vec![
            Control::new("timeslice", self.timeslice()),
            Control::new("freeze", freeze),
            Control::new("thaw", thaw),
            Control::new("preemption mode", self.preemption_mode()),
            Control::new("interleave", self.interleave()),
        ]
    }

    fn timeslice(&self) -> Result<String, String> {
        let controls = &self.controls;
        let found = controls.timeslice().map_err(why)?;
        // A second group with a slice of 1 µs would bring the device to a stop: the program is off it meanwhile. Where it
        // cannot be frozen, no other group has such a timeslice.
        let frozen = controls.freeze().is_ok();
        let answer = self.set_and_read_back(found);
        match controls.thaw() {
            Err(error) if frozen => Err(why(error)),
            _ => answer,
        }
    }

    fn set_and_read_back(&self, found: u64) -> Result<String, String> {
        let controls = &self.controls;
        for slice in [1, 1_000_000, found] {
            let started = Instant::now();
            controls.set_timeslice(slice).map_err(why)?;
            let took = started.elapsed().as_micros();
            let read = controls.timeslice().map_err(why)?;
            if read != slice {
                return Err(format!("{slice} µs were set, {read} µs were read back"));
            }
            if slice == found {
                return Ok(format!(
                    "set and read back 1 µs, 1 s and {found} µs; {took} µs a call"
                ));
            }
        }
        unreachable!("the last slice is `found`")
    }

    fn freeze(&self) -> Result<String, String> {
        self.progress()
            .map_err(|_| "the program makes no progress by itself".to_owned())?;
        let started = Instant::now();
        self.controls.freeze().map_err(why)?;
        let took = started.elapsed().as_micros();
        if self.goes_on() {
            self.controls.thaw().map_err(why)?;
            return Err("the driver accepts it, but the program goes on".into());
        }
        Ok(format!("a running program stands still; {took} µs"))
    }

    fn thaw(&self) -> Result<String, String> {
        let started = Instant::now();
        self.controls.thaw().map_err(why)?;
        let took = started.elapsed().as_micros();
        self.progress()?;
        for _ in 0..2 {
            self.controls.freeze().map_err(why)?;
        }
        self.once.thaw().map_err(why)?;
        let enough = self.goes_on();
        self.controls.thaw().map_err(why)?;
        self.progress()?;
        let twice = match enough {
            true => "once",
            false => "twice",
        };
        Ok(format!(
            "it runs again; {took} µs; frozen twice, it is thawed {twice}"
        ))
    }

    /// Whether the program goes on after a control that lets it run, or not.
    fn goes_on(&self) -> bool {
        std::thread::sleep(SETTLE);
        while self.kernels.try_recv().is_ok() {}
        std::thread::sleep(STILL);
        // The program waits for each kernel. One may have been done before, and is only told now.
        self.kernels.try_iter().count() > 1
    }

    fn progress(&self) -> Result<(), String> {
        let line = self.kernels.recv_timeout(PROGRESS);
        line.map(drop)
            .map_err(|_| format!("it made no progress within {PROGRESS:?}"))
    }

    fn preemption_mode(&self) -> Result<String, String> {
        for mode in [PreemptionMode::ThreadBlock, PreemptionMode::Instruction] {
            self.controls.set_preemption_mode(mode).map_err(why)?;
        }
        Ok("thread block and instruction were accepted".into())
    }

    fn interleave(&self) -> Result<String, String> {
        for level in [Interleave::High, Interleave::Medium] {
            self.controls
                .set_interleave(level)
                .map_err(|error| match error.cause {
                    Cause::Denied => {
                        format!("{error}: it needs CAP_SYS_NICE, and gpumux does without it")
                    }
                    _ => why(error),
                })?;
        }
        Ok("high and medium were accepted".into())
    }
}

fn why(error: ControlFailure) -> String {
    error.to_string()
}

/// The program's session, its controls, and such that do not know what the first ones did.
type Received = (OwnedFd, Box<dyn Controls>, Box<dyn Controls>);

/// Plays the daemon until the program's compute group is known.
fn receive(listener: &OwnedFd, emulated: bool) -> anyhow::Result<Received> {
    let deadline = Instant::now() + START;
    wait(listener, deadline)?;
    let session = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?;
    loop {
        wait(&session, deadline)?;
        let Some((message, file)) = socket::recv::<Shim>(&session, RecvFlags::empty())? else {
            bail!("the program ended before it had a context");
        };
        match (message, file) {
            (
                Shim::Hello {
                    protocol: PROTOCOL, ..
                },
                _,
            ) => {
                let welcome = Daemon::Welcome {
                    protocol: PROTOCOL,
                    tenant: "doctor".into(),
                    memory: false,
                };
                socket::send(&session, &welcome, None, SendFlags::empty())?;
            }
            (
                Shim::Hello {
                    protocol, version, ..
                },
                _,
            ) => bail!(
                "libgpumux.so is version {version} with protocol {protocol}, not {PROTOCOL}: install one that fits"
            ),
            (
                Shim::Group {
                    engine: engine::GR0,
                    client,
                    subdevice,
                    group,
                    channels,
                    ..
                },
                Some(file),
            ) => {
                let group = Group {
                    client,
                    subdevice,
                    group,
                    channels,
                };
                let files = [file.try_clone()?, file];
                let controls = files.map(|file| -> io::Result<Box<dyn Controls>> {
                    let file = control_file(file, emulated)?;
                    Ok(Box::new(RmControls::new(file, group.clone()).running()))
                });
                let [controls, once] = controls;
                return Ok((session, controls?, once?));
            }
            _ => {}
        }
    }
}

fn wait(fd: impl AsFd, deadline: Instant) -> anyhow::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
        Ok(0) => bail!(
            "no context was seen within {START:?}: either the program cannot make one, or the driver's calls are not understood"
        ),
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::INTR) => wait(fd, deadline),
        Err(error) => Err(error.into()),
    }
}
