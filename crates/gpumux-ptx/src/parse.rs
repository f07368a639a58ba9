//! Tokens into modules. Instructions are resolved in [`instruction`]; here is what is around them.

mod instruction;

use std::collections::HashMap;

use crate::{
    code::{Function, Global, Inst, Kernel, Module, Op, Parameter, Place, Special, Type},
    lex::{Token, tokens},
};

/// Why text is no PTX.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct ParseError {
    /// Where.
    pub line: u32,
    /// What is wrong.
    pub what: String,
}

type Result<T> = std::result::Result<T, ParseError>;

/// Most registers of a function, bytes of a variable's initial value, and bytes of a frame.
const MOST_REGISTERS: u32 = 1 << 16;
const MOST_INITIAL: u64 = 64 << 20;
const MOST_FRAME: u32 = 1 << 24;

impl Module {
    /// Reads PTX text.
    ///
    /// # Errors
    /// Names the line, when it is not PTX. An instruction that is not known is no error here.
    pub fn parse(text: &str) -> Result<Self> {
        Self::link(&[text])
    }

    /// Reads several texts into one module. Names that are not `.visible`, `.weak` or `.common` belong to their own text.
    ///
    /// # Errors
    /// Names the line, when one is not PTX or defines again what an earlier one has.
    pub fn link(texts: &[&str]) -> Result<Self> {
        let mut parser = Parser::default();
        for text in texts {
            parser.unit(text)?;
        }
        if texts.iter().any(|text| text.contains(GRID_FUNCTIONS)) {
            parser.unit(include_str!("grid.ptx"))?;
        }
        Ok(parser.finish())
    }
}

/// How the functions of CUDA's device runtime begin that are there without its library.
const GRID_FUNCTIONS: &str = "cudaCG";

/// What a name means inside a function.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    Register(u32),
    Frame(Place),
    KernelParameter(u32),
    Shared(u32),
    /// Of the kernel that is read: behind what all kernels have.
    OwnShared(u32),
    Dynamic,
    /// A variable that a function declares for itself.
    Global(u32),
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
enum Operand {
    Register(u32),
    NotRegister(u32),
    /// A whole number, or a float's bits.
    Number(u64),
    Float(f64),
    Special(Special),
    Frame(Place, i64),
    Parameter(u32, i64),
    Shared(u64),
    OwnShared(u64),
    Dynamic(i64),
    Global(u32, i64),
    /// Something of the module, or a label: known at the end.
    Name(String, i64),
    Memory(Box<Operand>, i64),
    Vector(Vec<Operand>),
    List(Vec<Operand>),
    Pair(Box<Operand>, Box<Operand>),
    Sink,
}

/// An instruction that is not resolved.
#[derive(Clone, Debug)]
struct Raw {
    guard: Option<(u32, bool)>,
    words: String,
    operands: Vec<Operand>,
    line: u32,
    /// Why it could not be read.
    problem: Option<String>,
}

/// Where a name of the module is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linkage {
    /// Its own text.
    Own,
    Visible,
    /// All, and there may be several of them.
    Weak,
    /// It is only declared.
    Extern,
}

/// Where names lead: those that all texts see, and those of each text.
#[derive(Default)]
struct Directory {
    shared: HashMap<String, (usize, Linkage)>,
    own: HashMap<(usize, String), usize>,
}

impl Directory {
    fn find(&self, unit: usize, name: &str) -> Option<usize> {
        let own = self.own.get(&(unit, name.to_owned())).copied();
        own.or_else(|| self.shared.get(name).map(|it| it.0))
    }

    /// Enters a definition; false when there is one that it may not stand beside.
    fn add(&mut self, unit: usize, name: &str, index: usize, linkage: Linkage) -> bool {
        if linkage == Linkage::Own {
            return self.own.insert((unit, name.to_owned()), index).is_none();
        }
        match self.shared.get(name) {
            Some((_, Linkage::Weak)) if linkage == Linkage::Weak => {}
            Some((_, Linkage::Weak)) | None => {
                self.shared.insert(name.to_owned(), (index, linkage));
            }
            Some(_) => return linkage == Linkage::Weak,
        }
        true
    }
}

