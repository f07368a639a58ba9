//! Which memory moves: no more than is lacking, by chunks of this library's blocks and by handles of the program's.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    ffi::c_int,
};

use crate::memory::space::Space;

/// What is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// A chunk of the block at this address; on the way back: the first of several.
    Chunk { block: u64, index: usize },
    /// Memory that the program handles, by its handle.
    Physical(u64),
}

/// Memory that may leave the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Good {
    pub(super) key: Key,
    pub(super) at: u64,
    /// Bytes on the device, and those of them whose contents count.
    pub(super) bytes: u64,
    pub(super) kept: u64,
    pub(super) device: c_int,
    pub(super) context: u64,
    /// Nothing of it must be kept, and it does not come back.
    droppable: bool,
    cold: bool,
}

/// Memory that is away.
#[derive(Clone, Debug)]
pub(super) struct Gone {
    pub(super) key: Key,
    pub(super) at: u64,
    pub(super) bytes: u64,
    /// Bytes of one chunk.
    pub(super) piece: u64,
    pub(super) device: c_int,
    pub(super) context: u64,
    /// Where its contents are.
    pub(super) host: Vec<(usize, usize)>,
}

/// What is to be moved so that at least so much of each device comes free, if there is so much.
pub(super) fn goods(space: &Space, least: u64) -> Vec<Good> {
    let blocks = space.blocks.iter();
    let movable = blocks.filter(|(at, block)| !block.stays() && !space.is_spare(**at));
    let chunks = movable.flat_map(|(at, block)| {
        block.resident().map(move |(index, cold)| {
            let span = block.span(index);
            Good {
                key: Key::Chunk { block: *at, index },
                at: at + span.start,
                bytes: span.end - span.start,
                kept: block.kept(index),
                device: block.device,
                context: block.context,
                droppable: block.is_droppable(index),
                cold,
            }
        })
    });
    let physicals = space.physicals.iter().filter(|(_, it)| it.is_movable());
    let physicals = physicals.filter_map(|(handle, it)| {
        Some(Good {
            key: Key::Physical(*handle),
            at: it.address()?,
            bytes: it.bytes,
            kept: it.bytes,
            device: it.device,
            context: it.context,
            droppable: false,
            cold: false,
        })
    });
    pick(chunks.chain(physicals).collect(), least)
}

/// What needs no copy first, cold before warm, then what costs least to move for what comes free, in large pieces from the highest address; the last one no larger
/// than needed. As long as a program's memory is the same, so is the choice: what moved in the last quantum moves in the next.
fn pick(mut goods: Vec<Good>, least: u64) -> Vec<Good> {
    let rank = |it: &Good| (it.device, !it.droppable, !it.cold, it.kept == it.bytes);
    goods.sort_by_key(|it| (rank(it), Reverse(it.bytes), Reverse(it.at)));
    let mut found: BTreeMap<c_int, u64> = BTreeMap::new();
    let mut picked = Vec::new();
    for (at, good) in goods.iter().enumerate() {
        let found = found.entry(good.device).or_default();
        let missing = least.saturating_sub(*found);
        if missing == 0 {
            continue;
        }
        // Sorted by size: the smallest of its rank that is large enough.
        let alike = goods[at..].iter().take_while(|it| rank(it) == rank(good));
        let enough = alike.take_while(|it| it.bytes >= missing);
        let good = enough.min_by_key(|it| it.bytes).unwrap_or(good);
        *found = found.saturating_add(good.bytes);
        picked.push(*good);
    }
    picked
}

/// All that is away.
pub(super) fn gone(space: &Space) -> Vec<Gone> {
    let chunks = space.blocks.iter().flat_map(|(at, block)| {
        block.gaps().into_iter().map(move |gap| Gone {
            key: Key::Chunk {
                block: *at,
                index: gap.first,
            },
            at: at + gap.offset,
            bytes: gap.bytes,
            piece: block.piece,
            device: block.device,
            context: block.context,
            host: gap.host,
        })
    });
    let physicals = space.physicals.iter().filter(|(_, it)| it.is_away());
    let physicals = physicals.filter_map(|(handle, it)| {
        Some(Gone {
            key: Key::Physical(*handle),
            at: it.address()?,
            bytes: it.bytes,
            piece: it.bytes,
            device: it.device,
            context: it.context,
            host: it.host.clone(),
        })
    });
    chunks.chain(physicals).collect()
}

/// A device's contexts with memory that is away, and its bytes.
pub(super) type Need = (BTreeSet<u64>, u64);

/// What each device needs for all that is away.
pub(super) fn needs(gone: &[Gone]) -> BTreeMap<c_int, Need> {
    let mut needs: BTreeMap<c_int, Need> = BTreeMap::new();
    for it in gone {
        let (contexts, bytes) = needs.entry(it.device).or_default();
        contexts.insert(it.context);
        *bytes = bytes.saturating_add(it.bytes);
    }
    needs
}

#[cfg(test)]
mod tests;
