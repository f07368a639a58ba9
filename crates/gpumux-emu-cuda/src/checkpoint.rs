//! The driver's checkpoint calls: another process locks this one, takes it off its devices, and restores it, on the same devices or, with
//! pairs of UUIDs, on others.
//!
//! A thread of the process listens at a socket of its own, as the real library's does, and carries out what the calling process sends.
//! Locked, the process's calls of CUDA wait until it is unlocked. Handles and addresses stay; an ordinal names the new device.
//! As measured on H100s (driver 580.159.04): every device that the process sees must be in the list of pairs.

use std::{
    ffi::{c_int, c_uint},
    io::{Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::{
        Arc, Once,
        atomic::{AtomicU8, Ordering},
    },
    time::{Duration, Instant},
};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    border::{In, Out, exports, unlocked},
    context::{CONTEXTS, Context},
    error::{CuError, Result},
    locked, memory,
    process::{Place, Process, lock, process, spawn},
    rm::Rm,
};

/// `CU_PROCESS_STATE_…`. There is a fourth, of a process that failed for good; on this device none does.
const RUNNING: u8 = 0;
const LOCKED: u8 = 1;
const CHECKPOINTED: u8 = 2;

/// Most devices of a process.
const MOST: usize = 16;
/// Pause between looks at work that is to end.
const LOOK: Duration = Duration::from_millis(1);
/// How long an answer may take: far longer than a process's memory needs.
const ANSWER: Duration = Duration::from_secs(600);

static STATE: AtomicU8 = AtomicU8::new(RUNNING);

// ---- The calling process -------------------------------------------------------------------------

/// `CUcheckpointLockArgs`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LockArgs {
    timeout_ms: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 7],
}

/// `CUcheckpointCheckpointArgs`, `CUcheckpointUnlockArgs`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NoArgs([u64; 8]);

/// `CUcheckpointGpuPair`: two UUIDs.
type Pair = [u8; 32];

/// `CUcheckpointRestoreArgs`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RestoreArgs {
    pairs: In<Pair>,
    count: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 6],
}

/// What is to be done, by the calls' order.
const GET_STATE: u32 = 0;
const LOCK: u32 = 1;
const CHECKPOINT: u32 = 2;
const RESTORE: u32 = 3;
const UNLOCK: u32 = 4;

/// From the calling process to the other one.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Request {
    what: u32,
    timeout_ms: u32,
    count: u64,
    pairs: [Pair; MOST],
}

/// The answer: an error, and the process's state.
type Reply = [u8; 8];

fn address(pid: u32) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("gpumux-emu-checkpoint-{pid}"))
}

/// Has the process do something; its state.
fn ask(pid: c_int, request: &Request) -> Result<u8> {
    let ask = || {
        let mut socket = UnixStream::connect_addr(&address(pid.unsigned_abs())?)?;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.write_all(request.as_bytes())?;
        let mut reply: Reply = [0; 8];
        socket.read_exact(&mut reply)?;
        Ok::<_, std::io::Error>(reply)
    };
    // No process that uses CUDA, or it has ended.
    let [a, b, c, d, state, ..] = ask().map_err(|_| CuError::INVALID_VALUE)?;
    match i32::from_le_bytes([a, b, c, d]) {
        0 => Ok(state),
        error => Err(CuError(error)),
    }
}

fn order(pid: c_int, what: u32) -> Result {
    let request = Request {
        what,
        ..Request::default()
    };
    ask(pid, &request).map(drop)
}

/// The arguments, where there are any.
fn given<T: Copy>(args: In<T>) -> Option<T> {
    args.get().ok()
}

fn no_args(args: In<NoArgs>) -> Result {
    match given(args) {
        Some(args) if args.0 != [0; 8] => Err(CuError::INVALID_VALUE),
        _ => Ok(()),
    }
}

fn lock_process(pid: c_int, args: In<LockArgs>) -> Result {
    let args = given(args);
    if args.is_some_and(|it| it.reserved0 != 0 || it.reserved1 != [0; 7]) {
        return Err(CuError::INVALID_VALUE);
    }
    let request = Request {
        what: LOCK,
        timeout_ms: args.map_or(0, |it| it.timeout_ms),
        ..Request::default()
    };
    ask(pid, &request).map(drop)
}

