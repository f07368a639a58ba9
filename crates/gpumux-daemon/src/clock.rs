//! The time of day, for people and for records. Nothing is decided by it where it is read.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time since 1970.
pub fn since_1970() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}
