// Memory: copies of all kinds, sets, pitched and pinned memory, symbols, pools, attributes of pointers.
#include "check.h"
#include <cstring>
#include <vector>

__constant__ int factor = 3;
__device__ int total;
__device__ float table[4] = {1.5f, 2.5f, 3.5f, 4.5f};

__global__ void scale(int *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        data[i] *= factor;
        atomicAdd(&total, data[i]);
    }
}
__global__ void look_up(float *out) { out[threadIdx.x] = table[threadIdx.x] * 2; }

int main() {
    const int n = 1000;
    std::vector<int> host(n), back(n);
    for (int i = 0; i < n; i++) host[i] = i;
    int *data, *other;
    CHECK(cudaMalloc(&data, n * sizeof(int)));
    CHECK(cudaMalloc(&other, n * sizeof(int)));
    CHECK(cudaMemcpy(data, host.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    scale<<<(n + 127) / 128, 128>>>(data, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(other, data, n * sizeof(int), cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy(back.data(), other, n * sizeof(int), cudaMemcpyDeviceToHost));
    int sum;
    CHECK(cudaMemcpyFromSymbol(&sum, total, sizeof(int)));
    say("scaled", back[999] == 2997 && back[1] == 3);
    say("summed by atomics", sum == 3 * 999 * 500);
    int five = 5;
    CHECK(cudaMemcpyToSymbol(factor, &five, sizeof(int)));
    scale<<<8, 128>>>(data, n);
    CHECK(cudaMemcpy(back.data(), data, n * sizeof(int), cudaMemcpyDeviceToHost));
    say("scaled by a changed constant", back[10] == 150);
    float *floats, result[4];
    CHECK(cudaMallocManaged(&floats, 4 * sizeof(float)));
    look_up<<<1, 4>>>(floats);
    CHECK(cudaDeviceSynchronize());
    memcpy(result, floats, sizeof(result));
    say("initialised table", result[0] == 3 && result[3] == 9);
    CHECK(cudaMemset(data, 0xff, n * sizeof(int)));
    CHECK(cudaMemcpy(back.data(), data, n * sizeof(int), cudaMemcpyDeviceToHost));
    say("set", back[0] == -1 && back[999] == -1);

    size_t pitch;
    char *rows;
    CHECK(cudaMallocPitch(&rows, &pitch, 100, 10));
    CHECK(cudaMemset2D(rows, pitch, 7, 100, 10));
    std::vector<char> flat(1000);
    CHECK(cudaMemcpy2D(flat.data(), 100, rows, pitch, 100, 10, cudaMemcpyDeviceToHost));
    bool sevens = true;
    for (char byte : flat) sevens &= byte == 7;
    say("rows", sevens && pitch >= 100);

    int *pinned, *mapped;
    CHECK(cudaHostAlloc(&pinned, n * sizeof(int), cudaHostAllocMapped));
    for (int i = 0; i < n; i++) pinned[i] = 1;
    CHECK(cudaHostGetDevicePointer(&mapped, pinned, 0));
    scale<<<8, 128>>>(mapped, n);
    CHECK(cudaDeviceSynchronize());
    say("pinned memory", pinned[0] == 5 && pinned[999] == 5);
    CHECK(cudaHostRegister(host.data(), n * sizeof(int), cudaHostRegisterDefault));
    cudaPointerAttributes of;
    CHECK(cudaPointerGetAttributes(&of, host.data()));
    say("registered", of.type == cudaMemoryTypeHost);
    CHECK(cudaHostUnregister(host.data()));
    CHECK(cudaPointerGetAttributes(&of, data));
    say("device pointer", of.type == cudaMemoryTypeDevice && of.device == 0);
    CHECK(cudaPointerGetAttributes(&of, &five));
    say("unknown pointer", of.type == cudaMemoryTypeUnregistered);

    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int *pooled;
    CHECK(cudaMallocAsync(&pooled, n * sizeof(int), stream));
    CHECK(cudaMemsetAsync(pooled, 0, n * sizeof(int), stream));
    CHECK(cudaMemcpyAsync(back.data(), pooled, n * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaFreeAsync(pooled, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("pool memory", back[0] == 0 && back[999] == 0);
    cudaMemPool_t pool;
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    unsigned long long threshold = 1 << 20, read = 0;
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &read));
    say("pool attribute", read == threshold);
    CHECK(cudaMemPoolTrimTo(pool, 0));

    size_t available, all;
    CHECK(cudaMemGetInfo(&available, &all));
    say("memory info", available > 0 && available < all);
    say("too much", cudaMalloc(&other, all * 2) == cudaErrorMemoryAllocation);
    say("error is forgotten", cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess);
    say("wrong free", cudaFree(&five) == cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK(cudaFree(data));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaDeviceReset());
    printf("done\n");
}
