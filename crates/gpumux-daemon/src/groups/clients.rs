//! Which processes may be in a group. A process of the same user finds every group, whatever its own is, by its folder: it is ended when
//! the server reports that it has a context. Not before, as it can do no harm, and as NVIDIA's server hangs at times when a client
//! dies while it connects (driver 580.159.04).

use std::{
    collections::BTreeSet,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{AGAIN, Group, Groups, WATCH, entry::Client, folder::Output};
use crate::{examine::PATIENCE, peer::ProcessId};

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
/// A process that hides its environment for so many looks, of [`PATIENCE`] each, is ended.
const LOOKS: u32 = 3;
/// Names a process's tenant, by a secret.
const TOKEN: &str = "GPUMUX_TENANT";

impl Groups {
    /// Reports the clients that enter a group.
    pub(super) async fn guard(&self, group: &Arc<Group>) {
        let mut output: Option<Output> = None;
        let mut due: Vec<Due> = Vec::new();
        loop {
            tokio::time::sleep(WATCH).await;
            let Some((_, to)) = self.reports.get() else {
                continue;
            };
            output = output.filter(|output| !output.is_old(&group.folder));
            if output.is_none() {
                let inherited = group.state().inherited;
                output = Output::open(&group.folder, !inherited).ok();
                // Clients that came before have not been read yet. What is written meanwhile is read after that.
                if inherited {
                    let now = Instant::now();
                    let inherited = self.inherited(group).await.into_iter();
                    due.extend(inherited.map(|pid| Due::new(now, pid)));
                }
            }
            let said = output.as_mut().and_then(|output| output.next().ok());
            let now = Instant::now();
            for came in said.iter().flat_map(|said| clients(said)) {
                due.push(Due::new(now + came.after, came.pid));
                group.state().serving.extend(came.server);
            }
            let now: Vec<Due> = due.extract_if(.., |look| look.at <= now).collect();
            for look in now {
                match self.look_at(group, look).await {
                    // A daemon that ends looks at none.
                    Ok(client) => client.into_iter().for_each(|it| drop(to.send(it))),
                    Err(again) => due.push(again),
                }
            }
        }
    }

    /// The pids of those that came in an earlier daemon's time.
    async fn inherited(&self, group: &Arc<Group>) -> BTreeSet<u32> {
        while group.process().is_some() {
            if let Ok(clients) = self.clients(group).await {
                return clients;
            }
            tokio::time::sleep(AGAIN).await;
        }
        BTreeSet::new()
    }

    /// What shows whose process it is; nothing of one that has ended, or that is the group's own. Or the next look at one that could
    /// not be looked at.
    async fn look_at(&self, group: &Group, due: Due) -> Result<Option<Client>, Due> {
        let pid = due.pid;
        let Some((process, watch)) = ProcessId::of(pid).and_then(|it| Some((it, it.watch()?)))
        else {
            return Ok(None);
        };
        let line = process.line();
        let control = group.process();
        // Its server is the control daemon's child.
        let servant = control.is_some_and(|control| line.iter().take(2).any(|it| *it == control));
        if servant || pid == std::process::id() || !process.is_of(group.key.uid) {
            return Ok(None);
        }
        let own = self.examiner.clone();
        let look = move || {
            let deadline = Instant::now() + PATIENCE;
            let token = own.variable(process, &watch, TOKEN, deadline);
            (watch, token)
        };
        let Ok((watch, token)) = tokio::task::spawn_blocking(look).await else {
            return Ok(None);
        };
        if watch.has_ended() {
            return Ok(None);
        }
        if let Err(error) = &token
            && let Some(again) = due.again(error.kind(), Instant::now())
        {
            return Err(again);
        }
        Ok(Some(Client {
            group: group.key.clone(),
            token,
            line,
            process,
            watch,
            examiner: self.examiner.clone(),
            emulated: self.emulated.clone(),
        }))
    }
}

/// A process to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Due {
    at: Instant,
    pid: u32,
    /// Looks that ended without an answer.
    silent: u32,
}

impl Due {
    fn new(at: Instant, pid: u32) -> Self {
        let silent = 0;
        Self { at, pid, silent }
    }

    /// The next look, after one that failed so; none if this one was the last. A machine without room for one more process, or the
    /// like, says nothing about this one.
    fn again(self, error: io::ErrorKind, now: Instant) -> Option<Self> {
        let silent = self.silent + u32::from(error == io::ErrorKind::TimedOut);
        let at = now + AGAIN;
        (silent < LOOKS).then_some(Self { at, silent, ..self })
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
    fn only_a_process_that_hides_is_ended_unseen() {
        let now = Instant::now();
        let mut look = Due::new(now, 440);
        for error in [
            io::ErrorKind::UnexpectedEof,
            io::ErrorKind::TimedOut,
            io::ErrorKind::WouldBlock,
            io::ErrorKind::TimedOut,
            io::ErrorKind::OutOfMemory,
        ] {
            look = look.again(error, now).unwrap();
            assert_eq!((look.pid, look.at), (440, now + AGAIN));
        }
        assert_eq!(look.again(io::ErrorKind::TimedOut, now), None);
    }

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
