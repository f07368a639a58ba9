//! Contexts: work goes to the server, a thread of the context takes the reports and executes effects.

mod kernels;
mod suspend;

use std::{
    cell::RefCell,
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
    time::Duration,
};

use gpumux_emu::{
    client::{self, Execution},
    protocol::{Command, MAX_SUBMISSIONS, Queue, Report, Submission, Work},
};

use crate::{
    border::{HostCall, StorageEnd},
    capture::Slot,
    effect::Effect,
    error::{CuError, Result},
    interpret::Interpreter,
    mark::Mark,
    memory::{self, Viewer},
    op::{Op, OpWork},
    pool,
    process::{Device, Registry, lock, process, spawn},
    rm::{Groups, Rm},
};

/// Work under way per context: a launch waits when there is more, as with the driver's own queues.
const MAX_LIVE: usize = 4096;
/// How often is looked for what happens outside of the process, or in memory.
const POLL: Duration = Duration::from_micros(50);

/// A context.
pub(crate) struct Context {
    pub(crate) handle: OnceLock<usize>,
    pub(crate) id: u64,
    pub(crate) ordinal: i32,
    pub(crate) device: Device,
    pub(crate) flags: u32,
    pub(crate) legacy: DefaultStream,
    per_thread: Mutex<HashMap<ThreadId, DefaultStream>>,
    interpreter: Interpreter,
    /// What the runtime keeps here: values, and whom to tell of the end, by key.
    pub(crate) storage: Mutex<HashMap<usize, (usize, StorageEnd)>>,
    /// The devices to whose memory it has access, a bit each by their numbers in the server.
    pub(crate) peers: AtomicU32,
    /// Replaced when the process is restored from a checkpoint.
    execution: RwLock<Arc<Execution>>,
    /// The process is checkpointed: it has no groups, and no connection.
    suspended: AtomicBool,
    groups: Mutex<Option<Groups>>,
    /// Number of the last work; held while work is sent, so that it arrives in order.
    order: Mutex<u64>,
    state: Mutex<State>,
    changed: Condvar,
}

/// A stream that every context has, or every thread in it.
#[derive(Clone)]
pub(crate) struct DefaultStream {
    pub(crate) id: u64,
    pub(crate) capture: Arc<Slot>,
}

#[derive(Default)]
struct State {
    /// Why nothing more can be done here.
    error: Option<CuError>,
    /// It will be of no use in a moment: what is submitted until then is not done, although the server does it.
    failing: bool,
    streams: HashMap<u64, StreamState>,
    pending: HashMap<u64, Pending>,
}

/// What is known of a stream. Work numbers rise, and a stream's work completes in order.
#[derive(Clone, Copy, Debug, Default)]
struct StreamState {
    submitted: u64,
    completed: u64,
    /// Where its last work runs.
    queue: Option<Queue>,
    /// The last submitted work is a mark, reported as soon as it is reached.
    marked: bool,
    /// Waits for the legacy stream and is waited for.
    blocking: bool,
    priority: i8,
    /// The legacy stream already waits for this work of this stream.
    waited: u64,
    /// This stream already waits for this work of the legacy stream.
    after_legacy: u64,
    /// Destroyed: forgotten when it is done.
    ended: bool,
}

impl StreamState {
    fn busy(&self) -> bool {
        self.completed < self.submitted
    }
}

/// Work that is under way.
struct Pending {
    stream: u64,
    effect: Effect,
    /// Steps of the effect that are done.
    done: u64,
    mark: Option<Arc<Mark>>,
}

pub(crate) static CONTEXTS: Registry<Context> = Registry::new();

