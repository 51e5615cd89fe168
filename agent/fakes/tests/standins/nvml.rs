//! The management library as `nvml-wrapper`, which the agent uses, sees it.

use std::ffi::{c_int, c_uint, c_void};

use nvml_wrapper::{Nvml, enums::device::UsedGpuMemory, error::NvmlError};

use crate::{
    driver::{Library, call},
    support::{Bench, MIB, is_alone, run_alone},
};

const PID: &str = "VRAMSCOPE_TEST_PID";

#[test]
fn cards_show_what_living_processes_hold() {
    let bench = Bench::new();
    let mut holder = bench.workload("sleep 60").spawn().unwrap();
    bench.wait_for(|totals| totals.live_count == 1);
    run_alone(&bench, "nvml::one_process_holds_memory", |command| {
        command.env(PID, holder.id().to_string());
    });
    holder.kill().unwrap();
    holder.wait().unwrap();
    run_alone(&bench, "nvml::nobody_holds_memory", |_| {});
    run_alone(&bench, "nvml::nobody_holds_memory", |command| {
        command.env_remove("VRAMSCOPE_FAKE_DIR");
    });
}

#[test]
#[ignore = "run by cards_show_what_living_processes_hold"]
fn one_process_holds_memory() {
    if !is_alone() {
        return;
    }
    let pid: u32 = std::env::var(PID).unwrap().parse().unwrap();
    // `sleep` holds 64 MiB of device memory, and pinned memory, which is none of the card's. To
    // that comes the context overhead of 256 MiB.
    let used = (64 + 256) * MIB;
    let nvml = Nvml::init().unwrap();
    let card = nvml.device_by_index(0).unwrap();
    let memory = card.memory_info().unwrap();
    assert_eq!(memory.total, 8192 * MIB);
    assert_eq!(memory.used, used);
    assert_eq!(memory.free, 8192 * MIB - used);
    let processes = card.running_compute_processes().unwrap();
    assert_eq!(processes.len(), 1);
    assert_eq!(processes[0].pid, pid);
    assert_eq!(processes[0].used_gpu_memory, UsedGpuMemory::Used(used));
    assert!(card.running_graphics_processes().unwrap().is_empty());

    let other = nvml.device_by_index(1).unwrap();
    assert_eq!(other.memory_info().unwrap().used, 0);
    assert!(other.running_compute_processes().unwrap().is_empty());
}

#[test]
#[ignore = "run by cards_show_what_living_processes_hold"]
fn nobody_holds_memory() {
    if !is_alone() {
        return;
    }
    let nvml = Nvml::init().unwrap();
    assert_eq!(nvml.device_count().unwrap(), 2);
    assert_eq!(nvml.sys_driver_version().unwrap(), "580.65.06");
    assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 13000);
    for index in 0..2 {
        let card = nvml.device_by_index(index).unwrap();
        assert_eq!(card.name().unwrap(), "Stand-in GPU");
        assert_eq!(card.index().unwrap(), index);
        assert_eq!(card.minor_number().unwrap(), index);
        let uuid = format!("GPU-00000000-0000-0000-0000-00000000000{index}");
        assert_eq!(card.uuid().unwrap(), uuid);
        assert_eq!(nvml.device_by_uuid(uuid).unwrap().index().unwrap(), index);
        let pci = card.pci_info().unwrap();
        assert_eq!(pci.bus_id, format!("00000000:0{}:00.0", index + 1));
        assert_eq!((pci.domain, pci.bus, pci.device), (0, index + 1, 0));
        assert_eq!(card.utilization_rates().unwrap().gpu, 0);
        assert!(matches!(card.numa_node_id(), Err(NvmlError::NotSupported)));
        let memory = card.memory_info().unwrap();
        assert_eq!((memory.used, memory.free), (0, 8192 * MIB));
        assert!(card.running_compute_processes().unwrap().is_empty());
    }
    let beyond = nvml.device_by_index(2);
    assert!(matches!(beyond, Err(NvmlError::InvalidArg)));
}

#[test]
fn cards_show_memory_of_every_sort_once() {
    let bench = Bench::new();
    run_alone(
        &bench,
        "nvml::this_process_holds_memory_of_every_sort",
        |_| {},
    );
}

/// In MiB: 5 managed; 6 created, which mapping twice does not make more; a slice of 3, for which the pool
/// holds 32; 7 pinned, which are not the card's.
#[test]
#[ignore = "run by cards_show_memory_of_every_sort_once"]
fn this_process_holds_memory_of_every_sort() {
    if !is_alone() {
        return;
    }
    let mib = MIB as usize;
    let cuda = Library::open("libcuda.so.1");
    let (mut context, mut place) = (0usize, 0usize);
    assert_eq!(call!(cuda, c"cuInit", 0 => c_uint), 0);
    let created = call!(
        cuda, c"cuCtxCreate_v4",
        &mut context => *mut usize, std::ptr::null() => *const c_void, 0 => c_uint, 0 => c_int
    );
    assert_eq!(created, 0);
    let used = || {
        let nvml = Nvml::init().unwrap();
        let memory = nvml.device_by_index(0).unwrap().memory_info().unwrap();
        memory.used / MIB
    };
    assert_eq!(used(), 0);
    let managed = call!(
        cuda, c"cuMemAllocManaged", &mut place => *mut usize, 5 * mib => usize, 1 => c_uint
    );
    assert_eq!((managed, used()), (0, 256 + 5));

    // CUmemAllocationProp: pinned, not shared, on device 0.
    let properties = [1u32, 0, 1, 0, 0, 0, 0, 0];
    let (mut handle, mut range) = (0usize, 0usize);
    let created = call!(
        cuda, c"cuMemCreate",
        &mut handle => *mut usize, 6 * mib => usize, &properties => *const [u32; 8], 0 => u64
    );
    let reserved = call!(
        cuda, c"cuMemAddressReserve",
        &mut range => *mut usize, 12 * mib => usize, 0 => usize, 0 => usize, 0 => u64
    );
    assert_eq!((created, reserved), (0, 0));
    for offset in [0, 6 * mib] {
        let mapped = call!(
            cuda, c"cuMemMap",
            range + offset => usize, 6 * mib => usize, 0 => usize, handle => usize, 0 => u64
        );
        assert_eq!(mapped, 0);
    }
    assert_eq!(used(), 256 + 5 + 6);

    let sliced = call!(
        cuda, c"cuMemAllocAsync", &mut place => *mut usize, 3 * mib => usize, 0 => usize
    );
    assert_eq!((sliced, used()), (0, 256 + 5 + 6 + 32));
    let pinned = call!(
        cuda, c"cuMemAllocHost_v2", &mut place => *mut usize, 7 * mib => usize
    );
    assert_eq!((pinned, used()), (0, 256 + 5 + 6 + 32));
}
