//! The configuration file, and what it defaults to.

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, ToSocketAddrs},
    path::{Path, PathBuf},
    time::Duration,
};

use gpumux_core::{
    Kind, MAX_NAME, TenantSpec,
    admission::{Reserve, UserRules},
    is_name, policy, quantity,
    runlist::Mechanism,
    tamper::TamperRule,
};
use serde::{Deserialize, Serialize};

use crate::api::types::SpecChange;

/// All that can be set. Every key may be left out; unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where the sockets are. Unset: `GPUMUX_RUNTIME_DIR`, else `/run/gpumux` for root, else `$XDG_RUNTIME_DIR/gpumux`, else `/tmp/gpumux-UID`.
    pub runtime_dir: Option<PathBuf>,
    /// Folder of `settings.json`, which has what `gpumux set` remembers, and of `programs.json`, which has scaling profiles. Unset:
    /// `GPUMUX_STATE_DIR`, else the runtime directory.
    pub state_dir: Option<PathBuf>,
    /// The policy of devices that have none of their own: `priority`, `max-min` or `weighted`.
    pub policy: String,
    /// How programs are scheduled: by the driver's `controls`, at their `launches`, or `auto`: at launches where the driver or a
    /// sandbox refuses the controls.
    pub mechanism: Mechanism,
    /// Settings of single devices, by UUID.
    pub devices: BTreeMap<String, DeviceConfig>,
    /// What an ordinary user may have, unless a section of its Unix groups or its own says otherwise.
    pub defaults: UserRules,
    /// What the members of a Unix group may have, by the group's name. Of several groups of a user, what allows most.
    pub unix_groups: BTreeMap<String, UserRules>,
    /// What a user may have, by name or number. It comes before what its groups may have.
    pub users: BTreeMap<String, UserRules>,
    /// What of each device is kept for root.
    pub reserve: Reserve,
    /// What follows when processes undo controls: thaw themselves, or set their timeslices.
    pub tampering: TamperRule,
    /// What tenants get when they start, by `user/name`, or by `name` for whichever user starts one of this name.
    pub tenants: BTreeMap<String, DeclaredTenant>,
    /// The host's memory that moved memory may take.
    pub host_memory: HostMemory,
    /// What is done about a process that is stopped (SIGSTOP, a debugger) while its tenant has memory above its guarantee that another
    /// tenant is guaranteed: `report`, `continue` (SIGCONT) or `end` (SIGKILL).
    pub when_stopped: WhenStopped,
    /// NVML's library. Unset: `GPUMUX_NVML`, else the system's.
    pub nvml: Option<PathBuf>,
    /// NVIDIA's MPS control program, which groups are made with. Unset: `GPUMUX_MPS_CONTROL`, else the system's.
    pub mps_control: Option<PathBuf>,
    /// Socket of an emulated device's server: its tenants are accepted too. Unset: `GPUMUX_EMU_SOCKET`, else none.
    pub emulated: Option<PathBuf>,
    /// TCP address where the web page, `/metrics` and the rest of the API can be read by every client that
    /// reaches it; nothing can be changed there. Unset: none.
    pub listen: Option<Listen>,
    /// Most processes that may be connected. How many of one user: `max_sessions` of `[defaults]`.
    pub max_sessions: usize,
    /// Exit after so long without a tenant: a number of seconds, or a time such as `"10min"`. Unset: never.
    #[serde(deserialize_with = "quantity::read_some_seconds")]
    pub idle_exit_s: Option<u64>,
    /// A file that gets what the planners are given and decide.
    pub record: Option<PathBuf>,
}

/// Where memory goes that is moved away from devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostMemory {
    /// Most that it may take for all tenants together, such as `"64GiB"`; what would exceed it is not moved. Unset: half
    /// of the machine's memory.
    pub limit: Option<Bytes>,
    /// Folder on a tmpfs or hugetlbfs, the same for all tenants' processes, to make files without names in. Unset: the
    /// process's own memory, on huge pages where the system allows it.
    pub location: Option<PathBuf>,
    /// Whether it is overwritten with zeros once its contents are back on the device.
    pub scrub: bool,
}

/// What is done about a stopped process that has memory which others are guaranteed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenStopped {
    /// Nothing but the report: it gives its memory when it goes on.
    #[default]
    Report,
    /// It is sent SIGCONT.
    Continue,
    /// It is ended.
    End,
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
        let bytes = quantity::parse_bytes(&text).map(Self);
        bytes.map_err(|error| error.to_string())
    }
}

/// A TCP address to listen on, as people write it: `127.0.0.1:9440` or `localhost:9440`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Listen(pub SocketAddr);

