//! A virtual-time GPU that runs the policies unchanged.
//!
//! [`gpu`] is the hardware. On top of it, a [`Scenario`] (TOML) says which tenants ask for what and when, and [`run`]
//! plays it: programs that submit kernels, a simulated daemon that sees demand late and pays for every control, and the
//! policies of `gpumux-core` between them. Same scenario, same seed, same report.
#![forbid(unsafe_code)]

mod arrivals;
mod chrome;
mod daemon;
pub mod gpu;
mod memory;
mod mode;
mod report;
mod run;
mod scenario;
mod shares;

pub use arrivals::{Arrival, Request, parse_trace};
pub use memory::MemoryModel;
pub use mode::Mode;
pub use report::{BoundReport, DeviceReport, Latency, ModeReport, Moves, Report, TenantReport};
pub use run::{run, run_traced};
pub use scenario::{Error, Scenario, Tenant, Work};
