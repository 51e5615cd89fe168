//! The hook table: which functions are probed, and what their arguments mean. A new function
//! is a row in [`table`] and no code, on either side of the ring, as long as its effect is one
//! that the ledger knows.
//!
//! Argument positions follow the vendor's public headers (`cuda.h`, `cuda_runtime_api.h`).

mod size;
mod table;

use serde::{Deserialize, Serialize};
use vramscope_ebpf_abi::{Action, Cookie, NO_ARG};

pub use size::{Measured, Size};
pub use table::HOOKS;

/// Which library exports the function, or tells of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Layer {
    Driver,
    Runtime,
    /// A framework's allocator: see [`super::framework`].
    Framework,
}

impl Layer {
    /// The value of `alloc_events.layer`.
    pub const fn name(self) -> &'static str {
        match self {
            Layer::Driver => "driver",
            Layer::Runtime => "runtime",
            Layer::Framework => "framework",
        }
    }
}

/// What memory a call is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemoryKind {
    /// cuMemAlloc and its like: memory of the card.
    Device,
    /// Unified memory: moves between card and host.
    Managed,
    /// CUDA arrays and mipmapped arrays.
    Array,
    /// cuMemCreate: memory without an address.
    VmmPhysical,
    /// cuMemAddressReserve: addresses without memory.
    VmmVirtual,
    /// cuMemMap: addresses that show created memory.
    VmmMapped,
    /// A slice of a stream-ordered memory pool.
    Pool,
    /// Host memory that the driver allocated and pinned.
    PinnedHost,
    /// Host memory of the program, pinned for a while.
    RegisteredHost,
    /// Another process's memory, opened by its handle.
    Ipc,
    /// A block of a framework's allocator, inside memory that it took from the driver.
    FrameworkBlock,
}

/// Bytes of different classes are never summed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// On the card.
    Physical,
    Host,
    /// Addresses.
    Virtual,
    /// Slices of memory that some other call took from the card.
    SubAllocated,
    /// Somebody else's.
    Foreign,
}

impl MemoryKind {
    /// The value of `alloc_events.memory_kind`.
    pub const fn name(self) -> &'static str {
        match self {
            MemoryKind::Device => "device",
            MemoryKind::Managed => "managed",
            MemoryKind::Array => "array",
            MemoryKind::VmmPhysical => "vmm_physical",
            MemoryKind::VmmVirtual => "vmm_virtual",
            MemoryKind::VmmMapped => "vmm_mapped",
            MemoryKind::Pool => "pool",
            MemoryKind::PinnedHost => "pinned_host",
            MemoryKind::RegisteredHost => "registered_host",
            MemoryKind::Ipc => "ipc",
            MemoryKind::FrameworkBlock => "framework_block",
        }
    }

    /// Its class of bytes.
    pub const fn class(self) -> Class {
        match self {
            MemoryKind::Device
            | MemoryKind::Managed
            | MemoryKind::Array
            | MemoryKind::VmmPhysical => Class::Physical,
            MemoryKind::VmmVirtual | MemoryKind::VmmMapped => Class::Virtual,
            MemoryKind::Pool | MemoryKind::FrameworkBlock => Class::SubAllocated,
            MemoryKind::PinnedHost | MemoryKind::RegisteredHost => Class::Host,
            MemoryKind::Ipc => Class::Foreign,
        }
    }

    /// The value of `alloc_events.op` for a call that ends such memory.
    pub const fn free_op(self) -> &'static str {
        match self {
            MemoryKind::RegisteredHost => "unregister",
            MemoryKind::VmmVirtual => "release",
            MemoryKind::VmmMapped | MemoryKind::Ipc => "unmap",
            _ => "free",
        }
    }

    /// The value of `alloc_events.op` for a call that begins it.
    pub const fn alloc_op(self) -> &'static str {
        match self {
            MemoryKind::RegisteredHost => "register",
            MemoryKind::VmmVirtual => "reserve",
            MemoryKind::VmmMapped | MemoryKind::Ipc => "map",
            _ => "alloc",
        }
    }
}

/// Addresses and handles of one space name one thing at a time. A call that ends something
/// names its space; what kind of memory it was is what the beginning said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Space {
    /// Device pointers: of plain, managed and stream-ordered memory alike.
    Device,
    Array,
    MipmappedArray,
    /// Created memory, by the `seq` of its creation: a handle may be given out again while
    /// memory that it named is still mapped.
    Physical,
    Reserved,
    Mapped,
    Host,
    Registered,
    Ipc,
}

