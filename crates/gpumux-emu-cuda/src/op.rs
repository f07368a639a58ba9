//! What streams and graphs submit to a context.

use std::sync::Arc;

use gpumux_emu::protocol::{Queue, Work};

use crate::{border::HostCall, effect::Effect, mark::Mark};

/// One piece of work to submit.
#[derive(Clone)]
pub(crate) struct Op {
    /// Where it runs; `None`: where the stream's last work did, as marks and waits do. (So a stream that
    /// only copies goes on while the compute group is frozen.)
    pub(crate) queue: Option<Queue>,
    pub(crate) work: OpWork,
    pub(crate) effect: Effect,
    /// The mark of an event that it is.
    pub(crate) mark: Option<Arc<Mark>>,
    /// A thread waits for it.
    pub(crate) prompt: bool,
}

/// What it is for the server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OpWork {
    Plain(Work),
    /// Waits for an earlier one of those submitted together.
    AfterItem(usize),
}

impl Op {
    pub(crate) fn compute(work: Work, effect: Effect) -> Self {
        Self::on(Queue::Compute, work, effect)
    }

    /// Runs where the stream's last work did.
    pub(crate) fn following(work: Work, effect: Effect) -> Self {
        Self {
            queue: None,
            ..Self::compute(work, effect)
        }
    }

    pub(crate) fn on(queue: Queue, work: Work, effect: Effect) -> Self {
        Self {
            queue: Some(queue),
            work: OpWork::Plain(work),
            effect,
            mark: None,
            prompt: false,
        }
    }

    /// Waits on the host as long as this takes.
    pub(crate) fn waiting(wait: impl Fn() + Send + Sync + 'static) -> Self {
        let call = HostCall::Wait(Arc::new(wait));
        Self::following(Work::Host, Effect::Host(call))
    }

    /// A mark that is reported at once.
    pub(crate) fn mark() -> Self {
        Self {
            prompt: true,
            ..Self::following(Work::Record, Effect::Nothing)
        }
    }
}
