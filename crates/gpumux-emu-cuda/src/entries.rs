//! The entry points of the driver, by name and by the CUDA version that introduced a form of them: those of the one list
//! ([`gpumux_cuda::list`]).

use std::{collections::HashMap, ffi::c_int, sync::LazyLock};

use gpumux_cuda::list::entry_points;

use crate::{
    arrays,
    border::{Address, Out, Text, cuda, exports},
    checkpoint, driver,
    error::{CuError, Result},
    ipc, library, missing, nodes, plane, pools,
    process::driver_version,
    tables, values,
};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// A function that no CUDA has: tests take it for one of a newer CUDA than the list knows.
const FUTURE: (&str, c_int) = ("cuMemcpyFutureAsync", 14_000);

exports! { FUNCTIONS by cuda;
    cuGetProcAddress(symbol: Text, function: Out<usize>, version: c_int, flags: u64) => get_proc_address(symbol, function, version, flags, None);
    cuGetProcAddress_v2(symbol: Text, function: Out<usize>, version: c_int, flags: u64, status: Out<c_int>) => get_proc_address(symbol, function, version, flags, Some(status));
    cuGetProcAddress_v2_ptsz(symbol: Text, function: Out<usize>, version: c_int, flags: u64, status: Out<c_int>) => {
        let flags = if flags == 0 { PER_THREAD_DEFAULT_STREAM } else { flags };
        get_proc_address(symbol, function, version, flags, Some(status))
    };
}

/// One form of a function.
#[derive(Clone, Copy)]
struct Form {
    version: c_int,
    /// Its null stream is the thread's own.
    per_thread: bool,
    symbol: &'static str,
}

/// The functions that do something.
fn implemented() -> impl Iterator<Item = &'static (&'static str, Address)> {
    [
        FUNCTIONS,
        arrays::FUNCTIONS,
        checkpoint::FUNCTIONS,
        driver::FUNCTIONS,
        ipc::FUNCTIONS,
        library::FUNCTIONS,
        nodes::FUNCTIONS,
        plane::FUNCTIONS,
        pools::FUNCTIONS,
        tables::FUNCTIONS,
        values::FUNCTIONS,
    ]
    .into_iter()
    .flatten()
}

static FORMS: LazyLock<HashMap<&str, Vec<Form>>> = LazyLock::new(|| {
    let mut forms: HashMap<&str, Vec<Form>> = HashMap::new();
    for it in entry_points() {
        forms.entry(it.name).or_default().push(Form {
            version: it.version,
            per_thread: it.per_thread(),
            symbol: it.symbol,
        });
    }
    let (symbol, version) = FUTURE;
    let future = Form {
        version,
        per_thread: false,
        symbol,
    };
    forms.entry(symbol).or_default().push(future);
    forms
});

static ADDRESSES: LazyLock<HashMap<&str, usize>> = LazyLock::new(|| {
    implemented()
        .chain(missing::FUNCTIONS)
        .map(|(symbol, address)| (*symbol, address.0 as usize))
        .collect()
});

/// `cuGetProcAddress`
fn get_proc_address(
    symbol: Text,
    function: Out<usize>,
    version: c_int,
    flags: u64,
    status: Option<Out<c_int>>,
) -> Result {
    let tell = |value| {
        if let Some(status) = status {
            status.put_if_wanted(value);
        }
    };
    let name = symbol.get()?;
    function.put(0)?;
    if name.is_empty() {
        tell(0);
        return Ok(());
    }
    let forms = FORMS.get(name.as_str()).map_or(&[][..], Vec::as_slice);
    // A driver has nothing of later versions than its own.
    let version = version.min(driver_version());
    let found = newest(forms, version, flags & PER_THREAD_DEFAULT_STREAM != 0);
    match found.and_then(|form| ADDRESSES.get(form.symbol)) {
        Some(address) => {
            tell(0);
            function.put(*address)
        }
        None => {
            // 1: no such symbol, 2: not for a version this old.
            tell(if forms.is_empty() { 1 } else { 2 });
            Err(CuError::NOT_FOUND)
        }
    }
}

