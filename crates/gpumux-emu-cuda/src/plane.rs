//! Copies and sets of planes and volumes of plain memory. Arrays (textures) there are none.

use std::ffi::c_uint;

use gpumux_emu::protocol::{Queue, Work};

use crate::{
    border::{In, Out, cuda, exports},
    effect::{Effect, Rows},
    error::{CuError, Result},
    memory,
    op::Op,
    stream::{self, Direction, stream},
};

type Handle = usize;
type Address = u64;

/// Words of `CUDA_MEMCPY2D` and of `CUDA_MEMCPY3D`.
type Plane = In<[u64; 16]>;
pub(crate) type Volume = In<[u64; 25]>;

/// One side of a copy.
struct Side {
    /// It must be memory that the device reaches.
    device: bool,
    at: u64,
    pitch: u64,
    slice: u64,
}

impl Side {
    /// From the kind of memory (1 host, 2 device, 4 either), its two addresses, and where in it.
    fn new(
        kind: u64,
        [host, device]: [u64; 2],
        [x, y, z]: [u64; 3],
        pitch: u64,
        rows: u64,
    ) -> Result<Self> {
        let base = match kind & 0xffff_ffff {
            1 => host,
            2 | 4 => device,
            _ => return Err(CuError::NOT_SUPPORTED),
        };
        let wrong = CuError::INVALID_VALUE;
        let slice = pitch.checked_mul(rows).ok_or(wrong)?;
        let offset = || {
            z.checked_mul(slice)?
                .checked_add(y.checked_mul(pitch)?)?
                .checked_add(x)
        };
        let at = offset()
            .and_then(|offset| base.checked_add(offset))
            .ok_or(wrong)?;
        if base == 0 {
            return Err(wrong);
        }
        Ok(Self {
            device: kind & 0xffff_ffff == 2,
            at,
            pitch,
            slice,
        })
    }
}

fn copy_plane(plane: Plane, stream: Handle, wait: bool) -> Result {
    let it = plane.get()?;
    let [width, height] = [it[14], it[15]];
    let pitch = |pitch: u64| if pitch == 0 { width } else { pitch };
    let from = Side::new(it[2], [it[3], it[4]], [it[0], it[1], 0], pitch(it[6]), 0)?;
    let to = Side::new(it[9], [it[10], it[11]], [it[7], it[8], 0], pitch(it[13]), 0)?;
    copy(&to, &from, [width, height, 1], stream, wait)
}

pub(crate) fn copy_volume(volume: Volume, stream: Handle, wait: bool) -> Result {
    let it = volume.get()?;
    let [width, height, depth] = [it[22], it[23], it[24]];
    let or = |value: u64, other: u64| if value == 0 { other } else { value };
    let from = Side::new(
        it[4],
        [it[5], it[6]],
        [it[0], it[1], it[2]],
        or(it[9], width),
        or(it[10], height),
    )?;
    let to = Side::new(
        it[15],
        [it[16], it[17]],
        [it[11], it[12], it[13]],
        or(it[20], width),
        or(it[21], height),
    )?;
    copy(&to, &from, [width, height, depth], stream, wait)
}

fn copy(
    to: &Side,
    from: &Side,
    [width, height, depth]: [u64; 3],
    stream_handle: Handle,
    wait: bool,
) -> Result {
    let stream = stream(stream_handle)?;
    stream.context()?.check()?;
    if width == 0 || height == 0 || depth == 0 {
        return Ok(());
    }
    let wrong = CuError::INVALID_VALUE;
    let bytes = width
        .checked_mul(height)
        .and_then(|it| it.checked_mul(depth))
        .ok_or(wrong)?;
    if to.pitch < width || from.pitch < width {
        return Err(wrong);
    }
    let last = |side: &Side| {
        let slices = (depth - 1).checked_mul(side.slice)?;
        side.at
            .checked_add(slices)?
            .checked_add((height - 1).checked_mul(side.pitch)?)
    };
    let (to_last, from_last) = (last(to).ok_or(wrong)?, last(from).ok_or(wrong)?);
    let (to_device, from_device, pinned) = {
        let space = memory::space();
        let device = |side: &Side, last: u64| {
            space.is_device(side.at, width) && space.is_device(last, width)
        };
        let (to_device, from_device) = (device(to, to_last), device(from, from_last));
        // Reserved addresses without memory have no owner, and the device's are no others.
        let wrong = |side: &Side, last: u64, device: bool| {
            !device
                && (space.is_unmapped(side.at, width)
                    || space.is_unmapped(last, width)
                    || side.device && !space.is_pinned(side.at, width))
        };
        if wrong(to, to_last, to_device) || wrong(from, from_last, from_device) {
            return Err(CuError::INVALID_VALUE);
        }
        let pinned = (to_device || space.is_pinned(to.at, width))
            && (from_device || space.is_pinned(from.at, width));
        (to_device, from_device, pinned)
    };
    let queue = match (to_device, from_device) {
        (true, true) => Queue::Compute,
        (true, false) => Queue::HostToDevice,
        (false, _) => Queue::DeviceToHost,
    };
    // What is not pinned is copied before the call returns.
    let wait = wait || (!pinned && !stream.is_captured());
    if wait {
        stream.not_captured()?;
    }
    let rows = Rows {
        to: to.at,
        from: from.at,
        to_pitch: to.pitch,
        from_pitch: from.pitch,
        to_slice: to.slice,
        from_slice: from.slice,
        width,
        height,
        depth,
        to_device,
        from_device,
    };
    stream.complete(
        Op::on(queue, Work::Copy { bytes }, Effect::Rows(rows)),
        wait,
    )
}

