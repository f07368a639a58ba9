//! Learning handles from a program's own RM calls.
//!
//! Two pure steps. [`Call::decode`] reads one finished ioctl and keeps the few that matter: objects
//! made, duplicated and freed, groups scheduled and given a slice. [`Capture::apply`] follows
//! them and says what that means for channel groups. Neither does I/O, and neither trusts what
//! it sees: any sequence of calls is taken without panic and in bounded memory.
//!
//! Only calls that RM carried out (status 0) count. Objects are known by client and handle; what
//! FREE names as parent is ignored, because libcuda names the device there for a channel of a group.

mod call;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::{
    controls::Group,
    layout::{class, engine},
};

pub use self::call::Call;

/// Most objects that are followed; what a program makes beyond is not seen. (A context needs
/// about 30.)
pub const MAX_OBJECTS: usize = 65_536;

/// Most duplicates of unknown objects that are remembered for being perhaps a group.
const MAX_FOREIGN: usize = 4096;

/// Timeslices that were never set, in µs, for compute and for copy engines (measured on H100).
const DEFAULT_TIMESLICE_US: (u64, u64) = (2048, 1024);

/// The caller's name for an open control file.
pub type FileId = u64;

/// A channel group, by the order of appearance. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u64);

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
