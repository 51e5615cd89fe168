//! Random histories against a naive model of a driver, written without looking at the ledger:
//! lists of things that live, searched from end to end.
//!
//! After every call the rows must add up to the model's books by kind and device, the roll-ups
//! must say the same, and peaks must be the model's, also when the books are rebuilt from the
//! journal in between.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Alloc {
        how: usize,
        device: u64,
        bytes: u64,
        fails: bool,
        via_runtime: bool,
    },
    Free {
        which: usize,
        fails: bool,
        via_runtime: bool,
        other_device: bool,
    },
    Create {
        device: u64,
        bytes: u64,
    },
    Map {
        which: usize,
    },
    Unmap {
        which: usize,
        more: bool,
    },
    Retain {
        which: usize,
    },
    Release {
        which: usize,
    },
    DestroyContext {
        device: u64,
    },
    Ipc,
}

/// Driver function, runtime function if there is one, kind, and the functions that end it.
type Way = (
    &'static str,
    Option<&'static str>,
    &'static str,
    &'static str,
    Option<&'static str>,
);

const WAYS: [Way; 5] = [
    (
        "cuMemAlloc_v2",
        Some("cudaMalloc"),
        "device",
        "cuMemFree_v2",
        Some("cudaFree"),
    ),
    (
        "cuMemAllocManaged",
        Some("cudaMallocManaged"),
        "managed",
        "cuMemFree_v2",
        Some("cudaFree"),
    ),
    (
        "cuMemAllocAsync",
        Some("cudaMallocAsync"),
        "pool",
        "cuMemFreeAsync",
        Some("cudaFreeAsync"),
    ),
    (
        "cuMemHostAlloc",
        Some("cudaHostAlloc"),
        "pinned_host",
        "cuMemFreeHost",
        Some("cudaFreeHost"),
    ),
    (
        "cuMemAllocHost_v2",
        None,
        "pinned_host",
        "cuMemFreeHost",
        None,
    ),
];

#[derive(Debug, Clone)]
struct Block {
    way: usize,
    address: u64,
    device: u64,
    context: u64,
    bytes: u64,
}

#[derive(Debug, Clone)]
struct Created {
    handle: u64,
    device: u64,
    bytes: u64,
    references: u32,
}

#[derive(Debug, Clone)]
struct Mapped {
    address: u64,
    created: usize,
}

type Place = (String, Option<i32>);

#[derive(Default)]
struct Model {
    blocks: Vec<Block>,
    free_addresses: Vec<u64>,
    next_address: u64,
    created: Vec<Option<Created>>,
    free_handles: Vec<u64>,
    next_handle: u64,
    mapped: Vec<Mapped>,
    next_mapping: u64,
    contexts: [u64; 2],
    next_context: u64,
    peaks: BTreeMap<Place, u64>,
}

impl Model {
    fn address(&mut self) -> u64 {
        self.free_addresses.pop().unwrap_or_else(|| {
            self.next_address += 0x1000;
            self.next_address
        })
    }

    fn handle(&mut self) -> u64 {
        self.free_handles.pop().unwrap_or_else(|| {
            self.next_handle += 1;
            self.next_handle
        })
    }

    /// Memory that nothing refers to and nothing maps is gone.
    fn collect(&mut self) {
        for index in 0..self.created.len() {
            let is_mapped = self.mapped.iter().any(|m| m.created == index);
            let unused = |c: &Created| c.references == 0 && !is_mapped;
            if self.created[index].as_ref().is_some_and(unused) {
                self.created[index] = None;
            }
        }
    }

    fn live(&self) -> BTreeMap<Place, (u64, u64)> {
        let mut live = BTreeMap::new();
        let mut add = |kind: &str, device: u64, bytes: u64| {
            let place = (kind.to_string(), Some(device as i32));
            let entry: &mut (u64, u64) = live.entry(place).or_default();
            entry.0 += bytes;
            entry.1 += 1;
        };
        for block in &self.blocks {
            add(WAYS[block.way].2, block.device, block.bytes);
        }
        for created in self.created.iter().flatten() {
            add("vmm_physical", created.device, created.bytes);
        }
        for mapped in &self.mapped {
            if let Some(created) = &self.created[mapped.created] {
                add("vmm_mapped", created.device, created.bytes);
            }
        }
        live
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..WAYS.len(), 0..2u64, 1..1000u64, prop::bool::weighted(0.15), any::<bool>()).prop_map(
            |(how, device, bytes, fails, via_runtime)| Step::Alloc { how, device, bytes, fails, via_runtime }
        ),
        4 => (0..100usize, prop::bool::weighted(0.15), any::<bool>(), any::<bool>()).prop_map(
            |(which, fails, via_runtime, other_device)| Step::Free { which, fails, via_runtime, other_device }
        ),
        2 => (0..2u64, 1..1000u64).prop_map(|(device, bytes)| Step::Create { device, bytes }),
        2 => (0..100usize).prop_map(|which| Step::Map { which }),
        2 => (0..100usize, any::<bool>()).prop_map(|(which, more)| Step::Unmap { which, more }),
        1 => (0..100usize).prop_map(|which| Step::Retain { which }),
        2 => (0..100usize).prop_map(|which| Step::Release { which }),
        1 => (0..2u64).prop_map(|device| Step::DestroyContext { device }),
        1 => Just(Step::Ipc),
    ];
    proptest::collection::vec(step, 0..80)
}

