//! A uprobe on a function that begins with `push %rbp` costs a thirtieth of one on most other first
//! instructions, and the vendor's functions begin so: the stand-ins' must too.

use object::{Object, ObjectSection, ObjectSymbol};

use vramscope_fakes::install::LIBRARIES;

use crate::support::standins;

/// push %rbp
const PUSH_RBP: u8 = 0x55;

/// Exported functions of a library with the address and the first byte of each.
fn exported(library: &str) -> Vec<(String, u64, u8)> {
    let bytes = std::fs::read(standins().join(library)).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let mut functions = Vec::new();
    for symbol in file.dynamic_symbols() {
        let name = symbol.name().unwrap();
        let is_interface = ["cu", "__cuda", "nvml"].iter().any(|p| name.starts_with(p));
        if !symbol.is_definition() || !is_interface {
            continue;
        }
        let address = symbol.address();
        let section = file
            .sections()
            .find(|section| {
                (section.address()..section.address() + section.size()).contains(&address)
            })
            .unwrap();
        let code = section.data_range(address, 1).unwrap().unwrap();
        functions.push((name.to_owned(), address, code[0]));
    }
    functions
}

#[track_caller]
fn assert_functions(library: &str, required: &str) {
    let functions = exported(library);
    for name in required.split_ascii_whitespace() {
        let has = functions.iter().any(|(exported, ..)| exported == name);
        assert!(has, "{library} lacks {name}");
    }
    for (name, _, first) in &functions {
        assert_eq!(
            *first, PUSH_RBP,
            "{name} in {library} begins with {first:#04x}, not push %rbp: \
             build with -C force-frame-pointers=yes"
        );
    }
    // A probe on one name must not see calls of another.
    let mut addresses: Vec<u64> = functions.iter().map(|(_, address, _)| *address).collect();
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(
        addresses.len(),
        functions.len(),
        "two names share their code"
    );
}

#[test]
fn driver_functions_begin_with_push_rbp() {
    assert_functions(
        "libcuda.so.1",
        "cuMemAllocPitch_v2 cuMemAllocManaged cuMemAllocHost_v2 cuMemAllocAsync cuMemAllocAsync_ptsz
         cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz cuMemFreeAsync cuMemFreeAsync_ptsz
         cuArrayCreate_v2 cuArray3DCreate_v2 cuArrayDestroy cuMipmappedArrayCreate
         cuMipmappedArrayDestroy cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemRelease
         cuMemMap cuMemUnmap cuMemSetAccess cuMemGetAllocationGranularity
         cuMemRetainAllocationHandle cuMemExportToShareableHandle cuMemImportFromShareableHandle
         cuMemPoolCreate cuMemPoolDestroy cuMemPoolTrimTo cuMemPoolGetAttribute
         cuMemPoolSetAttribute cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceSetMemPool
         cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle cuCtxCreate
         cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy cuCtxPushCurrent cuCtxPopCurrent
         cuDevicePrimaryCtxRelease cuDevicePrimaryCtxReset cuMemHostRegister cuCtxSynchronize
         cuCtxSynchronize_v2 cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize
         cuStreamSynchronize_ptsz
         cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetUuid
         cuDeviceGetUuid_v2 cuDeviceGetAttribute cuDeviceTotalMem_v2 cuDevicePrimaryCtxRetain
         cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxGetState
         cuCtxCreate_v2 cuCtxDestroy_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxPushCurrent_v2
         cuCtxPopCurrent_v2 cuCtxGetDevice cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2
         cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister cuGetProcAddress
         cuGetProcAddress_v2 cuGetErrorName cuGetErrorString
         cuMemcpy cuMemcpyAsync cuMemsetD8_v2 cuMemsetD8Async cuMemsetD32Async cuStreamQuery
         cuMemGetAddressRange_v2 cuPointerGetAttribute cuMemPoolSetAccess cuFuncGetAttribute
         cuFuncSetAttribute cuFuncSetCacheConfig cuLaunchCooperativeKernel cuLaunchKernel
         cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2 cuMemGetAllocationPropertiesFromHandle
         cuModuleGetFunction cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleUnload
         cuOccupancyMaxActiveBlocksPerMultiprocessor cuStreamWriteValue32_v2 cuTensorMapEncodeTiled",
    );
}

