//! Texts of some width.

use gpumux_daemon::api::types::Device;
use ratatui::{
    layout::Rect,
    widgets::{Paragraph, Wrap},
};

use super::super::view::Answer;
use crate::output::short;

/// `columns` wide: filled as far as `part` of it, with a mark.
pub(super) fn bar(columns: usize, part: f64, mark: Option<f64>) -> String {
    let at = |part: f64| (part * columns as f64).round() as usize;
    let mark = mark
        .filter(|mark| *mark > 0.0)
        .map(|mark| at(mark).min(columns - 1));
    (0..columns)
        .map(|column| match column {
            _ if mark == Some(column) => '|',
            _ if column < at(part) => '█',
            _ => '·',
        })
        .collect()
}

/// What people call a device: its index, or as much of its UUID as tells devices apart.
pub(super) fn title(answer: &Answer, uuid: &str) -> String {
    let number = Device::number(uuid, &answer.status.devices);
    number.map_or_else(|| short(uuid).to_owned(), |it| format!("GPU {it}"))
}

/// How many lines a text takes.
pub(super) fn lines(text: &str, width: u16) -> u16 {
    let text = Paragraph::new(text).wrap(Wrap { trim: true });
    // Words that are moved to the next line need no more than that.
    let rect = Rect::new(0, 0, width.max(1), 64);
    let mut buffer = ratatui::buffer::Buffer::empty(rect);
    ratatui::widgets::Widget::render(text, rect, &mut buffer);
    let used = |y: &u16| (0..rect.width).any(|x| buffer[(x, *y)].symbol() != " ");
    (0..rect.height).rev().find(used).map_or(0, |last| last + 1)
}
