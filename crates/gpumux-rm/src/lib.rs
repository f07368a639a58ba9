//! The kernel driver's resource manager (RM) as gpumux sees it: the layouts of
//! its ioctls, the handles that a program's own calls reveal, and the controls
//! that work on them.
//!
//! This is the only crate that knows RM. [`layout`] has the structures, [`capture`] learns
//! handles from a program's calls, [`controls`] pulls on them through a [`ControlFile`]:
//! [`real::DeviceFile`] sends ioctls on an nvidiactl file, [`emulated::EmulatedFile`] talks to
//! the emulated device. [`branches`] says for which drivers and GPUs that is known.

pub mod branches;
pub mod capture;
pub mod controls;
pub mod emulated;
pub mod layout;
pub mod real;
mod status;

pub use controls::{
    Cause, ControlFailure, Controls, Group, Interleave, PreemptionMode, RmControls, control_file,
};
pub use status::RmStatus;

use std::io;

/// A file that carries an RM client's authority.
///
/// Both the real and the emulated driver let a process that holds the open file description act on
/// the clients that were made through it, whatever its uid.
pub trait ControlFile: Send {
    /// Sends control `cmd` to `object` of `client`; `params` is read and written back.
    ///
    /// # Errors
    /// [`ControlError::Status`] when RM refuses, [`ControlError::Io`] when the call itself fails.
    fn control(
        &self,
        client: u32,
        object: u32,
        cmd: u32,
        params: &mut [u8],
    ) -> Result<(), ControlError>;
}

impl ControlFile for Box<dyn ControlFile> {
    fn control(
        &self,
        client: u32,
        object: u32,
        cmd: u32,
        params: &mut [u8],
    ) -> Result<(), ControlError> {
        (**self).control(client, object, cmd, params)
    }
}

/// Why a control failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// RM's answer.
    #[error("the driver refused: {0}")]
    Status(RmStatus),
    /// The call did not reach RM.
    #[error("the call did not reach the driver: {0}")]
    Io(#[from] io::Error),
}
