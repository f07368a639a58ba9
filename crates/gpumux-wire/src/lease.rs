//! The lease under which the daemon controls a process's channel groups.
//!
//! The daemon's scheduling thread counts up a word in shared memory at least every [`RENEW`]; every process maps
//! it for reading and looks at it every [`LOOK`]. After [`LOOKS`] looks in a row without change the lease has
//! expired: the process takes its groups back and begins a new session. Looks are counted, not time: a machine
//! that stood still as a whole has missed none.
//!
//! One word for all processes: a process cannot write it, and what the daemon counts does not depend on how many
//! processes there are.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::{
    mapping::{self, Mapping},
    message::REVISION,
};

/// The daemon renews at least so often while it has sessions.
pub const RENEW: Duration = Duration::from_millis(100);

/// Pause between a process's looks.
pub const LOOK: Duration = Duration::from_millis(100);

/// Looks in a row that find no renewal before the lease has expired. At most 600 ms pass from the last renewal to
/// the look that finds it expired, which leaves 400 ms of the second for the controls.
pub const LOOKS: u32 = 5;

#[derive(Debug)]
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    revision: AtomicU64,
    renewed: AtomicU64,
}

// SAFETY: `repr(C)`, atomics only.
unsafe impl mapping::Layout for Layout {
    const MAGIC: u64 = 0x0001_6c65_6173_6500;
    const NAME: &'static str = "gpumux-lease";

    fn magic(&self) -> &AtomicU64 {
        &self.magic
    }
}

/// The daemon's side.
#[derive(Debug)]
pub struct Lease(Mapping<Layout>);

impl Lease {
    /// Makes a lease. The file is for the processes, which cannot write it.
    ///
    /// # Errors
    /// When there is no memory for it, or the kernel (before Linux 5.1) cannot make it read-only.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let (made, file) = Mapping::<Layout>::create(mapping::READ_ONLY)?;
        made.revision.store(REVISION.into(), Ordering::Release);
        Ok((Self(made), file))
    }

    /// Renews it.
    pub fn renew(&self) {
        self.0.renewed.fetch_add(1, Ordering::Release);
    }
}

/// A process's side.
#[derive(Debug)]
pub struct Leased {
    page: Mapping<Layout>,
    watch: Watch,
}

impl Leased {
    /// Maps the file that came with the daemon's welcome.
    ///
    /// # Errors
    /// When it is no lease.
    pub fn open(file: impl AsFd) -> io::Result<Self> {
        let page = Mapping::<Layout>::open(file)?;
        let watch = Watch::new(page.renewed.load(Ordering::Acquire));
        Ok(Self { page, watch })
    }

    /// The daemon's [`REVISION`].
    pub fn revision(&self) -> u32 {
        let revision = self.page.revision.load(Ordering::Acquire);
        u32::try_from(revision).unwrap_or(u32::MAX)
    }

    /// Whether the daemon has renewed it since the last look.
    pub fn is_renewed(&self) -> bool {
        self.watch.renewed != self.page.renewed.load(Ordering::Acquire)
    }

    /// Looks once; to be called every [`LOOK`]. Whether the lease has expired.
    pub fn look(&mut self) -> bool {
        self.watch.look(self.page.renewed.load(Ordering::Acquire))
    }
}

/// Decides when a lease has expired.
#[derive(Clone, Copy, Debug)]
struct Watch {
    renewed: u64,
    unchanged: u32,
}

impl Watch {
    fn new(renewed: u64) -> Self {
        Self {
            renewed,
            unchanged: 0,
        }
    }

    fn look(&mut self, renewed: u64) -> bool {
        self.unchanged = match renewed == self.renewed {
            true => self.unchanged.saturating_add(1),
            false => 0,
        };
        self.renewed = renewed;
        self.unchanged >= LOOKS
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustix::{fs::OFlags, io::Errno};

    use super::*;

    #[test]
    fn lease_without_renewal_expires_at_the_fifth_look() {
        let (lease, file) = Lease::create().unwrap();
        let mut leased = Leased::open(&file).unwrap();
        assert_eq!(leased.revision(), REVISION);
        for _ in 0..3 {
            for _ in 1..LOOKS {
                assert!(!leased.look());
            }
            lease.renew();
        }
        assert!(!leased.look());
        for _ in 1..LOOKS {
            assert!(!leased.look());
        }
        assert!(leased.look());
        assert!(leased.look(), "and stays so until it is renewed");
        assert!(!leased.is_renewed());
        lease.renew();
        assert!(leased.is_renewed());
        assert!(!leased.look());
    }

    /// In virtual time: whenever the daemon stops, and however the looks lie, the expiry is found within 600 ms.
    #[test]
    fn expiry_is_found_within_600_ms_of_the_last_renewal() {
        for phase in 0..LOOK.as_millis() as u64 {
            for last in 0..LOOK.as_millis() as u64 * 3 {
                let mut watch = Watch::new(0);
                let renewed = |now: u64| (now.min(last)) / RENEW.as_millis() as u64 + 1;
                let looks = (phase..).step_by(LOOK.as_millis() as usize);
                let found = looks.clone().find(|now| watch.look(renewed(*now)));
                let last_renewal = last - last % RENEW.as_millis() as u64;
                assert!(found.unwrap() - last_renewal <= 600, "{phase} {last}");
            }
        }
    }

    #[test]
    fn tenant_cannot_write_the_lease() {
        let (_lease, file) = Lease::create().unwrap();
        assert_eq!(rustix::io::pwrite(&file, &[1; 8], 16), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&file, 0), Err(Errno::PERM));
        let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let again = rustix::fs::open(again, OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(rustix::io::pwrite(&again, &[1; 8], 16), Err(Errno::PERM));
    }

    #[test]
    fn file_that_is_no_lease_is_refused() {
        let (_page, file) = crate::page::Page::create().unwrap();
        assert!(Leased::open(&file).is_err());
        assert!(Leased::open(std::fs::File::open("/dev/null").unwrap()).is_err());
    }

    proptest! {
        /// No false expiry: a daemon that renews in time, however the looks are delayed.
        #[test]
        fn renewed_lease_never_expires(delays in proptest::collection::vec(100u64..5000, 1..50)) {
            let mut watch = Watch::new(0);
            let mut now = 0;
            for delay in delays {
                now += delay;
                prop_assert!(!watch.look(now / RENEW.as_millis() as u64));
            }
        }
    }
}
