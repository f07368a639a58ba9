//! Latency and batch loops through the CUDA driver API, for real and emulated devices
