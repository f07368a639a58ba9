//! How much is in the graphs that the program launches: how many nodes do work. The driver can be asked for that only before a graph
//! is made executable.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    ptr,
    sync::Mutex,
};

use crate::ground::{
    driver::{CUresult, SUCCESS, functions},
    gate, guard,
};

type Handle = *mut c_void;

functions! {
    get_nodes c"cuGraphGetNodes" (Handle, *mut Handle, *mut usize);
    get_type c"cuGraphNodeGetType" (Handle, *mut c_int);
    get_child c"cuGraphChildGraphNodeGetGraph" (Handle, *mut Handle);
}

/// Kinds of nodes (`CUgraphNodeType`).
mod kind {
    pub(super) const KERNEL: i32 = 0;
    pub(super) const MEMCPY: i32 = 1;
    pub(super) const MEMSET: i32 = 2;
    pub(super) const GRAPH: i32 = 4;
    pub(super) const CONDITIONAL: i32 = 13;
}

/// Nodes that do work, by executable graph; 0: unknown.
static NODES: Mutex<BTreeMap<u64, u32>> = Mutex::new(BTreeMap::new());

/// A graph as the driver, or a test, has it.
trait Graph: Sized {
    /// Its nodes: the kind, and the graph in it where the kind is [`kind::GRAPH`].
    fn nodes(&self) -> Option<Vec<(i32, Option<Self>)>>;
}

struct Drivers(Handle);

impl Graph for Drivers {
    fn nodes(&self) -> Option<Vec<(i32, Option<Self>)>> {
        let (get, kind_of, child_of) = (get_nodes()?, get_type()?, get_child()?);
        let mut count = 0;
        // SAFETY: a graph of the program's, and a place to write.
        let counted = unsafe { get(self.0, ptr::null_mut(), &raw mut count) };
        let mut nodes = vec![ptr::null_mut(); count];
        // SAFETY: room for as many as there are.
        let listed = unsafe { get(self.0, nodes.as_mut_ptr(), &raw mut count) };
        if (counted, listed) != (SUCCESS, SUCCESS) {
            return None;
        }
        let node = |node: Handle| {
            let (mut kind, mut child) = (0, ptr::null_mut());
            // SAFETY: a node of the graph, and a place to write.
            let mut asked = unsafe { kind_of(node, &raw mut kind) };
            if asked == SUCCESS && kind == kind::GRAPH {
                // SAFETY: as above.
                asked = unsafe { child_of(node, &raw mut child) };
            }
            let child = (!child.is_null()).then_some(Self(child));
            (asked == SUCCESS).then_some((kind, child))
        };
        nodes.into_iter().map(node).collect()
    }
}

/// How many nodes do work. None: it decides on the device what it does, or the driver does not tell.
fn count(graph: &impl Graph) -> Option<u32> {
    let each = graph.nodes()?.into_iter().map(|node| match node {
        (kind::KERNEL | kind::MEMCPY | kind::MEMSET, _) => Some(1),
        (kind::GRAPH, Some(child)) => count(&child),
        (kind::GRAPH, None) | (kind::CONDITIONAL, _) => None,
        _ => Some(0),
    });
    each.sum()
}

/// The program makes a graph executable.
///
/// # Safety
/// `out` is where `real` writes the executable, if it succeeds.
pub(crate) unsafe fn instantiate(
    out: *const Handle,
    graph: Handle,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    gate::through(|| {
        let result = real();
        if result == SUCCESS {
            let nodes = count(&Drivers(graph)).unwrap_or(0);
            // SAFETY: the caller's.
            guard::lock(&NODES).insert(unsafe { *out } as u64, nodes);
        }
        result
    })
}

/// The program destroys an executable graph.
pub(crate) fn destroy(executable: Handle, real: impl FnOnce() -> CUresult) -> CUresult {
    // Before its address may be another's.
    guard::lock(&NODES).remove(&(executable as u64));
    gate::through(real)
}

/// How many of an executable graph's nodes do work; 0: unknown.
pub(crate) fn nodes(executable: u64) -> u32 {
    let nodes = guard::lock(&NODES);
    nodes.get(&executable).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kinds of nodes, and graphs in it.
    struct Made(Vec<i32>, Vec<Made>);

    impl Graph for &Made {
        fn nodes(&self) -> Option<Vec<(i32, Option<Self>)>> {
            let plain = self.0.iter().map(|kind| (*kind, None));
            let children = self.1.iter().map(|child| (kind::GRAPH, Some(child)));
            Some(plain.chain(children).collect())
        }
    }

    #[test]
    fn nodes_that_do_work_are_counted_in_children_too() {
        const HOST: i32 = 3;
        let inner = || Made(vec![kind::KERNEL, kind::KERNEL, HOST], vec![]);
        let outer = Made(
            vec![kind::MEMSET, HOST, kind::MEMCPY],
            vec![inner(), inner()],
        );
        assert_eq!(count(&&outer), Some(6));
        assert_eq!(count(&&Made(vec![], vec![])), Some(0));
    }

    #[test]
    fn graph_that_decides_on_the_device_is_not_counted() {
        let inner = Made(vec![kind::KERNEL, kind::CONDITIONAL], vec![]);
        assert_eq!(count(&&Made(vec![kind::KERNEL], vec![inner])), None);
    }
}
