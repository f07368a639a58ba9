//! All tenants that live: their names and users, how long they live, and their specs.
//!
//! A tenant lives while it is held by the process that asked for it, or by a session. Its spec
//! is decided by the scheduler; here is only a copy to show and to keep.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use gpumux_core::{
    Class, Hints, TenantId,
    quantity::{Size, Time},
    tamper::Then,
};
use rustix::process::Signal;
use tokio::sync::{Mutex, MutexGuard};

use super::{
    faults::GroupCounts,
    model::{Holder, Tenant, TenantError, check_curve, check_fingerprint},
    persistence::Files,
    table::Table,
};
use crate::{
    api::types::{
        Ended, EventKind, Exit, Fault, LostOutput, NewCurve, Relocated, Reported, Setting,
        SpecChange,
    },
    clock::since_1970,
    config::WhenStopped,
    events::Events,
    groups::{Groups, Key, UnauthorizedClient},
    link::SessionId,
    peer::{ProcessFd, ProcessId},
    programs::Programs,
    scheduler::{Command, Handle, Happening, Stopped, View},
    store::Writer,
    users::{Users, uid_of},
};

/// All tenants.
pub(crate) struct Tenants {
    pub(super) table: Mutex<Table>,
    pub(super) scheduler: Handle,
    pub(super) files: Files,
    pub(super) session_socket: String,
    pub(super) groups: Arc<Groups>,
    pub(crate) programs: Programs,
    pub(super) settings: Writer,
    /// Held while a spec is changed: the table is not, since the scheduling thread may wait for the driver.
    pub(super) changing: Mutex<()>,
    pub(crate) events: Events,
    pub(crate) users: Arc<Users>,
}

impl Tenants {
    /// Sets a program's scaling profile.
    pub(crate) async fn teach(
        &self,
        uid: u32,
        fingerprint: &str,
        curve: &NewCurve,
    ) -> Result<(), TenantError> {
        check_fingerprint(Some(fingerprint))?;
        check_curve(&curve.curve)?;
        if curve.bandwidth.is_some_and(|it| !it.is_valid()) {
            return Err(TenantError::BadBandwidth);
        }
        let now = since_1970().as_secs();
        self.programs.teach(uid, fingerprint, curve, now);
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

    /// Lets the tenant live as long as a process.
    pub(super) fn hold(
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
        let nearest = line.iter().find_map(|process| {
            let all = table.tenants.values();
            let held: Vec<_> = all.filter(|it| it.holds(*process)).collect();
            (!held.is_empty()).then_some(held)
        });
        nearest.is_some_and(|held| held.into_iter().any(is_of))
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
        self.release_in(&mut table, id, holder).await;
    }

    pub(super) async fn release_in(&self, table: &mut Table, id: TenantId, holder: Holder) {
        let Some(tenant) = table.tenants.get_mut(&id) else {
            return;
        };
        tenant.holders.remove(&holder);
        if tenant.holders.is_empty() && !tenant.kept {
            tenant.membership = None;
            let ended = tenant.clone();
            self.remove(table, id).await;
            if ended.made_for.is_none() {
                table.remember(ended);
            }
        }
        table.save_or_warn(&self.files);
    }

    pub(super) async fn remove(&self, table: &mut Table, id: TenantId) {
        if let Some(tenant) = table.tenants.remove(&id) {
            let end = tenant.end();
            tracing::info!(tenant = tenant.name, reason = end.reason, "tenant ended");
            let whose = (tenant.name.as_str(), tenant.uid);
            (self.events).push(EventKind::Ended, Some(whose), end.reason.clone());
            table.ends.push(end);
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
        let table = self.open_table().await?;
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
        let mut table = self.open_table().await?;
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
        let mut table = self.open_table().await?;
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
        let mut table = self.open_table().await?;
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

    /// A tenant is on another device.
    pub(crate) async fn relocated(&self, id: TenantId, moved: &Relocated) {
        let table = self.table.lock().await;
        if let Some(tenant) = table.tenants.get(&id) {
            let took = Time(Duration::from_secs_f64(
                moved.out_s + moved.driver_s + moved.back_s,
            ));
            let text = format!("moved from {} to {} in {took}", moved.from, moved.to);
            let whose = (tenant.name.as_str(), tenant.uid);
            self.events.push(EventKind::Moved, Some(whose), text);
        }
    }

    /// Something has happened to a tenant.
    pub(super) async fn happened(&self, happening: Happening) {
        if let Happening::Silent { pid, .. } = happening {
            let look = tokio::task::spawn_blocking(move || ProcessId::is_stopped(pid));
            if !look.await.unwrap_or(false) {
                return;
            }
        }
        let mut table = self.table.lock().await;
        let id = match happening {
            Happening::Moved { tenant, .. }
            | Happening::AtLimit { tenant, .. }
            | Happening::Tampered { tenant, .. }
            | Happening::Silent { tenant, .. }
            | Happening::Withheld { tenant, .. } => tenant,
        };
        let Some(tenant) = table.tenants.get_mut(&id) else {
            return;
        };
        let mut to_end = None;
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
                        to_end = tenant.process(pid);
                        "; the process was ended"
                    }
                };
                let text = format!("process {pid} {}{then}", what.deed());
                (EventKind::Tampered, text)
            }
            Happening::Silent { pid, then, .. } => {
                let then = match then {
                    WhenStopped::Report => "",
                    WhenStopped::Continue => tenant.signal_stopped(pid, Signal::CONT),
                    WhenStopped::End => tenant.signal_stopped(pid, Signal::KILL),
                };
                let text = format!(
                    "process {pid} is stopped, and has memory that others are guaranteed{then}"
                );
                tracing::warn!(tenant = id.0, "{text}");
                (EventKind::Stopped, text)
            }
            Happening::Withheld { what, .. } => {
                tenant.withheld = what;
                table.save_or_warn(&self.files);
                return;
            }
        };
        let whose = (tenant.name.as_str(), tenant.uid);
        self.events.push(kind, Some(whose), text);
        // Its reason can be read by what has seen its end.
        if let Some(process) = to_end {
            process.kill();
        }
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

    /// The tenant of this name, if this user may move its memory, and its processes can. `moves` tells whether anything is to be moved,
    /// given whether the tenant's memory is on the host.
    pub(crate) async fn movable(
        &self,
        uid: u32,
        name: &str,
        moves: impl Fn(bool) -> bool,
    ) -> Result<TenantId, TenantError> {
        let table = self.table.lock().await;
        let tenant = table.owned(uid, name)?;
        let (id, pids) = (tenant.id, tenant.pids.clone());
        drop(table);
        let stopped = pids.into_iter().find(|pid| ProcessId::is_stopped(*pid));
        match stopped {
            Some(pid) if moves(self.view().await?.swapped_out.contains(&id)) => {
                Err(TenantError::StoppedProcess(name.into(), pid))
            }
            _ => Ok(id),
        }
    }

    /// Ends a tenant that has no connected process.
    pub(crate) async fn delete(&self, uid: u32, name: &str) -> Result<(), TenantError> {
        let mut table = self.open_table().await?;
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

    /// The table, unless the daemon leaves: what a request changes then, the next daemon would not know.
    pub(super) async fn open_table(&self) -> Result<MutexGuard<'_, Table>, Stopped> {
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
