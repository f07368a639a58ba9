mod changes;

use std::time::Duration;

use gpumux_core::{Class, Demand};
use gpumux_daemon::api::types::{
    Device, DeviceMemory, Domain, History, HostMemory, MemoryShare, Readings, SpecChange, Status,
    Tenant, TenantHistory, TenantSpec, TenantState,
};
use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
};

use super::{
    keys::{Action, HELP},
    screen::draw,
    view::{Answer, Input, Order, Page, View, What},
};

const UUID: &str = "GPU-5efc3a7e-70d7-750a";
const GIB: u64 = 1 << 30;

fn domain(id: u64, entitled_share: f64, received_us: u64, waited_us: u64) -> Domain {
    Domain {
        id,
        device: UUID.into(),
        pid: 7,
        demand: Demand::Busy,
        entitled_share,
        received_share: 0.5,
        received_us,
        waited_us,
        ..Domain::default()
    }
}

fn memory(tenant: &str, in_use: u64, swapped: u64) -> MemoryShare {
    MemoryShare {
        device: UUID.into(),
        tenant: tenant.into(),
        guaranteed: 0,
        limit: Some(8 * GIB),
        in_use,
        above_guarantee: in_use,
        pinned: 0,
        swapped,
        above_limit: 0,
    }
}

fn tenant(name: &str, class: Class, domains: Vec<Domain>) -> Tenant {
    let state = match domains.is_empty() {
        true => TenantState::Starting,
        false => TenantState::Running,
    };
    Tenant {
        name: name.into(),
        class,
        spec: TenantSpec {
            class,
            ..TenantSpec::default()
        },
        pids: vec![7],
        memory: match domains.is_empty() {
            true => vec![],
            false => vec![memory(name, 4 * GIB, 0)],
        },
        devices: domains.iter().map(|domain| domain.device.clone()).collect(),
        domains,
        state,
        ..Tenant::default()
    }
}

fn status(tenants: usize, gpus: u32) -> Status {
    let device = |index| Device {
        uuid: if index == 0 {
            UUID.into()
        } else {
            format!("GPU-{index}")
        },
        index: Some(index),
        readings: Readings {
            utilization: Some(0.81),
            temperature_c: Some(64),
            power_w: Some(580.4),
            power_limit_w: Some(700.0),
            memory_used: Some(9 * GIB),
        },
        name: "NVIDIA H100 80GB HBM3 (emulated)".into(),
        emulated: true,
        driver: "580".into(),
        memory_bytes: 80 * GIB,
        memory_guaranteeable: 0,
        context_bytes: 0,
        hardware: Default::default(),
        policy: "priority".into(),
        state: "ok".into(),
        domains: 2,
        foreign: Vec::new(),
        controls: vec![],
    };
    Status {
        faults: Vec::new(),
        host_memory: HostMemory::default(),
        version: "1.2.3".into(),
        protocol: 1,
        pid: 1,
        uptime_s: 1,
        runtime_dir: String::new(),
        session_socket: String::new(),
        listen: None,
        policy: "priority".into(),
        tenants,
        sessions: 2,
        devices: (0..gpus).map(device).collect(),
        scheduler: Default::default(),
    }
}

/// After `looks` at half a second: web gets a quarter, training the rest.
fn view(looks: u64, extra: usize) -> View {
    let mut view = View::default();
    for look in 1..=looks {
        let web = vec![domain(1, 0.75, look * 125_000, 0)];
        let training = vec![domain(2, 0.25, look * 375_000, look * 125_000)];
        let mut tenants = vec![
            tenant("web", Class::Latency, web),
            tenant("a-training-with-a-long-name", Class::Batch, training),
            tenant("notebook", Class::Standard, vec![]),
        ];
        tenants.extend((0..extra).map(|n| tenant(&format!("job-{n}"), Class::Batch, vec![])));
        let answer = Answer {
            status: status(tenants.len(), 1),
            memory: vec![DeviceMemory {
                device: UUID.into(),
                total: 80 * GIB,
                occupied: 2 * GIB,
                free: 70 * GIB,
                tenants: vec![
                    memory("web", 4 * GIB, 0),
                    memory("a-training-with-a-long-name", 4 * GIB, 0),
                ],
            }],
            why: "entitled  75% of GPU 0\nreceived  25%\nwhy       it has no more work\n\
                  rest      a-training-with-a-long-name 75%\nto do     nothing"
                .into(),
            tenants,
        };
        view.update(answer, Duration::from_millis(500 * look));
    }
    view
}

