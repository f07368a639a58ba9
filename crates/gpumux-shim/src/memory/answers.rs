//! What functions of `gpumux.h` for memory answer, and what they check first.

use std::ffi::c_int;

use crate::{
    ground::context::current_context,
    memory::space::{self, with},
};

pub(crate) const DONE: c_int = 0;
pub(crate) const LATER: c_int = 1;
pub(crate) const FULL: c_int = 2;
pub(crate) const FOUND: c_int = 3;
pub(crate) const UNKNOWN: c_int = -1;
pub(crate) const NO_CONTEXT: c_int = -2;
pub(crate) const NATIVE: c_int = -3;
pub(crate) const REFUSED: c_int = -4;
pub(crate) const NOT_KEPT: c_int = -5;

/// The current context, which must be of this device, where memory is gpumux's to make.
pub(crate) fn own_context(device: c_int) -> Result<u64, c_int> {
    if space::off() {
        return Err(NATIVE);
    }
    let own = space::current_device().zip(current_context());
    let (_, context) = own.filter(|own| own.0 == device).ok_or(NO_CONTEXT)?;
    match with(|space| space.is_native(device)) {
        true => Err(NATIVE),
        false => Ok(context),
    }
}
