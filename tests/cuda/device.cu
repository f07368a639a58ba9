// What the device is, and the errors that end a context.
#include "check.h"
#include <cstring>

__global__ void store(int *at) { *at = 1; }
__global__ void stop() { __trap(); }

int main(int argc, char **argv) {
    int count, version, runtime;
    CHECK(cudaGetDeviceCount(&count));
    CHECK(cudaDriverGetVersion(&version));
    CHECK(cudaRuntimeGetVersion(&runtime));
    say("devices", count >= 1);
    say("driver", version >= 12000);
    cudaDeviceProp is;
    CHECK(cudaGetDeviceProperties(&is, 0));
    say("Hopper", is.major == 9 && is.minor == 0);
    say("properties", is.multiProcessorCount >= 100 && is.warpSize == 32 && is.maxThreadsPerBlock == 1024 && is.sharedMemPerBlock == 49152 && is.totalGlobalMem > (60ull << 30));
    char bus[32];
    CHECK(cudaDeviceGetPCIBusId(bus, sizeof(bus), 0));
    int same;
    CHECK(cudaDeviceGetByPCIBusId(&same, bus));
    say("bus id", same == 0 && strlen(bus) >= 12);
    int value;
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    say("attribute", value == is.multiProcessorCount);
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrCooperativeLaunch, 0));
    say("cooperative launch", value == 1);
    size_t stack;
    CHECK(cudaDeviceGetLimit(&stack, cudaLimitStackSize));
    CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 4096));
    say("limits", stack == 1024);
    say("no such device", cudaSetDevice(count) == cudaErrorInvalidDevice);
    cudaGetLastError();
    int *data;
    CHECK(cudaMalloc(&data, 4));
    if (argc > 1 && !strcmp(argv[1], "trap")) {
        stop<<<1, 1>>>();
        printf("trap: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    } else {
        store<<<1, 1>>>((int *)16);
        printf("wild store: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    }
    store<<<1, 1>>>(data);
    say("nothing works any more", cudaDeviceSynchronize() != cudaSuccess && cudaMemset(data, 0, 4) != cudaSuccess);
    printf("done\n");
}
