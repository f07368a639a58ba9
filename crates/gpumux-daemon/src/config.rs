//! The configuration file, and what it defaults to.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use gpumux_core::policy;
use serde::{Deserialize, Serialize};

/// All that can be set. Every key may be left out; unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where the sockets are; see [`crate::paths::runtime_dir`] for the default.
    pub runtime_dir: Option<PathBuf>,
    /// Where `settings.json` is, which says what was set for tenants' names, and `programs.json`, what is known of programs;
    /// without it, in the runtime directory (default: `GPUMUX_STATE_DIR`).
    pub state_dir: Option<PathBuf>,
    /// The policy of devices that have none of their own: `priority`, `max-min` or `weighted`.
    pub policy: String,
    /// Settings of single devices, by UUID.
    pub devices: BTreeMap<String, DeviceConfig>,
    /// The host's memory that moved memory may take.
    pub host_memory: HostMemory,
    /// NVML's library, if not the system's (default: `GPUMUX_NVML`).
    pub nvml: Option<PathBuf>,
    /// NVIDIA's MPS control program, which groups are made with, if not the system's (default:
    /// `GPUMUX_MPS_CONTROL`).
    pub mps_control: Option<PathBuf>,
    /// Socket of an emulated device's server: its tenants are accepted too (default:
    /// `GPUMUX_EMU_SOCKET`).
    pub emulated: Option<PathBuf>,
    /// TCP address where the web page, `/metrics` and the rest of the API can be read by anybody who
    /// reaches it; nothing can be changed there. Unset: none.
    pub listen: Option<SocketAddr>,
    /// Whether slices of copy-engine groups follow the class as well.
    pub copy_engines: bool,
    /// Most processes that may be connected.
    pub max_sessions: usize,
    /// Most of them of one user (root excepted).
    pub max_sessions_per_user: usize,
    /// Exit after so many seconds without a tenant. Unset: never.
    pub idle_exit_s: Option<u64>,
}

/// Where memory goes that is moved away from devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostMemory {
    /// Most that it may take for all tenants together, such as `"64GiB"`; what would exceed it is not moved. Unset: as much
    /// as the host has available.
    pub limit: Option<Bytes>,
    /// Folder on a tmpfs or hugetlbfs, the same for all tenants' processes, to make files without names in. Unset: the
    /// process's own memory, on huge pages where the system allows it.
    pub location: Option<PathBuf>,
    /// Whether it is overwritten with zeros once its contents are back on the device.
    pub scrub: bool,
}

/// A size as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub u64);

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> Self {
        bytes.0.to_string()
    }
}

impl TryFrom<String> for Bytes {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no size: use one such as \"512MiB\" or \"64GiB\"");
        gpumux_core::parse_bytes(&text).map(Self).ok_or_else(wrong)
    }
}

/// Settings of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceConfig {
    /// Its policy, if not the common one.
    pub policy: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        let path = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        Self {
            runtime_dir: None,
            state_dir: path("GPUMUX_STATE_DIR"),
            policy: policy::NAMES[0].into(),
            devices: BTreeMap::new(),
            host_memory: HostMemory::default(),
            nvml: path("GPUMUX_NVML"),
            mps_control: path("GPUMUX_MPS_CONTROL"),
            emulated: path("GPUMUX_EMU_SOCKET"),
            listen: None,
            copy_engines: false,
            max_sessions: 4096,
            max_sessions_per_user: 2048,
            idle_exit_s: None,
        }
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {0}: {1}")]
    Read(PathBuf, io::Error),
    /// The file makes no sense.
    #[error("the configuration {0} makes no sense: {1}")]
    Parse(PathBuf, Box<toml::de::Error>),
    /// No policy of this name.
    #[error("unknown policy `{0}`: use {list}", list = policy::NAMES.join(", "))]
    UnknownPolicy(String),
    /// Other processes would look elsewhere.
    #[error("the location of host memory must begin with a slash: `{0}` is not absolute")]
    RelativeLocation(PathBuf),
}

