//! Any bytes on the session socket: refused, or a packet that survives being sent again.
//! `fuzz/run 60 session_packets`

#![no_main]

use gpumux_wire::{
    Daemon, Shim,
    message::{decode, encode},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(packet) = decode::<Shim>(data) {
        assert_eq!(decode::<Shim>(&encode(&packet).unwrap()).unwrap(), packet);
    }
    if let Ok(packet) = decode::<Daemon>(data) {
        assert_eq!(decode::<Daemon>(&encode(&packet).unwrap()).unwrap(), packet);
    }
});
