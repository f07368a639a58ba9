use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::memory::{
    block::{GRAIN, NOWHERE, tests::block},
    vmm::{CHUNK, Chunk, GRANULE},
};

const MIB: u64 = 1 << 20;

#[test]
fn what_is_away_needs_room_on_each_device() {
    let gone = |device, context, bytes| Gone {
        key: Key::Physical(bytes),
        at: 0,
        bytes,
        piece: bytes,
        device,
        context,
        host: Vec::new(),
    };
    let all = [gone(0, 1, 10), gone(1, 2, 7), gone(0, 3, 30), gone(0, 1, 2)];
    let expected = [
        (0, (BTreeSet::from([1, 3]), 42)),
        (1, (BTreeSet::from([2]), 7)),
    ];
    assert_eq!(needs(&all), BTreeMap::from(expected));
    assert!(needs(&[]).is_empty());
}

#[test]
fn cold_and_cheap_go_first_and_no_more_than_needed() {
    let good = |at, bytes, kept, cold| Good {
        key: Key::Physical(at),
        at,
        bytes,
        kept,
        device: 0,
        context: 1,
        droppable: false,
        cold,
    };
    let all = vec![
        good(1, 10, 10, false),
        good(2, 30, 30, false),
        good(3, 5, 5, true),
        good(4, 8, 2, false),
        Good {
            device: 1,
            ..good(5, 50, 50, false)
        },
    ];
    let ids = |least| {
        let picked = pick(all.clone(), least).into_iter();
        let mut ids: Vec<u64> = picked.map(|it| it.at).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(ids(0), [0; 0]);
    assert_eq!(ids(4), [3, 5]);
    assert_eq!(ids(6), [3, 4, 5]);
    assert_eq!(ids(14), [1, 3, 4, 5]);
    assert_eq!(ids(25), [2, 3, 4, 5]);
    assert_eq!(ids(u64::MAX), [1, 2, 3, 4, 5]);
}

#[test]
fn single_allocation_gives_up_its_highest_chunks() {
    let mut space = Space::default();
    space.blocks.insert(1 << 40, block(10 * CHUNK));
    let offsets = |least| {
        let picked = goods(&space, least).into_iter();
        picked
            .map(|it| (it.at - (1 << 40)) / CHUNK)
            .collect::<Vec<_>>()
    };
    assert_eq!(offsets(1), [9]);
    assert_eq!(offsets(CHUNK), [9]);
    assert_eq!(offsets(2 * CHUNK + 1), [9, 8, 7]);
}

/// What a process may do, and have done to it.
#[derive(Clone, Debug)]
enum Step {
    /// It allocates so many granules.
    Alloc(u64),
    /// It frees one of its allocations.
    Free(usize),
    /// It writes into one of its allocations, at a grain.
    Write(usize, u64, u32),
    /// It says this of so many grains.
    Advise(usize, u64, u64, c_int),
    /// So many granules are taken, at least.
    Take(u64),
    /// A move of so many granules fails after the copies.
    Fail(u64),
    /// All comes back.
    Back,
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0..100_usize;
    prop_oneof![
        3 => (1..150_u64).prop_map(Step::Alloc),
        1 => which.clone().prop_map(Step::Free),
        4 => (which.clone(), 0..300_u64, any::<u32>()).prop_map(|(n, at, it)| Step::Write(n, at, it)),
        2 => (which, 0..300_u64, 1..200_u64, 0..3).prop_map(|(n, at, count, it)| Step::Advise(n, at, count, it)),
        3 => (0..300_u64).prop_map(Step::Take),
        1 => (0..300_u64).prop_map(Step::Fail),
        3 => Just(Step::Back),
    ]
}

/// The process's tables with a device and a host whose memory is a number for each grain.
#[derive(Default)]
struct World {
    space: Space,
    next: u64,
    handles: u64,
    device: BTreeMap<u64, u32>,
    host: BTreeMap<usize, u32>,
    filled: usize,
    /// What the program knows to be in its memory; none: it does not count on anything.
    expected: BTreeMap<u64, Option<u32>>,
    /// Grains that need not be kept.
    discardable: BTreeSet<u64>,
    /// Where chunks were away the last time, for so much that was asked.
    last: Option<(u64, Vec<u64>)>,
    /// Blocks or advice have changed since.
    changed: bool,
}

/// A grain that is mapped, and was not written since.
const FRESH: u32 = 0xF0F0_F0F0;

impl World {
    fn grains(at: u64, bytes: u64) -> impl Iterator<Item = u64> {
        (at..at + bytes).step_by(GRAIN as usize)
    }

    fn nth(&self, n: usize) -> Option<u64> {
        let count = self.space.blocks.len();
        (count > 0).then(|| self.space.blocks.keys().nth(n % count).copied())?
    }

    fn away(&self) -> u64 {
        self.space.blocks.values().map(|it| it.away()).sum()
    }

    /// Maps physical memory, which must not be there.
    fn back(&mut self, at: u64, bytes: u64) -> Vec<Chunk> {
        for grain in Self::grains(at, bytes) {
            assert_eq!(self.device.insert(grain, FRESH), None, "mapped twice");
        }
        let sizes = (0..bytes).step_by(CHUNK as usize);
        let sizes = sizes.map(|from| CHUNK.min(bytes - from));
        let chunks = sizes.zip(self.handles + 1..);
        let chunks: Vec<_> = chunks
            .map(|(bytes, handle)| Chunk { handle, bytes })
            .collect();
        self.handles += chunks.len() as u64;
        chunks
    }

    fn unback(&mut self, at: u64, bytes: u64) {
        for grain in Self::grains(at, bytes) {
            assert!(self.device.remove(&grain).is_some(), "not mapped");
        }
    }

    fn take(&mut self, least: u64, fails: bool) {
        let resident = self.device.len() as u64 * MIB;
        let picked = goods(&self.space, least);
        let moved: u64 = picked.iter().map(|it| it.bytes).sum();
        assert!(moved >= least.min(resident), "{moved} of {least}");
        assert!(moved < least.max(1) + CHUNK, "{moved} for {least}");
        let (before, filled) = (self.away(), self.filled);
        let mut chosen: Vec<u64> = picked.iter().map(|it| it.at).collect();
        chosen.sort_unstable();
        if before == 0 {
            let same = self.last.take().filter(|_| !self.changed);
            if let Some((asked, last)) = same.filter(|(asked, _)| *asked == least) {
                assert_eq!(chosen, last, "the same for {asked}");
            }
            (self.last, self.changed) = (Some((least, chosen)), false);
        }
        let mut places = Vec::new();
        let mut kept = 0;
        for good in &picked {
            let Key::Chunk { block, index } = good.key else {
                unreachable!("there is no other memory")
            };
            let known = self.space.blocks.get_mut(&block).expect("it was chosen");
            let departure = known.leave(index);
            let (mut parts, mut from) = (Vec::new(), good.at);
            for (length, is_kept) in departure.sections {
                let to = if is_kept {
                    1 << 40 | self.filled
                } else {
                    NOWHERE
                };
                if is_kept {
                    for grain in Self::grains(from, length as u64) {
                        let host = to + (grain - from) as usize;
                        self.host.insert(host, self.device[&grain]);
                    }
                    self.filled += length;
                    kept += length as u64;
                }
                parts.push((to, length));
                from += length as u64;
            }
            assert_eq!(from, good.at + good.bytes, "all of it");
            places.push((block, index, good, parts, departure.lost));
        }
        assert_eq!(kept, picked.iter().map(|it| it.kept).sum::<u64>());
        if fails {
            for (block, _, _, _, lost) in places {
                self.space
                    .blocks
                    .get_mut(&block)
                    .expect("it was chosen")
                    .stay(&lost);
            }
            self.filled = filled;
            return;
        }
        for (block, index, good, parts, _) in places {
            let known = self.space.blocks.get_mut(&block).expect("it was chosen");
            let chunk = known.left(0, index, parts).expect("it was there");
            assert_eq!(chunk.chunk.bytes, good.bytes);
            self.unback(good.at, good.bytes);
        }
        assert_eq!(self.away(), before + moved);
    }

    fn bring_back(&mut self) {
        let away = self.away();
        let mut came = 0;
        for gone in gone(&self.space) {
            let Key::Chunk { block, index } = gone.key else {
                unreachable!("there is no other memory")
            };
            let chunks = self.back(gone.at, gone.bytes);
            let mut to = gone.at;
            for (from, length) in &gone.host {
                for grain in Self::grains(to, *length as u64) {
                    if *from != NOWHERE {
                        let value = self.host[&(from + (grain - to) as usize)];
                        self.device.insert(grain, value);
                    }
                }
                to += *length as u64;
            }
            assert_eq!(to, gone.at + gone.bytes);
            let known = self.space.blocks.get_mut(&block).expect("it is away");
            known.arrived(index, chunks);
            came += gone.bytes;
        }
        assert_eq!((came, self.away()), (away, 0), "just what had left");
        self.host.clear();
        self.filled = 0;
    }

    /// What the program does; it cannot while its memory is away.
    fn work(&mut self, step: &Step) {
        match *step {
            Step::Alloc(granules) => {
                self.next += 1 << 32;
                let (at, bytes) = (self.next, granules * GRANULE);
                let chunks = self.back(at, bytes);
                let made = crate::memory::block::Block::new((bytes, 0, 1), chunks, None);
                self.space.blocks.insert(at, made);
                self.expected
                    .extend(Self::grains(at, bytes).map(|it| (it, None)));
                self.changed = true;
            }
            Step::Free(n) => {
                if let Some(at) = self.nth(n) {
                    let block = self.space.blocks.remove(&at).expect("it is there");
                    self.unback(at, block.bytes);
                    let freed = at..at + block.bytes;
                    self.expected.retain(|it, _| !freed.contains(it));
                    self.discardable.retain(|it| !freed.contains(it));
                    self.changed = true;
                }
            }
            Step::Write(n, grain, value) => {
                if let Some(at) = self.nth(n) {
                    let bytes = self.space.blocks[&at].bytes;
                    let place = at + grain * MIB % bytes;
                    self.device.insert(place, value);
                    self.expected.insert(place, Some(value));
                }
            }
            _ => {}
        }
    }

    /// The program may say something at any time.
    fn advise(&mut self, n: usize, from: u64, count: u64, advice: c_int) {
        /// Numbers of `gpumux.h`.
        const KEEP: c_int = 0;
        const DISCARDABLE: c_int = 2;
        const LOST: c_int = 1;
        let Some(at) = self.nth(n) else { return };
        let block = self.space.blocks.get_mut(&at).expect("it is there");
        let from = from * MIB % block.bytes;
        let to = (from + count * MIB).min(block.bytes);
        let answer = block.advise(from..to, advice);
        for grain in Self::grains(at + from, to - from) {
            match advice {
                DISCARDABLE => {
                    self.discardable.insert(grain);
                }
                // It writes anew what was lost.
                KEEP if self.discardable.remove(&grain) && answer == LOST => {
                    self.expected.insert(grain, None);
                }
                _ => {}
            }
        }
        self.changed = true;
    }

    fn check(&self) {
        let all: u64 = self.space.blocks.values().map(|it| it.bytes).sum();
        assert_eq!(self.device.len() as u64 * MIB + self.away(), all);
        let handles = self.space.blocks.values().flat_map(|block| {
            let resident = block.resident();
            resident.filter_map(|(index, _)| Some(block.chunk(index)?.handle))
        });
        let handles: Vec<u64> = handles.collect();
        let different: BTreeSet<_> = handles.iter().collect();
        assert_eq!(different.len(), handles.len(), "no memory is at two places");
    }

    fn verify(&self) {
        for (at, expected) in &self.expected {
            if let Some(expected) = expected
                && !self.discardable.contains(at)
            {
                assert_eq!(self.device.get(at), Some(expected), "at {at:#x}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever leaves and comes back: every byte is somewhere, once, and no more moves than asked plus one chunk.
    #[test]
    fn memory_is_kept_and_moves_by_what_is_asked(steps in proptest::collection::vec(step(), 1..60)) {
        let mut world = World::default();
        for step in &steps {
            match *step {
                Step::Take(granules) => world.take(granules * GRANULE, false),
                Step::Fail(granules) => world.take(granules * GRANULE, true),
                Step::Back => world.bring_back(),
                Step::Advise(n, from, count, advice) => world.advise(n, from, count, advice),
                _ if world.away() > 0 => {}
                _ => world.work(step),
            }
            world.check();
            if world.away() == 0 {
                world.verify();
            }
        }
        world.bring_back();
        world.verify();
    }
}
