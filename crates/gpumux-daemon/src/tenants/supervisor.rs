//! Deals with groups that fail: the faulting client, the members that it ended, and the group's new start.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use gpumux_core::TenantId;
use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
};

use super::{
    faults::{CrashCount, SERVER, faulting_client, server_lost},
    learning,
    registry::Tenants,
};
use crate::{
    api::types::{EventKind, Fault},
    clock::since_1970,
    failure::{Crash, Failure},
    groups::Client,
    hold,
    scheduler::{Command, Left, Stopped},
};

/// How long reports of one fault are gathered.
const GATHER: Duration = Duration::from_millis(30);
/// How long processes may take to learn that their group has failed (up to 0.5 s on an H100, driver 580.159.04).
const TOLD: Duration = Duration::from_secs(1);
/// How long a server may be gone before that is noticed.
const UNNOTICED: Duration = Duration::from_millis(500);

/// Watches over groups and programs of these tenants from now on.
pub(crate) async fn watch(tenants: &Arc<Tenants>) -> Result<(), Stopped> {
    let (tell, told) = unbounded_channel();
    let (enter, mut entered) = unbounded_channel();
    tenants.groups.report_to(tell.clone(), enter);
    let (report, mut reported) = unbounded_channel();
    (tenants.scheduler)
        .ask(|answer| Command::ReportTo(tell, report, answer))
        .await?;
    tokio::spawn(watch_crashes(Arc::downgrade(tenants), told));
    let watcher = Arc::downgrade(tenants);
    tokio::spawn(async move {
        while let (Some(happening), Some(tenants)) = (reported.recv().await, watcher.upgrade()) {
            tenants.happened(happening).await;
        }
    });
    let watcher = Arc::downgrade(tenants);
    tokio::spawn(async move {
        while let (Some(client), Some(tenants)) = (entered.recv().await, watcher.upgrade()) {
            tokio::spawn(async move { tenants.check(client).await });
        }
    });
    tokio::spawn(learning::watch(Arc::downgrade(tenants)));
    Ok(())
}

/// What was reported of one fault: whether the server is gone, and which processes crashed.
type Told = (bool, Vec<Crash>);

/// Gathers the reports of each fault and deals with it: one after the other in a group, and each group by itself, because
/// starting one again may take long.
async fn watch_crashes(tenants: Weak<Tenants>, mut told: UnboundedReceiver<Failure>) {
    let mut waiting: BTreeMap<Arc<str>, Told> = BTreeMap::new();
    let mut busy: BTreeSet<Arc<str>> = BTreeSet::new();
    // Each ends with its group, and whether that was dealt with, or only time went by until all is reported.
    let mut tasks: JoinSet<(Arc<str>, bool)> = JoinSet::new();
    loop {
        let done = tokio::select! {
            failure = told.recv() => match failure {
                Some(failure) => {
                    let group = match failure {
                        Failure::Process(crash) => {
                            // Told by an earlier daemon already: the program lives on.
                            let dealt_with = (tenants.upgrade())
                                .is_some_and(|it| it.groups.began_after(&crash.group, crash.age_ms));
                            if dealt_with {
                                continue;
                            }
                            let group = Arc::clone(&crash.group);
                            waiting.entry(Arc::clone(&group)).or_default().1.push(crash);
                            group
                        }
                        Failure::Server(group) => {
                            waiting.entry(Arc::clone(&group)).or_default().0 = true;
                            group
                        }
                        Failure::Stuck { tenant, pid } => {
                            if let Some(tenants) = tenants.upgrade() {
                                tenants.end_stuck(tenant, pid).await;
                            }
                            continue;
                        }
                    };
                    if busy.insert(Arc::clone(&group)) {
                        tasks.spawn(gathered(group));
                    }
                    continue;
                }
                None => return,
            },
            Some(done) = tasks.join_next() => done,
        };
        let Ok((group, dealt_with)) = done else {
            continue;
        };
        match (dealt_with, waiting.contains_key(&group)) {
            (false, _) => {
                let Some(tenants) = tenants.upgrade() else {
                    return;
                };
                let (server, crashes) = waiting.remove(&group).unwrap_or_default();
                tasks.spawn(async move {
                    // A daemon that stops has nothing more to deal with.
                    let _ = tenants.crashed(&group, server, crashes).await;
                    (group, true)
                });
            }
            (true, true) => {
                tasks.spawn(gathered(group));
            }
            (true, false) => {
                busy.remove(&group);
            }
        }
    }
}

