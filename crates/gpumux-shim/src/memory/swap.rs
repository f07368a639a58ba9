//! Moving the process's memory to the host and back, by a thread of its own ([`crate::mover`]), at the daemon's word.
//!
//! First the gate is closed, all threads leave it, and copies end ([`Mover::quiesce`]): from then on only kernels can
//! touch memory. When the daemon has frozen the compute groups, nothing can. Then the contents go to pinned host
//! memory over the process's own copy engines, and the physical memory is let go of; the addresses stay. Back is the
//! reverse, at the same addresses. A kernel in the middle of its work notices nothing. Often a part is enough: then what the
//! program called cold goes first, and the rest stays on the device, as frozen as its program ([`choice`]).

mod calls;
mod choice;
mod context;
mod host;
mod numa;
mod pool;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{c_int, c_void},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::{
    ground::{
        context::{is_capturing_anywhere, relax_captures, within},
        driver::CUstream,
        gate,
        guard::lock,
        notice::say,
    },
    memory::{
        block::{Departed, NOWHERE},
        physical, pools, space, targets, vmm,
    },
    work,
    work::permits,
};
use calls::*;
use choice::{Gone, Good, Key};
use context::{GONE, PREPARING, await_copies, is_broken, lock_soon, stream, streams};
pub(crate) use context::{end_context, forget_context, in_context, make_tools, without_preparing};
use host::mib;
use pool::{Cursor, Pool};

/// How long to wait until [`is_quiet`].
const QUIET: Duration = Duration::from_secs(15);
/// How long to hope that all work ends by itself, before kernels are frozen in the middle.
const IDLE: Duration = Duration::from_millis(200);
/// How long the gate stays closed at first while copies or calls do not end. Then threads go on for a tenth of that, because a copy may
/// wait for work that another thread has not launched yet. Both double each time.
const CLOSED: Duration = Duration::from_millis(500);
/// Pause between looks.
const LOOK: Duration = Duration::from_micros(200);
/// So much is pinned at once: about a third of a second (measured on an H100's host).
const GROWTH: usize = 1 << 30;
/// So much is overwritten at a time: orders do not wait for more.
const SCRUB: usize = 256 << 20;

/// Where the process's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Away {
    No,
    /// On the device, and no thread may touch it.
    Quiet,
    /// On the host, all or a part.
    Out,
}

/// The tool of the thread that moves memory.
pub(crate) struct Mover {
    /// The move to the host that is under way is not wanted any more.
    called_off: &'static AtomicBool,
    away: Away,
    pool: Pool,
    /// How far the pool is in use.
    filled: Cursor,
    /// Bytes of the pool, from its beginning, that may have contents.
    dirty: usize,
    /// They are overwritten after use.
    scrubs: bool,
    relaxed: bool,
}

/// Whether no thread, copy or capture can touch memory any more; where the driver refuses to freeze kernels, no kernel either.
fn is_quiet() -> bool {
    !gate::is_occupied()
        && !is_capturing_anywhere()
        && !work::copies_under_way()
        && (!permits::is_active() || work::all_idle())
}

impl Mover {
    pub(crate) fn new(called_off: &'static AtomicBool) -> Self {
        Self {
            called_off,
            away: Away::No,
            pool: Pool::default(),
            filled: Cursor::default(),
            dirty: 0,
            scrubs: false,
            relaxed: false,
        }
    }

    /// Where the memory is.
    pub(crate) const fn away(&self) -> Away {
        self.away
    }

    /// Ends a move to the host that is not wanted any more.
    fn check_wanted(&self) -> Result<(), String> {
        match self.called_off.load(Ordering::Acquire) {
            true => Err("the move was called off".into()),
            false => Ok(()),
        }
    }

    /// Where host memory is made from now on, and whether it is overwritten after use.
    pub(crate) fn set_rules(&mut self, location: Option<String>, scrub: bool) {
        (self.pool.location, self.scrubs) = (location.map(PathBuf::from), scrub);
    }

    /// Bytes of host memory that are kept.
    pub(crate) fn keeps(&self) -> u64 {
        self.pool.total as u64
    }

    /// Lets go of the host memory if nothing is there.
    pub(crate) fn drop_host(&mut self) {
        if self.away != Away::No {
            return;
        }
        while self.scrub() {}
        // The driver may be about to go, with the process.
        let Some(_moving) = gate::begin_move() else {
            return;
        };
        if let Some(_alone) = lock_soon(&PREPARING) {
            self.clear_up();
            self.clear_pool();
        }
    }

