//! `gpumux logs`: the output of programs that run detached.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use gpumux_daemon::client::ClientError;

use super::client;
use crate::logs;

const EXAMPLES: &str = "\
Examples:
  gpumux run -d --name noted -- python train.py; gpumux wait noted; gpumux logs noted
  gpumux run -d --name last -- true; gpumux logs --follow --lines 100 last

The output of a program that runs detached (`gpumux run -d`) is in ~/.local/state/gpumux/logs (or \
$XDG_STATE_HOME/gpumux/logs): up to 8 MiB in NAME.log, and what was before that in NAME.log.1.";

/// Show the output of a tenant that runs detached
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps -a` names it
    name: String,
    /// Go on until the tenant has ended
    #[arg(short, long)]
    follow: bool,
    /// Only so many of the last lines
    #[arg(short = 'n', long, value_name = "COUNT")]
    lines: Option<usize>,
}

/// Between two looks at a file that is followed, and at its tenant.
const LOOK: Duration = Duration::from_millis(50);
const ASK: Duration = Duration::from_millis(500);

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (path, note) = find(&args.name)?;
    let (mut text, mut file) = read(&path)?;
    // Its parent has written the end into the log, where it could.
    if let Some(note) = note.filter(|it| !String::from_utf8_lossy(&text).contains(it)) {
        eprintln!("gpumux: {}: {note}", args.name);
    }
    if args
        .lines
        .is_none_or(|lines| logs::last_lines(&text, lines).len() == text.len())
        && let Ok((mut before, _)) = read(&logs::old(&path))
        && belongs(&before)
    {
        before.append(&mut text);
        text = before;
    }
    let mut lives = args.follow && is_alive(&args.name, &path) == Some(true);
    let shown = args
        .lines
        .map_or(&*text, |lines| logs::last_lines(&text, lines));
    if !write(shown)? || !args.follow {
        return Ok(ExitCode::SUCCESS);
    }
    let mut asked = Instant::now();
    loop {
        let mut more = Vec::new();
        file.read_to_end(&mut more)?;
        if !write(&more)? {
            return Ok(ExitCode::SUCCESS);
        }
        let moved = std::fs::metadata(&path)
            .is_ok_and(|now| file.metadata().is_ok_and(|own| own.ino() != now.ino()));
        if moved {
            // What was written to the old one after the last look.
            let mut rest = Vec::new();
            file.read_to_end(&mut rest)?;
            write(&rest)?;
            file = File::open(&path)?;
        } else if more.is_empty() {
            if !lives {
                return Ok(ExitCode::SUCCESS);
            }
            thread::sleep(LOOK);
        }
        if asked.elapsed() > ASK {
            // A daemon that is away does not end the program; where that has ended, it is noted.
            let on = lives && !logs::exit(&path).exists();
            lives = is_alive(&args.name, &path).unwrap_or(on);
            asked = Instant::now();
        }
    }
}

/// The tenant's file, as the daemon records it, or where this user's are; and what a user should know of its output or its end.
fn find(name: &str) -> anyhow::Result<(PathBuf, Option<String>)> {
    let known = client::about(name, async |client| match client.tenant(name).await {
        Ok(tenant) => Ok((tenant.log, tenant.lost_output.map(|lost| lost.to_string()))),
        Err(_) => {
            let ends = client.ended().await?;
            let end = client::last_end(ends, name, |_| true);
            let end = end.ok_or_else(|| client::unknown(name))?;
            Ok((end.log, Some(end.reason).filter(|_| end.noteworthy)))
        }
    });
    // Only tenants of this user have their output there.
    let own_name = name.rsplit('/').next().unwrap_or(name);
    let own = logs::folder().map(|folder| logs::file(&folder, own_name));
    match (known, own) {
        (Ok((Some(path), note)), _) => Ok((path.into(), note)),
        (Ok((None, _)), _) => bail!(
            "`{name}` does not run detached, so its output went where `gpumux run` was called: use `gpumux run -d`"
        ),
        (_, Ok(path)) if path.is_file() => Ok((path, None)),
        (Err(error), _) => Err(error.into()),
    }
}

fn read(path: &Path) -> anyhow::Result<(Vec<u8>, File)> {
    let cannot = || format!("cannot read the output in {}", path.display());
    let mut file = File::open(path).with_context(cannot)?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).with_context(cannot)?;
    Ok((text, file))
}

/// Whether the old file is the beginning of the new one: an earlier tenant's is not full.
fn belongs(before: &[u8]) -> bool {
    before.len() as u64 + (16 << 10) > logs::MAX
}

/// Whether the tenant whose output goes there runs; none where no daemon answers.
fn is_alive(name: &str, path: &Path) -> Option<bool> {
    match client::block(async |client| client.tenant(name).await) {
        Ok(tenant) => Some(tenant.log.is_some_and(|log| Path::new(&log) == path)),
        Err(ClientError::Refused { status: 404, .. }) => Some(false),
        Err(_) => None,
    }
}

/// Writes the output as it is; whether there is still a reader.
fn write(bytes: &[u8]) -> anyhow::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.into()),
    }
}
