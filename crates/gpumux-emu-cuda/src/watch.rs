//! Ends hold kernels when their words say so. The model does not read memory: a thread looks at the words and notifies the server.

use std::{
    sync::{Arc, Mutex, Weak, mpsc},
    thread,
    time::Duration,
};

use crate::{
    access::load_u64,
    context::Context,
    error::{CuError, Result},
    hold::{is_met, note_held},
    process::lock,
};

/// How often the word is looked at.
const TICK: Duration = Duration::from_micros(20);

/// A hold that is under way.
struct Watched {
    context: Weak<Context>,
    id: u64,
    page: u64,
    ticket: u32,
    timeout: u64,
    met: bool,
}

/// Ends a hold when its word says so.
pub(crate) fn watch(
    context: &Arc<Context>,
    id: u64,
    page: u64,
    ticket: u32,
    timeout: u64,
) -> Result {
    static WATCHER: Mutex<Option<mpsc::Sender<Watched>>> = Mutex::new(None);
    let mut watcher = lock(&WATCHER);
    let sender = match &mut *watcher {
        Some(sender) => sender,
        none => {
            let (sender, receiver) = mpsc::channel();
            let started = thread::Builder::new()
                .name("cuda-hold".into())
                .spawn(move || look(&receiver));
            started.map_err(|_| CuError::OPERATING_SYSTEM)?;
            none.insert(sender)
        }
    };
    let watched = Watched {
        context: Arc::downgrade(context),
        id,
        page,
        ticket,
        timeout,
        met: is_met(page, ticket),
    };
    sender.send(watched).map_err(|_| CuError::OPERATING_SYSTEM)
}

fn look(new: &mpsc::Receiver<Watched>) {
    let mut all: Vec<Watched> = Vec::new();
    loop {
        if all.is_empty() {
            match new.recv() {
                Ok(watched) => all.push(watched),
                Err(_) => return,
            }
        }
        all.extend(new.try_iter());
        all.retain_mut(|watched| {
            let Some(context) = watched.context.upgrade() else {
                return false;
            };
            if !watched.met && is_met(watched.page, watched.ticket) {
                watched.met = true;
                let _ = note_held(watched.page, watched.timeout);
            }
            // The low half of the first two words.
            let released = load_u64(watched.page).map_or(watched.ticket, |words| words as u32);
            if watched.ticket.wrapping_sub(released) as i32 <= 0 {
                context.host_done(watched.id);
                return false;
            }
            context.is_under_way(watched.id)
        });
        thread::sleep(TICK);
    }
}
