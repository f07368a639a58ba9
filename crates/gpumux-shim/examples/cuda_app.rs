//! A driver-API program for the shim's tests: reaches libcuda in the way named by its first argument, then
//! does as told on standard input and answers each command with one line.

use std::{
    collections::HashMap,
    ffi::{CString, c_char, c_int, c_void},
    io::{BufRead, Write},
    ptr,
};

type Handle = *mut c_void;
/// Ways to libcuda.
enum Way {
    /// `dlopen` and `dlsym`.
    Dlsym(Handle),
    /// `dlopen`, then one `dlsym` for `cuGetProcAddress_v2`, and that for everything, itself included.
    Proc { resolver: Handle, library: Handle },
    /// Symbols of the whole program, as of one that is linked to libcuda.
    Linked,
}

impl Way {
    fn open(name: &str) -> Self {
        // SAFETY: C strings; the libraries have no constructors that matter.
        let open = || unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        match name {
            "dlsym" => Self::Dlsym(open()),
            "proc" => {
                let library = open();
                let first = Self::Dlsym(library).find("cuGetProcAddress_v2");
                Self::Proc {
                    resolver: ask(first, "cuGetProcAddress"),
                    library,
                }
            }
            "linked" => {
                // SAFETY: a C string.
                unsafe {
                    libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL)
                };
                Self::Linked
            }
            other => panic!("no way {other:?}"),
        }
    }

    fn find(&self, name: &str) -> Handle {
        let library = match self {
            Self::Proc { resolver, library } => match ask(*resolver, name) {
                found if found.is_null() => *library,
                found => return found,
            },
            Self::Dlsym(library) => *library,
            Self::Linked => libc::RTLD_DEFAULT,
        };
        let symbol = CString::new(name).unwrap();
        // SAFETY: a C string and an open library.
        let found = unsafe { libc::dlsym(library, symbol.as_ptr()) };
        assert!(!found.is_null(), "{name}");
        found
    }
}

fn ask(resolver: Handle, name: &str) -> Handle {
    type Resolver =
        unsafe extern "C" fn(*const c_char, *mut Handle, c_int, u64, *mut c_int) -> c_int;
    let name = CString::new(name.trim_end_matches("_v2")).unwrap();
    let (mut found, mut status) = (ptr::null_mut(), 0);
    // SAFETY: the resolver's signature; a C string and two places to write.
    unsafe {
        let resolver: Resolver = std::mem::transmute(resolver);
        resolver(name.as_ptr(), &raw mut found, 13000, 0, &raw mut status);
    }
    found
}

macro_rules! call {
    ($way:expr, $name:literal($($arg:expr),*): ($($type:ty),*)) => {{
        // SAFETY: the signature is `cuda.h`'s.
        unsafe {
            let function: unsafe extern "C" fn($($type),*) -> c_int =
                std::mem::transmute($way.find($name));
            function($($arg),*)
        }
    }};
}

type Launch = unsafe extern "C" fn(
    Handle,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    Handle,
    *mut Handle,
    *mut Handle,
) -> c_int;

fn launch(function: Launch, stream: Handle) -> c_int {
    let none = ptr::null_mut();
    // SAFETY: the stand-in looks at the stream only.
    unsafe { function(none, 1, 1, 1, 1, 1, 1, 0, stream, none.cast(), none.cast()) }
}

fn main() {
    let way = Way::open(&std::env::args().nth(1).unwrap());
    let mut things: HashMap<String, Handle> = HashMap::from([("0".into(), ptr::null_mut())]);
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let thing = |at: usize| things[words[at]];
        let mut made: Handle = ptr::null_mut();
        let result = match words[0] {
            "context" => {
                call!(way, "cuCtxCreate_v2"(&raw mut made, 0, 0): (*mut Handle, u32, c_int))
            }
            "green" => {
                let none = ptr::null_mut();
                call!(way, "cuGreenCtxCreate"(&raw mut made, none, 0, 0): (*mut Handle, Handle, c_int, u32))
            }
            "from-green" => {
                call!(way, "cuCtxFromGreenCtx"(&raw mut made, thing(2)): (*mut Handle, Handle))
            }
            "destroy-green" => call!(way, "cuGreenCtxDestroy"(thing(1)): (Handle)),
            "attach" => call!(way, "cuCtxAttach"(&raw mut made, 0): (*mut Handle, u32)),
            "detach" => call!(way, "cuCtxDetach"(thing(1)): (Handle)),
            "current" => call!(way, "cuCtxSetCurrent"(thing(1)): (Handle)),
            "stream" => call!(way, "cuStreamCreate"(&raw mut made, 0): (*mut Handle, u32)),
            "event" => call!(way, "cuEventCreate"(&raw mut made, 0): (*mut Handle, u32)),
            "launch" => {
                // SAFETY: the signature is `cuda.h`'s.
                launch(
                    unsafe { std::mem::transmute::<Handle, Launch>(way.find("cuLaunchKernel")) },
                    thing(1),
                )
            }
            "sync" => call!(way, "cuStreamSynchronize"(thing(1)): (Handle)),
            "sync-context" => call!(way, "cuCtxSynchronize"(): ()),
            "record" => call!(way, "cuEventRecord"(thing(1), thing(2)): (Handle, Handle)),
            "sync-event" => call!(way, "cuEventSynchronize"(thing(1)): (Handle)),
            "capture" => call!(way, "cuStreamBeginCapture_v2"(thing(1), 0): (Handle, c_int)),
            "end-capture" => {
                call!(way, "cuStreamEndCapture"(thing(1), &raw mut made): (Handle, *mut Handle))
            }
            "destroy" => call!(way, "cuStreamDestroy_v2"(thing(1)): (Handle)),
            "finish" => call!(way, "fake_finish"(thing(1)): (Handle)),
            "spoiled" => call!(way, "fake_spoiled"(): ()),
            other => panic!("no command {other:?}"),
        };
        if !made.is_null() {
            things.insert(words[1].into(), made);
        }
        println!("{result}");
        std::io::stdout().flush().unwrap();
    }
}
