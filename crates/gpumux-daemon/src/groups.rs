//! Groups: tenants of one user and one trust domain that share devices in space.
//!
//! Every group has an MPS control daemon of its own, with folders of its own that only its user can enter ([`folder`]); it runs
//! as that user. It has nothing to do with an MPS that an administrator runs, and the device's compute mode stays what it is. A
//! group begins with the first tenant that takes a [`Membership`] in it and ends a while after the last one left.
//!
//! The control daemon outlives this daemon, as its tenants do: the next daemon finds it in its file.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs::{self, DirBuilder},
    io, mem,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use gpumux_core::Class;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::Command,
    runtime::Handle,
    sync::mpsc::UnboundedSender,
};

use crate::{
    config::Config,
    examine::Examiner,
    failure::Failure,
    paths::MPS_VARIABLES,
    peer::ProcessId,
    secret::secret,
    store::{self, Sync},
};

mod clients;
mod entry;
mod folder;

pub(crate) use entry::{Client, Key};
use folder::Folder;

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
/// How long all that were killed may take.
const KILLED: Duration = Duration::from_millis(200);
/// How long a group without tenants is kept: starting a server takes a second.
const LINGER: Duration = Duration::from_secs(10);
/// How often a control daemon is looked at.
const WATCH: Duration = Duration::from_millis(25);
/// How often its servers are asked whether they still answer, and how soon again when they did not.
const PING: Duration = Duration::from_secs(3);
const PING_AGAIN: Duration = Duration::from_millis(250);
/// Answers in a row that must be missing until servers count as hung.
const MISSES: u32 = 3;
/// Looks in a row that must find a server stopped until it counts as hung.
const STOPPED: u32 = 2;
/// How long a server that has not answered yet may be starting: on machines with many devices it takes its time.
const STARTING: Duration = Duration::from_secs(60);
/// Bytes of an answer that are read at most, and servers that are asked.
const MAX_ANSWER: u64 = 64 * 1024;
const MAX_SERVERS: usize = 16;
/// Each has an MPS control daemon and servers.
const MAX_GROUPS_PER_USER: usize = 16;
/// Starts that may fail, and the time between them.
const ATTEMPTS: u32 = 5;
const AGAIN: Duration = Duration::from_secs(1);

/// Clients that one MPS server takes (48 from Volta to Hopper; NVIDIA's MPS documentation).
pub(crate) const ROOM: usize = 48;

/// All groups.
pub(crate) struct Groups {
    examiner: Examiner,
    dir: PathBuf,
    file: PathBuf,
    /// The control program, and why there is none.
    control: Result<Vec<OsString>, String>,
    emulated: Option<PathBuf>,
    runtime: Handle,
    table: Mutex<BTreeMap<Key, Arc<Group>>>,
    /// Receive a notice when a server is gone, and what enters.
    reports: OnceLock<(UnboundedSender<Failure>, UnboundedSender<Client>)>,
}

struct Group {
    key: Key,
    folder: Folder,
    gid: u32,
    state: Mutex<State>,
    /// Held while it is started or ended.
    change: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    memberships: usize,
    /// Its control daemon, and whether that has answered.
    process: Option<ProcessId>,
    ready: bool,
    /// One of its control daemons has answered: it may have members.
    answered: bool,
    /// An earlier daemon has started that.
    inherited: bool,
    /// Counts empty moments: a task that waits for the end of one compares it to see whether it is still the same.
    emptied: u64,
    watched: bool,
    /// Servers that gave a client a context, and of which that is not yet known where they are watched.
    serving: BTreeSet<u32>,
}

/// A group in the file.
#[derive(Serialize, Deserialize)]
struct Saved {
    key: Key,
    folder: PathBuf,
    gid: u32,
    /// None: it is started again.
    process: Option<ProcessId>,
    #[serde(rename = "ready")]
    answered: bool,
}

/// That a process is a client of a group that is not its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UnauthorizedClient {
    Seen(String),
    /// The group does not say.
    Feared(String),
}

/// Why a control daemon has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unanswered {
    /// It was asked, and said nothing in time.
    Late,
    /// It could not be asked.
    Failed,
}

