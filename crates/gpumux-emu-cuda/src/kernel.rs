//! The kernels that the emulated device knows, by name: how long they take and what they do.
//!
//! They are those of the workloads (`gpumux-workload`, file `kernels.rs`, which has the table of their
//! arguments), and the one by which `libgpumux.so` holds the device (its `hold.ptx`). Threads count as if every SM were filled evenly: a kernel's width in SMs is the part
//! of all thread slots that it occupies.

use gpumux_emu::protocol::{DeviceInfo, Work};

use crate::{
    access::{add_u32, add_u64, fill_u32, sum_u32, sweep_u32},
    error::{CuError, Result},
    hold,
};

/// Threads that an SM holds, and blocks, on Hopper.
const SM_THREADS: u64 = 2048;
const SM_BLOCKS: u64 = 32;
/// Threads per SM that it takes to use all of the memory's bandwidth, where all SMs have as many.
const SATURATING: u64 = SM_THREADS / 4;

/// A kernel with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    Spin {
        ns: u64,
    },
    Work {
        iterations: u32,
    },
    Fill {
        at: u64,
        value: u32,
        n: u64,
    },
    Add {
        at: u64,
        value: u32,
        n: u64,
    },
    Rounds {
        at: u64,
        n: u64,
        rounds: u32,
    },
    Sum {
        at: u64,
        n: u64,
        out: u64,
    },
    Sweep {
        at: u64,
        value: u32,
        n: u64,
        out: u64,
    },
    Read {
        n: u64,
        times: u32,
    },
    Trap,
    /// Words at `page`: released and finished (32 bits), began and held (64).
    Hold {
        page: u64,
        ticket: u32,
        last: bool,
        timeout: u64,
    },
}

/// Grid and block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) blocks: u64,
    pub(crate) threads: u64,
}

