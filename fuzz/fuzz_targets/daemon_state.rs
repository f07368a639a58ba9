//! The files that outlive the daemon: tenants, settings, programs and groups, as a disk may give them back. Read, or refused.
//! `fuzz/run 60 daemon_state`

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Some((kind, bytes)) = data.split_first() {
        gpumux_daemon::read_state(*kind, bytes);
    }
});
