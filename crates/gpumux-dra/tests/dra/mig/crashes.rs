//! The driver, the daemon or the machine ends in the middle: no instance stays, and none of others goes.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn driver_killed_after_any_step_leaves_no_instance() {
    let (machine, mut node) = machine(&[]).await;
    let theirs = make(&node, "1g.10gb", 6).await;
    let dir = machine.dir().to_owned();
    let first = Driver::start_on(&node, Some(&dir), "pod-a", None);
    node.api.until_published().await;
    drop(first);
    let free = node.scheduler.clone();
    for (round, step) in Step::ALL.into_iter().enumerate() {
        let going = step >= Step::Undescribed;
        let claim = claim(&mut node, &format!("claim{round}"), "2g.20gb");
        if going {
            let driver = Driver::start_on(&node, Some(&dir), "pod-a", None);
            let kubelet = driver.kubelet(&node).await;
            kubelet.prepare_one(&claim).await.unwrap();
        }
        let driver = Driver::start_on(&node, Some(&dir), "pod-a", Some(step));
        driver.dies_at(&node, &claim, step).await;
        let driver = Driver::start_on(&node, Some(&dir), "pod-a", None);
        let kubelet = driver.kubelet(&node).await;
        if !going && round % 2 == 0 {
            kubelet.prepare_one(&claim).await.unwrap();
            let made = instances(&node).await;
            assert_eq!(made.len(), 2, "{step:?}");
            let own = made.iter().find(|it| **it != theirs).unwrap();
            let tenant = node.tenant(&claim).await.unwrap();
            assert_eq!(tenant.may_use, [own.compute_instances[0].device.clone()]);
        }
        kubelet.unprepare_one(&claim).await.unwrap();
        assert_eq!(
            instances(&node).await,
            std::slice::from_ref(&theirs),
            "{step:?}"
        );
        assert_eq!(node.records(), 0, "{step:?}");
        assert!(node.tenant(&claim).await.is_none(), "{step:?}");
        node.scheduler = free.clone();
    }
}

/// The pod is gone when the driver starts again, and the kubelet asks for nothing: what a record names is undone all the same.
#[tokio::test(flavor = "multi_thread")]
async fn half_prepared_claim_is_undone_when_the_driver_starts() {
    let (machine, mut node) = machine(&[]).await;
    let dir = machine.dir().to_owned();
    for step in [
        Step::Recorded,
        Step::Partitioned,
        Step::Named,
        Step::Tenants,
    ] {
        let driver = Driver::start_on(&node, Some(&dir), "pod-a", Some(step));
        node.api.until_published().await;
        let kubelet = driver.kubelet(&node).await;
        let claim = claim(&mut node, &format!("{step:?}").to_lowercase(), "4g.40gb");
        kubelet.prepare_one(&claim).await.unwrap_err();
        driver.died();
        assert_eq!(node.records(), 1, "{step:?}");
        assert_eq!(
            instances(&node).await.len(),
            usize::from(step != Step::Recorded)
        );
        let _driver = Driver::start_on(&node, Some(&dir), "pod-a", None);
        until("the end of the record", async || node.records() == 0).await;
        assert_eq!(instances(&node).await, [], "{step:?}");
        assert!(node.tenant(&claim).await.is_none(), "{step:?}");
        node.scheduler = Scheduler::default();
    }
}

/// A GPU instance is there without a compute instance, and the answer was lost.
#[tokio::test(flavor = "multi_thread")]
async fn daemon_killed_while_it_makes_an_instance_is_asked_again() {
    let fault = "kill@1:nvmlGpuInstanceCreateComputeInstance";
    let (mut machine, mut node) = machine(&[("GPUMUX_EMU_FAULT", fault)]).await;
    let (driver, kubelet) = driver(&machine, &node).await;
    let claim = claim(&mut node, "a", "1g.20gb");
    kubelet.prepare_one(&claim).await.unwrap_err();
    machine.await_daemons_end();
    machine.set_variable("GPUMUX_EMU_FAULT", "");
    machine.start_daemon();
    // The driver looks itself, every few seconds, and may have removed it.
    let half = instances(&node).await;
    assert!(half.len() <= 1 && half.iter().all(|it| it.compute_instances.is_empty()));
    kubelet.prepare_one(&claim).await.unwrap();
    let made = instances(&node).await;
    assert_eq!((made.len(), made[0].compute_instances.len()), (1, 1));
    kubelet.unprepare_one(&claim).await.unwrap();
    assert_eq!(instances(&node).await, []);
    driver.stop().await;
}

