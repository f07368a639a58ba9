//! The table of all tenants that live, and of the last ones that ended: names, secrets, and room for more.

use std::{collections::BTreeMap, time::Instant};

use gpumux_core::{
    MAX_NAME, Ring, TenantId, TenantSpec, admission::UserPolicy, is_name, is_name_char,
};

use super::{
    faults::Faults,
    model::{Tenant, TenantError, find},
    persistence::{self, Files, Settings},
    placement::{Room, Wish},
};
use crate::{
    api::types::{Ended, NewTenant, SpecChange},
    groups::Key,
    peer::Peer,
    quota::kept,
    secret::is_secret,
};

/// Most tenants there may be.
const MAX_TENANTS: usize = 4096;
/// Tenants that are remembered after their end.
const MAX_ENDED: usize = 256;

#[derive(Default)]
pub(super) struct Table {
    pub(super) made: u64,
    pub(super) holders_made: u64,
    pub(super) tenants: BTreeMap<TenantId, Tenant>,
    /// The last ones that ended: a process of theirs may use a device only now, long after the one that
    /// asked for the tenant.
    pub(super) ended: Ring<Tenant, MAX_ENDED>,
    /// How the last ones ended, the latest last.
    pub(super) ends: Ring<Ended, MAX_ENDED>,
    pub(super) settings: Settings,
    /// The last processes that joined, and their tenants.
    pub(super) joined: Ring<(u32, TenantId), MAX_ENDED>,
    pub(super) faults: Faults,
    /// The daemon is leaving: what ends now must still be known to the next one.
    pub(super) closed: bool,
    /// When the last tenant ended, or the daemon began.
    pub(super) empty_since: Option<Instant>,
}

impl Table {
    /// Those in a group.
    pub(super) fn members(&self, key: &Key) -> impl Iterator<Item = &Tenant> {
        let all = self.tenants.values();
        all.filter(move |it| it.membership.is_some() && it.group.as_ref() == Some(key))
    }

