//! One thread: its registers and what instructions do to them.

use super::{
    model::{BARRIERS, CYCLES, FaultKind, LOCAL, Memory, PARAM, SHARED, Shared, WARP, WINDOW},
    phase,
};
use crate::{
    alu,
    code::{
        Address, Atomic, BarrierResult, Binary, Function, Kind, Mask, Op, Place, Round, SINK,
        Space, Special, Type, Value,
    },
    text,
};

/// Most bytes of local memory, and calls inside calls, of a thread.
const MOST_LOCAL: u32 = 1 << 20;
const MOST_CALLS: usize = 4096;
/// Longest text that a kernel prints at once or asserts.
const MOST_TEXT: usize = 4096;

/// Why a thread stops for now.
pub(super) enum Stop {
    /// It had its turn.
    Turn,
    Exit,
    Barrier {
        id: usize,
        threads: u32,
        arrive: bool,
        flag: bool,
    },
    /// It waits for lanes of its warp.
    Warp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    Done,
    Barrier {
        id: usize,
        result: BarrierResult,
        to: u32,
    },
    /// At a warp function, with its operands.
    Warp {
        mask: u32,
        a: u64,
        b: u64,
        c: u64,
    },
}

#[derive(Debug)]
pub(super) struct Thread {
    number: usize,
    index: [u32; 3],
    pub(super) state: State,
    function: usize,
    pc: usize,
    /// Where this function's registers begin, and its frame.
    base: usize,
    frame: u32,
    registers: Vec<u64>,
    local: Vec<u8>,
    calls: Vec<Call>,
    carry: bool,
    executed: u64,
}

#[derive(Debug)]
struct Call {
    function: usize,
    pc: usize,
    base: usize,
    frame: u32,
}

type Result<T> = std::result::Result<T, FaultKind>;

impl Thread {
    pub(super) fn new(number: usize, block: [u32; 3], at: usize, function: &Function) -> Self {
        let [x, y, _] = block.map(|it| it as usize);
        Self {
            number,
            index: [number % x, number / x % y, number / (x * y)].map(|it| it as u32),
            state: State::Ready,
            function: at,
            pc: 0,
            base: 0,
            frame: 0,
            registers: vec![0; function.registers as usize],
            local: vec![0; function.frame as usize],
            calls: Vec::new(),
            carry: false,
            executed: 0,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.state == State::Ready
    }

    pub(super) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Line of the instruction that it is at, or waits at.
    pub(super) fn line(&self, functions: &[Function]) -> u32 {
        let at = self.pc.saturating_sub(1);
        functions[self.function]
            .code
            .get(at)
            .map_or(0, |it| it.line)
    }

    /// A number for the instruction that it waits at.
    fn place(&self) -> u64 {
        (self.function as u64) << 32 | self.pc as u64
    }

    /// The warp function that it waits at.
    pub(super) fn waits_at<'a>(&self, functions: &'a [Function]) -> &'a Op {
        &functions[self.function].code[self.pc - 1].op
    }

    pub(super) fn set(&mut self, register: u32, value: u64) {
        self.registers[self.base + register as usize] = value;
    }

    /// Goes on behind an open barrier.
    pub(super) fn pass_barrier(&mut self, at: usize, count: u32, arrived: u32) -> bool {
        let State::Barrier { id, result, to } = self.state else {
            return false;
        };
        if id % BARRIERS != at {
            return false;
        }
        match result {
            BarrierResult::None => {}
            BarrierResult::Count => self.set(to, count.into()),
            BarrierResult::And => self.set(to, (count == arrived).into()),
            BarrierResult::Or => self.set(to, (count > 0).into()),
        }
        self.state = State::Ready;
        true
    }

    /// Executes up to `most` instructions.
    pub(super) fn run(
        &mut self,
        shared: &mut Shared<'_>,
        memory_of_block: &mut [u8],
        memory: &mut impl Memory,
        most: u64,
    ) -> std::result::Result<Stop, (u32, FaultKind)> {
        let mut left = most;
        let stop = loop {
            if left == 0 {
                break Stop::Turn;
            }
            let inst = &shared.functions[self.function].code[self.pc];
            left -= 1;
            self.pc += 1;
            if let Some((register, wanted)) = inst.guard
                && (self.registers[self.base + register as usize] & 1 == 1) != wanted
            {
                continue;
            }
            let mut machine = Machine {
                thread: self,
                shared,
                memory_of_block,
                memory,
            };
            match machine.execute(&inst.op) {
                Ok(None) => {}
                Ok(Some(stop)) => break stop,
                Err(kind) => return Err((inst.line, kind)),
            }
        };
        let done = most - left;
        self.executed += done;
        shared.stats.instructions += done;
        shared.stats.longest = shared.stats.longest.max(self.executed);
        if let Stop::Exit = stop {
            // It may have been large, and lives as long as its block.
            (self.registers, self.local) = (Vec::new(), Vec::new());
            self.state = State::Done;
        }
        Ok(stop)
    }
}

