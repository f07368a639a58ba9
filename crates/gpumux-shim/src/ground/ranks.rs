//! A rank's own device, where a job has more ranks than the machine has devices (`gpumux run --ranks-per-gpu`).
//!
//! A launcher such as `torchrun` starts a process for each rank, with its number in `LOCAL_RANK`, and programs use the device of that number.
//! Here rank *i* of a job on *N* devices is given device *i mod N* as its only one, and `LOCAL_RANK=0`: so all of `LOCAL_RANK`, `cuda:0`
//! and a rank modulo the number of devices name it. PyTorch's `torchrun --virtual-local-rank` does the same where there is a device for
//! each rank.
//!
//! The one thing that is done before the program begins, because it reads its environment then. Without the variable of `gpumux run`
//! nothing is done. A process that inherits the changed environment finds its device the first of one.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    sync::LazyLock,
};

use gpumux_wire::RANKS_VARIABLE;

use crate::ground::{next, notice::say};

const LOCAL_RANK: &str = "LOCAL_RANK";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// The first version of NCCL that takes several ranks on a device, as `ncclGetVersion` writes it.
const NCCL: c_int = 2_30_03;

/// The C library calls it before the program's `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[allow(
    clippy::disallowed_methods,
    reason = "no other thread can read the environment yet"
)]
extern "C" fn begin() {
    let text = |name| std::env::var(name).ok();
    if let (Some(_), Some(rank), Some(visible)) =
        (text(RANKS_VARIABLE), text(LOCAL_RANK), text(VISIBLE))
        && let Some(own) = own(&visible, &rank)
    {
        // SAFETY: the program has no other thread yet.
        unsafe {
            std::env::set_var(VISIBLE, own);
            std::env::set_var(LOCAL_RANK, "0");
        }
    }
}

/// The device of a rank.
fn own<'a>(visible: &'a str, rank: &str) -> Option<&'a str> {
    let devices: Vec<&str> = (visible.split(',').map(str::trim))
        .filter(|it| !it.is_empty())
        .collect();
    let rank: usize = rank.parse().ok()?;
    devices.get(rank.checked_rem(devices.len())?).copied()
}

/// How many ranks share a device.
static RANKS: LazyLock<u64> = LazyLock::new(|| {
    let told = std::env::var(RANKS_VARIABLE).ok();
    told.and_then(|it| it.parse().ok()).unwrap_or(1).max(1)
});

/// What a rank is shown of its tenant's memory of a device: an equal part.
pub(crate) fn part(bytes: u64) -> u64 {
    bytes / *RANKS
}

/// Reports an NCCL that will refuse the ranks. When the process begins to use a device: it has loaded its libraries by then.
pub(crate) fn check_nccl() {
    if *RANKS > 1
        && let Some(version) = nccl_version().filter(|it| *it < NCCL)
    {
        let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
        say(format_args!(
            "NCCL {major}.{minor}.{patch} refuses several ranks on a GPU (`Duplicate GPU detected`): 2.30.3 or newer is needed. Name its \
             libnccl.so.2 in LD_PRELOAD"
        ));
    }
}

type Version = unsafe extern "C" fn(*mut c_int) -> c_int;

/// The version of the NCCL that is loaded, if one is.
fn nccl_version() -> Option<c_int> {
    let mut path = None::<CString>;
    // SAFETY: the callback gets the place that is named here.
    unsafe { libc::dl_iterate_phdr(Some(find), (&raw mut path).cast()) };
    let path = path?;
    // SAFETY: the library is loaded already, so nothing of it runs.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: a library and a C string.
    let address = unsafe { next::dlsym()?(library, c"ncclGetVersion".as_ptr()) };
    // SAFETY: null, or NCCL's function of this name.
    let ask: Option<Version> = unsafe { std::mem::transmute(address) };
    let mut version = 0;
    // SAFETY: a place to write.
    (unsafe { ask?(&raw mut version) } == 0).then_some(version)
}

/// Keeps the path of the first library that is NCCL's by its name.
unsafe extern "C" fn find(
    library: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the loader's, and the caller's place.
    let (name, found) = unsafe { ((*library).dlpi_name, &mut *found.cast::<Option<CString>>()) };
    if name.is_null() {
        return 0;
    }
    // SAFETY: a C string of the loader's.
    let name = unsafe { CStr::from_ptr(name) };
    let is_nccl = name.to_bytes().windows(10).any(|it| it == b"libnccl.so");
    if is_nccl {
        *found = Some(name.to_owned());
    }
    is_nccl.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_has_the_device_of_its_number_modulo_all() {
        let all = |visible| ["0", "1", "2", "3"].map(|rank| own(visible, rank));
        assert_eq!(all("4,5"), [Some("4"), Some("5"), Some("4"), Some("5")]);
        assert_eq!(all("GPU-a"), [Some("GPU-a"); 4]);
        assert_eq!(all(" 1, 0 ,")[1], Some("0"));
        assert_eq!(all(""), [None; 4]);
        assert_eq!(own("0,1", "-1"), None);
        // A process that a rank starts inherits what it was given.
        assert_eq!(own(own("4,5", "3").unwrap(), "0"), Some("5"));
    }
}
