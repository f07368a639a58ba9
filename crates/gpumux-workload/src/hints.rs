//! Saying that work is coming: through the preloaded library, or through the daemon's API.

use std::{
    ffi::{c_int, c_uint},
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use anyhow::{Context, bail};

use crate::{Hint, Latency};

/// Longest wait for the daemon's answer.
const PATIENCE: Duration = Duration::from_secs(2);

type Function = unsafe extern "C" fn(c_int, c_uint) -> c_int;

/// The way that was chosen, made ready.
pub(crate) enum Hinter {
    None,
    Manual { hint: Function, device: c_int },
    Outside { api: UnixStream, request: String },
}

impl Hinter {
    pub(crate) fn new(args: &Latency) -> anyhow::Result<Self> {
        let expected_us = args.prepare_us.map_or(0, |it| it.as_micros() as u32);
        match (args.hint, &args.hint_tenant, &args.hint_api) {
            (None, ..) => Ok(Self::None),
            (Some(Hint::Manual), ..) => Ok(Self::Manual {
                hint: function().context("gpumux_hint is not there: run it by `gpumux run`")?,
                device: args.common.device as c_int,
            }),
            (Some(Hint::Outside), Some(tenant), Some(path)) => {
                let api = UnixStream::connect(path)
                    .with_context(|| format!("no API at {}", path.display()))?;
                api.set_read_timeout(Some(PATIENCE))?;
                let body = match expected_us {
                    0 => "{}".to_owned(),
                    us => format!("{{\"expected_us\":{us}}}"),
                };
                let request = format!(
                    "POST /v1/tenants/{tenant}/hint HTTP/1.1\r\nhost: gpumux\r\n\
                     content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                Ok(Self::Outside { api, request })
            }
            (Some(Hint::Outside), ..) => bail!("--hint outside needs --hint-tenant and --hint-api"),
        }
    }

    /// Says it. What the daemon answers is read by [`Self::answered`].
    pub(crate) fn say(&mut self, expected: Duration) -> anyhow::Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Manual { hint, device } => {
                // SAFETY: the library's documented signature. Any answer is fine: it is a hint.
                unsafe { hint(*device, expected.as_micros() as c_uint) };
                Ok(())
            }
            Self::Outside { api, request } => Ok(api.write_all(request.as_bytes())?),
        }
    }

    /// Reads the daemon's answer to a hint from outside.
    pub(crate) fn answered(&mut self) -> anyhow::Result<()> {
        let Self::Outside { api, .. } = self else {
            return Ok(());
        };
        // One read for each small answer; what is left is read with the next.
        let mut answer = [0; 4096];
        let count = api.read(&mut answer).context("no answer to a hint")?;
        let answer = String::from_utf8_lossy(&answer[..count]).into_owned();
        if !answer.starts_with("HTTP/1.1 202") {
            bail!("the hint was refused: {answer}");
        }
        Ok(())
    }
}

/// The function of the preloaded library.
fn function() -> Option<Function> {
    // SAFETY: a C string; searches what is loaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"gpumux_hint".as_ptr()) };
    // SAFETY: null is `None`; else it is the library's function with its documented signature.
    unsafe { std::mem::transmute(found) }
}
