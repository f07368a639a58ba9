//! What a process has: its connection, its devices, and how handles name what it makes.

use std::{
    collections::BTreeMap,
    ops::Deref,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use gpumux_emu::{
    client::{ClientError, ProcessConnection},
    protocol::DeviceInfo,
};

use crate::{
    error::{CuError, Result},
    rm::Rm,
    system,
};

/// One device as this process sees it: another one of the server's after a move (see [`crate::checkpoint`]).
#[derive(Clone, Debug)]
pub(crate) struct Device {
    place: Arc<RwLock<&'static Place>>,
}

/// One device of the server's.
#[derive(Debug)]
pub(crate) struct Place {
    /// Its number in the server.
    pub(crate) index: u32,
    pub(crate) info: DeviceInfo,
}

impl Device {
    fn new(index: u32, info: DeviceInfo) -> Self {
        // As long as the process: what refers to it is kept across moves.
        let place: &'static Place = Box::leak(Box::new(Place { index, info }));
        Self {
            place: Arc::new(RwLock::new(place)),
        }
    }

    pub(crate) fn place(&self) -> &'static Place {
        *self.place.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_place(&self, place: &'static Place) {
        *self.place.write().unwrap_or_else(PoisonError::into_inner) = place;
    }
}

impl Deref for Device {
    type Target = Place;

    fn deref(&self) -> &Place {
        self.place()
    }
}

/// Everything of an initialised process.
pub(crate) struct Process {
    pub(crate) connection: Mutex<ProcessConnection>,
    pub(crate) rm: Mutex<Option<Rm>>,
    pub(crate) devices: Vec<Device>,
    host_calls: Mutex<mpsc::Sender<HostCall>>,
}

/// A call into the program that work has come to.
type HostCall = Box<dyn FnOnce() + Send>;

static PROCESS: OnceLock<Process> = OnceLock::new();
/// This is a child of a process that uses CUDA: nothing of it may be used here.
static FORKED: AtomicBool = AtomicBool::new(false);

/// What `cuInit` made.
pub(crate) fn process() -> Result<&'static Process> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(CuError::NOT_INITIALIZED);
    }
    PROCESS.get().ok_or(CuError::NOT_INITIALIZED)
}

/// The version of the server's profile; before `cuInit`, the one this library was written after.
pub(crate) fn driver_version() -> std::ffi::c_int {
    process()
        .ok()
        .and_then(|process| process.devices.first())
        .map_or(13_000, |device| device.info.cuda_version)
}

/// `cuInit`.
pub(crate) fn init(flags: u32) -> Result {
    static INITIALISING: Mutex<()> = Mutex::new(());
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if FORKED.load(Ordering::Relaxed) {
        return Err(CuError::NOT_INITIALIZED);
    }
    let _alone = lock(&INITIALISING);
    if PROCESS.get().is_none() {
        let made = start().inspect_err(explain)?;
        // SAFETY: the handler only stores to an atomic, which is allowed after a fork.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        let _ = PROCESS.set(made);
    }
    Ok(())
}

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(
        "there is no emulated device: {} is not set; start one with `gpumux emu serve`, or run the program by `gpumux emu -- PROGRAM`",
        gpumux_emu::SOCKET_VARIABLE
    )]
    NoSocket,
    #[error("{0} ({variable}={1}); is `gpumux emu serve` running?", variable = gpumux_emu::SOCKET_VARIABLE)]
    Client(ClientError, String),
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    #[error("CUDA_VISIBLE_DEVICES={0} names none of the emulated devices")]
    NoneVisible(String),
}

impl From<&StartError> for CuError {
    fn from(_: &StartError) -> Self {
        Self::NO_DEVICE
    }
}

impl From<StartError> for CuError {
    fn from(error: StartError) -> Self {
        (&error).into()
    }
}

/// Says it once, however often a program tries.
fn explain(why: &StartError) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        eprintln!("gpumux: {why}");
    }
}

