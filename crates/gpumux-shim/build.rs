//! Marks the library as one that is never unloaded: its agent thread, its fork handlers and the
//! program's bindings to its `ioctl` must outlive a `dlclose`.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