async fn gathered(group: Arc<str>) -> (Arc<str>, bool) {
    tokio::time::sleep(GATHER).await;
    (group, false)
}

impl Tenants {
    /// Ends a process that has entered a group, unless it is of a tenant of that. Work that it leaves under way ends no other client.
    async fn check(&self, client: Client) {
        let secret = client.token.as_ref().ok().and_then(Option::as_deref);
        if self.belongs(&client.group, secret, &client.line).await {
            return;
        }
        let group = client.group.name().into();
        if let Some(files) = client.end().await {
            hold::until_ended(&self.scheduler, Left::Group(group), files)
                .await
                .await;
        }
    }

    /// A group has failed: records the faulting client and the members that it ended, and starts it again.
    async fn crashed(
        &self,
        group: &str,
        server: bool,
        mut crashes: Vec<Crash>,
    ) -> Result<(), Stopped> {
        let begun = Instant::now();
        let at = since_1970().as_secs();
        let give_up = |answer| Command::GiveUp(group.into(), answer);
        let more = self.scheduler.ask(give_up).await?;
        crashes.extend(more);
        let told = async {
            match server {
                true => Ok(()),
                false => self.all_told(group).await,
            }
        };
        let restarted = self.groups.restart(group, server, told).await?;
        let took = restarted.is_ok().then(|| begun.elapsed());
        let restarted_ms = took.map(|took| took.as_millis() as u64);
        let said = restarted.unwrap_or_else(|error| {
            tracing::warn!(group, %error, "the group cannot be started again");
            String::new()
        });
        let mut table = self.table.lock().await;
        let members: Vec<TenantId> = (table.tenants.values())
            .filter(|it| {
                it.membership
                    .as_ref()
                    .is_some_and(|membership| *membership.name() == *group)
            })
            .map(|it| it.id)
            .collect();
        // Whatever names it, no process outside the group can have done it.
        let whose = |pid| {
            let told = crashes.iter().find(|crash| crash.pid == pid);
            let joined = || {
                let mut all = table.joined.iter().rev();
                let own = |(it, tenant): &&(u32, TenantId)| *it == pid && members.contains(tenant);
                all.find(own).map(|(_, tenant)| *tenant)
            };
            told.map(|crash| crash.tenant).or_else(joined)
        };
        // A member may tell of it before the group does.
        let server_lost = server_lost(&crashes, server);
        let (faulting_client, evidence) = match server && server_lost {
            true => (None, SERVER.into()),
            false => faulting_client(&crashes, &said, &members, whose),
        };
        let known = |id: TenantId| {
            let mut all = table.ended.iter().chain(table.tenants.values());
            all.find(|it| it.id == id)
        };
        let blamed = faulting_client.and_then(known);
        let name = blamed.map(|it| it.name.clone());
        // A program that was ended from outside did not fault.
        let was_ended = |id| {
            crashes
                .iter()
                .any(|it| it.tenant == id && it.ended_at_work())
        };
        let crash_count = blamed.filter(|it| !was_ended(it.id)).and_then(|it| {
            let name = it.named.then_some(it.name.as_str());
            CrashCount::of(it.group.as_ref(), name, it.placement.fingerprint.as_deref())
        });
        // Some processes ended before they could be asked.
        let used = members.into_iter();
        let used = used.filter(|id| table.joined.iter().any(|(_, tenant)| tenant == id));
        // A process that an error ends has said so; one that loses its server may have had no time.
        let server_gone = server || server_lost;
        let lately = (UNNOTICED + GATHER).as_millis() as u64;
        let ended_by_it =
            |crash: &&Crash| crash.ended_ms.is_none_or(|it| server_gone && it <= lately);
        let crashed = crashes.iter().filter(ended_by_it);
        let mut others: Vec<String> = (crashed.map(|crash| crash.tenant).chain(used))
            .filter(|tenant| Some(*tenant) != faulting_client)
            .filter_map(|tenant| Some(known(tenant)?.name.clone()))
            .collect();
        others.sort();
        others.dedup();
        // That of the faulting client comes first: it may differ from what the others got.
        let own = (crashes.iter()).filter(|it| Some(it.tenant) == faulting_client);
        let error = own
            .chain(&crashes)
            .map(|crash| crash.error)
            .find(|it| *it != 0);
        // What came later was known to be coming.
        let noticed_after_ms = crashes.iter().find_map(|crash| crash.age_ms);
        let fault = Fault {
            number: table.faults.number + 1,
            at,
            group: group.to_owned(),
            error: error.unwrap_or(0),
            faulting_client: name,
            evidence,
            others,
            noticed_after_ms,
            restarted_ms,
        };
        tracing::warn!(group, error, faulting_client = ?fault.faulting_client, evidence = fault.evidence, others = ?fault.others,
            noticed_after_ms, restarted_ms, "a fault ended all processes in a group");
        self.record(&fault);
        table.faults.remember(fault, crash_count, took);
        Ok(())
    }

