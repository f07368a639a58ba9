//! The controls: what the driver does to one channel group on request.

use std::{
    io,
    os::fd::OwnedFd,
    sync::atomic::{AtomicU32, Ordering},
};

use zerocopy::{FromBytes, IntoBytes};

use crate::{
    ControlError, ControlFile, RmStatus,
    emulated::EmulatedFile,
    layout::{
        DisableChannelsParams, GidInfoParams, InterleaveParams, PreemptionModeParams,
        TimesliceParams, cmd, engine,
    },
    real::DeviceFile,
};

/// Handles of one channel group, all of one RM client.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Group {
    /// RM client.
    pub client: u32,
    /// Subdevice (class 0x2080) of the same client: where channel controls are sent.
    pub subdevice: u32,
    /// The group (class 0xa06c, or a duplicate of one).
    pub group: u32,
    /// Its channels.
    pub channels: Vec<u32>,
}

/// When a running kernel may be interrupted (`NV2080_CTRL_SET_CTXSW_PREEMPTION_MODE_COMPUTE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum PreemptionMode {
    /// After the kernel.
    WaitForIdle = 0,
    /// After the running thread blocks.
    ThreadBlock = 1,
    /// Between any two instructions: the default of compute contexts.
    Instruction = 2,
}

/// How often the hardware visits a group among others (`NVA06C_CTRL_INTERLEAVE_LEVEL_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Interleave {
    /// Rarely.
    Low = 0,
    /// The default.
    Medium = 1,
    /// Often.
    High = 2,
}

/// Why a control failed, whatever the vendor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The driver does not have the control, whatever the object.
    Unsupported,
    /// The driver does not allow it to this caller, whatever the object.
    Denied,
    /// The system, or a sandbox, does not let the call through.
    Blocked,
    /// The object is not one of the file's.
    NotOwner,
    /// The device is lost, or must be reset.
    DeviceLost,
    /// The driver refuses for this object or at this moment.
    Refused,
    /// The call did not reach the driver.
    NotReached,
}

/// A control that failed.
#[derive(Debug, thiserror::Error)]
#[error("{control}: {source}")]
pub struct ControlFailure {
    /// Which control.
    pub control: &'static str,
    /// Why.
    pub cause: Cause,
    /// In the driver's words.
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl ControlFailure {
    /// A control that failed for this cause, with the driver's words.
    pub fn new(
        control: &'static str,
        cause: Cause,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        let source = source.into();
        Self {
            control,
            cause,
            source,
        }
    }

    /// Whether the driver answered.
    pub const fn is_answer(&self) -> bool {
        !matches!(self.cause, Cause::Blocked | Cause::NotReached)
    }

    /// Whether the driver, or a sandbox in front of it, does not have the control or does not allow it, whatever the object.
    pub const fn is_of_driver(&self) -> bool {
        matches!(
            self.cause,
            Cause::Unsupported | Cause::Denied | Cause::Blocked
        )
    }
}

/// RM's errors in the words of all vendors.
fn cause(error: &ControlError) -> Cause {
    match error {
        ControlError::Status(status) => match *status {
            RmStatus::INSUFFICIENT_PERMISSIONS | RmStatus::PRIV_SEC_VIOLATION => Cause::Denied,
            RmStatus::NOT_SUPPORTED
            | RmStatus::INVALID_COMMAND
            | RmStatus::INVALID_FUNCTION
            | RmStatus::INVALID_PARAM_STRUCT => Cause::Unsupported,
            RmStatus::INVALID_CLIENT => Cause::NotOwner,
            RmStatus::GPU_IS_LOST | RmStatus::GPU_IN_FULLCHIP_RESET | RmStatus::RESET_REQUIRED => {
                Cause::DeviceLost
            }
            _ => Cause::Refused,
        },
        ControlError::Io(error) => match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES | libc::ENOTTY | libc::ENOSYS | libc::EINVAL) => {
                Cause::Blocked
            }
            _ => Cause::NotReached,
        },
    }
}

