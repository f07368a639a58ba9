//! Any sequence of RM calls, as bytes: must neither panic nor grow without bound.
//! `fuzz/run 60 rm_calls`

#![no_main]

use gpumux_rm::{
    capture::{Call, Capture, MAX_OBJECTS},
    layout::Variant,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // Per call: escape, file, length of its structure, the structure. All of the input is the
    // program's memory.
    let read = |address: u64, out: &mut [u8]| {
        let bytes = usize::try_from(address).ok().and_then(|at| data.get(at..));
        let Some(bytes) = bytes.and_then(|bytes| bytes.get(..out.len())) else {
            return false;
        };
        out.copy_from_slice(bytes);
        true
    };
    let mut capture = Capture::default();
    let mut rest = data;
    while let [nr, file, len, tail @ ..] = rest {
        let (arg, after) = tail.split_at(tail.len().min(usize::from(*len)));
        rest = after;
        if let Some(call) = Call::decode(Variant::of(""), *nr, arg, read) {
            capture.apply(u64::from(*file), &call);
        }
        assert!(capture.objects() <= MAX_OBJECTS);
    }
    for id in capture.groups().collect::<Vec<_>>() {
        assert!(capture.group(id).is_some());
    }
    for file in 0..=u64::from(u8::MAX) {
        capture.close(file);
    }
    assert_eq!(capture.objects(), 0);
});
