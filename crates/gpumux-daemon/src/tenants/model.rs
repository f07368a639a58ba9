//! What a tenant is, by which names and secrets it is known, and why a request for one is refused.

use std::{collections::BTreeMap, io, path::PathBuf, sync::Arc};

use gpumux_core::{MAX_NAME, TenantId, TenantSpec, admission::Refusal, is_name, space};

use rustix::process::Signal;

use super::life::Life;
use crate::{
    api::types::{Ended, NewTenant, Placement},
    clock::since_1970,
    groups::{Key, Membership},
    link::SessionId,
    peer::{Peer, ProcessFd, ProcessId},
    scheduler::{Owner, Stopped, Withheld},
    users::trusted,
};

/// Most devices that one tenant can be confined to: all that a machine can have, and some.
pub(super) const MAX_CONFINED: usize = 64;
/// Most ranks of a job that share a device.
pub(super) const MAX_RANKS: u32 = 8;
/// Points of a curve.
const MAX_POINTS: usize = 100;

/// One tenant.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    pub(crate) name: String,
    pub(crate) spec: TenantSpec,
    pub(crate) uid: u32,
    /// The user's name.
    pub(crate) user: String,
    /// Seconds since 1970.
    pub(crate) since: u64,
    pub(crate) pids: Vec<u32>,
    pub(super) token: String,
    /// The process that it was made for, if that came without a secret.
    pub(super) made_for: Option<ProcessId>,
    /// Lives without holders, and is joined by any user's processes.
    pub(super) kept: bool,
    /// Its user chose its name.
    pub(super) named: bool,
    /// How it shares devices, and its place in a group.
    pub(crate) placement: Placement,
    pub(super) group: Option<Key>,
    pub(super) membership: Option<Arc<Membership>>,
    pub(super) utility: Vec<(u32, f64)>,
    /// Devices that it may use, by UUID; empty: all.
    pub(crate) devices: Vec<String>,
    pub(super) holders: BTreeMap<Holder, Option<ProcessId>>,
    /// Its program, from start to end.
    pub(crate) life: Life,
    /// What of its spec does not hold now, for the next daemon.
    pub(super) withheld: Withheld,
    /// Why the driver does not let gpumux control its processes, if it does not.
    pub(crate) uncontrolled: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Holder {
    Process(u64),
    Session(SessionId),
}

/// Why nothing was done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TenantError {
    #[error("no tenant is called `{0}`: see `gpumux ps`")]
    Unknown(String),
    #[error("tenant `{0}` belongs to another user: only its owner or root may change it")]
    NotYours(String),
    #[error("several users have a tenant `{0}`: name one of {1}")]
    Ambiguous(String, String),
    #[error(
        "a tenant of yours called `{0}` lives already: use another name, or wait until it ends"
    )]
    Taken(String),
    #[error("`{0}` is no name for a tenant: use 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`")]
    BadName(String),
    #[error(
        "`{0}` is no name for a trust domain: use 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`"
    )]
    BadTrust(String),
    #[error("`{0}` is no fingerprint: use 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`")]
    BadFingerprint(String),
    #[error("{0}% is no part of the SMs: use 1 to 100")]
    BadPercent(u32),
    #[error("{0} ranks on each GPU are more than fit: ask for at most {MAX_RANKS}")]
    TooManyRanks(u32),
    #[error(
        "that is no curve: use up to {MAX_POINTS} points of 1 to 100 percent and a throughput, 0 or 1e-6 to 1e15"
    )]
    BadCurve,
    #[error("that is no bandwidth: use a demand of 0 to 1 and a sensitivity of 0 to 4")]
    BadBandwidth,
    #[error("nothing is known of a program `{0}` of yours: see `gpumux profile --list`")]
    NothingKnown(String),
    #[error(
        "{0} has {1} tenants, and may have {2}: let some end, or ask the administrator (`max_tenants` in gpumux.toml)"
    )]
    TooMany(String, usize, usize),
    #[error(
        "{0} tenants live already, and the rest is for root and users with few: let some end first"
    )]
    Full(usize),
    #[error("the daemon cannot see your process: ask from the same pid namespace")]
    Invisible,
    #[error("the tenant of this secret is unknown: it has ended, or belongs to another daemon")]
    UnknownToken,
    #[error(
        "process {pid} runs as user {user}, and tenant `{name}`, whose secret the process has, is of user {owner}: only processes of \
         {owner} and root may join it. Change the user first, and start `gpumux run` as {user} then (`sudo -u {user} gpumux run …`)"
    )]
    OtherUser {
        pid: u32,
        user: String,
        name: String,
        owner: String,
    },
    #[error("only root and the daemon's own user may keep a tenant")]
    NotTrusted,
    #[error("{0} devices are more than a tenant can be confined to: name at most {MAX_CONFINED}")]
    TooManyDevices(usize),
    #[error("`{0}` names no single device: {1}; use a number or a UUID")]
    NoDevice(String, String),
    #[error(
        "the secret is refused: use 32 hexadecimal digits that no tenant of another process has"
    )]
    BadToken,
    #[error("tenant `{0}` still has {1} connected processes: end them first")]
    Busy(String, usize),
    #[error(
        "process {1} of tenant `{0}` is stopped (SIGSTOP, Ctrl-Z, a debugger, a paused container), so memory of the tenant cannot be \
         moved: let it go on first (`gpumux kill -s CONT {0}`)"
    )]
    StoppedProcess(String, u32),
    #[error("{0} is no signal that can be sent: use 1 to 31")]
    BadSignal(i32),
    #[error("tenant `{0}` has no process that you may send a signal to")]
    NoProcess(String),
    #[error(
        "tenant `{0}` is of class {1}: only a latency tenant takes the GPU ahead of its work; `gpumux set {0} --class latency` makes it one"
    )]
    NoHints(String, gpumux_core::Class),
    #[error("tenant `{0}` takes no hints: allow them with `gpumux set {0} --hints auto`")]
    HintsOff(String),
    #[error(transparent)]
    Refused(Box<Refusal>),
    #[error(transparent)]
    Stopped(#[from] Stopped),
    #[error(
        "{1}; a part of it was set for `{0}` before: say otherwise, or `gpumux set --forget {0}`"
    )]
    Set(String, Box<Refusal>),
    #[error("nothing was set for `{0}`")]
    NothingSet(String),
    #[error("cannot keep it in {0}: {1}")]
    Save(PathBuf, io::Error),
    #[error("it holds now, but a restarted daemon will not know it: {0}")]
    NotKept(String),
}

