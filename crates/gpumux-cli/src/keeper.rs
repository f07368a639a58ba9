//! Device memory that outlives the program that made it (`gpumux run --keep-memory`).
//!
//! The program's library hands over the file of each buffer that it keeps. While any process has such a file open, the driver keeps the
//! memory, with or without a context. When the program runs again, its library finds the buffers by their names.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use gpumux_wire::{
    keeper::{Answer, Buffer, LONGEST_NAME, Request, VARIABLE},
    socket,
};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, SocketFlags, accept_with, sockopt::socket_peercred},
    process::getuid,
};

/// Most buffers, and most connections at a time.
const MOST: usize = 256;
/// How long no connection is accepted when descriptors have run out.
const PAUSE: Duration = Duration::from_millis(100);

/// Keeps what the program's processes hand over until it is dropped.
pub(crate) struct Keeper {
    store: Arc<Mutex<Store<OwnedFd>>>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        *lock(&self.store) = Store::default();
    }
}

fn lock(store: &Mutex<Store<OwnedFd>>) -> MutexGuard<'_, Store<OwnedFd>> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Keeper {
    /// For processes of this user that have the tenant's secret; the program learns where it is.
    pub(crate) fn start(program: &mut Command, tenant: String) -> io::Result<Self> {
        let mut random = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let name = format!("gpumux-keeper-{:032x}", u128::from_ne_bytes(random));
        let listener = socket::listen_abstract(name.as_bytes(), MOST as i32)?;
        program.env(VARIABLE, name);
        let store = Arc::new(Mutex::new(Store {
            open: true,
            ..Store::default()
        }));
        let keeper = Self {
            store: Arc::clone(&store),
        };
        let tenant: Arc<str> = tenant.into();
        thread::Builder::new()
            .name("keeper".into())
            .spawn(move || accept(&listener, &store, &tenant))?;
        Ok(keeper)
    }
}

/// Accepts connections for as long as this process lives.
fn accept(listener: &OwnedFd, store: &Arc<Mutex<Store<OwnedFd>>>, tenant: &Arc<str>) {
    loop {
        let socket = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            // There are no descriptors left.
            Err(_) => {
                thread::sleep(PAUSE);
                continue;
            }
        };
        // The socket's name can be seen by all users.
        let own = socket_peercred(&socket).is_ok_and(|peer| peer.uid == getuid());
        let place = own.then(|| lock(store).join()).flatten();
        let Some(number) = place else {
            continue;
        };
        let (own, tenant) = (Arc::clone(store), Arc::clone(tenant));
        let serve = move || {
            serve(&socket, number, &own, &tenant);
            lock(&own).left(number);
        };
        let thread = thread::Builder::new().name("keeper".into()).spawn(serve);
        if thread.is_err() {
            lock(store).left(number);
        }
    }
}

/// Serves a process until its end.
fn serve(socket: &OwnedFd, number: u64, store: &Mutex<Store<OwnedFd>>, tenant: &str) {
    let mut known = false;
    while let Ok(Some((request, file))) = socket::recv::<Request>(socket, RecvFlags::empty()) {
        let (answer, file) = match request {
            Request::Hello { tenant: named } if named == tenant => {
                known = true;
                (Answer::Done, None)
            }
            _ if !known => return,
            request => lock(store).answer(number, request, file, |it| it.try_clone().ok()),
        };
        let file = file.as_ref().map(AsFd::as_fd);
        if socket::send(socket, &answer, file, SendFlags::empty()).is_err() {
            return;
        }
    }
}

/// What is kept.
struct Store<F> {
    open: bool,
    /// By name.
    all: BTreeMap<String, Kept<F>>,
    /// The last connection's number, and how many there are.
    last: u64,
    connections: usize,
}

struct Kept<F> {
    /// What it is; none: a process is about to make it.
    memory: Option<(Buffer, F)>,
    /// The connection that holds it.
    holder: Option<u64>,
}

impl<F> Default for Store<F> {
    fn default() -> Self {
        Self {
            open: false,
            all: BTreeMap::new(),
            last: 0,
            connections: 0,
        }
    }
}

impl<F> Store<F> {
    /// A process has connected: its number.
    fn join(&mut self) -> Option<u64> {
        let fits = self.connections < MOST;
        self.connections += usize::from(fits);
        self.last += 1;
        fits.then_some(self.last)
    }

    /// It has ended.
    fn left(&mut self, number: u64) {
        self.connections = self.connections.saturating_sub(1);
        self.all.retain(|_, it| {
            if it.holder == Some(number) {
                it.holder = None;
            }
            it.holder.is_some() || it.memory.is_some()
        });
    }