/// A function's body, read.
#[derive(Default)]
struct Body {
    unit: usize,
    raw: Vec<Raw>,
    labels: HashMap<String, usize>,
    tables: HashMap<String, Vec<String>>,
    registers: u32,
    frame: u32,
    parameters: Vec<Place>,
    results: Vec<Place>,
}

#[derive(Default)]
struct Parser {
    /// Number of the text that is read, and its tokens.
    unit: usize,
    target: u32,
    tokens: Vec<(Token, u32)>,
    at: usize,
    kernels: Vec<(Kernel, Option<Body>)>,
    kernel_names: Directory,
    functions: Vec<Body>,
    function_names: Directory,
    globals: Vec<Global>,
    global_names: Directory,
    /// Variables of the text in shared memory.
    shared: HashMap<String, u32>,
    /// Bytes of shared memory of texts and functions, which all kernels have, and of the kernel that is read.
    shared_size: u32,
    own_shared: Option<u32>,
    shared_align: u32,
    dynamic: Vec<String>,
    addresses: Vec<Reference>,
    scopes: Vec<HashMap<String, Meaning>>,
}

/// An address in a variable's initial value.
struct Reference {
    unit: usize,
    variable: usize,
    offset: usize,
    name: String,
    added: u64,
}

/// A declared variable.
struct Variable {
    name: String,
    kind: Type,
    align: u32,
    size: u64,
    managed: bool,
    open: bool,
}

impl Parser {
    /// Reads one more text.
    fn unit(&mut self, text: &str) -> Result<()> {
        self.tokens = tokens(text).map_err(|line| ParseError {
            line,
            what: "this is not PTX".into(),
        })?;
        self.at = 0;
        self.shared.clear();
        self.dynamic.clear();
        if !self.is_word(".version") {
            return self.fail("PTX begins with .version");
        }
        while self.at < self.tokens.len() {
            self.top()?;
        }
        self.unit += 1;
        Ok(())
    }

    // Tokens

    fn line(&self) -> u32 {
        let at = self.at.min(self.tokens.len().saturating_sub(1));
        self.tokens.get(at).map_or(0, |it| it.1)
    }

