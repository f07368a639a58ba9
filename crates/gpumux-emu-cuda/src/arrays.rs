//! Arrays: device memory behind a handle, row by row. Nothing samples them, as there are no textures.

use std::{
    ffi::{c_int, c_uint},
    sync::{Arc, Weak},
};

use crate::{
    border::{In, Out, cuda, exports},
    context::{Context, current},
    device,
    error::{CuError, Result},
    memory,
    process::Registry,
};

type Handle = usize;

/// `CUDA_ARRAY3D_LAYERED`, and the flags of arrays whose memory comes from elsewhere (deferred, sparse).
const LAYERED: c_uint = 1;
const UNBACKED: c_uint = 0x40 | 0x80;

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    extent: [usize; 3],
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct FlatShape {
    extent: [usize; 2],
    format: c_int,
    channels: c_uint,
}

impl Shape {
    fn flat(it: FlatShape) -> Self {
        Self {
            extent: [it.extent[0], it.extent[1], 0],
            format: it.format,
            channels: it.channels,
            flags: 0,
        }
    }

    /// Bytes of an element.
    fn element(&self) -> Result<u64> {
        let channel = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            0x03 | 0x0a | 0x20 => 4,
            _ => return Err(CuError::NOT_SUPPORTED),
        };
        match self.channels {
            1 | 2 | 4 => Ok(channel * u64::from(self.channels)),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    /// That of a mipmapped array's level: layers stay.
    fn level(&self, level: u32) -> Self {
        let smaller = |size: usize| if size == 0 { 0 } else { (size >> level).max(1) };
        let [width, height, depth] = self.extent;
        let depth = if self.flags & LAYERED != 0 {
            depth
        } else {
            smaller(depth)
        };
        Self {
            extent: [smaller(width), smaller(height), depth],
            ..*self
        }
    }
}

/// An array, or a level of a mipmapped one.
pub(crate) struct Array {
    context: Weak<Context>,
    shape: Shape,
    /// Its memory, row behind row.
    at: u64,
    pub(crate) pitch: u64,
    pub(crate) rows: u64,
    pub(crate) slices: u64,
    /// A level, which goes with the whole.
    part: bool,
}

impl Array {
    fn new(context: &Arc<Context>, shape: Shape) -> Result<Self> {
        let [width, height, depth] = shape.extent.map(|size| size as u64);
        if width == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        if shape.flags & UNBACKED != 0 {
            return Err(CuError::NOT_SUPPORTED);
        }
        let pitch = width.checked_mul(shape.element()?);
        Ok(Self {
            context: Arc::downgrade(context),
            shape,
            at: 0,
            pitch: pitch.ok_or(CuError::INVALID_VALUE)?,
            rows: height.max(1),
            slices: depth.max(1),
            part: false,
        })
    }

    fn bytes(&self) -> Result<u64> {
        let rows = self.pitch.checked_mul(self.rows);
        rows.and_then(|bytes| bytes.checked_mul(self.slices))
            .ok_or(CuError::INVALID_VALUE)
    }

    /// Where its memory is.
    pub(crate) fn memory(&self) -> Result<u64> {
        match self.context.upgrade() {
            Some(_) => Ok(self.at),
            None => Err(CuError::CONTEXT_IS_DESTROYED),
        }
    }

    fn free(&self) -> Result {
        // It went with its context.
        self.memory().map_or(Ok(()), device::free_memory)
    }
}

pub(crate) static ARRAYS: Registry<Array> = Registry::new();
/// The levels of each mipmapped array.
static MIPMAPPED: Registry<Vec<Handle>> = Registry::new();

/// Makes arrays in one allocation.
fn make(shapes: impl Iterator<Item = Shape>) -> Result<Vec<Array>> {
    let context = current()?;
    context.check()?;
    let mut bytes = 0_u64;
    let mut arrays = Vec::new();
    for shape in shapes {
        let mut array = Array::new(&context, shape)?;
        (array.at, array.part) = (bytes, true);
        let more = bytes.checked_add(array.bytes()?);
        bytes = more.ok_or(CuError::INVALID_VALUE)?;
        arrays.push(array);
    }
    let at = memory::alloc(context.device.index, context.handle(), bytes)?;
    for array in &mut arrays {
        array.at += at;
    }
    Ok(arrays)
}

fn create(shape: Shape) -> Result<Handle> {
    let mut made = make(std::iter::once(shape))?;
    let mut array = made.pop().ok_or(CuError::INVALID_VALUE)?;
    array.part = false;
    Ok(ARRAYS.add(Arc::new(array)))
}

fn create_mipmapped(shape: Shape, levels: c_uint) -> Result<Handle> {
    let most = shape.extent.into_iter().max().unwrap_or(0).checked_ilog2();
    let levels = levels.min(most.ok_or(CuError::INVALID_VALUE)? + 1).max(1);
    let made = make((0..levels).map(|level| shape.level(level)))?;
    let handles = made.into_iter().map(|array| ARRAYS.add(Arc::new(array)));
    Ok(MIPMAPPED.add(Arc::new(handles.collect())))
}

fn destroy(handle: Handle) -> Result {
    if ARRAYS.get(handle)?.part {
        return Err(CuError::INVALID_HANDLE);
    }
    ARRAYS.remove(handle)?.free()
}

fn destroy_mipmapped(handle: Handle) -> Result {
    let mut freed = Ok(());
    for (level, handle) in MIPMAPPED.remove(handle)?.iter().enumerate() {
        let array = ARRAYS.remove(*handle)?;
        if level == 0 {
            freed = array.free();
        }
    }
    freed
}

exports! { FUNCTIONS by cuda;
    cuArrayCreate_v2(array: Out<Handle>, shape: In<FlatShape>) => {
        array.check()?;
        array.put(create(Shape::flat(shape.get()?))?)
    };
    cuArray3DCreate_v2(array: Out<Handle>, shape: In<Shape>) => {
        array.check()?;
        array.put(create(shape.get()?)?)
    };
    cuArrayGetDescriptor_v2(shape: Out<FlatShape>, array: Handle) => {
        let Shape { extent: [width, height, _], format, channels, .. } = ARRAYS.get(array)?.shape;
        shape.put(FlatShape { extent: [width, height], format, channels })
    };
    cuArray3DGetDescriptor_v2(shape: Out<Shape>, array: Handle) => shape.put(ARRAYS.get(array)?.shape);
    cuArrayDestroy(array: Handle) => destroy(array);
    cuMipmappedArrayCreate(array: Out<Handle>, shape: In<Shape>, levels: c_uint) => {
        array.check()?;
        array.put(create_mipmapped(shape.get()?, levels)?)
    };
    cuMipmappedArrayGetLevel(array: Out<Handle>, mipmapped: Handle, level: c_uint) => {
        let levels = MIPMAPPED.get(mipmapped)?;
        array.put(*levels.get(level as usize).ok_or(CuError::INVALID_VALUE)?)
    };
    cuMipmappedArrayDestroy(array: Handle) => destroy_mipmapped(array);
}
