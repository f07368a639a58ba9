//! A program for the shim's tests: makes RM calls as libcuda does, as told on standard input, and
//! answers each command with one line.

use std::{
    ffi::{c_int, c_void},
    io::{BufRead, Write},
};

use common::Rm;
use gpumux_rm::layout::{Free, engine, escape};

mod common;

fn main() {
    let mut rm: Option<Rm> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = || u32::from_str_radix(words[1], 16).unwrap();
        let answer = match words[0] {
            "open" => {
                let new = Rm::open();
                rm = Some(new);
                format!("{:x}", new.client)
            }
            "context" => {
                rm.unwrap().context(number());
                String::new()
            }
            // Scheduled, but its library never sets a slice.
            "bare" => {
                rm.unwrap().group(number(), engine::GR0);
                String::new()
            }
            "slice" => {
                rm.unwrap().slice(number(), 500);
                String::new()
            }
            "free" => {
                let Rm { fd, client } = rm.unwrap();
                let mut free = Free {
                    root: client,
                    parent: common::DEVICE,
                    object: number(),
                    status: 0,
                };
                common::call(fd, escape::FREE, &mut free);
                String::new()
            }
            "close" => {
                // SAFETY: the program's own.
                unsafe { libc::close(rm.take().unwrap().fd) }.to_string()
            }
            "race" => {
                let threads: Vec<_> = (0..number())
                    .map(|_| std::thread::spawn(|| Rm::open().context(0x5c00_0100)))
                    .collect();
                threads
                    .into_iter()
                    .for_each(|thread| thread.join().unwrap());
                String::new()
            }
            // A child with a context of its own, which stays until our end.
            "fork" | "fork-idle" => {
                // SAFETY: the child only uses what a forked child may here: this program has one thread
                // of its own, and no lock of its own is held.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    if words[0] == "fork" {
                        Rm::open().context(0x5c00_0200);
                    }
                    loop {
                        // SAFETY: waits to be killed.
                        unsafe { libc::pause() };
                    }
                }
                child.to_string()
            }
            // What a child of vfork does before exec: it closes descriptors in its own table, but in
            // our memory.
            "vfork-close" => vfork_close(rm.unwrap().fd).to_string(),
            "errno" => errno().to_string(),
            "threads" => threads(),
            "dlopen" => {
                let path = std::ffi::CString::new(words[1]).unwrap();
                // SAFETY: a C string; the library has no constructor.
                unsafe {
                    let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
                    assert!(!library.is_null());
                    libc::dlclose(library);
                }
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
                maps.contains(words[1]).to_string()
            }
            other => panic!("no command {other:?}"),
        };
        println!("{answer}");
        std::io::stdout().flush().unwrap();
    }
}

/// The names of our threads.
fn threads() -> String {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap())
        .map(|name| name.trim_end().to_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

fn vfork_close(fd: c_int) -> c_int {
    extern "C" fn child(fd: *mut c_void) -> c_int {
        // SAFETY: closes the number in the child's own table.
        unsafe { libc::close(fd as c_int) }
    }
    let mut stack = vec![0u8; 64 * 1024];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let mut status = 0;
    // SAFETY: the child has a stack of its own and ends before this thread goes on.
    unsafe {
        let top = stack.as_mut_ptr().add(stack.len()).cast();
        let pid = libc::clone(child, top, flags, fd as usize as *mut c_void);
        libc::waitpid(pid, &raw mut status, 0);
    }
    status
}

/// The error number after calls that succeed and one that fails in the library's sight.
fn errno() -> i32 {
    let location = || {
        // SAFETY: always points to this thread's `errno`.
        unsafe { libc::__errno_location() }
    };
    // SAFETY: as above.
    unsafe { *location() = 77 };
    let rm = Rm::open();
    rm.context(0x5c00_0300);
    // SAFETY: the program's own.
    unsafe { libc::close(rm.fd) };
    // SAFETY: as above.
    assert_eq!(unsafe { *location() }, 77);
    // SAFETY: a C string.
    assert_eq!(unsafe { libc::open(c"/dev/null/none".as_ptr(), 0) }, -1);
    // SAFETY: as above.
    unsafe { *location() }
}
