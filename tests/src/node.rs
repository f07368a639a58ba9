//! One machine in small: a runtime folder, a device and a daemon.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use gpumux_wire::socket;
use rustix::{
    fs::{FlockOperation, flock},
    net::SocketFlags,
    process::{Pid, Signal, kill_process},
};
use serde_json::{Value, json};

use crate::{
    Finished, PATIENCE, Patience, Process, binary, library, readable, real, wait_for, wait_settled,
};

/// How a node is made.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Emulated devices; 0 means one.
    pub devices: u32,
    /// Further arguments of `gpumux daemon`.
    pub daemon: Vec<String>,
    /// Profile of the emulated device, where it differs from the default.
    pub profile: &'static str,
    /// Memory of each emulated device in bytes; 0 means the profile's. Contexts are small there then.
    pub memory: u64,
    /// No daemon at first.
    pub without_daemon: bool,
}

/// A device and a daemon, with the folder they meet in.
#[derive(Debug)]
pub struct Node {
    options: Options,
    /// Variables of the daemon's environment.
    variables: Vec<(String, OsString)>,
    daemon: Option<Process>,
    // Dropped after the daemon.
    emulated: Option<Process>,
    dir: tempfile::TempDir,
    _alone: Option<MutexGuard<'static, ()>>,
}

/// Nodes on a real device take turns, because they all mean the same one.
static REAL_DEVICE: Mutex<()> = Mutex::new(());

impl Node {
    /// A node with one device and a daemon.
    #[track_caller]
    pub fn start() -> Self {
        Self::with(Options::default())
    }

    /// A node whose emulated device has so much memory.
    #[track_caller]
    pub fn with_memory(bytes: u64) -> Self {
        Self::with(Options {
            memory: bytes,
            ..Options::default()
        })
    }

    /// A node with two devices; none where the machine has fewer.
    #[track_caller]
    pub fn with_two_devices() -> Option<Self> {
        if crate::devices() < 2 {
            eprintln!("SKIPPED: it needs two devices");
            return None;
        }
        Some(Self::with(Options {
            devices: 2,
            ..Options::default()
        }))
    }

    /// A node as `options` say.
    #[track_caller]
    pub fn with(options: Options) -> Self {
        let _alone = real().then(|| REAL_DEVICE.lock().unwrap_or_else(PoisonError::into_inner));
        // Short, because the path of a socket may have 107 bytes only.
        let dir = tempfile::Builder::new()
            .prefix("gm")
            .tempdir_in("/tmp")
            .expect("a folder");
        let mut node = Self {
            options,
            variables: Vec::new(),
            daemon: None,
            emulated: None,
            dir,
            _alone,
        };
        if !real() {
            node.emulated = Some(node.start_emulated());
        }
        if !node.options.without_daemon {
            node.start_daemon();
        }
        node
    }

    fn start_emulated(&self) -> Process {
        let mut command = Command::new(binary());
        command
            .args(["emu", "serve", "--socket"])
            .arg(self.emulated_socket());
        command.args(["--devices", &self.options.devices.max(1).to_string()]);
        let mut text = self.options.profile.to_owned();
        if self.options.memory != 0 {
            let memory = self.options.memory;
            text = format!("memory = {memory}\ncontext_memory = {}\n{text}", 8 << 20);
        }
        if !text.is_empty() {
            let profile = self.dir().join("profile.toml");
            fs::write(&profile, text).expect("a profile");
            command.arg("--profile").arg(profile);
        }
        let mut process = Process::start(&mut command);
        wait_for("the emulated device", PATIENCE, || {
            assert!(process.poll().is_none(), "it ended: {}", process.err());
            socket::connect(&self.emulated_socket(), SocketFlags::empty()).ok()
        });
        process
    }

    /// Starts the daemon (again) and waits until it answers.
    #[track_caller]
    pub fn start_daemon(&mut self) {
        let mut command = match std::env::var_os("GPUMUX_TEST_UNIT") {
            Some(_) => under_unit(),
            None => Command::new(binary()),
        };
        command.arg("daemon").args(&self.options.daemon);
        self.enter(&mut command);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        let mut process = Process::start(&mut command);
        wait_for("an answer of the daemon", PATIENCE, || {
            assert!(process.poll().is_none(), "it ended: {}", process.err());
            self.try_get("/v1/tenants")
        });
        self.daemon = Some(process);
    }

    /// Adds arguments of `gpumux daemon`, for the next one.
    pub fn configure(&mut self, args: impl IntoIterator<Item = String>) {
        self.options.daemon.extend(args);
    }

    /// Sets a variable of the environment, for the next daemon and those after it.
    pub fn set_variable(&mut self, name: &str, value: impl Into<OsString>) {
        self.variables.push((name.into(), value.into()));
    }

