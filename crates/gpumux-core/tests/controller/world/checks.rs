//! What must hold at every moment, and what is measured.

use super::*;

impl World {
    /// As the daemon does.
    pub(super) fn check_timeslices(&mut self) {
        self.checked = self.now;
        for (id, group) in &self.groups {
            let event = match group.manner {
                Manner::Works => Event::Found(*id, group.timeslice),
                Manner::Fails => Event::Unreadable(*id),
                Manner::Hangs => continue,
            };
            self.controller.handle(self.now, event);
        }
    }

    /// Whether a group runs if the hardware gives it its turn. It runs no group of which one member's channels are disabled.
    pub(super) fn runs(&self, group: &Group) -> bool {
        let member = |it: &Group| it.shared == group.shared && it.frozen;
        let others = group.shared.is_some() && self.groups.values().any(member);
        let frozen = group.frozen || others;
        !frozen && self.processes[&group.process].busy
    }

    pub(super) fn is_away(&self, process: ProcessId) -> bool {
        self.processes[&process].swapped() > 0
    }

    /// Whether the controller may control all groups of a tenant, also by their other members, and its memory is there.
    pub(super) fn is_sound(&self, tenant: u64) -> bool {
        let shared = self.tenants[&tenant].shared;
        let member = |it: &Group| shared.is_some() && it.shared == shared;
        let meant = |it: &Group| it.tenant == tenant || member(it);
        let mut known = self.groups.iter().filter(|(_, it)| meant(it));
        known.all(|(id, group)| {
            let known = self.controller.domain(*id).expect("it came");
            group.manner == Manner::Works && !known.is_faulty() && !known.swapped_out
        })
    }

    /// How many run at timeslices about as short as a switch.
    pub(super) fn livelocked(&self, device: usize) -> usize {
        let livelocked = self.groups.iter().filter(|(id, it)| {
            let known = self.controller.domain(**id).expect("it came");
            let foreign = self.now < it.tampered + CHECK + SOON;
            let short = it.timeslice < SHORT && !known.is_faulty() && !foreign;
            it.device == device && self.runs(it) && short
        });
        let names = livelocked.map(|(id, it)| it.shared.unwrap_or(*id));
        names.collect::<BTreeSet<_>>().len()
    }

    /// What must always hold.
    pub(super) fn check(&mut self) {
        let now = self.now;
        let mut wrong = BTreeSet::new();
        // Another control hangs: nothing can be done before its deadline.
        let hung = |it: &Group| it.hung.is_some_and(|at| now < at + DEADLINE + SOON);
        let mut groups = self.groups.values();
        let hangs = groups.any(|it| it.manner == Manner::Hangs || hung(it)) || now < self.hung;
        for device in 0..self.devices {
            let here = |group: &&Group| group.device == device;
            if self.livelocked(device) > 1 && !hangs {
                wrong.insert(("two run at short timeslices", device as u64));
            }
            let running = self.groups.values().filter(here).any(|it| self.runs(it));
            let single = |it: &Group| {
                let busy = self.processes[&it.process].busy;
                busy && self.groups_of(it.tenant).count() == 1 && self.is_sound(it.tenant)
            };
            let could = self.groups.values().filter(here).any(single);
            if could && !running && !hangs {
                wrong.insert(("idles", device as u64));
            }
        }
        for (id, group) in &self.groups {
            let known = self.controller.domain(*id).expect("it came");
            if self.is_away(group.process) {
                assert!(group.frozen, "computes while its memory is away: {id:?}");
            }
            // What is not as the controller knows it was set by another program, or is being set.
            let foreign = now < group.tampered + CHECK + SOON;
            if !known.is_faulty() && group.manner == Manner::Works && !hangs && !foreign {
                let frozen = known.state.run == RunState::Frozen;
                if (group.frozen, group.timeslice) != (frozen, known.state.timeslice) {
                    wrong.insert(("differs", id.0));
                }
                if known.swapped_out && !group.frozen {
                    wrong.insert(("runs without its memory", id.0));
                }
            }
            if known.is_faulty() && group.manner == Manner::Works {
                let longest = group.mended + BACKOFF.1 + DEADLINE;
                assert!(now <= longest || hangs, "{id:?} is not taken up again");
            }
            if group.frozen {
                let ends = known.swapped_out
                    || known.is_faulty()
                    || self.controller.next_wakeup().is_some();
                assert!(
                    ends && !known.reason.is_empty(),
                    "{id:?} stays frozen: {known:?}"
                );
            }
        }
        for id in self.tenants.keys() {
            // On each device, one of its processes.
            let mut here: BTreeMap<usize, bool> = BTreeMap::new();
            let busy = self.groups_of(*id).map(|it| it.1);
            for group in busy.filter(|it| self.processes[&it.process].busy) {
                *here.entry(group.device).or_default() |= self.runs(group);
            }
            let states: BTreeSet<bool> = here.into_values().collect();
            if self.is_sound(*id) && states.len() > 1 && !hangs {
                wrong.insert(("runs in part", *id));
            }
        }
        self.wrong.retain(|key, _| wrong.contains(key));
        for key in wrong {
            let since = *self.wrong.entry(key).or_insert(now);
            let most = match key.0 {
                "runs in part" => PART,
                _ if now <= self.unseen => STANDS,
                _ => SOON,
            };
            let most = most + Micros(self.groups.len() as u64 * DEFERRED.0);
            assert!(
                now <= since + most,
                "{key:?} since {since}: {:?}",
                self.groups
            );
        }
        self.measure_waits(hangs);
    }

