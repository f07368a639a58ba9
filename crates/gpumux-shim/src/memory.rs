//! The program's device memory: given out, counted, moved to the host and back, shared with other processes, and kept over faults.

pub(crate) mod allocate;
pub(crate) mod answers;
pub(crate) mod attempt;
pub(crate) mod block;
pub(crate) mod caches;
pub(crate) mod elastic;
pub(crate) mod granules;
pub(crate) mod graphs;
pub(crate) mod ipc;
pub(crate) mod keep;
pub(crate) mod native;
pub(crate) mod physical;
pub(crate) mod pools;
pub(crate) mod ranges;
pub(crate) mod reclaim;
pub(crate) mod reports;
pub(crate) mod room;
pub(crate) mod shown;
pub(crate) mod space;
pub(crate) mod swap;
pub(crate) mod targets;
pub(crate) mod vmm;
