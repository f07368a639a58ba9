//! Elastic ranges (`include/gpumux.h`): addresses that are reserved once, and memory behind the granules that the program needs now.
//!
//! A range is a block ([`crate::memory::block`]) whose chunks are its granules. So memory in use moves as any other, and what the
//! table ([`crate::memory::granules`]) calls free or cached is dropped instead of copied. At the daemon's order the agent takes such granules
//! without the program: the gate is closed and the compute groups are frozen then, so that nothing meets an address that is being
//! mapped anew.

use std::{
    ffi::{c_int, c_uint, c_void},
    time::{Duration, Instant},
};

use crate::{
    ground::{
        context::{is_capturing_anywhere, within},
        driver::CUresult,
        gate, wake,
    },
    memory::{
        allocate,
        answers::{DONE, FULL, LATER, NO_CONTEXT, REFUSED, UNKNOWN, own_context},
        attempt::{self, Refused},
        block::{Block, Departed, Elastic},
        granules::{CACHED, FREE, IN_USE, OUT, Table, is_settable},
        ranges, reports,
        space::{self, Part, with},
        targets,
        vmm::{self, CHUNK, GRANULE, OUT_OF_MEMORY},
    },
    work,
};

/// Size of a granule where the program names none.
const DEFAULT: u64 = 16 << 20;
/// Largest range.
const LARGEST: u64 = 1 << 46;
/// How long a call that needs no memory of others waits for the process's own.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a segment waits for memory that others have.
const SEGMENT: Duration = Duration::from_secs(30);
/// A segment has as small granules as it can have without having more than so many.
const MANY: u64 = 4096;
/// A request that waited for less than this may be refused although there is room: the daemon was not done.
const SOON: Duration = Duration::from_millis(30);

// ---- The program's side --------------------------------------------------------------------------

/// `gpumux_range_new`
fn new(device: c_int, bytes: u64, granule: u64, until: Instant) -> Result<Table, c_int> {
    let granule = if granule == 0 { DEFAULT } else { granule };
    let bytes = bytes.checked_next_multiple_of(granule).unwrap_or(0);
    let fits = (GRANULE..=CHUNK).contains(&granule) && granule.is_multiple_of(GRANULE);
    if !fits || bytes == 0 || bytes > LARGEST {
        return Err(UNKNOWN);
    }
    let context = own_context(device)?;
    let left = until.saturating_duration_since(Instant::now());
    if !space::take_within(left, device, granule, true, None) {
        return Err(FULL);
    }
    let made = attempt::make(Some(until), || {
        let made = gate::through_by(until, || make(device, context, bytes, granule));
        made.unwrap_or(Err(OUT_OF_MEMORY))
    });
    made.map_err(|refused| {
        space::give(device, granule, true);
        answer(refused.error())
    })
}

const fn answer(error: CUresult) -> c_int {
    match error {
        OUT_OF_MEMORY => LATER,
        _ => REFUSED,
    }
}

fn make(device: c_int, context: u64, bytes: u64, granule: u64) -> Result<Table, CUresult> {
    let at = vmm::reserve(bytes)?;
    let undo = |_: &CUresult| vmm::unreserve(at, bytes);
    let scratch = vmm::make(granule, device).inspect_err(undo)?;
    let undo = |error: CUresult| {
        let _ = vmm::release(scratch);
        vmm::unreserve(at, bytes);
        error
    };
    vmm::cover(at, bytes / granule, granule, scratch, device).map_err(undo)?;
    let table = Table::new(at, bytes, granule).map_err(|_| {
        (0..bytes / granule).for_each(|it| vmm::unmap(at + it * granule, granule));
        undo(OUT_OF_MEMORY)
    })?;
    reports::begin();
    with(|space| {
        let elastic = Elastic { table, scratch };
        let block = Block::elastic((bytes, device, context), granule, elastic);
        space.blocks.insert(at, block);
        ranges::add(at, bytes, at, context);
    });
    Ok(table)
}

