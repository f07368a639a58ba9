//! The server through its socket, as programs use it.

mod controls;
mod memory;
mod peers;

use std::{
    io::Write,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use gpumux_rm::{
    Cause, ControlFile, RmStatus,
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
                    priority: 0,
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
fn long_kernel_left_behind_in_a_group_ends_its_neighbours() {
    let running = start(Profile::default());
    // How long the kernel is that is left behind, whether the context is destroyed in order, whether a process holds
    // the control file until the kernel has ended, and whether the neighbours are lost.
    for (length, ends, held, lost) in [
        (u64::MAX, false, false, true),
        (1_000_000 * MILLI, false, false, true),
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
