//! The real driver: ioctls on `/dev/nvidiactl`.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use crate::{
    ControlError, ControlFile, RmStatus,
    layout::{Control, escape, iowr},
};

/// An open `/dev/nvidiactl`.
#[derive(Debug)]
pub struct DeviceFile(OwnedFd);

/// Major number of NVIDIA's character devices, and the minor of `/dev/nvidiactl`
/// (`NV_MAJOR_DEVICE_NUMBER`, `NV_CONTROL_DEVICE_MINOR` in `nv-linux.h`).
const NVIDIACTL: (u32, u32) = (195, 255);

impl DeviceFile {
    /// Takes a file that a peer sent.
    ///
    /// # Errors
    /// When it is anything but `/dev/nvidiactl`.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        if is_control_file(&fd)? {
            Ok(Self(fd))
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the file is not /dev/nvidiactl",
            ))
        }
    }
}

/// Whether `fd` is an open `/dev/nvidiactl`, by its device number.
///
/// # Errors
/// When the file cannot be examined.
pub fn is_control_file(fd: impl AsFd) -> io::Result<bool> {
    let stat = rustix::fs::fstat(fd)?;
    let device = (
        rustix::fs::major(stat.st_rdev),
        rustix::fs::minor(stat.st_rdev),
    );
    let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
    Ok(kind == rustix::fs::FileType::CharacterDevice && device == NVIDIACTL)
}

impl ControlFile for DeviceFile {
    fn control(
        &self,
        client: u32,
        object: u32,
        cmd: u32,
        params: &mut [u8],
    ) -> Result<(), ControlError> {
        let mut call = Control {
            client,
            object,
            cmd,
            params: params.as_mut_ptr() as u64,
            params_size: params.len() as u32,
            ..Default::default()
        };
        let request = iowr(escape::CONTROL, size_of::<Control>());
        // SAFETY: `call` has the layout that the request number names, and its pointer and size
        // describe `params`, which outlives the call. The raw system call is used because the C
        // library's `ioctl` may be interposed in this process.
        let result =
            unsafe { libc::syscall(libc::SYS_ioctl, self.0.as_raw_fd(), request, &raw mut call) };
        if result < 0 {
            return Err(io::Error::last_os_error().into());
        }
        match RmStatus(call.status) {
            RmStatus::OK => Ok(()),
            status => Err(ControlError::Status(status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_refused() {
        for path in ["/dev/null", "/dev/zero", "/proc/self/maps"] {
            let file = std::fs::File::open(path).unwrap();
            assert!(DeviceFile::new(file.into()).is_err(), "{path}");
        }
    }
}
