//! What is shown: no terminal, no clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gpumux_core::Ring;
use gpumux_daemon::api::types::{DeviceMemory, Domain, History, SpecChange, Status, Tenant};

/// Seconds that the timeline goes back.
pub(super) const PAST: usize = 64;
/// How long a message stays.
const MESSAGE: Duration = Duration::from_secs(8);
/// Changes that can be undone.
const UNDO: usize = 32;

/// What the daemon answered.
pub(super) struct Answer {
    pub(super) status: Status,
    pub(super) tenants: Vec<Tenant>,
    pub(super) memory: Vec<DeviceMemory>,
    /// About the chosen tenant.
    pub(super) why: String,
}

/// A tenant on a device; or without one, if it has none yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Row {
    pub(super) device: String,
    /// The MPS group that it runs in there.
    pub(super) group: Option<u64>,
    /// The share that it gets when all tenants have work.
    pub(super) share: f64,
    /// Parts of the time since the last look: on the device, and waiting for it.
    pub(super) received: f64,
    pub(super) waiting: f64,
}

/// What the tenants are sorted by; of equal ones the oldest comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    Age,
    Name,
    Received,
    Waiting,
    Memory,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Page {
    #[default]
    Tenants,
    Gpus,
    /// All about the chosen tenant.
    Detail,
    Help,
}

/// What the next keys are for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Input {
    #[default]
    Commands,
    Filter,
    /// The class of this tenant.
    Class(String),
    /// Whether this tenant is to sleep.
    Sleep(String),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum What {
    Spec(SpecChange),
    /// Move its memory to the host, or back.
    Sleep,
    Wake,
}

/// A change of one tenant, and what undoes it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    pub(super) name: String,
    pub(super) what: What,
    /// None: this undoes another.
    pub(super) inverse: Option<What>,
    /// For people.
    pub(super) text: String,
}

#[derive(Default)]
pub(super) struct View {
    pub(super) answer: Option<Answer>,
    pub(super) page: Page,
    pub(super) input: Input,
    pub(super) order: Order,
    pub(super) filter: String,
    /// Lines that the page is scrolled by, where it has no chosen line.
    pub(super) scrolled: u16,
    /// Name of the chosen tenant; without one the first is.
    pub(super) name: Option<String>,
    pub(super) rows: BTreeMap<String, Vec<Row>>,
    /// Shares per tenant and device, one a second, the latest last.
    pub(super) past: BTreeMap<(String, String), Ring<f64, PAST>>,
    /// Why the daemon did not answer the last time.
    pub(super) lost: Option<String>,
    /// When it was said, and whether it is bad news.
    message: Option<(Duration, bool, String)>,
    pub(super) undo: Ring<Change, UNDO>,
    now: Duration,
    /// Second of the last share in `past`.
    second: u64,
    /// Per domain: when it was looked at, and its device and waiting time then, in µs.
    before: BTreeMap<u64, (Duration, u64, u64)>,
}

/// Two users may have tenants of one name: the daemon finds them as `user/name`.
fn name_by_user<'a>(all: impl Iterator<Item = (&'a mut String, &'a str)>) {
    let mut all: Vec<_> = all.collect();
    let mut users: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (name, user) in &all {
        users.entry((*name).clone()).or_default().insert(user);
    }
    for (name, user) in all.iter_mut().filter(|(name, _)| users[*name].len() > 1) {
        **name = format!("{user}/{name}");
    }
}

impl View {
    /// The daemon's answer at this time since any beginning.
    pub(super) fn update(&mut self, mut answer: Answer, at: Duration) {
        name_by_user((answer.tenants.iter_mut()).map(|it| (&mut it.name, &*it.user)));
        let mut before = BTreeMap::new();
        self.rows.clear();
        for tenant in &answer.tenants {
            let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
            for domain in &tenant.domains {
                let (received, waiting) = self.lately(domain, at);
                before.insert(domain.id, (at, domain.received_us, domain.waited_us));
                let row = rows.entry(&domain.device).or_default();
                // Processes in one MPS group run together: each has what all received.
                row.received = match row.group {
                    Some(group) if domain.group == Some(group) => row.received.max(received),
                    _ => row.received + received,
                };
                row.device = domain.device.clone();
                row.group = domain.group;
                row.share = row.share.max(domain.entitled_share);
                row.waiting = row.waiting.max(waiting);
            }
            let mut rows: Vec<Row> = rows.into_values().collect();
            if rows.is_empty() {
                rows.push(Row::default());
            }
            self.rows.insert(tenant.name.clone(), rows);
        }
        self.before = before;
        let rows = &self.rows;
        let lives = |(name, device): &(String, String)| {
            rows.get(name)
                .is_some_and(|rows| rows.iter().any(|row| row.device == *device))
        };
        self.past.retain(|key, _| lives(key));
        if at.as_secs() > self.second {
            self.second = at.as_secs();
            for (name, rows) in rows {
                for row in rows {
                    let key = (name.clone(), row.device.clone());
                    let past = self.past.entry(key).or_default();
                    past.push(row.received);
                }
            }
        }
        (self.answer, self.now, self.lost) = (Some(answer), at, None);
    }

