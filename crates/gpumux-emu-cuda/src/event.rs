//! Events: marks in streams, with the model's time.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use gpumux_emu::protocol::Work;

use crate::{
    context::{Context, Op, current},
    effect::Effect,
    error::{CuError, Result},
    graph::CapturedMark,
    memory, pool,
    process::{Registry, lock},
    stream::stream,
};

/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;
/// Blocking sync, disable timing, interprocess.
const KNOWN_FLAGS: u32 = 7;

/// `CU_EVENT_INTERPROCESS`
const INTERPROCESS: u32 = 4;

/// An event.
pub(crate) struct Event {
    context: Weak<Context>,
    flags: u32,
    state: Mutex<EventState>,
    /// Of an event that processes share.
    marks: Option<Marks>,
}

static EVENTS: Registry<Event> = Registry::new();

/// What processes know of a shared event: how often it was recorded, and which record was reached last.
#[derive(Clone)]
struct Marks {
    file: Arc<OwnedFd>,
    words: &'static [AtomicU64; 2],
}

impl Marks {
    fn new(file: OwnedFd) -> Result<Self> {
        let words = memory::shared_words(&file)?;
        Ok(Self {
            file: Arc::new(file),
            words,
        })
    }

    fn recorded(&self) -> u64 {
        self.words[0].load(Ordering::Acquire)
    }

    fn has_reached(&self, record: u64) -> bool {
        self.words[1].load(Ordering::Acquire) >= record
    }
}

#[derive(Default)]
struct EventState {
    /// The mark of the last record.
    work: Option<u64>,
    /// Its number among the records of all processes.
    record: u64,
    /// When it was reached, on `CLOCK_MONOTONIC` in ns.
    at: Option<u64>,
    /// Was last recorded in a capture.
    captured: Option<CapturedMark>,
}

pub(crate) fn create(flags: u32) -> Result<usize> {
    let context = current()?;
    context.check()?;
    if flags & !KNOWN_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let marks = match flags & INTERPROCESS {
        0 => None,
        // Such an event has no time.
        _ if flags & DISABLE_TIMING == 0 => return Err(CuError::INVALID_VALUE),
        _ => Some(Marks::new(memory::shared_page()?)?),
    };
    Ok(EVENTS.add(Arc::new(Event {
        context: Arc::downgrade(&context),
        flags,
        state: Mutex::default(),
        marks,
    })))
}

/// Opens an event of another process by the page with its marks.
pub(crate) fn open(page: OwnedFd) -> Result<usize> {
    let context = current()?;
    context.check()?;
    Ok(EVENTS.add(Arc::new(Event {
        context: Arc::downgrade(&context),
        flags: INTERPROCESS | DISABLE_TIMING,
        state: Mutex::default(),
        marks: Some(Marks::new(page)?),
    })))
}

pub(crate) fn event(handle: usize) -> Result<Arc<Event>> {
    EVENTS.get(handle)
}

pub(crate) fn destroy(handle: usize) -> Result {
    EVENTS.remove(handle).map(drop)
}

impl Event {
    fn context(&self) -> Result<Arc<Context>> {
        self.context.upgrade().ok_or(CuError::CONTEXT_IS_DESTROYED)
    }

    /// The page with its marks, if processes share it.
    pub(crate) fn file(&self) -> Option<&OwnedFd> {
        self.marks.as_ref().map(|marks| &*marks.file)
    }

    /// Its mark has this number from now on.
    pub(crate) fn submitted(&self, work: u64) {
        let marks = self.marks.as_ref();
        *lock(&self.state) = EventState {
            work: Some(work),
            record: marks.map_or(0, |marks| marks.words[0].fetch_add(1, Ordering::AcqRel) + 1),
            at: None,
            captured: None,
        };
    }

    /// Its mark was reached, if it is still this one.
    pub(crate) fn reach(&self, work: u64, at: u64) {
        let mut state = lock(&self.state);
        if state.work == Some(work) {
            state.at = Some(at);
            if let Some(marks) = &self.marks {
                marks.words[1].fetch_max(state.record, Ordering::AcqRel);
            }
        }
    }

