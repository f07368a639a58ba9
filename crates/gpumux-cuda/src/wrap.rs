//! Owners of contexts, streams, events, modules, memory and graphs.
//!
//! Each keeps its context alive and gives its resource back when dropped; errors at that point
//! (the context may be dead after a fault) are ignored. What stays `unsafe` is what
//! only the caller can know: that a kernel's arguments fit the kernel. Where no other errors are named, they are the driver's.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    ptr::null_mut,
    sync::Arc,
};

use crate::{
    Result,
    driver::{Driver, Error},
    types::*,
};

macro_rules! any_thread {
    ($($type:ty),*) => { $(
        // SAFETY: CUDA's handles may be used from every thread; the driver locks for itself.
        unsafe impl Send for $type {}
        // SAFETY: as above.
        unsafe impl Sync for $type {}
    )* };
}
any_thread!(
    ContextInner,
    ModuleInner,
    Stream,
    Event,
    Function,
    Graph,
    HostBuffer
);

/// One device of the machine.
#[derive(Clone, Copy)]
pub struct Device {
    driver: &'static Driver,
    handle: CUdevice,
}

impl Device {
    /// How many devices this process sees.
    pub fn count() -> Result<usize> {
        let driver = Driver::get()?;
        let mut count = 0;
        // SAFETY: the pointer is valid for the call.
        unsafe { driver.cuDeviceGetCount(&mut count) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The device with this ordinal.
    ///
    /// # Errors
    /// The driver's, `CUDA_ERROR_INVALID_DEVICE` for an ordinal too large.
    pub fn get(ordinal: u32) -> Result<Self> {
        let driver = Driver::get()?;
        let mut handle = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the pointer is valid for the call.
        unsafe { driver.cuDeviceGet(&mut handle, ordinal) }?;
        Ok(Self { driver, handle })
    }

    /// The product name, such as `NVIDIA H100 80GB HBM3`.
    pub fn name(&self) -> Result<String> {
        let mut name = [0_u8; 256];
        // SAFETY: the buffer is as long as said; CUDA terminates the string.
        unsafe {
            self.driver
                .cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, self.handle)
        }?;
        Ok(CStr::from_bytes_until_nul(&name)
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default())
    }

    /// The UUID as NVML writes it: `GPU-xxxxxxxx-xxxx-…`, or `MIG-…` of an instance.
    pub fn uuid(&self) -> Result<String> {
        let mut uuid = CUuuid::default();
        // SAFETY: the pointer is valid for the call.
        unsafe { self.driver.cuDeviceGetUuid_v2(&mut uuid, self.handle) }?;
        // The older function knows GPUs only.
        let mut gpu = uuid;
        // SAFETY: the pointer is valid for the call.
        let _ = unsafe { self.driver.cuDeviceGetUuid(&mut gpu, self.handle) };
        let whole = gpu.bytes == uuid.bytes;
        Ok(format_uuid(if whole { "GPU" } else { "MIG" }, &uuid))
    }

    /// One of CUDA's device attributes (`DEVICE_ATTRIBUTE_*`).
    pub fn attribute(&self, attribute: c_int) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the pointer is valid for the call.
        unsafe {
            self.driver
                .cuDeviceGetAttribute(&mut value, attribute, self.handle)
        }?;
        Ok(value)
    }

