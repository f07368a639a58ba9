//! What makes a configuration unusable on this machine: it is held against the machine's users and folders.

use std::sync::Arc;

use gpumux_core::{
    TenantId, TenantSpec, UserId,
    admission::{self, Request, Room},
};

use crate::{
    config::{Config, ConfigError, DeclaredTenant},
    users::{self, Users},
};

/// All that makes no sense on this machine: what [`Config::check`] finds, names that the system does not know, a folder that is not
/// there, and declared tenants that their users may not have. No daemon starts with these.
pub fn mistakes(config: &Config) -> Vec<ConfigError> {
    let mut mistakes: Vec<ConfigError> = config.check().err().into_iter().collect();
    mistakes.extend(users::unknown(config).into_iter().map(ConfigError::Unknown));
    let location = config.host_memory.location.as_ref();
    if let Some(path) = location.filter(|path| !path.is_dir()) {
        mistakes.push(ConfigError::Missing {
            key: "location of [host_memory]",
            path: path.clone(),
            why: "which is no folder: make it",
        });
    }
    let users = Users::new(Arc::new(config.clone()));
    mistakes.extend(config.tenants.iter().filter_map(|(name, declared)| {
        let error = refused(config, &users, name, declared)?;
        Some(ConfigError::Tenant(name.clone(), error))
    }));
    mistakes
}

/// Why a declared tenant's user could not have it although the user had no other tenants, if so.
fn refused(
    config: &Config,
    users: &Users,
    name: &str,
    declared: &DeclaredTenant,
) -> Option<String> {
    let spec = declared.spec.apply(&TenantSpec::default());
    // What makes no sense by itself was found before.
    spec.validate().ok()?;
    let (user, _) = name.split_once('/')?;
    let uid = users::uid_of(user)?;
    let request = Request {
        tenant: TenantId(0),
        user: UserId(uid),
        spec: &spec,
        before: None,
    };
    let rooms = [Room {
        device: "a device".into(),
        ..Room::default()
    }];
    let admitted = admission::admit(&request, &users.look(uid), &config.reserve, &rooms);
    admitted.err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_finds_what_the_machine_lacks() {
        let [here, absent] =
            ["1", "2"].map(|end| format!("GPU-5efc3a7e-70d7-750a-e943-dc5db632f58{end}"));
        let config: Config = toml::from_str(&format!(
            "nvml = '/nonexistent/nvml.so'\n\
             [devices.{here}]\n[devices.{absent}]\n\
             [host_memory]\nlocation = '/nonexistent'\n\
             [users.nosuchuser]\n\
             [defaults]\nmax_guaranteed = 0.5\n\
             [tenants.'4711/web']\nguaranteed = 0.6",
        ))
        .unwrap();
        let missing = format!("[devices.{absent}]: no such device: the machine has {here}");
        let known = [here];
        let (wrong, absent) = (mistakes(&config), config.absences(Some(&known)));
        let found: Vec<String> = wrong
            .iter()
            .chain(&absent)
            .map(ToString::to_string)
            .collect();
        let expected = [
            "no user `nosuchuser`",
            "location of [host_memory] names /nonexistent",
            "4711 may be guaranteed at most 50%",
            "nvml names /nonexistent/nvml.so",
            &missing,
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.contains(expected), "{found}");
        }
        assert_eq!(mistakes(&Config::default()).len(), 0);
    }
}
