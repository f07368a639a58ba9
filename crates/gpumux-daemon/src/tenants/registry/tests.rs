use gpumux_core::{Class, space};
use tokio::task::JoinSet;

use super::{
    super::testing::{CONTROL, member, new, peer, placement, tenants, with_groups},
    *,
};
use crate::groups;

#[tokio::test]
async fn full_disk_stops_neither_the_daemon_nor_new_tenants() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tenants.json.new", "settings.json.new"] {
        std::fs::create_dir(dir.path().join(file)).unwrap();
    }
    let tenants = tenants(&dir).await;
    tenants.create(&peer(1), new("a")).await.unwrap();
    let change = SpecChange {
        class: Some(Class::Latency),
        ..SpecChange::default()
    };
    let changed = tenants.change(1, "a", &change).await;
    assert!(
        matches!(changed, Err(TenantError::NotKept(_))),
        "{changed:?}"
    );
    let all = tenants.list().await;
    assert_eq!(all[0].spec.class, Class::Latency, "it holds nevertheless");
}

#[tokio::test]
async fn request_that_cannot_be_met_starts_no_group() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = with_groups(&dir, CONTROL).await;
    let bad_name = member("no name", "a", 0.1);
    let bad_token = NewTenant {
        token: Some("x".into()),
        ..member("b", "b", 0.1)
    };
    let too_much = member("c", "c", 1.5);
    for new in [bad_name, bad_token, too_much] {
        let own = rustix::process::getuid().as_raw();
        assert!(tenants.create(&peer(own), new).await.is_err());
    }
    assert!(!dir.path().join("groups").exists(), "a group was made");
}

#[tokio::test]
async fn a_group_has_no_more_members_than_room_however_many_come_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = with_groups(&dir, CONTROL).await;
    let mut come = JoinSet::new();
    for n in 0..groups::ROOM + 12 {
        let tenants = Arc::clone(&tenants);
        let wish = member(&n.to_string(), "team", 0.0);
        come.spawn(async move { tenants.create(&peer(0), wish).await.unwrap() });
    }
    come.join_all().await;
    let all = tenants.list().await;
    let (inside, outside): (Vec<_>, Vec<_>) =
        all.iter().partition(|it| it.placement.way == Way::Space);
    assert_eq!((inside.len(), outside.len()), (groups::ROOM, 12));
    assert!(inside.iter().all(|it| it.membership.is_some()));
    for tenant in outside {
        assert!(tenant.placement.reason.contains("is full"), "{tenant:?}");
        assert!(tenant.membership.is_none());
    }
}

#[tokio::test]
async fn newcomer_does_not_get_what_a_guarantee_holds() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = with_groups(&dir, CONTROL).await;
    let (peer, auto) = (peer(0), |name: &str, guaranteed| NewTenant {
        sharing: space::Sharing::Auto,
        ..member(name, "team", guaranteed)
    });
    let (sure, plain) = tokio::join!(
        tenants.create(&peer, auto("sure", 0.6)),
        tenants.create(&peer, auto("plain", 0.0)),
    );
    for created in [sure, plain] {
        created.unwrap();
    }
    let (sure, apart) = placement(&tenants, "sure").await;
    let (plain, confined) = placement(&tenants, "plain").await;
    if sure < plain {
        assert_eq!((apart.way, confined.sm_percent), (Way::Space, Some(40)));
    } else {
        assert_eq!((apart.way, confined.sm_percent), (Way::Time, None));
    }
    // One that comes later finds members that keep what they have.
    tenants.create(&peer, auto("late", 0.1)).await.unwrap();
    let (_, late) = placement(&tenants, "late").await;
    assert_eq!(late.way, Way::Time);
    assert!(late.reason.contains("guarantee leaves"), "{late:?}");
}

