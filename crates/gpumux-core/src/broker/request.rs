//! A request for memory that waits.

use std::collections::BTreeMap;

use super::{
    messages::{Ask, Command},
    model::ProcessId,
};
use crate::{Micros, TenantId};

/// Requests that may wait of one process, and of one tenant: one more is refused at once. A thread waits with one.
pub const MAX_ASKS: (usize, usize) = (256, 1024);
/// Parts that a request may have, and for how long the first waits for the last.
pub const MAX_PARTS: u32 = 64;
/// See [`MAX_PARTS`].
pub const MEET: Micros = Micros::from_secs(10);

/// A request for memory that waits: its tenant, and its place among all by age.
pub(super) type AskKey = (TenantId, u64);

/// A request for memory that waits: granted when there is room for all its parts, or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pending {
    /// Which process asks, and its name for the part.
    pub(super) parts: Vec<(ProcessId, Ask)>,
    pub(super) tickets: Vec<u32>,
    /// Since when it has all its parts; since the first, while it has not.
    pub(super) since: Micros,
    /// Leases that are not used were asked back for it.
    pub(super) trimmed: bool,
    /// Its tenant frees of its own what it lacks: that is for it, also while others wait longer.
    pub(super) own: bool,
}

impl Pending {
    /// Parts that are not there yet.
    pub(super) fn lacks_parts(&self) -> bool {
        let whole = self.parts.first().and_then(|(_, ask)| ask.part);
        whole.is_some_and(|it| self.parts.len() < it.parts as usize)
    }

    pub(super) fn is_of(&self, process: ProcessId) -> bool {
        self.parts.iter().any(|(it, _)| *it == process)
    }

    /// What it needs, by device.
    pub(super) fn needs(&self) -> BTreeMap<String, u64> {
        let mut needs: BTreeMap<String, u64> = BTreeMap::new();
        for (_, ask) in &self.parts {
            let sum = needs.entry(ask.device.clone()).or_default();
            *sum = sum.saturating_add(ask.need);
        }
        needs
    }

    pub(super) fn needs_of(&self, uuid: &str) -> u64 {
        let own = self.parts.iter().filter(|(_, ask)| ask.device == uuid);
        own.fold(0, |sum, (_, ask)| sum.saturating_add(ask.need))
    }

    pub(super) fn is_on(&self, uuid: &str) -> bool {
        self.parts.iter().any(|(_, ask)| ask.device == uuid)
    }

    /// The answer to all of its parts but these.
    pub(super) fn answer(
        &self,
        bytes: &[u64],
        but: impl Fn(ProcessId, u32) -> bool,
        out: &mut Vec<Command>,
    ) {
        for (n, ((process, _), ticket)) in self.parts.iter().zip(&self.tickets).enumerate() {
            if !but(*process, *ticket) {
                out.push(Command::Grant {
                    process: *process,
                    ticket: *ticket,
                    bytes: bytes.get(n).copied().unwrap_or(0),
                });
            }
        }
    }
}
