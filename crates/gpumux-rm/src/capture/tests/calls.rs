//! Calls, as they are read from a process's memory.

use super::*;

#[test]
fn both_forms_of_alloc_are_read() {
    let params = GroupAlloc {
        engine: 11,
        ..Default::default()
    };
    let memory = memory(0x1000, params.as_bytes());
    let short = Alloc21 {
        root: CLIENT,
        parent: DEVICE,
        object: GROUP,
        class: class::CHANNEL_GROUP,
        params: 0x1000,
        ..Default::default()
    };
    let long = Alloc64 {
        root: CLIENT,
        parent: DEVICE,
        object: GROUP,
        class: class::CHANNEL_GROUP,
        params: 0x1000,
        ..Default::default()
    };
    let call = Some(alloc(DEVICE, GROUP, class::CHANNEL_GROUP, 11));
    assert_eq!(
        Call::decode(Variant::default(), escape::ALLOC, short.as_bytes(), &memory),
        call
    );
    assert_eq!(
        Call::decode(Variant::default(), escape::ALLOC, long.as_bytes(), &memory),
        call
    );
    let refused = Alloc64 {
        status: 0x1f,
        ..long
    };
    assert_eq!(
        Call::decode(
            Variant::default(),
            escape::ALLOC,
            refused.as_bytes(),
            &memory
        ),
        None
    );
    let refused = Alloc21 {
        status: 0x1f,
        ..short
    };
    assert_eq!(
        Call::decode(
            Variant::default(),
            escape::ALLOC,
            refused.as_bytes(),
            &memory
        ),
        None
    );
    assert_eq!(
        Call::decode(
            Variant::default(),
            escape::ALLOC,
            &long.as_bytes()[..40],
            &memory
        ),
        None
    );
    let other = Alloc64 {
        class: 0x3e,
        ..long
    };
    assert_eq!(
        Call::decode(Variant::default(), escape::ALLOC, other.as_bytes(), &memory),
        None
    );
}

#[test]
fn a_channel_s_engine_is_read() {
    let params = ChannelAllocHead {
        engine: 12,
        ..Default::default()
    };
    let long = Alloc64 {
        root: CLIENT,
        parent: GROUP,
        object: 7,
        class: HOPPER,
        params: 64,
        ..Default::default()
    };
    let call = Call::decode(
        Variant::default(),
        escape::ALLOC,
        long.as_bytes(),
        memory(64, params.as_bytes()),
    );
    assert_eq!(call, Some(alloc(GROUP, 7, HOPPER, 12)));
    // Unreadable parameters are no reason to miss the channel.
    let call = Call::decode(
        Variant::default(),
        escape::ALLOC,
        long.as_bytes(),
        |_, _| false,
    );
    assert_eq!(call, Some(alloc(GROUP, 7, HOPPER, 0)));
}

#[test]
fn structures_given_by_pointer_are_followed_once() {
    let free = Free {
        root: CLIENT,
        parent: 0,
        object: GROUP,
        status: 0,
    };
    let xfer = XferCmd {
        cmd: escape::FREE.into(),
        size: 16,
        ptr: 0x2000,
    };
    let read = memory(0x2000, free.as_bytes());
    let call = Call::decode(Variant::default(), escape::XFER_CMD, xfer.as_bytes(), &read);
    assert_eq!(
        call,
        Some(Call::Free {
            client: CLIENT,
            object: GROUP
        })
    );
    let huge = XferCmd {
        size: u32::MAX,
        ..xfer
    };
    assert_eq!(
        Call::decode(Variant::default(), escape::XFER_CMD, huge.as_bytes(), &read),
        None
    );
    let nested = XferCmd {
        cmd: escape::XFER_CMD.into(),
        ..xfer
    };
    assert_eq!(
        Call::decode(
            Variant::default(),
            escape::XFER_CMD,
            nested.as_bytes(),
            &read
        ),
        None
    );
}

#[test]
fn controls_of_groups_are_read() {
    let params = TimesliceParams { timeslice_us: 2048 };
    let memory = memory(8, params.as_bytes());
    let mut control = Control {
        client: CLIENT,
        object: GROUP,
        cmd: cmd::SET_TIMESLICE,
        params: 8,
        params_size: 8,
        ..Default::default()
    };
    let decode = |control: &Control| {
        Call::decode(
            Variant::default(),
            escape::CONTROL,
            control.as_bytes(),
            &memory,
        )
    };
    assert_eq!(decode(&control), Some(set(GROUP, 2048)));
    control.status = 0x23;
    assert_eq!(decode(&control), None);
    control.status = 0;
    control.cmd = cmd::GROUP_SCHEDULE;
    assert_eq!(
        decode(&control),
        None,
        "it disables: the first byte is 0 (2048 = 0x800)"
    );
    control.cmd = cmd::PREEMPT;
    assert_eq!(decode(&control), None);
}

#[test]
fn group_is_enabled_by_the_short_structure_of_older_drivers() {
    // Nothing can be read behind it.
    let memory = memory(8, &[1, 0]);
    let control = Control {
        client: CLIENT,
        object: GROUP,
        cmd: cmd::GROUP_SCHEDULE,
        params: 8,
        params_size: 2,
        ..Default::default()
    };
    let enabled = Call::Schedule {
        client: CLIENT,
        group: GROUP,
    };
    let call = Call::decode(
        Variant::default(),
        escape::CONTROL,
        control.as_bytes(),
        &memory,
    );
    assert_eq!(call, Some(enabled));
}

#[test]
fn the_layout_s_offsets_are_the_driver_s() {
    assert_eq!(std::mem::offset_of!(GroupAlloc, engine), 12);
    assert_eq!(std::mem::offset_of!(ChannelAllocHead, engine), 128);
}
