//! What this process is known to have made: its control files and channel groups, shared
//! between the program's threads, which add to it, and the agent, which tells the daemon.
//!
//! There is no queue between them. The program's threads change the picture and wake the agent; the
//! agent compares the picture with what it has told. So nothing can overflow, and telling
//! everything again to a new daemon is the same work.
//!
//! The agent sends and uses the program's own descriptors and keeps none of them: a kept one would keep the
//! program's GPU memory after the program has closed its file. Sending happens under the
//! lock that `close` takes, so a number cannot change its meaning meanwhile.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::c_int,
    fmt::Write,
    io,
    os::fd::{AsFd, BorrowedFd, RawFd},
    ptr,
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicPtr, Ordering},
    },
    time::Duration,
};

use gpumux_rm::{
    branches,
    capture::{Call, Capture, Event, FileId, GroupId, Seen},
    layout::{Variant, engine},
};
use gpumux_wire::page::{Page, SLOTS};
use rustix::{
    event::{EventfdFlags, eventfd},
    process::{Pid, getpid},
};

use crate::{
    ground::{
        config::Config,
        control_files::{self, Kind},
        guard,
        notice::say,
        own::{self, OwnFd},
        wake,
    },
    memory::{reclaim, space},
    work,
};

/// How long the program's thread waits under `GPUMUX_STRICT=1` until the agent has an answer, or none: longer than the agent
/// itself waits, even where it is seldom run.
const STRICT_WAIT: Duration = Duration::from_secs(20);

/// Exit code of a process that must not run unmanaged.
pub(crate) const REFUSED_EXIT: i32 = 125;

/// One process's picture.
pub(crate) struct Process {
    /// A child that shares this memory (vfork) has another.
    pid: Pid,
    pub(crate) config: Config,
    picture: Mutex<Picture>,
    /// Whether the daemon's first answer is known.
    decided: Mutex<bool>,
    decision: Condvar,
}

/// What the process has.
#[derive(Default)]
pub(crate) struct Picture {
    capture: Capture,
    files: BTreeMap<RawFd, (FileId, Kind)>,
    next_file: FileId,
    /// The groups' names on the wire.
    keys: BTreeMap<GroupId, u32>,
    compute_keys: u32,
    /// Names of compute groups that went while their contexts did not: those that the driver makes in their place get them.
    vacant: BTreeSet<u32>,
    other_keys: u32,
    /// The agent's, from the first group on.
    agent: Option<&'static Agent>,
}

/// What the agent shares with the program's threads.
pub(crate) struct Agent {
    /// Where work is counted for the daemon.
    pub(crate) page: Page,
    pub(crate) page_file: OwnFd,
    pub(crate) wake: OwnFd,
}

impl Agent {
    fn new() -> io::Result<Self> {
        let mut page = None;
        let page_file = OwnFd::new(|| {
            let (made, file) = Page::create()?;
            page = Some(made);
            Ok(file)
        })?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            page: page.ok_or(io::ErrorKind::Other)?,
            page_file,
            wake: OwnFd::new(|| Ok(eventfd(0, flags)?))?,
        })
    }

    pub(crate) fn wake(&self) {
        wake::signal(&self.wake);
    }
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// This process's picture, made at its first use. `None` in a child that shares its parent's memory.
fn get() -> Option<&'static Process> {
    let mut process = PROCESS.load(Ordering::Acquire);
    if process.is_null() {
        let new = Box::into_raw(Box::new(Process {
            pid: getpid(),
            config: Config::read(),
            picture: Mutex::default(),
            decided: Mutex::new(false),
            decision: Condvar::new(),
        }));
        match PROCESS.compare_exchange(process, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                process = new;
                handle_forks();
            }
            Err(other) => {
                process = other;
                // SAFETY: it lost the race, so no other thread has seen it.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }
    // SAFETY: never freed: a picture is only replaced, in a child, by none.
    let process = unsafe { &*process };
    (process.pid == getpid()).then_some(process)
}

/// Registers the fork handlers, once in a family of processes: children inherit them.
fn handle_forks() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    extern "C" fn in_child() {
        // The parent's locks may be held by threads that do not exist here: begin anew.
        PROCESS.store(ptr::null_mut(), Ordering::Release);
        wake::in_child();
        own::in_child();
        work::in_child();
        space::in_child();
        reclaim::in_child();
        crate::memory::caches::in_child();
    }
    extern "C" fn before() {
        own::before_fork();
    }
    extern "C" fn after() {
        own::after_fork();
    }
    ONCE.call_once(|| {
        // SAFETY: the handlers live as long as the process: this library is never unloaded.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) };
    });
}

