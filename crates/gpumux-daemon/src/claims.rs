//! Which daemon has a device. Two on one would bring it to a stop: each lets one batch tenant run with the shortest timeslice, and the device
//! switches between the two.
//!
//! A claim is a socket with an abstract name made of user and UUID. The kernel releases it with its process, however that ends, and names
//! process and user to each process that connects. A daemon gives way to one of its own user, and to root's. Other users' daemons control only
//! their own processes, and could otherwise keep a machine's daemon from its devices. Containers with a network of their own are not seen.

use std::{
    collections::{BTreeMap, hash_map::DefaultHasher},
    fmt,
    hash::{Hash, Hasher},
    os::fd::OwnedFd,
    path::Path,
    time::Duration,
};

use gpumux_wire::socket;
use rustix::{io::ioctl_fionbio, net::SocketFlags, process::getuid};

use crate::{devices::Known, paths, peer::credentials};

/// Looks that may wait to be answered.
const BACKLOG: i32 = 128;
/// A daemon that ends may keep its claims for up to this many times 10 ms.
const ATTEMPTS: u32 = 30;

/// Another daemon has a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{device} has a daemon already ({holder}), and two on one GPU would stop each other's tenants: {way}"
)]
pub struct Claimed {
    device: String,
    holder: Holder,
    way: String,
}

/// A daemon's process, as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    /// 0: it is in another pid namespace.
    pid: u32,
    uid: u32,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            0 => write!(f, "in another container, uid {}", self.uid),
            pid => write!(f, "pid {pid}, uid {}", self.uid),
        }
    }
}

/// The devices that this daemon has.
pub(crate) struct Claims {
    /// What tells emulated devices of one UUID apart.
    server: String,
    held: BTreeMap<String, OwnedFd>,
    /// Those that could not be claimed, and the daemon that has each; none where a process is in the way that must not stop this one.
    lacking: BTreeMap<String, Option<Claimed>>,
}

impl Claims {
    /// None yet; `emulated` is the server's socket if the devices are emulated.
    pub(crate) fn new(emulated: Option<&Path>) -> Self {
        let server = emulated.map(|socket| {
            let mut hash = DefaultHasher::new();
            socket.hash(&mut hash);
            format!("@{:x}", hash.finish())
        });
        Self {
            server: server.unwrap_or_default(),
            held: BTreeMap::new(),
            lacking: BTreeMap::new(),
        }
    }

    /// Claims those that are not claimed yet. Returns those of them that another daemon has, if that was not so at the last look.
    pub(crate) fn claim(&mut self, devices: &[Known]) -> Vec<Claimed> {
        let mut lacking = BTreeMap::new();
        for device in devices {
            if self.held.contains_key(&device.uuid) {
                continue;
            }
            let holder = match self.take(&device.uuid, self.attempts(&device.uuid)) {
                Ok(socket) => {
                    self.held.insert(device.uuid.clone(), socket);
                    continue;
                }
                Err(holder) => holder,
            };
            if holder.is_none() && !self.lacking.contains_key(&device.uuid) {
                tracing::warn!(
                    device = device.uuid,
                    "cannot claim the device, whose name a process of another user or one that was killed and hangs has: a second \
                     daemon would not notice this one"
                );
            }
            let claimed = holder.map(|holder| Claimed {
                device: format!("GPU {} ({})", device.gpu, device.uuid),
                holder,
                way: match holder.pid {
                    0 => "end one of them, or start this one where the device is not seen".into(),
                    _ if holder.uid == 0 && !getuid().is_root() => {
                        "use root's (`gpumux ps`)".into()
                    }
                    pid => {
                        format!("use that one (`gpumux ps`), or first end it (`kill {pid}`)")
                    }
                },
            });
            lacking.insert(device.uuid.clone(), claimed);
        }
        let before = std::mem::replace(&mut self.lacking, lacking);
        let new = (self.lacking.iter()).filter(|(uuid, it)| before.get(*uuid) != Some(it));
        new.filter_map(|(_, it)| it.clone()).collect()
    }

    /// The devices that other daemons have, by UUID, and which.
    pub(crate) fn others(&self) -> BTreeMap<String, String> {
        let others = self.lacking.iter();
        others
            .filter_map(|(uuid, it)| Some((uuid.clone(), it.as_ref()?.to_string())))
            .collect()
    }

    /// A daemon that ends is waited for once, not at each look.
    fn attempts(&self, uuid: &str) -> u32 {
        match self.lacking.contains_key(uuid) {
            true => 1,
            false => ATTEMPTS,
        }
    }

    /// Closes the connections of daemons that asked for the holder.
    pub(crate) fn answer(&self) {
        for socket in self.held.values() {
            // No process that is started meanwhile inherits it.
            while rustix::net::accept_with(socket, SocketFlags::CLOEXEC).is_ok() {}
        }
    }

