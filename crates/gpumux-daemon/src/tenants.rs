//! Who is who: tenants by name and by secret, how long they live, and the files that a restarted
//! daemon knows them from.
//!
//! A tenant lives while anybody holds it: the process that asked for it, or a session. What it is
//! promised is decided by the scheduler; here is only a copy to show and to keep.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use gpumux_core::{
    Hints, SpecError, TenantId, TenantSpec,
    space::{self, Applicant, Curve, Decision, Interference, Program, Way},
};
use gpumux_wire::MEMORY_LIMIT_VARIABLE;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{
        Mutex, MutexGuard,
        mpsc::{UnboundedReceiver, unbounded_channel},
    },
    task::JoinSet,
};

use crate::{
    api::types::{Created, CurveFrom, Fault, NewTenant, Placement, SpecChange},
    groups::{self, Failure, Groups, Intrusion, Key, Seat},
    hold,
    peer::{Peer, ProcessFd, ProcessId},
    programs::{self, Programs},
    scheduler::{Crash, Engine, Handle, Left, SessionId, Stopped, View},
    store::{self, Sync},
};

/// Most tenants there may be.
const MAX_TENANTS: usize = 4096;
/// Most of one user (root excepted).
const MAX_TENANTS_PER_USER: usize = 2048;
/// Longest name.
const MAX_NAME: usize = 64;
/// Tenants that are remembered after their end.
const MAX_ENDED: usize = 256;
/// Faults that are remembered.
const MAX_FAULTS: usize = 32;
/// Points of a curve.
const MAX_POINTS: usize = 100;
/// Most devices that one tenant can be confined to: all that a machine can have, and some.
const MAX_CONFINED: usize = 64;
/// How long reports of one fault are gathered.
const GATHER: Duration = Duration::from_millis(30);
/// How long processes may take to learn that their group has failed (up to 0.5 s on an H100, driver 580.159.04).
const TOLD: Duration = Duration::from_secs(1);
/// How long a server may be gone before that is noticed.
const UNNOTICED: Duration = Duration::from_millis(500);
/// Names of one user for which what was set is remembered.
const MAX_SETTINGS: usize = 256;

/// All tenants.
pub(crate) struct Tenants {
    table: Mutex<Table>,
    scheduler: Handle,
    files: Files,
    session_socket: String,
    groups: Arc<Groups>,
    pub(crate) programs: Programs,
}

/// What the next daemon knows it all from.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    /// The tenants that live.
    pub(crate) tenants: PathBuf,
    /// What was set for their names.
    pub(crate) settings: PathBuf,
    /// What is known of their programs.
    pub(crate) programs: PathBuf,
}

#[derive(Default)]
struct Table {
    made: u64,
    holders_made: u64,
    tenants: BTreeMap<TenantId, Tenant>,
    /// The last ones that ended: a process of theirs may use a device only now, long after the one that
    /// asked for the tenant.
    ended: VecDeque<Tenant>,
    settings: Vec<Setting>,
    /// The last processes that joined, and their tenants.
    joined: VecDeque<(u32, TenantId)>,
    /// The last faults in groups, and how many there were.
    faults: VecDeque<Fault>,
    faults_told: u64,
    /// What became of groups, those that have ended too, by name.
    counts: BTreeMap<String, GroupCounts>,
    /// Who took a group down how often.
    culprits: BTreeMap<Repute, u32>,
    /// The daemon is leaving: what ends now must still be known to the next one.
    closed: bool,
    /// When the last tenant ended, or the daemon began.
    empty_since: Option<Instant>,
}

/// A group in figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupCounts {
    /// Tenants with a seat in it.
    pub(crate) members: usize,
    /// Faults that ended its members' processes.
    pub(crate) faults: u64,
    /// How often it was there again after one, and how long that took.
    pub(crate) restarts: u64,
    pub(crate) restarting: Duration,
}

/// One tenant.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    pub(crate) name: String,
    pub(crate) spec: TenantSpec,
    pub(crate) uid: u32,
    /// Seconds since 1970.
    pub(crate) since: u64,
    pub(crate) pids: Vec<u32>,
    token: String,
    /// The process that it was made for, if that came without a secret.
    made_for: Option<ProcessId>,
    /// Lives without holders, and is joined by any user's processes.
    kept: bool,
    /// Somebody chose its name.
    named: bool,
    /// How it shares devices, and its place in a group.
    pub(crate) placement: Placement,
    group: Option<Key>,
    seat: Option<Arc<Seat>>,
    utility: Vec<(u32, f64)>,
    /// Devices that it may use, by UUID; empty: all.
    devices: Vec<String>,
    holders: BTreeMap<Holder, Option<ProcessId>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    Process(u64),
    Session(SessionId),
}

/// A tenant in the file.
#[derive(Serialize, Deserialize)]
struct Saved {
    name: String,
    token: String,
    spec: TenantSpec,
    uid: u32,
    since: u64,
    made_for: Option<ProcessId>,
    #[serde(default)]
    kept: bool,
    #[serde(default)]
    named: bool,
    #[serde(default)]
    placement: Placement,
    #[serde(default)]
    group: Option<Key>,
    #[serde(default)]
    utility: Vec<(u32, f64)>,
    #[serde(default)]
    devices: Vec<String>,
    holders: Vec<ProcessId>,
}

/// What was set for a user's tenants of a name, the latest last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Setting {
    uid: u32,
    name: String,
    change: SpecChange,
}

/// A tenant to be made, and what is known of it.
struct Wish<'a> {
    uid: u32,
    new: &'a NewTenant,
    /// Its group, if it may be in one.
    key: Option<Key>,
    known: Option<&'a Program>,
    utility: &'a (Vec<(u32, f64)>, Option<CurveFrom>),
}

/// Who is to blame for faults in a group, from one start to the next: its tenants of a name that was chosen, else those that run a program. A name
/// that was given is no sign: another program may have it next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Repute {
    Name(Key, String),
    Fingerprint(Key, String),
}

impl Repute {
    fn of(group: Option<&Key>, name: Option<&str>, fingerprint: Option<&str>) -> Option<Self> {
        let group = group?.clone();
        match (name, fingerprint) {
            (Some(name), _) => Some(Self::Name(group, name.to_owned())),
            (None, Some(fingerprint)) => Some(Self::Fingerprint(group, fingerprint.to_owned())),
            (None, None) => None,
        }
    }

    fn uid(&self) -> u32 {
        let (Self::Name(group, _) | Self::Fingerprint(group, _)) = self;
        group.uid
    }
}

/// Forgets one of a full map if this key is new: the first of the user who has most.
fn make_room<K: Ord + Clone, V>(all: &mut BTreeMap<K, V>, new: &K, uid: impl Fn(&K) -> u32) {
    if all.len() < MAX_SETTINGS || all.contains_key(new) {
        return;
    }
    let mut users: BTreeMap<u32, usize> = BTreeMap::new();
    for key in all.keys() {
        *users.entry(uid(key)).or_default() += 1;
    }
    let most = users.into_iter().max_by_key(|(_, count)| *count);
    let most = most.map(|(user, _)| user);
    let surplus = all.keys().find(|key| Some(uid(key)) == most).cloned();
    if let Some(surplus) = surplus {
        all.remove(&surplus);
    }
}

/// Why nothing was done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TenantError {
    #[error("no tenant is called `{0}`: see `gpumux ps`")]
    Unknown(String),
    #[error("tenant `{0}` belongs to another user: only its owner or root may change it")]
    NotYours(String),
    #[error("a tenant called `{0}` lives already: use another name, or wait until it ends")]
    Taken(String),
    #[error("`{0}` is no name for a tenant: use 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`")]
    BadName(String),
    #[error(
        "`{0}` is no name for a trust domain: use 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`"
    )]
    BadTrust(String),
    #[error("`{0}` is no fingerprint: use 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`")]
    BadFingerprint(String),
    #[error("{0}% is no part of the SMs: use 1 to 100")]
    BadPercent(u32),
    #[error(
        "that is no curve: use up to {MAX_POINTS} points of 1 to 100 percent and a throughput, 0 or 1e-6 to 1e15"
    )]
    BadCurve,
    #[error("nothing is known of a program `{0}` of yours: see `gpumux profile --list`")]
    NothingKnown(String),
    #[error("{0} tenants live already: let some end first")]
    TooMany(usize),
    #[error("the daemon cannot see your process: ask from the same pid namespace")]
    Invisible,
    #[error("the tenant of this secret is unknown: it has ended, or belongs to another daemon")]
    UnknownToken,
    #[error("only root and the daemon's own user may keep a tenant or choose its secret")]
    NotTrusted,
    #[error("{0} devices are more than a tenant can be confined to: name at most {MAX_CONFINED}")]
    TooManyDevices(usize),
    #[error("`{0}` is no device's UUID: see `gpumux doctor`")]
    BadDevice(String),
    #[error("the secret is refused: use 32 hexadecimal digits that no tenant has, and `kept`")]
    BadToken,
    #[error("tenant `{0}` still has {1} connected processes: end them first")]
    Busy(String, usize),
    #[error("tenant `{0}` takes no hints: allow them with `gpumux set {0} --hints auto`")]
    HintsOff(String),
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Stopped(#[from] Stopped),
    #[error(
        "{1}; a part of it was set for `{0}` before: say otherwise, or `gpumux set {0} --forget`"
    )]
    Set(String, SpecError),
    #[error("nothing was set for `{0}`")]
    NothingSet(String),
    #[error("cannot keep it in {0}: {1}")]
    Save(PathBuf, io::Error),
    #[error("it holds now, but a restarted daemon will not know it: {0}")]
    NotKept(String),
}

/// A tenant that there is not.
const NOBODY: TenantId = TenantId(u64::MAX);

impl Tenants {
    /// The tenants of the last daemon that still live; none at the first start.
    pub(crate) async fn load(
        files: Files,
        session_socket: String,
        scheduler: Handle,
        groups: Arc<Groups>,
    ) -> Result<Arc<Self>, TenantError> {
        let saved: Vec<Saved> = store::read(&files.tenants);
        let tenants = Arc::new(Self {
            table: Mutex::new(Table {
                empty_since: Some(Instant::now()),
                settings: store::read(&files.settings),
                ..Table::default()
            }),
            scheduler,
            programs: Programs::load(files.programs.clone()),
            files,
            session_socket,
            groups,
        });
        for saved in saved {
            tenants.take_over(saved).await?;
        }
        // On a full disk, too: it may be the next start that has room.
        tenants.table.lock().await.save_or_warn(&tenants.files);
        let (tell, told) = unbounded_channel();
        tenants.groups.tell_failures(tell.clone());
        tenants.groups.know(Arc::downgrade(&tenants));
        (tenants.scheduler)
            .call(move |engine| engine.tell_crashes(tell))
            .await?;
        tokio::spawn(watch_crashes(Arc::downgrade(&tenants), told));
        tokio::spawn(programs::watch(Arc::downgrade(&tenants)));
        Ok(tenants)
    }

