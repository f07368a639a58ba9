//! How much elastic ranges should keep: less for a while after others lacked room, or a request was refused.

use std::{
    ffi::c_int,
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::{
    ground::guard,
    memory::{granules::Table, reports, space::with},
};

/// For how long a target stays low.
const LOW: Duration = Duration::from_secs(10);

/// Until when targets are low.
static UNTIL: Mutex<Option<Instant>> = Mutex::new(None);

/// Others lack so much of a device, or a request of the program's does: its ranges shall keep so much less than they have.
pub(crate) fn lower(device: c_int, missing: u64) {
    if !reports::is_needed() {
        return;
    }
    let (tables, held): (Vec<Table>, Vec<u64>) = with(|space| {
        let own = space.blocks.values().filter(|it| it.device == device);
        let all = own.filter_map(|it| Some((it.elastic?.table, it.held())));
        all.unzip()
    });
    let kept = kept(&held, missing);
    (tables.iter().zip(kept)).for_each(|(table, target)| table.set_target(target));
    *guard::lock(&UNTIL) = Some(Instant::now() + LOW);
}

/// They may have all that they have addresses for, once it is time.
pub(crate) fn raise() {
    if is_over(&mut guard::lock(&UNTIL), Instant::now()) {
        Table::all().for_each(|table| table.set_target(u64::MAX));
    }
}

/// Whether targets were low until now.
fn is_over(until: &mut Option<Instant>, now: Instant) -> bool {
    until.take_if(|until| *until <= now).is_some()
}

/// What each of these keeps, so that they keep so much less together: each its part of that.
fn kept(held: &[u64], missing: u64) -> Vec<u64> {
    let all: u64 = held.iter().sum();
    let left = all.saturating_sub(missing);
    let part = |of: u64| (u128::from(of) * u128::from(left) / u128::from(all.max(1))) as u64;
    let mut before = 0;
    (held.iter())
        .map(|it| {
            let first = part(before);
            before += it;
            part(before) - first
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_low_until_their_time_is_over() {
        let start = Instant::now();
        let mut until = Some(start + LOW);
        assert!(!is_over(&mut until, start));
        assert!(is_over(&mut until, start + LOW));
        assert!(!is_over(&mut until, start + LOW), "once");
    }

    #[test]
    fn ranges_share_what_others_lack() {
        let even = kept(&[60, 60, 60], 43);
        assert_eq!(even.iter().sum::<u64>(), 137);
        assert!(even.iter().all(|it| (45..=46).contains(it)), "{even:?}");
        assert_eq!(kept(&[90, 0, 30], 60), [45, 0, 15]);
        assert_eq!(kept(&[60, 20], 100), [0, 0]);
        assert_eq!(kept(&[60, 20], 0), [60, 20]);
        assert_eq!(kept(&[0, 0], 5), [0, 0]);
        assert_eq!(kept(&[1 << 46, 1 << 46], 1 << 46), [1 << 45, 1 << 45]);
    }
}
