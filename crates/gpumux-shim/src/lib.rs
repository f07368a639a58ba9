//! `libgpumux.so`: preloaded into tenants, learns their channel groups and tells the daemon.
//!
//! The library stands between a program and libc's `open`, `close` and `ioctl`. What is not an NVIDIA
//! control file passes after one comparison. Of the driver library's RM calls it remembers the
//! handles of channel groups ([`process`]). When the first group appears, one thread of its own
//! ([`agent`]) connects to the daemon, sends the groups with their control file, and from
//! then on watches that the daemon is still there: when it is not, it thaws the process's groups.
//!
//! [`ground`] ← [`work`] (what is launched, and holding the device ahead of it) ← [`memory`] ← the threads and hooks beside this file.
//!
//! Rules that hold everywhere here:
//! - nothing happens before the program touches the driver: no constructor, thread, socket or allocation (but for a rank's device,
//!   where the user asks for that: [`ground::ranks`]);
//! - the program's own call is made first and with no lock held, its result and `errno` are what it gets;
//! - no panic crosses into the program, and no call of the program waits for the daemon (but for
//!   those about memory, and the first group under `GPUMUX_STRICT=1`, some two seconds);
//! - a child made by `fork` starts from nothing, and what the parent holds is closed in it.

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!(
    "the hooks need assembly, which exists for the processors of NVIDIA's driver alone: x86-64 and aarch64"
);

mod agent;
mod collectives;
mod exports;
mod ground;
mod hooks;
mod loader;
mod memory;
mod mover;
mod nvml;
mod process;
mod rescue;
mod unlisted;
mod work;
