//! `gpumux fleet usage`: the GPUs that tenants with recorded use need together.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Context;
use gpumux_fleet::{
    serving::Service,
    usage::{self, Outcome, Request, Row, Setting, Way},
};
use serde::Serialize;

use super::{
    lists::{NONE, rows},
    models::{self, Limits},
};
use crate::output;

/// Plan by the first half of a recording of GPU use, and play the second half
#[derive(clap::Args)]
pub(super) struct Args {
    /// The recording (CSV: tenant,window,gpu_milli,memory_mib)
    #[arg(long, value_name = "FILE", conflicts_with = "requests")]
    usage: Option<PathBuf>,
    /// Requests instead (CSV: name,at_s,prompt_tokens,output_tokens)
    #[arg(long, value_name = "FILE", required_unless_present = "usage", requires_all = ["models", "profile"])]
    requests: Option<PathBuf>,
    /// The models that the requests name (as for `gpumux fleet models`)
    #[arg(long, value_name = "FILE")]
    models: Option<PathBuf>,
    /// Measured step times of the models (as for `gpumux fleet models`)
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    limits: Limits,
    /// Memory of a GPU, in MiB
    #[arg(long, value_name = "MIB")]
    card: u32,
    /// Length of a window, in seconds
    #[arg(long, value_name = "N", default_value_t = 60.0)]
    window: f64,
    /// A guarantee covers so many percent of the windows of the first half
    #[arg(long, value_name = "N", default_value_t = 99, value_parser = clap::value_parser!(u32).range(1..=100))]
    covers: u32,
    /// Memory that moves between GPU and host, in MiB per second
    #[arg(long, value_name = "MIB", default_value_t = 25_600.0)]
    moved: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    tenants: usize,
    /// Mean number of GPUs in use in the second half.
    used_gpus: f64,
    ways: BTreeMap<String, Option<Outcome>>,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.window > 0.0 && args.moved > 0.0,
        "--window {} and --moved {} must be more than 0",
        args.window,
        args.moved
    );
    let recording = match (&args.requests, &args.models, &args.profile) {
        (Some(requests), Some(models), Some(profile)) => {
            let services: Vec<Service> = rows(models)?;
            let requests: Vec<Request> = rows(requests)?;
            let (profile, terms) = (models::profile(profile)?, args.limits.terms(args.card));
            usage::of_requests(&requests, &services, &profile, &terms, args.window)
                .with_context(|| format!("in {}", models.display()))?
        }
        _ => {
            let rows = args.usage.iter().map(|file| rows::<Row>(file));
            let rows = rows.collect::<anyhow::Result<Vec<_>>>()?;
            usage::recording(rows.into_iter().flatten())
        }
    };
    let setting = Setting {
        card_mib: args.card,
        covers_percent: args.covers,
        window_s: args.window,
        moved_mib_s: args.moved,
    };
    let (tenants, used_gpus) = usage::compared(&recording, &setting);
    anyhow::ensure!(
        tenants > 0,
        "no tenant has windows in both halves of the recording: there is nothing to compare"
    );
    let played = |way: Way| (way.name(), usage::play(&recording, way, &setting));
    let ways: Vec<_> = Way::ALL.into_iter().map(played).collect();
    let percent = |value: f64| format!("{value:.1}%");
    let mut rows = output::head("SHARING|GPUS|ATTAINED|RECEIVED|OUT OF MEMORY");
    rows.extend(ways.iter().map(|(name, found)| {
        match found {
            Some(found) => vec![
                name.clone(),
                found.gpus.to_string(),
                percent(found.attained),
                percent(found.received),
                percent(found.out_of_memory),
            ],
            None => [&**name, NONE, NONE, NONE, NONE]
                .map(str::to_owned)
                .to_vec(),
        }
    }));
    let head = format!("{tenants} tenants use {used_gpus:.1} GPUs on average\n");
    match args.json {
        true => output::json(&Report {
            tenants,
            used_gpus,
            ways: ways.into_iter().collect(),
        }),
        false => output::print(&(head + &output::table(&rows))),
    }
}