    fn fail<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(ParseError {
            line: self.line(),
            what: what.into(),
        })
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|it| &it.0)
    }

    fn next(&mut self) -> Result<Token> {
        match self.tokens.get(self.at) {
            Some((token, _)) => {
                self.at += 1;
                Ok(token.clone())
            }
            None => self.fail("the text ends too early"),
        }
    }

    fn is_word(&self, word: &str) -> bool {
        matches!(self.peek(), Some(Token::Word(it)) if it == word)
    }

    fn is_mark(&self, mark: char) -> bool {
        self.peek() == Some(&Token::Mark(mark))
    }

    fn take_mark(&mut self, mark: char) -> bool {
        let there = self.is_mark(mark);
        self.at += usize::from(there);
        there
    }

    fn take_word(&mut self, word: &str) -> bool {
        let there = self.is_word(word);
        self.at += usize::from(there);
        there
    }

    fn expect(&mut self, mark: char) -> Result<()> {
        match self.take_mark(mark) {
            true => Ok(()),
            false => self.fail(format!("`{mark}` is missing")),
        }
    }

    fn word(&mut self) -> Result<String> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            _ => self.fail("a name is missing"),
        }
    }

    fn number(&mut self) -> Result<u64> {
        let negative = self.take_mark('-');
        match self.next()? {
            Token::Number(number) if negative => Ok(number.wrapping_neg()),
            Token::Number(number) => Ok(number),
            _ => self.fail("a number is missing"),
        }
    }

    /// Everything up to a mark outside of all brackets.
    fn skip_to(&mut self, end: char) -> Result<()> {
        let mut depth = 0_u32;
        loop {
            match self.next()? {
                Token::Mark(mark) if mark == end && depth == 0 => return Ok(()),
                Token::Mark('{' | '(' | '[') => depth += 1,
                Token::Mark('}' | ')' | ']') => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
    }

    fn skip_block(&mut self) -> Result<()> {
        self.skip_to('{')?;
        self.skip_to('}')
    }

    // The module

    fn top(&mut self) -> Result<()> {
        let mut linkage = Linkage::Own;
        loop {
            let word = match self.next()? {
                Token::Word(word) => word,
                // Left over from a directive.
                Token::Mark(';') => return Ok(()),
                _ => return self.fail("a directive is missing"),
            };
            match word.as_str() {
                ".version" | ".address_size" => {
                    self.next()?;
                    return Ok(());
                }
                ".target" => {
                    let target = self.word()?;
                    let digits = target.trim_matches(|it: char| !it.is_ascii_digit());
                    self.target = self.target.max(digits.parse().unwrap_or(0));
                    while self.take_mark(',') {
                        self.word()?;
                    }
                    return Ok(());
                }
                ".visible" => linkage = Linkage::Visible,
                ".weak" | ".common" => linkage = Linkage::Weak,
                ".extern" => linkage = Linkage::Extern,
                ".entry" => return self.kernel(linkage),
                ".func" => return self.function(linkage),
                ".global" | ".const" => return self.global(word == ".const", Some(linkage)),
                ".shared" => return self.module_shared(),
                ".section" => return self.skip_block(),
                ".pragma" | ".alias" => return self.skip_to(';'),
                other => return self.fail(format!("`{other}` is not known here")),
            }
        }
    }

    /// Alignment, type, name and dimensions behind a space.
    fn variable(&mut self) -> Result<Variable> {
        let (mut align, mut kind, mut managed, mut vector) = (None, None, false, 1);
        let mut pointer = false;
        let name = loop {
            let word = self.word()?;
            match word.as_str() {
                // Behind `.ptr` it is that of what the parameter points to.
                ".align" if pointer => {
                    self.number()?;
                }
                ".align" => align = Some(self.number()? as u32),
                ".attribute" => {
                    self.expect('(')?;
                    managed |= self.is_word(".managed");
                    self.skip_to(')')?;
                }
                ".ptr" => pointer = true,
                ".global" | ".const" | ".shared" | ".local" | ".generic" => {}
                ".v2" => vector = 2,
                ".v4" => vector = 4,
                word if word.starts_with('.') => match Type::parse(&word[1..]) {
                    Some(known) if kind.is_none() => kind = Some(known),
                    _ if word == ".b128" => {
                        kind = Some(Type::U(8));
                        vector *= 2;
                    }
                    // Textures and the like: what refers to them will not be known.
                    _ => kind = Some(Type::U(8)),
                },
                _ => break word,
            }
        };
        let kind = kind.unwrap_or(Type::U(4));
        let mut size = u64::from(kind.size()) * vector;
        let align = align.unwrap_or(size as u32);
        if !align.is_power_of_two() || align > 1 << 16 {
            return self.fail(format!("alignment {align}"));
        }
        let mut open = false;
        while self.take_mark('[') {
            if self.take_mark(']') {
                open = true;
                continue;
            }
            size = match size.checked_mul(self.number()?) {
                Some(size) if size < 1 << 40 => size,
                _ => return self.fail(format!("`{name}` is too large")),
            };
            self.expect(']')?;
        }
        Ok(Variable {
            name,
            kind,
            align,
            size,
            managed,
            open,
        })
    }

    /// A variable of the module; without linkage one of the function that is read.
    fn global(&mut self, constant: bool, linkage: Option<Linkage>) -> Result<()> {
        loop {
            let variable = self.variable()?;
            let mut initial = Vec::new();
            let index = self.globals.len();
            if self.take_mark('=') {
                self.initial(index, variable.kind.size() as usize, &mut initial)?;
            }
            let size = if variable.open {
                initial.len() as u64
            } else {
                variable.size
            };
            if initial.len() as u64 > MOST_INITIAL {
                return self.fail(format!("`{}` is too large", variable.name));
            }
            initial.truncate(size as usize);
            let known = match linkage {
                Some(Linkage::Extern) => true,
                Some(linkage) => {
                    let (unit, name) = (self.unit, variable.name.as_str());
                    if !self.global_names.add(unit, name, index, linkage) {
                        return self.fail(format!("`{name}` is defined twice"));
                    }
                    linkage != Linkage::Own && self.global_names.find(unit, name) != Some(index)
                }
                None => {
                    self.declare(variable.name.clone(), Meaning::Global(index as u32));
                    false
                }
            };
            if known {
                self.addresses.retain(|it| it.variable != index);
            } else {
                self.globals.push(Global {
                    name: variable.name,
                    constant,
                    managed: variable.managed,
                    align: variable.align.into(),
                    size: size.max(1),
                    initial,
                    addresses: Vec::new(),
                });
            }
            if !self.take_mark(',') {
                return self.expect(';');
            }
        }
    }

    /// One value, or a list of them, of `size` bytes each.
    fn initial(&mut self, variable: usize, size: usize, bytes: &mut Vec<u8>) -> Result<()> {
        if self.take_mark('{') {
            while !self.take_mark('}') {
                self.initial(variable, size, bytes)?;
                self.take_mark(',');
            }
            return Ok(());
        }
        let at = bytes.len();
        let negative = self.take_mark('-');
        let value = match self.next()? {
            Token::Number(number) if negative => number.wrapping_neg(),
            Token::Number(number) => number,
            Token::Float(number) if size == 4 => (number as f32).to_bits().into(),
            Token::Float(number) => number.to_bits(),
            Token::Word(mut name) => {
                if name == "generic" {
                    self.expect('(')?;
                    name = self.word()?;
                    self.expect(')')?;
                }
                let added = if self.take_mark('+') {
                    self.number()?
                } else {
                    0
                };
                self.addresses.push(Reference {
                    unit: self.unit,
                    variable,
                    offset: at,
                    name,
                    added,
                });
                0
            }
            _ => return self.fail("a value is missing"),
        };
        bytes.extend(&value.to_le_bytes()[..size.min(8)]);
        Ok(())
    }

    fn module_shared(&mut self) -> Result<()> {
        let variable = self.variable()?;
        if variable.open || variable.size == 0 {
            self.dynamic.push(variable.name);
        } else {
            let at = self.place_shared(&variable)?;
            self.shared.insert(variable.name, at);
        }
        self.skip_to(';')
    }

    fn place_shared(&mut self, variable: &Variable) -> Result<u32> {
        let size = self.own_shared.as_mut().unwrap_or(&mut self.shared_size);
        let at = size.next_multiple_of(variable.align);
        match u64::from(at) + variable.size {
            end if end <= MOST_FRAME.into() => *size = end as u32,
            _ => return self.fail(format!("`{}` is too large", variable.name)),
        }
        self.shared_align = self.shared_align.max(variable.align);
        Ok(at)
    }

    /// Parameters in brackets.
    fn parameters(&mut self) -> Result<Vec<Variable>> {
        let mut found = Vec::new();
        self.expect('(')?;
        while !self.take_mark(')') {
            let word = self.word()?;
            if word != ".param" && word != ".reg" {
                return self.fail("a parameter is missing");
            }
            found.push(self.variable()?);
            self.take_mark(',');
        }
        Ok(found)
    }

    fn kernel(&mut self, linkage: Linkage) -> Result<()> {
        let name = self.word()?;
        let variables = if self.is_mark('(') {
            self.parameters()?
        } else {
            Vec::new()
        };
        let mut scope = HashMap::new();
        let (mut at, mut parameters) = (0_u64, Vec::new());
        for variable in variables {
            at = at.next_multiple_of(variable.align.into());
            if at + variable.size > 1 << 15 {
                return self.fail(format!("kernel `{name}`: more than 32 KiB of parameters"));
            }
            parameters.push(Parameter {
                offset: at as usize,
                size: variable.size as usize,
            });
            scope.insert(variable.name, Meaning::KernelParameter(at as u32));
            at += variable.size;
        }
        let (mut max_threads, mut cluster) = (0, 1);
        while let Some(Token::Word(word)) = self.peek() {
            let counts = word == ".maxntid" || word == ".reqntid";
            let clusters = word == ".reqnctapercluster" || word == ".maxclusterrank";
            self.at += 1;
            let mut product = 1_u64;
            while let Some(Token::Number(number)) = self.peek() {
                product = product.saturating_mul(*number);
                self.at += 1;
                self.take_mark(',');
            }
            if counts {
                max_threads = product.min(1024) as u32;
            }
            if clusters {
                cluster = product;
            }
        }
        self.own_shared = Some(0);
        let body = if self.take_mark(';') {
            None
        } else {
            Some(self.body(scope, Body::default())?)
        };
        let (registers, local) = body.as_ref().map_or((0, 0), |it| (it.registers, it.frame));
        let shared = self.own_shared.take().unwrap_or(0);
        let mut kernel = Kernel {
            name,
            parameters,
            shared,
            local,
            registers,
            max_threads,
            function: Err("it is only declared".into()),
        };
        if body.is_none() {
            return Ok(());
        }
        let body = match cluster {
            0 | 1 => body,
            _ => {
                kernel.function = Err("clusters of blocks are not known".into());
                None
            }
        };
        // Kernels are found by their names from outside, whatever their linkage.
        let linkage = match linkage {
            Linkage::Weak => Linkage::Weak,
            _ => Linkage::Visible,
        };
        let index = self.kernels.len();
        if !self
            .kernel_names
            .add(self.unit, &kernel.name, index, linkage)
        {
            return self.fail(format!("`{}` is defined twice", kernel.name));
        }
        if self.kernel_names.find(self.unit, &kernel.name) == Some(index) {
            self.kernels.push((kernel, body));
        }
        Ok(())
    }

    fn function(&mut self, linkage: Linkage) -> Result<()> {
        let mut body = Body {
            registers: 1,
            ..Body::default()
        };
        let mut scope = HashMap::new();
        while self.take_word(".attribute") {
            self.expect('(')?;
            self.skip_to(')')?;
        }
        if self.is_mark('(') {
            for variable in self.parameters()? {
                let place = self.place(&mut body, &variable)?;
                body.results.push(place);
                scope.insert(variable.name, Meaning::Frame(place));
            }
        }
        let name = self.word()?;
        if self.is_mark('(') {
            for variable in self.parameters()? {
                let place = self.place(&mut body, &variable)?;
                body.parameters.push(place);
                scope.insert(variable.name, Meaning::Frame(place));
            }
        }
        while matches!(
            self.peek(),
            Some(Token::Word(_) | Token::Number(_) | Token::Mark(','))
        ) {
            self.at += 1;
        }
        if self.take_mark(';') {
            return Ok(());
        }
        let body = self.body(scope, body)?;
        let index = self.functions.len();
        if !self.function_names.add(self.unit, &name, index, linkage) {
            return self.fail(format!("`{name}` is defined twice"));
        }
        self.functions.push(body);
        Ok(())
    }

    // Bodies

    fn place(&mut self, body: &mut Body, variable: &Variable) -> Result<Place> {
        let offset = body.frame.next_multiple_of(variable.align.max(1));
        if u64::from(offset) + variable.size > MOST_FRAME.into() {
            return self.fail(format!("`{}` is too large", variable.name));
        }
        body.frame = offset + variable.size as u32;
        Ok(Place {
            offset,
            size: variable.size as u32,
        })
    }

    fn body(&mut self, scope: HashMap<String, Meaning>, mut body: Body) -> Result<Body> {
        // Register 0 takes results that no instruction reads.
        body.registers = 1;
        body.unit = self.unit;
        self.scopes = vec![scope];
        self.expect('{')?;
        while !self.scopes.is_empty() {
            if self.take_mark('}') {
                if self.scopes.len() == 1 {
                    break;
                }
                self.scopes.pop();
            } else if self.take_mark('{') {
                self.scopes.push(HashMap::new());
            } else {
                self.statement(&mut body)?;
            }
        }
        Ok(body)
    }

    fn declare(&mut self, name: String, meaning: Meaning) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name, meaning);
        }
    }

    fn statement(&mut self, body: &mut Body) -> Result<()> {
        let mut guard = None;
        if self.take_mark('@') {
            let wanted = !self.take_mark('!');
            let name = self.word()?;
            guard = match self.meaning(&name) {
                Some(Meaning::Register(register)) => Some((register, wanted)),
                _ => return self.fail(format!("`{name}` is no predicate")),
            };
        }
        let line = self.line();
        if self.take_mark(';') {
            return Ok(());
        }
        let words = self.word()?;
        match words.as_str() {
            ".reg" => return self.registers(body),
            ".local" | ".param" => loop {
                let variable = self.variable()?;
                let place = self.place(body, &variable)?;
                self.declare(variable.name, Meaning::Frame(place));
                if !self.take_mark(',') {
                    return self.expect(';');
                }
            },
            ".shared" => {
                let variable = self.variable()?;
                let meaning = match variable.open {
                    true => Meaning::Dynamic,
                    false => match self.own_shared {
                        Some(_) => Meaning::OwnShared(self.place_shared(&variable)?),
                        None => Meaning::Shared(self.place_shared(&variable)?),
                    },
                };
                self.declare(variable.name, meaning);
                return self.skip_to(';');
            }
            ".global" | ".const" => return self.global(words == ".const", None),
            ".extern" if self.take_word(".shared") => {
                let variable = self.variable()?;
                self.declare(variable.name, Meaning::Dynamic);
                return self.skip_to(';');
            }
            ".pragma" => return self.skip_to(';'),
            _ => {}
        }
        if self.take_mark(':') {
            return self.label(words, body);
        }
        let from = self.at;
        let (operands, problem) = match self.operands() {
            _ if words.starts_with('.') => (Vec::new(), Some("this directive".to_owned())),
            Ok(operands) => (operands, None),
            Err(error) => (Vec::new(), Some(error.what)),
        };
        if problem.is_some() {
            // What is not understood makes its own function unusable, and no other.
            self.at = from;
            self.skip_to(';')?;
        }
        body.raw.push(Raw {
            guard,
            words,
            operands,
            line,
            problem,
        });
        Ok(())
    }

    fn operands(&mut self) -> Result<Vec<Operand>> {
        let mut operands = Vec::new();
        while !self.is_mark(';') {
            operands.push(self.operand()?);
            if !self.take_mark(',') {
                break;
            }
        }
        self.expect(';')?;
        Ok(operands)
    }

    fn label(&mut self, name: String, body: &mut Body) -> Result<()> {
        if self.take_word(".branchtargets") {
            let mut targets = vec![self.word()?];
            while self.take_mark(',') {
                targets.push(self.word()?);
            }
            body.tables.insert(name, targets);
            return self.expect(';');
        }
        if self.is_word(".callprototype") || self.is_word(".calltargets") {
            return self.skip_to(';');
        }
        body.labels.insert(name, body.raw.len());
        Ok(())
    }

    fn registers(&mut self, body: &mut Body) -> Result<()> {
        self.word()?; // the type
        loop {
            let name = self.word()?;
            let mut names = vec![name.clone()];
            if self.take_mark('<') {
                let count = self.number()?;
                if count > MOST_REGISTERS.into() {
                    return self.fail(format!("{count} registers"));
                }
                names = (0..count).map(|i| format!("{name}{i}")).collect();
                self.expect('>')?;
            }
            for name in names {
                self.declare(name, Meaning::Register(body.registers));
                body.registers += 1;
            }
            if body.registers > MOST_REGISTERS {
                return self.fail("too many registers");
            }
            if !self.take_mark(',') {
                return self.expect(';');
            }
        }
    }

    fn meaning(&self, name: &str) -> Option<Meaning> {
        let local = self.scopes.iter().rev().find_map(|scope| scope.get(name));
        local.copied().or_else(|| {
            if self.dynamic.iter().any(|it| it == name) {
                return Some(Meaning::Dynamic);
            }
            self.shared.get(name).map(|at| Meaning::Shared(*at))
        })
    }

    fn operand(&mut self) -> Result<Operand> {
        let first = self.simple()?;
        if self.take_mark('|') {
            return Ok(Operand::Pair(first.into(), self.simple()?.into()));
        }
        Ok(first)
    }

    fn simple(&mut self) -> Result<Operand> {
        match self.next()? {
            Token::Number(number) => Ok(Operand::Number(number)),
            Token::Float(number) => Ok(Operand::Float(number)),
            Token::Mark('-') => match self.next()? {
                Token::Number(number) => Ok(Operand::Number(number.wrapping_neg())),
                Token::Float(number) => Ok(Operand::Float(-number)),
                _ => self.fail("a number is missing"),
            },
            Token::Mark('!') => match self.simple()? {
                Operand::Register(register) => Ok(Operand::NotRegister(register)),
                _ => self.fail("a predicate is missing"),
            },
            Token::Mark('{') => Ok(Operand::Vector(self.several('}')?)),
            Token::Mark('(') => Ok(Operand::List(self.several(')')?)),
            Token::Mark('[') => {
                let base = self.simple()?;
                let offset = if self.take_mark('+') {
                    self.number()? as i64
                } else {
                    0
                };
                self.expect(']')?;
                Ok(Operand::Memory(base.into(), offset))
            }
            Token::Word(word) => {
                if word == "_" {
                    return Ok(Operand::Sink);
                }
                if let Some(special) = special(&word) {
                    return Ok(Operand::Special(special));
                }
                let mut added = 0;
                let meaning = self.meaning(&word);
                if !matches!(meaning, Some(Meaning::Register(_))) && self.take_mark('+') {
                    added = self.number()? as i64;
                }
                Ok(match meaning {
                    Some(Meaning::Register(register)) => Operand::Register(register),
                    Some(Meaning::Frame(place)) => Operand::Frame(place, added),
                    Some(Meaning::KernelParameter(at)) => Operand::Parameter(at, added),
                    Some(Meaning::Shared(at)) => {
                        Operand::Shared(u64::from(at).wrapping_add(added as u64))
                    }
                    Some(Meaning::OwnShared(at)) => {
                        Operand::OwnShared(u64::from(at).wrapping_add(added as u64))
                    }
                    Some(Meaning::Dynamic) => Operand::Dynamic(added),
                    Some(Meaning::Global(index)) => Operand::Global(index, added),
                    None => Operand::Name(word, added),
                })
            }
            other => self.fail(format!("`{other:?}` is no operand")),
        }
    }

    fn several(&mut self, end: char) -> Result<Vec<Operand>> {
        let mut found = Vec::new();
        while !self.take_mark(end) {
            found.push(self.simple()?);
            if !self.take_mark(',') && !self.is_mark(end) {
                return self.fail(format!("`{end}` is missing"));
            }
        }
        Ok(found)
    }

    // The end

    fn finish(mut self) -> Module {
        // Variables whose initial value is not known spoil the kernels that use them.
        let mut unknown = HashMap::new();
        for it in std::mem::take(&mut self.addresses) {
            match self.global_names.find(it.unit, &it.name) {
                Some(of) => {
                    let global = &mut self.globals[it.variable];
                    global.addresses.push((it.offset, of, it.added));
                }
                None => {
                    unknown.insert(it.variable, it.name);
                }
            }
        }
        let bodies = std::mem::take(&mut self.functions);
        let signatures: Vec<(Vec<Place>, Vec<Place>)> = bodies
            .iter()
            .map(|body| (body.parameters.clone(), body.results.clone()))
            .collect();
        let shared = self.shared_size.next_multiple_of(self.shared_align.max(1));
        let resolver = Resolver {
            shared,
            functions: &self.function_names,
            signatures: &signatures,
            globals: &self.global_names,
            unknown: &unknown,
        };
        // A device function that is not usable spoils only the kernels that call it.
        let mut problems = Vec::new();
        let mut functions = Vec::new();
        for body in bodies {
            let resolved = resolver.function(body);
            problems.push(resolved.as_ref().err().cloned());
            functions.push(resolved.unwrap_or_default());
        }
        let mut kernels = Vec::new();
        for (mut kernel, body) in self.kernels {
            kernel.shared += shared;
            if let Some(body) = body {
                kernel.function =
                    resolver.function(body).and_then(|function| {
                        match first_problem(&function, &functions, &problems) {
                            Some(problem) => Err(problem),
                            None => {
                                functions.push(function);
                                problems.push(None);
                                Ok(functions.len() - 1)
                            }
                        }
                    });
            }
            kernels.push(kernel);
        }
        Module {
            target: self.target,
            kernels,
            globals: self.globals,
            functions,
        }
    }
}

