//! The one list of the CUDA driver's entry points, `entry_points.txt`: what there is, since which version, and what each does to
//! device and memory. The preloaded library makes its hooks from it, the emulated device its exports.
//!
//! `tools/cuda_entry_points.py` extends it by the headers of a newer CUDA. What is new there has no class, which is refused here.

/// What a call does, as far as sharing a device is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Gives a stream work for the compute engine.
    Submit,
    /// Gives a stream what copy engines do, or what may run although the compute channels are frozen.
    Copy,
    /// Either, or both.
    SubmitAndCopy,
    /// Waits for work, asks whether it is done, or marks a place in a stream.
    Wait,
    /// Has the driver use the device for itself, or asks it about memory: waits while memory is swapped out.
    Gate,
    /// Gives out device memory.
    Allocate,
    /// Takes it back.
    Free,
    /// Touches neither device nor memory.
    None,
    /// The oldest form of a call, with addresses of 32 bits: no driver of a 64-bit process gives such addresses out.
    Short,
}

impl Class {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "submit" => Self::Submit,
            "copy" => Self::Copy,
            "submit-and-copy" => Self::SubmitAndCopy,
            "wait" => Self::Wait,
            "gate" => Self::Gate,
            "allocate" => Self::Allocate,
            "free" => Self::Free,
            "none" => Self::None,
            "short" => Self::Short,
            _ => return None,
        })
    }
}

/// One exported symbol of libcuda.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// As exported, such as `cuMemcpyAsync_ptsz`.
    pub symbol: &'static str,
    /// As `cuGetProcAddress` knows it, such as `cuMemcpyAsync`.
    pub name: &'static str,
    /// The least CUDA version for which `cuGetProcAddress` gives it, 1000 × major + 10 × minor.
    pub version: i32,
    /// Its arguments, a letter each: `i` an integer or a pointer, `s` a stream, `c` a launch configuration, `f` a float, `b` 64 bytes
    /// by value.
    pub arguments: &'static str,
    /// What it does.
    pub class: Class,
    /// The preloaded library has a function of its own for it; else that follows from the class.
    pub own: bool,
    /// The driver may take device memory of its own for it. A call that finds none has done nothing, and may be made again.
    pub room: bool,
}

impl EntryPoint {
    /// Whether its null stream is the thread's own: `cuGetProcAddress` gives it with the flag for that.
    pub fn per_thread(&self) -> bool {
        self.symbol.ends_with("_ptsz") || self.symbol.ends_with("_ptds")
    }

    /// Whether the preloaded library stands in front of it.
    pub fn hooked(&self) -> bool {
        self.own || !matches!(self.class, Class::None | Class::Short)
    }

    fn read(line: &'static str) -> Option<Self> {
        let mut words = line.split(' ');
        let mut entry = Self {
            symbol: words.next()?,
            name: words.next()?,
            version: words.next()?.parse().ok()?,
            arguments: words.next().map(|it| it.trim_start_matches('-'))?,
            class: Class::named(words.next()?)?,
            own: false,
            room: false,
        };
        for word in words {
            match word {
                "own" => entry.own = true,
                "room" => entry.room = true,
                _ => return None,
            }
        }
        entry
            .arguments
            .bytes()
            .all(|it| b"iscfb".contains(&it))
            .then_some(entry)
    }
}

/// The list, sorted by symbol.
///
/// # Panics
/// If a line of it is not complete, such as that of a new function without a class.
pub fn entry_points() -> impl Iterator<Item = EntryPoint> {
    include_str!("entry_points.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| EntryPoint::read(line).unwrap_or_else(|| panic!("not an entry point: {line}")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_line_of_the_list_is_complete_and_there_once() {
        let symbols: Vec<&str> = entry_points().map(|it| it.symbol).collect();
        assert!(symbols.is_sorted());
        let mut once = symbols.clone();
        once.dedup();
        assert_eq!(once, symbols);
        assert!(EntryPoint::read("cuNewAsync cuNewAsync 14000 iis ?").is_none());
        assert!(EntryPoint::read("cuNewAsync cuNewAsync 14000 iix copy").is_none());
        assert!(EntryPoint::read("cuNewAsync cuNewAsync 14000 iis copy ours").is_none());
    }

    #[test]
    fn twins_are_alike_but_for_the_default_stream() {
        let all: BTreeMap<&str, EntryPoint> = entry_points().map(|it| (it.symbol, it)).collect();
        for twin in all.values().filter(|it| it.per_thread()) {
            let plain = all[&twin.symbol[..twin.symbol.len() - "_ptsz".len()]];
            let of = |it: EntryPoint| (it.name, it.arguments, it.class, it.own, it.room);
            assert_eq!(of(*twin), of(plain), "{}", twin.symbol);
        }
    }

    #[test]
    fn room_is_for_calls_that_make_something_or_submit_it() {
        const ENDS: [&str; 6] = ["Destroy", "Free", "Release", "Reset", "Unload", "Unmap"];
        for it in entry_points().filter(|it| it.room) {
            let makes = [
                Class::Gate,
                Class::Submit,
                Class::Copy,
                Class::SubmitAndCopy,
            ];
            assert!(makes.contains(&it.class), "{}", it.symbol);
            assert!(
                !ENDS.iter().any(|end| it.name.contains(end)),
                "{}",
                it.symbol
            );
            assert!(!it.name.starts_with("cuMemcpy"), "{}", it.symbol);
        }
    }

    /// Names that say what a call does.
    #[test]
    fn what_moves_or_makes_data_has_a_class_that_waits() {
        const BEGINNINGS: [&str; 16] = [
            "cuMemcpy",
            "cuMemset",
            "cuMemAlloc",
            "cuMemFree",
            "cuMemPrefetch",
            "cuMemDiscard",
            "cuMemBatch",
            "cuMemMapArray",
            "cuMemCreate",
            "cuLaunch",
            "cuGraphLaunch",
            "cuGraphUpload",
            "cuGraphAddMem",
            "cuStreamWriteValue",
            "cuStreamWaitValue",
            "cuStreamBatchMemOp",
        ];
        for it in entry_points() {
            if BEGINNINGS.iter().any(|start| it.symbol.starts_with(start)) {
                assert_ne!(it.class, Class::None, "{}", it.symbol);
            }
        }
    }
}
