//! Whose a group is, and what enters one.

use std::{io, os::fd::OwnedFd, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    examine::Examiner,
    peer::{ProcessFd, ProcessId},
};

/// Whose group it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) uid: u32,
    pub(crate) trust: String,
}

impl Key {
    /// The group's name to the scheduler.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.uid, self.trust)
    }
}

/// A process that has entered a group, and what shows whose it is.
pub(crate) struct Client {
    pub(crate) group: Key,
    /// The secret in its environment; none in it; an error where it hides that.
    pub(crate) token: io::Result<Option<String>>,
    /// It and its parents.
    pub(crate) line: Vec<ProcessId>,
    pub(super) process: ProcessId,
    pub(super) watch: ProcessFd,
    pub(super) examiner: Examiner,
    pub(super) emulated: Option<PathBuf>,
}

impl Client {
    /// Ends it, as one that does not belong to the group. Gives the driver's files that it had, if it still ran.
    pub(crate) async fn end(self) -> Option<Vec<OwnedFd>> {
        let Self { process, watch, .. } = self;
        if watch.has_ended() {
            return None;
        }
        let why = match self.token {
            Ok(Some(_)) => "its secret is of no tenant of the group",
            Ok(None) => "it has no tenant's secret, and none of the group has started it",
            Err(_) => "it hides its environment, and none of the group has started it",
        };
        tracing::warn!(
            group = self.group.name(),
            pid = process.pid,
            program = process.program(),
            why,
            "a process that does not belong to the group has entered it, and is ended"
        );
        let look = move || {
            let files = (self.examiner).files(process, &watch, self.emulated.as_deref());
            watch.kill();
            files
        };
        tokio::task::spawn_blocking(look).await.ok()
    }
}