    /// Lets go of all host memory.
    fn clear_pool(&mut self) {
        // Pinned for all contexts: any one will do.
        let pool = &mut self.pool;
        let mut contexts = streams().into_keys();
        if !contexts.any(|context| within(context, || pool.clear()).is_some()) {
            pool.clear();
        }
        self.dirty = 0;
    }

    /// Overwrites a part of what is not in use any more. Whether there is more of it.
    pub(crate) fn scrub(&mut self) -> bool {
        if !self.scrubs || self.away != Away::No || self.dirty == 0 {
            return false;
        }
        let from = self.dirty.saturating_sub(SCRUB);
        self.pool.zero(from, self.dirty);
        self.dirty = from;
        from > 0
    }

    /// Makes ready what moving so much of each device needs, of the host no more than is allowed, then closes the gate.
    /// Says whether all work has ended too.
    pub(crate) fn quiesce(&mut self, least: u64, host: u64) -> Result<bool, String> {
        match self.away {
            Away::Out => return Err("its memory is on the host already".into()),
            Away::Quiet => return Ok(work::all_idle()),
            Away::No => {}
        }
        work::guard_exit();
        let _moving = gate::begin_move().ok_or("the program is ending")?;
        self.prepare(least, host)?;
        let deadline = Instant::now() + QUIET;
        gate::close();
        let mut closed = CLOSED;
        let mut open_at = Instant::now() + closed;
        let quiet = loop {
            if Instant::now() > open_at {
                gate::open();
                sleep(closed / 10);
                gate::close();
                closed *= 2;
                open_at = Instant::now() + closed;
            }
            if is_capturing_anywhere() {
                // It cannot end while its threads wait.
                gate::open();
                sleep(LOOK * 10);
                gate::close();
            }
            let quiet = is_quiet();
            if quiet || Instant::now() > deadline || self.check_wanted().is_err() {
                break quiet;
            }
            sleep(LOOK);
        };
        // What was allocated meanwhile needs room too.
        let ready = self.check_wanted().and_then(|()| match quiet {
            true => {
                pools::trim();
                space::drop_spares(|_| true);
                self.prepare(least, host)
            }
            false if permits::is_active() => Err(format!(
                "its copies, calls and kernels do not end within {QUIET:?}, and the driver does not let gpumux freeze kernels"
            )),
            false => Err(format!("its copies and calls do not end within {QUIET:?}")),
        });
        // Where nothing is copied, the freeze is over soon.
        let hope = Instant::now() + if least > 0 { IDLE } else { Duration::ZERO };
        while ready.is_ok() && !work::all_idle() && Instant::now() < hope {
            sleep(LOOK);
        }
        if let Err(why) = ready.and_then(|()| self.check_wanted()) {
            gate::open();
            return Err(why);
        }
        self.away = Away::Quiet;
        Ok(work::all_idle())
    }

    /// All threads may go on.
    pub(crate) fn resume(&mut self) {
        if self.away == Away::Quiet {
            self.away = Away::No;
            gate::open();
        }
    }

    /// Makes host memory and streams, while the device still works.
    fn prepare(&mut self, least: u64, host: u64) -> Result<(), String> {
        let _alone = lock_soon(&PREPARING).ok_or("a context of it is about to end")?;
        if !std::mem::replace(&mut self.relaxed, true) {
            relax_captures();
        }
        self.clear_up();
        let goods = chosen(least);
        let bytes: u64 = goods.iter().map(|it| it.kept).sum();
        let Some(first) = goods.first() else {
            return Ok(());
        };
        let bytes = self.filled.bytes + bytes as usize;
        let most = usize::try_from(host).unwrap_or(usize::MAX);
        while self.pool.total < bytes {
            // In steps, for pinning takes long and the program may want to end.
            if gate::is_leaving() {
                return Err("the program is ending".into());
            }
            self.check_wanted()?;
            let step = bytes.min(self.pool.total + GROWTH);
            self.pool.grow(step, most, first.context)?;
        }
        if self.away == Away::Out {
            // All streams are there: new ones could not be tried out now.
            return Ok(());
        }
        // Also of those that this time may stay.
        for Good { context, .. } in &chosen(u64::MAX) {
            within(*context, || make_tools(*context)).ok_or("its context cannot be entered")??;
        }
        Ok(())
    }

