//! The server through its socket, as programs use it.

use std::{
    io::Write,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use gpumux_rm::{
    ControlFile, RmStatus,
    controls::{Controls, Group, RmControls},
    emulated::{self, EmulatedFile, call},
    layout::{Alloc64, DupObject, GroupAlloc, Share, TimesliceParams, class, cmd, escape},
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use zerocopy::IntoBytes;

use super::{
    Server, ServerError, ServerHandle,
    core::{MAX_UNREAD, Role},
    signal,
};
use crate::{
    Profile,
    client::{self, ClientError, Execution, ProcessConnection, open_control_file},
    protocol::{self, Command, Queue, Refusal, Report, Request, Submission, Work},
};

struct Running {
    _server: ServerHandle,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

fn start(profile: Profile) -> Running {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("emu.sock");
    let server = Server::bind(profile, &path).unwrap();
    Running {
        _server: server.spawn().unwrap(),
        path,
        _dir: dir,
    }
}

/// A server that a test takes from step to step.
struct Stepped {
    server: Server,
    buffer: Vec<u8>,
    _dir: tempfile::TempDir,
}

impl Stepped {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::bind(Profile::default(), &dir.path().join("emu.sock")).unwrap();
        Self {
            server,
            buffer: vec![0; protocol::MAX_PACKET],
            _dir: dir,
        }
    }

    fn step(&mut self) -> bool {
        self.server.core.step(&mut self.buffer).unwrap()
    }

    /// Calls `client` on another thread and `meanwhile` here, then serves until the client is done.
    fn serve<T: Send, U>(
        &mut self,
        client: impl FnOnce() -> T + Send,
        meanwhile: impl FnOnce(&mut Self) -> U,
    ) -> (T, U) {
        let stop = std::sync::Arc::clone(&self.server.stop);
        thread::scope(|scope| {
            let client = scope.spawn(|| {
                let done = client();
                signal(&stop);
                done
            });
            let found = meanwhile(self);
            while self.step() {}
            rustix::io::read(&*stop, &mut [0; 8]).unwrap();
            (client.join().unwrap(), found)
        })
    }
}

/// A context as libcuda makes one: a file, a client, a compute group with two channels, two copy groups.
struct Program {
    file: OwnedFd,
    group: Group,
    /// Compute, and copies up and down.
    groups: [u32; 3],
    execution: Execution,
    next: u64,
}

fn alloc(file: &OwnedFd, root: u32, parent: u32, class: u32, params: &mut [u8]) -> u32 {
    let mut arg = Alloc64 {
        root,
        parent,
        class,
        ..Default::default()
    };
    call(file.as_fd(), escape::ALLOC, arg.as_mut_bytes(), params).unwrap();
    assert_eq!(RmStatus(arg.status), RmStatus::OK);
    arg.object
}

impl Program {
    fn start(path: &Path) -> Self {
        let file = open_control_file(path).unwrap();
        let client = alloc(&file, 0, 0, class::ROOT_CLIENT, &mut []);
        let device = alloc(&file, client, client, class::DEVICE, &mut [0; 4]);
        let subdevice = alloc(&file, client, device, class::SUBDEVICE, &mut [0; 4]);
        let groups = [1, 11, 12].map(|engine| {
            let mut params = GroupAlloc {
                engine,
                ..Default::default()
            };
            let class = class::CHANNEL_GROUP;
            alloc(&file, client, device, class, params.as_mut_bytes())
        });
        Self::with(file, client, subdevice, groups)
    }

    fn with(file: OwnedFd, client: u32, subdevice: u32, groups: [u32; 3]) -> Self {
        let [compute, up, down] = groups;
        let channels = (0..2)
            .map(|_| alloc(&file, client, compute, 0xc86f, &mut []))
            .collect();
        let execution = Execution::open(file.as_fd(), client, compute, up, down).unwrap();
        Self {
            file,
            group: Group {
                client,
                subdevice,
                group: compute,
                channels,
            },
            groups,
            execution,
            next: 0,
        }
    }

    /// Another program in this one's groups, as a client of an MPS server.
    fn neighbour(&self, running: &Running) -> Self {
        let file = open_control_file(&running.path).unwrap();
        let client = alloc(&file, 0, 0, class::ROOT_CLIENT, &mut []);
        let device = alloc(&file, client, client, class::DEVICE, &mut [0; 4]);
        let subdevice = alloc(&file, client, device, class::SUBDEVICE, &mut [0; 4]);
        let groups = self.groups.map(|group| {
            let mut share = Share {
                client: self.group.client,
                object: group,
                target: client,
                access: 1,
                kind: 3,
                status: 0,
            };
            call(
                self.file.as_fd(),
                escape::SHARE,
                share.as_mut_bytes(),
                &mut [],
            )
            .unwrap();
            let mut dup = DupObject {
                client,
                parent: device,
                object: 0x5000 + group,
                client_src: self.group.client,
                object_src: group,
                ..Default::default()
            };
            call(
                file.as_fd(),
                escape::DUP_OBJECT,
                dup.as_mut_bytes(),
                &mut [],
            )
            .unwrap();
            assert_eq!([share.status, dup.status], [0; 2]);
            dup.object
        });
        Self::with(file, client, subdevice, groups)
    }

    fn controls(&self) -> RmControls<EmulatedFile> {
        let file = EmulatedFile::new(self.file.try_clone().unwrap()).unwrap();
        RmControls::new(file, self.group.clone())
    }

    /// Submits to stream 1; the numbers of the work.
    fn submit(&mut self, works: &[Work]) -> Vec<u64> {
        let items: Vec<Submission> = works
            .iter()
            .map(|work| {
                self.next += 1;
                Submission {
                    stream: 1,
                    id: self.next,
                    queue: Queue::Compute,
                    work: *work,
                    prompt: *work == Work::Record,
                }
            })
            .collect();
        let ids = items.iter().map(|item| item.id).collect();
        let at = client::now();
        self.execution.send(&Command::Submit { at, items }).unwrap();
        ids
    }

    fn report(&self) -> Report {
        self.execution.receive().unwrap().expect("a report")
    }
}

const MILLI: u64 = 1_000_000;

fn kernel(duration: u64) -> Work {
    Work::Kernel { sms: 132, duration }
}

#[test]
fn work_is_reported_with_the_models_times() {
    let running = start(Profile::default());
    let mut program = Program::start(&running.path);
    let mut works = vec![kernel(10_000); 10];
    works.insert(0, Work::Record);
    works.push(Work::Record);
    let ids = program.submit(&works);
    let mut done = Vec::new();
    while done.len() < ids.len() {
        let Report::Done(more) = program.report() else {
            panic!("unexpected report");
        };
        done.extend(more);
    }
    assert_eq!(done.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids);
    // 10 x (10 + 3.1) µs, however late this machine is.
    assert_eq!(done[11].1 - done[0].1, 131_000);
}

#[test]
fn a_freeze_waits_for_the_effects_of_interrupted_kernels() {
    let running = start(Profile::default());
    let mut program = Program::start(&running.path);
    let ids = program.submit(&[kernel(1000 * MILLI), Work::Record]);
    let controls = program.controls();
    let (told, answers) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            // The kernel runs when the freeze arrives: nothing was submitted before it.
            controls.freeze().unwrap();
            told.send(()).unwrap();
            controls.thaw().unwrap();
        });
        let Report::Progress { token, works } = program.report() else {
            panic!("no progress report");
        };
        assert!(answers.try_recv().is_err(), "answered too early");
        let [(id, part, total)] = works[..] else {
            panic!("one kernel runs");
        };
        assert_eq!(id, ids[0]);
        assert!(0 < part && part < total);
        program
            .execution
            .send(&Command::Progressed { token })
            .unwrap();
        answers.recv().unwrap();
        assert!(matches!(program.report(), Report::Thawed));
        let Report::Done(done) = program.report() else {
            panic!("the kernel does not complete after the thaw");
        };
        assert_eq!(done.len(), 2);
    });
}