    /// Whether its mark was reached, or there is none.
    pub(crate) fn reached(&self) -> bool {
        if let Some(marks) = &self.marks {
            return marks.has_reached(marks.recorded());
        }
        let state = lock(&self.state);
        state.work.is_none() || state.at.is_some()
    }

    fn not_captured(&self) -> Result {
        match lock(&self.state).captured {
            Some(_) => Err(CuError::CAPTURED_EVENT),
            None => Ok(()),
        }
    }
}

pub(crate) fn record(handle: usize, stream_handle: usize) -> Result {
    let event = event(handle)?;
    let stream = stream(stream_handle)?;
    if let Some(lane) = &*lock(&stream.capture) {
        let mark = lane.record_mark()?;
        *lock(&event.state) = EventState {
            captured: Some(mark),
            ..Default::default()
        };
        return Ok(());
    }
    let context = stream.context()?;
    if !Arc::ptr_eq(&context, &event.context()?) {
        return Err(CuError::INVALID_HANDLE);
    }
    stream.submit(Op {
        event: Some(event),
        ..Op::mark()
    })
}

pub(crate) fn query(handle: usize) -> Result {
    let event = event(handle)?;
    event.not_captured()?;
    if event.reached() {
        return event.context()?.check();
    }
    event.context()?.check()?;
    Err(CuError::NOT_READY)
}

pub(crate) fn synchronize(handle: usize) -> Result {
    let event = event(handle)?;
    event.not_captured()?;
    let context = event.context()?;
    let done = match &event.marks {
        None => context.wait_for_event(&event),
        Some(marks) => {
            let record = marks.recorded();
            context.wait_until(|| Ok(marks.has_reached(record)));
            context.check()
        }
    };
    pool::settle();
    done
}

/// Milliseconds of the model between two marks.
pub(crate) fn elapsed(start: usize, end: usize) -> Result<f32> {
    let (start, end) = (event(start)?, event(end)?);
    if (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(CuError::INVALID_HANDLE);
    }
    for event in [&start, &end] {
        event.not_captured()?;
        event.context()?.check()?;
        if lock(&event.state).work.is_none() {
            return Err(CuError::INVALID_HANDLE);
        }
    }
    let (from, to) = (lock(&start.state).at, lock(&end.state).at);
    match (from, to) {
        (Some(from), Some(to)) => Ok(((i128::from(to) - i128::from(from)) as f64 / 1e6) as f32),
        _ => Err(CuError::NOT_READY),
    }
}

/// Lets a stream wait for an event's mark.
pub(crate) fn wait(stream_handle: usize, handle: usize, flags: u32) -> Result {
    if flags > 1 {
        return Err(CuError::INVALID_VALUE);
    }
    let event = event(handle)?;
    let stream = stream(stream_handle)?;
    let captured = lock(&event.state).captured.clone();
    if let Some(mark) = captured {
        return mark.join(&stream);
    }
    if let Some(lane) = &*lock(&stream.capture) {
        lane.invalidate();
        return Err(CuError::STREAM_CAPTURE_ISOLATION);
    }
    if let Some(marks) = &event.marks {
        let record = marks.recorded();
        if marks.has_reached(record) {
            return Ok(());
        }
        let marks = marks.clone();
        return stream.wait_until(move || Ok(marks.has_reached(record)));
    }
    let work = {
        let state = lock(&event.state);
        match (state.work, state.at) {
            (Some(work), None) => work,
            _ => return Ok(()),
        }
    };
    let source = event.context()?;
    if Arc::ptr_eq(&source, &stream.context()?) {
        return stream.submit(Op::following(Work::Wait(work), Effect::Nothing));
    }
    // Of another context: waited for on the host.
    stream.submit(Op::waiting(move || {
        let _ = source.wait_for_event(&event);
    }))
}