thread_local! {
    static CURRENT: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's stack of contexts; there is none any more when the thread ends, and libraries call even then.
fn with_stack<T>(body: impl FnOnce(&mut Vec<Arc<Context>>) -> Option<T>) -> Option<T> {
    CURRENT
        .try_with(|stack| body(&mut stack.borrow_mut()))
        .ok()
        .flatten()
}

/// The calling thread's context.
pub(crate) fn current() -> Result<Arc<Context>> {
    process()?;
    with_stack(|stack| stack.last().cloned()).ok_or(CuError::INVALID_CONTEXT)
}

/// The calling thread's context, if it has one.
pub(crate) fn current_handle() -> usize {
    let found = with_stack(|stack| stack.last().cloned());
    found.map_or(0, |context| context.handle())
}

/// Puts a context on top of the thread's stack.
pub(crate) fn push(context: Arc<Context>) {
    with_stack(|stack| {
        stack.push(context);
        Some(())
    });
}

/// Takes the top of the thread's stack.
pub(crate) fn pop() -> Result<usize> {
    process()?;
    let popped = with_stack(Vec::pop);
    popped
        .map(|context| context.handle())
        .ok_or(CuError::INVALID_CONTEXT)
}

/// Makes a context, with a handle of its own or this one.
pub(crate) fn create(ordinal: i32, flags: u32, handle: Option<usize>) -> Result<Arc<Context>> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let process = process()?;
    let device = process.device(ordinal)?.clone();
    let (groups, execution) = {
        let mut rm = lock(&process.rm);
        let rm = match &mut *rm {
            Some(rm) => rm,
            none => none.insert(Rm::open()?),
        };
        let groups = rm.make_groups(device.index)?;
        match rm.execution(&groups, device.info.sms) {
            Ok(execution) => (groups, execution),
            Err(error) => {
                rm.free_groups(&groups);
                return Err(error);
            }
        }
    };
    let mut state = State::default();
    let context = Arc::new(Context {
        handle: OnceLock::new(),
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        ordinal,
        device,
        flags,
        legacy: state.add_default_stream(),
        per_thread: Mutex::new(HashMap::new()),
        interpreter: Interpreter::default(),
        storage: Mutex::default(),
        peers: AtomicU32::new(0),
        execution: RwLock::new(Arc::new(execution)),
        suspended: AtomicBool::new(false),
        groups: Mutex::new(Some(groups)),
        order: Mutex::new(0),
        state: Mutex::new(state),
        changed: Condvar::new(),
    });
    context.start_worker()?;
    let handle = handle.unwrap_or_else(|| CONTEXTS.reserve());
    let _ = context.handle.set(handle);
    CONTEXTS.put(handle, Arc::clone(&context));
    Ok(context)
}

/// Destroys a context: its work, its groups and what was allocated in it.
pub(crate) fn destroy(handle: usize) -> Result {
    process()?;
    let context = CONTEXTS
        .remove(handle)
        .map_err(|_| CuError::INVALID_CONTEXT)?;
    with_stack(|stack| stack.pop_if(|top| Arc::ptr_eq(top, &context)));
    context.end();
    Ok(())
}

impl Context {
    pub(crate) fn handle(&self) -> usize {
        self.handle.get().copied().unwrap_or(0)
    }

    fn execution(&self) -> Arc<Execution> {
        let execution = self.execution.read();
        Arc::clone(&execution.unwrap_or_else(PoisonError::into_inner))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Fails once the context is of no use.
    pub(crate) fn check(&self) -> Result {
        self.state().check()
    }

    /// Whose memory its kernels may touch.
    fn viewer(&self) -> Viewer {
        Viewer {
            device: self.device.index,
            peers: self.peers.load(Ordering::Relaxed),
        }
    }

    /// Makes a stream; its number. A blocking one waits for the legacy stream and is waited for.
    pub(crate) fn add_stream(&self, blocking: bool, priority: i8) -> u64 {
        self.state().add_stream(blocking, priority)
    }

    /// A stream will not be used any more; its work goes on.
    pub(crate) fn end_stream(&self, id: u64) {
        let mut state = self.state();
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.ended = true;
            if !stream.busy() {
                state.streams.remove(&id);
            }
        }
        drop(state);
        let _ = self.execution().send(&Command::EndStream { stream: id });
    }

    /// The calling thread's own default stream.
    pub(crate) fn per_thread(&self) -> DefaultStream {
        let mut streams = lock(&self.per_thread);
        let stream = streams.entry(thread::current().id());
        stream
            .or_insert_with(|| self.state().add_default_stream())
            .clone()
    }

