//! The scheduler on controls that only record their calls, and on a clock that only they move.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Instant,
};

use gpumux_core::{
    Class, Demand, Micros, TenantId, TenantSpec, Timeslice,
    admission::UserPolicy,
    broker::{Ask, Event, Line, ProcessId},
    ledger::Kind,
    tamper::{TamperRule, Then},
};
use gpumux_rm::{Cause, ControlFailure, Controls};
use gpumux_wire::{
    Daemon,
    lease::{LOOK, Lease, Leased},
    page::{HintCounts, Page},
    socket,
};
use rustix::net::{RecvFlags, SocketType};

use super::{
    GroupError, Left, Member, Met, NewGroup, Owner, What, Withheld, engine::Engine, model::Clock,
    renewal::Renewal, thread::used,
};
use crate::{
    api::types,
    config::Config,
    link::{Link, SessionId},
    receiver::pair,
};

mod controls;
mod copies;
mod effort;
mod groups;
mod guarantees;
mod held;
mod memory;
mod processes;
mod tamper;

/// What each control takes on this device.
const COST: u64 = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pull {
    Freeze(u32),
    Thaw(u32),
    Set(u32, u64),
}

#[derive(Clone, Copy, Debug)]
struct Group {
    device: u32,
    slice: u64,
    frozen: bool,
    broken: bool,
    /// How many of its members' channels are disabled: it runs if none are.
    disabled: u32,
}

/// The hardware: groups by handle. Complains when two that may run have a slice of 1 µs.
#[derive(Default)]
struct Hardware {
    now: u64,
    pulls: Vec<Pull>,
    groups: BTreeMap<u32, Group>,
    /// Whether the channels of a member of a group are disabled, whatever files lead to them.
    disabled: BTreeMap<(u32, u32), Arc<AtomicBool>>,
    closed: Vec<u32>,
    /// What a control takes besides [`COST`]: the driver does other things first.
    busy: u64,
    /// A process that watches the lease, and when it looked last.
    lease: Option<Leased>,
    looked: u64,
    expired: bool,
}

impl Hardware {
    /// Time passes, and the process looks at its lease.
    fn pass(&mut self, time: u64) {
        self.now += time;
        let every = LOOK.as_micros() as u64;
        while self.looked + every <= self.now {
            self.looked += every;
            self.expired |= self.lease.as_mut().is_some_and(Leased::look);
        }
    }
}

type Shared = Arc<Mutex<Hardware>>;

/// Also after a test has failed in the middle of it, or its cleaning up would hide why.
fn lock(hardware: &Shared) -> MutexGuard<'_, Hardware> {
    hardware.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stuck() -> ControlFailure {
    ControlFailure::new("fake", Cause::Refused, "the channel is invalid")
}

struct FakeControls {
    group: u32,
    hardware: Shared,
    /// Its own channels are.
    disabled: Arc<AtomicBool>,
}

impl FakeControls {
    /// The hardware runs no group of which a member's channels are disabled.
    fn disable(&self, group: &mut Group, disabled: bool) {
        match (self.disabled.swap(disabled, Ordering::Relaxed), disabled) {
            (false, true) => group.disabled += 1,
            (true, false) => group.disabled -= 1,
            _ => {}
        }
        group.frozen = group.disabled > 0;
    }

    fn pull(&self, pull: Pull, change: impl FnOnce(&mut Group)) -> Result<(), ControlFailure> {
        let mut hardware = lock(&self.hardware);
        let time = COST + hardware.busy;
        hardware.pass(time);
        let group = hardware.groups.get_mut(&self.group).unwrap();
        if group.broken {
            return Err(stuck());
        }
        change(group);
        let device = group.device;
        hardware.pulls.push(pull);
        let livelocked = |group: &&Group| {
            group.device == device && group.slice == 1 && !group.frozen && !group.broken
        };
        assert!(
            hardware.groups.values().filter(livelocked).count() < 2,
            "{:?}",
            hardware.pulls
        );
        Ok(())
    }
}

impl Controls for FakeControls {
    fn set_timeslice(&self, us: u64) -> Result<(), ControlFailure> {
        self.pull(Pull::Set(self.group, us), |group| group.slice = us)
    }
    fn timeslice(&self) -> Result<u64, ControlFailure> {
        let group = lock(&self.hardware).groups[&self.group];
        match group.broken {
            true => Err(stuck()),
            false => Ok(group.slice),
        }
    }
    fn freeze(&self) -> Result<(), ControlFailure> {
        self.pull(Pull::Freeze(self.group), |group| self.disable(group, true))
    }
    fn thaw(&self) -> Result<(), ControlFailure> {
        self.pull(Pull::Thaw(self.group), |group| self.disable(group, false))
    }
}

impl Drop for FakeControls {
    fn drop(&mut self) {
        let mut hardware = lock(&self.hardware);
        hardware.closed.push(self.group);
    }
}

/// An engine, its hardware, and the controls that it threw away.
pub(super) struct Bench {
    pub(super) engine: Engine,
    hardware: Shared,
    dead: mpsc::Receiver<Box<dyn Send>>,
    pub(super) pages: Vec<Page>,
    /// The processes' ends of their connections.
    processes: BTreeMap<u64, OwnedFd>,
}

impl Bench {
    pub(super) fn new() -> Self {
        Self::with(Config::default())
    }

