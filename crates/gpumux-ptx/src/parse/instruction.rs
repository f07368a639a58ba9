//! Instructions, resolved: what their modifiers and operands mean.

use super::{Body, Operand, Raw, Resolver};
use crate::code::{
    Address, Atomic, BarrierResult, Binary, Compare, Kind, Op, Place, Round, SINK, Shuffle, Space,
    Ternary, Type, Unary, Value, Vote,
};

type Result<T> = std::result::Result<T, String>;

/// An instruction's name and modifiers.
struct Words<'a> {
    name: &'a str,
    all: Vec<&'a str>,
}

impl<'a> Words<'a> {
    fn new(text: &'a str) -> Self {
        let mut all = text.split('.');
        Self {
            name: all.next().unwrap_or(""),
            all: all.collect(),
        }
    }

    fn has(&self, word: &str) -> bool {
        self.all.contains(&word)
    }

    /// Types among the modifiers, in order.
    fn types(&self) -> Vec<Type> {
        self.all.iter().filter_map(|it| Type::parse(it)).collect()
    }

    fn kind(&self) -> Result<Type> {
        self.types()
            .last()
            .copied()
            .ok_or_else(|| format!("`{}` has no type", self.name))
    }

    fn round(&self) -> Round {
        let of = |word: &&&str| match **word {
            "rz" => Some(Round::Zero),
            "rm" => Some(Round::Down),
            "rp" => Some(Round::Up),
            "rni" => Some(Round::WholeNearest),
            "rzi" => Some(Round::WholeZero),
            "rmi" => Some(Round::WholeDown),
            "rpi" => Some(Round::WholeUp),
            _ => None,
        };
        self.all
            .iter()
            .find_map(|it| of(&it))
            .unwrap_or(Round::Nearest)
    }

    fn full(&self, kind: Type) -> Kind {
        Kind {
            kind,
            round: self.round(),
            saturate: self.has("sat"),
            flush: self.has("ftz"),
        }
    }

    /// The first modifier that changes what the instruction does in a way that is not known here.
    fn unknown(&self) -> Option<&'a str> {
        let known: &[&str] = match self.name {
            "add" | "sub" => &["cc", "sat", "ftz", "rn", "rz", "rm", "rp"],
            "addc" | "subc" => &["cc"],
            "mul" | "mad" | "madc" => &[
                "lo", "hi", "wide", "cc", "sat", "ftz", "rn", "rz", "rm", "rp",
            ],
            "mul24" | "mad24" => &["lo", "hi"],
            "fma" => &["sat", "ftz", "rn", "rz", "rm", "rp"],
            "div" | "rcp" | "sqrt" => &["approx", "full", "ftz", "rn", "rz", "rm", "rp"],
            "rsqrt" | "sin" | "cos" | "lg2" | "ex2" | "tanh" => &["approx", "ftz"],
            "abs" | "neg" => &["ftz"],
            "min" | "max" => &["ftz", "NaN"],
            "shf" => &["l", "r", "clamp", "wrap"],
            "bfind" => &["shiftamt"],
            "testp" => &[
                "finite",
                "infinite",
                "number",
                "notanumber",
                "normal",
                "subnormal",
            ],
            "slct" => &["ftz"],
            "set" | "setp" => &[
                "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu",
                "leu", "gtu", "geu", "num", "nan", "and", "or", "xor", "ftz",
            ],
            "cvt" => &[
                "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat",
            ],
            "rem" | "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "popc" | "clz"
            | "brev" | "sad" | "bfe" | "bfi" | "prmt" | "dp4a" | "lop3" | "selp" | "copysign" => {
                &[]
            }
            "redux" => &["sync", "add", "min", "max", "and", "or", "xor"],
            "atom" | "red" => &[
                "add",
                "min",
                "max",
                "and",
                "or",
                "xor",
                "exch",
                "cas",
                "inc",
                "dec",
                "relaxed",
                "acquire",
                "release",
                "acq_rel",
                "cta",
                "cluster",
                "gpu",
                "sys",
                "noftz",
                "global",
                "shared",
                "shared::cta",
                "L2::cache_hint",
            ],
            _ => return None,
        };
        let is_known = |word: &str| Type::parse(word).is_some() || known.contains(&word);
        self.all.iter().copied().find(|word| !is_known(word))
    }

    fn vector(&self) -> usize {
        match () {
            () if self.has("v2") => 2,
            () if self.has("v4") => 4,
            () if self.has("v8") => 8,
            () => 1,
        }
    }

    fn space(&self) -> Space {
        let of = |word: &&str| {
            let base = word.split("::").next().unwrap_or(word);
            Some(match base {
                "global" | "const" => Space::Global,
                "shared" => Space::Shared,
                "local" => Space::Local,
                "param" => Space::Param,
                _ => return None,
            })
        };
        self.all.iter().find_map(of).unwrap_or(Space::Generic)
    }
}

