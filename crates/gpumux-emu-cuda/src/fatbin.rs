//! Fat binaries: containers of compiled code and PTX, of which the device can use only the PTX.
//!
//! nvcc puts one into every program that it compiles. A *wrapper* (magic `0x466243b1`) points to it; it has a header, then
//! files one behind the other, each with its own header. PTX may be compressed, by zstd or as an LZ4 block.

use std::io::Read;

/// First word of a wrapper, and of the binary itself.
pub(crate) const WRAPPER: u32 = 0x4662_43b1;
pub(crate) const MAGIC: u32 = 0xba55_ed50;
/// Version of a wrapper that names a list of binaries: those that were linked to make the one that it points to, each with
/// its PTX.
pub(crate) const LINKED: u32 = 2;
/// First word of compiled code (ELF).
pub(crate) const ELF: u32 = 0x464c_457f;

/// Bytes of the binary's header, and of the part of a file's header that is read here.
pub(crate) const HEADER: usize = 16;
const FILE_HEADER: usize = 64;
/// Kind of a file that is PTX.
const PTX: u16 = 1;
/// Flags of compressed files.
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;
/// Most bytes of a file after decompression.
const MOST: u64 = 256 << 20;

/// Bytes of a whole binary, header included, by its header.
pub(crate) fn size(header: &[u8; HEADER]) -> Option<usize> {
    let own = u64::from(u16::from_le_bytes([header[6], header[7]]));
    let files = u64::from_le_bytes(header[8..].try_into().ok()?);
    usize::try_from(files.checked_add(own)?).ok()
}

/// Why a binary cannot be run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoText {
    pub(crate) why: String,
    /// A real device of this architecture would run its compiled code.
    pub(crate) compiled: bool,
}

/// The PTX of a binary that is for the newest architecture up to `most` (such as 90); or what there is instead.
pub(crate) fn ptx(binary: &[u8], most: u32) -> Result<String, NoText> {
    let damaged = |why: &str| NoText {
        why: why.to_owned(),
        compiled: false,
    };
    let mut best: Option<(u32, &[u8], u64, u64)> = None;
    let (mut others, mut compiled) = (Vec::new(), false);
    let header = usize::from(u16_at(binary, 6).unwrap_or(0));
    let mut rest = binary.get(header..).unwrap_or(&[]);
    while rest.len() >= FILE_HEADER {
        let Some(file) = File::read(rest) else {
            return Err(damaged("its fat binary is damaged"));
        };
        rest = &rest[file.length..];
        if file.kind != PTX || file.architecture > most {
            let same = file.architecture / 10 == most / 10 && file.architecture <= most;
            compiled |= file.kind != PTX && same;
            let kind = if file.kind == PTX { "compute" } else { "sm" };
            others.push(format!("{kind}_{}", file.architecture));
        } else if best.is_none_or(|best| file.architecture > best.0) {
            best = Some((file.architecture, file.data, file.flags, file.uncompressed));
        }
    }
    let Some((_, data, flags, uncompressed)) = best else {
        others.dedup();
        return Err(NoText {
            why: format!("it has code for {} only", others.join(", ")),
            compiled,
        });
    };
    let bytes = match () {
        () if uncompressed > MOST => None,
        () if flags & ZSTD != 0 => zstd(data),
        () if flags & LZ4 != 0 => lz4(data, uncompressed as usize),
        () => Some(data.to_vec()),
    };
    let bytes = bytes.ok_or_else(|| damaged("its PTX cannot be decompressed"))?;
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or(&[]);
    String::from_utf8(text.to_vec()).map_err(|_| damaged("its PTX is no text"))
}

struct File<'a> {
    kind: u16,
    architecture: u32,
    flags: u64,
    uncompressed: u64,
    data: &'a [u8],
    /// With its header.
    length: usize,
}

