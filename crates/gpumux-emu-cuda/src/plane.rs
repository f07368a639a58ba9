//! Copies and sets of planes and volumes, of plain memory and of arrays.

use std::ffi::c_uint;

use gpumux_emu::protocol::{Queue, Work};

use crate::{
    arrays::ARRAYS,
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
/// Words of `CUDA_MEMCPY3D_BATCH_OP`.
type Operation = In<[u64; 14]>;

/// One side of a copy.
struct Side {
    /// It must be memory that the device reaches.
    device: bool,
    at: u64,
    pitch: u64,
    slice: u64,
}

impl Side {
    /// From the kind of memory (1 host, 2 device, 3 array, 4 either), its address or handle, where in it, and how much of it.
    fn new(
        kind: u64,
        [host, device, array]: [u64; 3],
        [x, y, z]: [u64; 3],
        [width, height, depth]: [u64; 3],
        [mut pitch, mut rows]: [u64; 2],
    ) -> Result<Self> {
        let wrong = CuError::INVALID_VALUE;
        let kind = kind & 0xffff_ffff;
        let base = match kind {
            1 => host,
            2 | 4 => device,
            3 => {
                let array = ARRAYS.get(array as usize)?;
                (pitch, rows) = (array.pitch, array.rows);
                let parts = [
                    (x, width, pitch),
                    (y, height, rows),
                    (z, depth, array.slices),
                ];
                let fits = |(from, size, end): (u64, u64, u64)| {
                    from.checked_add(size).is_some_and(|to| to <= end)
                };
                if !parts.into_iter().all(fits) {
                    return Err(wrong);
                }
                array.memory()?
            }
            _ => return Err(CuError::NOT_SUPPORTED),
        };
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
            device: kind == 2 || kind == 3,
            at,
            pitch,
            slice,
        })
    }
}

fn copy_plane(plane: Plane, stream: Handle, wait: bool) -> Result {
    let it = plane.get()?;
    let extent = [it[14], it[15], 1];
    let side = |at: usize| {
        let pitch = if it[at + 6] == 0 { it[14] } else { it[at + 6] };
        let memory = [it[at + 3], it[at + 4], it[at + 5]];
        Side::new(
            it[at + 2],
            memory,
            [it[at], it[at + 1], 0],
            extent,
            [pitch, 0],
        )
    };
    copy(&side(7)?, &side(0)?, extent, stream, wait)
}

pub(crate) fn copy_volume(volume: Volume, stream: Handle, wait: bool) -> Result {
    let it = volume.get()?;
    let extent = [it[22], it[23], it[24]];
    let or = |value: u64, other: u64| if value == 0 { other } else { value };
    let side = |at: usize| {
        let memory = [it[at + 5], it[at + 6], it[at + 7]];
        let pitch = [or(it[at + 9], extent[0]), or(it[at + 10], extent[1])];
        Side::new(
            it[at + 4],
            memory,
            [it[at], it[at + 1], it[at + 2]],
            extent,
            pitch,
        )
    };
    copy(&side(11)?, &side(0)?, extent, stream, wait)
}

/// Copies bytes of a row: each side is an array's handle and an offset in it, or an address.
fn copy_row(to: Place, from: Place, bytes: usize, stream: Handle, wait: bool) -> Result {
    let extent = [bytes as u64, 1, 1];
    let side = |place| match place {
        Place::Array(array, offset) => Side::new(
            3,
            [0, 0, array as u64],
            [offset as u64, 0, 0],
            extent,
            [0, 0],
        ),
        Place::Memory(address) => Side::new(4, [0, address, 0], [0; 3], extent, [extent[0], 0]),
    };
    copy(&side(to)?, &side(from)?, extent, stream, wait)
}

