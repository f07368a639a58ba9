//! gpumux from end to end: the real binary, libraries and processes, on the emulated device, or on a real one
//! with `GPUMUX_TEST_REAL=1`. See the harness (`gpumux-tests`) for how to carry this to another machine.

mod contracts;
mod cuda;
mod docs;
mod emu;
mod faults;
mod gangs;
mod hints;
mod hostile;
mod levers;
mod memory;
mod mig;
mod on_demand;
mod packages;
mod run;
mod seen;
mod soak;
mod space;
mod timings;
mod transparency;
mod users;

/// A tenant program that runs one short kernel after the other and prints a line for each.
const TICKS: &str = "gpumux scratch";

/// Whether a tenant is as it was: its levers move. Whether it has work at this moment changes all the time.
fn is_well(tenant: &serde_json::Value) -> bool {
    ["running", "idle"].iter().any(|it| tenant["state"] == *it)
}

/// A latency tenant's program that has work now and then. Beside it, batch tenants take turns by freezing.
const REQUESTS: &str =
    "gpumux workload latency --kernels 1 --iterations 110000 --period-us 20000 --seconds 600";
