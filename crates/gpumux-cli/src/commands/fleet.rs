//! `gpumux fleet`: places tenants on the GPUs of a fleet, replays workloads on one, and orders nodes for the Kubernetes scheduler.

mod lists;
mod models;
mod usage;

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, time::Instant};

use anyhow::Context;
use gpumux_fleet::{
    engine::{Engine, Moves},
    fleet::Fleet,
    lifetimes::{self, Lived},
    model::{Demand, Models, NodeSpec, Pod, scaled},
    replay::{Point, Policy, Replay, Run},
    rules::Rule,
    sizing::{Need, Sharing, needed},
    trace,
};
use serde::Serialize;

use crate::{output, units};
use lists::{NONE, load_nodes, mean};

const EXAMPLES: &str = "\
Examples:
  gpumux fleet place --nodes scenarios/fleet/nodes.csv --pods scenarios/fleet/pods.csv
  gpumux fleet simulate --nodes scenarios/fleet/nodes.csv --pods scenarios/fleet/pods.csv --seeds 2
  gpumux fleet simulate --nodes scenarios/fleet/nodes.csv --pods scenarios/fleet/pods.csv --json
  gpumux fleet size --nodes scenarios/fleet/nodes.csv --pods scenarios/fleet/pods.csv
  gpumux fleet size --nodes scenarios/fleet/nodes.csv --pods scenarios/fleet/pods.csv --over-time
  gpumux fleet usage --usage scenarios/fleet/usage.csv --card 81920

Lists are CSV files with the columns of Alibaba's cluster-trace-gpu-v2023.
Nodes: sn,cpu_milli,memory_mib,gpu,model; optional: gpu_memory_mib
Pods: name,cpu_milli,memory_mib,num_gpu,gpu_milli;
optional: gpu_spec,qos,creation_time,deletion_time,gpu_memory_mib
gpu_milli is the share of each GPU in thousandths, gpu_spec the accepted models, separated by |.";

/// Place tenants on the GPUs of a fleet, or simulate it
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Place(PlaceArgs),
    Simulate(SimulateArgs),
    Size(SizeArgs),
    Models(models::Args),
    Usage(usage::Args),
    Serve(gpumux_dra::extender::Args),
}

#[derive(clap::Args)]
struct Lists {
    /// The fleet's nodes (CSV)
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,
    /// The tenants (CSV)
    #[arg(long, value_name = "FILE")]
    pods: PathBuf,
    /// Repeat or cut the list of nodes to this number of GPUs
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
}

/// Choose a node and GPUs for each tenant of a list, in its order
#[derive(clap::Args)]
struct PlaceArgs {
    #[command(flatten)]
    lists: Lists,
    /// GPU memory, in MiB, that may be moved between GPUs of a node to make room for a tenant [default: nothing]
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 0,
        hide_default_value = true
    )]
    move_up_to: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Let tenants arrive until they asked for 130% of the GPUs, and compare policies
#[derive(clap::Args)]
struct SimulateArgs {
    #[command(flatten)]
    lists: Lists,
    /// Policies: gpumux, fgd, best-fit, gpu-packing, gpu-clustering, dot-product, random [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = policy)]
    policy: Vec<(String, Policy)>,
    /// Orders of arrival, each with the seeds 42, 43, ...
    #[arg(long, value_name = "N", default_value_t = 1)]
    seeds: u64,
    /// Print JSON, with a point per percent of arrived demand
    #[arg(long)]
    json: bool,
}

