// nvcc: -rdc=true
// The kernels as a unit that is linked with others, as NVIDIA's samples are made.
#include "kernels.cu"