    /// Compute capability, such as (9, 0).
    pub fn compute_capability(&self) -> Result<(u32, u32)> {
        let part = |attribute| Ok(u32::try_from(self.attribute(attribute)?).unwrap_or(0));
        let major = part(DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        Ok((major, part(DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
    }

    /// Number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> Result<u32> {
        let count = self.attribute(DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(u32::try_from(count).unwrap_or(1).max(1))
    }
}

fn format_uuid(prefix: &str, uuid: &CUuuid) -> String {
    let hex: String = uuid
        .bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!(
        "{prefix}-{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

/// A context, current on the thread that made it.
#[derive(Clone)]
pub struct Context(Arc<ContextInner>);

struct ContextInner {
    driver: &'static Driver,
    device: Device,
    handle: CUcontext,
    primary: bool,
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and nothing that depends on it is left.
        let _ = unsafe {
            if self.primary {
                self.driver.cuDevicePrimaryCtxRelease_v2(self.device.handle)
            } else {
                self.driver.cuCtxDestroy_v2(self.handle)
            }
        };
    }
}

impl Context {
    /// Retains the device's primary context, the one that the CUDA runtime uses, and makes it current.
    pub fn primary(device: Device) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe {
            device
                .driver
                .cuDevicePrimaryCtxRetain(&mut handle, device.handle)
        }?;
        Self::adopt(device, handle, true)
    }

    /// Creates a context of its own (its own channel groups) and makes it current.
    pub fn create(device: Device) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { device.driver.cuCtxCreate_v2(&mut handle, 0, device.handle) }?;
        Self::adopt(device, handle, false)
    }

    fn adopt(device: Device, handle: CUcontext, primary: bool) -> Result<Self> {
        let context = Self(Arc::new(ContextInner {
            driver: device.driver,
            device,
            handle,
            primary,
        }));
        context.make_current()?;
        Ok(context)
    }

    /// Makes the context current on the calling thread; every other call expects that.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        unsafe { self.0.driver.cuCtxSetCurrent(self.0.handle) }
    }

    /// The context's device.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Waits for all work of the context, without a bound.
    ///
    /// # Errors
    /// The driver's, among them faults of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: no requirements but a current context, which CUDA checks.
        unsafe { self.0.driver.cuCtxSynchronize() }
    }

    /// Free and total memory in bytes, as this process sees them.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are valid for the call.
        unsafe { self.0.driver.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok((free, total))
    }

    fn driver(&self) -> &'static Driver {
        self.0.driver
    }

    /// For drops: the resource's context may not be current on this thread.
    fn release(&self, release: impl FnOnce(&'static Driver) -> Result<()>) {
        let _ = self.make_current().and_then(|()| release(self.driver()));
    }
}

/// How a wait spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Polls: quickest, and keeps one core busy.
    Spin,
    /// Sleeps until the driver's interrupt.
    Block,
}

fn ready(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.code() == Some(ERROR_NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A stream that does not wait for the default stream.
pub struct Stream {
    context: Context,
    handle: CUstream,
}

impl Stream {
    /// A new stream of the context.
    pub fn new(context: &Context) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe {
            context
                .driver()
                .cuStreamCreate(&mut handle, STREAM_NON_BLOCKING)
        }?;
        Ok(Self {
            context: context.clone(),
            handle,
        })
    }

    /// Whether all work submitted so far is done.
    ///
    /// # Errors
    /// The driver's, among them faults of that work.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the handle is alive.
        ready(unsafe { self.context.driver().cuStreamQuery(self.handle) })
    }

    /// Waits for all work submitted so far, without a bound.
    ///
    /// # Errors
    /// The driver's, among them faults of that work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        unsafe { self.context.driver().cuStreamSynchronize(self.handle) }
    }

    /// Launches a kernel with a one-dimensional grid and block.
    ///
    /// # Safety
    /// The arguments fit the kernel's signature, and the memory they point to lives until it is done.
    ///
    /// # Panics
    /// With more than eight arguments.
    pub unsafe fn launch(
        &self,
        function: &Function,
        blocks: u32,
        threads: u32,
        arguments: &[Arg],
    ) -> Result<()> {
        let mut pointers = [null_mut(); 8];
        assert!(arguments.len() <= pointers.len(), "at most eight arguments");
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = argument.pointer();
        }
        // SAFETY: CUDA copies the arguments during the call; the rest is the caller's promise.
        unsafe {
            self.context.driver().cuLaunchKernel(
                function.handle,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.handle,
                pointers.as_mut_ptr(),
                null_mut(),
            )
        }
    }

    /// Records what `record` submits to this stream instead of running it.
    ///
    /// # Errors
    /// The driver's, or what `record` returns.
    pub fn capture(&self, record: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let driver = self.context.driver();
        let mut graph = null_mut();
        // SAFETY: the stream is alive; a capture is always ended here.
        unsafe { driver.cuStreamBeginCapture_v2(self.handle, STREAM_CAPTURE_MODE_THREAD_LOCAL) }?;
        let recorded = record();
        // SAFETY: the pointer is valid for the call.
        unsafe { driver.cuStreamEndCapture(self.handle, &mut graph) }?;
        let mut exec = null_mut();
        // SAFETY: the graph was just made; its instance does not need it any more.
        let made = recorded
            .and_then(|()| unsafe { driver.cuGraphInstantiateWithFlags(&mut exec, graph, 0) });
        // SAFETY: the graph is ours.
        unsafe { driver.cuGraphDestroy(graph) }?;
        made?;
        Ok(Graph {
            context: self.context.clone(),
            handle: exec,
        })
    }

    /// Launches a recorded graph.
    pub fn launch_graph(&self, graph: &Graph) -> Result<()> {
        // SAFETY: both handles are alive.
        unsafe {
            self.context
                .driver()
                .cuGraphLaunch(graph.handle, self.handle)
        }
    }

    /// Starts copying host memory to the start of device memory.
    ///
    /// # Errors
    /// The driver's; a copy longer than the target is refused.
    pub fn copy_to_device(&self, to: &DeviceBuffer, from: &HostBuffer) -> Result<()> {
        if from.bytes > to.bytes {
            return Err(out_of_bounds("cuMemcpyHtoDAsync", from.bytes, to.bytes));
        }
        // SAFETY: both buffers are alive and long enough; pinned memory outlives the copy because
        // freeing it waits.
        unsafe {
            self.context.driver().cuMemcpyHtoDAsync_v2(
                to.address,
                from.memory,
                from.bytes,
                self.handle,
            )
        }
    }

    /// Starts filling device memory with a byte.
    pub fn fill(&self, buffer: &DeviceBuffer, value: u8) -> Result<()> {
        // SAFETY: the range is the buffer's own.
        unsafe {
            self.context
                .driver()
                .cuMemsetD8Async(buffer.address, value, buffer.bytes, self.handle)
        }
    }
}

