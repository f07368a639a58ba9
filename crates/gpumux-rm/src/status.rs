//! RM's answers by name.

use std::fmt;

/// An `NV_STATUS` (source: `nvstatuscodes.h`, open GPU kernel modules 580-595).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RmStatus(pub u32);

macro_rules! statuses {
    ($($name:ident = $code:literal),* $(,)?) => {
        impl RmStatus {
            $(#[doc = concat!("`NV_ERR_", stringify!($name), "`, or `NV_OK`.")]
            pub const $name: Self = Self($code);)*

            /// The name without `NV_ERR_`, where gpumux knows it.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 { $($code => Some(stringify!($name)),)* _ => None }
            }
        }
    };
}

statuses! {
    OK = 0x00, BUFFER_TOO_SMALL = 0x02, BUSY_RETRY = 0x03, CARD_NOT_PRESENT = 0x05,
    GPU_IS_LOST = 0x0f, GPU_IN_FULLCHIP_RESET = 0x10, GPU_NOT_FULL_POWER = 0x11,
    GPU_UUID_NOT_FOUND = 0x12, ILLEGAL_ACTION = 0x16, IN_USE = 0x17,
    INSERT_DUPLICATE_NAME = 0x19, INSUFFICIENT_RESOURCES = 0x1a, INSUFFICIENT_PERMISSIONS = 0x1b,
    INVALID_ACCESS_TYPE = 0x1d, INVALID_ADDRESS = 0x1e, INVALID_ARGUMENT = 0x1f,
    INVALID_CHANNEL = 0x21, INVALID_CLASS = 0x22, INVALID_CLIENT = 0x23, INVALID_COMMAND = 0x24,
    INVALID_DATA = 0x25, INVALID_DEVICE = 0x26, INVALID_FLAGS = 0x29, INVALID_FUNCTION = 0x2a,
    INVALID_INDEX = 0x2c, INVALID_LIMIT = 0x2e, INVALID_OBJECT = 0x31,
    INVALID_OBJECT_HANDLE = 0x33, INVALID_OBJECT_NEW = 0x34, INVALID_OBJECT_OLD = 0x35,
    INVALID_OBJECT_PARENT = 0x36, INVALID_OFFSET = 0x37, INVALID_OPERATION = 0x38,
    INVALID_OWNER = 0x39, INVALID_PARAM_STRUCT = 0x3a, INVALID_PARAMETER = 0x3b,
    INVALID_POINTER = 0x3d, INVALID_REQUEST = 0x3f, INVALID_STATE = 0x40, NO_FREE_FIFOS = 0x4f,
    NO_MEMORY = 0x51, NOT_COMPATIBLE = 0x54, NOT_READY = 0x55, NOT_SUPPORTED = 0x56,
    OBJECT_NOT_FOUND = 0x57, OBJECT_TYPE_MISMATCH = 0x58, OPERATING_SYSTEM = 0x59,
    OUT_OF_RANGE = 0x5b, PROTECTION_FAULT = 0x5f, RC_ERROR = 0x60, RESET_REQUIRED = 0x62,
    STATE_IN_USE = 0x63, SIGNAL_PENDING = 0x64, TIMEOUT = 0x65, TIMEOUT_RETRY = 0x66,
    LIB_RM_VERSION_MISMATCH = 0x6a, PRIV_SEC_VIOLATION = 0x6b, GPU_IN_DEBUG_MODE = 0x6c,
    FEATURE_NOT_ENABLED = 0x6d, RESOURCE_LOST = 0x6e, FATAL_ERROR = 0x71, MEMORY_ERROR = 0x72,
    OPERATION_ABORTED = 0x8b, GENERIC = 0xffff,
}

impl fmt::Display for RmStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(
                f,
                "{} (0x{:x})",
                name.to_lowercase().replace('_', " "),
                self.0
            ),
            None => write!(f, "status 0x{:x}", self.0),
        }
    }
}

impl fmt::Debug for RmStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_print_their_name_or_their_number() {
        assert_eq!(RmStatus(0x23).to_string(), "invalid client (0x23)");
        assert_eq!(RmStatus(0x1234).to_string(), "status 0x1234");
    }
}