/// The structures of the kernel's driver.
static DRIVER: OnceLock<Variant> = OnceLock::new();

/// By its version; where a sandbox hides that (gVisor), by that of its library.
fn driver() -> Variant {
    let read = std::fs::read_to_string::<&str>;
    let version = read("/sys/module/nvidia/version").or_else(|_| {
        let maps = read("/proc/self/maps")?;
        io::Result::Ok(branches::of_library(&maps).unwrap_or_default().to_owned())
    });
    Variant::of(&version.unwrap_or_default())
}

/// Starts the agent's thread.
pub(crate) type Start = fn(&'static Process, &'static Agent) -> io::Result<()>;

/// An RM call that may matter has succeeded; with the first group, the agent starts.
pub(crate) fn called(fd: c_int, kind: Kind, nr: u8, arg: &[u8], start: Start) {
    let variant = match kind {
        Kind::Device => *DRIVER.get_or_init(driver),
        Kind::Emulated => Variant::default(),
    };
    let Some(call) = Call::decode(variant, nr, arg, read_memory) else {
        return;
    };
    let Some(process) = get() else { return };
    let mut picture = process.picture();
    let file = picture.file(fd, kind);
    let events = picture.capture.apply(file, &call);
    picture.name_groups(&events);
    if process.config.trace_rm {
        trace(&picture, fd, &call, &events);
    }
    if events.is_empty() {
        return;
    }
    let started = match picture.agent {
        Some(agent) => {
            agent.wake();
            false
        }
        None => process.start_agent(&mut picture, start),
    };
    drop(picture);
    if started && process.config.strict {
        process.await_decision();
    }
}

/// `fd` is about to be closed, or was closed unseen.
pub(crate) fn closing(fd: c_int) {
    if !control_files::may_be_known(fd) {
        return;
    }
    let Some(process) = get() else { return };
    control_files::forget(fd);
    let mut picture = process.picture();
    let Some((file, _)) = picture.files.remove(&fd) else {
        return;
    };
    let events = picture.capture.close(file);
    picture.name_groups(&events);
    if process.config.trace_rm && !events.is_empty() {
        say(format_args!("rm: fd {fd} closed: {events:?}"));
    }
    if let Some(agent) = picture.agent {
        agent.wake();
    }
}

/// Copies the program's memory at `address`. Only for calls that the driver has carried out: it has read
/// the same memory.
fn read_memory(address: u64, out: &mut [u8]) -> bool {
    if address == 0 {
        return false;
    }
    // SAFETY: the driver has just read these bytes for a call that succeeded.
    unsafe {
        ptr::copy_nonoverlapping(address as *const u8, out.as_mut_ptr(), out.len());
    }
    true
}

impl Process {
    pub(crate) fn picture(&self) -> MutexGuard<'_, Picture> {
        guard::lock(&self.picture)
    }

    fn start_agent(&'static self, picture: &mut Picture, start: Start) -> bool {
        let agent = match Agent::new() {
            Ok(agent) => Box::leak(Box::new(agent)),
            Err(error) => {
                self.give_up(format_args!("cannot begin a session: {error}"));
                return false;
            }
        };
        if let Err(error) = start(self, agent) {
            self.give_up(format_args!("cannot start a thread: {error}"));
            return false;
        }
        picture.agent = Some(agent);
        wake::set(&agent.wake);
        work::activate(&agent.page);
        true
    }

    /// There will be no daemon: says so, and ends the process if that is what was asked for.
    pub(crate) fn give_up(&self, why: std::fmt::Arguments<'_>) {
        if self.config.strict {
            say(format_args!(
                "{why}; not running without a daemon (GPUMUX_STRICT=1)"
            ));
            // SAFETY: ends the process at once, without its exit handlers, from any thread.
            unsafe { libc::_exit(REFUSED_EXIT) };
        }
        say(format_args!("{why}; running unmanaged"));
    }

    /// The daemon's first answer is known.
    pub(crate) fn decide(&self) {
        *guard::lock(&self.decided) = true;
        self.decision.notify_all();
    }

    fn await_decision(&self) {
        let decided = guard::lock(&self.decided);
        let waited = self
            .decision
            .wait_timeout_while(decided, STRICT_WAIT, |decided| !*decided);
        if waited.is_ok_and(|(_, waited)| waited.timed_out()) {
            self.give_up(format_args!("the session does not begin"));
        }
    }
}

