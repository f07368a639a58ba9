//! Graphs of what was captured. Launching a graph submits it all again at once, lane 0 to the launch's stream and the
//! others to streams of its own.

use std::{
    cell::Cell,
    sync::{Arc, Mutex, Weak},
};

use gpumux_emu::protocol::Work;

use crate::{
    capture::{self, Node},
    context::Context,
    effect::Effect,
    error::{CuError, Result},
    nodes::{self, AddedNodes},
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
    capture::begin(&stream.capture)
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

/// Swaps the thread's capture mode. Nothing depends on it: unsafe calls are never refused here.
pub(crate) fn exchange_mode(mode: i32) -> Result<i32> {
    if !(0..=2).contains(&mode) {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(MODE.replace(mode))
}

/// A graph.
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) lanes: usize,
    /// Nodes that were added by themselves: they come behind those that were captured.
    pub(crate) added: AddedNodes,
}

pub(crate) static GRAPHS: Registry<Graph> = Registry::new();

impl Drop for Graph {
    fn drop(&mut self) {
        nodes::forget(&mut self.added);
    }
}

impl Graph {
    pub(crate) fn new(nodes: Vec<Node>, lanes: usize) -> Self {
        Self {
            nodes,
            lanes,
            added: AddedNodes::default(),
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
        let added = nodes::as_nodes(&lock(&self.added))?;
        Ok(self.nodes.iter().cloned().chain(added).collect())
    }
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