impl From<Listen> for String {
    fn from(listen: Listen) -> Self {
        listen.0.to_string()
    }
}

impl std::str::FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            format!(
                "`{text}` is not an address to listen on ({why}): use one such as localhost:9440"
            )
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
        if host.is_empty() {
            return Err(wrong("no host"));
        }
        if port.parse::<u16>().is_err() {
            return Err(wrong("no port from 0 to 65535"));
        }
        let found = text.to_socket_addrs();
        let mut found: Vec<SocketAddr> =
            found.map_err(|error| wrong(&error.to_string()))?.collect();
        // Of a name, the address that most clients try first when they are given 127.0.0.1 or a name.
        found.sort_by_key(|address| !address.is_ipv4());
        let first = found.first().ok_or_else(|| wrong("the host is unknown"))?;
        Ok(Self(*first))
    }
}

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// What a tenant gets when it starts. What `gpumux set` remembered for its name, and flags of `gpumux run`, come first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "toml::Table")]
pub struct DeclaredTenant {
    /// Any setting of the tenant, written in this table itself under its name in the API: `class`, `guaranteed`, `limit`, `weight`, `hints`, `memory_guaranteed`,
    /// `memory_limit`, `memory_policy`, `latency_objective_us`, `sleep_after_s`. Shares, memory and times may be written as `"50%"`,
    /// `"8GiB"` and `"5min"`.
    #[serde(flatten)]
    pub spec: SpecChange,
    /// Numbers or UUIDs of the devices that it may use. Unset: all.
    pub gpu: Vec<String>,
}

impl TryFrom<toml::Table> for DeclaredTenant {
    type Error = String;

    fn try_from(mut table: toml::Table) -> Result<Self, String> {
        let gpu = match table.remove("gpu") {
            Some(gpu) => gpu
                .try_into::<Vec<String>>()
                .map_err(|error| format!("gpu: {error}"))?,
            None => Vec::new(),
        };
        for (key, value) in &mut table {
            if let Some(read) = value.as_str().and_then(|text| quantity_of(key, text)) {
                *value = read.map_err(|error| format!("{key}: {error}"))?;
            }
        }
        let spec: SpecChange = table.try_into().map_err(|error| error.to_string())?;
        Ok(Self { spec, gpu })
    }
}

/// What the API's number is for a quantity as people write it; none for a key of another kind.
fn quantity_of(key: &str, text: &str) -> Option<Result<toml::Value, String>> {
    let whole = |number: u128| i64::try_from(number).map_err(|_| format!("{text} is too much"));
    let time = |unit, number: fn(Duration) -> u128| {
        let time = quantity::parse_time(text, unit).map_err(|error| error.to_string())?;
        whole(number(time))
    };
    let field = SpecChange::FIELDS.iter().find(|field| field.key == key)?;
    let number = match field.kind {
        Kind::Share => {
            let share = quantity::parse_share(text).map(toml::Value::Float);
            return Some(share.map_err(|error| error.to_string()));
        }
        Kind::Size | Kind::SizeOrNone => quantity::parse_bytes(text)
            .map_err(|error| error.to_string())
            .and_then(|bytes| whole(bytes.into())),
        Kind::SecondsOrNever => time(Duration::from_secs(1), |it| it.as_secs().into()),
        Kind::Objective => time(Duration::from_micros(1), |it| it.as_micros()),
        Kind::Name(..) | Kind::Weight => return None,
    };
    Some(number.map(toml::Value::Integer))
}

