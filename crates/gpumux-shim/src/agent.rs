//! The library's first thread: talks to the daemon, and frees the process when there is none.
//!
//! It connects, introduces the process, and reports every change of the picture. When the session ends,
//! for whatever reason, or the daemon's lease expires, all groups of which the daemon was notified are freed (see
//! [`crate::rescue`]): the daemon may have died with the process frozen. Then it tries
//! again, patiently. The program never waits for any of this.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    thread::{self, sleep},
    time::{Duration, Instant},
};

use gpumux_rm::{capture::GroupId, capture::Seen, layout::engine};
use gpumux_wire::{
    Daemon, PROTOCOL, Shim,
    lease::Leased,
    message::{INTRODUCTION, MAX_CHANNELS, MAX_DOMAINS},
    permits::Permitted,
    socket,
};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::{RecvFlags, SendFlags, SocketFlags},
};

use crate::{
    ground::{
        context::{self, within},
        gate, guard, lease,
        notice::say,
        own::OwnFd,
        ranks,
        wait::wait,
    },
    memory::{allocate, elastic, ipc, keep, pools, reclaim, reports, space},
    mover::MoverThread,
    process::{Agent, Picture, Process},
    rescue::Rescue,
    unlisted, work,
    work::{copies, hints, hold, permits},
};

/// How long the daemon may take to answer a hello.
const ANSWER: Duration = Duration::from_millis(1900);

/// First and longest pause between attempts to reach the daemon.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Pause after a daemon has refused: only its operator can change that.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// How long a group must have been unchanged to be taken as it is, when the driver library has not said
/// that it is finished. (Real libcuda sets the slice about 65 ms after the last channel.)
const SETTLED: Duration = Duration::from_millis(500);

/// How soon a context is looked for that is being made.
const CONTEXT_TICK: Duration = Duration::from_millis(5);

/// Tries to free groups, and the pause between them.
const FREE_TRIES: (u32, Duration) = (3, Duration::from_millis(10));

/// The file through which the driver library maps memory on the devices.
const UVM: &str = "/dev/nvidia-uvm";

/// Enough for the driver library, which the thread asks about pools of memory.
const STACK: usize = 2 << 20;

/// Starts the thread. It gets no signal of the program's: all are blocked from its first instruction.
pub(crate) fn start(process: &'static Process, shared: &'static Agent) -> io::Result<()> {
    let agent = thread::Builder::new()
        .name("gpumux".to_owned())
        .stack_size(STACK);
    let thread = guard::without_signals(|| {
        agent.spawn(move || {
            guard::enter(|| {
                Session {
                    process,
                    shared,
                    rescue: Box::leak(Box::default()),
                    told: BTreeMap::new(),
                    unsettled: BTreeMap::new(),
                    known: Known::Nothing,
                    poller_started: false,
                    mover: Box::leak(Box::default()),
                    shared_memory: VecDeque::new(),
                    requested: false,
                    delayed: 0,
                    permits: Vec::new(),
                }
                .run();
            });
        })
    });
    thread.map(drop)
}

/// Why there is no session, or no longer.
enum End {
    /// No daemon answers at the socket, or it is gone, or stands still.
    Lost(io::Error),
    /// The daemon does not want this process, or cannot be understood.
    Refused(String),
    /// The daemon has said good-bye.
    Left,
}

impl From<Errno> for End {
    fn from(error: Errno) -> Self {
        Self::Lost(error.into())
    }
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => {
                Self::Refused(format!("it does not speak protocol {PROTOCOL}: {error}"))
            }
            _ => Self::Lost(error),
        }
    }
}

/// What was sent to the daemon about a group.
struct Told {
    key: u32,
    channels: Vec<u32>,
    touched: u32,
}

/// What is known of the daemon. The program's user is notified of its absence and of its loss, once each.
#[derive(PartialEq)]
enum Known {
    Nothing,
    Absent,
    Present,
    Lost,
}

