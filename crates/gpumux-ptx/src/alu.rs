//! Arithmetic: values are raw bits in 64, zero above their size.

use half::{bf16, f16};

use crate::code::{Binary, Compare, Kind, Round, Ternary, Type, Unary};

/// The lowest `size` bytes.
pub(crate) fn cut(value: u64, size: u32) -> u64 {
    if size >= 8 {
        value
    } else {
        value & ((1 << (8 * size)) - 1)
    }
}

/// A whole number of this type with its sign.
pub(crate) fn wide(value: u64, kind: Type) -> i128 {
    match kind {
        Type::S(size) => {
            let shift = 64 - 8 * u32::from(size);
            i128::from((value << shift) as i64 >> shift)
        }
        _ => i128::from(cut(value, kind.size())),
    }
}

/// A product with all its bits, negative ones as two's complement.
fn product(a: u64, b: u64, kind: Type) -> u128 {
    (wide(a, kind) as u128).wrapping_mul(wide(b, kind) as u128)
}

/// The product of the lowest 24 bits, 48 bits of it.
fn product24(a: u64, b: u64, kind: Type) -> i128 {
    let low = |value: u64| match kind {
        Type::S(_) => i128::from((value << 40) as i64 >> 40),
        _ => i128::from(value & 0xff_ffff),
    };
    low(a) * low(b)
}

fn narrow(value: i128, kind: Kind) -> u64 {
    let value = if kind.saturate {
        let (least, most) = range(kind.kind);
        value.clamp(least, most)
    } else {
        value
    };
    cut(value as u64, kind.kind.size())
}

