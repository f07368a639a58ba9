//! Captures: what streams would have submitted, recorded in order, by lane: one for each stream that takes part.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
};

use gpumux_emu::protocol::Work;

use crate::{
    effect::Effect,
    error::{CuError, Result},
    op::{Op, OpWork},
    process::lock,
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
    /// The thread that began it, in which mode and context.
    thread: ThreadId,
    mode: i32,
    context: usize,
    nodes: Vec<Node>,
    /// Of the streams that take part; the first began it.
    slots: Vec<Weak<Slot>>,
    valid: bool,
    ended: bool,
}

/// A stream's part of a capture.
#[derive(Clone)]
pub(crate) struct Lane {
    capture: Arc<Mutex<Capture>>,
    index: usize,
}

/// Where a stream keeps its part of a capture.
pub(crate) type Slot = Mutex<Option<Lane>>;

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
    pub(crate) fn join(&self, slot: &Arc<Slot>) -> Result {
        let mut held = lock(slot);
        let lane = match &*held {
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
                capture.slots.push(Arc::downgrade(slot));
                let lane = Lane {
                    capture: Arc::clone(&self.capture),
                    index: capture.slots.len() - 1,
                };
                *held = Some(lane.clone());
                lane
            }
        };
        lane.record(Op {
            work: OpWork::AfterItem(self.node),
            ..Op::following(Work::Record, Effect::Nothing)
        })
    }
}

/// `CU_STREAM_CAPTURE_MODE_GLOBAL` and `CU_STREAM_CAPTURE_MODE_RELAXED`
const GLOBAL: i32 = 0;
const RELAXED: i32 = 2;

/// The captures of this process, also some that have ended.
static ALL: Mutex<Vec<Weak<Mutex<Capture>>>> = Mutex::new(Vec::new());

/// Fails, and spoils the captures, if a call cannot be made during one of those that go on.
fn refuse(forbids: impl Fn(&Capture) -> bool) -> Result {
    let mut refused = Ok(());
    lock(&ALL).retain(|it| {
        let Some(capture) = it.upgrade() else {
            return false;
        };
        let mut capture = lock(&capture);
        if !capture.ended && forbids(&capture) {
            capture.valid = false;
            refused = Err(CuError::STREAM_CAPTURE_UNSUPPORTED);
        }
        !capture.ended
    });
    refused
}

/// A call of this thread, in this mode, that the driver calls unsafe since it may wait for the device.
pub(crate) fn refuse_unsafe(mode: i32) -> Result {
    let own = thread::current().id();
    let global = |it: &Capture| mode == GLOBAL && it.mode == GLOBAL;
    refuse(|it| mode != RELAXED && it.mode != RELAXED && (it.thread == own || global(it)))
}

/// A call that waits for all work of a context.
pub(crate) fn refuse_wait(context: usize) -> Result {
    refuse(|it| it.context == context)
}

/// Begins a capture.
pub(crate) fn begin(slot: &Arc<Slot>, mode: i32, context: usize) -> Result {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut held = lock(slot);
    if held.is_some() {
        return Err(CuError::ILLEGAL_STATE);
    }
    let capture = Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        thread: thread::current().id(),
        mode,
        context,
        nodes: Vec::new(),
        slots: vec![Arc::downgrade(slot)],
        valid: true,
        ended: false,
    };
    let capture = Arc::new(Mutex::new(capture));
    lock(&ALL).push(Arc::downgrade(&capture));
    *held = Some(Lane { capture, index: 0 });
    Ok(())
}

/// Ends a capture; what was recorded, and in how many lanes.
pub(crate) fn end(slot: &Slot) -> Result<(Vec<Node>, usize)> {
    let lane = lock(slot).clone();
    let lane = lane.ok_or(CuError::ILLEGAL_STATE)?;
    if lane.index != 0 {
        lane.invalidate();
        return Err(CuError::STREAM_CAPTURE_UNMATCHED);
    }
    let (nodes, slots, valid) = {
        let mut capture = lock(&lane.capture);
        capture.ended = true;
        let nodes = std::mem::take(&mut capture.nodes);
        (nodes, std::mem::take(&mut capture.slots), capture.valid)
    };
    for slot in slots.iter().filter_map(Weak::upgrade) {
        *lock(&slot) = None;
    }
    if !valid {
        return Err(CuError::STREAM_CAPTURE_INVALIDATED);
    }
    if !joined(&nodes, slots.len()) {
        return Err(CuError::STREAM_CAPTURE_UNJOINED);
    }
    Ok((nodes, slots.len()))
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
pub(crate) fn status(slot: &Slot) -> (i32, u64) {
    match &*lock(slot) {
        None => (0, 0),
        Some(lane) => {
            let capture = lock(&lane.capture);
            (if capture.valid { 1 } else { 2 }, capture.id)
        }
    }
}

impl Node {
    /// Marks and waits are edges.
    pub(crate) fn is_work(&self) -> bool {
        !matches!(self.op.effect, Effect::Nothing)
            || !matches!(
                self.op.work,
                OpWork::AfterItem(_) | OpWork::Plain(Work::Record | Work::Wait(_))
            )
    }
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

    /// What an H200 does (driver 580.159.04).
    #[test]
    fn unsafe_calls_are_refused_and_spoil_captures_by_mode() {
        const LOCAL: i32 = 1;
        let spoils = |mode, call: &(dyn Fn() -> Result + Sync), elsewhere: bool| {
            let slot = Arc::<Slot>::default();
            begin(&slot, mode, 77).unwrap();
            let refused = match elsewhere {
                true => thread::scope(|it| it.spawn(call).join().unwrap()),
                false => call(),
            };
            assert_eq!(refused.is_err(), end(&slot).is_err(), "{mode}");
            refused.is_err()
        };
        let unsafe_call = || refuse_unsafe(GLOBAL);
        let all = [GLOBAL, LOCAL, RELAXED];
        assert_eq!(
            all.map(|it| spoils(it, &unsafe_call, false)),
            [true, true, false]
        );
        assert_eq!(
            all.map(|it| spoils(it, &unsafe_call, true)),
            [true, false, false]
        );
        assert!(!spoils(GLOBAL, &|| refuse_unsafe(RELAXED), true));
        assert!(all.iter().all(|it| spoils(*it, &|| refuse_wait(77), true)));
        assert!(!spoils(GLOBAL, &|| refuse_wait(78), false));
    }
}
