//! Gives the library libcuda's soname: programs that load `libcuda.so.1` get it once it is preloaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
