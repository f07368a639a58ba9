//! libgpumux_emu.so: the libcuda.so.1 and libnvidia-ml.so.1 of the emulated device
