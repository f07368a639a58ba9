//! The loop: waits for packets and for the next event, and brings everything to the present.

use std::io;

use gpumux_rm::emulated;
use rustix::{
    event::epoll,
    io::Errno,
    net::{SocketFlags, UCred, accept_with, sockopt},
    time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime},
};

use super::{
    core::{Action, Core, LISTENER, Role, STOP, TIMER},
    wire::{Incoming, Packet, now, receive},
};
use crate::protocol::{self, Answer, HELLO, Refusal, Request};

/// Packets read from one connection before the others have their turn.
const BURST: usize = 64;
/// How long no connection is accepted when files have run out.
const ACCEPT_PAUSE: u64 = 100_000_000;

impl Core {
    pub(super) fn run(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; protocol::MAX_PACKET];
        while self.step(&mut buffer)? {}
        Ok(())
    }

    /// Waits for what comes next and does it. False: the server is to stop.
    pub(super) fn step(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        self.arm()?;
        let mut ready = Vec::with_capacity(256);
        match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut ready), None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &ready {
            match event.data.u64() {
                LISTENER => self.accept(),
                TIMER => {
                    let _ = rustix::io::read(&self.timer, &mut [0; 8]);
                    self.armed = None;
                }
                STOP => return Ok(false),
                id => self.serve(id, event.flags, buffer),
            }
        }
        self.catch_up(now());
        Ok(true)
    }

    /// Sets the timer to when something may happen next.
    fn arm(&mut self) -> io::Result<()> {
        let timer = self.timers.keys().next().map(|(due, _)| *due);
        let next = [timer, self.devices.next_event()]
            .into_iter()
            .flatten()
            .min();
        if next == self.armed {
            return Ok(());
        }
        self.armed = next;
        // 0 would disarm it.
        let at = next.map_or(0, |at| at.clamp(1, i64::MAX as u64));
        let value = Timespec {
            tv_sec: (at / 1_000_000_000) as i64,
            tv_nsec: (at % 1_000_000_000) as i64,
        };
        let spec = Itimerspec {
            it_interval: Timespec::default(),
            it_value: value,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &spec)?;
        Ok(())
    }

    /// Brings everything to the present, in the order in which it was due.
    fn catch_up(&mut self, now: u64) {
        while let Some(entry) = self
            .timers
            .first_entry()
            .filter(|entry| entry.key().0 <= now)
        {
            let ((due, _), action) = entry.remove_entry();
            match action {
                Action::Control(call) => self.finish_control(call, due),
                Action::FreezeTimeout(token) => self.finish_freeze(token),
                Action::Release(device, bytes) => self.devices.give(device, bytes),
                Action::Accept => {
                    let data = epoll::EventData::new_u64(LISTENER);
                    let _ = epoll::modify(&self.poll, &self.listener, data, epoll::EventFlags::IN);
                }
            }
            self.close_all();
        }
        for device in &mut self.devices.all {
            device.advance(now);
        }
        self.dispatch();
        self.close_all();
    }

    fn accept(&mut self) {
        for _ in 0..BURST {
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    let _ = sockopt::set_socket_passcred(&socket, true);
                    let Ok(peer) = sockopt::socket_peercred(&socket) else {
                        continue;
                    };
                    self.add_connection(socket, pid(&peer), Role::Unknown);
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept; pausing");
                    let data = epoll::EventData::new_u64(LISTENER);
                    let none = epoll::EventFlags::empty();
                    let _ = epoll::modify(&self.poll, &self.listener, data, none);
                    self.after(now() + ACCEPT_PAUSE, Action::Accept);
                    return;
                }
            }
        }
    }

    fn serve(&mut self, id: u64, flags: epoll::EventFlags, buffer: &mut [u8]) {
        if flags.contains(epoll::EventFlags::OUT) {
            self.send_rest(id);
        }
        for _ in 0..BURST {
            let Some(connection) = self.connections.get(&id) else {
                return;
            };
            match receive(&connection.socket, buffer) {
                Incoming::Nothing => return,
                Incoming::End => self.closing.push_back(id),
                Incoming::Packet(packet) => {
                    if self.packet(id, packet).is_none() {
                        tracing::debug!(connection = id, "closed for breaking the rules");
                        self.closing.push_back(id);
                    }
                }
            }
            self.close_all();
        }
    }

    /// Works off a packet; `None` when it breaks the rules.
    fn packet(&mut self, id: u64, packet: Packet<'_>) -> Option<()> {
        let connection = self.connections.get_mut(&id)?;
        match &mut connection.role {
            Role::Unknown if packet.bytes.get(..4) == Some(&emulated::MAGIC.to_ne_bytes()) => {
                connection.role = Role::Control(0);
                self.control(id, packet)
            }
            Role::Unknown => {
                match protocol::decode(packet.bytes)? {
                    Request::Hello {
                        magic: HELLO,
                        version,
                    } => {
                        connection.role = Role::Process;
                        let answer = if version == protocol::VERSION {
                            Answer::Ok
                        } else {
                            Answer::Refused(Refusal::Version)
                        };
                        self.send(id, &answer, None);
                    }
                    Request::ExportMemory {
                        magic: HELLO,
                        id: memory,
                    } => {
                        let pid = connection.pid;
                        let answer = match self.export(pid, memory, packet.files) {
                            Ok(identity) => {
                                self.connections.get_mut(&id)?.role = Role::Export(identity);
                                // It may outlive the process, whose memory does not go with it.
                                self.leave(pid);
                                Answer::Ok
                            }
                            Err(refusal) => Answer::Refused(refusal),
                        };
                        self.send(id, &answer, None);
                    }
                    _ => return None,
                }
                Some(())
            }
            Role::Control(_) => self.control(id, packet),
            Role::Process => {
                let request = protocol::decode(packet.bytes)?;
                let (answer, file) = match self.request(id, request, packet.files) {
                    Ok(answer) => answer,
                    Err(refusal) => (Answer::Refused(refusal), None),
                };
                self.send(id, &answer, file);
                Some(())
            }
            Role::Execution(_) => {
                let command = protocol::decode(packet.bytes)?;
                self.command(id, command)
            }
            Role::Export(_) => None,
        }
    }

    /// Closes what is to be closed, and what that leads to.
    fn close_all(&mut self) {
        while let Some(id) = self.closing.pop_front() {
            self.close(id);
        }
    }

    fn close(&mut self, id: u64) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        let now = now();
        for device in &mut self.devices.all {
            device.advance(now);
        }
        match connection.role {
            Role::Control(_) => {
                self.end_orphans(id);
                self.tree.close(&mut self.devices, id);
                self.follow_controls();
            }
            Role::Execution(execution) => self.leave_execution(id, connection.pid, execution),
            Role::Export(identity) => return self.end_export(identity),
            Role::Unknown | Role::Process => {}
        }
        let waited: Vec<u64> = self.freezes.keys().copied().collect();
        for token in waited {
            self.progressed(id, token);
        }
        self.leave(connection.pid);
    }
}

fn pid(peer: &UCred) -> u32 {
    peer.pid.as_raw_nonzero().get() as u32
}