    async fn take_over(self: &Arc<Self>, saved: Saved) -> Result<(), TenantError> {
        let living = |process: ProcessId| Some((process, process.watch()?));
        let holders: Vec<_> = saved.holders.into_iter().filter_map(living).collect();
        if holders.is_empty() && !saved.kept {
            return Ok(());
        }
        let mut table = self.table.lock().await;
        let id = table.next_id();
        let mut spec = saved.spec;
        let given = spec.clone();
        let (uid, devices) = (saved.uid, saved.devices.clone());
        (self.scheduler)
            .call(move |engine| engine.confine(id, &devices))
            .await?;
        let admitted = self
            .scheduler
            .call(move |e| e.admit(id, uid, given))
            .await?;
        if let Err(error) = admitted {
            tracing::warn!(tenant = saved.name, %error, "an old promise cannot be kept");
            spec = TenantSpec {
                class: spec.class,
                ..TenantSpec::default()
            };
            let given = spec.clone();
            self.scheduler
                .call(move |e| e.admit(id, uid, given))
                .await??;
        }
        let tenant = Tenant {
            id,
            name: table.free_name(&saved.name),
            spec,
            uid: saved.uid,
            since: saved.since,
            pids: Vec::new(),
            token: saved.token,
            made_for: saved.made_for,
            kept: saved.kept,
            named: saved.named,
            placement: saved.placement,
            group: saved.group,
            seat: None,
            utility: saved.utility,
            devices: saved.devices,
            holders: BTreeMap::new(),
        };
        table.insert(tenant);
        self.sit_again(&mut table, id).await?;
        for (process, fd) in holders {
            self.hold(&mut table, id, Some(process), fd);
        }
        Ok(())
    }

    /// Makes a tenant that lives as long as the process that asks.
    pub(crate) async fn create(
        self: &Arc<Self>,
        peer: &Peer,
        new: NewTenant,
    ) -> Result<Created, TenantError> {
        if !trusted(peer.uid) && (new.kept || new.token.is_some()) {
            return Err(TenantError::NotTrusted);
        }
        if let Some(trust) = new.trust.as_ref().filter(|trust| !is_name(trust)) {
            return Err(TenantError::BadTrust(trust.clone()));
        }
        check_fingerprint(new.fingerprint.as_deref())?;
        if new.devices.len() > MAX_CONFINED {
            return Err(TenantError::TooManyDevices(new.devices.len()));
        }
        if let Some(device) = new.devices.iter().find(|uuid| !is_name(uuid)) {
            return Err(TenantError::BadDevice(device.clone()));
        }
        if let Some(percent) = new
            .sm_percent
            .filter(|percent| !(1..=100).contains(percent))
        {
            return Err(TenantError::BadPercent(percent));
        }
        if !new.utility.is_empty() {
            check_curve(&new.utility)?;
        }
        let known =
            (new.fingerprint.as_deref()).and_then(|name| self.programs.find(peer.uid, name));
        let utility = utility(&new, known.as_ref());
        let wish = Wish {
            uid: peer.uid,
            new: &new,
            key: new.trust.as_ref().map(|trust| Key {
                uid: peer.uid,
                trust: trust.clone(),
            }),
            known: known.as_ref(),
            utility: &utility,
        };
        // It may take a while until the group is there: meanwhile nobody else waits. A request that cannot be met starts nothing.
        let (decision, (set, spec)) = {
            let table = self.table.lock().await;
            table.check_name(new.name.as_deref())?;
            table.check_token(&new)?;
            table.check_room(peer.uid)?;
            let decision = table.decide(&wish, self.groups.unavailable());
            (decision, table.wish(peer.uid, &new))
        };
        if decision.way == Way::Space {
            let admits = move |engine: &mut crate::scheduler::Engine| engine.admits(NOBODY, &spec);
            let admitted = self.scheduler.call(admits).await?;
            admitted.map_err(|error| match (&set, &new.name) {
                (Some(_), Some(name)) => TenantError::Set(name.clone(), error),
                _ => error.into(),
            })?;
        }
        let entered = match wish.key.as_ref().filter(|_| decision.way == Way::Space) {
            Some(key) => Some(self.groups.enter(key, peer.pid).await),
            None => None,
        };
        let mut table = self.open_table().await?;
        // By now others may have come: who is in the table counts until this one is.
        let (placement, seat) = table.place(&wish, decision, entered, self.groups.unavailable());
        let named = new.name.is_some();
        let (set, spec) = table.wish(peer.uid, &new);
        table.check_name(new.name.as_deref())?;
        table.check_token(&new)?;
        let name = match new.name {
            Some(name) => name,
            None => table.free_name(&new.program.unwrap_or_default()),
        };
        let fd = peer
            .fd
            .as_ref()
            .and_then(|fd| fd.try_clone().ok())
            .ok_or(TenantError::Invisible)?;
        let token = new.token.unwrap_or_else(secret);
        let memory_limit = spec.memory_limit;
        let confined = (None, new.devices);
        let made = self
            .make(&mut table, name.clone(), spec, peer.uid, token, confined)
            .await;
        let id = made.map_err(|error| match error {
            TenantError::Spec(error) if set.is_some() => TenantError::Set(name.clone(), error),
            error => error,
        })?;
        let mut environment = match &seat {
            Some(seat) => seat.environment(placement.sm_percent),
            None => BTreeMap::new(),
        };
        let shown = (self.scheduler)
            .call(move |engine| engine.shown_memory(id))
            .await?;
        if let Some(bytes) = memory_limit.or(shown) {
            environment.insert(MEMORY_LIMIT_VARIABLE.into(), bytes.to_string());
        }
        if let Some(seat) = &seat {
            let name = seat.name();
            (self.scheduler)
                .call(move |engine| engine.place(id, name))
                .await?;
        }
        if let Some(tenant) = table.tenants.get_mut(&id) {
            (tenant.kept, tenant.named) = (new.kept, named);
            tenant.placement = placement;
            tenant.group = seat.as_ref().map(|seat| seat.key().clone());
            tenant.seat = seat.map(Arc::new);
            tenant.utility = utility.0;
        }
        if !new.kept {
            self.hold(&mut table, id, peer.process, fd);
        }
        // From here on the program may rely on it, whatever happens to this daemon. Without room on the disk it lasts as long as
        // this daemon: one user who fills the disk must not keep others from starting.
        table.save_or_warn(&self.files);
        let token = table
            .tenants
            .get(&id)
            .map(|t| t.token.clone())
            .unwrap_or_default();
        Ok(Created {
            name,
            token,
            socket: self.session_socket.clone(),
            environment,
        })
    }

    /// A group has failed: says who caused it and who suffers, and starts it again.
    async fn crashed(
        &self,
        group: &str,
        server: bool,
        mut crashes: Vec<Crash>,
    ) -> Result<(), Stopped> {
        let begun = Instant::now();
        let at = (SystemTime::now().duration_since(UNIX_EPOCH)).map_or(0, |it| it.as_secs());
        let name = group.to_owned();
        let more = self.scheduler.call(move |e| e.give_up(&name)).await?;
        crashes.extend(more);
        let told = async {
            match server {
                true => Ok(()),
                false => self.all_told(group).await,
            }
        };
        let restarted = self.groups.restart(group, told).await?;
        let took = restarted.is_ok().then(|| begun.elapsed());
        let restarted_ms = took.map(|took| took.as_millis() as u64);
        let said = restarted.unwrap_or_else(|error| {
            tracing::warn!(group, %error, "the group cannot be started again");
            String::new()
        });
        let mut table = self.table.lock().await;
        let seated: Vec<TenantId> = (table.tenants.values())
            .filter(|it| it.seat.as_ref().is_some_and(|seat| *seat.name() == *group))
            .map(|it| it.id)
            .collect();
        // Whoever says so, nobody outside the group can have done it.
        let whose = |pid| {
            let told = crashes.iter().find(|crash| crash.pid == pid);
            let joined = || {
                let mut all = table.joined.iter().rev();
                let own = |(it, tenant): &&(u32, TenantId)| *it == pid && seated.contains(tenant);
                all.find(own).map(|(_, tenant)| *tenant)
            };
            told.map(|crash| crash.tenant).or_else(joined)
        };
        let (culprit, evidence) = match server && !crashes.iter().any(is_origin) {
            true => (None, SERVER.into()),
            false => culprit(&crashes, &said, &seated, whose),
        };
        let known = |id: TenantId| {
            let mut all = table.ended.iter().chain(table.tenants.values());
            all.find(|it| it.id == id)
        };
        let blamed = culprit.and_then(known);
        let name = blamed.map(|it| it.name.clone());
        // Whoever ended a program did not make it fault.
        let was_ended = |id| {
            crashes
                .iter()
                .any(|it| it.tenant == id && it.ended_at_work())
        };
        let repute = blamed.filter(|it| !was_ended(it.id)).and_then(|it| {
            let name = it.named.then_some(it.name.as_str());
            Repute::of(it.group.as_ref(), name, it.placement.fingerprint.as_deref())
        });
        // Some processes ended before they could be asked.
        let used = seated.into_iter();
        let used = used.filter(|id| table.joined.iter().any(|(_, tenant)| tenant == id));
        // A process that an error ends has said so; one that loses its server may have had no time.
        let lately = (UNNOTICED + GATHER).as_millis() as u64;
        let ended_by_it = |crash: &&Crash| crash.ended_ms.is_none_or(|it| server && it <= lately);
        let crashed = crashes.iter().filter(ended_by_it);
        let mut others: Vec<String> = (crashed.map(|crash| crash.tenant).chain(used))
            .filter(|tenant| Some(*tenant) != culprit)
            .filter_map(|tenant| Some(known(tenant)?.name.clone()))
            .collect();
        others.sort();
        others.dedup();
        let error = crashes.iter().map(|crash| crash.error).find(|it| *it != 0);
        // What came later was known to be coming.
        let noticed_after_ms = crashes.iter().find_map(|crash| crash.age_ms);
        let fault = Fault {
            number: table.faults_told + 1,
            at,
            group: group.to_owned(),
            error: error.unwrap_or(0),
            culprit: name,
            evidence,
            others,
            noticed_after_ms,
            restarted_ms,
        };
        tracing::warn!(group, error, culprit = ?fault.culprit, evidence = fault.evidence, others = ?fault.others,
            noticed_after_ms, restarted_ms, "a fault ended all processes in a group");
        if let Some(repute) = repute {
            make_room(&mut table.culprits, &repute, Repute::uid);
            *table.culprits.entry(repute).or_default() += 1;
        }
        table.faults_told = fault.number;
        table.count_fault(group, took);
        table.faults.push_back(fault);
        let surplus = table.faults.len().saturating_sub(MAX_FAULTS);
        table.faults.drain(..surplus);
        Ok(())
    }

