//! Files whose end takes as long as their owner likes.

use std::{
    ffi::CString,
    fs::File,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// A connection with unsent data whose end takes as long as `time` says unless its other side, which is returned too, ends. Another
/// thread that starts a program in the meantime may have to wait for that.
///
/// # Panics
/// When there is no loopback interface, or `time` is no whole number of seconds.
pub fn lingering(time: Duration) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    own.set_nonblocking(true).unwrap();
    while own.write(&[0; 65536]).is_ok() {}
    own.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&own, Some(time)).unwrap();
    (own, other)
}

/// Of FUSE's requests (`linux/fuse.h`): their numbers, and a header's length.
mod fuse {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const HEADER: usize = 40;
    /// An inode's attributes follow times of validity.
    pub(super) fn attributes(inode: u64, mode: u32) -> Vec<u8> {
        let long = [inode, 0, 0, 0, 0, 0];
        let short = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
        (long.iter().flat_map(|it| it.to_ne_bytes()))
            .chain(short.iter().flat_map(|it: &u32| it.to_ne_bytes()))
            .collect()
    }
}

/// Mounts a FUSE file system in a mount namespace of its own, and opens its one file. Once the flag is set, closing that file is never
/// answered: not even SIGKILL ends a process that waits for it, until this process ends, which must have closed it before.
///
/// # Errors
/// Where a user may not mount one, as in most containers.
///
/// # Panics
/// Never.
pub fn open_on_fuse(at: &Path) -> io::Result<(File, Arc<AtomicBool>)> {
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let hangs = Arc::new(AtomicBool::new(false));
    let (at, flag) = (at.to_owned(), Arc::clone(&hangs));
    // A thread of its own has the namespace; the file is the process's.
    let opened = std::thread::spawn(move || -> io::Result<File> {
        let number = device.as_raw_fd();
        let options = format!("fd={number},rootmode=40000,user_id=0,group_id=0");
        mount_alone(&at, &options)?;
        std::thread::spawn(move || answer(&device, &flag));
        File::options().read(true).write(true).open(at.join("f"))
    });
    Ok((opened.join().expect("it does not panic")?, hangs))
}

/// Mounts FUSE in a mount namespace of this thread.
fn mount_alone(at: &Path, options: &str) -> io::Result<()> {
    let check = |result: i32| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    let at = CString::new(at.to_str().expect("text")).expect("no zero");
    let options = CString::new(options).expect("no zero");
    // SAFETY: all strings end with a zero and outlive the calls.
    unsafe {
        check(libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS))?;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        let none = std::ptr::null();
        check(libc::mount(none, c"/".as_ptr(), none, private, none.cast()))?;
        let flags = libc::MS_NOSUID | libc::MS_NODEV;
        let (source, kind) = (c"gpumux".as_ptr(), c"fuse".as_ptr());
        check(libc::mount(
            source,
            at.as_ptr(),
            kind,
            flags,
            options.as_ptr().cast(),
        ))
    }
}

/// Serves the file system for as long as this process lives.
fn answer(mut device: &File, hangs: &AtomicBool) {
    let mut request = [0; 1 << 17];
    while let Ok(length) = device.read(&mut request) {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().expect("8 bytes"));
        if length < fuse::HEADER {
            continue;
        }
        let (code, unique, node) = (word(4), long(8), long(16));
        let (folder, file) = (0o040_755, 0o100_666);
        let entry: Vec<u8> = [2_u64, 1, 1000, 1000, 0]
            .iter()
            .flat_map(|it| it.to_ne_bytes())
            .collect();
        let times: Vec<u8> = [1000_u64, 0]
            .iter()
            .flat_map(|it| it.to_ne_bytes())
            .collect();
        let (error, body) = match code {
            fuse::FORGET => continue,
            fuse::FLUSH if hangs.load(Ordering::Acquire) => continue,
            fuse::INIT => {
                let words = [
                    7,
                    31,
                    0,
                    0,
                    12 << 16 | 16,
                    65536,
                    1,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0_u32,
                ];
                (0, words.iter().flat_map(|it| it.to_ne_bytes()).collect())
            }
            fuse::LOOKUP => (0, [entry, fuse::attributes(2, file)].concat()),
            fuse::GETATTR => {
                let mode = if node == 1 { folder } else { file };
                (0, [times, fuse::attributes(node, mode)].concat())
            }
            fuse::OPEN => (
                0,
                [1_u64, 0].iter().flat_map(|it| it.to_ne_bytes()).collect(),
            ),
            fuse::FLUSH | fuse::RELEASE => (0, Vec::new()),
            _ => (-libc::ENOSYS, Vec::new()),
        };
        let length = (16 + body.len()) as u32;
        let head = [length.to_ne_bytes(), error.to_ne_bytes()].concat();
        let answer = [head, unique.to_ne_bytes().to_vec(), body].concat();
        if device.write_all(&answer).is_err() {
            return;
        }
    }
}
