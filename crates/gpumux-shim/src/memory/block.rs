//! Memory that this library maps, and which of it is on the device.
//!
//! A block is a range of addresses with physical memory in chunks ([`vmm::CHUNK`]). Each chunk leaves and comes back by itself, so that a
//! large allocation gives up what others lack and no more. While any of it is away, no thread of the program passes the gate, and
//! the program's kernels are frozen: to them a block is always whole.

use std::{collections::BTreeMap, ffi::c_int, ops::Range};

use crate::memory::{
    granules::{self, Table},
    vmm::{self, CHUNK, Chunk},
};

/// Contents are copied in multiples of this. The driver has small copies made by the compute group itself, which
/// is frozen then: they would not end.
pub(crate) const GRAIN: u64 = 1 << 20;
/// The host address of contents that were not kept.
pub(crate) const NOWHERE: usize = 0;

/// What a program says of a range (`gpumux.h`): its contents count; it is rarely used, so it is moved before
/// others; its contents need not survive a move.
const KEEP: c_int = 0;
const COLD: c_int = 1;
const DISCARDABLE: c_int = 2;
/// The answers.
const DONE: c_int = 0;
const LOST: c_int = 1;
pub(crate) const UNKNOWN: c_int = -1;

/// Memory mapped by this library.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) bytes: u64,
    pub(crate) device: c_int,
    pub(crate) context: u64,
    /// In the order of their addresses; all but the last are of `piece` bytes.
    chunks: Vec<Slot>,
    /// [`CHUNK`]; of an elastic range its granule.
    pub(crate) piece: u64,
    /// The program says which chunks have memory.
    pub(crate) elastic: Option<Elastic>,
    /// The program has taken hold of the physical memory: it stays.
    pub(crate) pinned: bool,
    /// How many exports of it other processes have open: it stays for so long.
    pub(crate) shared: u32,
    /// It outlives its mapping: bytes of one of its halves (see [`crate::memory::keep`]). It is counted as long as that is so.
    pub(crate) kept: Option<u64>,
    /// Ranges by offset whose contents need not be kept, and whether they are lost.
    discardable: BTreeMap<u64, (u64, bool)>,
    /// Of a shared block: free ranges by offset.
    pub(crate) free: Option<BTreeMap<u64, u64>>,
}

/// What an elastic range has besides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elastic {
    pub(crate) table: Table,
    /// Handle of the memory, one granule, that is mapped wherever there is no other: so that a stray access is no fault.
    pub(crate) scratch: u64,
}

/// A chunk's part of a block.
#[derive(Debug)]
struct Slot {
    place: Place,
    /// Moved before others.
    cold: bool,
}

/// Where the contents of a chunk are.
#[derive(Debug)]
enum Place {
    Device(Chunk),
    /// Host addresses and lengths; at [`NOWHERE`]: they were discarded.
    Host(Vec<(usize, usize)>),
    /// There is no memory; of an elastic range, the scratch page.
    Out,
}

/// A part of a block that leaves the device.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Departure {
    /// All of it in order, in lengths: whether the contents must be kept.
    pub(crate) sections: Vec<(usize, bool)>,
    /// The offsets of ranges that are lost from now on.
    pub(crate) lost: Vec<u64>,
}

/// Neighbouring chunks that are away.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    /// The first of them.
    pub(crate) first: usize,
    /// Offset in the block, and length.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Where their contents are.
    pub(crate) host: Vec<(usize, usize)>,
}

/// A chunk that has left the device.
#[derive(Debug)]
pub(crate) struct Departed {
    at: u64,
    pub(crate) chunk: Chunk,
    /// Nothing of it was kept: what is mapped in its place, of which device.
    scratch: Option<(u64, c_int)>,
}

impl Departed {
    /// Lets go of the physical memory, which nothing may be using.
    pub(crate) fn free(&self) {
        vmm::unback(self.at, &[self.chunk]);
        if let Some((scratch, device)) = self.scratch {
            // Without it a stray access is a fault, as with any freed memory.
            let _ = vmm::cover(self.at, 1, self.chunk.bytes, scratch, device);
        }
    }

