//! What the simulated daemon sees of programs, and when.

use super::*;

impl Place {
    /// A piece of work is launched.
    pub(super) fn launch(&mut self, now: Nanos) {
        // The first of a request comes after a pause.
        self.launched = self.launched.max(self.changed);
        if self.outstanding > 0 && now - self.launched >= Progress::GAP.0 * 1_000 {
            self.waited(now);
        }
        self.pieces += 1;
        self.launched = now;
    }

    /// It has launched nothing for a while, and waits for what it has launched.
    fn waited(&mut self, now: Nanos) {
        let us = (now - self.launched) / 1_000;
        let waited = &mut self.progress.waited_us;
        *waited = waited.wrapping_add(us as u32);
    }
}

impl Simulation<'_> {
    /// The number of a place's outstanding requests changes.
    pub(super) fn outstanding(&mut self, tenant: usize, place: usize, by: isize) {
        let (now, warmup) = (self.now, self.warmup);
        let delay = self.scenario.demand_delay_us * 1000;
        let player = &mut self.players[tenant];
        let state = &mut player.places[place];
        let before = state.outstanding;
        state.outstanding = before.saturating_add_signed(by);
        if (before > 0) == (state.outstanding > 0) {
            return;
        }
        let used = &mut self.used[state.device];
        if used.outstanding > 0 {
            used.wanted += now - used.changed.max(warmup).min(now);
        }
        used.changed = now;
        match before > 0 {
            true => {
                player.wanted += now - state.changed.max(warmup).min(now);
                used.outstanding -= 1;
                state.progress.waits += 1;
                state.progress.pieces = state.pieces;
                state.progress.busy += Micros((now - state.changed) / 1_000);
                state.waited(now);
            }
            false => {
                state.progressed = now;
                match now - state.changed >= delay {
                    true => state.paused += (now - state.changed).min(now % TICK),
                    false => state.left += 1,
                }
                used.outstanding += 1;
                if let Some(daemon) = &mut self.daemon {
                    daemon.came(now, state.id);
                }
            }
        }
        state.changed = now;
        self.check_demand(tenant, place);
    }

    /// The daemon will see this place's demand later.
    pub(super) fn check_demand(&mut self, tenant: usize, place: usize) {
        let delay = self.scenario.demand_delay_us * 1000;
        let state = &mut self.players[tenant].places[place];
        if self.daemon.is_some() && !state.check_due {
            state.check_due = true;
            self.at(self.now + delay, Happening::Demand(tenant, place));
        }
    }

    /// The daemon sees a place's demand: work at once, its absence when it has lasted for the delay.
    pub(super) fn demand(&mut self, tenant: usize, place: usize) {
        let delay = self.scenario.demand_delay_us * 1000;
        let player = &mut self.players[tenant];
        let state = &mut player.places[place];
        state.check_due = false;
        let (device, id, changed) = (state.device, state.id, state.changed);
        if player.gone {
            return;
        }
        // A group has work if any of its members has.
        let places = self.players.iter().filter(|player| !player.gone);
        let busy = places
            .flat_map(|player| &player.places)
            .any(|place| place.outstanding > 0 && (place.device, place.id) == (device, id));
        let state = &self.players[tenant].places[place];
        let progress = Progress {
            submitted: state.pieces,
            ..state.progress
        };
        let Some(daemon) = &mut self.daemon else {
            return;
        };
        daemon.progress(self.now, id, progress);
        if busy {
            daemon.demand(self.now, id, Demand::Busy);
        } else if self.now >= changed + delay {
            daemon.demand(self.now, id, Demand::Idle);
        } else {
            self.players[tenant].places[place].check_due = true;
            self.at(changed + delay, Happening::Demand(tenant, place));
        }
    }

    /// Observes progress; ends the warm-up and windows.
    pub(super) fn tick(&mut self) {
        self.at(self.now + TICK, Happening::Tick);
        let ends_warmup = self.now >= self.warmup && self.now < self.warmup + TICK;
        let window = nanos(self.scenario.window_s);
        let ends_window = self.now >= self.window_start + window;
        let used: Vec<Nanos> = (0..self.gpus.len())
            .map(|device| self.progress_of(device))
            .collect();
        let (tuning, costs) = (&self.scenario.tuning, &self.scenario.costs);
        let kinds = self.scenario.tenants.iter().map(|it| (&it.user, it.class));
        let quantum = 1e3 * tuning.quantum(costs, kinds);
        let delay = self.scenario.demand_delay_us * 1000;
        for tenant in 0..self.players.len() {
            let player = &mut self.players[tenant];
            if player.gone {
                continue;
            }
            for place in &mut player.places {
                let gpu = &self.gpus[place.device];
                let received = gpu.received(place.group).unwrap_or_default();
                let busy = gpu.stream_received(place.stream).unwrap_or_default().busy;
                if let Some(bound) = self.bounds.get(&TenantId(tenant as u64)) {
                    let gained = (busy - place.seen) as f64;
                    let available = used[place.device] - self.used[place.device].seen;
                    let since = self.now.saturating_sub(place.changed);
                    let mut paused = std::mem::take(&mut place.paused);
                    if place.outstanding == 0 && since >= delay {
                        paused += since.min(TICK);
                    }
                    let left = std::mem::take(&mut place.left) * 2 * costs.switch.0 * 1_000;
                    let worked = 1.0 - ((paused + left) as f64 / TICK as f64).min(1.0);
                    let due = worked * bound.share * available as f64;
                    let goes_on = place.outstanding > 0 || since <= GRACE;
                    let counts = goes_on && !place.swapped_out && self.now > self.warmup;
                    let lag = (place.lag + due - gained).max(0.0);
                    place.lag = match (counts, paused) {
                        (false, _) => 0.0,
                        (true, 0) => lag,
                        (true, _) => lag.min(quantum),
                    };
                    place.worst_lag = place.worst_lag.max(place.lag);
                }
                if busy > place.seen || place.outstanding == 0 {
                    place.progressed = self.now;
                }
                place.seen = busy;
                if self.now >= self.warmup {
                    let waited = self.now - place.progressed.max(self.warmup);
                    player.longest_wait = player.longest_wait.max(waited);
                }
                if ends_warmup {
                    place.base = busy;
                    place.base_preemptions = received.preemptions;
                }
                if ends_warmup || ends_window {
                    let of = used[place.device] - self.used[place.device].window;
                    let share = (busy - place.window) as f64 / of.max(1) as f64;
                    place.window = busy;
                    let whole = std::mem::replace(&mut place.whole_window, true);
                    if whole && !ends_warmup && self.now > self.warmup && of > 0 {
                        player.window_min = player.window_min.min(share);
                        player.window_max = player.window_max.max(share);
                    }
                    if let Some(trace) = &mut self.trace {
                        trace.share(&player.program.name, self.now, share);
                    }
                }
            }
        }
        for (device, used) in used.into_iter().enumerate() {
            self.used[device].seen = used;
            if ends_warmup || ends_window {
                self.used[device].window = used;
            }
            if ends_warmup {
                self.used[device].base = used;
            }
        }
        if ends_warmup || ends_window {
            self.window_start = self.now;
        }
    }

    /// All progress on a device so far.
    pub(super) fn progress_of(&self, device: usize) -> Nanos {
        let places = self
            .players
            .iter()
            .filter(|player| !player.gone)
            .flat_map(|player| &player.places);
        let here = places.filter(|place| place.device == device);
        let groups: BTreeSet<GroupId> = here.map(|place| place.group).collect();
        let busy = groups.into_iter().map(|group| {
            let received = self.gpus[device].received(group);
            received.map_or(0, |received| received.busy)
        });
        self.used[device].gone + busy.sum::<Nanos>()
    }

    /// SMs that a tenant has in its group, where they are divided.
    pub(super) fn sms_of(&self, tenant: usize) -> Option<u32> {
        let place = self.players[tenant].places.first()?;
        let key = (place.device, place.trust.clone()?);
        self.shared.get(&key)?.shares.as_ref()?.sms(place.stream)
    }
}