impl Resolver<'_> {
    pub(super) fn op(&self, raw: &Raw, body: &Body) -> Result<Op> {
        let words = Words::new(&raw.words);
        if let Some(problem) = &raw.problem {
            return Err(format!("`{}` is not known: {problem}", raw.words));
        }
        if let Some(word) = words.unknown() {
            return Err(format!("`{}` is not known: `.{word}`", raw.words));
        }
        let it = Operands {
            all: &raw.operands,
            resolver: self,
            unit: body.unit,
        };
        self.known(&words, &it, body)
            .and_then(|op| op.ok_or_else(|| format!("`{}` is not known", raw.words)))
    }

    fn known(&self, words: &Words<'_>, it: &Operands<'_>, body: &Body) -> Result<Option<Op>> {
        let label = |name: &str| {
            let found = body.labels.get(name);
            found
                .copied()
                .ok_or_else(|| format!("there is no label `{name}`"))
        };
        if let Some(op) = arithmetic(words, it)? {
            return Ok(Some(op));
        }
        if let Some(op) = together(words, it)? {
            return Ok(Some(op));
        }
        Ok(Some(match words.name {
            "mov" => return self.movement(words, it).map(Some),
            "ld" | "ldu" => {
                let kind = words.kind()?;
                let from = it.address(1, words.space())?;
                let to = it.registers(0)?;
                if to.len() != words.vector() {
                    return Err("a vector of another length".into());
                }
                Op::Load { to, kind, from }
            }
            "st" => {
                let kind = words.kind()?;
                let to = it.address(0, words.space())?;
                let from = it.values(1, kind)?;
                if from.len() != words.vector() {
                    return Err("a vector of another length".into());
                }
                Op::Store { from, kind, to }
            }
            "atom" | "red" => {
                let kind = words.kind()?;
                let op = match () {
                    () if words.has("add") => Atomic::Add,
                    () if words.has("min") => Atomic::Min,
                    () if words.has("max") => Atomic::Max,
                    () if words.has("and") => Atomic::And,
                    () if words.has("or") => Atomic::Or,
                    () if words.has("xor") => Atomic::Xor,
                    () if words.has("exch") => Atomic::Exch,
                    () if words.has("cas") => Atomic::Cas,
                    () if words.has("inc") => Atomic::Inc,
                    () if words.has("dec") => Atomic::Dec,
                    () => return Ok(None),
                };
                let first = usize::from(words.name == "atom");
                if words.vector() != 1 {
                    return Ok(None);
                }
                let b = match op {
                    Atomic::Cas => it.value(first + 2, kind)?,
                    _ => Value::Const(0),
                };
                Op::Atomic {
                    op,
                    kind,
                    to: if first == 1 { it.to(0)? } else { SINK },
                    at: it.address(first, words.space())?,
                    a: it.value(first + 1, kind)?,
                    b,
                }
            }
            "cvta" => {
                let kind = words.kind()?;
                let (to, a) = (it.to(0)?, it.value(1, kind)?);
                Op::ToGeneric {
                    to,
                    a,
                    space: words.space(),
                    back: words.has("to"),
                }
            }
            "isspacep" => Op::IsSpace {
                to: it.to(0)?,
                a: it.value(1, Type::U(8))?,
                space: words.space(),
            },
            // Copies are done already: their arrival is the thread's own, or was not counted.
            "cp" if words.has("mbarrier") && words.has("noinc") => Op::Arrive {
                to: SINK,
                at: it.address(0, words.space())?,
                count: Value::Const(1),
                drop: false,
            },
            "cp" if words.has("mbarrier") => Op::Nop,
            "mbarrier" => return self.barrier(words, it),
            "cp" if words.has("async") && (words.has("ca") || words.has("cg")) => Op::CopyAsync {
                to: it.address(0, Space::Shared)?,
                from: it.address(1, Space::Global)?,
                bytes: it.constant(2)? as u32,
                used: if it.all.len() > 3 {
                    it.value(3, Type::U(4))?
                } else {
                    Value::Const(it.constant(2)?)
                },
            },
            // Copies are done when their instruction is.
            "cp" if matches!(
                words.all[..],
                ["async", "commit_group" | "wait_group" | "wait_all"]
            ) =>
            {
                Op::Nop
            }
            "bra" => match &it.all.first() {
                Some(Operand::Name(name, 0)) => Op::Branch { to: label(name)? },
                _ => return Ok(None),
            },
            "brx" => match (&it.all.first(), &it.all.get(1)) {
                (Some(_), Some(Operand::Name(table, 0))) => {
                    let targets = body
                        .tables
                        .get(table)
                        .ok_or_else(|| format!("there is no table `{table}`"))?;
                    let to = targets
                        .iter()
                        .map(|name| label(name))
                        .collect::<Result<_>>()?;
                    Op::BranchTable {
                        index: it.value(0, Type::U(4))?,
                        to,
                    }
                }
                _ => return Ok(None),
            },
            "call" => return self.call(it, body.unit).map(Some),
            "ret" => Op::Return,
            "exit" => Op::Exit,
            "trap" => Op::Trap,
            "nanosleep" => Op::Sleep {
                ns: it.value(0, Type::U(4))?,
            },
            "membar" | "fence" => Op::Fence,
            // Hints are hints.
            "prefetch" | "prefetchu" | "discard" | "applypriority" | "brkpt" | "pmevent"
            | "griddepcontrol" | "setmaxnreg" => Op::Nop,
            _ => return Ok(None),
        }))
    }

    /// `mbarrier`: without counts of bytes, which only bulk copies need.
    fn barrier(&self, words: &Words<'_>, it: &Operands<'_>) -> Result<Option<Op>> {
        let word = |name| words.has(name);
        let known = [
            "init",
            "inval",
            "arrive",
            "arrive_drop",
            "noComplete",
            "test_wait",
            "try_wait",
            "parity",
            "pending_count",
            "release",
            "acquire",
            "relaxed",
            "cta",
            "shared",
            "shared::cta",
            "b64",
        ];
        if words.all.iter().any(|word| !known.contains(word)) {
            return Ok(None);
        }
        let count = |i: usize| match it.all.get(i) {
            Some(_) => it.value(i, Type::U(4)),
            None => Ok(Value::Const(1)),
        };
        Ok(match () {
            () if word("init") => Some(Op::InitBarrier {
                at: it.address(0, words.space())?,
                count: it.value(1, Type::U(4))?,
            }),
            () if word("inval") => Some(Op::Nop),
            () if word("arrive") || word("arrive_drop") => Some(Op::Arrive {
                to: it.to(0)?,
                at: it.address(1, words.space())?,
                count: count(2)?,
                drop: word("arrive_drop"),
            }),
            () if word("test_wait") || word("try_wait") => Some(Op::TestBarrier {
                to: it.to(0)?,
                at: it.address(1, words.space())?,
                state: it.value(2, Type::U(8))?,
                parity: word("parity"),
            }),
            () if word("pending_count") => Some(Op::PendingCount {
                to: it.to(0)?,
                state: it.value(1, Type::U(8))?,
            }),
            () => None,
        })
    }

    fn movement(&self, words: &Words<'_>, it: &Operands<'_>) -> Result<Op> {
        let kind = match words.kind() {
            Ok(kind) => kind,
            Err(_) if words.has("b128") => Type::U(16),
            Err(error) => return Err(error),
        };
        let size = kind.size();
        match (it.all.first(), it.all.get(1)) {
            (Some(Operand::Vector(_)), Some(Operand::Vector(_))) => {
                Err("`mov` between vectors is not known".into())
            }
            (Some(Operand::Vector(parts)), Some(_)) if size <= 8 => Ok(Op::Unpack {
                size: size / parts.len().max(1) as u32,
                to: it.registers(0)?,
                from: it.value(1, kind)?,
            }),
            (Some(_), Some(Operand::Vector(parts))) if size <= 8 => {
                let part = size / parts.len().max(1) as u32;
                Ok(Op::Pack {
                    to: it.to(0)?,
                    from: it.values(1, Type::U(part as u8))?,
                    size: part,
                })
            }
            _ if size <= 8 => Ok(Op::Move {
                to: it.to(0)?,
                from: it.value(1, kind)?,
                size,
            }),
            _ => Err("128-bit registers are not known".into()),
        }
    }

    fn call(&self, it: &Operands<'_>, unit: usize) -> Result<Op> {
        let place = |operand: &Operand| match operand {
            Operand::Frame(place, 0) => Ok(*place),
            _ => Err("a call's parameter is not in parameter memory".to_owned()),
        };
        let places = |operand: Option<&Operand>| match operand {
            Some(Operand::List(list)) => list.iter().map(place).collect::<Result<Vec<Place>>>(),
            _ => Ok(Vec::new()),
        };
        let (results, rest) = match it.all.first() {
            Some(Operand::List(_)) => (places(it.all.first())?, &it.all[1..]),
            _ => (Vec::new(), it.all),
        };
        let Some(Operand::Name(name, 0)) = rest.first() else {
            return Err("calls by address are not known".into());
        };
        let arguments = places(rest.get(1))?;
        match (name.as_str(), &arguments[..]) {
            ("vprintf", [format, arguments]) => {
                let (format, arguments) = (*format, *arguments);
                return Ok(Op::Print {
                    format,
                    arguments,
                    result: results.first().copied(),
                });
            }
            ("__assertfail", _) => return Ok(Op::Assert { arguments }),
            _ => {}
        }
        let function = self
            .functions
            .find(unit, name)
            .ok_or_else(|| format!("there is no device function `{name}`"))?;
        let (parameters, given) = &self.signatures[function];
        let same = |a: &[Place], b: &[Place]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.size == b.size)
        };
        if !same(parameters, &arguments) || !same(given, &results) {
            return Err(format!("`{name}` has other parameters"));
        }
        Ok(Op::Call {
            function,
            arguments,
            results,
        })
    }
}

