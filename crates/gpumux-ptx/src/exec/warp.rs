//! Warp functions: executed when all the lanes that they name have come.

use super::{
    model::WARP,
    thread::{State, Thread},
};
use crate::{
    alu,
    code::{Function, Kind, Op, Round, Shuffle, Vote},
};

/// What a lane brought.
#[derive(Clone, Copy, Default)]
struct Lane {
    mask: u32,
    a: u64,
    b: u64,
    c: u64,
}

/// Lets lanes go on whose warp function is complete; whether there were any.
pub(super) fn settle(threads: &mut [Thread], functions: &[Function]) -> bool {
    let mut lanes = [Lane::default(); WARP];
    let (mut waiting, mut gone) = (0_u32, !0_u32);
    for (i, thread) in threads.iter().enumerate() {
        if !thread.is_done() {
            gone &= !(1 << i);
        }
        if let State::Warp { mask, a, b, c } = thread.state {
            waiting |= 1 << i;
            lanes[i] = Lane { mask, a, b, c };
        }
    }
    if waiting == 0 {
        return false;
    }
    // A lane always waits at least for itself.
    let complete: Vec<usize> = (0..threads.len())
        .filter(|i| waiting >> i & 1 == 1 && (lanes[*i].mask | 1 << i) & !(waiting | gone) == 0)
        .collect();
    for lane in &complete {
        finish(&mut threads[*lane], *lane, &lanes, waiting, functions);
    }
    !complete.is_empty()
}

fn finish(
    thread: &mut Thread,
    lane: usize,
    lanes: &[Lane; WARP],
    waiting: u32,
    functions: &[Function],
) {
    let own = lanes[lane];
    let present = own.mask & waiting;
    let among = || {
        (0..WARP)
            .filter(|i| present >> i & 1 == 1)
            .map(|i| (i, lanes[i].a))
    };
    let bit = |it: bool| u64::from(it);
    match thread.waits_at(functions) {
        Op::Shuffle { op, to, ok, .. } => {
            let (source, inside) = source(*op, lane as u32, own.b as u32, own.c as u32);
            let there = inside && present >> source & 1 == 1;
            thread.set(*ok, bit(inside));
            thread.set(
                *to,
                alu::cut(
                    if there {
                        lanes[source as usize].a
                    } else {
                        own.a
                    },
                    4,
                ),
            );
        }
        Op::Vote { op, to, other, .. } => {
            let mut second = 0;
            let first = match op {
                Vote::All => bit(among().all(|(_, a)| a == 1)),
                Vote::Any => bit(among().any(|(_, a)| a == 1)),
                Vote::Uniform => bit(among().all(|(_, a)| a == own.a)),
                Vote::Ballot => among().fold(0, |all, (i, a)| all | a << i),
                Vote::MatchAny => among().fold(0, |all, (i, a)| all | bit(a == own.a) << i),
                Vote::MatchAll => {
                    second = bit(among().all(|(_, a)| a == own.a));
                    if second == 1 { present.into() } else { 0 }
                }
                Vote::Reduce(op, kind) => {
                    let kind = Kind {
                        kind: *kind,
                        round: Round::Nearest,
                        saturate: false,
                        flush: false,
                    };
                    let values = among().map(|(_, a)| a);
                    values
                        .reduce(|all, a| alu::binary(*op, kind, all, a))
                        .unwrap_or(0)
                }
                Vote::Elect => {
                    let leader = present.trailing_zeros();
                    second = bit(leader as usize == lane);
                    leader.into()
                }
                Vote::Sync => 0,
            };
            thread.set(*other, second);
            thread.set(*to, first);
        }
        // Those that come to it together. Other functions name at least their own lane.
        Op::ActiveMask { to } => {
            let together = |i: &usize| waiting >> i & 1 == 1 && lanes[*i].mask == 0;
            let same = (0..WARP).filter(|i| together(i) && lanes[*i].a == own.a);
            thread.set(*to, same.fold(0, |all, i| all | 1 << i));
        }
        _ => {}
    }
    thread.state = State::Ready;
}

/// Which lane a shuffle reads, and whether it is inside of the lane's segment.
fn source(op: Shuffle, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (clamp, segment) = (c & 31, c >> 8 & 31);
    let (by, most) = (b & 31, (lane & segment) | (clamp & !segment));
    let least = lane & segment;
    let (at, inside) = match op {
        Shuffle::Up => (
            lane.wrapping_sub(by),
            lane.wrapping_sub(by) as i32 >= most as i32,
        ),
        Shuffle::Down => (lane + by, lane + by <= most),
        Shuffle::Butterfly => (lane ^ by, lane ^ by <= most),
        Shuffle::Index => (least | (by & !segment), (least | (by & !segment)) <= most),
    };
    if inside {
        (at & 31, true)
    } else {
        (lane, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_stay_in_their_segment() {
        // As CUDA encodes a width of 32 and of 8.
        let (whole, eight) = (0x1f, (32 - 8) << 8 | 0x1f);
        assert_eq!(source(Shuffle::Down, 30, 1, whole), (31, true));
        assert_eq!(source(Shuffle::Down, 31, 1, whole), (31, false));
        assert_eq!(source(Shuffle::Down, 7, 1, eight), (7, false));
        assert_eq!(source(Shuffle::Index, 13, 2, eight), (10, true));
        assert_eq!(source(Shuffle::Butterfly, 5, 4, eight), (1, true));
        // Up is clamped by 0.
        assert_eq!(source(Shuffle::Up, 0, 1, 0), (0, false));
        assert_eq!(source(Shuffle::Up, 9, 1, (32 - 8) << 8), (8, true));
        assert_eq!(source(Shuffle::Up, 8, 1, (32 - 8) << 8), (8, false));
    }
}