    /// What was before `top` was started.
    pub(super) fn remember(&mut self, history: &History) {
        let mut living: Vec<_> = (history.tenants.iter())
            .filter(|it| it.ended_s_ago.is_none())
            .map(|it| (it.name.clone(), it))
            .collect();
        name_by_user(living.iter_mut().map(|(name, it)| (name, &*it.user)));
        for (name, tenant) in living {
            let known = tenant.received.iter().skip_while(|it| it.is_none());
            let past = known.map(|it| it.unwrap_or(0.0).into()).collect();
            self.past.insert((name, tenant.device.clone()), past);
        }
    }

    /// Parts of the time since the last look.
    fn lately(&self, domain: &Domain, at: Duration) -> (f64, f64) {
        let Some((then, received, waited)) = self.before.get(&domain.id) else {
            return (domain.received_share, 0.0);
        };
        let elapsed = at.saturating_sub(*then).as_micros().max(1) as f64;
        let part = |now: u64, old: u64| (now.saturating_sub(old) as f64 / elapsed).min(1.0);
        (
            part(domain.received_us, *received),
            part(domain.waited_us, *waited),
        )
    }

    /// Parts of a GPU's time, the largest first, each with the tenants that received it: those of an MPS group together.
    pub(super) fn received(&self, device: &str) -> Vec<(Vec<&str>, f64)> {
        let mut all: Vec<(Vec<&str>, f64)> = Vec::new();
        let mut groups: BTreeMap<u64, usize> = BTreeMap::new();
        for (name, rows) in &self.rows {
            for row in rows.iter().filter(|row| row.device == device) {
                let at = match row.group {
                    Some(group) => *groups.entry(group).or_insert(all.len()),
                    None => all.len(),
                };
                if at == all.len() {
                    all.push(Default::default());
                }
                let (names, part) = &mut all[at];
                names.push(name);
                *part = part.max(row.received);
            }
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }

    /// The daemon did not answer at this time.
    pub(super) fn lose(&mut self, why: String, at: Duration) {
        (self.lost, self.now) = (Some(why), at);
    }

    pub(super) fn say(&mut self, text: String, bad: bool) {
        self.message = Some((self.now, bad, text));
    }

    /// The message, and whether it is bad news, until it is old.
    pub(super) fn message(&self) -> Option<(bool, &str)> {
        let (at, bad, text) = self.message.as_ref()?;
        (self.now < *at + MESSAGE).then_some((*bad, text))
    }

    pub(super) fn forget_message(&mut self) {
        self.message = None;
    }

    /// A change was made.
    pub(super) fn changed(&mut self, change: Change) {
        let undo = match change.inverse {
            Some(_) => " u undoes it.",
            None => "",
        };
        self.say(format!("{}{undo}", change.text), false);
        if change.inverse.is_some() {
            self.undo.push(change);
        }
    }

    /// What the filter leaves, sorted.
    pub(super) fn visible(&self) -> Vec<&Tenant> {
        let all = self.answer.iter().flat_map(|answer| &answer.tenants);
        let wanted = self.filter.to_lowercase();
        let is_wanted = |it: &&Tenant| {
            let words = [&*it.name, it.class.name(), it.state.name()];
            words
                .iter()
                .any(|word| word.to_lowercase().contains(&wanted))
        };
        let mut shown: Vec<&Tenant> = all.filter(is_wanted).collect();
        let most = |it: &Tenant, value: fn(&Row) -> f64| {
            let rows = self.rows.get(&it.name).into_iter().flatten();
            rows.map(value).fold(0.0, f64::max)
        };
        let memory = |it: &Tenant| {
            it.memory
                .iter()
                .map(|it| it.in_use + it.swapped)
                .sum::<u64>()
        };
        match self.order {
            Order::Age => {}
            Order::Name => shown.sort_by(|a, b| a.name.cmp(&b.name)),
            Order::Received => shown.sort_by(|a, b| {
                most(b, |row| row.received).total_cmp(&most(a, |row| row.received))
            }),
            Order::Waiting => shown
                .sort_by(|a, b| most(b, |row| row.waiting).total_cmp(&most(a, |row| row.waiting))),
            Order::Memory => shown.sort_by_key(|it| std::cmp::Reverse(memory(it))),
        }
        shown
    }

    /// The chosen tenant, of those that are shown.
    pub(super) fn chosen(&self) -> Option<&Tenant> {
        let shown = self.visible();
        let named = shown.iter().find(|it| Some(&it.name) == self.name.as_ref());
        named.or(shown.first()).copied()
    }
}