#[tokio::test]
async fn process_that_becomes_another_tenant_leaves_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    let wish = |name: &str, leaves: Option<&Created>| NewTenant {
        leaves: leaves.map(|it| it.token.clone()),
        spec: SpecChange {
            guaranteed: Some(0.6),
            ..SpecChange::default()
        },
        ..new(name)
    };
    let own = rustix::process::getuid().as_raw();
    let outer = tenants.create(&peer(own), wish("outer", None)).await;
    let outer = outer.unwrap();
    // Another process of the first tenant's: that one lives on, with its guarantee.
    let mut child = std::process::Command::new("sleep")
        .arg("60")
        .spawn()
        .unwrap();
    let process = ProcessId::of(child.id());
    let other = Peer {
        uid: own,
        pid: child.id(),
        process,
        fd: process.and_then(ProcessId::watch),
    };
    let refused = tenants.create(&other, wish("inner", Some(&outer))).await;
    assert!(
        matches!(refused, Err(TenantError::Refused(_))),
        "{refused:?}"
    );
    let names = async || {
        let all = tenants.list().await;
        all.into_iter().map(|it| it.name).collect::<Vec<_>>()
    };
    assert_eq!(names().await, ["outer"]);
    child.kill().unwrap();
    child.wait().unwrap();
    // Its own process: what it held is free for the new one.
    let inner = tenants
        .create(&peer(own), wish("inner", Some(&outer)))
        .await;
    inner.unwrap();
    assert_eq!(names().await, ["inner"]);
    let ends = tenants.ends().await;
    let ends: Vec<_> = ends.iter().map(|it| (&*it.name, &*it.reason)).collect();
    assert_eq!(ends, [("outer", "its process became another tenant")]);
}

#[tokio::test]
async fn only_its_owner_and_root_have_a_say() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    let created = tenants.create(&peer(1000), new("mine")).await.unwrap();
    let change = SpecChange {
        class: Some(Class::Latency),
        ..SpecChange::default()
    };
    let error = tenants.change(1001, "mine", &change).await.unwrap_err();
    assert!(matches!(error, TenantError::NotYours(_)), "{error}");
    let error = tenants.delete(1001, "mine").await.unwrap_err();
    assert!(matches!(error, TenantError::NotYours(_)), "{error}");
    let token = Some(created.token.as_str());
    let error = tenants
        .join(SessionId(1), &peer(1001), token)
        .await
        .unwrap_err();
    assert!(matches!(error, TenantError::UnknownToken), "{error}");
    assert_eq!(tenants.list().await[0].spec, TenantSpec::default());
    tenants.change(1000, "mine", &change).await.unwrap();
    tenants
        .join(SessionId(2), &peer(1000), token)
        .await
        .unwrap();
    tenants.join(SessionId(3), &peer(0), token).await.unwrap();
    assert_eq!(tenants.list().await[0].spec.class, Class::Latency);
    let file = std::fs::metadata(dir.path().join("tenants.json")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.permissions());
    assert_eq!(mode & 0o777, 0o600, "it has secrets in it");
}

#[tokio::test]
async fn what_makes_no_sense_of_a_program_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    for (wish, wrong) in [
        (
            NewTenant {
                fingerprint: Some("../x".into()),
                ..new("a")
            },
            "`../x` is no fingerprint",
        ),
        (
            NewTenant {
                sm_percent: Some(101),
                ..new("a")
            },
            "101% is no part",
        ),
        (
            NewTenant {
                utility: vec![(0, 1.0)],
                ..new("a")
            },
            "no curve",
        ),
    ] {
        let error = tenants.create(&peer(0), wish).await.unwrap_err();
        assert!(error.to_string().contains(wrong), "{error}");
    }
    for curve in [
        &[][..],
        &[(50, -1.0)],
        &[(50, f64::NAN)],
        &[(50, 5e-324)],
        &[(50, 1e16)],
        &[(1, 1.0); 101],
    ] {
        let error = tenants.teach(0, "train", curve).await.unwrap_err();
        assert!(matches!(error, TenantError::BadCurve), "{error}");
    }
    tenants.teach(1000, "train", &[(100, 1.0)]).await.unwrap();
    let error = tenants.unlearn(1001, "train").await.unwrap_err();
    assert!(matches!(error, TenantError::NothingKnown(_)), "{error}");
    tenants.unlearn(1000, "train").await.unwrap();
}

