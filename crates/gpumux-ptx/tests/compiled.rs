//! The kernels of `tests/cuda/kernels.cu` as nvcc has compiled them (`kernels.ptx`): they compute what they should, also where
//! there is no compiler and so no program around them.

use std::sync::Arc;

use gpumux_ptx::{Launch, Module, Run};

mod memory;
use memory::Bytes;

const TEXT: &str = include_str!("../../../tests/cuda/kernels.ptx");
/// Where the module's variables end and the tests' memory begins.
const DATA: u64 = 0x1000 + VARIABLES as u64;
const VARIABLES: usize = 1 << 16;

/// Memory with the module's variables and then `data`.
struct Device {
    module: Arc<Module>,
    globals: Vec<u64>,
    memory: Bytes,
}

impl Device {
    fn new(data: &[u8]) -> Self {
        let module = Arc::new(Module::parse(TEXT).unwrap());
        let mut bytes = vec![0; VARIABLES];
        let (mut globals, mut top) = (Vec::new(), 0_usize);
        for global in &module.globals {
            top = top.next_multiple_of(global.align.max(1) as usize);
            bytes[top..top + global.initial.len()].copy_from_slice(&global.initial);
            globals.push(0x1000 + top as u64);
            top += global.size as usize;
        }
        bytes.extend(data);
        Self {
            module,
            globals,
            memory: Bytes(bytes),
        }
    }

    /// Runs the kernel whose mangled name has this in it; what it printed.
    fn run(&mut self, name: &str, grid: u32, block: [u32; 2], parameters: &[&[u8]]) -> String {
        let kernels = &self.module.kernels;
        let kernel = kernels
            .iter()
            .position(|it| it.name.contains(name))
            .unwrap();
        let mut laid_out = vec![0; kernels[kernel].parameter_bytes()];
        for (place, value) in kernels[kernel].parameters.iter().zip(parameters) {
            laid_out[place.offset..place.offset + place.size].copy_from_slice(value);
        }
        let mut run = Run::new(Launch {
            module: Arc::clone(&self.module),
            kernel,
            grid: [grid, 1, 1],
            block: [block[0], block[1], 1],
            dynamic_shared: 1024,
            parameters: laid_out,
            globals: self.globals.clone(),
            resident: 64,
            sms: 4,
            workspace: 0,
        })
        .unwrap();
        for _ in 0..10_000 {
            if run.step(&mut self.memory, 10_000).unwrap() {
                return String::from_utf8(run.take_output()).unwrap();
            }
        }
        panic!("{name} does not end");
    }

    fn words(&self, from: usize, count: usize) -> Vec<u32> {
        self.memory.words()[VARIABLES / 4 + from..][..count].to_vec()
    }
}

fn bytes(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn at(offset: u64) -> [u8; 8] {
    (DATA + offset).to_le_bytes()
}

#[test]
fn shared_memory_and_barriers_sum_up() {
    let mut device = Device::new(&bytes((0..1000).chain([0])));
    let parameters: [&[u8]; 3] = [&at(0), &at(4000), &1000_u32.to_le_bytes()];
    device.run("reduceIiE", 4, [256, 1], &parameters);
    assert_eq!(device.words(1000, 1), [499_500]);

    let mut device = Device::new(&bytes((0..1000).map(|_| 0.5_f32.to_bits()).chain([0])));
    device.run("reduceIfE", 4, [256, 1], &parameters);
    assert_eq!(device.words(1000, 1), [500_f32.to_bits()]);
}

#[test]
fn tiles_of_shared_memory_turn_a_matrix() {
    let n = 16_u32;
    let mut device = Device::new(&bytes((0..n * n).chain((0..n * n).map(|_| 0))));
    let parameters: [&[u8]; 3] = [&at(0), &at(1024), &n.to_le_bytes()];
    device.run("transpose", 1, [16, 16], &parameters);
    let expected: Vec<u32> = (0..n * n).map(|i| i % n * n + i / n).collect();
    assert_eq!(device.words(256, 256), expected);
}

#[test]
fn warps_vote_shuffle_and_reduce() {
    let mut device = Device::new(&bytes([0; 64]));
    device.run("warps", 1, [64, 1], &[&at(0)]);
    assert_eq!(device.words(0, 64), [496 + 16 + 2 + 31; 64]);
    device.run("tiles", 1, [32, 1], &[&at(0)]);
    let expected: Vec<u32> = (0..32).map(|lane| 28 + lane / 8).collect();
    assert_eq!(device.words(0, 32), expected);
}

#[test]
fn functions_call_themselves() {
    let mut device = Device::new(&bytes([0; 2]));
    device.run("recursive", 1, [1, 1], &[&at(0), &12_u32.to_le_bytes()]);
    assert_eq!(device.words(0, 2), [144, 0]);
}

#[test]
fn atomics_lose_nothing() {
    let input: Vec<u8> = (0..=255).cycle().take(4096).collect();
    let mut device = Device::new(&[input, bytes([0; 16])].concat());
    let parameters: [&[u8]; 3] = [&at(0), &4096_u32.to_le_bytes(), &at(4096)];
    device.run("histogram", 3, [128, 1], &parameters);
    assert_eq!(device.words(1024, 16), [256; 16]);

    let mut device = Device::new(&bytes([0; 2]));
    device.run("compare_and_swap", 2, [100, 1], &[&at(0)]);
    assert_eq!(device.words(0, 2), [2 * 4950, 0]);

    let mut device = Device::new(&bytes([0; 11]));
    device.run("last_block", 10, [32, 1], &[&at(0), &at(4)]);
    assert_eq!(device.words(1, 1), [45]);
    let mut device = Device::new(&bytes([0; 8]));
    device.run("wait_for_neighbour", 8, [1, 1], &[&at(0)]);
    assert_eq!(device.words(0, 8), [1, 1, 1, 1, 1, 1, 1, 0]);
}

#[test]
fn functions_of_the_mathematics_library_are_near() {
    let x = [-3.5_f32, -1.0, 0.0, 0.25, 3.0];
    let input = x.map(f32::to_bits).into_iter().chain([0; 3 + 8 + 16]);
    let mut device = Device::new(&bytes(input));
    let parameters: [&[u8]; 4] = [&at(0), &at(32), &at(64), &5_u32.to_le_bytes()];
    device.run("curves", 1, [32, 1], &parameters);
    let (single, double) = (device.words(8, 5), device.words(16, 10));
    for (i, x) in x.into_iter().map(f64::from).enumerate() {
        let y = x.exp() + x.sin() * x.abs().sqrt() + 2_f64.powf(x) / 3.0;
        let z = x.exp() + x.cos() + (1.5 + x * x).ln();
        let found_y = f64::from(f32::from_bits(single[i]));
        let bits = u64::from(double[2 * i]) | u64::from(double[2 * i + 1]) << 32;
        let found_z = f64::from_bits(bits);
        assert!(
            (y - found_y).abs() < 1e-5 * y.abs().max(1.0),
            "{x}: {found_y}, not {y}"
        );
        assert!(
            (z - found_z).abs() < 1e-12 * z.abs().max(1.0),
            "{x}: {found_z}, not {z}"
        );
    }
}

#[test]
fn printf_prints() {
    let mut device = Device::new(b"device\0\0");
    let parameters: [&[u8]; 3] = [&2_u32.to_le_bytes(), &2.5_f64.to_le_bytes(), &at(0)];
    let said = device.run("speak", 1, [2, 1], &parameters);
    assert_eq!(said, "hello from device: 1 of 2, 2.500,   end|\n");
}
