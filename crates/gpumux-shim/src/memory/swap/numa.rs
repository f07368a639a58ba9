//! Host memory on the device's own NUMA node, where the machine has several: copies cross no link between processors. What fails
//! changes nothing.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fs::read_to_string,
    path::Path,
};

use crate::{
    ground::driver::{SUCCESS, functions},
    memory::space::current_device,
};

/// `MPOL_PREFERRED`: another node serves where this one has no room.
const PREFERRED: c_int = 1;

functions! {
    pci_bus_id c"cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
}

/// The node of the current context's device.
pub(super) fn node() -> Option<u32> {
    let mut text: [c_char; 32] = [0; 32];
    let function = pci_bus_id()?;
    // SAFETY: the signature is `cuda.h`'s; the driver writes no more than so many characters, the last a zero.
    let result = unsafe { function(text.as_mut_ptr(), text.len() as c_int, current_device()?) };
    // SAFETY: as above; where the driver has failed, it is all zeros.
    let id = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str();
    node_of(Path::new("/sys"), id.ok().filter(|_| result == SUCCESS)?)
}

/// The node of a device by its address on the bus; none where the machine has only one.
fn node_of(sys: &Path, bus_id: &str) -> Option<u32> {
    let online = read_to_string(sys.join("devices/system/node/online")).ok()?;
    let several = online.trim().contains([',', '-']);
    let device = sys
        .join("bus/pci/devices")
        .join(bus_id.to_ascii_lowercase());
    // -1: the firmware does not report it.
    let node = read_to_string(device.join("numa_node")).ok()?;
    node.trim().parse().ok().filter(|_| several)
}

/// Has the kernel take pages of this mapping from a node where it can. Before it has any.
pub(super) fn prefer(node: u32, at: *mut c_void, bytes: usize) {
    let mask = 1u64.checked_shl(node).unwrap_or(0);
    // The kernel reads one bit less than the number says.
    let bits = u64::from(u64::BITS) + 1;
    if mask != 0 {
        // SAFETY: a mapping of `map`, and a mask that outlives the call.
        unsafe {
            libc::syscall(
                libc::SYS_mbind,
                at,
                bytes,
                PREFERRED,
                &raw const mask,
                bits,
                0,
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};

    use super::*;

    #[test]
    fn node_is_that_of_the_device_where_there_are_several() {
        let sys = tempfile::tempdir().unwrap();
        let (nodes, bus) = ("devices/system/node", "bus/pci/devices");
        create_dir_all(sys.path().join(nodes)).unwrap();
        for (id, node) in [("0000:1b:00.0", "1\n"), ("0000:9a:00.0", "-1\n")] {
            create_dir_all(sys.path().join(bus).join(id)).unwrap();
            write(sys.path().join(bus).join(id).join("numa_node"), node).unwrap();
        }
        let found = |online: &str| {
            write(sys.path().join(nodes).join("online"), online).unwrap();
            ["0000:1B:00.0", "0000:9A:00.0", "0000:FF:00.0", ""].map(|id| node_of(sys.path(), id))
        };
        assert_eq!(found("0-1\n"), [Some(1), None, None, None]);
        assert_eq!(found("0,2\n"), [Some(1), None, None, None]);
        assert_eq!(found("0\n"), [None; 4]);
        assert_eq!(node_of(Path::new("/nonexistent"), "0000:1B:00.0"), None);
    }

    /// The kernel has the preference, and gives pages also where it cannot follow it.
    #[test]
    fn preferred_node_is_the_mapping_s_policy() {
        let bytes = 1 << 20;
        let at = super::super::host::map(bytes, None).unwrap();
        for node in [0, 63, 64] {
            prefer(node, at, bytes);
        }
        let maps = read_to_string("/proc/self/numa_maps").unwrap_or_default();
        let own = maps
            .lines()
            .find(|it| it.starts_with(&format!("{:x} ", at as usize)));
        // A kernel without NUMA has no such file, and a sandbox may refuse the call.
        if let Some(policy) = own.and_then(|it| it.split(' ').nth(1)) {
            assert!(["prefer:0", "default"].contains(&policy), "{policy}");
        }
        // SAFETY: the mapping of this test, which holds zeros.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 7, bytes) };
        // SAFETY: nothing uses it any more.
        unsafe { rustix::mm::munmap(at, bytes) }.unwrap();
    }
}
