//! CUDA driver declarations and the table of the driver at hand