#[test]
fn a_freeze_does_not_wait_for_a_program_that_does_not_read() {
    let mut stepped = Stepped::new();
    let path = stepped.server.path().to_owned();
    let (mut program, ()) = stepped.serve(|| Program::start(&path), |_| ());
    program.submit(&[kernel(u64::MAX)]);
    let id = loop {
        let connections = &stepped.server.core.connections;
        let is_busy = |role: &Role| matches!(role, Role::Execution(it) if !it.works.is_empty());
        match connections.iter().find(|(_, it)| is_busy(&it.role)) {
            Some((id, _)) => break *id,
            None => assert!(stepped.step()),
        }
    };
    while stepped.server.core.connections[&id].unsent.len() < MAX_UNREAD {
        stepped.server.core.send(id, &Report::Thawed, None);
    }
    let controls = program.controls();
    // The request for progress is one packet too many.
    let (done, waits) = stepped.serve(
        || controls.freeze(),
        |stepped| {
            while stepped.server.core.connections.contains_key(&id) {
                stepped.step();
            }
            !stepped.server.core.freezes.is_empty()
        },
    );
    done.unwrap();
    assert!(!waits, "for a connection that is closed");
}

#[test]
fn slices_reach_the_driver_through_a_passed_file_only() {
    let running = start(Profile::default());
    let program = Program::start(&running.path);
    let controls = program.controls();
    assert_eq!(controls.timeslice().unwrap(), 1024);
    controls.set_timeslice(1).unwrap();
    assert_eq!(controls.timeslice().unwrap(), 1);
    let text = crate::protocol::uuid_text(&Profile::default().uuid(0));
    assert_eq!(controls.device_uuid().unwrap(), text);

    let own = EmulatedFile::new(open_control_file(&running.path).unwrap()).unwrap();
    let error = RmControls::new(own, program.group.clone())
        .set_timeslice(5)
        .unwrap_err();
    assert_eq!(error.status(), Some(RmStatus::INVALID_CLIENT));
    assert_eq!(controls.timeslice().unwrap(), 1);
}

