//! Device attributes of an H100 (numbers from `cuda.h`; values as an H100 80GB HBM3 reports them).

use gpumux_emu::{mps, protocol::DeviceInfo};

use crate::error::{CuError, Result};

/// One past the last attribute of CUDA 13.0.
const END: i32 = 148;

/// `cuDeviceGetAttribute`. What is not listed is 0: unsupported, or none.
pub(crate) fn get(info: &DeviceInfo, attribute: i32) -> Result<i32> {
    if !(1..END).contains(&attribute) {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(match attribute {
        1 => 1024,       // threads per block
        2 | 3 => 1024,   // block x, y
        4 => 64,         // block z
        5 => i32::MAX,   // grid x
        6 | 7 => 65_535, // grid y, z
        8 => 49_152,     // shared memory per block
        9 => 65_536,     // constant memory
        10 => 32,        // warp size
        11 => i32::MAX,  // pitch
        12 => 65_536,    // registers per block
        13 => info.clock_khz as i32,
        14 => 512, // texture alignment
        15 => 1,   // copies overlap kernels
        16 => mps::visible_sms(info.sms) as i32,
        19 => 1, // host memory can be mapped
        31 => 1, // concurrent kernels
        32 => 1, // ECC
        33 => info.pci_bus as i32,
        36 => 2_619_000,  // memory clock, kHz
        37 => 5120,       // memory bus, bits
        38 => 52_428_800, // L2 cache
        39 => 2048,       // threads per SM
        40 => 3,          // copy engines
        41 => 1,          // unified addressing
        51 => 32,         // texture pitch alignment
        75 => info.compute_capability.0 as i32,
        76 => info.compute_capability.1 as i32,
        78 => 1,       // stream priorities
        79 | 80 => 1,  // L1 for globals, locals
        81 => 233_472, // shared memory per SM
        82 => 65_536,  // registers per SM
        83 => 1,       // managed memory
        87 => 2,       // single to double precision rate
        89 => 1,       // managed memory at the same time as the host
        90 => 1,       // compute preemption
        91 => 1,       // registered host memory has one address
        95 => 1,       // cooperative launch
        97 => 232_448, // shared memory per block, opt-in
        99 => 1,       // host registration
        102 => 1,      // virtual memory management
        103 => 1,      // memory handles as files
        106 => 32,     // blocks per SM
        111 => 1024,   // reserved shared memory per block
        115 => 1,      // stream-ordered allocation
        122 => 1,      // 64-bit values waited for and written in stream order
        123 => 1,      // and the condition nor
        125 => 1,      // events of other processes
        _ => 0,
    })
}