fn restore_process(pid: c_int, args: In<RestoreArgs>) -> Result {
    let mut request = Request {
        what: RESTORE,
        ..Request::default()
    };
    if let Some(args) = given(args) {
        let count = args.count as usize;
        if args.reserved0 != 0 || args.reserved1 != [0; 6] || count > MOST {
            return Err(CuError::INVALID_VALUE);
        }
        request.count = count as u64;
        for (at, pair) in request.pairs[..count].iter_mut().enumerate() {
            *pair = args.pairs.get_at(at)?;
        }
    }
    ask(pid, &request).map(drop)
}

exports! { FUNCTIONS by unlocked;
    cuCheckpointProcessGetState(pid: c_int, state: Out<c_int>) => {
        state.check()?;
        let request = Request { what: GET_STATE, ..Request::default() };
        state.put(ask(pid, &request)?.into())
    };
    // Every process's own thread restores it.
    cuCheckpointProcessGetRestoreThreadId(pid: c_int, thread: Out<c_int>) => thread.put(pid);
    cuCheckpointProcessLock(pid: c_int, args: In<LockArgs>) => lock_process(pid, args);
    cuCheckpointProcessCheckpoint(pid: c_int, args: In<NoArgs>) => { no_args(args)?; order(pid, CHECKPOINT) };
    cuCheckpointProcessRestore(pid: c_int, args: In<RestoreArgs>) => restore_process(pid, args);
    cuCheckpointProcessUnlock(pid: c_int, args: In<NoArgs>) => { no_args(args)?; order(pid, UNLOCK) };
}

// ---- The process that is checkpointed ------------------------------------------------------------

/// Begins to listen, once. Without the socket, this process cannot be checkpointed.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let listener = address(std::process::id()).and_then(|at| UnixListener::bind_addr(&at));
        if let Ok(listener) = listener {
            let _ = spawn("cuda-checkpoint", move || {
                for mut socket in listener.incoming().flatten() {
                    let _ = serve(&mut socket);
                }
            });
        }
    });
}

/// One request. Only root, and processes of the same user, may make any.
fn serve(socket: &mut UnixStream) -> std::io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(&*socket)?.uid;
    if !peer.is_root() && peer != rustix::process::geteuid() {
        return Ok(());
    }
    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut request = Request::default();
    socket.read_exact(request.as_mut_bytes())?;
    let error = carry_out(&request).err().map_or(0, |error| error.0);
    let mut reply: Reply = [0; 8];
    reply[..4].copy_from_slice(&error.to_le_bytes());
    reply[4] = STATE.load(Ordering::SeqCst);
    socket.write_all(&reply)
}

fn carry_out(request: &Request) -> Result {
    let process = process()?;
    let state = STATE.load(Ordering::SeqCst);
    let next = match (request.what, state) {
        (GET_STATE, _) => return Ok(()),
        (LOCK, RUNNING) => {
            close(request.timeout_ms)?;
            LOCKED
        }
        (CHECKPOINT, LOCKED) => {
            checkpoint(process)?;
            CHECKPOINTED
        }
        (RESTORE, CHECKPOINTED) => {
            let count = usize::try_from(request.count).unwrap_or(usize::MAX);
            restore(process, request.pairs.get(..count).unwrap_or_default())?;
            LOCKED
        }
        (UNLOCK, LOCKED) => {
            locked::open();
            RUNNING
        }
        _ => return Err(CuError::ILLEGAL_STATE),
    };
    STATE.store(next, Ordering::SeqCst);
    Ok(())
}