impl<'a> File<'a> {
    fn read(from: &'a [u8]) -> Option<Self> {
        let header = u32_at(from, 4)? as usize;
        let padded = u32_at(from, 8)? as usize;
        let compressed = u32_at(from, 16)? as usize;
        let length = header.checked_add(padded)?;
        let whole = from.get(header..length)?;
        Some(Self {
            kind: u16_at(from, 0)?,
            architecture: u32_at(from, 28)?,
            flags: u64_at(from, 40)?,
            uncompressed: u64_at(from, 56)?,
            data: if compressed > 0 {
                whole.get(..compressed)?
            } else {
                whole
            },
            length,
        })
    }
}

fn u16_at(from: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(from.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(from: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(from.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(from: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(from.get(at..at + 8)?.try_into().ok()?))
}

fn zstd(data: &[u8]) -> Option<Vec<u8>> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(data).ok()?;
    let mut bytes = Vec::new();
    decoder.take(MOST).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// An LZ4 block: pieces of plain bytes and of repetitions, in turn.
fn lz4(data: &[u8], size: usize) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(size);
    let mut data = data.iter().copied();
    // A length of 15 goes on in bytes, up to one that is not 255.
    let longer = |data: &mut dyn Iterator<Item = u8>, length: u8| {
        let mut length = usize::from(length);
        if length == 15 {
            loop {
                let more = data.next()?;
                length += usize::from(more);
                if more != 255 {
                    break;
                }
            }
        }
        Some(length)
    };
    while let Some(token) = data.next() {
        let plain = longer(&mut data, token >> 4)?;
        for _ in 0..plain {
            out.push(data.next()?);
        }
        let Some(low) = data.next() else {
            break;
        };
        let distance = usize::from(u16::from_le_bytes([low, data.next()?]));
        let length = longer(&mut data, token & 15)? + 4;
        let from = out.len().checked_sub(distance).filter(|_| distance > 0)?;
        if out.len() + length > size {
            return None;
        }
        for i in from..from + length {
            out.push(out[i]);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(kind: u16, architecture: u32, data: &[u8], flags: u64, uncompressed: u64) -> Vec<u8> {
        let padded = data.len().next_multiple_of(8);
        let mut out = vec![0; FILE_HEADER + padded];
        out[..2].copy_from_slice(&kind.to_le_bytes());
        out[4..8].copy_from_slice(&(FILE_HEADER as u32).to_le_bytes());
        out[8..12].copy_from_slice(&(padded as u32).to_le_bytes());
        if flags != 0 {
            out[16..20].copy_from_slice(&(data.len() as u32).to_le_bytes());
        }
        out[28..32].copy_from_slice(&architecture.to_le_bytes());
        out[40..48].copy_from_slice(&flags.to_le_bytes());
        out[56..64].copy_from_slice(&uncompressed.to_le_bytes());
        out[FILE_HEADER..][..data.len()].copy_from_slice(data);
        out
    }

    fn binary(files: &[Vec<u8>]) -> Vec<u8> {
        let files = files.concat();
        let mut out = MAGIC.to_le_bytes().to_vec();
        out.extend([1, 0, HEADER as u8, 0]);
        out.extend((files.len() as u64).to_le_bytes());
        out.extend(files);
        out
    }

    #[test]
    fn the_newest_ptx_that_fits_is_taken() {
        // Plain "abcd", then 8 bytes from 4 back, then plain "e".
        let packed = [0x44, b'a', b'b', b'c', b'd', 4, 0, 0x10, b'e'];
        let all = binary(&[
            file(2, 90, b"ELF", 0, 0),
            file(1, 52, b"old\0\0", 0, 0),
            file(1, 90, &packed, LZ4, 13),
            file(1, 100, b"new", 0, 0),
        ]);
        let header: &[u8; HEADER] = all[..HEADER].try_into().unwrap();
        assert_eq!(size(header), Some(all.len()));
        assert_eq!(ptx(&all, 90).unwrap(), "abcdabcdabcde");
        assert_eq!(ptx(&all, 80).unwrap(), "old");
        assert_eq!(
            ptx(&all, 50).unwrap_err().why,
            "it has code for sm_90, compute_52, compute_90, compute_100 only"
        );
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300), flags in proptest::sample::select(vec![0, LZ4, ZSTD])) {
            let _ = ptx(&bytes, 90);
            let _ = ptx(&binary(&[file(1, 90, &bytes, flags, 1000)]), 90);
        }
    }
}