impl Space {
    /// The only kind of memory in that space, if there is only one.
    pub const fn kind(self) -> Option<MemoryKind> {
        match self {
            Space::Device => None,
            Space::Array | Space::MipmappedArray => Some(MemoryKind::Array),
            Space::Physical => Some(MemoryKind::VmmPhysical),
            Space::Reserved => Some(MemoryKind::VmmVirtual),
            Space::Mapped => Some(MemoryKind::VmmMapped),
            Space::Host => Some(MemoryKind::PinnedHost),
            Space::Registered => Some(MemoryKind::RegisteredHost),
            Space::Ipc => Some(MemoryKind::Ipc),
        }
    }
}

/// Where an allocation's address is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Address {
    /// Written through the pointer in that argument.
    Out(u8),
    /// The argument itself.
    Arg(u8),
}

/// A call that begins memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alloc {
    pub kind: MemoryKind,
    pub space: Space,
    pub address: Address,
    pub size: Size,
    pub stream_arg: Option<u8>,
    pub pool_arg: Option<u8>,
}

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Begins memory.
    Alloc(Alloc),
    /// Ends the memory at the address in the first argument.
    Free {
        space: Space,
        stream_arg: Option<u8>,
    },
    /// Makes memory without an address: handle out, size, properties with the device.
    Create,
    /// One more reference to created memory: handle out.
    Retain,
    /// Another process's memory: handle out.
    Import,
    /// Ends one reference to created memory: handle.
    Release,
    /// Shows created memory at an address: address, size, offset, handle.
    Map,
    /// Ends all mappings in a range: address, size.
    Unmap,
    /// Another process's memory at an address of this one: address out.
    OpenIpc,
    /// Ends that: address.
    CloseIpc,
    /// A pool: handle out, properties with the device.
    CreatePool,
    /// Ends a pool's name; its slices live on until each is freed.
    DestroyPool,
    /// Gives a pool's unused memory back: pool, bytes to keep.
    TrimPool,
    /// The program asks about a pool: pool, attribute, value out.
    AskPool,
    /// The program asks for a device's pool: handle out, device.
    NamePool,
    /// The program asks for the card's free bytes: they, and all bytes, out.
    AskMemory,
    /// Tells that the context written through `out` lives on the device in `device_arg`.
    ContextOfDevice { out: u8, device_arg: u8 },
    /// The same for the device's primary context, which lives while it is retained.
    RetainPrimary,
    /// Ends one retain of the primary context of the device in the first argument.
    ReleasePrimary,
    /// Ends the primary context of the device in the first argument at once.
    ResetPrimary,
    /// The same for the thread's device, through the runtime.
    ResetDevice,
    /// Ends the context in the first argument, and with it the memory allocated in it.
    EndContext,
    /// The context in the first argument replaces the current one. Kept in the kernel, no record.
    SetContext,
    /// The context in the first argument becomes the current one. Kept in the kernel, no record.
    PushContext,
    /// The one below is current again. Kept in the kernel, no record.
    PopContext,
    /// Chooses the device in the first argument. Kept in the kernel, no record.
    SetDevice,
}

impl Effect {
    /// Whether the call takes effect when it is entered: a thing it ends may be given out again
    /// before it returns.
    pub const fn at_entry(self) -> bool {
        matches!(
            self,
            Effect::Free { .. }
                | Effect::Release
                | Effect::Unmap
                | Effect::CloseIpc
                | Effect::DestroyPool
                | Effect::ReleasePrimary
                | Effect::ResetPrimary
                | Effect::ResetDevice
                | Effect::EndContext
        )
    }

    /// Whether the call makes a row of `alloc_events`.
    const fn makes_row(self) -> bool {
        matches!(
            self,
            Effect::Alloc(_)
                | Effect::Free { .. }
                | Effect::Create
                | Effect::Retain
                | Effect::Import
                | Effect::Release
                | Effect::Map
                | Effect::Unmap
                | Effect::OpenIpc
                | Effect::CloseIpc
                | Effect::TrimPool
        )
    }

    const fn action(self) -> Action {
        match self {
            Effect::ContextOfDevice { .. } => Action::RecordContext,
            Effect::EndContext => Action::RecordEnd,
            Effect::SetContext => Action::SetContext,
            Effect::PushContext => Action::PushContext,
            Effect::PopContext => Action::PopContext,
            Effect::SetDevice => Action::SetDevice,
            _ => Action::Record,
        }
    }

