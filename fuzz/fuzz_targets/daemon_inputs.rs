//! What people and programs write for the daemon, as bytes: its configuration, and bodies of API requests. Refused, or valid.
//! `fuzz/run 60 daemon_inputs`

#![no_main]

use gpumux_daemon::{
    Config,
    api::types::{NewCurve, NewHint, NewTenant, SpecChange},
};
use libfuzzer_sys::fuzz_target;
use serde::{Serialize, de::DeserializeOwned};

/// A body that is understood is understood again when it is written anew.
fn body<T: Serialize + DeserializeOwned>(data: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<T>(data) {
        let text = serde_json::to_vec(&value).unwrap();
        serde_json::from_slice::<T>(&text).unwrap();
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, data)) = data.split_first() else {
        return;
    };
    match kind % 5 {
        0 => body::<NewTenant>(data),
        1 => body::<SpecChange>(data),
        2 => body::<NewCurve>(data),
        3 => body::<NewHint>(data),
        _ => {
            let text = std::str::from_utf8(data).ok();
            if let Some(Ok(config)) = text.map(toml::from_str::<Config>) {
                let _ = config.check();
            }
        }
    }
});
