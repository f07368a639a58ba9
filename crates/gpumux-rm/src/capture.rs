//! Learning handles from a program's own RM calls.
//!
//! Two pure steps. [`Call::decode`] reads one finished ioctl and keeps the few that matter: objects
//! made, duplicated and freed, groups scheduled and given a slice. [`Capture::apply`] follows
//! them and says what that means for channel groups. Neither does I/O, and neither trusts what
//! it sees: any sequence of calls is taken without panic and in bounded memory.
//!
//! Only calls that RM carried out (status 0) count. Objects are known by client and handle; what
//! FREE names as parent is ignored, because libcuda names the device there for a channel of a group.

use std::collections::BTreeMap;

use zerocopy::FromBytes;

use crate::{
    controls::Group,
    layout::{
        Alloc21, Alloc64, Control, DupObject, Free, GroupAlloc, TimesliceParams, Variant, XferCmd,
        class, cmd, engine, escape,
    },
};

/// Most objects that are followed; what a program makes beyond is not seen. (A context needs
/// about 30.)
pub const MAX_OBJECTS: usize = 65_536;

/// Most duplicates of unknown objects that are remembered for being perhaps a group.
const MAX_FOREIGN: usize = 4096;

/// Largest structure of a call that matters.
const MAX_ARG: usize = size_of::<Alloc64>();

/// Timeslices that were never set, in µs, for compute and for copy engines (measured on H100).
const DEFAULT_TIMESLICE_US: (u64, u64) = (2048, 1024);

/// The caller's name for an open control file.
pub type FileId = u64;

/// A channel group, by the order of appearance. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u64);

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

/// What a call means for a channel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The group exists. It may still be under construction.
    Made(GroupId),
    /// The driver library has finished with it: nothing that is set now will be overwritten.
    Ready(GroupId),
    /// It has other channels than before.
    Channels(GroupId),
    /// The program set the slice of a ready group itself.
    TimesliceTouched(GroupId),
    /// It is gone.
    Gone(GroupId),
}

/// What is known of a channel group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The file through which its client was made.
    pub file: FileId,
    /// RM engine type.
    pub engine: u32,
    /// Its handles. The subdevice is 0 while the client has none for its device.
    pub group: Group,
    /// The slice that the driver library gave it, or the hardware's default, in µs.
    pub timeslice_us: u64,
    /// See [`Event::Ready`].
    pub ready: bool,
    /// How often the program itself has set the slice since then.
    pub touched: u32,
    /// Another process made it, and shares it: an MPS server.
    pub shared: bool,
}

#[derive(Debug)]
struct Object {
    parent: u32,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Client(FileId),
    Device,
    Subdevice,
    Group(GroupState),
    Channel,
    /// A duplicate of something that this process did not make.
    Foreign,
}

#[derive(Clone, Copy, Debug)]
struct GroupState {
    id: GroupId,
    engine: u32,
    timeslice_us: Option<u64>,
    ready: bool,
    touched: u32,
    shared: bool,
}

/// Client and handle.
type Key = (u32, u32);

/// All that a process's calls have told so far.
#[derive(Debug, Default)]
pub struct Capture {
    objects: BTreeMap<Key, Object>,
    groups: BTreeMap<GroupId, Key>,
    foreign: usize,
    next_group: u64,
}

