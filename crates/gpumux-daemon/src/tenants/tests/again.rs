//! Requests that are made again.

use super::*;

/// The daemon was killed after it had made the tenant, and before it had answered.
#[tokio::test]
async fn request_that_is_made_again_has_one_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let own = rustix::process::getuid().as_raw();
    let wish = |name: Option<&str>, token: &str| NewTenant {
        name: name.map(Into::into),
        program: Some("train".into()),
        token: Some(token.into()),
        spec: SpecChange {
            guaranteed: Some(0.6),
            ..SpecChange::default()
        },
        ..NewTenant::default()
    };
    let token = secret();
    for name in [Some("a"), Some("a"), None, None] {
        let next = tenants(&dir).await;
        let made = next.create(&peer(own), wish(name, &token)).await.unwrap();
        assert_eq!(made.name, name.unwrap_or("train"));
        assert_eq!(next.list().await.len(), 1);
    }
    // It takes no other's place: neither with another secret, nor as another process.
    let next = tenants(&dir).await;
    let other = next
        .create(&peer(own), wish(Some("train"), &secret()))
        .await;
    assert!(matches!(other, Err(TenantError::Taken(_))), "{other:?}");
    let (mut child, child_peer) = child(own);
    let other = next.create(&child_peer, wish(None, &token)).await;
    assert!(matches!(other, Err(TenantError::BadToken)), "{other:?}");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A process undoes controls, and the daemon is killed.
#[tokio::test]
async fn what_does_not_hold_is_known_to_the_next_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let own = rustix::process::getuid().as_raw();
    let first = tenants(&dir).await;
    first.create(&peer(own), new("a")).await.unwrap();
    let what = Withheld {
        lapsed: false,
        lowered: true,
    };
    let tenant = first.list().await[0].id;
    first.happened(Happening::Withheld { tenant, what }).await;
    let next = tenants(&dir).await;
    assert_eq!(next.list().await[0].withheld, what);
    let view = next.view().await.unwrap();
    let tenant = next.list().await[0].id;
    assert!(view.tampering[&tenant].lowered);
}

#[tokio::test]
async fn longest_name_is_the_same_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let first = tenants(&dir).await;
    let longest = "x".repeat(MAX_NAME);
    first.create(&peer(0), new(&longest)).await.unwrap();
    // Named after a program of this name: there is room for its number.
    let program = NewTenant {
        program: Some(longest.clone()),
        ..NewTenant::default()
    };
    let second = first.create(&peer(0), program).await.unwrap().name;
    assert!(is_name(&second) && second.ends_with("x-2"), "{second}");
    let next = tenants(&dir).await;
    let names = next.list().await.into_iter().map(|it| it.name);
    assert_eq!(names.collect::<Vec<_>>(), [longest, second]);
}

/// What a request changes after that, the next daemon does not know.
#[tokio::test]
async fn request_to_a_daemon_that_leaves_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = tenants(&dir).await;
    first.create(&peer(0), new("a")).await.unwrap();
    first.close().await;
    let change = SpecChange {
        class: Some(Class::Latency),
        ..SpecChange::default()
    };
    let changed = first.change(0, "a", &change).await;
    assert!(
        matches!(changed, Err(TenantError::Stopped(_))),
        "{changed:?}"
    );
    let reported = first.report_exit(0, "a", Exit::default()).await;
    assert!(
        matches!(reported, Err(TenantError::Stopped(_))),
        "{reported:?}"
    );
    let deleted = first.delete(0, "a").await;
    assert!(
        matches!(deleted, Err(TenantError::Stopped(_))),
        "{deleted:?}"
    );
}
