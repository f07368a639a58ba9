//! What cannot be right fails, and everything behind it: an instruction that is not known, code without PTX. And what a real driver
//! does that programs rely on.

#[macro_use]
mod common;

use std::{
    ffi::{CString, c_int, c_uint, c_void},
    ptr::null_mut,
};

use common::*;

const HEAD: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

const NO_BINARY: i32 = 209;
const ILLEGAL_INSTRUCTION: i32 = 715;

/// Loads an image; CUDA's code.
fn load(image: &[u8]) -> (*mut c_void, i32) {
    let mut module = null_mut();
    let code = code_of!(cuModuleLoadData(&mut module, image.as_ptr().cast()));
    (module.cast(), code)
}

fn function(module: *mut c_void, name: &str) -> gpumux_cuda::types::CUfunction {
    let mut function = null_mut();
    let name = CString::new(name).unwrap();
    cu!(cuModuleGetFunction(
        &mut function,
        module.cast(),
        name.as_ptr()
    ));
    function
}

/// A fat binary with files of a kind (1 is PTX, 2 compiled) for an architecture.
fn binary(files: &[(u16, u32, &[u8])]) -> Vec<u64> {
    let mut all = Vec::new();
    for (kind, architecture, data) in files {
        let mut file = vec![0_u8; 64];
        let padded = data.len().next_multiple_of(8);
        file[..2].copy_from_slice(&kind.to_le_bytes());
        file[4..8].copy_from_slice(&64_u32.to_le_bytes());
        file[8..12].copy_from_slice(&(padded as u32).to_le_bytes());
        file[28..32].copy_from_slice(&architecture.to_le_bytes());
        file.extend_from_slice(data);
        file.resize(64 + padded, 0);
        all.extend(file);
    }
    let mut whole = 0xba55_ed50_u32.to_le_bytes().to_vec();
    whole.extend([1, 0, 16, 0]);
    whole.extend((all.len() as u64).to_le_bytes());
    whole.extend(all);
    let words = whole.chunks(8);
    words
        .map(|word| u64::from_le_bytes(std::array::from_fn(|i| word.get(i).copied().unwrap_or(0))))
        .collect()
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn unknown_instruction_fails_launch_and_context() {
    on_device("unknown_instruction_fails_launch_and_context", || {
        primary();
        let text =
            format!("{HEAD}.entry bad() {{ wgmma.something; ret; }}\n.entry good() {{ ret; }}\0");
        let (module, _) = load(text.as_bytes());
        launch(function(module, "good"), null_mut(), &[]);
        cu!(cuCtxSynchronize());
        let launched = try_launch(function(module, "bad"), null_mut(), &[]);
        assert_eq!(code(launched), ILLEGAL_INSTRUCTION);
        let mut address = 0;
        assert_eq!(
            code_of!(cuMemAlloc_v2(&mut address, 4)),
            ILLEGAL_INSTRUCTION
        );
        assert_eq!(code_of!(cuCtxSynchronize()), ILLEGAL_INSTRUCTION);
    });
}

#[test]
fn code_without_ptx_fails_the_context() {
    on_device("code_without_ptx_fails_the_context", || {
        primary();
        // For another device: a real one refuses it, too, and goes on.
        let older = binary(&[(2, 75, b"code"), (1, 120, b".version 9.0")]);
        assert_eq!(load(&bytes(&older)).1, NO_BINARY);
        cu!(cuMemFree_v2(alloc(4)));
        let own = binary(&[(2, 90, b"code"), (1, 120, b".version 9.0")]);
        assert_eq!(load(&bytes(&own)).1, NO_BINARY);
        let mut address = 0;
        assert_eq!(code_of!(cuMemAlloc_v2(&mut address, 4)), NO_BINARY);
    });
}

#[test]
fn newer_device_takes_newer_ptx() {
    let profile = "compute_capability = [12, 0]";
    on_profile("newer_device_takes_newer_ptx", profile, || {
        primary();
        let text = |name: &str| format!(".version 9.0\n.target sm_120\n.entry {name}() {{ ret; }}");
        let (old, new) = (text("old"), text("new"));
        let image = binary(&[(1, 90, old.as_bytes()), (1, 120, new.as_bytes())]);
        let (module, _) = load(&bytes(&image));
        let function = function(module, "new");
        let attribute: unsafe extern "C" fn(*mut c_int, c_int, *mut c_void) -> c_int =
            symbol("cuFuncGetAttribute");
        let mut versions = [0; 2];
        for (version, of) in versions.iter_mut().zip([5, 6]) {
            // SAFETY: the pointer is valid.
            assert_eq!(unsafe { attribute(version, of, function.cast()) }, 0);
        }
        assert_eq!(versions, [120, 120], "of its PTX and of the device");
    });
}

#[test]
fn linked_units_run_as_one_program() {
    on_device("linked_units_run_as_one_program", || {
        primary();
        let first = format!(
            "{HEAD}.extern .func (.param .b32 r) other();\n.visible .entry k(.param .u64 p) {{ .reg .b32 %r<2>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [p]; {{ .param .b32 v; call.uni (v), other, (); ld.param.b32 %r1, [v]; }} st.global.u32 [%rd1], %r1; ret; }}"
        );
        let second = format!(
            "{HEAD}.visible .func (.param .b32 r) other() {{ .reg .b32 %r<2>; mov.b32 %r1, 77; st.param.b32 [r], %r1; ret; }}"
        );
        let whole = binary(&[(2, 90, b"linked")]);
        let (first, second) = (
            binary(&[(1, 80, first.as_bytes())]),
            binary(&[(1, 80, second.as_bytes())]),
        );
        // As `nvcc -rdc=true` leaves it in a program.
        let list = [first.as_ptr() as u64, second.as_ptr() as u64, 0];
        let wrapper = [
            0x2_4662_43b1_u64,
            whole.as_ptr() as u64,
            list.as_ptr() as u64,
        ];
        let (module, _) = load(&bytes(&wrapper));
        let place = alloc(4);
        launch(function(module, "k"), null_mut(), &[place]);
        assert_eq!(read(place, 1), [77]);
    });
}

#[test]
fn memset_of_the_hosts_memory_is_done_on_return() {
    on_device("memset_of_the_hosts_memory_is_done_on_return", || {
        primary();
        let spin = kernel("gpumux_spin");
        let mut host = null_mut();
        cu!(cuMemHostAlloc(&mut host, 4096, 0));
        let managed = {
            let make: unsafe extern "C" fn(*mut u64, usize, c_uint) -> c_int =
                symbol("cuMemAllocManaged");
            let mut managed = 0;
            // SAFETY: the pointer is valid.
            assert_eq!(unsafe { make(&mut managed, 4096, 1) }, 0);
            managed
        };
        let set: unsafe extern "C" fn(u64, u8, usize) -> c_int = symbol("cuMemsetD8_v2");
        for at in [host as u64, managed] {
            launch(spin, null_mut(), &[20_000_000]);
            // SAFETY: the memory is the program's own; the device is done with it.
            let seen = unsafe {
                assert_eq!(set(at, 0xab, 4096), 0);
                (at as *const u8).add(4095).read_volatile()
            };
            assert_eq!(seen, 0xab);
        }
        assert_eq!(code_of!(cuMemFree_v2(managed)), 0);
    });
}

#[test]
fn memory_is_freed_without_a_current_context() {
    on_device("memory_is_freed_without_a_current_context", || {
        primary();
        let place = alloc(4);
        let mut host = null_mut();
        cu!(cuMemHostAlloc(&mut host, 4096, 0));
        cu!(cuCtxSetCurrent(null_mut()));
        assert_eq!(code_of!(cuMemFree_v2(place)), 0);
        assert_eq!(code_of!(cuMemFreeHost(host)), 0);
    });
}

#[test]
fn primary_context_keeps_its_handle_over_a_reset() {
    on_device("primary_context_keeps_its_handle_over_a_reset", || {
        let mut context = null_mut();
        cu!(cuDevicePrimaryCtxRetain(&mut context, 0));
        let reset: unsafe extern "C" fn(c_int) -> c_int = symbol("cuDevicePrimaryCtxReset_v2");
        let push: unsafe extern "C" fn(*mut c_void) -> c_int = symbol("cuCtxPushCurrent_v2");
        // SAFETY: the handle is the device's.
        unsafe {
            assert_eq!(reset(0), 0);
            assert_eq!(push(context.cast()), 0);
        }
        cu!(cuMemFree_v2(alloc(4)));
        let mut again = null_mut();
        cu!(cuDevicePrimaryCtxRetain(&mut again, 0));
        assert_eq!(again, context);
    });
}

#[test]
fn compilation_logs_and_limits_are_kept() {
    on_device("compilation_logs_and_limits_are_kept", || {
        primary();
        type Load = unsafe extern "C" fn(
            *mut *mut c_void,
            *const c_void,
            c_uint,
            *const c_int,
            *mut usize,
        ) -> c_int;
        let load: Load = symbol("cuModuleLoadDataEx");
        let (mut info, mut error) = ([0x7f_u8; 64], [0x7f_u8; 64]);
        // Most registers; information and its size; errors and their size.
        let options = [0, 3, 4, 5, 6];
        let mut values = [
            20,
            info.as_mut_ptr() as usize,
            64,
            error.as_mut_ptr() as usize,
            64,
        ];
        let text = format!("{HEAD}.const .align 4 .b32 c[25];\n.entry k() {{ ret; }}\0");
        let mut module = null_mut();
        let mut with = |text: &str| {
            // SAFETY: all pointers are valid.
            unsafe {
                load(
                    &mut module,
                    text.as_ptr().cast(),
                    5,
                    options.as_ptr(),
                    values.as_mut_ptr(),
                )
            }
        };
        assert_eq!(with(&text), 0);
        assert_eq!((info[0], error[0]), (0, 0));
        assert_eq!((values[2], values[4]), (0, 0));
        let attribute: unsafe extern "C" fn(*mut c_int, c_int, *mut c_void) -> c_int =
            symbol("cuFuncGetAttribute");
        let mut found = [0; 2];
        for (value, of) in found.iter_mut().zip([2, 4]) {
            let function = function(module, "k").cast();
            // SAFETY: the pointer is valid.
            assert_eq!(unsafe { attribute(value, of, function) }, 0);
        }
        assert_eq!(found, [100, 20], "bytes of constants, registers");
        values[4] = 64;
        let mut with = |text: &str| {
            // SAFETY: all pointers are valid.
            unsafe {
                load(
                    &mut module,
                    text.as_ptr().cast(),
                    5,
                    options.as_ptr(),
                    values.as_mut_ptr(),
                )
            }
        };
        assert_eq!(with("nonsense\0"), 218);
        assert!(error.starts_with(b"the PTX of a module is not understood"));
    });
}

#[test]
fn copy_of_reserved_addresses_without_memory_is_refused() {
    on_device(
        "copy_of_reserved_addresses_without_memory_is_refused",
        || {
            primary();
            let (place, mut reserved) = (alloc(MIB), 0);
            cu!(cuMemAddressReserve(&mut reserved, 2 * MIB, 0, 0, 0));
            let copy: unsafe extern "C" fn(u64, u64, usize) -> c_int = symbol("cuMemcpy");
            // A node: 4 bytes from one place to another, of a kind of memory (2 device, 4 any).
            let create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int =
                symbol("cuGraphCreate");
            type Add = unsafe extern "C" fn(
                *mut *mut c_void,
                *mut c_void,
                *const c_void,
                usize,
                *const [u64; 25],
                *mut c_void,
            ) -> c_int;
            let add: Add = symbol("cuGraphAddMemcpyNode");
            let node = |kind: u64, to: u64, from: u64| {
                let mut params = [0; 25];
                (params[4], params[6], params[15], params[17]) = (kind, from, kind, to);
                (params[22], params[23], params[24]) = (4, 1, 1);
                let (mut graph, mut node) = (null_mut(), null_mut());
                // SAFETY: all pointers are valid.
                unsafe {
                    assert_eq!(create(&mut graph, 0), 0);
                    add(&mut node, graph, std::ptr::null(), 0, &params, null_mut())
                }
            };
            for kind in [2, 4] {
                assert_eq!(node(kind, place, place + 8), 0);
                assert_eq!(node(kind, reserved, place), 1);
                assert_eq!(node(kind, place, reserved), 1);
            }
            let gone = alloc(4 * MIB);
            cu!(cuMemFree_v2(gone));
            assert_eq!(node(2, place, gone), 1);
            // SAFETY: refused.
            assert_eq!(unsafe { copy(reserved, place, 4) }, 1);
        },
    );
}

#[test]
fn pinned_memory_is_copied_as_the_devices() {
    on_device("pinned_memory_is_copied_as_the_devices", || {
        primary();
        let mut host = null_mut();
        cu!(cuMemHostAlloc(&mut host, 4096, 0));
        let at = host as u64;
        let range: unsafe extern "C" fn(*mut u64, *mut usize, u64) -> c_int =
            symbol("cuMemGetAddressRange_v2");
        let copy: unsafe extern "C" fn(u64, u64, usize) -> c_int = symbol("cuMemcpyDtoD_v2");
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the pointers and the memory are valid.
        unsafe {
            assert_eq!(range(&mut base, &mut bytes, at + 8), 0);
            assert_eq!((base, bytes), (at, 4096));
            (at as *mut u32).write_volatile(5);
            assert_eq!(copy(at + 64, at, 4), 0);
        }
        cu!(cuCtxSynchronize());
        assert_eq!(read(at + 64, 1), [5]);
        // The program's other memory has none.
        let own = 0_u32;
        let mut to = 0_u32;
        let copied = code_of!(cuMemcpyDtoH_v2(
            (&raw mut to).cast(),
            (&raw const own) as u64,
            4
        ));
        assert_eq!(copied, 1);
    });
}
