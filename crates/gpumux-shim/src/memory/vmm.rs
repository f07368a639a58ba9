//! Physical memory at addresses of ours, by the driver's virtual-memory calls.

use std::{
    ffi::{c_int, c_void},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::ground::{
    context::bits,
    driver::{AllocationProp, CUresult, Location, SUCCESS, functions},
    own::OwnFd,
};

/// Physical memory comes in multiples of this on every device that has these calls.
pub(crate) const GRANULE: u64 = 2 << 20;

/// Size of one piece of physical memory, the least that moves of a large allocation. To make and map one takes 41 µs, to unmap and free it
/// 65 µs (medians of `docs/fidelity.md`): 3% and 5% of the 1.2 ms of its copy. A larger one would save some of that, and move more than is lacking.
pub(crate) const CHUNK: u64 = 64 << 20;

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(crate) const OUT_OF_MEMORY: CUresult = 2;
/// `CUDA_ERROR_NOT_SUPPORTED`: what a driver answers that lacks a call.
pub(crate) const NOT_SUPPORTED: CUresult = 801;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const FILE: c_int = 1;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`
const FILES_SUPPORTED: c_int = 103;

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
pub(crate) const READ_WRITE: c_int = 3;

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) location: Location,
    pub(crate) flags: c_int,
}

functions! {
    mem_address_reserve c"cuMemAddressReserve" (*mut u64, usize, usize, u64, u64);
    mem_address_free c"cuMemAddressFree" (u64, usize);
    mem_create c"cuMemCreate" (*mut u64, usize, *const AllocationProp, u64);
    mem_release c"cuMemRelease" (u64);
    mem_map c"cuMemMap" (u64, usize, usize, u64, u64);
    mem_unmap c"cuMemUnmap" (u64, usize);
    mem_set_access c"cuMemSetAccess" (u64, usize, *const Access, usize);
    mem_export c"cuMemExportToShareableHandle" (*mut c_void, u64, c_int, u64);
    mem_import c"cuMemImportFromShareableHandle" (*mut u64, *mut c_void, c_int);
    mem_properties c"cuMemGetAllocationPropertiesFromHandle" (*mut AllocationProp, u64);
    device_attribute c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
}

/// By device, the devices that reach its memory by peer access, a bit each. A program that ends such access gets no fault for it.
static REACHED_BY: [AtomicU32; u32::BITS as usize] = [const { AtomicU32::new(0) }; 32];

/// Contexts of one device reach the memory of another from now on. Whether both are told apart.
pub(crate) fn let_reach(reaching: c_int, reached: c_int) -> bool {
    let places = usize::try_from(reached).ok();
    let place = places.and_then(|it| REACHED_BY.get(it));
    let bit = u32::try_from(reaching)
        .ok()
        .and_then(|it| 1_u32.checked_shl(it));
    let known = place.zip(bit);
    known
        .map(|(place, bit)| place.fetch_or(bit, Ordering::SeqCst))
        .is_some()
}

/// The devices that reach a device's memory by peer access, a bit each.
pub(crate) fn reached_by(device: c_int) -> u32 {
    let place = usize::try_from(device)
        .ok()
        .and_then(|it| REACHED_BY.get(it));
    place.map_or(0, |it| it.load(Ordering::SeqCst))
}

/// Calls a function of the driver that may be missing.
macro_rules! call {
    ($function:expr, $($arg:expr),*) => {
        match $function {
            // SAFETY: the signature is `cuda.h`'s; pointers are to places that outlive the call.
            Some(function) => match unsafe { function($($arg),*) } {
                SUCCESS => Ok(()),
                error => Err(error),
            },
            None => Err(NOT_SUPPORTED),
        }
    };
}

/// A piece of physical memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) handle: u64,
    pub(crate) bytes: u64,
}

/// Whether physical memory of a device can be passed to other processes.
pub(crate) fn is_shareable(device: c_int) -> bool {
    let mut supported = 0;
    let asked = call!(
        device_attribute(),
        &raw mut supported,
        FILES_SUPPORTED,
        device
    );
    asked.is_ok() && supported != 0
}

/// Reserves addresses.
pub(crate) fn reserve(bytes: u64) -> Result<u64, CUresult> {
    let mut at = 0;
    call!(
        mem_address_reserve(),
        &raw mut at,
        bytes as usize,
        GRANULE as usize,
        0,
        0
    )?;
    Ok(at)
}

/// Gives addresses back, at which nothing is mapped.
pub(crate) fn unreserve(at: u64, bytes: u64) {
    let _: Result<(), CUresult> = call!(mem_address_free(), at, bytes as usize);
}

/// Physical memory of a device as this library makes it.
fn plain(device: c_int) -> AllocationProp {
    let location = Location {
        // `CU_MEM_LOCATION_TYPE_DEVICE`
        kind: 1,
        id: device,
    };
    AllocationProp {
        // `CU_MEM_ALLOCATION_TYPE_PINNED`
        kind: 1,
        location,
        // It costs nothing until it is done.
        handles: if is_shareable(device) { FILE } else { 0 },
        ..AllocationProp::default()
    }
}

/// One piece of physical memory that is mapped nowhere yet; its handle.
pub(crate) fn make(bytes: u64, device: c_int) -> Result<u64, CUresult> {
    create(bytes as usize, &plain(device))
}

/// Maps the same piece of physical memory at so many places after each other.
pub(crate) fn cover(
    at: u64,
    count: u64,
    piece: u64,
    handle: u64,
    device: c_int,
) -> Result<(), CUresult> {
    let undo = |places: u64| (0..places).for_each(|it| unmap(at + it * piece, piece));
    for place in 0..count {
        result(map(at + place * piece, piece as usize, 0, handle, 0))
            .inspect_err(|_| undo(place))?;
    }
    grant(at, count * piece, device).inspect_err(|_| undo(count))
}

/// Puts new physical memory of a device at reserved addresses, in such pieces, all or nothing.
pub(crate) fn back(at: u64, bytes: u64, piece: u64, device: c_int) -> Result<Vec<Chunk>, CUresult> {
    let prop = plain(device);
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut mapped = 0;
    let mut all = || {
        while mapped < bytes {
            let size = piece.min(bytes - mapped);
            let mut handle = 0;
            call!(
                mem_create(),
                &raw mut handle,
                size as usize,
                &raw const prop,
                0
            )?;
            let chunk = Chunk {
                handle,
                bytes: size,
            };
            if let Err(error) = call!(mem_map(), at + mapped, size as usize, 0, handle, 0) {
                let _: Result<(), CUresult> = call!(mem_release(), handle);
                return Err(error);
            }
            chunks.push(chunk);
            mapped += size;
        }
        grant(at, bytes, device)
    };
    match all() {
        Ok(()) => Ok(chunks),
        Err(error) => {
            unback(at, &chunks);
            Err(error)
        }
    }
}

/// A file by which another process can map a piece.
pub(crate) fn export(chunk: &Chunk) -> Result<OwnFd, CUresult> {
    /// `CUDA_ERROR_OPERATING_SYSTEM`
    const OPERATING_SYSTEM: CUresult = 304;
    let mut fd: c_int = -1;
    call!(
        mem_export(),
        (&raw mut fd).cast::<c_void>(),
        chunk.handle,
        FILE,
        0
    )?;
    // SAFETY: the driver has just made it, and nothing else knows of it.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let closes = rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC);
    closes
        .map_err(Into::into)
        .and_then(|()| OwnFd::new(|| Ok(file)))
        .map_err(|_| OPERATING_SYSTEM)
}

/// Maps another process's piece at reserved addresses; it may not be touched there yet. Also where it is, if the driver tells.
pub(crate) fn import(
    at: u64,
    bytes: u64,
    file: impl AsFd,
) -> Result<(Chunk, Option<Location>), CUresult> {
    let mut handle = 0;
    let number = file.as_fd().as_raw_fd() as usize;
    call!(
        mem_import(),
        &raw mut handle,
        ptr::without_provenance_mut(number),
        FILE
    )?;
    let mut prop = AllocationProp::default();
    let known = call!(mem_properties(), &raw mut prop, handle).is_ok();
    match call!(mem_map(), at, bytes as usize, 0, handle, 0) {
        Ok(()) => Ok((Chunk { handle, bytes }, known.then_some(prop.location))),
        Err(error) => {
            let _ = release(handle);
            Err(error)
        }
    }
}

/// Lets a device reach mappings of its memory, and those that have peer access to it.
pub(crate) fn grant(at: u64, bytes: u64, device: c_int) -> Result<(), CUresult> {
    let peers = bits(reached_by(device).into()).map(|it| it as c_int);
    let all = std::iter::once(device).chain(peers.filter(|it| *it != device));
    let access: Vec<Access> = all
        .map(|id| Access {
            location: Location { kind: 1, id },
            flags: READ_WRITE,
        })
        .collect();
    call!(
        mem_set_access(),
        at,
        bytes as usize,
        access.as_ptr(),
        access.len()
    )
}

/// Lets the device of this location reach mappings.
pub(crate) fn set_access(at: u64, bytes: usize, location: Location) -> CUresult {
    let access = Access {
        location,
        flags: READ_WRITE,
    };
    number(call!(mem_set_access(), at, bytes, &raw const access, 1))
}

/// Physical memory as it is asked for; its handle.
pub(crate) fn create(bytes: usize, prop: &AllocationProp) -> Result<u64, CUresult> {
    let mut handle = 0;
    call!(mem_create(), &raw mut handle, bytes, ptr::from_ref(prop), 0)?;
    Ok(handle)
}

/// `cuMemRelease`
pub(crate) fn release(handle: u64) -> CUresult {
    number(call!(mem_release(), handle))
}

/// `cuMemMap`
pub(crate) fn map(at: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> CUresult {
    number(call!(mem_map(), at, bytes, offset, handle, flags))
}

/// `cuMemUnmap`
pub(crate) fn unmap(at: u64, bytes: u64) {
    let _: Result<(), CUresult> = call!(mem_unmap(), at, bytes as usize);
}

fn number(result: Result<(), CUresult>) -> CUresult {
    result.err().unwrap_or(SUCCESS)
}

fn result(number: CUresult) -> Result<(), CUresult> {
    match number {
        SUCCESS => Ok(()),
        error => Err(error),
    }
}

/// Takes physical memory away and lets go of it; the addresses stay reserved. Nothing may be using it.
pub(crate) fn unback(at: u64, chunks: &[Chunk]) {
    let mut address = at;
    for chunk in chunks {
        let _: Result<(), CUresult> = call!(mem_unmap(), address, chunk.bytes as usize);
        let _: Result<(), CUresult> = call!(mem_release(), chunk.handle);
        address += chunk.bytes;
    }
}
