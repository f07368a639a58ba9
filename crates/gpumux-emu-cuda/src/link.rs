//! Linking at run time (`cuLink…`): the PTX of all inputs, each of which keeps its own names.

use std::sync::{Arc, Mutex, OnceLock};

use crate::{
    border::{
        Text,
        code::{Image, JitOptions, Refused},
        program_bytes,
    },
    error::{CuError, Result},
    module::{self, BETWEEN},
    process::{Registry, lock, process},
};

/// First bytes of a static library.
const ARCHIVE: &[u8] = b"!<arch>";

/// What is being linked.
#[derive(Default)]
pub(crate) struct Link {
    texts: Mutex<Vec<String>>,
    /// The result, which ends with 0.
    made: OnceLock<Vec<u8>>,
}

static LINKS: Registry<Link> = Registry::new();

/// Begins; the link's handle.
pub(crate) fn create(options: JitOptions) -> Result<usize> {
    options.log("");
    process()?;
    Ok(LINKS.add(Arc::default()))
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
    let link = LINKS.get(link)?;
    // CUDA's device runtime: what there is of it, the interpreter has. What a kernel lacks, its launch names.
    if bytes.starts_with(ARCHIVE) {
        return Ok(());
    }
    let added = module::texts(Image::of(bytes)?).map_err(tell)?;
    lock(&link.texts).extend(added);
    Ok(())
}

/// Nothing is loaded yet: the context goes on.
fn tell(refused: Refused) -> CuError {
    refused.tell(JitOptions::NONE)
}

/// Address and size of the result, which lives as long as the link.
pub(crate) fn complete(link: usize) -> Result<(usize, usize)> {
    let link = LINKS.get(link)?;
    let texts = lock(&link.texts).clone();
    module::parse(&texts).map_err(tell)?;
    let made = link
        .made
        .get_or_init(|| [texts.join(BETWEEN).as_bytes(), &[0]].concat());
    Ok((made.as_ptr() as usize, made.len()))
}

/// Ends it.
pub(crate) fn destroy(link: usize) -> Result {
    LINKS.remove(link).map(drop)
}