    /// What is known of the group that a new tenant may enter.
    pub(super) fn room<'a>(&'a self, wish: &Wish<'_>, unavailable: Option<&'a str>) -> Room<'a> {
        Room {
            members: (wish.key.iter())
                .flat_map(|key| self.members(key))
                .collect(),
            unavailable,
            faults: self.faults.of(wish.crash_count().as_ref()),
        }
    }

    pub(super) fn next_id(&mut self) -> TenantId {
        self.made += 1;
        TenantId(self.made)
    }

    pub(super) fn insert(&mut self, tenant: Tenant) {
        tracing::info!(tenant = tenant.name, class = %tenant.spec.class, uid = tenant.uid, "tenant");
        self.empty_since = None;
        self.tenants.insert(tenant.id, tenant);
    }

    pub(super) fn of_user(&self, uid: u32, name: &str) -> Option<&Tenant> {
        let mut all = self.tenants.values();
        all.find(|tenant| tenant.uid == uid && tenant.name == name)
    }

    pub(super) fn owned(&self, uid: u32, name: &str) -> Result<&Tenant, TenantError> {
        let tenant = find(self.tenants.values(), Some(uid), name)?;
        match uid == 0 || uid == tenant.uid {
            true => Ok(tenant),
            false => Err(TenantError::NotYours(name.into())),
        }
    }

    /// What was set for the name of a new tenant before, and what it is to have with that and with what is declared for it, or for any of its user's.
    pub(super) fn wish(
        &self,
        uid: u32,
        declared: &TenantSpec,
        new: &NewTenant,
    ) -> (Option<SpecChange>, TenantSpec) {
        let named = new.name.as_deref().filter(|_| !new.kept);
        let set = named
            .and_then(|name| self.settings.find(uid, name))
            .cloned();
        let spec = set.clone().unwrap_or_default().apply(declared);
        (set, new.spec.apply(&spec))
    }

    /// A name that no tenant of the user has, as close to the wish as possible.
    pub(super) fn free_name(&self, uid: u32, wish: &str) -> String {
        let program = wish.rsplit('/').next().unwrap_or_default();
        let kept = program.chars().filter(|c| is_name_char(*c));
        let mut base: String = kept.take(MAX_NAME).collect();
        if !is_name(&base) {
            base = "tenant".into();
        }
        // Leaves room for a number.
        let short = &base[..base.len().min(MAX_NAME - 8)];
        let numbered = (2..).map(|n: usize| format!("{short}-{n}"));
        let mut names = std::iter::once(base.clone()).chain(numbered);
        names
            .find(|name| self.of_user(uid, name).is_none())
            .unwrap_or(base)
    }

    pub(super) fn save(&self, files: &Files) -> Result<(), TenantError> {
        match self.closed {
            true => Ok(()),
            false => persistence::save(files, self.tenants.values()),
        }
    }

    /// Why a process with this secret joins no tenant.
    pub(super) fn refusal(&self, token: &str, peer: &Peer, user: &str) -> TenantError {
        let mut all = self.tenants.values().chain(&self.ended);
        let of_another = all.find(|tenant| tenant.token == token);
        of_another.map_or(TenantError::UnknownToken, |it| it.refuses(peer, user))
    }

    /// Whether a new tenant may have this name.
    pub(super) fn check_name(&self, uid: u32, name: Option<&str>) -> Result<(), TenantError> {
        match name {
            Some(name) if !is_name(name) => Err(TenantError::BadName(name.into())),
            Some(name) if self.of_user(uid, name).is_some() => Err(TenantError::Taken(name.into())),
            _ => Ok(()),
        }
    }

    /// Whether a new tenant may bring its token.
    pub(super) fn check_token(&self, new: &NewTenant) -> Result<(), TenantError> {
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
    pub(super) fn check_room(&self, uid: u32, policy: &UserPolicy) -> Result<(), TenantError> {
        let own = self.tenants.values().filter(|it| it.uid == uid).count();
        if own >= policy.max_tenants {
            let user = policy.user.clone();
            return Err(TenantError::TooMany(user, own, policy.max_tenants));
        }
        let all = self.tenants.len();
        match all >= MAX_TENANTS - kept(MAX_TENANTS, uid, own) {
            true => Err(TenantError::Full(all)),
            false => Ok(()),
        }
    }

    /// Remembers a tenant that has ended, in place of the oldest of the user with most: no user's are pushed out by another's.
    pub(super) fn remember(&mut self, ended: Tenant) {
        if self.ended.len() >= MAX_ENDED {
            let count = |uid| self.ended.iter().filter(|it| it.uid == uid).count();
            let most = self.ended.iter().map(|it| it.uid);
            let most = most.max_by_key(|uid| count(*uid));
            let oldest = self.ended.iter().position(|it| Some(it.uid) == most);
            oldest.and_then(|at| self.ended.remove(at));
        }
        self.ended.push(ended);
    }

    pub(super) fn save_or_warn(&self, files: &Files) {
        if let Err(error) = self.save(files) {
            tracing::warn!(%error, "a restarted daemon will not know all tenants");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Owner;

    #[test]
    fn tenants_of_one_user_push_no_others_out() {
        let mut table = Table::default();
        let of = |uid, n: usize| {
            let owner = Owner {
                name: format!("{uid}-{n}"),
                uid,
                policy: UserPolicy::unlimited().into(),
            };
            let spec = TenantSpec::default();
            Tenant::new(TenantId(n as u64), &owner, spec, String::new(), Vec::new())
        };
        table.remember(of(1, 0));
        (0..2 * MAX_ENDED).for_each(|n| table.remember(of(2, n)));
        assert_eq!(table.ended.len(), MAX_ENDED);
        assert_eq!(table.ended.iter().filter(|it| it.uid == 1).count(), 1);
        let last = table.ended.iter().last();
        assert_eq!(last.map(|it| it.name.as_str()), Some("2-511"));
    }
}
