//! What the emulated devices are and what their calls cost: a TOML file, or an H100.

use std::path::Path;

use gpumux_sim::gpu::Hardware;
use serde::{Deserialize, Serialize};

use crate::{mig, protocol::DeviceInfo};

/// One machine's devices; all are alike, but for their partitions. Every key may be left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Profile {
    /// Product name. Says that it is emulated, because results carry it.
    pub name: String,
    /// Number of devices, 1 to [`MAX_DEVICES`].
    pub devices: u32,
    /// For each device in order, the MIG instances it is partitioned into, by the names of their profiles (`1g.10gb`).
    /// A device with none is whole.
    pub mig: Vec<Vec<String>>,
    /// For each device in order, whether it is in MIG mode without an instance too. One with instances always is.
    pub mig_mode: Vec<bool>,
    /// Bytes of device memory.
    pub memory: u64,
    /// Bytes that NVML counts beyond these, and reports as reserved. Unset: a 232nd part, as on an H200.
    pub reserved_memory: Option<u64>,
    /// Bytes that every context occupies. Measured: about 520 MiB.
    pub context_memory: u64,
    /// Bytes that every stream occupies that the program makes. Not measured.
    pub stream_memory: u64,
    /// For how many ms after its end a process's memory stays taken. On an H200, 119 GiB were still taken after 188 ms.
    pub release_ms: u64,
    /// Compute capability.
    pub compute_capability: (u32, u32),
    /// SM clock in kHz. Measured while spinning: 1755 MHz.
    pub clock_khz: u32,
    /// Bytes per second that kernels can move (HBM3: 3.35 TB/s).
    pub memory_bandwidth: u64,
    /// Driver version as NVML gives it.
    pub driver_version: String,
    /// CUDA version as `cuDriverGetVersion` gives it.
    pub cuda_version: i32,
    /// Costs inside the GPU.
    pub hardware: Hardware,
    /// Costs of the resource manager's controls.
    pub controls: Controls,
}

/// How many devices one server can have.
pub const MAX_DEVICES: u32 = 16;

/// How long controls take, in µs: least and most. Draws are spread evenly between, from a fixed seed.
/// Calls that pull controls take turns on a device, as they do in the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Controls {
    /// Setting a timeslice.
    pub set_timeslice_us: (u64, u64),
    /// Disabling channels.
    pub freeze_us: (u64, u64),
    /// Enabling channels.
    pub thaw_us: (u64, u64),
    /// Preempting a group.
    pub preempt_us: (u64, u64),
    /// Every so many-th call that freezes or thaws fails with `EIO`; 0: none.
    pub fail_every: u64,
    /// RM refuses controls of processes that did not open the file themselves: a driver or sandbox without what gpumux needs.
    pub own_process_only: bool,
}

