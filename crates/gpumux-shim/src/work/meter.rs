//! How much work of a channel group is launched and not done, in time: what a budget is compared with. Asks no clock and no driver.
//!
//! Launches are told apart by what they launch, and how many blocks or nodes of it. How long each kind takes is learned from pairs of
//! events around batches of launches. A graph that was not measured yet counts by its nodes, as long as nodes took before. What is not
//! known at all is launched alone.

use std::collections::VecDeque;

/// Kinds of kernels that are told apart; others may share a place with one of them. So many graphs are remembered, too.
const KINDS: usize = 4096;
/// Most launches of a batch, and their time in ns at which it ends.
const BATCH: (usize, u64) = (64, 100_000);
/// A batch that takes longer, in ns, no longer counts: its kernels may wait for one that is not launched yet.
pub(crate) const PATIENCE: u64 = 50_000_000;
/// No launch takes less, in ns.
const SHORTEST: u64 = 1_000;

/// What is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Piece {
    place: u16,
    /// Of a graph, the nodes that do work; 0: unknown, or it is none.
    nodes: u32,
    /// Tells it from others with its place.
    tag: u32,
}

impl Piece {
    /// An executable graph with so many nodes. Another one that has its address later is another.
    pub(crate) fn graph(of: u64, nodes: u32) -> Self {
        let it = Self::new(of, [nodes, 0, 0]);
        Self { nodes, ..it }
    }

    /// Of this function, with this many blocks or bytes.
    #[inline]
    pub(crate) fn new(of: u64, size: [u32; 3]) -> Self {
        // Fibonacci hashing.
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let mix = |hash: u64, part: u64| (hash.rotate_left(23) ^ part).wrapping_mul(FACTOR);
        let [x, y, z] = size.map(u64::from);
        let hash = mix(mix(of.wrapping_mul(FACTOR), x | y << 32), z);
        Self {
            place: (hash >> 52) as u16,
            nodes: 0,
            tag: (hash >> 20) as u32,
        }
    }
}

/// Launches on one stream, one after the other.
struct Batch<E> {
    place: usize,
    /// How many pieces its stream has done when this is done.
    upto: u64,
    /// When the first was launched, in ns.
    since: u64,
    pieces: Vec<Piece>,
    /// Events before the first and after the last.
    begin: Option<E>,
    end: Option<E>,
}

/// What is outstanding of one group. Events are the driver's, or a test's.
pub(crate) struct Meter<E> {
    /// Of kernels, in ns; 0: not measured.
    lengths: Box<[u32]>,
    /// Of graphs, each with its tag. There may be ever new ones: none is taken for another.
    graphs: Box<[(u32, u32)]>,
    /// What a graph's node takes, in ns; 0: no graph was measured.
    node: u64,
    /// In the order in which they were begun. Of each stream only the last has no event at its end.
    batches: VecDeque<Batch<E>>,
}

impl<E> Default for Meter<E> {
    fn default() -> Self {
        Self {
            lengths: vec![0; KINDS].into(),
            graphs: vec![(0, 0); KINDS].into(),
            node: 0,
            batches: VecDeque::new(),
        }
    }
}

impl<E: Clone> Meter<E> {
    fn measured(&self, piece: Piece) -> Option<u64> {
        let place = usize::from(piece.place);
        let length = match (piece.nodes, self.graphs[place]) {
            (0, _) => self.lengths[place],
            (_, (tag, length)) if tag == piece.tag => length,
            _ => 0,
        };
        (length != 0).then_some(length.into())
    }

    /// As measured, or by its nodes.
    fn length(&self, piece: Piece) -> Option<u64> {
        let estimate = u64::from(piece.nodes) * self.node;
        let estimate = (estimate != 0).then_some(estimate.min(PATIENCE));
        self.measured(piece).or(estimate)
    }

    /// How long a batch is expected to take; none: unknown.
    fn expected(&self, batch: &Batch<E>) -> Option<u64> {
        let lengths = batch.pieces.iter().map(|piece| self.length(*piece));
        lengths.sum()
    }

