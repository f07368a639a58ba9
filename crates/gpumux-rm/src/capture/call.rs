//! What one finished ioctl says.

use zerocopy::FromBytes;

use crate::layout::{
    Alloc21, Alloc64, Control, DupObject, Free, GroupAlloc, TimesliceParams, Variant, XferCmd,
    class, cmd, escape,
};

/// Largest structure of a call that matters.
const MAX_ARG: usize = size_of::<Alloc64>();

/// One RM call that succeeded and matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// An object was made.
    Alloc {
        /// Client.
        client: u32,
        /// Parent.
        parent: u32,
        /// Its handle, as RM wrote it back.
        object: u32,
        /// Its class: one of those that [`Capture`] follows.
        class: u32,
        /// Engine type, for groups and channels; 0 when not given.
        engine: u32,
    },
    /// An object was duplicated.
    Dup {
        /// Client of the duplicate.
        client: u32,
        /// Parent of the duplicate.
        parent: u32,
        /// The duplicate.
        object: u32,
        /// Client of the source.
        client_src: u32,
        /// Source.
        object_src: u32,
    },
    /// An object was freed.
    Free {
        /// Client.
        client: u32,
        /// Object; a client frees itself.
        object: u32,
    },
    /// A group was enabled.
    Schedule {
        /// Client.
        client: u32,
        /// Group.
        group: u32,
    },
    /// A group's slice was set.
    SetTimeslice {
        /// Client.
        client: u32,
        /// Group.
        group: u32,
        /// The slice in µs.
        us: u64,
    },
}

impl Call {
    /// Whether escape `nr` can be a call that matters.
    pub const fn may_matter(nr: u8) -> bool {
        matches!(
            nr,
            escape::FREE | escape::CONTROL | escape::ALLOC | escape::DUP_OBJECT | escape::XFER_CMD
        )
    }

    /// Reads a finished ioctl of a driver with these structures: its escape number, its structure as RM left it, and `read`, which
    /// copies the program's memory at an address and says whether it could.
    pub fn decode(
        variant: Variant,
        nr: u8,
        arg: &[u8],
        read: impl Fn(u64, &mut [u8]) -> bool,
    ) -> Option<Self> {
        if nr != escape::XFER_CMD {
            return decode_plain(variant, nr, arg, &read);
        }
        let xfer = XferCmd::read_from_bytes(arg).ok()?;
        let nr = u8::try_from(xfer.cmd).ok()?;
        let mut inner = [0; MAX_ARG];
        let inner = inner.get_mut(..xfer.size as usize)?;
        // An XFER_CMD within an XFER_CMD is not a thing.
        (nr != escape::XFER_CMD && read(xfer.ptr, inner))
            .then(|| decode_plain(variant, nr, inner, &read))
            .flatten()
    }
}

fn decode_plain(
    variant: Variant,
    nr: u8,
    arg: &[u8],
    read: &impl Fn(u64, &mut [u8]) -> bool,
) -> Option<Call> {
    match nr {
        escape::ALLOC => {
            // The two forms agree up to `params`; `status` is elsewhere.
            let (alloc, status) = if arg.len() == size_of::<Alloc64>() {
                let long = Alloc64::read_from_bytes(arg).ok()?;
                (Alloc21::read_from_prefix(arg).ok()?.0, long.status)
            } else {
                let short = Alloc21::read_from_bytes(arg).ok()?;
                (short, short.status)
            };
            let engine_at = match alloc.class {
                class::CHANNEL_GROUP => std::mem::offset_of!(GroupAlloc, engine),
                class if class::is_channel(class) => variant.channel_engine(),
                class::DEVICE | class::SUBDEVICE => 0,
                class if class::is_client(class) => 0,
                _ => return None,
            };
            let mut bytes = [0; 4];
            let given = engine_at != 0
                && alloc.params != 0
                && read(alloc.params.checked_add(engine_at as u64)?, &mut bytes);
            (status == 0).then_some(Call::Alloc {
                client: alloc.root,
                parent: alloc.parent,
                object: alloc.object,
                class: alloc.class,
                engine: if given { u32::from_ne_bytes(bytes) } else { 0 },
            })
        }
        escape::DUP_OBJECT => {
            let dup = DupObject::read_from_bytes(arg).ok()?;
            (dup.status == 0).then_some(Call::Dup {
                client: dup.client,
                parent: dup.parent,
                object: dup.object,
                client_src: dup.client_src,
                object_src: dup.object_src,
            })
        }
        escape::FREE => {
            let free = Free::read_from_bytes(arg).ok()?;
            (free.status == 0).then_some(Call::Free {
                client: free.root,
                object: free.object,
            })
        }
        escape::CONTROL => {
            let control = Control::read_from_bytes(arg).ok()?;
            if control.status != 0 {
                return None;
            }
            let (client, group) = (control.client, control.object);
            match control.cmd {
                cmd::GROUP_SCHEDULE => {
                    // The structure's length differs between branches.
                    let mut enable = [0];
                    let enabled = read(control.params, &mut enable) && enable != [0];
                    enabled.then_some(Call::Schedule { client, group })
                }
                cmd::SET_TIMESLICE => {
                    let mut params = [0; size_of::<TimesliceParams>()];
                    read(control.params, &mut params).then(|| Call::SetTimeslice {
                        client,
                        group,
                        us: u64::from_ne_bytes(params),
                    })
                }
                _ => None,
            }
        }
        _ => None,
    }
}
