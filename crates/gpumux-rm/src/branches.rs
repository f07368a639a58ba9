//! For which drivers and GPUs the controls are known, and how.
//!
//! # Facts
//! NVIDIA's open kernel modules of all branches in [`BRANCHES`] have the same controls, with the same structures, and ask no privilege
//! for those that gpumux needs. One structure differs that gpumux looks at (`NVA06C_CTRL_GPFIFO_SCHEDULE_PARAMS` has 2 bytes up to 570,
//! then 3), and of that only the first byte. `tests/branches.txt` has the record, and `tests/branches.rs` compares it with
//! [`crate::layout`]. From 610 on one more structure differs, which [`crate::layout::Variant`] knows. All else that a version can tell is
//! how well the controls are known there.

/// How it is known that the controls work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Evidence {
    /// Measured on such a GPU with this branch.
    Measured,
    /// NVIDIA's source of this branch has them for such GPUs, as it has for those that were measured.
    Source,
    /// Neither.
    Unknown,
}

impl Evidence {
    /// For people.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Measured => "measured with this driver branch",
            Self::Source => "in the driver's source, not measured",
            Self::Unknown => "unknown for this driver and GPU",
        }
    }
}

/// A family of GPUs with one form of channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// NVIDIA's name.
    pub name: &'static str,
    /// First and last compute capability.
    capabilities: ((u32, u32), (u32, u32)),
    /// The first branch whose source has its channel groups.
    pub since: u32,
}

/// By compute capability ("CUDA C++ Programming Guide", compute capabilities) and chip (`g_gpu_class_list.c`: TU102, GA100, GA102,
/// AD102, GH100, GB100, GB110, GB202, GB20B).
pub const ARCHITECTURES: [Architecture; 8] = [
    architecture("Turing", (7, 5), (7, 5), 535),
    architecture("Ampere", (8, 0), (8, 8), 535),
    architecture("Ada", (8, 9), (8, 9), 535),
    architecture("Hopper", (9, 0), (9, 0), 535),
    architecture("Blackwell", (10, 0), (10, 2), 560),
    architecture("Blackwell Ultra", (10, 3), (10, 3), 575),
    architecture("Blackwell RTX", (12, 0), (12, 0), 570),
    architecture("Blackwell (GB10)", (12, 1), (12, 1), 575),
];

const fn architecture(
    name: &'static str,
    first: (u32, u32),
    last: (u32, u32),
    since: u32,
) -> Architecture {
    Architecture {
        name,
        capabilities: (first, last),
        since,
    }
}

impl Architecture {
    /// The one with this compute capability, if its controls are known at all.
    pub fn of(capability: (u32, u32)) -> Option<&'static Self> {
        ARCHITECTURES
            .iter()
            .find(|it| (it.capabilities.0..=it.capabilities.1).contains(&capability))
    }
}

/// Driver branches whose source was read: all that matters here of it, or (615) most.
pub const BRANCHES: [u32; 12] = [535, 545, 550, 555, 560, 565, 570, 575, 580, 590, 595, 615];

/// Architecture and branch with which the controls were measured: H100 and H200, driver 580.159.04.
const MEASURED: (&str, u32) = ("Hopper", 580);

/// The branch of a version such as `580.159.04`.
pub fn branch(version: &str) -> Option<u32> {
    version.trim().split('.').next()?.parse().ok()
}

/// The version of the driver's library among the files that a process maps (`/proc/PID/maps`), by its file's name.
pub fn of_library(maps: &str) -> Option<&str> {
    let names = maps.lines().filter_map(|line| line.rsplit('/').next());
    let mut versions = names.filter_map(|name| name.strip_prefix("libcuda.so."));
    versions.find(|version| version.contains('.'))
}

/// How well the controls are known with a driver of this version, open or closed, on GPUs of this compute capability.
pub fn evidence(version: &str, open: bool, capability: (u32, u32)) -> Evidence {
    let branch = branch(version).filter(|it| open && BRANCHES.contains(it));
    match (branch, Architecture::of(capability)) {
        (Some(branch), Some(it)) if (it.name, branch) == MEASURED => Evidence::Measured,
        (Some(branch), Some(it)) if branch >= it.since => Evidence::Source,
        _ => Evidence::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn librarys_version_is_in_the_name_of_its_file() {
        let of = |path| {
            let line = "7f5c8a000000-7f5c8a1f4000 r--p 00000000 00:1d 4711      ";
            of_library(&format!("{line} [heap]\n{line} {path}\n")).map(str::to_owned)
        };
        let real = of("/usr/lib/x86_64-linux-gnu/libcuda.so.610.43.02");
        assert_eq!(real.as_deref(), Some("610.43.02"));
        assert_eq!(of("/usr/lib/libcuda.so.1"), None);
        assert_eq!(of("/usr/lib/libcudart.so.12.8.90"), None);
    }

    #[test]
    fn only_what_was_measured_is_said_to_be() {
        let open = |version, capability| evidence(version, true, capability);
        assert_eq!(open("580.159.04", (9, 0)), Evidence::Measured);
        assert_eq!(open("580.159.04", (8, 0)), Evidence::Source);
        assert_eq!(open("535.288.01", (9, 0)), Evidence::Source);
        assert_eq!(open("570.211.01", (12, 0)), Evidence::Source);
        assert_eq!(open("565.77", (12, 0)), Evidence::Unknown, "not there yet");
        assert_eq!(open("610.43.02", (9, 0)), Evidence::Unknown, "not read");
        assert_eq!(open("615.71.09", (9, 0)), Evidence::Source);
        assert_eq!(open("620.6", (9, 0)), Evidence::Unknown);
        assert_eq!(open("530.41.03", (9, 0)), Evidence::Unknown);
        assert_eq!(open("580.159.04", (7, 0)), Evidence::Unknown, "Volta");
        assert_eq!(open("", (9, 0)), Evidence::Unknown);
        let closed = evidence("580.159.04", false, (9, 0));
        assert_eq!(closed, Evidence::Unknown);
    }
}
