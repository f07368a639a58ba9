//! The export tables: functions that NVIDIA's own libraries ask for by UUID, of which the CUDA runtime needs some to start.
//!
//! They are not documented; what is here was found by watching which slots the runtimes of CUDA 12.8 to 13.5 use. Slot 0 of
//! most tables is their size in bytes.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicU32, Ordering},
};

use gpumux_cuda::types::CUuuid;

use crate::{
    border::{
        Address, In, Out, StorageEnd,
        code::{Image, JitOptions},
        cuda, exports,
    },
    device::{self, context},
    error::{CuError, Result},
    integrity::{self, Seen},
    module,
    process::{self, lock, process},
};

type Handle = usize;

/// A table's slots.
struct Table<const N: usize>([Address; N]);

impl<const N: usize> Table<N> {
    const fn new(slots: &[(usize, Address)], sized: bool) -> Self {
        let mut all = [Address(std::ptr::null()); N];
        if sized {
            all[0] = Address(std::ptr::without_provenance(8 * N));
        }
        let mut i = 0;
        while i < slots.len() {
            all[slots[i].0] = slots[i].1;
            i += 1;
        }
        Self(all)
    }

    fn address(&'static self) -> *const c_void {
        self.0.as_ptr().cast()
    }
}

macro_rules! slot {
    ($function:ident) => {
        Address($function as *const ())
    };
}

/// Modules out of fat binaries, and the primary context.
static RUNTIME: Table<13> = Table::new(
    &[
        (1, slot!(module_of_binary)),
        (2, slot!(primary_context)),
        (6, slot!(module_of_binary)),
        (7, slot!(nothing)),
        (8, slot!(module_of_data)),
        (12, slot!(nothing)),
    ],
    true,
);
/// Memory in which tools would leave callbacks: none does.
static CALLBACKS: Table<7> = Table::new(&[(2, slot!(callbacks)), (6, slot!(more_callbacks))], true);
static THREADS: Table<4> = Table::new(&[], true);
/// What the runtime keeps with a context.
static STORAGE: Table<4> = Table::new(
    &[(0, slot!(put)), (1, slot!(delete)), (2, slot!(get))],
    false,
);
/// The runtime of CUDA 13.5 wants it to be there.
static TOOLS: Table<4> = Table::new(
    &[
        (1, slot!(nothing)),
        (2, slot!(nothing)),
        (3, slot!(nothing)),
    ],
    true,
);
static CHECKS: Table<4> = Table::new(&[(2, slot!(check)), (3, slot!(nothing))], true);
/// Proof that this is the driver.
static INTEGRITY: Table<3> = Table::new(&[(1, slot!(prove))], true);

exports! { FUNCTIONS by cuda;
    cuGetExportTable(table: Out<*const c_void>, uuid: In<CUuuid>) => {
        table.check()?;
        let known = match &uuid.get()?.bytes {
            b"\x6b\xd5\xfb\x6c\x5b\xf4\xe7\x4a\x89\x87\xd9\x39\x12\xfd\x9d\xf9" => RUNTIME.address(),
            b"\xa0\x94\x79\x8c\x2e\x74\x2e\x74\x93\xf2\x08\x00\x20\x0c\x0a\x66" => CALLBACKS.address(),
            b"\x42\xd8\x5a\x81\x23\xf6\xcb\x47\x82\x98\xf6\xe7\x8a\x3a\xec\xdc" => THREADS.address(),
            b"\xc6\x93\x33\x6e\x11\x21\xdf\x11\xa8\xc3\x68\xf3\x55\xd8\x95\x93" => STORAGE.address(),
            b"\x26\x3e\x88\x60\x7c\xd2\x61\x43\x92\xf6\xbb\xd5\x00\x6d\xfa\x7e" => CHECKS.address(),
            b"\x21\x31\x8c\x60\x97\x14\x32\x48\x8c\xa6\x41\xff\x73\x24\xc8\xf2" => TOOLS.address(),
            b"\xd4\x08\x20\x55\xbd\xe6\x70\x4b\x8d\x34\xba\x12\x3c\x66\xe1\xf2" => INTEGRITY.address(),
            _ => {
                table.put(std::ptr::null())?;
                return Err(CuError::INVALID_VALUE);
            }
        };
        table.put(known)
    };
}

extern "C" fn nothing() -> c_int {
    0
}

extern "C" fn module_of_binary(module: Out<Handle>, binary: Image) -> c_int {
    cuda("module_of_binary", || {
        module.check()?;
        module.put(module::load(binary, JitOptions::NONE)?)
    })
}

extern "C" fn module_of_data(binary: Image, module: Out<Handle>) -> c_int {
    module_of_binary(module, binary)
}

extern "C" fn primary_context(out: Out<Handle>, device: c_int) -> c_int {
    cuda("primary_context", || {
        out.check()?;
        out.put(device::primary(device)?)
    })
}

extern "C" fn callbacks(memory: Out<*const AtomicU32>, count: Out<usize>) {
    static MEMORY: [AtomicU32; 1024] = [const { AtomicU32::new(0) }; 1024];
    memory.put_if_wanted(MEMORY.as_ptr());
    count.put_if_wanted(MEMORY.len());
}

extern "C" fn more_callbacks(memory: Out<*const AtomicU32>, count: Out<usize>) {
    static MEMORY: [AtomicU32; 14] = [const { AtomicU32::new(0) }; 14];
    memory.put_if_wanted(MEMORY.as_ptr());
    count.put_if_wanted(MEMORY.len());
}

/// Whether a context is one of those whose state forbids something: none is.
extern "C" fn check(_context: Handle, state: Out<u32>, _more: Out<usize>) -> c_int {
    state.put_if_wanted(0);
    0
}

extern "C" fn put(handle: Handle, key: usize, value: usize, end: StorageEnd) -> c_int {
    cuda("put", || {
        lock(&context(handle)?.storage).insert(key, (value, end));
        Ok(())
    })
}

extern "C" fn delete(handle: Handle, key: usize) -> c_int {
    cuda("delete", || {
        lock(&context(handle)?.storage).remove(&key);
        Ok(())
    })
}

extern "C" fn get(value: Out<usize>, handle: Handle, key: usize) -> c_int {
    cuda("get", || {
        let found = lock(&context(handle)?.storage).get(&key).map(|it| it.0);
        // The runtime knows by this code that there is nothing yet.
        value.put(found.ok_or(CuError::INVALID_HANDLE)?)
    })
}

extern "C" fn prove(version: u32, seconds: u64, proof: Out<[u64; 2]>) -> c_int {
    // Also counts how often, so that a runtime that asks without end can be seen.
    static ASKED: AtomicU32 = AtomicU32::new(0);
    ASKED.fetch_add(1, Ordering::Relaxed);
    cuda("prove", || proof.put(prove_for(version, seconds)?))
}

fn prove_for(version: u32, seconds: u64) -> Result<[u64; 2]> {
    let devices = process()?.devices.iter();
    let devices: Vec<_> = devices.map(|it| (it.info.uuid, it.info.pci_bus)).collect();
    Ok(integrity::prove(
        &Seen {
            driver: process::driver_version() as u32,
            runtime: version,
            process: std::process::id(),
            thread: integrity::thread(),
            runtime_table: RUNTIME.address() as u64,
            integrity_table: INTEGRITY.address() as u64,
            function: INTEGRITY.0[1].0 as u64,
            seconds,
        },
        &devices,
    ))
}
