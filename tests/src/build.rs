//! Where the programs under test are.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The folder with the binary and the libraries, built when this is first called.
fn dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| match env::var_os("GPUMUX_BIN_DIR") {
        Some(dir) => PathBuf::from(dir)
            .canonicalize()
            .expect("GPUMUX_BIN_DIR names no folder"),
        None => build(&["--workspace"]),
    })
}

/// Builds with `cargo build ARGS` into the folder that the test itself was built in, and names it: cargo builds
/// no `cdylib` for a test.
///
/// # Panics
/// When the test was not run through cargo, or the build fails.
pub fn build(args: &[&str]) -> PathBuf {
    // <target>/<profile>/deps/<this test>
    let test = env::current_exe().expect("the test's own path");
    let dir = test
        .ancestors()
        .nth(2)
        .expect("a test lies in <target>/<profile>/deps");
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .expect("run the tests through cargo, or set GPUMUX_BIN_DIR to the folder with gpumux");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.args(["build", "--quiet"]).args(args);
    cargo.arg("--target-dir");
    cargo.arg(dir.parent().expect("a profile's folder has a parent"));
    match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => {}
        Some(profile) => {
            cargo.args(["--profile", profile]);
        }
    }
    let status = cargo.current_dir(manifest).status().expect("cargo starts");
    assert!(status.success(), "cargo build {args:?} fails");
    dir.to_owned()
}

/// The `gpumux` binary.
pub fn binary() -> PathBuf {
    dir().join("gpumux")
}

/// One of the libraries, such as `libgpumux.so`.
pub fn library(name: &str) -> PathBuf {
    dir().join(name)
}
