//! The driver's table: one list of functions, resolved from `libcuda.so.1`.
//!
//! Each line of the list gives the exact exported symbol (with its `_v2`) and its arguments. A symbol
//! that this driver lacks is an error only when it is called. The library stays loaded for the life of
//! the process: libcuda's own threads would not survive an unload.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    mem::ManuallyDrop,
    sync::OnceLock,
};

use crate::types::*;

/// The soname under which every NVIDIA driver, and the emulated device, is found.
pub const SONAME: &str = "libcuda.so.1";

/// Why a driver call did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No CUDA driver on this machine.
    #[error("cannot load {SONAME}: {0}; install the NVIDIA driver or run under `gpumux emu`")]
    Load(String),
    /// The driver is older than the function.
    #[error("this driver has no {0}; install a newer one")]
    Missing(&'static str),
    /// The driver refused.
    #[error("{call} failed: {name} ({code}): {description}")]
    Call {
        /// The function, as in CUDA's documentation.
        call: &'static str,
        /// CUDA's number.
        code: CUresult,
        /// CUDA's name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// CUDA's sentence.
        description: String,
    },
}

impl Error {
    /// CUDA's number, when the driver itself answered.
    pub fn code(&self) -> Option<CUresult> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }
}

macro_rules! driver_functions {
    ($($symbol:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        #[allow(non_snake_case)]
        struct Table { $($symbol: Option<unsafe extern "C" fn($($type),*) -> CUresult>,)* }

        /// Every symbol that the table looks up.
        pub const SYMBOLS: &[&str] = &[$(stringify!($symbol)),*];

        impl Table {
            fn resolve(library: &libloading::Library) -> Self {
                Self {
                    $($symbol: {
                        // SAFETY: the list gives the signature that `cuda.h` gives to this symbol.
                        unsafe { library.get(concat!(stringify!($symbol), "\0").as_bytes()) }
                            .ok()
                            .map(|symbol| *symbol)
                    },)*
                }
            }
        }

        /// One checked method per driver function, under its exported name.
        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl Driver {
            $(
                #[doc = concat!("`", stringify!($symbol), "`, with CUDA's requirements on its arguments.")]
                pub unsafe fn $symbol(&self, $($arg: $type),*) -> Result<(), Error> {
                    let function = self.table.$symbol.ok_or(Error::Missing(stringify!($symbol)))?;
                    // SAFETY: the caller keeps CUDA's requirements.
                    self.check(stringify!($symbol), unsafe { function($($arg),*) })
                }
            )*
        }
    };
}

driver_functions! {
    cuInit(flags: c_uint);
    cuCheckpointProcessGetState(pid: c_int, state: *mut c_int);
    cuCheckpointProcessLock(pid: c_int, args: *const c_void);
    cuCheckpointProcessCheckpoint(pid: c_int, args: *const c_void);
    cuCheckpointProcessRestore(pid: c_int, args: *const c_void);
    cuCheckpointProcessUnlock(pid: c_int, args: *const c_void);

    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice);
    cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice);
    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);

    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuCtxCreate_v2(context: *mut CUcontext, flags: c_uint, device: CUdevice);
    cuCtxDestroy_v2(context: CUcontext);
    cuCtxSetCurrent(context: CUcontext);
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxSynchronize();

    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleUnload(module: CUmodule);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);

    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    cuMemFree_v2(address: CUdeviceptr);
    cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr);
    cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: CUdeviceptr);
    cuPointerGetAttributes(count: c_uint, attributes: *const c_int, data: *mut *mut c_void, address: CUdeviceptr);
    cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(memory: *mut c_void);
    cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize);
    cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemsetD8Async(address: CUdeviceptr, value: u8, count: usize, stream: CUstream);
    cuMemsetD32Async(address: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);

    cuMemAddressReserve(address: *mut CUdeviceptr, bytes: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong);
    cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    cuMemCreate(handle: *mut CUmemGenericAllocationHandle, bytes: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong);
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemGetAllocationGranularity(bytes: *mut usize, prop: *const CUmemAllocationProp, option: c_int);

    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamQuery(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamBeginCapture_v2(stream: CUstream, mode: c_int);
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);

    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventQuery(event: CUevent);
    cuEventSynchronize(event: CUevent);
    cuEventElapsedTime(ms: *mut f32, start: CUevent, end: CUevent);

    cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
    cuGraphExecDestroy(exec: CUgraphExec);
    cuGraphDestroy(graph: CUgraph);

    cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
}

