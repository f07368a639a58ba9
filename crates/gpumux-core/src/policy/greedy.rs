//! Latency domains that take what they can get, and the looks at them: at what one does when it may take the device at once.

use crate::{DomainId, Micros, Timeslice};

/// How much of the time a domain has work is averaged over so many µs: some tokens of a language model, a few tens of short requests.
const BUSY: f64 = 250_000.0;
/// The same in a look.
const BUSY_IN_LOOK: f64 = 50_000.0;
/// A latency domain takes what it can get while it has work for at least the first part of the time, as after a long pause; it is found to from
/// the second on. What it receives does not tell: one with short requests and a small share receives that, too.
const GREEDY: (f64, f64) = (0.3, 0.6);
/// From one look to the next, whichever domains: at least, and where requests are long. The first is also how long a domain waits for its first look,
/// unless its requests are short; the second is also the longest wait between two looks at one domain.
const LOOKS: (Micros, Micros) = (Micros::from_millis(500), Micros::from_secs(32));
/// A look that shows nothing new has the next one wait so many times as long.
const SELDOMER: u64 = 4;
/// How long a look takes at most.
const LOOK: Micros = Micros::from_millis(100);

/// How much of the time a domain has work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Habit {
    /// The part of the time in which it had work lately, [`BUSY`] back or so; while it has none, before it paused.
    part: f64,
    /// It has work for certain, and since when it has or has not.
    busy: (bool, Micros),
    /// How long its requests take: see [`crate::DomainState::request`].
    pub(super) request: Option<Micros>,
    /// Takes what it can get, of latency domains: since when.
    greedy: Option<Micros>,
    /// How long it is taken for one until it is looked at.
    look_after: Micros,
}

/// The looks at the domains of one device. Among timeslices, one that waits with a short request seems to be one that takes what it can get.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Looks {
    /// Since when domains share by timeslices that all take what they can get.
    together: Option<Micros>,
    /// Which is looked at.
    of: Option<DomainId>,
    /// When the last look began.
    began: Micros,
}

/// What a look has shown so far.
pub(super) enum Seen {
    /// It may be over at this time.
    Nothing(Micros),
    /// The domain takes what it can get.
    Greedy,
    /// It does not.
    Modest,
}

impl Habit {
    /// It had work in the last `elapsed` µs, if it did. A pause counts when it is over: before, it is not known whether the domain has little
    /// work, or none for now.
    pub(super) fn work(&mut self, elapsed: f64, in_look: bool) {
        if self.busy.0 {
            let kept = (-elapsed / window(in_look)).exp();
            self.part = kept * self.part + 1.0 - kept;
        }
    }

    /// Whether it has work from now on. When a pause is over, it counts, a long one as one of the window; after that, what it does is looked at at once.
    pub(super) fn see(&mut self, busy: bool, now: Micros, in_look: bool) {
        let (before, since) = self.busy;
        if busy == before {
            return;
        }
        let lasted = now.saturating_sub(since);
        self.busy = (busy, now);
        if before {
            return;
        }
        self.part *= (-(lasted.0 as f64 / window(in_look)).min(1.0)).exp();
        if lasted >= LOOKS.0 {
            (self.greedy, self.look_after) = (self.greedy.map(|_| now), Micros::ZERO);
        }
    }

    /// Whether its requests are shorter than a timeslice for which they would wait.
    fn has_short_requests(&self) -> bool {
        self.request.is_some_and(|it| it.0 < Timeslice::DEFAULT.0)
    }

    /// Whether it was found to take what it can get.
    pub(super) fn is_greedy(&self) -> bool {
        self.greedy.is_some()
    }

    /// Whether it takes what it can get.
    pub(super) fn judge(&mut self, now: Micros) -> bool {
        let (least, most) = GREEDY;
        if self.part < least {
            self.greedy = None;
        } else if self.greedy.is_none() && self.part >= most {
            let at_once = self.has_short_requests();
            let look_after = if at_once { Micros::ZERO } else { LOOKS.0 };
            (self.greedy, self.look_after) = (Some(now), look_after);
        }
        self.is_greedy()
    }
}

impl Looks {
    /// Whether this domain is looked at.
    pub(super) fn are_at(&self, id: DomainId) -> bool {
        self.of == Some(id)
    }

    /// Domains share by timeslices that all take what they can get, as far as is known. Begins a look at one of them, if that is due. Else when one may
    /// be. Seldom at one whose requests take longer than a `round`: short ones wait for that long at most.
    pub(super) fn begin<'a>(
        &mut self,
        now: Micros,
        round: Micros,
        domains: impl Iterator<Item = (DomainId, &'a mut Habit)>,
    ) -> Option<Micros> {
        let begun = *self.together.get_or_insert(now);
        let due = |it: &Habit| {
            let greedy = it.greedy.filter(|_| it.busy.0)?;
            let within_round = it.request.is_some_and(|request| request <= round);
            // Many may begin with one that comes back, so that the first look at it shows nothing.
            let soon = within_round || it.look_after <= LOOK;
            let apart = if soon { LOOKS.0 } else { LOOKS.1 };
            Some((greedy.max(begun) + it.look_after).max(self.began + apart))
        };
        let due = domains.filter_map(|(id, it)| Some((due(it)?, id, it)));
        let Some((at, id, habit)) = due.min_by_key(|(at, ..)| *at) else {
            return Some(now + LOOKS.0);
        };
        if at > now {
            return Some(at);
        }
        (habit.greedy, habit.part) = (None, 0.0);
        (self.of, self.began) = (Some(id), now);
        None
    }

    /// They do not, or not now.
    pub(super) fn are_apart(&mut self) {
        self.together = self.together.filter(|_| self.of.is_some());
    }

    /// What the look at a domain shows. It takes what it can get if it works most of the time, or for so `long` without a
    /// pause where its requests are not short.
    pub(super) fn look(&mut self, now: Micros, long: Micros, habit: &mut Habit) -> Seen {
        let end = self.began + LOOK;
        let works = match habit.busy {
            // Those that came while it waited among timeslices are worked off first.
            (true, _) if habit.has_short_requests() => end,
            // Many may begin with it: until they are frozen, its first request waits.
            (true, since) if habit.look_after == Micros::ZERO => {
                since.max(self.began) + long + long
            }
            (true, since) => since.max(self.began) + long,
            (false, _) => end,
        };
        let mostly = habit.part >= GREEDY.1 && (now >= end || !habit.has_short_requests());
        let greedy = works <= now && works < end || mostly;
        if !greedy && now < end {
            return Seen::Nothing(end.min(works));
        }
        self.end();
        if !greedy {
            return Seen::Modest;
        }
        habit.part = habit.part.max(GREEDY.1);
        habit.greedy = Some(now);
        let after = Micros(SELDOMER * habit.look_after.0);
        habit.look_after = after.clamp(LOOK, LOOKS.1);
        Seen::Greedy
    }

    /// No domain is looked at any more.
    pub(super) fn end(&mut self) {
        self.of = None;
    }
}

/// Over how many µs it is averaged how much of the time a domain has work.
fn window(in_look: bool) -> f64 {
    if in_look { BUSY_IN_LOOK } else { BUSY }
}
