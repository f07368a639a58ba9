//! Packets in every order, with odd contents and files.

use super::*;

fn any_packet(random: &mut Random) -> Shim {
    let names = ["", "GPU-0", "\u{1b}[2J\n", "../..", &"x".repeat(5000)];
    let (a, b, c) = (number(random), number(random), number(random));
    let name = names[random.below(5) as usize].to_owned();
    let (key, flag, token) = (
        a as u32,
        b.is_multiple_of(2),
        u128::from(a) << 64 | u128::from(b),
    );
    match random.below(25) {
        0 => hello(Some(&name)),
        1 => group(key, b as u32, c as u32 % 600),
        2 => Shim::Memory,
        3 => Shim::Channels {
            key,
            channels: vec![b as u32; c as usize % 600],
        },
        4 => Shim::TimesliceTouched { key },
        5 => Shim::Gone { key },
        6 => Shim::Ask {
            ticket: key,
            device: name,
            total: a,
            need: b,
            want: c,
            pinned: flag,
        },
        7 => Shim::Holds {
            device: name,
            total: a,
            movable: b,
            pinned: c,
            swapped: a,
        },
        8 => Shim::View {
            ticket: key,
            device: name,
            total: c,
        },
        9 => Shim::Quiet { op: a, idle: flag },
        10 => Shim::Busy {
            op: a,
            reason: name,
        },
        11 => Shim::Moved { op: a },
        12 => Shim::WakeRequest,
        13 => Shim::Keeps { bytes: a },
        14 => Shim::Reclaims,
        15 => Shim::Reclaimed { op: a, bytes: b },
        16 => Shim::Missing { ticket: key },
        17 => Shim::Unlisted { name },
        18 => Shim::Export { ticket: key, token },
        19 => Shim::Withdraw { token },
        20 => Shim::Redeem {
            ticket: key,
            token,
            index: c as u32,
        },
        21 => Shim::Piece {
            op: a,
            piece: flag.then_some(Piece {
                bytes: a,
                whole: b,
                offset: c,
                allocation: a,
            }),
        },
        22 => Shim::Opened {
            token,
            charged: flag,
        },
        23 => Shim::Kept {
            device: name,
            bytes: a,
            inherited: b,
        },
        _ => Shim::Closed { token },
    }
}

#[test]
fn packets_in_any_order_are_survived() {
    let (node, old) = with_old_tenant();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let null = std::fs::File::open("/dev/null").unwrap();
    let (_page, page) = Page::create().unwrap();
    for round in 0..60 {
        // Half of them before they are welcome.
        let guest = (round % 2 == 0).then(|| Guest::new(&node));
        let session = match &guest {
            Some(guest) => guest.session.try_clone().unwrap(),
            None => connect(&node),
        };
        for _ in 0..200 {
            let file =
                [None, None, Some(null.as_fd()), Some(page.as_fd())][random.below(4) as usize];
            let sent = socket::send(
                &session,
                &any_packet(&mut random),
                file,
                SendFlags::DONTWAIT,
            );
            // Its end, or a full socket, is no fault.
            if sent.is_err_and(|it| it.kind() == std::io::ErrorKind::BrokenPipe) {
                break;
            }
        }
    }
    daemon_serves(&node, &old);
    // Nothing of that is left in what the daemon believes of the device.
    wait_for("the guests' ends", PATIENCE, || {
        let ps = node.ps();
        (ps["tenants"].as_array()?.len() == 1).then_some(())
    });
    let memory = node.gpumux(["memory", "--json"]).run().ok().json();
    assert_eq!(
        memory["devices"].as_array().map(Vec::len),
        Some(1),
        "{memory:#}"
    );
}

#[test]
fn packets_with_many_files_leave_none_in_the_daemon() {
    let (node, old) = with_old_tenant();
    let before = settled_files(&node);
    let null = std::fs::File::open("/dev/null").unwrap();
    let guest = Guest::new(&node);
    for session in [&guest.session, &connect(&node)] {
        for count in 1..=300 {
            let files = [null.as_fd(); 16];
            let files = &files[..1 + count % 16];
            let _ = socket::send_bytes(session, &[0xff; 8], files, SendFlags::DONTWAIT);
        }
    }
    drop(guest);
    daemon_serves(&node, &old);
    assert!(settled_files(&node) <= before, "{:#?}", node.daemon_files());
}
