//! The word of a barrier in memory: arrivals that are awaited in this phase (bits 0 to 19) and in each (20 to 39), and the
//! phase (63).

const COUNT: u64 = (1 << 20) - 1;
const PHASE: u64 = 1 << 63;

/// A barrier for so many arrivals.
pub(super) fn new(count: u64) -> u64 {
    let count = count & COUNT;
    count << 20 | count
}

/// The barrier after `count` more have arrived, which stay away from the next phases if they `drop`.
pub(super) fn arrive(word: u64, count: u64, drop: bool) -> u64 {
    let (pending, each) = (word & COUNT, word >> 20 & COUNT);
    let each = if drop {
        each.saturating_sub(count)
    } else {
        each
    };
    let phase = word & PHASE;
    match pending.saturating_sub(count) {
        0 => (phase ^ PHASE) | each << 20 | each,
        left => phase | each << 20 | left,
    }
}

/// Arrivals that a state awaits.
pub(super) fn pending(word: u64) -> u64 {
    word & COUNT
}

/// Whether the phase of a state, or the last one of a parity, is over.
pub(super) fn is_over(word: u64, state: u64, by_parity: bool) -> bool {
    let phase = if by_parity { state << 63 } else { state };
    (word ^ phase) & PHASE != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_follow_each_other() {
        let before = new(2);
        let one = arrive(before, 1, false);
        assert!(!is_over(one, before, false) && pending(one) == 1);
        let open = arrive(one, 1, true);
        assert!(is_over(open, before, false) && is_over(open, 0, true) && !is_over(open, 1, true));
        assert_eq!(pending(open), 1, "one stays away");
        assert!(is_over(arrive(open, 1, false), open, false));
        assert!(is_over(before, 1, true), "the phase before the first");
    }
}
