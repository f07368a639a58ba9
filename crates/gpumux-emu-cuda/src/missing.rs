//! The driver functions that the emulated device does not have. They are exported, as programs that are linked
//! against libcuda need every symbol, and say so when they are called. How often is counted: `GPUMUX_EMU_MISSING` names
//! a file to which a process appends a line for each when it ends.

use std::{collections::BTreeMap, ffi::c_int, fs::File, io::Write, sync::Mutex};

use crate::{border::Address, error::CuError, process::lock};

/// The variable that names the file.
const FILE_VARIABLE: &str = "GPUMUX_EMU_MISSING";

/// Calls by symbol.
static CALLS: Mutex<BTreeMap<&str, u64>> = Mutex::new(BTreeMap::new());

macro_rules! missing {
    ($($symbol:ident)*) => {
        $(
            /// Takes no arguments of those that there are: it looks at none.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub(crate) extern "C" fn $symbol() -> c_int {
                called(stringify!($symbol))
            }
        )*

        /// All of them.
        pub(crate) const FUNCTIONS: &[(&str, Address)] =
            &[$((stringify!($symbol), Address($symbol as *const ())),)*];
    };
}

fn called(symbol: &'static str) -> c_int {
    let mut calls = lock(&CALLS);
    if calls.is_empty() {
        // SAFETY: the function is there as long as the process: the library is never unloaded once it has threads.
        unsafe { libc::atexit(tell) };
    }
    *calls.entry(symbol).or_default() += 1;
    CuError::NOT_SUPPORTED.0
}

/// Appends calls and symbol of each to the file.
extern "C" fn tell() {
    let Some(path) = std::env::var_os(FILE_VARIABLE) else {
        return;
    };
    let lines: String = lock(&CALLS)
        .iter()
        .map(|(symbol, calls)| format!("{calls} {symbol}\n"))
        .collect();
    let written = File::options().create(true).append(true).open(&path);
    if let Err(error) = written.and_then(|mut file| file.write_all(lines.as_bytes())) {
        eprintln!("gpumux: cannot write {}: {error}", path.display());
    }
}

