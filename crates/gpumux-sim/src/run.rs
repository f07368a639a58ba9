//! Plays a scenario: programs, the simulated daemon and the devices, in one order of time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use gpumux_core::policy::Bound;
use gpumux_core::space::{self, Applicant, Rule, Way};
use gpumux_core::{
    Class, Demand, DomainId, Micros, Progress, Snapshot, TenantId, TenantSpec, TenantState,
    Timeslice, UserId, policy,
};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::arrivals::{Arrival, Arrivals, Request, nanos, spread};
use crate::chrome::Trace;
use crate::daemon::Daemon;
use crate::gpu::{Engine, EventKind, Gpu, GroupId, Nanos, StreamId, Work as GpuWork, WorkId};
use crate::memory::{self, Newcomer, gib};
use crate::mode::Mode;
use crate::report::{BoundReport, DeviceReport, Latency, ModeReport, Moves, Report, TenantReport};
use crate::scenario::{Error, Scenario, Tenant, Work};
use crate::shares::Shares;

/// Plays a scenario in all its modes.
///
/// # Errors
/// A trace that it names was not added.
pub fn run(scenario: &Scenario) -> Result<Report, Error> {
    play(scenario, None)
}

/// Plays a scenario and also returns its last mode as a Chrome trace (JSON).
///
/// # Errors
/// A trace that it names was not added, or its last mode is `alone`, where there is no common time.
pub fn run_traced(scenario: &Scenario) -> Result<(Report, String), Error> {
    if scenario.modes.last() == Some(&Mode::Alone) {
        return Err(Error::TraceOfAlone);
    }
    let mut trace = Trace::default();
    let report = play(scenario, Some(&mut trace))?;
    Ok((report, trace.finish()))
}

fn play(scenario: &Scenario, mut trace: Option<&mut Trace>) -> Result<Report, Error> {
    scenario.check_traces()?;
    let programs = programs(scenario);
    let last = scenario.modes.len().saturating_sub(1);
    let mut modes = Vec::new();
    for (at, mode) in scenario.modes.iter().enumerate() {
        let trace = trace.as_deref_mut().filter(|_| at == last);
        modes.push(match mode {
            Mode::Alone => {
                let each = programs.iter().map(|program| {
                    Simulation::new(scenario, *mode, std::slice::from_ref(program), None).run()
                });
                together(each.collect())
            }
            _ => Simulation::new(scenario, *mode, &programs, trace).run(),
        });
    }
    Ok(Report {
        scenario: scenario.name.clone(),
        about: scenario.about.clone(),
        seconds: scenario.seconds,
        seed: scenario.seed,
        modes,
    })
}

/// One report of runs with one tenant each.
fn together(reports: Vec<ModeReport>) -> ModeReport {
    let mut all = ModeReport {
        mode: Mode::Alone,
        policy: None,
        tenants: Vec::new(),
        devices: Vec::new(),
        daemon_busy: 0.0,
        plans: 0,
    };
    for report in reports {
        all.tenants.extend(report.tenants);
        all.devices.extend(report.devices);
    }
    all
}

/// One tenant to play.
struct Program<'a> {
    name: String,
    kind: &'a Tenant,
    spec: TenantSpec,
    user: UserId,
    /// Its own randomness: the same in every mode and beside any other tenants.
    seed: u64,
}

fn programs(scenario: &Scenario) -> Vec<Program<'_>> {
    let named = scenario.tenants.iter().flat_map(|kind| {
        let names = kind.names().into_iter();
        names.map(move |name| (name, kind))
    });
    named
        .enumerate()
        .map(|(at, (name, kind))| Program {
            name,
            kind,
            spec: kind.spec(),
            user: scenario.user_of(kind),
            seed: scenario
                .seed
                .wrapping_mul(1_000_003)
                .wrapping_add(at as u64),
        })
        .collect()
}

/// Something that happens at a moment set before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Start(usize),
    Stop(usize),
    /// An open arrival of a tenant.
    Arrive(usize),
    /// A closed loop's next request.
    Think(usize),
    /// The program launches kernel `1` of request `0`.
    Launch(usize, u64, usize),
    /// The daemon's view of the demand of this tenant's domain number `1` is due.
    Demand(usize, usize),
    /// A move of memory is done.
    Moved,
    /// Observe progress.
    Tick,
}

