//! Captures and graphs. A capture records what would have been submitted, in order, by lane: one for each
//! stream that takes part. Launching a graph submits it all again at once, lane 0 to the launch's stream and the
//! others to streams of its own.

use std::{
    cell::Cell,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use gpumux_emu::protocol::Work;

use crate::{
    context::Context,
    effect::Effect,
    error::{CuError, Result},
    nodes::{self, AddedNodes},
    op::{Op, OpWork},
    process::{Registry, lock},
    stream::{Stream, stream},
};

/// What was recorded.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) lane: usize,
    /// The handle of a node that was added; 0: captured.
    pub(crate) origin: usize,
    pub(crate) op: Op,
}

/// A capture that goes on.
struct Capture {
    id: u64,
    nodes: Vec<Node>,
    /// The streams that take part; the first began it.
    streams: Vec<Weak<Stream>>,
    valid: bool,
    ended: bool,
}

/// A stream's part of a capture.
#[derive(Clone)]
pub(crate) struct Lane {
    capture: Arc<Mutex<Capture>>,
    index: usize,
}

/// A place in a capture that others can wait for.
#[derive(Clone)]
pub(crate) struct CapturedMark {
    capture: Arc<Mutex<Capture>>,
    node: usize,
}

impl Lane {
    /// Records work.
    pub(crate) fn record(&self, op: Op) -> Result {
        self.push(op).map(drop)
    }

    /// Records a place to wait for.
    pub(crate) fn record_mark(&self) -> Result<CapturedMark> {
        let node = self.push(Op::following(Work::Record, Effect::Nothing))?;
        Ok(CapturedMark {
            capture: Arc::clone(&self.capture),
            node,
        })
    }

    /// Something was done that a capture cannot record.
    pub(crate) fn invalidate(&self) {
        lock(&self.capture).valid = false;
    }

    fn push(&self, op: Op) -> Result<usize> {
        let mut capture = lock(&self.capture);
        if !capture.valid {
            return Err(CuError::STREAM_CAPTURE_INVALIDATED);
        }
        capture.nodes.push(Node {
            lane: self.index,
            origin: 0,
            op: Op {
                prompt: false,
                ..op
            },
        });
        Ok(capture.nodes.len() - 1)
    }
}

impl CapturedMark {
    /// A stream waits for this place, and takes part in the capture from now on.
    pub(crate) fn join(&self, stream: &Arc<Stream>) -> Result {
        let mut slot = lock(&stream.capture);
        let lane = match &*slot {
            Some(lane) if Arc::ptr_eq(&lane.capture, &self.capture) => lane.clone(),
            Some(lane) => {
                lane.invalidate();
                lock(&self.capture).valid = false;
                return Err(CuError::STREAM_CAPTURE_MERGE);
            }
            None => {
                let mut capture = lock(&self.capture);
                if capture.ended {
                    return Err(CuError::CAPTURED_EVENT);
                }
                capture.streams.push(Arc::downgrade(stream));
                let lane = Lane {
                    capture: Arc::clone(&self.capture),
                    index: capture.streams.len() - 1,
                };
                *slot = Some(lane.clone());
                lane
            }
        };
        lane.record(Op {
            work: OpWork::AfterItem(self.node),
            ..Op::following(Work::Record, Effect::Nothing)
        })
    }
}

/// Begins a capture.
pub(crate) fn begin(stream_handle: usize, mode: i32) -> Result {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if !(0..=2).contains(&mode) {
        return Err(CuError::INVALID_VALUE);
    }
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    context.check()?;
    // The legacy stream waits for others behind the program's back.
    if Arc::ptr_eq(&stream, &context.legacy) {
        return Err(CuError::STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut slot = lock(&stream.capture);
    if slot.is_some() {
        return Err(CuError::ILLEGAL_STATE);
    }
    let capture = Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        nodes: Vec::new(),
        streams: vec![Arc::downgrade(&stream)],
        valid: true,
        ended: false,
    };
    *slot = Some(Lane {
        capture: Arc::new(Mutex::new(capture)),
        index: 0,
    });
    Ok(())
}

/// Ends a capture; the graph's handle.
pub(crate) fn end(stream_handle: usize) -> Result<usize> {
    let stream = stream(stream_handle)?;
    let lane = lock(&stream.capture).clone();
    let lane = lane.ok_or(CuError::ILLEGAL_STATE)?;
    if lane.index != 0 {
        lane.invalidate();
        return Err(CuError::STREAM_CAPTURE_UNMATCHED);
    }
    let (nodes, streams, valid) = {
        let mut capture = lock(&lane.capture);
        capture.ended = true;
        let nodes = std::mem::take(&mut capture.nodes);
        (nodes, std::mem::take(&mut capture.streams), capture.valid)
    };
    for stream in streams.iter().filter_map(Weak::upgrade) {
        *lock(&stream.capture) = None;
    }
    if !valid {
        return Err(CuError::STREAM_CAPTURE_INVALIDATED);
    }
    if !joined(&nodes, streams.len()) {
        return Err(CuError::STREAM_CAPTURE_UNJOINED);
    }
    let graph = Graph::new(nodes, streams.len());
    Ok(GRAPHS.add(Arc::new(graph)))
}

/// Whether the last work of every lane but the first is waited for by another lane.
fn joined(nodes: &[Node], lanes: usize) -> bool {
    (1..lanes).all(|lane| {
        let last = nodes.iter().rposition(|node| node.lane == lane);
        nodes.iter().any(|node| {
            node.lane != lane
                && matches!(node.op.work, OpWork::AfterItem(item) if Some(item) == last)
        })
    })
}

/// Status (none, active, invalidated) and id of a stream's capture.
pub(crate) fn status(stream_handle: usize) -> Result<(i32, u64)> {
    let stream = stream(stream_handle)?;
    let slot = lock(&stream.capture);
    Ok(match &*slot {
        None => (0, 0),
        Some(lane) => {
            let capture = lock(&lane.capture);
            (if capture.valid { 1 } else { 2 }, capture.id)
        }
    })
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

impl Node {
    /// Marks and waits are edges.
    fn is_work(&self) -> bool {
        !matches!(self.op.effect, Effect::Nothing)
            || !matches!(
                self.op.work,
                OpWork::AfterItem(_) | OpWork::Plain(Work::Record | Work::Wait(_))
            )
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
        .map(|_| {
            let stream = Stream::new(Arc::downgrade(&context), 1, 0);
            context.add_stream(&stream);
            stream
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn node(lane: usize, after: Option<usize>) -> Node {
        let op = Op::following(Work::Record, Effect::Nothing);
        let work = after.map_or(op.work, OpWork::AfterItem);
        Node {
            lane,
            origin: 0,
            op: Op { work, ..op },
        }
    }

    #[test]
    fn every_lane_must_be_joined() {
        let fork = [node(0, None), node(1, Some(0)), node(1, None)];
        assert!(joined(&fork, 1));
        assert!(!joined(&fork, 2));
        let early = [fork.to_vec(), vec![node(0, Some(1))]].concat();
        assert!(!joined(&early, 2));
        let whole = [fork.to_vec(), vec![node(0, Some(2))]].concat();
        assert!(joined(&whole, 2));
    }
}