/// Lets no call in any more, and waits for those that have begun and for all work.
fn close(timeout_ms: u32) -> Result {
    let timeout = match timeout_ms {
        0 => ANSWER,
        ms => Duration::from_millis(ms.into()),
    };
    let deadline = Instant::now() + timeout;
    locked::close();
    let ends = |context: &Arc<Context>| context.is_idle();
    while locked::is_occupied() || !CONTEXTS.all().iter().all(ends) {
        if Instant::now() >= deadline {
            locked::open();
            return Err(CuError::NOT_READY);
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Takes the process off its devices.
fn checkpoint(process: &Process) -> Result {
    let contexts = CONTEXTS.all();
    for context in &contexts {
        context.check()?;
    }
    let peers = |context: &Arc<Context>| context.peers.load(Ordering::Relaxed) != 0;
    let mut rm = lock(&process.rm);
    let in_group = rm.as_ref().is_some_and(Rm::is_in_group);
    if locked::has_shared() || in_group || !memory::is_movable() || contexts.iter().any(peers) {
        return Err(CuError::NOT_SUPPORTED);
    }
    memory::detach()?;
    if let Some(rm) = rm.take() {
        contexts.iter().for_each(|context| context.suspend(&rm));
    }
    Ok(())
}

/// Puts the process on its devices, each of a pair in the place of the other one.
fn restore(process: &Process, pairs: &[Pair]) -> Result {
    let before: Vec<&'static Place> = process.devices.iter().map(|it| it.place()).collect();
    let after = match pairs.is_empty() {
        true => before.clone(),
        false => permuted(&before, pairs).ok_or(CuError::INVALID_VALUE)?,
    };
    put(process, &after);
    let restored = make(process, &before, &after);
    if restored.is_err() {
        put(process, &before);
    }
    restored
}

fn put(process: &Process, places: &[&'static Place]) {
    for (device, place) in process.devices.iter().zip(places) {
        device.set_place(place);
    }
}

fn make(process: &Process, before: &[&'static Place], after: &[&'static Place]) -> Result {
    let contexts = CONTEXTS.all();
    let mut held = lock(&process.rm);
    if !contexts.is_empty() {
        let rm = held.insert(Rm::open()?);
        for (at, context) in contexts.iter().enumerate() {
            if let Err(error) = context.resume(rm) {
                contexts[..at].iter().for_each(|it| it.suspend(rm));
                *held = None;
                return Err(error);
            }
        }
    }
    let now = |index: u32| {
        let at = before.iter().position(|it| it.index == index);
        at.map_or(index, |at| after[at].index)
    };
    memory::attach(now).inspect_err(|_| {
        if let Some(rm) = held.take() {
            contexts.iter().for_each(|context| context.suspend(&rm));
        }
    })
}

/// The places that devices have by these pairs; none: the pairs do not name every device once on either side.
fn permuted(before: &[&'static Place], pairs: &[Pair]) -> Option<Vec<&'static Place>> {
    let named = |uuid: &[u8]| before.iter().find(|it| it.info.uuid == uuid).copied();
    let after: Option<Vec<&Place>> = (before.iter())
        .map(|old| {
            let pair = pairs.iter().find(|it| it[..16] == old.info.uuid)?;
            named(&pair[16..])
        })
        .collect();
    let after = after.filter(|_| pairs.len() == before.len())?;
    let once = |old: &&'static Place| after.iter().filter(|it| it.index == old.index).count() == 1;
    before.iter().all(once).then_some(after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumux_emu::Profile;

    fn places() -> Vec<&'static Place> {
        let infos = Profile::parse("devices = 3").unwrap().infos();
        let place = |(index, info)| &*Box::leak(Box::new(Place { index, info }));
        (0..).zip(infos).map(place).collect()
    }

    fn pair(all: &[&Place], old: usize, new: usize) -> Pair {
        let mut pair = [0; 32];
        pair[..16].copy_from_slice(&all[old].info.uuid);
        pair[16..].copy_from_slice(&all[new].info.uuid);
        pair
    }

    #[test]
    fn pairs_must_name_every_visible_device_once() {
        let all = places();
        let of = |pairs: &[(usize, usize)]| {
            let pairs: Vec<Pair> = pairs.iter().map(|(a, b)| pair(&all, *a, *b)).collect();
            let after = permuted(&all, &pairs)?;
            Some(after.iter().map(|it| it.index).collect::<Vec<_>>())
        };
        assert_eq!(of(&[(0, 1), (1, 0), (2, 2)]), Some(vec![1, 0, 2]));
        assert_eq!(of(&[(2, 0), (1, 2), (0, 1)]), Some(vec![1, 2, 0]));
        assert_eq!(of(&[(0, 1)]), None, "two devices are missing");
        assert_eq!(of(&[(0, 1), (1, 1), (2, 2)]), None, "one twice");
        assert_eq!(of(&[(0, 1), (0, 2), (2, 0)]), None, "one is missing");
    }
}
