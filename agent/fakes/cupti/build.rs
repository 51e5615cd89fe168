//! Gives the library the vendor's SONAME, so that a dynamic linker takes it for the vendor's.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcupti.so.13");
}