/// The newest form that a program of this version knows.
fn newest(forms: &[Form], version: c_int, per_thread: bool) -> Option<&Form> {
    let of = |own| {
        let known = forms
            .iter()
            .filter(move |it| it.version <= version && it.per_thread == own);
        known.max_by_key(|it| it.version)
    };
    per_thread.then(|| of(true)).flatten().or_else(|| of(false))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_entry_point_is_exported_once() {
        let expected: BTreeSet<&str> = entry_points().map(|it| it.symbol).collect();
        let all: Vec<&str> = implemented()
            .chain(missing::FUNCTIONS)
            .map(|it| it.0)
            .collect();
        let exported: BTreeSet<&str> = all.iter().copied().collect();
        assert_eq!(all.len(), exported.len(), "a function is there twice");
        let expected = expected.into_iter().chain([FUTURE.0]).collect();
        assert_eq!(exported, expected);
    }

    #[test]
    fn whatever_the_workloads_call_does_something() {
        for symbol in gpumux_cuda::driver::SYMBOLS {
            assert!(implemented().any(|it| it.0 == *symbol), "{symbol}");
        }
    }

    #[test]
    fn a_program_gets_the_newest_form_that_it_knows() {
        let symbol = |base, version, own| newest(&FORMS[base], version, own).map(|it| it.symbol);
        assert_eq!(symbol("cuCtxCreate", 1000, false), None);
        assert_eq!(symbol("cuCtxCreate", 3020, false), Some("cuCtxCreate_v2"));
        assert_eq!(symbol("cuCtxCreate", 12040, false), Some("cuCtxCreate_v3"));
        assert_eq!(symbol("cuCtxCreate", 13000, false), Some("cuCtxCreate_v4"));
        assert_eq!(symbol("cuMemcpy", 13000, true), Some("cuMemcpy_ptds"));
        assert_eq!(symbol("cuMemcpy", 4000, true), Some("cuMemcpy"));
        assert_eq!(symbol("cuInit", 13000, true), Some("cuInit"));
        assert_eq!(
            symbol("cuGetProcAddress", 11030, false),
            Some("cuGetProcAddress")
        );
        assert_eq!(
            symbol("cuGetProcAddress", 12000, false),
            Some("cuGetProcAddress_v2")
        );
    }

    /// The list for the reader, and whether it is as it should be: `GPUMUX_WRITE_DOCS=1` writes it.
    #[test]
    fn the_list_in_the_docs_is_true() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/emulated-functions.md"
        );
        let text = docs();
        if std::env::var_os("GPUMUX_WRITE_DOCS").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap();
        assert_eq!(found, text, "write it with GPUMUX_WRITE_DOCS=1");
    }

    fn docs() -> String {
        let (mut there, mut missing): (Vec<&str>, Vec<&str>) = (
            implemented()
                .map(|it| it.0)
                .filter(|it| *it != FUTURE.0)
                .collect(),
            missing::FUNCTIONS.iter().map(|it| it.0).collect(),
        );
        let list = |symbols: &mut Vec<&str>| {
            symbols.sort_unstable();
            let mut text = String::new();
            for symbol in symbols {
                text.push_str(&format!("`{symbol}`\n"));
            }
            text
        };
        format!(
            "# Driver functions of the emulated device\n\n\
             All {} entry points of the CUDA 13.5 driver are exported (`cuGetProcAddress` gives those of the profile's `cuda_version`). Those that are not implemented return \
             `CUDA_ERROR_NOT_SUPPORTED`;\n`GPUMUX_EMU_MISSING=FILE` makes each process append to FILE how often it \
             called which.\n\n## Implemented ({})\n\n{}\n## Not implemented ({})\n\n{}",
            there.len() + missing.len(),
            there.len(),
            list(&mut there),
            missing.len(),
            list(&mut missing),
        )
    }
}
