//! Groups: tenants of one user and one trust domain that share devices in space.
//!
//! Every group has an MPS control daemon of its own, with folders of its own that only its user can enter; it runs as that
//! user. It has nothing to do with an MPS that an administrator runs, and the device's compute mode stays what it is. A
//! group begins with the first tenant that takes a [`Seat`] in it and ends a while after the last one left.
//!
//! The control daemon outlives this daemon, as its tenants do: the next daemon finds it in its file.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde::{Deserialize, Serialize};
use tokio::{io::AsyncWriteExt, process::Command, runtime::Handle, sync::mpsc::UnboundedSender};

use crate::{
    config::Config,
    peer::ProcessId,
    scheduler::Crash,
    store::{self, Sync},
};

/// NVIDIA's control program.
const CONTROL: &str = "nvidia-cuda-mps-control";
/// Where it is, if not on PATH.
const PLACES: [&str; 2] = ["/usr/bin", "/usr/local/nvidia/bin"];
/// How long a control daemon may take until it answers.
const START: Duration = Duration::from_secs(4);
/// How long it may take for an answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long it may take to end, before it is killed.
const END: Duration = Duration::from_millis(500);
/// How long a group without tenants is kept: starting a server takes a second.
const LINGER: Duration = Duration::from_secs(10);
/// How often a control daemon is looked at.
const WATCH: Duration = Duration::from_millis(25);
/// How often it is asked whether it still answers.
const PING: Duration = Duration::from_secs(3);
/// Bytes of a log that are read at most, from its end.
const MAX_LOG: usize = 64 * 1024;
/// Starts that may fail, and the time between them.
const ATTEMPTS: u32 = 5;
const AGAIN: Duration = Duration::from_secs(1);

/// Clients that one MPS server takes (48 from Volta to Hopper; NVIDIA's MPS documentation).
pub(crate) const ROOM: usize = 48;

/// Confines an MPS client to so many percent of the SMs, from its start on.
const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// Whose group it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) uid: u32,
    pub(crate) trust: String,
}

/// What can go wrong with a group.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A process in it got an error that ends its context.
    Process(Crash),
    /// Its server has ended, or hangs.
    Server(Arc<str>),
}

/// All groups.
pub(crate) struct Groups {
    dir: PathBuf,
    file: PathBuf,
    /// The control program, and why there is none.
    control: Result<Vec<OsString>, String>,
    emulated: Option<PathBuf>,
    runtime: Handle,
    table: Mutex<BTreeMap<Key, Arc<Group>>>,
    /// Who wants to know when a server is gone.
    failures: OnceLock<UnboundedSender<Failure>>,
}

struct Group {
    key: Key,
    folder: PathBuf,
    gid: u32,
    state: Mutex<State>,
    /// Held while it is started or ended.
    change: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    seats: usize,
    /// Its control daemon.
    process: Option<ProcessId>,
    /// Counts empty moments: who waits for the end of one knows whether it is still the same.
    emptied: u64,
    watched: bool,
}

/// A group in the file.
#[derive(Serialize, Deserialize)]
struct Saved {
    key: Key,
    folder: PathBuf,
    gid: u32,
    process: ProcessId,
}

/// A tenant's place in a group; given back when dropped.
pub(crate) struct Seat {
    groups: Arc<Groups>,
    group: Arc<Group>,
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seat({})", self.name())
    }
}

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GroupError {
    #[error("{0}")]
    Unavailable(String),
    #[error("cannot make {0}: {1}")]
    Folder(PathBuf, io::Error),
    #[error("cannot start {0}: {1}")]
    Start(String, io::Error),
    #[error("{0} ended at once: {1}")]
    Ended(String, String),
    #[error("{0} does not answer after {1:?}: {2}")]
    Silent(String, Duration, String),
}