    /// Submits work to streams, in this order; the number of the last.
    pub(crate) fn submit(&self, ops: Vec<(u64, Op)>) -> Result<u64> {
        let mut order = lock(&self.order);
        let mut state = self.state();
        loop {
            state.check()?;
            if state.pending.is_empty() || state.pending.len() + ops.len() <= MAX_LIVE {
                break;
            }
            state = self.wait_for_change(state);
        }
        let mut items = Vec::with_capacity(ops.len());
        let mut numbers = Vec::with_capacity(ops.len());
        for (stream, mut op) in ops {
            let queue = state.queue(stream, op.queue);
            let priority = state.streams.get(&stream).map_or(0, |it| it.priority);
            let mut put = |state: &mut State, work: Work, op: Op| {
                *order += 1;
                items.push(Submission {
                    stream,
                    priority,
                    id: *order,
                    queue,
                    work,
                    prompt: op.prompt,
                });
                state.add(*order, stream, op);
            };
            for other in state.barriers(stream, self.legacy.id) {
                let wait = Work::Wait(other);
                put(&mut state, wait, Op::on(queue, wait, Effect::Nothing));
            }
            // An interpreted kernel is two pieces: see `interpret`.
            if let (Effect::Interpreted(_), OpWork::Plain(Work::Rest { sms })) =
                (&op.effect, op.work)
            {
                let work = Work::Kernel { sms, duration: 0 };
                let effect = std::mem::replace(&mut op.effect, Effect::Nothing);
                let begin = Op {
                    // It goes on only when it is known to have begun.
                    prompt: true,
                    ..Op::on(queue, work, effect)
                };
                put(&mut state, work, begin);
            }
            let work = match op.work {
                OpWork::Plain(work) => work,
                OpWork::AfterItem(index) => Work::Wait(numbers.get(index).copied().unwrap_or(0)),
            };
            put(&mut state, work, op);
            numbers.push(*order);
        }
        drop(state);
        let at = client::now();
        for items in items.chunks(MAX_SUBMISSIONS) {
            let items = items.to_vec();
            if self
                .execution()
                .send(&Command::Submit { at, items })
                .is_err()
            {
                self.fail(why_lost());
                return self.check().map(|()| *order);
            }
        }
        Ok(*order)
    }

    /// Whether all work of a stream is done.
    pub(crate) fn query(&self, stream: u64) -> Result<bool> {
        let busy = {
            let state = self.state();
            state.check()?;
            state.streams.get(&stream).filter(|it| it.busy()).copied()
        };
        // As libcuda does: puts a mark behind it. It keeps the device from turning to others while
        // the last kernel still runs.
        if busy.is_some_and(|stream| !stream.marked) {
            self.submit(vec![(stream, Op::mark())])?;
        }
        Ok(busy.is_none())
    }

    /// Waits for all work of a stream. Pools give back then what is above their thresholds.
    pub(crate) fn synchronize_stream(&self, stream: u64) -> Result {
        let done = self.wait_for_stream(stream);
        pool::settle();
        done
    }

    fn wait_for_stream(&self, stream: u64) -> Result {
        if self.query(stream)? {
            return Ok(());
        }
        let target = self.state().streams.get(&stream).map(|it| it.submitted);
        let Some(target) = target else {
            return Ok(());
        };
        self.wait(|state| {
            let stream = state.streams.get(&stream);
            stream.is_none_or(|stream| stream.completed >= target)
        })
    }

    /// Waits for all work of all streams.
    pub(crate) fn synchronize(&self) -> Result {
        let busy: Vec<u64> = {
            // At once: a failure drops all work, and a wait that found none would have succeeded.
            let state = self.state();
            state.check()?;
            let busy = state.streams.iter().filter(|(_, stream)| stream.busy());
            busy.map(|(id, _)| *id).collect()
        };
        let done = busy
            .into_iter()
            .try_for_each(|stream| self.wait_for_stream(stream));
        pool::settle();
        done
    }

    /// Waits until a mark is reached.
    pub(crate) fn wait_for_mark(&self, mark: &Mark) -> Result {
        self.wait(|_| mark.is_reached())
    }

    /// Waits until something outside of the context is so, or for the context's end.
    pub(crate) fn wait_until(&self, reached: impl Fn() -> Result<bool>) {
        while self.check().is_ok() {
            match reached() {
                Ok(true) => return,
                Ok(false) => thread::sleep(POLL),
                Err(error) => return self.fault(error),
            }
        }
    }

    fn wait(&self, done: impl Fn(&State) -> bool) -> Result {
        let mut state = self.state();
        loop {
            state.check()?;
            if done(&state) {
                return Ok(());
            }
            state = self.wait_for_change(state);
        }
    }

    fn wait_for_change<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether work is not done yet.
    pub(crate) fn is_under_way(&self, id: u64) -> bool {
        self.state().pending.contains_key(&id)
    }