    /// Waits, though not for long, until all processes of a group that has failed know it: who then waits for a server that is
    /// ended waits for ever.
    async fn all_told(&self, group: &str) -> Result<(), Stopped> {
        let patience = Instant::now() + TOLD;
        while Instant::now() < patience {
            let name = group.to_owned();
            if !self.scheduler.call(move |it| it.has_unaware(&name)).await? {
                break;
            }
            tokio::time::sleep(GATHER).await;
        }
        Ok(())
    }

    /// Ends a process that waits for ever.
    async fn end_stuck(&self, id: TenantId, pid: u32) {
        let table = self.table.lock().await;
        let Some(tenant) = table.tenants.get(&id) else {
            return;
        };
        // Not whoever may have its pid by now.
        let mut processes = tenant.holders.values().flatten();
        let process = processes.find(|process| process.pid == pid);
        let Some(process) = process.and_then(|process| process.watch()) else {
            return;
        };
        tracing::warn!(
            tenant = tenant.name,
            pid,
            "it waits for a device that it lost with its group, and is ended"
        );
        process.kill();
    }

    /// Says what a program makes of SMs.
    pub(crate) fn teach(
        &self,
        uid: u32,
        fingerprint: &str,
        curve: &[(u32, f64)],
    ) -> Result<(), TenantError> {
        check_fingerprint(Some(fingerprint))?;
        check_curve(curve)?;
        let taught = self.programs.teach(uid, fingerprint, curve);
        taught.map_err(|error| TenantError::Save(self.files.programs.clone(), error))
    }

    /// Forgets what is known of a program.
    pub(crate) fn unlearn(&self, uid: u32, fingerprint: &str) -> Result<(), TenantError> {
        match self.programs.forget(uid, fingerprint) {
            Ok(true) => Ok(()),
            Ok(false) => Err(TenantError::NothingKnown(fingerprint.into())),
            Err(error) => Err(TenantError::Save(self.files.programs.clone(), error)),
        }
    }

    /// What the scheduler sees.
    pub(crate) async fn view(&self) -> Result<View, Stopped> {
        self.scheduler.call(|engine| engine.view()).await
    }

    /// The last faults in groups, the latest last.
    pub(crate) async fn faults(&self) -> Vec<Fault> {
        self.table.lock().await.faults.iter().cloned().collect()
    }

    /// All groups in figures, by name.
    pub(crate) async fn groups(&self) -> BTreeMap<String, GroupCounts> {
        let table = self.table.lock().await;
        let mut groups = table.counts.clone();
        for seat in table.tenants.values().filter_map(|it| it.seat.as_ref()) {
            let name = seat.name().to_string();
            groups.entry(name).or_default().members += 1;
        }
        groups
    }

    /// Gives a tenant that was in a group its seat back, if the group is still there.
    async fn sit_again(&self, table: &mut Table, id: TenantId) -> Result<(), Stopped> {
        let Some(tenant) = table.tenants.get_mut(&id) else {
            return Ok(());
        };
        let seat = (tenant.group.as_ref()).and_then(|key| self.groups.enter_again(key));
        if let Some(seat) = seat {
            let name = seat.name();
            tenant.seat = Some(Arc::new(seat));
            (self.scheduler)
                .call(move |engine| engine.place(id, name))
                .await?;
        }
        Ok(())
    }

    /// Makes a tenant that nobody holds yet.
    async fn make(
        &self,
        table: &mut Table,
        name: String,
        spec: TenantSpec,
        uid: u32,
        token: String,
        (made_for, devices): (Option<ProcessId>, Vec<String>),
    ) -> Result<TenantId, TenantError> {
        table.check_room(uid)?;
        let id = table.next_id();
        let (given, confined) = (spec.clone(), devices.clone());
        let set = move |engine: &mut Engine| {
            engine.confine(id, &confined);
            engine
                .admit(id, uid, given)
                .inspect_err(|_| engine.forget(id))
        };
        self.scheduler.call(set).await??;
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |t| t.as_secs());
        table.insert(Tenant {
            id,
            name,
            spec,
            uid,
            since,
            pids: Vec::new(),
            token,
            made_for,
            kept: false,
            named: false,
            placement: Placement::default(),
            group: None,
            seat: None,
            utility: Vec::new(),
            devices,
            holders: BTreeMap::new(),
        });
        Ok(id)
    }

    /// Lets the tenant live as long as a process.
    fn hold(
        self: &Arc<Self>,
        table: &mut Table,
        id: TenantId,
        process: Option<ProcessId>,
        fd: ProcessFd,
    ) {
        table.holders_made += 1;
        let holder = Holder::Process(table.holders_made);
        if let Some(tenant) = table.tenants.get_mut(&id) {
            tenant.holders.insert(holder, process);
        }
        let tenants = Arc::downgrade(self);
        tokio::spawn(async move {
            if let Err(error) = fd.ended().await {
                tracing::warn!(%error, "cannot wait for a process to end");
            }
            if let Some(tenants) = tenants.upgrade() {
                tenants.release(id, holder).await;
            }
        });
    }

    /// Finds or makes the tenant of a process that connects.
    pub(crate) async fn join(
        &self,
        session: SessionId,
        peer: &Peer,
        token: Option<&str>,
    ) -> Result<(TenantId, String), TenantError> {
        let mut table = self.open_table().await?;
        let known = table.tenants.values().find(|tenant| match token {
            Some(token) => tenant.may_join(token, peer),
            None => tenant.made_for.is_some() && tenant.made_for == peer.process,
        });
        let id = match (known, token) {
            (Some(tenant), _) => tenant.id,
            (None, Some(token)) => {
                let may = |ended: &Tenant| ended.may_join(token, peer);
                let ended = table
                    .ended
                    .iter()
                    .position(may)
                    .and_then(|n| table.ended.remove(n));
                let Tenant {
                    name,
                    spec,
                    uid,
                    token,
                    named,
                    placement,
                    group,
                    devices,
                    ..
                } = ended.ok_or(TenantError::UnknownToken)?;
                let name = table.free_name(&name);
                let confined = (None, devices);
                let id = self
                    .make(&mut table, name, spec, uid, token, confined)
                    .await?;
                if let Some(tenant) = table.tenants.get_mut(&id) {
                    (tenant.named, tenant.placement, tenant.group) = (named, placement, group);
                }
                self.sit_again(&mut table, id).await?;
                id
            }
            (None, None) => {
                let program = peer.process.map(ProcessId::program).unwrap_or_default();
                let name = table.free_name(&format!("{program}-{}", peer.pid));
                let spec = TenantSpec::default();
                let free = (peer.process, Vec::new());
                self.make(&mut table, name, spec, peer.uid, secret(), free)
                    .await?
            }
        };
        let Some(tenant) = table.tenants.get_mut(&id) else {
            return Err(TenantError::UnknownToken);
        };
        tenant
            .holders
            .insert(Holder::Session(session), peer.process);
        tenant.pids.push(peer.pid);
        let name = tenant.name.clone();
        table.joined.push_back((peer.pid, id));
        let surplus = table.joined.len().saturating_sub(MAX_ENDED);
        table.joined.drain(..surplus);
        table.save_or_warn(&self.files);
        Ok((id, name))
    }

    /// The group that a process is in although its tenant is not, if there is one. Its environment may say what it will: who
    /// enters a group that is not its tenant's could end it by a fault.
    pub(crate) async fn intruded(&self, id: TenantId, pid: u32) -> Option<Intrusion> {
        let (uid, own) = {
            let table = self.table.lock().await;
            let tenant = table.tenants.get(&id)?;
            let own = tenant.seat.as_ref().map(|seat| seat.name());
            (tenant.uid, own)
        };
        self.groups.intruded(uid, own.as_deref(), pid).await
    }

    /// Whether a process may be in a group: the tenant that its secret names is of it, or, if it has none that is known, that of
    /// the nearest in its `line` of itself and its parents who is a tenant's. A program may have overwritten its secret.
    pub(crate) async fn belongs(
        &self,
        group: &Key,
        token: Option<&str>,
        line: &[ProcessId],
    ) -> bool {
        let table = self.table.lock().await;
        let is_of = |tenant: &Tenant| tenant.group.as_ref() == Some(group);
        // Processes of one that has ended may come late.
        let mut all = table.tenants.values().chain(&table.ended);
        if let Some(tenant) = token.and_then(|token| all.find(|it| it.token == token)) {
            return is_of(tenant);
        }
        let holds = |tenant: &Tenant, process| tenant.holders.values().any(|it| *it == process);
        let nearest = line.iter().find_map(|process| {
            let all = table.tenants.values();
            let held: Vec<_> = all.filter(|it| holds(it, Some(*process))).collect();
            (!held.is_empty()).then_some(held)
        });
        nearest.is_some_and(|held| held.into_iter().any(is_of))
    }

    /// Holds the memory of a process that was ended in a group of this name.
    pub(crate) async fn hold_memory(&self, group: Arc<str>, files: Vec<OwnedFd>) {
        let rest = hold::until_ended(&self.scheduler, Left::Group(group), files).await;
        tokio::spawn(rest);
    }

    /// A session has ended.
    pub(crate) async fn leave(&self, session: SessionId, id: TenantId, pid: u32) {
        if let Some(tenant) = self.table.lock().await.tenants.get_mut(&id)
            && let Some(index) = tenant.pids.iter().position(|own| *own == pid)
        {
            tenant.pids.swap_remove(index);
        }
        self.release(id, Holder::Session(session)).await;
    }

    async fn release(&self, id: TenantId, holder: Holder) {
        let mut table = self.table.lock().await;
        let Some(tenant) = table.tenants.get_mut(&id) else {
            return;
        };
        tenant.holders.remove(&holder);
        if tenant.holders.is_empty() && !tenant.kept {
            tenant.seat = None;
            let ended = tenant.clone();
            self.remove(&mut table, id).await;
            if ended.made_for.is_none() {
                table.ended.push_back(ended);
                let surplus = table.ended.len().saturating_sub(MAX_ENDED);
                table.ended.drain(..surplus);
            }
        }
        table.save_or_warn(&self.files);
    }

    async fn remove(&self, table: &mut Table, id: TenantId) {
        if let Some(tenant) = table.tenants.remove(&id) {
            tracing::info!(tenant = tenant.name, "tenant ended");
        }
        if table.tenants.is_empty() {
            table.empty_since = Some(Instant::now());
        }
        // A scheduler that has ended has forgotten everybody.
        let _ = self.scheduler.call(move |engine| engine.forget(id)).await;
    }

    /// Changes what a tenant is promised; what cannot be promised changes nothing.
    pub(crate) async fn change(
        &self,
        uid: u32,
        name: &str,
        change: &SpecChange,
    ) -> Result<(), TenantError> {
        let mut table = self.table.lock().await;
        let (id, spec) = table
            .owned(uid, name)
            .map(|tenant| (tenant.id, change.apply(&tenant.spec)))?;
        let given = spec.clone();
        self.scheduler
            .call(move |engine| engine.set_spec(id, given))
            .await??;
        let (mut set, mut kept) = (None, Ok(()));
        if let Some(tenant) = table.tenants.get_mut(&id) {
            tenant.spec = spec;
            set = (tenant.named && !tenant.kept).then_some(tenant.uid);
        }
        if let Some(uid) = set {
            table.set(uid, name, change);
            kept = table.save_settings(&self.files);
        }
        kept.and(table.save(&self.files))
            .map_err(|error| TenantError::NotKept(error.to_string()))
    }

    /// Forgets what this user (root: anybody) set for a name. A tenant that has it keeps what it has.
    pub(crate) async fn forget(&self, uid: u32, name: &str) -> Result<(), TenantError> {
        let mut table = self.table.lock().await;
        let before = table.settings.len();
        (table.settings).retain(|set| set.name != name || (uid != 0 && uid != set.uid));
        if table.settings.len() == before {
            return Err(TenantError::NothingSet(name.into()));
        }
        table.save_settings(&self.files)
    }

    /// The tenant of this name, if this user may say that its work is coming.
    pub(crate) async fn hintable(&self, uid: u32, name: &str) -> Result<TenantId, TenantError> {
        let table = self.table.lock().await;
        let tenant = table.owned(uid, name)?;
        match tenant.spec.hints {
            Hints::Off => Err(TenantError::HintsOff(name.into())),
            Hints::Auto | Hints::Manual => Ok(tenant.id),
        }
    }

    /// The tenant of this name, if this user may say what becomes of it.
    pub(crate) async fn own(&self, uid: u32, name: &str) -> Result<TenantId, TenantError> {
        let table = self.table.lock().await;
        table.owned(uid, name).map(|tenant| tenant.id)
    }

    /// Ends a tenant that has no connected process.
    pub(crate) async fn delete(&self, uid: u32, name: &str) -> Result<(), TenantError> {
        let mut table = self.table.lock().await;
        let tenant = table.owned(uid, name)?;
        if !tenant.pids.is_empty() {
            return Err(TenantError::Busy(tenant.name.clone(), tenant.pids.len()));
        }
        let id = tenant.id;
        self.remove(&mut table, id).await;
        table.save_or_warn(&self.files);
        Ok(())
    }

    /// All tenants, the oldest first.
    pub(crate) async fn list(&self) -> Vec<Tenant> {
        self.table.lock().await.tenants.values().cloned().collect()
    }

    /// What tenants are called, those that ended lately too.
    pub(crate) async fn names(&self) -> BTreeMap<TenantId, String> {
        let table = self.table.lock().await;
        let all = table.ended.iter().chain(table.tenants.values());
        all.map(|tenant| (tenant.id, tenant.name.clone())).collect()
    }

    /// Closes if there was no tenant for so long; else says how long to wait at least.
    pub(crate) async fn close_if_empty(&self, idle: Duration) -> Result<(), Duration> {
        let mut table = self.table.lock().await;
        let waited = table
            .empty_since
            .map_or(Duration::ZERO, |since| since.elapsed());
        if table.empty_since.is_none() || waited < idle {
            return Err(idle - waited);
        }
        table.closed = true;
        Ok(())
    }

    async fn open_table(&self) -> Result<MutexGuard<'_, Table>, Stopped> {
        let table = self.table.lock().await;
        if table.closed {
            Err(Stopped)
        } else {
            Ok(table)
        }
    }

    /// The daemon leaves: what ends from now on stays in the file for the next one.
    pub(crate) async fn close(&self) {
        self.programs.save();
        self.table.lock().await.closed = true;
    }
}

