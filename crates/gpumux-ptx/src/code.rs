//! What parsed text is: modules, kernels and resolved instructions.

/// Parsed PTX.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// The newest architecture that its texts were made for, such as 90 for `sm_90a`.
    pub target: u32,
    /// Kernels in order.
    pub kernels: Vec<Kernel>,
    /// Variables of the module, in order.
    pub globals: Vec<Global>,
    pub(crate) functions: Vec<Function>,
}

/// A kernel (`.entry`).
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its name, as mangled.
    pub name: String,
    /// Its parameters, laid out.
    pub parameters: Vec<Parameter>,
    /// Bytes of shared memory that it declares.
    pub shared: u32,
    /// Bytes of local memory per thread.
    pub local: u32,
    /// Registers that it declares (of PTX, not of the hardware).
    pub registers: u32,
    /// Most threads in a block that it was compiled for; 0: not said.
    pub max_threads: u32,
    pub(crate) function: Result<usize, String>,
}

impl Kernel {
    /// Whether it can be run; why not.
    pub fn usable(&self) -> Result<(), &str> {
        self.function.as_ref().map(|_| ()).map_err(String::as_str)
    }

    /// Bytes of all parameters together.
    pub fn parameter_bytes(&self) -> usize {
        self.parameters
            .last()
            .map_or(0, |last| last.offset + last.size)
    }
}

/// Where a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Bytes from the start.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// A variable of the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Global {
    /// Its name, as mangled.
    pub name: String,
    /// In constant memory.
    pub constant: bool,
    /// Managed memory.
    pub managed: bool,
    /// Alignment in bytes.
    pub align: u64,
    /// Size in bytes.
    pub size: u64,
    /// Its bytes at first; the rest is 0.
    pub initial: Vec<u8>,
    /// Where addresses of other variables go: offset, which variable, what is added.
    pub addresses: Vec<(usize, usize, u64)>,
}

/// A function with resolved code.
#[derive(Clone, Debug, Default)]
pub(crate) struct Function {
    pub(crate) code: Vec<Inst>,
    pub(crate) registers: u32,
    /// Bytes of local memory: variables and the parameters of calls.
    pub(crate) frame: u32,
    pub(crate) parameters: Vec<Place>,
    pub(crate) results: Vec<Place>,
}

/// A variable of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset: u32,
    pub(crate) size: u32,
}

/// One instruction.
#[derive(Clone, Debug)]
pub(crate) struct Inst {
    /// The predicate and what it must be.
    pub(crate) guard: Option<(u32, bool)>,
    pub(crate) op: Op,
    pub(crate) line: u32,
}

/// Types of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    Pred,
    /// Bits or unsigned.
    U(u8),
    S(u8),
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "pred" => Self::Pred,
            "b8" | "u8" => Self::U(1),
            "b16" | "u16" => Self::U(2),
            "b32" | "u32" => Self::U(4),
            "b64" | "u64" => Self::U(8),
            "s8" => Self::S(1),
            "s16" => Self::S(2),
            "s32" => Self::S(4),
            "s64" => Self::S(8),
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Bytes.
    pub(crate) fn size(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::U(size) | Self::S(size) => size.into(),
            Self::F16 | Self::Bf16 => 2,
            Self::F16x2 | Self::Bf16x2 | Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        !matches!(self, Self::Pred | Self::U(_) | Self::S(_))
    }
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    Reg(u32),
    /// A predicate, turned around.
    Not(u32),
    Const(u64),
    Special(Special),
    /// Address of a variable of the frame, in local memory.
    Frame(u32),
    /// Address of a variable of the module, and what is added.
    Global(u32, u64),
    /// Address of a kernel parameter, in parameter memory.
    Param(u32),
    /// Address behind the declared shared memory.
    Dynamic(u32),
}

