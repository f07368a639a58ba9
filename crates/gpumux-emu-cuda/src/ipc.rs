//! Memory and events that processes share by handles (`cuIpc…`). A handle names a process and one of its files: memory of the
//! server's, or a page with an event's marks. It is good as long as that process has what it names.

use std::{
    ffi::c_uint,
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
};

use crate::{
    border::{Out, cuda, exports},
    context::current,
    error::{CuError, Result},
    event::{self, event},
    memory,
    process::process,
};

/// `CUipcMemHandle` and `CUipcEventHandle`: what it is, process and file, and of memory where it begins there, its bytes, and the
/// address that it has in its process.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Shared([u64; 8]);

const MEMORY: u64 = u64::from_le_bytes(*b"gpumux m");
const EVENT: u64 = u64::from_le_bytes(*b"gpumux e");
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY: c_uint = 1;

impl Shared {
    fn new(kind: u64, file: &OwnedFd, rest: [u64; 3]) -> Self {
        let owner = u64::from(std::process::id()) << 32 | file.as_raw_fd() as u64;
        Self([kind, owner, rest[0], rest[1], rest[2], 0, 0, 0])
    }

    /// The file, of another process.
    fn open(&self, kind: u64) -> Result<OwnedFd> {
        let (process, file) = (self.0[1] >> 32, self.0[1] & 0xffff_ffff);
        if self.0[0] != kind {
            return Err(CuError::INVALID_VALUE);
        }
        if process == u64::from(std::process::id()) {
            return Err(CuError::INVALID_CONTEXT);
        }
        let path = format!("/proc/{process}/fd/{file}");
        let opened = File::options().read(true).write(true).open(path);
        opened.map(Into::into).map_err(|_| CuError::INVALID_HANDLE)
    }
}

fn open_memory(handle: Shared, flags: c_uint) -> Result<u64> {
    current()?.check()?;
    if flags != LAZY {
        return Err(CuError::INVALID_VALUE);
    }
    let [_, owner, offset, bytes, address, ..] = handle.0;
    memory::open_shared((owner >> 32, address), offset, bytes, || {
        handle.open(MEMORY)
    })
}

exports! { FUNCTIONS by cuda;
    cuIpcGetMemHandle(handle: Out<Shared>, address: u64) => {
        process()?;
        handle.check()?;
        let made = memory::share(address, |file, at, offset, bytes| Shared::new(MEMORY, file, [offset, bytes, at]))?;
        handle.put(made)
    };
    cuIpcOpenMemHandle(address: Out<u64>, handle: Shared, flags: c_uint) => { address.check()?; address.put(open_memory(handle, flags)?) };
    cuIpcOpenMemHandle_v2(address: Out<u64>, handle: Shared, flags: c_uint) => { address.check()?; address.put(open_memory(handle, flags)?) };
    cuIpcCloseMemHandle(address: u64) => {
        // Work that uses it ends first.
        current()?.synchronize()?;
        memory::close_shared(address)
    };
    cuIpcGetEventHandle(handle: Out<Shared>, of: usize) => {
        handle.check()?;
        let of = event(of)?;
        handle.put(Shared::new(EVENT, of.file().ok_or(CuError::INVALID_HANDLE)?, [0; 3]))
    };
    cuIpcOpenEventHandle(made: Out<usize>, handle: Shared) => { made.check()?; made.put(event::open(handle.open(EVENT)?)?) };
}
