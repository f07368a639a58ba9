//! Whether work follows a call of the program, and whether taking the device ahead of it pays: learned
//! from what followed earlier calls of the same kind. Pure: time comes in.
//!
//! What a hold gains is at most one switch of contexts, and at most the time from the call to when the
//! work could begin (its *lead*). What it costs the others is what it holds beyond the switch, or all of it
//! when no work comes. It pays while a latency task's gain, weighted, exceeds the others' loss, and while
//! the losses together stay below a small part of the time. And it must show: where requests with a hold take
//! longer than those without, whatever the reason (streams that share a hardware queue, say), there are none.

use super::long::{AHEAD, COMPARED, End, LONG, Long, RECENT, WATCHED, WORTH, is_one_of};

/// A switch of contexts on a full H100 in µs.
const SWITCH: f32 = 170.0;
/// Launching two hold kernels in µs: the program waits for that.
const ISSUE: f32 = 12.0;
/// The least gain in µs that is worth anything.
const LEAST: f32 = 25.0;
/// A hold's shortest and longest time on the device in µs.
pub(crate) const TIMEOUT: (f32, f32) = (150.0, 500.0);
/// The same of one from a wait to the next, in µs: the work that is waited for runs in this time, too.
const WAITING: f32 = 1_500.0;
/// The same of one before the end of a long request.
const ENDING: f32 = AHEAD + WAITING;
/// Requests of each kind that make a comparison, and how much longer one may take by chance, in µs.
const ENOUGH: u16 = 4;
const NOISE: f32 = 10.0;
/// One that takes so much more or less than the others, in µs, counts as if by no more: a host that stands still for 20 ms would else hide for
/// hundreds of calls what holds do.
const FAR: f32 = 2.0 * SWITCH;
/// A hold that is over before the wait gains nothing: not to be most of them.
const MOSTLY: f32 = 0.5;
/// Bytes per µs that a copy from the host moves: PCIe 5 does twice that, PCIe 4 half.
const LINK: f32 = 25_000.0;
/// The others lose at most this part of the time to holds of the library's own accord, with so
/// much saved up, in µs.
const SHARE: f32 = 1.0 / 64.0;
const SAVED_UP: f32 = 20_000.0;

/// Calls that work may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// A copy that the program waits for.
    Copy,
    /// A copy that goes on after the call.
    AsyncCopy,
    /// A wait for all work, after which some programs submit a little and wait again: language models, for what they made of a token. In between the
    /// device idles for less time than two switches take.
    Wait,
}

/// A kind of call: calls of one kind are taken to predict the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    call: Call,
    size: usize,
}

/// What followed the calls of one kind.
#[derive(Clone, Copy)]
struct Lesson {
    seen: u16,
    /// Part of the calls that work followed soon.
    hit: f32,
    /// From the call to the launch of that work, in µs; from the end of a wait to the next wait.
    gap: f32,
    /// Time from the call to when the work was seen done, in µs, without and with a hold; and how many.
    took: [(f32, u16); 2],
    /// Part of the waits whose hold was over before they were.
    over: f32,
}

const NEW: Lesson = Lesson {
    seen: 0,
    hit: 0.0,
    gap: 0.0,
    took: [(0.0, 0); 2],
    over: 0.0,
};

/// A wait, and what came before it.
#[derive(Clone, Copy)]
pub(crate) struct Waited {
    pub(crate) site: Site,
    ended: u64,
    /// The time-out of the hold that lasts until the next wait.
    pub(crate) held: Option<f32>,
    /// The wait shortly before it, until its work is known to be done: which, when it ended, and whether the device was kept since.
    before: Option<(Site, u64, bool)>,
    /// The end of its request, if that is a long one, until its work is known to be done.
    ending: Option<End>,
}

impl Waited {
    pub(crate) fn new(site: Site) -> Self {
        Self {
            site,
            ended: 0,
            held: None,
            before: None,
            ending: None,
        }
    }
}

