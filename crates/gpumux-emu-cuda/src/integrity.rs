//! The proof that the CUDA runtime demands of its driver: an HMAC-MD2 over what both see.
//!
//! Facts from public reimplementations of the driver; the hash function is that of RFC 1319, the HMAC that of RFC 2104.

/// The key.
const KEY: [u8; 16] = [
    0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52, 0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f,
];

/// What is hashed, in this order, before the devices.
pub(crate) struct Seen {
    pub(crate) driver: u32,
    pub(crate) runtime: u32,
    pub(crate) process: u32,
    /// The lower half of `pthread_self`.
    pub(crate) thread: u32,
    pub(crate) runtime_table: u64,
    pub(crate) integrity_table: u64,
    pub(crate) function: u64,
    pub(crate) seconds: u64,
}

/// The lower half of `pthread_self`.
pub(crate) fn thread() -> u32 {
    // SAFETY: always allowed.
    unsafe { libc::pthread_self() as u32 }
}

/// The proof, for devices by UUID and PCI bus (domain and device are 0).
pub(crate) fn prove(seen: &Seen, devices: &[([u8; 16], u32)]) -> [u64; 2] {
    match seen.runtime % 10 {
        // Such versions want no proof but these.
        0 => return [0x3341_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8],
        1 => return [0x1841_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8],
        _ => {}
    }
    let mut text = Vec::new();
    for word in [seen.driver, seen.runtime, seen.process, seen.thread] {
        text.extend(word.to_le_bytes());
    }
    for long in [
        seen.runtime_table,
        seen.integrity_table,
        seen.function,
        seen.seconds,
    ] {
        text.extend(long.to_le_bytes());
    }
    for (uuid, bus) in devices {
        text.extend(uuid);
        for word in [0, *bus, 0] {
            text.extend(word.to_le_bytes());
        }
    }
    let padded = |pad: u8| KEY.map(|byte| byte ^ pad).to_vec();
    let inner = md2(&[padded(0x36), text].concat());
    let outer = md2(&[padded(0x5c), inner.to_vec()].concat());
    let (low, high) = outer.split_at(8);
    [low, high].map(|half| {
        half.iter()
            .rev()
            .fold(0, |all, byte| all << 8 | u64::from(*byte))
    })
}

/// RFC 1319.
fn md2(text: &[u8]) -> [u8; 16] {
    let mut text = text.to_vec();
    let pad = 16 - text.len() % 16;
    text.extend(std::iter::repeat_n(pad as u8, pad));
    let (mut sum, mut last) = ([0_u8; 16], 0_u8);
    for block in text.chunks(16) {
        for (sum, byte) in sum.iter_mut().zip(block) {
            *sum ^= PI[usize::from(byte ^ last)];
            last = *sum;
        }
    }
    text.extend(sum);
    let mut state = [0_u8; 48];
    for block in text.chunks(16) {
        for (i, byte) in block.iter().enumerate() {
            state[16 + i] = *byte;
            state[32 + i] = byte ^ state[i];
        }
        let mut mixed = 0_u8;
        for round in 0..18 {
            for byte in &mut state {
                *byte ^= PI[usize::from(mixed)];
                mixed = *byte;
            }
            mixed = mixed.wrapping_add(round);
        }
    }
    std::array::from_fn(|i| state[i])
}

/// RFC 1319's permutation, made from the digits of pi.
#[rustfmt::skip]
const PI: [u8; 256] = [
     41,  46,  67, 201, 162, 216, 124,   1,  61,  54,  84, 161, 236, 240,   6,  19,
     98, 167,   5, 243, 192, 199, 115, 140, 152, 147,  43, 217, 188,  76, 130, 202,
     30, 155,  87,  60, 253, 212, 224,  22, 103,  66, 111,  24, 138,  23, 229,  18,
    190,  78, 196, 214, 218, 158, 222,  73, 160, 251, 245, 142, 187,  47, 238, 122,
    169, 104, 121, 145,  21, 178,   7,  63, 148, 194,  16, 137,  11,  34,  95,  33,
    128, 127,  93, 154,  90, 144,  50,  39,  53,  62, 204, 231, 191, 247, 151,   3,
    255,  25,  48, 179,  72, 165, 181, 209, 215,  94, 146,  42, 172,  86, 170, 198,
     79, 184,  56, 210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116,   4, 241,
     69, 157, 112,  89, 100, 113, 135,  32, 134,  91, 207, 101, 230,  45, 168,   2,
     27,  96,  37, 173, 174, 176, 185, 246,  28,  70,  97, 105,  52,  64, 126,  15,
     85,  71, 163,  35, 221,  81, 175,  58, 195,  92, 249, 206, 186, 197, 234,  38,
     44,  83,  13, 110, 133,  40, 132,   9, 211, 223, 205, 244,  65, 129,  77,  82,
    106, 220,  55, 200, 108, 193, 171, 250,  36, 225, 123,   8,  12, 189, 177,  74,
    120, 136, 149, 139, 227,  99, 232, 109, 233, 203, 213, 254,  59,   0,  29,  57,
    242, 239, 183,  14, 102,  88, 208, 228, 166, 119, 114, 248, 235, 117,  75,  10,
     49,  68,  80, 180, 143, 237,  31,  26, 219, 153, 141,  51, 159,  17, 131,  20,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of RFC 1319.
    #[test]
    fn md2_is_md2() {
        let hex = |text: &str| {
            md2(text.as_bytes())
                .map(|byte| format!("{byte:02x}"))
                .concat()
        };
        assert_eq!(hex(""), "8350e5a3e24c153df2275c9f80692773");
        assert_eq!(hex("abc"), "da853b0d3f88d99b30283a69e6ded6bb");
        assert_eq!(
            hex("abcdefghijklmnopqrstuvwxyz"),
            "4e8ddff3650292ab5a4108c3aa47940b"
        );
    }

    #[test]
    fn everything_seen_counts() {
        let seen = |thread| Seen {
            driver: 13_000,
            runtime: 13_002,
            process: 1,
            thread,
            runtime_table: 2,
            integrity_table: 3,
            function: 4,
            seconds: 5,
        };
        let one = prove(&seen(1), &[([1; 16], 1)]);
        assert_eq!(one, prove(&seen(1), &[([1; 16], 1)]));
        assert_ne!(one, prove(&seen(2), &[([1; 16], 1)]));
        assert_ne!(one, prove(&seen(1), &[([1; 16], 2)]));
        assert_ne!(one, prove(&seen(1), &[([2; 16], 1)]));
    }
}
