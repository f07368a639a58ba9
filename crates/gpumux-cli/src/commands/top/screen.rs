//! The picture of [`View`]; it fits 80 columns and 24 lines.

use gpumux_daemon::api::types::{Device, DeviceMemory, MemoryShare, Tenant, TenantState};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize},
    text::{Line, Span},
    widgets::{Paragraph, Wrap},
};

use super::view::{PAST, Row, View};

/// Columns of the bar of one row.
const BAR: usize = 16;
/// Lines for the chosen tenant's explanation.
const WHY: u16 = 7;
/// Columns of a device's memory.
const MAP: usize = 48;
/// With more devices there is no room for the memory of each.
const MAPS: usize = 4;
const KEYS: &str =
    " ↑↓ choose  l latency  s standard  b batch  + - weight  z sleep  w wake  q quit";
/// Eighths of a column.
const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

pub(super) fn draw(frame: &mut Frame<'_>, view: &View) {
    let Some(answer) = &view.answer else {
        let text = if view.message.is_empty() {
            "asking the daemon …"
        } else {
            &view.message
        };
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), frame.area());
        return;
    };
    let devices = &answer.status.devices;
    let used = |it: &&DeviceMemory| it.tenants.iter().any(|it| it.in_use > 0);
    let maps = answer.memory.iter().filter(used);
    let maps: Vec<_> = maps.filter(|_| devices.len() <= MAPS).collect();
    let above = devices.len().min(8) + maps.len();
    let [head, list, table, why, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(above as u16),
        Constraint::Min(3),
        Constraint::Length(WHY),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let status = &answer.status;
    let text = format!(
        " gpumux {}   policy {}   {} tenants, {} processes",
        status.version, status.policy, status.tenants, status.sessions
    );
    frame.render_widget(Line::from(text).reversed(), head);
    let lines: Vec<Line<'_>> = devices
        .iter()
        .flat_map(|device| {
            let own = maps.iter().filter(|it| it.device == device.uuid);
            std::iter::once(describe(device, view)).chain(own.map(|it| map(it)))
        })
        .collect();
    frame.render_widget(Paragraph::new(lines), list);
    tenants(frame, table, view, &answer.tenants);
    let (text, style) = match view.message.is_empty() {
        true => {
            let chosen = view.chosen(&answer.tenants);
            let memory = chosen.map_or_else(String::new, memory);
            (answer.why.clone() + &memory, Style::default())
        }
        false => (view.message.clone(), Style::default().fg(Color::Red)),
    };
    frame.render_widget(
        Paragraph::new(text).style(style).wrap(Wrap { trim: true }),
        why,
    );
    frame.render_widget(Line::from(KEYS).reversed(), keys);
}

fn describe(device: &Device, view: &View) -> Line<'static> {
    let rows = view.rows.values().flatten();
    let used: f64 = rows
        .filter(|row| row.device == device.uuid)
        .map(|row| row.received)
        .fold(0.0, |sum, part| sum + part);
    // The emulated device's own name says it.
    let kind = match device.emulated && !device.name.contains("emulated") {
        true => " (emulated)",
        false => "",
    };
    let text = format!(
        " {:12} {}{kind}   {:.0}% used   {} domains",
        short(&device.uuid),
        device.name,
        used * 100.0,
        device.domains
    );
    match device.state.as_str() {
        "ok" => Line::from(text),
        trouble => Line::from(format!("{text}   {trouble}")).red(),
    }
}

