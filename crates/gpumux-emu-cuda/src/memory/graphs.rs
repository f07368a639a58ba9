//! Memory of graphs' nodes. An allocation's addresses are there as soon as its node is. There is memory from the first launch on; what no
//! launch uses is kept for the next one, until the program trims it.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ffi::c_int,
    sync::{Arc, Mutex},
};

use super::{
    GRANULARITY, GraphMemory, Mapping, Space, clear_raw, create_physical, fail_if_due, find,
    map_raw, reserve_raw, space_mut,
};
use crate::{
    error::{CuError, Result},
    process::lock,
};
use gpumux_cuda::types::graph_memory::{MOST_RESERVED, MOST_USED, RESERVED, USED};
use rustix::mm::ProtFlags;

/// By device, the most that was used and reserved.
static MOST: Mutex<BTreeMap<u32, (u64, u64)>> = Mutex::new(BTreeMap::new());

impl Space {
    /// Whether a range is of a graph's allocation, with or without memory.
    pub(crate) fn is_graphs(&self, address: u64, bytes: u64) -> bool {
        find(&self.graphs, address, |it| it.bytes)
            .is_some_and(|(start, it)| bytes <= it.bytes - (address - start))
    }

    /// Bytes of a device that graphs use, and that are reserved for them.
    fn graph_use(&self, device: u32) -> (u64, u64) {
        let own = self.graphs.iter().filter(|(_, it)| it.device == device);
        own.fold((0, 0), |(used, reserved), (at, it)| {
            let there = self.mapped.contains_key(at);
            let now = |is: bool| if is { it.bytes } else { 0 };
            (used + now(it.uses > 0), reserved + now(there))
        })
    }

    /// A graph's allocation is freed by a node, or by the program. Whether there is such a one.
    pub(super) fn release_graph(&mut self, address: u64) -> bool {
        let found = self.graphs.get_mut(&address);
        found
            .map(|it| it.uses = it.uses.saturating_sub(1))
            .is_some()
    }
}

/// Addresses for a node that allocates so many bytes.
pub(crate) fn reserve_for_graph(device: u32, bytes: u64) -> Result<u64> {
    let whole = bytes.checked_next_multiple_of(GRANULARITY);
    let bytes = whole.filter(|it| *it > 0).ok_or(CuError::INVALID_VALUE)?;
    let at = reserve_raw(bytes, GRANULARITY, 0)?;
    let memory = GraphMemory {
        device,
        bytes,
        uses: 0,
    };
    space_mut().graphs.insert(at, memory);
    Ok(at)
}

/// A launch allocates at a node's addresses.
pub(crate) fn back_for_launch(at: u64) -> Result {
    let (device, bytes) = {
        let mut space = space_mut();
        let there = space.mapped.contains_key(&at);
        let memory = space.graphs.get_mut(&at).ok_or(CuError::INVALID_VALUE)?;
        if there {
            memory.uses += 1;
            return Ok(());
        }
        (memory.device, memory.bytes)
    };
    fail_if_due()?;
    let physical = create_physical(device, bytes, false)?;
    let mut space = space_mut();
    // Unless another launch was faster.
    if let Entry::Vacant(place) = space.mapped.entry(at) {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        map_raw(at, bytes, &physical.file, 0, prot)?;
        place.insert(Mapping {
            bytes,
            physical: Arc::clone(&physical),
            accessible: true,
            devices: None,
        });
    }
    if let Some(memory) = space.graphs.get_mut(&at) {
        memory.uses += 1;
    }
    let (used, reserved) = space.graph_use(device);
    drop(space);
    drop(physical);
    let mut most = lock(&MOST);
    let most = most.entry(device).or_default();
    *most = (most.0.max(used), most.1.max(reserved));
    Ok(())
}

/// Gives back what no launch uses.
pub(crate) fn trim_graphs(device: u32) -> Result {
    let mut space = space_mut();
    let own = space.graphs.iter();
    let unused = own.filter(|(_, it)| it.device == device && it.uses == 0);
    let unused: Vec<(u64, u64)> = unused.map(|(at, it)| (*at, it.bytes)).collect();
    let mut gone = Vec::new();
    for (at, bytes) in unused {
        if space.mapped.contains_key(&at) {
            clear_raw(at, bytes)?;
            gone.extend(space.mapped.remove(&at));
        }
    }
    // The server is notified without the lock.
    drop(space);
    drop(gone);
    Ok(())
}

/// `cuDeviceGetGraphMemAttribute`
pub(crate) fn graph_attribute(device: u32, attribute: c_int) -> Result<u64> {
    let (used, reserved) = super::space().graph_use(device);
    let most = lock(&MOST).get(&device).copied().unwrap_or_default();
    match attribute {
        USED => Ok(used),
        MOST_USED => Ok(most.0.max(used)),
        RESERVED => Ok(reserved),
        MOST_RESERVED => Ok(most.1.max(reserved)),
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// `cuDeviceSetGraphMemAttribute`: the most can only begin anew.
pub(crate) fn reset_graph_attribute(device: u32, attribute: c_int, value: u64) -> Result {
    let now = super::space().graph_use(device);
    let mut most = lock(&MOST);
    let most = most.entry(device).or_default();
    match (attribute, value) {
        (MOST_USED, 0) => most.0 = now.0,
        (MOST_RESERVED, 0) => most.1 = now.1,
        _ => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}