fn range(kind: Type) -> (i128, i128) {
    let bits = 8 * kind.size();
    match kind {
        Type::S(_) => (-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        _ => (0, (1 << bits) - 1),
    }
}

/// A float of any type, exactly.
fn float(value: u64, kind: Type) -> f64 {
    match kind {
        Type::F64 => f64::from_bits(value),
        Type::F32 => f32::from_bits(value as u32).into(),
        Type::F16 => f16::from_bits(value as u16).into(),
        Type::Bf16 => bf16::from_bits(value as u16).into(),
        _ => 0.0,
    }
}

/// A denormal single as zero.
pub(crate) fn flushed(value: u64, kind: Type) -> u64 {
    match kind {
        Type::F32 if f32::from_bits(value as u32).is_subnormal() => value & 0x8000_0000,
        _ => value,
    }
}

/// Rounds to a float type.
fn bits(value: f64, kind: Kind) -> u64 {
    rounded(value, 0.0, kind)
}

/// Rounds what is `value` and a `rest` of that sign, smaller than half of the last place of a double.
fn rounded(value: f64, rest: f64, kind: Kind) -> u64 {
    let (value, rest) = match kind.saturate {
        // Not a number becomes 0.
        true if value > 0.0 && value < 1.0 => (value, rest),
        true => (if value >= 1.0 { 1.0 } else { 0.0 }, 0.0),
        false => (value, rest),
    };
    match kind.kind {
        Type::F64 => {
            let off = Off::new(0.0, rest);
            match off.step(kind.round, value > 0.0) {
                Some(true) if value != f64::INFINITY => value.next_up().to_bits(),
                Some(false) if value != f64::NEG_INFINITY => value.next_down().to_bits(),
                _ => value.to_bits(),
            }
        }
        Type::F32 => {
            let near = value as f32;
            let off = Off::new(value - f64::from(near), rest);
            let result = match off.step(kind.round, value > 0.0) {
                Some(true) => near.next_up(),
                Some(false) => near.next_down(),
                None => near,
            };
            let bits = u64::from(result.to_bits());
            if kind.flush {
                flushed(bits, Type::F32)
            } else {
                bits
            }
        }
        Type::F16 => {
            let near = f16::from_f64(value);
            let off = Off::new(value - f64::from(near), rest);
            half_step(near.to_bits(), off.step(kind.round, value > 0.0))
        }
        Type::Bf16 => {
            let near = bf16::from_f64(value);
            let off = Off::new(value - f64::from(near), rest);
            half_step(near.to_bits(), off.step(kind.round, value > 0.0))
        }
        _ => 0,
    }
}

/// Where the exact value lies as seen from the nearest one that there is.
struct Off {
    above: bool,
    below: bool,
}

impl Off {
    fn new(difference: f64, rest: f64) -> Self {
        let by = if difference == 0.0 { rest } else { difference };
        Self {
            above: by > 0.0,
            below: by < 0.0,
        }
    }

    /// Whether the neighbour above (true) or below is asked for.
    fn step(&self, round: Round, positive: bool) -> Option<bool> {
        match round {
            Round::Down if self.below => Some(false),
            Round::Up if self.above => Some(true),
            Round::Zero if positive && self.below => Some(false),
            Round::Zero if !positive && self.above => Some(true),
            _ => None,
        }
    }
}

/// A half, or its neighbour above (true) or below.
fn half_step(bits: u16, step: Option<bool>) -> u64 {
    let negative = bits & 0x8000 != 0;
    u64::from(match step {
        None => bits,
        Some(up) if bits & 0x7fff == 0 => 1 | u16::from(!up) << 15,
        Some(up) if up != negative => bits + 1,
        Some(_) => bits - 1,
    })
}

/// A sum and what rounding took from it.
fn two_sum(x: f64, y: f64) -> (f64, f64) {
    let sum = x + y;
    let part = sum - x;
    (sum, (x - (sum - part)) + (y - part))
}

/// `x * y + z`, and the sign of what rounding took from it.
fn fused(x: f64, y: f64, z: f64) -> (f64, f64) {
    let value = x.mul_add(y, z);
    let product = x * y;
    let low = x.mul_add(y, -product);
    let (sum, first) = two_sum(z, low);
    let (high, second) = two_sum(product, sum);
    let rest = ((high - value) + second) + first;
    // What overflows on the way has none.
    (value, if rest.is_finite() { rest } else { 0.0 })
}

fn whole(value: f64, round: Round) -> f64 {
    match round {
        Round::WholeNearest | Round::Nearest => value.round_ties_even(),
        Round::WholeZero | Round::Zero => value.trunc(),
        Round::WholeDown | Round::Down => value.floor(),
        Round::WholeUp | Round::Up => value.ceil(),
    }
}

/// Halves of a pair one by one.
fn halves(kind: Kind, values: &[u64], one: impl Fn(Kind, &[u64]) -> u64) -> u64 {
    let half = Kind {
        kind: if kind.kind == Type::F16x2 {
            Type::F16
        } else {
            Type::Bf16
        },
        ..kind
    };
    let part = |shift: u32| {
        let parts: Vec<u64> = values.iter().map(|it| it >> shift & 0xffff).collect();
        one(half, &parts) << shift
    };
    part(0) | part(16)
}

fn is_pair(kind: Kind) -> bool {
    matches!(kind.kind, Type::F16x2 | Type::Bf16x2)
}

pub(crate) fn unary(op: Unary, kind: Kind, a: u64) -> u64 {
    if is_pair(kind) {
        return halves(kind, &[a], |half, it| unary(op, half, it[0]));
    }
    let size = kind.kind.size();
    let count = 8 * size;
    if kind.kind.is_float() {
        let a = if kind.flush { flushed(a, kind.kind) } else { a };
        let x = float(a, kind.kind);
        let truth = |it: bool| u64::from(it);
        // Single precision where the hardware works in it.
        let value = match op {
            // Signs change also where nothing is a number.
            Unary::Abs => return cut(a & !(1 << (count - 1)), size),
            Unary::Neg => return a ^ 1 << (count - 1),
            Unary::Rcp => {
                let value = 1.0 / x;
                return rounded(value, (-value).mul_add(x, 1.0) * x.signum(), kind);
            }
            Unary::Sqrt => {
                let value = x.sqrt();
                return rounded(value, (-value).mul_add(value, x), kind);
            }
            Unary::Rsqrt => 1.0 / x.sqrt(),
            Unary::Sin => x.sin(),
            Unary::Cos => x.cos(),
            Unary::Lg2 => x.log2(),
            Unary::Ex2 => x.exp2(),
            Unary::Tanh => x.tanh(),
            Unary::Finite => return truth(x.is_finite()),
            Unary::Infinite => return truth(x.is_infinite()),
            Unary::Number => return truth(!x.is_nan()),
            Unary::NotANumber => return truth(x.is_nan()),
            Unary::Subnormal | Unary::Normal => {
                let subnormal = match kind.kind {
                    Type::F32 => f32::from_bits(a as u32).is_subnormal(),
                    _ => x.is_subnormal(),
                };
                let normal = !subnormal && x.is_finite() && x != 0.0;
                return truth(if op == Unary::Normal {
                    normal
                } else {
                    subnormal
                });
            }
            _ => return 0,
        };
        return bits(value, kind);
    }
    let plain = cut(a, size);
    match op {
        Unary::Abs => narrow(wide(a, kind.kind).abs(), kind),
        Unary::Neg => narrow(-wide(a, kind.kind), kind),
        Unary::Not if kind.kind == Type::Pred => a ^ 1,
        Unary::Not => cut(!a, size),
        Unary::Cnot => u64::from(plain == 0),
        Unary::Popc => plain.count_ones().into(),
        Unary::Clz => u64::from(plain.leading_zeros() + count - 64),
        Unary::Brev => plain.reverse_bits() >> (64 - count),
        Unary::Bfind | Unary::BfindShift => {
            let negative = wide(a, kind.kind) < 0;
            let sought = if negative { cut(!a, size) } else { plain };
            match 63_u32.checked_sub(sought.leading_zeros()) {
                None => 0xffff_ffff,
                Some(at) if op == Unary::Bfind => at.into(),
                Some(at) => u64::from(count - 1 - at),
            }
        }
        _ => 0,
    }
}

pub(crate) fn binary(op: Binary, kind: Kind, a: u64, b: u64) -> u64 {
    if is_pair(kind) {
        return halves(kind, &[a, b], |half, it| binary(op, half, it[0], it[1]));
    }
    let size = kind.kind.size();
    if kind.kind.is_float() {
        return float_binary(op, kind, a, b);
    }
    match op {
        Binary::And => return a & b,
        Binary::Or => return a | b,
        Binary::Xor => return a ^ b,
        _ => {}
    }
    // The most frequent ones by the shortest way.
    if !kind.saturate {
        match op {
            Binary::Add => return cut(a.wrapping_add(b), size),
            Binary::Sub => return cut(a.wrapping_sub(b), size),
            Binary::Mul => return cut(a.wrapping_mul(b), size),
            _ => {}
        }
    }
    let (x, y) = (wide(a, kind.kind), wide(b, kind.kind));
    match op {
        Binary::Add => narrow(x + y, kind),
        Binary::Sub => narrow(x - y, kind),
        Binary::MulHigh => cut((product(a, b, kind.kind) >> (8 * size)) as u64, size),
        Binary::MulWide => cut(product(a, b, kind.kind) as u64, 2 * size),
        Binary::Mul => cut(a.wrapping_mul(b), size),
        Binary::Mul24 => cut(product24(a, b, kind.kind) as u64, size),
        Binary::Mul24High => cut((product24(a, b, kind.kind) >> 16) as u64, size),
        // What the hardware gives: all ones.
        Binary::Div if y == 0 => cut(u64::MAX, size),
        Binary::Div => cut((x / y) as u64, size),
        Binary::Rem if y == 0 => cut(a, size),
        Binary::Rem => cut((x % y) as u64, size),
        Binary::Min | Binary::MinNan => cut(x.min(y) as u64, size),
        Binary::Max | Binary::MaxNan => cut(x.max(y) as u64, size),
        Binary::Shl => {
            let by = b & 0xffff_ffff;
            if by >= u64::from(8 * size) {
                0
            } else {
                cut(a << by, size)
            }
        }
        Binary::Shr => {
            let by = (b & 0xffff_ffff).min(127) as u32;
            cut((x >> by) as u64, size)
        }
        _ => 0,
    }
}

fn float_binary(op: Binary, kind: Kind, a: u64, b: u64) -> u64 {
    let plain = kind.round == Round::Nearest && !kind.saturate && !kind.flush;
    if kind.kind == Type::F32 && plain {
        let (x, y) = (f32::from_bits(a as u32), f32::from_bits(b as u32));
        let value = match op {
            Binary::Add => Some(x + y),
            Binary::Sub => Some(x - y),
            Binary::Mul => Some(x * y),
            Binary::Div => Some(x / y),
            _ => None,
        };
        if let Some(value) = value {
            return value.to_bits().into();
        }
    }
    let (a, b) = match kind.flush {
        true => (flushed(a, kind.kind), flushed(b, kind.kind)),
        false => (a, b),
    };
    let (x, y) = (float(a, kind.kind), float(b, kind.kind));
    let value = match op {
        Binary::Add | Binary::Sub => {
            let y = if op == Binary::Sub { -y } else { y };
            let (value, rest) = two_sum(x, y);
            // What cancels is -0 if it is rounded down.
            if value == 0.0 && x != 0.0 && kind.round == Round::Down {
                return bits(-0.0, kind);
            }
            return rounded(value, rest, kind);
        }
        Binary::Mul => {
            let value = x * y;
            return rounded(value, x.mul_add(y, -value), kind);
        }
        Binary::Div => {
            let value = x / y;
            return rounded(value, (-value).mul_add(y, x) * y.signum(), kind);
        }
        Binary::Min => x.min(y),
        Binary::Max => x.max(y),
        Binary::MinNan | Binary::MaxNan if x.is_nan() || y.is_nan() => f64::NAN,
        Binary::MinNan => x.min(y),
        Binary::MaxNan => x.max(y),
        // The sign of the first, the rest of the second.
        Binary::Copysign => y.copysign(x),
        _ => 0.0,
    };
    bits(value, kind)
}

pub(crate) fn ternary(op: Ternary, kind: Kind, a: u64, b: u64, c: u64) -> u64 {
    if is_pair(kind) {
        return halves(kind, &[a, b, c], |half, it| {
            ternary(op, half, it[0], it[1], it[2])
        });
    }
    let size = kind.kind.size();
    match op {
        Ternary::Fma | Ternary::Mad if kind.kind.is_float() => fma(kind, a, b, c),
        Ternary::Mad | Ternary::Fma if !kind.saturate => {
            cut(a.wrapping_mul(b).wrapping_add(c), size)
        }
        Ternary::Mad | Ternary::Fma => {
            let product = cut(a.wrapping_mul(b), size);
            narrow(wide(product, kind.kind) + wide(c, kind.kind), kind)
        }
        Ternary::MadHigh => {
            let high = cut((product(a, b, kind.kind) >> (8 * size)) as u64, size);
            narrow(wide(high, kind.kind) + wide(c, kind.kind), kind)
        }
        Ternary::Mad24 => cut((product24(a, b, kind.kind) as u64).wrapping_add(c), size),
        Ternary::Mad24High => cut(
            ((product24(a, b, kind.kind) >> 16) as u64).wrapping_add(c),
            size,
        ),
        Ternary::MadWide => {
            let product = product(a, b, kind.kind) as u64;
            cut(product.wrapping_add(c), 2 * size)
        }
        Ternary::Sad => {
            let distance = wide(a, kind.kind) - wide(b, kind.kind);
            cut((distance.unsigned_abs() as u64).wrapping_add(c), size)
        }
        Ternary::Bfe => {
            let (start, length) = ((b & 0xff) as u32, (c & 0xff) as u32);
            let x = wide(a, kind.kind);
            let last = 8 * size - 1;
            let sign = x >> (start + length).saturating_sub(1).min(last) & 1;
            let field = if length == 0 { 0 } else { x >> start.min(127) };
            let keep = if length >= 127 {
                i128::MAX
            } else {
                (1_i128 << length) - 1
            };
            let signed = matches!(kind.kind, Type::S(_)) && sign == 1 && length > 0;
            cut(
                if signed { field | !keep } else { field & keep } as u64,
                size,
            )
        }
        Ternary::Prmt => permute(a as u32, b as u32, c as u32).into(),
        Ternary::ShfLeft | Ternary::ShfRight | Ternary::ShfLeftClamp | Ternary::ShfRightClamp => {
            let both = b << 32 | cut(a, 4);
            let by = match op {
                Ternary::ShfLeft | Ternary::ShfRight => c & 31,
                _ => (c & 0xffff_ffff).min(32),
            };
            match op {
                Ternary::ShfLeft | Ternary::ShfLeftClamp => {
                    cut((u128::from(both) << by >> 32) as u64, 4)
                }
                _ => cut(both >> by, 4),
            }
        }
        Ternary::Dp4a(first_signed, second_signed) => {
            let part = |value: u64, i: u32, signed: bool| {
                wide(
                    value >> (8 * i),
                    if signed { Type::S(1) } else { Type::U(1) },
                )
            };
            let sum: i128 = (0..4)
                .map(|i| part(a, i, first_signed) * part(b, i, second_signed))
                .sum();
            cut((sum as u64).wrapping_add(c), 4)
        }
        Ternary::Slct(by_float) => {
            let first = if by_float {
                f32::from_bits(c as u32) >= 0.0
            } else {
                wide(c, Type::S(4)) >= 0
            };
            if first { a } else { b }
        }
    }
}

fn fma(kind: Kind, a: u64, b: u64, c: u64) -> u64 {
    let plain = kind.round == Round::Nearest && !kind.saturate && !kind.flush;
    if kind.kind == Type::F32 && plain {
        let of = |value: u64| f32::from_bits(value as u32);
        return of(a).mul_add(of(b), of(c)).to_bits().into();
    }
    let of = |value| {
        let value = if kind.flush {
            flushed(value, kind.kind)
        } else {
            value
        };
        float(value, kind.kind)
    };
    if kind.kind == Type::F32 && kind.round == Round::Nearest {
        // Once, not by way of a double.
        let value = (of(a) as f32).mul_add(of(b) as f32, of(c) as f32);
        return bits(value.into(), kind);
    }
    let (value, rest) = fused(of(a), of(b), of(c));
    rounded(value, rest, kind)
}

fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let all = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |value, i| {
        let which = selector >> (4 * i) & 0xf;
        let byte = (all >> (8 * (which & 7))) as u8;
        // The highest bit of the selector asks for the byte's sign all over.
        let byte = if which & 8 == 0 {
            byte
        } else {
            ((byte as i8) >> 7) as u8
        };
        value | u32::from(byte) << (8 * i)
    })
}