/// Sets rows of elements.
pub(crate) fn set(
    to: Address,
    pitch: usize,
    width: u64,
    value: u32,
    [columns, rows]: [usize; 2],
    stream: Handle,
    wait: bool,
) -> Result {
    if rows == 1 || pitch as u64 == columns as u64 * width {
        return stream::set(
            to,
            width,
            value,
            columns.checked_mul(rows).ok_or(CuError::INVALID_VALUE)?,
            stream,
            wait,
        );
    }
    for row in 0..rows as u64 {
        let at = row
            .checked_mul(pitch as u64)
            .and_then(|offset| to.checked_add(offset));
        stream::set(
            at.ok_or(CuError::INVALID_VALUE)?,
            width,
            value,
            columns,
            stream,
            wait,
        )?;
    }
    Ok(())
}

/// Copies many ranges.
fn copy_all(
    to: In<Address>,
    from: In<Address>,
    sizes: In<usize>,
    count: usize,
    stream: Handle,
) -> Result {
    for i in 0..count {
        let (to, from, size) = (to.get_at(i)?, from.get_at(i)?, sizes.get_at(i)?);
        stream::copy(to, from, size, Direction::Any, stream, false)?;
    }
    Ok(())
}

exports! { FUNCTIONS by cuda;
    [cuMemcpyBatchAsync_ptsz]cuMemcpyBatchAsync(to: In<Address>, from: In<Address>, sizes: In<usize>, count: usize, _attributes: Handle, _indices: Handle, _many: usize, failed: Out<usize>, stream: Handle) => {
        // Which one: not known.
        failed.put_if_wanted(usize::MAX);
        copy_all(to, from, sizes, count, stream)
    };
    [cuMemcpyBatchAsync_v2_ptsz]cuMemcpyBatchAsync_v2(to: In<Address>, from: In<Address>, sizes: In<usize>, count: usize, _attributes: Handle, _indices: Handle, _many: usize, stream: Handle) => copy_all(to, from, sizes, count, stream);
    [cuMemcpy2D_v2_ptds]cuMemcpy2D_v2(plane: Plane) => copy_plane(plane, 0, true);
    [cuMemcpy2DUnaligned_v2_ptds]cuMemcpy2DUnaligned_v2(plane: Plane) => copy_plane(plane, 0, true);
    [cuMemcpy2DAsync_v2_ptsz]cuMemcpy2DAsync_v2(plane: Plane, stream: Handle) => copy_plane(plane, stream, false);
    [cuMemcpy3D_v2_ptds]cuMemcpy3D_v2(volume: Volume) => copy_volume(volume, 0, true);
    [cuMemcpy3DAsync_v2_ptsz]cuMemcpy3DAsync_v2(volume: Volume, stream: Handle) => copy_volume(volume, stream, false);
    [cuMemsetD2D8_v2_ptds]cuMemsetD2D8_v2(to: Address, pitch: usize, value: u8, columns: usize, rows: usize) => set(to, pitch, 1, value.into(), [columns, rows], 0, true);
    [cuMemsetD2D16_v2_ptds]cuMemsetD2D16_v2(to: Address, pitch: usize, value: u16, columns: usize, rows: usize) => set(to, pitch, 2, value.into(), [columns, rows], 0, true);
    [cuMemsetD2D32_v2_ptds]cuMemsetD2D32_v2(to: Address, pitch: usize, value: c_uint, columns: usize, rows: usize) => set(to, pitch, 4, value, [columns, rows], 0, true);
    [cuMemsetD2D8Async_ptsz]cuMemsetD2D8Async(to: Address, pitch: usize, value: u8, columns: usize, rows: usize, stream: Handle) => set(to, pitch, 1, value.into(), [columns, rows], stream, false);
    [cuMemsetD2D16Async_ptsz]cuMemsetD2D16Async(to: Address, pitch: usize, value: u16, columns: usize, rows: usize, stream: Handle) => set(to, pitch, 2, value.into(), [columns, rows], stream, false);
    [cuMemsetD2D32Async_ptsz]cuMemsetD2D32Async(to: Address, pitch: usize, value: c_uint, columns: usize, rows: usize, stream: Handle) => set(to, pitch, 4, value, [columns, rows], stream, false);
}