impl From<Refusal> for TenantError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal.into())
    }
}

impl Tenant {
    /// Whether all its processes have ended: it is about to be released.
    pub(super) fn has_ended(&self) -> bool {
        let has_ended = |process: &Option<ProcessId>| process.is_some_and(|it| !it.lives());
        !self.kept && !self.holders.is_empty() && self.holders.values().all(has_ended)
    }

    /// Whether this is one of its processes.
    pub(super) fn holds(&self, process: ProcessId) -> bool {
        self.holders.values().any(|it| *it == Some(process))
    }

    /// Its process of this pid, if it has not ended; never another that has the pid by now.
    pub(super) fn process(&self, pid: u32) -> Option<ProcessFd> {
        let mut processes = self.holders.values().flatten();
        processes.find(|process| process.pid == pid)?.watch()
    }

    /// Sends a stopped process of it a signal in the name of its user. What is said of that.
    pub(super) fn signal_stopped(&self, pid: u32, signal: Signal) -> &'static str {
        let process = self.holders.values().flatten().find(|it| it.pid == pid);
        // It may have become another user's since it began.
        let own = process.filter(|it| it.is_of(self.uid));
        let watch = own.and_then(|it| it.watch());
        let sent = watch.is_some_and(|it| it.try_signal(signal).is_ok());
        match (sent, signal) {
            (false, _) => "; the daemon may not send it a signal",
            (true, Signal::CONT) => "; it was sent SIGCONT",
            (true, _) => "; it was ended",
        }
    }

    /// One that no process holds yet, from now on.
    pub(super) fn new(
        id: TenantId,
        owner: &Owner,
        spec: TenantSpec,
        token: String,
        devices: Vec<String>,
    ) -> Self {
        Self {
            id,
            name: owner.name.clone(),
            spec,
            uid: owner.uid,
            user: owner.policy.user.clone(),
            since: since_1970().as_secs(),
            pids: Vec::new(),
            token,
            made_for: None,
            kept: false,
            named: false,
            placement: Placement::default(),
            group: None,
            membership: None,
            utility: Vec::new(),
            devices,
            holders: BTreeMap::new(),
            life: Life::default(),
            withheld: Withheld::default(),
            uncontrolled: None,
        }
    }

    /// One whose process holds nothing.
    #[cfg(test)]
    pub(crate) fn example(id: TenantId, placement: Placement) -> Self {
        use gpumux_core::admission::UserPolicy;
        let owner = Owner {
            name: "example".into(),
            uid: 0,
            policy: Arc::new(UserPolicy::unlimited()),
        };
        let spec = TenantSpec::default();
        Self {
            user: "root".into(),
            placement,
            ..Self::new(id, &owner, spec, String::new(), Vec::new())
        }
    }

    /// What is kept of it when it ends now.
    pub(super) fn end(&self) -> Ended {
        let life = &self.life;
        let report = life.report();
        Ended {
            name: self.name.clone(),
            uid: self.uid,
            user: self.user.clone(),
            class: self.spec.class.to_string(),
            command: life.command.clone(),
            since: self.since,
            at: since_1970().as_secs(),
            exit: life.exit(),
            reason: match self.kept {
                true => "deleted".into(),
                false => report.reason,
            },
            noteworthy: report.noteworthy && !self.kept,
            log: life.log.clone(),
        }
    }

    /// What it is called beside tenants of other users.
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.user, self.name)
    }

    /// By what a process of this secret holds it, not by a session.
    pub(super) fn held_by(&self, token: &str, peer: &Peer) -> Option<Holder> {
        let is_its = |(holder, process): &(&Holder, &Option<ProcessId>)| {
            matches!(holder, Holder::Process(_)) && process.is_some() && **process == peer.process
        };
        let mut own = self.holders.iter().filter(|_| self.may_join(token, peer));
        own.find(is_its).map(|(holder, _)| *holder)
    }

    pub(super) fn may_join(&self, token: &str, peer: &Peer) -> bool {
        self.token == token && (peer.uid == 0 || peer.uid == self.uid || self.kept)
    }

    /// Why a process of this user may not join it.
    pub(super) fn refuses(&self, peer: &Peer, user: &str) -> TenantError {
        TenantError::OtherUser {
            pid: peer.pid,
            user: user.into(),
            name: self.name.clone(),
            owner: self.user.clone(),
        }
    }
}

