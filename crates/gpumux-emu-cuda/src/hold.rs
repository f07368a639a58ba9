//! The hold kernel of `libgpumux.so`: spins until a word of host memory says so. The model does not read
//! memory: a thread looks at the word and tells the server.

use std::{
    sync::{Arc, Mutex, Weak, mpsc},
    thread,
    time::Duration,
};

use gpumux_emu::client;

use crate::{
    access::{add_u64, load_u64, set_u32},
    context::Context,
    error::{CuError, Result},
    process::lock,
};

/// How often the word is looked at.
const TICK: Duration = Duration::from_micros(20);

/// Offsets of the words.
const FINISHED: u64 = 4;
const BEGAN: u64 = 8;
const HELD: u64 = 16;
const MET: u64 = 24;

/// A hold that is under way.
struct Watched {
    context: Weak<Context>,
    id: u64,
    page: u64,
    ticket: u32,
    timeout: u64,
    met: bool,
}

/// A hold is submitted: its time counts from here, as no event reports when it has the device.
pub(crate) fn begin(page: u64, last: bool) -> Result {
    match last {
        true => load_u64(page).map(drop),
        false => store(page + BEGAN, client::now()),
    }
}

/// The second of a pair has ended.
pub(crate) fn ended(page: u64, ticket: u32, timeout: u64) -> Result {
    if !is_met(page, ticket) {
        note_held(page, timeout)?;
    }
    set_u32(page + FINISHED, ticket)
}

fn is_met(page: u64, ticket: u32) -> bool {
    load_u64(page + MET).is_ok_and(|word| word as u32 == ticket)
}

fn note_held(page: u64, most: u64) -> Result {
    let took = client::now().saturating_sub(load_u64(page + BEGAN)?);
    store(page + HELD, took.min(most))
}

fn store(at: u64, value: u64) -> Result {
    add_u64(at, value.wrapping_sub(load_u64(at)?))
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