/// A range of granules of a table, if it has them.
fn part(address: u64, first: u64, count: u64) -> Option<(Table, std::ops::Range<usize>)> {
    let table = (!space::off()).then(|| Table::of(address)).flatten()?;
    let end = first.checked_add(count)?;
    (end <= table.granules() as u64).then_some((table, first as usize..end as usize))
}

/// Of a range: its device, what is mapped where nothing is, and whether it stays where it is.
fn about(address: u64) -> Option<(c_int, u64, bool)> {
    with(|space| {
        let block = space.blocks.get(&address)?;
        Some((block.device, block.elastic?.scratch, block.stays()))
    })
}

/// Neighbours among these, which are in order, as ranges.
fn runs(indices: &[usize]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for index in indices {
        match runs.last_mut() {
            Some(run) if run.end == *index => run.end += 1,
            _ => runs.push(*index..index + 1),
        }
    }
    runs
}

/// `gpumux_commit`, `gpumux_commit_part`
fn commit(address: u64, (first, count): (u64, u64), wait: Duration, of: Option<Part>) -> c_int {
    let Some((table, range)) = part(address, first, count) else {
        return UNKNOWN;
    };
    let Some((device, scratch, stays)) = about(address) else {
        return UNKNOWN;
    };
    let deadline = Instant::now() + wait;
    let committed = attempt::in_time(Some(deadline), || {
        let lacking = range.clone().filter(|it| table.state(*it) == OUT).count() as u64;
        let need = lacking * table.granule();
        // What of them is free or cached is not to be taken for this request.
        let _wanting = (need > 0).then(|| table.want(range.clone()));
        let left = deadline.saturating_duration_since(Instant::now());
        if (need > 0 || of.is_some()) && !space::take_within(left, device, need, stays, of) {
            return Err(Refused::ByAccounting);
        }
        let mut made = 0;
        let backed = attempt::make(Some(deadline), || {
            let range = range.clone();
            gate::through_by(deadline, || {
                back(table, range, device, scratch, need, &mut made)
            })
            .unwrap_or(Ok(LATER))
        });
        // Another thread was first, or it was not made.
        space::give(device, need - made, stays);
        // The others have their parts and ask no more: it would wait alone, and keep these from others meanwhile.
        match backed {
            Err(Refused::ByDriver(OUT_OF_MEMORY)) if of.is_some() => Ok(LATER),
            backed => backed,
        }
    });
    let early = Instant::now() < deadline && of.is_none();
    if matches!(committed, Err(Refused::ByAccounting)) && (early || wait >= SOON) {
        // It holds no more than this now.
        targets::lower(device, 0);
    }
    match committed {
        Ok(answer) => answer,
        // That of another part may be only for now.
        Err(Refused::ByAccounting) if early => FULL,
        Err(refused) => answer(refused.error()),
    }
}

/// Puts memory, of no more than so many bytes, behind what has none, all or nothing; what has some is in use from now on.
fn back(
    table: Table,
    range: std::ops::Range<usize>,
    device: c_int,
    scratch: u64,
    most: u64,
    made: &mut u64,
) -> Result<c_int, CUresult> {
    let (address, granule) = (table.address(), table.granule());
    let most = (most / granule) as usize;
    let own: Vec<usize> = (range.clone())
        .filter(|it| table.grab(*it, OUT))
        .take(most)
        .collect();
    let mut filled: Vec<usize> = Vec::new();
    for run in runs(&own) {
        let at = address + run.start as u64 * granule;
        let bytes = run.len() as u64 * granule;
        (0..run.len() as u64).for_each(|it| vmm::unmap(at + it * granule, granule));
        match vmm::back(at, bytes, granule, device) {
            Ok(chunks) => {
                with(|space| {
                    if let Some(block) = space.blocks.get_mut(&address) {
                        block.arrived(run.start, chunks);
                    }
                });
                run.clone().for_each(|it| table.fill(it));
                filled.extend(run);
            }
            Err(error) => {
                let _ = vmm::cover(at, run.len() as u64, granule, scratch, device);
                own.iter().for_each(|it| table.put_back(*it));
                let _ = vacate(table, &filled);
                return Err(error);
            }
        }
    }
    *made = own.len() as u64 * granule;
    let settled = range.clone().all(|it| {
        table.state(it) == IN_USE
            || table.exchange(it, FREE, IN_USE)
            || table.exchange(it, CACHED, IN_USE)
    });
    // Lost meanwhile: the program may try again.
    Ok(if settled { DONE } else { LATER })
}