fn start() -> std::result::Result<Process, StartError> {
    let socket = system::socket_path().ok_or(StartError::NoSocket)?;
    let lost = |error| StartError::Client(error, socket.display().to_string());
    let connection = ProcessConnection::open(&socket).map_err(lost)?;
    let devices = connection.devices().map_err(lost)?;
    let all: Vec<Device> = (0..)
        .zip(devices)
        .filter(|(_, info)| !info.gone)
        .map(|(index, info)| Device::new(index, info))
        .collect();
    let list = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let devices = visible(&all, list.as_deref());
    if let (Some(list), true) = (list, devices.is_empty()) {
        return Err(StartError::NoneVisible(list));
    }
    let (host_calls, queue) = mpsc::channel::<HostCall>();
    spawn("cuda-host-calls", move || {
        queue.into_iter().for_each(|call| call())
    })
    .map_err(StartError::Thread)?;
    Ok(Process {
        connection: Mutex::new(connection),
        rm: Mutex::new(None),
        devices,
        host_calls: Mutex::new(host_calls),
    })
}

/// The devices that `CUDA_VISIBLE_DEVICES` lists, by number or by (the start of) UUID, up to the first
/// that does not exist; without a list all. Partitioned GPUs are none; a MIG instance is seen by its UUID, or where there
/// is no other device, the first as number 0. A process that sees an instance sees nothing else.
fn visible(devices: &[Device], list: Option<&str>) -> Vec<Device> {
    let is_instance = |device: &&Device| device.info.instance.is_some();
    let is_whole = |device: &&Device| !is_instance(device) && !device.info.mig_mode;
    let mut numbered: Vec<&Device> = devices.iter().filter(is_whole).collect();
    if numbered.is_empty() {
        numbered.extend(devices.iter().find(is_instance));
    }
    let chosen: Vec<&Device> = match list {
        None => numbered,
        Some(list) => list
            .split(',')
            .map(str::trim)
            .map_while(|name| match name.parse::<usize>() {
                Ok(number) => numbered.get(number).copied(),
                Err(_) if name.starts_with("GPU-") || name.starts_with("MIG-") => devices
                    .iter()
                    .filter(|device| is_instance(device) || is_whole(device))
                    .find(|device| device.info.uuid_text().starts_with(name)),
                Err(_) => None,
            })
            .collect(),
    };
    let first = chosen.first().filter(|first| is_instance(first)).copied();
    let whole = chosen.iter().copied().filter(is_whole);
    match first {
        Some(instance) => vec![instance.clone()],
        None => whole.cloned().collect(),
    }
}

impl Process {
    pub(crate) fn device(&self, ordinal: i32) -> Result<&Device> {
        usize::try_from(ordinal)
            .ok()
            .and_then(|ordinal| self.devices.get(ordinal))
            .ok_or(CuError::INVALID_DEVICE)
    }

    /// Runs a call into the program, on the thread that is for that.
    pub(crate) fn call_host(&self, call: impl FnOnce() + Send + 'static) {
        let _ = lock(&self.host_calls).send(Box::new(call));
    }
}

/// Starts a thread of ours inside the program: the program's signals are for its own threads.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    // SAFETY: an empty set of bits is a signal set; it is filled before it is used.
    let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: both sets are valid for the calls. The mask is inherited by the new thread.
    unsafe {
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
    }
    let started = thread::Builder::new().name(name.into()).spawn(body);
    // SAFETY: the set was stored by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    started.map(drop)
}

/// Locks; what a panicking thread left is used as it is.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Things by handle. A wrong handle finds nothing, nor does any before [`init`].
pub(crate) struct Registry<T> {
    things: Mutex<BTreeMap<usize, Arc<T>>>,
}

impl<T> Registry<T> {
    /// Far from the small numbers that have meanings of their own, and from mapped memory.
    const FIRST: usize = 0x2000_0000;

    pub(crate) const fn new() -> Self {
        Self {
            things: Mutex::new(BTreeMap::new()),
        }
    }

