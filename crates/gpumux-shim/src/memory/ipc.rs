//! Device memory that processes share by handles (CUDA IPC).
//!
//! The driver makes no such handle for memory that this library maps. So the program gets one of this library's: a token that
//! cannot be guessed. A process of the same tenant that has it requests the memory from the daemon, which has the exporter's
//! agent send it, a file for each piece of physical memory. While another process has it open, the memory stays where it is.
//! Handles of the driver's own memory, and of events, are the driver's.

mod exported;
mod opened;

use gpumux_wire::{
    Shim,
    message::{INTRODUCTION, SHARING},
};

use crate::{ground::lease, memory::space::Space};

pub(crate) use self::{
    exported::{get, is_exportable, serve, unshared},
    opened::{arrived, close, close_deferred, forget_context, late, open, orphaned},
};

/// `CUipcMemHandle`: two words that no handle of the driver begins with, and the token.
pub(crate) type Handle = [u64; 8];
const MARK: [u64; 2] = [
    u64::from_ne_bytes(*b"gpumux\0I"),
    u64::from_ne_bytes(*b"PC token"),
];

/// The half of a token that all exports of one block have in common: they are opened, and accounted, as one.
const fn block_of(token: u128) -> u64 {
    (token >> 64) as u64
}

/// Whether this process's daemon passes memory on.
fn is_managed() -> bool {
    lease::await_link() && lease::knows(SHARING)
}

/// Tells a daemon that passes memory on. Another may have taken its place.
fn tell(packet: Shim) {
    if lease::knows(SHARING) {
        lease::tell(packet);
    }
}

/// The token of a handle that is this library's.
fn token_of(handle: Handle) -> Option<u128> {
    let [first, second, low, high, ..] = handle;
    ([first, second] == MARK).then(|| u128::from(high) << 64 | u128::from(low))
}

fn handle_of(token: u128) -> Handle {
    [
        MARK[0],
        MARK[1],
        token as u64,
        (token >> 64) as u64,
        0,
        0,
        0,
        0,
    ]
}

/// What a daemon receives about shared memory when a session begins: all that there is. The session must begin before the tables
/// change.
pub(crate) fn introduce(space: &Space) -> Vec<Shim> {
    if !lease::knows(SHARING) {
        return Vec::new();
    }
    let whole = lease::knows(INTRODUCTION);
    let exports = space.exports.iter().map(|(token, export)| match whole {
        true => Shim::Exported {
            token: *token,
            open: export.open,
        },
        false => Shim::Export {
            ticket: 0,
            token: *token,
        },
    });
    let imports = space.imports.values().map(|it| (it.token, it.charged));
    let opened = (space.opening.into_iter().chain(imports))
        .map(|(token, charged)| Shim::Opened { token, charged });
    let end = whole.then_some(Shim::Introduced);
    exports.chain(opened).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_names_its_token_and_no_other_is_taken_for_one() {
        let token = 0x0123_4567_89ab_cdef_1122_3344_5566_7788;
        let handle = handle_of(token);
        assert_eq!(token_of(handle), Some(token));
        for word in 0..2 {
            let mut other = handle;
            other[word] ^= 1;
            assert_eq!(token_of(other), None);
        }
    }
}