/// All controls of one channel group, or of another vendor's queues.
pub trait Controls: Send {
    /// Sets the timeslice in µs (1 to 1,000,000).
    ///
    /// # Errors
    /// When the driver refuses.
    fn set_timeslice(&self, us: u64) -> Result<(), ControlFailure>;
    /// Reads the timeslice in µs. Before it was set, the driver reports a constant.
    ///
    /// # Errors
    /// When the driver refuses.
    fn timeslice(&self) -> Result<u64, ControlFailure>;
    /// Takes the group off the device, in the middle of a kernel if need be, until [`Self::thaw`]; also where it is off already.
    ///
    /// # Errors
    /// When the driver refuses.
    fn freeze(&self) -> Result<(), ControlFailure>;
    /// Lets the group run again, however often it was frozen.
    ///
    /// # Errors
    /// When the driver refuses.
    fn thaw(&self) -> Result<(), ControlFailure>;
    /// Sets where its kernels may be interrupted.
    ///
    /// # Errors
    /// When the driver refuses.
    fn set_preemption_mode(&self, mode: PreemptionMode) -> Result<(), ControlFailure> {
        let _ = mode;
        lacks("set preemption mode")
    }
    /// Sets the interleave level; works only for a caller with `CAP_SYS_NICE`.
    ///
    /// # Errors
    /// When the driver refuses.
    fn set_interleave(&self, level: Interleave) -> Result<(), ControlFailure> {
        let _ = level;
        lacks("set interleave level")
    }
    /// The device's UUID as the driver writes it (`GPU-…`).
    ///
    /// # Errors
    /// When the driver refuses.
    fn device_uuid(&self) -> Result<String, ControlFailure> {
        lacks("read device uuid")
    }
    /// The channels changed.
    fn set_channels(&mut self, channels: Vec<u32>) {
        let _ = channels;
    }
}

/// Of controls that are made without one.
fn lacks<T>(control: &'static str) -> Result<T, ControlFailure> {
    let why = "these controls do not have it";
    Err(ControlFailure::new(control, Cause::Unsupported, why))
}

/// A control file that a peer sent: of the emulated device, or `/dev/nvidiactl`.
///
/// # Errors
/// When it is anything else.
pub fn control_file(fd: OwnedFd, emulated: bool) -> io::Result<Box<dyn ControlFile>> {
    Ok(match emulated {
        true => Box::new(EmulatedFile::new(fd)?),
        false => Box::new(DeviceFile::new(fd)?),
    })
}

/// How often a group's channels may have been disabled by others before it is controlled: by each daemon that met it without its memory,
/// twice.
const BEFORE: u32 = 16;
/// No group is thawed more often in one call: each time takes a third of a millisecond. It is thawed again if it stands still.
const MOST_TIMES: u32 = 64;

/// [`Controls`] over RM controls.
///
/// RM counts: a channel runs when it was enabled as often as it was disabled (driver 580.159.04, H100). Enabling one that runs does nothing.
#[derive(Debug)]
pub struct RmControls<F> {
    file: F,
    group: Group,
    /// How often its channels may be disabled; 0: they run, as far as is known here.
    disabled: AtomicU32,
    /// How often others may have disabled them where that is so.
    others: u32,
}

impl<F: ControlFile> RmControls<F> {
    /// Controls of `group`, whose client was made through `file`.
    pub fn new(file: F, group: Group) -> Self {
        Self {
            file,
            group,
            disabled: AtomicU32::new(BEFORE),
            others: BEFORE,
        }
    }

    /// Controls of an engine's group. Nothing freezes those of copies.
    pub fn of(engine: u32, file: F, group: Group) -> Self {
        let controls = Self::new(file, group);
        match engine {
            engine::GR0 => controls,
            _ => controls.running(),
        }
    }

