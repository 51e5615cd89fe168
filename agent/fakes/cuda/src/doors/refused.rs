//! Functions that programs look up or link, and that the stand-in has no use for: no kernels, and no
//! memory written by a stream. They refuse every call with CUDA_ERROR_NOT_SUPPORTED. A caller's
//! arguments lie in registers and on its own stack, so a function that takes none may be called with any.

use std::ffi::c_int;

use crate::codes::NOT_SUPPORTED;

macro_rules! refused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            distinct!(stringify!($name));
            NOT_SUPPORTED
        }
    )*};
}

refused! {
    cuFuncGetAttribute
    cuFuncSetAttribute
    cuFuncSetCacheConfig
    cuLaunchCooperativeKernel
    cuLaunchKernel
    cuLinkAddData_v2
    cuLinkComplete
    cuLinkCreate_v2
    cuMemGetAllocationPropertiesFromHandle
    cuModuleGetFunction
    cuModuleLoad
    cuModuleLoadData
    cuModuleLoadDataEx
    cuModuleUnload
    cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuStreamWriteValue32_v2
    cuTensorMapEncodeTiled
}
