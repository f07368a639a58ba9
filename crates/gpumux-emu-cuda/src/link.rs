//! Linking at run time (`cuLink…`): the PTX of all inputs, joined.

use std::sync::{Arc, Mutex, OnceLock};

use crate::{
    border::{Image, Text, program_bytes},
    error::Result,
    module,
    process::{lock, process},
};

/// Directives of which a text has one each, at its head.
const HEAD: [&str; 3] = [".version", ".target", ".address_size"];

/// What is being linked.
#[derive(Default)]
pub(crate) struct Link {
    text: Mutex<String>,
    /// The result, which ends with 0.
    made: OnceLock<Vec<u8>>,
}

/// Begins; the link's handle.
pub(crate) fn create() -> Result<usize> {
    Ok(process()?.links.add(Arc::default()))
}

/// Adds PTX or a fat binary that has some; other kinds of code cannot be run.
pub(crate) fn add(link: usize, address: u64, size: usize) -> Result {
    let mut bytes = program_bytes(address, size)?;
    bytes.push(0);
    add_bytes(link, &bytes)
}

/// Adds a file.
pub(crate) fn add_file(link: usize, path: Text) -> Result {
    add_bytes(link, &path.file()?)
}

fn add_bytes(link: usize, bytes: &[u8]) -> Result {
    let link = process()?.links.get(link)?;
    let added = Image::of(bytes)?.text()?;
    let mut text = lock(&link.text);
    match text.is_empty() {
        true => *text = added,
        false => {
            let head = |line: &&str| !HEAD.iter().any(|word| line.trim_start().starts_with(word));
            text.push('\n');
            added.lines().filter(head).for_each(|line| {
                text.push_str(line);
                text.push('\n');
            });
        }
    }
    Ok(())
}

/// Address and size of the result, which lives as long as the link.
pub(crate) fn complete(link: usize) -> Result<(usize, usize)> {
    let link = process()?.links.get(link)?;
    let text = lock(&link.text).clone();
    module::parse(&text)?;
    let made = link.made.get_or_init(|| [text.as_bytes(), &[0]].concat());
    Ok((made.as_ptr() as usize, made.len()))
}

/// Ends it.
pub(crate) fn destroy(link: usize) -> Result {
    process()?.links.remove(link).map(drop)
}