    /// Of a group that nothing else freezes.
    #[must_use]
    pub fn running(self) -> Self {
        Self {
            disabled: AtomicU32::new(0),
            others: 1,
            ..self
        }
    }

    fn control<P: IntoBytes + FromBytes>(
        &self,
        control: &'static str,
        object: u32,
        cmd: u32,
        params: &mut P,
    ) -> Result<(), ControlFailure> {
        self.file
            .control(self.group.client, object, cmd, params.as_mut_bytes())
            .map_err(|error| ControlFailure::new(control, cause(&error), error))
    }

    /// Disables or enables all channels, 64 in a call (the most RM takes).
    fn disable_channels(&self, control: &'static str, disable: bool) -> Result<(), ControlFailure> {
        for chunk in self.group.channels.chunks(64) {
            let mut params = DisableChannelsParams {
                disable: disable.into(),
                count: chunk.len() as u32,
                ..Default::default()
            };
            params.clients[..chunk.len()].fill(self.group.client);
            params.channels[..chunk.len()].copy_from_slice(chunk);
            self.control(
                control,
                self.group.subdevice,
                cmd::DISABLE_CHANNELS,
                &mut params,
            )?;
        }
        Ok(())
    }
}

impl<F: ControlFile> Controls for RmControls<F> {
    fn set_timeslice(&self, us: u64) -> Result<(), ControlFailure> {
        let mut params = TimesliceParams { timeslice_us: us };
        self.control(
            "set timeslice",
            self.group.group,
            cmd::SET_TIMESLICE,
            &mut params,
        )
    }

    fn timeslice(&self) -> Result<u64, ControlFailure> {
        let mut params = TimesliceParams::default();
        self.control(
            "get timeslice",
            self.group.group,
            cmd::GET_TIMESLICE,
            &mut params,
        )?;
        Ok(params.timeslice_us)
    }

    fn freeze(&self) -> Result<(), ControlFailure> {
        // Also if it fails: some of the channels may be disabled.
        self.disabled.fetch_add(1, Ordering::Relaxed);
        self.disable_channels("freeze", true)
    }

    fn thaw(&self) -> Result<(), ControlFailure> {
        let known = self.disabled.load(Ordering::Relaxed);
        let times = match known {
            0 => self.others,
            known => known.min(MOST_TIMES),
        };
        for _ in 0..times {
            self.disable_channels("thaw", false)?;
        }
        let left = known.saturating_sub(times);
        self.disabled.store(left, Ordering::Relaxed);
        Ok(())
    }

    fn set_preemption_mode(&self, mode: PreemptionMode) -> Result<(), ControlFailure> {
        let Some(channel) = self.group.channels.first() else {
            return Ok(());
        };
        let mut params = PreemptionModeParams {
            flags: 1,
            channel: *channel,
            compute: mode as u32,
            ..Default::default()
        };
        self.control(
            "set preemption mode",
            self.group.subdevice,
            cmd::SET_PREEMPTION_MODE,
            &mut params,
        )
    }

    fn set_interleave(&self, level: Interleave) -> Result<(), ControlFailure> {
        let mut params = InterleaveParams {
            level: level as u32,
        };
        self.control(
            "set interleave level",
            self.group.group,
            cmd::SET_INTERLEAVE_LEVEL,
            &mut params,
        )
    }

    fn device_uuid(&self) -> Result<String, ControlFailure> {
        let mut params = GidInfoParams::default();
        self.control(
            "read device uuid",
            self.group.subdevice,
            cmd::GET_GID_INFO,
            &mut params,
        )?;
        let length = (params.length as usize).min(params.data.len());
        let text = String::from_utf8_lossy(&params.data[..length]);
        Ok(text.trim_end_matches('\0').to_owned())
    }

