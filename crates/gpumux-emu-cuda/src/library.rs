//! Libraries: programs that are loaded for all contexts at once. Their kernels stand for functions, of whatever context
//! they are launched in.

use std::{
    collections::HashMap,
    ffi::{CString, c_int, c_uint},
    sync::{Arc, Mutex, Weak},
};

use crate::{
    border::{Image, In, JitOptions, Out, Text, UserData, cuda, exports},
    context::{Context, current},
    error::{CuError, Result},
    module::{self, Function, Module},
    process::{lock, process},
};

type Handle = usize;

/// A library.
pub(crate) struct Library {
    program: Arc<gpumux_ptx::Module>,
    /// Its handles of kernels, by name.
    kernels: HashMap<String, Handle>,
    /// By context.
    modules: Mutex<HashMap<u64, (Handle, Arc<Module>)>>,
}

/// A kernel of a library.
pub(crate) struct LibraryKernel {
    pub(crate) name: CString,
    library: Weak<Library>,
    handle: Handle,
}

fn load(image: Image, options: JitOptions) -> Result<Handle> {
    let process = process()?;
    let program = module::read(image, options)?;
    let handle = process.libraries.reserve();
    let library = Arc::new_cyclic(|library: &Weak<Library>| {
        let kernels = program.kernels.iter().map(|kernel| {
            let made = LibraryKernel {
                name: CString::new(kernel.name.as_str()).unwrap_or_default(),
                library: Weak::clone(library),
                handle,
            };
            (kernel.name.clone(), process.kernels.add(Arc::new(made)))
        });
        Library {
            kernels: kernels.collect(),
            modules: Mutex::default(),
            program: Arc::clone(&program),
        }
    });
    process.libraries.put(handle, library);
    Ok(handle)
}

fn unload(handle: Handle) -> Result {
    let process = process()?;
    let library = process.libraries.remove(handle)?;
    for kernel in library.kernels.values() {
        let _ = process.kernels.remove(*kernel);
    }
    for (handle, _) in lock(&library.modules).values() {
        let _ = process.modules.remove(*handle);
    }
    Ok(())
}

impl Library {
    /// Loads it into a context when that is needed first.
    fn module(&self, context: &Arc<Context>) -> Result<(Handle, Arc<Module>)> {
        let mut modules = lock(&self.modules);
        if let Some(module) = modules.get(&context.id) {
            return Ok(module.clone());
        }
        let module = Arc::new(module::load_in(context, &self.program)?);
        let made = (process()?.modules.add(Arc::clone(&module)), module);
        modules.insert(context.id, made.clone());
        Ok(made)
    }
}

impl LibraryKernel {
    /// Its function in a context.
    pub(crate) fn function(&self, context: &Arc<Context>) -> Result<Handle> {
        let library = self.library.upgrade().ok_or(CuError::INVALID_HANDLE)?;
        library
            .module(context)?
            .1
            .function(&self.name.to_string_lossy())
    }
}

/// A kernel's function in the context of a device: the current one if that is the device's, else its primary.
fn on_device(kernel: Handle, device: c_int) -> Result<Arc<Function>> {
    let process = process()?;
    process.device(device)?;
    let current = current().ok().filter(|context| context.ordinal == device);
    let primary = || lock(&process.primaries)[device as usize].context.clone();
    let context = current.or_else(primary).ok_or(CuError::INVALID_CONTEXT)?;
    module::resolve(kernel, &context)
}

fn global(library: Handle, name: Text) -> Result<(u64, u64)> {
    let library = process()?.libraries.get(library)?;
    library.module(&current()?)?.1.global(&name.get()?)
}

exports! { FUNCTIONS by cuda;
    cuLibraryLoadData(library: Out<Handle>, code: Image, jit: In<c_int>, jit_values: Out<usize>, jit_count: c_uint, _options: UserData, _values: UserData, _count: c_uint) => {
        library.check()?;
        library.put(load(code, JitOptions { count: jit_count, options: jit, values: jit_values })?)
    };
    cuLibraryLoadFromFile(library: Out<Handle>, path: Text, jit: In<c_int>, jit_values: Out<usize>, jit_count: c_uint, _options: UserData, _values: UserData, _count: c_uint) => {
        library.check()?;
        library.put(load(Image::of(&path.file()?)?, JitOptions { count: jit_count, options: jit, values: jit_values })?)
    };
    cuLibraryUnload(library: Handle) => unload(library);
    cuLibraryGetKernel(kernel: Out<Handle>, library: Handle, name: Text) => {
        let library = process()?.libraries.get(library)?;
        kernel.put(*library.kernels.get(name.get()?.as_str()).ok_or(CuError::NOT_FOUND)?)
    };
    cuLibraryGetKernelCount(count: Out<c_uint>, library: Handle) => count.put(process()?.libraries.get(library)?.kernels.len() as c_uint);
    cuLibraryEnumerateKernels(kernels: Out<Handle>, most: c_uint, library: Handle) => {
        let library = process()?.libraries.get(library)?;
        kernels.put_all(library.kernels.values().copied().take(most as usize))
    };
    cuLibraryGetModule(module: Out<Handle>, library: Handle) => module.put(process()?.libraries.get(library)?.module(&current()?)?.0);
    cuLibraryGetGlobal(address: Out<u64>, bytes: Out<usize>, library: Handle, name: Text) => {
        let found = global(library, name)?;
        address.put_if_wanted(found.0);
        bytes.put_if_wanted(found.1 as usize);
        Ok(())
    };
    cuLibraryGetManaged(address: Out<u64>, bytes: Out<usize>, library: Handle, name: Text) => {
        let found = global(library, name)?;
        address.put_if_wanted(found.0);
        bytes.put_if_wanted(found.1 as usize);
        Ok(())
    };
    cuKernelGetFunction(function: Out<Handle>, kernel: Handle) => function.put(process()?.kernels.get(kernel)?.function(&current()?)?);
    cuKernelGetLibrary(library: Out<Handle>, kernel: Handle) => library.put(process()?.kernels.get(kernel)?.handle);
    cuKernelGetName(name: Out<*const std::ffi::c_char>, kernel: Handle) => name.put(process()?.kernels.get(kernel)?.name.as_ptr());
    cuKernelGetAttribute(value: Out<c_int>, attribute: c_int, kernel: Handle, device: c_int) => value.put(module::attribute(attribute, &*on_device(kernel, device)?)?);
    cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: Handle, device: c_int) => module::set_attribute(attribute, value, &*on_device(kernel, device)?);
    cuKernelSetCacheConfig(kernel: Handle, _config: c_int, device: c_int) => on_device(kernel, device).map(drop);
    cuKernelGetParamInfo(kernel: Handle, index: usize, offset: Out<usize>, size: Out<usize>) => {
        let found = module::parameter(index, &*module::resolve(kernel, &current()?)?)?;
        offset.put_if_wanted(found.0);
        size.put_if_wanted(found.1);
        Ok(())
    };
}
