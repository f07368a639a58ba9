//! Libraries: programs that are loaded for all contexts at once. Their kernels stand for functions, of whatever context
//! they are launched in.

use std::{
    collections::HashMap,
    ffi::{CString, c_int, c_uint},
    sync::{Arc, Mutex, Weak},
};

use crate::{
    border::{
        In, Out, Text, UserData,
        code::{Image, JitOptions},
        cuda, exports,
    },
    context::{Context, current},
    device::active_primary,
    error::{CuError, Result},
    module::{self, Function, MODULES, Module},
    process::{Registry, lock, process},
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

static LIBRARIES: Registry<Library> = Registry::new();

/// A kernel of a library.
pub(crate) struct LibraryKernel {
    pub(crate) name: CString,
    library: Weak<Library>,
    handle: Handle,
}

static KERNELS: Registry<LibraryKernel> = Registry::new();

fn load(image: Image, options: JitOptions) -> Result<Handle> {
    process()?;
    let program = module::read(image, options)?;
    let handle = LIBRARIES.reserve();
    let library = Arc::new_cyclic(|library: &Weak<Library>| {
        let kernels = program.kernels.iter().map(|kernel| {
            let made = LibraryKernel {
                name: CString::new(kernel.name.as_str()).unwrap_or_default(),
                library: Weak::clone(library),
                handle,
            };
            (kernel.name.clone(), KERNELS.add(Arc::new(made)))
        });
        Library {
            kernels: kernels.collect(),
            modules: Mutex::default(),
            program: Arc::clone(&program),
        }
    });
    LIBRARIES.put(handle, library);
    Ok(handle)
}

fn unload(handle: Handle) -> Result {
    let library = LIBRARIES.remove(handle)?;
    for kernel in library.kernels.values() {
        let _ = KERNELS.remove(*kernel);
    }
    for (handle, _) in lock(&library.modules).values() {
        let _ = MODULES.remove(*handle);
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
        let made = (MODULES.add(Arc::clone(&module)), module);
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

/// The function of a handle, which may be one of a library's kernel.
pub(crate) fn resolve(handle: Handle, context: &Arc<Context>) -> Result<Arc<Function>> {
    module::loaded(handle).or_else(|_| module::loaded(KERNELS.get(handle)?.function(context)?))
}

/// A kernel's function in the context of a device: the current one if that is the device's, else its primary.
fn on_device(kernel: Handle, device: c_int) -> Result<Arc<Function>> {
    process()?.device(device)?;
    let current = current().ok().filter(|context| context.ordinal == device);
    let context = match current {
        Some(context) => Some(context),
        None => active_primary(device)?,
    };
    let context = context.ok_or(CuError::INVALID_CONTEXT)?;
    resolve(kernel, &context)
}

fn global(library: Handle, name: Text) -> Result<(u64, u64)> {
    let library = LIBRARIES.get(library)?;
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
        let library = LIBRARIES.get(library)?;
        kernel.put(*library.kernels.get(name.get()?.as_str()).ok_or(CuError::NOT_FOUND)?)
    };
    cuLibraryGetKernelCount(count: Out<c_uint>, library: Handle) => count.put(LIBRARIES.get(library)?.kernels.len() as c_uint);
    cuLibraryEnumerateKernels(kernels: Out<Handle>, most: c_uint, library: Handle) => {
        let library = LIBRARIES.get(library)?;
        kernels.put_all(library.kernels.values().copied().take(most as usize))
    };
    cuLibraryGetModule(module: Out<Handle>, library: Handle) => module.put(LIBRARIES.get(library)?.module(&current()?)?.0);
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
    cuKernelGetFunction(function: Out<Handle>, kernel: Handle) => function.put(KERNELS.get(kernel)?.function(&current()?)?);
    cuKernelGetLibrary(library: Out<Handle>, kernel: Handle) => library.put(KERNELS.get(kernel)?.handle);
    cuKernelGetName(name: Out<*const std::ffi::c_char>, kernel: Handle) => name.put(KERNELS.get(kernel)?.name.as_ptr());
    cuKernelGetAttribute(value: Out<c_int>, attribute: c_int, kernel: Handle, device: c_int) => value.put(module::attribute(attribute, &*on_device(kernel, device)?)?);
    cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: Handle, device: c_int) => module::set_attribute(attribute, value, &*on_device(kernel, device)?);
    cuKernelSetCacheConfig(kernel: Handle, _config: c_int, device: c_int) => on_device(kernel, device).map(drop);
    cuKernelGetParamInfo(kernel: Handle, index: usize, offset: Out<usize>, size: Out<usize>) => {
        let found = module::parameter(index, &*resolve(kernel, &current()?)?)?;
        offset.put_if_wanted(found.0);
        size.put_if_wanted(found.1);
        Ok(())
    };
}
