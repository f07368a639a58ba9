//! Processes: children, several at a time, and the ends of programs and of the server.

#[macro_use]
mod common;

use std::{fs, ptr::null_mut, thread};

use gpumux_cuda::{Driver, types::STREAM_NON_BLOCKING};
use gpumux_emu::{Profile, SOCKET_VARIABLE};

use common::*;

#[test]
fn a_forked_child_cannot_use_cuda_and_does_no_harm() {
    on_device("a_forked_child_cannot_use_cuda_and_does_no_harm", || {
        primary();
        let at = alloc(4);
        cu!(cuMemsetD32Async(at, 7, 1, null_mut()));
        // SAFETY: the child only calls functions that use no lock of another thread, and leaves at once.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let refused = code(driver().cuCtxSynchronize()) == 3
                    && code(driver().cuInit(0)) == 3
                    && code(driver().cuMemFree_v2(at)) == 3;
                libc::_exit(if refused { 0 } else { 1 });
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            assert_eq!(status, 0);
        }
        assert_eq!(read(at, 1), [7]);
    });
}

#[test]
fn without_a_server_there_is_no_device_and_one_line_says_so() {
    const NAME: &str = "without_a_server_there_is_no_device_and_one_line_says_so";
    if is_program(NAME) {
        for _ in 0..2 {
            assert_eq!(Driver::get().err().unwrap().code(), Some(100));
        }
        return;
    }
    let mut device = Device::new(Profile::default());
    device.server.take().unwrap().stop().unwrap();
    let said = finish(device.start(NAME));
    assert_eq!(said.matches("gpumux:").count(), 1, "{said}");
    assert!(
        said.contains("gpumux emu serve") && said.contains(SOCKET_VARIABLE),
        "{said}"
    );
}

#[test]
fn server_death_ends_waiting_programs() {
    const NAME: &str = "server_death_ends_waiting_programs";
    if is_program(NAME) {
        primary();
        let stream = stream(STREAM_NON_BLOCKING);
        launch(kernel("gpumux_spin"), stream, &[u64::MAX / 4]);
        fs::write(std::env::var_os("NOTE").unwrap(), "").unwrap();
        let mut address = 0;
        // SAFETY: the handles and pointers are valid.
        unsafe {
            assert_eq!(code(driver().cuStreamSynchronize(stream)), 46);
            assert_eq!(code(driver().cuCtxSynchronize()), 46);
            assert_eq!(code(driver().cuMemAlloc_v2(&mut address, 5 * MIB)), 46);
        }
        return;
    }
    let mut device = Device::new(Profile::default());
    let program = device.start(NAME);
    wait_for("the launch", || device.note().exists());
    device.server.take().unwrap().stop().unwrap();
    finish(program);
}

#[test]
fn what_a_killed_program_had_is_free_again() {
    const NAME: &str = "what_a_killed_program_had_is_free_again";
    if is_program(NAME) {
        primary();
        let stream = stream(STREAM_NON_BLOCKING);
        alloc(1 << 30);
        launch(kernel("gpumux_spin"), stream, &[u64::MAX / 4]);
        fs::write(std::env::var_os("NOTE").unwrap(), "").unwrap();
        thread::sleep(PATIENCE);
        return;
    }
    let device = Device::new(Profile::default());
    let mut program = device.start(NAME);
    wait_for("the launch", || device.note().exists());
    assert_eq!(device.used(), (1 << 30) + (520 << 20));
    program.kill().unwrap();
    program.wait().unwrap();
    device.wait_until_free();
}

#[test]
fn two_programs_share_the_device() {
    const NAME: &str = "two_programs_share_the_device";
    if is_program(NAME) {
        primary();
        let (spin, rounds) = (kernel("gpumux_spin"), kernel("gpumux_rounds_u32"));
        let at = alloc(4 * MIB);
        let (start, end) = (event(0), event(0));
        cu!(cuMemsetD32Async(at, 0, MIB, null_mut()));
        cu!(cuEventRecord(start, null_mut()));
        for _ in 0..10 {
            launch(spin, null_mut(), &[20_000_000]);
            launch(rounds, null_mut(), &[at, MIB as u64, 10]);
        }
        cu!(cuEventRecord(end, null_mut()));
        assert_eq!(read(at, MIB), vec![100; MIB]);
        let mut ms = 0.0;
        cu!(cuEventElapsedTime(&mut ms, start, end));
        fs::write(
            format!("{}-{}", std::env::var("NOTE").unwrap(), std::process::id()),
            ms.to_string(),
        )
        .unwrap();
        return;
    }
    let device = Device::new(Profile::default());
    let programs = [device.start(NAME), device.start(NAME)];
    let notes = programs
        .each_ref()
        .map(|it| format!("{}-{}", device.note().display(), it.id()));
    for program in programs {
        finish(program);
    }
    // Alone each takes 200 ms. Together the device has 400 ms of work and switches on top: the one that ends
    // last saw all of what overlapped.
    let times = notes.map(|note| fs::read_to_string(note).unwrap().parse::<f64>().unwrap());
    assert!(times.iter().all(|ms| *ms >= 200.0), "{times:?}");
    device.wait_until_free();
}
