//! Messages and shared page between shim and daemon
