//! Memory that this library maps, and which of it is on the device.
//!
//! A block is a range of addresses with physical memory in chunks ([`vmm::CHUNK`]). Each chunk leaves and comes back by itself, so that a
//! large allocation gives up what others lack and no more. While any of it is away, no thread of the program passes the gate, and
//! the program's kernels are frozen: to them a block is always whole.

use std::{collections::BTreeMap, ffi::c_int, ops::Range};

use crate::vmm::{self, CHUNK, Chunk};

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
    /// In the order of their addresses; all but the last are of [`CHUNK`].
    chunks: Vec<Slot>,
    /// The program has taken hold of the physical memory: it stays.
    pub(crate) pinned: bool,
    /// How many exports of it other processes have open: it stays for so long.
    pub(crate) shared: u32,
    /// Ranges by offset whose contents need not be kept, and whether they are lost.
    discardable: BTreeMap<u64, (u64, bool)>,
    /// Of a shared block: free ranges by offset.
    pub(crate) free: Option<BTreeMap<u64, u64>>,
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
            pinned: false,
            shared: 0,
            discardable: BTreeMap::new(),
            free,
        }
    }

    /// Whether it stays where it is.
    pub(crate) const fn stays(&self) -> bool {
        self.pinned || self.shared > 0
    }

    /// Offsets of a chunk.
    pub(crate) fn span(&self, index: usize) -> Range<u64> {
        let begin = index as u64 * CHUNK;
        begin..(begin + CHUNK).min(self.bytes)
    }

    /// The physical memory of a chunk, unless it is away.
    pub(crate) fn chunk(&self, index: usize) -> Option<Chunk> {
        match self.chunks.get(index)?.place {
            Place::Device(chunk) => Some(chunk),
            Place::Host(_) => None,
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
    }

    // ---- Moving ----------------------------------------------------------------------------------

    /// Bytes of a chunk that must be kept when it moves.
    pub(crate) fn kept(&self, index: usize) -> u64 {
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
        for offset in lost {
            if let Some((_, is_lost)) = self.discardable.get_mut(offset) {
                *is_lost = false;
            }
        }
    }

    /// A chunk has left. Its physical memory, which is to be freed.
    pub(crate) fn left(&mut self, index: usize, host: Vec<(usize, usize)>) -> Option<Chunk> {
        let place = &mut self.chunks.get_mut(index)?.place;
        match std::mem::replace(place, Place::Host(host)) {
            Place::Device(chunk) => Some(chunk),
            Place::Host(_) => None,
        }
    }

    /// Chunks are back, in this physical memory.
    pub(crate) fn arrived(&mut self, first: usize, chunks: Vec<Chunk>) {
        for (slot, chunk) in self.chunks.iter_mut().skip(first).zip(chunks) {
            slot.place = Place::Device(chunk);
        }
    }

    // ---- What the program says of it -------------------------------------------------------------

    /// `gpumux_advise`
    pub(crate) fn advise(&mut self, range: Range<u64>, advice: c_int) -> c_int {
        match advice {
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
            block.left(3, vec![(1, 8 << 20)]).map(|it| it.bytes),
            Some(8 * MIB)
        );
        assert_eq!(
            block.left(2, vec![(9, 64 << 20)]).map(|it| it.bytes),
            Some(CHUNK)
        );
        assert_eq!(
            block.left(0, vec![(7, 64 << 20)]).map(|it| it.bytes),
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
}