impl Config {
    /// The file at `path`, or the one of this user's daemon if it exists, or the defaults.
    ///
    /// # Errors
    /// When the file cannot be read or makes no sense.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let default = Self::default_file();
        let Some(path) = path.or(default.as_deref().filter(|file| file.exists())) else {
            return Ok(Self::default());
        };
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read(path.to_owned(), error))?;
        let config: Self = toml::from_str(&text)
            .map_err(|error| ConfigError::Parse(path.to_owned(), error.into()))?;
        config.check()?;
        Ok(config)
    }

    /// `/etc/gpumux/gpumux.toml` for root, else `$XDG_CONFIG_HOME/gpumux/gpumux.toml`.
    fn default_file() -> Option<PathBuf> {
        if rustix::process::getuid().is_root() {
            return Some("/etc/gpumux/gpumux.toml".into());
        }
        let var = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let home = || var("HOME").map(|home| home.join(".config"));
        Some(
            var("XDG_CONFIG_HOME")
                .or_else(home)?
                .join("gpumux/gpumux.toml"),
        )
    }

    /// Whether every policy named exists, and places are such for everybody.
    ///
    /// # Errors
    /// Names the first that does not.
    pub fn check(&self) -> Result<(), ConfigError> {
        if let Some(path) = self.host_memory.location.as_ref()
            && !path.is_absolute()
        {
            return Err(ConfigError::RelativeLocation(path.clone()));
        }
        let own = self
            .devices
            .values()
            .filter_map(|device| device.policy.as_ref());
        match own
            .chain([&self.policy])
            .find(|name| policy::by_name(name).is_none())
        {
            Some(unknown) => Err(ConfigError::UnknownPolicy(unknown.clone())),
            None => Ok(()),
        }
    }

    /// The policy of a device.
    pub(crate) fn policy_of(&self, uuid: &str) -> &str {
        let own = self
            .devices
            .get(uuid)
            .and_then(|device| device.policy.as_deref());
        own.unwrap_or(&self.policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of a struct of this file: name, type, and what is said of it.
    fn fields(name: &str) -> Vec<[String; 3]> {
        let start = format!("pub struct {name} {{\n");
        let body = include_str!("config.rs").split_once(&start).unwrap().1;
        let (mut fields, mut said) = (Vec::new(), Vec::new());
        for line in body.split_once("\n}\n").unwrap().0.lines().map(str::trim) {
            if let Some(text) = line.strip_prefix("///") {
                said.push(text.trim().to_owned());
            } else if let Some(field) = line.strip_prefix("pub ") {
                let (name, kind) = field.trim_end_matches(',').split_once(": ").unwrap();
                fields.push([name.into(), kind.into(), said.join(" ")]);
                said.clear();
            }
        }
        fields
    }

    #[test]
    fn the_reference_is_up_to_date() {
        let none = Config {
            state_dir: None,
            nvml: None,
            mps_control: None,
            emulated: None,
            ..Config::default()
        };
        let defaults = serde_json::to_value(none).unwrap();
        let kind = |kind: &str| match kind.trim_start_matches("Option<").trim_end_matches('>') {
            "PathBuf" => "path",
            "String" => "text",
            "bool" => "true or false",
            "usize" | "u64" => "number",
            "SocketAddr" => "address:port",
            "Bytes" => "size",
            _ => "table",
        };
        let mut text = String::from(
            "<!-- Made from the types: UPDATE_DOCS=1 cargo test -p gpumux-daemon reference -->\n\
             # Configuration\n\nThe file is `/etc/gpumux/gpumux.toml` for a machine's daemon and \
             `$XDG_CONFIG_HOME/gpumux/gpumux.toml` for a user's. Every key may be left out; unknown keys are \
             refused. Flags of `gpumux daemon` come first. `deploy/gpumux.toml` is an annotated example.\n",
        );
        for (of, title) in [
            ("Config", "Keys"),
            ("HostMemory", "Keys of `[host_memory]`"),
            ("DeviceConfig", "Keys of `[devices.UUID]`"),
        ] {
            text +=
                &format!("\n## {title}\n| key | value | default | meaning |\n|---|---|---|---|\n");
            for [name, value, said] in fields(of) {
                let values = match of {
                    "HostMemory" => &defaults["host_memory"],
                    _ => &defaults,
                };
                let default = match &values[&name] {
                    serde_json::Value::Null => "none".into(),
                    value if of != "DeviceConfig" && !value.is_object() => format!("`{value}`"),
                    _ => "none".into(),
                };
                // Links into the code lead nowhere in a book.
                let said = said.replace("[`crate::paths::runtime_dir`]", "`gpumux daemon --help`");
                text += &format!("| `{name}` | {} | {default} | {said} |\n", kind(&value));
            }
        }
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(file, &text).unwrap();
        }
        assert_eq!(
            std::fs::read_to_string(file).unwrap(),
            text,
            "run `UPDATE_DOCS=1 cargo test -p gpumux-daemon reference`"
        );
    }

    fn load(text: &str) -> Result<Config, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Config::load(Some(file.path()))
    }

    #[test]
    fn a_file_changes_what_it_names() {
        let config = load("policy = 'max-min'\n[devices.GPU-1]\npolicy = 'weighted'").unwrap();
        assert_eq!(config.policy_of("GPU-0"), "max-min");
        assert_eq!(config.policy_of("GPU-1"), "weighted");
        assert_eq!(config.max_sessions, Config::default().max_sessions);
    }

    #[test]
    fn the_example_says_what_the_defaults_are() {
        let example = include_str!("../../../deploy/gpumux.toml");
        assert_eq!(load(example).unwrap(), Config::default());
        // With its examples switched on it must still make sense.
        let is_key = |line: &str| {
            line.starts_with("# [") || (line.starts_with("# ") && line.contains(" = "))
        };
        let switched = |line: &str| match is_key(line) {
            true => line[2..].to_owned() + "\n",
            false => line.to_owned() + "\n",
        };
        let config = load(&example.lines().map(switched).collect::<String>()).unwrap();
        assert!(config.idle_exit_s.is_some() && config.nvml.is_some() && config.emulated.is_some());
    }

    #[test]
    fn mistakes_are_named() {
        for (text, message) in [
            ("polcy = 'priority'", "polcy"),
            (
                "policy = 'fair'",
                "unknown policy `fair`: use priority, max-min, weighted",
            ),
            ("[devices.GPU-1]\npolicy = 'fair'", "`fair`"),
            ("[host_memory]\nlimit = 'much'", "`much` is no size"),
            ("[host_memory]\nlocation = 'here'", "`here` is not absolute"),
        ] {
            let error = load(text).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let missing = Config::load(Some(Path::new("/nonexistent.toml"))).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent.toml"));
    }
}
