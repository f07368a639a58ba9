//! The emulated device: a GPU made of one server process, that CUDA driver programs share in real time.
//!
//! [`profile`] says what the device is, [`server`] is the device: it keeps the hardware model
//! ([`gpumux_sim::gpu`]) in step with the clock, plays the kernel driver's resource manager, keeps the books of
//! memory, and answers NVML. Programs reach it through `libgpumux_emu.so` (crate `gpumux-emu-cuda`), which
//! plays `libcuda.so.1`, `libnvidia-ml.so.1` and the device files inside them, over the messages of [`protocol`].
//!
//! Time is the model's: what a kernel takes does not depend on this machine. Effects on memory are executed in
//! the program's own process, where device addresses are mapped memory.

pub mod client;
pub mod fault;
pub mod mig;
pub mod mps;
pub mod profile;
pub mod protocol;
pub mod server;

use std::path::Path;

pub use profile::Profile;

/// Environment variable with the path of the server's socket.
pub const SOCKET_VARIABLE: &str = "GPUMUX_EMU_SOCKET";

/// File name of the library that programs load.
pub const LIBRARY: &str = "libgpumux_emu.so";

/// What a program needs in its environment to run on the emulated device whose server listens on `socket`:
/// `lib_dir` is the folder with [`LIBRARY`]. The library must come *behind* the shim in `LD_PRELOAD`. It has
/// libcuda's soname, so that programs that load `libcuda.so.1` get it; NVML is loaded by path ([`LIBRARY`] again).
pub fn environment(lib_dir: &Path, socket: &Path) -> Vec<(String, String)> {
    let library = lib_dir.join(LIBRARY).display().to_string();
    vec![
        ("LD_PRELOAD".to_owned(), library.clone()),
        ("GPUMUX_NVML".to_owned(), library),
        (SOCKET_VARIABLE.to_owned(), socket.display().to_string()),
    ]
}
