//! The socket where tenants' processes meet the daemon. All that comes from there is hostile until
//! shown otherwise: every count, size and wait has a bound, and what breaks a rule costs only its
//! own session.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use gpumux_core::{
    RunState, TenantId, Timeslice,
    broker::{Event, ProcessId, RETURN},
    runlist::Mechanism,
};
use gpumux_rm::{ControlFailure, Group};
use gpumux_wire::{
    Daemon, PROTOCOL, Shim,
    message::{LONGEST_NAME, MAX_CHANNELS, MAX_DOMAINS, PERMITS},
    page::{Page, SLOTS, Work},
    permits::Permits,
    socket,
};
use rustix::net::{RecvFlags, SendFlags};
use tokio::{
    io::unix::AsyncFd,
    sync::{mpsc, watch},
    task::AbortHandle,
};

use crate::{
    config::Config,
    groups::UnauthorizedClient,
    hold,
    link::{Link, Links, SessionId, send},
    memory,
    peer::{Peer, ProcessFd, readable},
    quota::{Place, Quota},
    receiver::Connection,
    scheduler::{Command, GroupError, Handle, Launches, Left, Member, Met, NewGroup, Stopped},
    sharing::Sharing,
    tenants::{TenantError, Tenants},
    verify::{self, Rejection, Vendor, verify},
};

/// How long a connection may take to say hello.
pub(crate) const HELLO: Duration = Duration::from_secs(5);

/// Packets that the sessions of a tenant may send at once, and per second after that. Later ones wait in their sockets.
const RATE: (f64, f64) = (4096.0, 4000.0);

/// Groups that were not what they were said to be (because the program freed them meanwhile)
/// before a session counts as hostile.
const MAX_REJECTED: usize = 64;

/// How long after the driver refused a group's controls the program's report that it has freed the group may take.
const FREED: Duration = Duration::from_secs(3);

/// Files held so per session: a control file, and the two of UVM that libcuda opens, told twice.
const MAX_KEPT: usize = 8;

/// Packets of a process that has ended that are looked at, and how long they may take.
const MAX_LAST_WORDS: usize = 64;
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Part of the places that only root may take (as its reciprocal).
const RESERVE: usize = 16;

/// Files that stay free for everything but sessions.
const SPARE_FILES: u64 = 128;

/// What all sessions share.
pub(crate) struct Sessions {
    tenants: Arc<Tenants>,
    scheduler: Handle,
    emulated: Option<PathBuf>,
    vendor: Vendor,
    mechanism: Mechanism,
    max: usize,
    files: u64,
    hello: Duration,
    made: AtomicU64,
    users: Quota,
    rates: Mutex<BTreeMap<TenantId, Weak<Rate>>>,
    links: Arc<Links>,
    sharing: Arc<Sharing>,
    /// Of processes whose end is waited for without a session.
    watches: Mutex<BTreeMap<u32, AbortHandle>>,
}

/// Packets that may be sent now, and when that was counted.
struct Rate(Mutex<(f64, Instant)>);

impl Rate {
    /// Counts a packet; how long it must wait.
    fn take(&self, now: Instant) -> Duration {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, counted) = *state;
        let passed = now.saturating_duration_since(counted).as_secs_f64();
        let left = (left + passed * RATE.1).min(RATE.0) - 1.0;
        *state = (left, counted.max(now));
        Duration::from_secs_f64((-left / RATE.1).max(0.0))
    }
}