/// What computes a value from values.
fn arithmetic(words: &Words<'_>, it: &Operands<'_>) -> Result<Option<Op>> {
    let binary = |op: Binary| -> Result<Option<Op>> {
        let kind = words.kind()?;
        let second = if matches!(op, Binary::Shl | Binary::Shr) {
            Type::U(4)
        } else {
            kind
        };
        let (to, a, b) = (it.to(0)?, it.value(1, kind)?, it.value(2, second)?);
        Ok(Some(Op::Binary {
            op,
            kind: words.full(kind),
            to,
            a,
            b,
        }))
    };
    let unary = |op: Unary, kind: Type| -> Result<Option<Op>> {
        let (to, a) = (it.to(0)?, it.value(1, kind)?);
        Ok(Some(Op::Unary {
            op,
            kind: words.full(kind),
            to,
            a,
        }))
    };
    let ternary = |op: Ternary, kind: Type, last: Type| -> Result<Option<Op>> {
        let (to, a, b, c) = (
            it.to(0)?,
            it.value(1, kind)?,
            it.value(2, kind)?,
            it.value(3, last)?,
        );
        Ok(Some(Op::Ternary {
            op,
            kind: words.full(kind),
            to,
            a,
            b,
            c,
        }))
    };
    let doubled = |kind: Type| match kind {
        Type::S(size) => Type::S(2 * size),
        kind => Type::U(2 * kind.size().min(4) as u8),
    };
    let carry = |subtract: bool, carry_in: bool| -> Result<Option<Op>> {
        let kind = words.kind()?;
        let (to, a, b) = (it.to(0)?, it.value(1, kind)?, it.value(2, kind)?);
        Ok(Some(Op::Carry {
            subtract,
            kind,
            to,
            a,
            b,
            carry_in,
            carry_out: words.has("cc"),
        }))
    };
    match words.name {
        "add" if words.has("cc") => carry(false, false),
        "addc" => carry(false, true),
        "sub" if words.has("cc") => carry(true, false),
        "subc" => carry(true, true),
        "madc" | "mad" if words.name == "madc" || words.has("cc") => {
            let kind = words.kind()?;
            Ok(Some(Op::MadCarry {
                high: words.has("hi"),
                kind,
                to: it.to(0)?,
                a: it.value(1, kind)?,
                b: it.value(2, kind)?,
                c: it.value(3, kind)?,
                carry_in: words.name == "madc",
                carry_out: words.has("cc"),
            }))
        }
        "add" => binary(Binary::Add),
        "sub" => binary(Binary::Sub),
        "mul24" if words.has("hi") => binary(Binary::Mul24High),
        "mul24" => binary(Binary::Mul24),
        "mad24" if words.has("hi") => ternary(Ternary::Mad24High, words.kind()?, words.kind()?),
        "mad24" => ternary(Ternary::Mad24, words.kind()?, words.kind()?),
        "mul" if words.has("wide") => binary(Binary::MulWide),
        "mul" if words.has("hi") => binary(Binary::MulHigh),
        "mul" => binary(Binary::Mul),
        "div" => binary(Binary::Div),
        "rem" => binary(Binary::Rem),
        "min" if words.has("NaN") => binary(Binary::MinNan),
        "max" if words.has("NaN") => binary(Binary::MaxNan),
        "min" if it.all.len() == 3 => binary(Binary::Min),
        "max" if it.all.len() == 3 => binary(Binary::Max),
        "and" => binary(Binary::And),
        "or" => binary(Binary::Or),
        "xor" => binary(Binary::Xor),
        "shl" => binary(Binary::Shl),
        "shr" => binary(Binary::Shr),
        "copysign" => binary(Binary::Copysign),
        "abs" => unary(Unary::Abs, words.kind()?),
        "neg" => unary(Unary::Neg, words.kind()?),
        "not" => unary(Unary::Not, words.kind()?),
        "cnot" => unary(Unary::Cnot, words.kind()?),
        "popc" => unary(Unary::Popc, words.kind()?),
        "clz" => unary(Unary::Clz, words.kind()?),
        "brev" => unary(Unary::Brev, words.kind()?),
        "bfind" if words.has("shiftamt") => unary(Unary::BfindShift, words.kind()?),
        "bfind" => unary(Unary::Bfind, words.kind()?),
        "rcp" => unary(Unary::Rcp, words.kind()?),
        "sqrt" => unary(Unary::Sqrt, words.kind()?),
        "rsqrt" => unary(Unary::Rsqrt, words.kind()?),
        "sin" => unary(Unary::Sin, words.kind()?),
        "cos" => unary(Unary::Cos, words.kind()?),
        "lg2" => unary(Unary::Lg2, words.kind()?),
        "ex2" => unary(Unary::Ex2, words.kind()?),
        "tanh" => unary(Unary::Tanh, words.kind()?),
        "testp" => {
            let op = match () {
                () if words.has("finite") => Unary::Finite,
                () if words.has("infinite") => Unary::Infinite,
                () if words.has("number") => Unary::Number,
                () if words.has("notanumber") => Unary::NotANumber,
                () if words.has("normal") => Unary::Normal,
                () => Unary::Subnormal,
            };
            unary(op, words.kind()?)
        }
        "mad" if words.has("wide") => {
            let kind = words.kind()?;
            ternary(Ternary::MadWide, kind, doubled(kind))
        }
        "mad" if words.has("hi") => ternary(Ternary::MadHigh, words.kind()?, words.kind()?),
        "mad" => ternary(Ternary::Mad, words.kind()?, words.kind()?),
        "fma" if words.has("relu") => Ok(None),
        "fma" => ternary(Ternary::Fma, words.kind()?, words.kind()?),
        "sad" => ternary(Ternary::Sad, words.kind()?, words.kind()?),
        "bfe" => {
            let kind = words.kind()?;
            let (to, a) = (it.to(0)?, it.value(1, kind)?);
            let (b, c) = (it.value(2, Type::U(4))?, it.value(3, Type::U(4))?);
            Ok(Some(Op::Ternary {
                op: Ternary::Bfe,
                kind: words.full(kind),
                to,
                a,
                b,
                c,
            }))
        }
        "bfi" => {
            let kind = words.kind()?;
            Ok(Some(Op::Bfi {
                kind,
                to: it.to(0)?,
                a: it.value(1, kind)?,
                b: it.value(2, kind)?,
                c: it.value(3, Type::U(4))?,
                d: it.value(4, Type::U(4))?,
            }))
        }
        "prmt" if words.all == ["b32"] => ternary(Ternary::Prmt, Type::U(4), Type::U(4)),
        "shf" => {
            let op = match (words.has("l"), words.has("clamp")) {
                (true, false) => Ternary::ShfLeft,
                (true, true) => Ternary::ShfLeftClamp,
                (false, false) => Ternary::ShfRight,
                (false, true) => Ternary::ShfRightClamp,
            };
            ternary(op, Type::U(4), Type::U(4))
        }
        "dp4a" => {
            let types = words.types();
            let signed = |i: usize| matches!(types.get(i), Some(Type::S(_)));
            ternary(Ternary::Dp4a(signed(0), signed(1)), Type::U(4), Type::U(4))
        }
        "slct" => {
            let types = words.types();
            let (Some(kind), Some(by)) = (types.first(), types.get(1)) else {
                return Ok(None);
            };
            ternary(Ternary::Slct(by.is_float()), *kind, *by)
        }
        "lop3" if words.all == ["b32"] => Ok(Some(Op::Lop3 {
            to: it.to(0)?,
            a: it.value(1, Type::U(4))?,
            b: it.value(2, Type::U(4))?,
            c: it.value(3, Type::U(4))?,
            table: it.constant(4)? as u8,
        })),
        "selp" => {
            let kind = words.kind()?;
            let (to, a, b) = (it.to(0)?, it.value(1, kind)?, it.value(2, kind)?);
            Ok(Some(Op::Select {
                to,
                size: kind.size(),
                a,
                b,
                c: it.value(3, Type::Pred)?,
            }))
        }
        "set" | "setp" => comparison(words, it).map(Some),
        "cvt" => conversion(words, it),
        _ => Ok(None),
    }
}

