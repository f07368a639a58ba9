//! Memory that outlives a fault of another member of the group (`include/gpumux.h`).
//!
//! A kept buffer is one piece of physical memory with room for the program's contents twice. The supervisor (`gpumux run
//! --keep-memory`) gets its file, which keeps the memory whatever becomes of this process, and gives it to the tenant's next process.
//! The first half is the program's. A commit copies it into the second one, in stream order; at each moment one of the two is whole,
//! and the words behind them name it.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    io,
    os::fd::AsFd,
    panic::AssertUnwindSafe,
    ptr,
    sync::Mutex,
    thread::sleep,
    time::{Duration, Instant},
};

use gpumux_wire::{
    Shim,
    keeper::{Answer, Buffer, LONGEST_NAME, Request, VARIABLE},
    message::KEEPING,
    socket,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags, SocketFlags},
};

use crate::{
    ground::{
        context::{is_capturing_anywhere, within},
        driver::{CUresult, CUstream, SUCCESS},
        gate, guard, lease,
        notice::say,
        own::OwnFd,
    },
    memory::{
        allocate,
        answers::{
            DONE, FOUND, FULL, LATER, NATIVE, NO_CONTEXT, NOT_KEPT, REFUSED, UNKNOWN, own_context,
        },
        attempt::{self, Refused},
        block::Block,
        ranges,
        space::{self, Space, with},
        vmm::{self, Chunk, GRANULE},
    },
};

/// Largest buffer.
const LARGEST: u64 = 1 << 44;
/// Between the parts of a buffer.
const UNIT: u64 = 512;
/// How long the supervisor may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How long a process that has the buffer may take to end, and the pause between two looks.
const ENDS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(20));

// The program's functions, as this library exports them: what they submit is counted.
unsafe extern "C-unwind" {
    fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, stream: CUstream) -> CUresult;
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: CUstream) -> CUresult;
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> CUresult;
    fn cuStreamSynchronize(stream: CUstream) -> CUresult;
}

/// What this process keeps.
struct Kept {
    /// To the supervisor.
    link: Option<OwnFd>,
    /// By name. It stays when the context goes: the supervisor has the memory then.
    all: BTreeMap<String, Entry>,
}

struct Entry {
    address: u64,
    device: c_int,
    bytes: u64,
}

/// Held while buffers are made and ended. Never inside the gate.
static KEPT: Mutex<Kept> = Mutex::new(Kept {
    link: None,
    all: BTreeMap::new(),
});

// ---- What a buffer consists of -------------------------------------------------------------------

/// Marks that a half is whole.
const WHOLE: u32 = 0x7470_656b;

/// Words behind the contents of a half: [`WHOLE`] if there was a commit, and its step.
type Tail = [u32; 3];

/// A buffer for so many bytes of the program's. The first half, which the program has, begins at 0; the second one follows. Behind
/// them is a word: [`WHOLE`] while the first half is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    half: u64,
}

/// Which half is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    First,
    Second,
}

impl Layout {
    const fn of(bytes: u64) -> Self {
        Self {
            half: bytes.next_multiple_of(UNIT) + UNIT,
        }
    }

    const fn bytes(self) -> u64 {
        (2 * self.half + UNIT).next_multiple_of(GRANULE)
    }

    /// Where the tail of a half is.
    const fn tail(self, half: Half) -> u64 {
        self.start(half) + self.half - UNIT
    }

    const fn start(self, half: Half) -> u64 {
        match half {
            Half::First => 0,
            Half::Second => self.half,
        }
    }

    const fn mark(self) -> u64 {
        2 * self.half
    }
}

/// What was committed last, if anything was.
fn committed(mark: u32, first: Tail, second: Tail) -> Option<(Half, u64)> {
    let (half, [whole, low, high]) = match mark {
        WHOLE => (Half::First, first),
        _ => (Half::Second, second),
    };
    (whole == WHOLE).then_some((half, u64::from(high) << 32 | u64::from(low)))
}

