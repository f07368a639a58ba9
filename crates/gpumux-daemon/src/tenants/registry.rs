//! All tenants that live: their names and users, how long they live, and their specs.
//!
//! A tenant lives while it is held by the process that asked for it, or by a session. Its spec
//! is decided by the scheduler; here is only a copy to show and to keep.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use gpumux_core::{
    Class, Hints, MAX_NAME, TenantId, TenantSpec,
    admission::UserPolicy,
    is_name, is_name_char,
    quantity::{Size, Time},
    space::Way,
    tamper::Then,
};
use gpumux_wire::MEMORY_LIMIT_VARIABLE;
use rustix::process::Signal;
use tokio::sync::{Mutex, MutexGuard};

use super::{
    faults::{Faults, GroupCounts},
    life::Life,
    model::{Holder, Tenant, TenantError, check_curve, check_fingerprint, find, is_secret, secret},
    persistence::{self, Files, Saved, Settings},
    placement::{self, Room, Wish},
    selection,
};
use crate::{
    api::types::{
        Created, Ended, EventKind, Exit, Fault, LostOutput, NewCurve, NewTenant, Placement,
        Reported, Setting, SpecChange,
    },
    events::Events,
    groups::{Groups, Key, UnauthorizedClient},
    hold,
    peer::{Peer, ProcessFd, ProcessId},
    programs::Programs,
    scheduler::{Command, Handle, Happening, Left, Owner, SessionId, Stopped, View},
    store::Writer,
    users::{Users, trusted, uid_of},
};

/// Most tenants there may be.
const MAX_TENANTS: usize = 4096;
/// Tenants that are remembered after their end.
const MAX_ENDED: usize = 256;
/// How long the end of a tenant may take once its processes have ended: the kernel tells an exit code up to half a second later.
const RELEASES: Duration = Duration::from_secs(2);
/// A tenant that there is not.
const NOBODY: TenantId = TenantId(u64::MAX);

/// All tenants.
pub(crate) struct Tenants {
    pub(super) table: Mutex<Table>,
    pub(super) scheduler: Handle,
    files: Files,
    session_socket: String,
    pub(super) groups: Arc<Groups>,
    pub(crate) programs: Programs,
    settings: Writer,
    /// Held while a spec is changed: the table is not, since the scheduling thread may wait for the driver.
    changing: Mutex<()>,
    pub(crate) events: Events,
    pub(crate) users: Arc<Users>,
}

#[derive(Default)]
pub(super) struct Table {
    made: u64,
    holders_made: u64,
    pub(super) tenants: BTreeMap<TenantId, Tenant>,
    /// The last ones that ended: a process of theirs may use a device only now, long after the one that
    /// asked for the tenant.
    pub(super) ended: VecDeque<Tenant>,
    /// How the last ones ended, the latest last.
    ends: VecDeque<Ended>,
    settings: Settings,
    /// The last processes that joined, and their tenants.
    pub(super) joined: VecDeque<(u32, TenantId)>,
    pub(super) faults: Faults,
    /// The daemon is leaving: what ends now must still be known to the next one.
    closed: bool,
    /// When the last tenant ended, or the daemon began.
    empty_since: Option<Instant>,
}

impl Tenants {
    /// The tenants of the last daemon that still live; none at the first start.
    pub(crate) async fn load(
        files: Files,
        session_socket: String,
        scheduler: Handle,
        groups: Arc<Groups>,
        users: Arc<Users>,
    ) -> Result<Arc<Self>, TenantError> {
        let saved = persistence::load(&files);
        let tenants = Arc::new(Self {
            table: Mutex::new(Table {
                empty_since: Some(Instant::now()),
                settings: Settings::load(&files),
                ..Table::default()
            }),
            scheduler,
            programs: Programs::load(files.programs.clone()),
            settings: Writer::new(files.settings.clone()),
            changing: Mutex::default(),
            events: Events::default(),
            files,
            session_socket,
            groups,
            users,
        });
        for saved in saved {
            tenants.take_over(saved).await?;
        }
        // On a full disk, too: it may be the next start that has room.
        tenants.table.lock().await.save_or_warn(&tenants.files);
        Ok(tenants)
    }

