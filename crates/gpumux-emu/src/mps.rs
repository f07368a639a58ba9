//! The emulated device's MPS: a process that makes channel groups and shares them with its clients.
//!
//! [`serve`] plays `nvidia-cuda-mps-control -f` and the server that it starts, in one process: its folder is the one
//! that `CUDA_MPS_PIPE_DIRECTORY` names, and what both say goes to the standard output. A program finds it by the same variable
//! ([`Member::join`]) and gets handles that lead to the server's groups, so that all clients are one to the hardware; its
//! kernels run at the same time as theirs, on as many SMs as `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` says. As with the real
//! one, a fault of one client ends all (but for an assertion), and no new client is let in until the last of them has gone.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use gpumux_rm::{
    RmStatus, emulated,
    layout::{
        Alloc64, Control, GroupAlloc, GroupScheduleParams, Share, TimesliceParams, class, cmd,
        engine, escape,
    },
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::retry_on_intr,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
        bind, connect, listen, recv, send, socket_with, sockopt,
    },
};
use serde::{Deserialize, Serialize};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use crate::{client::open_control_file, protocol};

/// Where the server's socket is.
const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// How many percent of the SMs a client uses.
const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
/// Engines of the groups, in the order in which [`Member::groups`] names them: compute, then copies.
const ENGINES: [u32; 4] = [engine::GR0, 11, 12, 13];
/// What an MPS server sets for its compute group, in µs.
const TIMESLICE: u64 = 2048;
/// How long a client waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of a server takes at most.
const ENDING: Duration = Duration::from_secs(1);
/// How often the server looks whether its folder is still there.
const LOOK: Duration = Duration::from_secs(1);
/// Clients that one server takes.
const ROOM: usize = 48;

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// A program with this RM client wants to share.
    Join { client: u32 },
    /// The groups of a device.
    Groups { device: u32 },
    /// A kernel of this program faulted.
    Fault { error: i32 },
    /// A line for the control program.
    Ask(String),
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Joined,
    Groups { client: u32, groups: [u32; 4] },
    Refused(String),
    Said(String),
}

/// A program's membership; it ends when this is dropped.
#[derive(Debug)]
pub struct Member {
    socket: OwnedFd,
    percent: Option<u32>,
}