#[tokio::test]
async fn kept_tenant_needs_no_holder_and_is_open_to_its_secret() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    let secret = "0123456789abcdef0123456789abcdef";
    let kept = |name: &str, secret: &str| NewTenant {
        kept: true,
        token: Some(secret.into()),
        ..new(name)
    };
    let error = tenants
        .create(&peer(1000), kept("pod", secret))
        .await
        .unwrap_err();
    assert!(matches!(error, TenantError::NotTrusted), "{error}");
    let error = tenants
        .create(&peer(0), kept("pod", "short"))
        .await
        .unwrap_err();
    assert!(matches!(error, TenantError::BadToken), "{error}");
    let created = tenants.create(&peer(0), kept("pod", secret)).await.unwrap();
    assert_eq!(created.token, secret);
    let error = tenants
        .create(&peer(0), kept("thief", secret))
        .await
        .unwrap_err();
    assert!(matches!(error, TenantError::BadToken), "{error}");
    let (id, _) = tenants
        .join(SessionId(1), &peer(1000), Some(secret))
        .await
        .unwrap();
    let error = tenants.delete(0, "pod").await.unwrap_err();
    assert!(matches!(error, TenantError::Busy(_, 1)), "{error}");
    tenants.leave(SessionId(1), id, peer(1000).pid).await;
    assert_eq!(tenants.list().await.len(), 1);
    tenants.delete(0, "pod").await.unwrap();
    let error = tenants
        .join(SessionId(2), &peer(0), Some(secret))
        .await
        .unwrap_err();
    assert!(matches!(error, TenantError::UnknownToken), "{error}");
}

#[tokio::test]
async fn confined_tenant_is_confined_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    let on = |name: &str, device: &str| NewTenant {
        kept: true,
        devices: vec![device.into()],
        spec: SpecChange {
            guaranteed: Some(0.9),
            ..SpecChange::default()
        },
        ..new(name)
    };
    let error = tenants
        .create(&peer(0), on("bad", "GPU 0"))
        .await
        .unwrap_err();
    assert!(matches!(error, TenantError::NoDevice(..)), "{error}");
    tenants.create(&peer(0), on("a", "GPU-0")).await.unwrap();
    tenants.create(&peer(0), on("b", "GPU-1")).await.unwrap();
    drop(tenants);
    let next = self::tenants(&dir).await;
    for device in ["GPU-0", "GPU-1"] {
        let error = next.create(&peer(0), on("c", device)).await.unwrap_err();
        assert!(error.to_string().contains(device), "{error}");
    }
    next.create(&peer(0), on("c", "GPU-2")).await.unwrap();
}

#[tokio::test]
async fn member_of_a_group_is_known_by_its_secret_or_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    let child = || {
        let mut command = std::process::Command::new("sleep");
        let child = command.arg("100").spawn().unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        let fd = process.watch();
        let peer = Peer {
            uid: 0,
            pid: child.id(),
            process: Some(process),
            fd,
        };
        (child, process, peer)
    };
    let ((mut a, of_a, by_a), (mut b, of_b, by_b)) = (child(), child());
    let inside = tenants.create(&by_a, new("inside")).await.unwrap().token;
    let outside = tenants.create(&by_b, new("outside")).await.unwrap().token;
    let team = Key {
        uid: 0,
        trust: "team".into(),
    };
    {
        let mut table = tenants.table.lock().await;
        let mut all = table.tenants.values_mut();
        all.find(|it| it.name == "inside").unwrap().group = Some(team.clone());
    }
    let none = ProcessId { pid: 1, start: 0 };
    for (token, line, expected) in [
        (Some(&*inside), &[][..], true),
        (Some(&*inside), &[of_b], true),
        (Some(&*outside), &[of_a], false),
        (None, &[none, of_a, of_b], true),
        (None, &[of_b, of_a], false),
        (Some("garbage"), &[none, of_b], false),
        (Some("garbage"), &[none], false),
        (None, &[], false),
    ] {
        let found = tenants.belongs(&team, token, line).await;
        assert_eq!(found, expected, "{token:?} {line:?}");
    }
    for child in [&mut a, &mut b] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    while !tenants.list().await.is_empty() {
        tokio::task::yield_now().await;
    }
    // A process that the tenant has left behind.
    assert!(tenants.belongs(&team, Some(&inside), &[]).await);
    assert!(!tenants.belongs(&team, None, &[of_a]).await);
}