fn result(number: CUresult) -> Result<(), CUresult> {
    match number {
        SUCCESS => Ok(()),
        error => Err(error),
    }
}

fn set(at: u64, value: u32, bytes: u64, stream: CUstream) -> Result<(), CUresult> {
    // SAFETY: numbers only; the driver checks the addresses.
    result(unsafe { cuMemsetD32Async(at, value, (bytes / 4) as usize, stream) })
}

fn copy(to: u64, from: u64, bytes: u64, stream: CUstream) -> Result<(), CUresult> {
    // SAFETY: as above.
    result(unsafe { cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream) })
}

fn words<const N: usize>(at: u64) -> Result<[u32; N], CUresult> {
    let mut words = [0; N];
    // SAFETY: a place of that size.
    result(unsafe { cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), at, size_of::<[u32; N]>()) })?;
    Ok(words)
}

fn settle() -> Result<(), CUresult> {
    // SAFETY: the default stream is always there.
    result(unsafe { cuStreamSynchronize(ptr::null_mut()) })
}

impl Layout {
    /// What the first half has now is the contents at this step, once the stream has come so far.
    fn commit(self, at: u64, step: u64, stream: CUstream) -> Result<(), CUresult> {
        let tail = at + self.tail(Half::First);
        for (place, word) in [WHOLE, step as u32, (step >> 32) as u32]
            .into_iter()
            .enumerate()
        {
            set(tail + 4 * place as u64, word, 4, stream)?;
        }
        self.refresh(at, stream)
    }

    /// The first half is whole: the second one becomes its copy.
    fn refresh(self, at: u64, stream: CUstream) -> Result<(), CUresult> {
        set(at + self.mark(), WHOLE, 4, stream)?;
        copy(at + self.start(Half::Second), at, self.half, stream)?;
        set(at + self.mark(), 0, 4, stream)
    }

    /// Makes both halves what was committed last; its step, if there is one. Else all is zero.
    fn restore(self, at: u64) -> Result<Option<u64>, CUresult> {
        let [mark] = words(at + self.mark())?;
        let first = words(at + self.tail(Half::First))?;
        let second = words(at + self.tail(Half::Second))?;
        let found = committed(mark, first, second);
        match found {
            None => self.clear(at)?,
            Some((Half::First, _)) => self.refresh(at, ptr::null_mut())?,
            Some((Half::Second, _)) => {
                let from = at + self.start(Half::Second);
                copy(at, from, self.half, ptr::null_mut())?;
            }
        }
        settle()?;
        Ok(found.map(|(_, step)| step))
    }

    fn clear(self, at: u64) -> Result<(), CUresult> {
        set(at, 0, self.bytes(), ptr::null_mut())?;
        settle()
    }
}

// ---- The supervisor ------------------------------------------------------------------------------

impl Kept {
    /// Connects to the supervisor, if there is one and not done yet.
    fn connect(&mut self) -> Option<()> {
        if self.link.is_some() {
            return Some(());
        }
        let set = |name| std::env::var(name).ok().filter(|it| !it.is_empty());
        let (name, tenant) = (set(VARIABLE)?, set("GPUMUX_TENANT")?);
        let connect = || socket::connect_abstract(name.as_bytes(), SocketFlags::NONBLOCK);
        self.link = Some(OwnFd::new(connect).ok()?);
        let answer = self.ask(&Request::Hello { tenant }, None);
        match answer {
            Ok((Answer::Done, _)) => Some(()),
            _ => {
                self.link = None;
                None
            }
        }
    }