    pub(crate) fn add(&self, thing: Arc<T>) -> usize {
        let handle = self.reserve();
        self.put(handle, thing);
        handle
    }

    /// A handle for something that is not made yet. No two things have the same, of whatever kind they are.
    pub(crate) fn reserve(&self) -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        Self::FIRST + NEXT.fetch_add(1, Ordering::Relaxed) * 16
    }

    pub(crate) fn put(&self, handle: usize, thing: Arc<T>) {
        lock(&self.things).insert(handle, thing);
    }

    pub(crate) fn get(&self, handle: usize) -> Result<Arc<T>> {
        process()?;
        lock(&self.things)
            .get(&handle)
            .cloned()
            .ok_or(CuError::INVALID_HANDLE)
    }

    pub(crate) fn entries(&self) -> Vec<(usize, Arc<T>)> {
        let things = lock(&self.things);
        let entries = things
            .iter()
            .map(|(handle, thing)| (*handle, Arc::clone(thing)));
        entries.collect()
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        lock(&self.things).values().cloned().collect()
    }

    pub(crate) fn remove(&self, handle: usize) -> Result<Arc<T>> {
        process()?;
        lock(&self.things)
            .remove(&handle)
            .ok_or(CuError::INVALID_HANDLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumux_emu::Profile;

    fn devices(profile: &str) -> Vec<Device> {
        let infos = Profile::parse(profile).unwrap().infos();
        let of = |(index, info)| Device::new(index, info);
        (0..).zip(infos).map(of).collect()
    }

    fn numbers(all: &[Device], list: Option<&str>) -> Vec<u32> {
        visible(all, list).iter().map(|it| it.index).collect()
    }

    #[test]
    fn visible_devices_are_chosen_and_ordered_as_cuda_does() {
        let all = devices("devices = 3");
        let uuid = all[1].info.uuid_text();
        for (list, expected) in [
            ("0,1,2", vec![0, 1, 2]),
            ("2, 0", vec![2, 0]),
            ("1,7,0", vec![1]),
            ("", vec![]),
            ("-1", vec![]),
            (uuid.as_str(), vec![1]),
            (&uuid[..12], vec![1]),
            ("GPU-nonsense,0", vec![]),
        ] {
            assert_eq!(numbers(&all, Some(list)), expected, "{list}");
        }
        assert_eq!(numbers(&all, None), [0, 1, 2]);
    }

    #[test]
    fn one_mig_instance_is_seen_alone() {
        // GPUs 0 and 1; instances 2 and 3 of GPU 0.
        let all = devices("devices = 2\nmig = [['1g.10gb', '2g.20gb']]");
        let uuid = |at: usize| all[at].info.uuid_text();
        let (gpu, whole, second) = (uuid(0), uuid(1), uuid(3));
        assert_eq!(numbers(&all, None), [1], "the whole one");
        for (list, expected) in [
            (second.clone(), vec![3]),
            (format!("{second},{}", uuid(2)), vec![3]),
            (format!("{whole},{second}"), vec![1]),
            (format!("{second},{whole}"), vec![3]),
            (gpu, vec![]),
            ("0".to_owned(), vec![1]),
        ] {
            assert_eq!(numbers(&all, Some(&list)), expected, "{list}");
        }
        let all = devices("mig = [['1g.10gb', '2g.20gb']]");
        assert_eq!(numbers(&all, None), [1], "the first");
        assert_eq!(numbers(&all, Some("0,1")), [1]);
    }

    #[test]
    fn handles_are_not_used_twice() {
        let registry = Registry::new();
        let first = registry.add(Arc::new(1));
        assert_eq!(registry.entries(), [(first, Arc::new(1))]);
        assert_eq!(registry.get(first), Err(CuError::NOT_INITIALIZED));
        lock(&registry.things).remove(&first);
        assert_ne!(registry.add(Arc::new(2)), first);
    }
}