/// The compute instance is gone, and its GPU instance is not.
#[tokio::test(flavor = "multi_thread")]
async fn daemon_killed_while_it_removes_an_instance_is_asked_again() {
    let fault = "kill@1:nvmlGpuInstanceDestroy";
    let (mut machine, mut node) = machine(&[("GPUMUX_EMU_FAULT", fault)]).await;
    let (driver, kubelet) = driver(&machine, &node).await;
    let claim = claim(&mut node, "a", "2g.20gb");
    kubelet.prepare_one(&claim).await.unwrap();
    kubelet.unprepare_one(&claim).await.unwrap_err();
    machine.await_daemons_end();
    machine.set_variable("GPUMUX_EMU_FAULT", "");
    machine.start_daemon();
    // The driver looks itself, every few seconds, and may have made it whole.
    assert_eq!(instances(&node).await.len(), 1);
    assert_eq!(node.records(), 1);
    kubelet.unprepare_one(&claim).await.unwrap();
    assert_eq!((instances(&node).await.len(), node.records()), (0, 0));
    driver.stop().await;
}

/// The daemon reports that nothing was made: nothing is recorded, and the claim can be prepared again.
#[tokio::test(flavor = "multi_thread")]
async fn instance_that_the_driver_refuses_leaves_nothing() {
    for call in [
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance",
    ] {
        let fault = format!("fail@1:{call}");
        let (machine, mut node) = machine(&[("GPUMUX_EMU_FAULT", &fault)]).await;
        let (driver, kubelet) = driver(&machine, &node).await;
        let claim = claim(&mut node, "a", "1g.10gb+me");
        let error = kubelet.prepare_one(&claim).await.unwrap_err();
        assert!(error.contains("NVML cannot make the"), "{error}");
        assert_eq!((instances(&node).await.len(), node.records()), (0, 0));
        kubelet.prepare_one(&claim).await.unwrap();
        assert_eq!(instances(&node).await.len(), 1);
        driver.stop().await;
    }
}

/// As after a reboot: instances are gone, records are not.
#[tokio::test(flavor = "multi_thread")]
async fn instances_that_are_gone_are_made_again() {
    let (machine, mut node) = machine(&[]).await;
    let (driver, kubelet) = driver(&machine, &node).await;
    let claim = claim(&mut node, "a", "3g.40gb");
    kubelet.prepare_one(&claim).await.unwrap();
    let made = instances(&node).await;
    let reset = async || {
        if let Some(tenant) = node.tenant(&claim).await {
            node.daemon.delete(&tenant.name).await.unwrap();
        }
        let gpu = node.daemon.mig_gpus().await.unwrap().remove(0);
        let device = gpu.instances[0].compute_instances[0].device.clone();
        let id = gpu.instances[0].gpu_instance;
        let removed = node.daemon.remove_mig(&gpu.uuid, id, Some(&device));
        removed.await
    };
    // The driver looks itself, every few seconds, and may be faster.
    until("the reset", async || reset().await.is_ok()).await;
    kubelet.prepare_one(&claim).await.unwrap();
    assert_eq!(instances(&node).await, made);
    until("the reset", async || reset().await.is_ok()).await;
    until("the instance and its tenant", async || {
        driver.engine.restore().await.unwrap();
        instances(&node).await == made && node.tenant(&claim).await.is_some()
    })
    .await;
    kubelet.unprepare_one(&claim).await.unwrap();
    assert_eq!(instances(&node).await, []);
    driver.stop().await;
}
