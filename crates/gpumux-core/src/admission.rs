//! Admission: whether a tenant's guarantees can be kept, decided before it starts or changes.
//!
//! # Problem
//! A guarantee that is given must hold. So the guarantees on a device must not exceed it, one user must not take what
//! all others need, and a refusal must name what stands in the way.
//!
//! # Approach
//! A guarantee is booked on every device that its tenant may use. [`admit`] checks the spec by itself, then what the
//! [`UserPolicy`] allows, then on each of these devices what the user's tenants are guaranteed together, what is reserved for
//! root, and what is free. A value that falls or stays is never refused: so a policy that becomes stricter takes nothing away.

use std::collections::BTreeSet;

use crate::{
    Class, SpecError, TenantId, TenantSpec, UserId,
    quantity::{Quantity, ROUNDING},
};

mod policy;

pub use policy::{Amount, Reserve, UserPolicy, UserRules};

/// A foreign process that uses less of a device than this, such as a display server, takes nothing from what can be guaranteed.
pub const FOREIGN_COUNTS: f64 = 0.05;
/// Holders that a refusal names.
const NAMED: usize = 3;

/// A tenant whose guarantees are to be admitted.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Which.
    pub tenant: TenantId,
    /// Whose it is.
    pub user: UserId,
    /// What it is to have.
    pub spec: &'a TenantSpec,
    /// What it has; none of a new tenant.
    pub before: Option<&'a TenantSpec>,
}

/// One device that the tenant may use.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Room {
    /// What people call it.
    pub device: String,
    /// Bytes that tenants can be guaranteed together; none: not known yet.
    pub memory: Option<u64>,
    /// What is guaranteed to the tenants that may use it.
    pub booked: Vec<Booking>,
    /// The processes on it that gpumux does not control.
    pub foreign: Vec<Foreign>,
}

/// What one tenant holds of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Booking {
    /// Which tenant.
    pub tenant: TenantId,
    /// What people call it.
    pub name: String,
    /// Whose it is.
    pub user: UserId,
    /// See [`UserPolicy::privileged`].
    pub privileged: bool,
    /// Share of compute that it is guaranteed.
    pub guaranteed: f64,
    /// Bytes that it is guaranteed, or that cannot be moved.
    pub memory: u64,
}

/// A process that gpumux does not control.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Foreign {
    /// What people call it.
    pub name: String,
    /// Part of the time in which its kernels run, 0 to 1; 0 if that is not known.
    pub used: f64,
    /// Bytes of the device's memory that it has; 0 if that is not known.
    pub memory: u64,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The spec makes no sense by itself.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A class that the user may not have.
    #[error(
        "user {user} may not have tenants of class {asked}: use {allowed}, or ask the administrator (`classes` in gpumux.toml)"
    )]
    Class {
        /// The tenant that asked.
        user: String,
        /// For which class.
        asked: Class,
        /// Those that are allowed.
        allowed: String,
    },
    /// More than the user's tenants may be guaranteed together.
    #[error(
        "cannot guarantee {asked} of {device}: user {user} may be guaranteed at most {most} of it{held}: guarantee at most {free}, {lower}or \
         ask the administrator (`{key}` in gpumux.toml)",
        held = held.after("; "),
        lower = if held.by.is_empty() { "" } else { "lower another guarantee, " },
    )]
    User {
        /// The tenant that asked.
        user: String,
        /// What was asked.
        asked: Quantity,
        /// Of which device.
        device: String,
        /// What the user may have there.
        most: Quantity,
        /// What its other tenants have.
        held: Box<Held>,
        /// What it may have yet.
        free: Quantity,
        /// What the administrator calls it.
        key: &'static str,
    },
    /// More than is free.
    #[error(
        "cannot guarantee {asked} of {device}{held}: guarantee at most {free}, {lower}or name another device with --gpu",
        held = held.after(": "),
        lower = if held.by.is_empty() { "" } else { "lower a guarantee with `gpumux set`, " },
    )]
    Full {
        /// What was asked.
        asked: Quantity,
        /// Of which device.
        device: String,
        /// What stands in the way.
        held: Box<Held>,
        /// What is free.
        free: Quantity,
    },
    /// More than the device has.
    #[error(
        "cannot guarantee {asked} of {device}: only {whole} of it can be guaranteed{held}: guarantee at most {free}, or name another device \
         with --gpu",
        held = held.after("; "),
    )]
    TooLarge {
        /// What was asked.
        asked: Quantity,
        /// Of which device.
        device: String,
        /// What can be guaranteed there in all.
        whole: Quantity,
        /// What foreign processes have beside that.
        held: Box<Held>,
        /// What is free.
        free: Quantity,
    },
}

/// What stands in the way of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// What tenants hold, the most first.
    pub by: Vec<(String, Quantity)>,
    /// What is reserved for root and not held by its tenants.
    pub reserved: Option<Quantity>,
    /// What foreign processes use, the most first.
    pub foreign: Vec<(String, Quantity)>,
}

