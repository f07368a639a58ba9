//! Moves a tenant to another device: `gpumux-core`'s `relocation` decides, the scheduling thread lets the tenant go and takes it back, and
//! a process of its own calls the driver.
//!
//! # Problem
//! The driver's checkpoint calls may take long or never return, and need the driver's library, which the daemon does not load. The daemon may
//! be killed in the middle.
//!
//! # Approach
//! The calls are made by the hidden command [`COMMAND`], as the tenant's user. It gets its task, reports that it is ready, and begins when it is
//! told to; then it goes on to the end, with or without a daemon. A helper that is late is ended, and another one puts back what it left.
//! The tenant's sessions end after that in any case, so that each process brings its memory back where it is, and reports that.

use std::{
    collections::BTreeSet,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use gpumux_core::{
    TenantId,
    relocation::{Gpu, Outcome, Plan, Refusal},
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    sync::Semaphore,
};

use crate::{
    api::types::Relocated,
    config::Config,
    memory,
    peer::{NOBODY, ProcessId},
    scheduler::{self, Handle, Relocate, Stopped},
};

/// Name of the hidden command that calls the driver.
pub const COMMAND: &str = "relocate";
/// How long the driver may take to begin in the helper.
const BEGIN: Duration = Duration::from_secs(30);
/// How long work that is under way may take to end, in each process.
pub const LOCK: Duration = Duration::from_secs(10);
/// How long the driver may take in all, besides two seconds for each GiB that gpumux has not moved itself.
const WORK: Duration = Duration::from_secs(60);
/// How long processes may take to come back.
const BACK: Duration = Duration::from_secs(60);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Tenants that are moved at once; others wait.
static PLACES: Semaphore = Semaphore::const_new(4);

/// What the helper is to do.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    /// The processes.
    pub pids: Vec<u32>,
    /// The devices of the node.
    pub gpus: Vec<Gpu>,
    /// UUID of the device where they are.
    pub from: String,
    /// UUID of the device where they shall be.
    pub to: String,
    /// Another helper has left them: they go on where they are.
    pub recover: bool,
}

/// What the helper reports, a line each.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// The driver has what it takes, and the processes can be moved.
    Ready,
    /// They cannot: why. Nothing was done.
    Unable(String),
    /// All are on the other device.
    Moved,
    /// All are where they were: why.
    Back(String),
    /// Some are not as they should be: why.
    Stuck(String),
}

impl From<Outcome> for Report {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Moved => Self::Moved,
            Outcome::Back(why) => Self::Back(why),
            Outcome::Stuck(why) => Self::Stuck(why),
        }
    }
}

/// Why a tenant was not moved.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RelocationError {
    #[error("not moved: {0}")]
    Refused(#[from] Refusal),
    #[error("not moved: {0}")]
    Memory(#[from] memory::MoveError),
    #[error("not moved: the driver refuses: {0}")]
    Unable(String),
    #[error("not moved, and the tenant goes on where it was: {0}")]
    Back(String),
    #[error("{0}: end the tenant, and start it again")]
    Stuck(String),
    #[error(
        "the tenant was moved, but not all of its processes have come back within {} s: see `gpumux ps` and its log",
        BACK.as_secs()
    )]
    Late,
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// What moves tenants.
pub(crate) struct Relocator {
    pub(crate) config: Arc<Config>,
    pub(crate) scheduler: Handle,
}

/// A helper that runs.
struct Helper {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Helper {
    /// Starts it as this user.
    async fn start(config: &Config, uid: u32, task: &Task) -> std::io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(COMMAND).current_dir("/").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(Stdio::null());
        for variable in ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "GPUMUX_TENANT"] {
            command.env_remove(variable);
        }
        if let Some(emulated) = &config.emulated {
            // The emulated device's library is its driver, too.
            let library: Option<&PathBuf> = config.nvml.as_ref();
            command.env("GPUMUX_EMU_SOCKET", emulated);
            command.envs(library.map(|library| ("LD_PRELOAD", library)));
        }
        if rustix::process::geteuid().is_root() && uid != 0 {
            // Its process's group may be the one that may open the devices; one that is hidden belongs to root there.
            let first = task.pids.first().copied().unwrap_or_default();
            let of = std::fs::metadata(format!("/proc/{first}"))?;
            let gid = if of.uid() == uid { of.gid() } else { NOBODY };
            command.uid(uid).gid(gid);
        }
        let mut child = command.spawn()?;
        let stdout = child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        let lines = BufReader::new(stdout).lines();
        let mut helper = Self { child, lines };
        let task = serde_json::to_string(task).map_err(std::io::Error::other)?;
        helper.say(&task).await?;
        Ok(helper)
    }

    async fn say(&mut self, line: &str) -> std::io::Result<()> {
        let stdin = self.child.stdin.as_mut();
        let stdin = stdin.ok_or(std::io::ErrorKind::BrokenPipe)?;
        stdin.write_all(format!("{line}\n").as_bytes()).await
    }

    /// Its next report, if that comes in time.
    async fn report(&mut self, patience: Duration) -> Option<Report> {
        let line = tokio::time::timeout(patience, self.lines.next_line()).await;
        serde_json::from_str(&line.ok()?.ok()??).ok()
    }

    /// Ends it. One that hangs in the driver ends when that returns.
    fn end(mut self) {
        let _ = self.child.start_kill();
        tokio::spawn(async move { self.child.wait().await });
    }
}