fn out_of_bounds(call: &'static str, asked: usize, there: usize) -> Error {
    Error::Call {
        call,
        code: ERROR_INVALID_VALUE,
        name: "CUDA_ERROR_INVALID_VALUE".into(),
        description: format!("{asked} bytes do not fit in {there}"),
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the handle is ours.
        self.context
            .release(|driver| unsafe { driver.cuStreamDestroy_v2(self.handle) });
    }
}

/// A kernel argument.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// A 32-bit value.
    U32(u32),
    /// A 64-bit value, such as an address.
    U64(u64),
}

impl Arg {
    fn pointer(&self) -> *mut c_void {
        match self {
            Self::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
        }
    }
}

/// A mark in a stream.
pub struct Event {
    context: Context,
    handle: CUevent,
}

impl Event {
    /// An event that only tells when it was reached; `wait` says how [`Self::synchronize`] waits.
    pub fn new(context: &Context, wait: Wait) -> Result<Self> {
        let flags = match wait {
            Wait::Spin => EVENT_DISABLE_TIMING,
            Wait::Block => EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC,
        };
        Self::with_flags(context, flags)
    }

    /// An event that also takes the time.
    pub fn timed(context: &Context) -> Result<Self> {
        Self::with_flags(context, EVENT_BLOCKING_SYNC)
    }

    fn with_flags(context: &Context, flags: u32) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { context.driver().cuEventCreate(&mut handle, flags) }?;
        Ok(Self {
            context: context.clone(),
            handle,
        })
    }

    /// Puts the mark behind all work submitted to the stream so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are alive.
        unsafe {
            self.context
                .driver()
                .cuEventRecord(self.handle, stream.handle)
        }
    }

    /// Waits until the mark is reached, without a bound.
    ///
    /// # Errors
    /// The driver's, among them faults of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        unsafe { self.context.driver().cuEventSynchronize(self.handle) }
    }

    /// Milliseconds on the device from `start` to this event; both [`Self::timed`] and reached.
    pub fn elapsed_ms(&self, start: &Self) -> Result<f32> {
        let mut ms = 0.0;
        // SAFETY: the pointer is valid for the call and both handles are alive.
        unsafe {
            self.context
                .driver()
                .cuEventElapsedTime(&mut ms, start.handle, self.handle)
        }?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is ours.
        self.context
            .release(|driver| unsafe { driver.cuEventDestroy_v2(self.handle) });
    }
}

/// Loaded device code.
#[derive(Clone)]
pub struct Module(Arc<ModuleInner>);

struct ModuleInner {
    context: Context,
    handle: CUmodule,
}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        // SAFETY: the handle is ours; functions keep the module alive.
        self.context
            .release(|driver| unsafe { driver.cuModuleUnload(self.handle) });
    }
}

impl Module {
    /// Loads PTX text, which the driver compiles for its device.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_PTX` for text that is none.
    pub fn from_ptx(context: &Context, ptx: &CStr) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: the text is terminated and valid for the call.
        unsafe {
            context
                .driver()
                .cuModuleLoadData(&mut handle, ptx.as_ptr().cast())
        }?;
        Ok(Self(Arc::new(ModuleInner {
            context: context.clone(),
            handle,
        })))
    }

    /// The kernel with this name.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` for an unknown name.
    pub fn function(&self, name: &str) -> Result<Function> {
        let mut handle = null_mut();
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the name is terminated and the pointers are valid for the call.
        unsafe {
            self.0
                .context
                .driver()
                .cuModuleGetFunction(&mut handle, self.0.handle, name.as_ptr())
        }?;
        Ok(Function {
            _module: self.clone(),
            handle,
        })
    }
}