impl Picture {
    /// The groups that exist, with their names.
    pub(crate) fn groups(&self) -> Vec<(GroupId, u32)> {
        self.capture
            .groups()
            .filter_map(|id| Some((id, *self.keys.get(&id)?)))
            .collect()
    }

    /// What is known of a group.
    pub(crate) fn group(&self, id: GroupId) -> Option<Seen> {
        self.capture.group(id)
    }

    /// See [`Capture::settle`].
    pub(crate) fn settle(&mut self, id: GroupId) {
        self.capture.settle(id);
    }

    /// The program's descriptor of a file, as long as the picture is locked.
    pub(crate) fn descriptor(&self, file: FileId) -> Option<(BorrowedFd<'_>, Kind)> {
        let (fd, (_, kind)) = self.files.iter().find(|(_, (id, _))| *id == file)?;
        // SAFETY: the program's `close` waits for the lock before it closes a listed number.
        Some((unsafe { BorrowedFd::borrow_raw(*fd) }, *kind))
    }

    fn file(&mut self, fd: RawFd, kind: Kind) -> FileId {
        let next = &mut self.next_file;
        let (file, _) = self.files.entry(fd).or_insert_with(|| {
            *next += 1;
            (*next, kind)
        });
        *file
    }

    /// Gives new groups their names. Compute groups get those that have a slot in the page, as
    /// long as there are any: only their work is counted.
    fn name_groups(&mut self, events: &[Event]) {
        for event in events {
            match event {
                Event::Made(id) => {
                    let Some(seen) = self.capture.group(*id) else {
                        continue;
                    };
                    let slots = SLOTS as u32;
                    let vacant = (seen.engine == engine::GR0).then(|| self.vacant.pop_first());
                    let key = if let Some(key) = vacant.flatten() {
                        work::group_made(key);
                        key
                    } else if seen.engine == engine::GR0 && self.compute_keys < slots {
                        self.compute_keys += 1;
                        work::group_made(self.compute_keys - 1);
                        self.compute_keys - 1
                    } else {
                        self.other_keys += 1;
                        slots + self.other_keys - 1
                    };
                    self.keys.insert(*id, key);
                }
                Event::Gone(id) => {
                    let key = self.keys.remove(id);
                    self.vacant.extend(key.filter(|key| work::group_gone(*key)));
                }
                _ => {}
            }
        }
    }
}

/// Handles in hexadecimal, as the driver's own tools print them; slices in decimal.
fn trace(picture: &Picture, fd: c_int, call: &Call, events: &[Event]) {
    let mut line = match call {
        Call::SetTimeslice { client, group, us } => {
            format!("rm: fd {fd} SetTimeslice {{ client: {client:x}, group: {group:x} }} {us} µs")
        }
        _ => format!("rm: fd {fd} {call:x?}"),
    };
    for event in events {
        let _ = write!(line, " -> {event:?}");
        if let Event::Ready(id) = event
            && let Some(seen) = picture.group(*id)
        {
            let (engine, group, us) = (seen.engine, seen.group, seen.timeslice_us);
            let _ = write!(line, " engine {engine}, {us} µs, {group:x?}");
        }
    }
    say(format_args!("{line}"));
}

/// Borrowed for the agent's poll.
impl AsFd for Agent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
