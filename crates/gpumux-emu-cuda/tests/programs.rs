//! The library as programs see it: each test runs its program in a process of its own, with the library
//! preloaded, on a device served by the test's process.

#[macro_use]
mod common;

use std::{
    ffi::{CString, c_char, c_int, c_void},
    fs,
    os::fd::{FromRawFd, OwnedFd},
    process::{Command, Stdio},
    ptr::null_mut,
    sync::atomic::{AtomicU32, Ordering},
};

use gpumux_cuda::types::{
    CUevent, CUgraph, CUgraphExec, CUmemAccessDesc, CUmemAllocationProp, CUstream,
    EVENT_DISABLE_TIMING, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, STREAM_NON_BLOCKING,
};
use gpumux_emu::Profile;

use common::*;

#[test]
fn memory_keeps_what_was_written() {
    on_device("memory_keeps_what_was_written", || {
        primary();
        let add = kernel("gpumux_add_u32");
        for count in [1, 100, 300_000, 2_000_000] {
            let (one, two) = (alloc(count * 4), alloc(count * 4));
            let values: Vec<u32> = (0..count as u32).collect();
            cu!(cuMemcpyHtoD_v2(one, values.as_ptr().cast(), count * 4));
            launch(add, null_mut(), &[one, 7, count as u64]);
            let copy: unsafe extern "C" fn(u64, u64, usize) -> c_int = symbol("cuMemcpyDtoD_v2");
            // SAFETY: both ranges are ours.
            assert_eq!(unsafe { copy(two, one, count * 4) }, 0);
            let expected: Vec<u32> = values.iter().map(|value| value + 7).collect();
            assert_eq!(read(two, count), expected);
            cu!(cuMemsetD32Async(two, 5, count, null_mut()));
            assert_eq!(read(two, count), vec![5; count]);
            cu!(cuMemFree_v2(one));
            cu!(cuMemFree_v2(two));
        }
        // Freed memory is not the program's any more.
        let gone = alloc(4 * MIB);
        cu!(cuMemFree_v2(gone));
        assert_eq!(code_of!(cuMemFree_v2(gone)), 1);
        assert_eq!(code_of!(cuMemsetD8Async(gone, 0, 1, null_mut())), 1);
    });
}

