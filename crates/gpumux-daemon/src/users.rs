//! Users of the machine: their names, their Unix groups, and what the configuration allows them.

use std::{
    collections::BTreeMap,
    ffi::CString,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use gpumux_core::admission::{UserPolicy, UserRules};
use nix::unistd::{Group, Uid, User, getgrouplist};

use crate::{
    api::types::NewTenant,
    config::{Config, DeclaredTenant},
};

/// How long what the system answered about a user holds: directory services may be slow.
const FRESH: Duration = Duration::from_secs(60);
/// Users that are remembered.
const MOST: usize = 1024;

/// What is known of users.
pub(crate) struct Users {
    config: Arc<Config>,
    known: Mutex<BTreeMap<u32, (Instant, Arc<UserPolicy>)>>,
}

impl Users {
    pub(crate) fn new(config: Arc<Config>) -> Arc<Self> {
        Arc::new(Self {
            config,
            known: Mutex::default(),
        })
    }

    /// What a user may have, as its name and groups are now, or were within the last minute.
    pub(crate) async fn policy(self: &Arc<Self>, uid: u32) -> Arc<UserPolicy> {
        if let Some(policy) = self.fresh(uid) {
            return policy;
        }
        let own = Arc::clone(self);
        let looked = tokio::task::spawn_blocking(move || own.look(uid)).await;
        looked.unwrap_or_else(|_| self.known(uid))
    }

    /// What a user may have as far as is known without asking the system.
    pub(crate) fn known(&self, uid: u32) -> Arc<UserPolicy> {
        let known = self.lock().get(&uid).map(|(_, policy)| Arc::clone(policy));
        known.unwrap_or_else(|| resolve(&self.config, uid, None, &[]).into())
    }

    /// What a user may have; asks the system, which may take long.
    pub(crate) fn look(&self, uid: u32) -> Arc<UserPolicy> {
        let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
        let groups = user.as_ref().map(groups_of).unwrap_or_default();
        let name = user.as_ref().map(|user| user.name.as_str());
        let policy = Arc::new(resolve(&self.config, uid, name, &groups));
        let mut known = self.lock();
        if known.len() >= MOST && !known.contains_key(&uid) {
            known.pop_first();
        }
        known.insert(uid, (Instant::now(), Arc::clone(&policy)));
        policy
    }

    /// What the configuration declares for a new tenant of a user: for `user/name` before `name`.
    pub(crate) fn declared(&self, policy: &UserPolicy, new: &NewTenant) -> DeclaredTenant {
        let Some(name) = new.name.as_ref().filter(|_| !new.kept) else {
            return DeclaredTenant::default();
        };
        let declared = |key: &str| self.config.tenants.get(key).cloned().unwrap_or_default();
        let (all, own) = (declared(name), declared(&format!("{}/{name}", policy.user)));
        DeclaredTenant {
            spec: own.spec.after(&all.spec),
            gpu: if own.gpu.is_empty() { all.gpu } else { own.gpu },
        }
    }

    fn fresh(&self, uid: u32) -> Option<Arc<UserPolicy>> {
        let known = self.lock();
        let (at, policy) = known.get(&uid)?;
        (at.elapsed() < FRESH).then(|| Arc::clone(policy))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, (Instant, Arc<UserPolicy>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The names of a user's groups.
fn groups_of(user: &User) -> Vec<String> {
    let Ok(name) = CString::new(user.name.as_str()) else {
        return Vec::new();
    };
    let gids = getgrouplist(&name, user.gid).unwrap_or_else(|_| vec![user.gid]);
    let named = |gid| Some(Group::from_gid(gid).ok().flatten()?.name);
    gids.into_iter().filter_map(named).collect()
}

/// What people call a user.
pub fn user_name(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

/// Whether a user may do what binds others.
pub(crate) fn trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::getuid().as_raw()
}

/// What the configuration allows a user of this name in these Unix groups. A section may name a user by number, too.
pub(crate) fn resolve(
    config: &Config,
    uid: u32,
    name: Option<&str>,
    groups: &[String],
) -> UserPolicy {
    let number = uid.to_string();
    let own = name.and_then(|name| config.users.get(name));
    let own = own.or_else(|| config.users.get(&number));
    let of_groups = groups
        .iter()
        .filter_map(|group| config.unix_groups.get(group));
    let privileged = trusted(uid);
    // The defaults are for ordinary users.
    let none = UserRules::default();
    let rules = match privileged {
        true => own.unwrap_or(&none).clone(),
        false => UserRules::resolve(own, of_groups, &config.defaults),
    };
    UserPolicy::new(name.map_or(number, str::to_owned), privileged, &rules)
}

/// The names in `[users]` and `[unix_groups]` that the system does not know.
pub(crate) fn unknown(config: &Config) -> Vec<String> {
    let no_user =
        |name: &&String| name.parse::<u32>().is_err() && matches!(User::from_name(name), Ok(None));
    let no_group = |name: &&String| matches!(Group::from_name(name), Ok(None));
    let owners = config.tenants.keys().filter_map(|key| key.split_once('/'));
    let owners: Vec<String> = owners.map(|(user, _)| user.to_owned()).collect();
    let users = config.users.keys().filter(no_user);
    let users = users.map(|name| format!("[users.{name}]: the system has no user `{name}`"));
    let groups = config.unix_groups.keys().filter(no_group);
    let groups =
        groups.map(|name| format!("[unix_groups.{name}]: the system has no group `{name}`"));
    let owners = owners.iter().filter(no_user);
    let owners = owners.map(|name| format!("[tenants]: the system has no user `{name}`"));
    users.chain(groups).chain(owners).collect()
}

/// The user of a declared tenant.
pub(crate) fn uid_of(name: &str) -> Option<u32> {
    let named = || Some(User::from_name(name).ok().flatten()?.uid.as_raw());
    name.parse().ok().or_else(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn user_section_comes_before_groups_before_defaults() {
        let config = config(
            "[defaults]\nmax_guaranteed = 0.1\nmax_tenants = 3\n\
             [unix_groups.ml]\nmax_guaranteed = 0.4\n\
             [unix_groups.web]\nmax_guaranteed = 0.3\nclasses = ['batch']\n\
             [users.alice]\nmax_guaranteed = 0.2\n\
             [users.4711]\nweight = 3.0",
        );
        let most = |name, groups: &[&str]| {
            let groups: Vec<String> = groups.iter().map(|it| (*it).into()).collect();
            resolve(&config, 4711, Some(name), &groups)
        };
        assert_eq!(most("bob", &[]).max_guaranteed, 0.1);
        assert_eq!(most("bob", &["ml", "web", "x"]).max_guaranteed, 0.4);
        assert_eq!(most("bob", &["web"]).classes.len(), 1);
        let alice = most("alice", &["ml"]);
        assert_eq!((alice.max_guaranteed, alice.max_tenants), (0.2, 3));
        assert_eq!((most("bob", &[]).weight, alice.weight), (3.0, 1.0));
        let root = resolve(&config, 0, Some("root"), &[]);
        assert_eq!((root.max_guaranteed, root.privileged), (1.0, true));
    }

    #[test]
    fn section_of_an_unknown_user_is_named() {
        let config =
            config("[users.nosuchuser]\n[users.root]\n[users.77]\n[unix_groups.nosuchgroup]");
        let unknown = unknown(&config);
        assert_eq!(unknown.len(), 2, "{unknown:?}");
        assert!(unknown[0].contains("`nosuchuser`") && unknown[1].contains("`nosuchgroup`"));
    }
}
