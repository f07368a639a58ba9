//! Modules and functions: PTX, loaded in a context.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use gpumux_emu::protocol::Work;
use gpumux_ptx::Launch;

use crate::{
    border::{Arguments, Image, JitOptions, MAX_REGISTERS, Refused, Text},
    context::{Context, current},
    effect::Effect,
    error::{CuError, Result},
    fault::{self, Kind},
    hold,
    interpret::Interpreted,
    kernel::{self, Kernel, Shape},
    library::KERNELS,
    memory,
    op::{Op, OpWork},
    process::{Registry, lock, process},
    stream::stream,
    watch,
};

/// Shared memory of a block, in bytes: without asking for more, at most, and what the system takes of an SM's.
const SHARED: u32 = 49_152;
const MOST_SHARED: u32 = 232_448;
const SM_SHARED: u32 = 233_472;
const RESERVED_SHARED: u32 = 1024;

/// Line between the texts of units that were linked; a load takes them apart again.
pub(crate) const BETWEEN: &str = "\n//gpumux: the next unit\n";

/// A loaded module.
pub(crate) struct Module {
    /// Handles of its functions by name.
    pub(crate) functions: HashMap<String, usize>,
    /// Address and size of its variables by name.
    globals: HashMap<String, (u64, u64)>,
    /// Memory of its variables.
    memory: Option<u64>,
}

pub(crate) static MODULES: Registry<Module> = Registry::new();

/// A kernel of a module.
pub(crate) struct Function {
    pub(crate) name: CString,
    program: Arc<gpumux_ptx::Module>,
    kernel: usize,
    globals: Arc<[u64]>,
    context: Weak<Context>,
    /// Memory for the barrier of its grids, once it was needed.
    workspace: OnceLock<u64>,
    /// What was set: dynamic shared memory, carve-out.
    settings: Mutex<(i32, i32)>,
    /// Registers of a thread, as told.
    registers: AtomicU32,
}

static FUNCTIONS: Registry<Function> = Registry::new();

/// Registers that a thread is said to have, unless the program asks for fewer: how many a compiler would use is not known.
const REGISTERS: u32 = 32;

/// Bytes of a grid barrier's memory.
const WORKSPACE: u64 = 64;

/// The PTX of an image for the current device, or for the first.
pub(crate) fn texts(image: Image) -> std::result::Result<Vec<String>, Refused> {
    let device = match current() {
        Ok(context) => Some(context.device.place()),
        Err(_) => process()
            .ok()
            .and_then(|it| Some(it.devices.first()?.place())),
    };
    let (major, minor) = device.map_or((9, 0), |it| it.info.compute_capability);
    image.texts(10 * major + minor)
}

/// Parses the PTX of one or several units.
pub(crate) fn parse(texts: &[String]) -> std::result::Result<Arc<gpumux_ptx::Module>, Refused> {
    let parts = texts.iter().flat_map(|text| text.split(BETWEEN));
    let texts: Vec<&str> = parts.collect();
    gpumux_ptx::Module::link(&texts)
        .map(Arc::new)
        .map_err(|error| Refused {
            code: CuError::INVALID_PTX,
            why: format!("the PTX of a module is not understood: {error}"),
            compiled: false,
        })
}

/// Reads the PTX of an image, and tells what is wrong with it.
pub(crate) fn read(image: Image, options: JitOptions) -> Result<Arc<gpumux_ptx::Module>> {
    let program = texts(image).and_then(|texts| parse(&texts));
    let program = program.map_err(|refused| {
        let code = refused.tell(options);
        // A real device would have run compiled code: what follows cannot be right.
        if refused.compiled
            && let Ok(context) = current()
        {
            context.spoil(code);
        }
        code
    })?;
    options.log("");
    Ok(program)
}

/// Loads PTX or a fat binary into the current context; the module's handle.
pub(crate) fn load(image: Image, options: JitOptions) -> Result<usize> {
    let context = current()?;
    let mut module = load_in(&context, &read(image, options)?)?;
    if let Some(most) = options.get(MAX_REGISTERS) {
        module.limit_registers(most as u32)?;
    }
    Ok(MODULES.add(Arc::new(module)))
}

/// Loads a file.
pub(crate) fn load_file(path: Text) -> Result<usize> {
    load(Image::of(&path.file()?)?, JitOptions::NONE)
}