struct Run {
    ledger: Ledger,
    journal: Vec<Change>,
    seq: u64,
    from_rows: BTreeMap<Place, (i64, i64)>,
}

impl Run {
    fn next(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    fn call(&mut self, symbol: &str, args: [u64; 4], out: Option<u64>, result: i32) -> TracedCall {
        let seq = self.next();
        let mut made = call(symbol, seq, [args[0], args[1]], out, result);
        made.args[2..4].copy_from_slice(&args[2..4]);
        made.device = None;
        made
    }

    fn book(&mut self, call: &TracedCall, nested_success: bool) {
        for row in apply(&mut self.ledger, call, nested_success) {
            if !row.counted {
                continue;
            }
            let begins = matches!(row.op, "alloc" | "register" | "reserve" | "map");
            let sign = if begins { 1 } else { -1 };
            let place = (row.memory_kind.unwrap().to_string(), row.device);
            let entry = self.from_rows.entry(place).or_default();
            entry.0 += sign * row.bytes.unwrap();
            entry.1 += sign;
        }
        self.journal.extend(self.ledger.take_changes());
    }

    /// A driver call, and over it the runtime's if there is one. Allocations come inner first,
    /// frees outer first, as they take effect.
    fn chain(&mut self, driver: TracedCall, runtime: Option<(&str, bool)>) {
        let Some((symbol, ends)) = runtime else {
            return self.book(&driver, false);
        };
        let mut outer = driver.clone();
        outer.hook = HOOKS.iter().position(|h| h.symbol == symbol).unwrap() as u16;
        let mut inner = driver;
        inner.parent_enter_ns = Some(outer.enter_ns);
        let succeeded = inner.result == 0;
        if ends {
            inner.seq = self.next();
            self.book(&outer, succeeded);
            self.book(&inner, false);
        } else {
            outer.seq = self.next();
            self.book(&inner, false);
            self.book(&outer, succeeded);
        }
    }
}

fn pick<T>(list: &[T], which: usize) -> Option<usize> {
    (!list.is_empty()).then(|| which % list.len())
}

fn step(run: &mut Run, model: &mut Model, step: &Step) {
    match *step {
        Step::Alloc {
            how,
            device,
            bytes,
            fails,
            via_runtime,
        } => {
            let (driver, runtime, ..) = WAYS[how];
            let context = model.contexts[device as usize];
            let address = model.address();
            let result = if fails { 2 } else { 0 };
            let out = (!fails).then_some(address);
            if fails {
                model.free_addresses.push(address);
            } else {
                model.blocks.push(Block {
                    way: how,
                    address,
                    device,
                    context,
                    bytes,
                });
            }
            let mut made = run.call(driver, [0, bytes, 0, 0], out, result);
            made.context = Some(context);
            let runtime = runtime
                .filter(|_| via_runtime)
                .map(|symbol| (symbol, false));
            run.chain(made, runtime);
        }
        Step::Free {
            which,
            fails,
            via_runtime,
            other_device,
        } => {
            let Some(index) = pick(&model.blocks, which) else {
                return;
            };
            let block = model.blocks[index].clone();
            let (_, _, _, driver, runtime) = WAYS[block.way];
            let result = if fails { 1 } else { 0 };
            if !fails {
                model.blocks.remove(index);
                model.free_addresses.push(block.address);
            }
            let current = if other_device {
                1 - block.device
            } else {
                block.device
            };
            let mut made = run.call(driver, [block.address, 0, 0, 0], None, result);
            made.context = Some(model.contexts[current as usize]);
            let runtime = runtime.filter(|_| via_runtime).map(|symbol| (symbol, true));
            run.chain(made, runtime);
        }
        Step::Create { device, bytes } => {
            let handle = model.handle();
            model.created.push(Some(Created {
                handle,
                device,
                bytes,
                references: 1,
            }));
            let mut made = run.call("cuMemCreate", [0, bytes, 0, 0], Some(handle), 0);
            made.extra = Some([1, 1 | device << 32, 0, 0]);
            run.book(&made, false);
        }
        Step::Map { which } => {
            let Some(index) = pick(&model.created, which) else {
                return;
            };
            let Some(created) = model.created[index].clone().filter(|c| c.references > 0) else {
                return;
            };
            model.next_mapping += 0x10_0000_0000;
            let adjacent = model
                .mapped
                .last()
                .filter(|_| which % 2 == 0)
                .and_then(|last| {
                    let bytes = model.created[last.created].as_ref()?.bytes;
                    Some(last.address + bytes)
                });
            let address = adjacent.unwrap_or(model.next_mapping);
            model.mapped.push(Mapped {
                address,
                created: index,
            });
            let made = run.call(
                "cuMemMap",
                [address, created.bytes, 0, created.handle],
                None,
                0,
            );
            run.book(&made, false);
        }
        Step::Unmap { which, more } => {
            let Some(index) = pick(&model.mapped, which) else {
                return;
            };
            let bytes_of =
                |model: &Model, m: &Mapped| model.created[m.created].as_ref().unwrap().bytes;
            let first = model.mapped[index].clone();
            let mut bytes = bytes_of(model, &first);
            let mut gone = vec![first.address];
            let next = model
                .mapped
                .iter()
                .find(|m| m.address == first.address + bytes)
                .cloned();
            if let (true, Some(next)) = (more, next) {
                bytes += bytes_of(model, &next);
                gone.push(next.address);
            }
            model.mapped.retain(|m| !gone.contains(&m.address));
            let made = run.call("cuMemUnmap", [first.address, bytes, 0, 0], None, 0);
            run.book(&made, false);
        }
        Step::Retain { which } => {
            let Some(index) = pick(&model.mapped, which) else {
                return;
            };
            let mapped = model.mapped[index].clone();
            let created = model.created[mapped.created].as_mut().unwrap();
            if created.references == 0 {
                // Released before: its handle may name something else by now.
                model.next_handle += 1;
                created.handle = model.next_handle;
            }
            created.references += 1;
            let handle = created.handle;
            let symbol = "cuMemRetainAllocationHandle";
            let made = run.call(symbol, [0, mapped.address, 0, 0], Some(handle), 0);
            run.book(&made, false);
        }
        Step::Release { which } => {
            let Some(index) = pick(&model.created, which) else {
                return;
            };
            let Some(created) = model.created[index].as_mut().filter(|c| c.references > 0) else {
                return;
            };
            created.references -= 1;
            let handle = created.handle;
            if created.references == 0 {
                model.free_handles.push(handle);
            }
            let made = run.call("cuMemRelease", [handle, 0, 0, 0], None, 0);
            run.book(&made, false);
        }
        Step::DestroyContext { device } => {
            let old = model.contexts[device as usize];
            if old != 0 {
                let dies = |b: &Block| b.context == old && WAYS[b.way].2 != "pool";
                let dead: Vec<_> = model
                    .blocks
                    .iter()
                    .filter(|b| dies(b))
                    .map(|b| b.address)
                    .collect();
                model.blocks.retain(|b| !dies(b));
                model.free_addresses.extend(dead);
                let made = run.call("cuCtxDestroy_v2", [old, 0, 0, 0], None, 0);
                run.book(&made, false);
            }
            model.next_context += 0x100;
            model.contexts[device as usize] = model.next_context;
            let made = run.call(
                "cuCtxCreate_v2",
                [0, 0, device, 0],
                Some(model.next_context),
                0,
            );
            run.book(&made, false);
        }
        Step::Ipc => {
            let made = run.call("cuIpcOpenMemHandle_v2", [0; 4], Some(0xffff_0000), 0);
            run.book(&made, false);
        }
    }
    model.collect();
}

proptest! {
    #[test]
    fn random_histories_add_up(steps in steps(), restart_at in 0..80usize) {
        let mut model = Model::default();
        let mut run = Run {
            ledger: new_ledger(),
            journal: Vec::new(),
            seq: 0,
            from_rows: BTreeMap::new(),
        };
        for device in [0, 1] {
            step(&mut run, &mut model, &Step::DestroyContext { device });
        }
        for (index, next) in steps.iter().enumerate() {
            step(&mut run, &mut model, next);
            if index == restart_at {
                // Through bytes, as the journal keeps them.
                let bytes = postcard::to_stdvec(&run.journal).unwrap();
                run.ledger = new_ledger();
                for change in postcard::from_bytes::<Vec<Change>>(&bytes).unwrap() {
                    run.ledger.restore(&change);
                }
                run.ledger.restored();
            }
            let live = model.live();
            for (place, (bytes, _)) in &live {
                let peak = model.peaks.entry(place.clone()).or_default();
                *peak = (*peak).max(*bytes);
            }
            let mut rows = run.from_rows.clone();
            rows.retain(|_, sums| *sums != (0, 0));
            let rows: BTreeMap<_, _> =
                rows.into_iter().map(|(place, (b, n))| (place, (b as u64, n as u64))).collect();
            prop_assert_eq!(&rows, &live, "rows after {:?}", next);
            let Some(process) = run.ledger.get(PID) else { continue };
            let mut rolled_up = BTreeMap::new();
            let mut peaks = BTreeMap::new();
            for (place, device) in process.rollup.window(true).devices {
                let name = (place.kind.name().to_string(), place.device);
                if device.sums.live_count > 0 {
                    rolled_up.insert(name.clone(), (device.sums.live_bytes, device.sums.live_count));
                }
                if device.process_peak_bytes > 0 {
                    peaks.insert(name, device.process_peak_bytes);
                }
            }
            prop_assert_eq!(&rolled_up, &live, "roll-ups after {:?}", next);
            prop_assert_eq!(&peaks, &model.peaks, "peaks after {:?}", next);
            prop_assert_eq!(run.ledger.live() as u64, live.values().map(|(_, n)| n).sum::<u64>());
        }
    }
}