    /// Makes events of a fault.
    fn record(&self, fault: &Fault) {
        self.events.push(EventKind::Fault, None, fault.to_string());
        if let Some(ms) = fault.restarted_ms {
            let text = format!(
                "group {}: new members are admitted again after {ms} ms",
                fault.group
            );
            self.events.push(EventKind::Restart, None, text);
        }
    }

    /// Waits, though not for long, until all processes of a group that has failed have noticed: one that then waits for a server that is
    /// ended waits without end.
    async fn all_told(&self, group: &str) -> Result<(), Stopped> {
        let patience = Instant::now() + TOLD;
        while Instant::now() < patience {
            let unaware = |answer| Command::HasUnaware(group.into(), answer);
            if !self.scheduler.ask(unaware).await? {
                break;
            }
            tokio::time::sleep(GATHER).await;
        }
        Ok(())
    }

    /// Ends a process that waits for a server that is gone.
    async fn end_stuck(&self, id: TenantId, pid: u32) {
        let table = self.table.lock().await;
        let Some(tenant) = table.tenants.get(&id) else {
            return;
        };
        let Some(process) = tenant.process(pid) else {
            return;
        };
        tracing::warn!(
            tenant = tenant.name,
            pid,
            "it waits for a device that it lost with its group, and is ended"
        );
        process.kill();
    }
}

#[cfg(test)]
mod tests {
    use gpumux_core::space::Way;

    use super::{
        super::testing::{CONTROL, member, new, peer, placement, with_groups},
        *,
    };
    use crate::{api::types::NewTenant, link::SessionId};

