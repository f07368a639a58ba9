//! Printing for people and for scripts.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;

/// Writes to stdout. A reader that has gone (`| head`) ends the writing without an error. Names come from programs of all users:
/// what would command a terminal is shown instead.
///
/// # Errors
/// When stdout cannot be written otherwise.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out
        .write_all(harmless(text).as_bytes())
        .and_then(|()| out.flush())
    {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// The text with its control characters, but for ends of lines and tabs, in visible form.
fn harmless(text: &str) -> String {
    let commands = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match commands(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// A cell of a table: in one line.
fn cell(text: &str) -> String {
    harmless(text).replace('\n', "\\n").replace('\t', "\\t")
}

/// Prints a value as one JSON document.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&(json_text(&serde_json::to_string_pretty(value)?) + "\n"))
}

/// JSON with its control characters as JSON escapes them: `serde_json` leaves those from U+007F on, which occur in strings only.
pub(crate) fn json_text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() && c >= '\x7f' {
            true => shown.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => shown.push(c),
        }
    }
    shown
}

/// How a command's result is printed.
#[derive(clap::Args)]
pub(crate) struct Printed {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Print nothing
    #[arg(short, long, conflicts_with = "json")]
    pub(crate) quiet: bool,
}

impl Printed {
    /// Prints a value, or a text about it.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub(crate) fn print(
        &self,
        value: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        match (self.json, self.quiet) {
            (true, _) => json(value),
            (_, true) => Ok(()),
            _ => print(&text()),
        }
    }
}

/// The first row of a table, of cells between bars.
pub(crate) fn head(cells: &str) -> Vec<Vec<String>> {
    vec![cells.split('|').map(str::to_owned).collect()]
}

/// Lines in columns, two spaces apart. The first row is the head.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    columns(rows, 2)
}

/// The same, so many spaces apart.
pub(crate) fn columns(rows: &[Vec<String>], gap: usize) -> String {
    let shown = |row: &Vec<String>| row.iter().map(|it| cell(it)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(shown).collect();
    let widths = widths(&rows);
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths);
        let cells: Vec<String> = cells.map(|(it, width)| format!("{it:width$}")).collect();
        cells.join(&" ".repeat(gap)).trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// How many characters each column has.
pub(crate) fn widths(rows: &[Vec<String>]) -> Vec<usize> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |column| rows.iter().filter_map(move |row| row.get(column));
    (0..count)
        .map(|column| cells(column).map(|it| it.chars().count()).max())
        .map(Option::unwrap_or_default)
        .collect()
}

/// An error with its causes in one line, each said once: many name their cause themselves.
pub(crate) fn with_causes(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |said, cause| {
        let cause = cause.to_string();
        match said.as_str() {
            "" => cause,
            said if said.contains(&cause) => said.to_owned(),
            said => format!("{said}: {cause}"),
        }
    })
}

/// Whether a person watches: progress is shown only then.
pub(crate) fn watched() -> bool {
    io::stderr().is_terminal()
}

/// A share as a whole percentage.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// As much of a text as fits.
pub(crate) fn cut(text: &str, columns: usize) -> String {
    match text.chars().count() > columns {
        true => text
            .chars()
            .take(columns.saturating_sub(1))
            .chain(['…'])
            .collect(),
        false => text.to_owned(),
    }
}

/// As much of a UUID as tells devices apart: `GPU-5efc3a7e`.
pub(crate) fn short(uuid: &str) -> &str {
    uuid.match_indices('-')
        .nth(1)
        .map_or(uuid, |(end, _)| &uuid[..end])
}

/// Bytes with a unit, short: `512 MiB`, `7.5 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    match mib {
        0.0 => "0".into(),
        _ if mib < 1024.0 => format!("{mib:.0} MiB"),
        _ => format!("{:.1} GiB", mib / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_command_the_terminal() {
        let rows = [
            vec!["NAME".into(), "X".into()],
            vec!["a\x1b[31m\nb\u{9b}1m".into(), "y".into()],
        ];
        let text = table(&rows);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.ends_with("a\\u{1b}[31m\\nb\\u{9b}1m  y\n"), "{text}");
        assert_eq!(harmless("a\tb\n"), "a\tb\n");
        assert_eq!(harmless("\r\x07"), "\\r\\u{7}");
    }

    #[test]
    fn json_with_control_characters_stays_json() {
        let name = "a\x1b[2J\x7f\u{80}\u{9b}\n\"é";
        let text = json_text(&serde_json::to_string_pretty(&[name]).unwrap());
        assert_eq!(harmless(&text), text);
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [name]);
    }

    #[test]
    fn every_cause_is_said_once() {
        let cause = std::io::Error::other("no such file");
        let error = anyhow::Error::new(cause).context("cannot read x (no such file)");
        assert_eq!(
            with_causes(&error.context("no profile")),
            "no profile: cannot read x (no such file)"
        );
    }

    #[test]
    fn columns_line_up() {
        let rows = [
            vec!["NAME".into(), "µs".into()],
            vec!["a".into(), "10".into()],
        ];
        assert_eq!(table(&rows), "NAME  µs\na     10\n");
    }
}
