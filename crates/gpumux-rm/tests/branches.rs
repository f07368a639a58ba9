//! The layouts against what the headers of every driver branch say (`branches.txt`), and against the page for users.

use std::mem::offset_of;

use gpumux_rm::{
    branches::{ARCHITECTURES, BRANCHES, Evidence, evidence},
    capture::Call,
    layout::*,
};
use zerocopy::IntoBytes;

/// Name, and the value in each branch.
struct Row {
    name: &'static str,
    values: Vec<&'static str>,
}

/// The branches, and the rows of the record.
fn record() -> (Vec<u32>, Vec<Row>) {
    let text = include_str!("branches.txt");
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let head = lines.next().unwrap().split_whitespace().skip(1);
    let branches = head.map(|tag| tag.split('.').next().unwrap().parse().unwrap());
    let rows = lines.map(|line| {
        let mut values = line.split_whitespace();
        let name = values.next().unwrap();
        let values = values.collect();
        Row { name, values }
    });
    (branches.collect(), rows.collect())
}

/// What this crate has for a row; none where it uses less than there is, or other rows are looked at elsewhere.
fn ours(name: &str) -> Option<String> {
    macro_rules! sizes {
        ($($layout:ident { $($field:ident),* })*) => {
            match name {
                $(
                    concat!(stringify!($layout), ".size") => size_of::<$layout>(),
                    $(concat!(stringify!($layout), ".", stringify!($field)) => offset_of!($layout, $field),)*
                )*
                _ => return numbers(name),
            }
        };
    }
    let size = sizes! {
        Free { root, object, status }
        Control { cmd, params, params_size, status }
        Alloc21 { class, params, status }
        Alloc64 { class, params, params_size, status }
        DupObject { client_src, status }
        Share { status }
        XferCmd { ptr }
        SubdeviceAlloc {}
        GroupAlloc { engine }
        TimesliceParams {}
        GroupScheduleParams {}
        InterleaveParams {}
        DisableChannelsParams { count, event, clients, channels }
        PreemptionModeParams { compute }
        GidInfoParams { data }
    };
    Some(size.to_string())
}

fn numbers(name: &str) -> Option<String> {
    let number = match name {
        "cmd.SET_TIMESLICE" => cmd::SET_TIMESLICE,
        "cmd.GET_TIMESLICE" => cmd::GET_TIMESLICE,
        "cmd.GROUP_SCHEDULE" => cmd::GROUP_SCHEDULE,
        "cmd.SET_INTERLEAVE_LEVEL" => cmd::SET_INTERLEAVE_LEVEL,
        "cmd.DISABLE_CHANNELS" => cmd::DISABLE_CHANNELS,
        "cmd.SET_PREEMPTION_MODE" => cmd::SET_PREEMPTION_MODE,
        "cmd.GET_GID_INFO" => cmd::GET_GID_INFO,
        "escape.FREE" => escape::FREE.into(),
        "escape.CONTROL" => escape::CONTROL.into(),
        "escape.ALLOC" => escape::ALLOC.into(),
        "escape.DUP_OBJECT" => escape::DUP_OBJECT.into(),
        "escape.SHARE" => escape::SHARE.into(),
        "escape.XFER_CMD" => escape::XFER_CMD.into(),
        "class.CHANNEL_GROUP" => class::CHANNEL_GROUP,
        name => {
            let architecture = match name.strip_prefix("class.")? {
                "BlackwellA" => "Blackwell A",
                "BlackwellB" => "Blackwell B",
                other => other,
            };
            let channels = class::CHANNELS.iter();
            return (channels.clone())
                .find(|(_, of)| *of == architecture)
                .map(|(class, _)| format!("{class:x}"));
        }
    };
    Some(format!("{number:x}"))
}