    /// Asks the supervisor. One that does not answer in time is not asked again.
    fn ask(
        &mut self,
        request: &Request,
        file: Option<&OwnFd>,
    ) -> io::Result<(Answer, Option<OwnFd>)> {
        let link = self.link.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let exchange = || {
            socket::send(link, request, file.map(AsFd::as_fd), SendFlags::empty())?;
            let until = Instant::now() + ANSWER;
            loop {
                match socket::recv::<Answer>(link, RecvFlags::empty()) {
                    Ok(Some((answer, file))) => {
                        let file = file.map(|file| OwnFd::new(|| Ok(file))).transpose()?;
                        return Ok((answer, file));
                    }
                    Ok(None) => return Err(io::ErrorKind::ConnectionReset.into()),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                let left = Timespec::try_from(left).unwrap_or_default();
                let _ = poll(&mut [PollFd::new(link, PollFlags::IN)], Some(&left));
            }
        };
        let answer = exchange();
        if let Err(error) = &answer {
            say(format_args!(
                "`gpumux run` does not keep this program's memory any more: {error}"
            ));
            self.link = None;
        }
        answer
    }

    /// The same, of what is only done or not.
    fn order(&mut self, request: &Request, file: Option<&OwnFd>) -> Result<(), c_int> {
        match self.ask(request, file) {
            Ok((Answer::Done, _)) => Ok(()),
            Ok((Answer::Refused { reason }, _)) => {
                say(format_args!(
                    "`gpumux run` does not keep a buffer: {reason}"
                ));
                Err(REFUSED)
            }
            _ => Err(NOT_KEPT),
        }
    }

    /// A buffer that an earlier process has left. Waits until that has ended.
    fn find(&mut self, name: &str) -> Result<Option<(Buffer, OwnFd)>, c_int> {
        let until = Instant::now() + ENDS.0;
        loop {
            let request = Request::Find {
                name: name.to_owned(),
            };
            match self.ask(&request, None) {
                Ok((Answer::Found(buffer), Some(file))) => return Ok(Some((buffer, file))),
                Ok((Answer::Done, _)) => return Ok(None),
                Ok((Answer::Busy, _)) if Instant::now() < until => sleep(ENDS.1),
                Ok((Answer::Busy, _)) => return Err(LATER),
                Ok((Answer::Refused { reason }, _)) => {
                    say(format_args!(
                        "`gpumux run` does not keep the buffer `{name}`: {reason}"
                    ));
                    return Err(REFUSED);
                }
                _ => return Err(NOT_KEPT),
            }
        }
    }
}

// ---- The program's side --------------------------------------------------------------------------

/// `gpumux_keep`: the address, and the step that was committed last.
fn keep(name: &str, device: c_int, bytes: u64) -> Result<(u64, Option<u64>), c_int> {
    if name.is_empty() || name.len() > LONGEST_NAME || bytes == 0 || bytes > LARGEST {
        return Err(UNKNOWN);
    }
    let context = own_context(device)?;
    if is_capturing_anywhere() {
        return Err(LATER);
    }
    let uuid = with(|space| space.uuid(device)).ok_or(NO_CONTEXT)?;
    let layout = Layout::of(bytes);
    // What an earlier process left is counted until the daemon receives whose it is.
    lease::await_link();
    let mut kept = guard::lock(&KEPT);
    let known = kept.all.get(name).map(|it| it.address);
    if known.is_some_and(|at| with(|space| space.kept_at(at).is_some())) {
        return Err(UNKNOWN);
    }
    kept.connect().ok_or(NOT_KEPT)?;
    let wanted = Buffer {
        device: uuid,
        size: bytes,
        bytes: layout.bytes(),
    };
    let found = kept.find(name)?;
    if let Some((_, file)) = found.as_ref().filter(|(buffer, _)| *buffer == wanted) {
        let at = import(layout, (device, context), file)?;
        kept.add(name, at, device, layout.bytes(), true);
        let step = layout.restore(at).map_err(|_| REFUSED)?;
        return Ok((at, step));
    }
    if let Some((other, _)) = found {
        // It is of no use to this program.
        kept.renounce(name, &other)?;
        kept.find(name)?;
    }
    let at = make(layout, (device, context))?;
    let added = layout.clear(at).map_err(|_| REFUSED);
    let added = added.and_then(|()| kept.hand_over(name, at, wanted));
    if let Err(error) = added {
        let _ = allocate::free(at, || SUCCESS);
        return Err(error);
    }
    with(|space| space.own(at, layout));
    kept.add(name, at, device, layout.bytes(), false);
    Ok((at, None))
}

/// Maps a buffer that the supervisor has.
fn import(layout: Layout, own: (c_int, u64), file: &OwnFd) -> Result<u64, c_int> {
    let bytes = layout.bytes();
    let mapped = || {
        let at = vmm::reserve(bytes)?;
        let undo = |_: &CUresult| vmm::unreserve(at, bytes);
        let (chunk, _) = vmm::import(at, bytes, file).inspect_err(undo)?;
        vmm::grant(at, bytes, own.0).inspect_err(|_| {
            vmm::unback(at, &[chunk]);
            vmm::unreserve(at, bytes);
        })?;
        with(|space| {
            space.place(at, own, chunk);
            space.own(at, layout);
        });
        Ok(at)
    };
    gate::through(mapped).map_err(|_: CUresult| REFUSED)
}

/// Makes a buffer's memory, which is kept by nothing yet.
fn make(layout: Layout, own: (c_int, u64)) -> Result<u64, c_int> {
    let (bytes, device) = (layout.bytes(), own.0);
    let back = || {
        let at = vmm::reserve(bytes)?;
        let undo = |_: &CUresult| vmm::unreserve(at, bytes);
        let chunks = vmm::back(at, bytes, bytes, device).inspect_err(undo)?;
        let chunk = chunks.into_iter().next().ok_or(vmm::OUT_OF_MEMORY)?;
        with(|space| space.place(at, own, chunk));
        Ok(at)
    };
    let made = attempt::in_time(None, || {
        if !space::take(device, bytes, true) {
            return Err(Refused::ByAccounting);
        }
        let made = attempt::make(None, || gate::through(back));
        made.inspect_err(|_| space::give(device, bytes, true))
    });
    made.map_err(|refused| match refused {
        Refused::ByAccounting => FULL,
        Refused::ByDriver(vmm::OUT_OF_MEMORY) => LATER,
        Refused::ByDriver(_) => REFUSED,
    })
}

impl Kept {
    /// The supervisor has a buffer's file from now on.
    fn hand_over(&mut self, name: &str, at: u64, buffer: Buffer) -> Result<(), c_int> {
        let block = |space: &mut Space| {
            let block = space.blocks.get(&at)?;
            Some((block.chunk(0)?, block.context))
        };
        let (chunk, context) = with(block).ok_or(REFUSED)?;
        let file = within(context, || vmm::export(&chunk)).and_then(Result::ok);
        let file = file.ok_or(REFUSED)?;
        let request = Request::Keep {
            name: name.to_owned(),
            buffer,
        };
        self.order(&request, Some(&file))
    }

