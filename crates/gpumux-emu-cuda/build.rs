//! Gives the library libcuda's soname: programs that load `libcuda.so.1` get it once it is preloaded. Makes the functions that
//! it does not have: those of the list of entry points that no `exports!` in `src` names.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use gpumux_cuda::list::entry_points;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    let there = implemented().expect("src can be read");
    let missing: Vec<&str> = entry_points()
        .map(|it| it.symbol)
        .filter(|it| !there.contains(*it))
        .collect();
    let out = std::env::var_os("OUT_DIR").expect("cargo says where");
    let text = format!("missing! {{\n    {}\n}}\n", missing.join("\n    "));
    fs::write(PathBuf::from(out).join("missing.rs"), text).expect("OUT_DIR can be written");
}

/// The files in a folder and those below it.
fn sources(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => found.extend(sources(&path)?),
            false => found.push(path),
        }
    }
    Ok(found)
}

/// What the lines of `exports!` begin with: a symbol and its arguments, and in brackets the symbol of its per-thread variant.
fn implemented() -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for file in sources(Path::new("src"))? {
        let text = fs::read_to_string(file)?;
        let exported = text.split("exports! {").skip(1);
        let lines = exported.flat_map(|it| it.split("\n}").next().unwrap_or(it).lines());
        for line in lines {
            let line = line.trim_start();
            let (twin, rest) = match line.strip_prefix('[').and_then(|it| it.split_once(']')) {
                Some((twin, rest)) => (Some(twin), rest.trim_start()),
                None => (None, line),
            };
            if let Some((symbol, _)) = rest.split_once('(')
                && symbol.starts_with("cu")
                && symbol
                    .bytes()
                    .all(|it| it.is_ascii_alphanumeric() || it == b'_')
            {
                found.extend(
                    [Some(symbol), twin]
                        .into_iter()
                        .flatten()
                        .map(str::to_owned),
                );
            }
        }
    }
    Ok(found)
}