fn picture(view: &View, columns: u16, lines: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
    terminal.draw(|frame| draw(frame, view)).unwrap();
    terminal.backend().to_string()
}

fn press(view: &mut View, key: KeyCode) -> Action {
    view.key(KeyEvent::from(key))
}

fn type_in(view: &mut View, keys: &str) -> Action {
    let pressed = keys.chars().map(|key| press(view, KeyCode::Char(key)));
    pressed.last().unwrap()
}

#[test]
fn tenants_fit_50_80_and_120_columns() {
    let view = view(6, 1);
    for columns in [50, 80, 120] {
        insta::assert_snapshot!(format!("tenants_{columns}"), picture(&view, columns, 24));
    }
}

#[test]
fn gpus_fit_50_80_and_120_columns() {
    let mut view = view(6, 0);
    press(&mut view, KeyCode::Tab);
    for columns in [50, 80, 120] {
        insta::assert_snapshot!(format!("gpus_{columns}"), picture(&view, columns, 24));
    }
}

#[test]
fn help_and_detail_fit_50_and_80_columns() {
    let mut view = view(6, 0);
    type_in(&mut view, "?");
    for columns in [50, 80] {
        let help = picture(&view, columns, 24);
        for (key, what) in HELP {
            assert!(help.contains(key) && help.contains(what), "{what}: {help}");
        }
        insta::assert_snapshot!(format!("help_{columns}"), help);
    }
    press(&mut view, KeyCode::Esc);
    press(&mut view, KeyCode::Enter);
    insta::assert_snapshot!("detail_50", picture(&view, 50, 24));
}

#[test]
fn long_explanation_is_whole_on_its_own_page() {
    let mut view = view(2, 0);
    view.answer.as_mut().unwrap().why =
        (0..30).map(|n| format!("sentence {n} of them. ")).collect();
    let short = picture(&view, 80, 24);
    assert!(
        short.contains("(Enter: all of it)") && !short.contains("sentence 29"),
        "{short}"
    );
    press(&mut view, KeyCode::Enter);
    assert!(picture(&view, 80, 24).contains("sentence 29"));
}

#[test]
fn filter_leaves_names_classes_and_states() {
    let names = |view: &View| {
        view.visible()
            .iter()
            .map(|it| it.name.clone())
            .collect::<Vec<_>>()
    };
    let mut view = view(2, 12);
    type_in(&mut view, "/JOB-1");
    assert_eq!(names(&view), ["job-1", "job-10", "job-11"]);
    assert!(picture(&view, 50, 24).contains("Filter: JOB-1"));
    press(&mut view, KeyCode::Enter);
    assert_eq!(view.input, Input::Commands);
    // The chosen one is among those that are shown.
    assert_eq!(view.chosen().unwrap().name, "job-1");
    assert!(picture(&view, 80, 24).contains("filter: JOB-1"));
    press(&mut view, KeyCode::Esc);
    type_in(&mut view, "/latency");
    assert_eq!(names(&view), ["web"]);
    press(&mut view, KeyCode::Esc);
    type_in(&mut view, "/starting");
    assert_eq!(names(&view).len(), 13);
    type_in(&mut view, "?");
    assert!(picture(&view, 80, 24).contains("No tenant matches `starting?`"));
}