#[tokio::test]
async fn a_late_process_finds_its_tenant_although_it_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    let mut child = std::process::Command::new("sleep")
        .arg("100")
        .spawn()
        .unwrap();
    let process = ProcessId::of(child.id());
    let fd = process.and_then(ProcessId::watch);
    let creator = Peer {
        uid: 0,
        pid: child.id(),
        process,
        fd,
    };
    let spec = TenantSpec {
        class: Class::Batch,
        ..TenantSpec::default()
    };
    let wish = NewTenant {
        spec: SpecChange {
            class: Some(Class::Batch),
            ..SpecChange::default()
        },
        ..new("script")
    };
    let created = tenants.create(&creator, wish).await.unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    while !tenants.list().await.is_empty() {
        tokio::task::yield_now().await;
    }
    let (_, name) = tenants
        .join(SessionId(1), &peer(0), Some(&created.token))
        .await
        .unwrap();
    assert_eq!(
        (name.as_str(), &tenants.list().await[0].spec),
        ("script", &spec)
    );
    assert!(
        tenants
            .join(SessionId(2), &peer(0), Some("guess"))
            .await
            .is_err()
    );
}

#[tokio::test]
async fn what_was_set_for_a_name_is_there_for_the_next_tenant_and_the_next_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let first = tenants(&dir).await;
    first.create(&peer(1000), new("train")).await.unwrap();
    let change = |class, weight| SpecChange {
        class,
        weight,
        ..SpecChange::default()
    };
    let (batch, heavy) = (
        change(Some(Class::Batch), Some(2.0)),
        change(None, Some(5.0)),
    );
    first.change(1000, "train", &batch).await.unwrap();
    first.change(0, "train", &heavy).await.unwrap();
    // A tenant without a chosen name is not remembered.
    let unnamed = first.create(&peer(1000), NewTenant::default()).await;
    let unnamed = unnamed.unwrap().name;
    first.change(1000, &unnamed, &batch).await.unwrap();

    std::fs::remove_file(dir.path().join("tenants.json")).unwrap();
    let next = tenants(&dir).await;
    let spec = async |tenants: &Arc<Tenants>, uid, wish: NewTenant| {
        let name = tenants.create(&peer(uid), wish).await.unwrap().name;
        let table = tenants.table.lock().await;
        let spec = find(table.tenants.values(), Some(uid), &name)
            .unwrap()
            .spec
            .clone();
        (spec.class, spec.weight)
    };
    let wish = |name: &str, spec| NewTenant { spec, ..new(name) };
    let none = SpecChange::default();
    assert_eq!(
        spec(&next, 1001, wish("train", none.clone())).await,
        (Class::Standard, 1.0),
        "it is another user's"
    );
    next.delete(1001, "train").await.unwrap();
    // What is said now comes before what was set then.
    assert_eq!(
        spec(&next, 1000, wish("train", change(None, Some(7.0)))).await,
        (Class::Batch, 7.0)
    );
    next.delete(1000, "train").await.unwrap();
    assert_eq!(
        spec(&next, 1000, wish("train", none.clone())).await,
        (Class::Batch, 5.0)
    );
    next.delete(1000, "train").await.unwrap();
    let nothing = wish(&unnamed, none.clone());
    assert_eq!(spec(&next, 1000, nothing).await, (Class::Standard, 1.0));

    let error = next.forget(1001, "train").await.unwrap_err();
    assert!(matches!(error, TenantError::NothingSet(_)), "{error}");
    next.forget(1000, "train").await.unwrap();
    let last = tenants(&dir).await;
    assert_eq!(
        spec(&last, 1000, wish("train", none)).await,
        (Class::Standard, 1.0)
    );
}