#[test]
fn memory_ends_at_the_devices_size() {
    on_device("memory_ends_at_the_devices_size", || {
        primary();
        let (mut free, mut total) = (0, 0);
        cu!(cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!((total, free), (80 << 30, (80 << 30) - (520 << 20)));
        let most = alloc(free);
        let mut more = 0;
        assert_eq!(code_of!(cuMemAlloc_v2(&mut more, MIB)), 2);
        cu!(cuMemFree_v2(most));
        cu!(cuMemFree_v2(alloc(MIB)));
    });
}

#[test]
fn mappings_can_be_moved_and_shared() {
    on_device("mappings_can_be_moved_and_shared", || {
        primary();
        let mut prop = CUmemAllocationProp::on_device(0);
        prop.requested_handle_types = MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let access = CUmemAccessDesc {
            location: prop.location,
            flags: 3,
        };
        let (mut one, mut two, mut handle) = (0, 0, 0);
        cu!(cuMemAddressReserve(&mut one, 4 * MIB, 0, 0, 0));
        cu!(cuMemAddressReserve(&mut two, 4 * MIB, 0, 0, 0));
        cu!(cuMemCreate(&mut handle, 2 * MIB, &prop, 0));
        cu!(cuMemMap(one + 2 * MIB as u64, 2 * MIB, 0, handle, 0));
        let at = one + 2 * MIB as u64;
        // Mapped, and not accessible yet.
        assert_eq!(code_of!(cuMemsetD8Async(at, 1, 1, null_mut())), 1);
        cu!(cuMemSetAccess(at, 2 * MIB, &access, 1));
        cu!(cuMemsetD32Async(at, 42, MIB / 2, null_mut()));
        cu!(cuCtxSynchronize());

        type Export = unsafe extern "C" fn(*mut c_int, u64, c_int, u64) -> c_int;
        type Import = unsafe extern "C" fn(*mut u64, usize, c_int) -> c_int;
        let (mut file, mut imported) = (-1, 0);
        // SAFETY: the pointers are valid.
        unsafe {
            let export: Export = symbol("cuMemExportToShareableHandle");
            assert_eq!(export(&mut file, handle, 1, 0), 0);
            let import: Import = symbol("cuMemImportFromShareableHandle");
            assert_eq!(import(&mut imported, file as usize, 1), 0);
            assert_ne!(import(&mut imported, 0, 1), 0, "no memory");
            drop(OwnedFd::from_raw_fd(file));
        }
        cu!(cuMemUnmap(at, 2 * MIB));
        cu!(cuMemRelease(handle));
        cu!(cuMemMap(two, 2 * MIB, 0, imported, 0));
        cu!(cuMemSetAccess(two, 2 * MIB, &access, 1));
        assert_eq!(read(two, MIB / 2), vec![42; MIB / 2]);
        // SAFETY: the driver refuses: something is mapped there; half of a mapping.
        unsafe {
            assert_ne!(code(driver().cuMemAddressFree(two, 4 * MIB)), 0);
            assert_ne!(code(driver().cuMemUnmap(two, MIB)), 0);
        }
        cu!(cuMemUnmap(two, 2 * MIB));
        cu!(cuMemRelease(imported));
        cu!(cuMemAddressFree(one, 4 * MIB));
        cu!(cuMemAddressFree(two, 4 * MIB));
        let (mut free, mut total) = (0, 0);
        cu!(cuMemGetInfo_v2(&mut free, &mut total));
        assert_eq!(total - free, 520 * MIB);
    });
}

#[test]
fn events_have_the_models_time() {
    on_device("events_have_the_models_time", || {
        primary();
        let spin = kernel("gpumux_spin");
        let stream = stream(STREAM_NON_BLOCKING);
        let (start, end) = (event(0), event(0));
        // All else is queued when it ends.
        launch(spin, stream, &[500_000_000]);
        cu!(cuEventRecord(start, stream));
        launch(spin, stream, &[20_000_000]);
        cu!(cuEventRecord(end, stream));
        cu!(cuEventSynchronize(end));
        let mut ms = 0.0;
        cu!(cuEventElapsedTime(&mut ms, start, end));
        // The kernel and its overhead; had it come late, that would be on top.
        assert!((20.003..40.0).contains(&ms), "{ms}");
        let untimed = event(EVENT_DISABLE_TIMING);
        cu!(cuEventRecord(untimed, stream));
        cu!(cuEventSynchronize(untimed));
        // SAFETY: the pointer is valid.
        let result = unsafe { driver().cuEventElapsedTime(&mut ms, start, untimed) };
        assert_eq!(code(result), 400);
        // Never recorded: reached.
        cu!(cuEventQuery(event(0)));
    });
}

#[test]
fn sweep_counts_each_wrong_element_once() {
    on_device("sweep_counts_each_wrong_element_once", || {
        primary();
        let sweep = kernel("gpumux_sweep_u32");
        let (count, wrong) = (5_000_000, alloc(8));
        let at = alloc(count * 4);
        let pass = |value| {
            cu!(cuMemsetD32Async(wrong, 0, 2, null_mut()));
            launch(sweep, null_mut(), &[at, value, count as u64, wrong]);
            read(wrong, 2)[0]
        };
        cu!(cuMemsetD32Async(at, 0, count, null_mut()));
        // Nearly all are wrong at first: index 0 is not, and others by chance.
        assert!(pass(0) > 4_990_000);
        assert_eq!(pass(1), 0);
        let expected: Vec<u32> = (0..count as u64)
            .map(|i| ((i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32).wrapping_add(2))
            .collect();
        assert_eq!(read(at, count), expected);
        cu!(cuMemsetD32Async(at + 4_000_000, 7, 3, null_mut()));
        assert_eq!([pass(2), pass(3)], [3, 0]);
        // Another value is wrong everywhere.
        assert_eq!(pass(9), count as u32);
    });
}

#[test]
fn streams_keep_the_order_that_was_asked_for() {
    on_device("streams_keep_the_order_that_was_asked_for", || {
        primary();
        let (spin, add, rounds) = (
            kernel("gpumux_spin"),
            kernel("gpumux_add_u32"),
            kernel("gpumux_rounds_u32"),
        );
        let at = alloc(4);
        let value = || read(at, 1)[0];
        let (one, two) = (stream(STREAM_NON_BLOCKING), stream(STREAM_NON_BLOCKING));
        // The second stream waits for the first by an event.
        cu!(cuMemsetD32Async(at, 0, 1, one));
        launch(spin, one, &[20_000_000]);
        launch(add, one, &[at, 5, 1]);
        let done = event(EVENT_DISABLE_TIMING);
        cu!(cuEventRecord(done, one));
        let wait: unsafe extern "C" fn(CUstream, CUevent, u32) -> c_int =
            symbol("cuStreamWaitEvent");
        // SAFETY: both handles are alive.
        assert_eq!(unsafe { wait(two, done, 0) }, 0);
        cu!(cuMemsetD32Async(at, 9, 1, two));
        cu!(cuStreamSynchronize(two));
        assert_eq!(value(), 9);
        cu!(cuStreamQuery(one));

        // The legacy stream waits for blocking ones, and they for it.
        let blocking = stream(0);
        launch(spin, blocking, &[20_000_000]);
        cu!(cuMemsetD32Async(at, 1, 1, blocking));
        launch(rounds, null_mut(), &[at, 1, 3]);
        launch(spin, null_mut(), &[20_000_000]);
        launch(add, blocking, &[at, 10, 1]);
        cu!(cuStreamSynchronize(blocking));
        assert_eq!(value(), 14);
        cu!(cuCtxSynchronize());
    });
}

#[test]
fn a_full_queue_holds_the_program_back_and_loses_nothing() {
    on_device(
        "a_full_queue_holds_the_program_back_and_loses_nothing",
        || {
            primary();
            let add = kernel("gpumux_add_u32");
            let at = alloc(4);
            let stream = stream(STREAM_NON_BLOCKING);
            cu!(cuMemsetD32Async(at, 0, 1, stream));
            for _ in 0..10_000 {
                launch(add, stream, &[at, 1, 1]);
            }
            cu!(cuStreamSynchronize(stream));
            assert_eq!(read(at, 1), [10_000]);
        },
    );
}

#[test]
fn graphs_replay_what_was_captured() {
    on_device("graphs_replay_what_was_captured", || {
        primary();
        let (add, spin) = (kernel("gpumux_add_u32"), kernel("gpumux_spin"));
        let at = alloc(8);
        let (one, two) = (stream(STREAM_NON_BLOCKING), stream(STREAM_NON_BLOCKING));
        cu!(cuMemsetD32Async(at, 0, 2, one));
        let (fork, join) = (event(EVENT_DISABLE_TIMING), event(EVENT_DISABLE_TIMING));
        let wait: unsafe extern "C" fn(CUstream, CUevent, u32) -> c_int =
            symbol("cuStreamWaitEvent");
        let mut graph: CUgraph = null_mut();
        cu!(cuStreamBeginCapture_v2(one, 1));
        launch(add, one, &[at, 1, 1]);
        cu!(cuEventRecord(fork, one));
        // SAFETY: the handles are alive.
        assert_eq!(unsafe { wait(two, fork, 0) }, 0);
        launch(spin, two, &[5_000_000]);
        launch(add, two, &[at + 4, 2, 1]);
        cu!(cuEventRecord(join, two));
        // SAFETY: as above.
        assert_eq!(unsafe { wait(one, join, 0) }, 0);
        launch(add, one, &[at + 4, 10, 1]);
        cu!(cuStreamEndCapture(one, &mut graph));
        let mut executable: CUgraphExec = null_mut();
        cu!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        cu!(cuGraphDestroy(graph));
        assert_eq!(read(at, 2), [0, 0], "a capture runs nothing");
        for stream in [one, two, one] {
            cu!(cuGraphLaunch(executable, stream));
        }
        cu!(cuCtxSynchronize());
        assert_eq!(read(at, 2), [3, 36]);
        cu!(cuGraphExecDestroy(executable));

        // A stream that was not joined, and a wait that cannot be captured.
        cu!(cuStreamBeginCapture_v2(one, 1));
        cu!(cuEventRecord(fork, one));
        // SAFETY: the handles are alive.
        assert_eq!(unsafe { wait(two, fork, 0) }, 0);
        assert_eq!(code_of!(cuStreamEndCapture(one, &mut graph)), 904);
        cu!(cuStreamBeginCapture_v2(one, 1));
        // SAFETY: as above.
        unsafe {
            assert_eq!(code(driver().cuStreamSynchronize(one)), 900);
            assert_eq!(code(driver().cuStreamEndCapture(one, &mut graph)), 901);
        }
        launch(add, two, &[at, 1, 1]);
        cu!(cuStreamSynchronize(two));
    });
}

static CALLS: AtomicU32 = AtomicU32::new(0);

extern "C" fn called(data: *mut c_void) {
    // What came before in the stream is done: 0, 1, 2.
    let expected = data as usize as u32;
    assert_eq!(CALLS.fetch_add(1, Ordering::SeqCst), expected);
}

#[test]
fn host_functions_run_in_their_place() {
    on_device("host_functions_run_in_their_place", || {
        primary();
        let spin = kernel("gpumux_spin");
        let stream = stream(STREAM_NON_BLOCKING);
        type HostFunction = extern "C" fn(*mut c_void);
        let launch_host: unsafe extern "C" fn(CUstream, HostFunction, usize) -> c_int =
            symbol("cuLaunchHostFunc");
        launch(spin, stream, &[1_000_000_000]);
        for i in 0..3 {
            // SAFETY: the function outlives the stream.
            assert_eq!(unsafe { launch_host(stream, called, i) }, 0);
            assert_eq!(CALLS.load(Ordering::SeqCst), 0, "before the kernel is done");
        }
        cu!(cuStreamSynchronize(stream));
        assert_eq!(CALLS.load(Ordering::SeqCst), 3);
    });
}

#[test]
fn a_fault_stays_in_its_context() {
    on_device("a_fault_stays_in_its_context", || {
        primary();
        let fill = kernel("gpumux_fill_u32");
        let at = alloc(4 * MIB);
        let (mut first, mut second) = (null_mut(), null_mut());
        cu!(cuCtxGetCurrent(&mut first));
        cu!(cuCtxCreate_v2(&mut second, 0, 0));
        let (trap, other) = (kernel("gpumux_trap"), alloc(4));
        cu!(cuMemsetD32Async(other, 3, 1, null_mut()));
        assert_eq!(read(other, 1), [3]);

        cu!(cuCtxSetCurrent(first));
        let beyond = 64 << 20;
        launch(fill, null_mut(), &[at, 1, beyond]);
        for _ in 0..2 {
            assert_eq!(code_of!(cuCtxSynchronize()), 700);
        }
        assert_eq!(code(try_launch(fill, null_mut(), &[at, 1, 1])), 700);

        cu!(cuCtxSetCurrent(second));
        assert_eq!(read(other, 1), [3]);
        launch(trap, null_mut(), &[]);
        assert_eq!(code_of!(cuCtxSynchronize()), 719);
        cu!(cuCtxDestroy_v2(second));
    });
}

#[test]
fn functions_are_found_by_name_and_version() {
    on_device("functions_are_found_by_name_and_version", || {
        primary();
        type Find =
            unsafe extern "C" fn(*const c_char, *mut usize, c_int, u64, *mut c_int) -> c_int;
        let find: Find = symbol("cuGetProcAddress_v2");
        let ask = |name: &str, version, flags| {
            let name = CString::new(name).unwrap();
            let (mut at, mut status) = (1, -1);
            // SAFETY: the pointers are valid.
            let code = unsafe { find(name.as_ptr(), &mut at, version, flags, &mut status) };
            (code, at, status)
        };
        let itself = symbol::<usize>("cuGetProcAddress_v2");
        // `symbol` reads a function pointer, whatever its type.
        assert_eq!(ask("cuGetProcAddress", 12000, 0), (0, itself, 0));
        assert_ne!(ask("cuGetProcAddress", 11030, 0).1, itself);
        let (own, shared) = (
            ask("cuMemsetD8Async", 7000, 2).1,
            ask("cuMemsetD8Async", 7000, 0).1,
        );
        assert!(own != shared && own != 0 && shared != 0);
        assert_eq!(ask("cuMemCreate", 9000, 0), (500, 0, 2));
        assert_eq!(ask("cuNoSuchThing", 13000, 0), (500, 0, 1));
        assert_eq!(ask("", 13000, 0), (0, 0, 0));
    });
}

/// GPU 0 has two instances, GPU 1 is whole. The program runs on the second instance.
/// As Numba does: two texts of PTX, of which one calls the other's function, are linked and loaded.
#[test]
fn code_is_linked_at_run_time() {
    const CALLER: &str = "
        .version 8.0\n.target sm_80\n.address_size 64
        .extern .func (.param .b32 out) twice (.param .b32 in);
        .visible .entry store_twice(.param .u64 to, .param .u32 value) {
            .reg .b32 %r<3>; .reg .b64 %rd<2>; .param .b32 a; .param .b32 b;
            ld.param.u64 %rd1, [to]; ld.param.u32 %r1, [value];
            st.param.b32 [a], %r1;
            call.uni (b), twice, (a);
            ld.param.b32 %r2, [b];
            st.global.u32 [%rd1], %r2;
            ret;
        }";
    const CALLED: &str = "
        .version 8.0\n.target sm_80\n.address_size 64
        .visible .func (.param .b32 out) twice (.param .b32 in) {
            .reg .b32 %r<2>;
            ld.param.b32 %r1, [in]; add.u32 %r1, %r1, %r1; st.param.b32 [out], %r1;
            ret;
        }";
    type Create = unsafe extern "C" fn(u32, *mut c_void, *mut c_void, *mut *mut c_void) -> c_int;
    type Add = unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *const c_void,
        usize,
        *const c_char,
        u32,
        *mut c_void,
        *mut c_void,
    ) -> c_int;
    type Complete = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut usize) -> c_int;
    /// `CU_JIT_INPUT_PTX`
    const PTX: c_int = 1;
    on_device("code_is_linked_at_run_time", || {
        primary();
        let (mut link, mut image, mut size) = (null_mut(), null_mut(), 0);
        // SAFETY: the types are `cuda.h`'s, the pointers are valid for the calls.
        unsafe {
            let create: Create = symbol("cuLinkCreate_v2");
            let add: Add = symbol("cuLinkAddData_v2");
            let complete: Complete = symbol("cuLinkComplete");
            assert_eq!(create(0, null_mut(), null_mut(), &raw mut link), 0);
            let added = |text: &str| {
                let (data, name) = (text.as_ptr().cast(), c"text".as_ptr());
                add(link, PTX, data, text.len(), name, 0, null_mut(), null_mut())
            };
            assert_eq!(added(CALLER), 0);
            assert_ne!(added("\u{7f}ELF"), 0);
            assert_eq!(added(CALLED), 0);
            assert_eq!(complete(link, &raw mut image, &raw mut size), 0);
        }
        assert!(size > CALLER.len());
        let (mut module, mut function) = (null_mut(), null_mut());
        cu!(cuModuleLoadData(&mut module, image));
        cu!(cuModuleGetFunction(
            &mut function,
            module,
            c"store_twice".as_ptr()
        ));
        let to = alloc(4);
        launch(function, null_mut(), &[to, 21]);
        let mut found = 0_u32;
        cu!(cuMemcpyDtoH_v2((&raw mut found).cast(), to, 4));
        assert_eq!(found, 42);
    });
}