/// Settings of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceConfig {
    /// Its policy. Unset: `policy` of the file.
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
            mechanism: Mechanism::Auto,
            devices: BTreeMap::new(),
            defaults: UserRules::default(),
            unix_groups: BTreeMap::new(),
            users: BTreeMap::new(),
            reserve: Reserve::default(),
            tampering: TamperRule::default(),
            tenants: BTreeMap::new(),
            host_memory: HostMemory::default(),
            when_stopped: WhenStopped::default(),
            nvml: path("GPUMUX_NVML"),
            mps_control: path("GPUMUX_MPS_CONTROL"),
            emulated: path("GPUMUX_EMU_SOCKET"),
            listen: None,
            max_sessions: 4096,
            idle_exit_s: None,
            record: None,
        }
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {0}: {1}")]
    Read(PathBuf, io::Error),
    /// It is no such file.
    #[error("cannot read the configuration {0}: {1}")]
    Parse(PathBuf, Box<toml::de::Error>),
    /// No policy of this name.
    #[error("unknown policy `{0}`: use {list}", list = policy::NAMES.join(", "))]
    UnknownPolicy(String),
    /// A value that makes no sense.
    #[error("{section}: {key} {value} is not valid: use {instead}")]
    Value {
        /// Where it stands.
        section: String,
        /// Of which key.
        key: &'static str,
        /// What is there.
        value: String,
        /// What could be there.
        instead: &'static str,
    },
    /// A declared tenant that cannot be.
    #[error("[tenants.\"{0}\"]: {1}")]
    Tenant(String, String),
    /// A user or group that the system does not know.
    #[error("{0}: mend the name, or remove the section")]
    Unknown(String),
    /// A file or folder that is not there.
    #[error("{key} names {path}, {why}")]
    Missing {
        /// The key that names it.
        key: &'static str,
        /// What it names.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A device that the machine does not have.
    #[error("[devices.{0}]: no such device: the machine has {1}")]
    NoDevice(String, String),
    /// A section of devices whose name is none that a driver gives.
    #[error(
        "[devices.{0}]: not a device's UUID: use one as `gpumux doctor` and `nvidia-smi -L` print it, such as GPU-5efc3a7e-70d7-750a-e943-dc5db632f589"
    )]
    NotUuid(String),
    /// No program could be managed.
    #[error("max_sessions 0 is out of range: use at least 1, such as the default of 4096")]
    NoSessions,
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

    /// Whether every policy named exists, and every folder is one that all users can use.
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
        let unknown = (own.chain([&self.policy])).find(|name| policy::by_name(name).is_none());
        if let Some(unknown) = unknown {
            return Err(ConfigError::UnknownPolicy(unknown.clone()));
        }
        if let Some(wrong) = self.devices.keys().find(|uuid| !is_uuid(uuid)) {
            return Err(ConfigError::NotUuid(wrong.clone()));
        }
        if self.max_sessions == 0 {
            return Err(ConfigError::NoSessions);
        }
        self.check_users()
    }

    fn check_users(&self) -> Result<(), ConfigError> {
        let sections = |kind: &'static str, of: &BTreeMap<String, UserRules>| {
            let named = of
                .iter()
                .map(move |(name, rules)| (format!("[{kind}.{name}]"), rules.clone()));
            named.collect::<Vec<_>>()
        };
        let mut all = vec![("[defaults]".to_owned(), self.defaults.clone())];
        all.extend(sections("unix_groups", &self.unix_groups));
        all.extend(sections("users", &self.users));
        for (section, rules) in all {
            if let Some((key, value, instead)) = rules.mistake() {
                return Err(ConfigError::Value {
                    section,
                    key,
                    value,
                    instead,
                });
            }
        }
        if !(0.0..=1.0).contains(&self.reserve.guaranteed) {
            return Err(ConfigError::Value {
                section: "[reserve]".into(),
                key: "guaranteed",
                value: self.reserve.guaranteed.to_string(),
                instead: "a share such as 0.5 or \"50%\"",
            });
        }
        for (name, declared) in &self.tenants {
            if !is_name(name.rsplit('/').next().unwrap_or_default()) {
                let rule = format!(
                    "no tenant is called so: use 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`"
                );
                return Err(ConfigError::Tenant(name.clone(), rule));
            }
            let spec = declared.spec.apply(&TenantSpec::default());
            spec.validate()
                .map_err(|error| ConfigError::Tenant(name.clone(), error.to_string()))?;
        }
        Ok(())
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

/// Whether a text is a UUID as drivers write those of devices: `GPU-` or `MIG-`, and 8, 4, 4, 4 and 12 hexadecimal digits.
fn is_uuid(text: &str) -> bool {
    let digits = (text.strip_prefix("GPU-")).or_else(|| text.strip_prefix("MIG-"));
    digits.is_some_and(|digits| {
        let groups = digits.split('-');
        let is_hex = |group: &str| group.bytes().all(|it| it.is_ascii_hexdigit());
        groups.clone().all(is_hex) && groups.map(str::len).eq([8, 4, 4, 4, 12])
    })
}

#[cfg(test)]
mod tests {
    use gpumux_core::admission::UserPolicy;

    use super::*;

