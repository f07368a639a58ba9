//! A stand-in for the driver in the shim's tests: preloaded behind the shim, it opens
//! `/dev/nvidiactl` as an emulated control file and answers RM calls on it. Every control that changes
//! something is one line in the file named by `FAKE_RM_LOG`. While there is a file of that name and `.refuse`, no timeslice
//! can be set.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int, c_ulong, c_void},
    fs::OpenOptions,
    io::{IoSlice, IoSliceMut, Write},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd},
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use gpumux_rm::{
    RmStatus,
    emulated::{self, AnswerHead, MAGIC, MAX_BYTES, RequestHead},
    layout::{
        Alloc64, Control, DisableChannelsParams, IOC_MAGIC, TimesliceParams, class, cmd, escape,
    },
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

unsafe fn open_file(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the program's own path.
    if unsafe { CStr::from_ptr(path) } == c"/dev/nvidiactl" {
        let (mine, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        std::thread::spawn(move || serve(&theirs));
        return mine.into_raw_fd();
    }
    type Open = unsafe extern "C" fn(*const c_char, c_int, libc::mode_t) -> c_int;
    // Behind this library comes libc; were the shim's `dlsym` to search from its own place instead of ours,
    // this would find ourselves.
    // SAFETY: a C string; `open` has this signature on this architecture; the program's own call.
    unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, c"open".as_ptr());
        std::mem::transmute::<*mut c_void, Open>(next)(path, flags, mode)
    }
}

/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_file(path, flags, mode) }
}

/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the caller's.
    unsafe { open_file(path, flags, mode) }
}

/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    if (request >> 8) as u8 != IOC_MAGIC {
        // SAFETY: the program's own call.
        return unsafe { libc::syscall(libc::SYS_ioctl, fd, request, arg) as c_int };
    }
    let size = (request >> 16) as usize & 0x3fff;
    // SAFETY: the request number says how many bytes there are.
    let arg = unsafe { std::slice::from_raw_parts_mut(arg.cast::<u8>(), size) };
    let nr = request as u8;
    let (at, len) = match nr {
        escape::ALLOC => {
            let alloc = Alloc64::read_from_bytes(arg).unwrap();
            (alloc.params, alloc.params_size)
        }
        escape::CONTROL => {
            let control = Control::read_from_bytes(arg).unwrap();
            (control.params, control.params_size)
        }
        _ => (0, 0),
    };
    let params = match at {
        0 => &mut [],
        // SAFETY: the structure says how many bytes there are.
        _ => unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len as usize) },
    };
    // SAFETY: the program's descriptor, open during its call.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    match emulated::call(file, nr, arg, params) {
        Ok(()) => 0,
        Err(error) => {
            // SAFETY: always points to this thread's `errno`.
            unsafe { *libc::__errno_location() = error.raw_os_error().unwrap_or(libc::EIO) };
            -1
        }
    }
}

fn serve(file: &OwnedFd) {
    let mut bytes = vec![0; 2 * MAX_BYTES];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        let Ok(received) = recvmsg(file, &mut buffers, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        else {
            return;
        };
        if received.bytes == 0 {
            log("closed");
            return;
        }
        let answer_to = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let (head, rest) = RequestHead::read_from_prefix(&bytes[..received.bytes]).unwrap();
        let mut rest = rest.to_vec();
        let (arg, params) = rest.split_at_mut(head.arg_len as usize);
        act(head.escape as u8, arg, params);
        let answer = AnswerHead {
            magic: MAGIC,
            errno: 0,
        };
        let _ = sendmsg(
            answer_to.unwrap().as_fd(),
            &[IoSlice::new(answer.as_bytes()), IoSlice::new(&rest)],
            &mut SendAncillaryBuffer::default(),
            SendFlags::NOSIGNAL,
        );
    }
}

fn act(nr: u8, arg: &mut [u8], params: &mut [u8]) {
    static NEXT_CLIENT: AtomicU32 = AtomicU32::new(0xc1d0_0001);
    match nr {
        escape::ALLOC => {
            let mut alloc = Alloc64::read_from_bytes(arg).unwrap();
            if class::is_client(alloc.class) {
                alloc.object = NEXT_CLIENT.fetch_add(1, Ordering::Relaxed);
            }
            arg.copy_from_slice(alloc.as_bytes());
        }
        escape::CONTROL => {
            static SLICES: Mutex<BTreeMap<(u32, u32), u64>> = Mutex::new(BTreeMap::new());
            let mut control = Control::read_from_bytes(arg).unwrap();
            let mut slice = TimesliceParams::new_zeroed();
            let mut channels = DisableChannelsParams::new_zeroed();
            let group = (control.client, control.object);
            if control.cmd == cmd::SET_TIMESLICE && refuses() {
                log(&format!("refused {:x}", control.object));
                control.status = RmStatus::BUSY_RETRY.0;
                arg.copy_from_slice(control.as_bytes());
            } else if control.cmd == cmd::SET_TIMESLICE {
                slice.as_mut_bytes().copy_from_slice(params);
                SLICES.lock().unwrap().insert(group, slice.timeslice_us);
                log(&format!(
                    "slice {:x} {}",
                    control.object, slice.timeslice_us
                ));
            }
            if control.cmd == cmd::GET_TIMESLICE {
                slice.timeslice_us = SLICES.lock().unwrap().get(&group).copied().unwrap_or(2000);
                params.copy_from_slice(slice.as_bytes());
            }
            if control.cmd == cmd::DISABLE_CHANNELS {
                channels.as_mut_bytes().copy_from_slice(params);
                let what = if channels.disable == 1 {
                    "freeze"
                } else {
                    "thaw"
                };
                let of = &channels.channels[..channels.count as usize];
                log(&format!("{what} {:x} {of:x?}", control.object));
            }
        }
        _ => {}
    }
}

fn refuses() -> bool {
    let log = std::env::var_os("FAKE_RM_LOG").map(PathBuf::from);
    log.is_some_and(|log| log.with_added_extension("refuse").exists())
}

fn log(line: &str) {
    if let Some(path) = std::env::var_os("FAKE_RM_LOG") {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        file.write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}
