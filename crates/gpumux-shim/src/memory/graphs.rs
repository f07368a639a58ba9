//! Memory that graphs allocate when they run: by their nodes, or by stream-ordered allocations that were captured.
//!
//! The driver keeps it by device, and for the next launch what no launch uses. It is counted as the driver reports it, within a second after
//! a launch. While work may be using it, it counts as pinned. What is not in use is given back when others lack room, or the tenant
//! sleeps, and the process has no work; the next launch makes it anew.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
};

use gpumux_cuda::types::{
    graph_memory::{RESERVED, USED},
    graph_node::ALLOCATE,
};

use crate::{
    ground::{
        driver::{CUresult, SUCCESS, functions},
        gate, lease,
    },
    memory::space::{self, GraphMemory, Space},
    work,
};

functions! {
    graph_attribute c"cuDeviceGetGraphMemAttribute" (c_int, c_int, *mut u64);
    graph_trim c"cuDeviceGraphMemTrim" (c_int);
}

/// A graph of this process may allocate.
static MAY_ALLOCATE: AtomicBool = AtomicBool::new(false);

/// A graph gets something that allocates.
pub(crate) fn will_allocate() {
    MAY_ALLOCATE.store(true, Ordering::Release);
}

/// `cuGraphAddMemAllocNode`
pub(crate) fn add_allocation(real: impl FnOnce() -> CUresult) -> CUresult {
    will_allocate();
    gate::through(real)
}

/// `cuGraphAddNode`
///
/// # Safety
/// `params` must be what the program passed.
pub(crate) unsafe fn add_node(params: *const c_int, real: impl FnOnce() -> CUresult) -> CUresult {
    // SAFETY: the kind of the node comes first; without parameters the driver refuses.
    if unsafe { params.as_ref() } == Some(&ALLOCATE) {
        will_allocate();
    }
    gate::through(real)
}

/// Whether a graph of this process may allocate.
pub(crate) fn may_allocate() -> bool {
    MAY_ALLOCATE.load(Ordering::Relaxed)
}

/// `cuDeviceGraphMemTrim`
pub(crate) fn trim_device(real: impl FnOnce() -> CUresult) -> CUresult {
    let result = gate::through(real);
    if !space::off() {
        recount();
    }
    result
}

fn attribute(device: c_int, which: c_int) -> Option<u64> {
    let mut bytes = 0;
    // SAFETY: the attribute has 64 bits; no context is needed.
    (unsafe { graph_attribute()?(device, which, &raw mut bytes) } == SUCCESS).then_some(bytes)
}

fn devices() -> Vec<c_int> {
    space::with(|space| space.devices.keys().copied().collect())
}

/// Counts anew.
pub(crate) fn recount() {
    if !MAY_ALLOCATE.load(Ordering::Acquire) {
        return;
    }
    let idle = work::all_idle();
    for device in devices() {
        let found = attribute(device, RESERVED).zip(attribute(device, USED));
        if let Some((reserved, used)) = found {
            let now = GraphMemory::new(reserved, used, idle);
            space::with(|space| space.count_graphs(device, now));
        }
    }
}

/// Has the driver give back what is not in use, if no work is under way: it would wait for that.
pub(crate) fn trim() {
    if !MAY_ALLOCATE.load(Ordering::Acquire) || !work::all_idle() {
        return;
    }
    for device in devices() {
        if let Some(trim) = graph_trim() {
            // SAFETY: a device that the tables have.
            unsafe { trim(device) };
        }
    }
}

impl Space {
    /// Graphs have so much of a device now.
    fn count_graphs(&mut self, device: c_int, now: GraphMemory) {
        let before = self.graphs.insert(device, now).unwrap_or_default();
        self.shift(device, before.pinned.saturating_sub(now.pinned), false);
        let less = before.reserved.saturating_sub(now.reserved);
        let less = (less > 0).then(|| self.give(device, less, false));
        let more = self.book_more(device, now.reserved.saturating_sub(before.reserved));
        self.shift(device, now.pinned.saturating_sub(before.pinned), true);
        let changes = less.flatten().into_iter().chain(more);
        changes.for_each(lease::tell);
    }

    /// Whether graphs keep what no launch may be using by now: what was used at the last look may be free.
    pub(crate) fn graphs_have_slack(&self) -> bool {
        self.graphs.values().any(|it| it.reserved > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_graphs_is_pinned_while_work_may_use_it() {
        let mut space = Space::default();
        space.know_for_tests(0);
        let count = |space: &mut Space, reserved, used, idle| {
            space.count_graphs(0, GraphMemory::new(reserved, used, idle));
            (space.used_for_tests(0), space.graphs_have_slack())
        };
        assert_eq!(count(&mut space, 100, 0, false), ((0, 100), true));
        assert_eq!(count(&mut space, 100, 0, true), ((100, 0), true));
        // An allocation that no node frees.
        assert_eq!(count(&mut space, 150, 30, true), ((120, 30), true));
        assert_eq!(count(&mut space, 30, 30, true), ((0, 30), true));
        assert_eq!(count(&mut space, 0, 0, true), ((0, 0), false));
    }
}
