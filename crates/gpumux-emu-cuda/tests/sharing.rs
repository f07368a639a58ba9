//! What processes, devices and streams share: memory and events by handles, peers' memory, values in memory, pools.

#[macro_use]
mod common;

use std::{
    ffi::{CString, c_int, c_uint, c_void},
    fs,
    path::PathBuf,
    ptr::null_mut,
};

use gpumux_emu::Profile;

use common::*;

/// A handle of memory or of an event.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle([u64; 8]);

fn note(name: &str) -> PathBuf {
    PathBuf::from(std::env::var_os("NOTE").unwrap()).with_extension(name)
}

/// Tells the other process, in one piece.
fn tell(name: &str, words: &[u64]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let unfinished = note("unfinished");
    fs::write(&unfinished, bytes).unwrap();
    fs::rename(unfinished, note(name)).unwrap();
}

fn hear(name: &str) -> Vec<u64> {
    wait_for(name, || note(name).exists());
    let bytes = fs::read(note(name)).unwrap();
    let words = bytes.chunks_exact(8);
    words
        .map(|it| u64::from_le_bytes(it.try_into().unwrap()))
        .collect()
}

type OpenMemory = unsafe extern "C" fn(*mut u64, Handle, c_uint) -> c_int;

#[test]
fn processes_share_memory_and_events_by_handles() {
    const NAME: &str = "processes_share_memory_and_events_by_handles";
    if is_program(NAME) {
        return match std::env::var_os("IMPORTS") {
            None => exporter(),
            Some(_) => importer(),
        };
    }
    let device = Device::new(Profile::default());
    let exporter = device.start(NAME);
    let importer = device.command(NAME).env("IMPORTS", "1").spawn().unwrap();
    finish(importer);
    finish(exporter);
    device.wait_until_free();
}

fn exporter() {
    primary();
    let get: unsafe extern "C" fn(*mut Handle, u64) -> c_int = symbol("cuIpcGetMemHandle");
    let open: OpenMemory = symbol("cuIpcOpenMemHandle_v2");
    let get_event: unsafe extern "C" fn(*mut Handle, *mut c_void) -> c_int =
        symbol("cuIpcGetEventHandle");
    let (large, small) = (alloc(3 * MIB), alloc(16));
    let mut told = Vec::new();
    for (at, value) in [(large, 5), (small, 6)] {
        cu!(cuMemsetD32Async(at, value, 4, null_mut()));
        let mut handle = Handle([0; 8]);
        // SAFETY: the pointers are valid.
        unsafe {
            // From the middle: the handle is the allocation's.
            assert_eq!(get(&mut handle, at + 4), 0);
            assert_eq!(open(&mut 0, handle, 1), 201, "in the process whose it is");
        }
        told.extend(handle.0);
    }
    cu!(cuCtxSynchronize());
    let mut handle = Handle([0; 8]);
    let shared = event(6);
    let mut wrong = null_mut();
    assert_eq!(code_of!(cuEventCreate(&mut wrong, 4)), 1, "with time");
    // SAFETY: the pointers are valid.
    unsafe {
        assert_eq!(get_event(&mut handle, shared.cast()), 0);
        assert_ne!(get_event(&mut handle, event(2).cast()), 0, "not for others");
        assert_eq!(get(&mut Handle([0; 8]), 0x1000), 1, "no memory");
    }
    // The importer's event is behind this.
    launch(kernel("gpumux_spin"), null_mut(), &[50_000_000]);
    launch(kernel("gpumux_fill_u32"), null_mut(), &[large, 7, 4]);
    cu!(cuEventRecord(shared, null_mut()));
    told.extend(handle.0);
    tell("handles", &told);
    hear("done");
    assert_eq!(read(large, 4), [7, 7, 7, 9]);
    assert_eq!(read(small, 4), [6, 6, 6, 10]);
}