/// A thread with what it works on.
struct Machine<'a, 's, M> {
    thread: &'a mut Thread,
    shared: &'a mut Shared<'s>,
    memory_of_block: &'a mut [u8],
    memory: &'a mut M,
}

impl<M: Memory> Machine<'_, '_, M> {
    fn set(&mut self, register: u32, value: u64) {
        self.thread.set(register, value);
    }

    #[inline]
    fn value(&mut self, value: Value) -> u64 {
        match value {
            Value::Reg(register) => self.thread.registers[self.thread.base + register as usize],
            Value::Const(value) => value,
            Value::Not(register) => self.thread.registers[self.thread.base + register as usize] ^ 1,
            Value::Special(special) => self.special(special),
            Value::Frame(offset) => u64::from(self.thread.frame.wrapping_add(offset)),
            Value::Global(index, added) => {
                self.shared.launch.globals[index as usize].wrapping_add(added)
            }
            Value::Param(offset) => offset.into(),
            Value::Dynamic(added) => {
                u64::from(self.shared.declared.next_multiple_of(16)) + u64::from(added)
            }
        }
    }

    fn special(&mut self, special: Special) -> u64 {
        let launch = self.shared.launch;
        let lane = self.thread.number % WARP;
        let block = |axis: u8| launch.block[usize::from(axis)];
        let threads: u32 = launch.block.iter().product();
        let clock = || self.thread.executed.wrapping_mul(CYCLES);
        let value = match special {
            Special::Tid(axis) => self.thread.index[usize::from(axis)],
            Special::Ntid(axis) => block(axis),
            Special::Ctaid(axis) => self.shared.index[usize::from(axis)],
            Special::Nctaid(axis) => launch.grid[usize::from(axis)],
            Special::Lane => lane as u32,
            Special::Warp => (self.thread.number / WARP) as u32,
            Special::Warps => threads.div_ceil(WARP as u32),
            Special::Sm => {
                let [x, y, z] = self.shared.index;
                let number = x.wrapping_add(
                    launch.grid[0].wrapping_mul(y.wrapping_add(launch.grid[1].wrapping_mul(z))),
                );
                number % launch.sms.max(1)
            }
            Special::Sms => launch.sms,
            Special::GridId | Special::Zero => 0,
            Special::One => 1,
            Special::LaneMask(mask) => {
                let own = 1_u32 << lane;
                match mask {
                    Mask::Eq => own,
                    Mask::Lt => own - 1,
                    Mask::Le => own | (own - 1),
                    Mask::Ge => !(own - 1),
                    Mask::Gt => !(own | (own - 1)),
                }
            }
            Special::Clock => clock() as u32,
            Special::ClockHigh => (clock() >> 32) as u32,
            Special::Clock64 => return clock(),
            Special::Timer => return self.memory.now(),
            Special::TimerLow => self.memory.now() as u32,
            Special::TimerHigh => (self.memory.now() >> 32) as u32,
            Special::SharedTotal => self.memory_of_block.len() as u32,
            Special::SharedDynamic => launch.dynamic_shared,
            Special::WarpSize => WARP as u32,
            Special::WorkspaceHigh => (launch.workspace >> 32) as u32,
            Special::WorkspaceLow => launch.workspace as u32,
        };
        value.into()
    }

