//! Modules and functions: PTX, loaded in a context.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{
    border::{
        Text,
        code::{Image, JitOptions, MAX_REGISTERS, Refused},
    },
    context::{Context, current},
    effect::Effect,
    error::{CuError, Result},
    memory,
    process::{Registry, lock, process},
};

/// Shared memory of a block, in bytes: without asking for more, at most, and what the system takes of an SM's.
pub(crate) const SHARED: u32 = 49_152;
pub(crate) const MOST_SHARED: u32 = 232_448;
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
    pub(crate) program: Arc<gpumux_ptx::Module>,
    pub(crate) kernel: usize,
    pub(crate) globals: Arc<[u64]>,
    pub(crate) context: Weak<Context>,
    /// Memory for the barrier of its grids, once it was needed.
    pub(crate) workspace: OnceLock<u64>,
    /// What was set: dynamic shared memory, carve-out.
    pub(crate) settings: Mutex<(i32, i32)>,
    /// Registers of a thread, as told.
    registers: AtomicU32,
}

static FUNCTIONS: Registry<Function> = Registry::new();

/// Registers that a thread is said to have, unless the program asks for fewer: how many a compiler would use is not known.
const REGISTERS: u32 = 32;

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