    /// Bytes that are the process's no longer.
    pub(crate) fn dropped(&self) -> u64 {
        self.scratch.map_or(0, |_| self.chunk.bytes)
    }
}

impl Block {
    /// Memory that was just mapped.
    pub(crate) fn new(
        (bytes, device, context): (u64, c_int, u64),
        chunks: Vec<Chunk>,
        free: Option<BTreeMap<u64, u64>>,
    ) -> Self {
        let slot = |chunk| Slot {
            place: Place::Device(chunk),
            cold: false,
        };
        Self {
            bytes,
            device,
            context,
            chunks: chunks.into_iter().map(slot).collect(),
            piece: CHUNK,
            elastic: None,
            pinned: false,
            shared: 0,
            kept: None,
            discardable: BTreeMap::new(),
            free,
        }
    }

    /// One piece of memory that stays where it is.
    pub(crate) fn whole((device, context): (c_int, u64), chunk: Chunk) -> Self {
        Self {
            piece: chunk.bytes,
            pinned: true,
            ..Self::new((chunk.bytes, device, context), vec![chunk], None)
        }
    }

    /// Addresses at which there is nothing but the scratch page.
    pub(crate) fn elastic(
        (bytes, device, context): (u64, c_int, u64),
        piece: u64,
        elastic: Elastic,
    ) -> Self {
        let slot = |_| Slot {
            place: Place::Out,
            cold: false,
        };
        Self {
            chunks: (0..bytes / piece).map(slot).collect(),
            piece,
            elastic: Some(elastic),
            ..Self::new((bytes, device, context), Vec::new(), None)
        }
    }

    /// Bytes that are on the device or on the host.
    pub(crate) fn held(&self) -> u64 {
        let there = (self.chunks.iter().enumerate())
            .filter(|(_, slot)| !matches!(slot.place, Place::Out))
            .map(|(index, _)| self.span(index));
        there.map(|span| span.end - span.start).sum()
    }

    /// Whether it stays where it is.
    pub(crate) const fn stays(&self) -> bool {
        self.pinned || self.shared > 0
    }

    /// Offsets of a chunk.
    pub(crate) fn span(&self, index: usize) -> Range<u64> {
        let begin = index as u64 * self.piece;
        begin..(begin + self.piece).min(self.bytes)
    }

    /// The physical memory of a chunk, unless it is away.
    pub(crate) fn chunk(&self, index: usize) -> Option<Chunk> {
        match self.chunks.get(index)?.place {
            Place::Device(chunk) => Some(chunk),
            Place::Host(_) | Place::Out => None,
        }
    }

    /// The chunks that are on the device, and whether the program rarely uses them.
    pub(crate) fn resident(&self) -> impl Iterator<Item = (usize, bool)> {
        let slots = self.chunks.iter().enumerate();
        slots.filter_map(|(n, slot)| {
            matches!(slot.place, Place::Device(_)).then_some((n, slot.cold))
        })
    }

    /// Bytes that are on the host.
    pub(crate) fn away(&self) -> u64 {
        self.gaps().iter().map(|gap| gap.bytes).sum()
    }

    /// What is away.
    pub(crate) fn gaps(&self) -> Vec<Gap> {
        let mut gaps: Vec<Gap> = Vec::new();
        for (index, slot) in self.chunks.iter().enumerate() {
            let (Place::Host(host), span) = (&slot.place, self.span(index)) else {
                continue;
            };
            match gaps.last_mut() {
                Some(gap) if gap.offset + gap.bytes == span.start => {
                    gap.bytes += span.end - span.start;
                    gap.host.extend(host);
                }
                _ => gaps.push(Gap {
                    first: index,
                    offset: span.start,
                    bytes: span.end - span.start,
                    host: host.clone(),
                }),
            }
        }
        gaps
    }