    fn set_channels(&mut self, channels: Vec<u32>) {
        self.group.channels = channels;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A driver that counts how often one channel was disabled.
    #[derive(Clone, Default)]
    struct Counts(Arc<AtomicU32>, Arc<AtomicU32>);

    impl ControlFile for Counts {
        fn control(&self, _: u32, _: u32, cmd: u32, params: &mut [u8]) -> Result<(), ControlError> {
            assert_eq!(cmd, cmd::DISABLE_CHANNELS);
            self.1.fetch_add(1, Ordering::Relaxed);
            let times = self.0.load(Ordering::Relaxed);
            let times = match params[0] {
                0 => times.saturating_sub(1),
                _ => times + 1,
            };
            self.0.store(times, Ordering::Relaxed);
            Ok(())
        }
    }

    impl Counts {
        fn controls(&self) -> RmControls<Self> {
            let group = Group {
                client: 1,
                subdevice: 2,
                group: 3,
                channels: vec![4],
            };
            RmControls::new(self.clone(), group)
        }

        fn runs(&self) -> bool {
            self.0.load(Ordering::Relaxed) == 0
        }

        fn calls(&self) -> u32 {
            self.1.swap(0, Ordering::Relaxed)
        }
    }

    #[test]
    fn group_runs_however_often_it_was_frozen() {
        let driver = Counts::default();
        let last = driver.controls();
        last.freeze().unwrap();
        // The next daemons meet it frozen, and freeze it again.
        for _ in 0..3 {
            let next = driver.controls();
            next.freeze().unwrap();
            next.freeze().unwrap();
        }
        let own = driver.controls();
        own.freeze().unwrap();
        own.thaw().unwrap();
        assert!(driver.runs());
        // What is known is not done more often than needed.
        driver.calls();
        for _ in 0..3 {
            own.freeze().unwrap();
            assert!(!driver.runs());
            own.thaw().unwrap();
            assert!(driver.runs());
        }
        assert_eq!(driver.calls(), 6);
        own.freeze().unwrap();
        own.freeze().unwrap();
        own.thaw().unwrap();
        assert!(driver.runs());
        // Another's late control.
        last.freeze().unwrap();
        own.thaw().unwrap();
        assert!(driver.runs());
    }

    #[test]
    fn group_that_is_frozen_very_often_is_thawed_in_parts() {
        let driver = Counts::default();
        let controls = driver.controls().running();
        (0..1000).for_each(|_| controls.freeze().unwrap());
        driver.calls();
        while !driver.runs() {
            controls.thaw().unwrap();
            assert!(driver.calls() <= MOST_TIMES);
        }
    }

    #[test]
    fn answers_of_the_driver_have_a_cause_of_any_vendor() {
        let of = |status| cause(&ControlError::Status(status));
        assert_eq!(of(RmStatus::NOT_SUPPORTED), Cause::Unsupported);
        assert_eq!(of(RmStatus::INSUFFICIENT_PERMISSIONS), Cause::Denied);
        assert_eq!(of(RmStatus::INVALID_CLIENT), Cause::NotOwner);
        assert_eq!(of(RmStatus::GPU_IS_LOST), Cause::DeviceLost);
        assert_eq!(of(RmStatus::OBJECT_NOT_FOUND), Cause::Refused);
        let io = |number| cause(&io::Error::from_raw_os_error(number).into());
        assert_eq!(io(libc::EPERM), Cause::Blocked);
        assert_eq!(io(libc::EIO), Cause::NotReached);
        let failed = |cause| ControlFailure::new("freeze", cause, "why");
        assert_eq!(failed(Cause::Refused).to_string(), "freeze: why");
        for (cause, is_of_driver, is_answer) in [
            (Cause::Unsupported, true, true),
            (Cause::Denied, true, true),
            (Cause::Blocked, true, false),
            (Cause::NotReached, false, false),
            (Cause::Refused, false, true),
        ] {
            let failed = failed(cause);
            let found = (failed.is_of_driver(), failed.is_answer());
            assert_eq!(found, (is_of_driver, is_answer), "{cause:?}");
        }
    }
}
