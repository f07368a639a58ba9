//! `gpumux fleet models`: the GPUs that models with rates need.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::Context;
use gpumux_fleet::{
    model::Pod,
    serving::{self, Mesh, Profile, Service, Slot, Terms},
    sizing::{Sharing, needed},
};
use serde::{Deserialize, Serialize};

use super::lists::{NONE, load_nodes, mean, rows};
use crate::{output, units};

/// Find the GPUs that models need to serve their requests, for each way of sharing GPUs
#[derive(clap::Args)]
pub(super) struct Args {
    /// The fleet's nodes (CSV), with the column gpu_memory_mib
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,
    /// The models (CSV: name,model,rate,prompt_tokens,output_tokens,weights_mib,kv_bytes,fewest_gpus)
    #[arg(long, value_name = "FILE")]
    models: PathBuf,
    /// Measured step times (JSON: model, GPUs, percent, batch, tokens: prefill and decoding in ms)
    #[arg(long, value_name = "FILE")]
    profile: PathBuf,
    #[command(flatten)]
    limits: Limits,
    /// A placement as MuxServe plans it (CSV: mesh,gpus,name,percent), to compare with
    #[arg(long, value_name = "FILE")]
    placement: Option<PathBuf>,
    /// Orders of the models for the size of the fleet, each with the seeds 42, 43, ...
    #[arg(long, value_name = "N", default_value_t = 1)]
    seeds: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a model may use and how slow it may be.
#[derive(clap::Args)]
pub(super) struct Limits {
    /// A request may take so many times as long as alone on whole GPUs
    #[arg(long, value_name = "N", default_value_t = 8.0)]
    slower: f64,
    /// GPU memory, in MiB, that a model uses besides weights and tokens
    #[arg(long, value_name = "MIB", default_value_t = 6144)]
    working: u32,
}

impl Limits {
    pub(super) fn terms(&self, card_mib: u32) -> Terms {
        Terms {
            card_mib,
            working_mib: self.working,
            slower: self.slower,
        }
    }
}

/// The step times in a file.
pub(super) fn profile(file: &Path) -> anyhow::Result<Profile> {
    let profile = serde_json::from_str(&units::text_of(file)?);
    profile.with_context(|| format!("in {}", file.display()))
}

#[derive(Deserialize)]
struct Placed {
    mesh: String,
    gpus: u32,
    name: String,
    percent: u32,
}

#[derive(Serialize)]
struct Way {
    sharing: String,
    /// The smallest fleet of such nodes for all models, mean over the orders. None if four times the nodes are too few.
    gpus: Option<f64>,
    /// Shares of GPUs that the models ask for together, in GPUs.
    asked: f64,
    /// Memory that they ask for, in GPUs.
    asked_memory: f64,
    /// Of all requests, in percent: served on the nodes of the list.
    served: f64,
}

#[derive(Serialize)]
struct Report {
    gpus: usize,
    rate: f64,
    slots: BTreeMap<String, Slot>,
    ways: Vec<Way>,
    /// Of all requests, in percent: served by the placement that was given, as its own planner estimates.
    placement: Option<f64>,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (nodes, _) = load_nodes(&args.nodes)?;
    let card_mib = nodes.iter().map(|node| node.gpu_memory_mib).min();
    let card_mib = card_mib.filter(|mib| *mib > 0).with_context(|| {
        format!(
            "{}: a node has no gpu_memory_mib: the memory of models cannot be placed without",
            args.nodes.display()
        )
    })?;
    let services: Vec<Service> = rows(&args.models)?;
    let (profile, terms) = (profile(&args.profile)?, args.limits.terms(card_mib));
    let slots = |whole| -> anyhow::Result<Vec<Slot>> {
        let slot = |service| Ok(profile.smallest(service, &terms, whole)?);
        services.iter().map(slot).collect()
    };
    let (whole, shared) = (slots(true)?, slots(false)?);
    let mut ways = Vec::new();
    // None of the tenants is best effort: elastic is the same as guaranteed.
    for sharing in Sharing::ALL
        .into_iter()
        .filter(|way| *way != Sharing::Elastic)
    {
        let slots = match sharing {
            Sharing::Exclusive => &whole,
            _ => &shared,
        };
        let tenants = serving::tenants(&services, slots);
        let pods: Vec<Pod> = tenants.into_iter().map(|(_, pod)| pod).collect();
        ways.push(Way {
            sharing: sharing.name(),
            gpus: mean(&(42..42 + args.seeds).collect::<Vec<_>>(), |seed| {
                needed(&nodes, &pods, sharing, *seed, 1, &[]).map(|need| need.gpus as f64)
            }),
            asked: slots.iter().map(asked).sum(),
            asked_memory: (slots.iter())
                .map(|slot| f64::from(slot.copies * slot.gpus) * f64::from(slot.memory_mib))
                .sum::<f64>()
                / f64::from(card_mib),
            served: serving::served(&nodes, &services, slots, sharing, (&profile, &terms))?,
        });
    }
    let placement = args.placement.as_ref().map(|file| {
        let placed: Vec<Placed> = rows(file)?;
        Ok::<_, anyhow::Error>(estimated(&placed, &services, &profile, &terms))
    });
    let report = Report {
        gpus: nodes.iter().map(|node| usize::from(node.gpus)).sum(),
        rate: services.iter().map(|service| service.rate).sum(),
        slots: (services.iter().map(|service| service.name.clone()))
            .zip(shared)
            .collect(),
        ways,
        placement: placement.transpose()?,
    };
    match args.json {
        true => output::json(&report),
        false => output::print(&text(&report)),
    }
}

/// Shares of GPUs of all copies, in GPUs.
fn asked(slot: &Slot) -> f64 {
    f64::from(slot.copies * slot.gpus * slot.percent) / 100.0
}

/// The part of all requests that the placement serves, in percent.
fn estimated(placed: &[Placed], services: &[Service], profile: &Profile, terms: &Terms) -> f64 {
    let mut meshes: BTreeMap<&str, Mesh<'_>> = BTreeMap::new();
    for placed in placed {
        let Some(service) = services.iter().find(|service| service.name == placed.name) else {
            continue;
        };
        let mesh = meshes.entry(&placed.mesh).or_insert(Mesh {
            gpus: placed.gpus,
            services: Vec::new(),
        });
        mesh.services.push((service, placed.percent));
    }
    let mut served = 0.0;
    for mesh in meshes.values() {
        let rates = serving::together(profile, mesh, terms);
        for ((service, _), rate) in mesh.services.iter().zip(rates) {
            served += rate.unwrap_or(0.0).min(service.rate);
        }
    }
    served * 100.0 / services.iter().map(|service| service.rate).sum::<f64>()
}

fn text(report: &Report) -> String {
    let mut rows = output::head("SHARING|GPUS|SHARES|MEMORY|SERVED");
    rows.extend(report.ways.iter().map(|way| {
        vec![
            way.sharing.clone(),
            way.gpus.map_or(NONE.into(), |gpus| format!("{gpus:.0}")),
            format!("{:.1}", way.asked),
            format!("{:.1}", way.asked_memory),
            format!("{:.1}%", way.served),
        ]
    }));
    if let Some(served) = report.placement {
        let row = [
            "the placement given",
            NONE,
            NONE,
            NONE,
            &format!("{served:.1}%"),
        ];
        rows.push(row.map(str::to_owned).to_vec());
    }
    let Report {
        gpus, rate, slots, ..
    } = report;
    let models = slots.len();
    let head = format!(
        "{models} models, {rate:.1} requests per second; SHARES and MEMORY are what they ask for, in GPUs; SERVED is on {gpus} GPUs\n"
    );
    head + &output::table(&rows)
}
