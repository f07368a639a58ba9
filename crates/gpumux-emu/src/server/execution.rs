//! What the server keeps of one context's work.

use std::collections::{BTreeSet, HashMap};

use gpumux_sim::gpu::{GroupId, PartitionId, StreamId, WorkId};

use super::{device::Device, rm::GroupKey};

/// One context's work.
pub(super) struct Execution {
    /// The connection of the control file that made it.
    pub(super) file: u64,
    /// The program has destroyed it.
    pub(super) ended: bool,
    pub(super) device: u32,
    pub(super) keys: [GroupKey; 3],
    pub(super) groups: [GroupId; 3],
    /// What its kernels are confined to.
    pub(super) partition: Option<PartitionId>,
    pub(super) streams: HashMap<u64, StreamId>,
    /// Streams to remove when they are idle.
    pub(super) ending: BTreeSet<StreamId>,
    /// The client's work numbers.
    pub(super) works: HashMap<u64, WorkId>,
    /// Not reported yet.
    pub(super) done: Vec<(u64, u64)>,
}

impl Execution {
    /// Drops all of its work; others that share its groups keep theirs.
    pub(super) fn drop_work(&mut self, device: &mut Device) {
        let streams = self.streams.drain().map(|(_, stream)| stream);
        for stream in streams.chain(std::mem::take(&mut self.ending)) {
            let _ = device.gpu.remove_stream(stream);
        }
        for work in self.works.drain().map(|(_, work)| work) {
            device.works.remove(&work);
        }
        self.done.clear();
    }
}