/// Why a session ends. The other side is notified.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(
        "the daemon speaks protocol {PROTOCOL}, the program's libgpumux.so protocol {0}: restart the program, or install the same version"
    )]
    Protocol(u32),
    #[error("no hello within {0:?}")]
    Late(Duration),
    #[error("the first packet must be a hello with the page of counters, and only that")]
    NoHello,
    #[error("the page of counters cannot be used: {0}")]
    Page(io::Error),
    #[error("the packet cannot be understood: {0}")]
    Packet(io::Error),
    #[error("{0} sessions are connected already: raise max_sessions in the daemon's configuration")]
    TooMany(usize),
    #[error(
        "{0} has {1} sessions, as many as it may have: end some, or raise `max_sessions` of the user in gpumux.toml"
    )]
    TooManyOfUser(String, usize),
    #[error("the daemon is short of files: raise its limit of open files")]
    Files,
    #[error("more than {MAX_DOMAINS} channel groups")]
    TooManyGroups,
    #[error("more than {MAX_CHANNELS} channels in a group")]
    TooManyChannels,
    #[error("the process entered group {0}, which is not its tenant's: it is ended")]
    Unauthorized(String),
    #[error("group {0}, of the same user, does not say whether the process is in it")]
    Unanswered(String),
    #[error("the group came without a control file of a device")]
    NoFile,
    #[error(transparent)]
    Rejected(#[from] Rejection),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Tenant(#[from] TenantError),
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// That a limit of open files leaves room for few sessions, if so.
fn lack_of_files(limit: Option<u64>) -> Option<String> {
    const LEAST: u64 = 2 * SPARE_FILES;
    let limit = limit.filter(|limit| *limit < LEAST)?;
    Some(format!(
        "the limit of open files is {limit}, and the daemon keeps {SPARE_FILES} for itself: programs run unmanaged. Raise it to {LEAST} or more (`ulimit -n`)"
    ))
}

impl Sessions {
    pub(crate) fn new(
        config: &Config,
        hello: Duration,
        tenants: Arc<Tenants>,
        scheduler: Handle,
    ) -> Arc<Self> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        if let Some(why) = lack_of_files(limit.current) {
            tracing::warn!("{why}");
        }
        let links = Arc::<Links>::default();
        Arc::new(Self {
            tenants,
            scheduler,
            emulated: config.emulated.clone(),
            vendor: verify::nvidia,
            mechanism: config.mechanism,
            max: config.max_sessions,
            files: limit.current.unwrap_or(u64::MAX),
            hello,
            made: AtomicU64::new(0),
            users: Quota::default(),
            rates: Mutex::default(),
            sharing: Arc::new(Sharing::new(Arc::clone(&links))),
            watches: Mutex::default(),
            links,
        })
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.users.all()
    }

    /// What the sessions of a tenant may send, which they share.
    fn rate(&self, tenant: TenantId) -> Arc<Rate> {
        let mut rates = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        rates.retain(|_, rate| rate.strong_count() > 0);
        let known = rates.get(&tenant).and_then(Weak::upgrade);
        let rate = known.unwrap_or_else(|| Arc::new(Rate(Mutex::new((RATE.0, Instant::now())))));
        rates.insert(tenant, Arc::downgrade(&rate));
        rate
    }

    /// Whether processes of a tenant share device memory.
    pub(crate) fn shares(&self, tenant: TenantId) -> bool {
        self.sharing.shares(tenant)
    }

    /// Notifies a tenant's processes that work is coming. Returns how many were notified.
    pub(crate) fn hint(&self, tenant: TenantId, expected_us: Option<u32>) -> usize {
        let hint = Daemon::Hint { expected_us };
        let links = self.links.all().into_iter();
        links
            .filter(|it| it.tenant == tenant && it.send(&hint))
            .count()
    }

    /// Serves connections until told to stop.
    pub(crate) async fn serve(
        self: Arc<Self>,
        mut arrivals: mpsc::Receiver<Connection>,
        mut stop: watch::Receiver<bool>,
    ) {
        loop {
            let arrived = tokio::select! {
                arrived = arrivals.recv() => arrived,
                _ = stop.wait_for(|stop| *stop) => return,
            };
            let Some(connection) = arrived else {
                return;
            };
            tokio::spawn(Arc::clone(&self).run(connection, stop.clone()));
        }
    }

    fn enter(&self, socket: &OwnedFd, uid: u32) -> Result<Place, Refusal> {
        self.check_files(socket)?;
        self.users.take(uid, |taken| {
            // Some places are root's: it must be able to see, and to end, the processes that fill the others.
            let most = match uid {
                0 => self.max,
                _ => self.max - self.max / RESERVE,
            };
            if taken.all >= most {
                return Err(Refusal::TooMany(taken.all));
            }
            let policy = self.tenants.users.known(uid);
            match taken.own >= policy.max_sessions {
                true => Err(Refusal::TooManyOfUser(policy.user.clone(), taken.own)),
                false => Ok(()),
            }
        })
    }

    /// Files get the lowest free number: a high one says that few are left.
    fn check_files(&self, file: &OwnedFd) -> Result<(), Refusal> {
        match file.as_raw_fd() as u64 + SPARE_FILES < self.files {
            true => Ok(()),
            false => Err(Refusal::Files),
        }
    }

    /// One session, from its first to its last packet.
    async fn run(self: Arc<Self>, connection: Connection, stop: watch::Receiver<bool>) {
        let Connection { socket, peer } = connection;
        let socket = Arc::new(socket);
        let ended = match self.enter(&socket, peer.uid) {
            Ok(place) => {
                let ended = self.serve_one(&socket, &peer, stop).await;
                drop(place);
                ended
            }
            Err(refusal) => Err(refusal),
        };
        match ended {
            Ok(()) => {}
            // Its next session may have it: with the next daemon, or with this one.
            Err(
                Refusal::Stopped(_)
                | Refusal::Tenant(TenantError::Stopped(_))
                | Refusal::Group(GroupError::Expired),
            ) => {
                let _ = send(&socket, &Daemon::Bye);
            }
            Err(refusal) => {
                tracing::info!(%refusal, "session refused");
                let reason = refusal.to_string();
                let _ = send(&socket, &Daemon::Refused { reason });
            }
        }
    }

    async fn serve_one(
        &self,
        socket: &Arc<OwnedFd>,
        peer: &Peer,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), Refusal> {
        let events = readable(socket.as_fd()).map_err(Refusal::Packet)?;
        let hello = tokio::time::timeout(self.hello, receive(&events)).await;
        let (page, token) = match hello.map_err(|_| Refusal::Late(self.hello))?? {
            None => return Ok(()),
            Some((Shim::Hello { protocol, .. }, _)) if protocol != PROTOCOL => {
                return Err(Refusal::Protocol(protocol));
            }
            Some((Shim::Hello { tenant, .. }, Some(page))) => {
                (Page::open(page).map_err(Refusal::Page)?, tenant)
            }
            Some((
                Shim::Look {
                    tenant,
                    device,
                    total,
                },
                None,
            )) => return self.show(socket, peer, &tenant, device, total).await,
            Some(_) => return Err(Refusal::NoHello),
        };
        let id = SessionId(self.made.fetch_add(1, Ordering::Relaxed));
        let (tenant, name) = self.tenants.join(id, peer, token.as_deref()).await?;
        // Before the welcome, with which the lease begins: an expiry right after it must be noticed.
        let link = Link::new(id, tenant, peer.pid, page.into(), Arc::clone(socket));
        let met = Box::new(Met::new(Arc::clone(&link)));
        let welcome = Daemon::Welcome {
            protocol: PROTOCOL,
            tenant: name.clone(),
            memory: true,
        };
        let lease = self.scheduler.lease().filter(|_| link.page.revision() >= 1);
        let _ = socket::send(socket, &welcome, lease, SendFlags::DONTWAIT);
        tracing::info!(pid = peer.pid, tenant = name, "session");
        let _ = self
            .scheduler
            .ask(|answer| Command::Meet(met, answer))
            .await;
        self.links.add(&link);
        self.sharing.join(&link, peer);
        let mut session = Session {
            sessions: self,
            link,
            process: peer.fd.as_ref(),
            keys: BTreeMap::new(),
            rejected: 0,
            away: BTreeSet::new(),
            refused: Refused::default(),
            kept: Vec::new(),
            rate: self.rate(tenant),
            permits: None,
            offered: BTreeMap::new(),
        };
        let ended = async {
            match &peer.fd {
                Some(process) => process.ended().await,
                None => std::future::pending().await,
            }
        };
        let result = tokio::select! {
            result = session.serve(&events) => result,
            _ = ended => Ok(()),
            _ = stop.wait_for(|stop| *stop) => {
                let _ = send(socket, &Daemon::Bye);
                Ok(())
            }
        };
        session.hear_last_words(&events).await;
        let held = session.has_shared_work();
        let mut rest = None;
        if held {
            tracing::info!(
                pid = peer.pid,
                "it ended with work under way: its memory is held"
            );
            let kept = std::mem::take(&mut session.kept);
            rest = Some(hold::until_ended(&self.scheduler, Left::Session(id), kept).await);
        }
        // The socket of a process that ends closes a moment before it has ended.
        let alive = !held && !peer.fd.as_ref().is_some_and(ProcessFd::has_ended);
        tracing::info!(pid = peer.pid, tenant = name, alive, "session ended");
        self.links.remove(id);
        // Commands are carried out in order: a group that is still on its way is removed by this one.
        let awaited = self
            .scheduler
            .ask(|answer| Command::Leave {
                session: id,
                alive,
                answer,
            })
            .await;
        self.watch_end(id, peer, alive, awaited.unwrap_or(false));
        self.tenants.leave(id, tenant, peer.pid).await;
        // Until then it counts among its user's sessions.
        if let Some(rest) = rest {
            rest.await;
        }
        result
    }

    /// Answers what a program without a session is shown of a device.
    async fn show(
        &self,
        socket: &OwnedFd,
        peer: &Peer,
        token: &str,
        device: String,
        total: u64,
    ) -> Result<(), Refusal> {
        let tenant = self.tenants.find(peer, token).await?;
        tokio::time::sleep(self.rate(tenant).take(Instant::now())).await;
        let show = |answer| Command::ShowMemory(tenant, device, total, answer);
        let (free, total) = self.scheduler.ask(show).await?;
        let seen = Daemon::Seen {
            ticket: 0,
            free,
            total,
        };
        let _ = send(socket, &seen);
        Ok(())
    }

    /// A session has ended. What a process has that lives is given up when it ends, if it does while that is `awaited`, or shares it.
    fn watch_end(&self, id: SessionId, peer: &Peer, alive: bool, awaited: bool) {
        let shares = self.sharing.leave(id, peer, alive);
        // Where its end cannot be noticed, other processes keep what they share with it: their memory stays where it is.
        let fd = (peer.fd.as_ref())
            .filter(|_| alive && (awaited || shares.is_some()))
            .map(ProcessFd::try_clone);
        let Some(Ok(fd)) = fd else {
            return;
        };
        let (sharing, scheduler) = (Arc::clone(&self.sharing), self.scheduler.clone());
        let patience = match shares {
            Some(_) => Duration::MAX,
            None => Duration::from_micros(RETURN.1.0),
        };
        let watch = tokio::spawn(async move {
            if let Ok(Ok(())) = tokio::time::timeout(patience, fd.ended()).await {
                shares.into_iter().for_each(|it| sharing.ended(it));
                let left = Event::Left(ProcessId(id.0));
                let left = |answer| Command::Memory(left, answer);
                let _ = scheduler.ask(left).await;
            }
        });
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        watches.retain(|_, it| !it.is_finished());
        // However often a process comes and goes, the daemon has one file for it.
        if let Some(before) = watches.insert(peer.pid, watch.abort_handle()) {
            before.abort();
        }
    }
}

