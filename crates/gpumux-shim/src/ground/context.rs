//! What counting work and holding the device ahead of it both stand on: the page, the current context, and whether streams are capturing.

use std::{
    ffi::c_int,
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence},
};

use gpumux_wire::page::Page;

use crate::ground::driver::{CUcontext, SUCCESS, functions};

functions! {
    ctx_get_current c"cuCtxGetCurrent" (*mut CUcontext);
    ctx_push_current c"cuCtxPushCurrent_v2" (CUcontext);
    ctx_pop_current c"cuCtxPopCurrent_v2" (*mut CUcontext);
    exchange_capture_mode c"cuThreadExchangeStreamCaptureMode" (*mut c_int);
}

/// Where to count; null: not at all.
static PAGE: AtomicPtr<Page> = AtomicPtr::new(ptr::null_mut());
/// How many captures are going on. While there are any, the poller asks nothing: a query can invalidate
/// a capture.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// Whether a daemon has ever taken the page. It counts from what it finds there.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// What was counted before that.
static EARLY: Early = Early([const { AtomicU64::new(0) }; 3]);

/// Counts that wait for a daemon: progress that the program reported, collectives, and the bytes that they send.
struct Early([AtomicU64; 3]);

impl Early {
    /// Adds to the page's counts, or keeps that for it.
    fn add<'a>(&self, counts: [u64; 3], page: impl FnOnce() -> Option<&'a Page>) {
        for (count, more) in self.0.iter().zip(counts).filter(|it| it.1 > 0) {
            count.fetch_add(more, Ordering::Relaxed);
        }
        // Either this sees that it is taken, or `taken` sees the counts.
        fence(Ordering::SeqCst);
        if let Some(page) = page() {
            self.move_to(page);
        }
    }

    fn move_to(&self, page: &Page) {
        let [progress, calls, bytes] = self.take();
        page.add_progress(progress);
        page.add_collectives(calls, bytes);
    }

    fn take(&self) -> [u64; 3] {
        std::array::from_fn(|at| self.0[at].swap(0, Ordering::Relaxed))
    }
}

/// The program reports so many units of its own as done.
pub(crate) fn add_progress(units: u64) {
    EARLY.add([units, 0, 0], taken_page);
}

/// A collective that sends so many bytes was called.
pub(crate) fn add_collective(bytes: u64) {
    EARLY.add([0, 1, bytes], taken_page);
}

/// From now on work is counted in this page.
pub(crate) fn set_page(page: &'static Page) {
    PAGE.store(ptr::from_ref(page).cast_mut(), Ordering::Release);
}

/// The page in which tests count, all in one.
#[cfg(test)]
pub(crate) fn test_page() -> &'static Page {
    static PAGE: std::sync::OnceLock<Page> = std::sync::OnceLock::new();
    let page = PAGE.get_or_init(|| Page::create().expect("a page").0);
    set_page(page);
    page
}

/// A daemon has taken the page: what waited for that is in its counts now.
pub(crate) fn taken() {
    TAKEN.store(true, Ordering::Release);
    fence(Ordering::SeqCst);
    if let Some(page) = page() {
        EARLY.move_to(page);
    }
}

fn taken_page() -> Option<&'static Page> {
    page().filter(|_| TAKEN.load(Ordering::Acquire))
}

/// Work is counted no longer. Whether it was.
pub(crate) fn take_page() -> bool {
    TAKEN.store(false, Ordering::Release);
    EARLY.take();
    !PAGE.swap(ptr::null_mut(), Ordering::AcqRel).is_null()
}

/// Whether this process counts.
#[inline]
pub(crate) fn page() -> Option<&'static Page> {
    // SAFETY: null, or a page that is never unmapped.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

/// Whether any stream is capturing.
#[inline]
pub(crate) fn is_capturing_anywhere() -> bool {
    CAPTURES.load(Ordering::Acquire) != 0
}

/// So many streams are capturing now.
pub(crate) fn set_captures(streams: usize) {
    CAPTURES.store(streams, Ordering::Release);
}

/// Exchanges what this thread's calls may do to captures of others for `mode`.
fn exchange(mode: &mut c_int) {
    if let Some(exchange) = exchange_capture_mode() {
        // SAFETY: a place to read and write.
        unsafe { exchange(mode) };
    }
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`
const RELAXED: c_int = 2;

/// This thread's calls spoil no capture from now on.
pub(crate) fn relax_captures() {
    let mut mode = RELAXED;
    exchange(&mut mode);
}

/// Runs `work`, whose calls spoil no capture, with `context` current.
pub(crate) fn aside<R>(context: u64, work: impl FnOnce() -> R) -> Option<R> {
    let mut mode = RELAXED;
    exchange(&mut mode);
    let result = within(context, work);
    exchange(&mut mode);
    result
}

/// The context that is current in this thread.
pub(crate) fn current_context() -> Option<u64> {
    let mut context = ptr::null_mut();
    // SAFETY: a place to write.
    let result = unsafe { ctx_get_current()?(&raw mut context) };
    (result == SUCCESS && !context.is_null()).then_some(context as u64)
}

/// Runs `work` with `context` current.
pub(crate) fn within<R>(context: u64, work: impl FnOnce() -> R) -> Option<R> {
    let (push, pop) = (ctx_push_current()?, ctx_pop_current()?);
    // SAFETY: a context that is removed from the tables before it is destroyed.
    if context == 0 || unsafe { push(context as CUcontext) } != SUCCESS {
        return None;
    }
    let result = work();
    let mut popped = ptr::null_mut();
    // SAFETY: a place to write; undoes the push above.
    unsafe { pop(&raw mut popped) };
    Some(result)
}

/// The bits that are set, by number.
pub(crate) fn bits(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (mask != 0).then(|| mask.trailing_zeros())?;
        mask &= mask - 1;
        Some(bit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_before_the_page_is_taken_are_not_lost() {
        let early = Early([const { AtomicU64::new(0) }; 3]);
        let page = Page::create().unwrap().0;
        early.add([40, 0, 0], || None);
        early.add([1, 1, 100], || None);
        assert_eq!((page.progress(), page.collectives()), (0, (0, 0)));
        early.move_to(&page);
        early.add([1, 1, 28], || Some(&page));
        assert_eq!((page.progress(), page.collectives()), (42, (2, 128)));
    }
}