struct Session {
    process: &'static Process,
    shared: &'static Agent,
    rescue: &'static Rescue,
    told: BTreeMap<GroupId, Told>,
    /// Groups under construction: their channels when last seen to change, and when that was.
    unsettled: BTreeMap<GroupId, (usize, Instant)>,
    known: Known,
    poller_started: bool,
    mover: &'static MoverThread,
    /// Orders about shared memory, which are carried out while all memory is on the device.
    shared_memory: VecDeque<Daemon>,
    /// The daemon was sent a request to bring the memory back for them.
    requested: bool,
    /// The last request that was reported to be delayed; a daemon counts them up.
    delayed: u64,
    /// Groups whose launches are to wait for permits, once it is known which device is whose.
    permits: Vec<u32>,
}

impl Session {
    fn run(mut self) {
        ranks::check_nccl();
        let mut pause = PAUSE.0;
        let mut is_home = true;
        loop {
            let path = self.process.config.socket();
            // The daemon that was there to make room for its memory is not.
            if !is_home {
                is_home = self.rescue(&path);
            }
            let end = match self.connect(&path) {
                Ok((session, memory)) => {
                    self.told.clear();
                    self.shared_memory.clear();
                    self.permits.clear();
                    self.process.decide();
                    if self.known != Known::Lost {
                        self.known = Known::Present;
                    }
                    pause = PAUSE.0;
                    // The daemon before may have had others; this one says where its own differ.
                    self.mover.set_rules(None, false);
                    self.begin(memory);
                    let end = self.serve(&session);
                    lease::set_up(false, Vec::new());
                    drop(session);
                    is_home = self.rescue(&path);
                    if let End::Lost(error) = &end {
                        self.fail(format_args!(
                            "lost the daemon at {}: {error}",
                            path.display()
                        ));
                    }
                    end
                }
                Err(end) => end,
            };
            let at = path.display();
            match end {
                End::Lost(error) => {
                    self.fail(format_args!("cannot reach the daemon at {at}: {error}"));
                    pause = match self.rescue.pause(pause) {
                        // It may be late, but not long.
                        true => PAUSE.0,
                        false => (pause * 2).min(PAUSE.1),
                    };
                }
                End::Refused(reason) => {
                    self.fail(format_args!(
                        "the daemon at {at} refuses this process: {reason}"
                    ));
                    sleep(REFUSED_PAUSE);
                }
                // If it comes back soon, no message is needed.
                End::Left => sleep(pause),
            }
        }
    }

    /// The session begins: with what the daemon receives about this process's memory, if it accounts memory.
    fn begin(&mut self, memory: bool) {
        self.delayed = 0;
        if !memory {
            return lease::set_up(false, Vec::new());
        }
        if work::take_remade() {
            space::look_anew();
        }
        introduce(self.keeps());
    }

    fn keeps(&self) -> Shim {
        let bytes = self.mover.keeps();
        Shim::Keeps { bytes }
    }

    /// There is no daemon, or no longer. If none answers the first hello, `GPUMUX_STRICT=1` ends the process.
    fn fail(&mut self, why: std::fmt::Arguments<'_>) {
        match self.known {
            Known::Nothing => {
                self.process.give_up(why);
                // The daemon that made its tenant was there lately.
                lease::expect(self.process.config.tenant.is_some());
                self.known = Known::Absent;
            }
            Known::Present => {
                say(format_args!("{why}; running unmanaged until it is back"));
                self.known = Known::Lost;
            }
            Known::Absent | Known::Lost => {}
        }
        self.process.decide();
        lease::set_up(false, Vec::new());
    }

