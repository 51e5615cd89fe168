//! The table itself. A record names its row by index; pinned programs outlive the agent, so the
//! order is part of what names the pin folder (see `probes::bpf`).
//!
//! Where two names of a library are the same code, the row that comes first is the one probed:
//! current versions come before first ones.

use super::{Address, Alloc, Effect, Hook, Layer, MemoryKind, Size, Space};
use Address::{Arg, Out};
use Effect::*;
use Layer::{Driver, Runtime};
use MemoryKind::{Array, Device, Managed, PinnedHost, Pool, RegisteredHost, VmmVirtual};

const fn hook(symbol: &'static str, layer: Layer, effect: Effect) -> Hook {
    Hook {
        symbol,
        layer,
        effect,
        narrow: false,
    }
}

/// The first version of a function, with 32-bit device addresses and sizes.
const fn narrow(symbol: &'static str, effect: Effect) -> Hook {
    Hook {
        symbol,
        layer: Driver,
        effect,
        narrow: true,
    }
}

const fn begins(kind: MemoryKind, space: Space, address: Address, size: Size) -> Effect {
    Alloc(Alloc {
        kind,
        space,
        address,
        size,
        stream_arg: None,
        pool_arg: None,
    })
}

const fn on_device(kind: MemoryKind, size: Size) -> Effect {
    begins(kind, Space::Device, Out(0), size)
}

const fn stream_ordered(stream_arg: u8, pool_arg: Option<u8>) -> Effect {
    Alloc(Alloc {
        kind: Pool,
        space: Space::Device,
        address: Out(0),
        size: Size::Arg(1),
        stream_arg: Some(stream_arg),
        pool_arg,
    })
}

const fn ends(space: Space) -> Effect {
    Free {
        space,
        stream_arg: None,
    }
}

const PLAIN: Effect = on_device(Device, Size::Arg(1));
const PITCHED: Effect = on_device(Device, Size::Pitched);
const PITCHED_3D: Effect = on_device(Device, Size::Pitched3D);
const MANAGED: Effect = on_device(Managed, Size::Arg(1));
const ASYNC: Effect = stream_ordered(2, None);
const FROM_POOL: Effect = stream_ordered(3, Some(2));
const FREE: Effect = ends(Space::Device);
const FREE_ASYNC: Effect = Free {
    space: Space::Device,
    stream_arg: Some(1),
};
const PINNED: Effect = begins(PinnedHost, Space::Host, Out(0), Size::Arg(1));
const REGISTER: Effect = begins(RegisteredHost, Space::Registered, Arg(0), Size::Arg(1));

const fn array(size: Size) -> Effect {
    begins(Array, Space::Array, Out(0), size)
}

const fn mipmaps(size: Size) -> Effect {
    begins(Array, Space::MipmappedArray, Out(0), size)
}

const fn context(device_arg: u8) -> Effect {
    ContextOfDevice { out: 0, device_arg }
}