/// A kernel of a loaded module.
pub struct Function {
    _module: Module,
    handle: CUfunction,
}

/// Plain device memory.
pub struct DeviceBuffer {
    context: Context,
    address: CUdeviceptr,
    bytes: usize,
    /// What it lies in, if that is not memory of its own.
    mapping: Option<Mapping>,
}

impl DeviceBuffer {
    /// Allocates `bytes` of device memory, not cleared.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_OUT_OF_MEMORY` when it does not fit.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: the pointer is valid for the call.
        unsafe { context.driver().cuMemAlloc_v2(&mut address, bytes) }?;
        Ok(Self {
            context: context.clone(),
            address,
            bytes,
            mapping: None,
        })
    }

    /// The beginning of a mapping that is backed, with as many bytes as it has at most.
    pub fn of_mapping(mapping: Mapping, bytes: usize) -> Self {
        Self {
            context: mapping.context.clone(),
            address: mapping.address(),
            bytes: bytes.min(mapping.bytes()),
            mapping: Some(mapping),
        }
    }

    /// Where it starts.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies from host memory to the buffer, `offset` bytes in, and waits.
    ///
    /// # Errors
    /// The driver's; a range outside the buffer is refused.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check("cuMemcpyHtoD", offset, data.len())?;
        let driver = self.context.driver();
        // From pageable memory it may return before the data has arrived, and streams that do not wait for the
        // default stream could overtake it (seen on an H100 whose copy engines were busy).
        // SAFETY: both ranges are valid; null is the default stream.
        unsafe {
            driver.cuMemcpyHtoD_v2(
                self.address + offset as u64,
                data.as_ptr().cast(),
                data.len(),
            )?;
            driver.cuStreamSynchronize(null_mut())
        }
    }

    /// Copies from the buffer, `offset` bytes in, to host memory, and waits.
    ///
    /// # Errors
    /// The driver's; a range outside the buffer is refused.
    pub fn read(&self, offset: usize, data: &mut [u8]) -> Result<()> {
        self.check("cuMemcpyDtoH", offset, data.len())?;
        // SAFETY: both ranges are valid.
        unsafe {
            self.context.driver().cuMemcpyDtoH_v2(
                data.as_mut_ptr().cast(),
                self.address + offset as u64,
                data.len(),
            )
        }
    }

    fn check(&self, call: &'static str, offset: usize, bytes: usize) -> Result<()> {
        let end = offset.saturating_add(bytes);
        if end > self.bytes {
            return Err(out_of_bounds(call, end, self.bytes));
        }
        Ok(())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Some(mapping) = &self.mapping {
            // Unlike freeing, unmapping waits for nothing.
            let _ = mapping.context.synchronize();
            return;
        }
        // SAFETY: the memory is ours.
        self.context
            .release(|driver| unsafe { driver.cuMemFree_v2(self.address) });
    }
}

/// Pinned host memory.
pub struct HostBuffer {
    context: Context,
    memory: *mut c_void,
    bytes: usize,
}

impl HostBuffer {
    /// Allocates `bytes` of pinned memory.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        let mut memory = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { context.driver().cuMemHostAlloc(&mut memory, bytes, 0) }?;
        // SAFETY: CUDA gave us this much writable memory; written once so that reading it is defined.
        unsafe { std::ptr::write_bytes(memory.cast::<u8>(), 0, bytes) };
        Ok(Self {
            context: context.clone(),
            memory,
            bytes,
        })
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: the memory is ours.
        self.context
            .release(|driver| unsafe { driver.cuMemFreeHost(self.memory) });
    }
}

/// A recorded graph, ready to launch.
pub struct Graph {
    context: Context,
    handle: CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the handle is ours.
        self.context
            .release(|driver| unsafe { driver.cuGraphExecDestroy(self.handle) });
    }
}

/// A reserved range of addresses, backed by physical handles that can be taken away and given back.
pub struct Mapping {
    context: Context,
    address: CUdeviceptr,
    chunk: usize,
    chunks: usize,
    handles: Vec<CUmemGenericAllocationHandle>,
    /// The handles are released: the memory lasts as long as it is mapped.
    released: bool,
}

