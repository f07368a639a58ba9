//! Streams, and the calls that put work into them: launches go through [`Stream::submit`], which records
//! instead while the stream is captured.

use std::sync::{Arc, Weak};

use gpumux_emu::protocol::{Queue, Work};

use crate::{
    border::{self, HostCall, HostFunction, StreamCallback, UserData},
    capture::Slot,
    context::{Context, DefaultStream, current},
    device,
    effect::Effect,
    error::{CuError, Result},
    fault, memory,
    op::Op,
    pool,
    process::{Registry, lock},
};

/// `CU_STREAM_DEFAULT`: waits for the legacy stream.
const BLOCKING: u32 = 0;
/// `CU_STREAM_NON_BLOCKING`
pub(crate) const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;
/// Highest priority; the lowest is 0.
pub(crate) const HIGHEST_PRIORITY: i8 = -5;

/// A stream is made of device memory: where less than this is free, the driver answers that there is none (seen on a full H200; how
/// much it needs is not known, and it takes what the profile has).
const STREAM: usize = 2 << 20;

/// Copies from memory that is not pinned take up to so many bytes at once, so that the program can go on. The compute group
/// makes them, and they may arrive later than the call returns (measured on an H100).
const STAGED: u64 = 64 << 10;
/// From this size on a copy from pinned memory is the copy engine's (measured on an H100: 24 KiB are not, 32 KiB are).
const INLINED: u64 = 32 << 10;

/// A stream.
pub(crate) struct Stream {
    pub(crate) id: u64,
    context: Weak<Context>,
    pub(crate) flags: u32,
    pub(crate) priority: i8,
    /// Its part of a capture.
    pub(crate) capture: Arc<Slot>,
    /// What it takes of the device.
    memory: Option<u64>,
}

static STREAMS: Registry<Stream> = Registry::new();

impl Stream {
    pub(crate) fn new(context: &Arc<Context>, flags: u32, priority: i8) -> Self {
        Self {
            id: context.add_stream(flags == BLOCKING, priority),
            context: Arc::downgrade(context),
            flags,
            priority,
            capture: Arc::default(),
            memory: None,
        }
    }

    /// One that every context has.
    fn of_context(context: &Arc<Context>, of: DefaultStream) -> Arc<Self> {
        Arc::new(Self {
            id: of.id,
            context: Arc::downgrade(context),
            flags: BLOCKING,
            priority: 0,
            capture: of.capture,
            memory: None,
        })
    }

    pub(crate) fn context(&self) -> Result<Arc<Context>> {
        self.context.upgrade().ok_or(CuError::CONTEXT_IS_DESTROYED)
    }

    /// Submits one piece of work, or records it.
    pub(crate) fn submit(&self, op: Op) -> Result {
        if let Some(lane) = &*lock(&self.capture) {
            return lane.record(op);
        }
        self.context()?.submit(vec![(self.id, op)]).map(drop)
    }

    /// Submits one piece of work. `wait`: it is done on return.
    pub(crate) fn complete(&self, op: Op, wait: bool) -> Result {
        self.submit(Op { prompt: wait, ..op })?;
        if wait {
            self.synchronize()?;
        }
        Ok(())
    }

    /// Waits in stream order until something outside of the context is so.
    pub(crate) fn wait_until(
        &self,
        reached: impl Fn() -> Result<bool> + Send + Sync + 'static,
    ) -> Result {
        let context = self.context()?;
        self.submit(Op::waiting(move || context.wait_until(&reached)))
    }

    pub(crate) fn is_captured(&self) -> bool {
        lock(&self.capture).is_some()
    }