    /// Whether this may be launched now, so that no more than `budget` ns are outstanding, or nothing else is.
    pub(crate) fn admits(&self, piece: Piece, budget: u64, now: u64) -> bool {
        let counts = |batch: &&Batch<E>| now.saturating_sub(batch.since) < PATIENCE;
        let mut batches = self.batches.iter().filter(counts).peekable();
        if batches.peek().is_none() {
            return true;
        }
        let outstanding: Option<u64> = batches.map(|batch| self.expected(batch)).sum();
        let after = outstanding
            .zip(self.length(piece))
            .map(|(all, own)| all + own);
        after.is_some_and(|after| after <= budget)
    }

    /// Whether a launch on this stream needs an event before it: no other's end is its beginning.
    pub(crate) fn begins(&self, place: usize) -> bool {
        !self.batches.iter().any(|batch| batch.place == place)
    }

    /// Something was launched on a stream, which has now been given `upto` pieces; `begin`: the event before it, if one was needed.
    /// Whether an event shall be recorded behind it now.
    pub(crate) fn launched(
        &mut self,
        place: usize,
        upto: u64,
        piece: Piece,
        begin: Option<E>,
        now: u64,
    ) -> bool {
        let last = self.batches.iter().rposition(|batch| batch.place == place);
        let open = last.filter(|at| self.batches[*at].end.is_none());
        let at = open.unwrap_or_else(|| {
            let before = last.and_then(|at| self.batches[at].end.clone());
            self.batches.push_back(Batch {
                place,
                upto,
                since: now,
                pieces: Vec::new(),
                begin: begin.or(before),
                end: None,
            });
            self.batches.len() - 1
        });
        let batch = &mut self.batches[at];
        batch.upto = upto;
        batch.pieces.push(piece);
        let batch = &self.batches[at];
        batch.pieces.len() >= BATCH.0
            || self.measured(piece).is_none()
            || self.expected(batch).is_none_or(|it| it >= BATCH.1)
    }

    /// Whether launches on a stream have no event behind them yet.
    pub(crate) fn is_open(&self, place: usize) -> bool {
        let mut own = self.batches.iter().filter(|batch| batch.place == place);
        own.next_back().is_some_and(|batch| batch.end.is_none())
    }

    /// This event was recorded behind a stream's launches.
    pub(crate) fn mark(&mut self, place: usize, end: E) {
        let mut own = self.batches.iter_mut().rev();
        if let Some(batch) = own.find(|batch| batch.place == place) {
            batch.end = Some(end);
        }
    }

    /// Looks what is done: by an event that has been reached, or because a stream has done as many pieces. Learns by how much time
    /// passed between two events. Returns how many pieces which streams have done.
    pub(crate) fn reap(
        &mut self,
        mut reached: impl FnMut(&E) -> bool,
        mut between: impl FnMut(&E, &E) -> Option<u64>,
        done: impl Fn(usize) -> u64,
    ) -> Vec<(usize, u64)> {
        let (mut found, mut blocked) = (Vec::new(), Vec::new());
        let mut at = 0;
        while let Some(batch) = self.batches.get(at) {
            let is_done = match &batch.end {
                _ if blocked.contains(&batch.place) => false,
                Some(end) => reached(end),
                None => done(batch.place) >= batch.upto,
            };
            if !is_done {
                blocked.push(batch.place);
                at += 1;
                continue;
            }
            let Some(batch) = self.batches.remove(at) else {
                break;
            };
            let took = batch.begin.as_ref().zip(batch.end.as_ref());
            if let Some(took) = took.and_then(|(begin, end)| between(begin, end)) {
                self.learn(&batch.pieces, took);
            }
            found.push((batch.place, batch.upto));
        }
        found
    }

    /// These together took so long, in ns.
    fn learn(&mut self, pieces: &[Piece], took: u64) {
        let before: u64 = pieces.iter().filter_map(|it| self.measured(*it)).sum();
        let unknown = pieces.iter().filter(|it| self.measured(**it).is_none());
        // One is the last of its batch; should there be more, each gets its part of what the others leave.
        let rest = took.saturating_sub(before) / (unknown.count() as u64).max(1);
        // Far off means that something else happened.
        let factor = (took as f64 / before.max(1) as f64).clamp(0.125, 8.0);
        // Once each, however often it is there: else a batch would correct itself too far.
        let mut kinds = pieces.to_vec();
        kinds.sort_unstable();
        kinds.dedup();
        for piece in kinds {
            let new = match self.measured(piece) {
                None => rest,
                Some(old) if pieces.len() == 1 => (old + took) / 2,
                Some(old) => (old as f64 * (1.0 + (factor - 1.0) / 4.0)) as u64,
            };
            let new = new.clamp(SHORTEST, PATIENCE);
            let place = usize::from(piece.place);
            if piece.nodes == 0 {
                self.lengths[place] = new as u32;
            } else {
                self.graphs[place] = (piece.tag, new as u32);
                // More is believed at once: a request waits for what was taken for too short.
                let node = new.div_ceil(piece.nodes.into());
                self.node = node.max(self.node - self.node.saturating_sub(node) / 4);
            }
        }
    }

