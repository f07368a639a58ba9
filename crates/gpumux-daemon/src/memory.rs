//! The memory broker: answers processes that ask for memory, and moves tenants' memory to the host and back: all of it when
//! they sleep, as much as is needed when others lack room. A tenant that lacks a part cannot run.
//!
//! A move has steps, each with a bound, and each leaves a state from which both sides can go on:
//! 1. every process of the tenant closes its gate ([`Daemon::Quiesce`]): nobody touches memory but kernels;
//! 2. its compute groups are frozen, maybe in the middle of a kernel;
//! 3. every process copies its memory to the host and lets go of it ([`Daemon::SwapOut`]).
//!
//! Back: room is made in the books, every process brings its memory back ([`Daemon::SwapIn`]), the groups are thawed.
//! Until the third step has begun everything can be undone at any time. From then on the groups
//! are thawed only when all memory is back; if this daemon dies, each process sees to that itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    ledger::{
        Candidate, Denied, EXTRA, Entry, HostFull, HostPool, Standing, in_order, turn, victims,
    },
};
use gpumux_wire::{Daemon, Shim, message::HOST_PIECE};
use tokio::sync::{Notify, oneshot};

use crate::{
    config::HostMemory,
    scheduler::{Activity, Ask, Engine, Handle, Line, SessionId, Stopped},
    session::say,
};

/// How long a process may take to close its gate: submissions under way must return, and copies end. And for a GiB of host memory that it
/// may have to make before: a third of a second (docs/memory.md).
const QUIET: Duration = Duration::from_secs(20);
const QUIET_PER_GIB: Duration = Duration::from_secs(1);
/// How long freezing may take.
const FREEZE: Duration = Duration::from_secs(5);
/// How long moving one process's memory may take: 140 GiB at 1 GiB/s, and as much again.
const MOVE: Duration = Duration::from_secs(300);
/// How long a request for memory waits until others free some, and until others were moved away: they have their turns first.
const PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE_FOR_TURNS: Duration = Duration::from_secs(300);
/// How long those who may have unused memory get to give it back.
const TRIM: Duration = Duration::from_millis(30);
/// Not more often than this for want of room on a device.
const TRIM_PAUSE: Duration = Duration::from_secs(1);
/// How often room is looked for while nothing is heard.
const LOOK: Duration = Duration::from_millis(100);
/// How long somebody waits for those who came before. They may wait for the very memory that it was given and, being
/// asleep, has not taken: then only its own coming back lets anybody go on.
const OVERTAKE: Duration = Duration::from_secs(5);
/// How long a process may take to let go of host memory.
const DROP: Duration = Duration::from_secs(10);
/// How long a program may take to give caches back, and how long it is not asked again.
const RECLAIM: Duration = Duration::from_secs(1);
const RECLAIM_PAUSE: Duration = Duration::from_secs(5);
/// Not more often than this is it said that the host is full.
const TELL_AGAIN: Duration = Duration::from_secs(60);
/// How often idle tenants are looked for that shall sleep.
const WATCH: Duration = Duration::from_millis(500);
/// How long an idle tenant that could not be put to sleep is left alone.
const SLEEP_AGAIN: Duration = Duration::from_secs(10);