    // Memory

    fn at(&mut self, address: Address) -> (Space, u64) {
        let base = self.value(address.base);
        let mut at = base.wrapping_add(address.offset as u64);
        // Addresses of 32 bits wrap around in 32 bits.
        if !matches!(address.space, Space::Generic | Space::Global) && base >> 32 == 0 {
            at = alu::cut(at, 4);
        }
        match (address.space, at >> WINDOW) {
            (Space::Generic, 1) => (Space::Shared, at - SHARED),
            (Space::Generic, 2) => (Space::Local, at - LOCAL),
            (Space::Generic, 3) => (Space::Param, at - PARAM),
            (Space::Generic, _) => (Space::Global, at),
            // 32-bit addresses of shared memory are in 64-bit registers here.
            (space, _) => (space, at),
        }
    }

    /// Bytes of a space that is not global.
    fn bytes(&mut self, space: Space, at: u64, size: u32) -> Result<&mut [u8]> {
        let all: &mut [u8] = match space {
            Space::Shared => self.memory_of_block,
            Space::Local => &mut self.thread.local,
            _ => return Err(FaultKind::IllegalAddress(at)),
        };
        let start = usize::try_from(at).map_err(|_| FaultKind::IllegalAddress(at))?;
        let end = start.checked_add(size as usize);
        end.and_then(|end| all.get_mut(start..end))
            .ok_or(FaultKind::IllegalAddress(at))
    }

    fn load(&mut self, space: Space, at: u64, size: u32) -> Result<u64> {
        if !at.is_multiple_of(size.into()) {
            return Err(FaultKind::Misaligned(at));
        }
        match space {
            Space::Global | Space::Generic => {
                self.shared.stats.bytes += u64::from(size);
                self.memory
                    .load(at, size)
                    .ok_or(FaultKind::IllegalAddress(at))
            }
            Space::Param => {
                let all = &self.shared.launch.parameters;
                let part = all
                    .get(at as usize..)
                    .and_then(|rest| rest.get(..size as usize));
                part.map(number).ok_or(FaultKind::IllegalAddress(at))
            }
            space => self.bytes(space, at, size).map(|bytes| number(bytes)),
        }
    }

    fn store(&mut self, space: Space, at: u64, size: u32, value: u64) -> Result<()> {
        if !at.is_multiple_of(size.into()) {
            return Err(FaultKind::Misaligned(at));
        }
        match space {
            Space::Global | Space::Generic => {
                self.shared.stats.bytes += u64::from(size);
                let done = self.memory.store(at, size, alu::cut(value, size));
                done.then_some(()).ok_or(FaultKind::IllegalAddress(at))
            }
            space => {
                let bytes = self.bytes(space, at, size)?;
                bytes.copy_from_slice(&value.to_le_bytes()[..size as usize]);
                Ok(())
            }
        }
    }

    fn update(
        &mut self,
        space: Space,
        at: u64,
        size: u32,
        mut change: impl FnMut(u64) -> u64,
    ) -> Result<u64> {
        if !at.is_multiple_of(size.into()) {
            return Err(FaultKind::Misaligned(at));
        }
        if let Space::Global | Space::Generic = space {
            self.shared.stats.bytes += 2 * u64::from(size);
            return self
                .memory
                .update(at, size, &mut change)
                .ok_or(FaultKind::IllegalAddress(at));
        }
        let bytes = self.bytes(space, at, size)?;
        let before = number(bytes);
        bytes.copy_from_slice(&change(before).to_le_bytes()[..size as usize]);
        Ok(before)
    }

    /// Bytes of a parameter of a call.
    fn place(&mut self, place: Place) -> Result<u64> {
        let at = u64::from(self.thread.frame + place.offset);
        self.bytes(Space::Local, at, place.size.min(8))
            .map(|bytes| number(bytes))
    }