#[test]
fn the_library_exports_every_entry_point() {
    // SAFETY: it does nothing when it is loaded.
    let library =
        unsafe { libloading::Library::new(gpumux_tests::built().join("libgpumux_emu.so")) };
    let library = library.unwrap();
    let mut count = 0;
    for it in gpumux_cuda::list::entry_points() {
        let symbol = it.symbol;
        // SAFETY: only looked up.
        let found = unsafe { library.get::<*const c_void>(symbol.as_bytes()) };
        assert!(found.is_ok(), "{symbol}");
        count += 1;
    }
    assert!(count > 600, "{count}");
}

/// A function that is not there says so, and is counted.
#[test]
fn what_is_missing_is_counted() {
    const NAME: &str = "what_is_missing_is_counted";
    if is_program(NAME) {
        // SAFETY: takes no arguments that it looks at.
        let code = unsafe {
            let library = libloading::Library::new("libcuda.so.1").unwrap();
            let call = library
                .get::<unsafe extern "C" fn() -> c_int>(b"cuGreenCtxDestroy")
                .unwrap();
            call() + call()
        };
        assert_eq!(code, 2 * 801);
        return;
    }
    let device = Device::new(Profile::default());
    let counts = device.note();
    let child = Command::new(std::env::current_exe().unwrap())
        .args([NAME, "--exact", "--nocapture", "--test-threads=1"])
        .envs(gpumux_emu::environment(
            gpumux_tests::built(),
            &device.socket(),
        ))
        .env(PROGRAM, NAME)
        .env("GPUMUX_EMU_MISSING", &counts)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    finish(child);
    assert_eq!(fs::read_to_string(counts).unwrap(), "2 cuGreenCtxDestroy\n");
}