/// Whatever can be set, memory and hints too.
#[tokio::test]
async fn all_that_can_be_set_is_there_for_the_next_daemon() {
    let dir = tempfile::tempdir().unwrap();
    // No `..`: what is new must be set here too.
    let change = SpecChange {
        class: Some(Class::Latency),
        guaranteed: Some(0.25),
        limit: Some(0.5),
        weight: Some(3.0),
        latency_objective_us: Some(Some(7000)),
        hints: Some(Hints::Manual),
        memory_guaranteed: Some(1 << 30),
        memory_limit: Some(Some(2 << 30)),
        memory_policy: Some(gpumux_core::MemoryPolicy::Wait),
        sleep_after_s: Some(Some(60)),
    };
    let first = tenants(&dir).await;
    first.create(&peer(0), new("serve")).await.unwrap();
    first.change(0, "serve", &change).await.unwrap();
    std::fs::remove_file(dir.path().join("tenants.json")).unwrap();
    let next = tenants(&dir).await;
    next.create(&peer(0), new("serve")).await.unwrap();
    let wanted = change.apply(&TenantSpec::default());
    assert_eq!(next.list().await[0].spec, wanted);
    // The one that lives is known to the daemon after that, from the other file.
    std::fs::remove_file(dir.path().join("settings.json")).unwrap();
    let last = tenants(&dir).await;
    assert_eq!(last.list().await[0].spec, wanted);
    // What is cleared is cleared for the next daemon too.
    let cleared: SpecChange =
        serde_json::from_str(r#"{"memory_limit": null, "sleep_after_s": null}"#).unwrap();
    last.change(0, "serve", &change).await.unwrap();
    last.change(0, "serve", &cleared).await.unwrap();
    std::fs::remove_file(dir.path().join("tenants.json")).unwrap();
    let last = tenants(&dir).await;
    last.create(&peer(0), new("serve")).await.unwrap();
    let wanted = TenantSpec {
        memory_limit: None,
        sleep_after_s: None,
        ..wanted
    };
    assert_eq!(last.list().await[0].spec, wanted);
}

#[tokio::test]
async fn an_old_setting_without_room_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    tenants.create(&peer(0), new("serve")).await.unwrap();
    let half = SpecChange {
        guaranteed: Some(0.6),
        ..SpecChange::default()
    };
    tenants.change(0, "serve", &half).await.unwrap();
    tenants.delete(0, "serve").await.unwrap();
    tenants.create(&peer(0), new("other")).await.unwrap();
    tenants.change(0, "other", &half).await.unwrap();
    let error = tenants.create(&peer(0), new("serve")).await.unwrap_err();
    assert!(matches!(error, TenantError::Set(..)), "{error}");
    assert!(error.to_string().contains("gpumux set serve --forget"));
}

#[tokio::test]
async fn a_process_without_a_secret_stays_what_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    let (first, name) = tenants.join(SessionId(1), &peer(0), None).await.unwrap();
    let (again, _) = tenants.join(SessionId(2), &peer(0), None).await.unwrap();
    assert_eq!(first, again);
    let change = SpecChange {
        class: Some(Class::Batch),
        ..SpecChange::default()
    };
    tenants.change(0, &name, &change).await.unwrap();
    // Another daemon, after this one was killed.
    let next = self::tenants(&dir).await;
    let (_, same) = next.join(SessionId(1), &peer(0), None).await.unwrap();
    assert_eq!(same, name);
    assert_eq!(next.list().await[0].spec.class, Class::Batch);
}

#[test]
fn names_are_made_from_anything() {
    let mut table = Table::default();
    for (wish, name) in [
        ("/usr/bin/python3", "python3"),
        ("../..", "tenant"),
        ("", "tenant"),
        ("-rf", "tenant"),
        ("my job\n", "myjob"),
    ] {
        assert_eq!(table.free_name(0, wish), name);
    }
    let long = table.free_name(0, &"x".repeat(500));
    assert!(is_name(&long));
    for name in ["python3", "python3-2"] {
        let name = name.to_owned();
        let id = table.next_id();
        let tenant = Tenant {
            name,
            ..Tenant::example(id, Placement::default())
        };
        table.insert(tenant);
    }
    assert_eq!(table.free_name(0, "python3"), "python3-3");
}