    /// Terminated text at a generic address.
    fn text(&mut self, at: u64) -> Result<Vec<u8>> {
        let mut found = Vec::new();
        while found.len() < MOST_TEXT {
            let address = Address {
                space: Space::Generic,
                base: Value::Const(at),
                offset: found.len() as i64,
            };
            let (space, at) = self.at(address);
            match self.load(space, at, 1)? {
                0 => break,
                byte => found.push(byte as u8),
            }
        }
        Ok(found)
    }

    // Instructions

    fn execute(&mut self, op: &Op) -> Result<Option<Stop>> {
        match op {
            Op::Nop => {}
            Op::Move { to, from, size } => {
                let value = self.value(*from);
                self.set(*to, alu::cut(value, *size));
            }
            Op::Unpack { to, from, size } => {
                let value = self.value(*from);
                for (i, to) in (0..).zip(to) {
                    self.set(*to, alu::cut(value >> (8 * size * i), *size));
                }
            }
            Op::Pack { to, from, size } => {
                let mut value = 0;
                for (i, from) in (0..).zip(from) {
                    value |= alu::cut(self.value(*from), *size) << (8 * size * i);
                }
                self.set(*to, value);
            }
            Op::Unary { op, kind, to, a } => {
                let a = self.value(*a);
                self.set(*to, alu::unary(*op, *kind, a));
            }
            Op::Binary { op, kind, to, a, b } => {
                let (a, b) = (self.value(*a), self.value(*b));
                self.set(*to, alu::binary(*op, *kind, a, b));
            }
            Op::Ternary {
                op,
                kind,
                to,
                a,
                b,
                c,
            } => {
                let (a, b, c) = (self.value(*a), self.value(*b), self.value(*c));
                self.set(*to, alu::ternary(*op, *kind, a, b, c));
            }
            Op::Carry {
                subtract,
                kind,
                to,
                a,
                b,
                carry_in,
                carry_out,
            } => {
                let (a, b) = (self.value(*a), self.value(*b));
                self.carry(*subtract, *kind, *to, (a, b), *carry_in, *carry_out);
            }
            Op::MadCarry {
                high,
                kind,
                to,
                a,
                b,
                c,
                carry_in,
                carry_out,
            } => {
                let (a, b, c) = (self.value(*a), self.value(*b), self.value(*c));
                let op = if *high { Binary::MulHigh } else { Binary::Mul };
                let product = alu::binary(op, plain(*kind), a, b);
                self.carry(false, *kind, *to, (product, c), *carry_in, *carry_out);
            }
            Op::Bfi {
                kind,
                to,
                a,
                b,
                c,
                d,
            } => {
                let (a, b, c, d) = (
                    self.value(*a),
                    self.value(*b),
                    self.value(*c),
                    self.value(*d),
                );
                self.set(*to, alu::insert(*kind, a, b, c, d));
            }
            Op::Lop3 { to, a, b, c, table } => {
                let (a, b, c) = (self.value(*a), self.value(*b), self.value(*c));
                self.set(*to, alu::lop3(a, b, c, *table));
            }
            Op::Convert { to, kind, from, a } => {
                let a = self.value(*a);
                self.set(*to, alu::convert(*kind, *from, a));
            }
            Op::ConvertPair { to, kind, a, b } => {
                let half = plain(if *kind == Type::F16x2 {
                    Type::F16
                } else {
                    Type::Bf16
                });
                let (a, b) = (self.value(*a), self.value(*b));
                let high = alu::convert(half, Type::F32, a);
                self.set(*to, high << 16 | alu::convert(half, Type::F32, b));
            }
            Op::Compare {
                to,
                other,
                how,
                kind,
                a,
                b,
                with,
                truth,
                flush,
            } => {
                let (mut a, mut b) = (self.value(*a), self.value(*b));
                if *flush {
                    (a, b) = (alu::flushed(a, *kind), alu::flushed(b, *kind));
                }
                let found = alu::compare(*how, *kind, a, b);
                let (mut first, mut second) = (found, !found);
                if let Some((op, with)) = with {
                    let with = self.value(*with) & 1;
                    let join =
                        |it: bool| alu::binary(*op, plain(Type::Pred), it.into(), with) & 1 == 1;
                    (first, second) = (join(first), join(second));
                }
                self.set(*other, second.into());
                self.set(*to, if first { *truth } else { 0 });
            }
            Op::Select { to, size, a, b, c } => {
                let chosen = if self.value(*c) & 1 == 1 { *a } else { *b };
                let value = self.value(chosen);
                self.set(*to, alu::cut(value, *size));
            }
            Op::Load { to, kind, from } => {
                let (space, at) = self.at(*from);
                let size = kind.size();
                aligned(at, size, to.len())?;
                for (i, to) in (0_u64..).zip(to) {
                    let value = self.load(space, at + i * u64::from(size), size)?;
                    // Registers may be wider than what is loaded.
                    let value = match kind {
                        Type::S(_) => alu::wide(value, *kind) as u64,
                        _ => value,
                    };
                    self.set(*to, value);
                }
            }
            Op::Store { from, kind, to } => {
                let (space, at) = self.at(*to);
                let size = kind.size();
                aligned(at, size, from.len())?;
                for (i, from) in (0_u64..).zip(from) {
                    let value = self.value(*from);
                    self.store(space, at + i * u64::from(size), size, value)?;
                }
            }
            Op::Atomic {
                op,
                kind,
                to,
                at,
                a,
                b,
            } => {
                let (space, at) = self.at(*at);
                let (a, b) = (self.value(*a), self.value(*b));
                let before =
                    self.update(space, at, kind.size(), |old| atomic(*op, *kind, old, a, b))?;
                self.set(*to, before);
            }
            Op::CopyAsync {
                to,
                from,
                bytes,
                used,
            } => {
                let used = self.value(*used);
                let ((to_space, to), (from_space, from)) = (self.at(*to), self.at(*from));
                for i in 0..u64::from(*bytes) {
                    let byte = if i < used {
                        self.load(from_space, from + i, 1)?
                    } else {
                        0
                    };
                    self.store(to_space, to + i, 1, byte)?;
                }
            }
            Op::ToGeneric { to, a, space, back } => {
                let base = window(*space);
                let a = self.value(*a);
                self.set(
                    *to,
                    if *back {
                        a.wrapping_sub(base)
                    } else {
                        a.wrapping_add(base)
                    },
                );
            }
            Op::IsSpace { to, a, space } => {
                let window_of = self.value(*a) >> WINDOW;
                let is = match space {
                    Space::Generic | Space::Global => window_of == 0,
                    space => window_of == window(*space) >> WINDOW,
                };
                self.set(*to, is.into());
            }
            Op::Branch { to } => self.thread.pc = *to,
            Op::BranchTable { index, to } => {
                let index = alu::cut(self.value(*index), 4) as usize;
                // Beyond the table is undefined; here it is a trap.
                self.thread.pc = *to.get(index).ok_or(FaultKind::Trap)?;
            }
            Op::Call {
                function,
                arguments,
                ..
            } => self.call(*function, arguments)?,
            Op::Print {
                format,
                arguments,
                result,
            } => {
                let (format, arguments) = (self.place(*format)?, self.place(*arguments)?);
                self.print(format, arguments)?;
                if let Some(result) = result {
                    let at = u64::from(self.thread.frame + result.offset);
                    self.store(Space::Local, at, 4, 1)?;
                }
            }
            Op::Assert { arguments } => {
                let mut parts = Vec::new();
                for place in arguments.iter().take(3) {
                    let value = self.place(*place)?;
                    parts.push(match place.size {
                        8 => String::from_utf8_lossy(&self.text(value)?).into_owned(),
                        _ => value.to_string(),
                    });
                }
                return Err(FaultKind::Assert(parts.join(", ")));
            }
            Op::Fence => std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst),
            Op::InitBarrier { at, count } => {
                let (space, at) = self.at(*at);
                let count = self.value(*count);
                self.store(space, at, 8, phase::new(count))?;
            }
            Op::Arrive {
                to,
                at,
                count,
                drop,
            } => {
                let (space, at) = self.at(*at);
                let count = alu::cut(self.value(*count), 4);
                let state = self.update(space, at, 8, |old| phase::arrive(old, count, *drop))?;
                self.set(*to, state);
            }
            Op::TestBarrier {
                to,
                at,
                state,
                parity,
            } => {
                let (space, at) = self.at(*at);
                let (word, state) = (self.load(space, at, 8)?, self.value(*state));
                let over = phase::is_over(word, state, *parity);
                self.set(*to, over.into());
                if !over {
                    // The others of the block must come to it.
                    return Ok(Some(Stop::Turn));
                }
            }
            Op::PendingCount { to, state } => {
                let state = self.value(*state);
                self.set(*to, phase::pending(state));
            }
            Op::Return => return Ok(self.finish_call()?.then_some(Stop::Exit)),
            Op::Exit => return Ok(Some(Stop::Exit)),
            Op::Trap => return Err(FaultKind::Trap),
            Op::Sleep { ns } => {
                // About as many instructions as fit into the time.
                let ns = alu::cut(self.value(*ns), 4).min(1_000_000);
                self.thread.executed += ns / CYCLES;
                return Ok(Some(Stop::Turn));
            }
            Op::ActiveMask { .. } => {
                self.thread.state = State::Warp {
                    mask: 0,
                    a: self.thread.place(),
                    b: 0,
                    c: 0,
                };
                return Ok(Some(Stop::Warp));
            }
            Op::Barrier {
                id,
                threads,
                arrive,
                result,
                to,
                a,
            } => {
                let id = self.value(*id) as usize % BARRIERS;
                let threads = match threads {
                    Some(threads) => alu::cut(self.value(*threads), 4) as u32,
                    None => 0,
                };
                let flag = self.value(*a) & 1 == 1;
                if !arrive {
                    self.thread.state = State::Barrier {
                        id,
                        result: *result,
                        to: *to,
                    };
                }
                return Ok(Some(Stop::Barrier {
                    id,
                    threads,
                    arrive: *arrive,
                    flag,
                }));
            }
            Op::Shuffle { a, b, c, mask, .. } => {
                let (a, b, c) = (self.value(*a), self.value(*b), self.value(*c));
                let mask = self.value(*mask) as u32;
                self.thread.state = State::Warp { mask, a, b, c };
                return Ok(Some(Stop::Warp));
            }
            Op::Vote { a, size, mask, .. } => {
                let a = alu::cut(self.value(*a), *size);
                let mask = self.value(*mask) as u32;
                self.thread.state = State::Warp {
                    mask,
                    a,
                    b: 0,
                    c: 0,
                };
                return Ok(Some(Stop::Warp));
            }
        }
        Ok(None)
    }

    fn carry(
        &mut self,
        subtract: bool,
        kind: Type,
        to: u32,
        (a, b): (u64, u64),
        carry_in: bool,
        carry_out: bool,
    ) {
        let (value, carry) = alu::carry(subtract, kind, a, b, carry_in && self.thread.carry);
        if carry_out {
            self.thread.carry = carry;
        }
        self.set(to, value);
    }

    fn call(&mut self, function: usize, arguments: &[Place]) -> Result<()> {
        let functions = self.shared.functions;
        let thread = &mut *self.thread;
        let frame = thread.frame + functions[thread.function].frame;
        let callee = &functions[function];
        if thread.calls.len() >= MOST_CALLS || frame + callee.frame > MOST_LOCAL {
            return Err(FaultKind::Stack);
        }
        let end = (frame + callee.frame) as usize;
        if thread.local.len() < end {
            thread.local.resize(end, 0);
        }
        for (from, to) in arguments.iter().zip(&callee.parameters) {
            let from = (thread.frame + from.offset) as usize;
            let bytes = from..from + to.size as usize;
            thread
                .local
                .copy_within(bytes, (frame + to.offset) as usize);
        }
        let base = thread.registers.len();
        thread.registers.resize(base + callee.registers as usize, 0);
        thread.calls.push(Call {
            function: thread.function,
            pc: thread.pc,
            base: thread.base,
            frame: thread.frame,
        });
        (thread.function, thread.pc, thread.base, thread.frame) = (function, 0, base, frame);
        Ok(())
    }

    /// Goes back to the caller; true when there is none.
    fn finish_call(&mut self) -> Result<bool> {
        let thread = &mut *self.thread;
        let Some(call) = thread.calls.pop() else {
            return Ok(true);
        };
        let from = &self.shared.functions[thread.function].results;
        let caller = &self.shared.functions[call.function];
        if let Some(Op::Call { results, .. }) = caller.code.get(call.pc - 1).map(|it| &it.op) {
            for (from, to) in from.iter().zip(results) {
                let start = (thread.frame + from.offset) as usize;
                let bytes = start..start + from.size as usize;
                thread
                    .local
                    .copy_within(bytes, (call.frame + to.offset) as usize);
            }
        }
        thread.registers.truncate(thread.base);
        (thread.function, thread.pc, thread.base, thread.frame) =
            (call.function, call.pc, call.base, call.frame);
        Ok(false)
    }

    fn print(&mut self, format: u64, arguments: u64) -> Result<()> {
        let format = self.text(format)?;
        let mut at = arguments;
        let mut output = Vec::new();
        for piece in text::pieces(&format) {
            match piece {
                text::Piece::Plain(bytes) => output.extend_from_slice(bytes),
                text::Piece::Value(spec) => {
                    let size = spec.size();
                    at = at.next_multiple_of(size.into());
                    let address = Address {
                        space: Space::Generic,
                        base: Value::Const(at),
                        offset: 0,
                    };
                    let (space, place) = self.at(address);
                    let value = self.load(space, place, size)?;
                    at += u64::from(size);
                    let text = if spec.is_text() && value != 0 {
                        self.text(value)?
                    } else {
                        b"(null)".to_vec()
                    };
                    output.extend(spec.show(value, &text));
                }
            }
        }
        self.shared.output.extend(output);
        Ok(())
    }
}

