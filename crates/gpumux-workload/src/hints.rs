//! Saying that work is coming: through the preloaded library, or through the daemon's API.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};

use crate::{Hint, Hints, Latency, Report, kernels::Gpu, pace::wait_until, stopped};

/// The library's answers: the device is being taken; or that would gain nothing now.
const HELD: c_int = 0;
const NEEDLESS: c_int = 2;

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

/// Long enough for every hold to be over.
const ROUND: Duration = Duration::from_millis(20);

pub(crate) fn probe(args: &Hints, stop: &AtomicBool) -> anyhow::Result<Report> {
    let gpu = Gpu::open(args.common.device)?;
    let mut report = args.common.report("hints", &gpu.name);
    let hint = function().context("gpumux_hint is not there: run it by `gpumux run`")?;
    let device = args.common.device as c_int;
    // SAFETY: the library's documented signature.
    let hint = || unsafe { hint(device, 0) };
    let work = || gpu.work(gpu.shape(1, 256), 1000);
    let round = || {
        work()?;
        gpu.stream.synchronize()
    };
    round()?;
    args.common.gate.ready()?;
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }
    let begin = Instant::now();
    let held = AtomicU64::new(0);
    while begin.elapsed() < args.common.seconds && !stopped(stop) {
        thread::scope(|scope| {
            for _ in 0..args.threads {
                scope.spawn(|| held.fetch_add(u64::from(hint() == HELD), Ordering::Relaxed));
            }
        });
        // No work comes: the hold ends by itself.
        wait_until(Instant::now() + ROUND, false, stop);
        let mut captured = NEEDLESS;
        let graph = gpu.stream.capture(|| {
            captured = hint();
            work()
        })?;
        ensure!(captured == NEEDLESS, "a hint during a capture: {captured}");
        gpu.stream.launch_graph(&graph)?;
        gpu.stream.synchronize()?;
        let forked = in_child(hint)?;
        ensure!(forked == NEEDLESS, "a hint after a fork: {forked}");
        // Work after a hold, and with one that it ends.
        round()?;
        held.fetch_add(u64::from(hint() == HELD), Ordering::Relaxed);
        request(round)?;
    }
    report.seconds = begin.elapsed().as_secs_f64();
    report.calls = held.into_inner();
    // The process ends while it holds the device.
    hint();
    Ok(report)
}

/// What a hint answers in a child of this process.
fn in_child(hint: impl Fn() -> c_int) -> anyhow::Result<c_int> {
    // SAFETY: the child only hints and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let answer = hint();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(answer) };
    }
    ensure!(pid > 0, "cannot fork");
    let mut status = 0;
    // SAFETY: a child of our own and a place to write.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    ensure!(
        waited == pid && libc::WIFEXITED(status),
        "the child did not end well: {status:x}"
    );
    Ok(libc::WEXITSTATUS(status))
}

/// Says to the preloaded library, if there is one, that work comes in so many seconds.
pub(crate) fn say(device: c_int, ahead: f64) {
    if let Some(hint) = function() {
        // SAFETY: the library's documented signature. Any answer is fine: it is a hint.
        unsafe { hint(device, (ahead * 1e6) as c_uint) };
    }
}

/// The function of the preloaded library.
fn function() -> Option<Function> {
    // SAFETY: null is `None`; else it is the library's function with its documented signature.
    unsafe { std::mem::transmute(symbol(c"gpumux_hint")) }
}

/// A symbol of what is loaded, or null.
pub(crate) fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: a C string; searches what is loaded.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// Marks `work` as a request, through the preloaded library.
fn request<T>(work: impl FnOnce() -> T) -> T {
    type Begin = unsafe extern "C" fn() -> u64;
    type End = unsafe extern "C" fn(u64);
    // SAFETY: as for `function`.
    let begin: Option<Begin> = unsafe { std::mem::transmute(symbol(c"gpumux_begin")) };
    // SAFETY: as for `function`.
    let end: Option<End> = unsafe { std::mem::transmute(symbol(c"gpumux_end")) };
    // SAFETY: the library's documented signature.
    let number = begin.map(|begin| unsafe { begin() });
    let result = work();
    if let (Some(number), Some(end)) = (number, end) {
        // SAFETY: as above.
        unsafe { end(number) };
    }
    result
}
