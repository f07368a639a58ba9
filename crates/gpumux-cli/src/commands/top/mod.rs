//! `gpumux top`: watch the tenants, and change them.

mod screen;
mod view;

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use gpumux_daemon::{
    client::{Client, ClientError},
    paths,
};
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyEventKind},
};
use tokio::runtime::Runtime;

use view::{Answer, View};

/// How long a move of memory is waited for.
const MOVE: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Examples:
  gpumux top
  gpumux top --interval 2

Keys: up and down choose a tenant; l, s, b make it latency, standard or batch; + and - double and \
halve its weight; z puts it to sleep, w wakes it; q quits. The bar shows what it receives (filled) and is promised (|).";

/// Watch who gets what; change classes and weights; put to sleep and wake
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Seconds between two looks, 0.1 to 60
    #[arg(long, default_value_t = 0.5, value_name = "SECONDS")]
    interval: f64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if !(0.1..=60.0).contains(&args.interval) {
        bail!(
            "an interval of {} s is out of range: use 0.1 to 60",
            args.interval
        );
    }
    if !io::stdout().is_terminal() {
        bail!("`gpumux top` needs a terminal: use `gpumux ps --json` in scripts");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let client = Client::new(paths::find());
    // No daemon at all is said before the terminal changes.
    runtime.block_on(client.status())?;
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let result = watch(
        &mut terminal,
        &runtime,
        &client,
        Duration::from_secs_f64(args.interval),
    );
    ratatui::restore();
    result.map(|()| ExitCode::SUCCESS)
}

fn watch(
    terminal: &mut DefaultTerminal,
    runtime: &Runtime,
    client: &Client,
    interval: Duration,
) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut view = View::default();
    loop {
        let next = Instant::now() + interval;
        // A daemon that restarts is waited for.
        match runtime.block_on(look(client, &view)) {
            Ok(answer) => view.update(answer, start.elapsed()),
            Err(error) => view.say(error.to_string()),
        }
        loop {
            terminal.draw(|frame| screen::draw(frame, &view))?;
            let rest = next.saturating_duration_since(Instant::now());
            if !event::poll(rest)? {
                break;
            }
            let Event::Key(key) = event::read()? else {
                continue;
            };
            if key.kind != KeyEventKind::Press {
                continue;
            }
            let answer = match view.key(key) {
                view::Key::Quit => return Ok(()),
                view::Key::Change(name, change) => {
                    runtime.block_on(client.change(&name, &change)).map(drop)
                }
                view::Key::Sleep(name) => runtime.block_on(patiently(client.sleep(&name))),
                view::Key::Wake(name) => runtime.block_on(patiently(client.wake(&name))),
                view::Key::Nothing => continue,
            };
            view.say(answer.map_or_else(|error| error.to_string(), |()| String::new()));
            break;
        }
    }
}

/// A move of memory, which may take long: the picture and the keys must not wait for it, and the daemon goes on with it.
async fn patiently(
    moved: impl Future<Output = Result<(), ClientError>>,
) -> Result<(), ClientError> {
    tokio::time::timeout(MOVE, moved).await.unwrap_or(Ok(()))
}

async fn look(client: &Client, view: &View) -> Result<Answer, ClientError> {
    let (status, tenants) = (client.status().await?, client.tenants().await?);
    let chosen = view.chosen(&tenants).map(|tenant| tenant.name.clone());
    let why = match &chosen {
        // It may have ended just now.
        Some(name) => client
            .explanation(name)
            .await
            .map_or(String::new(), |e| e.text),
        None => String::new(),
    };
    Ok(Answer {
        status,
        tenants,
        memory: client.memory().await?,
        why,
    })
}
