//! How tenants come: made for a process that asks, joined by one that connects, or taken over from the last daemon.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use gpumux_core::{TenantId, space::Way};
use gpumux_wire::MEMORY_LIMIT_VARIABLE;
use tokio::sync::Mutex;

use super::{
    life::Life,
    model::{Holder, Tenant, TenantError, check},
    persistence::{self, Files, Saved, Settings},
    placement::{self, Wish},
    registry::Tenants,
    selection,
    table::Table,
};
use crate::{
    api::types::{Created, EventKind, NewTenant, SpecChange},
    events::Events,
    groups::{Groups, Key},
    link::SessionId,
    peer::{Peer, ProcessId},
    programs::Programs,
    scheduler::{Command, Handle, Owner, Stopped},
    secret::secret,
    store::Writer,
    users::Users,
};

/// How long the end of a tenant may take once its processes have ended: the kernel tells an exit code up to half a second later.
const RELEASES: Duration = Duration::from_secs(2);
/// A tenant that there is not.
const NO_TENANT: TenantId = TenantId(u64::MAX);

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
        let owner = Owner {
            name: table.free_name(saved.uid, &saved.name),
            uid: saved.uid,
            policy,
        };
        let (whose, given, devices) = (owner.clone(), saved.spec.clone(), saved.devices.clone());
        let admit = |answer| Command::AdmitAgain {
            tenant: id,
            owner,
            devices,
            spec: given,
            withheld: saved.withheld,
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
            since: saved.since,
            made_for: saved.made_for,
            kept: saved.kept,
            named: saved.named,
            placement: saved.placement,
            group: saved.group,
            utility: saved.utility,
            life: saved.life,
            withheld: saved.withheld,
            ..Tenant::new(id, &whose, spec, saved.token, saved.devices)
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
        check(&new, peer.uid)?;
        let policy = self.users.policy(peer.uid).await;
        let numbers = self.scheduler.ask(Command::Numbers).await?;
        let declared = self.users.declared(&policy, &new);
        let (asked, visible) = (&new.devices, new.visible.as_deref());
        // A rank finds its own among them.
        let listed = new.ranks_per_gpu > 1;
        let selection = selection::select(asked, &declared.gpu, visible, &numbers, listed)?;
        let known =
            (new.fingerprint.as_deref()).and_then(|name| self.programs.find(peer.uid, name));
        let utility = placement::utility(&new, known.as_ref());
        let declared = declared.spec.apply(&policy.least_spec());
        let (_, spec) = (self.table.lock().await).wish(peer.uid, &declared, &new);
        let wish = Wish {
            new: &new,
            key: placement::trust(&new, &policy, &spec).map(|trust| Key {
                uid: peer.uid,
                trust,
            }),
            programs: &self.programs,
            utility: &utility,
            sms: (self.scheduler)
                .ask(|answer| Command::Sms(selection.devices.clone(), answer))
                .await?,
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
            let (set, spec) = table.wish(peer.uid, &declared, &new);
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
                tenant: NO_TENANT,
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
        let (set, spec) = table.wish(peer.uid, &declared, &new);
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
        let owner = Owner {
            name: name.clone(),
            uid: peer.uid,
            policy,
        };
        let token = new.token.unwrap_or_else(secret);
        let mut environment = match &membership {
            Some(membership) => membership.environment(placement.percent_of_each(), spec.class),
            None => BTreeMap::new(),
        };
        // A container has numbers of its own.
        if !new.kept {
            environment.extend(selection.environment);
        }
        let shown = spec.clone();
        let log = new.log.map(|folder| format!("{folder}/{name}.log"));
        let tenant = Tenant {
            kept: new.kept,
            named,
            placement: placement.clone(),
            group: membership.as_ref().map(|it| it.key().clone()),
            membership: membership.map(Arc::new),
            utility: utility.0,
            life: Life::new(new.command, log, peer.process),
            ..Tenant::new(
                table.next_id(),
                &owner,
                spec,
                token.clone(),
                selection.devices,
            )
        };
        let made = self.make(&mut table, owner, tenant).await;
        let id = made.map_err(|error| match error {
            TenantError::Refused(error) if may_refuse(&set) => {
                TenantError::Set(name.clone(), error)
            }
            error => error,
        })?;
        if let Some(bytes) = shown.memory_limit {
            environment.insert(MEMORY_LIMIT_VARIABLE.into(), bytes.to_string());
        }
        if !new.kept {
            self.hold(&mut table, id, peer.process, fd);
        }
        // From here on the program may rely on it, whatever happens to this daemon. Without room on the disk it lasts as long as
        // this daemon: one user who fills the disk must not keep others from starting.
        table.save_or_warn(&self.files);
        Ok(Created {
            name,
            token,
            socket: self.session_socket.clone(),
            environment,
            placement,
            spec: Some(shown),
            remembered: set,
        })
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
                let ended = table.ended.iter().position(may);
                let found = ended.and_then(|n| table.ended.get(n)).cloned();
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
                } = found.ok_or_else(|| table.refusal(token, peer, &policy.user))?;
                let owner = Owner {
                    name: table.free_name(uid, &name),
                    uid,
                    policy: self.users.known(uid),
                };
                let tenant = Tenant {
                    named,
                    placement,
                    group,
                    life: life.again(),
                    ..Tenant::new(table.next_id(), &owner, spec, token, devices)
                };
                // Refused, it may come again: another may have let go by then.
                let id = self.make(&mut table, owner, tenant).await?;
                ended.and_then(|n| table.ended.remove(n));
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
                let tenant = Tenant {
                    made_for: peer.process,
                    life: Life::new(Some(program), None, peer.process),
                    ..Tenant::new(table.next_id(), &owner, spec, secret(), Vec::new())
                };
                self.make(&mut table, owner, tenant).await?
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
        table.joined.push((peer.pid, id));
        table.save_or_warn(&self.files);
        Ok((id, name))
    }

    /// The living tenant of a process that has no session.
    pub(crate) async fn find(&self, peer: &Peer, token: &str) -> Result<TenantId, TenantError> {
        let table = self.open_table().await?;
        let known = (table.tenants.values()).find(|tenant| tenant.may_join(token, peer));
        known.map(|it| it.id).ok_or_else(|| {
            let user = &self.users.known(peer.uid).user;
            table.refusal(token, peer, user)
        })
    }

    /// Has the scheduler admit a tenant that no process holds yet, and the table keep it.
    async fn make(
        &self,
        table: &mut Table,
        owner: Owner,
        tenant: Tenant,
    ) -> Result<TenantId, TenantError> {
        table.check_room(owner.uid, &owner.policy)?;
        let (id, devices, spec) = (tenant.id, tenant.devices.clone(), tenant.spec.clone());
        let admit = |answer| Command::Admit {
            tenant: id,
            owner,
            devices,
            spec,
            answer,
        };
        self.scheduler.ask(admit).await??;
        if let Some(membership) = &tenant.membership {
            let name = membership.name();
            (self.scheduler)
                .ask(|answer| Command::Place(id, name, answer))
                .await?;
        }
        let text = format!("class {}: {}", tenant.spec.class, tenant.life.command);
        let whose = (tenant.name.as_str(), tenant.uid);
        self.events.push(EventKind::Started, Some(whose), text);
        table.insert(tenant);
        Ok(id)
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