impl Held {
    /// Its words after these; nothing if nothing is held.
    fn after(&self, before: &str) -> String {
        let list = |all: &[(String, Quantity)]| {
            let named = all.iter().take(NAMED);
            let mut parts: Vec<String> = named
                .map(|(name, quantity)| format!("{name} ({quantity})"))
                .collect();
            match all.len().saturating_sub(NAMED) {
                0 => {}
                more => parts.push(format!("{more} more")),
            }
            match parts.split_last() {
                Some((last, rest)) if !rest.is_empty() => {
                    format!("{} and {last}", rest.join(", "))
                }
                _ => parts.concat(),
            }
        };
        let mut parts = Vec::new();
        if !self.by.is_empty() {
            parts.push(format!("guaranteed to {}", list(&self.by)));
        }
        if !self.foreign.is_empty() {
            parts.push(format!("used without gpumux by {}", list(&self.foreign)));
        }
        if let Some(reserved) = self.reserved {
            parts.push(format!("{reserved} is reserved for root"));
        }
        match parts.is_empty() {
            true => String::new(),
            false => before.to_owned() + &parts.join(", "),
        }
    }
}

/// Decides whether a tenant can have this spec on these devices, all that it may use.
///
/// # Errors
/// Names the first thing that stands in the way.
pub fn admit(
    request: &Request<'_>,
    policy: &UserPolicy,
    reserve: &Reserve,
    rooms: &[Room],
) -> Result<(), Refusal> {
    let spec = request.spec;
    spec.validate()?;
    let had = |class| request.before.is_some_and(|before| before.class == class);
    if !policy.classes.contains(&spec.class) && !had(spec.class) {
        let allowed: Vec<&str> = policy.classes.iter().map(|class| class.name()).collect();
        return Err(Refusal::Class {
            user: policy.user.clone(),
            asked: spec.class,
            allowed: allowed.join(" or "),
        });
    }
    let before = request.before.map_or((0.0, 0), |before| {
        (before.guaranteed, before.memory_guaranteed)
    });
    for room in rooms {
        if spec.guaranteed > before.0 {
            let compute = Resource::compute(spec.guaranteed, policy, reserve, room);
            compute.check(request, policy, room)?;
        }
        if spec.memory_guaranteed > before.1
            && let Some(memory) = Resource::memory(spec.memory_guaranteed, policy, reserve, room)
        {
            memory.check(request, policy, room)?;
        }
    }
    Ok(())
}

/// What a tenant could have at most, beside what others hold now.
#[derive(Clone, Debug, PartialEq)]
pub struct Most {
    /// Classes that its user may have.
    pub classes: BTreeSet<Class>,
    /// Share of compute that it could be guaranteed on each of its devices.
    pub guaranteed: f64,
    /// Bytes that it could be guaranteed on each of its devices.
    pub memory_guaranteed: u64,
}

/// What [`admit`] would grant a tenant at most.
pub fn most(request: &Request<'_>, policy: &UserPolicy, reserve: &Reserve, rooms: &[Room]) -> Most {
    let least = |of: &dyn Fn(&Room) -> Option<f64>| rooms.iter().filter_map(of).reduce(f64::min);
    let compute = |room: &Room| {
        let compute = Resource::compute(0.0, policy, reserve, room);
        Some(compute.most(request, policy, room))
    };
    let memory = |room: &Room| {
        let memory = Resource::memory(0, policy, reserve, room)?;
        Some(memory.most(request, policy, room))
    };
    Most {
        classes: policy.classes.clone(),
        guaranteed: least(&compute).unwrap_or_default(),
        memory_guaranteed: least(&memory).unwrap_or_default() as u64,
    }
}

