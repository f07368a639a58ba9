//! `gpumux page`: the web page as this user.

use std::{net::Ipv4Addr, process::ExitCode};

use anyhow::Context;
use gpumux_daemon::{client::Client, forward::Forwarder, paths};
use tokio::net::TcpListener;

use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux page
  gpumux page --port 9441

It prints an address for your browser and serves it until you press Ctrl-C. Its part behind the # is a secret: \
a browser with the whole address has your rights, to change the class of your tenants, put them to sleep and wake them.
From another machine, with `gpumux page --port 9441` running on this one: ssh -L 9441:127.0.0.1:9441 THIS-MACHINE";

/// Show the web page as yourself: watch all tenants, change your own
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Port on 127.0.0.1; 0: any that is free
    #[arg(long, default_value_t = 0)]
    port: u16,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let dir = paths::find();
        // A missing daemon is reported here, not in the browser.
        Client::new(&dir).status().await?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).await;
        let listener =
            listener.with_context(|| format!("cannot listen on 127.0.0.1:{}", args.port))?;
        let forwarder = Forwarder::new(dir);
        let url = forwarder.url(listener.local_addr()?);
        output::print(&format!("Open {url}\nCtrl-C ends it.\n"))?;
        forwarder.serve(listener).await;
        Ok(ExitCode::SUCCESS)
    })
}