fn comparison(words: &Words<'_>, it: &Operands<'_>) -> Result<Op> {
    let kind = words.kind()?;
    let how = words.all.iter().find_map(|word| {
        Some(match *word {
            "eq" => Compare::Eq,
            "ne" => Compare::Ne,
            "lt" | "lo" => Compare::Lt,
            "le" | "ls" => Compare::Le,
            "gt" | "hi" => Compare::Gt,
            "ge" | "hs" => Compare::Ge,
            "equ" => Compare::Equ,
            "neu" => Compare::Neu,
            "ltu" => Compare::Ltu,
            "leu" => Compare::Leu,
            "gtu" => Compare::Gtu,
            "geu" => Compare::Geu,
            "num" => Compare::Num,
            "nan" => Compare::Nan,
            _ => return None,
        })
    });
    let how = how.ok_or("a comparison without its kind")?;
    let with = match () {
        () if it.all.len() < 4 => None,
        () if words.has("and") => Some(Binary::And),
        () if words.has("or") => Some(Binary::Or),
        () if words.has("xor") => Some(Binary::Xor),
        () => None,
    };
    let with = match with {
        Some(op) => Some((op, it.value(3, Type::Pred)?)),
        None => None,
    };
    if matches!(kind, Type::F16x2 | Type::Bf16x2) {
        return Err("comparing pairs is not known".into());
    }
    let (to, other) = it.pair(0)?;
    let truth = match words.types().first() {
        _ if words.name == "setp" => 1,
        Some(Type::F32) => 1.0_f32.to_bits().into(),
        _ => 0xffff_ffff,
    };
    Ok(Op::Compare {
        to,
        other,
        how,
        kind,
        a: it.value(1, kind)?,
        b: it.value(2, kind)?,
        with,
        truth,
        flush: words.has("ftz"),
    })
}

