//! The CUDA driver API: [`list`] is what there is of it, the rest is what gpumux's own programs use, and thin wrappers over that.
//!
//! [`driver`] holds one list of driver functions; from it come the table of function pointers that is
//! filled from the `libcuda.so.1` at hand (real or emulated), the list of symbol names and one checked
//! method per function. [`types`] has the types and constants. The wrappers ([`Context`], [`Stream`],
//! [`Event`], [`Module`], [`DeviceBuffer`], [`HostBuffer`], [`Graph`], [`Mapping`]) own what they name
//! and give it back when dropped.

pub mod checkpoint;
pub mod driver;
pub mod list;
pub mod types;
mod wrap;

pub use driver::{Driver, Error};
pub use wrap::{
    Arg, Context, Device, DeviceBuffer, Event, Function, Graph, HostBuffer, Mapping, Module,
    Stream, Wait,
};

/// What the calls of this crate return.
pub type Result<T> = std::result::Result<T, Error>;
