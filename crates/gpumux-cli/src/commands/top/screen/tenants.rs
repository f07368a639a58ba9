//! The tenants, below a line about each GPU and above why the chosen one gets what it gets.

use gpumux_daemon::api::types::{MemoryShare, Tenant};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize},
    text::{Line, Span},
    widgets::{Paragraph, Wrap},
};

use super::{
    super::view::{Answer, Order, Row, View},
    gpus,
    text::{bar, lines, title},
};
use crate::output::{bytes, cut, percent};

/// More GPUs than that are on their own page.
const GPUS: usize = 4;
/// Eighths of a column.
const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Columns of the table on a screen of some width.
struct Columns {
    name: usize,
    class: bool,
    gpu: bool,
    bar: usize,
    memory: bool,
    /// Of the last seconds.
    lately: usize,
}

impl Columns {
    fn of(width: u16) -> Self {
        let width = usize::from(width);
        Self {
            name: match width {
                ..72 => 12,
                72..100 => 16,
                _ => 24,
            },
            class: width >= 72,
            gpu: width >= 100,
            bar: if width >= 72 { 14 } else { 9 },
            memory: width >= 80,
            lately: width.saturating_sub(100),
        }
    }

    /// The head; the column that the tenants are sorted by is marked.
    fn head(&self, order: Order) -> Line<'static> {
        let mark = |own, text: &str| match order == own {
            true => format!("{text}▾"),
            false => text.to_owned(),
        };
        let columns = self.name;
        let mut text = format!(" {:columns$} ", mark(Order::Name, "NAME"));
        if self.class {
            text += "CLASS    ";
        }
        text += "STATE    ";
        if self.gpu {
            text += "GPU   ";
        }
        let bar = if self.bar >= 14 {
            "RECEIVED|SHARE"
        } else {
            "RECEIVED"
        };
        text += &format!(
            "{:bar_columns$} {:>5} {:>5} {:>5}",
            bar,
            mark(Order::Received, "RECV"),
            "SHARE",
            mark(Order::Waiting, "WAIT"),
            bar_columns = self.bar,
        );
        if self.memory {
            text += &format!(" {:>9}", mark(Order::Memory, "MEMORY"));
        }
        if self.lately > 0 {
            text += "  LAST SECONDS";
        }
        Line::from(text).style(Style::default().add_modifier(Modifier::DIM))
    }

    fn row(
        &self,
        view: &View,
        answer: &Answer,
        tenant: &Tenant,
        n: usize,
        row: &Row,
    ) -> Line<'static> {
        let is_chosen = view.chosen().is_some_and(|it| it.name == tenant.name);
        let style = match is_chosen {
            true => Style::default().bold(),
            false => Style::default(),
        };
        let first = |text: &str| {
            if n == 0 {
                text.to_owned()
            } else {
                String::new()
            }
        };
        let columns = self.name;
        let name = match n {
            0 => cut(&tenant.name, columns),
            _ => format!("  on {}", title(answer, &row.device)),
        };
        let mut text = format!("{}{name:columns$} ", if is_chosen { '>' } else { ' ' });
        if self.class {
            text += &format!("{:8} ", first(tenant.class.name()));
        }
        text += &format!("{:8} ", first(tenant.state.name()));
        if self.gpu {
            let place = if row.device.is_empty() {
                "-".into()
            } else {
                title(answer, &row.device)
            };
            text += &format!("{:5} ", cut(place.trim_start_matches("GPU "), 5));
        }
        let mut spans = vec![
            Span::styled(text, style),
            Span::styled(
                bar(self.bar, row.received, Some(row.share)),
                Style::default().fg(Color::Green),
            ),
            Span::raw(format!(
                " {:>5} {:>5} {:>5}",
                percent(row.received),
                percent(row.share),
                percent(row.waiting)
            )),
        ];
        if self.memory {
            let own = tenant.memory.iter().find(|it| it.device == row.device);
            let text = own.map_or_else(|| "-".into(), |it| bytes(it.in_use));
            spans.push(Span::raw(format!(" {text:>9}")));
        }
        if self.lately > 0 {
            let past = view.past.get(&(tenant.name.clone(), row.device.clone()));
            let past: Vec<f64> = past.into_iter().flatten().copied().collect();
            let last = &past[past.len().saturating_sub(self.lately)..];
            let level = |share: &f64| LEVELS[((share * 8.0).round() as usize).min(8)];
            let picture = format!("  {}", last.iter().map(level).collect::<String>());
            spans.push(Span::styled(picture, Style::default().fg(Color::Cyan)));
        }
        Line::from(spans)
    }
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, view: &View, answer: &Answer) {
    let above = above(area.width, view, answer);
    let chosen = view.chosen();
    let memory = chosen.map_or_else(String::new, |tenant| memory(answer, tenant));
    let text = format!("{}{memory}", answer.why);
    let most = (area.height / 3).max(3);
    let needed = lines(&text, area.width.saturating_sub(1));
    let [gpus, table, why] = Layout::vertical([
        Constraint::Length(above.len() as u16),
        Constraint::Min(3),
        Constraint::Length(needed.min(most) + 1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(above), gpus);
    draw_table(frame, table, view, answer);
    let Some(chosen) = chosen else { return };
    let more = if needed > most {
        "  (Enter: all of it)"
    } else {
        ""
    };
    let head = format!("── {}: why it runs or waits{more} ", cut(&chosen.name, 16));
    let rule = "─".repeat(usize::from(why.width).saturating_sub(head.chars().count()));
    let [line, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(why);
    frame.render_widget(Line::from(head + &rule).dim(), line);
    let [_, rest] = Layout::horizontal([Constraint::Length(1), Constraint::Min(0)]).areas(rest);
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), rest);
}

/// A line or two about each GPU.
fn above(width: u16, view: &View, answer: &Answer) -> Vec<Line<'static>> {
    let devices = &answer.status.devices;
    let mut shown: Vec<Line<'static>> = Vec::new();
    for device in devices.iter().take(GPUS) {
        shown.push(gpus::line(width, view, answer, device));
        let memory = answer.memory.iter().find(|it| it.device == device.uuid);
        let used = memory.filter(|it| it.tenants.iter().any(|it| it.in_use > 0));
        if devices.len() <= 2 {
            shown.extend(used.map(|it| gpus::map(width, it)));
        }
    }
    if devices.len() > GPUS {
        shown.push(Line::from(format!(" and {} more: Tab shows all", devices.len() - GPUS)).dim());
    }
    shown
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, view: &View, answer: &Answer) {
    let columns = Columns::of(area.width);
    let chosen = view.chosen().map(|it| &it.name);
    let (mut rows, mut place) = (Vec::new(), 0);
    for tenant in view.visible() {
        if chosen == Some(&tenant.name) {
            place = rows.len();
        }
        let own = view
            .rows
            .get(&tenant.name)
            .into_iter()
            .flatten()
            .enumerate();
        rows.extend(own.map(|(n, row)| columns.row(view, answer, tenant, n, row)));
    }
    if rows.is_empty() {
        rows.push(Line::from(match view.filter.is_empty() {
            true => " No tenants: start a program with `gpumux run -- program`.".to_owned(),
            false => format!(
                " No tenant matches `{}`: Esc clears the filter.",
                view.filter
            ),
        }));
    }
    // The chosen one stays in sight.
    let room = usize::from(area.height.saturating_sub(1)).max(1);
    let first = (place + 1).saturating_sub(room);
    let mut shown = vec![columns.head(view.order)];
    shown.extend(rows.into_iter().skip(first));
    frame.render_widget(Paragraph::new(shown), area);
}

/// A sentence for each GPU of whose memory the tenant has some.
pub(super) fn memory(answer: &Answer, tenant: &Tenant) -> String {
    let has = |it: &&MemoryShare| it.in_use + it.swapped > 0;
    let sentence = |it: &MemoryShare| {
        let limit = it
            .limit
            .map(|limit| format!(" of at most {}", bytes(limit)));
        format!(
            "\nMemory on {}: {}{}; on the host: {}.",
            title(answer, &it.device),
            bytes(it.in_use),
            limit.unwrap_or_default(),
            bytes(it.swapped)
        )
    };
    tenant.memory.iter().filter(has).map(sentence).collect()
}