    /// The fields of a struct of this file: name (none: its keys stand beside the others), type, and what is said of it.
    fn fields(name: &str) -> Vec<[String; 3]> {
        let start = format!("pub struct {name} {{\n");
        let files = [
            include_str!("config.rs"),
            include_str!("../../gpumux-core/src/admission/policy.rs"),
            include_str!("../../gpumux-core/src/tamper.rs"),
        ];
        let body = files.iter().find_map(|file| file.split_once(&start));
        let body = body.unwrap().1;
        let (mut fields, mut said, mut flat) = (Vec::new(), Vec::new(), false);
        for line in body.split_once("\n}\n").unwrap().0.lines().map(str::trim) {
            if let Some(text) = line.strip_prefix("///") {
                said.push(text.trim().to_owned());
            } else if let Some(field) = line.strip_prefix("pub ") {
                let (name, kind) = field.trim_end_matches(',').split_once(": ").unwrap();
                let name = if flat { "" } else { name };
                fields.push([name.into(), kind.into(), said.join(" ")]);
                (said, flat) = (Vec::new(), false);
            }
            flat |= line == "#[serde(flatten)]";
        }
        fields
    }

    #[test]
    fn configuration_reference_is_up_to_date() {
        let none = Config {
            state_dir: None,
            nvml: None,
            mps_control: None,
            emulated: None,
            ..Config::default()
        };
        let defaults = serde_json::to_value(none).unwrap();
        let ordinary = UserPolicy::new(String::new(), false, &UserRules::default());
        let ordinary = serde_json::to_value(ordinary).unwrap();
        let kind = |kind: &str| match kind
            .strip_prefix("Option<")
            .and_then(|it| it.strip_suffix('>'))
            .unwrap_or(kind)
        {
            "PathBuf" => "path",
            "String" => "text",
            "bool" => "true or false",
            "Then" | "Mechanism" | "WhenStopped" => "text",
            "usize" | "u64" | "u32" | "f64" => "number",
            "Amount" => "size or percentage",
            "BTreeSet<Class>" | "Vec<String>" => "list of texts",
            "Listen" => "address:port",
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
            (
                "UserRules",
                "Keys of `[defaults]`, and of `[unix_groups.NAME]` and `[users.NAME]`, which default to those",
            ),
            ("Reserve", "Keys of `[reserve]`"),
            ("TamperRule", "Keys of `[tampering]`"),
            (
                "DeclaredTenant",
                "Keys of `[tenants.NAME]` and `[tenants.\"USER/NAME\"]`",
            ),
        ] {
            text +=
                &format!("\n## {title}\n| key | value | default | meaning |\n|---|---|---|---|\n");
            for [name, value, said] in fields(of) {
                let values = match of {
                    "HostMemory" => &defaults["host_memory"],
                    "Reserve" => &defaults["reserve"],
                    "TamperRule" => &defaults["tampering"],
                    "UserRules" => &ordinary,
                    "DeclaredTenant" => &serde_json::Value::Null,
                    _ => &defaults,
                };
                let unset = said.split_once(" Unset: ");
                let default = match (unset, &values[&name]) {
                    (Some((_, unset)), _) => unset.trim_end_matches('.').to_owned(),
                    (None, serde_json::Value::Null | serde_json::Value::Object(_)) => "none".into(),
                    (None, value) => format!("`{value}`"),
                };
                let said = unset.map_or(said.as_str(), |(said, _)| said);
                let (name, kind) = match name.as_str() {
                    "" => ("a setting's name".into(), "text, number, size or time"),
                    name => (format!("`{name}`"), kind(&value)),
                };
                text += &format!("| {name} | {kind} | {default} | {said} |\n");
            }
        }
        crate::generated::assert_page("configuration.md", &text);
    }

