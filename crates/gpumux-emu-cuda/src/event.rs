//! Events: marks in streams, with the model's time.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, Mutex, Weak},
};

use gpumux_emu::protocol::Work;

use crate::{
    capture::CapturedMark,
    context::{Context, current},
    effect::Effect,
    error::{CuError, Result},
    mark::Mark,
    memory,
    op::Op,
    pool,
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
    mark: Arc<Mark>,
    /// Where it was recorded, if that was last in a capture.
    captured: Mutex<Option<CapturedMark>>,
}

static EVENTS: Registry<Event> = Registry::new();

pub(crate) fn create(flags: u32) -> Result<usize> {
    let context = current()?;
    context.check()?;
    if flags & !KNOWN_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let mark = match flags & INTERPROCESS {
        0 => Mark::default(),
        // Such an event has no time.
        _ if flags & DISABLE_TIMING == 0 => return Err(CuError::INVALID_VALUE),
        _ => Mark::shared(memory::shared_page()?)?,
    };
    Ok(Event::add(&context, flags, mark))
}

/// Opens an event of another process by the page with its marks.
pub(crate) fn open(page: OwnedFd) -> Result<usize> {
    let context = current()?;
    context.check()?;
    let flags = INTERPROCESS | DISABLE_TIMING;
    Ok(Event::add(&context, flags, Mark::shared(page)?))
}

pub(crate) fn event(handle: usize) -> Result<Arc<Event>> {
    EVENTS.get(handle)
}

pub(crate) fn destroy(handle: usize) -> Result {
    EVENTS.remove(handle).map(drop)
}

impl Event {
    fn add(context: &Arc<Context>, flags: u32, mark: Mark) -> usize {
        EVENTS.add(Arc::new(Self {
            context: Arc::downgrade(context),
            flags,
            mark: Arc::new(mark),
            captured: Mutex::default(),
        }))
    }

    fn context(&self) -> Result<Arc<Context>> {
        self.context.upgrade().ok_or(CuError::CONTEXT_IS_DESTROYED)
    }

    /// The page with its marks, if processes share it.
    pub(crate) fn file(&self) -> Option<&OwnedFd> {
        self.mark.file()
    }

    fn not_captured(&self) -> Result {
        match *lock(&self.captured) {
            Some(_) => Err(CuError::CAPTURED_EVENT),
            None => Ok(()),
        }
    }
}

pub(crate) fn record(handle: usize, stream_handle: usize) -> Result {
    let event = event(handle)?;
    let stream = stream(stream_handle)?;
    if let Some(lane) = &*lock(&stream.capture) {
        *lock(&event.captured) = Some(lane.record_mark()?);
        event.mark.forget();
        return Ok(());
    }
    let context = stream.context()?;
    if !Arc::ptr_eq(&context, &event.context()?) {
        return Err(CuError::INVALID_HANDLE);
    }
    stream.submit(Op {
        mark: Some(Arc::clone(&event.mark)),
        ..Op::mark()
    })?;
    *lock(&event.captured) = None;
    Ok(())
}

pub(crate) fn query(handle: usize) -> Result {
    let event = event(handle)?;
    event.not_captured()?;
    if event.mark.is_reached() {
        return event.context()?.check();
    }
    event.context()?.check()?;
    Err(CuError::NOT_READY)
}

pub(crate) fn synchronize(handle: usize) -> Result {
    let event = event(handle)?;
    event.not_captured()?;
    let context = event.context()?;
    let done = match event.mark.last_record() {
        None => context.wait_for_mark(&event.mark),
        Some(record) => {
            context.wait_until(|| Ok(event.mark.has_reached(record)));
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
        if event.mark.state().work.is_none() {
            return Err(CuError::INVALID_HANDLE);
        }
    }
    match (start.mark.state().at, end.mark.state().at) {
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
    let captured = lock(&event.captured).clone();
    if let Some(mark) = captured {
        return mark.join(&stream.capture);
    }
    if let Some(lane) = &*lock(&stream.capture) {
        lane.invalidate();
        return Err(CuError::STREAM_CAPTURE_ISOLATION);
    }
    let mark = Arc::clone(&event.mark);
    if let Some(record) = mark.last_record() {
        if mark.has_reached(record) {
            return Ok(());
        }
        return stream.wait_until(move || Ok(mark.has_reached(record)));
    }
    let state = mark.state();
    let (Some(work), None) = (state.work, state.at) else {
        return Ok(());
    };
    let source = event.context()?;
    if Arc::ptr_eq(&source, &stream.context()?) {
        return stream.submit(Op::following(Work::Wait(work), Effect::Nothing));
    }
    // Of another context: waited for on the host.
    stream.submit(Op::waiting(move || {
        let _ = source.wait_for_mark(&mark);
    }))
}