    /// A call into the program has returned, or a hold shall end.
    pub(crate) fn host_done(&self, id: u64) {
        let _ = self.execution().send(&Command::HostDone { id });
    }

    /// The context is of no use from now on: all work is dropped.
    fn fail(&self, error: CuError) {
        let mut state = self.state();
        state.error.get_or_insert(error);
        let dropped = std::mem::take(&mut state.pending);
        for stream in state.streams.values_mut() {
            stream.completed = stream.submitted;
        }
        drop(state);
        drop(dropped);
        self.interpreter.end();
        self.changed.notify_all();
    }

    fn end(&self) {
        let kept = std::mem::take(&mut *lock(&self.storage));
        for (key, (value, end)) in kept {
            end.call(self.handle(), key, value);
        }
        self.fail(CuError::CONTEXT_IS_DESTROYED);
        let _ = self.execution().send(&Command::End);
        self.execution().shut_down();
        memory::free_all_of(self.handle());
        if let Ok(process) = process()
            && let Some(groups) = lock(&self.groups).take()
            && let Some(rm) = &*lock(&process.rm)
        {
            rm.free_groups(&groups);
        }
    }

    // The context's thread

    fn start_worker(self: &Arc<Self>) -> Result {
        let (worker, execution) = (Arc::clone(self), self.execution());
        spawn("cuda-context", move || worker.work(&execution))
            .map_err(|_| CuError::OPERATING_SYSTEM)
    }

    fn work(self: Arc<Self>, execution: &Arc<Execution>) {
        loop {
            match execution.receive() {
                Ok(Some(Report::Done(works))) => {
                    for (id, at) in works {
                        self.complete(id, at);
                    }
                    self.changed.notify_all();
                }
                Ok(Some(Report::HostReady { id })) => self.call_host(id),
                Ok(Some(Report::Progress { token, works })) => {
                    // Kernels stop between two turns; so do all of the context, as they are of one group.
                    if works.iter().any(|work| self.interpreter.has(work.0)) {
                        self.interpreter.freeze(true);
                    }
                    for (id, done, total) in works {
                        self.progress(id, done, total);
                    }
                    let _ = execution.send(&Command::Progressed { token });
                }
                // As an H100 reports it to every client of an MPS server.
                Ok(Some(Report::Lost)) => self.fail(CuError::ILLEGAL_ADDRESS),
                Ok(Some(Report::Thawed)) => self.interpreter.freeze(false),
                Ok(None) | Err(_) if self.has_left(execution) => return,
                Ok(None) | Err(_) => return self.fail(why_lost()),
            }
        }
    }

    /// Work is done: does what is left of its effect, then wakes all threads that wait.
    fn complete(self: &Arc<Self>, id: u64, at: u64) {
        let rest = {
            let mut state = self.state();
            if state.failing {
                return;
            }
            state.pending.get_mut(&id).map(|pending| {
                let effect = std::mem::replace(&mut pending.effect, Effect::Nothing);
                (effect, pending.done)
            })
        };
        let Some((effect, done)) = rest else {
            return;
        };
        if let Effect::Interpreted(kernel) = &effect
            && let Err(error) = self.interpret(id + 1, kernel)
        {
            return self.fault(error);
        }
        if let Err(error) = effect.run(done, effect.steps()) {
            return self.fault(error);
        }
        let mut state = self.state();
        let Some(pending) = state.pending.remove(&id) else {
            return;
        };
        if let Some(mark) = &pending.mark {
            mark.reach(id, at);
        }
        if let Some(stream) = state.streams.get_mut(&pending.stream) {
            stream.completed = id;
            if stream.ended && !stream.busy() {
                state.streams.remove(&pending.stream);
            }
        }
    }

    /// Work is interrupted: brings its effect to where it was.
    fn progress(&self, id: u64, done: u64, total: u64) {
        let part = {
            let state = self.state();
            state.pending.get(&id).map(|pending| {
                let steps = u128::from(pending.effect.steps());
                let target = steps * u128::from(done) / u128::from(total.max(1));
                (pending.effect.clone(), pending.done, target as u64)
            })
        };
        let Some((effect, from, to)) = part else {
            return;
        };
        if let Err(error) = effect.run(from, to) {
            return self.fault(error);
        }
        if let Some(pending) = self.state().pending.get_mut(&id) {
            pending.done = pending.done.max(to);
        }
    }

