//! The management library as `nvml-wrapper`, which the agent uses, sees it.

use nvml_wrapper::{Nvml, enums::device::UsedGpuMemory, error::NvmlError};

use crate::support::{Bench, MIB, is_alone, run_alone};

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