fn importer() {
    primary();
    let open: OpenMemory = symbol("cuIpcOpenMemHandle_v2");
    let close: unsafe extern "C" fn(u64) -> c_int = symbol("cuIpcCloseMemHandle");
    let open_event: unsafe extern "C" fn(*mut *mut c_void, Handle) -> c_int =
        symbol("cuIpcOpenEventHandle");
    let told = hear("handles");
    let handle = |i: usize| Handle(told[8 * i..8 * i + 8].try_into().unwrap());
    let (mut large, mut small, mut again) = (0, 0, 0);
    let mut behind = null_mut();
    // SAFETY: the pointers are valid.
    unsafe {
        assert_eq!(open_event(&mut behind, handle(2)), 0);
        assert_eq!(open(&mut large, handle(0), 0), 1, "flags");
        assert_eq!(open(&mut large, handle(0), 1), 0);
        assert_eq!(open(&mut small, handle(1), 1), 0);
        assert_eq!(open(&mut again, handle(1), 1), 0);
    }
    assert_eq!(again, small);
    assert_eq!(code_of!(cuMemFree_v2(large)), 1, "another's");
    assert_eq!(read(small, 4), [6; 4]);
    // Behind the exporter's work, by its event.
    let own = stream(1);
    let wait: unsafe extern "C" fn(gpumux_cuda::types::CUstream, *mut c_void, c_uint) -> c_int =
        symbol("cuStreamWaitEvent");
    // SAFETY: the handles are valid.
    assert_eq!(unsafe { wait(own, behind, 0) }, 0);
    cu!(cuMemsetD32Async(large + 12, 9, 1, own));
    cu!(cuMemsetD32Async(small + 12, 10, 1, own));
    cu!(cuStreamSynchronize(own));
    cu!(cuEventSynchronize(behind.cast()));
    assert_eq!(read(large, 4), [7, 7, 7, 9]);
    // SAFETY: no work uses it.
    unsafe {
        assert_eq!(close(small), 0);
        assert_eq!(close(small), 0);
        assert_eq!(close(small), 1, "as often as it was opened");
        assert_eq!(close(large), 0);
    }
    tell("done", &[]);
}

#[test]
fn peers_memory_is_reached_when_access_is_enabled() {
    on_profile(
        "peers_memory_is_reached_when_access_is_enabled",
        "devices = 2",
        || {
            primary();
            let place = alloc(4);
            let (mut first, mut second) = (null_mut(), null_mut());
            cu!(cuDevicePrimaryCtxRetain(&mut first, 0));
            cu!(cuDevicePrimaryCtxRetain(&mut second, 1));
            cu!(cuCtxSetCurrent(second));
            let can: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int =
                symbol("cuDeviceCanAccessPeer");
            let enable: unsafe extern "C" fn(*mut c_void, c_uint) -> c_int =
                symbol("cuCtxEnablePeerAccess");
            let disable: unsafe extern "C" fn(*mut c_void) -> c_int =
                symbol("cuCtxDisablePeerAccess");
            let text = c".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) { .reg .b64 %rd<2>; ld.param.u64 %rd1, [p]; st.global.u32 [%rd1], 3; ret; }";
            let (mut module, mut store) = (null_mut(), null_mut());
            cu!(cuModuleLoadData(&mut module, text.as_ptr().cast()));
            let name = CString::new("k").unwrap();
            cu!(cuModuleGetFunction(&mut store, module, name.as_ptr()));
            let (mut other, mut own) = (0, 0);
            // SAFETY: the pointers and handles are valid.
            unsafe {
                assert_eq!((can(&mut other, 1, 0), can(&mut own, 1, 1)), (0, 0));
                assert_eq!((other, own), (1, 0));
                assert_eq!(disable(first.cast()), 705);
                assert_eq!(enable(second.cast(), 0), 101, "itself");
                assert_eq!(enable(first.cast(), 0), 0);
                assert_eq!(enable(first.cast(), 0), 704);
            }
            launch(store, null_mut(), &[place]);
            cu!(cuCtxSynchronize());
            assert_eq!(read(place, 1), [3]);
            // SAFETY: the handle is valid.
            assert_eq!(unsafe { disable(first.cast()) }, 0);
            launch(store, null_mut(), &[place]);
            assert_eq!(code_of!(cuCtxSynchronize()), 700);
            cu!(cuCtxSetCurrent(first));
            assert_eq!(read(place, 1), [3], "the other device goes on");
        },
    );
}

