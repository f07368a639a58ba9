//! Tenants come and go: what each gets, under which name, and for how long.

mod again;
mod policies;
mod settings;

use std::sync::Arc;

use gpumux_core::{
    Class, Hints, MAX_NAME, TenantSpec, is_name,
    space::{self, Way},
};
use tokio::task::JoinSet;

use super::{
    model::{Tenant, TenantError, find},
    registry::Tenants,
    table::Table,
    testing::{CONTROL, child, member, new, peer, placement, tenants, with_groups},
};
use crate::{
    api::types::{Created, Exit, NewCurve, NewTenant, Placement, SpecChange},
    groups::{self, Key},
    link::SessionId,
    peer::ProcessId,
    scheduler::{Command, Happening, Withheld},
    secret::secret,
};

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
async fn group_has_no_more_members_than_room_for_many_at_once() {
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
    let (mut child, other) = child(own);
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
        .unwrap_err()
        .to_string();
    let user = async |uid| tenants.users.policy(uid).await.user.clone();
    let (own, other) = (user(1000).await, user(1001).await);
    let said = format!(
        "runs as user {other}, and tenant `mine`, whose secret the process has, is of user {own}:"
    );
    assert!(error.contains(&said), "{error}");
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
    let of = |curve: &[(u32, f64)]| NewCurve {
        curve: curve.to_vec(),
        ..NewCurve::default()
    };
    for curve in [
        &[][..],
        &[(50, -1.0)],
        &[(50, f64::NAN)],
        &[(50, 5e-324)],
        &[(50, 1e16)],
        &[(1, 1.0); 101],
    ] {
        let error = tenants.teach(0, "train", &of(curve)).await.unwrap_err();
        assert!(matches!(error, TenantError::BadCurve), "{error}");
    }
    let bandwidth = Some(space::Bandwidth {
        demand: 1.1,
        sensitivity: 0.0,
    });
    let wrong = NewCurve {
        bandwidth,
        ..of(&[(100, 1.0)])
    };
    let error = tenants.teach(0, "train", &wrong).await.unwrap_err();
    assert!(matches!(error, TenantError::BadBandwidth), "{error}");
    (tenants.teach(1000, "train", &of(&[(100, 1.0)])).await).unwrap();
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
    let ((mut a, by_a), (mut b, by_b)) = (child(0), child(0));
    let [of_a, of_b] = [&by_a, &by_b].map(|peer| peer.process.unwrap());
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
    let (mut child, creator) = child(0);
    let spec = TenantSpec {
        class: Class::Batch,
        guaranteed: 0.5,
        ..TenantSpec::default()
    };
    let wish = NewTenant {
        spec: SpecChange {
            class: Some(Class::Batch),
            guaranteed: Some(0.5),
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
    // While there is no room for it, it is refused, and may try again.
    let full = NewTenant {
        spec: SpecChange {
            guaranteed: Some(0.7),
            ..SpecChange::default()
        },
        ..new("hoarder")
    };
    let hoarder = tenants.create(&peer(0), full).await.unwrap();
    let (session, secret) = (SessionId(1), Some(created.token.as_str()));
    let refused = tenants.join(session, &peer(0), secret).await;
    assert!(
        matches!(refused, Err(TenantError::Refused(_))),
        "{refused:?}"
    );
    let less = SpecChange {
        guaranteed: Some(0.0),
        ..SpecChange::default()
    };
    tenants.change(0, &hoarder.name, &less).await.unwrap();
    let (_, name) = tenants.join(session, &peer(0), secret).await.unwrap();
    let all = tenants.list().await;
    let joined = all.iter().find(|it| it.name == name).unwrap();
    assert_eq!((name.as_str(), &joined.spec), ("script", &spec));
    assert!(
        tenants
            .join(SessionId(2), &peer(0), Some("guess"))
            .await
            .is_err()
    );
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
