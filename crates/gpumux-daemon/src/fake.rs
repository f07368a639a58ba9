//! A driver in a few lines, for tests: one socket, any clients, each with one subdevice, one group
//! and eight channels, owned by the connection that named the client first.

use std::{
    collections::BTreeMap,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gpumux_rm::{
    Controls, Group, RmControls, RmStatus,
    emulated::{AnswerHead, EmulatedFile, MAGIC, RequestHead},
    layout::{Control, DisableChannelsParams, GidInfoParams, TimesliceParams, cmd},
};
use gpumux_wire::{Shim, page::Page, socket};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags,
    SocketFlags, accept_with, recvmsg, sendmsg,
};
use zerocopy::{FromBytes, IntoBytes};

pub(crate) const SUBDEVICE: u32 = 0x5c00_0003;
pub(crate) const GROUP: u32 = 0x5c00_0010;
pub(crate) const CHANNELS: std::ops::Range<u32> = 0x5c00_0020..0x5c00_0028;

/// An RM client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Client {
    owner: usize,
    pub(crate) slice: u64,
    pub(crate) frozen: bool,
    /// How often it was set running.
    pub(crate) thaws: u32,
    /// What the driver answers to its controls instead.
    pub(crate) refuses: Option<RmStatus>,
}

/// The driver, served by threads that end with their connections.
pub(crate) struct Driver {
    pub(crate) socket: PathBuf,
    clients: Arc<Mutex<BTreeMap<u32, Client>>>,
}

impl Driver {
    pub(crate) fn start(dir: &Path, name: &str) -> Self {
        let socket = dir.join(name);
        let listener = socket::listen(&socket, 128).unwrap();
        rustix::io::ioctl_fionbio(&listener, false).unwrap();
        let clients = Arc::<Mutex<BTreeMap<u32, Client>>>::default();
        let served = Arc::clone(&clients);
        std::thread::spawn(move || {
            for connection in 0.. {
                let Ok(file) = accept_with(&listener, SocketFlags::CLOEXEC) else {
                    return;
                };
                let clients = Arc::clone(&served);
                std::thread::spawn(move || while answer(&file, connection, &clients).is_some() {});
            }
        });
        Self { socket, clients }
    }

    /// A control file, as a program opens it.
    pub(crate) fn open(&self) -> OwnedFd {
        socket::connect(&self.socket, SocketFlags::empty()).unwrap()
    }

    /// A control file with a client whose controls the driver refuses.
    pub(crate) fn open_refusing(&self, client: u32, status: RmStatus) -> OwnedFd {
        let file = self.open();
        let group = Group {
            client,
            subdevice: SUBDEVICE,
            group: GROUP,
            channels: CHANNELS.collect(),
        };
        let controls =
            RmControls::new(EmulatedFile::new(file.try_clone().unwrap()).unwrap(), group);
        controls.timeslice().unwrap();
        self.clients().get_mut(&client).unwrap().refuses = Some(status);
        file
    }

    /// The clients that are still open.
    pub(crate) fn clients(&self) -> MutexGuard<'_, BTreeMap<u32, Client>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves one call; none when the connection is closed, and its clients with it.
fn answer(file: &OwnedFd, connection: usize, clients: &Mutex<BTreeMap<u32, Client>>) -> Option<()> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        file,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    );
    let mut clients = clients.lock().unwrap_or_else(PoisonError::into_inner);
    let length = received.map_or(0, |received| received.bytes);
    if length == 0 {
        clients.retain(|_, client| client.owner != connection);
        return None;
    }
    let reply = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    })?;
    let (_, rest) = RequestHead::read_from_prefix(&bytes[..length]).ok()?;
    let (mut control, params) = Control::read_from_prefix(rest).ok()?;
    let mut params = params.to_vec();
    let client = clients.entry(control.client).or_insert(Client {
        owner: connection,
        slice: 2048,
        frozen: false,
        thaws: 0,
        refuses: None,
    });
    let status = match client.owner == connection {
        true => act(client, &control, &mut params),
        false => RmStatus::INVALID_CLIENT,
    };
    control.status = status.0;
    let head = AnswerHead {
        magic: MAGIC,
        errno: 0,
    };
    sendmsg(
        reply,
        &[
            IoSlice::new(head.as_bytes()),
            IoSlice::new(control.as_bytes()),
            IoSlice::new(&params),
        ],
        &mut SendAncillaryBuffer::default(),
        SendFlags::NOSIGNAL,
    )
    .ok()
    .map(drop)
}

fn act(client: &mut Client, control: &Control, params: &mut [u8]) -> RmStatus {
    if let Some(status) = client.refuses {
        return status;
    }
    match (control.object, control.cmd) {
        (SUBDEVICE, cmd::GET_GID_INFO) => {
            let mut info = GidInfoParams {
                length: 6,
                ..Default::default()
            };
            info.data[..6].copy_from_slice(b"GPU-0\0");
            params.copy_from_slice(info.as_bytes());
        }
        (GROUP, cmd::GET_TIMESLICE) => {
            params.copy_from_slice(
                TimesliceParams {
                    timeslice_us: client.slice,
                }
                .as_bytes(),
            );
        }
        (GROUP, cmd::SET_TIMESLICE) => {
            client.slice = TimesliceParams::read_from_bytes(params)
                .unwrap()
                .timeslice_us;
        }
        (SUBDEVICE, cmd::DISABLE_CHANNELS) => {
            let list = DisableChannelsParams::read_from_bytes(params).unwrap();
            let named = list
                .channels
                .iter()
                .zip(&list.clients)
                .take(list.count as usize);
            for (channel, owner) in named {
                // Root may name any client: the daemon must not.
                assert_eq!(*owner, control.client, "a foreign client in the list");
                if !CHANNELS.contains(channel) {
                    return RmStatus::INVALID_CHANNEL;
                }
            }
            client.frozen = list.disable == 1;
            client.thaws += u32::from(!client.frozen);
        }
        _ => return RmStatus::OBJECT_NOT_FOUND,
    }
    RmStatus::OK
}

/// A shim's first packet, and its page.
pub(crate) fn hello(tenant: Option<&str>) -> (Shim, Page, OwnedFd) {
    let (page, file) = Page::create().unwrap();
    let hello = Shim::Hello {
        protocol: gpumux_wire::PROTOCOL,
        version: "test".into(),
        tenant: tenant.map(Into::into),
    };
    (hello, page, file)
}

/// The compute group of a client.
pub(crate) fn group(key: u32, client: u32) -> Shim {
    Shim::Group {
        key,
        engine: 1,
        client,
        subdevice: SUBDEVICE,
        group: GROUP,
        channels: CHANNELS.collect(),
        timeslice_us: 2048,
        shared: false,
    }
}