impl Member {
    /// Joins the server that the environment names; `None` when there is none. `client` is the program's RM client.
    ///
    /// # Errors
    /// When there is one that does not take the program.
    pub fn join(client: u32) -> io::Result<Option<Self>> {
        let Some(pipes) = env::var_os(PIPES).filter(|it| !it.is_empty()) else {
            return Ok(None);
        };
        let Ok(socket) = dial(Path::new(&pipes)) else {
            return Ok(None);
        };
        match exchange(&socket, &Request::Join { client })? {
            Answer::Joined => {}
            Answer::Refused(why) => {
                return Err(io::Error::new(io::ErrorKind::ConnectionRefused, why));
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        Ok(Some(Self {
            socket,
            percent: percentage(),
        }))
    }

    /// The server's client and its groups on a device: compute and three for copies.
    ///
    /// # Errors
    /// When the server is gone or has no such device.
    pub fn groups(&self, device: u32) -> io::Result<(u32, [u32; 4])> {
        match exchange(&self.socket, &Request::Groups { device })? {
            Answer::Groups { client, groups } => Ok((client, groups)),
            Answer::Refused(why) => Err(io::Error::other(why)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Tells the server of a fault, as the hardware would.
    pub fn faulted(&self, error: i32) {
        let _ = exchange(&self.socket, &Request::Fault { error });
    }

    /// Whether the server has ended. One that is ending closes its groups and this connection in any order, so a moment is waited for it.
    pub fn is_lost(&self) -> bool {
        let mut ready = [PollFd::new(&self.socket, PollFlags::empty())];
        let moment = Timespec::try_from(ENDING).ok();
        let polled = retry_on_intr(|| poll(&mut ready, moment.as_ref()));
        polled.is_ok_and(|count| count > 0)
    }

    /// How many of a device's SMs the program uses; 0: all.
    pub fn sms(&self, all: u32) -> u32 {
        self.percent.map_or(0, |percent| part(all, percent))
    }
}

fn percentage() -> Option<u32> {
    let percent: f64 = env::var(PERCENTAGE).ok()?.trim().parse().ok()?;
    Some(percent.clamp(1.0, 100.0) as u32).filter(|percent| *percent < 100)
}

fn part(all: u32, percent: u32) -> u32 {
    (all * percent).div_ceil(100).max(1)
}

/// How many of a device's SMs this process is shown: under a server its part, as NVIDIA's MPS documentation says of
/// `cudaDevAttrMultiProcessorCount`.
pub fn visible_sms(all: u32) -> u32 {
    static PERCENT: OnceLock<Option<u32>> = OnceLock::new();
    let percent = PERCENT.get_or_init(|| {
        let pipes = env::var_os(PIPES).filter(|it| !it.is_empty())?;
        dial(Path::new(&pipes)).ok()?;
        percentage()
    });
    percent.map_or(all, |percent| part(all, percent))
}

/// The answer to a line for the control program, such as `get_server_list`.
///
/// # Errors
/// When no server answers where the environment says.
pub fn ask(line: &str) -> io::Result<String> {
    let socket = dial(&folder(PIPES)?)?;
    match exchange(&socket, &Request::Ask(line.trim().to_owned()))? {
        Answer::Said(text) => Ok(text),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn dial(pipes: &Path) -> io::Result<OwnedFd> {
    let socket = open_control_file(&pipes.join("control"))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(TIMEOUT))?;
    Ok(socket)
}

fn exchange(socket: &OwnedFd, request: &Request) -> io::Result<Answer> {
    let bytes = protocol::encode(request).ok_or(io::ErrorKind::InvalidInput)?;
    send(socket, &bytes, SendFlags::NOSIGNAL)?;
    receive(socket)?.ok_or_else(|| io::ErrorKind::ConnectionReset.into())
}

fn receive<T: serde::de::DeserializeOwned>(socket: &OwnedFd) -> io::Result<Option<T>> {
    let mut buffer = vec![0; protocol::MAX_PACKET];
    let (_, length) = recv(socket, &mut buffer[..], RecvFlags::empty())?;
    if length == 0 {
        return Ok(None);
    }
    let message = protocol::decode(buffer.get(..length).unwrap_or_default());
    message
        .map(Some)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn folder(variable: &str) -> io::Result<PathBuf> {
    let found = env::var_os(variable).filter(|it| !it.is_empty());
    found
        .map(PathBuf::from)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{variable} is not set")))
}

/// What all connections share.
struct Server {
    emulated: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Pids of its clients.
    clients: Vec<u32>,
    /// A client faulted: no new one until all have gone.
    faulted: bool,
    driver: Option<Driver>,
}

/// Serves until told to quit, on the emulated device whose server listens on `emulated`.
///
/// # Errors
/// When it cannot listen where the environment says.
pub fn serve(emulated: &Path) -> io::Result<()> {
    let server = Arc::new(Server {
        emulated: emulated.to_owned(),
        state: Mutex::default(),
    });
    let path = folder(PIPES)?.join("control");
    let listener = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let address = SocketAddrUnix::new(&path)?;
    if connect(&listener, &address).is_ok() {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    let listener = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let _ = fs::remove_file(&path);
    bind(&listener, &address)?;
    listen(&listener, 128)?;
    log("Control", "Start");
    // Without its folder no client can find it, or request its end.
    thread::spawn(move || {
        while path.exists() {
            thread::sleep(LOOK);
        }
        process::exit(0)
    });
    loop {
        let socket = accept_with(&listener, SocketFlags::CLOEXEC)?;
        let server = Arc::clone(&server);
        thread::spawn(move || server.converse(&socket));
    }
}

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn converse(&self, socket: &OwnedFd) {
        let (pid, uid) = sockopt::socket_peercred(socket).map_or((0, 0), |peer| {
            (peer.pid.as_raw_nonzero().get() as u32, peer.uid.as_raw())
        });
        let mut joined = None;
        while let Ok(Some(request)) = receive::<Request>(socket) {
            let answer = match request {
                Request::Join { client } => {
                    let known = "Server already exists";
                    log(
                        "Control",
                        &format!("NEW CLIENT {pid} from user {uid}: {known}"),
                    );
                    let answer = self.join(pid);
                    joined = matches!(answer, Answer::Joined).then_some(client);
                    answer
                }
                Request::Groups { device } => match joined {
                    Some(client) => {
                        let active =
                            format!("Status of client {{PID: {pid}, Context ID: 1}} is ACTIVE");
                        log("Server", &active);
                        self.share(device, client)
                            .unwrap_or_else(|error| Answer::Refused(error.to_string()))
                    }
                    None => break,
                },
                Request::Fault { error } => {
                    self.state().faulted = true;
                    let what = format!("Client {pid} caused a fatal fault: error {error}");
                    log("Server", &what);
                    Answer::Said(String::new())
                }
                Request::Ask(line) => Answer::Said(self.say(&line)),
            };
            let Some(bytes) = protocol::encode(&answer) else {
                break;
            };
            if send(socket, &bytes, SendFlags::NOSIGNAL).is_err() {
                break;
            }
        }
        if joined.is_some() {
            self.leave(pid);
        }
    }

    fn join(&self, pid: u32) -> Answer {
        let mut state = self.state();
        if state.faulted {
            return Answer::Refused(
                "a client faulted: the MPS server waits until all have gone".into(),
            );
        }
        if state.clients.len() >= ROOM {
            return Answer::Refused("the MPS server has no place for more clients".into());
        }
        state.clients.push(pid);
        drop(state);
        log("Server", &format!("Client {pid} connected"));
        Answer::Joined
    }

    fn leave(&self, pid: u32) {
        let mut state = self.state();
        if let Some(at) = state.clients.iter().position(|it| *it == pid) {
            state.clients.swap_remove(at);
        }
        if state.clients.is_empty() && std::mem::take(&mut state.faulted) {
            state.driver = None;
        }
        drop(state);
        log("Server", &format!("Client process {pid} disconnected"));
    }

    fn share(&self, device: u32, with: u32) -> io::Result<Answer> {
        let mut state = self.state();
        let driver = match &mut state.driver {
            Some(driver) => driver,
            none => none.insert(Driver::open(&self.emulated)?),
        };
        let groups = driver.groups(device)?;
        for group in groups {
            driver.share(group, with)?;
        }
        Ok(Answer::Groups {
            client: driver.client,
            groups,
        })
    }

    fn say(&self, line: &str) -> String {
        match line {
            // The server is in the same process.
            "get_server_list" => format!("{}\n", process::id()),
            line if line.starts_with("get_client_list") => self
                .state()
                .clients
                .iter()
                .map(|pid| format!("{pid}\n"))
                .collect(),
            line if line.starts_with("quit") => {
                log("Control", "Exiting");
                process::exit(0)
            }
            other => format!("Unknown command: {other}\n"),
        }
    }
}

/// Says what happens, in lines like the real one's.
fn log(of: &str, text: &str) {
    let time = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let line = format!(
        "[{:.3} {of} {:5}] {text}\n",
        time.as_secs_f64(),
        process::id()
    );
    // At once, before any client acts on what is to come.
    let mut out = io::stdout().lock();
    let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
}

/// The server's own control file, and the groups that it made.
struct Driver {
    file: OwnedFd,
    client: u32,
    /// Groups of each device.
    devices: BTreeMap<u32, [u32; 4]>,
}

impl Driver {
    fn open(emulated: &Path) -> io::Result<Self> {
        let file = open_control_file(emulated)?;
        let client = alloc(&file, 0, 0, class::ROOT_CLIENT, &mut [])?;
        Ok(Self {
            file,
            client,
            devices: BTreeMap::new(),
        })
    }

    fn groups(&mut self, index: u32) -> io::Result<[u32; 4]> {
        if let Some(known) = self.devices.get(&index) {
            return Ok(*known);
        }
        let (file, client) = (&self.file, self.client);
        let device = alloc(
            file,
            client,
            client,
            class::DEVICE,
            &mut index.to_ne_bytes(),
        )?;
        let mut made = [0; 4];
        for (group, engine) in made.iter_mut().zip(ENGINES) {
            let mut params = GroupAlloc {
                engine,
                ..Default::default()
            };
            *group = alloc(
                file,
                client,
                device,
                class::CHANNEL_GROUP,
                params.as_mut_bytes(),
            )?;
            let mut schedule = GroupScheduleParams {
                enable: 1,
                ..Default::default()
            };
            control(
                file,
                client,
                *group,
                cmd::GROUP_SCHEDULE,
                schedule.as_mut_bytes(),
            )?;
        }
        let mut slice = TimesliceParams {
            timeslice_us: TIMESLICE,
        };
        control(
            file,
            client,
            made[0],
            cmd::SET_TIMESLICE,
            slice.as_mut_bytes(),
        )?;
        self.devices.insert(index, made);
        Ok(made)
    }

    /// Lets a client duplicate a group.
    fn share(&self, group: u32, with: u32) -> io::Result<()> {
        let mut arg = Share {
            client: self.client,
            object: group,
            target: with,
            access: 1,
            kind: 3,
            status: 0,
        };
        call(&self.file, escape::SHARE, &mut arg, &mut [])?;
        check(arg.status)
    }
}

fn alloc(file: &OwnedFd, root: u32, parent: u32, class: u32, params: &mut [u8]) -> io::Result<u32> {
    let mut arg = Alloc64 {
        root,
        parent,
        class,
        params_size: params.len() as u32,
        ..Default::default()
    };
    call(file, escape::ALLOC, &mut arg, params)?;
    check(arg.status)?;
    Ok(arg.object)
}

fn control(
    file: &OwnedFd,
    client: u32,
    object: u32,
    cmd: u32,
    params: &mut [u8],
) -> io::Result<()> {
    let mut arg = Control {
        client,
        object,
        cmd,
        params_size: params.len() as u32,
        ..Default::default()
    };
    call(file, escape::CONTROL, &mut arg, params)?;
    check(arg.status)
}

fn call<T: IntoBytes + FromZeros + Immutable + zerocopy::FromBytes>(
    file: &OwnedFd,
    number: u8,
    arg: &mut T,
    params: &mut [u8],
) -> io::Result<()> {
    emulated::call(file.as_fd(), number, arg.as_mut_bytes(), params)
}

fn check(status: u32) -> io::Result<()> {
    match RmStatus(status) {
        RmStatus::OK => Ok(()),
        status => Err(io::Error::other(status.to_string())),
    }
}
