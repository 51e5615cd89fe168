//! Functions that programs are linked with and that the stand-in has no use for: graphs and their
//! capture, code as data, events of other processes. They refuse every call with
//! cudaErrorNotSupported. A caller's arguments lie in registers and on its own stack, so a function
//! that takes none may be called with any.

use std::ffi::c_int;

use crate::{code, codes::NOT_SUPPORTED};

macro_rules! refused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            distinct!(stringify!($name));
            code(Err(NOT_SUPPORTED))
        }
    )*};
}

refused! {
    cudaGetSymbolAddress
    cudaGraphAddNode
    cudaGraphConditionalHandleCreate
    cudaGraphDestroy
    cudaGraphExecDestroy
    cudaGraphGetNodes
    cudaGraphInstantiate
    cudaGraphInstantiateWithFlags
    cudaGraphLaunch
    cudaGraphNodeGetDependencies
    cudaGraphRetainUserObject
    cudaIpcGetEventHandle
    cudaIpcOpenEventHandle
    cudaLibraryGetGlobal
    cudaLibraryGetKernel
    cudaLibraryGetKernelCount
    cudaLibraryGetManaged
    cudaLibraryGetUnifiedFunction
    cudaLibraryLoadData
    cudaLibraryLoadFromFile
    cudaLibraryUnload
    cudaStreamBeginCapture
    cudaStreamBeginCaptureToGraph
    cudaStreamEndCapture
    cudaStreamUpdateCaptureDependencies
    cudaUserObjectCreate
    cudaUserObjectRelease
}
