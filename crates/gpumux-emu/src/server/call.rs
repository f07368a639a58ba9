//! An RM call of a control file, and its answer.

use std::{collections::BTreeSet, os::fd::OwnedFd};

use gpumux_rm::emulated;
use zerocopy::IntoBytes;

use super::rm::Caller;

/// An RM call on its way.
pub(super) struct Call {
    pub(super) caller: Caller,
    pub(super) escape: u32,
    pub(super) arg: Vec<u8>,
    pub(super) params: Vec<u8>,
    pub(super) reply: OwnedFd,
}

/// A freeze that is done but for the effects of interrupted kernels.
pub(super) struct Freeze {
    pub(super) waiting: BTreeSet<u64>,
    pub(super) answer: Vec<u8>,
    pub(super) reply: OwnedFd,
}

pub(super) fn answer(errno: u32, arg: &[u8], params: &[u8]) -> Vec<u8> {
    let head = emulated::AnswerHead {
        magic: emulated::MAGIC,
        errno,
    };
    [head.as_bytes(), arg, params].concat()
}
