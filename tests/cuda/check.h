// What the programs share: each prints one line per thing that it tried, the same on every device.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        if (error_ != cudaSuccess) {                                                               \
            printf("%s: %s\n", #call, cudaGetErrorName(error_));                                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

// A line of the report: what, and whether it holds.
inline void say(const char *what, bool holds) { printf("%s: %s\n", what, holds ? "yes" : "NO"); }