/// A session that has said hello.
struct Session<'a> {
    sessions: &'a Sessions,
    link: Arc<Link>,
    process: Option<&'a ProcessFd>,
    /// Its groups: whether each is a compute group.
    keys: BTreeMap<u32, bool>,
    rejected: usize,
    /// Devices of which it has memory on the host: a compute group that it announces must not run.
    away: BTreeSet<String>,
    refused: Refused,
    /// Files that its memory lives with, if it shares a group.
    kept: Vec<OwnedFd>,
    rate: Arc<Rate>,
    /// Where it is written which groups may launch, if some are scheduled so; the file is the process's.
    permits: Option<(Arc<Permits>, OwnedFd)>,
    /// Groups that shall be scheduled at launch, once the process has named their devices.
    offered: BTreeMap<u32, Offered>,
}

/// Compute groups of its own whose controls the driver refused, until when it may report that it has freed them, and the refusal.
#[derive(Default)]
struct Refused(BTreeMap<u32, (Instant, ControlFailure)>);

impl Refused {
    fn add(&mut self, key: u32, error: ControlFailure, now: Instant) {
        self.0.insert(key, (now + FREED, error));
    }

    fn remove(&mut self, key: u32) {
        self.0.remove(&key);
    }

    /// When the first is due.
    fn next(&self) -> Option<Instant> {
        self.0.values().map(|(until, _)| *until).min()
    }