    /// A new buffer, whose memory is in the lease; or an inherited one, that an earlier process has left, or this one when its context
    /// ended.
    fn add(&mut self, name: &str, address: u64, device: c_int, bytes: u64, inherited: bool) {
        if let Some(entry) = self.all.get_mut(name).filter(|_| inherited) {
            entry.address = address;
            return;
        }
        let entry = Entry {
            address,
            device,
            bytes,
        };
        self.all.insert(name.to_owned(), entry);
        space::tell_with(|space| match inherited {
            true => space.take_over(device, bytes),
            false => {
                let kept = space.keep_more(device, bytes);
                kept.into_iter().chain(space.trim(device)).collect()
            }
        });
    }

    /// What an earlier process, or this one, has left under this name is kept no more.
    fn renounce(&mut self, name: &str, buffer: &Buffer) -> Result<(), c_int> {
        let request = Request::Drop {
            name: name.to_owned(),
        };
        self.order(&request, None)?;
        let device = space::ordinal(&buffer.device);
        match (self.all.remove(name), device) {
            (Some(own), _) => end_counting(own.device, own.bytes),
            // An earlier process has left it.
            (None, Some(device)) => space::tell_with(|space| {
                let mut all = space.holds();
                space.inherit(device, buffer.bytes);
                all.extend(space.tell_kept(device));
                all.append(&mut space.holds());
                all
            }),
            (None, None) => {}
        }
        Ok(())
    }
}

/// A buffer of this process's is kept no more, and its memory is gone.
fn end_counting(device: c_int, bytes: u64) {
    space::tell_with(|space| {
        let kept = space.keep_less(device, bytes);
        space.give(device, bytes, true);
        kept.into_iter().chain(space.trim(device))
    });
}

impl Space {
    /// The memory of a buffer is mapped.
    fn place(&mut self, at: u64, own: (c_int, u64), chunk: Chunk) {
        self.blocks.insert(at, Block::whole(own, chunk));
        ranges::add(at, chunk.bytes, at, own.1);
    }

