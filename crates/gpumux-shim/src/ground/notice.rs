//! What the library writes to standard error: single lines, whole or not at all.

use std::fmt::{Arguments, Write};

/// Writes one line that begins with `gpumux: `.
pub(crate) fn say(what: Arguments<'_>) {
    let mut line = String::with_capacity(128);
    if write!(line, "gpumux: {what}").is_err() {
        return;
    }
    // A reason that came from elsewhere stays one line.
    let line = line.replace('\n', " ") + "\n";
    // SAFETY: the buffer is as long as said. One write, so that lines of threads do not mix.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}
