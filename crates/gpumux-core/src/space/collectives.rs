//! How many thread blocks the collectives of a group's members may have, so that all of them fit on a device at once.
//!
//! A collective's kernels on different devices wait for each other. Two such jobs in a group can wait without end: the kernel of one has the
//! SMs of one device, that of the other those of another. That cannot happen while the thread blocks of all members fit beside each other.
//! One collective at a time is counted for each process: communicators that it uses at the same time have these blocks each.
//! NCCL reads its limit (`NCCL_MAX_CTAS`) when a process starts, so a new member gets half of what the others leave: something is left for the next.

/// Thread blocks that NCCL takes at most by itself, in a kernel.
pub const BLOCKS: u32 = 32;
/// The part of the SMs that collectives may fill. The rest is for kernels that end by themselves: those delay a collective, and do not stop it.
const FILLED: f64 = 0.75;

/// What a member's collectives take of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spinning {
    /// Percentage of the SMs to which each process is confined; 100: to none.
    pub percent: u32,
    /// Processes on each device.
    pub processes: u32,
    /// Thread blocks of each process.
    pub blocks: u32,
}

/// The limit of thread blocks for each process of a new member, confined to `percent` of the SMs, beside these.
///
/// Their sum, with one for each SM, fits into three quarters of the SMs of the most confined member, unless the result is 1.
pub fn blocks(sms: u32, others: &[Spinning], percent: u32, processes: u32) -> u32 {
    let least = (others.iter().map(|it| it.percent)).fold(percent, u32::min);
    let room = (f64::from(sms) * f64::from(least) / 100.0 * FILLED) as u32;
    let taken = others
        .iter()
        .map(|it| it.processes.saturating_mul(it.blocks))
        .fold(0, u32::saturating_add);
    let half = room.saturating_sub(taken) / 2;
    (half / processes.max(1)).clamp(1, BLOCKS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn members_of_an_h100_get_half_of_what_is_left() {
        let mut others = Vec::new();
        for expected in [32, 32, 17, 9, 4, 2, 1, 1, 1] {
            let blocks = blocks(132, &others, 100, 1);
            assert_eq!(blocks, expected, "{others:?}");
            others.push(Spinning {
                percent: 100,
                processes: 1,
                blocks,
            });
        }
        // Two ranks on each device, with half of the SMs each.
        assert_eq!(blocks(132, &[], 50, 2), 12);
    }

    proptest! {
        #[test]
        fn collectives_of_all_members_fit_at_once(
            sms in 1..200_u32,
            members in prop::collection::vec((1..=100_u32, 1..=8_u32), 1..48),
        ) {
            let mut all = Vec::<Spinning>::new();
            for (percent, processes) in members {
                let blocks = blocks(sms, &all, percent, processes);
                prop_assert!((1..=BLOCKS).contains(&blocks));
                all.push(Spinning { percent, processes, blocks });
                let least = all.iter().map(|it| it.percent).min().expect("one");
                let sum: u32 = all.iter().map(|it| it.processes * it.blocks).sum();
                let room = f64::from(sms) * f64::from(least) / 100.0 * FILLED;
                prop_assert!(blocks == 1 || f64::from(sum) <= room, "{all:?}");
            }
        }

        #[test]
        fn alike_members_fit_and_only_the_last_have_one_block(
            sms in 40..200_u32,
            percent in 20..=100_u32,
            count in 1..48_usize,
        ) {
            let mut all = Vec::<Spinning>::new();
            for _ in 0..count {
                let blocks = blocks(sms, &all, percent, 1);
                prop_assert!(all.last().is_none_or(|it| it.blocks >= blocks), "{all:?}");
                all.push(Spinning { percent, processes: 1, blocks });
            }
            let sum: u32 = all.iter().map(|it| it.blocks).sum();
            let ones = all.iter().filter(|it| it.blocks == 1).count() as f64;
            let room = f64::from(sms) * f64::from(percent) / 100.0 * FILLED;
            prop_assert!(f64::from(sum) <= room + ones, "{all:?}");
        }
    }
}