/// A tenant's domain on one device.
struct Place {
    device: usize,
    id: DomainId,
    group: GroupId,
    stream: StreamId,
    /// The trust domain whose group it shares.
    trust: Option<String>,
    /// Requests launched here and not complete.
    outstanding: usize,
    changed: Nanos,
    /// What the program has done, and pieces of work launched so far.
    progress: Progress,
    pieces: u64,
    check_due: bool,
    /// Progress at the last tick, at the start of the window, and at the end of the warm-up.
    seen: Nanos,
    window: Nanos,
    base: Nanos,
    base_preemptions: u64,
    progressed: Nanos,
    /// How far its service lags behind the share of its bound, and did at most, in ns.
    lag: f64,
    worst_lag: f64,
    /// Has been there since the window began.
    whole_window: bool,
    holds: Vec<WorkId>,
    /// Frozen, because its memory is not there.
    swapped_out: bool,
}

/// A group that several tenants share.
struct SharedGroup {
    group: GroupId,
    id: DomainId,
    /// The tenant that came first, and its user.
    tenant: TenantId,
    user: UserId,
    /// Tenants.
    members: Vec<usize>,
    shares: Option<Shares>,
}

/// Most clients of an MPS server.
const ROOM: usize = 48;

/// A request in flight.
struct Flight {
    arrived: Nanos,
    /// On how many devices it isn't complete.
    pending: usize,
    /// Nanoseconds of each of its kernels.
    kernel: Nanos,
    /// On how many devices its kernels aren't done, and what spins on each device until they are.
    computing: usize,
    barriers: Vec<(usize, WorkId)>,
}

/// Work that a program waits for.
#[derive(Clone, Copy)]
struct Awaited {
    tenant: usize,
    place: usize,
    request: u64,
    /// Completes the request here; otherwise it is now at the barrier between its devices.
    last: bool,
}

/// A request of a language model.
#[derive(Clone, Copy)]
struct Sequence {
    arrived: Nanos,
    context: u64,
    left: u64,
}

struct Player<'a> {
    program: &'a Program<'a>,
    rng: StdRng,
    arrivals: Arrivals<'a>,
    /// The next open arrival, already drawn.
    upcoming: Request,
    gone: bool,
    places: Vec<Place>,
    /// Requests that wait for the program.
    queue: VecDeque<Sequence>,
    /// The batch of a language model.
    batch: Vec<Sequence>,
    flights: BTreeMap<u64, Flight>,
    latencies: Vec<Nanos>,
    completed: u64,
    /// After the warm-up, noted when it goes: progress and preemptions, summed over places.
    received: Nanos,
    preempted: u64,
    /// Time with work, summed over places.
    wanted: Nanos,
    longest_wait: Nanos,
    window_min: f64,
    window_max: f64,
    moves: Moves,
}

struct Simulation<'a> {
    scenario: &'a Scenario,
    mode: Mode,
    now: Nanos,
    end: Nanos,
    warmup: Nanos,
    gpus: Vec<Gpu>,
    daemon: Option<Daemon>,
    players: Vec<Player<'a>>,
    agenda: BinaryHeap<Reverse<(Nanos, u64, Happening)>>,
    order: u64,
    domains: u64,
    requests: u64,
    /// For whom it is that a device's work completes.
    waiting: Vec<BTreeMap<WorkId, Awaited>>,
    used: Vec<Used>,
    /// Of each device, where a daemon runs.
    memory: Vec<memory::Memory>,
    /// When the next move ends.
    moved: Nanos,
    /// By device and trust domain.
    shared: BTreeMap<(usize, String), SharedGroup>,
    window_start: Nanos,
    /// What tenants can rely on.
    bounds: BTreeMap<TenantId, Bound>,
    trace: Option<&'a mut Trace>,
}

/// How a device was used.
#[derive(Clone, Copy, Default)]
struct Used {
    /// Domains with work, and time with at least one of them.
    outstanding: usize,
    changed: Nanos,
    wanted: Nanos,
    /// Progress of domains that are gone.
    gone: Nanos,
    seen: Nanos,
    window: Nanos,
    base: Nanos,
}