/// Tenants of a daemon with this configuration and these devices of 80 GiB.
async fn with_devices(dir: &tempfile::TempDir, config: &str, devices: u32) -> Arc<Tenants> {
    let tenants = super::super::testing::with_config(dir, toml::from_str(config).unwrap()).await;
    let known = (0..devices).map(|gpu| crate::devices::Known {
        uuid: format!("GPU-{gpu}"),
        gpu,
        memory_bytes: 80 << 30,
        state: "ok".into(),
        ..crate::devices::Known::default()
    });
    let known: Vec<_> = known.collect();
    let know = |answer| Command::KnowDevices(known, answer);
    tenants.scheduler.ask(know).await.unwrap();
    tenants
}

fn guaranteed(name: &str, share: f64, gib: u64, devices: &[&str]) -> NewTenant {
    NewTenant {
        devices: devices.iter().map(|it| (*it).into()).collect(),
        spec: SpecChange {
            guaranteed: Some(share),
            memory_guaranteed: Some(gib << 30),
            ..SpecChange::default()
        },
        ..new(name)
    }
}

#[tokio::test]
async fn tenants_that_could_meet_on_a_device_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = with_devices(&dir, "", 2).await;
    let make = async |wish| tenants.create(&peer(0), wish).await;
    make(guaranteed("a", 0.7, 0, &[])).await.unwrap();
    let error = make(guaranteed("b", 0.7, 0, &[])).await.unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("cannot guarantee 70% of GPU 0 (GPU-0): guaranteed to a (70%)"),
        "{error}"
    );
    tenants.delete(0, "a").await.unwrap();
    make(guaranteed("a", 0.7, 60, &["0"])).await.unwrap();
    make(guaranteed("b", 0.7, 60, &["1"])).await.unwrap();
    let error = make(guaranteed("c", 0.0, 60, &["GPU-1"])).await;
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("60.0 GiB of GPU 1 (GPU-1): guaranteed to b (60.0 GiB)"),
        "{error}"
    );
}

#[tokio::test]
async fn visible_devices_are_those_of_the_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = with_devices(&dir, "", 2).await;
    for gpu in ["0", "1"] {
        let wish = NewTenant {
            visible: Some(gpu.into()),
            ..guaranteed(gpu, 0.7, 60, &[])
        };
        tenants.create(&peer(0), wish).await.unwrap();
    }
    let devices: Vec<_> = tenants
        .list()
        .await
        .into_iter()
        .map(|it| it.devices)
        .collect();
    assert_eq!(devices, [["GPU-0"], ["GPU-1"]]);
    let wish = guaranteed("named", 0.1, 0, &["1", "0"]);
    let created = tenants.create(&peer(0), wish).await.unwrap();
    assert_eq!(created.environment["CUDA_VISIBLE_DEVICES"], "1,0");
}

#[tokio::test]
async fn ordinary_user_cannot_take_the_whole_machine() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = with_devices(&dir, "", 1).await;
    let greedy = guaranteed("greedy", 1.0, 78, &[]);
    let error = tenants.create(&peer(4711), greedy).await.unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("4711 may be guaranteed at most 80% of it"),
        "{error}"
    );
    for n in 0..2 {
        let wish = guaranteed(&n.to_string(), 0.4, 30, &[]);
        tenants.create(&peer(4711), wish).await.unwrap();
    }
    let split = guaranteed("split", 0.1, 0, &[]);
    assert!(tenants.create(&peer(4711), split).await.is_err());
    let other = guaranteed("other", 0.1, 1, &[]);
    tenants.create(&peer(4712), other.clone()).await.unwrap();
    assert!(tenants.create(&peer(4713), other.clone()).await.is_err());
    tenants.create(&peer(0), other).await.unwrap();
    let more = SpecChange {
        guaranteed: Some(0.5),
        ..SpecChange::default()
    };
    let error = tenants.change(4711, "0", &more).await.unwrap_err();
    assert!(error.to_string().contains("1 (40%)"), "{error}");
}

