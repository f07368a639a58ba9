//! The allocation model: what a device offers, how the scheduler rounds a request, and what fits together on
//! one device. The published slices are built from it, and every claim is checked against it once more before
//! it is prepared, so that no mistake or malice elsewhere can give a device away twice.

use std::collections::BTreeMap;

/// Compute of a whole device in milli-GPU.
pub const WHOLE_COMPUTE: u64 = 1000;
/// Guaranteed compute is given in steps of one percent: what the hardware's timeslices can keep.
pub const COMPUTE_STEP: u64 = 10;
/// Memory is given in steps of this many bytes.
pub const MEMORY_STEP: u64 = 256 << 20;
/// The least memory in bytes: a CUDA context takes 0.5 GiB of it (gpumuxd counts 544 MiB, measured on an H100).
pub const MEMORY_LEAST: u64 = 768 << 20;
/// Memory of a request that names none, in bytes.
pub const MEMORY_DEFAULT: u64 = 1 << 30;
/// Most tenants on one device.
pub const CLIENTS: u64 = 64;

/// A resource of a device that claims consume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// Guaranteed compute in milli-GPU; none of it is what preemptible means.
    Compute,
    /// Guaranteed memory in bytes.
    Memory,
    /// Tenants.
    Clients,
}

gpumux_core::names!(Resource: Compute = "compute", Memory = "memory", Clients = "clients");

impl Resource {
    /// The resource of that name, with or without the driver's domain.
    pub fn parse(name: &str) -> Option<Self> {
        let name = name
            .strip_prefix(crate::DRIVER)
            .and_then(|rest| rest.strip_prefix('/'))
            .unwrap_or(name);
        Self::named(name)
    }
}

/// An amount of each resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Amounts {
    /// milli-GPU.
    pub compute: u64,
    /// Bytes.
    pub memory: u64,
    /// Tenants.
    pub clients: u64,
}

impl Amounts {
    /// The amount of one resource.
    pub fn get(&self, resource: Resource) -> u64 {
        match resource {
            Resource::Compute => self.compute,
            Resource::Memory => self.memory,
            Resource::Clients => self.clients,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            compute: self.compute.saturating_add(other.compute),
            memory: self.memory.saturating_add(other.memory),
            clients: self.clients.saturating_add(other.clients),
        }
    }
}

/// What a request of one resource may be, and what it becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// For a request that does not name the resource.
    pub default: u64,
    /// Which amounts there are.
    pub valid: Valid,
}

/// Which amounts of a resource can be consumed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Valid {
    /// `min`, `min + step`, … up to `max`, or the device's whole amount.
    Range {
        /// The least.
        min: u64,
        /// The most; the whole amount if there is none.
        max: Option<u64>,
        /// The distance.
        step: u64,
    },
    /// These, ascending.
    Values(Vec<u64>),
}

/// The request cannot be satisfied by any device of this size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{asked} is more than the {most} that a request can get")]
pub struct TooMuch {
    /// What was asked.
    pub asked: u64,
    /// What there is.
    pub most: u64,
}

impl Policy {
    /// The policy of a resource.
    pub fn of(resource: Resource) -> Self {
        match resource {
            Resource::Compute => Self {
                default: 0,
                valid: Valid::Range {
                    min: 0,
                    max: Some(WHOLE_COMPUTE),
                    step: COMPUTE_STEP,
                },
            },
            Resource::Memory => Self {
                default: MEMORY_DEFAULT,
                valid: Valid::Range {
                    min: MEMORY_LEAST,
                    max: None,
                    step: MEMORY_STEP,
                },
            },
            Resource::Clients => Self {
                default: 1,
                valid: Valid::Values(vec![1]),
            },
        }
    }