    /// Copies at least so much of each device to the host, if there is so much, and lets go of the physical memory.
    /// All of that or nothing.
    pub(crate) fn out(&mut self, least: u64, host: u64) -> Result<(), String> {
        match self.away {
            Away::No => return Err("it was not asked to be quiet".into()),
            Away::Quiet => {}
            // More of it.
            Away::Out => self.prepare(least, host)?,
        }
        let mut filled = self.filled;
        let mut places = Vec::new();
        let mut lost = Vec::new();
        let mut begin = || {
            for good in chosen(least) {
                let sections = match good.key {
                    Key::Chunk { block, index } => {
                        let departure =
                            space::with(|space| Some(space.blocks.get_mut(&block)?.leave(index)));
                        departure.map(|it| {
                            lost.push((block, it.lost));
                            it.sections
                        })
                    }
                    Key::Physical(_) => Some(vec![(good.bytes as usize, true)]),
                };
                let stream = stream(good.context)?;
                let mut parts: Vec<(usize, usize)> = Vec::new();
                for (length, kept) in sections.unwrap_or_default() {
                    match kept {
                        true => parts.extend(
                            filled
                                .take(&self.pool, length)
                                .ok_or("no host memory is left")?,
                        ),
                        false => parts.push((NOWHERE, length)),
                    }
                }
                let copy = || {
                    let mut from = good.at;
                    for (to, length) in &parts {
                        if *to != NOWHERE {
                            call!(to_host, *to as *mut c_void, from, *length, stream)?;
                        }
                        from += *length as u64;
                    }
                    Ok::<_, String>(())
                };
                within(good.context, copy).ok_or("its context cannot be entered")??;
                places.push((good, parts));
            }
            Ok::<_, String>(())
        };
        let begun = begin();
        self.dirty = self.dirty.max(filled.bytes);
        let awaited = await_copies().into_iter().map(|(_, copied)| copied);
        let copied = begun.and(awaited.collect());
        if let Err(why) = copied.and_then(|()| self.check_wanted()) {
            space::with(|space| {
                for (at, lost) in &lost {
                    if let Some(block) = space.blocks.get_mut(at) {
                        block.stay(lost);
                    }
                }
            });
            return Err(why);
        }
        // From here on there is a copy of everything: nothing can fail.
        (self.away, self.filled) = (Away::Out, filled);
        let mut moved: BTreeMap<c_int, u64> = BTreeMap::new();
        for (good, parts) in places {
            match good.key {
                Key::Chunk { block, index } => {
                    let departed = space::with(|space| {
                        let block_of = space.blocks.get(&block);
                        let in_use =
                            good.kept > 0 && block_of.is_some_and(|it| it.elastic.is_some());
                        if in_use && least != u64::MAX {
                            *moved.entry(good.device).or_default() += good.bytes;
                        }
                        space.leave(block, index, parts)
                    });
                    departed.iter().for_each(Departed::free);
                }
                Key::Physical(handle) => physical::leave(handle, parts),
            }
        }
        space::with(|space| space.set_away());
        // All of it goes only where a user or an idle time says so.
        for (device, bytes) in moved {
            targets::lower(device, bytes);
        }
        Ok(())
    }

    /// Brings all back and lets all threads go on. What could not be brought back stays on the host.
    pub(crate) fn back(&mut self) -> Result<(), String> {
        match self.away {
            Away::No => return Ok(()),
            Away::Quiet => {
                self.resume();
                return Ok(());
            }
            Away::Out => {}
        }
        let mut failures = Failures::default();
        let gone = space::with(|space| choice::gone(space));
        let all = begin_back(gone, &mut failures, is_broken, |gone| {
            let begun = stream(gone.context).and_then(|stream| {
                within(gone.context, || bring(gone, stream))
                    .ok_or("its context cannot be entered")
                    .map_err(str::to_owned)
            });
            begun.map_or_else(
                |why| (None, Err(why)),
                |(made, copied)| (Some(made), copied),
            )
        });
        // A copy that fails now has lost nothing: the contents are still on the host.
        for (context, copied) in await_copies() {
            failures.add(context, copied, is_broken);
        }
        let failed = failures.why;
        if failed.is_none() && !failures.lost.is_empty() {
            // The program shall get that error, and nothing can help it.
            say(format_args!(
                "the context has failed while its memory was away"
            ));
        }
        // All or nothing: a process that waits for room with half of its memory there keeps others from theirs.
        for (gone, made) in all {
            match (gone.key, made, &failed) {
                (Key::Chunk { .. }, Made::Chunks(chunks), Some(_)) => {
                    vmm::unback(gone.at, &chunks);
                }
                (Key::Chunk { block, index }, Made::Chunks(chunks), None) => {
                    space::with(|space| {
                        if let Some(block) = space.blocks.get_mut(&block) {
                            block.arrived(index, chunks);
                        }
                    });
                }
                (Key::Physical(handle), Made::Physical(Some(made)), Some(_)) => {
                    physical::give_up(handle, made);
                }
                (Key::Physical(handle), Made::Physical(made), None) => {
                    physical::arrived(handle, made)
                }
                _ => {}
            }
        }
        space::with(|space| {
            if failed.is_none() {
                space.forget_away(&failures.lost);
            }
            space.set_away();
        });
        match failed {
            Some(why) => Err(why),
            None => {
                (self.away, self.filled) = (Away::No, Cursor::default());
                gate::open();
                Ok(())
            }
        }
    }