#[test]
fn streams_wait_for_values_in_memory() {
    on_device("streams_wait_for_values_in_memory", || {
        primary();
        type Op32 =
            unsafe extern "C" fn(gpumux_cuda::types::CUstream, u64, c_uint, c_uint) -> c_int;
        type Op64 = unsafe extern "C" fn(gpumux_cuda::types::CUstream, u64, u64, c_uint) -> c_int;
        type Batch = unsafe extern "C" fn(
            gpumux_cuda::types::CUstream,
            c_uint,
            *const [u64; 6],
            c_uint,
        ) -> c_int;
        let (wait32, write32): (Op32, Op32) = (
            symbol("cuStreamWaitValue32_v2"),
            symbol("cuStreamWriteValue32_v2"),
        );
        let (wait64, write64): (Op64, Op64) = (
            symbol("cuStreamWaitValue64_v2"),
            symbol("cuStreamWriteValue64_v2"),
        );
        let batch: Batch = symbol("cuStreamBatchMemOp_v2");
        let (waiting, other) = (stream(1), stream(1));
        let place = alloc(32);
        cu!(cuMemsetD32Async(place, 0, 8, null_mut()));
        cu!(cuCtxSynchronize());
        // SAFETY: the memory is the program's.
        unsafe {
            assert_eq!(wait32(waiting, place + 1, 1, 0), 1, "not aligned");
            assert_eq!(wait32(waiting, 0x1000, 1, 0), 1, "no memory");
            // At least 2, then exactly a number of 64 bits.
            assert_eq!(wait32(waiting, place, 2, 0), 0);
            assert_eq!(wait64(waiting, place + 8, 1 << 40, 1), 0);
        }
        cu!(cuMemsetD32Async(place + 16, 9, 1, waiting));
        // SAFETY: the memory is the program's.
        unsafe { assert_eq!(write32(other, place, 1, 0), 0) };
        cu!(cuStreamSynchronize(other));
        assert_eq!(code_of!(cuStreamQuery(waiting)), 600, "not yet");
        // SAFETY: the memory is the program's.
        unsafe {
            assert_eq!(write32(other, place, 3, 0), 0);
            assert_eq!(write64(other, place + 8, 1 << 40, 0), 0);
        }
        cu!(cuStreamSynchronize(waiting));
        assert_eq!(read(place, 5), [3, 0, 0, 256, 9]);
        // Write, barrier, wait for what was written.
        let operations = [
            [2, place, 77, 0, 0, 0],
            [6, 0, 0, 0, 0, 0],
            [1, place, 77, 1, 0, 0],
        ];
        // SAFETY: the pointers are valid.
        assert_eq!(unsafe { batch(other, 3, operations.as_ptr(), 0) }, 0);
        cu!(cuStreamSynchronize(other));
        assert_eq!(read(place, 1), [77]);
    });
}

#[test]
fn pools_keep_memory_up_to_their_threshold() {
    on_device("pools_keep_memory_up_to_their_threshold", || {
        primary();
        let pool_of: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
            symbol("cuDeviceGetDefaultMemPool");
        type Attribute = unsafe extern "C" fn(*mut c_void, c_int, *mut u64) -> c_int;
        let (get, set): (Attribute, Attribute) = (
            symbol("cuMemPoolGetAttribute"),
            symbol("cuMemPoolSetAttribute"),
        );
        let trim: unsafe extern "C" fn(*mut c_void, usize) -> c_int = symbol("cuMemPoolTrimTo");
        let make: unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> c_int =
            symbol("cuMemAllocAsync");
        let free: unsafe extern "C" fn(u64, *mut c_void) -> c_int = symbol("cuMemFreeAsync");
        let mut pool = null_mut();
        // SAFETY: the pointers are valid here and below.
        assert_eq!(unsafe { pool_of(&mut pool, 0) }, 0);
        let values = |pool| {
            let mut found = [0; 4];
            for (value, attribute) in found.iter_mut().zip(5..) {
                // SAFETY: see above.
                assert_eq!(unsafe { get(pool, attribute, value) }, 0);
            }
            found.map(|bytes| bytes >> 20)
        };
        let one = || {
            let mut at = 0;
            // SAFETY: see above.
            assert_eq!(unsafe { make(&mut at, 10 * MIB, null_mut()) }, 0);
            at
        };
        // SAFETY: see above.
        let free = |at| assert_eq!(unsafe { free(at, null_mut()) }, 0);
        let (first, second) = (one(), one());
        // Reserved, at most; used, at most.
        assert_eq!(values(pool), [32, 32, 20, 20]);
        free(first);
        cu!(cuCtxSynchronize());
        assert_eq!(values(pool), [32, 32, 10, 20], "a piece goes as a whole");
        free(second);
        cu!(cuCtxSynchronize());
        assert_eq!(
            values(pool),
            [0, 32, 0, 20],
            "nothing is kept unless that is asked for"
        );
        // SAFETY: see above.
        assert_eq!(unsafe { set(pool, 4, &mut u64::MAX.clone()) }, 0);
        let third = one();
        free(third);
        cu!(cuCtxSynchronize());
        assert_eq!(values(pool)[0], 32);
        assert_eq!(one(), third, "used again");
        free(third);
        cu!(cuCtxSynchronize());
        // SAFETY: see above.
        unsafe {
            assert_eq!(set(pool, 6, &mut 0), 0);
            assert_eq!(set(pool, 7, &mut 0), 1, "that is what it is");
            assert_eq!(trim(pool, 0), 0);
        }
        assert_eq!(values(pool), [0, 32, 0, 20]);
    });
}