missing! {
    cuArray3DCreate cuArray3DCreate_v2 cuArray3DGetDescriptor cuArray3DGetDescriptor_v2 cuArrayCreate
    cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor cuArrayGetDescriptor_v2 cuArrayGetMemoryRequirements
    cuArrayGetPlane cuArrayGetSparseProperties cuCheckpointProcessCheckpoint
    cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessGetState cuCheckpointProcessLock
    cuCheckpointProcessRestore cuCheckpointProcessUnlock cuCoredumpGetAttribute cuCoredumpGetAttributeGlobal
    cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal cuCtxAttach cuCtxCreate cuCtxDetach cuCtxFromGreenCtx
    cuCtxGetDevResource cuCtxGetExecAffinity cuCtxRecordEvent cuCtxWaitEvent cuDestroyExternalMemory
    cuDestroyExternalSemaphore cuDevResourceGenerateDesc cuDevSmResourceSplitByCount cuDeviceGetDevResource
    cuDeviceGetGraphMemAttribute cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid
    cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAtomicCapabilities cuDeviceGetProperties cuDeviceGraphMemTrim
    cuDeviceRegisterAsyncNotification cuDeviceSetGraphMemAttribute cuDeviceTotalMem
    cuDeviceUnregisterAsyncNotification cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerConnect
    cuEGLStreamConsumerConnectWithFlags cuEGLStreamConsumerDisconnect cuEGLStreamConsumerReleaseFrame
    cuEGLStreamProducerConnect cuEGLStreamProducerDisconnect cuEGLStreamProducerPresentFrame
    cuEGLStreamProducerReturnFrame cuEventCreateFromEGLSync cuExternalMemoryGetMappedBuffer
    cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites cuFuncGetModule cuFuncSetBlockShape
    cuFuncSetSharedSize cuGLCtxCreate cuGLCtxCreate_v2 cuGLGetDevices cuGLGetDevices_v2 cuGLInit
    cuGLMapBufferObject cuGLMapBufferObject_v2 cuGLMapBufferObject_v2_ptds cuGLMapBufferObjectAsync
    cuGLMapBufferObjectAsync_v2 cuGLMapBufferObjectAsync_v2_ptsz cuGLRegisterBufferObject
    cuGLSetBufferObjectMapFlags cuGLUnmapBufferObject cuGLUnmapBufferObjectAsync cuGLUnregisterBufferObject
    cuGraphAddBatchMemOpNode
    cuGraphAddEventRecordNode cuGraphAddEventWaitNode
    cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode
    cuGraphAddMemAllocNode cuGraphAddMemFreeNode
    cuGraphAddNode cuGraphAddNode_v2 cuGraphBatchMemOpNodeGetParams
    cuGraphBatchMemOpNodeSetParams cuGraphChildGraphNodeGetGraph cuGraphConditionalHandleCreate
    cuGraphDebugDotPrint cuGraphEventRecordNodeGetEvent
    cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent
    cuGraphExecBatchMemOpNodeSetParams cuGraphExecChildGraphNodeSetParams cuGraphExecEventRecordNodeSetEvent
    cuGraphExecEventWaitNodeSetEvent cuGraphExecExternalSemaphoresSignalNodeSetParams
    cuGraphExecExternalSemaphoresWaitNodeSetParams cuGraphExecGetFlags cuGraphExecHostNodeSetParams
    cuGraphExecMemcpyNodeSetParams
    cuGraphExecMemsetNodeSetParams cuGraphExecNodeSetParams cuGraphExecUpdate
    cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges
    cuGraphGetEdges_v2 cuGraphHostNodeGetParams cuGraphHostNodeSetParams
    cuGraphInstantiate
    cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
    cuGraphKernelNodeGetParams_v2 cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams
    cuGraphKernelNodeSetParams_v2 cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams
    cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams
    cuGraphMemsetNodeSetParams cuGraphNodeFindInClone cuGraphNodeGetDependencies cuGraphNodeGetDependencies_v2
    cuGraphNodeGetDependentNodes cuGraphNodeGetDependentNodes_v2 cuGraphNodeGetEnabled
    cuGraphNodeSetEnabled cuGraphNodeSetParams cuGraphReleaseUserObject
    cuGraphRetainUserObject cuGraphicsEGLRegisterImage cuGraphicsGLRegisterBuffer
    cuGraphicsGLRegisterImage cuGraphicsMapResources cuGraphicsMapResources_ptsz
    cuGraphicsResourceGetMappedEglFrame cuGraphicsResourceGetMappedMipmappedArray
    cuGraphicsResourceGetMappedPointer cuGraphicsResourceGetMappedPointer_v2 cuGraphicsResourceSetMapFlags
    cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
    cuGraphicsUnmapResources_ptsz cuGraphicsUnregisterResource cuGraphicsVDPAURegisterOutputSurface
    cuGraphicsVDPAURegisterVideoSurface cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxGetDevResource
    cuGreenCtxGetId cuGreenCtxRecordEvent cuGreenCtxStreamCreate cuGreenCtxWaitEvent cuImportExternalMemory
    cuImportExternalSemaphore cuIpcCloseMemHandle cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle
    cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuLaunch cuLaunchCooperativeKernelMultiDevice cuLaunchGrid
    cuLaunchGridAsync cuLibraryGetUnifiedFunction cuLinkAddData cuLinkAddFile
    cuLinkCreate cuLogsCurrent cuLogsDumpToFile
    cuLogsDumpToMemory cuLogsRegisterCallback cuLogsUnregisterCallback cuMemAlloc cuMemAllocHost
    cuMemAllocPitch cuMemBatchDecompressAsync cuMemBatchDecompressAsync_ptsz cuMemDiscardAndPrefetchBatchAsync
    cuMemDiscardAndPrefetchBatchAsync_ptsz cuMemDiscardBatchAsync cuMemDiscardBatchAsync_ptsz cuMemFree
    cuMemGetAddressRange cuMemGetDefaultMemPool cuMemGetHandleForAddressRange cuMemGetInfo cuMemGetMemPool
    cuMemHostGetDevicePointer cuMemMapArrayAsync cuMemMapArrayAsync_ptsz cuMemPoolExportPointer
    cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolImportPointer
    cuMemPrefetchBatchAsync cuMemPrefetchBatchAsync_ptsz cuMemRangeGetAttribute cuMemRangeGetAttributes
    cuMemSetMemPool cuMemcpy2D cuMemcpy2DAsync cuMemcpy2DUnaligned cuMemcpy3D cuMemcpy3DAsync
    cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_ptsz cuMemcpy3DBatchAsync_v2 cuMemcpy3DBatchAsync_v2_ptsz
    cuMemcpy3DPeer cuMemcpy3DPeer_ptds cuMemcpy3DPeerAsync cuMemcpy3DPeerAsync_ptsz cuMemcpyAtoA
    cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds cuMemcpyAtoD cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds cuMemcpyAtoH
    cuMemcpyAtoH_v2 cuMemcpyAtoH_v2_ptds cuMemcpyAtoHAsync cuMemcpyAtoHAsync_v2 cuMemcpyAtoHAsync_v2_ptsz
    cuMemcpyDtoA
    cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds cuMemcpyDtoD cuMemcpyDtoDAsync cuMemcpyDtoH cuMemcpyDtoHAsync
    cuMemcpyHtoA cuMemcpyHtoA_v2 cuMemcpyHtoA_v2_ptds cuMemcpyHtoAAsync cuMemcpyHtoAAsync_v2
    cuMemcpyHtoAAsync_v2_ptsz cuMemcpyHtoD cuMemcpyHtoDAsync cuMemsetD16 cuMemsetD2D16 cuMemsetD2D32
    cuMemsetD2D8 cuMemsetD32 cuMemsetD8 cuMipmappedArrayCreate cuMipmappedArrayDestroy
    cuMipmappedArrayGetLevel cuMipmappedArrayGetMemoryRequirements cuMipmappedArrayGetSparseProperties
    cuModuleGetGlobal cuModuleGetSurfRef cuModuleGetTexRef cuMulticastAddDevice cuMulticastBindAddr
    cuMulticastBindMem cuMulticastCreate cuMulticastGetGranularity cuMulticastUnbind
    cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveClusters
    cuOccupancyMaxPotentialBlockSizeWithFlags cuOccupancyMaxPotentialClusterSize cuParamSetSize
    cuParamSetTexRef cuParamSetf cuParamSeti cuParamSetv cuProfilerInitialize cuSignalExternalSemaphoresAsync
    cuSignalExternalSemaphoresAsync_ptsz cuStreamBatchMemOp cuStreamBatchMemOp_ptsz cuStreamBatchMemOp_v2
    cuStreamBatchMemOp_v2_ptsz cuStreamBeginCapture cuStreamBeginCapture_ptsz cuStreamBeginCaptureToGraph
    cuStreamBeginCaptureToGraph_ptsz cuStreamGetCaptureInfo cuStreamGetCaptureInfo_ptsz cuStreamGetCtx_v2
    cuStreamGetCtx_v2_ptsz cuStreamGetGreenCtx cuStreamUpdateCaptureDependencies
    cuStreamUpdateCaptureDependencies_ptsz cuStreamUpdateCaptureDependencies_v2
    cuStreamUpdateCaptureDependencies_v2_ptsz cuStreamWaitValue32 cuStreamWaitValue32_ptsz
    cuStreamWaitValue32_v2 cuStreamWaitValue32_v2_ptsz cuStreamWaitValue64 cuStreamWaitValue64_ptsz
    cuStreamWaitValue64_v2 cuStreamWaitValue64_v2_ptsz cuStreamWriteValue64 cuStreamWriteValue64_ptsz
    cuStreamWriteValue64_v2 cuStreamWriteValue64_v2_ptsz cuSurfObjectCreate cuSurfObjectDestroy
    cuSurfObjectGetResourceDesc cuSurfRefGetArray cuSurfRefSetArray cuTensorMapEncodeIm2col
    cuTensorMapEncodeIm2colWide cuTensorMapEncodeTiled cuTensorMapReplaceAddress cuTexObjectCreate
    cuTexObjectDestroy cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc
    cuTexRefCreate cuTexRefDestroy cuTexRefGetAddress cuTexRefGetAddress_v2 cuTexRefGetAddressMode
    cuTexRefGetArray cuTexRefGetBorderColor cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat
    cuTexRefGetMaxAnisotropy cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias
    cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray cuTexRefSetAddress cuTexRefSetAddress_v2
    cuTexRefSetAddress2D cuTexRefSetAddress2D_v2 cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode
    cuTexRefSetArray cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat
    cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias
    cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray cuUserObjectCreate cuUserObjectRelease
    cuUserObjectRetain cuVDPAUCtxCreate cuVDPAUCtxCreate_v2 cuVDPAUGetDevice cuWGLGetDevice
    cuWaitExternalSemaphoresAsync cuWaitExternalSemaphoresAsync_ptsz
}
