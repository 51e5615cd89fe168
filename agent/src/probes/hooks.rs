//! The hook table: which functions are probed, and what their arguments mean. A new function
//! is a row here and no code, on either side of the ring.
//!
//! Argument positions follow the vendor's public headers (`cuda.h`, `cuda_runtime_api.h`).

use vramscope_ebpf_abi::{Action, Cookie, NO_ARG};

/// Which library exports the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layer {
    Driver,
    Runtime,
}

impl Layer {
    /// The value of `alloc_events.layer`.
    pub const fn name(self) -> &'static str {
        match self {
            Layer::Driver => "driver",
            Layer::Runtime => "runtime",
        }
    }
}

/// What memory a call is about.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub enum MemoryKind {
    Device,
    PinnedHost,
    RegisteredHost,
}

impl MemoryKind {
    /// The value of `alloc_events.memory_kind`.
    pub const fn name(self) -> &'static str {
        match self {
            MemoryKind::Device => "device",
            MemoryKind::PinnedHost => "pinned_host",
            MemoryKind::RegisteredHost => "registered_host",
        }
    }

    /// The value of `alloc_events.op` for a call that ends such memory.
    pub const fn free_op(self) -> &'static str {
        match self {
            MemoryKind::RegisteredHost => "unregister",
            _ => "free",
        }
    }

    /// The value of `alloc_events.op` for a call that begins it.
    pub const fn alloc_op(self) -> &'static str {
        match self {
            MemoryKind::RegisteredHost => "register",
            _ => "alloc",
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

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Begins memory.
    Alloc {
        kind: MemoryKind,
        address: Address,
        size_arg: u8,
    },
    /// Ends the memory at an address.
    Free { kind: MemoryKind, address_arg: u8 },
    /// Tells that the context written through `out` lives on the device in `device_arg`.
    ContextOfDevice {
        out: u8,
        device_arg: u8,
        becomes_current: bool,
    },
    /// Ends the context in the first argument, and with it the memory allocated in it.
    EndContext,
    /// Makes the context in the first argument current. Kept in the kernel, no record.
    SetContext,
    /// Chooses the device in the first argument. Kept in the kernel, no record.
    SetDevice,
    /// Makes some other context current that is not named. Kept in the kernel, no record.
    ForgetContext,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Hook {
    /// Exported name; also the value of `alloc_events.api`.
    pub symbol: &'static str,
    pub layer: Layer,
    pub effect: Effect,
}

impl Hook {
    /// The cookie that tells the BPF programs what to do for this row.
    pub const fn cookie(&self, index: u16) -> u64 {
        let (out_arg, action) = match self.effect {
            Effect::Alloc {
                address: Address::Out(arg),
                ..
            } => (arg, Action::Record),
            Effect::Alloc {
                address: Address::Arg(_),
                ..
            }
            | Effect::Free { .. }
            | Effect::EndContext => (NO_ARG, Action::Record),
            Effect::ContextOfDevice {
                out,
                becomes_current: true,
                ..
            } => (out, Action::RecordContext),
            Effect::ContextOfDevice {
                out,
                becomes_current: false,
                ..
            } => (out, Action::Record),
            Effect::SetContext => (NO_ARG, Action::SetContext),
            Effect::SetDevice => (NO_ARG, Action::SetDevice),
            Effect::ForgetContext => (NO_ARG, Action::ForgetContext),
        };
        Cookie {
            hook: index,
            out_arg,
            action,
            seq_at_entry: matches!(self.effect, Effect::Free { .. } | Effect::EndContext),
            stack: matches!(self.effect, Effect::Alloc { .. } | Effect::Free { .. }),
        }
        .pack()
    }
}

const fn alloc(
    symbol: &'static str,
    layer: Layer,
    kind: MemoryKind,
    address: Address,
    size_arg: u8,
) -> Hook {
    Hook {
        symbol,
        layer,
        effect: Effect::Alloc {
            kind,
            address,
            size_arg,
        },
    }
}

const fn free(symbol: &'static str, layer: Layer, kind: MemoryKind) -> Hook {
    Hook {
        symbol,
        layer,
        effect: Effect::Free {
            kind,
            address_arg: 0,
        },
    }
}

const fn state(symbol: &'static str, layer: Layer, effect: Effect) -> Hook {
    Hook {
        symbol,
        layer,
        effect,
    }
}

use Address::{Arg, Out};
use Layer::{Driver, Runtime};
use MemoryKind::{Device, PinnedHost, RegisteredHost};

/// The table. A record names its row by index; pinned programs outlive the agent, so the order
/// is part of what names the pin folder (see `probes::bpf`).
pub const HOOKS: &[Hook] = &[
    alloc("cuMemAlloc_v2", Driver, Device, Out(0), 1),
    free("cuMemFree_v2", Driver, Device),
    alloc("cuMemHostAlloc", Driver, PinnedHost, Out(0), 1),
    free("cuMemFreeHost", Driver, PinnedHost),
    alloc("cuMemHostRegister_v2", Driver, RegisteredHost, Arg(0), 1),
    free("cuMemHostUnregister", Driver, RegisteredHost),
    alloc("cudaMalloc", Runtime, Device, Out(0), 1),
    free("cudaFree", Runtime, Device),
    alloc("cudaHostAlloc", Runtime, PinnedHost, Out(0), 1),
    free("cudaFreeHost", Runtime, PinnedHost),
    alloc("cudaHostRegister", Runtime, RegisteredHost, Arg(0), 1),
    free("cudaHostUnregister", Runtime, RegisteredHost),
    // Which device a call is for.
    state(
        "cuDevicePrimaryCtxRetain",
        Driver,
        Effect::ContextOfDevice {
            out: 0,
            device_arg: 1,
            becomes_current: false,
        },
    ),
    state(
        "cuCtxCreate_v2",
        Driver,
        Effect::ContextOfDevice {
            out: 0,
            device_arg: 2,
            becomes_current: true,
        },
    ),
    state("cuCtxDestroy_v2", Driver, Effect::EndContext),
    state("cuCtxSetCurrent", Driver, Effect::SetContext),
    state("cuCtxPushCurrent_v2", Driver, Effect::SetContext),
    state("cuCtxPopCurrent_v2", Driver, Effect::ForgetContext),
    state("cudaSetDevice", Runtime, Effect::SetDevice),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_distinct() {
        let mut symbols: Vec<_> = HOOKS.iter().map(|h| h.symbol).collect();
        symbols.sort_unstable();
        symbols.dedup();
        assert_eq!(symbols.len(), HOOKS.len());
    }

    /// The kernel side reads out-pointers from the first four arguments only.
    #[test]
    fn cookies_tell_what_the_row_says() {
        for (index, hook) in HOOKS.iter().enumerate() {
            let cookie = Cookie::unpack(hook.cookie(index as u16));
            assert_eq!(cookie.hook as usize, index);
            assert!(cookie.out_arg == NO_ARG || cookie.out_arg < 4);
            let ends = ["Free", "Unregister", "Destroy"]
                .iter()
                .any(|verb| hook.symbol.contains(verb));
            assert_eq!(cookie.seq_at_entry, ends);
        }
    }
}
