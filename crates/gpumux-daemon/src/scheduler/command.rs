//! What the scheduling thread does for others.

use std::{collections::BTreeSet, os::fd::OwnedFd, sync::Arc};

use gpumux_core::{
    Micros, TenantId, TenantSpec,
    admission::{Most, Refusal, UserPolicy},
    broker::{Event, MoveError},
};
use tokio::sync::mpsc::UnboundedSender;

use super::{
    domain::NewGroup,
    engine::{Engine, GroupError},
    held::Left,
    model::{Answer, Happening, Owner, Withheld},
    process::Met,
    record::History,
    relocation::Relocate,
    view::View,
};
use crate::{
    devices::{Known, Numbers},
    failure::{Crash, Failure},
    link::SessionId,
};

/// One thing to do on the scheduling thread. Commands are carried out in the order in which they were sent; each is answered when it
/// is done, and one whose answer is awaited no more is done all the same.
pub(crate) enum Command {
    // ---- Devices and figures
    /// Nothing: the answer proves that the thread works.
    Nothing(Answer<()>),
    /// The processes that have work and have submitted none for a while: they may be stopped.
    Standing(Answer<BTreeSet<u32>>),
    /// Of those, these are stopped.
    Stopped(BTreeSet<u32>, Answer<()>),
    /// NVML has found these devices, now with these processes. Also for devices that are known.
    KnowDevices(Vec<Known>, Answer<()>),
    /// The numbers of the devices that NVML has reported.
    Numbers(Answer<Numbers>),
    /// The fewest SMs of one of these devices, or, if none are named, of any, where that is known.
    Sms(Vec<String>, Answer<Option<u32>>),
    /// All that there is, for people and metrics.
    View(Answer<View>),
    /// What happened on every device in the last so much time, as far as it is remembered.
    History(Micros, Answer<Vec<History>>),
    /// From now on, crashes in groups and happenings are reported there. Once, before the first session.
    ReportTo(
        UnboundedSender<Failure>,
        UnboundedSender<Happening>,
        Answer<()>,
    ),
    /// Gives all groups back what they had. The last: nothing is scheduled after it.
    Restore(Answer<()>),

    // ---- Tenants
    /// Whether a tenant of this owner could have this spec, on these devices only or, if none are named, on all. Changes nothing.
    Admits {
        tenant: TenantId,
        owner: Owner,
        devices: BTreeSet<String>,
        spec: TenantSpec,
        answer: Answer<Result<(), Refusal>>,
    },
    /// What a tenant could have at most; none of one that is not known.
    Most(TenantId, Answer<Option<Most>>),
    /// A new tenant of this owner gets this spec, on these devices only or, if none are named, on all. Refused, it is not known.
    Admit {
        tenant: TenantId,
        owner: Owner,
        devices: Vec<String>,
        spec: TenantSpec,
        answer: Answer<Result<(), Refusal>>,
    },
    /// The same for a tenant that the last daemon had admitted, whatever its user's policy is by now; `withheld` did not hold. If its
    /// guarantees do not fit, it goes on without: the spec that it has, and why.
    AdmitAgain {
        tenant: TenantId,
        owner: Owner,
        devices: Vec<String>,
        spec: TenantSpec,
        withheld: Withheld,
        answer: Answer<(TenantSpec, Option<Refusal>)>,
    },
    /// Changes a tenant's spec, by what its user may have now; `by_root`: whatever that is. Refused, it stays as it was.
    Change {
        tenant: TenantId,
        policy: Arc<UserPolicy>,
        spec: TenantSpec,
        by_root: bool,
        answer: Answer<Result<(), Refusal>>,
    },
    /// A tenant's processes share the MPS group of this name. Before its first session.
    Place(TenantId, Arc<str>, Answer<()>),
    /// What a tenant's programs are shown of a device, of which the driver reports so many bytes in all: free memory and capacity.
    ShowMemory(TenantId, String, u64, Answer<(u64, u64)>),
    /// Moves all memory of a tenant to the host; answered when that is done.
    Sleep(TenantId, Answer<Result<(), MoveError>>),
    /// Brings all memory of a tenant back, others' away for it if need be; answered when that is done.
    Wake(TenantId, Answer<Result<(), MoveError>>),
    /// A tenant goes to another device.
    Relocate(Relocate),
    /// A tenant has ended. After its sessions.
    Forget(TenantId, Answer<()>),

    // ---- Sessions
    /// A process has connected. Before anything else of its session.
    Meet(Box<Met>, Answer<()>),
    /// A process announced a group, which is under control from now on; `replaces`: another under the same key is gone.
    Add {
        group: NewGroup,
        replaces: bool,
        answer: Answer<Result<(), GroupError>>,
    },
    /// The channels of the group with this key are now these.
    SetChannels(SessionId, u32, Vec<u32>, Answer<()>),
    /// A group of the process cannot be managed. With its key, if the process has it from an MPS server, and the driver refuses it.
    LeaveUnmanaged(SessionId, Option<u32>, Answer<()>),
    /// The process's library reports that the timeslice of the group with this key was set.
    Touched(SessionId, u32, Answer<()>),
    /// The process freed the group with this key.
    Gone(SessionId, u32, Answer<()>),
    /// A process of this tenant has called a function of the driver that its library does not know.
    CalledUnlisted(TenantId, String, Answer<()>),
    /// Sends the process what it is shown of a device's memory, of which the driver reports so many bytes in all.
    AnswerView {
        session: SessionId,
        ticket: u32,
        device: String,
        total: u64,
        answer: Answer<()>,
    },
    /// A process reported something that concerns memory.
    Memory(Event, Answer<()>),
    /// A process left work behind in a group: its files are held until the group had time to end that. Returns them if nothing is known
    /// of such a group, or too much is held for it. Before its session ends.
    Hold(Left, Vec<OwnedFd>, Answer<Option<Arc<[OwnedFd]>>>),
    /// A session has ended; `alive`: its process has not, and its groups are given back as they were made. The last of its session.
    Leave {
        session: SessionId,
        alive: bool,
        /// Whether its memory counts as taken until the process ends.
        answer: Answer<bool>,
    },