impl Relocator {
    async fn step<T>(
        &self,
        step: impl FnOnce(tokio::sync::oneshot::Sender<T>) -> Relocate,
    ) -> Result<T, Stopped> {
        let command = |answer| scheduler::Command::Relocate(step(answer));
        self.scheduler.ask(command).await
    }

    /// Moves a tenant. To be run to its end.
    ///
    /// # Errors
    /// Why it is where it was, or that it is in trouble.
    pub(crate) async fn relocate(
        &self,
        tenant: TenantId,
        target: String,
        gpus: Vec<Gpu>,
        shares: bool,
    ) -> Result<Relocated, RelocationError> {
        // Never closed.
        let _place = PLACES.acquire().await;
        let known = gpus.clone();
        let planned = self.step(|answer| Relocate::Plan {
            tenant,
            target,
            gpus: known,
            shares,
            answer,
        });
        let (plan, uid) = planned.await??;
        let result = self.carry_out((tenant, uid), &plan, &gpus).await;
        self.step(|answer| Relocate::Forget(tenant, answer)).await?;
        match &result {
            Ok(moved) => tracing::info!(tenant = tenant.0, ?moved, "moved to another device"),
            Err(error) => tracing::warn!(tenant = tenant.0, %error, "not moved"),
        }
        result
    }

    async fn carry_out(
        &self,
        (tenant, uid): (TenantId, u32),
        plan: &Plan,
        gpus: &[Gpu],
    ) -> Result<Relocated, RelocationError> {
        let task = Task {
            pids: plan.pids.clone(),
            gpus: gpus.to_vec(),
            from: plan.from.clone(),
            to: plan.to.clone(),
            recover: false,
        };
        let unable = |error: std::io::Error| RelocationError::Unable(error.to_string());
        let mut helper = Helper::start(&self.config, uid, &task)
            .await
            .map_err(unable)?;
        let ready = match helper.report(BEGIN).await {
            Some(Report::Ready) => Ok(()),
            Some(Report::Unable(why)) => Err(why),
            _ => Err("it does not answer".to_owned()),
        };
        if let Err(why) = ready {
            helper.end();
            return Err(RelocationError::Unable(why));
        }
        let began = Instant::now();
        let detained = self.step(|answer| Relocate::Detain(tenant, answer));
        if let Err(error) = detained.await? {
            helper.end();
            let released = self.step(|answer| Relocate::Release(tenant, answer));
            released.await?;
            return Err(memory::MoveError::from(error).into());
        }
        let asleep = Instant::now();
        let pids = plan.pids.clone();
        let let_go = self.step(|answer| Relocate::LetGo(tenant, pids, answer));
        if !let_go.await? {
            helper.end();
            let released = self.step(|answer| Relocate::Release(tenant, answer));
            released.await?;
            memory::wake(&self.scheduler, tenant).await?;
            let why = "a process of it has begun meanwhile: try again";
            return Err(RelocationError::Back(why.into()));
        }
        let patience = WORK + LOCK * plan.pids.len() as u32 + Duration::from_secs(plan.bytes >> 29);
        let report = match helper.say("go").await {
            Ok(()) => helper.report(patience).await,
            Err(_) => None,
        };
        helper.end();
        let report = match report {
            Some(report) => report,
            None => self.recover(uid, task).await,
        };
        let moved = Instant::now();
        self.step(|answer| Relocate::Release(tenant, answer))
            .await?;
        let back = self.await_return(tenant, plan).await?;
        match report {
            Report::Moved if back => Ok(Relocated {
                from: plan.from.clone(),
                to: plan.to.clone(),
                out_s: (asleep - began).as_secs_f64(),
                driver_s: (moved - asleep).as_secs_f64(),
                back_s: moved.elapsed().as_secs_f64(),
            }),
            Report::Moved => Err(RelocationError::Late),
            Report::Stuck(why) => Err(RelocationError::Stuck(why)),
            Report::Back(why) | Report::Unable(why) => Err(RelocationError::Back(why)),
            Report::Ready => Err(RelocationError::Back("the helper is confused".into())),
        }
    }

    /// Lets processes go on that a helper has left.
    async fn recover(&self, uid: u32, task: Task) -> Report {
        let task = Task {
            recover: true,
            ..task
        };
        let recovered = async {
            let mut helper = Helper::start(&self.config, uid, &task).await.ok()?;
            let report = helper.report(WORK).await;
            helper.end();
            report
        };
        let stuck = "the driver does not return from its checkpoint calls";
        (recovered.await).unwrap_or_else(|| Report::Stuck(stuck.into()))
    }

    /// Waits for the processes that still live. Whether they have come back in time.
    async fn await_return(&self, tenant: TenantId, plan: &Plan) -> Result<bool, Stopped> {
        let deadline = Instant::now() + BACK;
        loop {
            let ends = |pid: &u32| ProcessId::of(*pid).is_none_or(|it| !it.lives());
            let ended: BTreeSet<u32> = plan.pids.iter().copied().filter(ends).collect();
            let is_back = self.step(|answer| Relocate::IsBack {
                tenant,
                ended,
                answer,
            });
            if is_back.await? {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