    /// How long the rest of a kernel takes in all.
    fn length(&self, id: u64, duration: u64) {
        let _ = self.execution().send(&Command::Length { id, duration });
    }

    /// Work did what it must not: nothing of this context runs any more.
    pub(crate) fn fault(&self, error: CuError) {
        // As on an H100 (driver 580.159.04), where others of an MPS server go on after an assertion.
        let all = error != CuError::ASSERT;
        // Processes that share the group are notified after the server that made it, and before the program, which may end then.
        if all
            && let Ok(process) = process()
            && let Some(rm) = &*lock(&process.rm)
        {
            rm.faulted(error);
        }
        self.abort(all, error);
    }

    /// The program asked for what this device cannot do: nothing of this context runs any more, and no other is concerned.
    pub(crate) fn spoil(&self, error: CuError) {
        self.abort(false, error);
    }

    /// Tells the server before the program, which may end then.
    fn abort(&self, all: bool, error: CuError) {
        self.state().failing = true;
        let _ = self.execution().send(&Command::Abort { all });
        self.fail(error);
    }

    fn call_host(self: &Arc<Self>, id: u64) {
        let call = match self.state().pending.get(&id).map(|it| &it.effect) {
            Some(Effect::Host(call)) => call.clone(),
            _ => return,
        };
        let Ok(process) = process() else {
            return;
        };
        // A wait may wait for such a call of another context.
        let waits = matches!(call, HostCall::Wait(..));
        let context = Arc::downgrade(self);
        let run = move || {
            call.run();
            if let Some(context) = context.upgrade() {
                context.host_done(id);
            }
        };
        if waits {
            let _ = spawn("cuda-wait", run);
        } else {
            process.call_host(run);
        }
    }
}

/// Why the device does not answer any more.
fn why_lost() -> CuError {
    let process = process().ok();
    let rm = process.as_ref().map(|it| lock(&it.rm));
    let lost = rm.and_then(|rm| rm.as_ref().map(Rm::has_lost_server));
    match lost {
        Some(true) => CuError::MPS_RPC_FAILURE,
        _ => CuError::DEVICE_UNAVAILABLE,
    }
}

impl State {
    /// Fails once nothing more can be done.
    fn check(&self) -> Result {
        self.error.map_or(Ok(()), Err)
    }

    fn add_stream(&mut self, blocking: bool, priority: i8) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let state = StreamState {
            blocking,
            priority,
            ..Default::default()
        };
        self.streams.insert(id, state);
        id
    }

    fn add_default_stream(&mut self) -> DefaultStream {
        DefaultStream {
            id: self.add_stream(true, 0),
            capture: Arc::default(),
        }
    }

    /// Where a stream's next work runs.
    fn queue(&self, stream: u64, asked: Option<Queue>) -> Queue {
        let last = || self.streams.get(&stream).and_then(|it| it.queue);
        asked.or_else(last).unwrap_or(Queue::Compute)
    }

    fn add(&mut self, id: u64, stream: u64, op: Op) {
        if let Some(mark) = &op.mark {
            mark.submitted(id);
        }
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.queue = op.queue.or(stream.queue);
            stream.submitted = id;
            stream.marked = op.prompt;
        }
        let pending = Pending {
            stream,
            effect: op.effect,
            done: 0,
            mark: op.mark,
        };
        self.pending.insert(id, pending);
    }

    /// What a stream must wait for before its next work, by the rules of the legacy stream: it waits
    /// for all blocking streams, and they for it.
    fn barriers(&mut self, stream: u64, legacy: u64) -> Vec<u64> {
        if stream == legacy {
            let others = self.streams.iter_mut();
            return others
                .filter(|(id, it)| {
                    **id != legacy && it.blocking && it.busy() && it.submitted > it.waited
                })
                .map(|(_, it)| {
                    it.waited = it.submitted;
                    it.submitted
                })
                .collect();
        }
        let Some(last) = self
            .streams
            .get(&legacy)
            .filter(|it| it.busy())
            .map(|it| it.submitted)
        else {
            return Vec::new();
        };
        match self.streams.get_mut(&stream) {
            Some(it) if it.blocking && it.after_legacy < last => {
                it.after_legacy = last;
                vec![last]
            }
            _ => Vec::new(),
        }
    }
}
