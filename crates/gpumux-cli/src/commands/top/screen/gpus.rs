//! GPUs: a line about each above the tenants, and a page with all about them.

use gpumux_daemon::api::types::{Device, DeviceMemory};
use ratatui::{
    style::{Color, Style, Stylize},
    text::{Line, Span},
};

use super::{
    super::view::{Answer, View},
    text::{bar, title},
};
use crate::output::{bytes, cut, percent};

/// Columns before a bar.
const LABEL: usize = 17;
const COLORS: [Color; 5] = [
    Color::Green,
    Color::Cyan,
    Color::Yellow,
    Color::Magenta,
    Color::Blue,
];

const UNKNOWN: &str = "not reported";

fn temperature(device: &Device) -> Option<String> {
    Some(format!("{} °C", device.readings.temperature_c?))
}

fn power(device: &Device) -> Option<String> {
    let readings = &device.readings;
    let limit = readings
        .power_limit_w
        .map(|limit| format!(" of {limit:.0}"));
    Some(format!(
        "{:.0}{} W",
        readings.power_w?,
        limit.unwrap_or_default()
    ))
}

fn memory(device: &Device) -> Option<String> {
    let used = device.readings.memory_used?;
    Some(format!("{} of {}", bytes(used), bytes(device.memory_bytes)))
}

/// What processes use that gpumux does not control, if there are some.
fn foreign(device: &Device) -> Option<String> {
    let all = &device.foreign;
    let used = all.iter().map(|it| it.used_share).sum::<Option<f64>>();
    let used = used.map_or_else(|| "use unknown".into(), percent);
    (!all.is_empty()).then(|| format!("{} foreign ({used})", all.len()))
}

/// As much about a GPU as fits in a line, what matters most first.
pub(super) fn line(width: u16, view: &View, answer: &Answer, device: &Device) -> Line<'static> {
    let used = match device.readings.utilization {
        Some(used) => format!("{} used", percent(used)),
        None => {
            let received: f64 = view.received(&device.uuid).iter().map(|it| it.1).sum();
            format!("{} received", percent(received.min(1.0)))
        }
    };
    let mut text = format!(" {}", title(answer, &device.uuid));
    let trouble = (device.state != "ok").then(|| device.state.clone());
    let parts = [
        trouble,
        Some(used),
        foreign(device),
        temperature(device),
        power(device),
        memory(device),
        Some(device.name.clone()),
    ];
    for part in parts.into_iter().flatten().filter(|it| !it.is_empty()) {
        if text.chars().count() + 2 + part.chars().count() <= usize::from(width) {
            text += &format!("  {part}");
        }
    }
    match device.state.as_str() {
        "ok" => Line::from(text),
        _ => Line::from(text).red(),
    }
}

/// A GPU's memory: each tenant's part is as wide as it is large and begins with its name.
pub(super) fn map(width: u16, memory: &DeviceMemory) -> Line<'static> {
    let free = format!(" {} free", bytes(memory.free));
    let columns = usize::from(width).saturating_sub(LABEL + free.chars().count() + 1);
    let wide =
        |bytes: u64| (bytes as f64 / memory.total.max(1) as f64 * columns as f64).round() as usize;
    let occupied = wide(memory.occupied).min(columns);
    let mut spans = vec![
        Span::raw(format!("{:LABEL$}", "   memory")),
        Span::raw("░".repeat(occupied)),
    ];
    let mut left = columns - occupied;
    for (n, share) in memory.tenants.iter().enumerate() {
        let wide = wide(share.in_use).min(left);
        left -= wide;
        if wide > 0 {
            // Less than that tells no tenants apart.
            let name = if wide < 4 {
                String::new()
            } else {
                cut(&share.tenant, wide)
            };
            let name = format!("{name:█<wide$}");
            spans.push(Span::styled(
                name,
                Style::default().fg(COLORS[n % COLORS.len()]),
            ));
        }
    }
    spans.push(Span::raw("·".repeat(left)));
    spans.push(Span::raw(free));
    Line::from(spans)
}

/// The page: all about all GPUs.
pub(super) fn all(width: u16, view: &View, answer: &Answer) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if answer.status.devices.is_empty() {
        lines.push(Line::from(
            " No GPU is known: the first program that uses one shows it.",
        ));
    }
    for device in &answer.status.devices {
        let head = format!(
            " {}  {}  {}",
            title(answer, &device.uuid),
            device.name,
            device.state
        );
        let head = Line::from(head.trim_end().to_owned()).bold();
        lines.push(if device.state == "ok" {
            head
        } else {
            head.red()
        });
        let readings = &device.readings;
        let measured = |label: &str, part: Option<f64>, text: Option<String>| {
            let text = text.unwrap_or_else(|| UNKNOWN.into());
            let columns = usize::from(width).saturating_sub(LABEL + 22).clamp(8, 40);
            let picture = part.map(|part| bar(columns, part, None) + "  ");
            Line::from(vec![
                Span::raw(format!("{:LABEL$}", format!("   {label}"))),
                Span::styled(
                    picture.unwrap_or_default(),
                    Style::default().fg(Color::Green),
                ),
                Span::raw(text),
            ])
        };
        let of_limit = readings
            .power_w
            .zip(readings.power_limit_w)
            .map(|(power, limit)| power / limit);
        let of_memory = readings
            .memory_used
            .map(|used| used as f64 / device.memory_bytes.max(1) as f64);
        lines.push(measured(
            "utilization",
            readings.utilization,
            readings.utilization.map(percent),
        ));
        lines.push(measured("temperature", None, temperature(device)));
        lines.push(measured("power", of_limit, power(device)));
        lines.push(measured("memory in use", of_memory, memory(device)));
        let known = answer.memory.iter().find(|it| it.device == device.uuid);
        lines.extend(known.map(|it| map(width, it)));
        let shares = view.received(&device.uuid);
        // Where there are many tenants, most receive nothing at a moment.
        let shares: Vec<String> = shares
            .iter()
            .filter(|(_, part)| *part >= 0.005)
            .map(|(names, part)| match names.as_slice() {
                [name] => format!("{name} {}", percent(*part)),
                all => format!("{} together {}", all.join(", "), percent(*part)),
            })
            .collect();
        let tenants = if shares.is_empty() {
            "none".into()
        } else {
            shares.join(", ")
        };
        lines.push(Line::from(format!("{:LABEL$}{tenants}", "   received by")));
        if !device.foreign.is_empty() {
            let all: Vec<String> = device.foreign.iter().map(ToString::to_string).collect();
            let all = all.join(", ");
            lines.push(Line::from(format!("{:LABEL$}{all}", "   foreign")));
        }
        let groups = format!("{}, {} channel groups", device.policy, device.domains);
        for (label, text) in [("policy", &groups), ("UUID", &device.uuid)] {
            lines.push(Line::from(format!("{:LABEL$}{text}", format!("   {label}"))).dim());
        }
        lines.push(Line::default());
    }
    lines
}