/// What was told of one fault: whether the server is gone, and who crashed.
type Told = (bool, Vec<Crash>);

/// Gathers what is told of each fault and deals with it: one after the other in a group, and each group by itself, because
/// starting one again may take long.
async fn watch_crashes(tenants: Weak<Tenants>, mut told: UnboundedReceiver<Failure>) {
    let mut waiting: BTreeMap<Arc<str>, Told> = BTreeMap::new();
    let mut busy: BTreeSet<Arc<str>> = BTreeSet::new();
    // Each ends with its group, and whether that was dealt with, or only time went by until all is told.
    let mut tasks: JoinSet<(Arc<str>, bool)> = JoinSet::new();
    loop {
        let done = tokio::select! {
            failure = told.recv() => match failure {
                Some(failure) => {
                    let group = match failure {
                        Failure::Process(crash) => {
                            // Told by an earlier daemon already: the program lives on.
                            let dealt_with = (tenants.upgrade())
                                .is_some_and(|it| it.groups.began_after(&crash.group, crash.age_ms));
                            if dealt_with {
                                continue;
                            }
                            let group = Arc::clone(&crash.group);
                            waiting.entry(Arc::clone(&group)).or_default().1.push(crash);
                            group
                        }
                        Failure::Server(group) => {
                            waiting.entry(Arc::clone(&group)).or_default().0 = true;
                            group
                        }
                        Failure::Stuck { tenant, pid } => {
                            if let Some(tenants) = tenants.upgrade() {
                                tenants.end_stuck(tenant, pid).await;
                            }
                            continue;
                        }
                    };
                    if busy.insert(Arc::clone(&group)) {
                        tasks.spawn(gathered(group));
                    }
                    continue;
                }
                None => return,
            },
            Some(done) = tasks.join_next() => done,
        };
        let Ok((group, dealt_with)) = done else {
            continue;
        };
        match (dealt_with, waiting.contains_key(&group)) {
            (false, _) => {
                let Some(tenants) = tenants.upgrade() else {
                    return;
                };
                let (server, crashes) = waiting.remove(&group).unwrap_or_default();
                tasks.spawn(async move {
                    // A daemon that stops has nothing more to deal with.
                    let _ = tenants.crashed(&group, server, crashes).await;
                    (group, true)
                });
            }
            (true, true) => {
                tasks.spawn(gathered(group));
            }
            (true, false) => {
                busy.remove(&group);
            }
        }
    }
}

async fn gathered(group: Arc<str>) -> (Arc<str>, bool) {
    tokio::time::sleep(GATHER).await;
    (group, false)
}

/// Errors by which a process learns that its MPS server gave it up (`CUDA_ERROR_MPS_RPC_FAILURE`,
/// `CUDA_ERROR_MPS_CLIENT_TERMINATED`).
const COLLATERAL: [u32; 2] = [806, 810];
/// Nobody's fault.
const SERVER: &str = "the group's server ended, or hung";
/// A process that goes away while a kernel of it runs ends the others, as a fault does.
const ENDED: &str = "it ended while its work was under way";

/// Whether its error may be the one by which the others were lost.
fn is_origin(crash: &Crash) -> bool {
    Crash::ends_others(crash.error) && !COLLATERAL.contains(&crash.error)
}

/// Who caused a fault, if that can be told, and what says so: what the group's server said comes first, then who had ended
/// in the middle of its work, then, of all who have a seat, who alone got an error of its own.
fn culprit(
    crashes: &[Crash],
    said: &str,
    seated: &[TenantId],
    whose: impl Fn(u32) -> Option<TenantId>,
) -> (Option<TenantId>, String) {
    let named = said.lines().find_map(|line| {
        let (before, _) = line.split_once(" caused")?;
        before.rsplit_once("lient ")?.1.parse::<u32>().ok()
    });
    if let Some(pid) = named {
        return (whose(pid), format!("the server named process {pid}"));
    }
    let of = |which: &dyn Fn(&Crash) -> bool| -> BTreeSet<TenantId> {
        let some = crashes.iter().filter(|crash| which(crash));
        some.map(|crash| crash.tenant).collect()
    };
    let suspects = of(&Crash::ended_at_work);
    match (suspects.len(), suspects.first()) {
        (0, _) => {}
        (1, Some(tenant)) => return (Some(*tenant), ENDED.into()),
        (several, _) => {
            let evidence = format!("{several} members ended while their work was under way");
            return (None, evidence);
        }
    }
    if !crashes.iter().any(is_origin) && crashes.iter().any(|it| it.error != 0) {
        return (None, SERVER.into());
    }
    let living = of(&|it| it.ended_ms.is_none());
    // Somebody of whom nothing is known may be the one.
    if seated.iter().all(|tenant| living.contains(tenant)) {
        let found = of(&is_origin);
        if let (1, Some(tenant)) = (found.len(), found.first()) {
            return (Some(*tenant), "only it got an error of its own".into());
        }
    }
    (None, "neither the server nor the errors name one".into())
}

impl Tenant {
    /// One whose process holds nothing.
    #[cfg(test)]
    pub(crate) fn example(id: TenantId, placement: Placement) -> Self {
        Self {
            id,
            name: "example".into(),
            spec: TenantSpec::default(),
            uid: 0,
            since: 0,
            pids: Vec::new(),
            token: String::new(),
            made_for: None,
            kept: false,
            named: false,
            placement,
            group: None,
            seat: None,
            utility: Vec::new(),
            devices: Vec::new(),
            holders: BTreeMap::new(),
        }
    }

    fn may_join(&self, token: &str, peer: &Peer) -> bool {
        self.token == token && (peer.uid == 0 || peer.uid == self.uid || self.kept)
    }
}

impl Table {
    /// A group has failed, and was there again after so long, if it was.
    fn count_fault(&mut self, group: &str, took: Option<Duration>) {
        let group = group.to_owned();
        make_room(&mut self.counts, &group, |name| {
            let uid = name.split('/').next();
            uid.and_then(|uid| uid.parse().ok()).unwrap_or_default()
        });
        let counts = self.counts.entry(group).or_default();
        counts.faults += 1;
        if let Some(took) = took {
            counts.restarts += 1;
            counts.restarting += took;
        }
    }

    /// Those with a seat in a group.
    fn seated(&self, key: &Key) -> impl Iterator<Item = &Tenant> {
        let all = self.tenants.values();
        all.filter(move |it| it.seat.is_some() && it.group.as_ref() == Some(key))
    }

    /// Time or space, as things are now.
    fn decide(&self, wish: &Wish<'_>, unavailable: Option<&str>) -> Decision {
        let (_, spec) = self.wish(wish.uid, wish.new);
        let members: Vec<&Tenant> = (wish.key.iter()).flat_map(|key| self.seated(key)).collect();
        let hinders = |it: &&Tenant| space::hinders(it.placement.sm_percent, spec.guaranteed);
        let repute = Repute::of(
            wish.key.as_ref(),
            wish.new.name.as_deref(),
            wish.new.fingerprint.as_deref(),
        );
        space::decide(&Applicant {
            sharing: wish.new.sharing,
            trust: wish.new.trust.as_deref(),
            class: spec.class,
            members: members.len(),
            room: groups::ROOM,
            unavailable,
            faults: repute.map_or(0, |it| self.culprits.get(&it).copied().unwrap_or(0)),
            interference: (wish.key.as_ref().zip(wish.known))
                .and_then(|(key, known)| self.interference(key, &spec, known)),
            hindered: members.iter().any(hinders),
        })
    }

