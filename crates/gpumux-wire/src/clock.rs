//! The machine's monotonic clock.

/// Nanoseconds by the machine's monotonic clock.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Milliseconds by the machine's monotonic clock, as far as they fit: a comparison of two must mind that they begin anew.
pub(crate) fn now_ms() -> u32 {
    (now_ns() / 1_000_000) as u32
}
