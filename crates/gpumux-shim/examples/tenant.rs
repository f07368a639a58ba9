//! A program for the shim's tests: makes RM calls as libcuda does, as told on standard input, and
//! answers each command with one line.

use std::{
    ffi::{c_int, c_ulong, c_void},
    io::{BufRead, Write},
};

use gpumux_rm::layout::{
    Alloc64, Control, Free, GroupAlloc, GroupScheduleParams, TimesliceParams, class, cmd, engine,
    escape, iowr,
};
use zerocopy::{Immutable, IntoBytes};

unsafe extern "C" {
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
}

/// One nvidiactl with its client; groups are made in it.
#[derive(Clone, Copy)]
struct Rm {
    fd: c_int,
    client: u32,
}

const DEVICE: u32 = 0x5c00_0002;
const SUBDEVICE: u32 = 0x5c00_0003;
const HOPPER: u32 = 0xc86f;

fn call<T>(fd: c_int, nr: u8, arg: &mut T) {
    // SAFETY: `arg` has the layout that the number names.
    let result = unsafe { ioctl(fd, iowr(nr, size_of::<T>()), std::ptr::from_mut(arg)) };
    assert_eq!(
        result,
        0,
        "ioctl {nr:#x}: {}",
        std::io::Error::last_os_error()
    );
}

impl Rm {
    fn open() -> Self {
        // SAFETY: a C string.
        let fd = unsafe { libc::open(c"/dev/nvidiactl".as_ptr(), libc::O_RDWR) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        let mut root = Alloc64 {
            class: class::ROOT_CLIENT,
            ..Default::default()
        };
        call(fd, escape::ALLOC, &mut root);
        let rm = Self {
            fd,
            client: root.object,
        };
        rm.alloc(rm.client, DEVICE, class::DEVICE, &());
        rm.alloc(DEVICE, SUBDEVICE, class::SUBDEVICE, &());
        rm
    }

    fn alloc(self, parent: u32, object: u32, class: u32, params: &(impl IntoBytes + Immutable)) {
        let params = params.as_bytes();
        let mut alloc = Alloc64 {
            root: self.client,
            parent,
            object,
            class,
            params: if params.is_empty() {
                0
            } else {
                params.as_ptr() as u64
            },
            params_size: params.len() as u32,
            ..Default::default()
        };
        call(self.fd, escape::ALLOC, &mut alloc);
    }

    fn control<P: IntoBytes + Immutable>(self, object: u32, cmd: u32, params: &P) {
        let mut control = Control {
            client: self.client,
            object,
            cmd,
            params: std::ptr::from_ref(params) as u64,
            params_size: size_of::<P>() as u32,
            ..Default::default()
        };
        call(self.fd, escape::CONTROL, &mut control);
    }

    /// A group with two channels, as libcuda leaves it.
    fn group(self, group: u32, engine: u32) {
        let params = GroupAlloc {
            engine,
            ..Default::default()
        };
        self.alloc(DEVICE, group, class::CHANNEL_GROUP, &params);
        self.alloc(group, group + 1, HOPPER, &());
        self.alloc(group, group + 2, HOPPER, &());
        let enable = GroupScheduleParams {
            enable: 1,
            ..Default::default()
        };
        self.control(group, cmd::GROUP_SCHEDULE, &enable);
    }

    fn slice(self, group: u32, timeslice_us: u64) {
        self.control(group, cmd::SET_TIMESLICE, &TimesliceParams { timeslice_us });
    }

    fn context(self, group: u32) {
        self.group(group, engine::GR0);
        self.group(group + 0x10, engine::COPY0 + 2);
        self.slice(group, 2048);
    }
}

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
                    parent: DEVICE,
                    object: number(),
                    status: 0,
                };
                call(fd, escape::FREE, &mut free);
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