impl Groups {
    /// The groups in a runtime directory, those of the last daemon that still run among them.
    pub(crate) fn load(config: &Config, dir: &Path) -> Arc<Self> {
        let groups = Arc::new(Self {
            dir: dir.join("groups"),
            file: dir.join("groups.json"),
            control: control(config),
            emulated: config.emulated.clone(),
            runtime: Handle::current(),
            table: Mutex::default(),
            failures: OnceLock::new(),
        });
        for saved in store::read::<Vec<Saved>>(&groups.file) {
            let alive = saved.process.watch().is_some();
            let group = Arc::new(Group {
                key: saved.key.clone(),
                folder: saved.folder,
                gid: saved.gid,
                state: Mutex::new(State {
                    process: alive.then_some(saved.process),
                    ..State::default()
                }),
                change: tokio::sync::Mutex::default(),
            });
            groups.table().insert(saved.key, Arc::clone(&group));
            // Ends it unless a tenant of the last daemon takes its seat again.
            groups.sit(&group);
            groups.stand(&group);
        }
        groups
    }

    /// Servers that are gone are told here; who listens restarts the group.
    pub(crate) fn tell_failures(&self, to: UnboundedSender<Failure>) {
        let _ = self.failures.set(to);
    }

    /// Why there can be no groups here, if so.
    pub(crate) fn unavailable(&self) -> Option<&str> {
        self.control.as_ref().err().map(String::as_str)
    }

    /// The group of this user, other than `own`, whose server has this process as a client.
    pub(crate) async fn intruded(&self, uid: u32, own: Option<&str>, pid: u32) -> Option<String> {
        let groups: Vec<Arc<Group>> = self.table().values().cloned().collect();
        for group in groups {
            if group.key.uid != uid || Some(&*group.name()) == own {
                continue;
            }
            let servers = self
                .ask(&group, "get_server_list")
                .await
                .unwrap_or_default();
            for server in servers.split_whitespace() {
                let clients = self.ask(&group, &format!("get_client_list {server}")).await;
                let clients = clients.unwrap_or_default();
                if clients.split_whitespace().any(|it| it.parse() == Ok(pid)) {
                    return Some(group.name());
                }
            }
        }
        None
    }

    /// Takes a seat in a group and sees to it that its server can be reached. `like` is a process of the group's user.
    ///
    /// # Errors
    /// When there can be no group.
    pub(crate) async fn enter(self: &Arc<Self>, key: &Key, like: u32) -> Result<Seat, GroupError> {
        if let Err(why) = &self.control {
            return Err(GroupError::Unavailable(why.clone()));
        }
        let group = self.find_or_make(key, like)?;
        let seat = self.seat(group);
        self.start(&seat.group).await?;
        Ok(seat)
    }

    /// Takes a seat in a group that exists, as it is.
    pub(crate) fn enter_again(self: &Arc<Self>, key: &Key) -> Option<Seat> {
        let group = self.table().get(key).cloned()?;
        self.watch(&group);
        Some(self.seat(group))
    }

