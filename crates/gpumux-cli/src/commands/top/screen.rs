//! The picture of [`View`]: nothing is cut at 80 columns and 24 lines, and 50 columns are enough to use it.

mod gpus;
mod pages;
mod tenants;
mod text;

use ratatui::{
    Frame,
    layout::{Constraint, Layout},
    style::{Color, Style, Stylize},
    text::Line,
    widgets::{Paragraph, Wrap},
};

use super::view::{Answer, Input, Page, View};
use crate::output::cut;
use text::lines;

pub(super) fn draw(frame: &mut Frame<'_>, view: &View) {
    let note = note(view);
    let width = frame.area().width.saturating_sub(2);
    let [head, body, below, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(note.as_ref().map_or(0, |(text, _)| lines(text, width))),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let Some(answer) = &view.answer else {
        let text = view.lost.as_deref().unwrap_or("asking the daemon …");
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), frame.area());
        return;
    };
    frame.render_widget(header(head.width, view, answer), head);
    match view.page {
        Page::Tenants => tenants::draw(frame, body, view, answer),
        Page::Gpus => pages::show(frame, body, view, gpus::all(body.width, view, answer)),
        Page::Detail => pages::show(frame, body, view, pages::detail(view, answer)),
        Page::Help => pages::show(frame, body, view, pages::help(body.width)),
    }
    if let Some((text, style)) = note {
        let [_, below] =
            Layout::horizontal([Constraint::Length(1), Constraint::Length(width)]).areas(below);
        frame.render_widget(
            Paragraph::new(text).style(style).wrap(Wrap { trim: true }),
            below,
        );
    }
    frame.render_widget(footer(keys.width, view), keys);
}

fn header(width: u16, view: &View, answer: &Answer) -> Line<'static> {
    if let Some(why) = &view.lost {
        let text = format!(" OLD NUMBERS: {why}");
        return Line::from(text).style(Style::default().fg(Color::White).bg(Color::Red).bold());
    }
    let status = &answer.status;
    let filter = match view.filter.is_empty() {
        true => String::new(),
        false => format!("  filter: {}", view.filter),
    };
    let counts = format!("{} tenants, {} processes", status.tenants, status.sessions);
    let long = format!(
        " gpumux {}  {counts}  policy {}{filter}",
        status.version, status.policy
    );
    let short = format!(" gpumux  {} tenants{filter}", status.tenants);
    Line::from(fitting(
        width,
        [
            long,
            format!(" gpumux {}  {counts}{filter}", status.version),
            short,
        ],
    ))
    .reversed()
}

/// The first text that fits, or else the last.
fn fitting<const N: usize>(width: u16, texts: [String; N]) -> String {
    let fits = |text: &&String| text.chars().count() <= usize::from(width);
    let found = texts.iter().find(fits).or(texts.last());
    found.cloned().unwrap_or_default()
}

/// A question, or what became of the last change.
fn note(view: &View) -> Option<(String, Style)> {
    let ask = |text: String| Some((text, Style::default().yellow().bold()));
    match &view.input {
        Input::Filter => ask(format!(
            "Filter: {}▏  Enter keeps it, Esc clears it",
            view.filter
        )),
        Input::Class(name) => ask(format!("{}: l latency  s standard  b batch", cut(name, 14))),
        Input::Sleep(name) => ask(format!("Memory of {} to the host?  y yes", cut(name, 14))),
        Input::Commands => {
            let (bad, text) = view.message()?;
            let style = if bad {
                Style::default().red().bold()
            } else {
                Style::default().green()
            };
            Some((text.to_owned(), style))
        }
    }
}

fn footer(width: u16, view: &View) -> Line<'static> {
    let texts = match view.page {
        Page::Tenants => [
            " ? help  ↑↓ choose  Enter all about it  Tab GPUs  / filter  N R W M A sort  c class  + - weight  z sleep  w wake  u undo  q quit",
            " ? help  Enter more  Tab GPUs  / filter  c class  + - weight  z w sleep  u undo",
            " ? help  Enter more  / filter  c class  u undo",
        ],
        _ => [" ↑↓ scroll  Esc back  ? help  q quit"; 3],
    };
    Line::from(fitting(width, texts.map(str::to_owned))).reversed()
}
