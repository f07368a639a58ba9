//! Why MIG instances cannot be listed, made or removed.

use std::time::Duration;

/// How long a request waits for its turn, and then for NVML. The kubelet gives up on a call after 45 s.
pub(super) const LIMIT: Duration = Duration::from_secs(15);

/// Why an instance is not made or removed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum MigError {
    #[error("only root and the daemon's own user may list, make and remove MIG instances")]
    NotTrusted,
    #[error(
        "{0} is no GPU in MIG mode here: root switches that on with `nvidia-smi -i GPU -mig 1`, which resets the GPU"
    )]
    NoGpu(String),
    #[error("{gpu} has no profile `{profile}`: use one of {known}")]
    NoProfile {
        gpu: String,
        profile: String,
        known: String,
    },
    #[error(
        "an instance {profile} cannot begin at memory slice {start} of {gpu}: use one of {starts}"
    )]
    NoPlace {
        gpu: String,
        profile: String,
        start: u32,
        starts: String,
    },
    #[error(
        "{gpu} has no room for {profile} at memory slice {start}: {holders} must be removed first"
    )]
    Held {
        gpu: String,
        profile: String,
        start: u32,
        holders: String,
    },
    #[error("{gpu} has no GPU instance {id} (any more)")]
    NoInstance { gpu: String, id: u32 },
    #[error(
        "GPU instance {id} of {gpu} has {found} and not {expected}: it is another one now; list the instances again"
    )]
    Other {
        gpu: String,
        id: u32,
        found: String,
        expected: String,
    },
    #[error("{device} is in use by {holders}: it can be removed when they have ended")]
    InUse { device: String, holders: String },
    #[error("NVML cannot {what}: {error}")]
    Nvml { what: &'static str, error: String },
    #[error(
        "NVML cannot make the compute instance of {instance} ({error}); {}",
        undone(.left.as_deref())
    )]
    HalfMade {
        instance: String,
        error: String,
        /// Why the GPU instance could not be removed again.
        left: Option<String>,
    },
    #[error("this driver's NVML has no {0}: MIG instances need driver 525 or newer")]
    Old(&'static str),
    #[error(
        "NVML has not answered for {} s and may still do what it was asked for: list the instances later; `nvidia-smi` shows whether the driver answers",
        LIMIT.as_secs()
    )]
    Slow,
    #[error("a thread cannot be started: {0}")]
    Thread(String),
}

fn undone(left: Option<&str>) -> String {
    match left {
        None => "the GPU instance was removed again".to_owned(),
        Some(error) => format!("the GPU instance is left, since it cannot be removed: {error}"),
    }
}

/// Names in one text.
pub(super) fn join(all: impl Iterator<Item = String>) -> String {
    all.collect::<Vec<_>>().join(", ")
}
