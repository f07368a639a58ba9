//! RM calls as libcuda makes them.

use std::ffi::{c_int, c_ulong};

use gpumux_rm::layout::{
    Alloc64, Control, GroupAlloc, GroupScheduleParams, TimesliceParams, class, cmd, engine, escape,
    iowr,
};
use zerocopy::{Immutable, IntoBytes};

unsafe extern "C" {
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
}

/// One nvidiactl with its client; groups are made in it.
#[derive(Clone, Copy)]
pub(crate) struct Rm {
    pub(crate) fd: c_int,
    pub(crate) client: u32,
}

pub(crate) const DEVICE: u32 = 0x5c00_0002;
const SUBDEVICE: u32 = 0x5c00_0003;
const HOPPER: u32 = 0xc86f;

pub(crate) fn call<T>(fd: c_int, nr: u8, arg: &mut T) {
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
    pub(crate) fn open() -> Self {
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
    pub(crate) fn group(self, group: u32, engine: u32) {
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

    pub(crate) fn slice(self, group: u32, timeslice_us: u64) {
        self.control(group, cmd::SET_TIMESLICE, &TimesliceParams { timeslice_us });
    }

    pub(crate) fn context(self, group: u32) {
        self.group(group, engine::GR0);
        self.group(group + 0x10, engine::COPY0 + 2);
        self.slice(group, 2048);
    }
}