/// `gpumux_segment`: the address of a range that is all in use.
fn segment(device: c_int, bytes: u64) -> Option<u64> {
    let until = Instant::now() + SEGMENT;
    let make = || {
        let mut small = [GRANULE, 2 * GRANULE, 4 * GRANULE].into_iter();
        let granule = small.find(|it| bytes / it <= MANY).unwrap_or(DEFAULT);
        let table = new(device, bytes, granule, until).ok()?;
        let (address, count) = (table.address(), table.granules() as u64);
        let left = until.saturating_duration_since(Instant::now());
        let made = commit(address, (0, count), left, None) == DONE;
        if !made {
            let _ = allocate::free(address, || OUT_OF_MEMORY);
        }
        made.then_some(address)
    };
    match own_context(device) {
        // The thread has no current context, or one of another device.
        Err(NO_CONTEXT) => within(work::primary_context(device)?, make)?,
        _ => make(),
    }
}

/// Takes the memory from behind these, which nothing may be using; bytes that have come free.
fn vacate(table: Table, indices: &[usize]) -> u64 {
    let address = table.address();
    let settable = [IN_USE, FREE, CACHED];
    let own = indices.iter().copied();
    let own = own.filter(|it| settable.iter().any(|state| table.grab(*it, *state)));
    let departed: Vec<Departed> = with(|space| {
        let own = own.filter_map(|index| {
            let departed = space
                .blocks
                .get_mut(&address)?
                .left(address, index, vec![])?;
            Some(departed)
        });
        own.collect()
    });
    departed.iter().for_each(Departed::free);
    departed.iter().map(Departed::dropped).sum()
}

/// `gpumux_decommit`
fn decommit(address: u64, first: u64, count: u64) -> c_int {
    let Some((table, range)) = part(address, first, count) else {
        return UNKNOWN;
    };
    let Some((device, _, stays)) = about(address) else {
        return UNKNOWN;
    };
    if is_capturing_anywhere() {
        return LATER;
    }
    let indices: Vec<usize> = range.collect();
    let freed = gate::through_by(Instant::now() + PATIENCE, || vacate(table, &indices));
    let Some(freed) = freed else {
        return LATER;
    };
    space::give(device, freed, stays);
    DONE
}

/// `gpumux_mark`: how many are not in this state now.
fn mark(address: u64, first: u64, count: u64, state: u32) -> i64 {
    let Some((table, range)) = part(address, first, count) else {
        return UNKNOWN.into();
    };
    if !is_settable(state) {
        return UNKNOWN.into();
    }
    let set = || {
        let lost = range.filter(|it| {
            let from = [IN_USE, FREE, CACHED];
            !from.iter().any(|from| table.exchange(*it, *from, state))
        });
        lost.count() as i64
    };
    match state {
        // What is chosen to move without its contents shall not come into use before it has moved.
        IN_USE => gate::through_by(Instant::now() + PATIENCE, set).unwrap_or(count as i64),
        _ => {
            let lost = set();
            if reports::is_due() {
                wake::agent();
            }
            lost
        }
    }
}

fn guarded<R>(failed: R, work: impl FnOnce() -> R + std::panic::UnwindSafe) -> R {
    std::panic::catch_unwind(work).unwrap_or(failed)
}

