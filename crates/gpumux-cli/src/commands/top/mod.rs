//! `gpumux top`: watch the tenants, and change them.

mod keys;
mod screen;
#[cfg(test)]
mod tests;
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

use crate::units;
use keys::Action;
use view::{Answer, Change, View, What};

/// How long a move of memory is waited for.
const MOVE: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Examples:
  gpumux top
  gpumux top --interval 2

Press ? for the keys. No single key changes a tenant's class or puts it to sleep: c asks for the class, z asks for y. \
u undoes the last change. The bar is filled as far as a tenant receives its GPU; | is the share that it gets when all tenants have work. \
WAIT is the part of the time in which it has work and does not run; waits for memory do not count.";

/// Watch what tenants receive; change classes and weights; put to sleep and wake
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Seconds between two looks, 0.1 to 60
    #[arg(long, default_value_t = 0.5, value_name = "SECONDS", value_parser = units::interval)]
    interval: f64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if !io::stdout().is_terminal() {
        bail!("`gpumux top` needs a terminal: use `gpumux ps --json` in scripts");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let client = Client::new(paths::find());
    // A missing daemon is reported before the terminal changes.
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
    // An older daemon has no history.
    if let Ok(history) = runtime.block_on(client.history()) {
        view.remember(&history);
    }
    loop {
        let next = Instant::now() + interval;
        // A daemon that restarts is waited for.
        match runtime.block_on(look(client, &view)) {
            Ok(answer) => view.update(answer, start.elapsed()),
            Err(error) => view.lose(error.to_string(), start.elapsed()),
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
            match view.key(key) {
                Action::Quit => return Ok(()),
                Action::Nothing => continue,
                Action::Change(change) => match runtime.block_on(make(client, &change)) {
                    Ok(()) => view.changed(*change),
                    Err(error) => view.say(error.to_string(), true),
                },
            }
            break;
        }
    }
}

async fn make(client: &Client, Change { name, what, .. }: &Change) -> Result<(), ClientError> {
    match what {
        What::Spec(change) => client.change(name, change).await.map(drop),
        What::Sleep => patiently(client.sleep(name)).await,
        What::Wake => patiently(client.wake(name)).await,
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
    let why = match view.chosen().or(tenants.first()) {
        // It may have ended just now.
        Some(tenant) => {
            (client.explanation(&tenant.name).await).map_or(String::new(), |it| it.text)
        }
        None => String::new(),
    };
    Ok(Answer {
        status,
        tenants,
        memory: client.memory().await?,
        why,
    })
}