/// How often progress is observed.
const TICK: Nanos = 5_000_000;
/// The longest pause that forfeits nothing of a guarantee.
const GRACE: Nanos = 5_000_000;
/// Longest time that hold kernels hold.
const HOLD: Nanos = 10_000_000;
/// Longest time that a collective spins: longer than any run.
const SPIN: Nanos = 1 << 60;

impl<'a> Simulation<'a> {
    fn new(
        scenario: &'a Scenario,
        mode: Mode,
        programs: &'a [Program<'a>],
        mut trace: Option<&'a mut Trace>,
    ) -> Self {
        let daemon = mode.managed().then(|| {
            let policies = (0..scenario.devices)
                .filter_map(|_| policy::tuned(&scenario.policy, scenario.tuning));
            Daemon::new(policies.collect(), scenario.costs, scenario.user_weights())
        });
        let players: Vec<Player> = programs
            .iter()
            .map(|program| {
                let mut rng = StdRng::seed_from_u64(program.seed);
                let trace = match &program.kind.arrival {
                    Arrival::Trace { name, .. } => {
                        scenario.traces.get(name).map_or(&[][..], |trace| trace)
                    }
                    _ => &[],
                };
                let kind = program.kind;
                let arrivals = Arrivals::new(&kind.arrival, trace, kind.start_s, &mut rng);
                Player {
                    program,
                    rng,
                    arrivals,
                    upcoming: Request {
                        at_s: 0.0,
                        context: 0,
                        generated: 0,
                    },
                    gone: false,
                    places: Vec::new(),
                    queue: VecDeque::new(),
                    batch: Vec::new(),
                    flights: BTreeMap::new(),
                    latencies: Vec::new(),
                    completed: 0,
                    received: 0,
                    preempted: 0,
                    wanted: 0,
                    longest_wait: 0,
                    window_min: f64::INFINITY,
                    window_max: 0.0,
                    moves: Moves::default(),
                }
            })
            .collect();
        if let Some(trace) = &mut trace {
            for (at, player) in players.iter().enumerate() {
                trace.tenant(at, &player.program.name);
            }
        }
        let mut simulation = Self {
            scenario,
            mode,
            now: 0,
            end: nanos(scenario.seconds),
            warmup: nanos(scenario.warmup_s),
            gpus: (0..scenario.devices)
                .map(|_| Gpu::new(scenario.hardware.clone()))
                .collect(),
            daemon,
            players,
            agenda: BinaryHeap::new(),
            order: 0,
            domains: 0,
            requests: 0,
            waiting: vec![BTreeMap::new(); scenario.devices],
            used: vec![Used::default(); scenario.devices],
            memory: (0..scenario.devices)
                .filter(|_| mode.managed())
                .map(|_| memory::Memory::new(scenario.memory))
                .collect(),
            moved: 0,
            shared: BTreeMap::new(),
            window_start: 0,
            bounds: BTreeMap::new(),
            trace,
        };
        simulation.bounds = simulation.find_bounds();
        for (at, program) in programs.iter().enumerate() {
            simulation.at(nanos(program.kind.start_s), Happening::Start(at));
            if let Some(stop) = program.kind.stop_s {
                simulation.at(nanos(stop), Happening::Stop(at));
            }
        }
        simulation.at(0, Happening::Tick);
        simulation
    }

    /// What every tenant can rely on beside all that the scenario has on its device.
    fn find_bounds(&self) -> BTreeMap<TenantId, Bound> {
        let gang = |player: &Player| player.program.kind.devices.len() > 1;
        let Some(daemon) = self.daemon.as_ref().filter(|_| self.mode == Mode::Gpumux) else {
            return BTreeMap::new();
        };
        if self.players.iter().any(gang) {
            return BTreeMap::new();
        }
        let on = |device: usize| {
            let here = self.players.iter().enumerate();
            let here = here.filter(|(_, player)| player.program.kind.devices.contains(&device));
            let tenants = here.map(|(at, player)| TenantState {
                id: TenantId(at as u64),
                user: player.program.user,
                spec: player.program.spec.clone(),
            });
            let snapshot = Snapshot {
                users: self.scenario.user_weights(),
                costs: self.scenario.costs,
                ..Snapshot::of_tenants(tenants.collect())
            };
            daemon.bounds(device, &snapshot)
        };
        let all = (0..self.gpus.len()).flat_map(on);
        all.map(|bound| (bound.tenant, bound)).collect()
    }

    fn at(&mut self, at: Nanos, what: Happening) {
        self.order += 1;
        self.agenda.push(Reverse((at, self.order, what)));
    }

    fn run(mut self) -> ModeReport {
        loop {
            let due = self.agenda.peek().map(|Reverse((at, ..))| *at);
            let wake = self.daemon.as_ref().and_then(Daemon::wakes);
            let device = self.gpus.iter().filter_map(Gpu::next_event).min();
            let soonest = [due, wake, device].into_iter().flatten().min();
            let Some(at) = soonest.filter(|at| *at < self.end) else {
                break;
            };
            self.advance(at.max(self.now));
        }
        self.pass(self.end);
        self.report()
    }

    /// Lets the devices work until `at` and answers to what happened.
    fn advance(&mut self, at: Nanos) {
        self.pass(at);
        while let Some(Reverse((due, _, what))) = self.agenda.peek().copied() {
            if due > at {
                break;
            }
            self.agenda.pop();
            self.happen(what);
        }
        if let Some(daemon) = &mut self.daemon
            && daemon.wakes().is_some_and(|wakes| wakes <= at)
            && let Some(pull) = daemon.act(at, &mut self.gpus)
            && let Some(trace) = &mut self.trace
        {
            trace.control(pull.device, &format!("{:?}", pull.control), at, pull.until);
        }
    }

    fn pass(&mut self, at: Nanos) {
        self.now = at;
        for device in 0..self.gpus.len() {
            for event in self.gpus[device].advance(at) {
                if event.kind == EventKind::Done
                    && let Some(awaited) = self.waiting[device].remove(&event.work)
                {
                    match awaited.last {
                        true => self.done(awaited, event.at),
                        false => self.arrived_at_barrier(awaited),
                    }
                }
            }
        }
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Arrive(tenant)
            | Happening::Think(tenant)
            | Happening::Launch(tenant, ..)
                if self.players[tenant].gone => {}
            Happening::Start(tenant) => self.start(tenant),
            Happening::Stop(tenant) => self.stop(tenant),
            Happening::Tick => {
                self.move_memory();
                self.tick();
            }
            Happening::Moved => self.move_memory(),
            Happening::Demand(tenant, place) => self.demand(tenant, place),
            Happening::Arrive(tenant) => {
                let request = self.players[tenant].upcoming;
                self.ask(tenant, request);
                self.next_arrival(tenant);
                self.go_on(tenant);
            }
            Happening::Think(tenant) => {
                self.ask(tenant, self.players[tenant].upcoming);
                self.go_on(tenant);
            }
            Happening::Launch(tenant, request, kernel) => self.launch(tenant, request, kernel),
        }
    }

    /// A tenant comes: its program makes its groups.
    fn start(&mut self, tenant: usize) {
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
                check_due: false,
                seen: 0,
                window: 0,
                base: 0,
                base_preemptions: 0,
                progressed: self.now,
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
    fn want_memory(&mut self, tenant: usize, place: usize) {
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
    fn move_memory(&mut self) {
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
    fn group_of(&self, program: &Program, device: usize) -> Option<String> {
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
            interference: None,
            // Shares move while programs run.
            hindered: false,
        });
        (decision.way == Way::Space).then_some(trust)
    }

    /// A new domain of this tenant.
    fn domain(&mut self, device: usize, tenant: usize, spec: &TenantSpec) -> (GroupId, DomainId) {
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
    fn join(
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
        let spec = &self.players[tenant].program.spec;
        let shared = self.shared.get_mut(&key).expect("just made");
        shared.members.push(tenant);
        if let Some(shares) = &mut shared.shares {
            shares.join(&mut self.gpus[device], shared.group, stream, spec);
        }
        let made = (shared.group, shared.id);
        self.guarantee(&key);
        made
    }

    /// A member leaves a group. Whether others stay.
    fn part(&mut self, tenant: usize, key: (usize, String), stream: StreamId) -> bool {
        let Some(shared) = self.shared.get_mut(&key) else {
            return false;
        };
        shared.members.retain(|member| *member != tenant);
        if shared.members.is_empty() {
            self.shared.remove(&key);
            return false;
        }
        if let Some(shares) = &mut shared.shares {
            shares.leave(&mut self.gpus[key.0], shared.group, stream);
        }
        self.guarantee(&key);
        true
    }

    /// The daemon guarantees a group what its members are guaranteed together.
    fn guarantee(&mut self, key: &(usize, String)) {
        if let (Some(shared), Some(daemon)) = (self.shared.get(key), &mut self.daemon) {
            let specs = shared.members.iter();
            let specs = specs.map(|member| &self.players[*member].program.spec);
            // The first that came stands for all, also when it has left.
            daemon.guarantee(self.now, shared.tenant, shared.user, space::combine(specs));
        }
    }

    /// A tenant goes, in the middle of whatever it does.
    fn stop(&mut self, tenant: usize) {
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

    fn next_arrival(&mut self, tenant: usize) {
        let player = &mut self.players[tenant];
        if let Some((at, request)) = player.arrivals.next(&mut player.rng) {
            player.upcoming = request;
            self.at(at.max(self.now), Happening::Arrive(tenant));
        }
    }

    /// A request arrives at the program.
    fn ask(&mut self, tenant: usize, request: Request) {
        let arrived = self.now;
        self.players[tenant].queue.push_back(Sequence {
            arrived,
            context: request.context,
            left: request.generated.max(1),
        });
    }

    /// The program begins what it can.
    fn go_on(&mut self, tenant: usize) {
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
                    let request = self.fly(tenant, request.arrived, kernel);
                    match hint_us {
                        Some(ahead) => {
                            self.hold(tenant);
                            let at = self.now + nanos(ahead * 1e-6);
                            if let Some(flight) = self.players[tenant].flights.get_mut(&request) {
                                flight.arrived = at;
                            }
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

    fn fly(&mut self, tenant: usize, arrived: Nanos, kernel: Nanos) -> u64 {
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

    /// A hint: hold kernels take the devices.
    fn hold(&mut self, tenant: usize) {
        for place in 0..self.players[tenant].places.len() {
            self.outstanding(tenant, place, 1);
            let place = &mut self.players[tenant].places[place];
            let gpu = &mut self.gpus[place.device];
            place.holds = (0..2)
                .map(|_| {
                    gpu.submit(place.group, place.stream, GpuWork::Hold { timeout: HOLD })
                        .expect("its own")
                })
                .collect();
        }
    }

    /// The program launches a kernel on all its devices.
    fn launch(&mut self, tenant: usize, request: u64, number: usize) {
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
            let held = std::mem::take(&mut self.players[tenant].places[place].holds);
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
            self.players[tenant].places[place].pieces += 1;
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
    fn arrived_at_barrier(&mut self, awaited: Awaited) {
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
    fn done(&mut self, awaited: Awaited, at: Nanos) {
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

    fn complete(&mut self, tenant: usize, number: u64, arrived: Nanos, at: Nanos) {
        if at >= self.warmup {
            let player = &mut self.players[tenant];
            player.completed += 1;
            player.latencies.push(at.saturating_sub(arrived));
        }
        if let Some(trace) = &mut self.trace {
            trace.request(tenant, number, arrived, at);
        }
    }

    /// The number of a place's outstanding requests changes.
    fn outstanding(&mut self, tenant: usize, place: usize, by: isize) {
        let (now, warmup) = (self.now, self.warmup);
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
            }
            false => {
                state.progressed = now;
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
    fn check_demand(&mut self, tenant: usize, place: usize) {
        let delay = self.scenario.demand_delay_us * 1000;
        let state = &mut self.players[tenant].places[place];
        if self.daemon.is_some() && !state.check_due {
            state.check_due = true;
            self.at(self.now + delay, Happening::Demand(tenant, place));
        }
    }

    /// The daemon sees a place's demand: work at once, its absence when it has lasted for the delay.
    fn demand(&mut self, tenant: usize, place: usize) {
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
    fn tick(&mut self) {
        self.at(self.now + TICK, Happening::Tick);
        let ends_warmup = self.now >= self.warmup && self.now < self.warmup + TICK;
        let window = nanos(self.scenario.window_s);
        let ends_window = self.now >= self.window_start + window;
        let used: Vec<Nanos> = (0..self.gpus.len())
            .map(|device| self.progress_of(device))
            .collect();
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
                    let whole = place.outstanding > 0 && since >= TICK;
                    let due = if whole {
                        bound.share * available as f64
                    } else {
                        0.0
                    };
                    let goes_on = place.outstanding > 0 || since <= GRACE;
                    let counts = goes_on && !place.swapped_out && self.now > self.warmup;
                    place.lag = if counts {
                        (place.lag + due - gained).max(0.0)
                    } else {
                        0.0
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
        for ((device, _), shared) in &mut self.shared {
            if let Some(shares) = &mut shared.shares {
                shares.tick(&mut self.gpus[*device], shared.group);
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
    fn progress_of(&self, device: usize) -> Nanos {
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
    fn sms_of(&self, tenant: usize) -> Option<u32> {
        let place = self.players[tenant].places.first()?;
        let key = (place.device, place.trust.clone()?);
        self.shared.get(&key)?.shares.as_ref()?.sms(place.stream)
    }

    fn report(mut self) -> ModeReport {
        let measured = (self.end - self.warmup) as f64 / 1e9;
        let seconds = self.scenario.seconds;
        let used: Vec<Nanos> = (0..self.gpus.len())
            .map(|device| self.progress_of(device) - self.used[device].base)
            .collect();
        let mut devices = Vec::new();
        for (device, state) in self.used.iter().enumerate() {
            let open = match state.outstanding > 0 {
                true => self.end - state.changed.max(self.warmup),
                false => 0,
            };
            let wanted = (state.wanted + open) as f64 / 1e9 / measured;
            let used = used[device] as f64 / 1e9 / measured;
            let mut report = DeviceReport {
                used,
                overhead: (wanted - used).max(0.0),
                ..DeviceReport::default()
            };
            if let Some(daemon) = &self.daemon {
                daemon.report(device, seconds, &mut report);
            }
            devices.push(report);
        }
        let sms: Vec<Option<u32>> = (0..self.players.len())
            .map(|tenant| self.sms_of(tenant))
            .collect();
        for tenant in 0..self.players.len() {
            if !self.players[tenant].gone {
                self.stop(tenant);
            }
        }
        let bounds = std::mem::take(&mut self.bounds);
        let report = |(at, (player, sms)): (usize, (Player, Option<u32>))| {
            let kind = player.program.kind;
            let eager = matches!(kind.work, Work::Kernels { launch_us, .. } if launch_us > 0.0);
            let lags = player.places.iter().map(|place| place.worst_lag / 1e6);
            let worst = lags.fold(0.0, f64::max);
            let bound = bounds.get(&TenantId(at as u64)).map(|bound| BoundReport {
                share: bound.share,
                lag_ms: bound.lag.0 as f64 / 1e3,
                worst_lag_ms: (!eager).then_some(worst),
                wait_ms: bound.wait.0 as f64 / 1e3,
            });
            let places = player.places.len().max(1) as f64;
            let of = |time: Nanos| time as f64 / 1e9 / measured / places;
            let of_used: Nanos = player.places.iter().map(|place| used[place.device]).sum();
            let windows = player.window_min.is_finite();
            TenantReport {
                name: player.program.name.clone(),
                guaranteed: player.program.spec.guaranteed,
                sms,
                received: of(player.received),
                received_of_used: player.received as f64 / of_used.max(1) as f64,
                window_min: if windows { player.window_min } else { 0.0 },
                window_max: player.window_max,
                wanted: of(player.wanted),
                longest_wait_ms: player.longest_wait as f64 / 1e6,
                bound,
                rate: player.completed as f64 / measured,
                latency: Latency::of(player.latencies),
                preemptions: player.preempted as f64 / measured,
                moves: (player.moves != Moves::default()).then_some(player.moves),
            }
        };
        let tenants = std::mem::take(&mut self.players)
            .into_iter()
            .zip(sms)
            .enumerate()
            .map(report)
            .collect();
        let (daemon_busy, plans) = self
            .daemon
            .as_ref()
            .map_or((0.0, 0), |daemon| daemon.effort(seconds));
        ModeReport {
            mode: self.mode,
            policy: self.daemon.as_ref().map(|_| self.scenario.policy.clone()),
            tenants,
            devices,
            daemon_busy,
            plans,
        }
    }
}