/// Loads a program into a context.
pub(crate) fn load_in(context: &Arc<Context>, program: &Arc<gpumux_ptx::Module>) -> Result<Module> {
    context.check()?;
    let mut size = 0_u64;
    let mut offsets = Vec::new();
    for global in &program.globals {
        size = size.next_multiple_of(global.align.max(1));
        offsets.push(size);
        size += global.size;
    }
    let memory = match size {
        0 => None,
        size => Some(memory::alloc(context.device.index, context.handle(), size)?),
    };
    let at = |index: usize| memory.unwrap_or(0) + offsets[index];
    let addresses: Arc<[u64]> = (0..offsets.len()).map(at).collect();
    for (index, global) in program.globals.iter().enumerate() {
        let mut bytes = global.initial.clone();
        bytes.resize(global.size as usize, 0);
        for (offset, of, added) in &global.addresses {
            let value = at(*of).wrapping_add(*added).to_le_bytes();
            if let Some(place) = bytes.get_mut(*offset..*offset + 8) {
                place.copy_from_slice(&value);
            }
        }
        let effect = Effect::Write {
            to: at(index),
            data: bytes.into(),
        };
        effect.run(0, effect.steps())?;
    }
    let functions = program.kernels.iter().enumerate().map(|(kernel, of)| {
        let function = Function {
            name: CString::new(of.name.as_str()).unwrap_or_default(),
            program: Arc::clone(program),
            kernel,
            globals: Arc::clone(&addresses),
            context: Arc::downgrade(context),
            workspace: OnceLock::new(),
            settings: Mutex::new((0, -1)),
            registers: AtomicU32::new(REGISTERS),
        };
        (of.name.clone(), FUNCTIONS.add(Arc::new(function)))
    });
    let globals = program.globals.iter().enumerate();
    Ok(Module {
        functions: functions.collect(),
        globals: globals
            .map(|(i, global)| (global.name.clone(), (at(i), global.size)))
            .collect(),
        memory,
    })
}

impl Module {
    pub(crate) fn global(&self, name: &str) -> Result<(u64, u64)> {
        self.globals.get(name).copied().ok_or(CuError::NOT_FOUND)
    }

    /// At most so many registers for each thread.
    fn limit_registers(&mut self, most: u32) -> Result {
        for function in self.functions.values() {
            let function = FUNCTIONS.get(*function)?;
            function.registers.fetch_min(most.max(1), Ordering::Relaxed);
        }
        Ok(())
    }

    pub(crate) fn function(&self, name: &str) -> Result<usize> {
        self.functions.get(name).copied().ok_or(CuError::NOT_FOUND)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        for function in self.functions.values() {
            let _ = FUNCTIONS.remove(*function);
        }
        if let Some(memory) = self.memory {
            // The end of its context may have been before.
            let _ = memory::free(memory);
        }
    }
}

/// Unloads a module with its functions.
pub(crate) fn unload(module: usize) -> Result {
    MODULES.remove(module).map(drop)
}

/// The function of a handle.
pub(crate) fn loaded(function: usize) -> Result<Arc<Function>> {
    FUNCTIONS.get(function)
}

/// A function's handle.
pub(crate) fn function(module: usize, name: Text) -> Result<usize> {
    MODULES.get(module)?.function(&name.get()?)
}

/// The function of a handle, which may be one of a library's kernel.
pub(crate) fn resolve(handle: usize, context: &Arc<Context>) -> Result<Arc<Function>> {
    if let Ok(function) = FUNCTIONS.get(handle) {
        return Ok(function);
    }
    FUNCTIONS.get(KERNELS.get(handle)?.function(context)?)
}