    /// The supervisor has it, too.
    fn own(&mut self, at: u64, layout: Layout) {
        if let Some(block) = self.blocks.get_mut(&at) {
            block.kept = Some(layout.half);
        }
    }

    /// The buffer that is mapped there, and its context.
    fn kept_at(&self, at: u64) -> Option<(Layout, u64)> {
        let block = self.blocks.get(&at)?;
        let half = block.kept?;
        Some((Layout { half }, block.context))
    }

    /// What was granted in advance does not move either, and few buffers are made: it goes back.
    fn trim(&mut self, device: c_int) -> Vec<Shim> {
        if let Some(device) = self.devices.get_mut(&device) {
            device.trim();
        }
        self.holds()
    }

    /// A buffer that an earlier process has left is this one's, whose end the daemon may not have noticed. So it hears before what
    /// there is without that: only what a session begins with comes before that.
    fn take_over(&mut self, device: c_int, bytes: u64) -> Vec<Shim> {
        let mut all = self.holds();
        self.inherit(device, bytes);
        all.extend(self.keep_more(device, bytes));
        all.extend(self.book_foreign(device, bytes, true));
        all
    }

    fn inherit(&mut self, device: c_int, bytes: u64) {
        self.kept.entry(device).or_default().1 += bytes;
    }

    fn keep_more(&mut self, device: c_int, bytes: u64) -> Option<Shim> {
        self.kept.entry(device).or_default().0 += bytes;
        self.tell_kept(device)
    }

    fn keep_less(&mut self, device: c_int, bytes: u64) -> Option<Shim> {
        let kept = &mut self.kept.entry(device).or_default().0;
        *kept = kept.saturating_sub(bytes);
        self.tell_kept(device)
    }

    fn tell_kept(&self, device: c_int) -> Option<Shim> {
        let (bytes, inherited) = *self.kept.get(&device).filter(|_| lease::knows(KEEPING))?;
        let device = self.uuid(device)?;
        Some(Shim::Kept {
            device,
            bytes,
            inherited,
        })
    }
}

/// What a daemon receives about kept memory when a session begins. It may have counted that for the tenant since the last one ended.
pub(crate) fn introduce(space: &mut Space) -> Vec<Shim> {
    for (bytes, inherited) in space.kept.values_mut() {
        *inherited = *bytes;
    }
    let devices = space.kept.keys();
    devices
        .filter_map(|device| space.tell_kept(*device))
        .collect()
}

/// `gpumux_keep_end`
fn end(address: u64) -> Result<(), c_int> {
    if space::off() {
        return Err(NATIVE);
    }
    let mut kept = guard::lock(&KEPT);
    let mut all = kept.all.iter();
    let name = all.find(|(_, it)| it.address == address);
    let name = name.map(|(name, _)| name.clone()).ok_or(UNKNOWN)?;
    kept.order(&Request::Drop { name: name.clone() }, None)?;
    if with(|space| space.kept_at(address)).is_some() {
        let _ = allocate::free(address, || SUCCESS);
    }
    if let Some(own) = kept.all.remove(&name) {
        end_counting(own.device, own.bytes);
    }
    Ok(())
}

/// `gpumux_keep_commit`
fn commit(address: u64, step: u64, stream: CUstream) -> Result<(), c_int> {
    if space::off() {
        return Err(NATIVE);
    }
    let (layout, context) = with(|space| space.kept_at(address)).ok_or(UNKNOWN)?;
    let submitted = within(context, || layout.commit(address, step, stream));
    submitted.ok_or(NO_CONTEXT)?.map_err(|_| REFUSED)
}

fn guarded<R>(work: impl FnOnce() -> Result<R, c_int>) -> Result<R, c_int> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(REFUSED))
}