/// What foreign processes take of a device, the most first, without those that take less than this.
fn takers(room: &Room, takes: fn(&Foreign) -> f64, least: f64) -> Vec<(&str, f64)> {
    let all = room.foreign.iter().map(|it| (&*it.name, takes(it)));
    let mut all: Vec<_> = all
        .filter(|(_, takes)| *takes > 0.0 && *takes >= least)
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

/// Compute or memory of one device: shares, or bytes, of which a device has fewer than a number can count exactly.
struct Resource<'a> {
    asked: f64,
    /// What the device has.
    whole: f64,
    /// What the user may have.
    most: f64,
    /// What is kept for root.
    reserved: f64,
    /// What foreign processes take, see [`takers`].
    foreign: Vec<(&'a str, f64)>,
    /// What of that is in the whole.
    used: f64,
    booked: fn(&Booking) -> f64,
    shown: fn(f64) -> Quantity,
    key: &'static str,
}

impl<'a> Resource<'a> {
    fn compute(asked: f64, policy: &UserPolicy, reserve: &Reserve, room: &'a Room) -> Self {
        let foreign = takers(room, |it| it.used, FOREIGN_COUNTS);
        Self {
            asked,
            whole: 1.0,
            most: policy.max_guaranteed,
            reserved: reserve.guaranteed,
            used: foreign.iter().map(|(_, used)| used).sum(),
            foreign,
            booked: |it| it.guaranteed,
            shown: Quantity::Compute,
            key: "max_guaranteed",
        }
    }

    /// None while it is not known how much there is.
    fn memory(asked: u64, policy: &UserPolicy, reserve: &Reserve, room: &'a Room) -> Option<Self> {
        let memory = room.memory?;
        Some(Self {
            asked: asked as f64,
            whole: memory as f64,
            most: policy.max_memory_guaranteed.of(memory) as f64,
            reserved: reserve.memory_guaranteed.of(memory) as f64,
            foreign: takers(room, |it| it.memory as f64, FOREIGN_COUNTS * memory as f64),
            // What they have is not in what can be guaranteed.
            used: 0.0,
            booked: |it| it.memory as f64,
            shown: |bytes| Quantity::Memory(bytes as u64),
            key: "max_memory_guaranteed",
        })
    }

    /// What the tenants but the one that asks hold.
    fn held(&self, request: &Request<'_>, room: &Room, by: impl Fn(&Booking) -> bool) -> f64 {
        let others = (room.booked.iter()).filter(|it| it.tenant != request.tenant && by(it));
        others.map(self.booked).sum()
    }

    /// What the user may have yet.
    fn free_to_user(&self, request: &Request<'_>, room: &Room) -> f64 {
        self.most - self.held(request, room, |it| it.user == request.user)
    }

    /// What is kept for root and not held by its tenants.
    fn kept(&self, request: &Request<'_>, policy: &UserPolicy, room: &Room) -> f64 {
        match policy.privileged {
            true => 0.0,
            false => (self.reserved - self.held(request, room, |it| it.privileged)).max(0.0),
        }
    }

    /// What nothing stands in the way of.
    fn free(&self, request: &Request<'_>, policy: &UserPolicy, room: &Room) -> f64 {
        let kept = self.kept(request, policy, room);
        self.whole - self.used - kept - self.held(request, room, |_| true)
    }

    /// The most that would not be refused.
    fn most(&self, request: &Request<'_>, policy: &UserPolicy, room: &Room) -> f64 {
        let free = self.free(request, policy, room);
        free.min(self.free_to_user(request, room)).max(0.0)
    }

    fn check(
        &self,
        request: &Request<'_>,
        policy: &UserPolicy,
        room: &Room,
    ) -> Result<(), Refusal> {
        let others = || room.booked.iter().filter(|it| it.tenant != request.tenant);
        let free = self.free_to_user(request, room);
        // To a user without a bound, the holders are of more use.
        if self.most < self.whole && self.asked > free + ROUNDING {
            let own = |it: &&Booking| it.user == request.user;
            return Err(Refusal::User {
                user: policy.user.clone(),
                asked: (self.shown)(self.asked),
                device: room.device.clone(),
                most: (self.shown)(self.most),
                held: Box::new(Held {
                    by: self.holders(others().filter(own)),
                    reserved: None,
                    foreign: Vec::new(),
                }),
                free: (self.shown)(free.max(0.0)),
                key: self.key,
            });
        }
        let free = self.free(request, policy, room);
        if self.asked <= free + ROUNDING {
            return Ok(());
        }
        let foreign = self.foreign.iter();
        let foreign = foreign.map(|(name, takes)| ((*name).to_owned(), (self.shown)(*takes)));
        let foreign: Vec<_> = foreign.collect();
        if self.asked > self.whole + ROUNDING {
            return Err(Refusal::TooLarge {
                asked: (self.shown)(self.asked),
                device: room.device.clone(),
                whole: (self.shown)(self.whole),
                held: Box::new(Held {
                    by: Vec::new(),
                    reserved: None,
                    foreign,
                }),
                free: (self.shown)(free.max(0.0)),
            });
        }
        let reserved = self.kept(request, policy, room);
        Err(Refusal::Full {
            asked: (self.shown)(self.asked),
            device: room.device.clone(),
            held: Box::new(Held {
                by: self.holders(others()),
                reserved: (reserved > 0.0).then(|| (self.shown)(reserved)),
                foreign,
            }),
            free: (self.shown)(free.max(0.0)),
        })
    }

    /// The tenants that hold some, the most first.
    fn holders<'b>(&self, all: impl Iterator<Item = &'b Booking>) -> Vec<(String, Quantity)> {
        let mut all: Vec<_> = all
            .map(|it| (it.name.clone(), (self.booked)(it)))
            .filter(|(_, amount)| *amount > 0.0)
            .collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        let shown = |(name, amount)| (name, (self.shown)(amount));
        all.into_iter().map(shown).collect()
    }
}

#[cfg(test)]
mod tests;