#[test]
fn layouts_are_those_of_every_branch() {
    let (branches, rows) = record();
    assert_eq!(branches, BRANCHES);
    let mut compared = 0;
    for Row { name, values } in rows {
        assert_eq!(values.len(), BRANCHES.len(), "{name}");
        let known = |value: &&&str| !["-", "?"].contains(*value);
        match (name, ours(name)) {
            ("ChannelAlloc.engine", _) => {
                for (branch, value) in BRANCHES.iter().zip(values) {
                    let variant = Variant::of(&format!("{branch}.1"));
                    assert_eq!(value, variant.channel_engine().to_string(), "{branch}");
                }
            }
            // Its first byte is all that is looked at.
            ("GroupScheduleParams.size", _) => {}
            (_, Some(ours)) => {
                assert!(values.iter().filter(known).all(|it| *it == ours), "{name}");
                compared += 1;
            }
            // Root may set it: it is not needed.
            ("unprivileged.SET_INTERLEAVE_LEVEL", _) => {
                assert!(values.iter().all(|it| *it == "no"), "{name}");
            }
            (name, None) if name.starts_with("unprivileged.") => {
                assert!(values.iter().all(|it| *it == "yes"), "{name}");
                compared += 1;
            }
            (name, None) => assert!(name.starts_with("chip."), "{name} is compared with nothing"),
        }
    }
    assert!(compared > 60, "{compared}");
}

#[test]
fn architectures_begin_where_their_chips_do() {
    let (branches, rows) = record();
    let chips = [
        "TU102", "GA100", "AD102", "GH100", "GB100", "GB110", "GB202", "GB20B",
    ];
    for (architecture, chip) in ARCHITECTURES.iter().zip(chips) {
        let row = rows
            .iter()
            .find(|it| it.name == format!("chip.{chip}"))
            .unwrap();
        for (branch, has) in branches.iter().zip(&row.values) {
            assert_eq!(
                *branch >= architecture.since,
                *has == "yes",
                "{chip} {branch}"
            );
        }
    }
}

#[test]
fn channels_of_newer_drivers_are_read_at_their_engine() {
    assert_eq!(Variant::of("580.159.04"), Variant::To595);
    assert_eq!(Variant::of("610.43.02\n"), Variant::From610);
    assert_eq!(Variant::of("620.6.0"), Variant::From610);
    assert_eq!(Variant::of(""), Variant::To595);
    let alloc = Alloc64 {
        class: class::CHANNELS[3].0,
        params: 8,
        ..Default::default()
    };
    let mut params = [0; 376];
    params[136] = engine::COPY0 as u8;
    let read = |address: u64, out: &mut [u8]| {
        out.copy_from_slice(&params[address as usize - 8..][..out.len()]);
        true
    };
    for (variant, expected) in [(Variant::From610, engine::COPY0), (Variant::To595, 0)] {
        let call = Call::decode(variant, escape::ALLOC, alloc.as_bytes(), read);
        assert!(matches!(call, Some(Call::Alloc { engine, .. }) if engine == expected));
    }
}

/// The page's table is what the code says.
#[test]
fn page_for_users_says_the_same() {
    let page = include_str!("../../../docs/drivers.md");
    // Of this one no source was read.
    const UNREAD: u32 = 610;
    let mut columns = [&BRANCHES[..], &[UNREAD]].concat();
    columns.sort_unstable();
    let head: String = columns.iter().map(|it| format!(" {it} |")).collect();
    let mut table = format!("| driver branch |{head}\n");
    table += &format!("|---|{}\n", "---|".repeat(columns.len()));
    let capabilities = [
        (7, 5),
        (8, 0),
        (8, 9),
        (9, 0),
        (10, 0),
        (10, 3),
        (12, 0),
        (12, 1),
    ];
    for (architecture, capability) in ARCHITECTURES.iter().zip(capabilities) {
        table += &format!("| {} |", architecture.name);
        for branch in &columns {
            table += match evidence(&format!("{branch}.1"), true, capability) {
                Evidence::Measured => " **measured** |",
                Evidence::Source => " source |",
                Evidence::Unknown if *branch == UNREAD => " unknown |",
                Evidence::Unknown => " – |",
            };
        }
        table += "\n";
    }
    assert!(
        page.contains(&table),
        "docs/drivers.md should have:\n{table}"
    );
}