/// All that was learned of one context.
pub(crate) struct Lessons {
    of: [[Lesson; 64]; 3],
    budget: f32,
    /// When the budget was last filled up, in µs.
    filled: u64,
    /// The last wait, and how many pieces the program had submitted by then.
    last: Option<Waited>,
    pub(crate) upto: u64,
    long: Long,
}

impl Site {
    /// `size`: the bytes that are copied, or the pieces of work that are waited for.
    pub(crate) fn new(call: Call, size: usize) -> Self {
        Self { call, size }
    }

    fn place(self) -> (usize, usize) {
        (self.call as usize, self.size.max(1).ilog2() as usize)
    }

    /// From the call to when the work could begin, if it is launched so long after the call.
    fn lead(self, gap: f32) -> f32 {
        match self.call {
            Call::AsyncCopy => gap.max(self.size as f32 / LINK),
            Call::Copy | Call::Wait => gap,
        }
    }

    /// What the program gains by a hold. From one wait to the next the device is not given away at all.
    fn gain(self, lead: f32) -> f32 {
        match self.call {
            Call::Wait => SWITCH - ISSUE,
            Call::Copy | Call::AsyncCopy => lead.min(SWITCH) - ISSUE,
        }
    }

    /// What others lose to a hold that work meets. From one wait to the next it saves a switch back, too.
    fn loss(self, lead: f32) -> f32 {
        let switches = if self.call == Call::Wait { 2.0 } else { 1.0 };
        (lead - switches * SWITCH).max(0.0)
    }

    fn timeout(self, lead: f32) -> f32 {
        match self.call {
            Call::Wait => WAITING,
            Call::Copy | Call::AsyncCopy => (2.0 * lead).clamp(TIMEOUT.0, TIMEOUT.1),
        }
    }

    /// Work that is launched no later after the call comes soon: it may meet a hold.
    fn soon(self) -> f32 {
        SWITCH + self.timeout(f32::MAX)
    }
}

impl Lessons {
    pub(crate) const fn new() -> Self {
        Self {
            of: [[NEW; 64]; 3],
            budget: SAVED_UP,
            filled: 0,
            last: None,
            upto: 0,
            long: Long::new(),
        }
    }

    /// Whether to take the device for work that this call predicts, and for how long at most, in µs.
    pub(crate) fn decide(&mut self, site: Site, now: u64) -> Option<f32> {
        self.fill(now);
        let (call, size) = site.place();
        let lesson = self.of[call][size];
        let lead = site.lead(lesson.gap);
        let (timeout, gain) = (site.timeout(lead), site.gain(lead));
        let loss = lesson.hit * site.loss(lead) + (1.0 - lesson.hit) * missed(timeout);
        let pays = lesson.seen >= WATCHED && gain >= LEAST && WORTH * lesson.hit * gain > loss;
        let every = match lesson.shows() {
            true => !is_one_of(COMPARED.0, lesson.seen),
            false => is_one_of(COMPARED.1, lesson.seen),
        };
        (pays && every && self.budget > 0.0).then_some(timeout)
    }

    fn fill(&mut self, now: u64) {
        let passed = now.saturating_sub(self.filled) as f32;
        self.filled = now;
        self.budget = (self.budget + passed * SHARE).min(SAVED_UP);
    }

    /// After how many pieces in all the present request is near its end, if it is a long one like the last.
    pub(crate) fn due(&self) -> Option<u64> {
        Some(self.upto.wrapping_add(self.long.due()?))
    }

    /// The request is near its end, with so many pieces submitted in all. Whether to take the device, and for how long at most, in µs.
    pub(crate) fn near(&mut self, now: u64, submitted: u64) -> Option<f32> {
        self.fill(now);
        let takes = self.long.near(now, submitted, self.budget > 0.0);
        takes.then_some(ENDING)
    }

    /// The device could not be taken for a request that is near its end.
    pub(crate) fn not_held(&mut self) {
        self.long.not_held();
    }