    /// Introduces this process and waits for the daemon's answer, which begins its lease. Returns whether it keeps books of
    /// memory.
    fn connect(&self, path: &std::path::Path) -> Result<(OwnFd, bool), End> {
        // Does not wait: a daemon whose queue is full answers EAGAIN.
        let session = OwnFd::new(|| socket::connect(path, SocketFlags::NONBLOCK))?;
        let hello = Shim::Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tenant: self.process.config.tenant.clone(),
        };
        let page = Some(self.shared.page_file.as_fd());
        let sent = socket::send(&session, &hello, page, SendFlags::empty());
        // One that refuses before it reads has sent its reason, and then closed.
        let mut refused = match sent {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => true,
            sent => sent.map(|()| false)?,
        };
        let deadline = Instant::now() + ANSWER;
        loop {
            match socket::recv::<Daemon>(&session, RecvFlags::empty()) {
                Ok(Some((
                    Daemon::Welcome {
                        protocol: PROTOCOL,
                        memory,
                        ..
                    },
                    lease,
                ))) => {
                    // A daemon of revision 0 sends none.
                    let lease = lease.map(Leased::open).transpose()?;
                    lease::set_revision(lease.as_ref().map_or(0, Leased::revision));
                    (self.rescue).begin(self.process, self.shared, lease)?;
                    context::taken();
                    return Ok((session, memory));
                }
                Ok(Some((Daemon::Welcome { protocol, .. }, _))) => {
                    return Err(End::Refused(format!(
                        "it speaks protocol {protocol}, this library {PROTOCOL}"
                    )));
                }
                Ok(Some((Daemon::Refused { reason }, _))) => return Err(End::Refused(reason)),
                Ok(Some((Daemon::Bye, _))) => return Err(End::Left),
                // What comes before the welcome is ignored.
                Ok(Some(_)) => {}
                Ok(None) => {
                    return Err(End::Lost(io::ErrorKind::ConnectionReset.into()));
                }
                // The kernel reports that the hello was not read before what was sent.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && !refused => {
                    refused = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(End::Lost(io::ErrorKind::TimedOut.into()));
                    }
                    wait(&mut [PollFd::new(&session, PollFlags::IN)], Some(left))?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Keeps the daemon informed until the session ends.
    fn serve(&mut self, session: &OwnFd) -> End {
        loop {
            work::start_poller(&mut self.poller_started);
            let (full, settles) = match self.tell(session) {
                Ok(settles) => (false, settles),
                Err(End::Lost(error)) if error.kind() == io::ErrorKind::WouldBlock => (true, None),
                Err(end) => return end,
            };
            let settles = elastic::look(pools::look(settles));
            let events = if full {
                PollFlags::IN | PollFlags::OUT
            } else {
                PollFlags::IN
            };
            let mut ready = [
                PollFd::new(session, events),
                PollFd::new(self.shared, PollFlags::IN),
            ];
            if let Err(error) = wait(&mut ready, settles) {
                return error.into();
            }
            let _ = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
            if self.rescue.has_expired() {
                let why = "it stands still: it has not renewed its lease";
                return End::Lost(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            loop {
                match socket::recv::<Daemon>(session, RecvFlags::empty()) {
                    Ok(Some((Daemon::Welcome { .. }, _))) => {}
                    Ok(Some((Daemon::Bye, _))) => return End::Left,
                    Ok(Some((Daemon::Refused { reason }, _))) => return End::Refused(reason),
                    Ok(Some((Daemon::Hints { .. } | Daemon::Hint { .. }, _)))
                        if !self.process.config.hints => {}
                    Ok(Some((
                        Daemon::Hints {
                            contended,
                            automatic,
                        },
                        _,
                    ))) => hold::set_policy(contended, automatic),
                    Ok(Some((Daemon::Hint { expected_us }, _))) => hints::from_outside(expected_us),
                    Ok(Some((Daemon::Granted { ticket, bytes }, _))) => {
                        // One that came too late is given back.
                        if !lease::answered(ticket, (bytes, 0)) && bytes > 0 {
                            space::tell_with(|space| {
                                space::receipt(ticket).into_iter().chain(space.holds())
                            });
                        }
                    }
                    Ok(Some((
                        Daemon::Seen {
                            ticket,
                            free,
                            total,
                        },
                        _,
                    ))) => {
                        let _ = lease::answered(ticket, (free, total));
                    }
                    Ok(Some((Daemon::Piece { ticket, piece }, file))) => {
                        let file = file.and_then(|file| OwnFd::new(|| Ok(file)).ok());
                        ipc::arrived(ticket, piece.zip(file));
                    }
                    Ok(Some((Daemon::Late { ticket }, _))) => ipc::late(ticket),
                    Ok(Some((Daemon::Exported { ticket }, _))) => {
                        let _ = lease::answered(ticket, (0, 0));
                    }
                    Ok(Some((Daemon::Orphaned { token }, _))) => ipc::orphaned(token),
                    Ok(Some((order @ (Daemon::Serve { .. } | Daemon::Unshared { .. }), _))) => {
                        self.shared_memory.push_back(order)
                    }
                    Ok(Some((Daemon::Permits { key }, file))) => self.wait_to_launch(key, file),
                    Ok(Some((Daemon::CopyRates { key, rates }, _))) => copies::limit(key, rates),
                    Ok(Some((Daemon::Trim, _))) => allocate::trim(),
                    Ok(Some((Daemon::GiveBack { op }, _))) => {
                        allocate::trim();
                        space::report();
                        lease::tell(Shim::Moved { op });
                    }
                    Ok(Some((Daemon::HostMemory { location, scrub }, _))) => {
                        self.mover.set_rules(location, scrub);
                    }
                    Ok(Some((Daemon::Reclaim { op, device, bytes }, _))) => {
                        reclaim::begin(op, &device, bytes);
                    }
                    Ok(Some((order, _))) => self.mover.obey(self.rescue, order),
                    Ok(None) => return End::Lost(io::ErrorKind::ConnectionReset.into()),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return error.into(),
                }
            }
        }
    }

    /// A group's controls are not used: its launches wait for permits.
    fn wait_to_launch(&mut self, key: u32, file: Option<OwnedFd>) {
        // It may have gone before the daemon received that.
        let Some((id, _)) = self.told.iter().find(|(_, told)| told.key == key) else {
            return;
        };
        if permits::has_page() || file.is_some() {
            let page = file.and_then(|file| Permitted::open(file).ok());
            permits::begin(page, key);
            self.permits.push(key);
        }
        // Without a daemon there is nothing to set free but the launches.
        self.rescue.forget(*id);
    }

    /// Reports which device the groups are on whose launches wait. Says how soon to look again.
    fn report_permits(&mut self, session: &OwnFd) -> Result<Option<Duration>, End> {
        while let Some(key) = self.permits.last().copied() {
            let context = work::context_of(key);
            let uuid = context.and_then(|it| within(it, space::current_uuid));
            // The context may be about to be made.
            let Some(device) = uuid.flatten() else {
                return Ok(Some(CONTEXT_TICK));
            };
            let packet = Shim::AwaitsPermits { key, device };
            socket::send(session, &packet, None, SendFlags::empty())?;
            self.permits.pop();
        }
        Ok(None)
    }

    /// Whether another process waits for memory of this one, which is away. Returned once for each time that it is away.
    fn is_memory_requested(&mut self) -> bool {
        let mut orders = self.shared_memory.iter();
        let wanted = self.mover.is_out() && orders.any(|it| matches!(it, Daemon::Serve { .. }));
        wanted && !std::mem::replace(&mut self.requested, true)
    }

    /// Reports the requests whose answer waits for the memory to be back, each once.
    fn report_delay(&mut self) {
        if !lease::knows(INTRODUCTION) {
            return;
        }
        for order in &self.shared_memory {
            if let Daemon::Serve { op, .. } = *order
                && op > self.delayed
            {
                self.delayed = op;
                lease::tell(Shim::Delayed { op });
            }
        }
    }

    /// Has orders about shared memory carried out, one after the other, while all memory is on the device.
    fn share_memory(&mut self, session: &OwnFd) -> Result<(), End> {
        if let Some((op, made)) = self.mover.take_made() {
            let piece = made.as_ref().map(|(piece, _)| *piece);
            let file = made.as_ref().map(|(_, file)| file.as_fd());
            let packet = Shim::Piece { op, piece };
            let sent = socket::send(session, &packet, file, SendFlags::empty());
            if let Err(error) = sent {
                self.mover.put_back((op, made));
                return Err(error.into());
            }
        }
        if !self.mover.is_here() {
            if !self.mover.shares() {
                self.report_delay();
            }
            return Ok(());
        }
        self.requested = false;
        if let Some(order) = self.shared_memory.pop_front() {
            self.mover.obey(self.rescue, order);
        }
        Ok(())
    }

    /// Tells what has changed. Says how soon a group under construction may be taken as it is.
    fn tell(&mut self, session: &OwnFd) -> Result<Option<Duration>, End> {
        let send = |packet: &Shim| socket::send(session, packet, None, SendFlags::empty());
        let wanted = self.is_memory_requested();
        if self.mover.is_out() && (gate::take_wake_request() || wanted) {
            lease::tell(Shim::WakeRequest);
        }
        self.share_memory(session)?;
        while let Some(packet) = lease::next() {
            if let Err(error) = send(&packet) {
                lease::put_back(packet);
                return Err(error.into());
            }
        }
        // Calls the driver, whose threads may need the picture.
        let mut settles = self.report_permits(session)?;
        let mut picture = self.process.picture();
        let groups = picture.groups();
        let gone = |id: &GroupId| !groups.iter().any(|(other, _)| other == id);
        while let Some(id) = self.told.keys().copied().find(gone) {
            let key = self.told[&id].key;
            send(&Shim::Gone { key })?;
            self.rescue.forget(id);
            self.told.remove(&id);
            self.permits.retain(|it| *it != key);
        }
        self.unsettled.retain(|id, _| !gone(id));
        for (id, key) in groups {
            let Some(mut seen) = picture.group(id) else {
                continue;
            };
            // A domain of more channels than the protocol carries could be frozen only in part.
            let channels = &mut seen.group.channels;
            if channels.is_empty() || channels.len() > MAX_CHANNELS || seen.group.subdevice == 0 {
                continue;
            }
            if let Some(told) = self.told.get_mut(&id) {
                if told.channels != seen.group.channels {
                    let channels = seen.group.channels;
                    send(&Shim::Channels {
                        key,
                        channels: channels.clone(),
                    })?;
                    told.channels = channels;
                }
                if told.touched != seen.touched {
                    send(&Shim::TimesliceTouched { key })?;
                    told.touched = seen.touched;
                }
                continue;
            }
            if !seen.ready {
                let now = Instant::now();
                let size = seen.group.channels.len();
                // It may end at work before the group is announced.
                if !self.unsettled.contains_key(&id) {
                    hand_over_memory(session, &picture, &seen)?;
                }
                let since = self.unsettled.entry(id).or_insert((size, now));
                if since.0 != size {
                    *since = (size, now);
                }
                let left = SETTLED.saturating_sub(now - since.1);
                if !left.is_zero() {
                    settles = Some(settles.map_or(left, |other| other.min(left)));
                    continue;
                }
                picture.settle(id);
            }
            if self.told.len() < MAX_DOMAINS
                && let Some((file, _)) = picture.descriptor(seen.file)
            {
                let packet = Shim::Group {
                    key,
                    engine: seen.engine,
                    client: seen.group.client,
                    subdevice: seen.group.subdevice,
                    group: seen.group.group,
                    channels: seen.group.channels.clone(),
                    timeslice_us: seen.timeslice_us,
                    shared: seen.shared,
                };
                self.rescue.know(id);
                socket::send(session, &packet, Some(file), SendFlags::empty())?;
                hand_over_memory(session, &picture, &seen)?;
                let Seen { group, touched, .. } = seen;
                self.told.insert(
                    id,
                    Told {
                        key,
                        channels: group.channels,
                        touched,
                    },
                );
                self.unsettled.remove(&id);
            }
        }
        Ok(settles)
    }

    /// Frees all groups that a daemon knew; those whose memory is away once it is back. Whether all memory is: if not, a daemon
    /// is there again.
    fn rescue(&mut self, socket: &Path) -> bool {
        hold::set_policy(0, false);
        // Also what a daemon that stands still had sent before.
        permits::release();
        copies::release();
        let rescue = self.rescue;
        rescue.end(self.process);
        if !self.mover.bring_back(socket) {
            return false;
        }
        rescue.end_move(false);
        // What does not work now the thread that watches the lease tries again, where there is one.
        for _ in 0..FREE_TRIES.0 {
            if rescue.free(self.process) {
                break;
            }
            sleep(FREE_TRIES.1);
        }
        true
    }
}

/// The session begins, of a daemon that accounts memory, with what that receives about this process's memory and the host's.
fn introduce(keeps: Shim) {
    // What changes after it was named is sent: no thread gets between.
    space::with(|space| {
        let mut all = keep::introduce(space);
        all.append(&mut space.holds());
        all.append(&mut space.shown());
        all.push(keeps);
        all.extend(ipc::introduce(space));
        lease::set_up(true, all);
    });
    // Threads change these without that lock. Only now: what one of them tells is sent, or it is seen here, or both.
    if reclaim::is_asked_for() {
        lease::tell(Shim::Reclaims);
    }
    unlisted::message().into_iter().for_each(lease::tell);
    reports::forget_told();
}

/// Hands on the files that the process's memory lives with, if it shares this compute group: the daemon holds them for a while
/// when the process ends at work, as a kernel that outlives its memory is a fault of all in the group.
fn hand_over_memory(session: &OwnFd, picture: &Picture, seen: &Seen) -> Result<(), End> {
    if !seen.shared || seen.engine != engine::GR0 {
        return Ok(());
    }
    let send =
        |file: BorrowedFd<'_>| socket::send(session, &Shim::Memory, Some(file), SendFlags::empty());
    if let Some((control, _)) = picture.descriptor(seen.file) {
        send(control)?;
    }
    let numbers = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    for number in numbers
        .flatten()
        .filter_map(|it| it.file_name().to_str()?.parse().ok())
    {
        // SAFETY: it is used for one call, to which a number that has been closed meanwhile is an error.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        let Ok(copy) = rustix::io::fcntl_dupfd_cloexec(file, 0) else {
            continue;
        };
        // The number may have been another file's a moment ago; the copy is what it is.
        let path = std::fs::read_link(format!("/proc/self/fd/{}", copy.as_raw_fd()));
        if path.is_ok_and(|path| path == Path::new(UVM)) {
            send(copy.as_fd())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{ffi::c_void, ptr, sync::mpsc};

    use super::*;

    unsafe extern "C" fn frees_nothing(_: i32, _: u64, _: *mut c_void) -> u64 {
        0
    }

    /// A thread registers a function while the agent names all that there is.
    #[test]
    fn what_a_thread_says_while_a_session_begins_is_sent() {
        let (send, receive) = mpsc::channel();
        // The agent waits for the tables.
        let agent = space::with(|_| {
            let agent = thread::spawn(move || {
                send.send(()).unwrap();
                introduce(Shim::Keeps { bytes: 0 });
            });
            receive.recv().unwrap();
            sleep(Duration::from_millis(100));
            reclaim::register(Some(frees_nothing), ptr::null_mut());
            agent
        });
        agent.join().unwrap();
        let mut sent = std::iter::from_fn(lease::next);
        assert!(sent.any(|it| it == Shim::Reclaims));
        lease::set_up(false, Vec::new());
        reclaim::register(None, ptr::null_mut());
    }
}