    /// Fails, and spoils the capture, when the stream is captured.
    pub(crate) fn not_captured(&self) -> Result {
        match &*lock(&self.capture) {
            Some(lane) => {
                lane.invalidate();
                Err(CuError::STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    pub(crate) fn synchronize(&self) -> Result {
        self.not_captured()?;
        self.context()?.synchronize_stream(self.id)
    }
}

/// The stream of a handle; small numbers are the current context's own streams.
pub(crate) fn stream(handle: usize) -> Result<Arc<Stream>> {
    let per_thread = match handle {
        0 => border::is_per_thread(),
        LEGACY | PER_THREAD => handle == PER_THREAD,
        _ => return STREAMS.get(handle),
    };
    let context = current()?;
    let own = match per_thread {
        true => context.per_thread(),
        false => context.legacy.clone(),
    };
    Ok(Stream::of_context(&context, own))
}

pub(crate) fn create(flags: u32, priority: i32) -> Result<usize> {
    let context = current()?;
    context.check()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if device::memory_info()?.0 < STREAM {
        return Err(CuError::OUT_OF_MEMORY);
    }
    let priority = priority.clamp(HIGHEST_PRIORITY.into(), 0) as i8;
    let memory = match context.device.info.stream_memory {
        0 => None,
        bytes => Some(memory::alloc(
            context.device.index,
            context.handle(),
            bytes,
        )?),
    };
    Ok(STREAMS.add(Arc::new(Stream {
        memory,
        ..Stream::new(&context, flags, priority)
    })))
}

pub(crate) fn destroy(handle: usize) -> Result {
    let stream = STREAMS.remove(handle)?;
    if let Ok(context) = stream.context() {
        context.end_stream(stream.id);
        if let Some(memory) = stream.memory {
            memory::free(memory)?;
        }
    }
    Ok(())
}

pub(crate) fn query(handle: usize) -> Result {
    let stream = stream(handle)?;
    stream.not_captured()?;
    match stream.context()?.query(stream.id)? {
        true => Ok(()),
        false => Err(CuError::NOT_READY),
    }
}

pub(crate) fn synchronize(handle: usize) -> Result {
    stream(handle)?.synchronize()
}

pub(crate) fn launch_host(handle: usize, function: HostFunction, data: UserData) -> Result {
    let call = HostCall::function(function, data)?;
    stream(handle)?.submit(Op::following(Work::Host, Effect::Host(call)))
}

pub(crate) fn add_callback(
    handle: usize,
    callback: StreamCallback,
    data: UserData,
    flags: u32,
) -> Result {
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let stream = stream(handle)?;
    stream.not_captured()?;
    let call = HostCall::callback(callback, handle, data)?;
    stream.submit(Op::following(Work::Host, Effect::Host(call)))
}

/// Between what a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToDevice,
    ToHost,
    InDevice,
    /// Told by the addresses.
    Any,
}

/// Copies memory. `wait`: the copy is done on return.
pub(crate) fn copy(
    to: u64,
    from: u64,
    bytes: usize,
    direction: Direction,
    stream_handle: usize,
    wait: bool,
) -> Result {
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    context.check()?;
    let bytes = bytes as u64;
    if bytes == 0 {
        return Ok(());
    }
    let (to_device, from_device, to_reached, from_reached) = {
        let space = memory::space();
        if space.is_unmapped(to, bytes) || space.is_unmapped(from, bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        let is_device = |at| space.is_device(at, bytes) || space.is_graphs(at, bytes);
        let (is_to, is_from) = (is_device(to), is_device(from));
        let reached = |at, is_device: bool| is_device || space.is_pinned(at, bytes);
        (is_to, is_from, reached(to, is_to), reached(from, is_from))
    };
    let pinned = to_reached && from_reached;
    // Pinned memory has addresses of the device's, too.
    let fits = match direction {
        Direction::ToDevice => to_reached,
        Direction::ToHost => from_reached,
        Direction::InDevice => pinned,
        Direction::Any => true,
    };
    if !fits || to == 0 || from == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let queue = match (to_device, from_device) {
        (true, true) => Queue::Compute,
        (true, false) if bytes < INLINED || !pinned && bytes <= STAGED => Queue::Compute,
        (true, false) => Queue::HostToDevice,
        (false, _) => Queue::DeviceToHost,
    };
    let captured = stream.is_captured();
    if wait {
        stream.not_captured()?;
    }
    let effect = if !pinned && !captured && to_device && bytes <= STAGED {
        border::program_bytes(from, bytes as usize).map(|data| Effect::Write {
            to,
            data: data.into(),
        })?
    } else {
        Effect::Copy {
            to,
            from,
            bytes,
            to_device,
            from_device,
        }
    };
    // What is not pinned is copied before the call returns, unless it was taken already: then nothing waits, also not a call
    // that is named synchronous.
    let wait = matches!(effect, Effect::Copy { .. }) && (wait || (!pinned && !captured));
    // A rest of unknown length does not end.
    let (work, effect) = match fault::due(fault::At::Copy) {
        Some(_) => (Work::Rest { sms: 1 }, Effect::Nothing),
        None => (Work::Copy { bytes }, effect),
    };
    stream.complete(Op::on(queue, work, effect), wait)
}

/// Fills memory with elements of `width` bytes. `wait`: memory that the program looks at by itself is filled on return.
pub(crate) fn set(
    to: u64,
    width: u64,
    value: u32,
    count: usize,
    stream_handle: usize,
    wait: bool,
) -> Result {
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    context.check()?;
    let count = count as u64;
    let bytes = count.checked_mul(width).ok_or(CuError::INVALID_VALUE)?;
    if bytes == 0 {
        return Ok(());
    }
    let known = {
        let space = memory::space();
        space.is_reachable(to, bytes) || space.is_graphs(to, bytes)
    };
    if !to.is_multiple_of(width) || !known {
        return Err(CuError::INVALID_VALUE);
    }
    let info = &context.device.info;
    let work = Work::Moving {
        sms: info.sms,
        duration: (bytes as f64 * 1e9 / info.memory_bandwidth as f64) as u64,
    };
    let effect = Effect::Set {
        to,
        width,
        value,
        count,
    };
    let wait = wait && memory::space().is_hosts(to);
    if wait {
        stream.not_captured()?;
    }
    stream.complete(Op::compute(work, effect), wait)
}

/// Allocates in stream order: at once, as memory comes back to a pool only when its stream has come to that. Without a pool,
/// from the one of the stream's device.
pub(crate) fn alloc_async(bytes: usize, pool: Option<usize>, stream_handle: usize) -> Result<u64> {
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    context.check()?;
    if stream.is_captured() {
        let at = memory::reserve_for_graph(context.device.index, bytes as u64)?;
        let node = Op::following(Work::Record, Effect::Allocate(at));
        return stream.submit(node).map(|()| at);
    }
    let pool = pool.map_or_else(|| pool::of_device(context.ordinal, false), Ok)?;
    pool::alloc(pool, context.handle(), bytes as u64)
}

/// Frees in stream order.
pub(crate) fn free_async(address: u64, stream_handle: usize) -> Result {
    if address == 0 {
        return Ok(());
    }
    let stream = stream(stream_handle)?;
    let is_graphs = memory::space().is_graphs(address, 1);
    if !is_graphs {
        // A graph frees what a graph has allocated.
        stream.not_captured()?;
        memory::begin_free(address)?;
    }
    stream.submit(Op::following(Work::Record, Effect::Free(address)))
}