/// Puts the lowest `length` bits of `a` into `b` from bit `start`.
pub(crate) fn insert(kind: Type, a: u64, b: u64, start: u64, length: u64) -> u64 {
    let (start, length) = (start & 0xff, length & 0xff);
    if start >= 64 || length == 0 {
        return cut(b, kind.size());
    }
    let field = if length >= 64 {
        u64::MAX
    } else {
        (1 << length) - 1
    };
    cut(b & !(field << start) | (a & field) << start, kind.size())
}

/// Three inputs by a truth table.
pub(crate) fn lop3(a: u64, b: u64, c: u64, table: u8) -> u64 {
    let terms = (0..8).filter(|term| table >> term & 1 == 1).map(|term| {
        let pick = |value: u64, bit: u32| if term >> bit & 1 == 1 { value } else { !value };
        pick(a, 2) & pick(b, 1) & pick(c, 0)
    });
    cut(terms.fold(0, |all, term| all | term), 4)
}

/// A sum or difference with carry: value and carry.
pub(crate) fn carry(subtract: bool, kind: Type, a: u64, b: u64, carry: bool) -> (u64, bool) {
    let bits = 8 * kind.size();
    let (x, y) = (
        u128::from(cut(a, kind.size())),
        u128::from(cut(b, kind.size())),
    );
    let all = if subtract {
        x.wrapping_sub(y).wrapping_sub(carry.into())
    } else {
        x + y + u128::from(carry)
    };
    (cut(all as u64, kind.size()), all >> bits & 1 == 1)
}

