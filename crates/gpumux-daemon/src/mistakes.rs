//! What makes a configuration unusable on this machine: it is held against the machine's users and folders.

use std::{path::Path, sync::Arc};

use gpumux_core::{
    TenantId, UserId,
    admission::{self, Request, Room},
};

use crate::{
    config::{Config, ConfigError, DeclaredTenant},
    devices::Numbers,
    tenants,
    users::{self, Users},
};

/// All that makes no sense on this machine: what [`Config::check`] finds, names that the system does not know, a folder that is not
/// there, and declared tenants that their users may not have. No daemon starts with these.
pub fn mistakes(config: &Config) -> Vec<ConfigError> {
    let mut mistakes: Vec<ConfigError> = config.check().err().into_iter().collect();
    mistakes.extend(users::unknown(config).into_iter().map(ConfigError::Unknown));
    let own = "and no client would find the daemon: choose a folder of your own";
    mistakes.extend(unusable("runtime_dir", config.runtime_dir.as_deref(), own));
    let location = config.host_memory.location.as_ref();
    if let Some(path) = location.filter(|path| !path.is_dir()) {
        mistakes.push(ConfigError::Missing {
            key: "location of [host_memory]",
            path: path.clone(),
            why: "which is no folder: make it".into(),
        });
    }
    let users = Users::new(Arc::new(config.clone()));
    mistakes.extend(config.tenants.iter().filter_map(|(name, declared)| {
        let error = refused(config, &users, name, declared)?;
        Some(ConfigError::Tenant(name.clone(), error))
    }));
    mistakes
}

/// All that the configuration names and the machine lacks now: files, a folder to write in, and devices, of which it has these, if that is
/// known. A daemon starts without them.
pub fn absences(config: &Config, devices: Option<&Numbers>) -> Vec<ConfigError> {
    let mut absent = Vec::new();
    let lost = "so that what `gpumux set` changes would be lost: make room there, or choose another folder";
    absent.extend(unusable("state_dir", config.state_dir.as_deref(), lost));
    let files = [
        ("nvml", &config.nvml),
        ("mps_control", &config.mps_control),
        ("emulated", &config.emulated),
    ];
    for (key, path) in files {
        // A bare name is looked up where the system looks for it.
        let missing = path
            .as_ref()
            .filter(|path| path.components().count() > 1 && !path.exists());
        if let Some(path) = missing.cloned() {
            absent.push(ConfigError::Missing {
                key,
                path,
                why: "which does not exist".into(),
            });
        }
    }
    let Some(known) = devices else {
        return absent;
    };
    let has = match known.is_empty() {
        true => "none".to_owned(),
        false => known.keys().cloned().collect::<Vec<_>>().join(", "),
    };
    let sections = config
        .devices
        .keys()
        .filter(|uuid| !known.contains_key(*uuid));
    absent.extend(sections.map(|uuid| ConfigError::NoDevice(uuid.clone(), has.clone())));
    for (name, declared) in &config.tenants {
        let named = declared.gpu.iter().filter(|gpu| *gpu != "all");
        let wrong = named.filter_map(|gpu| tenants::resolve(gpu, known).err());
        absent.extend(wrong.map(|error| ConfigError::Tenant(name.clone(), error.to_string())));
    }
    absent
}

/// A folder that cannot be made, or not be written: it is tried, and nothing is left of that.
fn unusable(key: &'static str, dir: Option<&Path>, way: &str) -> Option<ConfigError> {
    let dir = dir?;
    let probe = dir
        .ancestors()
        .find(|it| it.exists())?
        .join(".gpumux-probe");
    let written = std::fs::write(&probe, [0; 4096]);
    let _ = std::fs::remove_file(&probe);
    Some(ConfigError::Missing {
        key,
        path: dir.to_owned(),
        why: format!("which cannot be written ({}), {way}", written.err()?),
    })
}

/// Why a declared tenant's user could not have it although the user had no other tenants, if so.
fn refused(
    config: &Config,
    users: &Users,
    name: &str,
    declared: &DeclaredTenant,
) -> Option<String> {
    let (user, _) = name.split_once('/')?;
    let uid = users::uid_of(user)?;
    let policy = users.look(uid);
    let spec = declared.spec.apply(&policy.least_spec());
    // What makes no sense by itself was found before.
    spec.validate().ok()?;
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
    let admitted = admission::admit(&request, &policy, &config.reserve, &rooms);
    admitted.err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_that_cannot_be_written_is_found() {
        let parent = tempfile::tempdir().unwrap();
        let in_the_way = parent.path().join("file");
        std::fs::write(&in_the_way, "").unwrap();
        let found = |dir: &Path| {
            let config = Config {
                state_dir: Some(dir.to_owned()),
                runtime_dir: Some(dir.to_owned()),
                nvml: None,
                mps_control: None,
                emulated: None,
                ..Config::default()
            };
            let all = mistakes(&config).into_iter().chain(absences(&config, None));
            all.map(|it| it.to_string()).collect::<Vec<_>>()
        };
        // The last is the kernel's: root cannot make files there either.
        let below = in_the_way.join("below");
        for dir in [&in_the_way, &below, Path::new("/proc/self/task")] {
            let texts = found(dir);
            let keys = ["runtime_dir names", "state_dir names"];
            assert_eq!(texts.len(), keys.len(), "{texts:?}");
            for (text, key) in texts.iter().zip(keys) {
                assert!(
                    text.starts_with(key) && text.contains("directory"),
                    "{text}"
                );
            }
        }
        let new = parent.path().join("a/b");
        assert!(found(&new).is_empty());
        assert!(!new.exists(), "a check makes nothing");
        assert_eq!(parent.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn check_finds_what_the_machine_lacks() {
        let [here, absent] =
            ["1", "2"].map(|end| format!("GPU-5efc3a7e-70d7-750a-e943-dc5db632f58{end}"));
        let config: Config = toml::from_str(&format!(
            "nvml = '/nonexistent/nvml.so'\n\
             [devices.{here}]\n[devices.{absent}]\n\
             [host_memory]\nlocation = '/nonexistent'\n\
             [users.nosuchuser]\n\
             [defaults]\nclasses = ['batch']\nmax_guaranteed = 0.5\n\
             [tenants.'4711/web']\nguaranteed = 0.6\n\
             [tenants.night]\ngpu = ['1', 'all', '7']",
        ))
        .unwrap();
        let missing = format!("[devices.{absent}]: no such device: the machine has {here}");
        let known = Numbers::from([(here, 1)]);
        let (wrong, absent) = (mistakes(&config), absences(&config, Some(&known)));
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
            "[tenants.\"night\"]: `7` names no single device",
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.contains(expected), "{found}");
        }
        assert_eq!(mistakes(&Config::default()).len(), 0);
    }
}