    /// Memory is handed out once, and accounted for.
    pub(super) fn check_memory(&self) {
        for (device, line) in (0..).zip(self.broker.lines()) {
            let has = |it: &Process| it.holding.get(&device).map(|it| it.resident());
            let (silent, known): (Vec<_>, Vec<_>) =
                self.processes.values().partition(|it| it.silent);
            let resident: u64 = known.into_iter().filter_map(has).sum();
            let absent = self.absent.values().map(|(it, _)| it);
            let unknown = absent.chain(silent).filter_map(has);
            let all = unknown.fold(resident, |sum, it| sum + it);
            assert!(all <= CAPACITY, "{all} bytes at {}", self.now);
            let room = line.capacity - line.occupied;
            assert!(
                resident <= room,
                "{resident} bytes of {room} at {}",
                self.now
            );
            let accounted = line.entries.iter().map(|(_, it)| it.holding.resident());
            let accounted: u64 = accounted.sum();
            assert!(
                accounted >= resident,
                "{accounted} accounted for, {resident} in use"
            );
        }
    }

    /// How long tenants wait with work although their memory is there.
    pub(super) fn measure_waits(&mut self, hangs: bool) {
        let now = self.now;
        let waiting: Vec<(DomainId, bool)> = (self.groups.iter())
            .map(|(id, it)| {
                let busy = self.processes[&it.process].busy;
                let waits = busy && it.frozen && !hangs && self.is_sound(it.tenant);
                (*id, waits)
            })
            .collect();
        for (id, waits) in waiting {
            let group = self.groups.get_mut(&id).expect("known");
            let since = waits.then(|| group.waits.unwrap_or(now));
            group.waits = since;
            let waited = since.map_or(Micros::ZERO, |since| now.saturating_sub(since));
            self.longest_wait = self.longest_wait.max(waited);
        }
        let away = self.tenants.keys().map(|id| {
            let mut own = self.processes.values().filter(|it| it.tenant == *id);
            (*id, own.any(|it| it.busy && it.swapped() > 0))
        });
        let away: Vec<(u64, bool)> = away.collect();
        for (id, away) in away {
            let tenant = self.tenants.get_mut(&id).expect("known");
            tenant.away = away.then(|| tenant.away.unwrap_or(now));
        }
    }

    /// How long a tenant has waited for its memory until now.
    pub(crate) fn away(&self, id: u64) -> Micros {
        let since = self.tenants.get(&id).and_then(|it| it.away);
        since.map_or(Micros::ZERO, |since| self.now.saturating_sub(since))
    }

    /// The longest wait that the policy's bounds allow any tenant of these devices.
    pub(crate) fn wait_bound(&self) -> Micros {
        let bounds = (0..self.devices).flat_map(|device| {
            let mut all: BTreeMap<DomainId, (UserId, Vec<&TenantSpec>)> = BTreeMap::new();
            for (id, group) in self.groups.iter().filter(|(_, it)| it.device == device) {
                let name = group.shared.unwrap_or(*id);
                let tenant = &self.tenants[&group.tenant];
                let (_, members) = all.entry(name).or_insert((tenant.user, Vec::new()));
                members.push(&tenant.spec);
            }
            let tenants = all.into_iter().map(|(id, (user, members))| TenantState {
                id: TenantId(id.0),
                user,
                spec: space::combine(members),
            });
            let snapshot = Snapshot::of_tenants(tenants.collect());
            self.controller.policy(device).bounds(&snapshot)
        });
        bounds.map(|it| it.wait).max().unwrap_or_default()
    }

    /// Service that each channel group receives from now on for so long, as parts of that time, by the hardware's own rules. `pauses`: how long
    /// tenants have work, and then none, in ms.
    pub(crate) fn shares_of(
        &mut self,
        time: Micros,
        pauses: &BTreeMap<u64, (u64, u64)>,
    ) -> BTreeMap<DomainId, f64> {
        let (start, end) = (self.now, self.now + time);
        let mut received: BTreeMap<DomainId, f64> = BTreeMap::new();
        while self.now < end {
            let before = self.now;
            let step = Micros(500).min(end.saturating_sub(before));
            for (id, (works, pause)) in pauses {
                let at = (before.0 / 1_000 + 7 * id) % (works + pause);
                self.set_busy(*id, at < *works);
            }
            for device in 0..self.devices {
                let mut states: BTreeMap<DomainId, DomainState> = BTreeMap::new();
                for (id, it) in self.groups.iter().filter(|(_, it)| it.device == device) {
                    let name = it.shared.unwrap_or(*id);
                    let state = states.entry(name).or_insert(DomainState {
                        timeslice: it.timeslice,
                        ..DomainState::new(name, TenantId(it.tenant), Demand::Idle, Micros::ZERO)
                    });
                    if self.processes[&it.process].busy {
                        state.demand = Demand::Busy;
                    }
                    if it.frozen {
                        state.run = RunState::Frozen;
                    }
                }
                let states: Vec<_> = states.into_values().collect();
                for (state, part) in states.iter().zip(fractions(&states, &Costs::default())) {
                    *received.entry(state.id).or_default() += part * step.0 as f64;
                }
            }
            self.run_for(step);
        }
        let time = end.saturating_sub(start).0 as f64;
        received
            .into_iter()
            .map(|(id, got)| (id, got / time))
            .collect()
    }

    /// The same of tenants that are in no MPS group and always have work or never.
    pub(crate) fn shares(&mut self, time: Micros) -> BTreeMap<u64, f64> {
        let all = self.shares_of(time, &BTreeMap::new());
        let mut received: BTreeMap<u64, f64> = BTreeMap::new();
        for (id, got) in all {
            if let Some(group) = self.groups.get(&id) {
                *received.entry(group.tenant).or_default() += got;
            }
        }
        received
    }
}
