//! The threads that interpret a context's kernels.

use std::sync::{Arc, Weak};

use super::Context;
use crate::{
    error::Result,
    interpret::{Interpreted, code, duration, explain},
    process::spawn,
};

impl Context {
    /// Begins a kernel whose rest has this number.
    pub(super) fn interpret(self: &Arc<Self>, id: u64, kernel: &Interpreted) -> Result {
        self.interpreter.begin(id, kernel, |helps| {
            let context = Arc::downgrade(self);
            spawn("cuda-kernels", move || work(&context, helps))
        })
    }
}

fn work(context: &Weak<Context>, helps: bool) {
    if helps {
        // Cores that no other thread needs: not those of the programs' own threads, and of the server, which keeps the time.
        // SAFETY: concerns this thread only; it is harmless if it fails.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
    }
    while let Some(context) = context.upgrade() {
        match context.interpreter.turn(context.viewer()) {
            (false, _) => return,
            (true, None) => {}
            (true, Some(Ok((id, shape, stats)))) => {
                context.length(id, duration(stats, shape, &context.device.info));
            }
            (true, Some(Err(fault))) => {
                explain(&fault);
                context.fault(code(&fault.kind));
            }
        }
    }
}