    /// Frees the physical memory. Nothing may be using it.
    pub(crate) fn unback(&self, at: u64) {
        for (index, _) in self.resident() {
            if let Some(chunk) = self.chunk(index) {
                vmm::unback(at + self.span(index).start, &[chunk]);
            }
        }
        let Some(Elastic { table, scratch }) = self.elastic else {
            return;
        };
        table.end();
        for (index, slot) in self.chunks.iter().enumerate() {
            if matches!(slot.place, Place::Out) {
                vmm::unmap(at + self.span(index).start, self.piece);
            }
        }
        let _ = vmm::release(scratch);
    }

    /// Whether nothing of a chunk must be kept, at this moment.
    pub(crate) fn is_droppable(&self, index: usize) -> bool {
        self.elastic.is_some_and(|it| it.table.is_droppable(index))
    }

    /// Bytes on the device that are free, and those that are a cache.
    pub(crate) fn droppable(&self) -> (u64, u64) {
        let Some(Elastic { table, .. }) = self.elastic.filter(|_| !self.stays()) else {
            return (0, 0);
        };
        let wanted = table.wanted();
        let counts = |n: &usize| !wanted.iter().any(|it| it.contains(n));
        let of = |state| {
            let alike = self.resident();
            let alike = alike.filter(|(n, _)| table.state(*n) == state && counts(n));
            alike.count() as u64 * self.piece
        };
        (of(granules::FREE), of(granules::CACHED))
    }

    /// A granule that was taken from the program's reach loses its memory, which is to be freed.
    pub(crate) fn drop_granule(&mut self, index: usize) -> Option<Chunk> {
        let place = &mut self.chunks.get_mut(index)?.place;
        match std::mem::replace(place, Place::Out) {
            Place::Device(chunk) => Some(chunk),
            other => {
                *place = other;
                None
            }
        }
    }

    // ---- Moving ----------------------------------------------------------------------------------

    /// Bytes of a chunk that must be kept when it moves.
    pub(crate) fn kept(&self, index: usize) -> u64 {
        if self.is_droppable(index) {
            return 0;
        }
        let span = self.span(index);
        let before_end = self.discardable.range(..span.end).rev();
        let inside = before_end.map(|(offset, (length, _))| {
            (*offset).max(span.start)..(offset + length).min(span.end)
        });
        // They do not overlap: before one that ends before the chunk, all do.
        let inside = inside.take_while(|it| it.start < it.end);
        let dropped = inside.filter_map(|it| whole_grains(it.start, it.end - it.start));
        span.end - span.start - dropped.map(|it| it.end - it.start).sum::<u64>()
    }

    /// A chunk is about to leave: what of it must be copied.
    pub(crate) fn leave(&mut self, index: usize) -> Departure {
        let span = self.span(index);
        if self
            .elastic
            .is_some_and(|it| it.table.grab_droppable(index))
        {
            return Departure {
                sections: vec![((span.end - span.start) as usize, false)],
                lost: vec![span.start],
            };
        }
        // Of a range that reaches into other chunks, only this part is lost.
        self.split(span.start);
        self.split(span.end);
        let (mut sections, mut lost) = (Vec::new(), Vec::new());
        let mut done = span.start;
        for (offset, (length, is_lost)) in self.discardable.range_mut(span.clone()) {
            let Some(dropped) = whole_grains(*offset, *length) else {
                continue;
            };
            if !std::mem::replace(is_lost, true) {
                lost.push(*offset);
            }
            sections.push(((dropped.start - done) as usize, true));
            sections.push(((dropped.end - dropped.start) as usize, false));
            done = dropped.end;
        }
        sections.push(((span.end - done) as usize, true));
        sections.retain(|(length, _)| *length > 0);
        Departure { sections, lost }
    }

    /// It did not leave after all: these ranges were not lost.
    pub(crate) fn stay(&mut self, lost: &[u64]) {
        if let Some(Elastic { table, .. }) = self.elastic {
            let granules = lost.iter().map(|offset| (offset / self.piece) as usize);
            return granules.for_each(|index| table.put_back(index));
        }
        for offset in lost {
            if let Some((_, is_lost)) = self.discardable.get_mut(offset) {
                *is_lost = false;
            }
        }
    }