impl Mapping {
    /// Reserves `chunks` × `chunk` bytes of addresses, unbacked. `chunk` is rounded up to what the
    /// device can map.
    pub fn reserve(context: &Context, chunk: usize, chunks: usize) -> Result<Self> {
        let driver = context.driver();
        let prop = CUmemAllocationProp::on_device(context.device().handle);
        let (mut granularity, mut address) = (0, 0);
        // SAFETY: the pointers are valid for the call.
        unsafe {
            driver.cuMemGetAllocationGranularity(
                &mut granularity,
                &prop,
                MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        }?;
        let chunk = chunk.max(1).next_multiple_of(granularity.max(1));
        let bytes = chunk.saturating_mul(chunks);
        // SAFETY: the pointer is valid for the call.
        unsafe { driver.cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }?;
        Ok(Self {
            context: context.clone(),
            address,
            chunk,
            chunks,
            handles: Vec::new(),
            released: false,
        })
    }

    /// Where it starts; the same for its whole life.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.chunk * self.chunks
    }

    /// Gives every chunk fresh memory; nothing to do when it has some.
    ///
    /// # Errors
    /// The driver's; after one, nothing is backed.
    pub fn back(&mut self) -> Result<()> {
        if !self.handles.is_empty() {
            return Ok(());
        }
        self.try_back().inspect_err(|_| {
            let _ = self.unback();
        })
    }

    fn try_back(&mut self) -> Result<()> {
        let driver = self.context.driver();
        let device = self.context.device().handle;
        let prop = CUmemAllocationProp::on_device(device);
        for index in 0..self.chunks {
            let mut handle = 0;
            let address = self.address + (index * self.chunk) as u64;
            // SAFETY: the pointers are valid for the call.
            unsafe { driver.cuMemCreate(&mut handle, self.chunk, &prop, 0) }?;
            // SAFETY: the range is inside our reservation and unmapped.
            let mapped = unsafe { driver.cuMemMap(address, self.chunk, 0, handle, 0) };
            if let Err(error) = mapped {
                // SAFETY: the handle is ours and not mapped.
                unsafe { driver.cuMemRelease(handle) }?;
                return Err(error);
            }
            self.handles.push(handle);
        }
        let access = CUmemAccessDesc {
            location: prop.location,
            flags: MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the whole range is mapped.
        unsafe { driver.cuMemSetAccess(self.address, self.bytes(), &access, 1) }
    }

    /// Lets go of the handles; what is mapped stays so.
    pub fn release(&mut self) -> Result<()> {
        if !std::mem::replace(&mut self.released, true) {
            for handle in &self.handles {
                // SAFETY: the handle is ours, and not used again.
                unsafe { self.context.driver().cuMemRelease(*handle) }?;
            }
        }
        Ok(())
    }

    /// Takes the memory away; the addresses stay reserved. Work that uses them must be frozen or done.
    pub fn unback(&mut self) -> Result<()> {
        let driver = self.context.driver();
        while let Some(handle) = self.handles.pop() {
            let address = self.address + (self.handles.len() * self.chunk) as u64;
            // SAFETY: this chunk is mapped, by this handle.
            unsafe { driver.cuMemUnmap(address, self.chunk) }?;
            if !self.released {
                // SAFETY: the handle is ours.
                unsafe { driver.cuMemRelease(handle) }?;
            }
        }
        self.released = false;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        let _ = self.unback();
        // SAFETY: the reservation is ours.
        let _ = unsafe {
            self.context
                .driver()
                .cuMemAddressFree(self.address, self.bytes())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_is_written_as_nvml_writes_it() {
        let bytes: Vec<u8> = (0..16).collect();
        let uuid = CUuuid {
            bytes: bytes.try_into().unwrap(),
        };
        assert_eq!(
            format_uuid("GPU", &uuid),
            "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
        );
    }

    #[test]
    fn arguments_point_at_their_values() {
        for (argument, expected) in [(Arg::U32(7), 7), (Arg::U64(1 << 40), 1 << 40)] {
            let read = match argument {
                // SAFETY: the pointer leads to the value inside `argument`.
                Arg::U32(_) => u64::from(unsafe { argument.pointer().cast::<u32>().read() }),
                // SAFETY: as above.
                Arg::U64(_) => unsafe { argument.pointer().cast::<u64>().read() },
            };
            assert_eq!(read, expected);
        }
    }
}