/// See `include/gpumux.h`.
///
/// # Safety
/// `name` must be a C string; `address` and `step` places for a number.
#[unsafe(no_mangle)]
unsafe extern "C" fn gpumux_keep(
    name: *const c_char,
    device: c_int,
    bytes: u64,
    address: *mut u64,
    step: *mut u64,
) -> c_int {
    if name.is_null() || address.is_null() || step.is_null() {
        return UNKNOWN;
    }
    // SAFETY: the caller's.
    let Ok(name) = unsafe { CStr::from_ptr(name) }.to_str() else {
        return UNKNOWN;
    };
    match guarded(|| keep(name, device, bytes)) {
        Ok((at, found)) => {
            // SAFETY: the caller's places, which are not null.
            unsafe { (*address, *step) = (at, found.unwrap_or(0)) };
            if found.is_some() { FOUND } else { DONE }
        }
        Err(answer) => answer,
    }
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_keep_commit(address: u64, step: u64, stream: CUstream) -> c_int {
    guarded(|| commit(address, step, stream)).map_or_else(|error| error, |()| DONE)
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_keep_end(address: u64) -> c_int {
    guarded(|| end(address)).map_or_else(|error| error, |()| DONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Tail = [WHOLE, 7, 1];
    const NEW: Tail = [WHOLE, 8, 1];
    /// In the middle of being written, or never.
    const TORN: Tail = [0, 8, 1];

    #[test]
    fn half_that_is_whole_is_found_at_every_moment_of_a_commit() {
        let (old, new) = (1 << 32 | 7, 1 << 32 | 8);
        // The program works on the first half; then its words are written, the second half, and the mark.
        for (mark, first, second, found) in [
            (0, TORN, TORN, None),
            (WHOLE, NEW, TORN, Some((Half::First, new))),
            (0, OLD, OLD, Some((Half::Second, old))),
            (0, NEW, OLD, Some((Half::Second, old))),
            (WHOLE, NEW, OLD, Some((Half::First, new))),
            (WHOLE, NEW, NEW, Some((Half::First, new))),
            (0, NEW, NEW, Some((Half::Second, new))),
        ] {
            assert_eq!(
                committed(mark, first, second),
                found,
                "{mark} {first:?} {second:?}"
            );
        }
    }

    #[test]
    fn report_of_what_is_inherited_comes_between_those_without_and_with_it() {
        lease::set_revision(KEEPING);
        let mut space = Space::default();
        space.know_for_tests(0);
        space.grant_for_tests(0, 5);
        let pinned = |it: &Shim| match *it {
            Shim::Holds { pinned, .. } => pinned,
            Shim::Kept { inherited, .. } => 100 + inherited,
            _ => unreachable!("{it:?}"),
        };
        let told: Vec<u64> = space.take_over(0, 3).iter().map(pinned).collect();
        assert_eq!(told, [5, 103, 8]);
    }

    #[test]
    fn parts_of_a_buffer_do_not_overlap() {
        for bytes in [1, UNIT, UNIT + 1, GRANULE, 3 * GRANULE - 5] {
            let layout = Layout::of(bytes);
            assert!(bytes <= layout.tail(Half::First), "{bytes}");
            assert_eq!(layout.start(Half::Second), layout.tail(Half::First) + UNIT);
            let second = layout.tail(Half::Second) - layout.start(Half::Second);
            assert_eq!(second, layout.tail(Half::First));
            assert_eq!(layout.mark(), layout.tail(Half::Second) + UNIT);
            assert!(layout.mark() + UNIT <= layout.bytes());
            assert!(layout.bytes().is_multiple_of(GRANULE));
        }
    }
}
