//! A virtual-time GPU that runs the policies unchanged