fn conversion(words: &Words<'_>, it: &Operands<'_>) -> Result<Option<Op>> {
    let types = words.types();
    let [to, from] = types[..] else {
        return Ok(None);
    };
    if let (Type::F16x2 | Type::Bf16x2, Type::F32) = (to, from) {
        let (a, b) = (it.value(1, from)?, it.value(2, from)?);
        return Ok(Some(Op::ConvertPair {
            to: it.to(0)?,
            kind: to,
            a,
            b,
        }));
    }
    let pair = |kind| matches!(kind, Type::F16x2 | Type::Bf16x2);
    if pair(to) || pair(from) {
        return Ok(None);
    }
    Ok(Some(Op::Convert {
        to: it.to(0)?,
        kind: words.full(to),
        from,
        a: it.value(1, from)?,
    }))
}

/// What threads do together.
fn together(words: &Words<'_>, it: &Operands<'_>) -> Result<Option<Op>> {
    let word = Type::U(4);
    let last = it.all.len().saturating_sub(1);
    Ok(Some(match words.name {
        "bar" | "barrier" if words.has("warp") => Op::Vote {
            op: Vote::Sync,
            to: SINK,
            other: SINK,
            a: Value::Const(0),
            size: 4,
            mask: it.value(0, word)?,
        },
        "barrier" if words.has("cluster") => Op::Nop,
        "bar" | "barrier" => {
            let result = match () {
                () if words.has("popc") => BarrierResult::Count,
                () if words.has("and") => BarrierResult::And,
                () if words.has("or") => BarrierResult::Or,
                () => BarrierResult::None,
            };
            let first = usize::from(result != BarrierResult::None);
            let (to, a) = match first {
                1 => (it.to(0)?, it.value(last, Type::Pred)?),
                _ => (SINK, Value::Const(0)),
            };
            let threads = if it.all.len() > 1 + 2 * first {
                Some(it.value(first + 1, word)?)
            } else {
                None
            };
            Op::Barrier {
                id: it.value(first, word)?,
                threads,
                arrive: words.has("arrive"),
                result,
                to,
                a,
            }
        }
        "shfl" if words.has("sync") => {
            let op = match () {
                () if words.has("up") => Shuffle::Up,
                () if words.has("down") => Shuffle::Down,
                () if words.has("bfly") => Shuffle::Butterfly,
                () => Shuffle::Index,
            };
            let (to, ok) = it.pair(0)?;
            Op::Shuffle {
                op,
                to,
                ok,
                a: it.value(1, word)?,
                b: it.value(2, word)?,
                c: it.value(3, word)?,
                mask: it.value(4, word)?,
            }
        }
        "vote" if words.has("sync") => {
            let op = match () {
                () if words.has("all") => Vote::All,
                () if words.has("any") => Vote::Any,
                () if words.has("uni") => Vote::Uniform,
                () => Vote::Ballot,
            };
            let (to, a, mask) = (it.to(0)?, it.value(1, Type::Pred)?, it.value(2, word)?);
            Op::Vote {
                op,
                to,
                other: SINK,
                a,
                size: 1,
                mask,
            }
        }
        "match" if words.has("sync") => {
            let op = if words.has("all") {
                Vote::MatchAll
            } else {
                Vote::MatchAny
            };
            let kind = words.kind()?;
            let (to, other) = it.pair(0)?;
            Op::Vote {
                op,
                to,
                other,
                a: it.value(1, kind)?,
                size: kind.size(),
                mask: it.value(2, word)?,
            }
        }
        "redux" if words.has("sync") => {
            let kind = words.kind()?;
            let op = match () {
                () if words.has("add") => Binary::Add,
                () if words.has("min") => Binary::Min,
                () if words.has("max") => Binary::Max,
                () if words.has("and") => Binary::And,
                () if words.has("or") => Binary::Or,
                () => Binary::Xor,
            };
            let (to, a, mask) = (it.to(0)?, it.value(1, kind)?, it.value(2, word)?);
            Op::Vote {
                op: Vote::Reduce(op, kind),
                to,
                other: SINK,
                a,
                size: kind.size(),
                mask,
            }
        }
        "elect" if words.has("sync") => {
            let (to, other) = it.pair(0)?;
            Op::Vote {
                op: Vote::Elect,
                to,
                other,
                a: Value::Const(0),
                size: 4,
                mask: it.value(1, word)?,
            }
        }
        "activemask" => Op::ActiveMask { to: it.to(0)? },
        _ => return Ok(None),
    }))
}

