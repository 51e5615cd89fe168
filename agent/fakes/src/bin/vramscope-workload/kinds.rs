//! `managed` and `pitched`: memory of the card in its other forms.

use super::{
    driver::Driver,
    runtime::{ChannelFormat, Extent, Runtime},
};

const MIB: usize = 1 << 20;

const FLOATING: i32 = 2;
const UNSIGNED: i32 = 1;
/// cudaArrayLayered.
const LAYERED: u32 = 1;

/// Managed memory of two devices through the runtime, and of the first through the driver.
pub fn managed() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let driver = Driver::load()?;
    let devices = runtime.device_count()?.min(2);
    runtime.set_device(0)?;
    keep_managed(&runtime, 8 * MIB)?;
    use_managed_for_a_moment(&runtime, 8 * MIB)?;
    use_managed_of_the_driver(&driver, 2 * MIB)?;
    if devices > 1 {
        runtime.set_device(1)?;
        keep_managed(&runtime, 4 * MIB)?;
        runtime.set_device(0)?;
    }
    runtime.report_failed_frees();
    Ok(())
}

#[inline(never)]
fn keep_managed(runtime: &Runtime, bytes: usize) -> anyhow::Result<()> {
    let address = runtime.malloc_managed(bytes)?;
    // SAFETY: managed memory may be written from the host, and this was just allocated.
    unsafe { (address.0 as *mut u8).write_volatile(1) };
    Ok(())
}

#[inline(never)]
fn use_managed_for_a_moment(runtime: &Runtime, bytes: usize) -> anyhow::Result<()> {
    let address = runtime.malloc_managed(bytes)?;
    runtime.free(address);
    Ok(())
}

#[inline(never)]
fn use_managed_of_the_driver(driver: &Driver, bytes: usize) -> anyhow::Result<()> {
    let address = driver.allocate_managed(bytes)?;
    driver.free(address)
}

/// Pitched memory of two and three dimensions, and arrays. Says on standard output what the rows'
/// paddings are, which only the driver knows.
pub fn pitched() -> anyhow::Result<()> {
    let runtime = Runtime::load()?;
    let driver = Driver::load()?;
    runtime.set_device(0)?;
    let (image, pitch) = runtime.malloc_pitch(1000, 300)?;
    println!("pitch {pitch}");
    runtime.free(image);
    let volume = Extent {
        width: 1000,
        height: 30,
        depth: 20,
    };
    let (_, pitch) = runtime.malloc_3d(volume)?;
    println!("pitch {pitch}");
    let (rows, pitch) = driver.allocate_pitch(600, 10)?;
    println!("pitch {pitch}");
    driver.free(rows)?;
    make_arrays(&runtime)?;
    runtime.report_failed_frees();
    Ok(())
}

#[inline(never)]
fn make_arrays(runtime: &Runtime) -> anyhow::Result<()> {
    let four_floats = ChannelFormat {
        bits: [32; 4],
        kind: FLOATING,
    };
    let flat = runtime.try_malloc_array(&four_floats, 128, 64);
    let flat = runtime.expect("cudaMallocArray", flat)?;
    runtime.check("cudaFreeArray", runtime.try_free_array(flat))?;

    let one_byte = ChannelFormat {
        bits: [8, 0, 0, 0],
        kind: UNSIGNED,
    };
    let deep = Extent {
        width: 32,
        height: 16,
        depth: 8,
    };
    runtime.malloc_3d_array(&one_byte, deep, 0)?;

    let two_shorts = ChannelFormat {
        bits: [16, 16, 0, 0],
        kind: UNSIGNED,
    };
    let six_layers = Extent {
        width: 64,
        height: 64,
        depth: 6,
    };
    runtime.malloc_3d_array(&two_shorts, six_layers, LAYERED)?;

    let square = Extent {
        width: 64,
        height: 64,
        depth: 0,
    };
    let levels = runtime.malloc_mipmapped_array(&two_shorts, square, 7)?;
    runtime.free_mipmapped_array(levels)
}
