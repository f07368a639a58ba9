//! Where the programs under test are.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The folder with the binary and the libraries.
fn dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| match env::var_os("GPUMUX_BIN_DIR") {
        Some(dir) => PathBuf::from(dir)
            .canonicalize()
            .expect("GPUMUX_BIN_DIR names no folder"),
        None => built().to_owned(),
    })
}

/// The folder that the test itself was built in, with the binary, the libraries and, under `examples`, the examples. They
/// are built when this is first called: cargo builds no `cdylib` for a test.
///
/// # Panics
/// When the test was not run through cargo, or the build fails.
pub fn built() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(build)
}

fn build() -> PathBuf {
    // <target>/<profile>/deps/<this test>
    let test = env::current_exe().expect("the test's own path");
    let dir = test
        .ancestors()
        .nth(2)
        .expect("a test lies in <target>/<profile>/deps");
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .expect("run the tests through cargo, or set GPUMUX_BIN_DIR to the folder with gpumux");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    // What the outer cargo says of this test would make build scripts run anew.
    for (name, _) in env::vars_os() {
        let described = |it: &str| {
            it == "OUT_DIR" || it.starts_with("CARGO_MANIFEST") || it.starts_with("CARGO_PKG_")
        };
        if name.to_str().is_some_and(described) {
            cargo.env_remove(name);
        }
    }
    // With examples come the features that tests have, so what `cargo test --workspace` has built is not built again.
    cargo.args(["build", "--quiet", "--workspace"]);
    cargo.args(["--lib", "--bins", "--examples", "--target-dir"]);
    cargo.arg(dir.parent().expect("a profile's folder has a parent"));
    match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => {}
        Some(profile) => {
            cargo.args(["--profile", profile]);
        }
    }
    let status = cargo.current_dir(manifest).status().expect("cargo starts");
    assert!(status.success(), "the programs under test are not built");
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