    /// What a request consumes of a device that has `whole` of the resource.
    ///
    /// # Errors
    /// No valid amount is large enough.
    pub fn consumed(&self, asked: Option<u64>, whole: u64) -> Result<u64, TooMuch> {
        let asked = asked.unwrap_or(self.default);
        let (amount, most) = match &self.valid {
            Valid::Range { min, max, step } => {
                let most = max.unwrap_or(whole).min(whole);
                let steps = asked.saturating_sub(*min).div_ceil((*step).max(1));
                (min.checked_add(steps.saturating_mul((*step).max(1))), most)
            }
            Valid::Values(values) => (
                values.iter().copied().find(|&value| value >= asked),
                values.last().copied().unwrap_or(0).min(whole),
            ),
        };
        amount
            .filter(|&amount| amount <= most)
            .ok_or(TooMuch { asked, most })
    }
}

/// How much of itself a device offers.
pub fn capacity(memory_bytes: u64) -> Amounts {
    Amounts {
        compute: WHOLE_COMPUTE,
        memory: memory_bytes,
        clients: CLIENTS,
    }
}

/// How a claim uses a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// Beside others, with these amounts guaranteed.
    Shared(Amounts),
    /// Alone.
    Whole,
    /// To look at it only, beside its users: nothing is guaranteed and nothing is counted.
    Admin,
}

/// Why a device cannot take one more user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Overbooked {
    /// Whole and shared use exclude each other.
    #[error("{device} is in use {by} and cannot be used {wanted} as well")]
    Mode {
        /// The device.
        device: String,
        /// How it is used.
        by: &'static str,
        /// How it was to be used.
        wanted: &'static str,
    },
    /// Two instances in one place of a GPU.
    #[error("{device} has memory slices of {other}")]
    Overlap {
        /// The device.
        device: String,
        /// Which one it overlaps.
        other: String,
    },
    /// Together they would consume more than there is.
    #[error(
        "{device} has {free} of {whole} {resource} left, and {asked} was allocated to this claim"
    )]
    Exceeded {
        /// The device.
        device: String,
        /// Of what.
        resource: Resource,
        /// What this claim was allocated.
        asked: u64,
        /// What is left.
        free: u64,
        /// What there is.
        whole: u64,
    },
}

/// What is guaranteed on the devices of a node.
#[derive(Clone, Debug, Default)]
pub struct Book {
    devices: BTreeMap<String, Vec<Use>>,
}

impl Book {
    /// Enters a use that was admitted before.
    pub fn enter(&mut self, device: &str, usage: Use) {
        if usage == Use::Admin {
            return;
        }
        self.devices
            .entry(device.to_owned())
            .or_default()
            .push(usage);
    }