/// Who has a device's memory: each tenant's part is as wide as it is large and begins with its name.
fn map(memory: &DeviceMemory) -> Line<'static> {
    const COLORS: [Color; 5] = [
        Color::Green,
        Color::Cyan,
        Color::Yellow,
        Color::Magenta,
        Color::Blue,
    ];
    let columns = |bytes: u64| {
        let part = bytes as f64 / memory.total.max(1) as f64;
        (part * MAP as f64).round() as usize
    };
    let mut spans = vec![Span::raw("   memory     ")];
    let occupied = columns(memory.occupied).min(MAP);
    spans.push(Span::raw("░".repeat(occupied)));
    let mut left = MAP - occupied;
    for (n, share) in memory.tenants.iter().enumerate() {
        let wide = columns(share.in_use).min(left);
        left -= wide;
        if wide > 0 {
            let name = format!("{:█<wide$}", cut(&share.tenant, wide));
            let style = Style::default().fg(COLORS[n % COLORS.len()]);
            spans.push(Span::styled(name, style));
        }
    }
    spans.push(Span::raw("·".repeat(left)));
    let free = crate::output::bytes(memory.free);
    spans.push(Span::raw(format!(" {free} free")));
    Line::from(spans)
}

fn tenants(frame: &mut Frame<'_>, area: Rect, view: &View, tenants: &[Tenant]) {
    let chosen = view.chosen(tenants).map(|tenant| &tenant.name);
    let timeline = usize::from(area.width).saturating_sub(66).min(PAST);
    let head = format!(
        " {:14} {:8} {:7} {:BAR$} {:>4} {:>4} {:>4} LATELY",
        "NAME", "CLASS", "STATE", "RECEIVED|PROMISE", "RECV", "PROM", "WAIT"
    );
    let mut lines = Vec::new();
    let mut place = 0;
    for tenant in tenants {
        for (n, row) in view
            .rows
            .get(&tenant.name)
            .into_iter()
            .flatten()
            .enumerate()
        {
            let is_chosen = chosen == Some(&tenant.name);
            if is_chosen && n == 0 {
                place = lines.len();
            }
            let style = match is_chosen {
                true => Style::default().add_modifier(Modifier::BOLD),
                false => Style::default(),
            };
            let mark = if is_chosen { '>' } else { ' ' };
            let (name, class) = match n {
                0 => (cut(&tenant.name, 14), tenant.class.name()),
                _ => (cut(&short(&row.device), 14), ""),
            };
            let state = match (n, tenant.asleep) {
                (0, true) => "asleep",
                (0, false) => state(tenant.state),
                _ => "",
            };
            let mut spans = vec![Span::styled(
                format!("{mark}{name:14} {class:8} {state:7} "),
                style,
            )];
            spans.push(Span::styled(bar(row), Style::default().fg(Color::Green)));
            spans.push(Span::raw(numbers(row)));
            let past = view.past.get(&(tenant.name.clone(), row.device.clone()));
            let past = past.into_iter().flatten().rev().take(timeline).copied();
            let past: Vec<f64> = past.collect();
            let picture: String = past.into_iter().rev().map(level).collect();
            spans.push(Span::styled(picture, Style::default().fg(Color::Cyan)));
            lines.push(Line::from(spans));
        }
    }
    if lines.is_empty() {
        lines.push(Line::from(
            " No tenants: start a program with `gpumux run -- program`.",
        ));
    }
    // The chosen one stays in sight.
    let room = usize::from(area.height.saturating_sub(1)).max(1);
    let first = (place + 1).saturating_sub(room);
    let mut shown = vec![Line::from(head).style(Style::default().add_modifier(Modifier::DIM))];
    shown.extend(lines.into_iter().skip(first));
    frame.render_widget(Paragraph::new(shown), area);
}

/// A sentence for each device of whose memory the tenant has some.
fn memory(tenant: &Tenant) -> String {
    let bytes = crate::output::bytes;
    let has = |it: &&MemoryShare| it.in_use + it.swapped > 0;
    let say = |it: &MemoryShare| {
        let limit = it
            .limit
            .map(|limit| format!(" of at most {}", bytes(limit)));
        format!(
            " Memory: {}{} on {}, {} on the host.",
            bytes(it.in_use),
            limit.unwrap_or_default(),
            short(&it.device),
            bytes(it.swapped)
        )
    };
    tenant.memory.iter().filter(has).map(say).collect()
}

