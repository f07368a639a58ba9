//! `gpumux sim`: predicts in virtual time what the tenants of a scenario get.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use gpumux_sim::{ModeReport, Report, Scenario, TenantReport};

use crate::{output, units};

const EXAMPLES: &str = "\
Examples:
  gpumux sim scenarios/graph+train.toml
  gpumux sim scenarios/hour.toml --json | jq '.modes[].tenants[] | {name, received}'
  gpumux sim scenarios/rotation-2.toml --trace out.json     open in https://ui.perfetto.dev
  gpumux sim scenarios/llm-trace.toml --requests conversation=AzureLLMInferenceTrace_conv.csv

The same scenario and seed always give the same result.";

/// Predict what tenants receive, in virtual time
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The scenario (TOML): devices, tenants, when their requests come and what they are
    scenario: PathBuf,
    /// Another seed than the scenario's
    #[arg(long)]
    seed: Option<u64>,
    /// Where the recorded requests NAME are (CSV) [default: NAME.csv beside the scenario]
    #[arg(long, value_name = "NAME=FILE", value_parser = named_file)]
    requests: Vec<(String, PathBuf)>,
    /// Also write the last mode as a Chrome trace
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut scenario = load(args)?;
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    let report = match &args.trace {
        None => gpumux_sim::run(&scenario)?,
        Some(file) => {
            let (report, trace) = gpumux_sim::run_traced(&scenario)?;
            fs::write(file, trace).with_context(|| format!("cannot write {}", file.display()))?;
            report
        }
    };
    match args.json {
        true => output::json(&report)?,
        false => output::print(&text(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    let (name, file) = text
        .split_once('=')
        .ok_or_else(|| format!("`{text}` does not say what is where: use NAME=FILE"))?;
    Ok((name.to_owned(), file.into()))
}

/// Reads a scenario and the recorded requests that it names.
fn load(args: &Args) -> anyhow::Result<Scenario> {
    let path = &args.scenario;
    let mut scenario = Scenario::from_toml(&units::text_of(path)?)
        .with_context(|| format!("in {}", path.display()))?;
    let dir = path.parent().unwrap_or(Path::new(""));
    let names: Vec<String> = scenario
        .trace_names()
        .into_iter()
        .map(str::to_owned)
        .collect();
    if let Some((given, _)) = args
        .requests
        .iter()
        .find(|(given, _)| !names.contains(given))
    {
        let needed = match names.is_empty() {
            true => "no recorded requests".to_owned(),
            false => names.join(", "),
        };
        let message = format!("--requests {given}: the scenario needs {needed}");
        return Err(units::Usage(message).into());
    }
    for name in names {
        let given = args.requests.iter().find(|(given, _)| *given == name);
        let file = given.map_or_else(|| dir.join(format!("{name}.csv")), |(_, file)| file.clone());
        let requests = units::text_of(&file).map_err(|units::Usage(why)| {
            units::Usage(format!("{why}: the scenario needs --requests {name}=FILE"))
        })?;
        scenario.add_trace(&name, &requests)?;
    }
    Ok(scenario)
}

fn text(report: &Report) -> String {
    let mut text = format!("{}: {}\n", report.scenario, report.about);
    for mode in &report.modes {
        text += &format!("\n{}\n", head(mode));
        let mut rows = output::head(
            "  TENANT|GUARANTEED|RECEIVED|LONGEST WAIT|LAG / BOUND|RATE|P50|P99|P99.9",
        );
        rows.extend(mode.tenants.iter().map(row));
        text += &output::table(&rows);
        for tenant in &mode.tenants {
            let Some(moves) = tenant.moves.filter(|moves| moves.outs > 0) else {
                continue;
            };
            text += &format!(
                "  {}: {:.1} GiB went to the host in {} moves; {:.1} s on the way\n",
                tenant.name, moves.out_gib, moves.outs, moves.moving_s
            );
        }
    }
    text
}

fn head(mode: &ModeReport) -> String {
    // The name as in the scenario's file.
    let name = serde_json::to_value(mode.mode).unwrap_or_default();
    let name = name.as_str().unwrap_or_default().to_owned();
    match &mode.policy {
        Some(policy) => format!("{name} ({policy})"),
        None => name,
    }
}

fn row(tenant: &TenantReport) -> Vec<String> {
    let mut row = vec![
        format!("  {}", tenant.name),
        format!("{:.1}%", tenant.guaranteed * 100.0),
        format!("{:.1}%", tenant.received * 100.0),
        format!("{:.1} ms", tenant.longest_wait_ms),
        tenant.bound.map_or_else(String::new, |bound| {
            let worst = bound
                .worst_lag_ms
                .map_or("-".into(), |ms| format!("{ms:.1}"));
            format!("{worst} / {:.0} ms", bound.lag_ms)
        }),
        format!("{:.1}/s", tenant.rate),
    ];
    if let Some(latency) = tenant.latency {
        let quantiles = [latency.p50_ms, latency.p99_ms, latency.p999_ms];
        row.extend(quantiles.map(|ms| format!("{ms:.2} ms")));
    }
    row
}