    #[tokio::test]
    async fn error_older_than_its_group_ends_no_process() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let wish = member("notebook", "team", 0.0);
        tenants.create(&peer(0), wish).await.unwrap();
        let (tenant, _) = placement(&tenants, "notebook").await;
        let (tell, told) = unbounded_channel();
        tokio::spawn(watch_crashes(Arc::downgrade(&tenants), told));
        let hour = 3_600_000;
        for (error, age_ms) in [(1, Some(hour)), (2, None), (700, Some(0))] {
            let crash = Crash {
                group: "0/team".into(),
                tenant,
                pid: 7,
                error,
                busy: true,
                age_ms,
                ended_ms: None,
            };
            tell.send(Failure::Process(crash)).unwrap();
        }
        while tenants.faults().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(tenants.faults().await[0].error, 700);
    }

    #[tokio::test]
    async fn fault_has_the_error_of_the_client_that_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let mut crashes = Vec::new();
        for (name, pid, error) in [("other", 1, 700), ("bad", 77, 719)] {
            let wish = member(name, "team", 0.0);
            tenants.create(&peer(0), wish).await.unwrap();
            let (tenant, _) = placement(&tenants, name).await;
            crashes.push(Crash {
                pid,
                ..crash(tenant, error, None)
            });
        }
        let group = std::fs::read_dir(dir.path().join("groups")).unwrap().next();
        let log = group.unwrap().unwrap().path().join("control.out");
        std::fs::write(log, "Client 77 caused a fatal fault").unwrap();
        tenants.crashed("0/team", false, crashes).await.unwrap();
        let fault = tenants.faults().await.remove(0);
        assert_eq!(
            (fault.faulting_client.as_deref(), fault.error),
            (Some("bad"), 719)
        );
    }

    /// What a process of a tenant in the group `team` reported.
    fn crash(tenant: TenantId, error: u32, ended_ms: Option<u64>) -> Crash {
        Crash {
            group: "0/team".into(),
            tenant,
            pid: 1,
            error,
            busy: true,
            age_ms: None,
            ended_ms,
        }
    }

    #[tokio::test]
    async fn ended_member_is_named_if_another_reports_the_lost_server() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        for name in ["ended", "told"] {
            let wish = member(name, "team", 0.0);
            tenants.create(&peer(0), wish).await.unwrap();
        }
        let (ended, _) = placement(&tenants, "ended").await;
        let (told, _) = placement(&tenants, "told").await;
        for server in [true, false] {
            let crashes = vec![crash(told, 806, None), crash(ended, 0, Some(50))];
            tenants.crashed("0/team", server, crashes).await.unwrap();
            let fault = tenants.faults().await.pop().unwrap();
            assert_eq!(fault.faulting_client, None, "{fault:?}");
            assert_eq!(fault.others, ["ended", "told"]);
        }
    }

    #[tokio::test]
    async fn member_ended_at_work_is_named_but_may_join_again() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        for name in ["killed", "left"] {
            let wish = member(name, "team", 0.0);
            tenants.create(&peer(0), wish).await.unwrap();
        }
        let (killed, _) = placement(&tenants, "killed").await;
        let (left, _) = placement(&tenants, "left").await;
        for _ in 0..3 {
            let crashes = vec![crash(left, 700, None), crash(killed, 0, Some(50))];
            tenants.crashed("0/team", false, crashes).await.unwrap();
            let fault = tenants.faults().await.pop().unwrap();
            assert_eq!(
                fault.faulting_client.as_deref(),
                Some("killed"),
                "{fault:?}"
            );
            assert_eq!(fault.others, ["left"]);
        }
        assert!(
            tenants
                .table
                .lock()
                .await
                .faults
                .faulting_clients
                .is_empty()
        );
    }

    #[tokio::test]
    async fn crash_count_is_found_by_name_or_else_by_program() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let unnamed = |fingerprint: &str| NewTenant {
            name: None,
            program: Some("python3".into()),
            fingerprint: Some(fingerprint.into()),
            ..member("", "team", 0.0)
        };
        let fail = async |wish: NewTenant| {
            let name = tenants.create(&peer(0), wish).await.unwrap().name;
            let (tenant, found) = placement(&tenants, &name).await;
            let crash = Crash {
                group: "0/team".into(),
                tenant,
                pid: 77,
                error: 719,
                busy: true,
                age_ms: None,
                ended_ms: None,
            };
            let group = std::fs::read_dir(dir.path().join("groups")).unwrap().next();
            let log = group.unwrap().unwrap().path().join("control.out");
            std::fs::write(log, "Client 77 caused a fatal fault").unwrap();
            tenants.crashed("0/team", false, vec![crash]).await.unwrap();
            tenants.delete(0, &name).await.unwrap();
            found.way
        };
        // Another one has the name that they would have.
        let good = unnamed("good");
        tenants.create(&peer(0), good.clone()).await.unwrap();
        for wish in [unnamed("bad"), member("chosen", "team", 0.0)] {
            let ways = [fail(wish.clone()).await, fail(wish.clone()).await];
            assert_eq!(ways, [Way::Space; 2], "{wish:?}");
            assert_eq!(fail(wish).await, Way::Time);
        }
        let named = |name: &str, trust: &str| NewTenant {
            fingerprint: Some("bad".into()),
            ..member(name, trust, 0.0)
        };
        for (wish, way) in [
            (good, Way::Space),
            (named("python3-2", "team"), Way::Space),
            (named("chosen", "other"), Way::Space),
            (named("chosen", "team"), Way::Time),
        ] {
            let name = tenants.create(&peer(0), wish).await.unwrap().name;
            let (_, found) = placement(&tenants, &name).await;
            assert_eq!(found.way, way, "{name}: {}", found.reason);
            tenants.delete(0, &name).await.unwrap();
        }
    }

    #[tokio::test]
    async fn group_that_does_not_start_delays_no_faults_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let slow = dir.path().join("slow");
        let script = CONTROL.replace("$GPUMUX_TEST_SLOW", &slow.display().to_string());
        let tenants = with_groups(&dir, &script).await;
        for trust in ["a", "b"] {
            let wish = member(trust, trust, 0.0);
            tenants.create(&peer(0), wish).await.unwrap();
        }
        // The group of `b` has no members any more: there is nothing to wait for.
        tenants.delete(0, "b").await.unwrap();
        std::fs::write(&slow, "").unwrap();
        tenants.groups.lose("0/a").await;
        let (tell, told) = unbounded_channel();
        tokio::spawn(watch_crashes(Arc::downgrade(&tenants), told));
        for group in ["0/a", "0/b"] {
            tell.send(Failure::Server(group.into())).unwrap();
        }
        let faults = async || {
            let all = tenants.faults().await;
            all.into_iter().map(|it| it.group).collect::<Vec<_>>()
        };
        while faults().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(faults().await, ["0/b"]);
        // What is reported of a group meanwhile is dealt with after that.
        tell.send(Failure::Server("0/a".into())).unwrap();
        std::fs::remove_file(&slow).unwrap();
        while faults().await.len() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(faults().await[1..], ["0/a", "0/a"]);
    }

    #[tokio::test]
    async fn process_outside_a_group_is_never_its_faulting_client() {
        let dir = tempfile::tempdir().unwrap();
        let tenants = with_groups(&dir, CONTROL).await;
        let created = tenants.create(&peer(0), new("outside")).await.unwrap();
        let mine = peer(0);
        tenants
            .join(SessionId(1), &mine, Some(&created.token))
            .await
            .unwrap();
        tenants
            .create(&peer(0), member("bad", "team", 0.0))
            .await
            .unwrap();
        let (bad, _) = placement(&tenants, "bad").await;
        let crash = |pid| Crash {
            group: "0/team".into(),
            tenant: bad,
            pid,
            error: 700,
            busy: true,
            age_ms: None,
            ended_ms: None,
        };
        let say = |pid: u32| {
            let group = std::fs::read_dir(dir.path().join("groups")).unwrap().next();
            let log = group.unwrap().unwrap().path().join("control.out");
            std::fs::write(log, format!("Client {pid} caused a fatal fault")).unwrap();
        };
        for (named, faulting_client) in [(mine.pid, None), (7, Some("bad"))] {
            say(named);
            let crashes = vec![crash(7)];
            tenants.crashed("0/team", false, crashes).await.unwrap();
            let fault = tenants.faults().await.pop().unwrap();
            assert_eq!(
                fault.faulting_client.as_deref(),
                faulting_client,
                "{fault:?}"
            );
        }
        let numbers = tenants.faults().await;
        let numbers: Vec<u64> = numbers.iter().map(|it| it.number).collect();
        assert_eq!(numbers, [1, 2]);
    }
}