/// Launches a kernel.
pub(crate) fn launch(
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    cooperative: bool,
    stream_handle: usize,
    arguments: Arguments,
) -> Result {
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    let function = resolve(function, &context)?;
    if !Weak::ptr_eq(&function.context, &Arc::downgrade(&context)) {
        return Err(CuError::INVALID_HANDLE);
    }
    let shape = Shape::new(grid, block)?;
    let (sms, together) = shape.width(&context.device.info);
    match fault::due(fault::At::Launch) {
        None => {}
        Some(Kind::Endless) => {
            // How long it takes is not known.
            return stream.submit(Op::compute(Work::Rest { sms }, Effect::Nothing));
        }
        Some(Kind::DeviceLost) => {
            context.fault(fault::code(Kind::DeviceLost));
            return Err(fault::code(Kind::DeviceLost));
        }
        Some(kind) => {
            let work = Work::Kernel {
                sms,
                duration: 1000,
            };
            return stream.submit(Op::compute(work, Effect::Fault(fault::code(kind))));
        }
    }
    let of = &function.program.kernels[function.kernel];
    let layout: Vec<_> = of
        .parameters
        .iter()
        .map(|it| (it.offset, it.size))
        .collect();
    let arguments = arguments.read(&layout)?;
    if kernel::is_known(&of.name) {
        let kernel = Kernel::new(&of.name, &arguments)?;
        let work = kernel.cost(shape, &context.device.info);
        if let Kernel::Hold {
            page,
            ticket,
            last,
            timeout,
        } = kernel
            && !stream.is_captured()
        {
            hold::begin(page, last)?;
            let op = Op::compute(work, Effect::Kernel(kernel));
            let id = context.submit(vec![(stream.id, op)])?;
            return watch::watch(&context, id, page, ticket, timeout);
        }
        return stream.submit(Op::compute(work, Effect::Kernel(kernel)));
    }
    if let Err(why) = of.usable() {
        eprintln!(
            "gpumux: the emulated device cannot run the kernel `{}`: {why}",
            of.name
        );
        // What follows cannot be right: everything fails from now on, as behind an instruction that a device lacks.
        context.spoil(CuError::ILLEGAL_INSTRUCTION);
        return Err(CuError::ILLEGAL_INSTRUCTION);
    }
    let most = match lock(&function.settings).0 {
        0 => SHARED,
        asked => (asked.max(0) as u32).max(SHARED - of.shared.min(SHARED)) + of.shared,
    };
    if of.shared.saturating_add(shared) > most.min(MOST_SHARED) {
        return Err(CuError::INVALID_VALUE);
    }
    let mut parameters = vec![0; of.parameter_bytes()];
    for ((offset, size), bytes) in layout.iter().zip(&arguments) {
        parameters[*offset..offset + size].copy_from_slice(bytes);
    }
    let workspace = match (cooperative, function.workspace.get()) {
        (false, _) => 0,
        (true, Some(at)) => *at,
        (true, None) => {
            // Goes with the context.
            let at = memory::alloc(context.device.index, context.handle(), WORKSPACE)?;
            let effect = Effect::Set {
                to: at,
                width: 4,
                value: 0,
                count: WORKSPACE / 4,
            };
            effect.run(0, WORKSPACE / 4)?;
            *function.workspace.get_or_init(|| at)
        }
    };
    if cooperative && shape.blocks > together * u64::from(context.device.info.sms) {
        return Err(CuError::COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    let launch = Launch {
        module: Arc::clone(&function.program),
        kernel: function.kernel,
        grid,
        block,
        dynamic_shared: shared,
        parameters,
        globals: function.globals.to_vec(),
        resident: (together * u64::from(context.device.info.sms)) as usize,
        sms: context.device.info.sms,
        workspace,
    };
    let kernel = Interpreted {
        launch: Arc::new(launch),
        shape,
    };
    stream.submit(Op {
        work: OpWork::Plain(Work::Rest { sms }),
        ..Op::compute(Work::Record, Effect::Interpreted(kernel))
    })
}

/// `cuFuncGetAttribute`.
pub(crate) fn attribute(attribute: i32, function: &Function) -> Result<i32> {
    let kernel = &function.program.kernels[function.kernel];
    let settings = *lock(&function.settings);
    Ok(match attribute {
        // Most threads in a block; shared and local memory, registers; PTX and binary version.
        0 if kernel.max_threads > 0 => kernel.max_threads as i32,
        0 => 1024,
        1 => kernel.shared as i32,
        3 => kernel.local as i32,
        4 => function.registers.load(Ordering::Relaxed) as i32,
        5 => function.program.target as i32,
        6 => {
            let context = function.context.upgrade();
            let (major, minor) = context.map_or((9, 0), |it| it.device.info.compute_capability);
            (10 * major + minor) as i32
        }
        8 if settings.0 == 0 => (SHARED - kernel.shared.min(SHARED)) as i32,
        8 => settings.0,
        9 => settings.1,
        // Constant memory is the module's.
        2 => {
            let constants = function.program.globals.iter().filter(|it| it.constant);
            constants.fold(0, |end: u64, it| {
                end.next_multiple_of(it.align.max(1)) + it.size
            }) as i32
        }
        // Caches, clusters.
        7 | 10..=15 => 0,
        _ => return Err(CuError::INVALID_VALUE),
    })
}

/// `cuFuncSetAttribute`.
pub(crate) fn set_attribute(attribute: i32, value: i32, function: &Function) -> Result {
    let mut settings = lock(&function.settings);
    match attribute {
        8 if (0..=MOST_SHARED as i32).contains(&value) => settings.0 = value,
        9 if (-1..=100).contains(&value) => settings.1 = value,
        // Clusters.
        10..=15 => {}
        _ => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}

/// Offset and size of a parameter.
pub(crate) fn parameter(index: usize, function: &Function) -> Result<(usize, usize)> {
    let found = function.program.kernels[function.kernel]
        .parameters
        .get(index);
    found
        .map(|it| (it.offset, it.size))
        .ok_or(CuError::INVALID_VALUE)
}

/// How many blocks of a function one SM holds at a time.
pub(crate) fn occupancy(function: &Function, threads: i32, shared: usize) -> Result<i32> {
    if !(1..=1024).contains(&threads) {
        return Err(CuError::INVALID_VALUE);
    }
    let declared = function.program.kernels[function.kernel].shared;
    let each = declared as usize + shared + RESERVED_SHARED as usize;
    let by_memory = (SM_SHARED as usize / each) as i32;
    Ok((2048 / (threads as u32).next_multiple_of(32) as i32)
        .min(32)
        .min(by_memory))
}

/// Threads of a block that keep an SM busiest, and blocks that fill the device with them.
pub(crate) fn best_block(function: &Function, context: &Context, most: i32) -> (i32, i32) {
    let limit = attribute(0, function).unwrap_or(1024);
    let threads = if most > 0 { most.min(limit) } else { limit };
    let together = occupancy(function, threads, 0).unwrap_or(1).max(1);
    (together * context.device.info.sms as i32, threads)
}