/// Where results go that no instruction reads.
pub(crate) const SINK: u32 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Lane,
    Warp,
    Warps,
    Sm,
    Sms,
    GridId,
    LaneMask(Mask),
    Clock,
    ClockHigh,
    Clock64,
    Timer,
    TimerLow,
    TimerHigh,
    SharedTotal,
    SharedDynamic,
    WarpSize,
    WorkspaceHigh,
    WorkspaceLow,
    Zero,
    One,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mask {
    Eq,
    Le,
    Lt,
    Ge,
    Gt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Address {
    pub(crate) space: Space,
    pub(crate) base: Value,
    pub(crate) offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    Abs,
    Neg,
    Not,
    Cnot,
    Popc,
    Clz,
    Brev,
    Bfind,
    BfindShift,
    Rcp,
    Sqrt,
    Rsqrt,
    Sin,
    Cos,
    Lg2,
    Ex2,
    Tanh,
    Finite,
    Infinite,
    Number,
    NotANumber,
    Normal,
    Subnormal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    MulHigh,
    MulWide,
    Mul24,
    Mul24High,
    Div,
    Rem,
    Min,
    Max,
    MinNan,
    MaxNan,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    Copysign,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ternary {
    Mad,
    MadHigh,
    MadWide,
    Mad24,
    Mad24High,
    Fma,
    Sad,
    Bfe,
    Prmt,
    ShfLeft,
    ShfRight,
    ShfLeftClamp,
    ShfRightClamp,
    Dp4a(bool, bool),
    Slct(bool),
}

/// How a result is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
    /// To whole numbers, in these ways.
    WholeNearest,
    WholeZero,
    WholeDown,
    WholeUp,
}

/// Type, rounding, and whether it saturates or flushes denormals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) kind: Type,
    pub(crate) round: Round,
    pub(crate) saturate: bool,
    pub(crate) flush: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// The same for floats, true also when one is not a number.
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Atomic {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
    MatchAny,
    MatchAll,
    Reduce(Binary, Type),
    Elect,
    Sync,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierResult {
    None,
    Count,
    And,
    Or,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Nop,
    Move {
        to: u32,
        from: Value,
        size: u32,
    },
    /// Parts of a value into registers, or the other way round.
    Unpack {
        to: Vec<u32>,
        from: Value,
        size: u32,
    },
    Pack {
        to: u32,
        from: Vec<Value>,
        size: u32,
    },
    Unary {
        op: Unary,
        kind: Kind,
        to: u32,
        a: Value,
    },
    Binary {
        op: Binary,
        kind: Kind,
        to: u32,
        a: Value,
        b: Value,
    },
    Ternary {
        op: Ternary,
        kind: Kind,
        to: u32,
        a: Value,
        b: Value,
        c: Value,
    },
    /// Add or subtract with the carry flag: in, out.
    Carry {
        subtract: bool,
        kind: Type,
        to: u32,
        a: Value,
        b: Value,
        carry_in: bool,
        carry_out: bool,
    },
    MadCarry {
        high: bool,
        kind: Type,
        to: u32,
        a: Value,
        b: Value,
        c: Value,
        carry_in: bool,
        carry_out: bool,
    },
    Bfi {
        kind: Type,
        to: u32,
        a: Value,
        b: Value,
        c: Value,
        d: Value,
    },
    Lop3 {
        to: u32,
        a: Value,
        b: Value,
        c: Value,
        table: u8,
    },
    Convert {
        to: u32,
        kind: Kind,
        from: Type,
        a: Value,
    },
    /// Two floats into a pair of halves.
    ConvertPair {
        to: u32,
        kind: Type,
        a: Value,
        b: Value,
    },
    /// `set` gives a number, `setp` predicates.
    Compare {
        to: u32,
        other: u32,
        how: Compare,
        kind: Type,
        a: Value,
        b: Value,
        with: Option<(Binary, Value)>,
        /// What is true for `set`.
        truth: u64,
        /// Denormals are zeros.
        flush: bool,
    },
    Select {
        to: u32,
        size: u32,
        a: Value,
        b: Value,
        c: Value,
    },
    Load {
        to: Vec<u32>,
        kind: Type,
        from: Address,
    },
    Store {
        from: Vec<Value>,
        kind: Type,
        to: Address,
    },
    Atomic {
        op: Atomic,
        kind: Type,
        to: u32,
        at: Address,
        a: Value,
        b: Value,
    },
    CopyAsync {
        to: Address,
        from: Address,
        bytes: u32,
        used: Value,
    },
    /// A space's address into a generic one, or back.
    ToGeneric {
        to: u32,
        a: Value,
        space: Space,
        back: bool,
    },
    IsSpace {
        to: u32,
        a: Value,
        space: Space,
    },
    Branch {
        to: usize,
    },
    BranchTable {
        index: Value,
        to: Vec<usize>,
    },
    Call {
        function: usize,
        arguments: Vec<Place>,
        results: Vec<Place>,
    },
    Print {
        format: Place,
        arguments: Place,
        result: Option<Place>,
    },
    Assert {
        arguments: Vec<Place>,
    },
    Return,
    Exit,
    Trap,
    Barrier {
        id: Value,
        threads: Option<Value>,
        arrive: bool,
        result: BarrierResult,
        to: u32,
        a: Value,
    },
    Shuffle {
        op: Shuffle,
        to: u32,
        ok: u32,
        a: Value,
        b: Value,
        c: Value,
        mask: Value,
    },
    Vote {
        op: Vote,
        to: u32,
        other: u32,
        a: Value,
        size: u32,
        mask: Value,
    },
    ActiveMask {
        to: u32,
    },
    Sleep {
        ns: Value,
    },
    Fence,
    /// Barriers in memory (`mbarrier`); their word is laid out in `exec::phase`.
    InitBarrier {
        at: Address,
        count: Value,
    },
    Arrive {
        to: u32,
        at: Address,
        count: Value,
        drop: bool,
    },
    TestBarrier {
        to: u32,
        at: Address,
        state: Value,
        parity: bool,
    },
    PendingCount {
        to: u32,
        state: Value,
    },
}