    fn seat(self: &Arc<Self>, group: Arc<Group>) -> Seat {
        self.sit(&group);
        Seat {
            groups: Arc::clone(self),
            group,
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<Group>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, group: &Arc<Group>) -> bool {
        let table = self.table();
        table
            .get(&group.key)
            .is_some_and(|it| Arc::ptr_eq(it, group))
    }

    fn find_or_make(&self, key: &Key, like: u32) -> Result<Arc<Group>, GroupError> {
        let mut table = self.table();
        if let Some(group) = table.get(key) {
            return Ok(Arc::clone(group));
        }
        let cannot = |path: &Path| {
            let path = path.to_owned();
            move |error| GroupError::Folder(path, error)
        };
        // Its users pass through, and see nothing of each other.
        make(&self.dir, 0o711).map_err(cannot(&self.dir))?;
        let folder = self.dir.join(&crate::tenants::secret()[..16]);
        let gid = fs::metadata(format!("/proc/{like}")).map_or(key.uid, |of| of.gid());
        for path in [folder.clone(), folder.join("pipe"), folder.join("log")] {
            make(&path, 0o700).map_err(cannot(&path))?;
            if rustix::process::geteuid().is_root() {
                chown(&path, Some(key.uid), Some(gid)).map_err(cannot(&path))?;
            }
        }
        let group = Arc::new(Group {
            key: key.clone(),
            folder,
            gid,
            state: Mutex::default(),
            change: tokio::sync::Mutex::default(),
        });
        table.insert(key.clone(), Arc::clone(&group));
        Ok(group)
    }

    fn sit(&self, group: &Group) {
        group.state().seats += 1;
    }

    /// One seat less; with the last one the group ends, a while later.
    fn stand(self: &Arc<Self>, group: &Arc<Group>) {
        let emptied = {
            let mut state = group.state();
            state.seats -= 1;
            state.emptied += 1;
            if state.seats > 0 {
                return;
            }
            state.emptied
        };
        let (groups, group) = (Arc::clone(self), Arc::clone(group));
        self.runtime.spawn(async move {
            tokio::time::sleep(LINGER).await;
            let _alone = group.change.lock().await;
            {
                let mut table = groups.table();
                let state = group.state();
                if state.seats > 0 || state.emptied != emptied {
                    return;
                }
                table.remove(&group.key);
            }
            groups.end(&group).await;
            let _ = fs::remove_dir_all(&group.folder);
            groups.save();
            tracing::info!(group = group.name(), "group ended");
        });
    }

    /// Starts the control daemon, unless it runs.
    async fn start(self: &Arc<Self>, group: &Arc<Group>) -> Result<(), GroupError> {
        let _alone = group.change.lock().await;
        self.start_alone(group).await
    }

    async fn start_alone(self: &Arc<Self>, group: &Arc<Group>) -> Result<(), GroupError> {
        if group.process().is_some() {
            return Ok(());
        }
        let begun = Instant::now();
        // What one that was killed left would keep the next from starting.
        for left in fs::read_dir(group.folder.join("pipe"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let _ = fs::remove_file(left.path());
        }
        let mut command = self.command(group)?;
        let name = command
            .as_std()
            .get_program()
            .to_string_lossy()
            .into_owned();
        let failed = |error| GroupError::Start(name.clone(), error);
        let out = File::create(group.log("control.out")).map_err(failed)?;
        let mut child = command
            .arg("-f")
            .stdin(Stdio::null())
            .stdout(out.try_clone().map_err(failed)?)
            .stderr(out)
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let process = child.id().and_then(ProcessId::of);
        let answers = async {
            while !self.answers(group).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = answers => {}
            _ = child.wait() => return Err(GroupError::Ended(name, group.said())),
            () = tokio::time::sleep(START) => {
                let _ = child.start_kill();
                return Err(GroupError::Silent(name, START, group.said()));
            }
        }
        // It is waited for when it has ended, whenever that is.
        self.runtime.spawn(async move { child.wait().await });
        group.state().process = process;
        self.watch(group);
        self.save();
        let (pid, took) = (process.map(|it| it.pid), begun.elapsed());
        tracing::info!(group = group.name(), pid, ?took, "group");
        Ok(())
    }

    /// Ends the groups that nobody needs; the others are the next daemon's.
    pub(crate) async fn close(&self) {
        let groups: Vec<Arc<Group>> = self.table().values().cloned().collect();
        for group in groups {
            let _alone = group.change.lock().await;
            if group.state().seats == 0 {
                self.table().remove(&group.key);
                self.end(&group).await;
                let _ = fs::remove_dir_all(&group.folder);
            }
        }
        self.save();
    }

    /// The control program, in a group's folders and as its user.
    fn command(&self, group: &Group) -> Result<Command, GroupError> {
        let words = (self.control.as_ref()).map_err(|why| GroupError::Unavailable(why.clone()))?;
        let mut command = Command::new(words.first().cloned().unwrap_or_default());
        command.args(words.iter().skip(1)).current_dir("/");
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("CUDA_") || variable == "LD_PRELOAD" {
                command.env_remove(variable);
            }
        }
        command.envs(group.environment());
        if let Some(socket) = &self.emulated {
            command.env("GPUMUX_EMU_SOCKET", socket);
        }
        if rustix::process::geteuid().is_root() && group.key.uid != 0 {
            command.uid(group.key.uid).gid(group.gid);
        }
        Ok(command)
    }

    /// Whether the control daemon answers.
    async fn answers(&self, group: &Group) -> bool {
        group.folder.join("pipe/control").exists()
            && self.ask(group, "get_server_list").await.is_some()
    }

    /// What a group's server has said since the last time, and starts it anew: after a fault it would let nobody in until
    /// all clients have gone.
    pub(crate) async fn restart(self: &Arc<Self>, name: &str) -> Result<String, GroupError> {
        let group = self.table().values().find(|it| it.name() == name).cloned();
        let Some(group) = group else {
            return Ok(String::new());
        };
        let _alone = group.change.lock().await;
        let said = fs::read(group.log("server.log")).unwrap_or_default();
        self.end(&group).await;
        // Each server begins its own.
        let _ = fs::rename(group.log("server.log"), group.log("server.log.old"));
        let from = said.len().saturating_sub(MAX_LOG);
        let said = String::from_utf8_lossy(&said[from..]).into_owned();
        if group.state().seats > 0 {
            self.start_alone(&group).await?;
        }
        Ok(said)
    }

    /// The control daemon's answer to a command, if it gives one in time.
    async fn ask(&self, group: &Group, question: &str) -> Option<String> {
        let mut asked = (self.command(group).ok()?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .ok()?;
        let answer = async {
            let mut input = asked.stdin.take()?;
            let line = format!("{question}\n");
            input.write_all(line.as_bytes()).await.ok()?;
            drop(input);
            let answer = asked.wait_with_output().await.ok()?;
            let text = String::from_utf8_lossy(&answer.stdout).into_owned();
            answer.status.success().then_some(text)
        };
        tokio::time::timeout(ANSWER, answer).await.ok().flatten()
    }

    /// Ends control daemon and server, for sure.
    async fn end(&self, group: &Group) {
        let Some(process) = group.state().process.take() else {
            return;
        };
        let Some(watch) = process.watch() else {
            return;
        };
        let Some(pid) = Pid::from_raw(process.pid as i32) else {
            return;
        };
        // The driver's control daemon starts a server for its user; both would wait for clients that hang.
        let servers = tokio::time::timeout(END, self.ask(group, "get_server_list")).await;
        let servers = servers.ok().flatten().unwrap_or_default();
        for signal in [Signal::TERM, Signal::KILL] {
            let _ = kill_process_group(pid, signal);
            if tokio::time::timeout(END, watch.ended()).await.is_ok() {
                break;
            }
        }
        let _ = kill_process_group(pid, Signal::KILL);
        for server in servers
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
        {
            let is_server = |it: &ProcessId| it.program().starts_with("nvidia-cuda-mps");
            if let Some(server) = ProcessId::of(server).filter(is_server)
                && let Some(pid) = Pid::from_raw(server.pid as i32)
            {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }

    /// Sees to it that a group that somebody needs has a server that answers.
    fn watch(self: &Arc<Self>, group: &Arc<Group>) {
        if std::mem::replace(&mut group.state().watched, true) {
            return;
        }
        let (groups, group) = (Arc::clone(self), Arc::clone(group));
        self.runtime.spawn(async move {
            let (mut failed, mut answered, mut gone) = (0, Instant::now(), None);
            while failed < ATTEMPTS && groups.has(&group) {
                tokio::time::sleep(WATCH).await;
                let alone = group.change.try_lock();
                if alone.is_err() || group.state().seats == 0 {
                    continue;
                }
                if group.process().is_some() {
                    gone = None;
                    if answered.elapsed() > PING {
                        if !groups.answers(&group).await {
                            tracing::warn!(group = group.name(), "the group's server hangs");
                            groups.end(&group).await;
                        }
                        answered = Instant::now();
                    }
                    continue;
                }
                drop(alone);
                // Who is told starts it again. If not, it is done here.
                let since = *gone.get_or_insert_with(|| {
                    if let Some(to) = groups.failures.get() {
                        let _ = to.send(Failure::Server(group.name().into()));
                    }
                    Instant::now()
                });
                if since.elapsed() < AGAIN {
                    continue;
                }
                gone = Some(Instant::now());
                if let Err(error) = groups.start(&group).await {
                    tracing::warn!(group = group.name(), %error, "the group cannot be started");
                    failed += 1;
                }
            }
            group.state().watched = false;
        });
    }

    fn save(&self) {
        let groups = self.table();
        let saved: Vec<Saved> = (groups.values())
            .filter_map(|group| {
                Some(Saved {
                    key: group.key.clone(),
                    folder: group.folder.clone(),
                    gid: group.gid,
                    process: group.state().process?,
                })
            })
            .collect();
        if let Err(error) = store::write(&self.file, &saved, Sync::No) {
            tracing::warn!(%error, "a restarted daemon will not know all groups");
        }
    }
}

impl Group {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its control daemon, while it runs.
    fn process(&self) -> Option<ProcessId> {
        let mut state = self.state();
        state.process = state
            .process
            .filter(|it| it.watch().is_some_and(|it| !it.has_ended()));
        state.process
    }

    fn name(&self) -> String {
        format!("{}/{}", self.key.uid, self.key.trust)
    }

    fn log(&self, file: &str) -> PathBuf {
        self.folder.join("log").join(file)
    }

    /// The last words of the control daemon.
    fn said(&self) -> String {
        let of = |file| fs::read_to_string(self.log(file)).unwrap_or_default();
        let text = of("control.out") + &of("control.log");
        let lines: Vec<&str> = text.trim().lines().collect();
        let last = lines[lines.len().saturating_sub(3)..].join("; ");
        if last.is_empty() {
            "it said nothing".into()
        } else {
            last
        }
    }

    fn environment(&self) -> [(&'static str, PathBuf); 2] {
        [
            ("CUDA_MPS_PIPE_DIRECTORY", self.folder.join("pipe")),
            ("CUDA_MPS_LOG_DIRECTORY", self.folder.join("log")),
        ]
    }
}

impl Seat {
    /// The group's name to the scheduler: one of its own for every user and trust domain.
    pub(crate) fn name(&self) -> Arc<str> {
        self.group.name().into()
    }

    pub(crate) fn key(&self) -> &Key {
        &self.group.key
    }

    /// What a program needs to join the group, confined to so many percent of the SMs.
    pub(crate) fn environment(&self, sm_percent: Option<u32>) -> BTreeMap<String, String> {
        let paths = self.group.environment().into_iter();
        let paths = paths.map(|(name, path)| (name, path.display().to_string()));
        let percent = sm_percent.map(|percent| (PERCENTAGE, percent.to_string()));
        let all = paths.chain(percent);
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.groups.stand(&self.group);
    }
}

/// Makes a folder that nobody else has made, or that is ours already.
fn make(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// The control program: the configured one, the emulated device's, or the driver's.
fn control(config: &Config) -> Result<Vec<OsString>, String> {
    if let Some(program) = &config.mps_control {
        return match program.is_file() {
            true => Ok(vec![program.into()]),
            false => Err(format!("{} is not there", program.display())),
        };
    }
    if config.emulated.is_some() {
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        return Ok(vec![own.into(), "emu".into(), "mps".into()]);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).chain(PLACES.map(PathBuf::from));
    match places.find(|place| place.join(CONTROL).is_file()) {
        Some(place) => Ok(vec![place.join(CONTROL).into()]),
        None => Err(format!("{CONTROL} is not installed")),
    }
}