type Describe = unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult;

/// The driver at hand, initialised.
pub struct Driver {
    table: Table,
    // Apart from the table because they explain its errors.
    error_name: Option<Describe>,
    error_string: Option<Describe>,
}

impl Driver {
    /// The process's driver, loaded and initialised (`cuInit`) by the first call.
    ///
    /// # Errors
    /// [`Error::Load`] without a driver; what `cuInit` says without a usable device.
    pub fn get() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
        DRIVER
            .get_or_init(Self::load)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn load() -> Result<Self, Error> {
        // SAFETY: libcuda's initialisers have no requirements on the process.
        let library = unsafe { libloading::Library::new(SONAME) }
            .map(ManuallyDrop::new) // never unloaded: the table points into it
            .map_err(|error| Error::Load(error.to_string()))?;
        let describe = |name: &[u8]| {
            // SAFETY: both symbols have this signature in `cuda.h`.
            unsafe { library.get::<Describe>(name) }
                .ok()
                .map(|symbol| *symbol)
        };
        let driver = Self {
            table: Table::resolve(&library),
            error_name: describe(b"cuGetErrorName\0"),
            error_string: describe(b"cuGetErrorString\0"),
        };
        // SAFETY: 0 is the only flag CUDA defines.
        unsafe { driver.cuInit(0) }?;
        Ok(driver)
    }

    fn check(&self, call: &'static str, code: CUresult) -> Result<(), Error> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(self.error(call, code))
    }

    #[cold]
    fn error(&self, symbol: &'static str, code: CUresult) -> Error {
        let text = |describe: Option<Describe>, otherwise: &str| {
            let mut text = std::ptr::null();
            // SAFETY: the pointer is valid for the call.
            let known = describe.map(|function| unsafe { function(code, &mut text) });
            if known != Some(SUCCESS) || text.is_null() {
                return otherwise.to_owned();
            }
            // SAFETY: on success CUDA gives a static, zero-terminated string.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        };
        Error::Call {
            call: symbol.strip_suffix("_v2").unwrap_or(symbol),
            code,
            name: text(self.error_name, "CUDA_ERROR"),
            description: text(self.error_string, "the driver has no text for this error"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_unique() {
        let mut names = SYMBOLS.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), SYMBOLS.len());
    }

    #[test]
    fn errors_name_the_call_and_the_cause() {
        let error = Error::Call {
            call: "cuMemAlloc",
            code: ERROR_OUT_OF_MEMORY,
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
            description: "out of memory".into(),
        };
        assert_eq!(
            error.to_string(),
            "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
        );
        assert_eq!(error.code(), Some(ERROR_OUT_OF_MEMORY));
    }

    /// A library without a single CUDA symbol: every call says which one it misses.
    #[test]
    fn a_missing_symbol_is_an_error_when_called() {
        // SAFETY: the C library is already loaded.
        let library = unsafe { libloading::Library::new("libc.so.6") }.unwrap();
        let driver = Driver {
            table: Table::resolve(&library),
            error_name: None,
            error_string: None,
        };
        // SAFETY: the symbol is missing, so nothing is called.
        let error = unsafe { driver.cuMemAlloc_v2(std::ptr::null_mut(), 1) }.unwrap_err();
        assert_eq!(error, Error::Missing("cuMemAlloc_v2"));
        assert_eq!(
            driver.error("cuMemAlloc_v2", ERROR_OUT_OF_MEMORY).code(),
            Some(ERROR_OUT_OF_MEMORY)
        );
    }
}
