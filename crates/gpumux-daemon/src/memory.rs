//! Memory's side of sessions and of the API: packets become events of the broker (`gpumux-core`: `broker`), which the
//! scheduling thread drives (`scheduler/memory.rs`).

use gpumux_core::{
    TenantId,
    broker::{self, Ask, Droppable, Event, Kept, Part, ProcessId, Reply},
    ledger::{Holding, Kind},
};
use gpumux_wire::Shim;

use crate::{
    link::SessionId,
    quota::cut,
    scheduler::{Command, Handle, Stopped},
};

/// Longest reason of a process that is kept, in bytes.
const REASON: usize = 200;

/// Why memory was not moved.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MoveError {
    #[error(transparent)]
    Refused(#[from] broker::MoveError),
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// What a packet means to the broker; none: nothing.
pub(crate) fn event(session: SessionId, packet: Shim) -> Option<Event> {
    let process = ProcessId(session.0);
    let reply = |op, reply| Event::Reply(process, op, reply);
    let kind = |pinned| match pinned {
        true => Kind::Pinned,
        false => Kind::Movable,
    };
    Some(match packet {
        Shim::Ask {
            ticket,
            device,
            total,
            need,
            want,
            pinned,
        } => Event::Ask {
            process,
            ticket,
            ask: Ask {
                device,
                total,
                need,
                want,
                kind: kind(pinned),
                part: None,
            },
        },
        Shim::AskPart {
            ticket,
            device,
            total,
            need,
            pinned,
            of,
            parts,
        } => Event::Ask {
            process,
            ticket,
            ask: Ask {
                device,
                total,
                need,
                want: need,
                kind: kind(pinned),
                part: Some(Part { of, parts }),
            },
        },
        Shim::Holds {
            device,
            total,
            movable,
            pinned,
            swapped,
        } => Event::Holds {
            process,
            device,
            total,
            holding: Holding {
                movable,
                pinned,
                swapped,
            },
        },
        Shim::Quiet { op, idle } => reply(op, Reply::Quiet(idle)),
        Shim::Moved { op } => reply(op, Reply::Done),
        Shim::Busy { op, reason } => reply(op, Reply::Refused(cut(reason, REASON))),
        Shim::Reclaimed { op, bytes } => reply(op, Reply::Freed(bytes)),
        Shim::WakeRequest => Event::Waits(process),
        Shim::Keeps { bytes } => Event::Keeps(process, bytes),
        Shim::Reclaims => Event::Reclaims(process),
        Shim::Droppable {
            device,
            free,
            cached,
        } => Event::Droppable {
            process,
            device,
            droppable: Droppable { free, cached },
        },
        Shim::Kept {
            device,
            bytes,
            inherited,
        } => Event::Kept {
            process,
            device,
            kept: Kept { bytes, inherited },
        },
        Shim::Received { ticket } => Event::Received(process, ticket),
        Shim::Cancel { ticket } => Event::Cancel(process, ticket),
        Shim::Missing { ticket } => Event::Missing { process, ticket },
        _ => return None,
    })
}

/// Moves all memory of a tenant to the host.
///
/// # Errors
/// When it cannot be moved now.
pub(crate) async fn sleep(scheduler: &Handle, tenant: TenantId) -> Result<(), MoveError> {
    let asleep = scheduler.ask(|answer| Command::Sleep(tenant, answer));
    Ok(asleep.await??)
}

/// Brings all memory of a tenant back, others' away for it if need be.
///
/// # Errors
/// When it cannot come back.
pub(crate) async fn wake(scheduler: &Handle, tenant: TenantId) -> Result<(), MoveError> {
    let awake = scheduler.ask(|answer| Command::Wake(tenant, answer));
    Ok(awake.await??)
}