    /// There is no daemon any more: brings all back, however long that takes, unless there is one again: it can make room. The
    /// groups may run only when all is back.
    pub(crate) fn rescue(&mut self, is_daemon_there: impl Fn() -> bool) {
        let mut told = false;
        while self.away == Away::Out {
            // Others wait for the same room: what does not fit is not begun, since each attempt fills the device and empties it again.
            let Err(why) = has_room().and_then(|()| self.back()) else {
                return;
            };
            if is_daemon_there() {
                return;
            }
            if !std::mem::replace(&mut told, true) {
                say(format_args!(
                    "memory cannot come back yet: {why}; trying on"
                ));
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// Forgets what went with contexts that are gone.
    fn clear_up(&mut self) {
        if self.away == Away::Out {
            return;
        }
        let gone = std::mem::take(&mut *lock(&GONE));
        if gone.is_empty() {
            return;
        }
        // It may have been pinned by one of them.
        self.clear_pool();
    }
}

/// Whether all that is away has room on its devices, but for what is of contexts that have failed for good.
fn has_room() -> Result<(), String> {
    let mut gone = space::with(|space| choice::gone(space));
    let contexts: BTreeSet<u64> = gone.iter().map(|it| it.context).collect();
    let broken: BTreeSet<u64> = contexts.into_iter().filter(|it| is_broken(*it)).collect();
    gone.retain(|it| !broken.contains(&it.context));
    for (contexts, bytes) in choice::needs(&gone).into_values() {
        let (mut free, mut total) = (0usize, 0usize);
        let mut asked = contexts.into_iter();
        // One that does not answer will say why when its memory is brought.
        let told = asked.any(|context| {
            let info = || call!(mem_info, &raw mut free, &raw mut total);
            matches!(within(context, info), Some(Ok(())))
        });
        if told && (free as u64) < bytes {
            let (free, bytes) = (mib(free as u64), mib(bytes));
            return Err(format!("the device has {free} free of {bytes}"));
        }
    }
    Ok(())
}

/// What has failed on the way back.
#[derive(Default)]
struct Failures {
    /// Contexts that have failed for good: nothing of theirs is waited for.
    lost: BTreeSet<u64>,
    /// Any other failure, after which all stays on the host.
    why: Option<String>,
}

impl Failures {
    fn add(
        &mut self,
        context: u64,
        result: Result<(), String>,
        is_broken: impl FnOnce(u64) -> bool,
    ) {
        let Err(why) = result else {
            return;
        };
        match is_broken(context) {
            true => drop(self.lost.insert(context)),
            false => self.why = Some(why),
        }
    }
}

/// Begins to bring all back but what is of contexts that have failed for good; what was made for it. Ends at any other failure.
fn begin_back<M>(
    all: Vec<Gone>,
    failures: &mut Failures,
    is_broken: impl Fn(u64) -> bool,
    mut bring: impl FnMut(&Gone) -> (Option<M>, Result<(), String>),
) -> Vec<(Gone, M)> {
    let mut begun = Vec::new();
    for gone in all {
        if failures.lost.contains(&gone.context) {
            continue;
        }
        let (made, copied) = bring(&gone);
        failures.add(gone.context, copied, &is_broken);
        begun.extend(made.map(|made| (gone, made)));
        if failures.why.is_some() {
            break;
        }
    }
    begun
}

/// Physical memory in place of what is away.
enum Made {
    Chunks(Vec<vmm::Chunk>),
    /// None: the driver has none.
    Physical(Option<u64>),
}

/// Puts physical memory where something was and begins to copy the contents to it.
fn bring(gone: &Gone, stream: CUstream) -> (Made, Result<(), String>) {
    let made = match gone.key {
        Key::Chunk { .. } => {
            let chunks = vmm::back(gone.at, gone.bytes, gone.piece, gone.device);
            (
                chunks.as_ref().err().copied(),
                Made::Chunks(chunks.unwrap_or_default()),
            )
        }
        Key::Physical(handle) => {
            let known = space::with(|space| space.physicals.get(&handle).cloned());
            let made = known.map(|known| physical::remake(&known)).transpose();
            (
                made.as_ref().err().copied(),
                Made::Physical(made.unwrap_or_default()),
            )
        }
    };
    let made = match made {
        (Some(error), made) => return (made, Err(format!("the driver gives no memory: {error}"))),
        (None, made) => made,
    };
    let mut to = gone.at;
    for (from, length) in &gone.host {
        if *from != NOWHERE
            && let Err(why) = call!(to_device, to, *from as *const c_void, *length, stream)
        {
            return (made, Err(why));
        }
        to += *length as u64;
    }
    (made, Ok(()))
}

/// See [`choice::goods`].
fn chosen(least: u64) -> Vec<Good> {
    space::with(|space| choice::goods(space, least))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ground::driver::AllocationProp, memory::block::tests::block};

    /// What is brought of contexts 1, 2 and 1 again, where one's copies fail, and what failed.
    fn brought(failing: u64, is_broken: bool) -> (Vec<u64>, Failures) {
        let gone = [1, 2, 1].map(|context| Gone {
            key: Key::Physical(context),
            at: 0,
            bytes: 0,
            piece: 0,
            device: 0,
            context,
            host: Vec::new(),
        });
        let mut failures = Failures::default();
        let bring = |gone: &Gone| match gone.context == failing {
            true => (None::<()>, Err("no".into())),
            false => (Some(()), Ok(())),
        };
        let begun = begin_back(gone.into(), &mut failures, |_| is_broken, bring);
        let contexts = begun.iter().map(|(gone, ())| gone.context);
        (contexts.collect(), failures)
    }

    #[test]
    fn broken_context_keeps_no_other_ones_memory_away() {
        let (contexts, failures) = brought(1, true);
        assert_eq!((contexts, failures.why), (vec![2], None));
        assert_eq!(failures.lost, [1].into());
        let (contexts, failures) = brought(2, true);
        assert_eq!((contexts, failures.why), (vec![1, 1], None));
    }

    #[test]
    fn other_failure_than_a_broken_context_keeps_all_away() {
        let (contexts, mut failures) = brought(2, false);
        assert_eq!(contexts, [1]);
        assert!(failures.lost.is_empty());
        // Also beside a context that is broken.
        failures.add(1, Err("gone".into()), |_| true);
        assert_eq!(failures.why.as_deref(), Some("no"));
    }

    #[test]
    fn memory_of_a_broken_context_does_not_stay_on_the_host() {
        const BYTES: u64 = 4 << 20;
        let mut space = space::Space::default();
        space.know_for_tests(0);
        space.book_more(0, 3 * BYTES);
        let prop = AllocationProp::default();
        let physical = space::Physical::new(3, BYTES, 1, prop);
        let host = || vec![(0x1000, BYTES as usize)];
        space.physicals.insert(
            7,
            space::Physical {
                host: host(),
                ..physical
            },
        );
        for (at, context) in [(BYTES, 1), (2 * BYTES, 2)] {
            let mut made = block(BYTES);
            made.context = context;
            space.blocks.insert(at, made);
            assert!(space.leave(at, 0, host()).is_some());
        }
        space.set_away();
        assert_eq!(space.swapped_for_tests(0), 3 * BYTES);
        // That of context 2 comes back, and context 1 is lost.
        let chunk = vmm::Chunk {
            handle: 9,
            bytes: BYTES,
        };
        space
            .blocks
            .get_mut(&(2 * BYTES))
            .expect("there")
            .arrived(0, vec![chunk]);
        space.forget_away(&[1].into());
        space.set_away();
        assert_eq!(space.swapped_for_tests(0), 0);
        assert_eq!(space.used_for_tests(0), (BYTES, 0));
        assert!(choice::gone(&space).is_empty());
        let left = choice::goods(&space, u64::MAX);
        assert_eq!(left.iter().map(|it| it.context).collect::<Vec<_>>(), [2]);
    }
}