    /// Kills the daemon as the kernel would: at once and without a word.
    #[track_caller]
    pub fn kill_daemon(&mut self) {
        self.daemon.take().expect("a daemon runs").kill();
    }

    /// Asks the daemon to end and waits for it.
    #[track_caller]
    pub fn stop_daemon(&mut self) -> Finished {
        self.end_daemon(Signal::TERM)
    }

    /// Sends the daemon a signal that ends it, and waits for that.
    #[track_caller]
    pub fn end_daemon(&mut self, signal: Signal) -> Finished {
        let daemon = self.daemon.take().expect("a daemon runs");
        daemon.signal(signal);
        daemon.finish()
    }

    /// Waits until the daemon has ended by itself.
    #[track_caller]
    pub fn await_daemons_end(&mut self) -> Finished {
        self.daemon.take().expect("a daemon runs").finish()
    }

    /// The daemon's process.
    #[track_caller]
    pub fn daemon(&self) -> &Process {
        self.daemon.as_ref().expect("a daemon runs")
    }

    /// The folder in which everything of this node lies.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The session socket.
    pub fn session_socket(&self) -> PathBuf {
        self.dir().join("session.sock")
    }

    /// The API's socket.
    pub fn api_socket(&self) -> PathBuf {
        self.dir().join("api.sock")
    }

    /// The emulated device's server.
    ///
    /// # Panics
    /// On a real device.
    pub fn emulated_pid(&self) -> u32 {
        self.emulated
            .as_ref()
            .expect("the device is emulated")
            .pid()
    }

    /// How many files the device's server holds when it opens and closes none: it closes a program's a moment after that has ended.
    ///
    /// # Panics
    /// On a real device.
    #[track_caller]
    pub fn emulated_files(&self) -> usize {
        let dir = format!("/proc/{}/fd", self.emulated_pid());
        let a_while = Duration::from_millis(100);
        wait_settled("no files come or go", PATIENCE, a_while, || {
            fs::read_dir(&dir).expect("the server runs").count()
        })
    }

    fn emulated_socket(&self) -> PathBuf {
        self.dir().join("emu.sock")
    }

