//! Graphs: what was captured, and nodes that were added. Launching a graph submits it all again at once, lane 0 to the
//! launch's stream and the others to streams of its own. Nodes that were added run one after the other, in an order that
//! their edges allow.

use std::{
    cell::Cell,
    ffi::c_int,
    sync::{Arc, Mutex, Weak},
};

use gpumux_emu::protocol::Work;

use crate::{
    capture::{self, Node},
    context::Context,
    effect::Effect,
    error::{CuError, Result},
    memory,
    op::{Op, OpWork},
    process::{Registry, lock},
    stream::{NON_BLOCKING, Stream, stream},
};

/// Begins a capture.
pub(crate) fn begin(stream_handle: usize, mode: i32) -> Result {
    if !(0..=2).contains(&mode) {
        return Err(CuError::INVALID_VALUE);
    }
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    context.check()?;
    // The legacy stream waits for others behind the program's back.
    if stream.id == context.legacy.id {
        return Err(CuError::STREAM_CAPTURE_UNSUPPORTED);
    }
    capture::begin(&stream.capture, mode, context.handle())
}

/// Ends a capture; the graph's handle.
pub(crate) fn end(stream_handle: usize) -> Result<usize> {
    let (nodes, lanes) = capture::end(&stream(stream_handle)?.capture)?;
    Ok(GRAPHS.add(Arc::new(Graph::new(nodes, lanes))))
}

/// Status (none, active, invalidated) and id of a stream's capture.
pub(crate) fn status(stream_handle: usize) -> Result<(i32, u64)> {
    Ok(capture::status(&stream(stream_handle)?.capture))
}

thread_local! {
    static MODE: Cell<i32> = const { Cell::new(0) };
}

/// Swaps the thread's capture mode.
pub(crate) fn exchange_mode(mode: i32) -> Result<i32> {
    if !(0..=2).contains(&mode) {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(MODE.replace(mode))
}

/// What precedes a call that the driver calls unsafe during captures. Those that map memory are not (H200, driver 580.159.04).
pub(crate) fn refuse_unsafe() -> Result {
    capture::refuse_unsafe(MODE.get())
}

/// Waits for all work of a context.
pub(crate) fn synchronize(context: &Context) -> Result {
    capture::refuse_wait(context.handle())?;
    context.synchronize()
}

/// A graph.
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) lanes: usize,
    /// Nodes that were added by themselves: they come behind those that were captured.
    pub(crate) added: Mutex<Vec<Added>>,
}

/// A node that was added.
#[derive(Clone)]
pub(crate) struct Added {
    pub(crate) handle: usize,
    pub(crate) kind: c_int,
    pub(crate) ops: Vec<Op>,
    /// Nodes that come before, by their handles.
    pub(crate) after: Vec<usize>,
}

pub(crate) static GRAPHS: Registry<Graph> = Registry::new();

/// The graphs of nodes that were added.
pub(crate) static NODES: Registry<Weak<Graph>> = Registry::new();

impl Drop for Graph {
    fn drop(&mut self) {
        for node in &*lock(&self.added) {
            let _ = NODES.remove(node.handle);
        }
    }
}

impl Graph {
    pub(crate) fn new(nodes: Vec<Node>, lanes: usize) -> Self {
        Self {
            nodes,
            lanes,
            added: Mutex::default(),
        }
    }

    /// How many captured nodes it has.
    pub(crate) fn captured(&self) -> usize {
        self.nodes.iter().filter(|node| node.is_work()).count()
    }

    /// The captured work, one after the other.
    pub(crate) fn ops(&self) -> Vec<Op> {
        let works = self.nodes.iter().filter(|node| node.is_work());
        works.map(|node| node.op.clone()).collect()
    }

    /// All that a launch submits.
    fn flat(&self) -> Result<Vec<Node>> {
        let added = in_order(&lock(&self.added))?;
        // All on the launch's stream.
        let added = added.into_iter().map(|(origin, op)| Node {
            lane: 0,
            origin,
            op,
        });
        Ok(self.nodes.iter().cloned().chain(added).collect())
    }
}

/// The work of added nodes in an order that their edges allow, with the nodes' handles.
pub(crate) fn in_order(added: &[Added]) -> Result<Vec<(usize, Op)>> {
    let mut waiting: Vec<&Added> = added.iter().collect();
    let mut order: Vec<&Added> = Vec::with_capacity(added.len());
    let mut done = std::collections::HashSet::new();
    while !waiting.is_empty() {
        let ready = |it: &&Added| it.after.iter().all(|before| done.contains(before));
        let (now, later): (Vec<&Added>, Vec<&Added>) = waiting.into_iter().partition(ready);
        if now.is_empty() {
            // A cycle.
            return Err(CuError::INVALID_VALUE);
        }
        done.extend(now.iter().map(|it| it.handle));
        order.extend(now);
        waiting = later;
    }
    let ops = |it: &Added| {
        let handle = it.handle;
        let ops = it.ops.clone();
        ops.into_iter().map(move |op| (handle, op))
    };
    Ok(order.into_iter().flat_map(ops).collect())
}

