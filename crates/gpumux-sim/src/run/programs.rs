//! What programs do: their requests, kernel by kernel.

use super::*;

impl Simulation<'_> {
    pub(super) fn next_arrival(&mut self, tenant: usize) {
        let player = &mut self.players[tenant];
        if let Some((at, request)) = player.arrivals.next(&mut player.rng) {
            player.upcoming = request;
            self.at(at.max(self.now), Happening::Arrive(tenant));
        }
    }

    /// A request arrives at the program.
    pub(super) fn ask(&mut self, tenant: usize, request: Request) {
        let arrived = self.now;
        self.players[tenant].queue.push_back(Sequence {
            arrived,
            context: request.context,
            left: request.generated.max(1),
        });
    }

    /// The program begins what it can.
    pub(super) fn go_on(&mut self, tenant: usize) {
        let kind = self.players[tenant].program.kind;
        let depth = match kind.arrival {
            Arrival::Closed { depth, .. } => depth,
            _ => 1,
        };
        while self.players[tenant].flights.len() < depth {
            match kind.work {
                Work::Kernels {
                    kernel_us,
                    launch_us,
                    cv,
                    kernels,
                    prepare_us,
                    hint_us,
                    ..
                } => {
                    let player = &mut self.players[tenant];
                    let Some(request) = player.queue.pop_front() else {
                        return;
                    };
                    let factor = spread(cv, &mut player.rng);
                    // A graph is one launch of all its kernels, overhead included.
                    let overhead = self.scenario.hardware.kernel_overhead;
                    let kernel = nanos(kernel_us * factor * 1e-6);
                    let kernel = match launch_us == 0.0 {
                        true => (kernel + overhead)
                            .saturating_mul(kernels as u64)
                            .saturating_sub(overhead),
                        false => kernel,
                    };
                    // What passes between the hint and the launch is the program's own: it counts for no request, but the queue does.
                    let ahead = nanos(hint_us.unwrap_or(0.0) * 1e-6);
                    let request = self.fly(tenant, request.arrived + ahead, kernel);
                    match hint_us {
                        Some(_) => {
                            let at = self.now + ahead;
                            let lead = if ahead > SOON { LEAD } else { ahead };
                            self.at(at - lead, Happening::Hold(tenant, request, lead + MARGIN));
                            self.at(at, Happening::Launch(tenant, request, 0));
                        }
                        None if prepare_us > 0.0 => {
                            let at = self.now + nanos(prepare_us * 1e-6);
                            self.at(at, Happening::Launch(tenant, request, 0));
                        }
                        None => self.launch(tenant, request, 0),
                    }
                }
                Work::Llm {
                    prefill_us_per_token,
                    decode_us,
                    max_batch,
                } => {
                    let player = &mut self.players[tenant];
                    let mut step = 0.0;
                    if !player.batch.is_empty() {
                        step += decode_us;
                    }
                    while player.batch.len() < max_batch
                        && let Some(sequence) = player.queue.pop_front()
                    {
                        step += prefill_us_per_token * sequence.context as f64;
                        player.batch.push(sequence);
                    }
                    if player.batch.is_empty() {
                        return;
                    }
                    let request = self.fly(tenant, self.now, nanos(step * 1e-6));
                    self.launch(tenant, request, 0);
                }
            }
        }
    }

    pub(super) fn fly(&mut self, tenant: usize, arrived: Nanos, kernel: Nanos) -> u64 {
        self.requests += 1;
        let places = self.players[tenant].places.len();
        let flight = Flight {
            arrived,
            pending: places,
            kernel,
            computing: places,
            barriers: Vec::new(),
        };
        self.players[tenant].flights.insert(self.requests, flight);
        self.requests
    }

    /// Shortly before work that was hinted at: hold kernels take the devices, unless others of the program have them.
    pub(super) fn hold(&mut self, tenant: usize, request: u64, timeout: Nanos) {
        let player = &mut self.players[tenant];
        let holds = player.places.iter().any(|it| !it.holds.is_empty());
        if holds || !player.flights.contains_key(&request) {
            return;
        }
        for place in 0..self.players[tenant].places.len() {
            self.outstanding(tenant, place, 1);
            let place = &mut self.players[tenant].places[place];
            let gpu = &mut self.gpus[place.device];
            place.holds = (0..2)
                .map(|_| {
                    gpu.submit(place.group, place.stream, GpuWork::Hold { timeout })
                        .expect("its own")
                })
                .collect();
        }
    }

    /// The program launches a kernel on all its devices.
    pub(super) fn launch(&mut self, tenant: usize, request: u64, number: usize) {
        let kind = self.players[tenant].program.kind;
        let Some(kernel) = self.players[tenant]
            .flights
            .get(&request)
            .map(|flight| flight.kernel)
        else {
            return;
        };
        let (sms, launches, launch_us) = match kind.work {
            Work::Kernels {
                sms,
                kernels,
                launch_us,
                ..
            } if launch_us > 0.0 => (sms, kernels, launch_us),
            Work::Kernels { sms, .. } => (sms, 1, 0.0),
            Work::Llm { .. } => (None, 1, 0.0),
        };
        let sms = sms.unwrap_or(self.scenario.hardware.sms);
        let last = number + 1 == launches;
        let gang = self.players[tenant].places.len() > 1;
        let mut barriers = Vec::new();
        for place in 0..self.players[tenant].places.len() {
            let held = match number {
                0 => std::mem::take(&mut self.players[tenant].places[place].holds),
                _ => Vec::new(),
            };
            if number == 0 && held.is_empty() {
                self.outstanding(tenant, place, 1);
            }
            let Place {
                device,
                group,
                stream,
                ..
            } = self.players[tenant].places[place];
            let gpu = &mut self.gpus[device];
            gpu.submit(
                group,
                stream,
                GpuWork::Kernel {
                    sms,
                    duration: kernel,
                },
            )
            .expect("its own");
            self.players[tenant].places[place].launch(self.now);
            let awaited = Awaited {
                tenant,
                place,
                request,
                last: true,
            };
            if last && gang {
                // Collectives spin until all devices are there.
                let mut submit = |work| gpu.submit(group, stream, work).expect("its own");
                let here = submit(GpuWork::Record);
                barriers.push((device, submit(GpuWork::Hold { timeout: SPIN })));
                self.waiting[device].insert(
                    here,
                    Awaited {
                        last: false,
                        ..awaited
                    },
                );
            }
            if last {
                let record = gpu.submit(group, stream, GpuWork::Record).expect("its own");
                self.waiting[device].insert(record, awaited);
            }
            for hold in held {
                gpu.release(hold);
            }
        }
        if let Some(flight) = self.players[tenant].flights.get_mut(&request) {
            flight.barriers = barriers;
        }
        // The daemon looks at what was submitted, too.
        for place in 0..self.players[tenant].places.len() {
            self.check_demand(tenant, place);
        }
        if !last {
            self.at(
                self.now + nanos(launch_us * 1e-6),
                Happening::Launch(tenant, request, number + 1),
            );
        }
    }

    /// A request's kernels are done on one device. When they are on all, its barrier opens.
    pub(super) fn arrived_at_barrier(&mut self, awaited: Awaited) {
        let flights = &mut self.players[awaited.tenant].flights;
        let Some(flight) = flights.get_mut(&awaited.request) else {
            return;
        };
        flight.computing -= 1;
        if flight.computing == 0 {
            for (device, spin) in flight.barriers.drain(..) {
                self.gpus[device].release(spin);
            }
        }
    }

    /// A request is complete on one device.
    pub(super) fn done(&mut self, awaited: Awaited, at: Nanos) {
        let Awaited {
            tenant,
            place,
            request,
            ..
        } = awaited;
        self.outstanding(tenant, place, -1);
        let player = &mut self.players[tenant];
        let Some(flight) = player.flights.get_mut(&request) else {
            return;
        };
        flight.pending -= 1;
        if flight.pending > 0 {
            return;
        }
        let arrived = flight.arrived;
        player.flights.remove(&request);
        match player.program.kind.work {
            Work::Kernels { .. } => self.complete(tenant, request, arrived, at),
            Work::Llm { .. } => {
                // A prefill also makes a request's first token.
                let mut batch = std::mem::take(&mut player.batch);
                for sequence in &mut batch {
                    sequence.left -= 1;
                }
                let (done, going): (Vec<_>, Vec<_>) =
                    batch.into_iter().partition(|sequence| sequence.left == 0);
                player.batch = going;
                for sequence in done {
                    self.requests += 1;
                    self.complete(tenant, self.requests, sequence.arrived, at);
                }
            }
        }
        if let Arrival::Closed {
            think_us, think_cv, ..
        } = self.players[tenant].program.kind.arrival
        {
            let pause = think_us * spread(think_cv, &mut self.players[tenant].rng);
            self.at(self.now + nanos(pause * 1e-6), Happening::Think(tenant));
        }
        self.go_on(tenant);
    }

    pub(super) fn complete(&mut self, tenant: usize, number: u64, arrived: Nanos, at: Nanos) {
        if at >= self.warmup {
            let player = &mut self.players[tenant];
            player.completed += 1;
            player.latencies.push(at.saturating_sub(arrived));
        }
        if let Some(trace) = &mut self.trace {
            trace.request(tenant, number, arrived, at);
        }
    }
}
