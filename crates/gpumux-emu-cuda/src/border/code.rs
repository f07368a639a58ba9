//! Device code that a program passes, and the options of its compilation.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::{In, Out, Text, program_bytes};
use crate::{
    error::{CuError, Result},
    fatbin,
};

/// Device code in memory: text, or something else by its first word.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Image(*const c_void);

impl Image {
    /// Of a file's content, which ends with 0.
    pub(crate) fn of(bytes: &[u8]) -> Result<Self> {
        // What a header says must be there.
        let whole = match bytes
            .first_chunk()
            .filter(|it| it.starts_with(&fatbin::MAGIC.to_le_bytes()))
        {
            Some(header) => fatbin::size(header).is_some_and(|size| size <= bytes.len()),
            None => !bytes.starts_with(&fatbin::WRAPPER.to_le_bytes()) && bytes.last() == Some(&0),
        };
        match whole {
            true => Ok(Self(bytes.as_ptr().cast())),
            false => Err(CuError::INVALID_IMAGE),
        }
    }

    /// Its PTX for a compute capability, such as 90: one text, or those of all that were linked to make it.
    pub(crate) fn texts(self, capability: u32) -> std::result::Result<Vec<String>, Refused> {
        let found = self.read(capability)?;
        found.map_err(|no| Refused {
            code: CuError::NO_BINARY_FOR_GPU,
            why: format!(
                "the emulated device needs a module's PTX for compute_{capability} or older, but {}",
                no.why
            ),
            compiled: no.compiled,
        })
    }

    fn read(self, capability: u32) -> Result<std::result::Result<Vec<String>, fatbin::NoText>> {
        let start = |at: *const c_void| In(at.cast::<[u8; 4]>()).get().map(u32::from_le_bytes);
        let mut at = self.0;
        if let [b'.' | b'/' | b'\n' | b' ' | b'\t', ..] = [In(at.cast::<u8>()).get()?] {
            return Ok(Ok(vec![Text(at.cast()).get()?]));
        }
        let mut linked = None;
        if start(at)? == fatbin::WRAPPER {
            // Magic and version, the address, and with version 2 the list.
            let wrapper = In(at.cast::<*const c_void>());
            if In(at.cast::<u32>()).get_at(1)? == fatbin::LINKED {
                linked = Some(In(wrapper.get_at(2)?.cast::<*const c_void>()));
            }
            at = wrapper.get_at(1)?;
        }
        let of_binary = |at: *const c_void| -> Result<_> {
            let header = In(at.cast::<[u8; fatbin::HEADER]>()).get()?;
            let size = fatbin::size(&header).ok_or(CuError::INVALID_IMAGE)?;
            Ok(fatbin::ptx(&program_bytes(at as u64, size)?, capability))
        };
        Ok(match (start(at)?, linked) {
            (fatbin::MAGIC, None) => of_binary(at)?.map(|text| vec![text]),
            (fatbin::MAGIC, Some(list)) => {
                let whole = of_binary(at)?;
                let mut texts = Vec::new();
                // The list ends with null. A part that was linked without PTX is reported for the whole.
                while let Ok(part) = list.get_at(texts.len()) {
                    if part.is_null() {
                        break;
                    }
                    match of_binary(part)? {
                        Ok(text) => texts.push(text),
                        Err(no) => return Ok(whole.map(|text| vec![text]).map_err(|_| no)),
                    }
                }
                match texts.is_empty() {
                    true => whole.map(|text| vec![text]),
                    false => Ok(texts),
                }
            }
            (fatbin::ELF, _) => Err(fatbin::NoText {
                why: "it is compiled code".to_owned(),
                compiled: true,
            }),
            _ => Ok(vec![Text(at.cast()).get()?]),
        })
    }
}

/// Why a program cannot be loaded.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) code: CuError,
    pub(crate) why: String,
    /// Only because this device interprets PTX and nothing else.
    pub(crate) compiled: bool,
}

impl From<CuError> for Refused {
    fn from(code: CuError) -> Self {
        Self {
            code,
            why: String::new(),
            compiled: false,
        }
    }
}

impl Refused {
    /// Says why, to the program and its user.
    pub(crate) fn tell(&self, options: JitOptions) -> CuError {
        options.log(&self.why);
        if !self.why.is_empty() {
            eprintln!("gpumux: {}", self.why);
        }
        self.code
    }
}

/// Options of a compilation, and where their values are.
#[derive(Clone, Copy)]
pub(crate) struct JitOptions {
    pub(crate) count: c_uint,
    pub(crate) options: In<c_int>,
    pub(crate) values: Out<usize>,
}

/// `CU_JIT_MAX_REGISTERS`, `CU_JIT_INFO_LOG_BUFFER`, `CU_JIT_ERROR_LOG_BUFFER`; behind each buffer's number is that of its size.
pub(crate) const MAX_REGISTERS: c_int = 0;
const INFO_LOG: c_int = 3;
const ERROR_LOG: c_int = 5;

impl JitOptions {
    pub(crate) const NONE: Self = Self {
        count: 0,
        options: In(std::ptr::null()),
        values: Out(std::ptr::null_mut()),
    };

    fn place(self, wanted: c_int) -> Option<Out<usize>> {
        let known = |i: &usize| self.options.get_at(*i) == Ok(wanted);
        let at = (0..self.count as usize).find(known)?;
        // Not past the end: the array has `count` values.
        (!self.values.is_null()).then(|| Out(self.values.0.wrapping_add(at)))
    }

    /// The value of an option.
    pub(crate) fn get(self, wanted: c_int) -> Option<usize> {
        self.place(wanted)?.get().ok()
    }

    /// Writes the logs: nothing to tell, but an error.
    pub(crate) fn log(self, error: &str) {
        for (buffer, text) in [(INFO_LOG, ""), (ERROR_LOG, error)] {
            let (Some(to), Some(size)) = (self.get(buffer), self.place(buffer + 1)) else {
                continue;
            };
            // Sizes are numbers of 32 bits in values of 64.
            let room = size.get().unwrap_or(0) & 0xffff_ffff;
            let room = c_int::try_from(room).unwrap_or(0);
            if Out(to as *mut c_char).put_text(room, text).is_ok() {
                size.put_if_wanted(text.len().min(room as usize));
            }
        }
    }
}
