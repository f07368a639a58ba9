//! The driver API: the list of what there is, one line per function. The list of entry points
//! ([`gpumux_cuda::list`]) has which versions of CUDA know them by which names; what nothing here exports is in [`crate::missing`].

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong},
    os::fd::IntoRawFd,
};

use gpumux_cuda::types::{
    CUmemAccessDesc, CUmemAllocationProp, CUmemLocation, CUuuid, MEM_ALLOCATION_TYPE_PINNED,
    MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, MEM_LOCATION_TYPE_DEVICE,
};

use crate::{
    attributes,
    border::{
        self, AnyOut, Arguments, HostFunction, In, Out, Pointers, StreamCallback, Text, UserData,
        code::{Image, JitOptions},
        cuda, exports,
    },
    checkpoint,
    context::{self, current},
    device::{self, context},
    error::{self, CuError, Result},
    event,
    graph::{self, EXECUTABLES, GRAPHS},
    launch, library, link, memory,
    module::{self, MODULES},
    process::{self, process},
    stream::{self, Direction},
};

/// Handles are numbers here; C sees pointers.
type Handle = usize;
/// A device address.
type Address = u64;
/// A host address.
type Host = u64;

exports! { FUNCTIONS by cuda;
    cuInit(flags: c_uint) => process::init(flags).map(|()| checkpoint::listen());
    cuDriverGetVersion(version: Out<c_int>) => version.put(process::driver_version());
    cuGetErrorName(code: c_int, text: Out<*const c_char>) => describe(code, text, |(name, _)| name);
    cuGetErrorString(code: c_int, text: Out<*const c_char>) => describe(code, text, |(_, sentence)| sentence);

    cuDeviceGetCount(count: Out<c_int>) => count.put(process()?.devices.len() as c_int);
    cuDeviceGet(device: Out<c_int>, ordinal: c_int) => process()?.device(ordinal).and_then(|_| device.put(ordinal));
    cuDeviceGetName(name: Out<c_char>, length: c_int, device: c_int) => name.put_text(length, &process()?.device(device)?.info.name);
    cuDeviceGetUuid(uuid: Out<CUuuid>, device: c_int) => {
        // The GPU's, where the later function gives that of the MIG instance.
        let info = &process()?.device(device)?.info;
        uuid.put(CUuuid { bytes: info.instance.as_ref().map_or(info.uuid, |it| it.gpu_uuid) })
    };
    cuDeviceGetUuid_v2(uuid: Out<CUuuid>, device: c_int) => uuid.put(CUuuid { bytes: process()?.device(device)?.info.uuid });
    cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) => value.put(attributes::get(&process()?.device(device)?.info, attribute)?);
    cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) => bytes.put(process()?.device(device)?.info.memory as usize);
    cuDeviceGetPCIBusId(text: Out<c_char>, length: c_int, device: c_int) => text.put_text(length, &device::pci_bus_id(process()?.device(device)?.info.pci_bus));
    cuDeviceGetByPCIBusId(device: Out<c_int>, text: Text) => device.put(device::by_pci_bus_id(text)?);
    cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: c_int) => {
        let (of_major, of_minor) = process()?.device(device)?.info.compute_capability;
        major.put(of_major as c_int)?;
        minor.put(of_minor as c_int)
    };
    cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) => can.put(device::are_peers(device, peer)?.into());

    cuDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) => {
        context.check()?;
        context.put(device::retain_primary(device)?)
    };
    cuDevicePrimaryCtxRelease_v2(device: c_int) => device::release_primary(device);
    cuDevicePrimaryCtxReset_v2(device: c_int) => device::reset_primary(device);
    cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) => {
        let state = device::primary_state(device)?;
        flags.put(state.0)?;
        active.put(state.1)
    };
    cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) => device::set_primary_flags(device, flags);
    cuCtxCreate_v2(context: Out<Handle>, flags: c_uint, device: c_int) => create_context(context, flags, device);
    cuCtxCreate_v3(context: Out<Handle>, _affinity: UserData, affinities: c_int, flags: c_uint, device: c_int) => {
        if affinities != 0 {
            return Err(CuError::NOT_SUPPORTED);
        }
        create_context(context, flags, device)
    };
    cuCtxCreate_v4(context: Out<Handle>, params: In<[usize; 3]>, flags: c_uint, device: c_int) => {
        // Execution affinity, how many, and a CIG structure: none of them.
        if params.get().is_ok_and(|params| params != [0; 3]) {
            return Err(CuError::NOT_SUPPORTED);
        }
        create_context(context, flags, device)
    };
    cuCtxDestroy_v2(context: Handle) => context::destroy(context);
    cuCtxPushCurrent_v2(context: Handle) => device::push(context);
    cuCtxPopCurrent_v2(context: Out<Handle>) => { context.put_if_wanted(context::pop()?); Ok(()) };
    cuDevicePrimaryCtxRelease(device: c_int) => device::release_primary(device);
    cuDevicePrimaryCtxReset(device: c_int) => device::reset_primary(device);
    cuDevicePrimaryCtxSetFlags(device: c_int, flags: c_uint) => device::set_primary_flags(device, flags);
    cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_int, device: c_int, peer: c_int) => {
        let peers = device::are_peers(device, peer)?;
        if device == peer {
            return Err(CuError::INVALID_DEVICE);
        }
        match attribute {
            // Access, and atomics; rank and arrays: none.
            2 | 3 => value.put(peers.into()),
            1 | 4 | 5 => value.put(0),
            _ => Err(CuError::INVALID_VALUE),
        }
    };
    cuCtxEnablePeerAccess(peer: Handle, flags: c_uint) => device::set_peer(peer, flags, true);
    cuCtxDisablePeerAccess(peer: Handle) => device::set_peer(peer, 0, false);
    cuDeviceGetTexture1DLinearMaxWidth(width: Out<usize>, _format: c_int, _channels: c_uint, device: c_int) => process()?.device(device).and_then(|_| width.put(1 << 28));
    cuDeviceGetExecAffinitySupport(can: Out<c_int>, _kind: c_int, device: c_int) => process()?.device(device).and_then(|_| can.put(0));
    cuCtxDestroy(context: Handle) => context::destroy(context);
    cuCtxPushCurrent(context: Handle) => device::push(context);
    cuCtxPopCurrent(context: Out<Handle>) => { context.put_if_wanted(context::pop()?); Ok(()) };
    cuCtxSetFlags(_flags: c_uint) => current().map(drop);
    cuCtxGetCacheConfig(config: Out<c_int>) => current().and_then(|_| config.put(0));
    cuCtxSetCacheConfig(_config: c_int) => current().map(drop);
    cuCtxGetSharedMemConfig(config: Out<c_int>) => current().and_then(|_| config.put(1));
    cuCtxSetSharedMemConfig(_config: c_int) => current().map(drop);
    cuCtxResetPersistingL2Cache() => current().map(drop);
    cuStreamDestroy(stream: Handle) => stream::destroy(stream);
    cuEventDestroy(event: Handle) => event::destroy(event);
    cuMemHostRegister(memory: Host, bytes: usize, flags: c_uint) => { current()?; memory::register_host(memory, bytes as u64, flags) };
    cuPointerGetAttributes(count: c_uint, attributes: In<c_int>, data: In<AnyOut>, address: Address) => {
        // Unknown addresses have attributes, too: none.
        for i in 0..count as usize {
            let (attribute, out) = (attributes.get_at(i)?, data.get_at(i)?);
            match pointer_attribute(out, attribute, address) {
                Ok(()) => {}
                Err(_) => no_attribute(out, attribute)?,
            }
        }
        Ok(())
    };
    cuPointerSetAttribute(_value: UserData, _attribute: c_int, address: Address) => {
        process()?;
        memory::space().range_of(address).map(drop).ok_or(CuError::INVALID_VALUE)
    };
    [cuMemcpyPeer_ptds]cuMemcpyPeer(to: Address, _to_context: Handle, from: Address, _from_context: Handle, bytes: usize) => stream::copy(to, from, bytes, Direction::Any, 0, true);
    [cuMemcpyPeerAsync_ptsz]cuMemcpyPeerAsync(to: Address, _to_context: Handle, from: Address, _from_context: Handle, bytes: usize, stream: Handle) => stream::copy(to, from, bytes, Direction::Any, stream, false);
    [cuStreamSetAttribute_ptsz]cuStreamSetAttribute(stream: Handle, _attribute: c_int, _value: UserData) => stream::stream(stream).map(drop);
    [cuStreamGetAttribute_ptsz]cuStreamGetAttribute(stream: Handle, _attribute: c_int, value: Out<[u64; 8]>) => stream::stream(stream).and_then(|_| value.put([0; 8]));
    [cuStreamCopyAttributes_ptsz]cuStreamCopyAttributes(to: Handle, from: Handle) => stream::stream(to).and(stream::stream(from)).map(drop);
    [cuStreamGetCaptureInfo_v3_ptsz]cuStreamGetCaptureInfo_v3(stream: Handle, status: Out<c_int>, id: Out<u64>, graph: Out<Handle>, dependencies: Out<usize>, edges: Out<usize>, count: Out<usize>) => {
        let (found, of) = graph::status(stream)?;
        status.put(found)?;
        id.put_if_wanted(of);
        graph.put_if_wanted(0);
        dependencies.put_if_wanted(0);
        edges.put_if_wanted(0);
        count.put_if_wanted(0);
        Ok(())
    };
    cuCtxSetCurrent(context: Handle) => device::set_current(context);
    cuCtxGetCurrent(context: Out<Handle>) => { process()?; context.put(context::current_handle()) };
    cuCtxGetDevice(device: Out<c_int>) => device.put(current()?.ordinal);
    cuCtxGetDevice_v2(device: Out<c_int>, handle: Handle) => device.put(context(handle)?.ordinal);
    cuCtxGetFlags(flags: Out<c_uint>) => flags.put(current()?.flags);
    cuCtxGetId(handle: Handle, id: Out<c_ulonglong>) => id.put(context(handle)?.id);
    cuCtxGetApiVersion(handle: Handle, version: Out<c_uint>) => context(handle).and_then(|_| version.put(3020));
    cuCtxSynchronize() => graph::synchronize(&*current()?);
    cuCtxSynchronize_v2(handle: Handle) => graph::synchronize(&*context(handle)?);
    cuCtxGetLimit(value: Out<usize>, limit: c_int) => { current()?; value.put(limit_of(limit)?) };
    cuCtxSetLimit(limit: c_int, _value: usize) => { current()?; limit_of(limit).map(drop) };
    cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) => {
        current()?;
        least.put_if_wanted(0);
        greatest.put_if_wanted(stream::HIGHEST_PRIORITY.into());
        Ok(())
    };

    cuModuleLoad(module: Out<Handle>, path: Text) => { module.check()?; module.put(module::load_file(path)?) };
    cuModuleLoadData(module: Out<Handle>, image: Image) => { module.check()?; module.put(module::load(image, JitOptions::NONE)?) };
    cuModuleLoadDataEx(module: Out<Handle>, image: Image, count: c_uint, options: In<c_int>, values: Out<usize>) => { module.check()?; module.put(module::load(image, JitOptions { count, options, values })?) };
    cuLinkCreate_v2(count: c_uint, options: In<c_int>, values: Out<usize>, link: Out<Handle>) => { link.check()?; link.put(link::create(JitOptions { count, options, values })?) };
    cuLinkAddData_v2(link: Handle, _kind: c_int, data: Address, size: usize, _name: UserData, _count: c_uint, _options: UserData, _values: UserData) => link::add(link, data, size);
    cuLinkAddFile_v2(link: Handle, _kind: c_int, path: Text, _count: c_uint, _options: UserData, _values: UserData) => link::add_file(link, path);
    cuLinkComplete(link: Handle, image: Out<usize>, size: Out<usize>) => {
        image.check()?;
        let made = link::complete(link)?;
        size.put_if_wanted(made.1);
        image.put(made.0)
    };
    cuLinkDestroy(link: Handle) => link::destroy(link);
    cuModuleUnload(module: Handle) => module::unload(module);
    cuModuleGetFunction(function: Out<Handle>, module: Handle, name: Text) => function.put(module::function(module, name)?);
    cuModuleGetGlobal_v2(address: Out<Address>, bytes: Out<usize>, module: Handle, name: Text) => {
        let found = MODULES.get(module)?.global(&name.get()?)?;
        address.put_if_wanted(found.0);
        bytes.put_if_wanted(found.1 as usize);
        Ok(())
    };
    cuModuleLoadFatBinary(module: Out<Handle>, image: Image) => { module.check()?; module.put(module::load(image, JitOptions::NONE)?) };
    cuModuleGetLoadingMode(mode: Out<c_int>) => mode.put(2);
    cuModuleGetFunctionCount(count: Out<c_uint>, module: Handle) => count.put(MODULES.get(module)?.functions.len() as c_uint);
    cuModuleEnumerateFunctions(functions: Out<Handle>, most: c_uint, module: Handle) => {
        let module = MODULES.get(module)?;
        functions.put_all(module.functions.values().copied().take(most as usize))
    };
    cuFuncGetAttribute(value: Out<c_int>, attribute: c_int, function: Handle) => value.put(module::attribute(attribute, &*function_of(function)?)?);
    cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) => module::set_attribute(attribute, value, &*function_of(function)?);
    cuFuncSetCacheConfig(function: Handle, _config: c_int) => function_of(function).map(drop);
    cuFuncSetSharedMemConfig(function: Handle, _config: c_int) => function_of(function).map(drop);
    cuFuncGetName(name: Out<*const c_char>, function: Handle) => name.put(function_of(function)?.name.as_ptr());
    cuFuncIsLoaded(state: Out<c_int>, function: Handle) => function_of(function).and_then(|_| state.put(1));
    cuFuncLoad(function: Handle) => function_of(function).map(drop);
    cuFuncGetParamInfo(function: Handle, index: usize, offset: Out<usize>, size: Out<usize>) => {
        let found = module::parameter(index, &*function_of(function)?)?;
        offset.put_if_wanted(found.0);
        size.put_if_wanted(found.1);
        Ok(())
    };
    cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<c_int>, function: Handle, threads: c_int, shared: usize) => blocks.put(module::occupancy(&*function_of(function)?, threads, shared)?);
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks: Out<c_int>, function: Handle, threads: c_int, shared: usize, _flags: c_uint) => blocks.put(module::occupancy(&*function_of(function)?, threads, shared)?);
    cuOccupancyMaxPotentialBlockSize(grid: Out<c_int>, block: Out<c_int>, function: Handle, _shared_of: UserData, _shared: usize, most: c_int) => {
        let best = module::best_block(&*function_of(function)?, &*current()?, most);
        grid.put(best.0)?;
        block.put(best.1)
    };

    cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) => {
        let info = device::memory_info()?;
        free.put_if_wanted(info.0);
        total.put_if_wanted(info.1);
        Ok(())
    };
    cuMemAlloc_v2(address: Out<Address>, bytes: usize) => { address.check()?; address.put(allocate(bytes as u64)?) };
    cuMemAllocPitch_v2(address: Out<Address>, pitch: Out<usize>, width: usize, height: usize, _element: c_uint) => {
        address.check()?;
        let row = width.checked_next_multiple_of(512).ok_or(CuError::INVALID_VALUE)?;
        pitch.put(row)?;
        address.put(allocate(row.checked_mul(height).ok_or(CuError::INVALID_VALUE)? as u64)?)
    };
    cuMemFree_v2(address: Address) => device::free_memory(address);
    cuMemGetAddressRange_v2(base: Out<Address>, bytes: Out<usize>, address: Address) => {
        let range = memory::space().range_of(address).ok_or(CuError::INVALID_VALUE)?;
        base.put_if_wanted(range.0);
        bytes.put_if_wanted(range.1 as usize);
        Ok(())
    };
    [cuMemAllocAsync_ptsz] cuMemAllocAsync(address: Out<Address>, bytes: usize, stream: Handle) => { address.check()?; address.put(stream::alloc_async(bytes, None, stream)?) };
    [cuMemFreeAsync_ptsz] cuMemFreeAsync(address: Address, stream: Handle) => stream::free_async(address, stream);
    cuMemHostAlloc(memory: Out<Host>, bytes: usize, flags: c_uint) => allocate_host(memory, bytes, flags);
    cuMemAllocHost_v2(memory: Out<Host>, bytes: usize) => allocate_host(memory, bytes, 0);
    cuMemFreeHost(memory: Host) => device::free_host(memory);
    cuMemHostGetDevicePointer_v2(address: Out<Address>, memory: Host, _flags: c_uint) => {
        memory::space().host_range(memory).ok_or(CuError::INVALID_VALUE)?;
        address.put(memory)
    };
    cuMemHostGetFlags(flags: Out<c_uint>, memory: Host) => {
        let range = memory::space().host_range(memory).ok_or(CuError::INVALID_VALUE)?;
        flags.put(range.1.flags)
    };
    cuMemHostRegister_v2(memory: Host, bytes: usize, flags: c_uint) => { current()?; memory::register_host(memory, bytes as u64, flags) };
    cuMemHostUnregister(memory: Host) => { current()?; memory::unregister_host(memory) };
    cuPointerGetAttribute(data: AnyOut, attribute: c_int, address: Address) => pointer_attribute(data, attribute, address);

    [cuMemcpy_ptds] cuMemcpy(to: Address, from: Address, bytes: usize) => stream::copy(to, from, bytes, Direction::Any, 0, true);
    [cuMemcpyAsync_ptsz] cuMemcpyAsync(to: Address, from: Address, bytes: usize, stream: Handle) => stream::copy(to, from, bytes, Direction::Any, stream, false);
    cuMemcpyFutureAsync(to: Address, from: Address, bytes: usize, stream: Handle) => stream::copy(to, from, bytes, Direction::Any, stream, false);
    [cuMemcpyHtoD_v2_ptds] cuMemcpyHtoD_v2(to: Address, from: Host, bytes: usize) => stream::copy(to, from, bytes, Direction::ToDevice, 0, true);
    [cuMemcpyDtoH_v2_ptds] cuMemcpyDtoH_v2(to: Host, from: Address, bytes: usize) => stream::copy(to, from, bytes, Direction::ToHost, 0, true);
    [cuMemcpyDtoD_v2_ptds] cuMemcpyDtoD_v2(to: Address, from: Address, bytes: usize) => stream::copy(to, from, bytes, Direction::InDevice, 0, false);
    [cuMemcpyHtoDAsync_v2_ptsz] cuMemcpyHtoDAsync_v2(to: Address, from: Host, bytes: usize, stream: Handle) => stream::copy(to, from, bytes, Direction::ToDevice, stream, false);
    [cuMemcpyDtoHAsync_v2_ptsz] cuMemcpyDtoHAsync_v2(to: Host, from: Address, bytes: usize, stream: Handle) => stream::copy(to, from, bytes, Direction::ToHost, stream, false);
    [cuMemcpyDtoDAsync_v2_ptsz] cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) => stream::copy(to, from, bytes, Direction::InDevice, stream, false);
    [cuMemsetD8_v2_ptds] cuMemsetD8_v2(to: Address, value: u8, count: usize) => stream::set(to, 1, value.into(), count, 0, true);
    [cuMemsetD16_v2_ptds] cuMemsetD16_v2(to: Address, value: u16, count: usize) => stream::set(to, 2, value.into(), count, 0, true);
    [cuMemsetD32_v2_ptds] cuMemsetD32_v2(to: Address, value: c_uint, count: usize) => stream::set(to, 4, value, count, 0, true);
    [cuMemsetD8Async_ptsz] cuMemsetD8Async(to: Address, value: u8, count: usize, stream: Handle) => stream::set(to, 1, value.into(), count, stream, false);
    [cuMemsetD16Async_ptsz] cuMemsetD16Async(to: Address, value: u16, count: usize, stream: Handle) => stream::set(to, 2, value.into(), count, stream, false);
    [cuMemsetD32Async_ptsz] cuMemsetD32Async(to: Address, value: c_uint, count: usize, stream: Handle) => stream::set(to, 4, value, count, stream, false);

    cuMemAddressReserve(address: Out<Address>, bytes: usize, alignment: usize, hint: Address, _flags: c_ulonglong) => {
        process()?;
        address.check()?;
        address.put(memory::reserve(bytes as u64, alignment as u64, hint)?)
    };
    cuMemAddressFree(address: Address, bytes: usize) => { process()?; memory::free_reservation(address, bytes as u64) };
    cuMemCreate(handle: Out<u64>, bytes: usize, prop: In<CUmemAllocationProp>, flags: c_ulonglong) => create_memory(handle, bytes, prop, flags);
    cuMemRelease(handle: u64) => { process()?; memory::release(handle) };
    cuMemMap(address: Address, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) => {
        process()?;
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        memory::map(address, bytes as u64, offset as u64, handle)
    };
    cuMemUnmap(address: Address, bytes: usize) => { process()?; memory::unmap(address, bytes as u64) };
    cuMemSetAccess(address: Address, bytes: usize, access: In<CUmemAccessDesc>, count: usize) => set_access(address, bytes, access, count);
    cuMemGetAccess(flags: Out<c_ulonglong>, location: In<CUmemLocation>, address: Address) => {
        let location = location.get()?;
        let device = process()?.device(location.id)?.index;
        let viewer = memory::Viewer { device, peers: 0 };
        flags.put(if memory::access(address, viewer)? { 3 } else { 0 })
    };
    cuMemGetAllocationGranularity(bytes: Out<usize>, prop: In<CUmemAllocationProp>, _option: c_int) => {
        device_of(&prop.get()?)?;
        bytes.put(memory::GRANULARITY as usize)
    };
    cuMemExportToShareableHandle(file: Out<c_int>, handle: u64, kind: c_int, _flags: c_ulonglong) => {
        process()?;
        file.check()?;
        if kind != MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CuError::NOT_SUPPORTED);
        }
        file.put(memory::export(handle)?.into_raw_fd())
    };
    cuMemImportFromShareableHandle(handle: Out<u64>, file: AnyOut, kind: c_int) => import_memory(handle, file, kind);
    cuMemGetAllocationPropertiesFromHandle(prop: Out<CUmemAllocationProp>, handle: u64) => properties(prop, handle);
    cuMemRetainAllocationHandle(handle: Out<u64>, address: Address) => { process()?; handle.put(memory::retain(address)?) };

    cuStreamCreate(stream: Out<Handle>, flags: c_uint) => { stream.check()?; stream.put(stream::create(flags, 0)?) };
    cuStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, priority: c_int) => { stream.check()?; stream.put(stream::create(flags, priority)?) };
    cuStreamDestroy_v2(stream: Handle) => stream::destroy(stream);
    [cuStreamQuery_ptsz] cuStreamQuery(stream: Handle) => stream::query(stream);
    [cuStreamSynchronize_ptsz] cuStreamSynchronize(stream: Handle) => stream::synchronize(stream);
    [cuStreamWaitEvent_ptsz] cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) => event::wait(stream, event, flags);
    [cuStreamGetFlags_ptsz] cuStreamGetFlags(stream: Handle, flags: Out<c_uint>) => flags.put(stream::stream(stream)?.flags);
    [cuStreamGetPriority_ptsz] cuStreamGetPriority(stream: Handle, priority: Out<c_int>) => priority.put(stream::stream(stream)?.priority.into());
    [cuStreamGetCtx_ptsz] cuStreamGetCtx(stream: Handle, context: Out<Handle>) => context.put(stream::stream(stream)?.context()?.handle());
    [cuStreamGetDevice_ptsz] cuStreamGetDevice(stream: Handle, device: Out<c_int>) => device.put(stream::stream(stream)?.context()?.ordinal);
    [cuStreamGetId_ptsz] cuStreamGetId(stream: Handle, id: Out<c_ulonglong>) => id.put(stream::stream(stream)?.id);
    [cuStreamAddCallback_ptsz] cuStreamAddCallback(stream: Handle, callback: StreamCallback, data: UserData, flags: c_uint) => stream::add_callback(stream, callback, data, flags);
    [cuLaunchHostFunc_ptsz] cuLaunchHostFunc(stream: Handle, function: HostFunction, data: UserData) => stream::launch_host(stream, function, data);
    [cuStreamBeginCapture_v2_ptsz] cuStreamBeginCapture_v2(stream: Handle, mode: c_int) => graph::begin(stream, mode);
    [cuStreamEndCapture_ptsz] cuStreamEndCapture(stream: Handle, graph: Out<Handle>) => {
        let made = graph::end(stream);
        graph.put_if_wanted(made.unwrap_or(0));
        made.map(drop)
    };
    [cuStreamIsCapturing_ptsz] cuStreamIsCapturing(stream: Handle, status: Out<c_int>) => status.put(graph::status(stream)?.0);
    [cuStreamGetCaptureInfo_v2_ptsz] cuStreamGetCaptureInfo_v2(stream: Handle, status: Out<c_int>, id: Out<u64>, graph: Out<Handle>, dependencies: Out<usize>, count: Out<usize>) => {
        let (found, of) = graph::status(stream)?;
        status.put(found)?;
        id.put_if_wanted(of);
        graph.put_if_wanted(0);
        dependencies.put_if_wanted(0);
        count.put_if_wanted(0);
        Ok(())
    };
    cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) => mode.put(graph::exchange_mode(mode.get()?)?);

    cuEventCreate(event: Out<Handle>, flags: c_uint) => { event.check()?; event.put(event::create(flags)?) };
    cuEventDestroy_v2(event: Handle) => event::destroy(event);
    [cuEventRecord_ptsz] cuEventRecord(event: Handle, stream: Handle) => event::record(event, stream);
    [cuEventRecordWithFlags_ptsz] cuEventRecordWithFlags(event: Handle, stream: Handle, flags: c_uint) => {
        if flags > 1 {
            return Err(CuError::INVALID_VALUE);
        }
        event::record(event, stream)
    };
    cuEventQuery(event: Handle) => event::query(event);
    cuEventSynchronize(event: Handle) => event::synchronize(event);
    cuEventElapsedTime(ms: Out<f32>, start: Handle, end: Handle) => ms.put(event::elapsed(start, end)?);
    cuEventElapsedTime_v2(ms: Out<f32>, start: Handle, end: Handle) => ms.put(event::elapsed(start, end)?);

    cuGraphDestroy(graph: Handle) => GRAPHS.remove(graph).map(drop);
    cuGraphInstantiate_v2(executable: Out<Handle>, graph: Handle, node: Out<Handle>, _log: UserData, _bytes: usize) => {
        executable.check()?;
        node.put_if_wanted(0);
        executable.put(graph::instantiate(graph)?)
    };
    cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, _flags: c_ulonglong) => { executable.check()?; executable.put(graph::instantiate(graph)?) };
    cuGraphExecDestroy(executable: Handle) => EXECUTABLES.remove(executable).map(drop);
    [cuGraphLaunch_ptsz] cuGraphLaunch(executable: Handle, stream: Handle) => graph::launch(executable, stream);
    [cuGraphUpload_ptsz] cuGraphUpload(executable: Handle, stream: Handle) => {
        stream::stream(stream)?;
        EXECUTABLES.get(executable).map(drop)
    };

    [cuLaunchKernel_ptsz] cuLaunchKernel(
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, pointers: Pointers, extra: Pointers,
    ) => launch::launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared, false, stream, Arguments { pointers, extra });
    [cuLaunchCooperativeKernel_ptsz] cuLaunchCooperativeKernel(
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, pointers: Pointers,
    ) => launch::launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared, true, stream, Arguments { pointers, extra: Pointers::NONE });
    [cuLaunchKernelEx_ptsz] cuLaunchKernelEx(config: In<LaunchConfig>, function: Handle, pointers: Pointers, extra: Pointers) => {
        let config = config.get()?;
        let attributes = (0..config.attribute_count as usize).map(|i| config.attributes.get_at(i));
        let attributes = attributes.collect::<Result<Vec<_>>>()?;
        let cooperative = attributes.iter().any(|it| it.id == COOPERATIVE && it.value != 0);
        // Blocks of a cluster reach each other's memory. Other attributes are hints: none changes what a kernel computes.
        if attributes.iter().any(|it| it.id == CLUSTER && (it.value > 1 || it.rest[..2].iter().any(|size| *size > 1))) {
            eprintln!("gpumux: the emulated device cannot run a kernel in clusters of blocks");
            current()?.spoil(CuError::INVALID_CLUSTER_SIZE);
            return Err(CuError::INVALID_CLUSTER_SIZE);
        }
        launch::launch(function, config.grid, config.block, config.shared, cooperative, config.stream, Arguments { pointers, extra })
    };
}