    fn name(&self, uid: u32, uuid: &str) -> Vec<u8> {
        format!("gpumux/{uid}/{uuid}{}", self.server).into_bytes()
    }

    /// Claims one. The error is the daemon that has it; none where a process is in the way that must not stop this one.
    fn take(&self, uuid: &str, attempts: u32) -> Result<OwnedFd, Option<Holder>> {
        let own = getuid().as_raw();
        let mut holder = None;
        for attempt in 0..attempts {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(10));
            }
            holder = [0, own].into_iter().find_map(|uid| self.holder(uid, uuid));
            if holder.is_some() {
                continue;
            }
            match claim(&self.name(own, uuid)) {
                Ok(socket) => return Ok(socket),
                Err(error) => tracing::debug!(uuid, %error, "cannot claim the device"),
            }
        }
        Err(holder)
    }

    /// The daemon of this user that has a device. A process of another user counts as little as one that cannot run any more.
    fn holder(&self, uid: u32, uuid: &str) -> Option<Holder> {
        let name = self.name(uid, uuid);
        let socket = socket::connect_abstract(&name, SocketFlags::NONBLOCK).ok()?;
        let (pid, peer) = credentials(&socket).ok()?;
        let counts = peer == uid && !paths::is_killed(pid);
        counts.then_some(Holder { pid, uid })
    }
}

fn claim(name: &[u8]) -> std::io::Result<OwnedFd> {
    let socket = socket::listen_abstract(name, BACKLOG)?;
    ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: &str) -> Known {
        Known {
            uuid: uuid.into(),
            gpu: 3,
            ..Known::default()
        }
    }

    /// Claims of a machine of this test's own.
    fn claims(server: &Path) -> Claims {
        Claims::new(Some(server))
    }

    #[test]
    fn device_of_another_daemon_is_named_until_that_ends() {
        let machine = tempfile::tempdir().unwrap();
        let (gpu, instance) = (device("GPU-1"), device("MIG-1"));
        let mut first = claims(machine.path());
        assert_eq!(first.claim(std::slice::from_ref(&gpu)), []);
        assert_eq!(first.claim(&[gpu.clone(), instance.clone()]), []);
        let mut second = claims(machine.path());
        let free = device("MIG-2");
        let all = [instance.clone(), free];
        let [error] = &second.claim(&all)[..] else {
            panic!("one has a daemon");
        };
        let own = std::process::id();
        assert_eq!(error.holder.pid, own);
        let text = error.to_string();
        for part in [
            "GPU 3 (MIG-1)",
            &format!("pid {own}"),
            &format!("`kill {own}`"),
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(second.claim(&all), [], "once");
        assert_eq!(second.others(), BTreeMap::from([("MIG-1".into(), text)]));
        // Its looks do not fill the queue of the first.
        for _ in 0..2 * BACKLOG {
            assert!(second.holder(getuid().as_raw(), "GPU-1").is_some());
            first.answer();
        }
        drop(first);
        assert_eq!(second.claim(&[instance, gpu]), []);
        assert_eq!(second.others(), BTreeMap::new());
    }

    #[test]
    fn other_instances_and_other_machines_devices_are_free() {
        let (machine, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut first = claims(machine.path());
        assert_eq!(first.claim(&[device("MIG-1")]), []);
        assert_eq!(claims(machine.path()).claim(&[device("MIG-2")]), []);
        assert_eq!(claims(other.path()).claim(&[device("MIG-1")]), []);
    }

    #[test]
    fn name_that_no_daemon_has_is_waited_for_once() {
        let machine = tempfile::tempdir().unwrap();
        let mut own = claims(machine.path());
        let name = own.name(getuid().as_raw(), "GPU-1");
        // This socket answers as little as one of another user counts.
        let kind = rustix::net::SocketType::SEQPACKET;
        let squatted = rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new_abstract_name(&name).unwrap();
        rustix::net::bind(&squatted, &address).unwrap();
        let gpu = [device("GPU-1")];
        assert_eq!(own.attempts("GPU-1"), ATTEMPTS);
        assert_eq!(own.claim(&gpu), []);
        assert_eq!(own.attempts("GPU-1"), 1);
        assert_eq!(own.others(), BTreeMap::new(), "it stops no daemon");
    }

    #[test]
    fn process_of_another_user_keeps_no_daemon_from_a_device() {
        let machine = tempfile::tempdir().unwrap();
        let mut own = claims(machine.path());
        // This process holds a name that is another user's.
        let _squatted = claim(&own.name(4711, "GPU-1")).unwrap();
        assert_eq!(own.holder(4711, "GPU-1"), None);
        assert_eq!(own.claim(&[device("GPU-1")]), []);
    }
}