    /// The work that a call predicted was seen done so many µs after the call.
    pub(crate) fn took(&mut self, site: Site, us: u64, held: bool) {
        let (call, size) = site.place();
        let (mean, count) = &mut self.of[call][size].took[usize::from(held)];
        let weight = RECENT.max(1.0 / (f32::from(*count) + 1.0));
        let differs = us as f32 - *mean;
        *mean += match *count {
            0 => differs,
            _ => differs.clamp(-FAR, FAR) * weight,
        };
        *count = count.saturating_add(1);
    }

    /// A wait that was answered with a hold has ended; whether the hold had before.
    pub(crate) fn waited(&mut self, site: Site, over: bool) {
        let (call, size) = site.place();
        let part = &mut self.of[call][size].over;
        *part += (f32::from(u8::from(over)) - *part) * RECENT;
    }

    /// Work was launched so many µs after the call, which had been answered with a hold of this time-out. Whether that is soon.
    pub(crate) fn learn(&mut self, site: Site, gap: u64, held: Option<f32>) -> bool {
        let (call, size) = site.place();
        let lesson = &mut self.of[call][size];
        let gap = gap as f32;
        let hit = gap <= site.soon();
        let weight = if lesson.seen == 0 { 1.0 } else { RECENT };
        if hit {
            let weight = if lesson.hit == 0.0 { 1.0 } else { weight };
            lesson.gap += (gap - lesson.gap) * weight;
        }
        lesson.hit += (f32::from(u8::from(hit)) - lesson.hit) * weight;
        lesson.seen = lesson.seen.checked_add(1).unwrap_or(WATCHED);
        if let Some(timeout) = held {
            let lead = site.lead(gap);
            self.budget -= match hit && lead <= SWITCH + timeout {
                true => site.loss(lead),
                false => missed(timeout),
            };
        }
        hit
    }

    /// A wait begins, when so many pieces have been submitted; a hold may outlast it, or not. Returns the wait, and whether the device is to be taken for it now. It
    /// is not where the last wait goes on: a program reads a number, and then waits for it.
    pub(crate) fn begin_wait(
        &mut self,
        now: u64,
        upto: u64,
        may_keep: bool,
    ) -> Option<(Waited, bool)> {
        let pieces = upto.wrapping_sub(std::mem::replace(&mut self.upto, upto));
        let before = self.last.take();
        if pieces == 0 {
            return Some((before?, false));
        }
        // What is submitted after a read may be part of the request, and is waited for with it.
        let ending = before.and_then(|it| it.ending);
        let before = before.and_then(|it| {
            let came_soon = self.learn(it.site, now.saturating_sub(it.ended), it.held);
            came_soon.then_some((it.site, it.ended, it.held.is_some()))
        });
        let mut wait = Waited::new(Site::new(Call::Wait, pieces as usize));
        wait.before = before;
        wait.ending = ending;
        if pieces >= LONG {
            let lost;
            (wait.ending, lost) = self.long.end(now, pieces, upto, ENDING);
            if lost {
                self.budget -= missed(ENDING);
            }
        }
        if may_keep {
            wait.held = self.decide(wait.site, now);
        }
        Some((wait, wait.held.is_some()))
    }

    /// It has ended; whether all work is known to be done.
    pub(crate) fn end_wait(&mut self, mut wait: Waited, now: u64, done: bool) {
        if let Some(end) = wait.ending.take_if(|_| done) {
            self.long.done(end, now);
        }
        if let Some((site, ended, held)) = wait.before.take_if(|_| done) {
            let took = now.saturating_sub(ended);
            self.took(site, took, held);
        }
        wait.ended = now;
        // Another thread's wait: what follows is not known to be its own.
        if let Some(timeout) = self.last.replace(wait).and_then(|it| it.held) {
            // It is not known what met that hold.
            self.budget -= missed(timeout);
        }
    }
}