    /// Where a new tenant goes for good, and its seat: what was decided before its group was `entered` is looked at again, now that
    /// nobody else can come before it.
    fn place(
        &self,
        wish: &Wish<'_>,
        before: Decision,
        entered: Option<Result<Seat, groups::GroupError>>,
        unavailable: Option<&str>,
    ) -> (Placement, Option<Seat>) {
        let mut placement = Placement {
            way: Way::Time,
            reason: before.reason,
            trust: wish.new.trust.clone(),
            fingerprint: wish.new.fingerprint.clone(),
            ..Placement::default()
        };
        let (Some(entered), Some(key)) = (entered, &wish.key) else {
            return (placement, None);
        };
        let seat = match entered {
            Ok(seat) => seat,
            Err(error) => {
                tracing::warn!(trust = key.trust, %error, "no group");
                placement.reason = format!("the group cannot be had: {error}");
                return (placement, None);
            }
        };
        let decision = self.decide(wish, unavailable);
        (placement.way, placement.reason) = (decision.way, decision.reason);
        if placement.way == Way::Time {
            return (placement, None);
        }
        let (_, spec) = self.wish(wish.uid, wish.new);
        let curve = |points: &[(u32, f64)]| Curve::of_percents(points.iter().copied());
        let others: Vec<(&TenantSpec, Curve)> = (self.seated(key))
            .map(|other| (&other.spec, curve(&other.utility)))
            .collect();
        let (points, from) = wish.utility;
        let own = curve(points);
        let mut all: Vec<_> = others.iter().map(|(spec, curve)| (*spec, curve)).collect();
        all.push((&spec, &own));
        (placement.sm_percent, placement.curve) = confine(wish.new.sm_percent, &all, *from);
        (placement, Some(seat))
    }

    /// What was measured of a program beside as many others as are in a group now, of whom it would have its share by weight in
    /// turns.
    fn interference(&self, key: &Key, spec: &TenantSpec, known: &Program) -> Option<Interference> {
        let (count, weight) = self
            .seated(key)
            .fold((0, spec.weight), |(count, weight), it| {
                (count + 1, weight + it.spec.weight)
            });
        known.interference(count, spec.weight / weight)
    }

    fn next_id(&mut self) -> TenantId {
        self.made += 1;
        TenantId(self.made)
    }

    fn insert(&mut self, tenant: Tenant) {
        tracing::info!(tenant = tenant.name, class = %tenant.spec.class, uid = tenant.uid, "tenant");
        self.empty_since = None;
        self.tenants.insert(tenant.id, tenant);
    }

    fn by_name(&self, name: &str) -> Option<&Tenant> {
        self.tenants.values().find(|tenant| tenant.name == name)
    }

    fn owned(&self, uid: u32, name: &str) -> Result<&Tenant, TenantError> {
        let tenant = self
            .by_name(name)
            .ok_or_else(|| TenantError::Unknown(name.into()))?;
        match uid == 0 || uid == tenant.uid {
            true => Ok(tenant),
            false => Err(TenantError::NotYours(name.into())),
        }
    }

    /// What was set for the name of a new tenant before, and what it is promised with that.
    fn wish(&self, uid: u32, new: &NewTenant) -> (Option<SpecChange>, TenantSpec) {
        let set = (self.settings.iter())
            .find(|set| {
                set.uid == uid && new.name.as_deref() == Some(set.name.as_str()) && !new.kept
            })
            .map(|set| set.change.clone());
        let spec = set
            .clone()
            .unwrap_or_default()
            .apply(&TenantSpec::default());
        (set, new.spec.apply(&spec))
    }

    /// A name that nobody has, as close to the wish as possible.
    fn free_name(&self, wish: &str) -> String {
        let program = wish.rsplit('/').next().unwrap_or_default();
        let mut base: String = program.chars().filter(|c| is_name_char(*c)).collect();
        // Leaves room for a number.
        base.truncate(MAX_NAME - 8);
        if !is_name(&base) {
            base = "tenant".into();
        }
        let numbered = (2..).map(|n: usize| format!("{base}-{n}"));
        let mut names = std::iter::once(base.clone()).chain(numbered);
        names
            .find(|name| self.by_name(name).is_none())
            .unwrap_or(base)
    }

    /// Remembers a change for a user's tenants of this name, in place of the longest unchanged if there are too many.
    fn set(&mut self, uid: u32, name: &str, change: &SpecChange) {
        let is = |set: &Setting| set.uid == uid && set.name == name;
        let old = self.settings.iter().position(is);
        let old = old.map(|at| self.settings.remove(at).change);
        let oldest = self.settings.iter().position(|set| set.uid == uid);
        let own = self.settings.iter().filter(|set| set.uid == uid).count();
        if let Some(oldest) = oldest.filter(|_| own >= MAX_SETTINGS) {
            self.settings.remove(oldest);
        }
        self.settings.push(Setting {
            uid,
            name: name.into(),
            change: change.after(&old.unwrap_or_default()),
        });
    }

    fn save_settings(&self, files: &Files) -> Result<(), TenantError> {
        store::write(&files.settings, &self.settings, Sync::Disk)
            .map_err(|error| TenantError::Save(files.settings.clone(), error))
    }

    fn save(&self, files: &Files) -> Result<(), TenantError> {
        if self.closed {
            return Ok(());
        }
        let saved: Vec<Saved> = self
            .tenants
            .values()
            .map(|tenant| Saved {
                name: tenant.name.clone(),
                token: tenant.token.clone(),
                spec: tenant.spec.clone(),
                uid: tenant.uid,
                since: tenant.since,
                made_for: tenant.made_for,
                kept: tenant.kept,
                named: tenant.named,
                placement: tenant.placement.clone(),
                group: tenant.group.clone(),
                utility: tenant.utility.clone(),
                devices: tenant.devices.clone(),
                holders: tenant.holders.values().copied().flatten().collect(),
            })
            .collect();
        store::write(&files.tenants, &saved, Sync::No)
            .map_err(|error| TenantError::Save(files.tenants.clone(), error))
    }

    /// Whether a new tenant may have this name.
    fn check_name(&self, name: Option<&str>) -> Result<(), TenantError> {
        match name {
            Some(name) if !is_name(name) => Err(TenantError::BadName(name.into())),
            Some(name) if self.by_name(name).is_some() => Err(TenantError::Taken(name.into())),
            _ => Ok(()),
        }
    }

    /// Whether a new tenant may bring its token.
    fn check_token(&self, new: &NewTenant) -> Result<(), TenantError> {
        let Some(token) = &new.token else {
            return Ok(());
        };
        let is_new = || self.tenants.values().all(|it| it.token != *token);
        match new.kept && is_secret(token) && is_new() {
            true => Ok(()),
            false => Err(TenantError::BadToken),
        }
    }

    /// Whether this user may have one tenant more.
    fn check_room(&self, uid: u32) -> Result<(), TenantError> {
        let own = self.tenants.values().filter(|it| it.uid == uid).count();
        match self.tenants.len() >= MAX_TENANTS || (uid != 0 && own >= MAX_TENANTS_PER_USER) {
            true => Err(TenantError::TooMany(own)),
            false => Ok(()),
        }
    }

    fn save_or_warn(&self, files: &Files) {
        if let Err(error) = self.save(files) {
            tracing::warn!(%error, "a restarted daemon will not know all tenants");
        }
    }
}

/// What is said of a new tenant's program, or else known of it, and which of both.
fn utility(new: &NewTenant, known: Option<&Program>) -> (Vec<(u32, f64)>, Option<CurveFrom>) {
    let measured = known.and_then(Program::utility);
    match (new.utility.is_empty(), measured) {
        (false, _) => (new.utility.clone(), Some(CurveFrom::Given)),
        (true, Some(curve)) => (curve.points().collect(), Some(CurveFrom::Measured)),
        (true, None) => (Vec::new(), None),
    }
}

/// To what percentage of the SMs the last of a group's members is confined, given what it asked for; and, where SMs are divided by
/// curves, where its own is from.
fn confine(
    asked: Option<u32>,
    members: &[(&TenantSpec, &Curve)],
    from: Option<CurveFrom>,
) -> (Option<u32>, Option<CurveFrom>) {
    let Some(((spec, _), others)) = members.split_last() else {
        return (None, None);
    };
    let (share, from) = match (asked, space::percentages(members)) {
        // Its own limit holds in any case.
        (Some(percent), _) => {
            let most = space::percentage(spec, []).unwrap_or(100);
            (Some(percent.min(most)), None)
        }
        (None, Some(shares)) => (shares.last().copied(), from),
        (None, None) => {
            let guaranteed = others.iter().map(|(spec, _)| spec.guaranteed);
            (space::percentage(spec, guaranteed), None)
        }
    };
    (share.filter(|share| *share < 100), from)
}

fn check_fingerprint(fingerprint: Option<&str>) -> Result<(), TenantError> {
    match fingerprint {
        Some(name) if !is_name(name) => Err(TenantError::BadFingerprint(name.into())),
        _ => Ok(()),
    }
}

fn check_curve(curve: &[(u32, f64)]) -> Result<(), TenantError> {
    let good = |(percent, rate): &(u32, f64)| space::is_point(*percent, *rate);
    match (1..=MAX_POINTS).contains(&curve.len()) && curve.iter().all(good) {
        true => Ok(()),
        false => Err(TenantError::BadCurve),
    }
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-".contains(c)
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(is_name_char)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// Whether a user may do what binds others.
fn trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::getuid().as_raw()
}

