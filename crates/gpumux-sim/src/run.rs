//! Plays a scenario: programs, the simulated daemon and the devices, in one order of time.

mod programs;
mod seen;
mod tenants;

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
    /// Hold kernels take the devices for this request, which will be launched soon, for so long at most.
    Hold(usize, u64, Nanos),
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
    /// When the last piece was launched.
    launched: Nanos,
    check_due: bool,
    /// Progress at the last tick, at the start of the window, and at the end of the warm-up.
    seen: Nanos,
    window: Nanos,
    base: Nanos,
    base_preemptions: u64,
    progressed: Nanos,
    /// How long it had no work since the last tick. Pauses that are too short to be seen are counted instead: in each the device switches to
    /// another, and back.
    paused: Nanos,
    left: u64,
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
/// As the library holds a device ahead of hinted work: from the hint on if the work is at most [`SOON`] away, else from [`LEAD`] before it; in
/// both cases until [`MARGIN`] after the expected moment.
const SOON: Nanos = 450_000;
const LEAD: Nanos = 250_000;
const MARGIN: Nanos = 100_000;
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
            | Happening::Hold(tenant, ..)
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
            Happening::Hold(tenant, request, timeout) => self.hold(tenant, request, timeout),
            Happening::Launch(tenant, request, kernel) => self.launch(tenant, request, kernel),
        }
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
