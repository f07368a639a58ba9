//! Pages of text that scroll: the help, and all about the chosen tenant.

use ratatui::{
    Frame,
    layout::Rect,
    style::{Style, Stylize},
    text::{Line, Span},
    widgets::{Paragraph, Wrap},
};

use super::{
    super::{
        keys,
        view::{Answer, View},
    },
    tenants,
};
use crate::output::percent;

pub(super) fn show(frame: &mut Frame<'_>, area: Rect, view: &View, lines: Vec<Line<'static>>) {
    let last = (lines.len() as u16).saturating_sub(1);
    let text = Paragraph::new(lines).wrap(Wrap { trim: false });
    frame.render_widget(text.scroll((view.scrolled.min(last), 0)), area);
}

pub(super) fn help(width: u16) -> Vec<Line<'static>> {
    let wide = keys::HELP
        .iter()
        .map(|(key, _)| key.chars().count())
        .max()
        .unwrap_or(0);
    let mut lines = vec![Line::from(" Keys").bold()];
    lines.extend(keys::HELP.iter().map(|(key, what)| {
        Line::from(vec![
            Span::styled(format!(" {key:wide$}  "), Style::default().bold()),
            Span::raw(*what),
        ])
    }));
    lines.push(Line::default());
    let about = [
        "Bar, RECV: part of the GPU's time received.",
        "|, SHARE: its share when all have work.",
        "WAIT: part of the time it had to wait.",
    ];
    lines.extend(about.map(|text| Line::from(format!(" {text}"))));
    if width >= 70 {
        lines.push(Line::from(
            " The states are described by `gpumux ps --help`.",
        ));
    }
    lines
}

pub(super) fn detail(view: &View, answer: &Answer) -> Vec<Line<'static>> {
    let Some(tenant) = view.chosen() else {
        return vec![Line::from(" There is no tenant.")];
    };
    let spec = &tenant.spec;
    let pids: Vec<String> = tenant.pids.iter().map(u32::to_string).collect();
    let facts = [
        ("class", tenant.class.to_string()),
        ("state", tenant.state.to_string()),
        ("guaranteed", percent(tenant.guaranteed())),
        ("limit", percent(spec.limit)),
        ("weight", spec.weight.to_string()),
        ("user", tenant.uid.to_string()),
        ("processes", pids.join(", ")),
    ];
    let mut lines = vec![Line::from(tenant.name.clone()).bold()];
    let text = format!("{}{}", answer.why, tenants::memory(answer, tenant));
    lines.extend(text.lines().map(|line| Line::from(line.to_owned())));
    lines.push(Line::default());
    lines.extend(facts.map(|(name, value)| Line::from(format!("{name:12} {value}"))));
    lines
}
