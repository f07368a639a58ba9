//! Modules and functions: what was loaded as PTX text.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{Arc, Weak},
};

use crate::{
    border::{Arguments, Image, Text},
    context::{Context, Op, current},
    effect::Effect,
    error::{CuError, Result},
    kernel::{Kernel, Shape},
    process::process,
    ptx,
    stream::stream,
};

/// A loaded module: handles of its functions by name.
pub(crate) struct Module {
    functions: HashMap<String, usize>,
}

/// A kernel of a module.
pub(crate) struct Function {
    pub(crate) name: CString,
    parameters: Vec<(usize, usize)>,
    context: Weak<Context>,
}

/// Loads PTX text; the module's handle.
pub(crate) fn load(image: Image) -> Result<usize> {
    load_text(&image.text()?)
}

/// Loads a file of PTX text.
pub(crate) fn load_file(path: Text) -> Result<usize> {
    let text = std::fs::read(path.get()?).map_err(|_| CuError::FILE_NOT_FOUND)?;
    load_text(&String::from_utf8(text).map_err(|_| CuError::INVALID_IMAGE)?)
}

fn load_text(text: &str) -> Result<usize> {
    let process = process()?;
    let context = current()?;
    let entries = ptx::entries(text).ok_or(CuError::INVALID_PTX)?;
    let functions = entries
        .into_iter()
        .map(|entry| {
            let function = Function {
                name: CString::new(entry.name.as_str()).unwrap_or_default(),
                parameters: entry.parameters,
                context: Arc::downgrade(&context),
            };
            (entry.name, process.functions.add(Arc::new(function)))
        })
        .collect();
    Ok(process.modules.add(Arc::new(Module { functions })))
}

/// Unloads a module with its functions.
pub(crate) fn unload(module: usize) -> Result {
    let process = process()?;
    let module = process.modules.remove(module)?;
    for function in module.functions.values() {
        let _ = process.functions.remove(*function);
    }
    Ok(())
}

/// A function's handle.
pub(crate) fn function(module: usize, name: Text) -> Result<usize> {
    let module = process()?.modules.get(module)?;
    let found = module.functions.get(name.get()?.as_str());
    found.copied().ok_or(CuError::NOT_FOUND)
}

/// Launches a kernel.
pub(crate) fn launch(
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    stream_handle: usize,
    arguments: Arguments,
) -> Result {
    let function = process()?.functions.get(function)?;
    let stream = stream(stream_handle)?;
    let context = stream.context()?;
    if !Weak::ptr_eq(&function.context, &Arc::downgrade(&context)) {
        return Err(CuError::INVALID_HANDLE);
    }
    let shape = Shape::new(grid, block)?;
    let name = function.name.to_str().unwrap_or_default();
    let kernel = Kernel::new(name, &arguments.read(&function.parameters)?)?;
    let work = kernel.cost(shape, &context.device.info);
    stream.submit(Op::compute(work, Effect::Kernel(kernel)))
}

/// `cuFuncGetAttribute`.
pub(crate) fn attribute(attribute: i32, function: usize) -> Result<i32> {
    process()?.functions.get(function)?;
    match attribute {
        0 => Ok(1024),   // most threads in a block
        4 => Ok(32),     // registers
        5 => Ok(70),     // PTX version
        6 => Ok(90),     // binary version
        1..=15 => Ok(0), // shared, constant and local memory, clusters
        _ => Err(CuError::INVALID_VALUE),
    }
}
