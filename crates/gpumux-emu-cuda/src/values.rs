//! Waits for, and writes of, values in memory in stream order (`cuStreamWaitValue32` and its like).

use std::ffi::c_uint;

use gpumux_emu::protocol::Work;

use crate::{
    access,
    border::{In, cuda, exports},
    effect::Effect,
    error::{CuError, Result},
    memory,
    op::Op,
    stream::stream,
};

type Handle = usize;
type Address = u64;

/// `CU_STREAM_WAIT_VALUE_FLUSH`: nothing is buffered here. The lowest bits of the flags are the condition.
const FLUSH: c_uint = 1 << 30;

/// What is waited for.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    at: Address,
    /// 4 or 8 bytes.
    width: u32,
    value: u64,
    condition: c_uint,
}

impl Awaited {
    /// Whether it is there.
    ///
    /// # Errors
    /// When there is no such memory any more.
    fn is_met(&self) -> Result<bool> {
        let found = match self.width {
            4 => access::load_u32(self.at)?.into(),
            _ => access::load_u64(self.at)?,
        };
        Ok(self.is_met_by(found))
    }

    fn is_met_by(&self, found: u64) -> bool {
        let all = u64::MAX >> (64 - 8 * self.width);
        // The conditions are those of cuda.h: cyclic at least, equal, and, nor.
        match self.condition {
            0 => (found.wrapping_sub(self.value) & all) <= all >> 1,
            1 => found == self.value & all,
            2 => found & self.value & all != 0,
            _ => !(found | self.value) & all != 0,
        }
    }
}

fn check(at: Address, width: u32) -> Result {
    let width = u64::from(width);
    match at.is_multiple_of(width) && memory::space().is_reachable(at, width) {
        true => Ok(()),
        false => Err(CuError::INVALID_VALUE),
    }
}

fn wait(stream_handle: Handle, at: Address, value: u64, width: u32, flags: c_uint) -> Result {
    let stream = stream(stream_handle)?;
    stream.context()?.check()?;
    check(at, width)?;
    let condition = flags & !FLUSH;
    if condition > 3 {
        return Err(CuError::INVALID_VALUE);
    }
    let awaited = Awaited {
        at,
        width,
        value,
        condition,
    };
    stream.wait_until(move || awaited.is_met())
}

fn write(stream_handle: Handle, at: Address, value: u64, width: u32, flags: c_uint) -> Result {
    let stream = stream(stream_handle)?;
    stream.context()?.check()?;
    check(at, width)?;
    // 1 leaves out a barrier that nothing here needs.
    if flags > 1 {
        return Err(CuError::INVALID_VALUE);
    }
    let effect = match width {
        4 => Effect::Set {
            to: at,
            width: 4,
            value: value as u32,
            count: 1,
        },
        _ => Effect::Write {
            to: at,
            data: value.to_le_bytes().into(),
        },
    };
    stream.submit(Op {
        prompt: true,
        ..Op::compute(Work::Record, effect)
    })
}

/// One operation of several (`CUstreamBatchMemOpParams`): its kind, an address, a value and flags.
fn one(stream: Handle, [kind, at, value, flags, ..]: [u64; 6]) -> Result {
    let flags = flags as c_uint;
    match kind as u32 {
        1 => wait(stream, at, value & 0xffff_ffff, 4, flags),
        2 => write(stream, at, value & 0xffff_ffff, 4, flags),
        4 => wait(stream, at, value, 8, flags),
        5 => write(stream, at, value, 8, flags),
        // Barriers and flushes: everything is seen in order.
        3 | 6 => Ok(()),
        _ => Err(CuError::INVALID_VALUE),
    }
}

fn batch(stream: Handle, count: c_uint, operations: In<[u64; 6]>, flags: c_uint) -> Result {
    if flags != 0 || count > 256 {
        return Err(CuError::INVALID_VALUE);
    }
    (0..count as usize).try_for_each(|i| one(stream, operations.get_at(i)?))
}

exports! { FUNCTIONS by cuda;
    [cuStreamWaitValue32_ptsz] cuStreamWaitValue32(stream: Handle, at: Address, value: c_uint, flags: c_uint) => wait(stream, at, value.into(), 4, flags);
    [cuStreamWaitValue32_v2_ptsz] cuStreamWaitValue32_v2(stream: Handle, at: Address, value: c_uint, flags: c_uint) => wait(stream, at, value.into(), 4, flags);
    [cuStreamWaitValue64_ptsz] cuStreamWaitValue64(stream: Handle, at: Address, value: u64, flags: c_uint) => wait(stream, at, value, 8, flags);
    [cuStreamWaitValue64_v2_ptsz] cuStreamWaitValue64_v2(stream: Handle, at: Address, value: u64, flags: c_uint) => wait(stream, at, value, 8, flags);
    [cuStreamWriteValue32_ptsz] cuStreamWriteValue32(stream: Handle, at: Address, value: c_uint, flags: c_uint) => write(stream, at, value.into(), 4, flags);
    [cuStreamWriteValue32_v2_ptsz] cuStreamWriteValue32_v2(stream: Handle, at: Address, value: c_uint, flags: c_uint) => write(stream, at, value.into(), 4, flags);
    [cuStreamWriteValue64_ptsz] cuStreamWriteValue64(stream: Handle, at: Address, value: u64, flags: c_uint) => write(stream, at, value, 8, flags);
    [cuStreamWriteValue64_v2_ptsz] cuStreamWriteValue64_v2(stream: Handle, at: Address, value: u64, flags: c_uint) => write(stream, at, value, 8, flags);
    [cuStreamBatchMemOp_ptsz] cuStreamBatchMemOp(stream: Handle, count: c_uint, operations: In<[u64; 6]>, flags: c_uint) => batch(stream, count, operations, flags);
    [cuStreamBatchMemOp_v2_ptsz] cuStreamBatchMemOp_v2(stream: Handle, count: c_uint, operations: In<[u64; 6]>, flags: c_uint) => batch(stream, count, operations, flags);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_cudas() {
        let met = |condition, width, value, found| {
            let it = Awaited {
                at: 0,
                width,
                value,
                condition,
            };
            it.is_met_by(found)
        };
        assert!(met(0, 4, 5, 5) && met(0, 4, 5, 6) && !met(0, 4, 5, 4));
        assert!(met(0, 4, 0xffff_fff0, 2), "cyclic");
        assert!(met(1, 8, 7, 7) && !met(1, 8, 7, 8));
        assert!(met(2, 4, 6, 2) && !met(2, 4, 6, 1));
        assert!(met(3, 4, 0xffff_fff0, 0xe) && !met(3, 4, 0xffff_fff0, 0xf));
    }
}