/// Why memory was not moved. Everything is as it was, but for [`MoveError::Stuck`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum MoveError {
    #[error("the tenant cannot be put to sleep now: {0}")]
    Busy(String),
    #[error("{0}: raise `limit` of `[host_memory]` in the daemon's configuration")]
    HostFull(#[from] HostFull),
    #[error("its groups cannot be frozen: {0}")]
    Freeze(String),
    #[error("its memory cannot come back: {1} on {0}")]
    NoRoom(String, Denied),
    #[error("a process of it does not answer: it stays frozen until that one ends")]
    Stuck,
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// What a process answers to an order.
#[derive(Debug)]
enum Reply {
    Done {
        /// It has no work outstanding.
        idle: bool,
    },
    Busy(String),
    /// So many bytes.
    Freed(u64),
    /// It has ended: nothing of it is left to be moved.
    Gone,
    Late,
}

/// What came of bringing a tenant back.
enum Back {
    Done,
    Lacks { device: String, missing: u64 },
    Refused(String),
}

/// One tenant's moves.
struct Place {
    /// One move at a time. Held only while memory moves, so that everybody may wait for it.
    turn: tokio::sync::Mutex<()>,
    /// One who brings it back is enough.
    waking: tokio::sync::Mutex<()>,
    asleep: AtomicBool,
    /// Requests of its processes that wait for room.
    asks: AtomicU64,
    /// When it could not be put to sleep for being idle.
    stayed: Mutex<Option<Instant>>,
    /// Since when its memory is on the device, and how long it took to bring it there.
    awake: Mutex<(Instant, Duration)>,
}

struct Member {
    tenant: TenantId,
    voice: Arc<OwnedFd>,
    /// Its program gives caches back, and when it was last asked to.
    reclaims: Option<Option<Instant>>,
    /// To let go of host memory that this daemon did not allow.
    told_to_drop: bool,
}

#[derive(Default)]
struct State {
    members: BTreeMap<SessionId, Member>,
    orders: BTreeMap<(SessionId, u64), oneshot::Sender<Reply>>,
    places: BTreeMap<TenantId, Arc<Place>>,
    /// When somebody was last told that the host is full.
    told_full: Option<Instant>,
}

/// Those who lack room on a device and have the same right to it are served in the order in which they came: the first has others
/// moved away. By device, whether it was promised, and class.
type Queue = (String, bool, Class);

/// The broker.
pub(crate) struct Memory {
    scheduler: Handle,
    state: Mutex<State>,
    trimmed: Mutex<Option<Instant>>,
    queues: Mutex<BTreeMap<Queue, Arc<tokio::sync::Mutex<()>>>>,
    rules: HostMemory,
    host: Mutex<HostPool>,
    /// Somebody has given something back.
    changed: Notify,
    orders_given: AtomicU64,
}

impl Memory {
    pub(crate) fn new(scheduler: Handle, rules: HostMemory) -> Arc<Self> {
        let limit = rules.limit.map_or(u64::MAX, |limit| limit.0);
        Arc::new(Self {
            scheduler,
            rules,
            host: Mutex::new(HostPool::new(limit)),
            state: Mutex::default(),
            trimmed: Mutex::default(),
            queues: Mutex::default(),
            changed: Notify::new(),
            orders_given: AtomicU64::new(0),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, tenant: TenantId) -> Arc<Place> {
        let mut state = self.state();
        let place = state.places.entry(tenant).or_insert_with(|| {
            Arc::new(Place {
                turn: tokio::sync::Mutex::default(),
                waking: tokio::sync::Mutex::default(),
                asleep: AtomicBool::new(false),
                asks: AtomicU64::new(0),
                stayed: Mutex::default(),
                awake: Mutex::new((Instant::now(), Duration::ZERO)),
            })
        });
        Arc::clone(place)
    }

    /// What moved memory takes on the host, and may take.
    pub(crate) fn on_host(&self) -> (u64, u64) {
        let host = lock(&self.host);
        (host.kept(), host.limit())
    }

    /// Whether a tenant's memory is on the host.
    pub(crate) fn is_asleep(&self, tenant: TenantId) -> bool {
        let state = self.state();
        let place = state.places.get(&tenant);
        place.is_some_and(|place| place.asleep.load(Ordering::Acquire))
    }

    /// Tenants that wait for room: for memory that they asked for, or to come back.
    pub(crate) fn waiting(&self) -> BTreeSet<TenantId> {
        let waits = |place: &Place| {
            let comes_back =
                place.asleep.load(Ordering::Acquire) && place.waking.try_lock().is_err();
            comes_back || place.asks.load(Ordering::Relaxed) > 0
        };
        let state = self.state();
        let places = state.places.iter().filter(|(_, place)| waits(place));
        places.map(|(tenant, _)| *tenant).collect()
    }

    /// A process has connected.
    pub(crate) fn meet(
        self: &Arc<Self>,
        session: SessionId,
        tenant: TenantId,
        voice: Arc<OwnedFd>,
    ) {
        if self.rules != HostMemory::default() {
            let rules = Daemon::HostMemory {
                location: (self.rules.location.as_ref()).map(|it| it.display().to_string()),
                scrub: self.rules.scrub,
            };
            let _ = say(&voice, &rules);
        }
        let member = Member {
            tenant,
            voice,
            reclaims: None,
            told_to_drop: false,
        };
        self.state().members.insert(session, member);
        // It will want to work, and knows nothing of its siblings' sleep.
        let memory = Arc::clone(self);
        tokio::spawn(async move { memory.wake_or_warn(tenant).await });
    }

    /// A session has ended.
    pub(crate) async fn leave(&self, session: SessionId) {
        let last = {
            let mut state = self.state();
            let Some(member) = state.members.remove(&session) else {
                return;
            };
            lock(&self.host).set(session.0, 0);
            // Whoever waits for it learns that it has gone.
            state.orders.retain(|(id, _), _| *id != session);
            let tenant = member.tenant;
            let others = state.members.values().any(|it| it.tenant == tenant);
            if !others {
                state.places.remove(&tenant);
            }
            (!others).then_some(tenant)
        };
        if let Some(tenant) = last {
            let _ = self
                .scheduler
                .call(move |engine| engine.park(tenant, false))
                .await;
        }
        self.changed.notify_waiters();
    }

    /// What a process says or asks about memory; the answer comes when there is one.
    pub(crate) async fn hear(
        self: &Arc<Self>,
        session: SessionId,
        tenant: TenantId,
        message: Shim,
    ) -> Result<(), Stopped> {
        let memory = Arc::clone(self);
        match message {
            Shim::Ask {
                ticket,
                device,
                total,
                need,
                want,
                pinned,
            } => {
                let kind = match pinned {
                    true => gpumux_core::ledger::Kind::Pinned,
                    false => gpumux_core::ledger::Kind::Movable,
                };
                let ask = Ask {
                    device,
                    total,
                    need,
                    want,
                    kind,
                };
                let first = ask.clone();
                let granted = self
                    .scheduler
                    .call(move |engine| engine.ask(session, &first))
                    .await?;
                match granted {
                    Ok(bytes) => self.tell(session, &Daemon::Granted { ticket, bytes }),
                    Err(denied) => {
                        tokio::spawn(async move {
                            memory.trim_for(denied).await;
                            let place = memory.place(tenant);
                            place.asks.fetch_add(1, Ordering::Relaxed);
                            let bytes = memory.lease(session, tenant, ask).await.unwrap_or(0);
                            place.asks.fetch_sub(1, Ordering::Relaxed);
                            memory.tell(session, &Daemon::Granted { ticket, bytes });
                        });
                    }
                }
            }
            Shim::Holds {
                device,
                total,
                movable,
                pinned,
                swapped,
            } => {
                let holding = gpumux_core::ledger::Holding {
                    movable,
                    pinned,
                    swapped,
                };
                self.scheduler
                    .call(move |engine| engine.holds(session, &device, total, holding))
                    .await?;
                self.changed.notify_waiters();
            }
            Shim::View {
                ticket,
                device,
                total,
            } => {
                let (free, total) = self
                    .scheduler
                    .call(move |engine| engine.memory_view(session, &device, total))
                    .await?;
                self.tell(
                    session,
                    &Daemon::Seen {
                        ticket,
                        free,
                        total,
                    },
                );
            }
            Shim::Quiet { op, idle } => self.reply(session, op, Reply::Done { idle }),
            Shim::Moved { op } => self.reply(session, op, Reply::Done { idle: true }),
            Shim::Busy { op, mut reason } => {
                reason.truncate(reason.floor_char_boundary(200));
                self.reply(session, op, Reply::Busy(reason));
            }
            Shim::Knock => {
                tokio::spawn(async move { memory.wake_or_warn(tenant).await });
            }
            Shim::Keeps { bytes } => {
                let allowed = lock(&self.host).hear(session.0, bytes);
                // Made for an earlier daemon, and not in use now: it is made anew when it is needed. Said once: letting go
                // takes a while, and what is made meanwhile is allowed.
                let mut state = self.state();
                let member = state.members.get_mut(&session).filter(|_| !allowed);
                let first = member.is_some_and(|it| !std::mem::replace(&mut it.told_to_drop, true));
                drop(state);
                if first {
                    self.tell(session, &Daemon::DropHost { op: 0 });
                }
            }
            Shim::Reclaims => {
                if let Some(member) = self.state().members.get_mut(&session) {
                    member.reclaims.get_or_insert(None);
                }
            }
            Shim::Reclaimed { op, bytes } => self.reply(session, op, Reply::Freed(bytes)),
            Shim::Missing { ticket } => {
                let policy = self.scheduler.call(move |engine| engine.policy(tenant));
                let again = policy.await? != Some(MemoryPolicy::Fail);
                let bytes = u64::from(again);
                self.tell(session, &Daemon::Granted { ticket, bytes });
            }
            _ => {}
        }
        Ok(())
    }

    fn reply(&self, session: SessionId, op: u64, reply: Reply) {
        if let Some(waiting) = self.state().orders.remove(&(session, op)) {
            let _ = waiting.send(reply);
        }
    }

    fn tell(&self, session: SessionId, message: &Daemon) {
        let voice = self
            .state()
            .members
            .get(&session)
            .map(|it| Arc::clone(&it.voice));
        if let Some(voice) = voice {
            let _ = say(&voice, message);
        }
    }

    /// The sessions of a tenant, or of everybody.
    fn sessions(&self, tenant: Option<TenantId>) -> Vec<SessionId> {
        let state = self.state();
        let of = |member: &Member| tenant.is_none_or(|tenant| tenant == member.tenant);
        let members = state.members.iter().filter(|(_, member)| of(member));
        members.map(|(id, _)| *id).collect()
    }

    /// Gives these processes an order and waits for all their answers.
    async fn order(
        &self,
        sessions: &[SessionId],
        order: impl Fn(u64) -> Daemon,
        bound: Duration,
    ) -> Vec<Reply> {
        self.order_each(sessions, |op, _| order(op), bound).await
    }

    /// The same, with an order for each.
    async fn order_each(
        &self,
        sessions: &[SessionId],
        order: impl Fn(u64, SessionId) -> Daemon,
        bound: Duration,
    ) -> Vec<Reply> {
        let op = self.orders_given.fetch_add(1, Ordering::Relaxed) + 1;
        let mut answers = Vec::new();
        for session in sessions {
            let (answer, waiting) = oneshot::channel();
            let voice = {
                let mut state = self.state();
                let voice = state.members.get(session).map(|it| Arc::clone(&it.voice));
                if voice.is_some() {
                    state.orders.insert((*session, op), answer);
                }
                voice
            };
            if let Some(voice) = voice
                && !say(&voice, &order(op, *session))
            {
                self.reply(*session, op, Reply::Busy("it does not listen".into()));
            }
            answers.push((*session, waiting));
        }
        let deadline = tokio::time::Instant::now() + bound;
        let mut replies = Vec::new();
        for (session, waiting) in answers {
            replies.push(match tokio::time::timeout_at(deadline, waiting).await {
                Ok(Ok(reply)) => reply,
                Ok(Err(_)) => Reply::Gone,
                Err(_) => {
                    self.state().orders.remove(&(session, op));
                    Reply::Late
                }
            });
        }
        replies
    }

    /// Moves memory of a tenant to the host: so much of each device, or all that there is. Says whether it has no work
    /// outstanding.
    ///
    /// # Errors
    /// When it cannot be moved now.
    pub(crate) async fn sleep(&self, tenant: TenantId, least: u64) -> Result<bool, MoveError> {
        let place = self.place(tenant);
        let _turn = place.turn.lock().await;
        self.out(tenant, &place, least).await
    }

    /// The same for another's sake, unless the tenant has come back since it was chosen.
    async fn give_way(
        &self,
        tenant: TenantId,
        least: u64,
        asleep: bool,
    ) -> Result<bool, MoveError> {
        let place = self.place(tenant);
        let _turn = place.turn.lock().await;
        match asleep && !place.asleep.load(Ordering::Acquire) {
            true => Ok(true),
            false => self.out(tenant, &place, least).await,
        }
    }

    async fn out(&self, tenant: TenantId, place: &Place, least: u64) -> Result<bool, MoveError> {
        let sessions = self.sessions(Some(tenant));
        if sessions.is_empty() {
            return Err(MoveError::Busy("it has no connected process".into()));
        }
        let in_group = self.scheduler.call(move |engine| engine.in_group(tenant));
        if in_group.await? {
            let why = "it shares a group, whose members can only be frozen together";
            return Err(MoveError::Busy(why.into()));
        }
        let host = self.host_room(tenant, least).await?;
        let host = |session: SessionId| host.get(&session.0).copied().unwrap_or(0);
        let out = |op, session| Daemon::SwapOut {
            op,
            least,
            host: host(session),
        };
        let began = Instant::now();
        let before = self
            .scheduler
            .call(move |engine| engine.swapped(tenant))
            .await?;
        if place.asleep.load(Ordering::Acquire) {
            // It lacks a part already: more of it.
            let moved = self.order_each(&sessions, out, MOVE).await;
            let bytes = self.went(tenant, before, began).await?;
            return match refusal(&moved) {
                Some(why) => Err(MoveError::Busy(why)),
                // What it was given and has not taken yet cannot be moved.
                None if bytes == 0 => Err(MoveError::Busy("it has nothing more".into())),
                None => Ok(true),
            };
        }
        let resume = |why: MoveError| async {
            self.scheduler
                .call(move |engine| engine.park(tenant, false))
                .await?;
            for session in &sessions {
                self.tell(*session, &Daemon::Resume { op: 0 });
            }
            Err(why)
        };
        let quiesce = |op, session| Daemon::Quiesce {
            op,
            least,
            host: host(session),
        };
        let most = sessions.iter().map(|session| host(*session)).max();
        let made = QUIET_PER_GIB.mul_f64(most.unwrap_or(0) as f64 / (1u64 << 30) as f64);
        let quiet = self.order_each(&sessions, quiesce, QUIET + made).await;
        if let Some(why) = refusal(&quiet) {
            return resume(MoveError::Busy(why)).await;
        }
        if let Err(why) = self.freeze(tenant).await {
            return resume(why).await;
        }
        let moved = self.order_each(&sessions, out, MOVE).await;
        if moved.iter().any(|reply| matches!(reply, Reply::Late)) {
            place.asleep.store(true, Ordering::Release);
            return Err(MoveError::Stuck);
        }
        if let Some(why) = refusal(&moved) {
            // Those who have moved come back; nobody else was given their room yet.
            if self
                .scheduler
                .call(move |engine| engine.bring_back(tenant))
                .await?
                .is_err()
            {
                place.asleep.store(true, Ordering::Release);
                return Err(MoveError::Stuck);
            }
            self.order(&sessions, |op| Daemon::SwapIn { op }, MOVE)
                .await;
            return resume(MoveError::Busy(why)).await;
        }
        place.asleep.store(true, Ordering::Release);
        self.went(tenant, before, began).await?;
        Ok(quiet
            .iter()
            .all(|reply| !matches!(reply, Reply::Done { idle: false })))
    }

    /// How much of the host's memory each process of a tenant may keep for a move. Others let go of what they do not use, if
    /// need be.
    async fn host_room(
        &self,
        tenant: TenantId,
        least: u64,
    ) -> Result<BTreeMap<u64, u64>, MoveError> {
        let needs = async || {
            let needs = move |engine: &mut Engine| engine.on_host(tenant, least);
            let needs = self.scheduler.call(needs).await?.into_iter();
            Ok::<BTreeMap<_, _>, Stopped>(needs.map(|(id, need)| (id.0, need)).collect())
        };
        let reserve = |needs: &BTreeMap<_, _>| lock(&self.host).reserve(needs, HOST_PIECE);
        let granted = needs().await?;
        if let Ok(most) = reserve(&granted) {
            return Ok(most);
        }
        // What is granted and not used is not moved.
        for session in self.sessions(Some(tenant)) {
            self.tell(session, &Daemon::Trim);
        }
        tokio::time::sleep(TRIM).await;
        let used = needs().await?;
        if let Ok(most) = reserve(&used) {
            return Ok(most);
        }
        let others: BTreeSet<TenantId> = {
            let state = self.state();
            let others = state.members.values().map(|it| it.tenant);
            others.filter(|other| *other != tenant).collect()
        };
        for other in others {
            let place = self.place(other);
            // Nobody else's move waits for this one.
            let Ok(_turn) = place.turn.try_lock() else {
                continue;
            };
            let keeps = |id: &SessionId| lock(&self.host).kept_by(id.0) > 0;
            let sessions = self.sessions(Some(other));
            let sessions: Vec<_> = sessions.into_iter().filter(keeps).collect();
            if sessions.is_empty() || place.asleep.load(Ordering::Acquire) {
                continue;
            }
            self.order(&sessions, |op| Daemon::DropHost { op }, DROP)
                .await;
            if let Ok(most) = reserve(&used) {
                return Ok(most);
            }
        }
        Ok(reserve(&used)?)
    }

    /// Counts a move to the host and tells everybody who waits for room.
    async fn went(&self, tenant: TenantId, before: u64, began: Instant) -> Result<u64, Stopped> {
        let took = began.elapsed();
        let count = move |engine: &mut Engine| {
            let bytes = engine.swapped(tenant).saturating_sub(before);
            engine.went(tenant, bytes, took);
            bytes
        };
        let bytes = self.scheduler.call(count).await?;
        tracing::info!(tenant = tenant.0, bytes, ?took, "memory went to the host");
        self.changed.notify_waiters();
        Ok(bytes)
    }

    async fn freeze(&self, tenant: TenantId) -> Result<(), MoveError> {
        self.scheduler
            .call(move |engine| engine.park(tenant, true))
            .await?;
        let deadline = Instant::now() + FREEZE;
        loop {
            let frozen = self
                .scheduler
                .call(move |engine| engine.is_frozen(tenant))
                .await?;
            match frozen {
                Ok(true) => return Ok(()),
                Ok(false) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_micros(500)).await;
                }
                Ok(false) => return Err(MoveError::Freeze(format!("not within {FREEZE:?}"))),
                Err(error) => return Err(MoveError::Freeze(error)),
            }
        }
    }

    /// Brings all memory of a tenant back, others' away for it if need be. Waits as long as its processes do.
    ///
    /// # Errors
    /// When there can never be room.
    pub(crate) async fn wake(self: &Arc<Self>, tenant: TenantId) -> Result<(), MoveError> {
        let place = self.place(tenant);
        let _waking = place.waking.lock().await;
        let mut first = None;
        while place.asleep.load(Ordering::Acquire) {
            match self.back(tenant, &place).await? {
                Back::Done => {}
                Back::Lacks { device, missing } if first.is_some() => {
                    self.make_room(tenant, &device, missing, false).await?;
                }
                Back::Lacks { device, missing } => {
                    let queue = self.queue(tenant, &device, missing).await?;
                    let served = tokio::time::timeout(OVERTAKE, queue.lock_owned()).await;
                    first = Some(served.ok());
                }
                Back::Refused(why) => {
                    // What came back stays; the driver had no room for the rest, whatever the books say.
                    tracing::warn!(
                        tenant = tenant.0,
                        why,
                        "memory does not come back: trying again"
                    );
                    tokio::time::sleep(LOOK).await;
                    self.make_more_room(tenant).await?;
                }
            }
        }
        Ok(())
    }

    /// The same for somebody who says so, and not because it has work: a move that is under way ends first.
    ///
    /// # Errors
    /// As above.
    pub(crate) async fn wake_asked(self: &Arc<Self>, tenant: TenantId) -> Result<(), MoveError> {
        let place = self.place(tenant);
        drop(place.turn.lock().await);
        self.wake(tenant).await
    }

    /// Brings a sleeping tenant back if there is room.
    async fn back(&self, tenant: TenantId, place: &Place) -> Result<Back, MoveError> {
        let _turn = place.turn.lock().await;
        let sessions = self.sessions(Some(tenant));
        if sessions.is_empty() {
            place.asleep.store(false, Ordering::Release);
            return Ok(Back::Done);
        }
        let (bytes, room) = self
            .scheduler
            .call(move |engine| (engine.swapped(tenant), engine.bring_back(tenant)))
            .await?;
        match room {
            Ok(()) => {}
            Err((device, Denied::Full { missing })) => return Ok(Back::Lacks { device, missing }),
            Err((device, denied)) => return Err(MoveError::NoRoom(device, denied)),
        }
        let began = Instant::now();
        let moved = self
            .order(&sessions, |op| Daemon::SwapIn { op }, MOVE)
            .await;
        if moved.iter().any(|reply| matches!(reply, Reply::Late)) {
            return Err(MoveError::Stuck);
        }
        if let Some(why) = refusal(&moved) {
            return Ok(Back::Refused(why));
        }
        let took = began.elapsed();
        let thaw = move |engine: &mut Engine| {
            engine.park(tenant, false);
            engine.came(tenant, bytes, took);
        };
        self.scheduler.call(thaw).await?;
        *lock(&place.awake) = (Instant::now(), took);
        place.asleep.store(false, Ordering::Release);
        tracing::info!(tenant = tenant.0, bytes, ?took, "memory came back");
        Ok(Back::Done)
    }

    /// Wakes a tenant that was put to sleep for another's sake, once that one has had the time to take the room.
    fn wake_soon(self: Arc<Self>, tenant: TenantId) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            tokio::time::sleep(LOOK).await;
            self.wake_or_warn(tenant).await;
        })
    }

    async fn wake_or_warn(self: &Arc<Self>, tenant: TenantId) {
        if let Err(error) = self.wake(tenant).await {
            tracing::warn!(%error, "a tenant sleeps on");
        }
    }

    /// Grants memory once there is room, as far as the tenant's policy goes.
    async fn lease(
        self: &Arc<Self>,
        session: SessionId,
        tenant: TenantId,
        ask: Ask,
    ) -> Result<u64, Stopped> {
        let began = Instant::now();
        let mut first = None;
        loop {
            let again = ask.clone();
            let granted = self
                .scheduler
                .call(move |engine| engine.ask(session, &again))
                .await?;
            let missing = match granted {
                Ok(bytes) => return Ok(bytes),
                Err(Denied::Full { missing }) => missing,
                Err(denied) => {
                    tracing::info!(%denied, "memory refused");
                    return Ok(0);
                }
            };
            let (_, activity) = self.scheduler.call(|engine| engine.memory()).await?;
            let policy = activity.get(&tenant).map(|it| it.spec.memory_policy);
            let connected = self.state().members.contains_key(&session);
            let patience = match policy {
                Some(MemoryPolicy::SwapOthers) => PATIENCE_FOR_TURNS,
                Some(MemoryPolicy::Wait) => PATIENCE,
                Some(MemoryPolicy::Fail) | None => Duration::ZERO,
            };
            let Some(left) = patience.checked_sub(began.elapsed()).filter(|_| connected) else {
                tracing::info!(tenant = tenant.0, missing, "memory refused: no room");
                return Ok(0);
            };
            if policy != Some(MemoryPolicy::SwapOthers) {
                self.wait().await;
            } else if first.is_some() {
                self.make_room(tenant, &ask.device, missing, true).await?;
            } else {
                let queue = self.queue(tenant, &ask.device, missing).await?;
                let patience = left.min(OVERTAKE);
                let served = tokio::time::timeout(patience, queue.lock_owned()).await;
                first = Some(served.ok());
            }
        }
    }

    /// Has those who were granted more than they use give it back, for one who was denied this.
    async fn trim_for(&self, denied: Denied) {
        let last = *lock(&self.trimmed);
        // Little can have come together since; a limit may be met by what the asker itself does not use.
        let lately = last.is_some_and(|last| last.elapsed() < TRIM_PAUSE);
        if !(lately && matches!(denied, Denied::Full { .. })) {
            self.trim().await;
        }
    }

    async fn trim(&self) {
        *lock(&self.trimmed) = Some(Instant::now());
        for session in self.sessions(None) {
            self.tell(session, &Daemon::Trim);
        }
        tokio::time::sleep(TRIM).await;
    }

    async fn wait(&self) {
        let _ = tokio::time::timeout(LOOK, self.changed.notified()).await;
    }

    /// Has others give way on all devices where a tenant lacks something, although the books show room.
    async fn make_more_room(self: &Arc<Self>, tenant: TenantId) -> Result<(), Stopped> {
        let (lines, _) = self.scheduler.call(|engine| engine.memory()).await?;
        for line in lines {
            let lacks =
                |(id, entry): &(TenantId, Entry)| *id == tenant && entry.holding.swapped > 0;
            if line.entries.iter().any(lacks) {
                self.make_room(tenant, &line.uuid, line.capacity / EXTRA, false)
                    .await?;
            }
        }
        Ok(())
    }

    /// Has others give way so that so much, or some more, comes free on a device for a tenant, or waits a moment.
    async fn make_room(
        self: &Arc<Self>,
        tenant: TenantId,
        device: &str,
        missing: u64,
        ahead: bool,
    ) -> Result<(), Stopped> {
        let (lines, activity) = self.scheduler.call(|engine| engine.memory()).await?;
        let line = lines.iter().find(|line| line.uuid == device);
        let candidates = line.map_or_else(Vec::new, |line| {
            self.candidates(tenant, missing, line, &activity)
        });
        if self.reclaim(device, missing, &candidates).await {
            return Ok(());
        }
        let extra = line.filter(|_| ahead).map_or(0, |it| it.capacity / EXTRA);
        let chosen = victims(missing.saturating_add(extra), &candidates);
        let Some(chosen) = chosen.or_else(|| victims(missing, &candidates)) else {
            self.trim().await;
            self.wait().await;
            return Ok(());
        };
        for (victim, least) in chosen {
            let asleep = |it: &Candidate| it.tenant == victim && it.asleep;
            let asleep = candidates.iter().any(asleep);
            match self.give_way(victim, least, asleep).await {
                Ok(true) => {}
                // Nobody of it may come to its gate: its threads wait for a kernel that is frozen.
                Ok(false) => {
                    let memory = Arc::clone(self);
                    tokio::spawn(async move { memory.wake_soon(victim).await });
                }
                Err(error) => {
                    self.tell_of(&error);
                    self.wait().await;
                }
            }
        }
        Ok(())
    }

    fn tell_of(&self, error: &MoveError) {
        let mut state = self.state();
        let lately = (state.told_full).is_some_and(|told| told.elapsed() < TELL_AGAIN);
        if matches!(error, MoveError::HostFull(_)) && !lately {
            state.told_full = Some(Instant::now());
            tracing::warn!(%error, "a tenant cannot give way");
        } else {
            tracing::debug!(%error, "a tenant does not give way");
        }
    }

    /// Has programs give back caches, in the order in which their tenants would be moved, until so much is free. Whether any
    /// did: then it is worth looking again.
    async fn reclaim(&self, device: &str, missing: u64, candidates: &[Candidate]) -> bool {
        let mut freed = 0u64;
        for candidate in in_order(candidates).into_iter().filter(|it| !it.asleep) {
            let sessions: Vec<SessionId> = {
                let mut state = self.state();
                let own =
                    (state.members.iter_mut()).filter(|(_, it)| it.tenant == candidate.tenant);
                let due = own.filter_map(|(id, member)| {
                    let last = member.reclaims.as_mut()?;
                    let due = last.is_none_or(|last| last.elapsed() > RECLAIM_PAUSE);
                    due.then(|| *last = Some(Instant::now()))?;
                    Some(*id)
                });
                due.collect()
            };
            if sessions.is_empty() {
                continue;
            }
            let ask = |op| Daemon::Reclaim {
                op,
                device: device.to_owned(),
                bytes: missing - freed,
            };
            for reply in self.order(&sessions, ask, RECLAIM).await {
                if let Reply::Freed(bytes) = reply {
                    tracing::info!(tenant = candidate.tenant.0, bytes, "caches were given back");
                    freed = freed.saturating_add(bytes);
                }
            }
            if freed >= missing {
                break;
            }
        }
        freed > 0
    }

    /// Where a tenant waits that lacks so much.
    async fn queue(
        &self,
        tenant: TenantId,
        device: &str,
        missing: u64,
    ) -> Result<Arc<tokio::sync::Mutex<()>>, Stopped> {
        let (lines, activity) = self.scheduler.call(|engine| engine.memory()).await?;
        let line = lines.iter().find(|line| line.uuid == device);
        let entitled = line.is_some_and(|line| is_entitled(tenant, missing, line));
        let class = activity
            .get(&tenant)
            .map_or(Class::Batch, |it| it.spec.class);
        let key = (device.to_owned(), entitled, class);
        Ok(Arc::clone(lock(&self.queues).entry(key).or_default()))
    }

    fn candidates(
        &self,
        tenant: TenantId,
        missing: u64,
        line: &Line,
        activity: &BTreeMap<TenantId, Activity>,
    ) -> Vec<Candidate> {
        let entitled = is_entitled(tenant, missing, line);
        let class = |id| activity.get(&id).map_or(Class::Batch, |it| it.spec.class);
        let mut candidates = Vec::new();
        for (id, entry) in line.entries.iter().filter(|(id, _)| *id != tenant) {
            let Some(known) = activity.get(id).filter(|known| !known.in_group) else {
                continue;
            };
            let place = self.place(*id);
            let (since, took) = *lock(&place.awake);
            let turn = turn(Micros(took.as_micros() as u64));
            let asleep = place.asleep.load(Ordering::Acquire);
            let standing = Standing {
                idle: known.idle,
                asleep,
                had_its_turn: since.elapsed() >= Duration::from_micros(turn.0),
            };
            if standing.may_give_way(class(*id), class(tenant), entitled) {
                candidates.push(Candidate {
                    tenant: *id,
                    class: class(*id),
                    asleep,
                    idle: known.idle,
                    movable: entry.holding.movable,
                    borrowed: entry.borrowed(),
                    // The longer ago, the less.
                    since: u64::MAX - since.elapsed().as_micros() as u64,
                });
            }
        }
        candidates
    }

    /// Puts idle tenants to sleep that want it so, until the daemon ends.
    pub(crate) async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(WATCH).await;
            let Ok((lines, activity)) = self.scheduler.call(|engine| engine.memory()).await else {
                return;
            };
            for (tenant, known) in activity {
                let Some(after) = known.spec.sleep_after_s else {
                    continue;
                };
                let has = |line: &Line| {
                    let own = |(id, entry): &(TenantId, gpumux_core::ledger::Entry)| {
                        *id == tenant && entry.holding.movable > 0
                    };
                    line.entries.iter().any(own)
                };
                let due = known.idle
                    && !known.in_group
                    && known.idle_for.as_secs_f64() >= after as f64
                    && lines.iter().any(has)
                    && lock(&self.place(tenant).awake).0.elapsed() >= Duration::from_secs(after);
                let place = self.place(tenant);
                let stayed = *lock(&place.stayed);
                let lately = stayed.is_some_and(|stayed| stayed.elapsed() < SLEEP_AGAIN);
                // While it moves, another order would only wait behind that.
                let moves = place.turn.try_lock().is_err();
                if due && !lately && !moves && !self.is_asleep(tenant) {
                    let memory = Arc::clone(&self);
                    tokio::spawn(async move {
                        if let Err(error) = memory.sleep(tenant, u64::MAX).await {
                            *lock(&place.stayed) = Some(Instant::now());
                            memory.tell_of(&error);
                        }
                    });
                }
            }
        }
    }
}

/// Whether a tenant was promised all that it would have with so much more on the device.
fn is_entitled(tenant: TenantId, missing: u64, line: &Line) -> bool {
    let own = line.entries.iter().find(|(id, _)| *id == tenant);
    own.is_some_and(|(_, entry)| {
        entry
            .holding
            .all()
            .max(entry.holding.resident().saturating_add(missing))
            <= entry.share.guaranteed
    })
}

/// Why an order was not carried out, if it was not.
fn refusal(replies: &[Reply]) -> Option<String> {
    replies.iter().find_map(|reply| match reply {
        Reply::Done { .. } | Reply::Freed(_) | Reply::Gone => None,
        Reply::Busy(why) => Some(why.clone()),
        Reply::Late => Some("a process of it does not answer".into()),
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
