//! The mark of an event: which work it is, and when that was reached. Processes may share it.

use std::{
    os::fd::OwnedFd,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{error::Result, memory, process::lock};

/// A mark.
#[derive(Default)]
pub(crate) struct Mark {
    state: Mutex<State>,
    shared: Option<Shared>,
}

/// The last record.
#[derive(Clone, Copy, Default)]
pub(crate) struct State {
    pub(crate) work: Option<u64>,
    /// Its number among the records of all processes.
    record: u64,
    /// When it was reached, on `CLOCK_MONOTONIC` in ns.
    pub(crate) at: Option<u64>,
}

/// What processes know of a shared mark: how often it was recorded, and which record was reached last.
struct Shared {
    file: OwnedFd,
    words: &'static [AtomicU64; 2],
}

impl Mark {
    /// One that processes share by this page.
    pub(crate) fn shared(file: OwnedFd) -> Result<Self> {
        let words = memory::shared_words(&file)?;
        Ok(Self {
            state: Mutex::default(),
            shared: Some(Shared { file, words }),
        })
    }

    /// Its page, if processes share it.
    pub(crate) fn file(&self) -> Option<&OwnedFd> {
        self.shared.as_ref().map(|it| &it.file)
    }

    pub(crate) fn state(&self) -> State {
        *lock(&self.state)
    }

    /// It is this work from now on.
    pub(crate) fn submitted(&self, work: u64) {
        let shared = self.shared.as_ref();
        *lock(&self.state) = State {
            work: Some(work),
            record: shared.map_or(0, |it| it.words[0].fetch_add(1, Ordering::AcqRel) + 1),
            at: None,
        };
    }

    /// It is no work.
    pub(crate) fn forget(&self) {
        *lock(&self.state) = State::default();
    }

    /// It was reached, if it is still this work.
    pub(crate) fn reach(&self, work: u64, at: u64) {
        let mut state = lock(&self.state);
        if state.work == Some(work) {
            state.at = Some(at);
            if let Some(shared) = &self.shared {
                shared.words[1].fetch_max(state.record, Ordering::AcqRel);
            }
        }
    }

    /// Whether it was reached, or is no work.
    pub(crate) fn is_reached(&self) -> bool {
        match self.last_record() {
            Some(record) => self.has_reached(record),
            None => {
                let state = self.state();
                state.work.is_none() || state.at.is_some()
            }
        }
    }

    /// The last record of all processes that share it.
    pub(crate) fn last_record(&self) -> Option<u64> {
        let shared = self.shared.as_ref()?;
        Some(shared.words[0].load(Ordering::Acquire))
    }

    /// Whether that record was reached.
    pub(crate) fn has_reached(&self, record: u64) -> bool {
        let shared = self.shared.as_ref();
        shared.is_none_or(|it| it.words[1].load(Ordering::Acquire) >= record)
    }
}