    /// Forgets what `goes` says, by the events; those of one batch are of one context.
    pub(crate) fn forget(&mut self, goes: impl Fn(&E) -> bool) {
        let gone = |event: &Option<E>| event.as_ref().is_some_and(&goes);
        (self.batches).retain(|batch| !gone(&batch.begin) && !gone(&batch.end));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use proptest::prelude::*;

    use super::*;

    const BUDGET: u64 = 400_000;

    fn piece(number: u64) -> Piece {
        Piece {
            place: number as u16,
            nodes: 0,
            tag: 0,
        }
    }

    /// A device with one stream: kernels end in their order. Events are numbers of kernels.
    #[derive(Default)]
    struct World {
        meter: Meter<usize>,
        /// When each kernel ends.
        ends: RefCell<Vec<u64>>,
        now: Cell<u64>,
    }

    impl World {
        fn outstanding(&self) -> u64 {
            let last = self.ends.borrow().last().copied().unwrap_or(0);
            last.saturating_sub(self.now.get())
        }

        fn reap(&mut self) {
            let (ends, now) = (self.ends.borrow(), self.now.get());
            let end = |event: usize| event.checked_sub(1).map_or(0, |last| ends[last]);
            let ended = ends.iter().filter(|it| **it <= now).count() as u64;
            self.meter.reap(
                |event| end(*event) <= now,
                |from, to| Some(end(*to).saturating_sub(end(*from))),
                |_| ended,
            );
        }

        /// Launches it as soon as it may be.
        fn launch(&mut self, piece: Piece, length: u64) {
            self.reap();
            while !self.meter.admits(piece, BUDGET, self.now.get()) {
                if self.meter.is_open(0) {
                    let launched = self.ends.borrow().len();
                    self.meter.mark(0, launched);
                }
                self.now.set(self.now.get() + 20_000);
                self.reap();
            }
            let begins = self.meter.begins(0);
            let before = self.ends.borrow().len();
            let start = self.outstanding() + self.now.get();
            self.ends.borrow_mut().push(start + length);
            let begin = begins.then_some(before);
            if (self.meter).launched(0, before as u64 + 1, piece, begin, self.now.get()) {
                self.meter.mark(0, before + 1);
            }
        }
    }

    #[test]
    fn launch_of_unknown_length_is_alone() {
        let mut meter = Meter::<usize>::default();
        assert!(meter.admits(piece(1), BUDGET, 0));
        assert!(meter.launched(0, 1, piece(1), Some(0), 0), "to be marked");
        meter.mark(0, 1);
        assert!(!meter.admits(piece(1), BUDGET, 10));
        assert!(!meter.admits(piece(2), BUDGET, 10));
        meter.reap(|_| true, |_, _| Some(5_000), |_| 0);
        assert!(!meter.launched(0, 2, piece(1), Some(1), 20), "it is short");
        assert!(meter.admits(piece(1), BUDGET, 30));
        assert!(!meter.admits(piece(2), BUDGET, 30));
    }

    /// It may wait for what is not launched yet.
    #[test]
    fn kernel_that_does_not_end_holds_others_for_a_bound() {
        let mut meter = Meter::<usize>::default();
        meter.launched(0, 1, piece(1), None, 0);
        meter.mark(0, 1);
        assert!(!meter.admits(piece(2), BUDGET, PATIENCE - 1));
        assert!(meter.admits(piece(2), BUDGET, PATIENCE));
    }

    #[test]
    fn stream_that_was_waited_for_has_nothing_outstanding() {
        let mut meter = Meter::<usize>::default();
        meter.lengths[1] = 10_000;
        meter.launched(0, 7, piece(1), Some(0), 0);
        meter.launched(1, 3, piece(1), Some(0), 0);
        let done = |place: usize| [7, 2][place];
        let found = meter.reap(|_| unreachable!("no event"), |_, _| None, done);
        assert_eq!(found, [(0, 7)]);
        assert_eq!(meter.batches.len(), 1);
        meter.forget(|_| true);
        assert!(meter.admits(piece(9), 0, 1));
    }

    #[test]
    fn graph_at_the_address_of_another_is_not_taken_for_it() {
        let mut meter = Meter::<usize>::default();
        meter.learn(&[Piece::graph(1, 2)], 20_000);
        assert_eq!(meter.length(Piece::graph(1, 2)), Some(20_000));
        // As long as its nodes would be one by one.
        assert_eq!(meter.length(Piece::graph(1, 300)), Some(3_000_000));
        assert_eq!(meter.length(Piece::graph(1, 0)), None, "not told");
        assert_eq!(meter.length(Piece::new(1, [2, 0, 0])), None, "a kernel");
        // Longer nodes are believed at once, shorter ones by and by.
        meter.learn(&[Piece::graph(2, 1)], 50_000);
        meter.learn(&[Piece::graph(3, 1)], 10_000);
        assert_eq!(meter.length(Piece::graph(4, 1)), Some(40_000));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Once lengths are known, no more is outstanding than the budget and the kernel that was launched last, give or take what
        /// lengths are known for; and the device is not idle for want of launches.
        #[test]
        fn outstanding_work_stays_within_the_budget(lengths in prop::collection::vec(2_000u64..2_000_000, 1..12)) {
            let mut world = World::default();
            let every = |world: &mut World| {
                for (kind, length) in lengths.iter().enumerate() {
                    world.launch(piece(kind as u64 * 7 + 1), *length);
                    let most = (2 * BUDGET).max(length + BUDGET / 4);
                    prop_assert!(world.outstanding() <= most, "{} of {most}", world.outstanding());
                }
                Ok(())
            };
            for _ in 0..60 {
                every(&mut world)?;
            }
            let (begun, worked) = (world.now.get(), world.ends.borrow().len());
            for _ in 0..60 {
                every(&mut world)?;
            }
            let all: u64 = lengths.iter().sum::<u64>() * 60;
            let took = world.now.get() + world.outstanding() - begun;
            let launches = (world.ends.borrow().len() - worked) as u64;
            // A look every 20 µs may come so much late where a kernel fills the budget.
            prop_assert!(took <= all + all / 4 + launches * 20_000 + BUDGET, "{took} for {all}");
        }

        /// Each graph is launched once, such as a program's that makes them anew. Held back like their kernels one by one, and no more:
        /// as much is outstanding, give or take one graph, and the device has as much to do.
        #[test]
        fn new_graphs_are_held_as_their_kernels_would_be(nodes in prop::collection::vec(1u32..100, 30), length in 2_000u64..60_000) {
            let (mut graphs, mut kernels) = (World::default(), World::default());
            let most = |longest: u64| (2 * BUDGET).max(longest + BUDGET / 4);
            for (address, count) in (1 << 40..).zip(&nodes) {
                let all = length * u64::from(*count);
                graphs.launch(Piece::graph(address, *count), all);
                prop_assert!(graphs.outstanding() <= most(all), "{}", graphs.outstanding());
                for _ in 0..*count {
                    kernels.launch(piece(1), length);
                    prop_assert!(kernels.outstanding() <= most(length), "{}", kernels.outstanding());
                }
            }
            let took = |world: &World| world.now.get() + world.outstanding();
            // One that does not fit waits for the end of all, which is seen up to 20 µs late.
            let late = nodes.len() as u64 * 20_000;
            prop_assert!(took(&graphs) <= took(&kernels) + late, "{} and {}", took(&graphs), took(&kernels));
            // Short ones do not wait for each other.
            let mut short = World::default();
            let most = (1u64..60).map(|address| {
                short.launch(Piece::graph(address << 20, 4), 20_000);
                short.outstanding()
            });
            prop_assert!(most.max() > Some(300_000));
        }
    }
}