/// Find the smallest fleet for 99% of the tenants' shares, for each way of sharing GPUs
#[derive(clap::Args)]
struct SizeArgs {
    #[command(flatten)]
    lists: Lists,
    /// Orders of nodes and tenants, each with the seeds 42, 43, ...
    #[arg(long, value_name = "N", default_value_t = 1)]
    seeds: u64,
    /// Round the size up to a multiple of N GPUs
    #[arg(long, value_name = "N", default_value_t = 8)]
    step: usize,
    /// Let tenants come and go at their times; then 99% of them must find room when they come
    #[arg(long)]
    over_time: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Place(args) => place(args),
        Command::Simulate(args) => simulate(args),
        Command::Size(args) if args.over_time => size_over_time(args),
        Command::Size(args) => size(args),
        Command::Models(args) => models::run(args),
        Command::Usage(args) => usage::run(args),
        Command::Serve(args) => {
            crate::bounded_log::start();
            gpumux_dra::extender::run(args).map_err(Into::into)
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

fn policies() -> impl Iterator<Item = (&'static str, Policy)> {
    let rules = Rule::ALL
        .into_iter()
        .map(|rule| (rule.name(), Policy::Rule(rule)));
    rules.chain([("gpumux", Policy::Gpumux(Moves::default()))])
}

fn policy(name: &str) -> Result<(String, Policy), String> {
    let found = policies().find(|(known, _)| *known == name);
    let names = || {
        policies()
            .map(|(name, _)| name)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let (name, policy) = found.ok_or_else(|| format!("no policy `{name}`: use {}", names()))?;
    Ok((name.to_owned(), policy))
}

fn load(lists: &Lists) -> anyhow::Result<(Vec<NodeSpec>, Vec<Pod>, Models)> {
    let (mut nodes, mut models) = load_nodes(&lists.nodes)?;
    let pods = trace::pods(&units::text_of(&lists.pods)?, &mut models);
    let pods = pods.with_context(|| format!("in {}", lists.pods.display()))?;
    if let Some(gpus) = lists.gpus {
        nodes = scaled(&nodes, gpus);
    }
    anyhow::ensure!(
        !pods.is_empty(),
        "no pod is in {}: there is nothing to place",
        lists.pods.display()
    );
    Ok((nodes, pods, models))
}

#[derive(Serialize)]
struct Placed<'a> {
    pod: &'a str,
    node: Option<&'a str>,
    gpus: Vec<usize>,
    /// Tenants that were moved on that node first: name and new GPU.
    moved: Vec<(&'a str, usize)>,
}

fn place(args: &PlaceArgs) -> anyhow::Result<()> {
    let (nodes, pods, _) = load(&args.lists)?;
    let workload: Vec<Demand> = pods.iter().map(|pod| pod.demand).collect();
    let mut engine = Engine::new(&nodes, &workload, Vec::new());
    let mut fleet = Fleet::new(nodes.clone());
    // The lists name no card's memory; 16 GiB is the smallest card of the trace.
    let moves = Moves {
        most_mib: args.move_up_to,
        card_mib: 16_384,
    };
    let mut placed = Vec::new();
    for (id, pod) in (0..).zip(&pods) {
        let admitted = engine.admit(&mut fleet, id, &pod.demand, moves)?;
        let moved = admitted.iter().flat_map(|admitted| &admitted.moves);
        let moved = moved.filter_map(|made| {
            Some((
                pods.get(made.tenant as usize)?.name.as_str(),
                made.to.gpus.iter().next()?,
            ))
        });
        placed.push(Placed {
            pod: &pod.name,
            moved: moved.collect(),
            node: admitted
                .as_ref()
                .map(|admitted| nodes[admitted.place.node as usize].name.as_str()),
            gpus: admitted.map_or(Vec::new(), |admitted| admitted.place.gpus.iter().collect()),
        });
    }
    if args.json {
        return output::json(&placed);
    }
    let mut rows = output::head("POD|NODE|GPUS");
    rows.extend(placed.iter().map(|placed| {
        let gpus: Vec<String> = placed.gpus.iter().map(usize::to_string).collect();
        vec![
            placed.pod.to_owned(),
            placed.node.unwrap_or("none has room").to_owned(),
            gpus.join(","),
        ]
    }));
    let fits = placed.iter().filter(|placed| placed.node.is_some()).count();
    output::print(&(output::table(&rows) + &format!("{fits} of {} pods placed\n", placed.len())))
}

#[derive(Serialize)]
struct Report {
    gpus: u64,
    nodes: usize,
    pods: usize,
    policies: BTreeMap<String, Vec<Timed>>,
}

/// A replay, and what a decision took on this machine.
#[derive(Serialize)]
struct Timed {
    seed: u64,
    /// Time per arrival, including the accounting of the replay, in microseconds.
    place_us_p50: f64,
    place_us_p99: f64,
    place_us_max: f64,
    /// Time to prepare the policy, in milliseconds.
    prepare_ms: f64,
    #[serde(flatten)]
    run: Run,
}

fn simulate(args: &SimulateArgs) -> anyhow::Result<()> {
    anyhow::ensure!(args.seeds > 0, "--seeds 0 simulates nothing: use 1 or more");
    let (nodes, pods, _) = load(&args.lists)?;
    let workload: Vec<Demand> = pods.iter().map(|pod| pod.demand).collect();
    let chosen: Vec<(String, Policy)> = match args.policy.is_empty() {
        true => policies()
            .map(|(name, policy)| (name.to_owned(), policy))
            .collect(),
        false => args.policy.clone(),
    };
    let seeds = 42..42 + args.seeds;
    let runs = |policy| {
        seeds
            .clone()
            .map(|seed| timed(&nodes, &workload, policy, seed))
            .collect()
    };
    let report = Report {
        gpus: nodes.iter().map(|node| u64::from(node.gpus)).sum(),
        nodes: nodes.len(),
        pods: pods.len(),
        policies: chosen
            .into_iter()
            .map(|(name, policy)| (name, runs(policy)))
            .collect(),
    };
    match args.json {
        true => output::json(&report),
        false => output::print(&text(&report)),
    }
}

fn timed(nodes: &[NodeSpec], workload: &[Demand], policy: Policy, seed: u64) -> Timed {
    let started = Instant::now();
    let mut replay = Replay::new(nodes, workload, policy, seed);
    let prepare_ms = started.elapsed().as_secs_f64() * 1e3;
    let mut took = Vec::new();
    loop {
        let started = Instant::now();
        if replay.step().is_none() {
            break;
        }
        took.push(started.elapsed().as_secs_f64() * 1e6);
    }
    took.sort_by(f64::total_cmp);
    let quantile = |q: f64| {
        took.get(((took.len() as f64 * q).ceil() as usize).max(1) - 1)
            .copied()
            .unwrap_or(0.0)
    };
    Timed {
        seed,
        place_us_p50: quantile(0.5),
        place_us_p99: quantile(0.99),
        place_us_max: quantile(1.0),
        prepare_ms,
        run: replay.result(),
    }
}

fn text(report: &Report) -> String {
    let Report {
        gpus, nodes, pods, ..
    } = report;
    let mut rows = output::head("POLICY|ALLOCATED 100%|ALLOCATED 130%|FRAGMENTS 130%|P99");
    for (name, runs) in &report.policies {
        let at = |arrived, value: fn(Point) -> f64| {
            percent(runs, 2, |timed| timed.run.at(arrived).map(value))
        };
        let took = mean(runs, |timed| Some(timed.place_us_p99));
        rows.push(vec![
            name.clone(),
            at(100, |point| point.allocated),
            at(130, |point| point.allocated),
            at(130, |point| point.fragments),
            took.map_or(NONE.into(), |took| format!("{took:.0} µs")),
        ]);
    }
    let head = format!(
        "{gpus} GPUs on {nodes} nodes; arrivals are drawn from {pods} pods until they asked for 130% of the GPUs\n"
    );
    head + &output::table(&rows)
}

/// The mean in percent, with so many digits.
fn percent<T>(all: &[T], digits: usize, value: impl Fn(&T) -> Option<f64>) -> String {
    mean(all, value).map_or(NONE.into(), |mean| format!("{mean:.digits$}%"))
}

/// Use of their shares by latency-sensitive tenants, in percent, for which the rate of the others is printed.
const USES: [f64; 3] = [100.0, 50.0, 25.0];

fn size(args: &SizeArgs) -> anyhow::Result<()> {
    anyhow::ensure!(args.seeds > 0, "--seeds 0 sizes nothing: use 1 or more");
    let (nodes, pods, _) = load(&args.lists)?;
    let mut found: Vec<(String, Vec<Need>)> = Vec::new();
    for sharing in Sharing::ALL {
        let name = sharing.name();
        let need = |seed| {
            let need = needed(&nodes, &pods, sharing, seed, args.step, &USES);
            need.with_context(|| {
                format!("{name}: the tenants do not fit on four times the nodes of the list")
            })
        };
        found.push((
            name.clone(),
            (42..42 + args.seeds)
                .map(need)
                .collect::<anyhow::Result<_>>()?,
        ));
    }
    if args.json {
        return output::json(&found.into_iter().collect::<BTreeMap<_, _>>());
    }
    let mut rows = output::head("SHARING|GPUS|ATTAINED");
    rows[0].extend(USES.map(|used| format!("BEST EFFORT AT {used}%")));
    for (name, needs) in &found {
        let gpus = mean(needs, |need| Some(need.gpus as f64));
        let mut row = vec![
            name.clone(),
            gpus.map_or(NONE.into(), |gpus| format!("{gpus:.0}")),
            percent(needs, 1, |need| need.attained),
        ];
        row.extend((0..USES.len()).map(|at| percent(needs, 1, |need| need.best_effort[at].1)));
        rows.push(row);
    }
    output::print(&output::table(&rows))
}

fn size_over_time(args: &SizeArgs) -> anyhow::Result<()> {
    anyhow::ensure!(args.seeds > 0, "--seeds 0 sizes nothing: use 1 or more");
    let (nodes, pods, _) = load(&args.lists)?;
    let mut found: BTreeMap<String, Vec<Lived>> = BTreeMap::new();
    for sharing in Sharing::ALL {
        let name = sharing.name();
        let need = |seed| {
            let need = lifetimes::needed(&nodes, &pods, sharing, seed, args.step, &USES);
            need.with_context(|| {
                format!("{name}: the tenants wait on four times the nodes of the list")
            })
        };
        let needs = (42..42 + args.seeds).map(need);
        found.insert(sharing.name(), needs.collect::<anyhow::Result<_>>()?);
    }
    if args.json {
        return output::json(&found);
    }
    let mut rows = output::head("SHARING|GPUS|WAITED|LONGEST|ATTAINED");
    for (name, needs) in &found {
        let gpus = mean(needs, |need| Some(need.gpus as f64));
        let longest = needs.iter().map(|need| need.longest_wait_s).max().flatten();
        rows.push(vec![
            name.clone(),
            gpus.map_or(NONE.into(), |gpus| format!("{gpus:.0}")),
            percent(needs, 2, |need| Some(need.waited)),
            longest.map_or(NONE.into(), |longest| format!("{longest} s")),
            percent(needs, 1, |need| need.attained),
        ]);
    }
    output::print(&output::table(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_run_has_is_shown_as_none() {
        let timed = |points: &[(u32, f64)]| Timed {
            seed: 42,
            place_us_p50: 1.0,
            place_us_p99: 1.0,
            place_us_max: 1.0,
            prepare_ms: 1.0,
            run: Run {
                points: (points.iter())
                    .map(|(arrived, allocated)| Point {
                        arrived: *arrived,
                        allocated: *allocated,
                        fragments: 0.0,
                    })
                    .collect(),
                placed: 0,
                refused: 0,
                moves: 0,
            },
        };
        let report = |runs| Report {
            gpus: 1,
            nodes: 1,
            pods: 1,
            policies: [("fgd".to_owned(), runs)].into(),
        };
        let row = |runs| {
            let text = text(&report(runs));
            let row = text.lines().last().unwrap();
            row.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        // The first tenant asks for more than all.
        let late = timed(&[(200, 0.0)]);
        assert_eq!(row(vec![late])[1..4], ["-", "-", "-"]);
        let early = timed(&[(60, 60.0), (200, 60.0)]);
        assert_eq!(row(vec![early])[1..4], ["60.00%", "60.00%", "0.00%"]);
    }
}