/// Filled as far as it receives, `|` where its promise ends.
fn bar(row: &Row) -> String {
    let at = |share: f64| (share * BAR as f64).round() as usize;
    let (filled, promised) = (at(row.received), at(row.promised).min(BAR - 1));
    (0..BAR)
        .map(|column| match column {
            _ if row.promised > 0.0 && column == promised => '|',
            _ if column < filled => '█',
            _ => '·',
        })
        .collect()
}

fn numbers(row: &Row) -> String {
    let percent = |share: f64| format!("{:.0}%", share * 100.0);
    format!(
        " {:>4} {:>4} {:>4} ",
        percent(row.received),
        percent(row.promised),
        percent(row.waiting)
    )
}

fn level(share: f64) -> char {
    LEVELS[((share * 8.0).round() as usize).min(8)]
}

fn state(state: TenantState) -> &'static str {
    match state {
        TenantState::Waiting => "waiting",
        TenantState::Running => "running",
        TenantState::Idle => "idle",
        TenantState::Faulty => "FAULTY",
    }
}

/// As much of a UUID as tells devices apart.
fn short(uuid: &str) -> String {
    uuid.splitn(3, '-').take(2).collect::<Vec<_>>().join("-")
}

fn cut(name: &str, columns: usize) -> String {
    match name.chars().count() > columns {
        true => name.chars().take(columns - 1).chain(['…']).collect(),
        false => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpumux_core::{Class, Demand};
    use gpumux_daemon::api::types::{Domain, HostMemory, Spec, Status};
    use ratatui::{
        Terminal,
        backend::TestBackend,
        crossterm::event::{KeyCode, KeyEvent},
    };

    use super::*;
    use crate::commands::top::view::{Answer, Key};

    fn domain(id: u64, promised_share: f64, received_us: u64, waited_us: u64) -> Domain {
        Domain {
            id,
            group: None,
            device: "GPU-5efc3a7e-70d7-750a".into(),
            pid: 7,
            timeslice_us: 1,
            frozen: false,
            demand: Demand::Busy,
            promised_share,
            received_share: 0.5,
            measured_share: None,
            received_us,
            runnable_us: received_us + waited_us,
            waited_us,
            preemptions: 1,
            freezes: 1,
            thaws: 1,
            slice_changes: 1,
            tampered: 0,
            reason: "has its turn".into(),
            error: None,
        }
    }

    fn tenant(name: &str, class: Class, domains: Vec<Domain>) -> Tenant {
        let state = match domains.is_empty() {
            true => TenantState::Waiting,
            false => TenantState::Running,
        };
        Tenant {
            placement: Default::default(),
            name: name.into(),
            class,
            spec: Spec {
                class,
                ..Spec::default()
            },
            uid: 0,
            pids: vec![7],
            devices: domains.iter().map(|domain| domain.device.clone()).collect(),
            domains,
            since: 0,
            state,
            work: 0,
            hints: Default::default(),
            requests: Default::default(),
            memory: Vec::new(),
            asleep: false,
            waits_for_memory: false,
            unlisted_calls: Vec::new(),
            moves: Default::default(),
        }
    }

    /// After `looks` at half a second: web gets a quarter, training the rest.
    fn view(looks: u64, extra: usize) -> View {
        let mut view = View::default();
        for look in 1..=looks {
            let mut tenants = vec![
                tenant(
                    "web",
                    Class::Latency,
                    vec![domain(1, 0.75, look * 125_000, 0)],
                ),
                tenant(
                    "a-training-with-a-long-name",
                    Class::Batch,
                    vec![domain(2, 0.25, look * 375_000, look * 125_000)],
                ),
                tenant("notebook", Class::Standard, vec![]),
            ];
            tenants.extend((0..extra).map(|n| tenant(&format!("job-{n}"), Class::Batch, vec![])));
            let device = Device {
                uuid: "GPU-5efc3a7e-70d7-750a".into(),
                name: "H100".into(),
                emulated: true,
                driver: "580".into(),
                memory_bytes: 1,
                memory_guaranteeable: 0,
                context_bytes: 0,
                hardware: Default::default(),
                policy: "priority".into(),
                state: "ok".into(),
                domains: 2,
                levers: vec![],
            };
            let status = Status {
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
                tenants: tenants.len(),
                sessions: 2,
                devices: vec![device],
                scheduler: Default::default(),
            };
            let why =
                "web is a latency tenant: it takes the device at once when it has work. ".repeat(5);
            view.update(
                Answer {
                    status,
                    tenants,
                    memory: Vec::new(),
                    why,
                },
                Duration::from_millis(500 * look),
            );
        }
        view
    }

    fn picture(view: &View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn it_fits_80_by_24() {
        insta::assert_snapshot!("three_tenants", picture(&view(6, 0)));
    }

    #[test]
    fn a_sleeper_is_seen_and_woken() {
        let mut view = view(2, 0);
        let answer = view.answer.as_mut().unwrap();
        answer.tenants[0].asleep = true;
        answer.tenants[0].memory = vec![MemoryShare {
            device: "GPU-5efc3a7e-70d7-750a".into(),
            tenant: "web".into(),
            guaranteed: 0,
            limit: Some(8 << 30),
            in_use: 1 << 30,
            borrowed: 1 << 30,
            pinned: 0,
            swapped: 3 << 30,
        }];
        answer.why = "web sleeps.".into();
        let picture = picture(&view);
        for text in [
            ">web            latency  asleep",
            "web sleeps. Memory: 1.0 GiB of at most 8.0 GiB on GPU-5efc3a7e, 3.0 GiB on the",
        ] {
            assert!(picture.contains(text), "{picture}");
        }
        let key = |view: &mut View, key| view.key(KeyEvent::from(KeyCode::Char(key)));
        assert!(matches!(key(&mut view, 'w'), Key::Wake(name) if name == "web"));
        assert!(matches!(key(&mut view, 'z'), Key::Sleep(name) if name == "web"));
    }

    #[test]
    fn the_memory_of_a_device_is_a_map() {
        let mut view = view(2, 0);
        let share = |tenant: &str, in_use| MemoryShare {
            device: "GPU-5efc3a7e-70d7-750a".into(),
            tenant: tenant.into(),
            guaranteed: 0,
            limit: None,
            in_use,
            borrowed: 0,
            pinned: 0,
            swapped: 0,
        };
        view.answer.as_mut().unwrap().memory = vec![DeviceMemory {
            device: "GPU-5efc3a7e-70d7-750a".into(),
            total: 48 << 30,
            occupied: 2 << 30,
            free: 18 << 30,
            tenants: vec![
                share("web", 8 << 30),
                share("sleeper", 0),
                share("a-training-with-a-long-name", 20 << 30),
            ],
        }];
        let picture = picture(&view);
        let map = "   memory     ░░web█████a-training-with-a-l…·················· 18.0 GiB free";
        assert!(picture.contains(map), "{picture}");
    }

    #[test]
    fn without_an_answer_it_says_why() {
        let mut view = View::default();
        view.say("no daemon".into());
        insta::assert_snapshot!("no_answer", picture(&view));
        assert!(matches!(
            view.key(KeyEvent::from(KeyCode::Char('q'))),
            Key::Quit
        ));
    }

    #[test]
    fn keys_change_the_chosen_tenant() {
        let mut view = view(2, 30);
        let Key::Change(name, change) = view.key(KeyEvent::from(KeyCode::Char('+'))) else {
            panic!("no change");
        };
        assert_eq!((name.as_str(), change.weight), ("web", Some(2.0)));
        for _ in 0..40 {
            view.key(KeyEvent::from(KeyCode::Down));
        }
        let Key::Change(name, change) = view.key(KeyEvent::from(KeyCode::Char('l'))) else {
            panic!("no change");
        };
        assert_eq!(
            (name.as_str(), change.class),
            ("job-29", Some(Class::Latency))
        );
        let picture = picture(&view);
        assert!(picture.contains(">job-29"), "{picture}");
        view.say("refused".into());
        assert!(self::picture(&view).contains("refused"));
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
}