/// What is wrong with the functions that a function calls, directly or not.
fn first_problem(
    function: &Function,
    all: &[Function],
    problems: &[Option<String>],
) -> Option<String> {
    let mut seen = vec![false; all.len()];
    let mut open: Vec<&Function> = vec![function];
    while let Some(function) = open.pop() {
        for inst in &function.code {
            if let Op::Call { function, .. } = inst.op
                && !std::mem::replace(&mut seen[function], true)
            {
                if let Some(problem) = &problems[function] {
                    return Some(problem.clone());
                }
                open.push(&all[function]);
            }
        }
    }
    None
}

struct Resolver<'a> {
    /// Bytes of shared memory that all kernels have.
    shared: u32,
    functions: &'a Directory,
    signatures: &'a [(Vec<Place>, Vec<Place>)],
    globals: &'a Directory,
    /// Variables that contain addresses of what is not known.
    unknown: &'a HashMap<usize, String>,
}

impl Resolver<'_> {
    fn function(&self, body: Body) -> std::result::Result<Function, String> {
        let mut code = Vec::with_capacity(body.raw.len() + 1);
        for raw in &body.raw {
            let op = self
                .op(raw, &body)
                .map_err(|what| format!("line {}: {what}", raw.line))?;
            code.push(Inst {
                guard: raw.guard,
                op,
                line: raw.line,
            });
        }
        // A body may end without `ret`; labels may stand at its end.
        code.push(Inst {
            guard: None,
            op: Op::Return,
            line: 0,
        });
        Ok(Function {
            code,
            registers: body.registers,
            frame: body.frame.next_multiple_of(16),
            parameters: body.parameters,
            results: body.results,
        })
    }
}

