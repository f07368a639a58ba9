//! Numbers that look random.

/// A sequence that its seed decides (xorshift64); a seed of 0 would stay 0.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number, below `most`.
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}