/// A graph that can be launched.
pub(crate) struct Executable {
    pub(crate) nodes: Mutex<Vec<Node>>,
    context: Weak<Context>,
    /// Streams of the lanes but the first.
    streams: Vec<Stream>,
    /// Stream and number of the last launch's last work: the next launch comes behind it.
    last: Mutex<Option<u64>>,
}

pub(crate) static EXECUTABLES: Registry<Executable> = Registry::new();

impl Drop for Executable {
    fn drop(&mut self) {
        if let Some(context) = self.context.upgrade() {
            for stream in &self.streams {
                context.end_stream(stream.id);
            }
        }
    }
}

/// Makes a graph launchable.
pub(crate) fn instantiate(graph: usize) -> Result<usize> {
    let graph = GRAPHS.get(graph)?;
    let context = crate::context::current()?;
    let streams = (1..graph.lanes)
        .map(|_| Stream::new(&context, NON_BLOCKING, 0))
        .collect();
    Ok(EXECUTABLES.add(Arc::new(Executable {
        nodes: Mutex::new(graph.flat()?),
        context: Arc::downgrade(&context),
        streams,
        last: Mutex::new(None),
    })))
}

/// Puts another graph's work into an executable one of the same shape.
pub(crate) fn update(executable: usize, graph: usize) -> Result {
    let executable = EXECUTABLES.get(executable)?;
    let new = GRAPHS.get(graph)?.flat()?;
    let mut nodes = lock(&executable.nodes);
    let same = |(a, b): (&Node, &Node)| a.lane == b.lane && a.is_work() == b.is_work();
    if new.len() != nodes.len() || !new.iter().zip(&*nodes).all(same) {
        return Err(CuError::GRAPH_EXEC_UPDATE_FAILURE);
    }
    for (node, new) in nodes.iter_mut().zip(new) {
        node.op = new.op;
    }
    Ok(())
}

/// Makes the memory that a launch allocates: all, or none.
fn allocate(nodes: &[Node]) -> Result {
    let places = nodes.iter().filter_map(|node| match node.op.effect {
        Effect::Allocate(at) => Some(at),
        _ => None,
    });
    let mut made = Vec::new();
    for at in places {
        if let Err(error) = memory::back_for_launch(at) {
            made.into_iter().try_for_each(memory::free)?;
            return Err(error);
        }
        made.push(at);
    }
    Ok(())
}

/// Launches a graph.
pub(crate) fn launch(executable: usize, stream_handle: usize) -> Result {
    let executable = EXECUTABLES.get(executable)?;
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    if !Weak::ptr_eq(&executable.context, &Arc::downgrade(&context)) {
        return Err(CuError::INVALID_HANDLE);
    }
    stream.not_captured()?;
    let nodes = lock(&executable.nodes);
    if nodes.is_empty() {
        return context.check();
    }
    allocate(&nodes)?;
    let mut last = lock(&executable.last);
    let mut ops = Vec::with_capacity(nodes.len() + 1);
    // Complete work is waited for at no cost.
    let before = last.unwrap_or(0);
    ops.push((
        stream.id,
        Op::following(Work::Wait(before), Effect::Nothing),
    ));
    for node in &*nodes {
        let lane = match node.lane {
            0 => stream.id,
            lane => executable.streams[lane - 1].id,
        };
        let work = match node.op.work {
            OpWork::AfterItem(item) => OpWork::AfterItem(item + 1),
            plain => plain,
        };
        let op = Op {
            work,
            ..node.op.clone()
        };
        ops.push((lane, op));
    }
    *last = Some(context.submit(ops)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(handle: usize, after: &[usize]) -> Added {
        Added {
            handle,
            kind: 0,
            ops: vec![Op::following(Work::Record, Effect::Nothing)],
            after: after.to_vec(),
        }
    }

    #[test]
    fn nodes_run_in_the_order_of_their_edges() {
        let order = |nodes: &[Added]| {
            let order = in_order(nodes).map(|it| it.into_iter().map(|it| it.0));
            order.map(Iterator::collect::<Vec<_>>)
        };
        let nodes = [added(1, &[3]), added(2, &[1]), added(3, &[])];
        assert_eq!(order(&nodes), Ok(vec![3, 1, 2]));
        let cycle = [added(1, &[2]), added(2, &[1]), added(3, &[])];
        assert_eq!(order(&cycle), Err(CuError::INVALID_VALUE));
    }
}
