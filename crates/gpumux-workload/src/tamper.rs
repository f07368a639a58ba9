//! A program that undoes what gpumux sets for it.
//!
//! The file through which a program's channel groups were made lets the program thaw them and set their timeslices. To learn
//! the groups' handles it stands between the preloaded library and the daemon: it starts itself again with a session
//! socket of its own, which passes every packet on and keeps a copy of the control files.

use std::{
    env,
    ffi::OsString,
    io::ErrorKind,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::Command,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use gpumux_rm::{
    Controls, Group, PreemptionMode, RmControls, control_file, layout::engine,
    real::is_control_file,
};
use gpumux_wire::{
    Shim,
    message::{MAX_PACKET, decode},
    socket,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{RecvFlags, SendFlags, Shutdown, SocketFlags},
};

use crate::Tamper;

/// The library's variable, and where the daemon really is.
const SOCKET: &str = "GPUMUX_SOCKET";
const DAEMON: &str = "GPUMUX_TAMPERED_SOCKET";

/// The timeslice, in µs, that a program takes for itself: the longest that gpumux gives.
const TIMESLICE: u64 = 1_000_000;

/// Longer than a packet may be.
const PACKET: usize = MAX_PACKET + 1;

pub(crate) type Known = Arc<Mutex<Vec<Box<dyn Controls>>>>;

/// Begins to undo what is set for this program, so often. Returns the count of controls that it used. Must come before the
/// program's first CUDA context; starts the program anew.
///
/// # Errors
/// When the program does not run under gpumux.
pub(crate) fn begin(what: &[Tamper], every: Duration) -> anyhow::Result<Option<Arc<AtomicU64>>> {
    if what.is_empty() {
        return Ok(None);
    }
    let controls = capture()?;
    let count = Arc::new(AtomicU64::new(0));
    let (done, what) = (Arc::clone(&count), what.to_vec());
    thread::spawn(move || {
        loop {
            for group in lock(&controls).iter() {
                for what in &what {
                    let result = match what {
                        Tamper::Timeslice => group.set_timeslice(TIMESLICE),
                        Tamper::Thaw => group.thaw(),
                    };
                    done.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
                }
            }
            thread::sleep(every);
        }
    });
    Ok(Some(count))
}

fn lock(known: &Known) -> MutexGuard<'_, Vec<Box<dyn Controls>>> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The controls of this program's compute groups, as they become known. Must come before its first CUDA context; starts the program
/// anew.
///
/// # Errors
/// When the program does not run under gpumux.
pub(crate) fn capture() -> anyhow::Result<Known> {
    let own = env::temp_dir().join(format!("gpumux-tamper-{}.sock", std::process::id()));
    let Some(daemon) = env::var_os(DAEMON) else {
        return Err(again(own));
    };
    let listener =
        socket::listen(&own, 16).with_context(|| format!("cannot listen at {}", own.display()))?;
    let controls = Known::default();
    let known = Arc::clone(&controls);
    thread::spawn(move || {
        while wait(&listener) {
            let Ok(library) = rustix::net::accept(&listener) else {
                continue;
            };
            if let Ok(daemon) = socket::connect(&PathBuf::from(&daemon), SocketFlags::empty()) {
                pass(library, daemon, &known);
            }
        }
    });
    Ok(controls)
}

/// Sets when kernels of this program may be interrupted, once it has a context.
///
/// # Errors
/// The driver's, or that no group became known.
pub(crate) fn set_preemption(known: &Known, mode: PreemptionMode) -> anyhow::Result<()> {
    let end = Instant::now() + Duration::from_secs(5);
    while lock(known).is_empty() {
        if Instant::now() > end {
            bail!("the library has not reported this program's channel group within 5 s");
        }
        thread::sleep(Duration::from_millis(5));
    }
    for group in lock(known).iter() {
        group.set_preemption_mode(mode)?;
    }
    Ok(())
}

/// Starts this program again, with a session socket of its own. Returns why it could not.
fn again(own: PathBuf) -> anyhow::Error {
    let start = || {
        let Some(daemon) = env::var_os(SOCKET) else {
            bail!("the controls of a program are known under `gpumux run`: {SOCKET} is not set");
        };
        let _ = std::fs::remove_file(&own);
        let args: Vec<OsString> = env::args_os().skip(1).collect();
        let mut program = Command::new(env::current_exe()?);
        let failed = program
            .args(args)
            .env(SOCKET, &own)
            .env(DAEMON, daemon)
            .exec();
        Err(failed.into())
    };
    match start() {
        Ok(never) => never,
        Err(error) => error,
    }
}

/// Passes packets on in both directions until one side closes.
fn pass(library: OwnedFd, daemon: OwnedFd, known: &Known) {
    let known = Arc::clone(known);
    let (library, daemon) = (Arc::new(library), Arc::new(daemon));
    let (to, from) = (Arc::clone(&daemon), Arc::clone(&library));
    thread::spawn(move || {
        forward(&library, &to, |bytes, files| {
            if let (Ok(message), Some(file)) = (decode::<Shim>(bytes), files.first()) {
                learn(&message, file, &known);
            }
        });
    });
    thread::spawn(move || forward(&daemon, &from, |_, _| {}));
}

fn forward(from: &OwnedFd, to: &OwnedFd, see: impl Fn(&[u8], &[OwnedFd])) {
    let mut bytes = [0; PACKET];
    while wait(from) {
        let (length, files) = match socket::recv_bytes(from, &mut bytes, RecvFlags::empty()) {
            Ok((0, _)) => break,
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        see(&bytes[..length], &files);
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        if socket::send_bytes(to, &bytes[..length], &files, SendFlags::empty()).is_err() {
            break;
        }
    }
    for side in [from, to] {
        let _ = rustix::net::shutdown(side, Shutdown::Both);
    }
}

/// Keeps the controls of a compute group.
fn learn(message: &Shim, file: &OwnedFd, known: &Known) {
    let Shim::Group {
        engine: engine::GR0,
        client,
        subdevice,
        group,
        channels,
        ..
    } = message
    else {
        return;
    };
    let group = Group {
        client: *client,
        subdevice: *subdevice,
        group: *group,
        channels: channels.clone(),
    };
    let emulated = !is_control_file(file).unwrap_or_default();
    let file = file
        .try_clone()
        .and_then(|file| control_file(file, emulated));
    if let Ok(file) = file {
        lock(known).push(Box::new(RmControls::new(file, group)));
    }
}

/// Waits until there is something to read or the other side has closed.
fn wait(socket: &OwnedFd) -> bool {
    loop {
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], None) {
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}
