//! Another vendor's queues: frozen and thawed, but without timeslices.

use gpumux_rm::{Cause, ControlFailure, Controls, Group};

use super::*;

const DEVICE: &str = "QUEUES-0";

/// An error that NVIDIA's driver does not have.
#[derive(Debug, thiserror::Error)]
#[error("a queue has no timeslice")]
struct NoTimeslice;

struct Queue;

fn none<T>(control: &'static str) -> Result<T, ControlFailure> {
    Err(ControlFailure::new(
        control,
        Cause::Unsupported,
        NoTimeslice,
    ))
}

impl Controls for Queue {
    fn set_timeslice(&self, _: u64) -> Result<(), ControlFailure> {
        none("set timeslice")
    }
    fn timeslice(&self) -> Result<u64, ControlFailure> {
        none("get timeslice")
    }
    fn freeze(&self) -> Result<(), ControlFailure> {
        unreachable!("it is not controlled")
    }
    fn thaw(&self) -> Result<(), ControlFailure> {
        Ok(())
    }
    fn device_uuid(&self) -> Result<String, ControlFailure> {
        Ok(DEVICE.into())
    }
}

/// A node of that vendor, and a process whose queue it is asked to control.
async fn node(mechanism: Mechanism) -> (Node, OwnedFd) {
    let vendor: Vendor = |_, _, _: Group, _| Ok((Box::new(Queue), true));
    let node = Node::of(vendor, 64, mechanism).await;
    let device = crate::devices::Known {
        uuid: DEVICE.into(),
        ..Default::default()
    };
    let known = |answer| scheduler::Command::KnowDevices(vec![device], answer);
    node.scheduler.ask(known).await.unwrap();
    let session = node.session().await;
    let file = node.driver.open();
    send(&session, &fake::group(0, 1), Some(file.as_fd()));
    (node, session)
}

#[tokio::test(flavor = "multi_thread")]
async fn vendor_without_timeslices_has_launches_scheduled() {
    let (node, session) = node(Mechanism::Auto).await;
    assert_eq!(answer(&session).await, Some(Daemon::Permits { key: 0 }));
    let device = DEVICE.into();
    send(&session, &Shim::AwaitsPermits { key: 0, device }, None);
    let domain = node.until_domains(1).await.remove(0);
    assert_eq!(domain.mechanism, Mechanism::Launches, "{domain:?}");
    let why = domain.refused.unwrap_or_default();
    assert!(
        why.contains("get timeslice: a queue has no timeslice"),
        "{why}"
    );
    assert_eq!(domain.error, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn vendor_without_timeslices_is_left_with_a_reason() {
    let (_node, session) = node(Mechanism::Controls).await;
    refused(&session, "get timeslice: a queue has no timeslice").await;
}
