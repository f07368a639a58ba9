//! Work of streams: kernels beside each other, copies, waits, and its end.

use super::*;

#[test]
fn copy_engines_share_by_timeslices_in_each_direction() {
    let mut gpu = Gpu::new(Hardware::default());
    let bytes = 552_000_000; // 10 ms
    let mut copies = Vec::new();
    for engine in [
        Engine::HostToDevice,
        Engine::HostToDevice,
        Engine::DeviceToHost,
    ] {
        let group = gpu.add_group(engine);
        let stream = gpu.add_stream();
        copies.push(gpu.submit(group, stream, Work::Copy { bytes }).unwrap());
    }
    let end: Vec<f64> = [2, 0, 1]
        .map(|i: usize| wait(&mut gpu, copies[i]) as f64 / 1e6)
        .into();
    assert_near(end[0], 10.0, 0.001, "the other direction");
    assert_near(end[1], 19.0, 0.03, "first of two");
    assert_near(end[2], 20.0, 0.03, "second of two");
}

#[test]
fn kernels_of_one_group_share_the_sms() {
    let mut gpu = Gpu::new(Hardware::default());
    let one = program(&mut gpu, 2048);
    let two = Program {
        stream: gpu.add_stream(),
        ..one
    };
    // 100 and 100 of 132: the second starts on 32 and gets more when the first is done.
    let first = one.kernel(&mut gpu, 100, MILLI);
    let second = two.kernel(&mut gpu, 100, MILLI);
    let first = wait(&mut gpu, first);
    assert_eq!(first, MILLI + 3100);
    let rest = (100 - 32) * first;
    assert_eq!(wait(&mut gpu, second), first + rest.div_ceil(100));
}

#[test]
fn kernels_bound_by_memory_share_its_bandwidth() {
    let mut gpu = Gpu::new(Hardware::default());
    let group = gpu.add_group(Engine::Compute);
    let parts = [66, 33, 33].map(|sms| gpu.add_partition(sms));
    let [one, two, computes] = parts.map(|part| {
        let stream = gpu.add_stream();
        gpu.confine(stream, Some(part)).unwrap();
        Program { group, stream }
    });
    let (sms, alone) = (132, MILLI + 3100);
    let moving = |gpu: &mut Gpu, it: Program| {
        let work = Work::Moving {
            sms,
            duration: MILLI,
        };
        gpu.submit(it.group, it.stream, work).unwrap()
    };
    // How long each takes, in the order in which they end.
    let took = |gpu: &mut Gpu| -> Vec<Nanos> {
        let begun = gpu.now;
        let ends = gpu.advance(begun + 10 * MILLI);
        ends.iter().map(|event| event.at - begun).collect()
    };
    // A quarter of the SMs is enough for all of the bandwidth.
    moving(&mut gpu, two);
    assert_eq!(took(&mut gpu), [alone]);
    for it in [one, two] {
        moving(&mut gpu, it);
    }
    computes.kernel(&mut gpu, 33, MILLI);
    let half = (alone * 33).div_ceil(16);
    assert_eq!(took(&mut gpu), [alone, half, half]);
    // With fewer SMs it takes less from the other.
    gpu.resize_partition(parts[1], 11).unwrap();
    for it in [one, two] {
        moving(&mut gpu, it);
    }
    let first = (alone * 33).div_ceil(24);
    let second = first + (alone * 33 - first * 8).div_ceil(11);
    assert_eq!(took(&mut gpu), [first, second]);
}

#[test]
fn in_a_shared_group_a_full_device_makes_every_kernel_wait() {
    // Two programs in one group (MPS), kernels of 10 ms on all SMs: each of the ten latency kernels
    // waits for one of them: 95 to 100 ms (measured 94.9).
    let mut gpu = Gpu::new(Hardware::default());
    let batch = program(&mut gpu, 2048);
    let latency = Program {
        stream: gpu.add_stream(),
        ..batch
    };
    batch.saturate(&mut gpu, 10 * MILLI, 1);
    gpu.advance(25 * MILLI);
    let end = latency.request(&mut gpu);
    let taken = wait(&mut gpu, end) - 25 * MILLI;
    assert_near(taken as f64, 95.0 * MILLI as f64, 0.05, "latency");
    // Limited to 70 % of the SMs it does not (measured 133 µs).
    let mut gpu = Gpu::new(Hardware::default());
    let batch = program(&mut gpu, 2048);
    let latency = Program {
        stream: gpu.add_stream(),
        ..batch
    };
    batch.kernel(&mut gpu, 92, SECOND);
    gpu.advance(MILLI);
    for _ in 0..10 {
        latency.kernel(&mut gpu, 40, 10 * MICRO);
    }
    let end = latency.record(&mut gpu);
    let taken = wait(&mut gpu, end) - MILLI;
    assert_near(taken as f64, 131.0 * MICRO as f64, 0.02, "latency");
}

#[test]
fn a_partition_bounds_what_its_streams_have_together() {
    let mut gpu = Gpu::new(Hardware::default());
    let group = gpu.add_group(Engine::Compute);
    let partition = gpu.add_partition(32);
    let confined = [(); 2].map(|()| Program {
        group,
        stream: gpu.add_stream(),
    });
    let free = Program {
        group,
        stream: gpu.add_stream(),
    };
    for program in confined {
        gpu.confine(program.stream, Some(partition)).unwrap();
        program.saturate(&mut gpu, MILLI, 1);
    }
    free.saturate(&mut gpu, MILLI, 1);
    gpu.advance(100 * MILLI);
    let work = |gpu: &Gpu, program: Program| gpu.stream_received(program.stream).unwrap().work;
    let both: u64 = confined.iter().map(|program| work(&gpu, *program)).sum();
    assert_near(both as f64, 32.0 * 1e8, 0.01, "two streams in 32 SMs");
    assert_near(
        work(&gpu, free) as f64,
        100.0 * 1e8,
        0.01,
        "the others' SMs",
    );
    gpu.resize_partition(partition, 64).unwrap();
    gpu.advance(200 * MILLI);
    let grown: u64 = confined.iter().map(|program| work(&gpu, *program)).sum();
    assert_near((grown - both) as f64, 64.0 * 1e8, 0.01, "resized");
    gpu.remove_partition(partition).unwrap();
    assert_eq!(
        gpu.resize_partition(partition, 8),
        Err(GpuError::Partition(partition))
    );
    assert_eq!(
        gpu.confine(free.stream, Some(partition)),
        Err(GpuError::Partition(partition))
    );
}