/// `CUlaunchAttribute`: its value is a union, of which numbers are the first word.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LaunchAttribute {
    id: c_int,
    pad: c_int,
    value: c_int,
    rest: [c_int; 15],
}

/// `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`
const COOPERATIVE: c_int = 2;
/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`
const CLUSTER: c_int = 4;
const _: () = assert!(size_of::<LaunchAttribute>() == 72);

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    attributes: In<LaunchAttribute>,
    attribute_count: c_uint,
}

const _: () = assert!(size_of::<LaunchConfig>() == 56);

/// The function of a handle, or of a kernel's in the current context.
fn function_of(handle: Handle) -> Result<std::sync::Arc<module::Function>> {
    match module::loaded(handle) {
        Ok(function) => Ok(function),
        Err(_) => library::resolve(handle, &current()?),
    }
}

fn describe(
    code: c_int,
    text: Out<*const c_char>,
    which: fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> Result {
    text.check()?;
    match error::describe(code) {
        Some(known) => text.put(which(known).as_ptr()),
        None => {
            text.put(std::ptr::null())?;
            Err(CuError::INVALID_VALUE)
        }
    }
}

fn create_context(out: Out<Handle>, flags: c_uint, ordinal: c_int) -> Result {
    out.check()?;
    let made = context::create(ordinal, flags, None)?;
    let handle = made.handle();
    context::push(made);
    out.put(handle)
}

/// Stack size, printf buffer, heap size and the like: fixed.
fn limit_of(limit: c_int) -> Result<usize> {
    match limit {
        0 => Ok(1024),
        1 => Ok(1 << 20),
        2 => Ok(8 << 20),
        3..=8 => Ok(0),
        _ => Err(CuError::UNSUPPORTED_LIMIT),
    }
}

fn allocate(bytes: u64) -> Result<u64> {
    let context = current()?;
    context.check()?;
    graph::refuse_unsafe()?;
    memory::alloc(context.device.index, context.handle(), bytes)
}

fn allocate_host(out: Out<Host>, bytes: usize, flags: c_uint) -> Result {
    current()?;
    out.check()?;
    out.put(memory::alloc_host(bytes, flags)? as Host)
}

/// The device on which memory is asked for; only plain device memory can be made.
fn device_of(prop: &CUmemAllocationProp) -> Result<u32> {
    let plain = prop.kind == MEM_ALLOCATION_TYPE_PINNED
        && prop.location.kind == MEM_LOCATION_TYPE_DEVICE
        && prop.requested_handle_types & !MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR == 0;
    if !plain {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(process()?.device(prop.location.id)?.index)
}

fn create_memory(
    handle: Out<u64>,
    bytes: usize,
    prop: In<CUmemAllocationProp>,
    flags: c_ulonglong,
) -> Result {
    handle.check()?;
    let prop = prop.get()?;
    let device = device_of(&prop)?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let exportable = prop.requested_handle_types != 0;
    handle.put(memory::create(device, bytes as u64, exportable)?)
}

fn import_memory(handle: Out<u64>, file: AnyOut, kind: c_int) -> Result {
    process()?;
    handle.check()?;
    let file = c_int::try_from(file.number()).map_err(|_| CuError::INVALID_VALUE)?;
    if kind != MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        return Err(CuError::NOT_SUPPORTED);
    }
    handle.put(memory::import(border::program_file(file)?)?)
}

fn properties(out: Out<CUmemAllocationProp>, handle: u64) -> Result {
    let process = process()?;
    let physical = memory::space().handle(handle)?;
    let ordinal = process
        .devices
        .iter()
        .position(|device| device.index == physical.device)
        .ok_or(CuError::INVALID_DEVICE)?;
    let mut prop = CUmemAllocationProp::on_device(ordinal as c_int);
    if physical.exportable {
        prop.requested_handle_types = MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
    out.put(prop)
}

fn set_access(address: u64, bytes: usize, access: In<CUmemAccessDesc>, count: usize) -> Result {
    let process = process()?;
    let (mut granted, mut taken) = (0, 0);
    if count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    for i in 0..count.min(process.devices.len()) {
        let access = access.get_at(i)?;
        let bit = 1_u32 << process.device(access.location.id)?.index;
        if access.location.kind != MEM_LOCATION_TYPE_DEVICE || ![0, 1, 3].contains(&access.flags) {
            return Err(CuError::INVALID_VALUE);
        }
        match access.flags {
            0 => taken |= bit,
            _ => granted |= bit,
        }
    }
    memory::set_access(address, bytes as u64, granted, taken)
}

/// `CU_POINTER_ATTRIBUTE_*`
fn pointer_attribute(data: AnyOut, attribute: c_int, address: u64) -> Result {
    let process = process()?;
    let space = memory::space();
    let host = space.host_range(address);
    let device = space.device_of(address);
    if host.is_none() && device.is_none() {
        return Err(CuError::INVALID_VALUE);
    }
    let managed = space.allocation(address).is_some_and(|it| it.managed);
    let ordinal = process
        .devices
        .iter()
        .position(|it| Some(it.index) == device)
        .map_or(0, |at| at as c_int);
    let range = match host {
        Some((start, range)) => (start, range.bytes),
        None => space.range_of(address).ok_or(CuError::INVALID_VALUE)?,
    };
    match attribute {
        // Context.
        1 => {
            let owner = space.allocation(address).map(|it| it.context);
            data.typed::<usize>().put(owner.unwrap_or(0))
        }
        // Kind of memory: 1 host, 2 device.
        2 => data
            .typed::<c_uint>()
            .put(if host.is_some() { 1 } else { 2 }),
        // Address on the device; on the host.
        3 => data.typed::<u64>().put(address),
        4 if host.is_some() || managed => data.typed::<u64>().put(address),
        4 => Err(CuError::INVALID_VALUE),
        // Managed.
        8 => data.typed::<c_uint>().put(managed.into()),
        9 => data.typed::<c_int>().put(ordinal),
        // Range; mapped.
        11 => data.typed::<u64>().put(range.0),
        12 => data.typed::<usize>().put(range.1 as usize),
        13 => data.typed::<c_uint>().put(1),
        // Synchronous copies; a name; kinds of handles; access; the mapping.
        6 => data.typed::<c_uint>().put(0),
        7 | 20 => data.typed::<u64>().put(range.0),
        14 => data.typed::<u64>().put(match space.is_exportable(address) {
            true => MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u64,
            false => 0,
        }),
        17 => data.typed::<u64>().put(0),
        16 => data.typed::<c_uint>().put(3),
        18 => data.typed::<u64>().put(range.1),
        19 => data.typed::<u64>().put(range.0),
        // By inter-process handles, as an H100 says; by network adapters, decompressors: not reachable.
        10 => {
            let plain = space.allocation(address);
            let plain = plain.filter(|it| !it.managed && it.pool == 0);
            data.typed::<c_uint>().put(plain.is_some().into())
        }
        15 | 21 => data.typed::<c_uint>().put(0),
        // Of later drivers.
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// What a pointer has that CUDA does not know.
fn no_attribute(data: AnyOut, attribute: c_int) -> Result {
    match attribute {
        2 | 8 => data.typed::<c_uint>().put(0),
        9 => data.typed::<c_int>().put(-2),
        13 => data.typed::<c_uint>().put(0),
        1 | 3 | 4 | 11 | 12 => data.typed::<u64>().put(0),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_works_before_init() {
        let mut count = 0;
        // SAFETY: the argument is a pointer as C would pass it.
        let out = unsafe { std::mem::transmute::<*mut c_int, Out<c_int>>(&raw mut count) };
        assert_eq!(cuDeviceGetCount(out), CuError::NOT_INITIALIZED.0);
        assert_eq!(cuCtxSynchronize(), CuError::NOT_INITIALIZED.0);
        assert_eq!(cuStreamQuery(0), CuError::NOT_INITIALIZED.0);
        assert_eq!(cuMemFree_v2(0), 0);
    }
}
