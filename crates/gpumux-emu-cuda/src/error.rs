//! CUDA's error codes by name.

use std::ffi::CStr;

use gpumux_emu::{client::ClientError, protocol::Refusal};
use gpumux_rm::RmStatus;

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CuError(pub(crate) i32);

/// What the functions behind the border return.
pub(crate) type Result<T = ()> = std::result::Result<T, CuError>;

macro_rules! errors {
    ($($name:ident = $code:literal $text:literal;)*) => {
        #[allow(dead_code)]
        impl CuError {
            $(pub(crate) const $name: Self = Self($code);)*
        }

        /// CUDA's name and sentence for a code.
        pub(crate) fn describe(code: i32) -> Option<(&'static CStr, &'static CStr)> {
            let (name, text) = match code {
                0 => ("CUDA_SUCCESS\0", "no error\0"),
                $($code => (
                    concat!("CUDA_ERROR_", stringify!($name), "\0"),
                    concat!($text, "\0"),
                ),)*
                _ => return None,
            };
            let c = |text: &'static str| CStr::from_bytes_with_nul(text.as_bytes()).ok();
            Some((c(name)?, c(text)?))
        }
    };
}

// Numbers from cuda.h of CUDA 13.0.
errors! {
    INVALID_VALUE = 1 "invalid argument";
    OUT_OF_MEMORY = 2 "out of memory";
    NOT_INITIALIZED = 3 "initialization error";
    DEINITIALIZED = 4 "driver shutting down";
    STUB_LIBRARY = 34 "CUDA driver is a stub library";
    DEVICE_UNAVAILABLE = 46 "CUDA-capable device(s) is/are busy or unavailable";
    NO_DEVICE = 100 "no CUDA-capable device is detected";
    INVALID_DEVICE = 101 "invalid device ordinal";
    INVALID_IMAGE = 200 "device kernel image is invalid";
    INVALID_CONTEXT = 201 "invalid device context";
    MAP_FAILED = 205 "mapping of buffer object failed";
    UNMAP_FAILED = 206 "unmapping of buffer object failed";
    ALREADY_MAPPED = 208 "resource already mapped";
    NO_BINARY_FOR_GPU = 209 "no kernel image is available for execution on the device";
    NOT_MAPPED = 211 "resource not mapped";
    UNSUPPORTED_LIMIT = 215 "limit is not supported on this architecture";
    PEER_ACCESS_UNSUPPORTED = 217 "peer access is not supported between these two devices";
    INVALID_PTX = 218 "a PTX JIT compilation failed";
    FILE_NOT_FOUND = 301 "file not found";
    OPERATING_SYSTEM = 304 "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400 "invalid resource handle";
    ILLEGAL_STATE = 401 "the operation cannot be performed in the present state";
    NOT_FOUND = 500 "named symbol not found";
    NOT_READY = 600 "device not ready";
    ILLEGAL_ADDRESS = 700 "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701 "too many resources requested for launch";
    LAUNCH_TIMEOUT = 702 "the launch timed out and was terminated";
    PEER_ACCESS_ALREADY_ENABLED = 704 "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705 "peer access has not been enabled";
    PRIMARY_CONTEXT_ACTIVE = 708 "cannot set while device is active in this process";
    CONTEXT_IS_DESTROYED = 709 "context is destroyed";
    ASSERT = 710 "device-side assert triggered";
    HOST_MEMORY_ALREADY_REGISTERED = 712 "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713 "pointer does not correspond to a registered memory region";
    HARDWARE_STACK_ERROR = 714 "hardware stack error";
    ILLEGAL_INSTRUCTION = 715 "an illegal instruction was encountered";
    MISALIGNED_ADDRESS = 716 "misaligned address";
    LAUNCH_FAILED = 719 "unspecified launch failure";
    COOPERATIVE_LAUNCH_TOO_LARGE = 720 "too many blocks in cooperative launch";
    NOT_PERMITTED = 800 "operation not permitted";
    NOT_SUPPORTED = 801 "operation not supported";
    MPS_CONNECTION_FAILED = 805 "MPS client failed to connect to the MPS control daemon or the MPS server";
    MPS_RPC_FAILURE = 806 "the remote procedural call between the MPS server and the MPS client failed";
    MPS_SERVER_NOT_READY = 807 "MPS server is not ready to accept new MPS client requests";
    STREAM_CAPTURE_UNSUPPORTED = 900 "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901 "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902 "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903 "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904 "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905 "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906 "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907 "operation not permitted on an event last recorded in a capturing stream";
    INVALID_CLUSTER_SIZE = 912 "the requested cluster size is not supported";
    GRAPH_EXEC_UPDATE_FAILURE = 910 "the graph update was not performed because it included changes which violated constraints specific to instantiated graph update";
    UNKNOWN = 999 "unknown error";
}

impl From<ClientError> for CuError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Refused(Refusal::OutOfMemory | Refusal::Host)
            | ClientError::Rm(RmStatus::NO_MEMORY) => Self::OUT_OF_MEMORY,
            ClientError::Refused(_) | ClientError::Rm(_) => Self::INVALID_VALUE,
            ClientError::Lost(_) => Self::DEVICE_UNAVAILABLE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_cudas_names() {
        let (name, text) = describe(CuError::OUT_OF_MEMORY.0).unwrap();
        assert_eq!(name, c"CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(text, c"out of memory");
        assert_eq!(describe(0).unwrap().0, c"CUDA_SUCCESS");
        assert!(describe(12345).is_none());
    }
}