#[test]
fn tenants_are_sorted_by_what_was_chosen() {
    let names = |view: &View| {
        view.visible()
            .iter()
            .map(|it| it.name.clone())
            .collect::<Vec<_>>()
    };
    let mut view = view(3, 0);
    let (web, training, notebook) = ("web", "a-training-with-a-long-name", "notebook");
    for (key, order, expected) in [
        ('N', Order::Name, [training, notebook, web]),
        ('R', Order::Received, [training, web, notebook]),
        ('W', Order::Waiting, [training, web, notebook]),
        ('M', Order::Memory, [web, training, notebook]),
        ('A', Order::Age, [web, training, notebook]),
    ] {
        press(&mut view, KeyCode::Char(key));
        assert_eq!(
            (view.order, names(&view)),
            (order, expected.map(str::to_owned).into())
        );
    }
}

#[test]
fn chosen_tenant_stays_in_sight_of_many() {
    let mut view = view(2, 60);
    press(&mut view, KeyCode::End);
    assert!(picture(&view, 80, 24).contains(">job-59"));
    press(&mut view, KeyCode::PageUp);
    assert!(picture(&view, 80, 24).contains(">job-49"));
    press(&mut view, KeyCode::Home);
    assert!(picture(&view, 80, 24).contains(">web"));
}

#[test]
fn swapped_tenant_shows_where_its_memory_is() {
    let mut view = view(2, 0);
    let answer = view.answer.as_mut().unwrap();
    answer.tenants[0].state = TenantState::Swapped;
    answer.tenants[0].memory = vec![memory("web", GIB, 3 * GIB)];
    let picture = picture(&view, 80, 24);
    for text in [
        ">web              latency  swapped",
        "Memory on GPU 0: 1.0 GiB of at most 8.0 GiB; on the host: 3.0 GiB.",
    ] {
        assert!(picture.contains(text), "{picture}");
    }
}

#[test]
fn many_gpus_have_a_page_that_scrolls() {
    let mut view = view(2, 0);
    view.answer.as_mut().unwrap().status = status(3, 8);
    assert!(picture(&view, 80, 24).contains("and 4 more: Tab shows all"));
    press(&mut view, KeyCode::Tab);
    assert!(!picture(&view, 80, 24).contains("GPU 7"));
    press(&mut view, KeyCode::End);
    press(&mut view, KeyCode::PageUp);
    assert_eq!(view.page, Page::Gpus);
    assert!(!picture(&view, 80, 24).contains("GPU 0 "));
}

#[test]
fn unknown_readings_are_named_so() {
    let mut view = view(2, 0);
    let device = &mut view.answer.as_mut().unwrap().status.devices[0];
    (device.readings, device.index) = (Readings::default(), None);
    let line = picture(&view, 80, 24);
    assert!(line.contains("GPU-5efc3a7e  100% received"), "{line}");
    press(&mut view, KeyCode::Tab);
    let page = picture(&view, 80, 24);
    assert!(page.contains("temperature   not reported"), "{page}");
}

#[test]
fn lost_daemon_is_plain_and_comes_back() {
    let mut view = View::default();
    view.lose("no daemon".into(), Duration::ZERO);
    assert!(picture(&view, 80, 24).contains("no daemon"));
    let mut view = self::view(2, 0);
    view.lose("no daemon".into(), Duration::from_secs(3));
    let lost = picture(&view, 80, 24);
    assert!(
        lost.contains("OLD NUMBERS: no daemon") && lost.contains(">web"),
        "{lost}"
    );
    let answer = view.answer.take().unwrap();
    view.update(answer, Duration::from_secs(4));
    assert!(!picture(&view, 80, 24).contains("OLD"));
    assert_eq!(press(&mut view, KeyCode::Char('q')), Action::Quit);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(view.key(interrupt), Action::Quit);
}

