//! A process that is connected to the daemon.

use std::{collections::BTreeMap, ops::Deref, sync::Arc};

use gpumux_core::Micros;
use gpumux_wire::page::{Slot, Work};

use super::record::Counted;
use crate::link::Link;

/// A connected process, and what the scheduling thread has of it.
pub(crate) struct Met {
    pub(super) link: Arc<Link>,
    /// How often the lease had expired for the process when its session began: at any other number it is over.
    pub(super) epoch: u64,
    /// What the page had counted when the process came: one that comes again brings it along.
    pub(super) before: Counted,
    /// What it knows of [`Daemon::Hints`].
    pub(super) told: (u64, bool),
    /// Whether the last compute group that it announced was one of its tenant's group.
    pub(super) shared: Option<bool>,
    /// Its groups were let go, since its lease had expired.
    pub(super) left: bool,
    /// It has a channel group that cannot be managed, and runs when it likes.
    pub(super) unmanaged: bool,
    /// When its session began.
    pub(super) began: Micros,
    /// Groups of an MPS server that the driver refused when this session began, and the work that was submitted there at the last
    /// look.
    pub(super) lost: BTreeMap<u32, u64>,
    /// Its group has failed, and what becomes of it is reported no more.
    pub(super) given_up: bool,
    /// Since when it has waited for the device nevertheless.
    pub(super) waits_since: Option<Micros>,
    /// When it last freed a part of a group in which it had work: what a process does that exits.
    pub(super) freed: Option<Micros>,
}

impl Deref for Met {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl Met {
    pub(crate) fn new(link: Arc<Link>) -> Self {
        Self {
            epoch: link.page.expired(),
            before: Counted::of(&link.page),
            link,
            told: (0, false),
            shared: None,
            left: false,
            unmanaged: false,
            began: Micros::ZERO,
            lost: BTreeMap::new(),
            given_up: false,
            waits_since: None,
            freed: None,
        }
    }

    /// Whether it waits for work in a group that it has lost, and has submitted none there since the last look.
    pub(super) fn waits_for_the_lost(&mut self) -> bool {
        let mut waits = false;
        for (key, before) in &mut self.lost {
            if let Some(Work::Busy(submitted)) = self.link.page.slot(*key).map(Slot::work) {
                waits |= std::mem::replace(before, submitted) == submitted;
            }
        }
        waits
    }

    pub(super) fn counted(&self) -> Counted {
        Counted::of(&self.page).since(&self.before)
    }

    /// Whether the process has freed its groups, since its lease had expired.
    pub(super) fn has_expired(&self) -> bool {
        self.page.expired() != self.epoch
    }
}
