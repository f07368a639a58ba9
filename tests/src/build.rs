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
        None => build(),
    })
}

/// `<target>/<profile>/deps/<this test>`: builds everything else into the same folder.
fn build() -> PathBuf {
    let test = env::current_exe().expect("the test's own path");
    let dir = test
        .ancestors()
        .nth(2)
        .expect("a test lies in <target>/<profile>/deps");
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .expect("run the tests through cargo, or set GPUMUX_BIN_DIR to the folder with gpumux");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.args(["build", "--workspace", "--quiet", "--target-dir"]);
    cargo.arg(dir.parent().expect("a profile's folder has a parent"));
    match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => {}
        Some(profile) => {
            cargo.args(["--profile", profile]);
        }
    }
    let status = cargo.current_dir(manifest).status().expect("cargo starts");
    assert!(status.success(), "the workspace does not build");
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