/// See `include/gpumux.h`.
///
/// # Safety
/// `range` must be a place for a pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn gpumux_range_new(
    device: c_int,
    bytes: u64,
    granule: u64,
    range: *mut *const c_void,
) -> c_int {
    if range.is_null() {
        return UNKNOWN;
    }
    match guarded(Err(REFUSED), || {
        new(device, bytes, granule, Instant::now() + PATIENCE)
    }) {
        Ok(table) => {
            // SAFETY: the caller's place, which is not null.
            unsafe { *range = table.pointer() };
            DONE
        }
        Err(answer) => answer,
    }
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_range_free(address: u64) -> c_int {
    guarded(UNKNOWN, || {
        if space::off() || Table::of(address).is_none() {
            return UNKNOWN;
        }
        let _ = allocate::free(address, || OUT_OF_MEMORY);
        DONE
    })
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_segment(bytes: i64, device: c_int, _stream: *mut c_void) -> u64 {
    let bytes = u64::try_from(bytes).unwrap_or(0);
    guarded(0, || segment(device, bytes).unwrap_or(0))
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_commit(address: u64, first: u64, count: u64, wait_ms: c_uint) -> c_int {
    let wait = Duration::from_millis(wait_ms.into());
    guarded(REFUSED, || commit(address, (first, count), wait, None))
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_commit_part(
    address: u64,
    first: u64,
    count: u64,
    wait_ms: c_uint,
    of: u64,
    parts: c_uint,
) -> c_int {
    let wait = Duration::from_millis(wait_ms.into());
    guarded(REFUSED, || {
        commit(address, (first, count), wait, Some((of, parts)))
    })
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_decommit(address: u64, first: u64, count: u64) -> c_int {
    guarded(UNKNOWN, || decommit(address, first, count))
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_mark(address: u64, first: u64, count: u64, state: c_int) -> i64 {
    let state = u32::try_from(state).unwrap_or(OUT);
    guarded(UNKNOWN.into(), || mark(address, first, count, state))
}

// ---- The agent's side ----------------------------------------------------------------------------

/// Frees so much of a device that needs no copy: granules without contents first, then caches, each from the highest address.
pub(crate) fn take(uuid: &str, bytes: u64) -> Result<(), String> {
    let device = space::ordinal(uuid).ok_or_else(|| format!("it has no memory of {uuid}"))?;
    let departed = with(|space| {
        let all = space.blocks.iter().filter(|(_, it)| it.device == device);
        let all = all.filter_map(|(at, it)| {
            let table = it.elastic.filter(|_| !it.stays())?.table;
            let resident: Vec<usize> = it.resident().map(|(index, _)| index).collect();
            Some((*at, it.context, table, resident))
        });
        let all: Vec<_> = all.collect();
        let (mut departed, mut freed) = (Vec::new(), 0);
        // What a request waits for goes last: the program would only ask for it again.
        let order = [false, true].into_iter();
        for (wanted, state) in order.flat_map(|it| [(it, FREE), (it, CACHED)]) {
            for (at, context, table, resident) in &all {
                let wants = table.wanted();
                for index in resident.iter().rev() {
                    if freed < bytes
                        && wants.iter().any(|it| it.contains(index)) == wanted
                        && table.grab(*index, state)
                        && let Some(one) = space.leave(*at, *index, Vec::new())
                    {
                        freed += one.dropped();
                        departed.push((*context, one));
                    }
                }
            }
        }
        departed
    });
    for (context, one) in &departed {
        let _ = within(*context, || one.free());
    }
    targets::lower(device, 0);
    space::report();
    Ok(())
}

/// Reports what has changed, now and then; how soon the agent is to look again at the latest.
pub(crate) fn look(settles: Option<Duration>) -> Option<Duration> {
    if !reports::is_needed() {
        return settles;
    }
    targets::raise();
    if reports::is_due() {
        space::report();
    }
    Some(settles.map_or(reports::PERIOD, |it| it.min(reports::PERIOD)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_mapped_at_once() {
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), [0..3, 5..6, 7..9]);
    }
}