impl Default for Controls {
    /// Measured on an H100 with driver 580.159; preemption as others measured it.
    fn default() -> Self {
        Self {
            set_timeslice_us: (150, 290),
            freeze_us: (370, 1300),
            thaw_us: (200, 240),
            preempt_us: (250, 356),
            fail_every: 0,
            own_process_only: false,
        }
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            name: "NVIDIA H100 80GB HBM3 (emulated)".into(),
            devices: 1,
            mig: Vec::new(),
            mig_mode: Vec::new(),
            memory: 80 << 30,
            reserved_memory: None,
            context_memory: 520 << 20,
            stream_memory: 0,
            release_ms: 200,
            compute_capability: (9, 0),
            clock_khz: 1_755_000,
            memory_bandwidth: 3_350_000_000_000,
            driver_version: "580.159.04".into(),
            cuda_version: 13_000,
            hardware: Hardware::default(),
            controls: Controls::default(),
        }
    }
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read the profile {path}: {source}")]
    Read {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not a profile.
    #[error("the profile is not valid: {0}")]
    Parse(#[from] toml::de::Error),
    /// A value makes no sense.
    #[error("the profile's `{key}` is {value}: use {allowed}")]
    Value {
        /// Which key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
}

impl Profile {
    /// Reads a profile file.
    ///
    /// # Errors
    /// When it cannot be read, or is not valid.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let text = std::fs::read_to_string(path).map_err(|source| ProfileError::Read {
            path: path.display().to_string(),
            source,
        })?;
        Self::parse(&text)
    }

    /// Reads a profile's text.
    ///
    /// # Errors
    /// When it is not valid.
    pub fn parse(text: &str) -> Result<Self, ProfileError> {
        let profile: Self = toml::from_str(text)?;
        profile.check()?;
        Ok(profile)
    }

    /// Checks that all values make sense.
    ///
    /// # Errors
    /// Names the first that does not.
    pub fn check(&self) -> Result<(), ProfileError> {
        let wrong = |key, value: &dyn std::fmt::Display, allowed| {
            Err(ProfileError::Value {
                key,
                value: value.to_string(),
                allowed,
            })
        };
        if self.devices == 0 || self.devices > MAX_DEVICES {
            return wrong("devices", &self.devices, "1 to 16");
        }
        if self.mig.len() > self.devices as usize {
            return wrong("mig", &self.mig.len(), "one list per device at most");
        }
        if self.mig_mode.len() > self.devices as usize {
            let most = "one value per device at most";
            return wrong("mig_mode", &self.mig_mode.len(), most);
        }
        if let Some(names) = self.mig.iter().find(|names| !mig::fits(names)) {
            return wrong("mig", &names.join(", "), mig::ALLOWED);
        }
        if self.hardware.sms == 0 || self.hardware.sms > 4096 {
            return wrong("hardware.sms", &self.hardware.sms, "1 to 4096");
        }
        if self.memory < 1 << 20 || self.memory > 1 << 44 {
            return wrong("memory", &self.memory, "1 MiB to 16 TiB, in bytes");
        }
        if let Some(reserved) = self.reserved_memory.filter(|it| *it > 1 << 44) {
            return wrong("reserved_memory", &reserved, "at most 16 TiB, in bytes");
        }
        if self.context_memory > self.memory {
            return wrong("context_memory", &self.context_memory, "at most `memory`");
        }
        if self.stream_memory > self.memory {
            return wrong("stream_memory", &self.stream_memory, "at most `memory`");
        }
        if self.release_ms > 60_000 {
            return wrong("release_ms", &self.release_ms, "at most 60000");
        }
        if self.clock_khz == 0 {
            return wrong("clock_khz", &self.clock_khz, "more than 0");
        }
        if self.memory_bandwidth == 0 {
            return wrong("memory_bandwidth", &self.memory_bandwidth, "more than 0");
        }
        if self.name.is_empty() || self.name.len() > 90 {
            return wrong("name", &self.name, "1 to 90 bytes");
        }
        for (key, (least, most)) in [
            ("controls.set_timeslice_us", self.controls.set_timeslice_us),
            ("controls.freeze_us", self.controls.freeze_us),
            ("controls.thaw_us", self.controls.thaw_us),
            ("controls.preempt_us", self.controls.preempt_us),
        ] {
            if least > most || most > 1_000_000 {
                let value = format!("[{least}, {most}]");
                return wrong(key, &value, "[least, most], at most 1 s");
            }
        }
        Ok(())
    }

    /// All devices in order: the GPUs by their index, then the MIG instances of each.
    pub fn infos(&self) -> Vec<DeviceInfo> {
        let whole = |index| DeviceInfo {
            name: self.name.clone(),
            uuid: self.uuid(index),
            pci_bus: Self::pci_bus(index),
            memory: self.memory,
            stream_memory: self.stream_memory,
            reserved_memory: self.reserved_memory.unwrap_or(self.memory / 232),
            sms: self.hardware.sms,
            compute_capability: self.compute_capability,
            clock_khz: self.clock_khz,
            memory_bandwidth: self.memory_bandwidth,
            driver_version: self.driver_version.clone(),
            cuda_version: self.cuda_version,
            mig_mode: self.mig_mode.get(index as usize).is_some_and(|it| *it)
                || self
                    .mig
                    .get(index as usize)
                    .is_some_and(|it| !it.is_empty()),
            instance: None,
            gone: false,
        };
        let parts = self.places().into_iter().map(|(gpu, place)| DeviceInfo {
            uuid: self.instance_uuid(gpu, place.id),
            ..mig::instance(&place, gpu, &whole(gpu))
        });
        (0..self.devices).map(whole).chain(parts).collect()
    }

    /// The instances that there are from the beginning, each with its GPU.
    pub(crate) fn places(&self) -> Vec<(u32, mig::Place)> {
        let of = |(names, gpu): (&Vec<String>, u32)| {
            let places = mig::places(names).unwrap_or_default();
            places.into_iter().map(move |place| (gpu, place))
        };
        self.mig.iter().zip(0..self.devices).flat_map(of).collect()
    }

    /// The UUID of a GPU's instance with this number: an instance that is made anew has it again.
    pub(crate) fn instance_uuid(&self, gpu: u32, id: u32) -> [u8; 16] {
        self.uuid(MAX_DEVICES + gpu * 16 + id)
    }

    /// The UUID of a device: always the same for the same name and index.
    pub fn uuid(&self, index: u32) -> [u8; 16] {
        // FNV-1a, twice, over what tells devices apart.
        let hash = |salt: u64| {
            self.name
                .bytes()
                .chain(index.to_le_bytes())
                .fold(0xcbf2_9ce4_8422_2325 ^ salt, |hash: u64, byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
                })
        };
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&hash(0).to_be_bytes());
        uuid[8..].copy_from_slice(&hash(0x9e37_79b9_7f4a_7c15).to_be_bytes());
        uuid[6] = uuid[6] & 0x0f | 0x80; // version 8: vendor-specific
        uuid[8] = uuid[8] & 0x3f | 0x80;
        uuid
    }

    /// A device's PCI bus; domain, device and function are 0.
    pub const fn pci_bus(index: u32) -> u32 {
        index + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::uuid_text;

    #[test]
    fn an_empty_profile_is_an_h100() {
        assert_eq!(Profile::parse("").unwrap(), Profile::default());
    }

    #[test]
    fn a_profile_survives_being_written() {
        let profile = Profile {
            devices: 3,
            mig: vec![vec![], vec!["1g.10gb".into(), "2g.20gb".into()]],
            ..Profile::default()
        };
        let text = toml::to_string(&profile).unwrap();
        assert_eq!(Profile::parse(&text).unwrap(), profile);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, key) in [
            ("device = 2", "device"),
            ("devices = 0", "devices"),
            ("mig = [['1g.10gb'], ['1g.10gb']]", "mig"),
            ("mig = [['1g.11gb']]", "1g.11gb"),
            ("mig = [['4g.40gb', '4g.40gb']]", "4g.40gb, 4g.40gb"),
            ("[hardware]\nsms = 0", "hardware.sms"),
            ("[hardware]\nwarps = 1", "warps"),
            ("[controls]\nfreeze_us = [2, 1]", "controls.freeze_us"),
            ("context_memory = 99999999999999", "context_memory"),
            ("stream_memory = 99999999999999", "stream_memory"),
        ] {
            let error = Profile::parse(text).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn instances_come_after_all_gpus() {
        let text = "devices = 2\nmig = [['1g.10gb'], ['2g.20gb', '1g.10gb']]";
        let devices = Profile::parse(text).unwrap().infos();
        let of = |info: &DeviceInfo| info.instance.as_ref().map(|it| it.gpu);
        let found: Vec<_> = devices.iter().map(|it| (of(it), it.pci_bus)).collect();
        let expected = [
            (None, 1),
            (None, 2),
            (Some(0), 1),
            (Some(1), 2),
            (Some(1), 2),
        ];
        assert_eq!(found, expected);
        assert!(devices[0].uuid_text().starts_with("GPU-"));
        assert!(devices[2].uuid_text().starts_with("MIG-"));
        assert_ne!(devices[3].uuid, devices[4].uuid);
        assert!(devices[3].name.ends_with(" MIG 2g.20gb"));
    }

    #[test]
    fn uuids_are_stable_and_tell_devices_apart() {
        let profile = Profile::default();
        let text = uuid_text(&profile.uuid(0));
        assert_eq!(text.len(), 40);
        assert_eq!(text, uuid_text(&Profile::default().uuid(0)));
        assert_ne!(profile.uuid(0), profile.uuid(1));
    }
}