/// A tenant's place in a group; given back when dropped.
pub(crate) struct Membership {
    groups: Arc<Groups>,
    group: Arc<Group>,
}

impl std::fmt::Debug for Membership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Membership({})", self.name())
    }
}

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GroupError {
    #[error("{0}")]
    Unavailable(String),
    #[error("the user has {0} groups already: each has MPS servers of its own")]
    TooMany(usize),
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
    pub(crate) fn load(config: &Config, dir: &Path, examiner: Examiner) -> Arc<Self> {
        let groups = Arc::new(Self {
            examiner,
            dir: dir.join("groups"),
            file: dir.join("groups.json"),
            control: control(config),
            emulated: config.emulated.clone(),
            runtime: Handle::current(),
            table: Mutex::default(),
            reports: OnceLock::new(),
        });
        for saved in store::read::<Vec<Saved>>(&groups.file) {
            // One that has never answered has nobody in it.
            let Some(folder) = Folder::find(&saved.folder).filter(|_| saved.answered) else {
                continue;
            };
            let process = saved.process.filter(|it| it.watch().is_some());
            let group = Arc::new(Group {
                key: saved.key.clone(),
                folder,
                gid: saved.gid,
                state: Mutex::new(State {
                    process,
                    ready: true,
                    answered: true,
                    inherited: true,
                    ..State::default()
                }),
                change: tokio::sync::Mutex::default(),
            });
            groups.table().insert(saved.key, Arc::clone(&group));
            if process.is_some() {
                groups.watch(&group);
            }
            // Ends it unless a tenant of the last daemon joins it again.
            groups.sit(&group);
            groups.stand(&group);
        }
        groups.sweep();
        groups
    }

    /// Ends what no group is known of: control daemons that were starting when the last daemon was killed, or all if its file was
    /// damaged.
    fn sweep(&self) {
        let table = self.table();
        let known: Vec<&Path> = table.values().map(|it| it.folder.path()).collect();
        let found = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        for path in found.map(|it| it.path()) {
            if known.contains(&&*path) {
                continue;
            }
            let Some(folder) = Folder::find(&path) else {
                continue;
            };
            tracing::info!("{} belongs to no group: removed", path.display());
            if let Some(uid) = folder.user() {
                folder.end_servants(uid, &self.examiner);
            }
            folder.remove();
        }
    }

    /// Servers that are gone are reported to the first, which restarts the group, and processes that enter to the second, which ends
    /// them unless they belong there.
    pub(crate) fn report_to(
        &self,
        failures: UnboundedSender<Failure>,
        clients: UnboundedSender<Client>,
    ) {
        let _ = self.reports.set((failures, clients));
    }

    /// Why there can be no groups here, if so.
    pub(crate) fn unavailable(&self) -> Option<&str> {
        self.control.as_ref().err().map(String::as_str)
    }

    /// The group of this user, other than `own`, whose server has this process as a client; also one that does not say whether it
    /// has.
    pub(crate) async fn intruded(
        &self,
        uid: u32,
        own: Option<&str>,
        pid: u32,
    ) -> Option<UnauthorizedClient> {
        let groups: Vec<Arc<Group>> = self.table().values().cloned().collect();
        let groups = groups.into_iter().filter(|group| group.key.uid == uid);
        let (own, others): (Vec<_>, Vec<_>) = groups.partition(|group| Some(&*group.name()) == own);
        // A process is in one group at most.
        for group in own {
            let clients = self.clients(&group).await;
            if clients.is_ok_and(|clients| clients.contains(&pid)) {
                return None;
            }
        }
        for group in others {
            // One that has never answered has nobody in it.
            if group.process().is_none() || !group.state().ready {
                continue;
            }
            let group_name = group.name();
            match self.clients(&group).await {
                Ok(clients) if !clients.contains(&pid) => {}
                Ok(_) => return Some(UnauthorizedClient::Seen(group_name)),
                Err(_) => return Some(UnauthorizedClient::Feared(group_name)),
            }
        }
        None
    }

    fn named(&self, name: &str) -> Option<Arc<Group>> {
        self.table().values().find(|it| it.name() == name).cloned()
    }

    /// Whether a group began after something that was so long ago: its control daemon did. None was very long ago.
    pub(crate) fn began_after(&self, name: &str, age_ms: Option<u64>) -> bool {
        let process = self.named(name).and_then(|group| group.process());
        let old = |it: ProcessId| age_ms.is_none_or(|age| it.age_ms() < age);
        process.is_some_and(old)
    }

    /// All clients of a group's servers.
    async fn clients(&self, group: &Group) -> Result<BTreeSet<u32>, Unanswered> {
        let mut clients = BTreeSet::new();
        for server in pids(&self.ask(group, "get_server_list").await?).take(MAX_SERVERS) {
            let question = format!("get_client_list {server}");
            clients.extend(pids(&self.ask(group, &question).await?));
        }
        Ok(clients)
    }

    /// Joins a group and sees to it that its server can be reached. `like` is a process of the group's user.
    ///
    /// # Errors
    /// When there can be no group.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        key: &Key,
        like: u32,
    ) -> Result<Membership, GroupError> {
        if let Err(why) = &self.control {
            return Err(GroupError::Unavailable(why.clone()));
        }
        let group = self.find_or_make(key, like)?;
        let membership = self.membership(group);
        self.start(&membership.group).await?;
        Ok(membership)
    }

    /// Joins a group that exists, as it is.
    pub(crate) fn enter_again(self: &Arc<Self>, key: &Key) -> Option<Membership> {
        let group = self.table().get(key).cloned()?;
        self.watch(&group);
        Some(self.membership(group))
    }

    fn membership(self: &Arc<Self>, group: Arc<Group>) -> Membership {
        self.sit(&group);
        Membership {
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
        let own = table.keys().filter(|it| it.uid == key.uid).count();
        if key.uid != 0 && own >= MAX_GROUPS_PER_USER {
            return Err(GroupError::TooMany(own));
        }
        let cannot = |path: &Path| {
            let path = path.to_owned();
            move |error| GroupError::Folder(path, error)
        };
        // Its users pass through, and see nothing of each other.
        make(&self.dir, 0o711).map_err(cannot(&self.dir))?;
        let path = self.dir.join(&secret()[..16]);
        let gid = fs::metadata(format!("/proc/{like}")).map_or(key.uid, |of| of.gid());
        let folder = Folder::make(&path, key.uid, gid).map_err(cannot(&path))?;
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
        group.state().memberships += 1;
    }

    /// One membership less; with the last one the group ends, a while later.
    fn stand(self: &Arc<Self>, group: &Arc<Group>) {
        let emptied = {
            let mut state = group.state();
            state.memberships -= 1;
            state.emptied += 1;
            if state.memberships > 0 {
                return;
            }
            state.emptied
        };
        // They may all have ended because their server did; its control daemon ends after it.
        let tell_loss = move |groups: &Self, group: &Group| {
            let lost = |it: ProcessId| it.watch().is_none_or(|it| it.has_ended());
            let mut state = group.state();
            let same = state.memberships == 0 && state.emptied == emptied;
            let told = same && state.process.take_if(|it| lost(*it)).is_some();
            drop(state);
            if told {
                groups.tell(group);
            }
        };
        tell_loss(self, group);
        let (groups, group) = (Arc::clone(self), Arc::clone(group));
        self.runtime.spawn(async move {
            tokio::time::sleep(END).await;
            tell_loss(&groups, &group);
            tokio::time::sleep(LINGER).await;
            let _alone = group.change.lock().await;
            {
                let mut table = groups.table();
                let state = group.state();
                if state.memberships > 0 || state.emptied != emptied {
                    return;
                }
                table.remove(&group.key);
            }
            groups.end(&group).await;
            let folder = group.folder.clone();
            let _ = tokio::task::spawn_blocking(move || folder.remove()).await;
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
        if group.process().is_some() && group.state().ready {
            return Ok(());
        }
        let begun = Instant::now();
        let mut command = self.command(group)?;
        let name = command
            .as_std()
            .get_program()
            .to_string_lossy()
            .into_owned();
        let failed = |error| GroupError::Start(name.clone(), error);
        // Servers outlive a control daemon that was killed.
        self.end(group).await;
        let folder = group.folder.clone();
        let _ = tokio::task::spawn_blocking(move || folder.clear_pipe()).await;
        let cannot = |error| GroupError::Folder(group.folder.output_path(), error);
        let out = group.folder.begin_output().map_err(cannot)?;
        let mut child = command
            .arg("-f")
            .stdin(Stdio::null())
            .stdout(out.try_clone().map_err(failed)?)
            .stderr(out)
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let process = child.id().and_then(ProcessId::of);
        {
            let mut state = group.state();
            (state.process, state.ready, state.inherited) = (process, false, false);
        }
        // Whatever happens from here on, this daemon or the next one will end it.
        self.save();
        self.watch(group);
        let answers = async {
            while !self.answers(group).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let started = tokio::select! {
            () = answers => Ok(()),
            _ = child.wait() => Err(GroupError::Ended(name, group.said())),
            () = tokio::time::sleep(START) => Err(GroupError::Silent(name, START, group.said())),
        };
        // It is waited for when it has ended, whenever that is.
        self.runtime.spawn(async move { child.wait().await });
        match started {
            Ok(()) => {
                let mut state = group.state();
                (state.ready, state.answered) = (true, true);
            }
            Err(_) => self.end(group).await,
        }
        self.save();
        started?;
        let (pid, took) = (process.map(|it| it.pid), begun.elapsed());
        tracing::info!(group = group.name(), pid, ?took, "group");
        Ok(())
    }

    /// Ends the groups without members; the others are the next daemon's.
    pub(crate) async fn close(&self) {
        self.end_empty().await;
        self.save();
    }

    /// Ends the groups without members.
    pub(crate) async fn end_empty(&self) {
        let groups: Vec<Arc<Group>> = self.table().values().cloned().collect();
        for group in groups {
            let _alone = group.change.lock().await;
            if group.state().memberships == 0 {
                self.table().remove(&group.key);
                self.end(&group).await;
                group.folder.remove();
            }
        }
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
        group.folder.has_control() && self.ask(group, "get_server_list").await.is_ok()
    }

    /// What a group's control daemon and server have written, and starts them anew once `told` allows it: after a fault it would let
    /// no client in until all of them have gone. A client that comes meanwhile waits. Where the `server` itself was lost, one that is
    /// there now was started since, and stays.
    ///
    /// # Errors
    /// Those of `told`; inside, why it does not start.
    pub(crate) async fn restart<E>(
        self: &Arc<Self>,
        name: &str,
        server: bool,
        told: impl Future<Output = Result<(), E>>,
    ) -> Result<Result<String, GroupError>, E> {
        let Some(group) = self.named(name) else {
            return Ok(Ok(String::new()));
        };
        let _alone = group.change.lock().await;
        if server && group.process().is_some() {
            return Ok(Ok(String::new()));
        }
        told.await?;
        self.end(&group).await;
        // The next one begins anew.
        let said = group.folder.said();
        if group.state().memberships > 0
            && let Err(error) = self.start_alone(&group).await
        {
            return Ok(Err(error));
        }
        Ok(Ok(said))
    }

    /// Ends a group's servers, as if they had crashed.
    #[cfg(test)]
    pub(crate) async fn lose(&self, name: &str) {
        let group = self.named(name).expect("there is such a group");
        self.end(&group).await;
    }

    /// The control daemon's answer to a command, if it gives one in time.
    async fn ask(&self, group: &Group, question: &str) -> Result<String, Unanswered> {
        let mut command = self.command(group).map_err(|_| Unanswered::Failed)?;
        let asked = (command.stdin(Stdio::piped()).stdout(Stdio::piped()))
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        let mut asked = asked.map_err(|error| {
            tracing::debug!(group = group.name(), %error, "the control daemon cannot be asked");
            Unanswered::Failed
        })?;
        let answer = async {
            let mut input = asked.stdin.take()?;
            let line = format!("{question}\n");
            input.write_all(line.as_bytes()).await.ok()?;
            drop(input);
            // The one that answers is a process of the user.
            let mut text = String::new();
            let mut output = asked.stdout.take()?.take(MAX_ANSWER);
            output.read_to_string(&mut text).await.ok()?;
            let status = asked.wait().await.ok()?;
            status.success().then_some(text)
        };
        match tokio::time::timeout(ANSWER, answer).await {
            Ok(answer) => answer.ok_or(Unanswered::Failed),
            Err(_) => Err(Unanswered::Late),
        }
    }

    /// Ends control daemon and servers, for sure: these would wait for clients that hang.
    async fn end(&self, group: &Group) {
        let (folder, uid, examiner) = (group.folder.clone(), group.key.uid, self.examiner.clone());
        let servants = tokio::task::spawn_blocking(move || folder.servants(uid, &examiner)).await;
        let control = group.state().process.take().and_then(ProcessId::watch);
        let Ok(mut all) = servants else { return };
        if let Some(control) = control {
            control.signal(Signal::TERM);
            let _ = tokio::time::timeout(END, control.ended()).await;
            all.push(control);
        }
        for process in &all {
            process.kill();
        }
        // A killed one does nothing more, however long the driver takes to let it go.
        let gone = async {
            for process in &all {
                let _ = process.ended().await;
            }
        };
        let _ = tokio::time::timeout(KILLED, gone).await;
    }

    /// Sees to it that a group with members has a server that answers, and that no other process enters it.
    fn watch(self: &Arc<Self>, group: &Arc<Group>) {
        if std::mem::replace(&mut group.state().watched, true) {
            return;
        }
        let (groups, group) = (Arc::clone(self), Arc::clone(group));
        self.runtime.spawn(async move {
            tokio::select! {
                () = groups.keep(&group) => {}
                () = groups.guard(&group) => {}
            }
            group.state().watched = false;
        });
    }

    /// Starts a group again whose server is gone or hangs, until that fails too often or the group is forgotten.
    async fn keep(self: &Arc<Self>, group: &Arc<Group>) {
        let (mut failed, mut gone, mut pulse) = (0, None, Pulse::default());
        while failed < ATTEMPTS && self.has(group) {
            tokio::time::sleep(WATCH).await;
            let alone = group.change.try_lock();
            if alone.is_err() || group.state().memberships == 0 {
                continue;
            }
            drop(alone);
            if let Some(process) = group.process() {
                gone = None;
                if self.hangs(group, process, &mut pulse).await {
                    let _alone = group.change.lock().await;
                    if group.process() == Some(process) {
                        tracing::warn!(group = group.name(), "the group's server hangs");
                        self.tell(group);
                        self.end(group).await;
                        gone = Some(Instant::now());
                    }
                }
                continue;
            }
            // The receiver of the notice starts it again. If not, it is done here.
            let since = *gone.get_or_insert_with(|| {
                self.tell(group);
                Instant::now()
            });
            if since.elapsed() < AGAIN {
                continue;
            }
            gone = Some(Instant::now());
            if let Err(error) = self.start(group).await {
                tracing::warn!(group = group.name(), %error, "the group cannot be started");
                failed += 1;
            }
        }
    }

    fn tell(&self, group: &Group) {
        if let Some((to, _)) = self.reports.get() {
            let _ = to.send(Failure::Server(group.name().into()));
        }
    }

    /// Whether a group's servers were stopped, or do not answer; they are asked when it is time to. A control daemon answers for
    /// itself as long as nobody asks for what only a server knows.
    async fn hangs(&self, group: &Group, process: ProcessId, pulse: &mut Pulse) -> bool {
        let now = Instant::now();
        if pulse.of != Some(process) {
            *pulse = Pulse {
                of: Some(process),
                felt: Some(now),
                ..Pulse::default()
            };
        }
        (pulse.known).append(&mut mem::take(&mut group.state().serving));
        let stopped = |server: &u32| process.has_stopped_child(*server);
        if pulse.has_stopped(pulse.known.iter().any(stopped)) {
            return true;
        }
        if !pulse.is_due(now) {
            return false;
        }
        let servers: Vec<u32> = match self.ask(group, "get_server_list").await {
            Ok(servers) => pids(&servers).take(MAX_SERVERS).collect(),
            Err(why) => return pulse.missed(None, why, Instant::now()),
        };
        for server in &servers {
            let question = format!("get_client_list {server}");
            match self.ask(group, &question).await {
                Ok(_) => pulse.answered(*server),
                Err(why) => return pulse.missed(Some(*server), why, Instant::now()),
            }
        }
        pulse.well(&servers);
        false
    }

    fn save(&self) {
        let groups = self.table();
        let saved: Vec<Saved> = (groups.values())
            .map(|group| {
                let state = group.state();
                Saved {
                    key: group.key.clone(),
                    folder: group.folder.path().to_owned(),
                    gid: group.gid,
                    // One that has not answered is started anew.
                    process: state.process.filter(|_| state.ready),
                    answered: state.answered,
                }
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
        self.key.name()
    }

    /// The last words of the control daemon.
    fn said(&self) -> String {
        let text = self.folder.said();
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
            (MPS_VARIABLES[0], self.folder.pipe()),
            (MPS_VARIABLES[1], self.folder.log()),
        ]
    }
}

impl Membership {
    /// The group's name to the scheduler: one of its own for every user and trust domain.
    pub(crate) fn name(&self) -> Arc<str> {
        self.group.name().into()
    }

    pub(crate) fn key(&self) -> &Key {
        &self.group.key
    }

    /// What a program of this class needs to join the group, confined to so many percent of the SMs. MPS has two priorities: normal, and one below.
    pub(crate) fn environment(&self, percent: u32, class: Class) -> BTreeMap<String, String> {
        let paths = self.group.environment().into_iter();
        let paths = paths.map(|(name, path)| (name, path.display().to_string()));
        let percent = (percent < 100).then(|| (MPS_VARIABLES[2], percent.to_string()));
        let priority = u32::from(class != Class::Latency).to_string();
        let all = (paths.chain(percent)).chain([(MPS_VARIABLES[3], priority)]);
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.groups.stand(&self.group);
    }
}

/// What is known of whether a group's servers answer.
#[derive(Debug, Default)]
struct Pulse {
    /// The control daemon that was asked, and when.
    of: Option<ProcessId>,
    felt: Option<Instant>,
    /// Servers that have answered before, or have given a client a context.
    known: BTreeSet<u32>,
    misses: u32,
    /// Looks in a row that found one stopped.
    stopped: u32,
    /// Since when one that has not does not answer.
    starting: Option<Instant>,
}

impl Pulse {
    /// Takes note of whether a server is stopped, and says whether it stays so.
    fn has_stopped(&mut self, stopped: bool) -> bool {
        self.stopped = if stopped { self.stopped + 1 } else { 0 };
        self.stopped >= STOPPED
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let missing = self.misses > 0 || self.starting.is_some();
        let pause = if missing { PING_AGAIN } else { PING };
        let due = (self.felt).is_none_or(|felt| now.duration_since(felt) >= pause);
        if due {
            self.felt = Some(now);
        }
        due
    }

    fn answered(&mut self, server: u32) {
        self.known.insert(server);
    }

    /// All have answered.
    fn well(&mut self, servers: &[u32]) {
        self.known.retain(|server| servers.contains(server));
        (self.misses, self.starting) = (0, None);
    }

    /// This server, or the control daemon, gave no answer. Whether that means that they hang.
    fn missed(&mut self, server: Option<u32>, why: Unanswered, now: Instant) -> bool {
        if why == Unanswered::Failed {
            return false;
        }
        if server.is_some_and(|server| !self.known.contains(&server)) {
            self.starting.get_or_insert(now);
        }
        // A control daemon that waits for its server answers nothing.
        if let Some(since) = self.starting {
            return now.duration_since(since) > STARTING;
        }
        self.misses += 1;
        self.misses >= MISSES
    }
}

/// The pids in a control daemon's answer.
fn pids(answer: &str) -> impl Iterator<Item = u32> {
    let words = answer.split_whitespace();
    words.filter_map(|word| word.parse().ok())
}

/// Makes a folder that no other process has made, or that is ours already.
fn make(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
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

/// For fuzzing, see [`store::read_again`].
pub(crate) fn read_state(bytes: &[u8], sealed: bool) {
    store::read_again::<Vec<Saved>>(bytes, sealed);
}

#[cfg(test)]
mod tests;