#[test]
fn messages_stay_for_a_while() {
    let mut view = view(2, 0);
    view.say("refused".into(), true);
    assert!(picture(&view, 80, 24).contains("refused"));
    let answer = view.answer.take().unwrap();
    view.update(answer, Duration::from_secs(60));
    assert!(!picture(&view, 80, 24).contains("refused"));
}

#[test]
fn tenants_of_one_name_are_told_apart_by_user() {
    let mut view = View::default();
    let of_user = |uid, user: &str, received| Tenant {
        uid,
        user: user.into(),
        ..tenant(
            "web",
            Class::Batch,
            vec![domain(uid.into(), 0.5, received, 0)],
        )
    };
    for look in 1..=2 {
        let answer = Answer {
            status: status(2, 1),
            tenants: vec![
                of_user(1000, "ada", look * 100_000),
                of_user(1001, "bob", look * 400_000),
            ],
            memory: vec![],
            why: String::new(),
        };
        view.update(answer, Duration::from_millis(500 * look));
    }
    type_in(&mut view, "j");
    assert!(picture(&view, 80, 24).contains(">bob/web"));
    assert!((view.rows["bob/web"][0].received - 0.8).abs() < 1e-9);
    let Action::Change(change) = type_in(&mut view, "+") else {
        panic!("no change");
    };
    assert_eq!(change.name, "bob/web");
}

#[test]
fn members_of_a_group_count_once() {
    // Of two tenants, one with two processes, beside one outside the group.
    let mut view = View::default();
    for look in 1..=2 {
        let member = |id| Domain {
            group: Some(1),
            ..domain(id, 1.0, look * 200_000, 0)
        };
        let answer = Answer {
            status: status(3, 1),
            tenants: vec![
                tenant("a", Class::Batch, vec![member(1), member(4)]),
                tenant("b", Class::Batch, vec![member(2)]),
                tenant("c", Class::Batch, vec![domain(3, 1.0, look * 250_000, 0)]),
            ],
            memory: vec![],
            why: String::new(),
        };
        view.update(answer, Duration::from_millis(500 * look));
    }
    let received = view.received(UUID);
    let total: f64 = received.iter().map(|it| it.1).sum();
    assert!((total - 0.9).abs() < 1e-9, "{received:?}");
    assert!((view.rows["a"][0].received - 0.4).abs() < 1e-9);
    press(&mut view, KeyCode::Tab);
    let shown = picture(&view, 80, 24);
    assert!(shown.contains("c 50%, a, b together 40%"), "{shown}");
}

#[test]
fn timeline_begins_with_the_daemons_history() {
    let mut view = View::default();
    let mut received = vec![None; 290];
    received.extend(vec![Some(1.0); 10]);
    view.remember(&History {
        now: 0,
        step_s: 1,
        samples: 300,
        devices: vec![],
        tenants: vec![TenantHistory {
            id: 1,
            name: "web".into(),
            uid: 0,
            user: "root".into(),
            device: UUID.into(),
            group: None,
            ended_s_ago: None,
            waiting: vec![None; 300],
            memory: vec![None; 300],
            swapped: vec![None; 300],
            moves: vec![None; 300],
            received,
        }],
        left_out: 0,
    });
    let answer = self::view(1, 0).answer.take().unwrap();
    view.update(answer, Duration::from_secs(1));
    assert!(picture(&view, 120, 24).contains("██████████▄"));
}

/// What it costs to look and to draw at 2 Hz with 32 tenants, without the way to the daemon.
#[test]
fn drawing_costs_little() {
    use rustix::time::{ClockId, clock_gettime};
    let cpu = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    let before = cpu();
    let view = view(10, 29);
    for _ in 0..10 {
        terminal.draw(|frame| draw(frame, &view)).unwrap();
    }
    // Ten looks are five seconds; even unoptimised this is far below 3%.
    let part = (cpu() - before) / 5.0;
    assert!(part < 0.03, "{part}");
}