#[test]
fn waiting_kernels_run_by_priority_of_their_streams() {
    let mut gpu = Gpu::new(Hardware::default());
    let low = program(&mut gpu, 2048);
    let [also_low, high] = [(); 2].map(|()| Program {
        stream: gpu.add_stream(),
        ..low
    });
    gpu.prioritize(high.stream, -5).unwrap();
    let running = low.kernel(&mut gpu, 132, MILLI);
    let waiting = also_low.kernel(&mut gpu, 132, MILLI);
    let behind = low.kernel(&mut gpu, 132, MILLI);
    gpu.advance(100 * MICRO);
    let first = high.kernel(&mut gpu, 132, MILLI);
    let order: Vec<WorkId> = gpu.advance(SECOND).iter().map(|it| it.work).collect();
    assert_eq!(order, [running, first, waiting, behind]);
}

#[test]
fn streams_wait_for_each_other_and_for_the_host() {
    let mut gpu = Gpu::new(Hardware::default());
    let one = program(&mut gpu, 2048);
    let two = Program {
        stream: gpu.add_stream(),
        ..one
    };
    let host = gpu.submit(one.group, one.stream, Work::Host).unwrap();
    let kernel = one.kernel(&mut gpu, 1, MILLI);
    let event = one.record(&mut gpu);
    gpu.submit(two.group, two.stream, Work::Wait(event))
        .unwrap();
    let last = two.record(&mut gpu);
    let ready = gpu.advance(5 * MILLI);
    assert_eq!(ready.len(), 1);
    assert_eq!((ready[0].work, ready[0].kind), (host, EventKind::HostReady));
    assert_eq!(gpu.next_event(), None);
    gpu.release(host);
    let events = gpu.advance(SECOND);
    let order: Vec<WorkId> = events.iter().map(|event| event.work).collect();
    assert_eq!(order[..3], [host, kernel, event]);
    assert_eq!(order.last(), Some(&last));
    assert_eq!(events.last().unwrap().at, 6 * MILLI + 3100);
    assert!(gpu.is_idle(one.stream).unwrap() && gpu.is_idle(two.stream).unwrap());
}

#[test]
fn removing_frees_the_device_and_what_waited() {
    let mut gpu = Gpu::new(Hardware::default());
    let one = program(&mut gpu, 1_000_000);
    let two = program(&mut gpu, 1_000_000);
    let endless = one.kernel(&mut gpu, 132, Nanos::MAX);
    two.kernel(&mut gpu, 132, MILLI);
    gpu.submit(two.group, two.stream, Work::Wait(endless))
        .unwrap();
    let last = two.record(&mut gpu);
    gpu.advance(MILLI);
    gpu.remove_group(one.group).unwrap();
    gpu.remove_stream(one.stream).unwrap();
    assert!(gpu.is_complete(endless));
    // The engine may be on its way from one to the other: a switch at most.
    assert!(wait(&mut gpu, last) <= 2 * MILLI + 200 * MICRO);
    assert_eq!(
        gpu.freeze(one.group).unwrap_err(),
        GpuError::Group(one.group)
    );
}

#[test]
fn rest_of_a_kernel_takes_what_is_set_while_it_runs() {
    let mut gpu = Gpu::new(Hardware::default());
    let group = gpu.add_group(Engine::Compute);
    let stream = gpu.add_stream();
    let begin = Work::Kernel {
        sms: 4,
        duration: 0,
    };
    gpu.submit(group, stream, begin).unwrap();
    let rest = gpu.submit(group, stream, Work::Rest { sms: 4 }).unwrap();
    let behind = gpu.submit(group, stream, Work::Record).unwrap();
    gpu.advance(1_000_000);
    assert!(!gpu.is_complete(rest), "its length is not known");
    assert_eq!(gpu.progress(group).unwrap().len(), 1);
    // Frozen time does not count.
    gpu.freeze(group).unwrap();
    gpu.advance(5_000_000);
    gpu.set_length(rest, 2_000_000);
    gpu.advance(9_000_000);
    assert!(!gpu.is_complete(rest));
    gpu.thaw(group).unwrap();
    let events = gpu.advance(20_000_000);
    let done: Vec<_> = events.iter().map(|event| event.work).collect();
    assert_eq!(done, [rest, behind]);
    let overhead = Hardware::default().kernel_overhead;
    assert!(events[0].at > 9_000_000 + 2_000_000 - 1_000_000 + overhead - 1);
    // One that is set before it begins, and one whose time has passed already.
    gpu.submit(group, stream, begin).unwrap();
    let known = gpu.submit(group, stream, Work::Rest { sms: 4 }).unwrap();
    gpu.set_length(known, 5_000);
    gpu.advance(21_000_000);
    assert!(gpu.is_complete(known));
    let late = gpu.submit(group, stream, Work::Rest { sms: 4 }).unwrap();
    gpu.advance(22_000_000);
    gpu.set_length(late, 1);
    gpu.advance(22_000_001);
    assert!(gpu.is_complete(late));
}