    /// The refusal of one that was not freed in time.
    fn due(&mut self, now: Instant) -> Option<ControlFailure> {
        let late = |_: &u32, (until, _): &mut (Instant, _)| *until <= now;
        let due = self.0.extract_if(.., late).next();
        due.map(|(_, (_, error))| error)
    }
}

/// A group that shall be scheduled at launch.
struct Offered {
    launches: Launches,
    /// Its device, if the driver has named it.
    device: Option<String>,
    default: Timeslice,
}

impl Session<'_> {
    async fn serve(&mut self, events: &Events<'_>) -> Result<(), Refusal> {
        loop {
            let pause = self.rate.take(Instant::now());
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            let late = self.refused.next();
            let received = match late.map(tokio::time::Instant::from_std) {
                Some(late) => tokio::time::timeout_at(late, receive(events)).await,
                None => Ok(receive(events).await),
            };
            match received {
                Ok(received) => match received? {
                    Some((packet, file)) => self.handle(packet, file, events.get_ref()).await?,
                    None => return Ok(()),
                },
                Err(_late) => self.give_up_refused().await?,
            }
        }
    }

    async fn handle(
        &mut self,
        packet: Shim,
        file: Option<OwnedFd>,
        socket: &BorrowedFd<'_>,
    ) -> Result<(), Refusal> {
        let id = self.link.session;
        let scheduler = &self.sessions.scheduler;
        match packet {
            Shim::Hello { .. } | Shim::Look { .. } => return Err(Refusal::NoHello),
            Shim::Group {
                key,
                engine,
                client,
                subdevice,
                group,
                channels,
                timeslice_us,
                shared,
            } => {
                let file = file.ok_or(Refusal::NoFile)?;
                self.sessions.check_files(&file)?;
                let compute = engine == gpumux_rm::layout::engine::GR0;
                check_channels(&channels, compute)?;
                if self.keys.len() >= MAX_DOMAINS && !self.keys.contains_key(&key) {
                    return Err(Refusal::TooManyGroups);
                }
                let handles = Group {
                    client,
                    subdevice,
                    group,
                    channels,
                };
                self.announce(key, engine, handles, (timeslice_us, shared), file, socket)
                    .await?;
            }
            Shim::Memory => {
                let file = file.ok_or(Refusal::NoFile)?;
                self.sessions.check_files(&file)?;
                self.keep(file);
            }
            Shim::Channels { key, channels } => {
                if let Some(compute) = self.keys.get(&key) {
                    check_channels(&channels, *compute)?;
                    scheduler
                        .ask(|answer| Command::SetChannels(id, key, channels, answer))
                        .await?;
                }
            }
            Shim::TimesliceTouched { key } => {
                scheduler
                    .ask(|answer| Command::Touched(id, key, answer))
                    .await?;
            }
            Shim::AwaitsPermits { key, device } => self.begin_launches(key, device).await?,
            Shim::Gone { key } => {
                self.keys.remove(&key);
                self.offered.remove(&key);
                self.refused.remove(key);
                scheduler
                    .ask(|answer| Command::Gone(id, key, answer))
                    .await?;
            }
            Shim::Unlisted { mut name } => {
                name.retain(|it| it.is_ascii_alphanumeric() || it == '_');
                name.truncate(LONGEST_NAME);
                let tenant = self.link.tenant;
                scheduler
                    .ask(|answer| Command::CalledUnlisted(tenant, name, answer))
                    .await?;
            }
            Shim::View {
                ticket,
                device,
                total,
            } => {
                let view = |answer| Command::AnswerView {
                    session: id,
                    ticket,
                    device,
                    total,
                    answer,
                };
                scheduler.ask(view).await?;
            }
            Shim::Shown { device, total } => {
                let event = Event::WasShown(self.link.tenant, device, total);
                scheduler
                    .ask(|answer| Command::Memory(event, answer))
                    .await?;
            }
            Shim::Piece { .. } => {
                if let Some(file) = &file {
                    self.sessions.check_files(file)?;
                }
                self.sessions.sharing.handle(id, &packet, file);
            }
            Shim::Export { .. }
            | Shim::Withdraw { .. }
            | Shim::Redeem { .. }
            | Shim::Opened { .. }
            | Shim::Closed { .. }
            | Shim::Exported { .. }
            | Shim::Introduced
            | Shim::Delayed { .. } => self.sessions.sharing.handle(id, &packet, None),
            packet => {
                if let Shim::Holds {
                    device, swapped, ..
                } = &packet
                {
                    match *swapped > 0 && self.away.len() < MAX_DOMAINS {
                        true => self.away.insert(device.clone()),
                        false => self.away.remove(device),
                    };
                }
                if let Some(event) = memory::event(id, packet) {
                    scheduler
                        .ask(|answer| Command::Memory(event, answer))
                        .await?;
                }
            }
        }
        Ok(())
    }

    /// The process goes on as if there were no daemon: it could be neither frozen nor moved safely.
    async fn leave_unmanaged(&self, error: ControlFailure) -> Result<(), Refusal> {
        let rejection = Rejection::Unsupported(error);
        let why = rejection.to_string();
        tracing::warn!(pid = self.link.pid, %why, "a process runs unmanaged");
        self.sessions
            .tenants
            .uncontrolled(self.link.tenant, why)
            .await;
        Err(rejection.into())
    }

    /// The program still has a group whose controls the driver refused.
    async fn give_up_refused(&mut self) -> Result<(), Refusal> {
        match self.refused.due(Instant::now()) {
            Some(error) => self.leave_unmanaged(error).await,
            None => Ok(()),
        }
    }

    /// Keeps a file that the process's memory lives with.
    fn keep(&mut self, file: OwnedFd) {
        if self.kept.len() < MAX_KEPT {
            self.kept.push(file);
        }
    }

    /// Files that a process sent that has ended, before its end was noticed.
    async fn hear_last_words(&mut self, events: &Events<'_>) {
        let hear = async {
            for _ in 0..MAX_LAST_WORDS {
                match receive(events).await {
                    Ok(Some((Shim::Memory, Some(file))))
                        if self.sessions.check_files(&file).is_ok() =>
                    {
                        self.keep(file);
                    }
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => return,
                }
            }
        };
        // Its relay ends with it, unless a child of it has its socket.
        let _ = tokio::time::timeout(LAST_WORDS, hear).await;
    }

    /// Whether work was under way, as far as is known, of a process that shares a compute group.
    fn has_shared_work(&self) -> bool {
        let busy = |key| {
            let slot = self.link.page.slot(key);
            slot.is_some_and(|slot| matches!(slot.work(), Work::Busy(_)))
        };
        !self.kept.is_empty() && (0..SLOTS as u32).any(busy)
    }

    /// Puts a group under management, if it is what it is said to be.
    async fn announce(
        &mut self,
        key: u32,
        engine: u32,
        handles: Group,
        (default, shared): (u64, bool),
        file: OwnedFd,
        socket: &BorrowedFd<'_>,
    ) -> Result<(), Refusal> {
        let member = Member {
            session: self.link.session,
            key,
            pid: self.link.pid,
            handles: (handles.client, handles.group),
        };
        let (vendor, emulated) = (self.sessions.vendor, self.sessions.emulated.clone());
        // Copies are never frozen.
        let run = match self.away.is_empty() || engine != gpumux_rm::layout::engine::GR0 {
            true => RunState::Enabled,
            false => RunState::Frozen,
        };
        let examine = move || verify(vendor, file, engine, handles, run, emulated.as_deref());
        let examined = tokio::task::spawn_blocking(examine).await;
        if shared {
            match self
                .sessions
                .tenants
                .intruded(self.link.tenant, self.link.pid)
                .await
            {
                Some(UnauthorizedClient::Seen(group)) => {
                    if let Some(process) = self.process {
                        process.kill();
                    }
                    return Err(Refusal::Unauthorized(group));
                }
                // One that did is ended when the group answers.
                Some(UnauthorizedClient::Feared(group)) => return Err(Refusal::Unanswered(group)),
                None => {}
            }
        }
        let slices = Timeslice::MIN..=Timeslice::MAX;
        let default = Some(Timeslice(default)).filter(|slice| slices.contains(slice));
        let default = default.unwrap_or(Timeslice::DEFAULT);
        let verified = match examined.map_err(|_| Stopped)? {
            Ok(verified)
                if verified.run == RunState::Enabled && self.launches_instead(shared, true) =>
            {
                let (why, device) = ("the daemon's `mechanism` is `launches`", verified.device);
                return self.offer((key, engine), why, Some(device), default, socket);
            }
            Err(Rejection::Unsupported(failure)) if self.launches_instead(shared, false) => {
                let why = format!("the driver or a sandbox refuses the controls ({failure})");
                return self.offer((key, engine), &why, None, default, socket);
            }
            Ok(verified) => verified,
            // The program may have freed it meanwhile, a few times, or its MPS server is lost: then whatever the driver answers is no
            // word on what it has.
            Err(rejection) if self.rejected < MAX_REJECTED && rejection.may_pass(shared) => {
                let (Rejection::Control(error) | Rejection::Unsupported(error)) = rejection else {
                    return Err(rejection.into());
                };
                tracing::warn!(pid = self.link.pid, %error, "a channel group cannot be managed");
                self.rejected += 1;
                let id = self.link.session;
                let refused = error.is_answer();
                let lost = (shared && refused).then_some(key);
                // The members of an MPS group stay: it is controlled through the others' handles, and those that wait for a lost server
                // are ended.
                if engine == gpumux_rm::layout::engine::GR0 && !shared {
                    self.refused.add(key, error, Instant::now());
                }
                let leave = |answer| Command::LeaveUnmanaged(id, lost, answer);
                self.sessions.scheduler.ask(leave).await?;
                return Ok(());
            }
            Err(Rejection::Unsupported(error)) => return self.leave_unmanaged(error).await,
            Err(rejection) => return Err(rejection.into()),
        };
        let group = NewGroup {
            member,
            tenant: self.link.tenant,
            engine,
            device: verified.device,
            emulated: verified.emulated,
            controls: verified.controls,
            page: Arc::clone(&self.link.page),
            shared,
            timeslice: verified.timeslice,
            default,
            run: verified.run,
            launches: None,
        };
        self.add(group).await
    }

    /// Whether a group is scheduled at launch although, or because, its controls are `usable`. Not a member of an MPS group.
    fn launches_instead(&self, shared: bool, usable: bool) -> bool {
        let chosen = match self.sessions.mechanism {
            Mechanism::Auto => !usable,
            Mechanism::Controls => false,
            Mechanism::Launches => true,
        };
        chosen && !shared && self.link.page.revision() >= PERMITS
    }

    /// Has the process wait before it launches in a group, whose controls are not used.
    fn offer(
        &mut self,
        (key, engine): (u32, u32),
        why: &str,
        device: Option<String>,
        default: Timeslice,
        socket: &BorrowedFd<'_>,
    ) -> Result<(), Refusal> {
        // Copies do not wait, nor what is not counted.
        if engine != gpumux_rm::layout::engine::GR0 || key >= SLOTS as u32 {
            return Ok(());
        }
        if self.permits.is_none() {
            let (page, file) = Permits::create().map_err(Refusal::Page)?;
            self.permits = Some((page.into(), file));
        }
        if let Some((page, file)) = &self.permits {
            let launches = Launches {
                page: Arc::clone(page),
                key,
                why: why.into(),
            };
            let offered = Offered {
                launches,
                device,
                default,
            };
            self.offered.insert(key, offered);
            let order = Daemon::Permits { key };
            socket::send(socket, &order, Some(file.as_fd()), SendFlags::DONTWAIT)
                .map_err(Refusal::Packet)?;
            tracing::info!(pid = self.link.pid, why, "its launches are scheduled");
        }
        Ok(())
    }

    /// A group's launches wait from now on. The process has named its device, of which the driver may have said nothing.
    async fn begin_launches(&mut self, key: u32, device: String) -> Result<(), Refusal> {
        let Some(offered) = self.offered.remove(&key) else {
            return Ok(());
        };
        let Offered {
            launches, default, ..
        } = offered;
        let group = NewGroup {
            member: Member {
                session: self.link.session,
                key,
                pid: self.link.pid,
                // The driver has confirmed none. Its clients have far higher numbers than sessions.
                handles: (self.link.session.0 as u32, key),
            },
            tenant: self.link.tenant,
            engine: gpumux_rm::layout::engine::GR0,
            device: offered.device.unwrap_or(device),
            emulated: self.sessions.emulated.is_some(),
            controls: launches.controls(default.0),
            page: Arc::clone(&self.link.page),
            shared: false,
            timeslice: default,
            default,
            run: RunState::Enabled,
            launches: Some(launches),
        };
        self.add(group).await
    }

    async fn add(&mut self, group: NewGroup) -> Result<(), Refusal> {
        let compute = group.engine == gpumux_rm::layout::engine::GR0;
        let replaces = self.keys.insert(group.member.key, compute).is_some();
        let add = |answer| Command::Add {
            group,
            replaces,
            answer,
        };
        Ok(self.sessions.scheduler.ask(add).await??)
    }
}

fn check_channels(channels: &[u32], compute: bool) -> Result<(), Refusal> {
    match channels.len() {
        // It could not be frozen.
        0 if compute => Err(Rejection::NoChannels.into()),
        n if n > MAX_CHANNELS => Err(Refusal::TooManyChannels),
        _ => Ok(()),
    }
}

type Events<'a> = AsyncFd<std::os::fd::BorrowedFd<'a>>;

/// The next packet; none when the other side has closed.
async fn receive(events: &Events<'_>) -> Result<Option<(Shim, Option<OwnedFd>)>, Refusal> {
    loop {
        let mut ready = events.readable().await.map_err(Refusal::Packet)?;
        match ready.try_io(|socket| socket::recv(socket.get_ref(), RecvFlags::DONTWAIT)) {
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Ok(packet) => return packet.map_err(Refusal::Packet),
            Err(_would_block) => {}
        }
    }
}

#[cfg(test)]
mod tests;
