//! What the tests share: a device, a program that is the test itself in a process of its own, and calls of the driver.
// Each test file uses a part.
#![allow(dead_code, unused_macros)]

use std::{
    ffi::{CString, c_void},
    path::PathBuf,
    process::{Child, Command, Stdio},
    ptr::null_mut,
    thread,
    time::{Duration, Instant},
};

use gpumux_cuda::{
    Driver, Error,
    types::{CUdeviceptr, CUevent, CUfunction, CUstream},
};
use gpumux_emu::{
    Profile,
    client::ProcessConnection,
    server::{Server, ServerHandle},
};

pub(crate) const PROGRAM: &str = "GPUMUX_EMU_TEST_PROGRAM";
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
pub(crate) const MIB: usize = 1 << 20;

/// Whether this process is the program of that name.
pub(crate) fn is_program(name: &str) -> bool {
    std::env::var(PROGRAM).is_ok_and(|program| program == name)
}

/// A device and the folder with its socket.
pub(crate) struct Device {
    pub(crate) server: Option<ServerHandle>,
    pub(crate) dir: tempfile::TempDir,
}

impl Device {
    pub(crate) fn new(profile: Profile) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::bind(profile, &dir.path().join("emu")).unwrap();
        let server = Some(server.spawn().unwrap());
        Self { server, dir }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("emu")
    }

    /// A file that programs use to tell something.
    pub(crate) fn note(&self) -> PathBuf {
        self.dir.path().join("note")
    }

    pub(crate) fn start(&self, name: &str) -> Child {
        self.command(name).spawn().unwrap()
    }

    pub(crate) fn command(&self, name: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .envs(gpumux_emu::environment(
                gpumux_tests::built(),
                &self.socket(),
            ))
            .env(PROGRAM, name)
            .env("NOTE", self.note())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn used(&self) -> u64 {
        let connection = ProcessConnection::open(&self.socket()).unwrap();
        connection.status(0).unwrap().used
    }

    /// What an ended process had stays taken for a moment, then all is free.
    #[track_caller]
    pub(crate) fn wait_until_free(&self) {
        wait_for("the memory of ended processes", || self.used() == 0);
    }
}

#[track_caller]
pub(crate) fn wait_for(what: &str, mut there: impl FnMut() -> bool) {
    let start = Instant::now();
    while !there() {
        assert!(start.elapsed() < PATIENCE, "in vain: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for a program's end; its standard error.
#[track_caller]
pub(crate) fn finish(mut child: Child) -> String {
    wait_for("the program's end", || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    let ran = output.status.success() && out.contains("1 passed");
    assert!(ran, "{:?}\n{out}\n{err}", output.status);
    err
}

/// Runs `program` in a process with the library, on a device of its own.
#[track_caller]
pub(crate) fn on_device(name: &str, program: impl FnOnce()) {
    on_profile(name, "", program);
}

/// The same on one that this profile describes.
#[track_caller]
pub(crate) fn on_profile(name: &str, profile: &str, program: impl FnOnce()) {
    if is_program(name) {
        return program();
    }
    let device = Device::new(Profile::parse(profile).unwrap());
    finish(device.start(name));
    device.wait_until_free();
}

// What programs use

pub(crate) fn driver() -> &'static Driver {
    Driver::get().unwrap()
}

/// Calls of the driver, all of them with pointers that are valid for the call.
macro_rules! cu {
    ($call:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the tests pass valid pointers.
        unsafe { driver().$call($($arg),*) }.unwrap()
    };
}

/// CUDA's code for a call.
macro_rules! code_of {
    ($call:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the tests pass valid pointers; wrong addresses and handles are refused.
        code(unsafe { driver().$call($($arg),*) })
    };
}

pub(crate) fn code(result: Result<(), Error>) -> i32 {
    result.map_or_else(|error| error.code().unwrap(), |()| 0)
}

/// The device's primary context, current.
pub(crate) fn primary() {
    let mut context = null_mut();
    cu!(cuDevicePrimaryCtxRetain(&mut context, 0));
    cu!(cuCtxSetCurrent(context));
}

pub(crate) fn kernel(name: &str) -> CUfunction {
    let text = CString::new(include_str!("../../../gpumux-workload/src/kernels.ptx")).unwrap();
    let (mut module, mut function) = (null_mut(), null_mut());
    cu!(cuModuleLoadData(&mut module, text.as_ptr().cast()));
    let name = CString::new(name).unwrap();
    cu!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

/// Launches with arguments of 8 bytes, of which 4-byte ones use the lower half.
pub(crate) fn try_launch(
    function: CUfunction,
    stream: CUstream,
    arguments: &[u64],
) -> Result<(), Error> {
    let mut pointers: Vec<*mut c_void> = arguments
        .iter()
        .map(|argument| std::ptr::from_ref(argument).cast_mut().cast())
        .collect();
    // SAFETY: the arguments are valid for the call.
    unsafe {
        driver().cuLaunchKernel(
            function,
            528,
            1,
            1,
            512,
            1,
            1,
            0,
            stream,
            pointers.as_mut_ptr(),
            null_mut(),
        )
    }
}

pub(crate) fn launch(function: CUfunction, stream: CUstream, arguments: &[u64]) {
    try_launch(function, stream, arguments).unwrap();
}

pub(crate) fn alloc(bytes: usize) -> CUdeviceptr {
    let mut address = 0;
    cu!(cuMemAlloc_v2(&mut address, bytes));
    address
}

pub(crate) fn stream(flags: u32) -> CUstream {
    let mut stream = null_mut();
    cu!(cuStreamCreate(&mut stream, flags));
    stream
}

pub(crate) fn event(flags: u32) -> CUevent {
    let mut event = null_mut();
    cu!(cuEventCreate(&mut event, flags));
    event
}

pub(crate) fn read(address: CUdeviceptr, count: usize) -> Vec<u32> {
    let mut values = vec![0; count];
    cu!(cuMemcpyDtoH_v2(
        values.as_mut_ptr().cast(),
        address,
        count * 4
    ));
    values
}

/// A function that the tests' driver list does not have.
pub(crate) fn symbol<T: Copy>(name: &str) -> T {
    // SAFETY: the callers give the function's type.
    unsafe {
        let library = libloading::Library::new("libcuda.so.1").unwrap();
        // Never unloaded: the function is in it.
        let library = std::mem::ManuallyDrop::new(library);
        *library.get::<T>(name.as_bytes()).unwrap()
    }
}
