//! Cards, as NVML tells of them, and which card a process means by a device ordinal.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use tracing::{info, warn};

use super::{clock, numa};

/// What does not change about a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    pub index: u32,
    pub uuid: String,
    pub name: Option<String>,
    pub pci_bus_id: Option<String>,
    /// NUMA node, `None` when the platform does not say.
    pub numa_node: Option<i32>,
}

/// One sample of one card. What NVML does not tell is `None`.
#[derive(Debug, Clone)]
pub struct Sample {
    pub at_ns: i64,
    pub card: Card,
    pub total: Option<u64>,
    pub used: Option<u64>,
    pub free: Option<u64>,
    pub reserved: Option<u64>,
    /// Share of time a kernel ran, 0..1.
    pub utilization: Option<f64>,
    /// Process and its bytes, if NVML tells them.
    pub processes: Vec<(u32, Option<u64>)>,
}

/// How long to wait before NVML is tried again: a driver may be loaded later.
const RETRY: Duration = Duration::from_secs(60);

/// Samples all cards on a thread of its own (NVML calls can take tens of milliseconds).
pub struct Sampler {
    samples: Receiver<Vec<Sample>>,
    stop: Sender<()>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Sampler {
    /// `library` overrides the loader's search for NVML; `sysfs` is where NUMA nodes are read.
    pub fn start(
        library: Option<PathBuf>,
        sysfs: PathBuf,
        interval: Duration,
    ) -> std::io::Result<Self> {
        let (sender, samples) = mpsc::channel();
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("nvml".into())
            .spawn(move || run(library.as_deref(), &sysfs, interval, &sender, &stopped))?;
        Ok(Self {
            samples,
            stop,
            thread: Some(thread),
        })
    }

    /// Samples taken since the last call.
    pub fn take(&self) -> Vec<Sample> {
        self.samples.try_iter().flatten().collect()
    }

    /// Waits for the first sample, so that the first events know their cards.
    pub fn wait_first(&self, limit: Duration) -> Vec<Sample> {
        self.samples.recv_timeout(limit).unwrap_or_default()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(
    library: Option<&Path>,
    sysfs: &Path,
    interval: Duration,
    samples: &Sender<Vec<Sample>>,
    stop: &Receiver<()>,
) {
    let mut complained = false;
    loop {
        match open(library) {
            Ok(nvml) => {
                info!("NVML opened");
                loop {
                    let started = Instant::now();
                    if samples.send(sample_all(&nvml, sysfs)).is_err() {
                        return;
                    }
                    let wait = interval.saturating_sub(started.elapsed());
                    if stop.recv_timeout(wait) != Err(mpsc::RecvTimeoutError::Timeout) {
                        return;
                    }
                }
            }
            Err(error) => {
                if !complained {
                    warn!(
                        "no card samples: NVML is not available ({error}); is libnvidia-ml.so.1 installed? trying again every minute"
                    );
                    complained = true;
                }
                if samples.send(Vec::new()).is_err()
                    || stop.recv_timeout(RETRY) != Err(mpsc::RecvTimeoutError::Timeout)
                {
                    return;
                }
            }
        }
    }
}

fn open(library: Option<&Path>) -> Result<Nvml, NvmlError> {
    // The plain name is missing where only the driver and no development files are installed.
    let library = library.unwrap_or(Path::new("libnvidia-ml.so.1"));
    Nvml::builder().lib_path(library.as_os_str()).init()
}

fn sample_all(nvml: &Nvml, sysfs: &Path) -> Vec<Sample> {
    let count = nvml.device_count().unwrap_or_default();
    (0..count)
        .filter_map(|index| sample(nvml, index, sysfs))
        .collect()
}

fn sample(nvml: &Nvml, index: u32, sysfs: &Path) -> Option<Sample> {
    let device = nvml.device_by_index(index).ok()?;
    let memory = device.memory_info().ok();
    let pci_bus_id = device.pci_info().ok().map(|pci| pci.bus_id);
    let numa_node = pci_bus_id
        .as_deref()
        .and_then(|bus_id| numa::node_of_pci(sysfs, bus_id));
    let mut processes: Vec<(u32, Option<u64>)> = Vec::new();
    let compute = device.running_compute_processes().unwrap_or_default();
    let graphics = device.running_graphics_processes().unwrap_or_default();
    for process in compute.into_iter().chain(graphics) {
        let used = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        // A process that computes and draws is listed twice with the same bytes.
        if !processes.iter().any(|(pid, _)| *pid == process.pid) {
            processes.push((process.pid, used));
        }
    }
    Some(Sample {
        at_ns: clock::realtime_ns() as i64,
        card: Card {
            index,
            uuid: device.uuid().ok()?,
            name: device.name().ok(),
            pci_bus_id,
            numa_node,
        },
        total: memory.as_ref().map(|m| m.total),
        used: memory.as_ref().map(|m| m.used),
        free: memory.as_ref().map(|m| m.free),
        reserved: memory.as_ref().map(|m| m.reserved),
        utilization: device
            .utilization_rates()
            .ok()
            .map(|u| f64::from(u.gpu) / 100.0),
        processes,
    })
}

/// The card that a process means by an ordinal, from its `CUDA_VISIBLE_DEVICES` and
/// `CUDA_DEVICE_ORDER`. `None` where it is not certain: without `CUDA_DEVICE_ORDER=PCI_BUS_ID`
/// the driver puts the fastest card first, which is NVML's order only if all cards are alike.
pub fn card_of_ordinal<'a>(
    cards: &'a [Card],
    visible: Option<&str>,
    order: Option<&str>,
    ordinal: i32,
) -> Option<&'a Card> {
    let ordinal = usize::try_from(ordinal).ok()?;
    let alike = cards
        .windows(2)
        .all(|pair| pair[0].name == pair[1].name && pair[0].name.is_some());
    let order_known = cards.len() <= 1 || alike || order == Some("PCI_BUS_ID");
    let by_index = |index: usize| {
        let index = u32::try_from(index).ok()?;
        cards.iter().find(|card| order_known && card.index == index)
    };
    let Some(visible) = visible else {
        return by_index(ordinal);
    };
    let entry = visible.split(',').map(str::trim).nth(ordinal)?;
    if let Ok(index) = entry.parse::<usize>() {
        return by_index(index);
    }
    // A UUID may be cut short as long as it names one card.
    let mut matching = cards
        .iter()
        .filter(|card| !entry.is_empty() && card.uuid.starts_with(entry));
    let card = matching.next()?;
    matching.next().is_none().then_some(card)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cards(names: &[&str]) -> Vec<Card> {
        (0..)
            .zip(names)
            .map(|(index, name)| Card {
                index,
                uuid: format!("GPU-{index}{index}{index}{index}"),
                name: Some((*name).to_string()),
                pci_bus_id: None,
                numa_node: None,
            })
            .collect()
    }

    /// Expectations follow the CUDA programming guide's environment variables.
    #[test]
    fn ordinals_follow_the_environment() {
        let alike = cards(&["H", "H", "H"]);
        let index = |visible, order, ordinal| {
            card_of_ordinal(&alike, visible, order, ordinal).map(|c| c.index)
        };
        assert_eq!(index(None, None, 1), Some(1));
        assert_eq!(index(Some("2,0"), None, 0), Some(2));
        assert_eq!(index(Some("2,0"), None, 1), Some(0));
        assert_eq!(index(Some("2,0"), None, 2), None);
        assert_eq!(index(Some("GPU-11"), None, 0), Some(1));
        assert_eq!(index(Some("GPU-"), None, 0), None);
        assert_eq!(index(Some(""), None, 0), None);
        assert_eq!(index(None, None, -1), None);
    }

    #[test]
    fn different_cards_have_no_certain_order() {
        let mixed = cards(&["slow", "fast"]);
        assert_eq!(card_of_ordinal(&mixed, None, None, 0), None);
        assert_eq!(
            card_of_ordinal(&mixed, None, Some("PCI_BUS_ID"), 1).map(|c| c.index),
            Some(1)
        );
        assert_eq!(
            card_of_ordinal(&mixed, Some("GPU-1111"), None, 0).map(|c| c.index),
            Some(1)
        );
    }
}