    // ---- Groups that fail
    /// A group has failed: all processes in it, and those that had left it just before. What becomes of them is reported no more.
    GiveUp(Arc<str>, Answer<Vec<Crash>>),
    /// Whether some process of a group that has failed waits for the device, and has not received its error.
    HasUnaware(Arc<str>, Answer<bool>),

    /// Stands still until the other end is dropped.
    #[cfg(test)]
    Stall(std::sync::mpsc::Receiver<()>, Answer<()>),
}

/// The answer may be awaited no more.
fn send<T>(answer: Answer<T>, with: T) {
    let _ = answer.send(with);
}

impl Command {
    #[expect(clippy::unit_arg, reason = "an answer without contents")]
    pub(super) fn carry_out(self, engine: &mut Engine) {
        match self {
            Self::Nothing(answer) => send(answer, ()),
            Self::Standing(answer) => send(answer, engine.standing()),
            Self::Stopped(stopped, answer) => send(answer, engine.set_stopped(&stopped)),
            Self::KnowDevices(known, answer) => send(answer, engine.know_devices(known)),
            Self::Numbers(answer) => send(answer, engine.admission.numbers.clone()),
            Self::Sms(devices, answer) => {
                let all = engine.admission.sms.iter();
                let of = all.filter(|it| devices.is_empty() || devices.contains(it.0));
                send(answer, of.map(|it| *it.1).min());
            }
            Self::View(answer) => send(answer, engine.view()),
            Self::History(time, answer) => send(answer, engine.history(time)),
            Self::ReportTo(failures, happenings, answer) => {
                engine.crashes.report_to(failures);
                engine.state.report_to(happenings);
                send(answer, ());
            }
            Self::Restore(answer) => send(answer, engine.restore()),

            Self::Admits {
                tenant,
                owner,
                devices,
                spec,
                answer,
            } => {
                let devices = Some(&devices).filter(|devices| !devices.is_empty());
                send(answer, engine.admits(tenant, Some(&owner), devices, &spec));
            }
            Self::Most(tenant, answer) => send(answer, engine.most(tenant)),
            Self::Admit {
                tenant,
                owner,
                devices,
                spec,
                answer,
            } => {
                engine.confine(tenant, &devices);
                send(answer, engine.admit(tenant, owner, spec));
            }
            Self::AdmitAgain {
                tenant,
                owner,
                devices,
                spec,
                withheld,
                answer,
            } => {
                let again = engine.admit_again(tenant, owner, &devices, spec, withheld);
                send(answer, again);
            }
            Self::Change {
                tenant,
                policy,
                spec,
                by_root,
                answer,
            } => send(answer, engine.change(tenant, policy, spec, by_root)),
            Self::Place(tenant, group, answer) => send(answer, engine.place(tenant, group)),
            Self::ShowMemory(tenant, device, total, answer) => {
                let (moves, state) = (&mut engine.moves, &mut engine.state);
                send(answer, moves.view(state, tenant, device, total));
            }
            // After a move to another device a tenant is awake.
            Self::Sleep(tenant, answer) if engine.relocations.contains_key(&tenant) => {
                let why = "it is on its way to another GPU".into();
                send(answer, Err(MoveError::Busy(why)));
            }
            Self::Sleep(tenant, answer) => {
                let sleep = |request| Event::Sleep(tenant, request);
                engine.moves.request(&mut engine.state, sleep, answer);
            }
            Self::Wake(tenant, answer) => {
                let wake = |request| Event::Wake(tenant, request);
                engine.moves.request(&mut engine.state, wake, answer);
            }
            Self::Relocate(step) => step.carry_out(engine),
            Self::Forget(tenant, answer) => send(answer, engine.forget(tenant)),

            Self::Meet(met, answer) => send(answer, engine.meet(*met)),
            Self::Add {
                group,
                replaces,
                answer,
            } => {
                if replaces {
                    engine.gone(group.member.session, group.member.key);
                }
                send(answer, engine.add(group));
            }
            Self::SetChannels(session, key, channels, answer) => {
                send(answer, engine.set_channels(session, key, channels))
            }
            Self::LeaveUnmanaged(session, lost, answer) => {
                send(answer, engine.leave_unmanaged(session, lost))
            }
            Self::Touched(session, key, answer) => send(answer, engine.touched(session, key)),
            Self::Gone(session, key, answer) => send(answer, engine.gone(session, key)),
            Self::CalledUnlisted(tenant, name, answer) => {
                send(answer, engine.called_unlisted(tenant, name))
            }
            Self::AnswerView {
                session,
                ticket,
                device,
                total,
                answer,
            } => {
                let (moves, state) = (&mut engine.moves, &mut engine.state);
                send(
                    answer,
                    moves.answer_view(state, session, ticket, device, total),
                );
            }
            Self::Memory(event, answer) => send(answer, engine.memory_event(event)),
            Self::Hold(of, files, answer) => send(answer, engine.hold(&of, files)),
            Self::Leave {
                session,
                alive,
                answer,
            } => send(answer, engine.leave(session, alive)),

            Self::GiveUp(group, answer) => send(answer, engine.give_up(&group)),
            Self::HasUnaware(group, answer) => send(answer, engine.has_unaware(&group)),

            #[cfg(test)]
            Self::Stall(stopped, answer) => {
                let _ = stopped.recv();
                send(answer, ());
            }
        }
    }
}