    const fn out_arg(self) -> u8 {
        match self {
            Effect::Alloc(Alloc {
                address: Address::Out(arg),
                ..
            }) => arg,
            Effect::ContextOfDevice { out, .. } => out,
            Effect::Create
            | Effect::Retain
            | Effect::Import
            | Effect::OpenIpc
            | Effect::CreatePool
            | Effect::NamePool
            | Effect::AskMemory
            | Effect::RetainPrimary => 0,
            Effect::AskPool => 2,
            _ => NO_ARG,
        }
    }

    /// Argument that points to something worth reading, and how many words.
    const fn extra(self) -> (u8, u8) {
        match self {
            Effect::Alloc(alloc) => alloc.size.extra(),
            // CUmemAllocationProp: type, handle types, location's type and id.
            Effect::Create => (2, 2),
            // CUmemPoolProps begins alike.
            Effect::CreatePool => (1, 2),
            _ => (NO_ARG, 0),
        }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Hook {
    /// Exported name; also the value of `alloc_events.api`.
    pub symbol: &'static str,
    pub layer: Layer,
    pub effect: Effect,
    /// Device addresses and sizes have 32 bits: what the first versions of some functions take.
    pub narrow: bool,
}

impl Hook {
    /// The cookie that tells the BPF programs what to do for this row.
    pub const fn cookie(&self, index: u16) -> u64 {
        let (extra_arg, extra_words) = self.effect.extra();
        Cookie {
            hook: index,
            out_arg: self.effect.out_arg(),
            action: self.effect.action(),
            seq_at_entry: self.effect.at_entry(),
            stack: self.effect.makes_row(),
            stack_args: match self.effect {
                Effect::Alloc(alloc) => alloc.size.by_value(),
                _ => false,
            },
            extra_arg,
            extra_words,
        }
        .pack()
    }

    /// An address or handle as the function means it.
    pub const fn address(&self, word: u64) -> u64 {
        let is_device_pointer = match self.effect {
            Effect::Alloc(alloc) => matches!(alloc.space, Space::Device),
            Effect::Free { space, .. } => matches!(space, Space::Device),
            _ => false,
        };
        if self.narrow && is_device_pointer {
            word as u32 as u64
        } else {
            word
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramscope_ebpf_abi::EXTRA_WORDS;

    #[test]
    fn symbols_are_distinct() {
        let mut symbols: Vec<_> = HOOKS.iter().map(|h| h.symbol).collect();
        symbols.sort_unstable();
        symbols.dedup();
        assert_eq!(symbols.len(), HOOKS.len());
    }

    /// The kernel side reads through the first four arguments only, and a few words.
    #[test]
    fn cookies_tell_what_the_row_says() {
        for (index, hook) in HOOKS.iter().enumerate() {
            let cookie = Cookie::unpack(hook.cookie(index as u16));
            assert_eq!(cookie.hook as usize, index);
            assert!(cookie.out_arg == NO_ARG || cookie.out_arg < 4);
            assert!(cookie.extra_arg == NO_ARG || cookie.extra_arg < 4);
            assert!(cookie.extra_words as usize <= EXTRA_WORDS);
            let ends = [
                "Free",
                "Unregister",
                "Destroy",
                "Release",
                "Unmap",
                "Close",
                "Reset",
                "Detach",
                "ThreadExit",
            ]
            .iter()
            .any(|verb| hook.symbol.contains(verb));
            assert_eq!(cookie.seq_at_entry, ends, "{}", hook.symbol);
        }
    }

    /// A size of 32 bits beside a pointer of 64.
    #[test]
    fn first_versions_narrow_device_pointers_only() {
        let hook = |symbol| HOOKS.iter().find(|hook| hook.symbol == symbol).unwrap();
        let word = 0x7f00_1234_5678;
        assert_eq!(hook("cuMemAlloc").address(word), 0x1234_5678);
        assert_eq!(hook("cuMemAllocHost").address(word), word);
        assert_eq!(hook("cuMemAlloc_v2").address(word), word);
    }

    #[test]
    fn layers_go_by_prefix() {
        for hook in HOOKS {
            let is_runtime = hook.symbol.starts_with("cuda");
            assert_eq!(hook.layer == Layer::Runtime, is_runtime, "{}", hook.symbol);
        }
    }
}
