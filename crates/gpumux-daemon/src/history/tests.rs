use proptest::prelude::*;

use super::*;

fn look(tenant: u64, received_us: f64) -> Look {
    Look {
        tenant: TenantId(tenant),
        device: "GPU-0".into(),
        name: format!("job-{tenant}"),
        uid: 1000,
        user: "ada".into(),
        group: None,
        received_us,
        waited_us: 0.0,
        memory: 1 << 30,
        swapped: 0,
        moves: 0,
    }
}

const fn at(second: u64) -> Micros {
    Micros(second * 1_000_000)
}

#[test]
fn tenant_has_shares_of_the_time_between_looks() {
    let mut history = History::default();
    for second in 0..=20 {
        let busy = Look {
            waited_us: 500_000.0 * second as f64,
            moves: second / 10,
            ..look(1, 250_000.0 * second as f64)
        };
        history.record(at(second), &[], vec![busy]);
    }
    let answer = history.answer(Span::FiveMinutes, 1_700_000_000);
    let own = &answer.tenants[0];
    assert_eq!(own.received[300 - 20..], [Some(0.25); 20]);
    assert_eq!(own.waiting[299], Some(0.5));
    assert_eq!(own.moves[299], Some(1.0));
    // Its first look says nothing of the time before, and before that there was none.
    assert_eq!(own.received[300 - 21], None);
    assert_eq!(
        (own.memory[300 - 21], own.memory[300 - 22]),
        (Some((1u64 << 30) as f32), None)
    );
    let hour = history.answer(Span::Hour, 1_700_000_000);
    assert_eq!(hour.tenants[0].received[357..], [Some(0.25); 3]);
}

#[test]
fn ended_tenant_stays_for_an_hour() {
    let mut history = History::default();
    history.record(at(5), &[], vec![look(1, 0.0)]);
    history.record(at(6), &[], vec![]);
    assert_eq!(history.answer(Span::Hour, 0).tenants[0].ended_s_ago, None);
    history.record(at(65), &[], vec![]);
    assert_eq!(
        history.answer(Span::Hour, 0).tenants[0].ended_s_ago,
        Some(60)
    );
    history.record(at(3604), &[], vec![]);
    assert_eq!(history.answer(Span::Hour, 0).tenants.len(), 1);
    history.record(at(3605), &[], vec![]);
    assert_eq!(history.answer(Span::Hour, 0).tenants.len(), 0);
}

#[test]
fn full_history_drops_the_tenant_that_ended_first() {
    let mut history = History::default();
    let all = |from: u64, to| (from..to).map(|it| look(it, 0.0)).collect::<Vec<_>>();
    let most = MAX_TENANTS as u64;
    history.record(at(1), &[], all(0, most));
    history.record(at(2), &[], all(0, most + 3));
    assert_eq!(history.answer(Span::Hour, 0).left_out, 3, "all live");
    history.record(at(10), &[], all(1, most));
    history.record(at(11), &[], all(1, most + 2));
    let answer = history.answer(Span::Hour, 0);
    assert_eq!((answer.tenants.len(), answer.left_out), (MAX_TENANTS, 1));
    assert!(answer.tenants.iter().all(|it| it.id != 0));
}

#[test]
fn unknown_readings_are_gaps() {
    let mut history = History::default();
    let known = types::Readings {
        temperature_c: Some(60),
        ..Default::default()
    };
    history.record(at(1), &[("GPU-0".into(), known)], vec![]);
    history.record(
        at(2),
        &[("GPU-0".into(), types::Readings::default())],
        vec![],
    );
    let answer = history.answer(Span::FiveMinutes, 0);
    let device = &answer.devices[0];
    assert_eq!(device.temperature_c[298..], [Some(60.0), None]);
    assert_eq!(device.power_w[298..], [None, None]);
    // The mean is of what is known.
    let answer = history.answer(Span::Hour, 0);
    assert_eq!(answer.devices[0].temperature_c[359], Some(60.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn ring_keeps_the_last_steps(steps in proptest::collection::vec(0..2000u64, 1..200)) {
        let mut ring: Samples<1> = Samples::new(Span::FiveMinutes);
        let mut model = BTreeMap::new();
        for (n, step) in steps.iter().enumerate() {
            if model.last_key_value().is_none_or(|(last, _)| last <= step) {
                model.insert(*step, n as f32);
            }
            ring.put(*step, [n as f32]);
            prop_assert!(ring.samples.len() <= Span::FiveMinutes.samples());
        }
        let last = *model.last_key_value().unwrap().0;
        for step in 0..2100 {
            let kept = step + 300 > last;
            let expected = model.get(&step).filter(|_| kept).copied();
            let got = Some(ring.get(step)[0]).filter(|it| !it.is_nan());
            prop_assert_eq!(got, expected, "step {}", step);
        }
    }

    #[test]
    fn ten_seconds_have_the_mean_of_their_seconds(values in proptest::collection::vec(0.0..1.0f32, 1..100)) {
        let mut series: Series<1> = Series::new();
        for (second, value) in values.iter().enumerate() {
            series.put(second as u64, [*value]);
        }
        for (step, of) in values.chunks(10).enumerate() {
            let mean = of.iter().sum::<f32>() / of.len() as f32;
            prop_assert!((series.coarse.get(step as u64)[0] - mean).abs() < 1e-5);
        }
    }

    #[test]
    fn memory_is_bounded_in_any_course(looks in proptest::collection::vec((0..4000u64, 0..400u64, 0..300u64), 1..20)) {
        let (mut history, mut now) = (History::default(), 0);
        for (wait, first, count) in looks {
            now += wait;
            let devices: Vec<_> = (first..first + count).map(|it| (it.to_string(), types::Readings::default())).collect();
            let tenants = (first..first + count).map(|it| look(it, 0.0)).collect();
            history.record(at(now), &devices, tenants);
            prop_assert!(history.tenants.len() <= MAX_TENANTS && history.devices.len() <= MAX_DEVICES);
        }
        for span in [Span::FiveMinutes, Span::Hour] {
            let answer = history.answer(span, 0);
            prop_assert!(answer.tenants.iter().all(|it| it.received.len() == span.samples()));
        }
    }
}
