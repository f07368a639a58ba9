//! What was set for a name stays.

use super::*;

#[tokio::test]
async fn settings_of_a_name_hold_for_the_next_tenant_and_daemon() {
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
    assert!(error.to_string().contains("gpumux set --forget serve"));
    // What was set cannot be the reason.
    let sleeps = SpecChange {
        sleep_after_s: Some(Some(60)),
        ..SpecChange::default()
    };
    tenants.create(&peer(0), new("large")).await.unwrap();
    tenants.change(0, "large", &sleeps).await.unwrap();
    tenants.delete(0, "large").await.unwrap();
    let wish = NewTenant {
        spec: half,
        ..new("large")
    };
    let error = tenants.create(&peer(0), wish).await.unwrap_err();
    assert!(matches!(error, TenantError::Refused(..)), "{error}");
}
