//! How tenants come and go: where they run, their groups, and their memory.

use super::*;

impl Simulation<'_> {
    /// A tenant comes: its program makes its groups.
    pub(super) fn start(&mut self, tenant: usize) {
        let program = self.players[tenant].program;
        for &device in &program.kind.devices {
            let trust = self.group_of(program, device);
            let stream = self.gpus[device].add_stream();
            let (group, id) = match &trust {
                Some(trust) => self.join(tenant, device, trust, stream),
                None => self.domain(device, tenant, &program.spec),
            };
            let gpu = &mut self.gpus[device];
            let timeslice = match (self.mode, program.spec.class) {
                (Mode::Fixed, Class::Latency) => Some(Timeslice::MAX),
                (Mode::Fixed, _) => Some(Timeslice::MIN),
                (Mode::TimeSlicing, _) => program.kind.timeslice_us.map(Timeslice),
                _ => None,
            };
            if let Some(timeslice) = timeslice {
                gpu.set_timeslice(group, timeslice).expect("just made");
            }
            let place = self.players[tenant].places.len();
            self.players[tenant].places.push(Place {
                device,
                id,
                group,
                stream,
                trust,
                outstanding: 0,
                changed: self.now,
                progress: Progress::default(),
                pieces: 0,
                launched: self.now,
                check_due: false,
                seen: 0,
                window: 0,
                base: 0,
                base_preemptions: 0,
                progressed: self.now,
                paused: 0,
                left: 0,
                lag: 0.0,
                worst_lag: 0.0,
                whole_window: false,
                holds: Vec::new(),
                swapped_out: false,
            });
            self.check_demand(tenant, place);
            self.want_memory(tenant, place);
        }
        self.move_memory();
        match program.kind.arrival {
            Arrival::Closed { depth, .. } => {
                for _ in 0..depth {
                    self.ask(
                        tenant,
                        Request {
                            at_s: 0.0,
                            context: 0,
                            generated: 0,
                        },
                    );
                }
                self.go_on(tenant);
            }
            _ => self.next_arrival(tenant),
        }
    }

    /// A tenant needs its memory on a device from now on.
    pub(super) fn want_memory(&mut self, tenant: usize, place: usize) {
        let program = self.players[tenant].program;
        let place = &self.players[tenant].places[place];
        let bytes = gib(program.kind.memory_gib);
        if let Some(broker) = self.memory.get_mut(place.device)
            && bytes > 0
            && place.trust.is_none()
        {
            let newcomer = Newcomer {
                tenant: TenantId(tenant as u64),
                class: program.spec.class,
                share: program.spec.memory(),
                bytes,
            };
            broker.join(self.now, newcomer);
        }
    }

    /// Moves memory as far as it must, and freezes the tenants that lack theirs.
    pub(super) fn move_memory(&mut self) {
        let players = &self.players;
        let idle = |tenant: TenantId| {
            let places = &players[tenant.0 as usize].places;
            places.iter().all(|place| place.outstanding == 0)
        };
        let next = (self.memory.iter_mut())
            .filter_map(|broker| broker.step(self.now, idle))
            .min();
        for (tenant, player) in self.players.iter_mut().enumerate() {
            for place in player.places.iter_mut().filter(|_| !player.gone) {
                let Some(broker) = self.memory.get(place.device) else {
                    continue;
                };
                let swapped_out = !broker.is_home(TenantId(tenant as u64));
                if swapped_out != std::mem::replace(&mut place.swapped_out, swapped_out)
                    && let Some(daemon) = &mut self.daemon
                {
                    daemon.park(self.now, place.id, swapped_out);
                }
            }
        }
        if let Some(next) = next.filter(|next| *next > self.now && *next != self.moved) {
            self.moved = next;
            self.at(next, Happening::Moved);
        }
    }

    /// The trust domain whose group a tenant joins, if it joins one.
    pub(super) fn group_of(&self, program: &Program, device: usize) -> Option<String> {
        let trust = match self.mode {
            Mode::Mps => return Some(String::new()),
            Mode::Space | Mode::Equal | Mode::Utility => program.kind.trust.clone()?,
            Mode::Alone | Mode::TimeSlicing | Mode::Fixed | Mode::Gpumux => return None,
        };
        let group = self.shared.get(&(device, trust.clone()));
        let decision = space::decide(&Applicant {
            sharing: program.kind.sharing,
            trust: Some(&trust),
            class: program.spec.class,
            members: group.map_or(0, |group| group.members.len()),
            room: ROOM,
            unavailable: None,
            faults: 0,
            prediction: None,
            // Shares are divided anew when a member comes or goes.
            hindered: false,
        });
        (decision.way == Way::Space).then_some(trust)
    }

    /// A new domain of this tenant.
    pub(super) fn domain(
        &mut self,
        device: usize,
        tenant: usize,
        spec: &TenantSpec,
    ) -> (GroupId, DomainId) {
        let group = self.gpus[device].add_group(Engine::Compute);
        self.domains += 1;
        let id = DomainId(self.domains);
        if let Some(daemon) = &mut self.daemon {
            let user = self.players[tenant].program.user;
            let tenant = TenantId(tenant as u64);
            daemon.announce(self.now, device, (id, group), (tenant, user, spec));
        }
        (group, id)
    }

    /// A tenant joins a group, which is made if it is the first. To the daemon the first one stands for all.
    pub(super) fn join(
        &mut self,
        tenant: usize,
        device: usize,
        trust: &str,
        stream: StreamId,
    ) -> (GroupId, DomainId) {
        let key = (device, trust.to_owned());
        if !self.shared.contains_key(&key) {
            let spec = &self.players[tenant].program.spec;
            let (group, id) = self.domain(device, tenant, spec);
            let rule = match self.mode {
                Mode::Equal => Some(Rule::MaxMin),
                Mode::Utility => Some(Rule::Utility),
                _ => None,
            };
            let made = SharedGroup {
                group,
                id,
                tenant: TenantId(tenant as u64),
                user: self.players[tenant].program.user,
                members: Vec::new(),
                shares: rule.map(Shares::new),
            };
            self.shared.insert(key.clone(), made);
        }
        let program = &self.players[tenant].program;
        let shared = self.shared.get_mut(&key).expect("just made");
        shared.members.push(tenant);
        if let Some(shares) = &mut shared.shares {
            let work = &program.kind.work;
            shares.join(&mut self.gpus[device], stream, &program.spec, work);
        }
        let made = (shared.group, shared.id);
        self.guarantee(&key);
        made
    }

    /// A member leaves a group. Whether others stay.
    pub(super) fn part(&mut self, tenant: usize, key: (usize, String), stream: StreamId) -> bool {
        let Some(shared) = self.shared.get_mut(&key) else {
            return false;
        };
        shared.members.retain(|member| *member != tenant);
        if shared.members.is_empty() {
            self.shared.remove(&key);
            return false;
        }
        if let Some(shares) = &mut shared.shares {
            shares.leave(&mut self.gpus[key.0], stream);
        }
        self.guarantee(&key);
        true
    }

    /// The daemon guarantees a group what its members are guaranteed together.
    pub(super) fn guarantee(&mut self, key: &(usize, String)) {
        if let (Some(shared), Some(daemon)) = (self.shared.get(key), &mut self.daemon) {
            let specs = shared.members.iter();
            let specs = specs.map(|member| &self.players[*member].program.spec);
            // The first that came stands for all, also when it has left.
            daemon.guarantee(self.now, shared.tenant, shared.user, space::combine(specs));
        }
    }

    /// A tenant goes, in the middle of whatever it does.
    pub(super) fn stop(&mut self, tenant: usize) {
        let (mut gained, mut preempted) = (0, 0);
        for place in 0..self.players[tenant].places.len() {
            let outstanding = self.players[tenant].places[place].outstanding;
            self.outstanding(tenant, place, -(outstanding as isize));
            let place = &self.players[tenant].places[place];
            let gpu = &mut self.gpus[place.device];
            let received = gpu.received(place.group).expect("its own");
            let busy = gpu.stream_received(place.stream).expect("its own").busy;
            if self.now > self.warmup {
                gained += busy - place.base;
                preempted += received.preemptions - place.base_preemptions;
            }
            let (device, group, id) = (place.device, place.group, place.id);
            let (stream, trust) = (place.stream, place.trust.clone());
            gpu.remove_stream(stream).expect("its own");
            if trust.is_some_and(|trust| self.part(tenant, (device, trust), stream)) {
                continue;
            }
            if let Some(broker) = self.memory.get_mut(device) {
                let moves = broker.leave(self.now, TenantId(tenant as u64));
                self.players[tenant].moves.add(moves.unwrap_or_default());
            }
            self.used[device].gone += received.busy;
            self.gpus[device].remove_group(group).expect("its own");
            if let Some(daemon) = &mut self.daemon {
                daemon.forget(self.now, id);
            }
        }
        let player = &mut self.players[tenant];
        (player.gone, player.received, player.preempted) = (true, gained, preempted);
        for waiting in &mut self.waiting {
            waiting.retain(|_, awaited| awaited.tenant != tenant);
        }
    }
}