#[tokio::test]
async fn policy_of_a_user_bounds_class_and_number_of_tenants() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[defaults]\nclasses = ['batch']\nmax_tenants = 1\n[users.4712]\nmax_tenants = 2";
    let tenants = with_devices(&dir, config, 1).await;
    let of_class = |name: &str, class| NewTenant {
        spec: SpecChange {
            class: Some(class),
            ..SpecChange::default()
        },
        ..new(name)
    };
    let latency = of_class("a", Class::Latency);
    let error = tenants
        .create(&peer(4711), latency.clone())
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("class latency: use batch"),
        "{error}"
    );
    tenants.create(&peer(0), latency).await.unwrap();
    for (uid, most) in [(4711, 1), (4712, 2)] {
        for n in 0..most {
            let name = n.to_string();
            let batch = of_class(&name, Class::Batch);
            tenants.create(&peer(uid), batch).await.unwrap();
        }
        let more = tenants
            .create(&peer(uid), of_class("more", Class::Batch))
            .await;
        let error = more.unwrap_err().to_string();
        assert!(
            error.contains(&format!("{uid} has {most} tenants")),
            "{error}"
        );
    }
}

#[tokio::test]
async fn declared_tenant_gets_what_is_declared_unless_told_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[tenants.web]\nclass = 'latency'\nweight = 2.0\n\
                  [tenants.'4711/web']\nguaranteed = 0.3\ngpu = ['1']";
    let tenants = with_devices(&dir, config, 2).await;
    tenants.create(&peer(4711), new("web")).await.unwrap();
    tenants.create(&peer(0), new("web")).await.unwrap();
    let all = tenants.list().await;
    let shown = |at: usize| {
        (
            all[at].spec.class,
            all[at].spec.guaranteed,
            all[at].devices.clone(),
        )
    };
    assert_eq!(shown(0), (Class::Latency, 0.3, vec!["GPU-1".to_owned()]));
    assert_eq!(shown(1), (Class::Latency, 0.0, Vec::new()));
    tenants.delete(0, "web").await.unwrap();
    let heavy = NewTenant {
        spec: SpecChange {
            weight: Some(5.0),
            ..SpecChange::default()
        },
        ..new("web")
    };
    tenants.create(&peer(0), heavy).await.unwrap();
    let all = tenants.list().await;
    assert_eq!(all[1].spec.weight, 5.0);
}

#[tokio::test]
async fn two_users_may_each_have_a_tenant_of_one_name() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = tenants(&dir).await;
    for uid in [4711, 4712] {
        tenants.create(&peer(uid), new("web")).await.unwrap();
        let error = tenants.create(&peer(uid), new("web")).await.unwrap_err();
        assert!(matches!(error, TenantError::Taken(_)), "{error}");
    }
    let all = tenants.list().await;
    let id = async |uid, name: &str| {
        let all = tenants.list().await;
        find(all.iter(), uid, name).ok().map(|it| it.id)
    };
    assert_eq!(id(Some(4711), "web").await, Some(all[0].id));
    assert_eq!(id(Some(4712), "web").await, Some(all[1].id));
    assert_eq!(id(Some(0), "4712/web").await, Some(all[1].id));
    let error = tenants.own(0, "web").await.unwrap_err().to_string();
    assert!(error.contains("4711/web, 4712/web"), "{error}");
    let error = tenants.own(4711, "4712/web").await.unwrap_err();
    assert!(matches!(error, TenantError::NotYours(_)), "{error}");
    let names: Vec<_> = tenants.names().await.into_values().collect();
    assert_eq!(names, ["4711/web", "4712/web"]);
    tenants.delete(0, "4711/web").await.unwrap();
    assert_eq!(id(Some(0), "web").await, Some(all[1].id));
    // The next daemon knows whose it is, too.
    let next = self::tenants(&dir).await;
    assert_eq!(next.list().await[0].full_name(), "4712/web");
}
