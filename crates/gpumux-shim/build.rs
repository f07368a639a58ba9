//! Marks the library as one that is never unloaded: its agent thread, its fork handlers and the
//! program's bindings to its `ioctl` must outlive a `dlclose`. Makes the table of hooked functions, and those of them that
//! follow from their class, out of the list of entry points.

use std::{fmt::Write, path::PathBuf};

use gpumux_cuda::list::{Class, EntryPoint, entry_points};

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
    let mut text = String::new();
    forms(&mut text).expect("text can be written");
    rows(&mut text).expect("text can be written");
    generic(&mut text).expect("text can be written");
    let out = std::env::var_os("OUT_DIR").expect("cargo says where");
    std::fs::write(PathBuf::from(out).join("hooks.rs"), text).expect("OUT_DIR can be written");
}

/// Everything that is listed.
fn forms(out: &mut String) -> std::fmt::Result {
    let all: Vec<EntryPoint> = entry_points().collect();
    writeln!(out, "static FORMS: [Form; {}] = [", all.len())?;
    for it in all {
        writeln!(
            out,
            "    Form {{ symbol: c{:?}, name: c{:?}, version: {}, per_thread: {}, hooked: {} }},",
            it.symbol,
            it.name,
            it.version,
            it.per_thread(),
            it.hooked()
        )?;
    }
    writeln!(out, "];")
}

/// A row for everything that is hooked.
fn rows(out: &mut String) -> std::fmt::Result {
    writeln!(out, "rows! {{")?;
    for it in entry_points().filter(EntryPoint::hooked) {
        let (symbol, name, version) = (it.symbol, it.name, it.version);
        let flags = if it.per_thread() { 2 } else { 0 };
        let again = match (it.room, it.class) {
            (false, _) => "No",
            (true, Class::Submit | Class::Copy | Class::SubmitAndCopy) => "UnlessCapturing",
            (true, _) => "Yes",
        };
        writeln!(
            out,
            "    {symbol} c{symbol:?} c{name:?} {version} {flags} {again};"
        )?;
    }
    writeln!(out, "}}")
}

/// The functions that only pass their arguments on. Every argument is an integer or a pointer, or as its letter says, so it takes
/// one register or one eight-byte place on the stack, whatever its type.
fn generic(out: &mut String) -> std::fmt::Result {
    writeln!(out, "hooks! {{")?;
    for it in entry_points().filter(|it| it.hooked() && !it.own) {
        let kind = |letter| match letter {
            's' => "CUstream",
            'c' => "*const LaunchConfig",
            'f' => "f32",
            'b' => "ByValue",
            _ => "u64",
        };
        let arguments: Vec<String> = it
            .arguments
            .chars()
            .enumerate()
            .map(|(n, letter)| format!("a{n}: {}", kind(letter)))
            .collect();
        let stream = match (it.arguments.find('s'), it.arguments.find('c')) {
            (Some(n), _) => format!("a{n}"),
            // A program that passes no configuration crashes in libcuda as well.
            (None, Some(n)) => format!("unsafe {{ (*a{n}).stream }}"),
            (None, None) => "ptr::null_mut()".into(),
        };
        let own = if it.per_thread() { "OWN" } else { "LEGACY" };
        let body = match it.class {
            Class::Submit => format!("work::submit({stream}, {own}, {}, real)", piece(&it)),
            Class::Copy => format!("work::copy({stream}, {own}, real)"),
            Class::SubmitAndCopy => format!("work::either({stream}, {own}, real)"),
            Class::Gate => "gate::through(real)".into(),
            Class::Wait | Class::Allocate | Class::Free | Class::None | Class::Short => {
                panic!(
                    "{} is of class {:?}: that takes a function of its own",
                    it.symbol, it.class
                )
            }
        };
        let (symbol, arguments) = (it.symbol, arguments.join(", "));
        writeln!(out, "    {symbol}({arguments}) (real) => {body};")?;
    }
    writeln!(out, "}}")
}

/// What is launched: a function with its blocks, or memory that is set.
fn piece(it: &EntryPoint) -> &'static str {
    match (it.name, it.arguments.contains('c')) {
        (_, true) => "Piece::new(a1, unsafe { (*a0).grid })",
        ("cuLaunchKernel" | "cuLaunchCooperativeKernel", _) => {
            "Piece::new(a0, [a1 as u32, a2 as u32, a3 as u32])"
        }
        _ => "Piece::new(0, [a2 as u32, 0, 0])",
    }
}
