//! Where the libraries are that programs load, and the environment that makes them load them.

use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};

/// The shim.
pub(crate) const SHIM: &str = "libgpumux.so";
/// The emulated device's CUDA driver and NVML.
pub(crate) const EMULATED: &str = gpumux_emu::LIBRARY;

/// The folder named by `GPUMUX_LIB_DIR`; without that, the executable's own (as after a build), then
/// `../lib/gpumux` from there (as installed).
fn places() -> anyhow::Result<Vec<PathBuf>> {
    if let Some(dir) = env::var_os("GPUMUX_LIB_DIR") {
        return Ok(vec![dir.into()]);
    }
    let exe = env::current_exe().context("cannot find out where gpumux itself lies")?;
    let dir = exe.parent().unwrap_or(Path::new("/"));
    Ok(vec![dir.into(), dir.join("../lib/gpumux")])
}

/// The absolute path of a library.
pub(crate) fn find(name: &str) -> anyhow::Result<PathBuf> {
    let places = places()?;
    let Some(found) = places
        .iter()
        .map(|dir| dir.join(name))
        .find(|p| p.is_file())
    else {
        let places: Vec<_> = places.iter().map(|dir| dir.display().to_string()).collect();
        bail!(
            "{name} is not in {}: build it with `cargo build --workspace`, or set GPUMUX_LIB_DIR to its folder",
            places.join(" or ")
        );
    };
    let path = found
        .canonicalize()
        .with_context(|| format!("cannot use {}", found.display()))?;
    if path
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|b| b" :\t\n".contains(b))
    {
        bail!(
            "{} cannot be preloaded, because its path has a space or a colon: move it",
            path.display()
        );
    }
    Ok(path)
}

/// The value of a list variable with `entry` before all others. (Naming a library twice loads it once.)
pub(crate) fn first(variable: &str, entry: &Path) -> OsString {
    join([entry.as_os_str(), &current(variable)])
}

/// The value of a list variable with `entry` after all others.
pub(crate) fn last(variable: &str, entry: &Path) -> OsString {
    join([&current(variable), entry.as_os_str()])
}

fn current(variable: &str) -> OsString {
    env::var_os(variable).unwrap_or_default()
}

fn join(lists: [&OsStr; 2]) -> OsString {
    let lists = lists.into_iter().filter(|list| !list.is_empty());
    lists.collect::<Vec<_>>().join(OsStr::new(":"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_no_empty_entries() {
        let [a, b] = ["/a.so", "/x.so /y.so"].map(OsStr::new);
        assert_eq!(join([a, b]), "/a.so:/x.so /y.so");
        assert_eq!(join([a, OsStr::new("")]), "/a.so");
        assert_eq!(join([OsStr::new(""), b]), "/x.so /y.so");
    }
}
