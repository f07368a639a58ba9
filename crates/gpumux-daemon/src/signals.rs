//! Signals that this process ignores since its start, as under `nohup`: they stay ignored.

/// Whether a signal is one of them (proc(5), `SigIgn`).
pub fn is_ignored(number: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let bits = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_some_and(|bits| bits >> (number - 1) & 1 != 0)
}