    /// `gpumux ARGS…` on this node.
    pub fn gpumux<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(binary());
        command.args(args);
        self.enter(&mut command);
        command
    }

    /// `PROGRAM ARGS…` with this node's device as its GPU, but not as a tenant.
    pub fn on_device<S: AsRef<OsStr>>(&self, program: impl IntoIterator<Item = S>) -> Command {
        let mut program = program.into_iter();
        let mut command = if real() {
            Command::new(program.next().expect("a program"))
        } else {
            let mut command = Command::new(binary());
            command.args(["emu", "--"]);
            command
        };
        command.args(program);
        self.enter(&mut command);
        command
    }

    /// `gpumux run OPTIONS… -- PROGRAM…` with this node's device as its GPU. Options and program are
    /// words separated by blanks; `gpumux` as the program is the binary under test.
    pub fn tenant(&self, options: &str, program: &str) -> Command {
        let mut line = vec![binary().into_os_string(), "run".into()];
        line.extend(words(options));
        line.push("--".into());
        line.extend(words(program));
        self.on_device(line)
    }

    /// `PROGRAM…` with this node's device as its GPU and the shim preloaded, but without `gpumux run`.
    pub fn shimmed(&self, program: &str, socket: &Path) -> Command {
        let mut command = self.on_device(words(program));
        command
            .env("LD_PRELOAD", library("libgpumux.so"))
            .env("GPUMUX_SOCKET", socket);
        command
    }

    fn enter(&self, command: &mut Command) {
        command.env("GPUMUX_RUNTIME_DIR", self.dir());
        for variable in [
            "GPUMUX_SOCKET",
            "GPUMUX_TENANT",
            "GPUMUX_STRICT",
            "LD_PRELOAD",
            // With it Python writes a line in pieces, between those of other processes.
            "PYTHONUNBUFFERED",
        ] {
            command.env_remove(variable);
        }
        if !real() {
            command.env("GPUMUX_EMU_SOCKET", self.emulated_socket());
        }
    }

    /// Status and body of the daemon's answer to a request of its API; none, if it listens to none or closes without one.
    #[track_caller]
    pub fn request(&self, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
        let mut stream = UnixStream::connect(self.api_socket()).ok()?;
        let length = body.len();
        // In the older version an answer comes in one piece. What is refused early is not read to its end.
        let request = format!(
            "{method} {path} HTTP/1.0\r\nhost: gpumux\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let _ = stream.write_all(request.as_bytes());
        assert!(
            readable(&stream, 2 * PATIENCE),
            "no answer to {method} {path}"
        );
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some((status, body.to_owned()))
    }

    #[track_caller]
    fn try_get(&self, path: &str) -> Option<Value> {
        let (status, body) = self.request("GET", path, "")?;
        (status == 200).then(|| serde_json::from_str(&body).expect("JSON"))
    }

    /// The daemon's answer to a GET request of its API.
    #[track_caller]
    pub fn get(&self, path: &str) -> Value {
        wait_for("an answer of the daemon", PATIENCE, || {
            let (status, body) = self.request("GET", path, "").expect("a daemon");
            // Its scheduling thread may be late.
            assert!([200, 504].contains(&status), "{path}: {status} {body}");
            (status == 200).then(|| serde_json::from_str(&body).expect("JSON"))
        })
    }

    /// `tenants` and `faults`, as `gpumux ps --json` prints them.
    #[track_caller]
    pub fn ps(&self) -> Value {
        json!({
            "tenants": self.get("/v1/tenants"),
            "faults": self.get("/v1/status")["faults"],
        })
    }

    /// One tenant, if it is there.
    #[track_caller]
    pub fn find_tenant(&self, name: &str) -> Option<Value> {
        let tenants = self.get("/v1/tenants");
        let mut tenants = tenants.as_array().expect("a list").iter();
        tenants.find(|tenant| tenant["name"] == name).cloned()
    }

    /// Waits until this tenant is there and `accept` takes it.
    #[track_caller]
    pub fn wait_tenant(&self, name: &str, accept: impl Fn(&Value) -> bool) -> Value {
        let mut left = Patience::new(PATIENCE);
        loop {
            match self.find_tenant(name) {
                Some(tenant) if accept(&tenant) => return tenant,
                _ => assert!(
                    left.lasts(),
                    "tenant {name} never came to be as it should: {:#}",
                    self.ps()
                ),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Files that the daemon holds open, as the kernel names them.
    pub fn daemon_files(&self) -> Vec<String> {
        let dir = format!("/proc/{}/fd", self.daemon().pid());
        let links = fs::read_dir(dir).expect("the daemon runs").flatten();
        links
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .map(|link| link.to_string_lossy().into_owned())
            .collect()
    }
}

impl Node {
    /// Ends the servers of groups, which outlive a daemon that is killed, and other users of their folders.
    fn end_groups(&self) {
        let groups = self.dir().join("groups").display().to_string();
        if !Path::new(&groups).exists() {
            return;
        }
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        for process in processes {
            let environment = fs::read(process.path().join("environ")).unwrap_or_default();
            let pid = process.file_name().to_string_lossy().parse().ok();
            if String::from_utf8_lossy(&environment).contains(&groups)
                && let Some(pid) = pid.and_then(Pid::from_raw)
            {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

impl Drop for Node {
    /// Ends the daemon that a `run` has started, if one has. The lock's holder is the one whose pid is in it.
    fn drop(&mut self) {
        let daemon = self.daemon.take();
        if let Some(daemon) = daemon.as_ref().filter(|_| std::thread::panicking()) {
            eprintln!("the daemon's log:\n{}", daemon.err());
        }
        drop(daemon);
        self.end_groups();
        let path = self.dir().join("lock");
        let Ok(lock) = fs::File::open(&path) else {
            return;
        };
        let mut left = Patience::new(PATIENCE);
        while flock(&lock, FlockOperation::NonBlockingLockShared).is_err() && left.lasts() {
            let pid = fs::read_to_string(&path).unwrap_or_default();
            if let Some(pid) = pid.trim().parse().ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::TERM);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The service's unit, as it is shipped.
const UNIT: &str = include_str!("../../deploy/systemd/gpumuxd.service");

/// What the unit sets a key to; all lines of it.
///
/// # Panics
/// When it does not set it.
pub fn unit(key: &str) -> String {
    let value = |line: &'static str| line.strip_prefix(key)?.strip_prefix('=');
    let values: Vec<&str> = UNIT.lines().filter_map(value).collect();
    assert!(!values.is_empty(), "the unit has no {key}");
    values.join(" ")
}

/// `gpumux` with the umask, the capabilities and the flag of privileges that the unit gives the daemon. Needs root and `setpriv`
/// (util-linux).
fn under_unit() -> Command {
    let capabilities = unit("CapabilityBoundingSet").to_lowercase();
    let names = capabilities.split_whitespace();
    let names = names.map(|it| format!("+{}", it.strip_prefix("cap_").unwrap_or(it)));
    let set: Vec<String> = std::iter::once("-all".to_owned()).chain(names).collect();
    assert_eq!(unit("NoNewPrivileges"), "yes");
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            &format!("umask {}; exec setpriv \"$@\"", unit("UMask")),
            "sh",
        ])
        .arg(format!("--bounding-set={}", set.join(",")))
        .args(["--no-new-privs", "--"])
        .arg(binary());
    command
}

/// Words separated by blanks; `gpumux` is the binary under test.
fn words(text: &str) -> Vec<OsString> {
    let word = |word: &str| {
        if word == "gpumux" {
            binary().into()
        } else {
            word.into()
        }
    };
    text.split_whitespace().map(word).collect()
}