#[test]
fn runtime_functions_begin_with_push_rbp() {
    assert_functions(
        "libcudart.so.13",
        "cudaMallocPitch cudaMalloc3D cudaMallocManaged cudaMallocAsync cudaMallocAsync_ptsz
         cudaMallocFromPoolAsync cudaMallocFromPoolAsync_ptsz cudaFreeAsync cudaFreeAsync_ptsz
         cudaMallocArray cudaMalloc3DArray cudaMallocMipmappedArray cudaFreeArray
         cudaFreeMipmappedArray cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaIpcCloseMemHandle
         cudaMemPoolCreate cudaMemPoolDestroy cudaMemPoolTrimTo cudaMemPoolGetAttribute
         cudaMemPoolSetAttribute cudaDeviceGetDefaultMemPool cudaDeviceGetMemPool
         cudaDeviceSetMemPool cudaStreamCreate cudaStreamDestroy cudaStreamSynchronize
         cudaStreamSynchronize_ptsz
         cudaGetDeviceCount cudaSetDevice cudaGetDevice cudaMalloc cudaFree cudaHostAlloc
         cudaMallocHost cudaFreeHost cudaHostRegister cudaHostUnregister cudaMemGetInfo
         cudaDeviceSynchronize cudaDeviceReset cudaGetLastError cudaPeekAtLastError
         cudaGetErrorName cudaGetErrorString cudaRuntimeGetVersion cudaDriverGetVersion
         __cudaGetKernel __cudaLaunchKernel __cudaPopCallConfiguration __cudaPushCallConfiguration
         __cudaRegisterFatBinary __cudaRegisterFatBinaryEnd __cudaRegisterFunction
         __cudaRegisterVar __cudaUnregisterFatBinary cudaDeviceCanAccessPeer
         cudaDeviceEnablePeerAccess cudaDeviceGetAttribute cudaDeviceGetGraphMemAttribute
         cudaDeviceGetPCIBusId cudaDeviceGetStreamPriorityRange cudaDeviceSetGraphMemAttribute
         cudaEventCreate cudaEventCreateWithFlags cudaEventDestroy cudaEventElapsedTime
         cudaEventQuery cudaEventRecord cudaEventRecordWithFlags cudaEventSynchronize
         cudaFuncGetAttributes cudaFuncSetAttribute cudaGetDeviceProperties
         cudaGetDriverEntryPointByVersion cudaGetSymbolAddress cudaGraphAddNode
         cudaGraphConditionalHandleCreate cudaGraphDestroy cudaGraphExecDestroy cudaGraphGetNodes
         cudaGraphInstantiate cudaGraphInstantiateWithFlags cudaGraphLaunch
         cudaGraphNodeGetDependencies cudaGraphRetainUserObject cudaIpcGetEventHandle
         cudaIpcOpenEventHandle cudaKernelSetAttributeForDevice cudaLaunchCooperativeKernel
         cudaLaunchHostFunc cudaLaunchKernel cudaLaunchKernelExC cudaLibraryGetGlobal
         cudaLibraryGetKernel cudaLibraryGetKernelCount cudaLibraryGetManaged
         cudaLibraryGetUnifiedFunction cudaLibraryLoadData cudaLibraryLoadFromFile
         cudaLibraryUnload cudaMemPoolSetAccess cudaMemcpy cudaMemcpy2DAsync cudaMemcpyAsync
         cudaMemcpyPeerAsync cudaMemcpyToSymbol cudaMemset cudaMemsetAsync
         cudaOccupancyMaxActiveBlocksPerMultiprocessor
         cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cudaPointerGetAttributes
         cudaProfilerStart cudaProfilerStop cudaStreamAddCallback cudaStreamBeginCapture
         cudaStreamBeginCaptureToGraph cudaStreamCreateWithFlags cudaStreamCreateWithPriority
         cudaStreamEndCapture cudaStreamGetCaptureInfo cudaStreamGetPriority cudaStreamIsCapturing
         cudaStreamQuery cudaStreamUpdateCaptureDependencies cudaStreamWaitEvent
         cudaThreadExchangeStreamCaptureMode cudaUserObjectCreate cudaUserObjectRelease",
    );
}

#[test]
fn management_functions_begin_with_push_rbp() {
    assert_functions(
        "libnvidia-ml.so.1",
        "nvmlInit_v2 nvmlInitWithFlags nvmlShutdown nvmlErrorString nvmlSystemGetDriverVersion
         nvmlDeviceGetCount_v2 nvmlDeviceGetHandleByIndex_v2 nvmlDeviceGetUUID nvmlDeviceGetName
         nvmlDeviceGetIndex nvmlDeviceGetMinorNumber nvmlDeviceGetNumaNodeId
         nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetPciInfo_v3
         nvmlDeviceGetUtilizationRates nvmlDeviceGetComputeRunningProcesses_v3
         nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses
         nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo_v2",
    );
}

/// All that PyTorch's profiler is linked with.
#[test]
fn profiling_functions_begin_with_push_rbp() {
    assert_functions(
        "libcupti.so.13",
        "cuptiActivityDisable cuptiActivityEnable cuptiActivityEnableCudaEventDeviceTimestamps
         cuptiActivityEnableDriverApi cuptiActivityEnableRuntimeApi cuptiActivityFlushAll
         cuptiActivityGetNextRecord cuptiActivityGetNumDroppedRecords
         cuptiActivityPopExternalCorrelationId cuptiActivityPushExternalCorrelationId
         cuptiActivityRegisterCallbacks cuptiActivityRegisterTimestampCallback
         cuptiActivitySetAttribute cuptiEnableCallback cuptiEnableDomain cuptiFinalize
         cuptiGetCallbackName cuptiGetResultString cuptiGetVersion cuptiSubscribe cuptiUnsubscribe",
    );
}

#[test]
fn libraries_carry_the_vendors_sonames() {
    for library in LIBRARIES.map(|(_, soname)| soname) {
        let bytes = std::fs::read(standins().join(library)).unwrap();
        let name = [library.as_bytes(), b"\0"].concat();
        let file = object::File::parse(&*bytes).unwrap();
        let names = file.section_by_name(".dynstr").unwrap();
        let names = names.data().unwrap();
        let carries = names.windows(name.len()).any(|part| part == name);
        assert!(carries, "{library} has another SONAME");
    }
}
