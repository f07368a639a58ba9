//! The files that the next daemon knows tenants from, and what was set for their names.

use std::path::PathBuf;

use gpumux_core::TenantSpec;
use serde::{Deserialize, Serialize};

use super::{
    life::Life,
    model::{Tenant, TenantError},
};
use crate::{
    api::types::{Placement, Setting, SpecChange},
    groups::Key,
    peer::ProcessId,
    scheduler::Withheld,
    store::{self, Sync},
};

/// Names of one user for which what was set is remembered.
const MAX_SETTINGS: usize = 256;

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

/// A tenant in the file.
#[derive(Serialize, Deserialize)]
pub(super) struct Saved {
    pub(super) name: String,
    pub(super) token: String,
    pub(super) spec: TenantSpec,
    pub(super) uid: u32,
    pub(super) since: u64,
    pub(super) made_for: Option<ProcessId>,
    #[serde(default)]
    pub(super) kept: bool,
    #[serde(default)]
    pub(super) named: bool,
    #[serde(default)]
    pub(super) placement: Placement,
    #[serde(default)]
    pub(super) group: Option<Key>,
    #[serde(default)]
    pub(super) utility: Vec<(u32, f64)>,
    #[serde(default)]
    pub(super) devices: Vec<String>,
    #[serde(default)]
    pub(super) life: Life,
    #[serde(default)]
    pub(super) withheld: Withheld,
    pub(super) holders: Vec<ProcessId>,
}

/// What was set for names, the latest last.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings(Vec<Setting>);

impl Settings {
    pub(super) fn load(files: &Files) -> Self {
        Self(store::read(&files.settings))
    }

    /// What was set for a user's tenants of this name.
    pub(super) fn find(&self, uid: u32, name: &str) -> Option<&SpecChange> {
        let mut all = self.0.iter();
        let found = all.find(|set| set.uid == uid && set.name == name);
        found.map(|set| &set.change)
    }

    /// Remembers a change for a user's tenants of this name, in place of the longest unchanged if there are too many.
    pub(super) fn set(&mut self, uid: u32, name: &str, change: &SpecChange) {
        let is = |set: &Setting| set.uid == uid && set.name == name;
        let old = self.0.iter().position(is);
        let old = old.map(|at| self.0.remove(at).change);
        let oldest = self.0.iter().position(|set| set.uid == uid);
        let own = self.0.iter().filter(|set| set.uid == uid).count();
        if let Some(oldest) = oldest.filter(|_| own >= MAX_SETTINGS) {
            self.0.remove(oldest);
        }
        self.0.push(Setting {
            uid,
            name: name.into(),
            change: change.after(&old.unwrap_or_default()),
        });
    }

    /// What a user (root: any user) has set, the latest last.
    pub(super) fn of(&self, uid: u32) -> Vec<Setting> {
        let all = self.0.iter();
        all.filter(|set| uid == 0 || uid == set.uid)
            .cloned()
            .collect()
    }

    /// Forgets what this user set for a name. Whether there was something.
    pub(super) fn forget(&mut self, uid: u32, name: &str) -> bool {
        let before = self.0.len();
        (self.0).retain(|set| set.name != name || uid != set.uid);
        self.0.len() < before
    }

    /// What is written of them.
    pub(super) fn saved(&self) -> Vec<Setting> {
        self.0.clone()
    }
}

/// The tenants of the last daemon.
pub(super) fn load(files: &Files) -> Vec<Saved> {
    store::read(&files.tenants)
}

/// Keeps the tenants for the next daemon.
pub(super) fn save<'a>(
    files: &Files,
    tenants: impl Iterator<Item = &'a Tenant>,
) -> Result<(), TenantError> {
    let saved: Vec<Saved> = tenants.map(Saved::from).collect();
    store::write(&files.tenants, &saved, Sync::No)
        .map_err(|error| TenantError::Save(files.tenants.clone(), error))
}

impl From<&Tenant> for Saved {
    fn from(tenant: &Tenant) -> Self {
        Self {
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
            life: tenant.life.clone(),
            withheld: tenant.withheld,
            holders: tenant.holders.values().copied().flatten().collect(),
        }
    }
}

/// For fuzzing, see [`store::read_again`].
pub(crate) fn read_state(bytes: &[u8], sealed: bool) {
    store::read_again::<Vec<Saved>>(bytes, sealed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_bounded_per_user() {
        let mut settings = Settings::default();
        settings.set(1, "other", &SpecChange::default());
        for n in 0..=MAX_SETTINGS {
            settings.set(0, &n.to_string(), &SpecChange::default());
        }
        let names: Vec<_> = settings.0.iter().map(|set| set.name.as_str()).collect();
        assert_eq!(names.len(), MAX_SETTINGS + 1);
        assert!(names.contains(&"other") && names.contains(&"1") && !names.contains(&"0"));
    }
}