fn is_secret(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// 128 bits that nobody can guess, in hexadecimal.
pub(crate) fn secret() -> String {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        // Fails only when a signal comes before the kernel has gathered entropy.
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()).unwrap_or(0);
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use gpumux_core::Class;

    use super::*;
    use crate::scheduler;

    /// This process as another user's.
    fn peer(uid: u32) -> Peer {
        let process = ProcessId::of(std::process::id());
        Peer {
            uid,
            pid: std::process::id(),
            process,
            fd: process.and_then(ProcessId::watch),
        }
    }

    /// Says that it is a control daemon, as slowly as a file `slow` beside its pipes wants, until its folder is gone.
    const CONTROL: &str = r#"#!/bin/sh
[ "$1" = -f ] || { cat >/dev/null; echo 1; exit; }
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit
while [ -e "$GPUMUX_TEST_SLOW" ]; do sleep 0.05; done
: >control
while [ -e "$CUDA_MPS_PIPE_DIRECTORY" ]; do sleep 0.05; done
"#;

    async fn tenants(dir: &tempfile::TempDir) -> Arc<Tenants> {
        with_control(dir, None).await
    }

    /// With groups, whose control daemons are this script.
    async fn with_groups(dir: &tempfile::TempDir, script: &str) -> Arc<Tenants> {
        let control = dir.path().join("control.sh");
        gpumux_tests::program(&control, script);
        with_control(dir, Some(control)).await
    }

    async fn with_control(dir: &tempfile::TempDir, mps_control: Option<PathBuf>) -> Arc<Tenants> {
        let scheduler = scheduler::start(Arc::default()).unwrap();
        let files = Files {
            tenants: dir.path().join("tenants.json"),
            settings: dir.path().join("settings.json"),
            programs: dir.path().join("programs.json"),
        };
        let config = crate::Config {
            mps_control,
            ..crate::Config::default()
        };
        let groups = Groups::load(&config, dir.path());
        Tenants::load(files, String::new(), scheduler, groups)
            .await
            .unwrap()
    }

    fn new(name: &str) -> NewTenant {
        NewTenant {
            name: Some(name.into()),
            ..NewTenant::default()
        }
    }

    /// One that wants to be in a group.
    fn member(name: &str, trust: &str, guaranteed: f64) -> NewTenant {
        NewTenant {
            trust: Some(trust.into()),
            sharing: space::Sharing::Space,
            spec: SpecChange {
                guaranteed: Some(guaranteed),
                ..SpecChange::default()
            },
            ..new(name)
        }
    }

    #[tokio::test]
    async fn full_disk_stops_neither_the_daemon_nor_new_tenants() {
        let dir = tempfile::tempdir().unwrap();
        for file in ["tenants.json.new", "settings.json.new"] {
            std::fs::create_dir(dir.path().join(file)).unwrap();
        }
        let tenants = tenants(&dir).await;
        tenants.create(&peer(1), new("a")).await.unwrap();
        let change = SpecChange {
            class: Some(Class::Latency),
            ..SpecChange::default()
        };
        let changed = tenants.change(1, "a", &change).await;
        assert!(
            matches!(changed, Err(TenantError::NotKept(_))),
            "{changed:?}"
        );
        let all = tenants.list().await;
        assert_eq!(all[0].spec.class, Class::Latency, "it holds nevertheless");
    }

    #[tokio::test]
    async fn request_that_cannot_be_met_starts_no_group() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let bad_name = member("no name", "a", 0.1);
        let bad_token = NewTenant {
            token: Some("x".into()),
            ..member("b", "b", 0.1)
        };
        let too_much = member("c", "c", 1.5);
        for new in [bad_name, bad_token, too_much] {
            let own = rustix::process::getuid().as_raw();
            assert!(tenants.create(&peer(own), new).await.is_err());
        }
        assert!(!dir.path().join("groups").exists(), "a group was made");
    }

    async fn placement(tenants: &Tenants, name: &str) -> (TenantId, Placement) {
        let table = tenants.table.lock().await;
        let tenant = table.by_name(name).unwrap();
        (tenant.id, tenant.placement.clone())
    }

    #[tokio::test]
    async fn a_group_has_no_more_members_than_room_however_many_come_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let mut come = JoinSet::new();
        for n in 0..groups::ROOM + 12 {
            let tenants = Arc::clone(&tenants);
            let wish = member(&n.to_string(), "team", 0.0);
            come.spawn(async move { tenants.create(&peer(0), wish).await.unwrap() });
        }
        come.join_all().await;
        let all = tenants.list().await;
        let (inside, outside): (Vec<_>, Vec<_>) =
            all.iter().partition(|it| it.placement.way == Way::Space);
        assert_eq!((inside.len(), outside.len()), (groups::ROOM, 12));
        assert!(inside.iter().all(|it| it.seat.is_some()));
        for tenant in outside {
            assert!(tenant.placement.reason.contains("is full"), "{tenant:?}");
            assert!(tenant.seat.is_none());
        }
    }

    #[tokio::test]
    async fn who_comes_at_the_same_time_as_a_guarantee_does_not_get_what_it_promises() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let (peer, auto) = (peer(0), |name: &str, guaranteed| NewTenant {
            sharing: space::Sharing::Auto,
            ..member(name, "team", guaranteed)
        });
        let (sure, plain) = tokio::join!(
            tenants.create(&peer, auto("sure", 0.6)),
            tenants.create(&peer, auto("plain", 0.0)),
        );
        for created in [sure, plain] {
            created.unwrap();
        }
        let (sure, promised) = placement(&tenants, "sure").await;
        let (plain, confined) = placement(&tenants, "plain").await;
        if sure < plain {
            assert_eq!((promised.way, confined.sm_percent), (Way::Space, Some(40)));
        } else {
            assert_eq!((promised.way, confined.sm_percent), (Way::Time, None));
        }
        // One that comes later finds members that keep what they have.
        tenants.create(&peer, auto("late", 0.1)).await.unwrap();
        let (_, late) = placement(&tenants, "late").await;
        assert_eq!(late.way, Way::Time);
        assert!(late.reason.contains("guarantee leaves"), "{late:?}");
    }

    #[tokio::test]
    async fn nobody_outside_a_group_is_named_for_its_faults_whatever_its_log_says() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let created = tenants.create(&peer(0), new("stranger")).await.unwrap();
        let mine = peer(0);
        tenants
            .join(SessionId(1), &mine, Some(&created.token))
            .await
            .unwrap();
        tenants
            .create(&peer(0), member("bad", "team", 0.0))
            .await
            .unwrap();
        let (bad, _) = placement(&tenants, "bad").await;
        let crash = |pid| Crash {
            group: "0/team".into(),
            tenant: bad,
            pid,
            error: 700,
            busy: true,
            age_ms: None,
            ended_ms: None,
        };
        let say = |pid: u32| {
            let group = std::fs::read_dir(dir.path().join("groups")).unwrap().next();
            let log = group.unwrap().unwrap().path().join("control.out");
            std::fs::write(log, format!("Client {pid} caused a fatal fault")).unwrap();
        };
        for (named, culprit) in [(mine.pid, None), (7, Some("bad"))] {
            say(named);
            let crashes = vec![crash(7)];
            tenants.crashed("0/team", false, crashes).await.unwrap();
            let fault = tenants.faults().await.pop().unwrap();
            assert_eq!(fault.culprit.as_deref(), culprit, "{fault:?}");
        }
        let numbers = tenants.faults().await;
        let numbers: Vec<u64> = numbers.iter().map(|it| it.number).collect();
        assert_eq!(numbers, [1, 2]);
    }

    #[tokio::test]
    async fn an_error_older_than_its_group_harms_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let wish = member("notebook", "team", 0.0);
        tenants.create(&peer(0), wish).await.unwrap();
        let (tenant, _) = placement(&tenants, "notebook").await;
        let (tell, told) = unbounded_channel();
        tokio::spawn(watch_crashes(Arc::downgrade(&tenants), told));
        let hour = 3_600_000;
        for (error, age_ms) in [(1, Some(hour)), (2, None), (700, Some(0))] {
            let crash = Crash {
                group: "0/team".into(),
                tenant,
                pid: 7,
                error,
                busy: true,
                age_ms,
                ended_ms: None,
            };
            tell.send(Failure::Process(crash)).unwrap();
        }
        while tenants.faults().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(tenants.faults().await[0].error, 700);
    }

    #[tokio::test]
    async fn who_was_ended_in_its_work_is_named_but_may_join_again() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        for name in ["killed", "left"] {
            let wish = member(name, "team", 0.0);
            tenants.create(&peer(0), wish).await.unwrap();
        }
        let (killed, _) = placement(&tenants, "killed").await;
        let (left, _) = placement(&tenants, "left").await;
        for _ in 0..3 {
            let crash = |tenant, error, ended_ms| Crash {
                group: "0/team".into(),
                tenant,
                pid: 1,
                error,
                busy: true,
                age_ms: None,
                ended_ms,
            };
            let crashes = vec![crash(left, 700, None), crash(killed, 0, Some(50))];
            tenants.crashed("0/team", false, crashes).await.unwrap();
            let fault = tenants.faults().await.pop().unwrap();
            assert_eq!(fault.culprit.as_deref(), Some("killed"), "{fault:?}");
            assert_eq!(fault.others, ["left"]);
        }
        assert!(tenants.table.lock().await.culprits.is_empty());
    }

    #[tokio::test]
    async fn who_took_groups_down_is_known_again_by_its_name_or_else_its_program() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let unnamed = |fingerprint: &str| NewTenant {
            name: None,
            program: Some("python3".into()),
            fingerprint: Some(fingerprint.into()),
            ..member("", "team", 0.0)
        };
        let fail = async |wish: NewTenant| {
            let name = tenants.create(&peer(0), wish).await.unwrap().name;
            let (tenant, found) = placement(&tenants, &name).await;
            let crash = Crash {
                group: "0/team".into(),
                tenant,
                pid: 77,
                error: 719,
                busy: true,
                age_ms: None,
                ended_ms: None,
            };
            let group = std::fs::read_dir(dir.path().join("groups")).unwrap().next();
            let log = group.unwrap().unwrap().path().join("control.out");
            std::fs::write(log, "Client 77 caused a fatal fault").unwrap();
            tenants.crashed("0/team", false, vec![crash]).await.unwrap();
            tenants.delete(0, &name).await.unwrap();
            found.way
        };
        // Another one has the name that they would have.
        let good = unnamed("good");
        tenants.create(&peer(0), good.clone()).await.unwrap();
        for wish in [unnamed("bad"), member("chosen", "team", 0.0)] {
            let ways = [fail(wish.clone()).await, fail(wish.clone()).await];
            assert_eq!(ways, [Way::Space; 2], "{wish:?}");
            assert_eq!(fail(wish).await, Way::Time);
        }
        let named = |name: &str, trust: &str| NewTenant {
            fingerprint: Some("bad".into()),
            ..member(name, trust, 0.0)
        };
        for (wish, way) in [
            (good, Way::Space),
            (named("python3-2", "team"), Way::Space),
            (named("chosen", "other"), Way::Space),
            (named("chosen", "team"), Way::Time),
        ] {
            let name = tenants.create(&peer(0), wish).await.unwrap().name;
            let (_, found) = placement(&tenants, &name).await;
            assert_eq!(found.way, way, "{name}: {}", found.reason);
            tenants.delete(0, &name).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_group_that_does_not_start_does_not_delay_the_faults_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let slow = dir.path().join("slow");
        let script = CONTROL.replace("$GPUMUX_TEST_SLOW", &slow.display().to_string());
        let tenants = with_groups(&dir, &script).await;
        for trust in ["a", "b"] {
            let wish = member(trust, trust, 0.0);
            tenants.create(&peer(0), wish).await.unwrap();
        }
        // Nobody needs the group of `b` any more: there is nothing to wait for.
        tenants.delete(0, "b").await.unwrap();
        std::fs::write(&slow, "").unwrap();
        let (tell, told) = unbounded_channel();
        tokio::spawn(watch_crashes(Arc::downgrade(&tenants), told));
        for group in ["0/a", "0/b"] {
            tell.send(Failure::Server(group.into())).unwrap();
        }
        let faults = async || {
            let all = tenants.faults().await;
            all.into_iter().map(|it| it.group).collect::<Vec<_>>()
        };
        while faults().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(faults().await, ["0/b"]);
        // What is told of a group meanwhile is dealt with after that.
        tell.send(Failure::Server("0/a".into())).unwrap();
        std::fs::remove_file(&slow).unwrap();
        while faults().await.len() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(faults().await[1..], ["0/a", "0/a"]);
    }

    #[tokio::test]
    async fn only_its_owner_and_root_have_a_say() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = tenants(&dir).await;
        let created = tenants.create(&peer(1000), new("mine")).await.unwrap();
        let change = SpecChange {
            class: Some(Class::Latency),
            ..SpecChange::default()
        };
        let error = tenants.change(1001, "mine", &change).await.unwrap_err();
        assert!(matches!(error, TenantError::NotYours(_)), "{error}");
        let error = tenants.delete(1001, "mine").await.unwrap_err();
        assert!(matches!(error, TenantError::NotYours(_)), "{error}");
        let token = Some(created.token.as_str());
        let error = tenants
            .join(SessionId(1), &peer(1001), token)
            .await
            .unwrap_err();
        assert!(matches!(error, TenantError::UnknownToken), "{error}");
        assert_eq!(tenants.list().await[0].spec, TenantSpec::default());
        tenants.change(1000, "mine", &change).await.unwrap();
        tenants
            .join(SessionId(2), &peer(1000), token)
            .await
            .unwrap();
        tenants.join(SessionId(3), &peer(0), token).await.unwrap();
        assert_eq!(tenants.list().await[0].spec.class, Class::Latency);
        let file = std::fs::metadata(dir.path().join("tenants.json")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&file.permissions());
        assert_eq!(mode & 0o777, 0o600, "it has secrets in it");
    }

    #[tokio::test]
    async fn what_makes_no_sense_of_a_program_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = tenants(&dir).await;
        for (wish, wrong) in [
            (
                NewTenant {
                    fingerprint: Some("../x".into()),
                    ..new("a")
                },
                "`../x` is no fingerprint",
            ),
            (
                NewTenant {
                    sm_percent: Some(101),
                    ..new("a")
                },
                "101% is no part",
            ),
            (
                NewTenant {
                    utility: vec![(0, 1.0)],
                    ..new("a")
                },
                "no curve",
            ),
        ] {
            let error = tenants.create(&peer(0), wish).await.unwrap_err();
            assert!(error.to_string().contains(wrong), "{error}");
        }
        for curve in [
            &[][..],
            &[(50, -1.0)],
            &[(50, f64::NAN)],
            &[(50, 5e-324)],
            &[(50, 1e16)],
            &[(1, 1.0); 101],
        ] {
            let error = tenants.teach(0, "train", curve).unwrap_err();
            assert!(matches!(error, TenantError::BadCurve), "{error}");
        }
        tenants.teach(1000, "train", &[(100, 1.0)]).unwrap();
        let error = tenants.unlearn(1001, "train").unwrap_err();
        assert!(matches!(error, TenantError::NothingKnown(_)), "{error}");
        tenants.unlearn(1000, "train").unwrap();
    }

    #[test]
    fn a_curve_is_named_only_where_sms_are_divided_by_it() {
        let spec = TenantSpec::default();
        let half = TenantSpec {
            limit: 0.5,
            ..TenantSpec::default()
        };
        let (small, none) = (
            Curve::of_percents([(20, 0.9), (100, 1.0)]),
            Curve::default(),
        );
        let from = Some(CurveFrom::Measured);
        let two = [(&spec, &none), (&spec, &small)];
        assert_eq!(confine(None, &two, from), (Some(20), from));
        assert_eq!(confine(None, &two[1..], from), (None, None), "the first");
        assert_eq!(confine(None, &[two[1]; 3], from), (None, None), "alike");
        let many = |count| [&[two[0]; 3], &vec![two[1]; count][..]].concat();
        assert_eq!(confine(None, &many(15), from), (Some(5), from));
        assert_eq!(confine(None, &many(18), from), (None, None), "too many");
        // What is asked for comes first, and the limit before that.
        assert_eq!(confine(Some(30), &two, from), (Some(30), None));
        assert_eq!(confine(Some(100), &two, from), (None, None));
        let limited = [two[0], (&half, &small)];
        assert_eq!(confine(Some(70), &limited, from), (Some(50), None));
    }

    #[test]
    fn what_is_said_of_a_program_comes_before_what_is_known() {
        let mut known = Program::default();
        let said = NewTenant {
            utility: vec![(50, 1.0), (100, 1.5)],
            ..new("a")
        };
        assert_eq!(utility(&new("a"), Some(&known)), (Vec::new(), None));
        known.set_curve([(100, 2.0)]);
        assert_eq!(
            utility(&new("a"), Some(&known)).1,
            None,
            "one point is no curve"
        );
        known.set_curve([(25, 1.0), (100, 2.0)]);
        assert_eq!(
            utility(&new("a"), Some(&known)),
            (vec![(25, 1.0), (100, 2.0)], Some(CurveFrom::Measured))
        );
        assert_eq!(utility(&said, Some(&known)).1, Some(CurveFrom::Given));
        assert_eq!(utility(&said, None).0, said.utility);
    }

    #[tokio::test]
    async fn a_kept_tenant_needs_no_holder_and_is_open_to_whoever_has_its_secret() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = tenants(&dir).await;
        let secret = "0123456789abcdef0123456789abcdef";
        let kept = |name: &str, secret: &str| NewTenant {
            kept: true,
            token: Some(secret.into()),
            ..new(name)
        };
        let error = tenants
            .create(&peer(1000), kept("pod", secret))
            .await
            .unwrap_err();
        assert!(matches!(error, TenantError::NotTrusted), "{error}");
        let error = tenants
            .create(&peer(0), kept("pod", "short"))
            .await
            .unwrap_err();
        assert!(matches!(error, TenantError::BadToken), "{error}");
        let created = tenants.create(&peer(0), kept("pod", secret)).await.unwrap();
        assert_eq!(created.token, secret);
        let error = tenants
            .create(&peer(0), kept("thief", secret))
            .await
            .unwrap_err();
        assert!(matches!(error, TenantError::BadToken), "{error}");
        let (id, _) = tenants
            .join(SessionId(1), &peer(1000), Some(secret))
            .await
            .unwrap();
        let error = tenants.delete(0, "pod").await.unwrap_err();
        assert!(matches!(error, TenantError::Busy(_, 1)), "{error}");
        tenants.leave(SessionId(1), id, peer(1000).pid).await;
        assert_eq!(tenants.list().await.len(), 1);
        tenants.delete(0, "pod").await.unwrap();
        let error = tenants
            .join(SessionId(2), &peer(0), Some(secret))
            .await
            .unwrap_err();
        assert!(matches!(error, TenantError::UnknownToken), "{error}");
    }

    #[tokio::test]
    async fn confined_tenant_is_confined_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = tenants(&dir).await;
        let on = |name: &str, device: &str| NewTenant {
            kept: true,
            devices: vec![device.into()],
            spec: SpecChange {
                guaranteed: Some(0.9),
                ..SpecChange::default()
            },
            ..new(name)
        };
        let error = tenants
            .create(&peer(0), on("bad", "GPU 0"))
            .await
            .unwrap_err();
        assert!(matches!(error, TenantError::BadDevice(_)), "{error}");
        tenants.create(&peer(0), on("a", "GPU-0")).await.unwrap();
        tenants.create(&peer(0), on("b", "GPU-1")).await.unwrap();
        drop(tenants);
        let next = self::tenants(&dir).await;
        for device in ["GPU-0", "GPU-1"] {
            let error = next.create(&peer(0), on("c", device)).await.unwrap_err();
            assert!(error.to_string().contains(device), "{error}");
        }
        next.create(&peer(0), on("c", "GPU-2")).await.unwrap();
    }

    #[tokio::test]
    async fn who_belongs_to_a_group_is_known_by_its_secret_or_else_by_who_started_it() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = tenants(&dir).await;
        let child = || {
            let mut command = std::process::Command::new("sleep");
            let child = command.arg("100").spawn().unwrap();
            let process = ProcessId::of(child.id()).unwrap();
            let fd = process.watch();
            let peer = Peer {
                uid: 0,
                pid: child.id(),
                process: Some(process),
                fd,
            };
            (child, process, peer)
        };
        let ((mut a, of_a, by_a), (mut b, of_b, by_b)) = (child(), child());
        let inside = tenants.create(&by_a, new("inside")).await.unwrap().token;
        let outside = tenants.create(&by_b, new("outside")).await.unwrap().token;
        let team = Key {
            uid: 0,
            trust: "team".into(),
        };
        {
            let mut table = tenants.table.lock().await;
            let mut all = table.tenants.values_mut();
            all.find(|it| it.name == "inside").unwrap().group = Some(team.clone());
        }
        let nobody = ProcessId { pid: 1, start: 0 };
        for (token, line, expected) in [
            (Some(&*inside), &[][..], true),
            (Some(&*inside), &[of_b], true),
            (Some(&*outside), &[of_a], false),
            (None, &[nobody, of_a, of_b], true),
            (None, &[of_b, of_a], false),
            (Some("garbage"), &[nobody, of_b], false),
            (Some("garbage"), &[nobody], false),
            (None, &[], false),
        ] {
            let found = tenants.belongs(&team, token, line).await;
            assert_eq!(found, expected, "{token:?} {line:?}");
        }
        for child in [&mut a, &mut b] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        while !tenants.list().await.is_empty() {
            tokio::task::yield_now().await;
        }
        // A process that the tenant has left behind.
        assert!(tenants.belongs(&team, Some(&inside), &[]).await);
        assert!(!tenants.belongs(&team, None, &[of_a]).await);
    }

    #[tokio::test]
    async fn a_late_process_finds_its_tenant_although_it_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = tenants(&dir).await;
        let mut child = std::process::Command::new("sleep")
            .arg("100")
            .spawn()
            .unwrap();
        let process = ProcessId::of(child.id());
        let fd = process.and_then(ProcessId::watch);
        let creator = Peer {
            uid: 0,
            pid: child.id(),
            process,
            fd,
        };
        let spec = TenantSpec {
            class: Class::Batch,
            ..TenantSpec::default()
        };
        let wish = NewTenant {
            spec: SpecChange {
                class: Some(Class::Batch),
                ..SpecChange::default()
            },
            ..new("script")
        };
        let created = tenants.create(&creator, wish).await.unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        while !tenants.list().await.is_empty() {
            tokio::task::yield_now().await;
        }
        let (_, name) = tenants
            .join(SessionId(1), &peer(0), Some(&created.token))
            .await
            .unwrap();
        assert_eq!(
            (name.as_str(), &tenants.list().await[0].spec),
            ("script", &spec)
        );
        assert!(
            tenants
                .join(SessionId(2), &peer(0), Some("guess"))
                .await
                .is_err()
        );
    }

    #[tokio::test]
    async fn what_was_set_for_a_name_is_there_for_the_next_tenant_and_the_next_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let first = tenants(&dir).await;
        first.create(&peer(1000), new("train")).await.unwrap();
        let change = |class, weight| SpecChange {
            class,
            weight,
            ..SpecChange::default()
        };
        let (batch, heavy) = (
            change(Some(Class::Batch), Some(2.0)),
            change(None, Some(5.0)),
        );
        first.change(1000, "train", &batch).await.unwrap();
        first.change(0, "train", &heavy).await.unwrap();
        // A tenant whose name nobody chose is nobody to remember.
        let unnamed = first.create(&peer(1000), NewTenant::default()).await;
        let unnamed = unnamed.unwrap().name;
        first.change(1000, &unnamed, &batch).await.unwrap();

        std::fs::remove_file(dir.path().join("tenants.json")).unwrap();
        let next = tenants(&dir).await;
        let spec = async |tenants: &Arc<Tenants>, uid, wish: NewTenant| {
            let name = tenants.create(&peer(uid), wish).await.unwrap().name;
            let table = tenants.table.lock().await;
            let spec = table.by_name(&name).unwrap().spec.clone();
            (spec.class, spec.weight)
        };
        let wish = |name: &str, spec| NewTenant { spec, ..new(name) };
        let none = SpecChange::default();
        assert_eq!(
            spec(&next, 1001, wish("train", none.clone())).await,
            (Class::Standard, 1.0),
            "it is another user's"
        );
        next.delete(1001, "train").await.unwrap();
        // What is said now comes before what was set then.
        assert_eq!(
            spec(&next, 1000, wish("train", change(None, Some(7.0)))).await,
            (Class::Batch, 7.0)
        );
        next.delete(1000, "train").await.unwrap();
        assert_eq!(
            spec(&next, 1000, wish("train", none.clone())).await,
            (Class::Batch, 5.0)
        );
        next.delete(1000, "train").await.unwrap();
        let nothing = wish(&unnamed, none.clone());
        assert_eq!(spec(&next, 1000, nothing).await, (Class::Standard, 1.0));

        let error = next.forget(1001, "train").await.unwrap_err();
        assert!(matches!(error, TenantError::NothingSet(_)), "{error}");
        next.forget(1000, "train").await.unwrap();
        let last = tenants(&dir).await;
        assert_eq!(
            spec(&last, 1000, wish("train", none)).await,
            (Class::Standard, 1.0)
        );
    }

    /// Whatever can be set, memory and hints too.
    #[tokio::test]
    async fn all_that_can_be_set_is_there_for_the_next_daemon() {
        let dir = tempfile::tempdir().unwrap();
        // No `..`: what is new must be set here too.
        let change = SpecChange {
            class: Some(Class::Latency),
            guaranteed: Some(0.25),
            limit: Some(0.5),
            weight: Some(3.0),
            latency_objective_us: Some(Some(7000)),
            hints: Some(Hints::Manual),
            memory_guaranteed: Some(1 << 30),
            memory_limit: Some(Some(2 << 30)),
            memory_policy: Some(gpumux_core::MemoryPolicy::Wait),
            sleep_after_s: Some(Some(60)),
        };
        let first = tenants(&dir).await;
        first.create(&peer(0), new("serve")).await.unwrap();
        first.change(0, "serve", &change).await.unwrap();
        std::fs::remove_file(dir.path().join("tenants.json")).unwrap();
        let next = tenants(&dir).await;
        next.create(&peer(0), new("serve")).await.unwrap();
        let wanted = change.apply(&TenantSpec::default());
        assert_eq!(next.list().await[0].spec, wanted);
        // The one that lives is known to the daemon after that, from the other file.
        std::fs::remove_file(dir.path().join("settings.json")).unwrap();
        let last = tenants(&dir).await;
        assert_eq!(last.list().await[0].spec, wanted);
        // What is cleared is cleared for the next daemon too.
        let cleared: SpecChange =
            serde_json::from_str(r#"{"memory_limit": null, "sleep_after_s": null}"#).unwrap();
        last.change(0, "serve", &change).await.unwrap();
        last.change(0, "serve", &cleared).await.unwrap();
        std::fs::remove_file(dir.path().join("tenants.json")).unwrap();
        let last = tenants(&dir).await;
        last.create(&peer(0), new("serve")).await.unwrap();
        let wanted = TenantSpec {
            memory_limit: None,
            sleep_after_s: None,
            ..wanted
        };
        assert_eq!(last.list().await[0].spec, wanted);
    }

    #[tokio::test]
    async fn an_old_setting_that_cannot_be_kept_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = tenants(&dir).await;
        tenants.create(&peer(0), new("serve")).await.unwrap();
        let half = SpecChange {
            guaranteed: Some(0.6),
            ..SpecChange::default()
        };
        tenants.change(0, "serve", &half).await.unwrap();
        tenants.delete(0, "serve").await.unwrap();
        tenants.create(&peer(0), new("other")).await.unwrap();
        tenants.change(0, "other", &half).await.unwrap();
        let error = tenants.create(&peer(0), new("serve")).await.unwrap_err();
        assert!(matches!(error, TenantError::Set(..)), "{error}");
        assert!(error.to_string().contains("gpumux set serve --forget"));
    }

    #[test]
    fn what_a_user_does_does_not_make_another_ones_culprits_forgotten() {
        let of = |uid, n| {
            let group = Key {
                uid,
                trust: "team".into(),
            };
            Repute::Name(group, format!("{n:03}"))
        };
        let mut culprits = BTreeMap::from([(of(1, 0), 1), (of(1, 1), 2)]);
        for n in 0..2 * MAX_SETTINGS {
            make_room(&mut culprits, &of(2, n), Repute::uid);
            culprits.insert(of(2, n), 1);
        }
        assert_eq!(culprits.len(), MAX_SETTINGS);
        assert_eq!((culprits[&of(1, 0)], culprits[&of(1, 1)]), (1, 2));
        make_room(&mut culprits, &of(1, 0), Repute::uid);
        assert_eq!(culprits.len(), MAX_SETTINGS, "it has its place");
    }

    #[test]
    fn the_culprit_is_whom_the_evidence_names_and_nobody_else() {
        let crash = |tenant, error, busy| Crash {
            group: "0/team".into(),
            tenant: TenantId(tenant),
            pid: 100 + tenant as u32,
            error,
            busy,
            age_ms: None,
            ended_ms: None,
        };
        let ended = |tenant, busy| Crash {
            ended_ms: Some(60),
            ..crash(tenant, 0, busy)
        };
        let said = "[1 server 7] Client 101 connected\n[2 server 7] Client 102 caused a fatal fault: error 700";
        let unknown = "Client 77 caused a fatal fault";
        // What is told, what the server said, up to which number they are in the group, and whom that names.
        for (crashes, said, last, named) in [
            (
                vec![crash(1, 700, true), crash(2, 700, true)],
                said,
                2,
                Some(2),
            ),
            (vec![crash(1, 700, true)], unknown, 1, None),
            (vec![crash(1, 700, true), crash(2, 700, true)], "", 2, None),
            // The server has gone, whoever had work.
            (vec![crash(1, 806, true)], "", 1, None),
            (
                vec![crash(1, 810, true), crash(2, 719, false)],
                "",
                2,
                Some(2),
            ),
            (
                // Who had work need not be who did it.
                vec![crash(1, 700, false), crash(2, 700, true)],
                "",
                2,
                None,
            ),
            (
                vec![crash(1, 700, true), crash(1, 700, true)],
                "",
                1,
                Some(1),
            ),
            // There is one more, of whom nothing is known.
            (vec![crash(1, 700, true)], "", 2, None),
            (vec![], "", 1, None),
            // A third one ended in the middle of its work, and is the first suspect, but not if the server knows better.
            (vec![crash(1, 700, true), ended(3, true)], "", 1, Some(3)),
            (vec![crash(2, 700, true), ended(3, true)], said, 2, Some(2)),
            (
                vec![crash(1, 700, true), ended(3, true), ended(4, true)],
                "",
                1,
                None,
            ),
            // One without work, and one that is not in the group any more, say nothing.
            (vec![crash(1, 700, true), ended(3, false)], "", 1, Some(1)),
            (vec![crash(1, 700, true), ended(3, false)], "", 2, None),
            (vec![crash(1, 700, true), crash(3, 810, false)], "", 2, None),
        ] {
            let whose = |pid: u32| {
                (101..=102)
                    .contains(&pid)
                    .then(|| TenantId(u64::from(pid) - 100))
            };
            let seated: Vec<TenantId> = (1..=last).map(TenantId).collect();
            let (found, evidence) = culprit(&crashes, said, &seated, whose);
            assert_eq!(
                found,
                named.map(TenantId),
                "{crashes:?} {said} {last}: {evidence}"
            );
        }
    }

    #[test]
    fn faults_of_groups_are_counted_and_bounded() {
        let mut table = Table::default();
        table.count_fault("0/team", None);
        for n in 1..=MAX_SETTINGS {
            table.count_fault(&format!("1000/{n:04}"), None);
        }
        let took = Duration::from_millis(5);
        table.count_fault("0/team", Some(took));
        assert_eq!(table.counts.len(), MAX_SETTINGS);
        assert!(!table.counts.contains_key("1000/0001"));
        let counts = GroupCounts {
            members: 0,
            faults: 2,
            restarts: 1,
            restarting: took,
        };
        assert_eq!(table.counts["0/team"], counts);
    }

    #[test]
    fn settings_are_bounded_per_user() {
        let mut table = Table::default();
        table.set(1, "other", &SpecChange::default());
        for n in 0..=MAX_SETTINGS {
            table.set(0, &n.to_string(), &SpecChange::default());
        }
        let names: Vec<_> = table.settings.iter().map(|set| set.name.as_str()).collect();
        assert_eq!(names.len(), MAX_SETTINGS + 1);
        assert!(names.contains(&"other") && names.contains(&"1") && !names.contains(&"0"));
    }

    #[tokio::test]
    async fn a_process_without_a_secret_stays_what_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = tenants(&dir).await;
        let (first, name) = tenants.join(SessionId(1), &peer(0), None).await.unwrap();
        let (again, _) = tenants.join(SessionId(2), &peer(0), None).await.unwrap();
        assert_eq!(first, again);
        let change = SpecChange {
            class: Some(Class::Batch),
            ..SpecChange::default()
        };
        tenants.change(0, &name, &change).await.unwrap();
        // Another daemon, after this one was killed.
        let next = self::tenants(&dir).await;
        let (_, same) = next.join(SessionId(1), &peer(0), None).await.unwrap();
        assert_eq!(same, name);
        assert_eq!(next.list().await[0].spec.class, Class::Batch);
    }

    #[test]
    fn names_are_made_from_anything() {
        let mut table = Table::default();
        for (wish, name) in [
            ("/usr/bin/python3", "python3"),
            ("../..", "tenant"),
            ("", "tenant"),
            ("-rf", "tenant"),
            ("my job\n", "myjob"),
        ] {
            assert_eq!(table.free_name(wish), name);
        }
        let long = table.free_name(&"x".repeat(500));
        assert!(is_name(&long));
        for name in ["python3", "python3-2"] {
            let name = name.to_owned();
            let id = table.next_id();
            let tenant = Tenant {
                name,
                ..Tenant::example(id, Placement::default())
            };
            table.insert(tenant);
        }
        assert_eq!(table.free_name("python3"), "python3-3");
    }
}
