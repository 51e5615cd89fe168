//! `vramscope-workload-static`: the workloads of `vramscope-workload`, with the stand-in runtime linked
//! into the executable, as the vendor's is into many libraries and programs. No `libcudart` is loaded:
//! the runtime's functions are symbols of the executable (`.symtab`), and gone where it is stripped.

use std::{
    ffi::{CStr, c_void},
    process::ExitCode,
};

#[path = "../../src/bin/vramscope-workload/main.rs"]
mod workload;

fn main() -> ExitCode {
    workload::library::use_linked_runtime(find);
    workload::main()
}

fn find(name: &CStr) -> Option<*mut c_void> {
    let functions = vramscope_fake_cudart::functions();
    let found = functions.iter().find(|(known, _)| *known == name);
    found.map(|(_, address)| address.cast_mut().cast())
}