impl Capture {
    /// Follows one call that came through `file`.
    pub fn apply(&mut self, file: FileId, call: &Call) -> Vec<Event> {
        let mut events = Vec::new();
        match *call {
            Call::Alloc {
                client,
                parent,
                object,
                class,
                engine,
            } => {
                let (parent, kind) = match class {
                    class if class::is_client(class) => {
                        // The new client's handle is its own root.
                        let handle = if object != 0 { object } else { client };
                        self.remove(handle, handle, &mut events);
                        self.insert((handle, handle), 0, Kind::Client(file));
                        return events;
                    }
                    class::DEVICE => (parent, Kind::Device),
                    class::SUBDEVICE => (parent, Kind::Subdevice),
                    class::CHANNEL_GROUP => (parent, self.new_group(engine)),
                    class if class::is_channel(class) => (parent, Kind::Channel),
                    _ => return events,
                };
                if !self.takes(client, parent, object) {
                    return events;
                }
                // A handle in use again was freed by a call that was not seen.
                self.remove(client, object, &mut events);
                if matches!(kind, Kind::Channel) {
                    self.adopt_group(client, parent, engine, &mut events);
                }
                self.insert((client, object), parent, kind);
                self.tell_made((client, object), &mut events);
                if class::is_channel(class) {
                    self.tell_channels((client, parent), &mut events);
                }
            }
            Call::Dup {
                client,
                parent,
                object,
                client_src,
                object_src,
            } => {
                if !self.takes(client, parent, object) {
                    return events;
                }
                let kind = match self.objects.get(&(client_src, object_src)).map(|o| &o.kind) {
                    Some(Kind::Group(source)) => {
                        let engine = source.engine;
                        self.new_group(engine)
                    }
                    Some(Kind::Device) => Kind::Device,
                    Some(Kind::Subdevice) => Kind::Subdevice,
                    Some(Kind::Client(_) | Kind::Channel) => return events,
                    Some(Kind::Foreign) | None => Kind::Foreign,
                };
                self.remove(client, object, &mut events);
                self.insert((client, object), parent, kind);
                self.tell_made((client, object), &mut events);
            }
            Call::Free { client, object } => self.remove(client, object, &mut events),
            // Only a compute group's timeslice is overwritten afterwards, not a copy group's.
            Call::Schedule { client, group } => {
                if let Some(state) = self.group_mut((client, group))
                    && !state.ready
                    && state.engine != engine::GR0
                {
                    state.ready = true;
                    events.push(Event::Ready(state.id));
                }
            }
            Call::SetTimeslice { client, group, us } => {
                if let Some(state) = self.group_mut((client, group)) {
                    if state.ready {
                        state.touched = state.touched.saturating_add(1);
                        events.push(Event::TimesliceTouched(state.id));
                    } else {
                        state.timeslice_us = Some(us);
                        state.ready = true;
                        events.push(Event::Ready(state.id));
                    }
                }
            }
        }
        events
    }

    /// Takes a group for ready whose library has said nothing for long enough (a compute group
    /// that is shared with others gets its slice from its owner).
    pub fn settle(&mut self, id: GroupId) {
        if let Some(key) = self.groups.get(&id).copied()
            && let Some(state) = self.group_mut(key)
        {
            state.ready = true;
        }
    }

    /// The last descriptor of `file` was closed: its clients go.
    pub fn close(&mut self, file: FileId) -> Vec<Event> {
        let mut events = Vec::new();
        let clients: Vec<u32> = self
            .objects
            .iter()
            .filter(|(_, object)| matches!(object.kind, Kind::Client(owner) if owner == file))
            .map(|((client, _), _)| *client)
            .collect();
        for client in clients {
            self.remove(client, client, &mut events);
        }
        events
    }