    fn load(text: &str) -> Result<Config, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Config::load(Some(file.path()))
    }

    #[test]
    fn file_changes_only_its_keys() {
        let own = "GPU-5efc3a7e-70d7-750a-e943-dc5db632f589";
        let text = format!("policy = 'max-min'\n[devices.{own}]\npolicy = 'weighted'");
        let config = load(&text).unwrap();
        assert_eq!(config.policy_of("GPU-0"), "max-min");
        assert_eq!(config.policy_of(own), "weighted");
        assert_eq!(config.max_sessions, Config::default().max_sessions);
    }

    #[test]
    fn file_quantities_read_as_on_the_command_line() {
        for (written, bytes) in [
            ("64G", 64 << 30),
            ("64Gi", 64 << 30),
            ("1GB", 1_000_000_000),
        ] {
            let config = load(&format!("[host_memory]\nlimit = '{written}'")).unwrap();
            assert_eq!(config.host_memory.limit, Some(Bytes(bytes)), "{written}");
        }
        for (written, seconds) in [("600", 600), ("'10min'", 600), ("'1h30m'", 5400)] {
            let config = load(&format!("idle_exit_s = {written}")).unwrap();
            assert_eq!(config.idle_exit_s, Some(seconds), "{written}");
        }
        let shares = "[defaults]\nmax_guaranteed = '50%'\nguarantee_expires_s = '10min'\n\
            [reserve]\nguaranteed = '5%'\n\
            [tenants.web]\nguaranteed = '30%'\nlimit = '80%'\nsleep_after_s = '5min'\nlatency_objective_us = '20ms'";
        let config = load(shares).unwrap();
        assert_eq!(config.defaults.max_guaranteed, Some(0.5));
        assert_eq!(config.defaults.guarantee_expires_s, Some(600));
        assert_eq!(config.reserve.guaranteed, 0.05);
        let web = &config.tenants["web"].spec;
        assert_eq!((web.guaranteed, web.limit), (Some(0.3), Some(0.8)));
        assert_eq!(web.sleep_after_s, Some(Some(300)));
        assert_eq!(web.latency_objective_us, Some(Some(20_000)));
        let whole = load("[users.a]\nmax_guaranteed = 1\n[reserve]\nguaranteed = 0").unwrap();
        assert_eq!(whole.users["a"].max_guaranteed, Some(1.0));
        let local: Listen = "localhost:9440".parse().unwrap();
        assert!(local.0.ip().is_loopback() && local.0.port() == 9440);
        assert_eq!(
            "[::1]:1".parse::<Listen>().unwrap().0,
            "[::1]:1".parse().unwrap()
        );
    }

    #[test]
    fn example_file_has_the_defaults() {
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
    fn declared_tenant_is_read_with_units() {
        let config = load(
            "[tenants.'alice/web']\nclass = 'latency'\nmemory_guaranteed = '8GiB'\ngpu = ['0']\n\
             [tenants.web]\nguaranteed = 0.2",
        )
        .unwrap();
        let web = &config.tenants["alice/web"];
        assert_eq!(web.spec.memory_guaranteed, Some(8 << 30));
        assert_eq!(web.gpu, ["0"]);
        assert_eq!(config.tenants["web"].spec.guaranteed, Some(0.2));
    }

    #[test]
    fn configuration_errors_name_key_and_value() {
        for (text, message) in [
            ("polcy = 'priority'", "polcy"),
            (
                "policy = 'fair'",
                "unknown policy `fair`: use priority, max-min, weighted",
            ),
            ("[devices.GPU-1]\npolicy = 'fair'", "`fair`"),
            ("[devices.0]", "[devices.0]: not a device's UUID"),
            ("[devices.GPU-1234]", "[devices.GPU-1234]: not a"),
            (
                "[devices.GPU-5efc3a7e-70d7-750a-e943-dc5db632f58g]",
                "`nvidia-smi -L`",
            ),
            (
                "[defaults]\nmax_guaranteed = 1.5",
                "[defaults]: max_guaranteed 1.5",
            ),
            ("[users.a]\nweight = 0.0", "[users.a]: weight 0"),
            ("[unix_groups.a]\nclasses = []", "at least one of latency"),
            (
                "[defaults]\nmax_memory_guaranteed = '120%'",
                "`120%` is out of range",
            ),
            ("[reserve]\nguaranteed = 2.0", "[reserve]: guaranteed 2"),
            (
                "[tenants.web]\nguaranteed = 1.5",
                "[tenants.\"web\"]: guaranteed 1.5",
            ),
            (
                "[tenants.web]\nguaranteed = '200%'",
                "guaranteed: `200%` is out of range",
            ),
            (
                "[users.a]\nmax_guaranteed = '150%'",
                "`150%` is out of range",
            ),
            ("[users.a]\nmax_guaranteed = true", "a share such as 0.5"),
            ("[reserve]\nguaranteed = 'half'", "`half` is not a share"),
            (
                "[tenants.'a b']\nclass = 'batch'",
                "[tenants.\"a b\"]: no tenant",
            ),
            ("[tenants.'alice/']\nclass = 'batch'", "letters, digits"),
            ("[tenants.web]\ncolour = 'red'", "colour"),
            (
                "[tenants.web]\nmemory_limit = 'much'",
                "`much` is not a size",
            ),
            ("[host_memory]\nlimit = 'much'", "`much` is not a size"),
            ("[host_memory]\nlimit = '64'", "give a unit, such as 64GiB"),
            ("[host_memory]\nlocation = 'here'", "`here` is not absolute"),
            ("max_sessions = 0", "max_sessions 0"),
            ("idle_exit_s = 'soon'", "`soon` is not a time"),
            ("listen = '9440'", "no port"),
            ("listen = ':9440'", "no host"),
            ("listen = 'localhost:http'", "no port from 0 to 65535"),
        ] {
            let error = load(text).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let missing = Config::load(Some(Path::new("/nonexistent.toml"))).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent.toml"));
    }
}