impl Lesson {
    /// Whether holds last long enough, and requests with one take no longer than those without, as far as is known.
    fn shows(&self) -> bool {
        let [(without, one), (with, other)] = self.took;
        self.over < MOSTLY && (one < ENOUGH || other < ENOUGH || with <= without + NOISE)
    }
}

/// What others lose to one that no work meets.
fn missed(timeout: f32) -> f32 {
    timeout + 2.0 * SWITCH
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// A program that makes the same call every 10 ms and launches so long after it: how many holds?
    fn holds(lessons: &mut Lessons, site: Site, gap: u64, calls: u64, from: u64) -> u64 {
        (0..calls)
            .filter(|n| {
                let held = lessons.decide(site, from + n * 10_000);
                lessons.learn(site, gap, held);
                held.is_some()
            })
            .count() as u64
    }

    #[test]
    fn a_lead_as_long_as_a_switch_pays_after_a_few_calls() {
        let mut lessons = Lessons::new();
        let site = Site::new(Call::Copy, MIB);
        assert_eq!(holds(&mut lessons, site, 200, 100, 0), 91);
    }

    #[test]
    fn a_copy_that_goes_on_is_a_lead_of_its_own() {
        let mut lessons = Lessons::new();
        let long = Site::new(Call::AsyncCopy, 8 * MIB);
        assert_eq!(holds(&mut lessons, long, 5, 100, 0), 91);
        let short = Site::new(Call::AsyncCopy, 64 << 10);
        assert_eq!(holds(&mut lessons, short, 5, 100, 0), 0);
    }

    #[test]
    fn wait_that_another_follows_soon_pays_and_the_last_one_does_not() {
        // A host that is half as fast at times.
        for slow in 1..=2 {
            let (mut lessons, mut holds) = (Lessons::new(), [0; 3]);
            // Pieces of a token, then of what is made of it, and how long after each wait the next one begins.
            let waits = [(690, 70), (3, 400), (8, 9_000)];
            for now in (0..100).map(|token| token * 11_000 * slow) {
                for (count, (pieces, gap)) in holds.iter_mut().zip(waits) {
                    let site = Site::new(Call::Wait, pieces);
                    let held = lessons.decide(site, now);
                    lessons.learn(site, gap * slow, held);
                    *count += u32::from(held.is_some());
                }
            }
            assert_eq!(holds, [91, 91, 0], "{slow} times as slow");
        }
    }

    #[test]
    fn what_gains_nothing_or_comes_too_late_is_let_be() {
        let mut lessons = Lessons::new();
        for gap in [5, 1_500, 50_000] {
            let site = Site::new(Call::Copy, 4096);
            assert_eq!(holds(&mut lessons, site, gap, 100, 0), 0, "{gap}");
        }
    }

    #[test]
    fn a_program_that_changes_its_ways_is_followed() {
        let mut lessons = Lessons::new();
        let site = Site::new(Call::Copy, MIB);
        holds(&mut lessons, site, 150, 50, 0);
        let wasted = holds(&mut lessons, site, 1_000_000, 100, 1_000_000);
        assert!(wasted < 10, "{wasted}");
        let again = holds(&mut lessons, site, 150, 100, 3_000_000);
        assert!(again > 70, "{again}");
    }

    #[test]
    fn holds_must_show_in_the_requests() {
        let site = Site::new(Call::AsyncCopy, 8 * MIB);
        let run = |lessons: &mut Lessons, calls: u64, with: u64| {
            let mut held = 0;
            for n in 0..calls {
                let decided = lessons.decide(site, n * 10_000);
                lessons.learn(site, 5, decided);
                held += u64::from(decided.is_some());
                lessons.took(
                    site,
                    if decided.is_some() { with } else { 500 },
                    decided.is_some(),
                );
            }
            held
        };
        let mut lessons = Lessons::new();
        assert!(run(&mut lessons, 1000, 350) > 950);
        let mut lessons = Lessons::new();
        assert!(run(&mut lessons, 1000, 800) < 100);
        // The reason has gone: some are still tried.
        assert!(run(&mut lessons, 2000, 350) > 1000);
    }

    /// Such as those for a graph of 10 ms.
    #[test]
    fn waits_that_are_longer_than_a_hold_are_let_be() {
        let site = Site::new(Call::Wait, 1);
        let run = |lessons: &mut Lessons, over: bool| {
            let held = |n: &u64| {
                let held = lessons.decide(site, n * 10_000);
                if held.is_some() {
                    lessons.waited(site, over);
                }
                lessons.learn(site, 100, held);
                held.is_some()
            };
            (0..1_000).filter(held).count()
        };
        let mut lessons = Lessons::new();
        assert!(run(&mut lessons, false) > 950);
        assert!(run(&mut lessons, true) < 100);
        assert!(run(&mut lessons, false) > 800, "the reason has gone");
    }

    /// Every 150th takes 20 ms more by chance.
    #[test]
    fn requests_that_stand_still_by_chance_hide_nothing() {
        let site = Site::new(Call::AsyncCopy, 8 * MIB);
        let run = |with: u64| {
            let (mut lessons, mut held) = (Lessons::new(), 0);
            for n in 0..20_000u64 {
                let decided = lessons.decide(site, n * 10_000);
                lessons.learn(site, 5, decided);
                held += u64::from(decided.is_some());
                let took = if decided.is_some() { with } else { 500 };
                let stands = if n % 150 == 149 { 20_000 } else { 0 };
                lessons.took(site, took + stands, decided.is_some());
            }
            held
        };
        let (gain, harm) = (run(350), run(900));
        assert!(gain > 18_000, "{gain}");
        assert!(harm < 2_000, "{harm}");
    }

    /// It reads a number and then waits for it: what holds delay shows only in the second call.
    #[test]
    fn holds_before_a_read_must_show_in_the_wait_for_it() {
        let mut lessons = Lessons::new();
        let (mut now, mut upto, mut held) = (0, 0, 0);
        for _ in 0..1_000 {
            for (pieces, gap) in [(600, 100), (3, 9_000)] {
                upto += pieces;
                let (wait, _) = lessons.begin_wait(now, upto, true).unwrap();
                let late = wait.before.is_some_and(|(_, _, held)| held);
                held += u32::from(wait.held.is_some());
                lessons.end_wait(wait, now, false);
                let before = wait.held;
                let (wait, takes) = lessons.begin_wait(now + 2, upto, true).unwrap();
                assert_eq!((wait.held, takes), (before, false), "it goes on");
                now += if late { 1_500 } else { 300 };
                lessons.end_wait(wait, now, true);
                now += gap;
            }
        }
        assert!((10..150).contains(&held), "{held}");
    }

    /// Two threads wait at the same time, and nothing meets the hold of the first one.
    #[test]
    fn losses_of_threads_that_wait_together_have_a_budget() {
        const LOST: u64 = 1_500;
        let mut lessons = Lessons::new();
        let (mut now, mut upto, mut lost) = (0, 0, 0);
        let mut begin = |lessons: &mut Lessons, now, pieces| {
            upto += pieces;
            lessons.begin_wait(now, upto, true).unwrap().0
        };
        for _ in 0..5_000 {
            for _ in 0..4 {
                let alone = begin(&mut lessons, now, 600);
                lessons.end_wait(alone, now + 300, true);
                now += 400;
            }
            let first = begin(&mut lessons, now, 600);
            let other = begin(&mut lessons, now + 10, 3);
            lessons.end_wait(first, now + 300, true);
            lessons.end_wait(other, now + 310, true);
            lost += if first.held.is_some() { LOST } else { 0 };
            now += 5_000;
        }
        let most = now / 64 + 20_000 + LOST;
        assert!((most / 4..=most).contains(&lost), "{lost} of {most}");
    }

    /// Submits so many pieces, one every 15 µs, after which the host stops for so long before the last 40. When the device was taken, if it was.
    fn submit(
        lessons: &mut Lessons,
        now: &mut u64,
        upto: &mut u64,
        pieces: u64,
        stops: u64,
    ) -> Option<u64> {
        let (mut near, end) = (None, *upto + pieces);
        while *upto < end {
            *now += if *upto + 40 == end { 15 + stops } else { 15 };
            *upto += 1;
            if near.is_none() && lessons.due().is_some_and(|due| *upto >= due) {
                near = Some((*now, lessons.near(*now, *upto)));
            }
        }
        let (at, timeout) = near?;
        assert!(timeout.is_none_or(|us| us == ENDING));
        timeout.map(|_| at)
    }

    /// Some requests go on where the others end, or the host stops before their end: the device was taken for nothing.
    #[test]
    fn losses_to_requests_that_end_late_have_a_budget() {
        for (every, longer, stops) in [(16, 600, 0), (2, 0, 5_000)] {
            let mut lessons = Lessons::new();
            let (mut now, mut upto, mut lost) = (0, 0, 0.0);
            for n in 0..4_000 {
                let late = n % every == 0;
                let (pieces, stops) = if late {
                    (400 + longer, stops)
                } else {
                    (400, 0)
                };
                now += 4_000;
                let held = submit(&mut lessons, &mut now, &mut upto, pieces, stops);
                let is_lost = |at| longer > 0 && late || (now - at) as f32 > ENDING;
                lost += held
                    .filter(|at| is_lost(*at))
                    .map_or(0.0, |_| missed(ENDING));
                let (wait, _) = lessons.begin_wait(now, upto, false).unwrap();
                now += if held.is_some() { 150 } else { 700 };
                lessons.end_wait(wait, now, true);
            }
            let most = now as f32 * SHARE + SAVED_UP + missed(ENDING);
            assert!((most / 4.0..=most).contains(&lost), "{lost} of {most}");
        }
    }

    /// A program reads its results, submits a little more and waits: what holds delay shows only there.
    #[test]
    fn holds_before_the_end_must_show_in_the_wait_for_what_was_read() {
        let mut lessons = Lessons::new();
        let (mut now, mut upto, mut held) = (0, 0, 0);
        for _ in 0..2_000 {
            let taken = submit(&mut lessons, &mut now, &mut upto, 690, 0).is_some();
            let (read, _) = lessons.begin_wait(now, upto, false).unwrap();
            lessons.end_wait(read, now + 2, false);
            upto += 3;
            let (wait, _) = lessons.begin_wait(now + 10, upto, false).unwrap();
            now += if taken { 2_000 } else { 500 };
            lessons.end_wait(wait, now, true);
            held += u32::from(taken);
        }
        assert!((100..200).contains(&held), "{held}");
    }

    #[test]
    fn losses_have_a_budget() {
        let mut lessons = Lessons::new();
        let site = Site::new(Call::Copy, MIB);
        // 330 µs lost every ms would be a third of the device.
        let mut lost = 0;
        for n in 0..10_000 {
            let held = lessons.decide(site, n * 1000);
            lessons.learn(site, 500, held);
            lost += if held.is_some() { 330 } else { 0 };
        }
        let most = 10_000_000 / 64 + SAVED_UP as u64 + 330;
        assert!((most / 2..=most).contains(&lost), "{lost} of {most}");
    }

    #[test]
    fn time_outs_stay_within_bounds() {
        for gap in [40, 100, 200, 300, 600] {
            let mut lessons = Lessons::new();
            let site = Site::new(Call::Copy, 0);
            for n in 0..20 {
                if let Some(timeout) = lessons.decide(site, n * 100_000) {
                    assert!((TIMEOUT.0..=TIMEOUT.1).contains(&timeout));
                }
                lessons.learn(site, gap, None);
            }
        }
    }
}