/// An instruction's operands.
struct Operands<'a> {
    all: &'a [Operand],
    resolver: &'a Resolver<'a>,
    /// The text that they are in.
    unit: usize,
}

impl Operands<'_> {
    fn get(&self, i: usize) -> Result<&Operand> {
        self.all
            .get(i)
            .ok_or_else(|| "an operand is missing".to_owned())
    }

    /// A register that is written.
    fn to(&self, i: usize) -> Result<u32> {
        register(self.get(i)?)
    }

    /// Two registers that are written, of which there may be only the first.
    fn pair(&self, i: usize) -> Result<(u32, u32)> {
        match self.get(i)? {
            Operand::Pair(first, second) => Ok((register(first)?, register(second)?)),
            single => Ok((register(single)?, SINK)),
        }
    }

    fn registers(&self, i: usize) -> Result<Vec<u32>> {
        match self.get(i)? {
            Operand::Vector(parts) => parts.iter().map(register).collect(),
            single => Ok(vec![register(single)?]),
        }
    }

    fn value(&self, i: usize, kind: Type) -> Result<Value> {
        self.resolve(self.get(i)?, kind)
    }

    fn values(&self, i: usize, kind: Type) -> Result<Vec<Value>> {
        match self.get(i)? {
            Operand::Vector(parts) => parts.iter().map(|part| self.resolve(part, kind)).collect(),
            single => Ok(vec![self.resolve(single, kind)?]),
        }
    }

    fn constant(&self, i: usize) -> Result<u64> {
        match self.get(i)? {
            Operand::Number(number) => Ok(*number),
            _ => Err("a constant is missing".into()),
        }
    }

    fn address(&self, i: usize, space: Space) -> Result<Address> {
        let Operand::Memory(base, offset) = self.get(i)? else {
            return Err("an address is missing".into());
        };
        // Parameters of calls live in frames.
        let space = match (&**base, space) {
            (Operand::Frame(..), _) => Space::Local,
            (_, space) => space,
        };
        Ok(Address {
            space,
            base: self.resolve(base, Type::U(8))?,
            offset: *offset,
        })
    }

    fn resolve(&self, operand: &Operand, kind: Type) -> Result<Value> {
        Ok(match operand {
            Operand::Register(register) => Value::Reg(*register),
            Operand::NotRegister(register) => Value::Not(*register),
            // All bits of it, in compilers' writing of a predicate that is true.
            Operand::Number(number) if kind == Type::Pred => Value::Const(u64::from(*number != 0)),
            Operand::Number(number) => Value::Const(crate::alu::cut(*number, kind.size())),
            Operand::Float(number) if kind == Type::F64 => Value::Const(number.to_bits()),
            Operand::Float(number) => Value::Const((*number as f32).to_bits().into()),
            Operand::Special(special) => Value::Special(*special),
            Operand::Frame(place, added) => Value::Frame(place.offset.wrapping_add(*added as u32)),
            Operand::Parameter(at, added) => Value::Param(at.wrapping_add(*added as u32)),
            Operand::Shared(at) => Value::Const(*at),
            Operand::OwnShared(at) => {
                Value::Const(u64::from(self.resolver.shared).wrapping_add(*at))
            }
            Operand::Dynamic(added) => Value::Dynamic(*added as u32),
            Operand::Global(index, added) => Value::Global(*index, *added as u64),
            Operand::Name(name, added) => match self.resolver.globals.find(self.unit, name) {
                Some(index) => match self.resolver.unknown.get(&index) {
                    None => Value::Global(index as u32, *added as u64),
                    Some(other) => {
                        return Err(format!(
                            "`{name}` holds the address of `{other}`, which is not known"
                        ));
                    }
                },
                None => return Err(format!("`{name}` is not known")),
            },
            Operand::Sink => Value::Reg(SINK),
            _ => return Err("this operand is not known here".into()),
        })
    }
}

fn register(operand: &Operand) -> Result<u32> {
    match operand {
        Operand::Register(register) => Ok(*register),
        Operand::Sink => Ok(SINK),
        _ => Err("a register is missing".into()),
    }
}