/// The tenant of the process with this pid or, if it is of none, of the nearest of its parents that is a tenant's.
pub(crate) fn started_by(tenants: &[Tenant], pid: u32) -> Option<&Tenant> {
    let line = ProcessId::of(pid)?.line();
    line.iter()
        .find_map(|process| tenants.iter().find(|it| it.holds(*process)))
}

/// The tenant that a user means by a name: its own before others', or the one of `user/name`.
pub(crate) fn find<'a>(
    tenants: impl Iterator<Item = &'a Tenant> + Clone,
    uid: Option<u32>,
    name: &str,
) -> Result<&'a Tenant, TenantError> {
    let unknown = || TenantError::Unknown(name.into());
    if let Some((user, own)) = name.split_once('/') {
        let is = |it: &&Tenant| it.name == own && (it.user == user || user.parse() == Ok(it.uid));
        return tenants.clone().find(is).ok_or_else(unknown);
    }
    let all: Vec<&Tenant> = tenants.filter(|it| it.name == name).collect();
    if let Some(own) = all.iter().find(|it| Some(it.uid) == uid) {
        return Ok(own);
    }
    match all.as_slice() {
        [] => Err(unknown()),
        [one] => Ok(one),
        several => {
            let names: Vec<String> = several.iter().map(|it| it.full_name()).collect();
            Err(TenantError::Ambiguous(name.into(), names.join(", ")))
        }
    }
}

/// Whether a request for a tenant is well-formed, and its user may make it.
pub(super) fn check(new: &NewTenant, uid: u32) -> Result<(), TenantError> {
    if !trusted(uid) && new.kept {
        return Err(TenantError::NotTrusted);
    }
    if let Some(trust) = new.trust.as_ref().filter(|trust| !is_name(trust)) {
        return Err(TenantError::BadTrust(trust.clone()));
    }
    check_fingerprint(new.fingerprint.as_deref())?;
    if let Some(percent) = new.sm_percent.filter(|it| !(1..=100).contains(it)) {
        return Err(TenantError::BadPercent(percent));
    }
    if new.ranks_per_gpu > MAX_RANKS {
        return Err(TenantError::TooManyRanks(new.ranks_per_gpu));
    }
    match new.utility.is_empty() {
        true => Ok(()),
        false => check_curve(&new.utility),
    }
}

pub(super) fn check_fingerprint(fingerprint: Option<&str>) -> Result<(), TenantError> {
    match fingerprint {
        Some(name) if !is_name(name) => Err(TenantError::BadFingerprint(name.into())),
        _ => Ok(()),
    }
}

pub(super) fn check_curve(curve: &[(u32, f64)]) -> Result<(), TenantError> {
    let good = |(percent, rate): &(u32, f64)| space::is_point(*percent, *rate);
    match (1..=MAX_POINTS).contains(&curve.len()) && curve.iter().all(good) {
        true => Ok(()),
        false => Err(TenantError::BadCurve),
    }
}