    /// Enters a use if its guarantee fits on the device.
    ///
    /// # Errors
    /// It is used whole, is to be used whole while it is shared, or too little is left.
    pub fn admit(&mut self, device: &str, whole: Amounts, usage: Use) -> Result<(), Overbooked> {
        let users = self.devices.get(device).map_or(&[][..], Vec::as_slice);
        let mode = |by, wanted| Overbooked::Mode {
            device: device.to_owned(),
            by,
            wanted,
        };
        match usage {
            Use::Admin => return Ok(()),
            Use::Whole if users.contains(&Use::Whole) => return Err(mode("whole", "whole")),
            Use::Whole if !users.is_empty() => return Err(mode("shared", "whole")),
            Use::Whole => {}
            Use::Shared(asked) => {
                let used = users
                    .iter()
                    .try_fold(Amounts::default(), |sum, user| match user {
                        Use::Whole => Err(mode("whole", "shared")),
                        Use::Shared(amounts) => Ok(sum.plus(*amounts)),
                        Use::Admin => Ok(sum),
                    })?;
                for resource in Resource::ALL {
                    let free = whole.get(resource).saturating_sub(used.get(resource));
                    if asked.get(resource) > free {
                        return Err(Overbooked::Exceeded {
                            device: device.to_owned(),
                            resource,
                            asked: asked.get(resource),
                            free,
                            whole: whole.get(resource),
                        });
                    }
                }
            }
        }
        self.enter(device, usage);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn shared(compute: u64, memory: u64) -> Use {
        Use::Shared(Amounts {
            compute,
            memory,
            clients: 1,
        })
    }

    #[test]
    fn requests_round_up_to_the_policy() {
        let compute = Policy::of(Resource::Compute);
        assert_eq!(compute.consumed(Some(295), 1000), Ok(300));
        assert_eq!(
            compute.consumed(None, 1000),
            Ok(0),
            "no compute is preemptible"
        );
        assert_eq!(
            compute.consumed(Some(1001), 1000),
            Err(TooMuch {
                asked: 1001,
                most: 1000
            })
        );
        let memory = Policy::of(Resource::Memory);
        assert_eq!(memory.consumed(Some(1), 80 * GIB), Ok(MEMORY_LEAST));
        assert_eq!(memory.consumed(None, 80 * GIB), Ok(GIB));
        assert!(memory.consumed(Some(81 * GIB), 80 * GIB).is_err());
        let clients = Policy::of(Resource::Clients);
        assert_eq!(clients.consumed(None, 64), Ok(1));
        assert!(clients.consumed(Some(2), 64).is_err());
    }

    #[test]
    fn whole_and_shared_use_exclude_each_other() {
        let whole = capacity(80 * GIB);
        let mut book = Book::default();
        book.admit("gpu-0", whole, shared(500, GIB)).unwrap();
        let error = book
            .admit("gpu-0", whole, Use::Whole)
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "gpu-0 is in use shared and cannot be used whole as well"
        );
        book.admit("gpu-1", whole, Use::Whole).unwrap();
        for usage in [Use::Whole, shared(0, GIB)] {
            assert!(matches!(
                book.admit("gpu-1", whole, usage),
                Err(Overbooked::Mode { by: "whole", .. })
            ));
        }
    }

    #[test]
    fn what_exceeds_is_named() {
        let whole = capacity(80 * GIB);
        let mut book = Book::default();
        book.admit("gpu-0", whole, shared(800, GIB)).unwrap();
        let error = book
            .admit("gpu-0", whole, shared(300, GIB))
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "gpu-0 has 200 of 1000 compute left, and 300 was allocated to this claim"
        );
    }

    proptest! {
        #[test]
        fn a_consumed_amount_is_valid_and_the_least_that_suffices(
            asked in proptest::option::of(0..3000u64),
            whole in 1..2000u64,
            min in 0..50u64,
            step in 1..50u64,
        ) {
            let policy = Policy { default: min, valid: Valid::Range { min, max: None, step } };
            let wanted = asked.unwrap_or(min);
            match policy.consumed(asked, whole) {
                Ok(got) => {
                    prop_assert!(got >= wanted && got >= min && got <= whole);
                    prop_assert_eq!((got - min) % step, 0);
                    prop_assert!(got == min || got - step < wanted);
                }
                Err(_) => {
                    let fits = (0..).map(|n| min + n * step).take_while(|&v| v <= whole).any(|v| v >= wanted);
                    prop_assert!(!fits);
                }
            }
        }

        #[test]
        fn no_order_of_admissions_overbooks(
            uses in proptest::collection::vec((0..4u8, 0..1000u64, 0..(40 * GIB)), 0..100),
        ) {
            let whole = capacity(80 * GIB);
            let mut book = Book::default();
            for (kind, compute, memory) in uses {
                let usage = if kind == 0 { Use::Whole } else { shared(compute, memory) };
                let _ = book.admit("gpu-0", whole, usage);
            }
            let users = book.devices.remove("gpu-0").unwrap_or_default();
            if users.contains(&Use::Whole) {
                prop_assert_eq!(users.len(), 1);
            }
            let sum = users.iter().fold(Amounts::default(), |sum, user| match user {
                Use::Shared(amounts) => sum.plus(*amounts),
                Use::Whole | Use::Admin => sum,
            });
            for resource in Resource::ALL {
                prop_assert!(sum.get(resource) <= whole.get(resource));
            }
        }
    }
}