    /// A chunk of the block at this address has left. Its physical memory, which is to be freed.
    pub(crate) fn left(
        &mut self,
        at: u64,
        index: usize,
        host: Vec<(usize, usize)>,
    ) -> Option<Departed> {
        let at = at + self.span(index).start;
        if let Some(Elastic { table, scratch }) = self.elastic
            && table.is_grabbed(index)
        {
            let Some(chunk) = self.drop_granule(index) else {
                table.put_back(index);
                return None;
            };
            table.lose(index);
            return Some(Departed {
                at,
                chunk,
                scratch: Some((scratch, self.device)),
            });
        }
        let place = &mut self.chunks.get_mut(index)?.place;
        match std::mem::replace(place, Place::Host(host)) {
            Place::Device(chunk) => Some(Departed {
                at,
                chunk,
                scratch: None,
            }),
            Place::Host(_) | Place::Out => None,
        }
    }

    /// Chunks are back, in this physical memory.
    pub(crate) fn arrived(&mut self, first: usize, chunks: Vec<Chunk>) {
        for (slot, chunk) in self.chunks.iter_mut().skip(first).zip(chunks) {
            slot.place = Place::Device(chunk);
        }
    }

    /// What is away does not come back. How many bytes that is.
    pub(crate) fn forget_away(&mut self) -> u64 {
        let bytes = self.away();
        let slots = self.chunks.iter_mut().map(|slot| &mut slot.place);
        let away = slots.filter(|place| matches!(place, Place::Host(_)));
        away.for_each(|place| *place = Place::Out);
        bytes
    }

    // ---- What the program says of it -------------------------------------------------------------

    /// `gpumux_advise`
    pub(crate) fn advise(&mut self, range: Range<u64>, advice: c_int) -> c_int {
        match advice {
            // Its table has the same.
            KEEP | DISCARDABLE if self.elastic.is_some() => UNKNOWN,
            KEEP => {
                self.set_cold(&range, false);
                if self.keep(&range) { LOST } else { DONE }
            }
            COLD => {
                self.set_cold(&range, true);
                DONE
            }
            DISCARDABLE => {
                let lost = self.keep(&range);
                if range.start < range.end {
                    let length = range.end - range.start;
                    self.discardable.insert(range.start, (length, lost));
                }
                DONE
            }
            _ => UNKNOWN,
        }
    }

    fn set_cold(&mut self, range: &Range<u64>, cold: bool) {
        for index in 0..self.chunks.len() {
            let span = self.span(index);
            if span.start < range.end && range.start < span.end {
                self.chunks[index].cold = cold;
            }
        }
    }

    /// What is in this range counts again. Whether some of it was lost.
    fn keep(&mut self, range: &Range<u64>) -> bool {
        let mut any = false;
        for (offset, (length, lost)) in std::mem::take(&mut self.discardable) {
            let end = offset + length;
            any |= lost && offset < range.end && range.start < end;
            for (from, to) in [(offset, end.min(range.start)), (offset.max(range.end), end)] {
                if from < to {
                    self.discardable.insert(from, (to - from, lost));
                }
            }
        }
        any
    }

    /// Makes two of a range that goes beyond this offset.
    fn split(&mut self, at: u64) {
        let before = self.discardable.range_mut(..at).next_back();
        if let Some((offset, (length, lost))) = before
            && offset + *length > at
        {
            let rest = (offset + *length - at, *lost);
            *length = at - offset;
            self.discardable.insert(at, rest);
        }
    }

    /// An allocation in it is freed: nothing was said of the range any more.
    pub(crate) fn forget_range(&mut self, range: &Range<u64>) {
        self.discardable.retain(|offset, _| !range.contains(offset));
    }

    /// There is nothing in it any more.
    pub(crate) fn forget_advice(&mut self) {
        self.discardable.clear();
        self.chunks.iter_mut().for_each(|slot| slot.cold = false);
    }
}