/// One side of a copy of bytes.
enum Place {
    Array(Handle, usize),
    Memory(Address),
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

/// Copies many ranges, which have so many kinds.
fn copy_all(
    to: In<Address>,
    from: In<Address>,
    sizes: In<usize>,
    count: usize,
    kinds: usize,
    stream: Handle,
) -> Result {
    // As an H100's driver answers where a copy has none.
    if kinds == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    for i in 0..count {
        let (to, from, size) = (to.get_at(i)?, from.get_at(i)?, sizes.get_at(i)?);
        stream::copy(to, from, size, Direction::Any, stream, false)?;
    }
    Ok(())
}

/// Copies many volumes.
fn copy_volumes(all: Operation, count: usize, stream: Handle) -> Result {
    for i in 0..count {
        let it = all.get_at(i)?;
        let [width, height, depth] = [it[10], it[11], it[12]];
        // In which order the source is read.
        if !(1..=3).contains(&(it[13] & 0xffff_ffff)) {
            return Err(CuError::INVALID_VALUE);
        }
        let side = |at: usize| {
            // A pointer; the device's or the host's.
            let kind = match it[at] & 0xffff_ffff {
                1 => 4,
                _ => return Err(CuError::NOT_SUPPORTED),
            };
            let or = |value: u64, other: u64| if value == 0 { other } else { value };
            let (pitch, rows) = (or(it[at + 2], width), or(it[at + 3], height));
            Side::new(
                kind,
                [0, it[at + 1], 0],
                [0; 3],
                [width, height, depth],
                [pitch, rows],
            )
        };
        copy(&side(5)?, &side(0)?, [width, height, depth], stream, false)?;
    }
    Ok(())
}

exports! { FUNCTIONS by cuda;
    [cuMemcpyBatchAsync_ptsz]cuMemcpyBatchAsync(to: In<Address>, from: In<Address>, sizes: In<usize>, count: usize, _attributes: Handle, _indices: Handle, many: usize, failed: Out<usize>, stream: Handle) => {
        // Which one: not known.
        failed.put_if_wanted(usize::MAX);
        copy_all(to, from, sizes, count, many, stream)
    };
    [cuMemcpyBatchAsync_v2_ptsz]cuMemcpyBatchAsync_v2(to: In<Address>, from: In<Address>, sizes: In<usize>, count: usize, _attributes: Handle, _indices: Handle, many: usize, stream: Handle) => copy_all(to, from, sizes, count, many, stream);
    [cuMemcpy2D_v2_ptds]cuMemcpy2D_v2(plane: Plane) => copy_plane(plane, 0, true);
    [cuMemcpy2DUnaligned_v2_ptds]cuMemcpy2DUnaligned_v2(plane: Plane) => copy_plane(plane, 0, true);
    [cuMemcpy2DAsync_v2_ptsz]cuMemcpy2DAsync_v2(plane: Plane, stream: Handle) => copy_plane(plane, stream, false);
    [cuMemcpy3D_v2_ptds]cuMemcpy3D_v2(volume: Volume) => copy_volume(volume, 0, true);
    [cuMemcpy3DAsync_v2_ptsz]cuMemcpy3DAsync_v2(volume: Volume, stream: Handle) => copy_volume(volume, stream, false);
    [cuMemcpyHtoA_v2_ptds]cuMemcpyHtoA_v2(to: Handle, offset: usize, from: Address, bytes: usize) => copy_row(Place::Array(to, offset), Place::Memory(from), bytes, 0, true);
    [cuMemcpyAtoH_v2_ptds]cuMemcpyAtoH_v2(to: Address, from: Handle, offset: usize, bytes: usize) => copy_row(Place::Memory(to), Place::Array(from, offset), bytes, 0, true);
    [cuMemcpyHtoAAsync_v2_ptsz]cuMemcpyHtoAAsync_v2(to: Handle, offset: usize, from: Address, bytes: usize, stream: Handle) => copy_row(Place::Array(to, offset), Place::Memory(from), bytes, stream, false);
    [cuMemcpyAtoHAsync_v2_ptsz]cuMemcpyAtoHAsync_v2(to: Address, from: Handle, offset: usize, bytes: usize, stream: Handle) => copy_row(Place::Memory(to), Place::Array(from, offset), bytes, stream, false);
    [cuMemcpyDtoA_v2_ptds]cuMemcpyDtoA_v2(to: Handle, offset: usize, from: Address, bytes: usize) => copy_row(Place::Array(to, offset), Place::Memory(from), bytes, 0, true);
    [cuMemcpyAtoD_v2_ptds]cuMemcpyAtoD_v2(to: Address, from: Handle, offset: usize, bytes: usize) => copy_row(Place::Memory(to), Place::Array(from, offset), bytes, 0, true);
    [cuMemcpyAtoA_v2_ptds]cuMemcpyAtoA_v2(to: Handle, offset: usize, from: Handle, start: usize, bytes: usize) => copy_row(Place::Array(to, offset), Place::Array(from, start), bytes, 0, true);
    [cuMemcpy3DPeer_ptds]cuMemcpy3DPeer(volume: Volume) => copy_volume(volume, 0, true);
    [cuMemcpy3DPeerAsync_ptsz]cuMemcpy3DPeerAsync(volume: Volume, stream: Handle) => copy_volume(volume, stream, false);
    [cuMemcpyWithAttributesAsync_ptsz]cuMemcpyWithAttributesAsync(to: Address, from: Address, bytes: usize, _attributes: Handle, stream: Handle) => stream::copy(to, from, bytes, Direction::Any, stream, false);
    [cuMemcpy3DBatchAsync_ptsz]cuMemcpy3DBatchAsync(count: usize, all: Operation, failed: Out<usize>, _flags: u64, stream: Handle) => {
        // Which one: not known.
        failed.put_if_wanted(usize::MAX);
        copy_volumes(all, count, stream)
    };
    [cuMemcpy3DBatchAsync_v2_ptsz]cuMemcpy3DBatchAsync_v2(count: usize, all: Operation, _flags: u64, stream: Handle) => copy_volumes(all, count, stream);
    [cuMemcpy3DWithAttributesAsync_ptsz]cuMemcpy3DWithAttributesAsync(only: Operation, _flags: u64, stream: Handle) => copy_volumes(only, 1, stream);
    [cuMemsetD2D8_v2_ptds]cuMemsetD2D8_v2(to: Address, pitch: usize, value: u8, columns: usize, rows: usize) => set(to, pitch, 1, value.into(), [columns, rows], 0, true);
    [cuMemsetD2D16_v2_ptds]cuMemsetD2D16_v2(to: Address, pitch: usize, value: u16, columns: usize, rows: usize) => set(to, pitch, 2, value.into(), [columns, rows], 0, true);
    [cuMemsetD2D32_v2_ptds]cuMemsetD2D32_v2(to: Address, pitch: usize, value: c_uint, columns: usize, rows: usize) => set(to, pitch, 4, value, [columns, rows], 0, true);
    [cuMemsetD2D8Async_ptsz]cuMemsetD2D8Async(to: Address, pitch: usize, value: u8, columns: usize, rows: usize, stream: Handle) => set(to, pitch, 1, value.into(), [columns, rows], stream, false);
    [cuMemsetD2D16Async_ptsz]cuMemsetD2D16Async(to: Address, pitch: usize, value: u16, columns: usize, rows: usize, stream: Handle) => set(to, pitch, 2, value.into(), [columns, rows], stream, false);
    [cuMemsetD2D32Async_ptsz]cuMemsetD2D32Async(to: Address, pitch: usize, value: c_uint, columns: usize, rows: usize, stream: Handle) => set(to, pitch, 4, value, [columns, rows], stream, false);
}
