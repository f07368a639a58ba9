//! Memory of the tests.

use gpumux_ptx::Memory;

/// Memory from address 0x1000.
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Bytes {
    fn part(&mut self, at: u64, size: u32) -> Option<&mut [u8]> {
        let start = usize::try_from(at.checked_sub(0x1000)?).ok()?;
        self.0.get_mut(start..start + size as usize)
    }

    /// As 32-bit words.
    pub(crate) fn words(&self) -> Vec<u32> {
        let words = self.0.chunks_exact(4);
        words
            .map(|it| u32::from_le_bytes(it.try_into().unwrap()))
            .collect()
    }
}

impl Memory for Bytes {
    fn load(&mut self, at: u64, size: u32) -> Option<u64> {
        let mut wide = [0; 8];
        wide[..size as usize].copy_from_slice(self.part(at, size)?);
        Some(u64::from_le_bytes(wide))
    }

    fn store(&mut self, at: u64, size: u32, value: u64) -> bool {
        let bytes = value.to_le_bytes();
        self.part(at, size)
            .map(|part| part.copy_from_slice(&bytes[..size as usize]))
            .is_some()
    }

    fn update(&mut self, at: u64, size: u32, change: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
        let old = self.load(at, size)?;
        self.store(at, size, change(old)).then_some(old)
    }

    fn now(&mut self) -> u64 {
        0
    }
}