pub(crate) fn compare(how: Compare, kind: Type, a: u64, b: u64) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let order = if kind.is_float() {
        float(a, kind).partial_cmp(&float(b, kind))
    } else {
        Some(wide(a, kind).cmp(&wide(b, kind)))
    };
    match how {
        Compare::Eq => order == Some(Equal),
        Compare::Ne => matches!(order, Some(Less | Greater)),
        Compare::Lt => order == Some(Less),
        Compare::Le => matches!(order, Some(Less | Equal)),
        Compare::Gt => order == Some(Greater),
        Compare::Ge => matches!(order, Some(Greater | Equal)),
        Compare::Equ => order != Some(Less) && order != Some(Greater),
        Compare::Neu => order != Some(Equal),
        Compare::Ltu => matches!(order, None | Some(Less)),
        Compare::Leu => order != Some(Greater),
        Compare::Gtu => matches!(order, None | Some(Greater)),
        Compare::Geu => order != Some(Less),
        Compare::Num => order.is_some(),
        Compare::Nan => order.is_none(),
    }
}

/// `cvt`.
pub(crate) fn convert(kind: Kind, from: Type, a: u64) -> u64 {
    match (from.is_float(), kind.kind.is_float()) {
        (false, false) => narrow(wide(a, from), kind),
        (false, true) => {
            let value = wide(a, from);
            match (kind.kind, kind.round) {
                // Not through doubles, which would round twice.
                (Type::F32, Round::Nearest) => u64::from((value as f32).to_bits()),
                _ => {
                    let near = value as f64;
                    rounded(near, (value - near as i128) as f64, kind)
                }
            }
        }
        (true, false) => {
            let a = if kind.flush { flushed(a, from) } else { a };
            let value = float(a, from);
            let (least, most) = range(kind.kind);
            // Saturates in Rust as on the device; not a number is 0, but the highest bit for 64 bits.
            let value = whole(value, kind.round);
            if value.is_nan() {
                return if kind.kind.size() == 8 { 1 << 63 } else { 0 };
            }
            cut((value as i128).clamp(least, most) as u64, kind.kind.size())
        }
        (true, true) => {
            let a = if kind.flush { flushed(a, from) } else { a };
            let value = float(a, from);
            let value = match kind.round {
                Round::WholeNearest | Round::WholeZero | Round::WholeDown | Round::WholeUp => {
                    whole(value, kind.round)
                }
                _ => value,
            };
            bits(value, kind)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn kind(kind: Type) -> Kind {
        Kind {
            kind,
            round: Round::Nearest,
            saturate: false,
            flush: false,
        }
    }

    fn single(value: f32) -> u64 {
        value.to_bits().into()
    }

    #[test]
    fn whole_numbers_wrap_and_have_signs() {
        let (u32_, s32, s16) = (kind(Type::U(4)), kind(Type::S(4)), kind(Type::S(2)));
        assert_eq!(binary(Binary::Add, u32_, 0xffff_ffff, 2), 1);
        assert_eq!(binary(Binary::Shr, s32, 0xffff_fff0, 2), 0xffff_fffc);
        assert_eq!(binary(Binary::Shr, u32_, 0xffff_fff0, 40), 0);
        assert_eq!(binary(Binary::Shl, u32_, 1, 32), 0);
        assert_eq!(binary(Binary::Div, s32, 0xffff_fff9, 2), 0xffff_fffd);
        assert_eq!(binary(Binary::Rem, s32, 0xffff_fff9, 2), 0xffff_ffff);
        assert_eq!(binary(Binary::MulWide, s16, 0xffff, 3), 0xffff_fffd);
        assert_eq!(binary(Binary::MulHigh, u32_, 0x8000_0000, 4), 2);
        assert_eq!(unary(Unary::Bfind, u32_, 0x100), 8);
        assert_eq!(unary(Unary::Clz, u32_, 0), 32);
        assert_eq!(unary(Unary::Brev, u32_, 1), 0x8000_0000);
        let saturated = Kind {
            saturate: true,
            ..s32
        };
        assert_eq!(binary(Binary::Add, saturated, 0x7fff_ffff, 1), 0x7fff_ffff);
        assert_eq!(ternary(Ternary::Bfe, s32, 0xf0, 4, 4), 0xffff_ffff);
        assert_eq!(ternary(Ternary::Bfe, u32_, 0xf0, 4, 4), 0xf);
        assert_eq!(insert(Type::U(4), 0xff, 0x1111_1111, 8, 8), 0x1111_ff11);
        assert_eq!(permute(0x0302_0100, 0x0706_0504, 0x7531), 0x0705_0301);
        assert_eq!(ternary(Ternary::ShfLeft, u32_, 0x8000_0000, 1, 1), 3);
    }

    #[test]
    fn floats_round_as_asked() {
        let f32_ = kind(Type::F32);
        let to = |round| Kind {
            round,
            ..kind(Type::S(4))
        };
        assert_eq!(
            convert(to(Round::WholeZero), Type::F32, single(-1.7)),
            0xffff_ffff
        );
        assert_eq!(convert(to(Round::WholeNearest), Type::F32, single(2.5)), 2);
        assert_eq!(convert(to(Round::WholeUp), Type::F32, single(2.1)), 3);
        assert_eq!(
            convert(to(Round::WholeZero), Type::F32, single(f32::NAN)),
            0
        );
        assert_eq!(
            convert(to(Round::WholeZero), Type::F32, single(1e20)),
            0x7fff_ffff
        );
        let down = Kind {
            round: Round::Down,
            ..f32_
        };
        assert_eq!(
            binary(Binary::Add, down, single(1.0), single(1e-10)),
            single(1.0)
        );
        let up = Kind {
            round: Round::Up,
            ..f32_
        };
        assert!(binary(Binary::Add, up, single(1.0), single(1e-10)) > single(1.0));
        assert_eq!(unary(Unary::Neg, f32_, single(0.0)), single(-0.0));
        let pair = kind(Type::F16x2);
        let ones = 0x3c00_3c00;
        assert_eq!(binary(Binary::Add, pair, ones, ones), 0x4000_4000);
        assert!(compare(
            Compare::Neu,
            Type::F32,
            single(f32::NAN),
            single(1.0)
        ));
        assert!(!compare(
            Compare::Ne,
            Type::F32,
            single(f32::NAN),
            single(1.0)
        ));
    }

    proptest::proptest! {
        #[test]
        fn truth_tables(a: u32, b: u32, c: u32) {
            let of = |table| lop3(a.into(), b.into(), c.into(), table) as u32;
            proptest::prop_assert_eq!(of(0x80), a & b & c);
            proptest::prop_assert_eq!(of(0x96), a ^ b ^ c);
            proptest::prop_assert_eq!(of(0xfe), a | b | c);
        }

        #[test]
        fn carries_make_wide_sums(a: u64, b: u64) {
            let (low, flag) = carry(false, Type::U(4), a, b, false);
            let (high, _) = carry(false, Type::U(4), a >> 32, b >> 32, flag);
            proptest::prop_assert_eq!(high << 32 | low, a.wrapping_add(b));
            let (low, flag) = carry(true, Type::U(4), a, b, false);
            let (high, _) = carry(true, Type::U(4), a >> 32, b >> 32, flag);
            proptest::prop_assert_eq!(high << 32 | low, a.wrapping_sub(b));
        }

        #[test]
        fn nothing_panics(a: u64, b: u64, c: u64, shift in 0..300_u64) {
            let kinds = [Type::Pred, Type::U(1), Type::S(1), Type::U(2), Type::U(4), Type::S(4), Type::U(8), Type::S(8), Type::F16, Type::F16x2, Type::Bf16, Type::F32, Type::F64];
            for of in kinds {
                for saturate in [false, true] {
                    let of = Kind { saturate, ..kind(of) };
                    for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::MulHigh, Binary::MulWide, Binary::Div, Binary::Rem, Binary::Min, Binary::Shl, Binary::Shr] {
                        binary(op, of, a, b);
                        binary(op, of, a, shift);
                    }
                    for op in [Ternary::Mad, Ternary::MadHigh, Ternary::MadWide, Ternary::Fma, Ternary::Sad, Ternary::Bfe, Ternary::ShfLeftClamp, Ternary::ShfRightClamp] {
                        ternary(op, of, a, b, c);
                        ternary(op, of, a, shift, c & 0xff);
                    }
                    for op in [Unary::Abs, Unary::Neg, Unary::Popc, Unary::Clz, Unary::Brev, Unary::Bfind, Unary::BfindShift, Unary::Sqrt] {
                        unary(op, of, a);
                    }
                    for from in kinds {
                        convert(of, from, a);
                    }
                }
                insert(of, a, b, shift, c);
            }
        }
    }
}