/// See the module's text.
pub const HOOKS: &[Hook] = &[
    // Memory of the card.
    hook("cuMemAlloc_v2", Driver, PLAIN),
    narrow("cuMemAlloc", PLAIN),
    hook("cuMemAllocPitch_v2", Driver, PITCHED),
    narrow("cuMemAllocPitch", PITCHED),
    hook("cuMemAllocManaged", Driver, MANAGED),
    hook("cuMemAllocAsync", Driver, ASYNC),
    hook("cuMemAllocAsync_ptsz", Driver, ASYNC),
    hook("cuMemAllocFromPoolAsync", Driver, FROM_POOL),
    hook("cuMemAllocFromPoolAsync_ptsz", Driver, FROM_POOL),
    hook("cuMemFree_v2", Driver, FREE),
    narrow("cuMemFree", FREE),
    hook("cuMemFreeAsync", Driver, FREE_ASYNC),
    hook("cuMemFreeAsync_ptsz", Driver, FREE_ASYNC),
    hook("cuArrayCreate_v2", Driver, array(Size::Array)),
    narrow("cuArrayCreate", array(Size::Array)),
    hook("cuArray3DCreate_v2", Driver, array(Size::Array3D)),
    narrow("cuArray3DCreate", array(Size::Array3D)),
    hook("cuArrayDestroy", Driver, ends(Space::Array)),
    hook("cuMipmappedArrayCreate", Driver, mipmaps(Size::Mipmaps)),
    hook(
        "cuMipmappedArrayDestroy",
        Driver,
        ends(Space::MipmappedArray),
    ),
    hook("cudaMalloc", Runtime, PLAIN),
    hook("cudaMallocPitch", Runtime, PITCHED),
    hook("cudaMalloc3D", Runtime, PITCHED_3D),
    hook("cudaMallocManaged", Runtime, MANAGED),
    hook("cudaMallocAsync", Runtime, ASYNC),
    hook("cudaMallocAsync_ptsz", Runtime, ASYNC),
    hook("cudaMallocFromPoolAsync", Runtime, FROM_POOL),
    hook("cudaMallocFromPoolAsync_ptsz", Runtime, FROM_POOL),
    hook("cudaFree", Runtime, FREE),
    hook("cudaFreeAsync", Runtime, FREE_ASYNC),
    hook("cudaFreeAsync_ptsz", Runtime, FREE_ASYNC),
    hook("cudaMallocArray", Runtime, array(Size::RuntimeArray)),
    hook("cudaMalloc3DArray", Runtime, array(Size::RuntimeArray3D)),
    hook(
        "cudaMallocMipmappedArray",
        Runtime,
        mipmaps(Size::RuntimeMipmaps),
    ),
    hook("cudaFreeArray", Runtime, ends(Space::Array)),
    hook(
        "cudaFreeMipmappedArray",
        Runtime,
        ends(Space::MipmappedArray),
    ),
    // Virtual memory management.
    hook(
        "cuMemAddressReserve",
        Driver,
        begins(VmmVirtual, Space::Reserved, Out(0), Size::Arg(1)),
    ),
    hook("cuMemAddressFree", Driver, ends(Space::Reserved)),
    hook("cuMemCreate", Driver, Create),
    hook("cuMemRelease", Driver, Release),
    hook("cuMemMap", Driver, Map),
    hook("cuMemUnmap", Driver, Unmap),
    hook("cuMemImportFromShareableHandle", Driver, Import),
    hook("cuMemRetainAllocationHandle", Driver, Retain),
    // Host memory.
    hook("cuMemHostAlloc", Driver, PINNED),
    hook("cuMemAllocHost_v2", Driver, PINNED),
    narrow("cuMemAllocHost", PINNED),
    hook("cuMemFreeHost", Driver, ends(Space::Host)),
    hook("cuMemHostRegister_v2", Driver, REGISTER),
    hook("cuMemHostRegister", Driver, REGISTER),
    hook("cuMemHostUnregister", Driver, ends(Space::Registered)),
    hook("cudaHostAlloc", Runtime, PINNED),
    hook("cudaMallocHost", Runtime, PINNED),
    hook("cudaFreeHost", Runtime, ends(Space::Host)),
    hook("cudaHostRegister", Runtime, REGISTER),
    hook("cudaHostUnregister", Runtime, ends(Space::Registered)),
    // Pools and other processes' memory.
    hook("cuMemPoolCreate", Driver, CreatePool),
    hook("cuMemPoolDestroy", Driver, DestroyPool),
    hook("cuMemPoolTrimTo", Driver, TrimPool),
    hook("cuMemPoolGetAttribute", Driver, AskPool),
    hook("cuDeviceGetDefaultMemPool", Driver, NamePool),
    hook("cuDeviceGetMemPool", Driver, NamePool),
    hook("cudaMemPoolCreate", Runtime, CreatePool),
    hook("cudaMemPoolDestroy", Runtime, DestroyPool),
    hook("cudaMemPoolTrimTo", Runtime, TrimPool),
    hook("cudaMemPoolGetAttribute", Runtime, AskPool),
    hook("cudaDeviceGetDefaultMemPool", Runtime, NamePool),
    hook("cudaDeviceGetMemPool", Runtime, NamePool),
    hook("cuIpcOpenMemHandle_v2", Driver, OpenIpc),
    hook("cuIpcOpenMemHandle", Driver, OpenIpc),
    hook("cuIpcCloseMemHandle", Driver, CloseIpc),
    hook("cudaIpcOpenMemHandle", Runtime, OpenIpc),
    hook("cudaIpcCloseMemHandle", Runtime, CloseIpc),
    // What an allocator asks before it says that memory is out.
    hook("cuMemGetInfo_v2", Driver, AskMemory),
    narrow("cuMemGetInfo", AskMemory),
    hook("cudaMemGetInfo", Runtime, AskMemory),
    // Which device a call is for, and what ends with a context.
    hook("cuDevicePrimaryCtxRetain", Driver, RetainPrimary),
    hook("cuDevicePrimaryCtxRelease_v2", Driver, ReleasePrimary),
    hook("cuDevicePrimaryCtxRelease", Driver, ReleasePrimary),
    hook("cuDevicePrimaryCtxReset_v2", Driver, ResetPrimary),
    hook("cuDevicePrimaryCtxReset", Driver, ResetPrimary),
    hook("cuCtxCreate_v2", Driver, context(2)),
    hook("cuCtxCreate_v3", Driver, context(4)),
    hook("cuCtxCreate_v4", Driver, context(3)),
    hook("cuCtxCreate", Driver, context(2)),
    hook("cuGLCtxCreate_v2", Driver, context(2)),
    hook("cuGLCtxCreate", Driver, context(2)),
    hook("cuVDPAUCtxCreate_v2", Driver, context(2)),
    hook("cuVDPAUCtxCreate", Driver, context(2)),
    hook("cuCtxDestroy_v2", Driver, EndContext),
    hook("cuCtxDestroy", Driver, EndContext),
    hook("cuCtxSetCurrent", Driver, SetContext),
    hook("cuCtxPushCurrent_v2", Driver, PushContext),
    hook("cuCtxPushCurrent", Driver, PushContext),
    hook("cuCtxPopCurrent_v2", Driver, PopContext),
    hook("cuCtxPopCurrent", Driver, PopContext),
    hook("cudaSetDevice", Runtime, SetDevice),
    hook("cudaVDPAUSetVDPAUDevice", Runtime, SetDevice),
    hook("cudaDeviceReset", Runtime, ResetDevice),
    hook("cudaThreadExit", Runtime, ResetDevice),
];
