//! Whether a group that a process announces is really its own.
//!
//! A daemon that runs as root could be made to freeze other tenants' channels: the firmware trusts
//! root with any client's handles. So a group counts only if harmless controls succeed through the file that
//! came with it, with exactly the handles it names; only the holder of an RM client's file can achieve that.
//! Channels are only ever sent together with the client that was verified so.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use gpumux_core::{RunState, Timeslice};
use gpumux_rm::{
    Cause, ControlFailure, Controls, Group, RmControls, control_file, real::is_control_file,
};
use rustix::{
    fs::{FileType, fstat, major, stat},
    net::SocketFlags,
};

use crate::peer::credentials;

/// Device numbers of `/dev/nvidia*` begin with this (Documentation/admin-guide/devices.txt of Linux).
const NVIDIA: u32 = 195;
/// The driver's other device has a number that is found at run time.
const UVM: &str = "/dev/nvidia-uvm";

/// What a group turned out to be.
pub(crate) struct Verified {
    pub(crate) controls: Box<dyn Controls>,
    /// UUID of its device.
    pub(crate) device: String,
    /// Whether that is the emulated one.
    pub(crate) emulated: bool,
    pub(crate) timeslice: Timeslice,
    /// What it does now.
    pub(crate) run: RunState,
}

/// Why a group does not count.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Rejection {
    #[error("the file is no control file of a device: {0}")]
    File(io::Error),
    #[error("the file does not own RM client {0:#x}")]
    NotOwner(u32),
    /// Also when the program has just freed it.
    #[error(transparent)]
    Control(ControlFailure),
    #[error(
        "the driver does not let gpumux control this process ({0}): `gpumux doctor` tries each control"
    )]
    Unsupported(ControlFailure),
    #[error("a compute group without channels")]
    NoChannels,
    #[error("the driver names no device")]
    NoDevice,
}

/// Makes a vendor's controls of an engine's group from the file that came with it, and says whether the device is emulated.
pub(crate) type Vendor =
    fn(OwnedFd, u32, Group, Option<&Path>) -> Result<(Box<dyn Controls>, bool), Rejection>;

/// NVIDIA's, and those of the emulated device.
///
/// # Errors
/// When the file is not one of the driver's.
pub(crate) fn nvidia(
    file: OwnedFd,
    engine: u32,
    group: Group,
    emulated: Option<&Path>,
) -> Result<(Box<dyn Controls>, bool), Rejection> {
    let real = is_control_file(&file).map_err(Rejection::File)?;
    let server = emulated.filter(|_| !real);
    if let Some(server) = server {
        leads_to(&file, server).map_err(Rejection::File)?;
    }
    let file = control_file(file, server.is_some()).map_err(Rejection::File)?;
    Ok((Box::new(RmControls::of(engine, file, group)), !real))
}

/// Examines a group, which does as `run` says from then on. Takes as long as a few controls: not for the event loop.
///
/// # Errors
/// When it is not what it is said to be.
pub(crate) fn verify(
    vendor: Vendor,
    file: OwnedFd,
    engine: u32,
    group: Group,
    run: RunState,
    emulated: Option<&Path>,
) -> Result<Verified, Rejection> {
    let client = group.client;
    let (controls, emulated) = vendor(file, engine, group, emulated)?;
    examine(controls, emulated, run).map_err(|rejection| match rejection {
        Rejection::Control(error) if error.cause == Cause::NotOwner => Rejection::NotOwner(client),
        other => other,
    })
}

impl Rejection {
    /// Whether it may be of this moment only: the program frees the group, or it is `shared` and its MPS server is gone.
    pub(crate) fn may_pass(&self, shared: bool) -> bool {
        match self {
            Self::Control(_) => true,
            Self::Unsupported(_) => shared,
            _ => false,
        }
    }
}

impl From<ControlFailure> for Rejection {
    fn from(failure: ControlFailure) -> Self {
        match failure.is_of_driver() {
            true => Self::Unsupported(failure),
            false => Self::Control(failure),
        }
    }
}

fn examine(
    controls: Box<dyn Controls>,
    emulated: bool,
    run: RunState,
) -> Result<Verified, Rejection> {
    // Client and subdevice, then client and group, then the channels, of which one
    // that an earlier daemon left frozen runs again.
    let device = controls.device_uuid()?;
    if device.is_empty() || device.len() > 64 || !device.chars().all(|c| c.is_ascii_graphic()) {
        return Err(Rejection::NoDevice);
    }
    let timeslice = Timeslice(controls.timeslice()?);
    match run {
        RunState::Enabled => controls.thaw()?,
        RunState::Frozen => controls.freeze()?,
    }
    Ok(Verified {
        controls,
        device,
        emulated,
        timeslice,
        run,
    })
}

/// Whether a socket is connected to the emulated device's server, and not to something that
/// pretends to be it.
pub(crate) fn leads_to(file: &OwnedFd, server: &Path) -> io::Result<()> {
    let other = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    let (pid, _) = credentials(file)?;
    let own = gpumux_wire::socket::connect(server, SocketFlags::empty())?;
    let (expected, _) = credentials(own.as_fd())?;
    match pid == expected && pid != 0 {
        true => Ok(()),
        false => other("it is not connected to the emulated device"),
    }
}

/// Whether a file is a device of the driver, whose end waits for no user.
pub(crate) fn is_of_driver(file: &OwnedFd) -> bool {
    fstat(file).is_ok_and(|own| {
        let uvm = || stat(UVM).is_ok_and(|uvm| major(uvm.st_rdev) == major(own.st_rdev));
        FileType::from_raw_mode(own.st_mode) == FileType::CharacterDevice
            && (major(own.st_rdev) == NVIDIA || uvm())
    })
}