    fn with(config: Config) -> Self {
        let hardware = Shared::default();
        let clock = Arc::clone(&hardware);
        let (reaper, dead) = mpsc::channel();
        let clock: Clock = Arc::new(move || Micros(lock(&clock).now));
        let (lease, file) = Lease::create().unwrap();
        let renewal = Arc::new(Renewal::new(Some(lease), Arc::clone(&clock)));
        lock(&hardware).lease = Some(Leased::open(file).unwrap());
        let engine = Engine::new(Arc::new(config), clock, reaper, renewal);
        Self {
            engine,
            hardware,
            dead,
            pages: Vec::new(),
            processes: BTreeMap::new(),
        }
    }

    fn hardware(&self) -> MutexGuard<'_, Hardware> {
        lock(&self.hardware)
    }

    /// Tenant, session, process and group `n` of this class; always busy.
    fn add(&mut self, n: u32, class: Class) {
        self.spec(
            n,
            TenantSpec {
                class,
                ..TenantSpec::default()
            },
        )
        .unwrap();
        let group = self.group(n, n, 1);
        self.engine.add(group).unwrap();
        self.pages.last().unwrap().slot(n).unwrap().submit();
    }

    /// A process of a tenant connects.
    pub(super) fn meet(&mut self, session: u64, tenant: TenantId, page: Arc<Page>) {
        let (socket, process) = pair(SocketType::SEQPACKET).unwrap();
        let pid = 1000 + session as u32;
        let link = Link::new(SessionId(session), tenant, pid, page, socket.into());
        self.engine.meet(Met::new(link));
        self.processes.insert(session, process);
    }

    /// What a process has received.
    pub(super) fn received(&self, session: u64) -> Vec<Daemon> {
        let next = || socket::recv(&self.processes[&session], RecvFlags::DONTWAIT).ok()?;
        std::iter::from_fn(next)
            .map(|(message, _)| message)
            .collect()
    }

    fn park(&mut self, tenant: TenantId, swapped_out: bool) {
        let Engine { moves, state, .. } = &mut self.engine;
        moves.park(state, tenant, swapped_out);
    }

    fn moved(&mut self, tenant: TenantId, out: bool, bytes: u64, took: Micros) {
        let Engine { moves, state, .. } = &mut self.engine;
        moves.moved(state, tenant, out, bytes, took);
    }

    pub(super) fn spec(
        &mut self,
        n: u32,
        spec: TenantSpec,
    ) -> Result<(), gpumux_core::admission::Refusal> {
        self.engine.set_spec(TenantId(n.into()), spec)
    }

    pub(super) fn group(&mut self, n: u32, handle: u32, engine: u32) -> NewGroup {
        let (page, file) = Page::create().unwrap();
        page.slot(n).unwrap().begin_counting();
        self.pages.push(page);
        let group = Group {
            device: 0,
            slice: 2048,
            frozen: false,
            broken: false,
            disabled: 0,
        };
        // The driver library of each process that joins sets the timeslice.
        let slice = group.slice;
        self.hardware().groups.entry(handle).or_insert(group).slice = slice;
        let disabled = Arc::clone(self.hardware().disabled.entry((n, handle)).or_default());
        NewGroup {
            member: Member {
                session: SessionId(n.into()),
                key: n,
                pid: 1000 + n,
                handles: (n, handle),
            },
            tenant: TenantId(n.into()),
            engine,
            device: "GPU-0".into(),
            emulated: true,
            controls: Box::new(FakeControls {
                group: handle,
                hardware: Arc::clone(&self.hardware),
                disabled,
            }),
            page: Arc::new(Page::open(file).unwrap()),
            shared: false,
            timeslice: Timeslice(2048),
            default: Timeslice(2048),
            run: gpumux_core::RunState::Enabled,
            launches: None,
        }
    }

    /// A busy tenant whose process shares the hardware's group `handle` as a member of the group of this name.
    fn member(&mut self, n: u32, handle: u32, name: &str) {
        let spec = TenantSpec {
            class: Class::Batch,
            ..TenantSpec::default()
        };
        self.spec(n, spec).unwrap();
        self.engine.place(TenantId(n.into()), name.into());
        let before = self.hardware().groups.get(&handle).copied();
        let group = NewGroup {
            shared: true,
            ..self.group(n, handle, 1)
        };
        if let Some(before) = before {
            self.hardware().groups.insert(handle, before);
        }
        self.engine.add(group).unwrap();
        self.pages.last().unwrap().slot(n).unwrap().submit();
    }

    /// Steps as the thread would, for this long.
    pub(super) fn run(&mut self, time: Micros) {
        let end = self.engine.state.now() + time;
        while self.engine.state.now() < end {
            let next = self.engine.step().unwrap_or(end).min(end);
            let mut hardware = self.hardware();
            hardware.now = hardware.now.max(next.0);
        }
    }

    fn take_pulls(&self) -> Vec<Pull> {
        std::mem::take(&mut self.hardware().pulls)
    }

    pub(super) fn domain(&mut self, n: u32) -> types::Domain {
        let tenant = TenantId(n.into());
        let mut domains = self.engine.view().domains.into_iter();
        domains
            .find(|(id, _)| *id == tenant)
            .map(|(_, domain)| domain)
            .unwrap()
    }

    fn closed(&self) -> Vec<u32> {
        self.dead.try_iter().for_each(drop);
        let mut closed = self.hardware().closed.clone();
        closed.sort_unstable();
        closed
    }
}
