//! How work reads and writes memory: in pieces, each of which is checked and stays mapped meanwhile.

use crate::{
    error::{CuError, Result},
    memory,
};

/// An address and whether it must be one of the device's.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    at: u64,
    device: bool,
}

impl Place {
    pub(crate) fn new(at: u64, device: bool) -> Self {
        Self { at, device }
    }
}

/// Ranges are worked on in pieces of this many bytes, so that no thread waits long for the memory's lock.
const PIECE: u64 = 8 << 20;

/// Calls `work` for the pieces of a range: each is checked, and stays mapped while it is worked on. The
/// elements have `width` bytes, of which `PIECE` is a multiple.
fn pieces(address: u64, bytes: u64, width: u64, mut work: impl FnMut(*mut u8, usize)) -> Result {
    if !address.is_multiple_of(width) {
        return Err(CuError::MISALIGNED_ADDRESS);
    }
    let mut done = 0;
    while done < bytes {
        let at = address.checked_add(done).ok_or(CuError::ILLEGAL_ADDRESS)?;
        let length = PIECE.min(bytes - done);
        let space = memory::space();
        if !space.is_reachable(at, length) {
            return Err(CuError::ILLEGAL_ADDRESS);
        }
        work(at as *mut u8, length as usize);
        done += length;
    }
    Ok(())
}

/// Copies; the ranges may overlap.
pub(crate) fn copy(to: Place, from: Place, bytes: u64) -> Result {
    let mut done = 0;
    while done < bytes {
        let length = PIECE.min(bytes - done);
        let space = memory::space();
        for place in [to, from] {
            if place.device && !space.is_reachable(place.at + done, length) {
                return Err(CuError::ILLEGAL_ADDRESS);
            }
        }
        let (target, source) = ((to.at + done) as *mut u8, (from.at + done) as *const u8);
        // SAFETY: the device's side is mapped as long as `space` lives; host memory is the program's, which
        // promises that it lives until the copy is done.
        unsafe { std::ptr::copy(source, target, length as usize) };
        done += length;
    }
    Ok(())
}

/// Every one of `count` elements of `width` bytes becomes `value`.
pub(crate) fn set(address: u64, width: u64, value: u32, count: u64) -> Result {
    pieces(address, count.saturating_mul(width), width, |at, bytes| {
        // SAFETY: the piece is mapped and aligned (see `pieces`).
        unsafe {
            match width {
                1 => at.write_bytes(value as u8, bytes),
                2 => fill(at.cast::<u16>(), bytes / 2, value as u16),
                _ => fill(at.cast::<u32>(), bytes / 4, value),
            }
        }
    })
}

/// # Safety
/// `count` elements are writable and aligned there.
unsafe fn fill<T: Copy>(at: *mut T, count: usize, value: T) {
    for i in 0..count {
        // SAFETY: the caller's promise.
        unsafe { at.add(i).write(value) };
    }
}

/// Every one of `count` 32-bit numbers becomes `value`.
pub(crate) fn fill_u32(address: u64, count: u64, value: u32) -> Result {
    set(address, 4, value, count)
}

/// Adds `value` to `count` 32-bit numbers.
pub(crate) fn add_u32(address: u64, count: u64, value: u32) -> Result {
    if value == 0 {
        return Ok(());
    }
    pieces(address, count.saturating_mul(4), 4, |at, bytes| {
        let at = at.cast::<u32>();
        for i in 0..bytes / 4 {
            // SAFETY: the piece is mapped and aligned. The program may race with its own kernels; raw
            // accesses promise nothing about that.
            unsafe { at.add(i).write(at.add(i).read().wrapping_add(value)) };
        }
    })
}

/// The sum of `count` 32-bit numbers.
pub(crate) fn sum_u32(address: u64, count: u64) -> Result<u64> {
    let mut sum = 0_u64;
    pieces(address, count.saturating_mul(4), 4, |at, bytes| {
        let at = at.cast::<u32>();
        for i in 0..bytes / 4 {
            // SAFETY: the piece is mapped and aligned.
            sum = sum.wrapping_add(u64::from(unsafe { at.add(i).read() }));
        }
    })?;
    Ok(sum)
}

/// How many of `count` 32-bit numbers, the first of index `first`, are not what `gpumux_sweep_u32` expects of `value`; all
/// become what it expects of the next.
pub(crate) fn sweep_u32(address: u64, first: u64, count: u64, value: u32) -> Result<u64> {
    let (mut wrong, mut index) = (0, first);
    pieces(address, count.saturating_mul(4), 4, |at, bytes| {
        let at = at.cast::<u32>();
        for i in 0..bytes / 4 {
            let place = (index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32;
            let expected = place.wrapping_add(value);
            // SAFETY: the piece is mapped and aligned.
            unsafe {
                wrong += u64::from(at.add(i).read() != expected);
                at.add(i).write(expected.wrapping_add(1));
            }
            index += 1;
        }
    })?;
    Ok(wrong)
}

/// A 64-bit number.
pub(crate) fn load_u64(address: u64) -> Result<u64> {
    let mut value = 0;
    pieces(address, 8, 8, |at, _| {
        // SAFETY: mapped and aligned; the program may store there meanwhile.
        value = unsafe { at.cast::<u64>().read_volatile() };
    })?;
    Ok(value)
}

/// A 32-bit number.
pub(crate) fn load_u32(address: u64) -> Result<u32> {
    let mut value = 0;
    pieces(address, 4, 4, |at, _| {
        // SAFETY: mapped and aligned; the program may store there meanwhile.
        value = unsafe { at.cast::<u32>().read_volatile() };
    })?;
    Ok(value)
}

/// Sets a 32-bit number.
pub(crate) fn set_u32(address: u64, value: u32) -> Result {
    set(address, 4, value, 1)
}

/// Adds to a 64-bit number.
pub(crate) fn add_u64(address: u64, value: u64) -> Result {
    pieces(address, 8, 8, |at, _| {
        let at = at.cast::<u64>();
        // SAFETY: mapped and aligned.
        unsafe { at.write(at.read().wrapping_add(value)) };
    })
}