impl Shape {
    /// Checks what the hardware can do.
    pub(crate) fn new(grid: [u32; 3], block: [u32; 3]) -> Result<Self> {
        let limits = [(2_147_483_647, 1024), (65_535, 1024), (65_535, 64)];
        for ((most_blocks, most_threads), (blocks, threads)) in
            limits.into_iter().zip(grid.into_iter().zip(block))
        {
            if blocks == 0 || threads == 0 || blocks > most_blocks || threads > most_threads {
                return Err(CuError::INVALID_VALUE);
            }
        }
        let product = |values: [u32; 3]| {
            values
                .into_iter()
                .fold(1_u64, |product, value| product.saturating_mul(value.into()))
        };
        let (blocks, threads) = (product(grid), product(block));
        if threads > 1024 {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(Self { blocks, threads })
    }

    /// SMs that a kernel can use, and its blocks that one SM holds at a time.
    pub(crate) fn width(self, device: &DeviceInfo) -> (u32, u64) {
        let sms = u64::from(device.sms.max(1));
        let together = (SM_THREADS / self.threads.next_multiple_of(32)).clamp(1, SM_BLOCKS);
        let occupied = self.blocks.min(together * sms) * self.threads;
        (occupied.div_ceil(SM_THREADS).clamp(1, sms) as u32, together)
    }
}

/// The kernels that are known by name.
pub(crate) fn is_known(name: &str) -> bool {
    [
        "gpumux_spin",
        "gpumux_work",
        "gpumux_fill_u32",
        "gpumux_add_u32",
        "gpumux_rounds_u32",
        "gpumux_sum_u32",
        "gpumux_sweep_u32",
        "gpumux_read_u32",
        "gpumux_trap",
        "gpumux_hold",
    ]
    .contains(&name)
}

impl Kernel {
    /// The kernel of this name with these arguments.
    pub(crate) fn new(name: &str, arguments: &[Vec<u8>]) -> Result<Self> {
        let number = |i: usize, size: usize| -> Result<u64> {
            let bytes = arguments
                .get(i)
                .filter(|bytes| bytes.len() == size)
                .ok_or(CuError::INVALID_VALUE)?;
            let mut wide = [0; 8];
            wide[..size].copy_from_slice(bytes);
            Ok(u64::from_le_bytes(wide))
        };
        let long = |i| number(i, 8);
        let short = |i| number(i, 4).map(|value| value as u32);
        let (kernel, count) = match name {
            "gpumux_spin" => (Self::Spin { ns: long(0)? }, 1),
            "gpumux_work" => {
                long(0)?; // where it never writes
                let iterations = short(1)?;
                (Self::Work { iterations }, 2)
            }
            "gpumux_fill_u32" => {
                let (at, value, n) = (long(0)?, short(1)?, long(2)?);
                (Self::Fill { at, value, n }, 3)
            }
            "gpumux_add_u32" => {
                let (at, value, n) = (long(0)?, short(1)?, long(2)?);
                (Self::Add { at, value, n }, 3)
            }
            "gpumux_rounds_u32" => {
                let (at, n, rounds) = (long(0)?, long(1)?, short(2)?);
                (Self::Rounds { at, n, rounds }, 3)
            }
            "gpumux_sum_u32" => {
                let (at, n, out) = (long(0)?, long(1)?, long(2)?);
                (Self::Sum { at, n, out }, 3)
            }
            "gpumux_sweep_u32" => {
                let (at, value, n, out) = (long(0)?, short(1)?, long(2)?, long(3)?);
                (Self::Sweep { at, value, n, out }, 4)
            }
            "gpumux_read_u32" => {
                let (n, times) = (long(1)?, short(2)?);
                (Self::Read { n, times }, 4)
            }
            "gpumux_trap" => (Self::Trap, 0),
            "gpumux_hold" => {
                let (page, ticket, last) = (long(0)?, short(1)?, short(2)? != 0);
                let timeout = long(3)?;
                let hold = Self::Hold {
                    page,
                    ticket,
                    last,
                    timeout,
                };
                (hold, 4)
            }
            _ => return Err(CuError::NOT_FOUND),
        };
        if arguments.len() != count {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(kernel)
    }

    /// SMs and time.
    pub(crate) fn cost(&self, shape: Shape, device: &DeviceInfo) -> Work {
        let sms = u64::from(device.sms);
        let (width, together) = shape.width(device);
        // How often all SMs are filled.
        let waves = shape.blocks.div_ceil(together * sms);
        let busiest = shape.blocks.div_ceil(sms).min(together);
        let occupied = shape.blocks.min(together * sms) * shape.threads;
        let clock = u64::from(device.clock_khz).max(1);
        let moving = |bytes: u64, times: u32| {
            let part = (occupied as f64 / (sms * SATURATING) as f64).min(1.0);
            let rate = device.memory_bandwidth as f64 * part;
            let once = (bytes as f64 * 1e9 / rate) as u64;
            Work::Moving {
                sms: width,
                duration: once.saturating_mul(times.into()),
            }
        };
        let duration = match self {
            Self::Spin { ns } => ns.saturating_mul(waves),
            Self::Work { iterations } => {
                // Warps per scheduler; two dependent multiply-adds of 4 cycles, 2.75 instructions to issue.
                let warps = (busiest * shape.threads.div_ceil(32)) as f64 / 4.0;
                let cycles = f64::max(8.0, 2.75 * warps) * f64::from(*iterations);
                (cycles * waves as f64 * 1e6 / clock as f64) as u64
            }
            Self::Fill { n, .. } | Self::Sum { n, .. } => return moving(n.saturating_mul(4), 1),
            Self::Read { n, times } => return moving(n.saturating_mul(4), *times),
            Self::Add { n, .. } | Self::Sweep { n, .. } => return moving(n.saturating_mul(8), 1),
            Self::Rounds { n, rounds, .. } => return moving(n.saturating_mul(8), *rounds),
            Self::Trap => 1000,
            // The last one ends with the first: they have one deadline.
            Self::Hold { last: true, .. } => return Work::Hold { timeout: 1 },
            Self::Hold { timeout, .. } => return Work::Hold { timeout: *timeout },
        };
        Work::Kernel {
            sms: width,
            duration,
        }
    }

    /// How many steps its effect has.
    pub(crate) fn steps(&self) -> u64 {
        match self {
            Self::Spin { .. } | Self::Work { .. } | Self::Read { .. } => 0,
            Self::Trap | Self::Hold { .. } => 1,
            Self::Fill { n, .. }
            | Self::Add { n, .. }
            | Self::Sum { n, .. }
            | Self::Sweep { n, .. } => *n,
            Self::Rounds { n, rounds, .. } => n.saturating_mul((*rounds).into()),
        }
    }

    /// Does the steps from one to before another.
    pub(crate) fn run(&self, from: u64, to: u64) -> Result {
        match *self {
            Self::Spin { .. } | Self::Work { .. } | Self::Read { .. } => Ok(()),
            Self::Trap => Err(CuError::LAUNCH_FAILED),
            Self::Hold {
                page,
                ticket,
                last: true,
                timeout,
            } => hold::ended(page, ticket, timeout),
            Self::Hold { .. } => Ok(()),
            Self::Fill { at, value, .. } => fill_u32(element(at, from)?, to - from, value),
            Self::Add { at, value, .. } => add_u32(element(at, from)?, to - from, value),
            Self::Sum { at, out, .. } => add_u64(out, sum_u32(element(at, from)?, to - from)?),
            Self::Sweep { at, value, out, .. } => {
                let wrong = sweep_u32(element(at, from)?, from, to - from, value)?;
                add_u64(out, wrong)
            }
            Self::Rounds { at, n, .. } => {
                for (start, end, value) in rounds(n, from, to) {
                    add_u32(element(at, start)?, end - start, value)?;
                }
                Ok(())
            }
        }
    }
}

fn element(at: u64, index: u64) -> Result<u64> {
    index
        .checked_mul(4)
        .and_then(|offset| at.checked_add(offset))
        .ok_or(CuError::ILLEGAL_ADDRESS)
}

/// What the steps `from..to` of rounds over `n` elements add: ranges of elements and how much each gets.
fn rounds(n: u64, from: u64, to: u64) -> [(u64, u64, u32); 3] {
    let (first, begin) = (from / n, from % n);
    let (last, end) = (to / n, to % n);
    // An element gets one for every round whose visit lies between: one more before `end`, one less
    // before `begin`.
    let gets = |i: u64| (last + u64::from(i < end) - first - u64::from(i < begin)) as u32;
    let (low, high) = (begin.min(end), begin.max(end));
    [
        (0, low, gets(0)),
        (low, high, if low < high { gets(low) } else { 0 }),
        (high, n, if high < n { gets(high) } else { 0 }),
    ]
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use gpumux_emu::Profile;

    pub(crate) fn h100() -> DeviceInfo {
        Profile::default().infos().remove(0)
    }

    #[test]
    fn width_is_the_part_of_the_thread_slots() {
        let kernel = Kernel::Spin { ns: 1000 };
        for (blocks, threads, expected) in [
            (1, 1, 1),
            (132, 256, 17),
            (264, 1024, 132),
            (10_000, 1024, 132),
            (132, 2, 1),
        ] {
            let shape = Shape { blocks, threads };
            let Work::Kernel { sms, .. } = kernel.cost(shape, &h100()) else {
                panic!("a kernel");
            };
            assert_eq!(sms, expected, "{blocks} x {threads}");
        }
    }

    #[test]
    fn fixed_work_takes_time_by_iterations_and_waves() {
        let time = |blocks, threads, iterations| {
            let shape = Shape { blocks, threads };
            match (Kernel::Work { iterations }).cost(shape, &h100()) {
                Work::Kernel { duration, .. } => duration,
                _ => panic!("a kernel"),
            }
        };
        // 8 cycles an iteration at 1.755 GHz while few warps share a scheduler.
        assert_eq!(time(132, 128, 1000), 4558);
        // 16 warps on each scheduler: 44 cycles.
        assert_eq!(time(264, 1024, 1000), 25071);
        assert_eq!(time(528, 1024, 1000), 2 * 25071);
    }

    #[test]
    fn arguments_must_fit() {
        let long = 7_u64.to_le_bytes().to_vec();
        let short = 3_u32.to_le_bytes().to_vec();
        assert_eq!(
            Kernel::new(
                "gpumux_rounds_u32",
                &[long.clone(), long.clone(), short.clone()]
            ),
            Ok(Kernel::Rounds {
                at: 7,
                n: 7,
                rounds: 3
            })
        );
        for wrong in [
            vec![],
            vec![long.clone()],
            vec![short.clone(), long.clone(), short],
        ] {
            let made = Kernel::new("gpumux_rounds_u32", &wrong);
            assert_eq!(made, Err(CuError::INVALID_VALUE));
        }
        assert_eq!(
            Kernel::new("gpumux_spin", &[long.clone(), long]),
            Err(CuError::INVALID_VALUE)
        );
        assert_eq!(Kernel::new("other", &[]), Err(CuError::NOT_FOUND));
    }

    proptest::proptest! {
        /// However a kernel of rounds is interrupted, every element gets what one walk would give it.
        #[test]
        fn rounds_add_up(n in 1..20_u64, rounds_total in 0..9_u64, cuts in proptest::collection::vec(0..200_u64, 0..6)) {
            let steps = n * rounds_total;
            let mut at: Vec<u64> = cuts.into_iter().map(|cut| cut.min(steps)).collect();
            at.extend([0, steps]);
            at.sort_unstable();
            let mut elements = vec![0_u64; n as usize];
            let mut walked = 0;
            for pair in at.windows(2) {
                for (start, end, value) in rounds(n, pair[0], pair[1]) {
                    for element in &mut elements[start as usize..end as usize] {
                        *element += u64::from(value);
                    }
                }
                walked = pair[1];
                for (i, element) in elements.iter().enumerate() {
                    let visits = walked / n + u64::from((i as u64) < walked % n);
                    proptest::prop_assert_eq!(*element, visits);
                }
            }
            proptest::prop_assert_eq!(walked, steps);
        }
    }
}
