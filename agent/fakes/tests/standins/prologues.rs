//! A uprobe on a function that begins with `push %rbp` costs a thirtieth of one on most other first
//! instructions, and the vendor's functions begin so: the stand-ins' must too.

use object::{Object, ObjectSection, ObjectSymbol};

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
        let is_interface = name.starts_with("cu") || name.starts_with("nvml");
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
         cuGetProcAddress_v2 cuGetErrorName cuGetErrorString",
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
         cudaGetErrorName cudaGetErrorString cudaRuntimeGetVersion cudaDriverGetVersion",
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
         nvmlDeviceGetGraphicsRunningProcesses_v3",
    );
}

#[test]
fn libraries_carry_the_vendors_sonames() {
    for library in ["libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1"] {
        let bytes = std::fs::read(standins().join(library)).unwrap();
        let name = [library.as_bytes(), b"\0"].concat();
        let file = object::File::parse(&*bytes).unwrap();
        let names = file.section_by_name(".dynstr").unwrap();
        let names = names.data().unwrap();
        let carries = names.windows(name.len()).any(|part| part == name);
        assert!(carries, "{library} has another SONAME");
    }
}
