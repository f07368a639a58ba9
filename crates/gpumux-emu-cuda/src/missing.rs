//! The driver functions that the emulated device does not have: those of the list of entry points that nothing here exports
//! (`build.rs`). They are exported too, as programs that are linked
//! against libcuda need every symbol, and say so when they are called. How often is counted: `GPUMUX_EMU_MISSING` names
//! a file to which a process appends a line for each when it ends.

use std::{collections::BTreeMap, ffi::c_int, fs::File, io::Write, sync::Mutex};

use crate::{border::Address, error::CuError, process::lock};

/// The variable that names the file.
const FILE_VARIABLE: &str = "GPUMUX_EMU_MISSING";

/// Calls by symbol.
static CALLS: Mutex<BTreeMap<&str, u64>> = Mutex::new(BTreeMap::new());

macro_rules! missing {
    ($($symbol:ident)*) => {
        $(
            /// Takes no arguments of those that there are: it looks at none.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub(crate) extern "C" fn $symbol() -> c_int {
                called(stringify!($symbol))
            }
        )*

        /// All of them.
        pub(crate) const FUNCTIONS: &[(&str, Address)] =
            &[$((stringify!($symbol), Address($symbol as *const ())),)*];
    };
}

fn called(symbol: &'static str) -> c_int {
    let mut calls = lock(&CALLS);
    if calls.is_empty() {
        // SAFETY: the function is there as long as the process: the library is never unloaded once it has threads.
        unsafe { libc::atexit(tell) };
    }
    *calls.entry(symbol).or_default() += 1;
    CuError::NOT_SUPPORTED.0
}

/// Appends calls and symbol of each to the file.
extern "C" fn tell() {
    let Some(path) = std::env::var_os(FILE_VARIABLE) else {
        return;
    };
    let lines: String = lock(&CALLS)
        .iter()
        .map(|(symbol, calls)| format!("{calls} {symbol}\n"))
        .collect();
    let written = File::options().create(true).append(true).open(&path);
    if let Err(error) = written.and_then(|mut file| file.write_all(lines.as_bytes())) {
        eprintln!("gpumux: cannot write {}: {error}", path.display());
    }
}

include!(concat!(env!("OUT_DIR"), "/missing.rs"));
