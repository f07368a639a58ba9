//! More tenants than memory: they take turns with it.

use super::*;

#[test]
fn more_tenants_than_memory_take_turns() {
    if real() {
        // The device there is too large to fill in a test: `bench/memory.py oversubscribe` does so.
        return;
    }
    let node = Node::with_memory(256 << 20);
    let check = "gpumux workload check --json --memory 100MiB --seconds 1";
    let mut workers: Vec<Process> = (0..3)
        .map(|n| Process::start(&mut node.tenant(&format!("--name w{n}"), check)))
        .collect();
    // These have memory in many pieces, so that a part of it may stay.
    workers.extend((0..2).map(|n| {
        let program = program(n, "100MiB", 200);
        Process::start(&mut node.tenant(&format!("--name r{n}"), &program))
    }));
    for worker in workers {
        verified(&worker.finish_within(Duration::from_secs(240)));
    }
}

/// Each has one allocation, of 60% and of 50% of the device. For each quantum only the part that is not on the device moves, not the whole allocation.
#[test]
fn single_allocations_move_by_what_is_lacking() {
    const CHUNK: u64 = 64 << 20;
    if real() {
        eprintln!("SKIPPED: `bench/residency.py arena` fills the device");
        return;
    }
    let node = Node::with_memory(512 << 20);
    let mut jobs = [("large", "307MiB"), ("small", "256MiB")].map(|(name, memory)| {
        let sweep = format!("gpumux workload sweep --json --memory {memory} --seconds 600");
        let job = Process::start(&mut node.tenant(&format!("--name {name}"), &sweep));
        (name, job)
    });
    // Both from one look: it moves on between two.
    let moves = |name: &str| {
        let moves = &node.find_tenant(name)?["moves"];
        moves["outs"].as_u64().zip(moves["out_bytes"].as_u64())
    };
    for (name, job) in &mut jobs {
        wait_for("both to have moved", PATIENCE * 6, || {
            assert!(job.poll().is_none(), "{name} has ended: {}", job.err());
            (moves(name)?.0 > 0).then_some(())
        });
    }
    let memory = node.gpumux(["memory", "--json"]).run().ok().json();
    let device = &memory["devices"][0];
    let number = |it: &Value, field: &str| it[field].as_u64().expect("a number");
    let tenants = device["tenants"].as_array().expect("an array");
    let wanted = |it| number(it, "in_use") + number(it, "swapped");
    let room = number(device, "total") - number(device, "occupied");
    let lacking = tenants.iter().map(wanted).sum::<u64>() - room;
    assert!(lacking < 180 << 20, "{lacking} of {memory:#}");
    for (name, job) in jobs {
        let (outs, bytes) = moves(name).expect("it runs");
        assert!(
            bytes <= outs * (lacking + CHUNK),
            "{name}: {bytes} bytes in {outs} moves, lacking {lacking} bytes"
        );
        job.signal(Signal::TERM);
        verified(&job.finish_within(PATIENCE * 2));
    }
}

#[test]
fn ten_tenants_that_start_together_never_exceed_the_device() {
    if real() {
        return;
    }
    let node = Node::with_memory(1 << 30);
    let idle = "gpumux workload idle --seconds 2 --memory 200MiB";
    let tenants: Vec<Process> = (0..10)
        .map(|n| {
            let options = format!("--name t{n} --memory-policy fail");
            Process::start(&mut node.tenant(&options, idle))
        })
        .collect();
    let (mut served, mut refused) = (0, 0);
    for tenant in tenants {
        let finished = tenant.finish_within(PATIENCE * 3);
        match finished.status.success() {
            true => served += 1,
            false => {
                // Its own error, not a crash.
                assert_eq!(finished.status.code(), Some(1), "{}", finished.err);
                assert!(
                    finished.err.contains("OUT_OF_MEMORY")
                        || finished.err.contains("out of memory"),
                    "{}",
                    finished.err
                );
                refused += 1;
            }
        }
    }
    assert!(
        served >= 1 && served + refused == 10,
        "{served} served, {refused} refused"
    );
}