    async fn take_over(self: &Arc<Self>, saved: Saved) -> Result<(), TenantError> {
        let living = |process: ProcessId| Some((process, process.watch()?));
        let holders: Vec<_> = saved.holders.into_iter().filter_map(living).collect();
        let ended = holders.is_empty() && !saved.kept;
        let policy = self.users.policy(saved.uid).await;
        let mut table = self.table.lock().await;
        let id = table.next_id();
        let name = table.free_name(saved.uid, &saved.name);
        let user = policy.user.clone();
        let owner = Owner {
            name: name.clone(),
            uid: saved.uid,
            policy,
        };
        let (given, devices) = (saved.spec.clone(), saved.devices.clone());
        let admit = |answer| Command::AdmitAgain {
            tenant: id,
            owner,
            devices,
            spec: given,
            answer,
        };
        let (spec, error) = match ended {
            true => (saved.spec, None),
            false => self.scheduler.ask(admit).await?,
        };
        if let Some(error) = error {
            tracing::warn!(tenant = saved.name, %error, "an old guarantee does not fit any more");
        }
        let tenant = Tenant {
            id,
            name,
            spec,
            uid: saved.uid,
            user,
            since: saved.since,
            pids: Vec::new(),
            token: saved.token,
            made_for: saved.made_for,
            kept: saved.kept,
            named: saved.named,
            placement: saved.placement,
            group: saved.group,
            membership: None,
            utility: saved.utility,
            devices: saved.devices,
            holders: BTreeMap::new(),
            life: saved.life,
            uncontrolled: None,
        };
        table.insert(tenant);
        if ended {
            // No daemon was there to see it.
            self.remove(&mut table, id).await;
            return Ok(());
        }
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
        if !trusted(peer.uid) && new.kept {
            return Err(TenantError::NotTrusted);
        }
        if let Some(trust) = new.trust.as_ref().filter(|trust| !is_name(trust)) {
            return Err(TenantError::BadTrust(trust.clone()));
        }
        check_fingerprint(new.fingerprint.as_deref())?;
        if let Some(percent) = new
            .sm_percent
            .filter(|percent| !(1..=100).contains(percent))
        {
            return Err(TenantError::BadPercent(percent));
        }
        if !new.utility.is_empty() {
            check_curve(&new.utility)?;
        }
        let policy = self.users.policy(peer.uid).await;
        let numbers = self.scheduler.ask(Command::Numbers).await?;
        let declared = self.users.declared(&policy, &new);
        let (asked, visible) = (&new.devices, new.visible.as_deref());
        let selection = selection::select(asked, &declared.gpu, visible, &numbers)?;
        let known =
            (new.fingerprint.as_deref()).and_then(|name| self.programs.find(peer.uid, name));
        let utility = placement::utility(&new, known.as_ref());
        let (_, spec) = (self.table.lock().await).wish(peer.uid, &declared.spec, &new);
        let wish = Wish {
            new: &new,
            key: placement::trust(&new, &policy, &spec).map(|trust| Key {
                uid: peer.uid,
                trust,
            }),
            known: known.as_ref(),
            utility: &utility,
        };
        // A request whose answer was lost is made again: its first tenant was this process's.
        for token in new.leaves.iter().chain(&new.token) {
            self.depart(peer, token).await;
        }
        if let Some(name) = &new.name {
            self.await_end(peer.uid, name).await;
        }
        // It may take a while until the group is there: meanwhile no other request waits. A request that cannot be met starts nothing.
        let (decision, (set, spec)) = {
            let table = self.table.lock().await;
            table.check_name(peer.uid, new.name.as_deref())?;
            table.check_token(&new)?;
            table.check_room(peer.uid, &policy)?;
            let (set, spec) = table.wish(peer.uid, &declared.spec, &new);
            let room = table.room(&wish, self.groups.unavailable());
            (placement::decide(&wish, &spec, &room), (set, spec))
        };
        if decision.way == Way::Space {
            let owner = Owner {
                name: new.name.clone().unwrap_or_default(),
                uid: peer.uid,
                policy: Arc::clone(&policy),
            };
            let admits = |answer| Command::Admits {
                tenant: NOBODY,
                owner,
                devices: selection.devices.iter().cloned().collect(),
                spec,
                answer,
            };
            let admitted = self.scheduler.ask(admits).await?;
            admitted.map_err(|error| match &new.name {
                Some(name) if may_refuse(&set) => TenantError::Set(name.clone(), error.into()),
                _ => error.into(),
            })?;
        }
        let entered = match wish.key.as_ref().filter(|_| decision.way == Way::Space) {
            Some(key) => Some(self.groups.enter(key, peer.pid).await),
            None => None,
        };
        let mut table = self.open_table().await?;
        // By now others may have come: the tenants in the table count until this one is in it.
        let (set, spec) = table.wish(peer.uid, &declared.spec, &new);
        let room = table.room(&wish, self.groups.unavailable());
        let (placement, membership) = placement::place(&wish, &spec, decision, entered, &room);
        let named = new.name.is_some();
        table.check_name(peer.uid, new.name.as_deref())?;
        table.check_token(&new)?;
        let name = match new.name {
            Some(name) => name,
            None => table.free_name(peer.uid, &new.program.unwrap_or_default()),
        };
        let fd = peer
            .fd
            .as_ref()
            .and_then(|fd| fd.try_clone().ok())
            .ok_or(TenantError::Invisible)?;
        let token = new.token.unwrap_or_else(secret);
        let memory_limit = spec.memory_limit;
        let confined = (None, selection.devices);
        let owner = Owner {
            name: name.clone(),
            uid: peer.uid,
            policy,
        };
        let made = self.make(&mut table, owner, spec, token, confined).await;
        let id = made.map_err(|error| match error {
            TenantError::Refused(error) if may_refuse(&set) => {
                TenantError::Set(name.clone(), error)
            }
            error => error,
        })?;
        let mut environment = match &membership {
            Some(membership) => membership.environment(placement.sm_percent),
            None => BTreeMap::new(),
        };
        // A container has numbers of its own.
        if !new.kept {
            environment.extend(selection.environment);
        }
        let shown = (self.scheduler)
            .ask(|answer| Command::ShownMemory(id, answer))
            .await?;
        if let Some(bytes) = memory_limit.or(shown) {
            environment.insert(MEMORY_LIMIT_VARIABLE.into(), bytes.to_string());
        }
        if let Some(membership) = &membership {
            let name = membership.name();
            (self.scheduler)
                .ask(|answer| Command::Place(id, name, answer))
                .await?;
        }
        if let Some(tenant) = table.tenants.get_mut(&id) {
            (tenant.kept, tenant.named) = (new.kept, named);
            tenant.placement = placement.clone();
            tenant.group = membership
                .as_ref()
                .map(|membership| membership.key().clone());
            tenant.membership = membership.map(Arc::new);
            tenant.utility = utility.0;
            let log = new
                .log
                .map(|folder| format!("{folder}/{}.log", tenant.name));
            tenant.life = Life::new(new.command, log, peer.process);
        }
        self.started(&table, id);
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
            placement,
            remembered: set,
        })
    }

    /// Sets a program's scaling profile.
    pub(crate) async fn teach(
        &self,
        uid: u32,
        fingerprint: &str,
        curve: &NewCurve,
    ) -> Result<(), TenantError> {
        check_fingerprint(Some(fingerprint))?;
        check_curve(&curve.curve)?;
        self.programs.teach(uid, fingerprint, curve);
        self.save_programs().await
    }

    /// Forgets what is known of a program.
    pub(crate) async fn unlearn(&self, uid: u32, fingerprint: &str) -> Result<(), TenantError> {
        match self.programs.forget(uid, fingerprint) {
            true => self.save_programs().await,
            false => Err(TenantError::NothingKnown(fingerprint.into())),
        }
    }

    async fn save_programs(&self) -> Result<(), TenantError> {
        let kept = self.programs.save().await;
        kept.map_err(|error| TenantError::Save(self.files.programs.clone(), error))
    }

    /// What the scheduler sees.
    pub(crate) async fn view(&self) -> Result<View, Stopped> {
        self.scheduler.ask(Command::View).await
    }

    /// The last faults in groups, the latest last.
    pub(crate) async fn faults(&self) -> Vec<Fault> {
        self.table
            .lock()
            .await
            .faults
            .last
            .iter()
            .cloned()
            .collect()
    }

    /// All groups in figures, by name.
    pub(crate) async fn groups(&self) -> BTreeMap<String, GroupCounts> {
        let table = self.table.lock().await;
        let mut groups = table.faults.counts.clone();
        for membership in table
            .tenants
            .values()
            .filter_map(|it| it.membership.as_ref())
        {
            let name = membership.name().to_string();
            groups.entry(name).or_default().members += 1;
        }
        groups
    }

    /// Gives a tenant that was in a group its membership back, if the group is still there.
    async fn sit_again(&self, table: &mut Table, id: TenantId) -> Result<(), Stopped> {
        let Some(tenant) = table.tenants.get_mut(&id) else {
            return Ok(());
        };
        let membership = (tenant.group.as_ref()).and_then(|key| self.groups.enter_again(key));
        if let Some(membership) = membership {
            let name = membership.name();
            tenant.membership = Some(Arc::new(membership));
            (self.scheduler)
                .ask(|answer| Command::Place(id, name, answer))
                .await?;
        }
        Ok(())
    }

    /// Makes a tenant that no process holds yet.
    async fn make(
        &self,
        table: &mut Table,
        owner: Owner,
        spec: TenantSpec,
        token: String,
        (made_for, devices): (Option<ProcessId>, Vec<String>),
    ) -> Result<TenantId, TenantError> {
        table.check_room(owner.uid, &owner.policy)?;
        let id = table.next_id();
        let (name, uid, user) = (owner.name.clone(), owner.uid, owner.policy.user.clone());
        let admit = |answer| Command::Admit {
            tenant: id,
            owner,
            devices: devices.clone(),
            spec: spec.clone(),
            answer,
        };
        self.scheduler.ask(admit).await??;
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |t| t.as_secs());
        table.insert(Tenant {
            id,
            name,
            spec,
            uid,
            user,
            since,
            pids: Vec::new(),
            token,
            made_for,
            kept: false,
            named: false,
            placement: Placement::default(),
            group: None,
            membership: None,
            utility: Vec::new(),
            devices,
            holders: BTreeMap::new(),
            life: Life::default(),
            uncontrolled: None,
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
            let is_main = match tenants.upgrade() {
                Some(tenants) => tenants.is_main(id, holder).await,
                None => false,
            };
            let exit = match is_main {
                true => fd.exit().await,
                false => None,
            };
            if let Some(tenants) = tenants.upgrade() {
                if let Some(exit) = exit {
                    tenants.exited(id, exit).await;
                }
                tenants.release(id, holder).await;
            }
        });
    }

    /// Waits until the tenant of this name is released, if all its processes have ended: that takes a moment, and
    /// the next program of this name may start at once.
    async fn await_end(&self, uid: u32, name: &str) {
        let released = async {
            loop {
                let last = self.events.last();
                let table = self.table.lock().await;
                if !table.of_user(uid, name).is_some_and(Tenant::has_ended) {
                    break;
                }
                drop(table);
                self.events.after(last).await;
            }
        };
        // What takes longer ends as a name that is taken.
        let _ = tokio::time::timeout(RELEASES, released).await;
    }

    /// Finds or makes the tenant of a process that connects.
    pub(crate) async fn join(
        &self,
        session: SessionId,
        peer: &Peer,
        token: Option<&str>,
    ) -> Result<(TenantId, String), TenantError> {
        let policy = self.users.policy(peer.uid).await;
        if token.is_none() {
            // A tenant may be made: not while the scheduling thread waits for the driver, or the table would be held meanwhile.
            self.scheduler.ask(Command::Nothing).await?;
        }
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
                    life,
                    ..
                } = ended.ok_or_else(|| table.refusal(token, peer, &policy.user))?;
                let owner = Owner {
                    name: table.free_name(uid, &name),
                    uid,
                    policy: self.users.known(uid),
                };
                let confined = (None, devices);
                let id = self.make(&mut table, owner, spec, token, confined).await?;
                if let Some(tenant) = table.tenants.get_mut(&id) {
                    (tenant.named, tenant.placement, tenant.group) = (named, placement, group);
                    tenant.life = life.again();
                }
                self.started(&table, id);
                self.sit_again(&mut table, id).await?;
                id
            }
            (None, None) => {
                let program = peer.process.map(ProcessId::program).unwrap_or_default();
                let owner = Owner {
                    name: table.free_name(peer.uid, &format!("{program}-{}", peer.pid)),
                    uid: peer.uid,
                    policy: Arc::clone(&policy),
                };
                let spec = policy.least_spec();
                let free = (peer.process, Vec::new());
                let id = self.make(&mut table, owner, spec, secret(), free).await?;
                if let Some(tenant) = table.tenants.get_mut(&id) {
                    tenant.life = Life::new(Some(program), None, peer.process);
                }
                self.started(&table, id);
                id
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
    pub(crate) async fn intruded(&self, id: TenantId, pid: u32) -> Option<UnauthorizedClient> {
        let (uid, own) = {
            let table = self.table.lock().await;
            let tenant = table.tenants.get(&id)?;
            let own = tenant
                .membership
                .as_ref()
                .map(|membership| membership.name());
            (tenant.uid, own)
        };
        self.groups.intruded(uid, own.as_deref(), pid).await
    }

    /// The driver does not let gpumux control a process of the tenant.
    pub(crate) async fn uncontrolled(&self, id: TenantId, why: String) {
        if let Some(tenant) = self.table.lock().await.tenants.get_mut(&id) {
            tenant.uncontrolled = Some(why);
        }
    }

    /// Whether a process may be in a group: the tenant that its secret names is of it, or, if it has none that is known, that of
    /// the nearest in its `line` of itself and its parents that is a tenant's. A program may have overwritten its secret.
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

    /// A process leaves the tenant of this secret for another one, before that is admitted: what it held is free.
    async fn depart(&self, peer: &Peer, token: &str) {
        let mut table = self.table.lock().await;
        let held = |it: &Tenant| Some((it.held_by(token, peer)?, it.id));
        let Some((holder, id)) = table.tenants.values().find_map(held) else {
            return;
        };
        if let Some(tenant) = table.tenants.get_mut(&id) {
            tenant.life.replaced = true;
        }
        self.release_in(&mut table, id, holder).await;
    }

    async fn release(&self, id: TenantId, holder: Holder) {
        let mut table = self.table.lock().await;
        self.release_in(&mut table, id, holder).await;
    }

    async fn release_in(&self, table: &mut Table, id: TenantId, holder: Holder) {
        let Some(tenant) = table.tenants.get_mut(&id) else {
            return;
        };
        tenant.holders.remove(&holder);
        if tenant.holders.is_empty() && !tenant.kept {
            tenant.membership = None;
            let ended = tenant.clone();
            self.remove(table, id).await;
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
            let end = tenant.end();
            tracing::info!(tenant = tenant.name, reason = end.reason, "tenant ended");
            let whose = (tenant.name.as_str(), tenant.uid);
            (self.events).push(EventKind::Ended, Some(whose), end.reason.clone());
            table.ends.push_back(end);
            let surplus = table.ends.len().saturating_sub(MAX_ENDED);
            table.ends.drain(..surplus);
        }
        if table.tenants.is_empty() {
            table.empty_since = Some(Instant::now());
        }
        // A scheduler that has ended has forgotten all tenants. One that waits for the driver does so later, before what it is sent after
        // this.
        let _ = (self.scheduler).send(|answer| Command::Forget(id, answer));
    }

    /// Changes a tenant's spec; one that does not fit changes nothing.
    pub(crate) async fn change(
        &self,
        uid: u32,
        name: &str,
        change: &SpecChange,
    ) -> Result<(), TenantError> {
        let owner = self.owner_of(uid, name).await?;
        let policy = self.users.policy(owner).await;
        let alone = self.changing.lock().await;
        let table = self.table.lock().await;
        let tenant = table.owned(uid, name)?;
        let set = (tenant.named && !tenant.kept).then(|| (tenant.uid, tenant.name.clone()));
        let (id, spec) = (tenant.id, change.apply(&tenant.spec));
        let change_spec = |answer| Command::Change {
            tenant: id,
            policy,
            spec: spec.clone(),
            // What root grants one of its users is root's business.
            by_root: uid == 0,
            answer,
        };
        // It is sent before the tenant can end.
        let answered = self.scheduler.send(change_spec)?;
        drop(table);
        answered.await.map_err(|_| Stopped)??;
        let mut table = self.table.lock().await;
        if let Some(tenant) = table.tenants.get_mut(&id) {
            let whose = (tenant.name.as_str(), tenant.uid);
            let text = change.to_string();
            self.events.push(EventKind::Resized, Some(whose), text);
            tenant.spec = spec;
        }
        if let Some((uid, name)) = set {
            table.settings.set(uid, &name, change);
            self.settings.changed();
        }
        let saved = table.save(&self.files);
        drop((table, alone));
        let kept = self.save_settings().await;
        kept.and(saved)
            .map_err(|error| TenantError::NotKept(error.to_string()))
    }

    /// Writes what was set for names, if that is not written yet.
    async fn save_settings(&self) -> Result<(), TenantError> {
        let take = async { self.table.lock().await.settings.saved() };
        let kept = self.settings.write(take).await;
        kept.map_err(|error| TenantError::Save(self.files.settings.clone(), error))
    }

    async fn owner_of(&self, uid: u32, name: &str) -> Result<u32, TenantError> {
        let table = self.table.lock().await;
        Ok(table.owned(uid, name)?.uid)
    }

    /// Forgets what this user set for a name, or, by root, another user for `user/name`. A tenant that has it keeps what it has.
    pub(crate) async fn forget(&self, uid: u32, name: &str) -> Result<(), TenantError> {
        let (uid, name) = match name.split_once('/') {
            Some((user, own)) if uid == 0 => (uid_of(user), own),
            _ => (Some(uid), name),
        };
        let mut table = self.table.lock().await;
        if !uid.is_some_and(|uid| table.settings.forget(uid, name)) {
            return Err(TenantError::NothingSet(name.into()));
        }
        drop(table);
        self.settings.changed();
        self.save_settings().await
    }

    /// What a user (root: any user) has set for names.
    pub(crate) async fn settings(&self, uid: u32) -> Vec<Setting> {
        self.table.lock().await.settings.of(uid)
    }

    /// How the last tenants ended, the latest last.
    pub(crate) async fn ends(&self) -> Vec<Ended> {
        self.table.lock().await.ends.iter().cloned().collect()
    }

    /// Sends a signal to a tenant's program, or, if that has ended, to its connected processes; one that no process can pass on, and SIGCONT,
    /// to all of them. Returns how many processes were sent it.
    pub(crate) async fn signal(
        &self,
        uid: u32,
        name: &str,
        signal: i32,
    ) -> Result<usize, TenantError> {
        let known = Signal::from_named_raw(signal).ok_or(TenantError::BadSignal(signal))?;
        let mut table = self.table.lock().await;
        let tenant = table.owned(uid, name)?;
        let (id, main) = (tenant.id, tenant.life.main);
        let mut targets: Vec<ProcessId> = tenant.holders.values().copied().flatten().collect();
        targets.sort_unstable_by_key(|process| (process.pid, process.start));
        targets.dedup();
        let for_all = [Signal::KILL, Signal::STOP, Signal::CONT].contains(&known);
        if let Some(main) = main.filter(|it| !for_all && targets.contains(it)) {
            targets = vec![main];
        }
        // A process may have become another user's since it began: the daemon's right to signal is not its owner's.
        let may = |process: &ProcessId| uid == 0 || process.is_of(uid);
        let sent = targets.into_iter().filter(may).filter(|process| {
            let watch = process.watch();
            watch.is_some_and(|process| process.try_signal(known).is_ok())
        });
        match sent.count() {
            0 => Err(TenantError::NoProcess(name.into())),
            count => {
                if let Some(tenant) = table.tenants.get_mut(&id) {
                    tenant.life.signalled(signal);
                }
                Ok(count)
            }
        }
    }

    /// The program of a tenant ended so, as its parent reports.
    pub(crate) async fn report_exit(
        &self,
        uid: u32,
        name: &str,
        exit: Exit,
    ) -> Result<Reported, TenantError> {
        let mut table = self.table.lock().await;
        let id = table.owned(uid, name)?.id;
        let tenant = table.tenants.get_mut(&id);
        let life = &mut tenant
            .ok_or_else(|| TenantError::Unknown(name.into()))?
            .life;
        life.exit = Some(exit);
        Ok(life.report())
    }

    /// So much of the output of a tenant's program could not be written, as its parent reports.
    pub(crate) async fn report_lost_output(
        &self,
        uid: u32,
        name: &str,
        lost: LostOutput,
    ) -> Result<(), TenantError> {
        let mut table = self.table.lock().await;
        let id = table.owned(uid, name)?.id;
        if let Some(tenant) = table.tenants.get_mut(&id) {
            tenant.life.lost(lost);
        }
        Ok(())
    }

    async fn exited(&self, id: TenantId, exit: Exit) {
        if let Some(tenant) = self.table.lock().await.tenants.get_mut(&id) {
            // What a parent has reported is of the program, this of the parent.
            tenant.life.exit.get_or_insert(exit);
        }
    }

    async fn is_main(&self, id: TenantId, holder: Holder) -> bool {
        let table = self.table.lock().await;
        let tenant = table.tenants.get(&id);
        tenant.is_some_and(|it| {
            it.life.main.is_some() && it.holders.get(&holder) == Some(&it.life.main)
        })
    }

    fn started(&self, table: &Table, id: TenantId) {
        if let Some(tenant) = table.tenants.get(&id) {
            let text = format!("class {}: {}", tenant.spec.class, tenant.life.command);
            let whose = (tenant.name.as_str(), tenant.uid);
            self.events.push(EventKind::Started, Some(whose), text);
        }
    }

    /// Something has happened to a tenant.
    pub(super) async fn happened(&self, happening: Happening) {
        let mut table = self.table.lock().await;
        let id = match happening {
            Happening::Moved { tenant, .. }
            | Happening::AtLimit { tenant, .. }
            | Happening::Tampered { tenant, .. } => tenant,
        };
        let Some(tenant) = table.tenants.get_mut(&id) else {
            return;
        };
        let (kind, text) = match happening {
            Happening::Moved {
                out, bytes, took, ..
            } => {
                let (kind, to) = match out {
                    true => (EventKind::Swapped, "to the host"),
                    false => (EventKind::Returned, "back to the GPU"),
                };
                let took = Time(Duration::from_micros(took.0));
                (kind, format!("{} moved {to} in {took}", Size(bytes)))
            }
            Happening::AtLimit { limit, .. } => {
                // A program that asks again and again is reported once.
                if tenant.life.limited.replace(limit) == Some(limit) {
                    return;
                }
                (
                    EventKind::Limit,
                    format!("reached its memory limit of {}", Size(limit)),
                )
            }
            Happening::Tampered {
                pid, what, then, ..
            } => {
                let then = match then {
                    None | Some(Then::Report) => "",
                    Some(Then::Lower) => {
                        "; the tenant is class batch without a compute guarantee until root changes its settings"
                    }
                    Some(Then::End) => {
                        if let Some(process) = tenant.process(pid) {
                            process.kill();
                        }
                        "; the process was ended"
                    }
                };
                let text = format!("process {pid} {}{then}", what.deed());
                (EventKind::Tampered, text)
            }
        };
        let whose = (tenant.name.as_str(), tenant.uid);
        self.events.push(kind, Some(whose), text);
    }

    /// The tenant of this name, if this user may say that its work is coming.
    pub(crate) async fn hintable(&self, uid: u32, name: &str) -> Result<TenantId, TenantError> {
        let table = self.table.lock().await;
        let tenant = table.owned(uid, name)?;
        match (tenant.spec.hints, tenant.spec.class) {
            (Hints::Off, _) => Err(TenantError::HintsOff(name.into())),
            (Hints::Auto | Hints::Manual, Class::Latency) => Ok(tenant.id),
            (_, class) => Err(TenantError::NoHints(name.into(), class)),
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

    /// What tenants are called, those that ended lately too: `user/name` where several users have one of the name.
    pub(crate) async fn names(&self) -> BTreeMap<TenantId, String> {
        let table = self.table.lock().await;
        let mut users: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
        let all = || table.ended.iter().chain(table.tenants.values());
        for tenant in all() {
            users.entry(&tenant.name).or_default().insert(tenant.uid);
        }
        let called = |tenant: &Tenant| match users.get(tenant.name.as_str()) {
            Some(users) if users.len() > 1 => tenant.full_name(),
            _ => tenant.name.clone(),
        };
        all().map(|tenant| (tenant.id, called(tenant))).collect()
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
        self.programs.save_or_warn().await;
        self.table.lock().await.closed = true;
    }
}

/// Whether what was set for a name may be why a tenant is refused.
fn may_refuse(set: &Option<SpecChange>) -> bool {
    let concerns = |set: &SpecChange| {
        let shares = [set.guaranteed, set.limit, set.weight];
        set.class.is_some()
            || shares.iter().any(Option::is_some)
            || set.memory_guaranteed.is_some()
            || set.memory_limit.is_some()
    };
    set.as_ref().is_some_and(concerns)
}

impl Table {
    /// Those in a group.
    fn members(&self, key: &Key) -> impl Iterator<Item = &Tenant> {
        let all = self.tenants.values();
        all.filter(move |it| it.membership.is_some() && it.group.as_ref() == Some(key))
    }

    /// What is known of the group that a new tenant may enter.
    fn room<'a>(&'a self, wish: &Wish<'_>, unavailable: Option<&'a str>) -> Room<'a> {
        Room {
            members: (wish.key.iter())
                .flat_map(|key| self.members(key))
                .collect(),
            unavailable,
            faults: self.faults.of(wish.crash_count().as_ref()),
        }
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

    fn of_user(&self, uid: u32, name: &str) -> Option<&Tenant> {
        let mut all = self.tenants.values();
        all.find(|tenant| tenant.uid == uid && tenant.name == name)
    }

    fn owned(&self, uid: u32, name: &str) -> Result<&Tenant, TenantError> {
        let tenant = find(self.tenants.values(), Some(uid), name)?;
        match uid == 0 || uid == tenant.uid {
            true => Ok(tenant),
            false => Err(TenantError::NotYours(name.into())),
        }
    }

    /// What was set for the name of a new tenant before, and what it is to have with that and with what is declared for it.
    fn wish(
        &self,
        uid: u32,
        declared: &SpecChange,
        new: &NewTenant,
    ) -> (Option<SpecChange>, TenantSpec) {
        let named = new.name.as_deref().filter(|_| !new.kept);
        let set = named
            .and_then(|name| self.settings.find(uid, name))
            .cloned();
        let spec = declared.apply(&TenantSpec::default());
        let spec = set.clone().unwrap_or_default().apply(&spec);
        (set, new.spec.apply(&spec))
    }

    /// A name that no tenant of the user has, as close to the wish as possible.
    fn free_name(&self, uid: u32, wish: &str) -> String {
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
            .find(|name| self.of_user(uid, name).is_none())
            .unwrap_or(base)
    }

    fn save(&self, files: &Files) -> Result<(), TenantError> {
        match self.closed {
            true => Ok(()),
            false => persistence::save(files, self.tenants.values()),
        }
    }

    /// Why a process with this secret joins no tenant.
    fn refusal(&self, token: &str, peer: &Peer, user: &str) -> TenantError {
        let mut all = self.tenants.values().chain(&self.ended);
        let of_another = all.find(|tenant| tenant.token == token);
        of_another.map_or(TenantError::UnknownToken, |it| it.refuses(peer, user))
    }

    /// Whether a new tenant may have this name.
    fn check_name(&self, uid: u32, name: Option<&str>) -> Result<(), TenantError> {
        match name {
            Some(name) if !is_name(name) => Err(TenantError::BadName(name.into())),
            Some(name) if self.of_user(uid, name).is_some() => Err(TenantError::Taken(name.into())),
            _ => Ok(()),
        }
    }

    /// Whether a new tenant may bring its token.
    fn check_token(&self, new: &NewTenant) -> Result<(), TenantError> {
        let Some(token) = &new.token else {
            return Ok(());
        };
        let is_new = || self.tenants.values().all(|it| it.token != *token);
        match is_secret(token) && is_new() {
            true => Ok(()),
            false => Err(TenantError::BadToken),
        }
    }

    /// Whether this user may have one tenant more.
    fn check_room(&self, uid: u32, policy: &UserPolicy) -> Result<(), TenantError> {
        let own = self.tenants.values().filter(|it| it.uid == uid).count();
        if own >= policy.max_tenants {
            let user = policy.user.clone();
            return Err(TenantError::TooMany(user, own, policy.max_tenants));
        }
        match self.tenants.len() {
            all if all >= MAX_TENANTS => Err(TenantError::Full(all)),
            _ => Ok(()),
        }
    }

    fn save_or_warn(&self, files: &Files) {
        if let Err(error) = self.save(files) {
            tracing::warn!(%error, "a restarted daemon will not know all tenants");
        }
    }
}

#[cfg(test)]
mod tests;
