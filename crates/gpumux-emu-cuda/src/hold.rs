//! The hold kernel of `libgpumux.so`, which spins until a word of host memory says so: the words that it reads and writes.

use gpumux_emu::client;

use crate::{
    access::{add_u64, load_u64, set_u32},
    error::Result,
};

/// Offsets of the words.
const FINISHED: u64 = 4;
const BEGAN: u64 = 8;
const HELD: u64 = 16;
const MET: u64 = 24;

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

pub(crate) fn is_met(page: u64, ticket: u32) -> bool {
    load_u64(page + MET).is_ok_and(|word| word as u32 == ticket)
}

pub(crate) fn note_held(page: u64, most: u64) -> Result {
    let took = client::now().saturating_sub(load_u64(page + BEGAN)?);
    store(page + HELD, took.min(most))
}

fn store(at: u64, value: u64) -> Result {
    add_u64(at, value.wrapping_sub(load_u64(at)?))
}
