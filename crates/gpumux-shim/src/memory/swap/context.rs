//! What moving memory needs of each context: a stream and memory to try copies out with; and that contexts end meanwhile.

use std::{
    collections::BTreeMap,
    ptr,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{calls::*, host, host::map};
use crate::{
    ground::{
        context::within,
        driver::CUstream,
        gate,
        guard::{lock, lock_by},
    },
    memory::block::GRAIN,
    work,
};

/// How long a context may take to end before a move is given up.
const SOON: Duration = Duration::from_secs(1);

/// Contexts that are gone, by handle: another may get the same.
pub(super) static GONE: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Held while the thread that moves memory enters contexts although the gate is open.
pub(super) static PREPARING: Mutex<()> = Mutex::new(());

/// A lock, but not waited for long: its holder may wait for the device.
pub(super) fn lock_soon(mutex: &'static Mutex<()>) -> Option<MutexGuard<'static, ()>> {
    lock_by(mutex, Instant::now() + SOON)
}

/// Calls the driver in a context, by the thread that moves memory; none: the context or the process is ending.
pub(crate) fn in_context<R>(context: u64, work: impl FnOnce() -> R) -> Option<R> {
    let _moving = gate::begin_move()?;
    let _alone = lock_soon(&PREPARING)?;
    within(context, work)
}

/// What moving a context's memory needs of the device.
#[derive(Clone, Copy, Default)]
pub(super) struct Tools {
    /// Device memory to try copies out with. Freeing it would wait for the device.
    memory: u64,
    stream: usize,
    /// The stream has copied in both directions: nothing is left to be set up when the device is frozen.
    tried: bool,
}

/// By context.
pub(super) static TOOLS: Mutex<BTreeMap<u64, Tools>> = Mutex::new(BTreeMap::new());
/// The last context for which they were made.
pub(super) static READY: AtomicU64 = AtomicU64::new(0);

/// Makes what moving memory of the current context needs, which is this one. With the context's first memory: when that moves, the device
/// may be full, and then the driver has none.
pub(crate) fn make_tools(context: u64) -> Result<(), String> {
    /// `CU_STREAM_NON_BLOCKING`
    const NON_BLOCKING: u32 = 1;
    if READY.load(Ordering::Acquire) == context {
        return Ok(());
    }
    let mut all = lock(&TOOLS);
    let it = all.entry(context).or_default();
    if it.memory == 0 {
        call!(mem_alloc, &raw mut it.memory, GRAIN as usize)?;
    }
    if it.stream == 0 {
        let mut stream = ptr::null_mut();
        call!(stream_create, &raw mut stream, NON_BLOCKING)?;
        it.stream = stream as usize;
    }
    if !it.tried {
        try_out(*it)?;
        it.tried = true;
    }
    READY.store(context, Ordering::Release);
    Ok(())
}

/// The streams for copies, by context.
pub(super) fn streams() -> BTreeMap<u64, CUstream> {
    let all = lock(&TOOLS);
    let tried = all.iter().filter(|(_, it)| it.tried);
    tried.map(|(id, it)| (*id, it.stream as CUstream)).collect()
}

pub(super) fn stream(context: u64) -> Result<CUstream, String> {
    let all = lock(&TOOLS);
    let own = all.get(&context).filter(|it| it.tried);
    own.map(|it| it.stream as CUstream)
        .ok_or_else(|| "a context is new".into())
}

/// Waits until no copy is under way any more; what each context says of its own.
pub(super) fn await_copies() -> Vec<(u64, Result<(), String>)> {
    let streams = streams().into_iter();
    let all = streams.map(|(context, stream)| {
        // Once more, because nothing may be taken from under a copy; a context that is gone has none.
        let wait =
            || call!(stream_synchronize, stream).or_else(|_| call!(stream_synchronize, stream));
        (context, within(context, wait).unwrap_or(Ok(())))
    });
    all.collect()
}

/// Whether a context can do nothing any more but tell its error, which may also be that its device is lost.
pub(super) fn is_broken(context: u64) -> bool {
    // `CUDA_ERROR_DEVICE_UNAVAILABLE`, `UNKNOWN`
    let is_lost = |it| matches!(it, 46 | 999);
    let Ok(stream) = stream(context) else {
        return false;
    };
    // SAFETY: a stream of ours, in its context.
    let query = || Some(unsafe { stream_query()?(stream) });
    let answer = within(context, query).flatten();
    answer.is_some_and(|it| work::is_fatal(it) || is_lost(it))
}

/// Copies in both directions.
pub(super) fn try_out(Tools { memory, stream, .. }: Tools) -> Result<(), String> {
    let (stream, bytes) = (stream as CUstream, GRAIN as usize);
    let host = map(bytes, None).map_err(|error| format!("the host has no room: {error}"))?;
    host::advise(host, bytes);
    let copied = call!(host_register, host, bytes, 1).and_then(|()| {
        let copied = call!(to_device, memory, host, bytes, stream)
            .and_then(|()| call!(to_host, host, memory, bytes, stream));
        let done = copied.and(call!(stream_synchronize, stream));
        done.and(call!(host_unregister, host))
    });
    // SAFETY: made above, known to no other thread, and not registered any more but where the context has failed for good.
    let _ = unsafe { rustix::mm::munmap(host, bytes) };
    copied
}

/// A context is gone.
pub(crate) fn forget_context(context: u64) {
    lock(&GONE).push(context);
    let mut all = lock(&TOOLS);
    all.remove(&context);
    // Another may get the same handle.
    let _ = READY.compare_exchange(context, 0, Ordering::AcqRel, Ordering::Acquire);
}

/// A context is about to be destroyed by a call that leaves its streams.
pub(crate) fn end_context(context: u64) {
    let own = lock(&TOOLS).get(&context).map(|it| it.stream);
    if let Some(stream) = own.filter(|it| *it != 0) {
        let _ = within(context, || call!(stream_destroy, stream as CUstream));
    }
    forget_context(context);
}

/// Does what may end a context, while the thread that moves memory is in none. To be called inside the gate: behind a closed one that
/// thread enters contexts at any time.
pub(crate) fn without_preparing<R>(work: impl FnOnce() -> R) -> R {
    let _alone = lock(&PREPARING);
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_context_leaves_no_tools_to_another_of_its_handle() {
        const CONTEXT: u64 = 0xe4d;
        let tools = Tools {
            memory: 1,
            stream: 2,
            tried: true,
        };
        lock(&TOOLS).insert(CONTEXT, tools);
        READY.store(CONTEXT, Ordering::Release);
        end_context(CONTEXT);
        assert!(stream(CONTEXT).is_err());
        assert_ne!(READY.load(Ordering::Acquire), CONTEXT);
    }
}
