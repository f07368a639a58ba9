//! Who may be in a group. A process of the same user finds every group, whatever its own is, by its folder: it is ended when
//! the server reports that it has a context. Not before, as it can do no harm, and as NVIDIA's server hangs at times when a client
//! dies while it connects (driver 580.159.04).

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use super::{AGAIN, Group, Groups, WATCH, folder::Output};
use crate::{examine::PATIENCE, peer::ProcessId, tenants::Tenants};

/// What the control daemon writes before it lets a process in; the pid follows. It should have a context after this time.
const COMES: (&str, Duration) = ("NEW CLIENT ", Duration::from_secs(1));
/// What the server writes when a process has a context, around the pid, and the time in which it has told the process.
const ACTIVE: (&str, &str, Duration) = (
    "Status of client {PID: ",
    " is ACTIVE",
    Duration::from_millis(20),
);
/// What precedes the server's pid where it says that.
const SERVER: &str = " Server ";
/// Names a process's tenant, by a secret.
const TOKEN: &str = "GPUMUX_TENANT";

impl Groups {
    /// Ends a client that enters a group that is not its tenant's.
    pub(super) async fn guard(&self, group: &Arc<Group>) {
        let mut output: Option<Output> = None;
        let mut due: Vec<(Instant, u32)> = Vec::new();
        loop {
            tokio::time::sleep(WATCH).await;
            let Some(tenants) = self.tenants.get().and_then(Weak::upgrade) else {
                continue;
            };
            output = output.filter(|output| !output.is_old(&group.folder));
            if output.is_none() {
                let inherited = group.state().inherited;
                output = Output::open(&group.folder, !inherited).ok();
                // Clients that came before have not been read yet. What is written meanwhile is read after that.
                if inherited {
                    self.check_all(group, &tenants).await;
                }
            }
            let said = output.as_mut().and_then(|output| output.next().ok());
            let now = Instant::now();
            for came in said.iter().flat_map(|said| clients(said)) {
                due.push((now + came.after, came.pid));
                group.state().serving.extend(came.server);
            }
            for (_, pid) in due.extract_if(.., |(at, _)| *at <= now) {
                self.check(group, pid, &tenants).await;
            }
        }
    }

    async fn check_all(&self, group: &Arc<Group>, tenants: &Tenants) {
        while group.process().is_some() {
            if let Ok(clients) = self.clients(group).await {
                for pid in clients {
                    self.check(group, pid, tenants).await;
                }
                return;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Ends a process, unless it is of a tenant of the group. Work that it leaves under way ends no other client.
    async fn check(&self, group: &Group, pid: u32, tenants: &Tenants) {
        let Some(process) = ProcessId::of(pid) else {
            return;
        };
        let Some(watch) = process.watch() else { return };
        let line = process.line();
        let control = group.process();
        // Its server is the control daemon's child.
        let servant = control.is_some_and(|control| line.iter().take(2).any(|it| *it == control));
        if servant || pid == std::process::id() || !process.is_of(group.key.uid) {
            return;
        }
        let (examiner, emulated) = (self.examiner, self.emulated.clone());
        let look = move || {
            let deadline = Instant::now() + PATIENCE;
            let token = examiner.variable(process, &watch, TOKEN, deadline);
            (watch, token)
        };
        let Ok((watch, token)) = tokio::task::spawn_blocking(look).await else {
            return;
        };
        if tenants.belongs(&group.key, token.as_deref(), &line).await || watch.has_ended() {
            return;
        }
        let why = match token {
            Some(_) => "its secret is of no tenant of the group",
            None => "it has no tenant's secret, and none of the group has started it",
        };
        tracing::warn!(
            group = group.name(),
            pid,
            program = process.program(),
            why,
            "a process that does not belong to the group has entered it, and is ended"
        );
        let look = move || {
            let files = examiner.files(process, &watch, emulated.as_deref());
            watch.kill();
            files
        };
        let files = tokio::task::spawn_blocking(look).await.unwrap_or_default();
        tenants.hold_memory(group.name().into(), files).await;
    }
}

/// A process that has come.
#[derive(Debug, PartialEq, Eq)]
struct Came {
    pid: u32,
    /// When to look at it.
    after: Duration,
    /// The server that gave it a context.
    server: Option<u32>,
}

/// The processes that have come, as a control daemon and its server say.
fn clients(said: &str) -> impl Iterator<Item = Came> {
    said.lines().filter_map(|line| {
        let (pid, after, server) = match line.split_once(COMES.0) {
            Some((_, client)) => (client.split_once(" from user")?.0, COMES.1, None),
            None => {
                let (who, client) = line.split_once(ACTIVE.0)?;
                let server = who
                    .split_once(SERVER)
                    .and_then(|(_, it)| it.split_once(']'));
                (
                    client.trim_end().strip_suffix(ACTIVE.1)?.split_once(',')?.0,
                    ACTIVE.2,
                    server.and_then(|(pid, _)| pid.trim().parse().ok()),
                )
            }
        };
        Some(Came {
            pid: pid.trim().parse().ok()?,
            after,
            server,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_found_in_what_control_daemons_say() {
        let said = "\
[2026-11-22 05:38:32.546 Control   419] Accepting connection...
[2026-11-22 05:38:32.546 Control   419] NEW CLIENT 440 from user 0: Server already exists
[2026-11-22 05:38:32.546 Server   423] Received new client request for {PID: 440, Context ID: 0}
[2026-11-22 05:38:32.700 Server   423] Status of client {PID: 440, Context ID: 1} is ACTIVE 
[2026-11-22 05:38:33.000 Control   419] NEW CLIENT 441 from user 0: Server is not ready, push client to pending list
[2026-11-22 05:38:33.000 Control   419] NEW CLIENT -1 from user 0
[2026-11-22 05:38:33.000 Control   419] NEW CLIENT 442
";
        let looks = [
            (440, COMES.1, None),
            (440, ACTIVE.2, Some(423)),
            (441, COMES.1, None),
        ];
        let looks = looks.map(|(pid, after, server)| Came { pid, after, server });
        assert_eq!(clients(said).collect::<Vec<_>>(), looks);
    }
}