    fn answer(
        &mut self,
        number: u64,
        request: Request,
        file: Option<F>,
        copy: impl FnOnce(&F) -> Option<F>,
    ) -> (Answer, Option<F>) {
        let refused = |reason: &str| {
            let reason = reason.to_owned();
            (Answer::Refused { reason }, None)
        };
        if !self.open {
            return refused("the program has ended");
        }
        match request {
            Request::Hello { .. } => (Answer::Done, None),
            Request::Find { name } => {
                if name.is_empty() || name.len() > LONGEST_NAME {
                    return refused("a name has 1 to 128 bytes");
                }
                if self.all.len() >= MOST && !self.all.contains_key(&name) {
                    return refused("256 buffers are kept: use fewer, larger ones");
                }
                let entry = self.all.entry(name).or_insert(Kept {
                    memory: None,
                    holder: None,
                });
                if entry.holder.is_some_and(|it| it != number) {
                    return (Answer::Busy, None);
                }
                let Some((buffer, file)) = &entry.memory else {
                    entry.holder = Some(number);
                    return (Answer::Done, None);
                };
                let Some(file) = copy(file) else {
                    return refused(
                        "`gpumux run` has no descriptors left: raise its limit (ulimit -n)",
                    );
                };
                entry.holder = Some(number);
                (Answer::Found(buffer.clone()), Some(file))
            }
            Request::Keep { name, buffer } => match (self.all.get_mut(&name), file) {
                (Some(entry), Some(file)) if entry.holder == Some(number) => {
                    entry.memory = Some((buffer, file));
                    (Answer::Done, None)
                }
                _ => refused("this process does not hold the buffer"),
            },
            Request::Drop { name } => match self.all.get(&name) {
                Some(entry) if entry.holder == Some(number) => {
                    self.all.remove(&name);
                    (Answer::Done, None)
                }
                _ => refused("this process does not hold the buffer"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(bytes: u64) -> Buffer {
        Buffer {
            device: "GPU-1".into(),
            size: bytes / 2,
            bytes,
        }
    }

    fn store() -> Store<u32> {
        Store {
            open: true,
            ..Store::default()
        }
    }

    fn find(store: &mut Store<u32>, number: u64, name: &str) -> (Answer, Option<u32>) {
        let name = name.to_owned();
        store.answer(number, Request::Find { name }, None, |it| Some(*it))
    }

    fn keep(store: &mut Store<u32>, number: u64, name: &str, file: u32) -> Answer {
        let request = Request::Keep {
            name: name.to_owned(),
            buffer: buffer(file.into()),
        };
        store.answer(number, request, Some(file), |it| Some(*it)).0
    }

    #[test]
    fn buffer_is_found_by_the_next_process_and_by_one_at_a_time() {
        let mut store = store();
        let [first, second] = [(); 2].map(|()| store.join().unwrap());
        assert_eq!(find(&mut store, first, "a"), (Answer::Done, None));
        assert_eq!(find(&mut store, second, "a"), (Answer::Busy, None));
        assert_eq!(keep(&mut store, first, "a", 7), Answer::Done);
        assert!(matches!(
            keep(&mut store, second, "a", 8),
            Answer::Refused { .. }
        ));
        store.left(first);
        let found = find(&mut store, second, "a");
        assert_eq!(found, (Answer::Found(buffer(7)), Some(7)));
        // A process finds its own again.
        assert_eq!(find(&mut store, second, "a").1, Some(7));
        let name = "a".to_owned();
        let ended = store.answer(second, Request::Drop { name }, None, |it| Some(*it));
        assert_eq!(ended.0, Answer::Done);
        assert_eq!(find(&mut store, second, "a"), (Answer::Done, None));
    }

    #[test]
    fn name_is_free_when_its_process_ends_with_nothing_kept() {
        let mut store = store();
        let first = store.join().unwrap();
        assert_eq!(find(&mut store, first, "a"), (Answer::Done, None));
        store.left(first);
        assert!(store.all.is_empty());
    }

    #[test]
    fn names_and_processes_are_bounded_and_end_with_the_keeper() {
        let mut store = store();
        let number = store.join().unwrap();
        for name in ["", &"a".repeat(LONGEST_NAME + 1)] {
            assert!(matches!(
                find(&mut store, number, name).0,
                Answer::Refused { .. }
            ));
        }
        for name in 0..MOST {
            assert_eq!(find(&mut store, number, &name.to_string()).0, Answer::Done);
        }
        assert!(matches!(
            find(&mut store, number, "more").0,
            Answer::Refused { .. }
        ));
        let others = (0..MOST).filter_map(|_| store.join()).count();
        assert_eq!(others, MOST - 1);
        let mut store = Store::<u32>::default();
        assert!(matches!(find(&mut store, 1, "a").0, Answer::Refused { .. }));
    }
}