    /// All groups that exist, in the order of their appearance.
    pub fn groups(&self) -> impl Iterator<Item = GroupId> + '_ {
        self.groups.keys().copied()
    }

    /// What is known of a group, while it exists.
    pub fn group(&self, id: GroupId) -> Option<Seen> {
        let key @ (client, group) = *self.groups.get(&id)?;
        let Kind::Group(state) = self.objects.get(&key)?.kind else {
            return None;
        };
        let Kind::Client(file) = self.objects.get(&(client, client))?.kind else {
            return None;
        };
        let (compute, copy) = DEFAULT_TIMESLICE_US;
        let default = if state.engine == engine::GR0 {
            compute
        } else {
            copy
        };
        Some(Seen {
            file,
            engine: state.engine,
            group: Group {
                client,
                subdevice: self.subdevice_of(key).unwrap_or(0),
                group,
                channels: self
                    .children(key)
                    .filter(|(_, object)| matches!(object.kind, Kind::Channel))
                    .map(|((_, handle), _)| handle)
                    .collect(),
            },
            timeslice_us: state.timeslice_us.unwrap_or(default),
            ready: state.ready,
            touched: state.touched,
            shared: state.shared,
        })
    }

    /// How many objects are followed.
    pub fn objects(&self) -> usize {
        self.objects.len()
    }

    fn knows_client(&self, client: u32) -> bool {
        matches!(
            self.objects.get(&(client, client)),
            Some(Object {
                kind: Kind::Client(_),
                ..
            })
        )
    }

    /// Whether RM could have made this object: in a known client, apart from its parent.
    fn takes(&self, client: u32, parent: u32, object: u32) -> bool {
        self.knows_client(client) && object != client && object != parent && object != 0
    }

    fn new_group(&mut self, engine: u32) -> Kind {
        let id = GroupId(self.next_group);
        self.next_group += 1;
        Kind::Group(GroupState {
            id,
            engine,
            timeslice_us: None,
            ready: false,
            touched: 0,
            shared: false,
        })
    }

    fn group_mut(&mut self, key: Key) -> Option<&mut GroupState> {
        match &mut self.objects.get_mut(&key)?.kind {
            Kind::Group(state) => Some(state),
            _ => None,
        }
    }

    /// A channel whose parent is nothing known lies in a group that another process duplicated
    /// into this client: an MPS server does so.
    fn adopt_group(&mut self, client: u32, parent: u32, engine: u32, events: &mut Vec<Event>) {
        let known = self
            .objects
            .get(&(client, parent))
            .map(|object| (&object.kind, object.parent));
        let grandparent = match known {
            Some((Kind::Foreign, grandparent)) => grandparent,
            None => 0,
            Some(_) => return,
        };
        let engine = if engine == 0 { engine::GR0 } else { engine };
        self.remove(client, parent, events);
        let mut group = self.new_group(engine);
        if let Kind::Group(state) = &mut group {
            state.shared = true;
        }
        self.insert((client, parent), grandparent, group);
        self.tell_made((client, parent), events);
    }

    fn insert(&mut self, key: Key, parent: u32, kind: Kind) {
        let foreign = matches!(kind, Kind::Foreign);
        if self.objects.len() >= MAX_OBJECTS || foreign && self.foreign >= MAX_FOREIGN {
            return;
        }
        self.foreign += usize::from(foreign);
        if let Kind::Group(state) = &kind {
            self.groups.insert(state.id, key);
        }
        self.objects.insert(key, Object { parent, kind });
    }

    fn tell_made(&self, key: Key, events: &mut Vec<Event>) {
        if let Some(Object {
            kind: Kind::Group(state),
            ..
        }) = self.objects.get(&key)
        {
            events.push(Event::Made(state.id));
        }
    }

    fn tell_channels(&self, group: Key, events: &mut Vec<Event>) {
        if let Some(Object {
            kind: Kind::Group(state),
            ..
        }) = self.objects.get(&group)
        {
            events.push(Event::Channels(state.id));
        }
    }

    /// Removes an object and all that lies under it; a client with all it has.
    fn remove(&mut self, client: u32, object: u32, events: &mut Vec<Event>) {
        let mut doomed = if client == object && self.knows_client(client) {
            self.of_client(client).map(|(key, _)| key).collect()
        } else {
            vec![(client, object)]
        };
        let mut shrunk = Vec::new();
        while let Some(key) = doomed.pop() {
            match self.objects.remove(&key) {
                Some(Object {
                    kind: Kind::Group(state),
                    ..
                }) => {
                    self.groups.remove(&state.id);
                    events.push(Event::Gone(state.id));
                }
                Some(Object {
                    kind: Kind::Channel,
                    parent,
                }) => shrunk.push((client, parent)),
                Some(Object {
                    kind: Kind::Foreign,
                    ..
                }) => self.foreign -= 1,
                _ => {}
            }
            doomed.extend(self.children(key).map(|(key, _)| key));
        }
        shrunk.dedup();
        for group in shrunk {
            self.tell_channels(group, events);
        }
    }

    fn of_client(&self, client: u32) -> impl Iterator<Item = (Key, &Object)> + '_ {
        self.objects
            .range((client, 0)..=(client, u32::MAX))
            .map(|(key, object)| (*key, object))
    }

    fn children(&self, (client, parent): Key) -> impl Iterator<Item = (Key, &Object)> + '_ {
        self.of_client(client).filter(move |(_, object)| {
            object.parent == parent && !matches!(object.kind, Kind::Client(_))
        })
    }

    /// The subdevice of the device above `key`; where that is not known, the client's last.
    fn subdevice_of(&self, key @ (client, _): Key) -> Option<u32> {
        let mut device = self.objects.get(&key)?.parent;
        // Handles come from the program: its parents may form a ring.
        for _ in 0..8 {
            match self.objects.get(&(client, device)) {
                Some(Object {
                    kind: Kind::Device | Kind::Client(_),
                    ..
                })
                | None => break,
                Some(object) => device = object.parent,
            }
        }
        let is_subdevice = |object: &Object| matches!(object.kind, Kind::Subdevice);
        let of_device = self
            .children((client, device))
            .find(|(_, object)| is_subdevice(object));
        let any = || {
            self.of_client(client)
                .filter(|(_, object)| is_subdevice(object))
                .last()
        };
        of_device.or_else(any).map(|((_, handle), _)| handle)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::*;
    use crate::layout::ChannelAllocHead;

    const CLIENT: u32 = 0xc1d0_001a;
    const DEVICE: u32 = 0x5c00_0002;
    const SUBDEVICE: u32 = 0x5c00_0003;
    const GROUP: u32 = 0x5c00_0015;
    const HOPPER: u32 = 0xc86f;

    fn alloc(parent: u32, object: u32, class: u32, engine: u32) -> Call {
        let client = CLIENT;
        Call::Alloc {
            client,
            parent,
            object,
            class,
            engine,
        }
    }

    fn client(handle: u32) -> Call {
        let class = class::ROOT_CLIENT;
        Call::Alloc {
            client: 0,
            parent: 0,
            object: handle,
            class,
            engine: 0,
        }
    }

    /// What libcuda does up to and including one compute group with two channels.
    fn context() -> Capture {
        let mut capture = Capture::default();
        for call in [
            client(CLIENT),
            alloc(CLIENT, DEVICE, class::DEVICE, 0),
            alloc(DEVICE, SUBDEVICE, class::SUBDEVICE, 0),
            alloc(DEVICE, GROUP, class::CHANNEL_GROUP, engine::GR0),
            alloc(GROUP, GROUP + 1, HOPPER, engine::GR0),
            alloc(GROUP, GROUP + 2, HOPPER, engine::GR0),
        ] {
            capture.apply(1, &call);
        }
        capture
    }

    fn set(group: u32, us: u64) -> Call {
        Call::SetTimeslice {
            client: CLIENT,
            group,
            us,
        }
    }

    #[test]
    fn a_context_is_ready_when_its_library_has_set_the_slice() {
        let mut capture = context();
        let id = capture.groups().next().unwrap();
        let schedule = Call::Schedule {
            client: CLIENT,
            group: GROUP,
        };
        assert_eq!(capture.apply(1, &schedule), []);
        assert!(!capture.group(id).unwrap().ready);
        assert_eq!(capture.apply(1, &set(GROUP, 3000)), [Event::Ready(id)]);
        let seen = capture.group(id).unwrap();
        assert_eq!(
            (seen.file, seen.engine, seen.timeslice_us),
            (1, engine::GR0, 3000)
        );
        assert_eq!(
            seen.group,
            Group {
                client: CLIENT,
                subdevice: SUBDEVICE,
                group: GROUP,
                channels: vec![GROUP + 1, GROUP + 2],
            }
        );
        assert_eq!(
            capture.apply(1, &set(GROUP, 9)),
            [Event::TimesliceTouched(id)]
        );
        let seen = capture.group(id).unwrap();
        assert_eq!(
            (seen.timeslice_us, seen.touched),
            (3000, 1),
            "the slice to give back stays"
        );
    }

    #[test]
    fn a_copy_group_is_ready_when_scheduled() {
        let mut capture = context();
        let made = capture.apply(1, &alloc(DEVICE, 0x50, class::CHANNEL_GROUP, engine::COPY0));
        let [Event::Made(id)] = made[..] else {
            panic!("{made:?}")
        };
        let schedule = Call::Schedule {
            client: CLIENT,
            group: 0x50,
        };
        assert_eq!(capture.apply(1, &schedule), [Event::Ready(id)]);
        assert_eq!(capture.group(id).unwrap().timeslice_us, 1024);
    }

    #[test]
    fn channels_come_and_go_under_any_parent_that_free_names() {
        let mut capture = context();
        let id = capture.groups().next().unwrap();
        let free = |object| Call::Free {
            client: CLIENT,
            object,
        };
        assert_eq!(capture.apply(1, &free(GROUP + 1)), [Event::Channels(id)]);
        assert_eq!(capture.group(id).unwrap().group.channels, [GROUP + 2]);
        assert_eq!(capture.apply(1, &free(0x77)), [], "not ours");
        assert_eq!(capture.apply(1, &free(DEVICE)), [Event::Gone(id)]);
        assert_eq!(capture.objects(), 1, "the client stays");
    }

    #[test]
    fn every_architecture_s_channels_are_known() {
        for (class, name) in class::CHANNELS {
            let mut capture = context();
            let id = capture.groups().next().unwrap();
            let events = capture.apply(1, &alloc(GROUP, 0x99, class, 0));
            assert_eq!(events, [Event::Channels(id)], "{name}");
        }
    }

    #[test]
    fn foreign_group_shows_as_the_parent_of_a_channel() {
        for seen_dup in [false, true] {
            let mut capture = context();
            // A second device with its subdevice, made before and after.
            capture.apply(1, &alloc(CLIENT, 0x80, class::DEVICE, 0));
            capture.apply(1, &alloc(0x80, 0x81, class::SUBDEVICE, 0));
            if seen_dup {
                let dup = Call::Dup {
                    client: CLIENT,
                    parent: 0x80,
                    object: 0x90,
                    client_src: 0xc1d0_0001,
                    object_src: 0x5c00_0015,
                };
                assert_eq!(capture.apply(1, &dup), []);
            }
            let events = capture.apply(1, &alloc(0x90, 0x91, HOPPER, 0));
            let [Event::Made(id), Event::Channels(_)] = events[..] else {
                panic!("{events:?}")
            };
            let seen = capture.group(id).unwrap();
            assert_eq!((seen.engine, seen.shared), (engine::GR0, true));
            assert_eq!(
                (seen.group.group, &seen.group.channels[..]),
                (0x90, &[0x91][..])
            );
            if seen_dup {
                assert_eq!(seen.group.subdevice, 0x81);
            }
            assert!(!seen.ready);
            capture.settle(id);
            assert!(capture.group(id).unwrap().ready);
            assert_eq!(
                capture.apply(1, &set(0x90, 5)),
                [Event::TimesliceTouched(id)]
            );
        }
    }

    #[test]
    fn a_duplicate_of_a_known_group_is_a_group() {
        let mut capture = context();
        let dup = Call::Dup {
            client: CLIENT,
            parent: DEVICE,
            object: 0x90,
            client_src: CLIENT,
            object_src: GROUP,
        };
        let events = capture.apply(1, &dup);
        let [Event::Made(id)] = events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(capture.group(id).unwrap().engine, engine::GR0);
    }

    #[test]
    fn clients_of_several_files_and_devices_stay_apart() {
        let mut capture = context();
        let first = capture.groups().next().unwrap();
        let other = 0xc1d0_0020;
        let alloc = |parent, object, class, engine| Call::Alloc {
            client: other,
            parent,
            object,
            class,
            engine,
        };
        capture.apply(2, &client(other));
        // The same handles as the first client's, and two devices.
        capture.apply(2, &alloc(other, DEVICE, class::DEVICE, 0));
        capture.apply(2, &alloc(DEVICE, 0x21, class::SUBDEVICE, 0));
        capture.apply(2, &alloc(other, 0x30, class::DEVICE, 0));
        capture.apply(2, &alloc(0x30, 0x31, class::SUBDEVICE, 0));
        capture.apply(2, &alloc(DEVICE, GROUP, class::CHANNEL_GROUP, engine::GR0));
        capture.apply(
            2,
            &alloc(0x30, GROUP + 9, class::CHANNEL_GROUP, engine::GR0),
        );
        let groups: Vec<_> = capture
            .groups()
            .map(|id| capture.group(id).unwrap())
            .collect();
        assert_eq!(groups.iter().map(|g| g.file).collect::<Vec<_>>(), [1, 2, 2]);
        assert_eq!(
            groups.iter().map(|g| g.group.subdevice).collect::<Vec<_>>(),
            [SUBDEVICE, 0x21, 0x31]
        );
        assert_eq!(capture.close(2).len(), 2);
        assert_eq!(capture.groups().collect::<Vec<_>>(), [first]);
        assert_eq!(capture.close(1), [Event::Gone(first)]);
        assert_eq!(capture.objects(), 0);
    }

    #[test]
    fn calls_in_a_client_that_was_not_seen_mean_nothing() {
        let mut capture = Capture::default();
        let group = alloc(DEVICE, GROUP, class::CHANNEL_GROUP, engine::GR0);
        assert_eq!(capture.apply(1, &group), []);
        assert_eq!(capture.objects(), 0);
    }

    #[test]
    fn memory_is_bounded() {
        let mut capture = context();
        for object in 0x1_0000..0x1_0000 + 2 * MAX_FOREIGN as u32 {
            let dup = Call::Dup {
                client: CLIENT,
                parent: DEVICE,
                object,
                client_src: 1,
                object_src: 1,
            };
            capture.apply(1, &dup);
        }
        assert!(capture.objects() <= MAX_FOREIGN + 10);
        capture.apply(
            1,
            &Call::Free {
                client: CLIENT,
                object: CLIENT,
            },
        );
        assert_eq!((capture.objects(), capture.foreign), (0, 0));
    }

    /// A program's memory: one block at one address.
    fn memory(at: u64, bytes: &[u8]) -> impl Fn(u64, &mut [u8]) -> bool + '_ {
        move |address, out| {
            let Some(from) = address.checked_sub(at) else {
                return false;
            };
            let Some(block) = bytes.get(from as usize..) else {
                return false;
            };
            let Some(block) = block.get(..out.len()) else {
                return false;
            };
            out.copy_from_slice(block);
            true
        }
    }

    #[test]
    fn both_forms_of_alloc_are_read() {
        let params = GroupAlloc {
            engine: 11,
            ..Default::default()
        };
        let memory = memory(0x1000, params.as_bytes());
        let short = Alloc21 {
            root: CLIENT,
            parent: DEVICE,
            object: GROUP,
            class: class::CHANNEL_GROUP,
            params: 0x1000,
            ..Default::default()
        };
        let long = Alloc64 {
            root: CLIENT,
            parent: DEVICE,
            object: GROUP,
            class: class::CHANNEL_GROUP,
            params: 0x1000,
            ..Default::default()
        };
        let call = Some(alloc(DEVICE, GROUP, class::CHANNEL_GROUP, 11));
        assert_eq!(
            Call::decode(Variant::default(), escape::ALLOC, short.as_bytes(), &memory),
            call
        );
        assert_eq!(
            Call::decode(Variant::default(), escape::ALLOC, long.as_bytes(), &memory),
            call
        );
        let refused = Alloc64 {
            status: 0x1f,
            ..long
        };
        assert_eq!(
            Call::decode(
                Variant::default(),
                escape::ALLOC,
                refused.as_bytes(),
                &memory
            ),
            None
        );
        let refused = Alloc21 {
            status: 0x1f,
            ..short
        };
        assert_eq!(
            Call::decode(
                Variant::default(),
                escape::ALLOC,
                refused.as_bytes(),
                &memory
            ),
            None
        );
        assert_eq!(
            Call::decode(
                Variant::default(),
                escape::ALLOC,
                &long.as_bytes()[..40],
                &memory
            ),
            None
        );
        let other = Alloc64 {
            class: 0x3e,
            ..long
        };
        assert_eq!(
            Call::decode(Variant::default(), escape::ALLOC, other.as_bytes(), &memory),
            None
        );
    }

    #[test]
    fn a_channel_s_engine_is_read() {
        let params = ChannelAllocHead {
            engine: 12,
            ..Default::default()
        };
        let long = Alloc64 {
            root: CLIENT,
            parent: GROUP,
            object: 7,
            class: HOPPER,
            params: 64,
            ..Default::default()
        };
        let call = Call::decode(
            Variant::default(),
            escape::ALLOC,
            long.as_bytes(),
            memory(64, params.as_bytes()),
        );
        assert_eq!(call, Some(alloc(GROUP, 7, HOPPER, 12)));
        // Unreadable parameters are no reason to miss the channel.
        let call = Call::decode(
            Variant::default(),
            escape::ALLOC,
            long.as_bytes(),
            |_, _| false,
        );
        assert_eq!(call, Some(alloc(GROUP, 7, HOPPER, 0)));
    }

    #[test]
    fn structures_given_by_pointer_are_followed_once() {
        let free = Free {
            root: CLIENT,
            parent: 0,
            object: GROUP,
            status: 0,
        };
        let xfer = XferCmd {
            cmd: escape::FREE.into(),
            size: 16,
            ptr: 0x2000,
        };
        let read = memory(0x2000, free.as_bytes());
        let call = Call::decode(Variant::default(), escape::XFER_CMD, xfer.as_bytes(), &read);
        assert_eq!(
            call,
            Some(Call::Free {
                client: CLIENT,
                object: GROUP
            })
        );
        let huge = XferCmd {
            size: u32::MAX,
            ..xfer
        };
        assert_eq!(
            Call::decode(Variant::default(), escape::XFER_CMD, huge.as_bytes(), &read),
            None
        );
        let nested = XferCmd {
            cmd: escape::XFER_CMD.into(),
            ..xfer
        };
        assert_eq!(
            Call::decode(
                Variant::default(),
                escape::XFER_CMD,
                nested.as_bytes(),
                &read
            ),
            None
        );
    }

    #[test]
    fn controls_of_groups_are_read() {
        let params = TimesliceParams { timeslice_us: 2048 };
        let memory = memory(8, params.as_bytes());
        let mut control = Control {
            client: CLIENT,
            object: GROUP,
            cmd: cmd::SET_TIMESLICE,
            params: 8,
            params_size: 8,
            ..Default::default()
        };
        let decode = |control: &Control| {
            Call::decode(
                Variant::default(),
                escape::CONTROL,
                control.as_bytes(),
                &memory,
            )
        };
        assert_eq!(decode(&control), Some(set(GROUP, 2048)));
        control.status = 0x23;
        assert_eq!(decode(&control), None);
        control.status = 0;
        control.cmd = cmd::GROUP_SCHEDULE;
        assert_eq!(
            decode(&control),
            None,
            "it disables: the first byte is 0 (2048 = 0x800)"
        );
        control.cmd = cmd::PREEMPT;
        assert_eq!(decode(&control), None);
    }

    #[test]
    fn group_is_enabled_by_the_short_structure_of_older_drivers() {
        // Nothing can be read behind it.
        let memory = memory(8, &[1, 0]);
        let control = Control {
            client: CLIENT,
            object: GROUP,
            cmd: cmd::GROUP_SCHEDULE,
            params: 8,
            params_size: 2,
            ..Default::default()
        };
        let enabled = Call::Schedule {
            client: CLIENT,
            group: GROUP,
        };
        let call = Call::decode(
            Variant::default(),
            escape::CONTROL,
            control.as_bytes(),
            &memory,
        );
        assert_eq!(call, Some(enabled));
    }

    /// Calls over few handles, so that they meet.
    fn any_call() -> impl Strategy<Value = Call> {
        let client = prop_oneof![Just(1u32), Just(2), 0u32..4];
        let handle = || 0u32..12;
        let class = prop_oneof![
            Just(class::ROOT_CLIENT),
            Just(class::DEVICE),
            Just(class::SUBDEVICE),
            Just(class::CHANNEL_GROUP),
            Just(HOPPER),
        ];
        (client, handle(), handle(), class, 0..12u32, 0..9).prop_map(
            |(client, parent, object, class, engine, what)| match what {
                0..5 => Call::Alloc {
                    client,
                    parent,
                    object,
                    class,
                    engine,
                },
                5 => Call::Dup {
                    client,
                    parent,
                    object,
                    client_src: engine % 4,
                    object_src: engine,
                },
                6 => Call::Free { client, object },
                7 => Call::Schedule {
                    client,
                    group: object,
                },
                _ => Call::SetTimeslice {
                    client,
                    group: object,
                    us: engine.into(),
                },
            },
        )
    }

    proptest! {
        #[test]
        fn any_calls_leave_a_consistent_picture(
            calls in proptest::collection::vec((0..3u64, any_call()), 0..200),
        ) {
            let mut capture = Capture::default();
            let mut alive = std::collections::BTreeSet::new();
            for (file, call) in &calls {
                for event in capture.apply(*file, call) {
                    match event {
                        Event::Made(id) => prop_assert!(alive.insert(id), "{id:?} made twice"),
                        Event::Gone(id) => prop_assert!(alive.remove(&id), "{id:?} gone twice"),
                        Event::Ready(id) | Event::Channels(id) | Event::TimesliceTouched(id) => {
                            prop_assert!(alive.contains(&id), "{event:?} of no group");
                        }
                    }
                }
                let listed: std::collections::BTreeSet<_> = capture.groups().collect();
                prop_assert_eq!(&listed, &alive);
                for id in listed {
                    prop_assert!(capture.group(id).is_some(), "a group without its client");
                }
                let foreign = capture
                    .objects
                    .values()
                    .filter(|object| matches!(object.kind, Kind::Foreign))
                    .count();
                prop_assert_eq!(foreign, capture.foreign);
            }
            for file in 0..3 {
                capture.close(file);
            }
            prop_assert_eq!(capture.objects(), 0, "closing the files leaves nothing");
            prop_assert_eq!(capture.groups().count(), 0);
        }

        #[test]
        fn freeing_a_parent_frees_all_below(
            calls in proptest::collection::vec(any_call(), 0..100),
            (client, object) in (1..3u32, 0..12u32),
        ) {
            let mut capture = Capture::default();
            for call in &calls {
                capture.apply(1, call);
            }
            capture.apply(1, &Call::Free { client, object });
            prop_assert_eq!(capture.children((client, object)).count(), 0);
            prop_assert!(!capture.objects.contains_key(&(client, object)));
            if client == object {
                prop_assert_eq!(capture.of_client(client).count(), 0);
            }
        }

        #[test]
        fn any_bytes_decode_to_a_call_or_nothing(
            nr in prop_oneof![
                Just(escape::ALLOC), Just(escape::CONTROL), Just(escape::FREE),
                Just(escape::DUP_OBJECT), Just(escape::XFER_CMD), any::<u8>(),
            ],
            arg in proptest::collection::vec(any::<u8>(), 0..64),
            memory_bytes in proptest::collection::vec(any::<u8>(), 0..600),
        ) {
            let mut capture = context();
            if let Some(call) = Call::decode(Variant::default(), nr, &arg, memory(0, &memory_bytes)) {
                prop_assert!(Call::may_matter(nr));
                capture.apply(1, &call);
            }
        }
    }

    #[test]
    fn the_layout_s_offsets_are_the_driver_s() {
        assert_eq!(std::mem::offset_of!(GroupAlloc, engine), 12);
        assert_eq!(std::mem::offset_of!(ChannelAllocHead, engine), 128);
    }
}