fn special(word: &str) -> Option<Special> {
    use crate::code::Mask;
    let axis = |word: &str| match word {
        ".x" => Some(0),
        ".y" => Some(1),
        ".z" => Some(2),
        _ => None,
    };
    let (name, rest) = word.split_at(word.find('.').unwrap_or(word.len()));
    Some(match (name, axis(rest)) {
        ("%tid", Some(axis)) => Special::Tid(axis),
        ("%ntid", Some(axis)) => Special::Ntid(axis),
        ("%ctaid", Some(axis)) => Special::Ctaid(axis),
        ("%nctaid", Some(axis)) => Special::Nctaid(axis),
        ("%clusterid", Some(axis)) => Special::Ctaid(axis),
        ("%nclusterid", Some(axis)) => Special::Nctaid(axis),
        ("%cluster_ctaid", Some(_)) | ("%cluster_ctarank", None) => Special::Zero,
        ("%cluster_nctaid", Some(_)) | ("%cluster_nctarank", None) => Special::One,
        ("%laneid", None) => Special::Lane,
        ("%warpid", None) => Special::Warp,
        ("%nwarpid", None) => Special::Warps,
        ("%smid", None) => Special::Sm,
        ("%nsmid", None) => Special::Sms,
        ("%gridid", None) => Special::GridId,
        ("%lanemask_eq", None) => Special::LaneMask(Mask::Eq),
        ("%lanemask_le", None) => Special::LaneMask(Mask::Le),
        ("%lanemask_lt", None) => Special::LaneMask(Mask::Lt),
        ("%lanemask_ge", None) => Special::LaneMask(Mask::Ge),
        ("%lanemask_gt", None) => Special::LaneMask(Mask::Gt),
        ("%clock", None) => Special::Clock,
        ("%clock_hi", None) => Special::ClockHigh,
        ("%clock64", None) => Special::Clock64,
        ("%globaltimer", None) => Special::Timer,
        ("%globaltimer_lo", None) => Special::TimerLow,
        ("%globaltimer_hi", None) => Special::TimerHigh,
        ("%total_smem_size", None) => Special::SharedTotal,
        ("%dynamic_smem_size", None) => Special::SharedDynamic,
        ("WARP_SZ", None) => Special::WarpSize,
        // Where cooperative groups find the memory for their grid barrier.
        ("%envreg1", None) => Special::WorkspaceHigh,
        ("%envreg2", None) => Special::WorkspaceLow,
        _ => return None,
    })
}