#[test]
fn the_last_close_of_the_file_ends_the_context() {
    let running = start(Profile::default());
    let program = Program::start(&running.path);
    let copy = program.file.try_clone().unwrap();
    drop(program.file);
    let file = EmulatedFile::new(copy).unwrap();
    let mut params = TimesliceParams::default();
    let (client, group) = (program.group.client, program.group.group);
    file.control(client, group, cmd::GET_TIMESLICE, params.as_mut_bytes())
        .unwrap();
    drop(file);
    assert_eq!(program.execution.receive().unwrap(), None);
}

#[test]
fn memory_is_counted_shared_and_given_back() {
    let running = start(Profile {
        memory: 1 << 30,
        ..Profile::default()
    });
    let one = ProcessConnection::open(&running.path).unwrap();
    let used = |connection: &ProcessConnection| connection.status(0).unwrap().used;
    let (id, file) = one.create_memory(0, 600 << 20).unwrap();
    assert!(matches!(
        one.create_memory(0, 600 << 20),
        Err(ClientError::Refused(Refusal::OutOfMemory))
    ));
    let imported = one.import_memory(file.as_fd()).unwrap();
    assert_eq!(imported, (id, 0, 600 << 20));
    one.free_memory(id).unwrap();
    assert_eq!(used(&one), 600 << 20, "the importer still has it");
    one.free_memory(id).unwrap();
    assert_eq!(used(&one), 0);
    assert!(one.free_memory(id).is_err());
    assert!(one.import_memory(file.as_fd()).is_err(), "it is gone");
    let other = tempfile::tempfile().unwrap();
    assert!(one.import_memory(other.as_fd()).is_err());

    // With the process's last connection goes its memory. (The next one may come before the server has
    // seen the end of the last: then that one's end is it.)
    one.create_memory(0, 1 << 20).unwrap();
    drop(one);
    while used(&ProcessConnection::open(&running.path).unwrap()) > 0 {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn memory_of_an_ended_process_stays_taken_for_a_while() {
    let running = start(Profile {
        memory: 1 << 30,
        release_ms: 60_000,
        ..Profile::default()
    });
    let one = ProcessConnection::open(&running.path).unwrap();
    let (_, file) = one.create_memory(0, 600 << 20).unwrap();
    drop(one);
    // Once the server has noticed the end, nothing is to be imported any more.
    let open = || ProcessConnection::open(&running.path).unwrap();
    while open().import_memory(file.as_fd()).is_ok() {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(open().status(0).unwrap().used, 600 << 20);
}

#[test]
fn a_context_takes_memory_and_needs_it() {
    let running = start(Profile {
        memory: 1 << 30,
        ..Profile::default()
    });
    let program = Program::start(&running.path);
    let watcher = ProcessConnection::open(&running.path).unwrap();
    let status = watcher.status(0).unwrap();
    assert_eq!(status.used, 520 << 20);
    assert_eq!(status.processes, [(std::process::id(), 520 << 20)]);
    let second = Execution::open(
        program.file.as_fd(),
        program.group.client,
        program.group.group,
        program.group.group,
        program.group.group,
    );
    assert!(matches!(
        second,
        Err(ClientError::Rm(RmStatus::INVALID_ARGUMENT))
    ));
    drop(program);
    while watcher.status(0).unwrap().used > 0 {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_abort_drops_everything_and_the_context_goes_on() {
    let running = start(Profile::default());
    let mut program = Program::start(&running.path);
    program.submit(&[kernel(u64::MAX), Work::Record]);
    program
        .execution
        .send(&Command::Abort { all: true })
        .unwrap();
    let ids = program.submit(&[kernel(1), Work::Record]);
    let Report::Done(done) = program.report() else {
        panic!("no completion");
    };
    assert_eq!(done.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids);
}

#[test]
fn rule_breakers_lose_only_their_own_connection() {
    let running = start(Profile::default());
    let mut program = Program::start(&running.path);
    let honest = ProcessConnection::open(&running.path).unwrap();
    for garbage in [
        vec![0],
        vec![0xff; 100],
        emulated::MAGIC.to_ne_bytes().to_vec(),
        [emulated::MAGIC.to_ne_bytes().as_slice(), &[0xff; 60]].concat(),
        vec![7; protocol::MAX_PACKET + 1],
        protocol::encode(&Request::Devices).unwrap(),
    ] {
        let socket = open_control_file(&running.path).unwrap();
        let _ = rustix::io::write(&socket, &garbage);
        // The server hangs up.
        let mut byte = [0];
        let _ = rustix::io::read(&socket, &mut byte);
    }
    let idle: Vec<_> = (0..500)
        .map_while(|_| open_control_file(&running.path).ok())
        .collect();
    // A client that submits and never reads.
    let mut deaf = Program::start(&running.path);
    for _ in 0..2 * MAX_UNREAD {
        let items = vec![Work::Record; 1];
        deaf.next += 1;
        let id = deaf.next;
        let items = items
            .into_iter()
            .map(|work| Submission {
                stream: 1,
                id,
                queue: Queue::Compute,
                work,
                prompt: true,
            })
            .collect();
        let at = client::now();
        if deaf.execution.send(&Command::Submit { at, items }).is_err() {
            break;
        }
    }
    assert_eq!(honest.devices().unwrap().len(), 1);
    program.submit(&[kernel(1000), Work::Record]);
    assert!(matches!(program.report(), Report::Done(_)));
    drop(idle);
}

#[test]
fn a_second_server_is_refused_and_a_dead_ones_socket_is_taken_over() {
    let running = start(Profile::default());
    assert!(matches!(
        Server::bind(Profile::default(), &running.path),
        Err(ServerError::InUse(_))
    ));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("left-over");
    let address = SocketAddrUnix::new(&path).unwrap();
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    bind(&socket, &address).unwrap();
    drop(socket);
    assert!(path.exists());
    let server = Server::bind(Profile::default(), &path).unwrap();
    let handle = server.spawn().unwrap();
    let connection = ProcessConnection::open(&path).unwrap();
    handle.stop().unwrap();
    assert!(!path.exists());
    assert!(matches!(connection.devices(), Err(ClientError::Lost(_))));
    // A plain file is not removed.
    let path = dir.path().join("file");
    std::fs::File::create(&path)
        .unwrap()
        .write_all(b"x")
        .unwrap();
    assert!(Server::bind(Profile::default(), &path).is_err());
}

#[test]
fn long_kernel_left_behind_in_a_group_ends_its_neighbours() {
    let running = start(Profile::default());
    // How long the kernel is that is left behind, whether the context is destroyed in order, whether a process holds
    // the control file until the kernel has ended, and whether the neighbours are lost.
    for (length, ends, held, lost) in [
        (u64::MAX, false, false, true),
        (1000 * MILLI, false, false, true),
        (MILLI, false, false, false),
        (u64::MAX, true, false, false),
        (300 * MILLI, false, true, false),
    ] {
        let mut here = Program::start(&running.path);
        let mut gone = here.neighbour(&running);
        gone.submit(&[kernel(length), Work::Record]);
        if ends {
            gone.execution.send(&Command::End).unwrap();
        }
        let hold = held.then(|| gone.file.try_clone().unwrap());
        drop(gone);
        if let Some(file) = hold {
            // The first has all SMs: the second of two ends after the one that was left behind.
            for _ in 0..2 {
                here.submit(&[kernel(length), Work::Record]);
                assert!(matches!(here.report(), Report::Done(_)));
            }
            drop(file);
        }
        let ids = here.submit(&[kernel(1), Work::Record]);
        let report = here.report();
        match lost {
            true => assert_eq!(report, Report::Lost, "{length}"),
            false => assert!(
                matches!(&report, Report::Done(done) if done.last().unwrap().0 == ids[1]),
                "{length}: {report:?}"
            ),
        }
    }
    // Held, but without end: lost when the file goes.
    let here = Program::start(&running.path);
    let mut gone = here.neighbour(&running);
    gone.submit(&[kernel(u64::MAX)]);
    let Program {
        file, execution, ..
    } = gone;
    drop(execution);
    drop(file);
    assert_eq!(here.report(), Report::Lost);
}