fn plain(kind: Type) -> Kind {
    Kind {
        kind,
        round: Round::Nearest,
        saturate: false,
        flush: false,
    }
}

fn window(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED,
        Space::Local => LOCAL,
        Space::Param => PARAM,
        Space::Generic | Space::Global => 0,
    }
}

fn number(bytes: &[u8]) -> u64 {
    let mut value = [0; 8];
    value[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(value)
}

/// Vectors must be aligned as a whole.
fn aligned(at: u64, size: u32, count: usize) -> Result<()> {
    match at.is_multiple_of(u64::from(size) * count as u64) {
        true => Ok(()),
        false => Err(FaultKind::Misaligned(at)),
    }
}

fn atomic(op: Atomic, kind: Type, old: u64, a: u64, b: u64) -> u64 {
    let by = |op: Binary| alu::binary(op, plain(kind), old, a);
    let size = kind.size();
    match op {
        Atomic::Add => by(Binary::Add),
        Atomic::Min => by(Binary::Min),
        Atomic::Max => by(Binary::Max),
        Atomic::And => by(Binary::And),
        Atomic::Or => by(Binary::Or),
        Atomic::Xor => by(Binary::Xor),
        Atomic::Exch => a,
        Atomic::Cas if old == alu::cut(a, size) => b,
        Atomic::Cas => old,
        Atomic::Inc if old >= alu::cut(a, size) => 0,
        Atomic::Inc => old + 1,
        Atomic::Dec if old == 0 || old > alu::cut(a, size) => a,
        Atomic::Dec => old - 1,
    }
}

const _: () = assert!(SINK == 0);