/// The part of a range that is dropped when it moves, so that what is copied around it comes in whole grains too.
fn whole_grains(offset: u64, length: u64) -> Option<Range<u64>> {
    let start = offset.next_multiple_of(GRAIN);
    let end = (offset + length) / GRAIN * GRAIN;
    (start < end).then_some(start..end)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// With physical memory of handles from 1.
    pub(crate) fn block(bytes: u64) -> Block {
        let sizes = (0..bytes).step_by(CHUNK as usize);
        let chunks = sizes.zip(1..).map(|(from, handle)| Chunk {
            handle,
            bytes: CHUNK.min(bytes - from),
        });
        Block::new((bytes, 0, 1), chunks.collect(), None)
    }

    fn lengths(sections: &[(usize, bool)]) -> Vec<(u64, bool)> {
        let mib = sections.iter().map(|(it, kept)| (*it as u64 / MIB, *kept));
        mib.collect()
    }

    #[test]
    fn discardable_range_is_not_kept_and_known_to_be_lost() {
        let mut block = block(60 * MIB);
        assert_eq!(block.advise(10 * MIB - 5..30 * MIB, DISCARDABLE), DONE);
        assert_eq!(block.advise(40 * MIB..50 * MIB + 5, DISCARDABLE), DONE);
        // Too small to be worth a copy of its own.
        assert_eq!(block.advise(55 * MIB + 1..56 * MIB, DISCARDABLE), DONE);
        // A part of it counts again, before anything happened.
        assert_eq!(block.advise(20 * MIB..45 * MIB, KEEP), DONE);
        assert_eq!(block.kept(0), 45 * MIB);
        // A move that fails loses nothing.
        let found = block.leave(0);
        let sections = [(10, true), (10, false), (25, true), (5, false), (10, true)];
        assert_eq!(lengths(&found.sections), sections);
        assert_eq!(found.lost.len(), 2);
        block.stay(&found.lost);
        assert!(block.discardable.values().all(|(_, lost)| !lost));
        assert_eq!(block.leave(0), found);
        assert!(block.leave(0).lost.is_empty(), "they are lost already");
        assert_eq!(block.advise(30 * MIB..45 * MIB, KEEP), DONE);
        assert_eq!(block.advise(55 * MIB..57 * MIB, KEEP), DONE);
        assert_eq!(block.advise(0..15 * MIB, KEEP), LOST);
        assert_eq!(block.advise(0..15 * MIB, KEEP), DONE, "it is reported once");
        // What is lost stays so until it was reported.
        assert_eq!(block.advise(0..60 * MIB, DISCARDABLE), DONE);
        assert_eq!(block.advise(59 * MIB..60 * MIB, KEEP), LOST);
        assert_eq!(block.kept(0), MIB);
        assert_eq!(block.advise(0..1, 77), UNKNOWN);
    }

    #[test]
    fn discardable_range_is_lost_only_in_chunks_that_left() {
        let mut block = block(150 * MIB);
        assert_eq!(block.advise(60 * MIB..140 * MIB, DISCARDABLE), DONE);
        let kept: Vec<u64> = (0..3).map(|n| block.kept(n) / MIB).collect();
        assert_eq!(kept, [60, 0, 10]);
        let found = block.leave(1);
        assert_eq!(lengths(&found.sections), [(64, false)]);
        assert_eq!(block.advise(60 * MIB..64 * MIB, KEEP), DONE);
        assert_eq!(block.advise(128 * MIB..150 * MIB, KEEP), DONE);
        assert_eq!(block.advise(64 * MIB..65 * MIB, KEEP), LOST);
    }

    #[test]
    fn cold_range_makes_its_chunks_cold() {
        let mut block = block(200 * MIB);
        assert_eq!(block.advise(70 * MIB..130 * MIB, COLD), DONE);
        let cold = |block: &Block| block.resident().map(|it| it.1).collect::<Vec<_>>();
        assert_eq!(cold(&block), [false, true, true, false]);
        assert_eq!(block.advise(64 * MIB..128 * MIB, KEEP), DONE);
        assert_eq!(cold(&block), [false, false, true, false]);
        block.forget_advice();
        assert_eq!(cold(&block), [false; 4]);
    }

    #[test]
    fn chunks_leave_and_come_back_by_themselves() {
        let mut block = block(200 * MIB);
        assert_eq!(
            block
                .left(0, 3, vec![(1, 8 << 20)])
                .map(|it| it.chunk.bytes),
            Some(8 * MIB)
        );
        assert_eq!(
            block
                .left(0, 2, vec![(9, 64 << 20)])
                .map(|it| it.chunk.bytes),
            Some(CHUNK)
        );
        assert_eq!(
            block
                .left(0, 0, vec![(7, 64 << 20)])
                .map(|it| it.chunk.bytes),
            Some(CHUNK)
        );
        assert_eq!(block.away(), 136 * MIB);
        assert!(block.chunk(2).is_none() && block.chunk(1).is_some());
        let gap = |first, offset, bytes, host: &[(usize, usize)]| Gap {
            first,
            offset,
            bytes,
            host: host.to_vec(),
        };
        let after = gap(2, 128 * MIB, 72 * MIB, &[(9, 64 << 20), (1, 8 << 20)]);
        assert_eq!(block.gaps(), [gap(0, 0, 64 * MIB, &[(7, 64 << 20)]), after]);
        let made = |handle, bytes| Chunk { handle, bytes };
        block.arrived(2, vec![made(77, CHUNK), made(78, 8 * MIB)]);
        block.arrived(0, vec![made(79, CHUNK)]);
        assert_eq!(block.away(), 0);
        let handles: Vec<_> = (0..4)
            .filter_map(|n| Some(block.chunk(n)?.handle))
            .collect();
        assert_eq!(handles, [79, 2, 77, 78]);
    }

    #[test]
    fn granules_leave_without_a_copy_unless_they_are_in_use() {
        const AT: u64 = 0x7000_0000;
        let table = Table::new(AT, 8 * MIB, 2 * MIB).expect("room");
        let mut block = Block::elastic((8 * MIB, 0, 1), 2 * MIB, Elastic { table, scratch: 9 });
        assert_eq!(
            (block.held(), block.away(), block.droppable()),
            (0, 0, (0, 0))
        );
        for index in 0..3 {
            assert!(table.grab(index, granules::OUT));
            block.arrived(
                index,
                vec![Chunk {
                    handle: 5,
                    bytes: 2 * MIB,
                }],
            );
            table.fill(index);
        }
        assert!(table.exchange(1, granules::IN_USE, granules::FREE));
        assert!(table.exchange(2, granules::IN_USE, granules::CACHED));
        assert_eq!(
            (block.held(), block.droppable()),
            (6 * MIB, (2 * MIB, 2 * MIB))
        );
        assert_eq!(
            (block.kept(0), block.kept(1), block.kept(2)),
            (2 * MIB, 0, 0)
        );
        // A move that fails changes nothing.
        let departure = block.leave(1);
        assert_eq!(departure.sections, [(2 << 20, false)]);
        assert!(
            !table.exchange(1, granules::FREE, granules::IN_USE),
            "it is being moved"
        );
        block.stay(&departure.lost);
        assert!(table.exchange(1, granules::FREE, granules::IN_USE));
        assert_eq!(block.leave(1).sections, [(2 << 20, true)]);
        for (index, dropped) in [(0, 0), (1, 0), (2, 2 * MIB)] {
            let lost = block.leave(index).lost;
            let departed = block.left(AT, index, vec![(NOWHERE, 2 << 20)]);
            assert_eq!(departed.expect("it was there").dropped(), dropped);
            assert_eq!(lost.is_empty(), dropped == 0);
        }
        // What was dropped does not come back.
        assert_eq!((block.held(), block.away()), (4 * MIB, 4 * MIB));
        assert_eq!(table.state(2), granules::OUT);
        table.end();
    }
}
