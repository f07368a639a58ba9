//! What users may have, on which devices, and what is declared for them.

use super::*;

/// Tenants of a daemon with this configuration and these devices of 80 GiB.
async fn with_devices(dir: &tempfile::TempDir, config: &str, devices: u32) -> Arc<Tenants> {
    let tenants = crate::tenants::testing::with_config(dir, toml::from_str(config).unwrap()).await;
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
    let error = tenants
        .movable(0, "web", |_| true)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("4711/web, 4712/web"), "{error}");
    let error = tenants
        .movable(4711, "4712/web", |_| true)
        .await
        .unwrap_err();
    assert!(matches!(error, TenantError::NotYours(_)), "{error}");
    let names: Vec<_> = tenants.names().await.into_values().collect();
    assert_eq!(names, ["4711/web", "4712/web"]);
    tenants.delete(0, "4711/web").await.unwrap();
    assert_eq!(id(Some(0), "web").await, Some(all[1].id));
    // The next daemon knows whose it is, too.
    let next = self::tenants(&dir).await;
    assert_eq!(next.list().await[0].full_name(), "4712/web");
}
