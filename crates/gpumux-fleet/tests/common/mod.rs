//! Nodes and demands for tests.

use gpumux_fleet::{
    fleet::{Gpus, Place},
    model::{Class, Demand, NodeSpec, WHOLE},
};
use proptest::prelude::*;

pub(crate) fn node(number: usize, gpus: u8, model: u8) -> NodeSpec {
    NodeSpec {
        name: format!("node-{number}"),
        cpu_milli: 16_000 * u32::from(gpus.max(1)),
        memory_mib: 65_536,
        gpus,
        model,
        gpu_memory_mib: 16_384,
        domain: number as u32 / 2,
    }
}

pub(crate) fn share(milli: u32) -> Demand {
    Demand {
        cpu_milli: 1_000,
        memory_mib: 64,
        gpus: 1,
        milli,
        ..Demand::default()
    }
}

pub(crate) fn whole(gpus: u8) -> Demand {
    Demand {
        gpus,
        ..share(WHOLE)
    }
}

pub(crate) fn place(node: u32, gpu: usize) -> Place {
    Place {
        node,
        gpus: Gpus::default().with(gpu),
    }
}

pub(crate) fn demands() -> impl Strategy<Value = Demand> {
    let shares = prop_oneof![
        Just((0, 0)),
        (1..10u32).prop_map(|tenth| (1, tenth * 100)),
        (1..5u8).prop_map(|n| (n, WHOLE))
    ];
    (shares, 0..8u32, 0..3u8, 0..4u32, any::<bool>(), 0..3u16).prop_map(
        |((gpus, milli), cpus, model, memory, guaranteed, bandwidth)| Demand {
            cpu_milli: cpus * 1_000,
            memory_mib: 1_024,
            gpus,
            milli,
            models: if model < 2 {
                Default::default()
            } else {
                gpumux_fleet::model::ModelSet::ANY.with(1)
            },
            gpu_memory_mib: if gpus == 0 { 0 } else { memory * 3_000 },
            bandwidth_milli: if gpus == 0 { 0 } else { bandwidth * 400 },
            class: if guaranteed {
                Class::Guaranteed
            } else {
                Class::Preemptible
            },
        },
    )
}

pub(crate) fn nodes() -> impl Strategy<Value = Vec<NodeSpec>> {
    prop::collection::vec((0..5u8, 0..2u8), 1..8).prop_map(|nodes| {
        (0..)
            .zip(nodes)
            .map(|(number, (gpus, model))| node(number, gpus, model))
            .collect()
    })
}
