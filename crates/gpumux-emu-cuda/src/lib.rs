//! `libgpumux_emu.so`: what programs load instead of `libcuda.so.1` and `libnvidia-ml.so.1` to run on the
//! emulated device.
//!
//! It plays both sides of the real thing. Its libcuda half ([`driver`] is the list of what there is) makes
//! contexts by RM calls on `/dev/nvidiactl`, through the process's own `open` and `ioctl`, so that a preloaded shim sees
//! them; its kernel half ([`system`]) recognises these and passes them to the server. Work goes to the server too, which
//! says when it is done; what it does to memory happens here ([`effect`]), where device addresses are
//! mapped memory ([`memory`]).
//!
//! Functions called from C are made by the macros of [`border`]; no panic leaves them, and pointers are touched
//! nowhere else but there, in [`memory`], in [`access`] and in [`interpret`].

mod access;
mod arrays;
mod attributes;
mod border;
mod capture;
mod checkpoint;
mod context;
mod device;
mod driver;
mod effect;
mod entries;
mod error;
mod event;
mod fatbin;
mod fault;
mod graph;
mod hold;
mod integrity;
mod interpret;
mod ipc;
mod kernel;
mod launch;
mod library;
mod link;
mod locked;
mod mark;
mod memory;
mod missing;
mod module;
mod nodes;
mod nvml;
mod nvml_missing;
mod op;
mod plane;
mod pool;
mod pools;
mod process;
mod rm;
mod stream;
mod system;
mod tables;
mod values;
mod watch;
