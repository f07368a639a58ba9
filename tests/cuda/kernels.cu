// What kernels compute: shared memory, warps, atomics, calls, printf, cooperation, occupancy.
#include "check.h"
#include <cmath>
#include <cooperative_groups.h>
#include <vector>

namespace cg = cooperative_groups;

template <typename T> __global__ void reduce(const T *in, T *out, int n) {
    extern __shared__ char memory[];
    T *shared = (T *)memory;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    shared[threadIdx.x] = i < n ? in[i] : T(0);
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(out, shared[0]);
}

__global__ void warps(int *out) {
    int lane = threadIdx.x % 32, value = lane;
    for (int by = 16; by > 0; by /= 2) value += __shfl_down_sync(~0u, value, by);
    value = __shfl_sync(~0u, value, 0);
    unsigned odd = __ballot_sync(~0u, lane & 1);
    int all = __all_sync(~0u, value == 496), votes = __syncthreads_count(lane == 3);
    out[threadIdx.x] = value + __popc(odd) * all + votes + __reduce_max_sync(~0u, lane);
}

__noinline__ __device__ long fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
__global__ void recursive(long *out, int n) { *out = fibonacci(n); }

__global__ void transpose(const float *in, float *out, int n) {
    __shared__ float tile[16][17];
    tile[threadIdx.y][threadIdx.x] = in[(blockIdx.y * 16 + threadIdx.y) * n + blockIdx.x * 16 + threadIdx.x];
    __syncthreads();
    out[(blockIdx.x * 16 + threadIdx.y) * n + blockIdx.y * 16 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

__global__ void curves(const float *x, float *y, double *z, int n) {
    int i = threadIdx.x;
    if (i < n) {
        y[i] = expf(x[i]) + sinf(x[i]) * sqrtf(fabsf(x[i])) + powf(2.0f, x[i]) / 3.0f;
        z[i] = exp((double)x[i]) + cos((double)x[i]) + log(1.5 + x[i] * x[i]);
    }
}

__global__ void histogram(const unsigned char *in, int n, unsigned *bins) {
    __shared__ unsigned local[16];
    if (threadIdx.x < 16) local[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[in[i] % 16], 1u);
    __syncthreads();
    if (threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

__global__ void compare_and_swap(unsigned long long *out) {
    unsigned long long seen = *out, before;
    do {
        before = seen;
        seen = atomicCAS(out, before, before + threadIdx.x);
    } while (seen != before);
}

__global__ void speak(int n, double x, const char *who) {
    if (threadIdx.x == 1) printf("hello from %s: %d of %d, %.3f, %5s|\n", who, threadIdx.x, n, x, "end");
}

__global__ void tiles(int *out) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int value = tile.thread_rank();
    for (int by = tile.size() / 2; by > 0; by /= 2) value += tile.shfl_xor(value, by);
    out[threadIdx.x] = value + (int)tile.meta_group_rank();
}

__global__ void last_block(unsigned *ticket, int *out) {
    __shared__ bool last;
    // One thread only: were another's store later than the ticket, it would be after the sum.
    if (threadIdx.x == 0) {
        out[blockIdx.x] = blockIdx.x;
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < gridDim.x; i++) sum += ((volatile int *)out)[i];
        out[0] = sum;
    }
}

__global__ void wait_for_neighbour(volatile int *flags) {
    if (blockIdx.x > 0) flags[blockIdx.x - 1] = 1;
    while (blockIdx.x + 1 < gridDim.x && !flags[blockIdx.x]) {
    }
}

static int *device(size_t bytes) {
    int *made;
    CHECK(cudaMalloc(&made, bytes));
    CHECK(cudaMemset(made, 0, bytes));
    return made;
}

int main() {
    const int n = 5000;
    std::vector<int> ints(n);
    std::vector<float> floats(n);
    for (int i = 0; i < n; i++) ints[i] = i % 7, floats[i] = 0.5f;
    int *in = device(n * 4), *out = device(4096 * 8);
    CHECK(cudaMemcpy(in, ints.data(), n * 4, cudaMemcpyHostToDevice));
    reduce<int><<<20, 256, 256 * 4>>>(in, out, n);
    int sum, expected = 0;
    for (int value : ints) expected += value;
    CHECK(cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost));
    say("sum of integers", sum == expected);
    CHECK(cudaMemset(out, 0, 8));
    CHECK(cudaMemcpy(in, floats.data(), n * 4, cudaMemcpyHostToDevice));
    reduce<float><<<20, 256, 256 * 4>>>((float *)in, (float *)out, n);
    float fsum;
    CHECK(cudaMemcpy(&fsum, out, 4, cudaMemcpyDeviceToHost));
    say("sum of floats", fsum == 2500.0f);

    int lanes[64];
    warps<<<1, 64>>>(out);
    CHECK(cudaMemcpy(lanes, out, sizeof(lanes), cudaMemcpyDeviceToHost));
    say("warp functions", lanes[0] == 496 + 16 + 2 + 31 && lanes[63] == lanes[0]);
    tiles<<<1, 32>>>(out);
    CHECK(cudaMemcpy(lanes, out, 128, cudaMemcpyDeviceToHost));
    say("tiles", lanes[0] == 28 && lanes[31] == 31);

    long fib;
    recursive<<<1, 1>>>((long *)out, 15);
    CHECK(cudaMemcpy(&fib, out, 8, cudaMemcpyDeviceToHost));
    say("recursion", fib == 610);

    std::vector<float> square(64 * 64), turned(64 * 64);
    for (int i = 0; i < 64 * 64; i++) square[i] = i;
    int *from = device(64 * 64 * 4), *to = device(64 * 64 * 4);
    CHECK(cudaMemcpy(from, square.data(), 64 * 64 * 4, cudaMemcpyHostToDevice));
    transpose<<<dim3(4, 4), dim3(16, 16)>>>((float *)from, (float *)to, 64);
    CHECK(cudaMemcpy(turned.data(), to, 64 * 64 * 4, cudaMemcpyDeviceToHost));
    bool right = true;
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < 64; j++) right &= turned[i * 64 + j] == square[j * 64 + i];
    say("transposed", right);

    float x[32], y[32];
    double z[32];
    for (int i = 0; i < 32; i++) x[i] = -4 + i * 0.25f;
    CHECK(cudaMemcpy(in, x, sizeof(x), cudaMemcpyHostToDevice));
    curves<<<1, 32>>>((float *)in, (float *)out, (double *)to, 32);
    CHECK(cudaMemcpy(y, out, sizeof(y), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(z, to, sizeof(z), cudaMemcpyDeviceToHost));
    bool near = true;
    for (int i = 0; i < 32; i++) {
        double a = exp((double)x[i]) + sin((double)x[i]) * sqrt(fabs((double)x[i])) + pow(2, (double)x[i]) / 3;
        double b = exp((double)x[i]) + cos((double)x[i]) + log(1.5 + (double)x[i] * x[i]);
        near &= fabs(y[i] - a) < 1e-5 * fmax(1, fabs(a)) && fabs(z[i] - b) < 1e-12 * fmax(1, fabs(b));
    }
    say("functions", near);

    unsigned bins[16];
    CHECK(cudaMemset(out, 0, 64));
    histogram<<<4, 128>>>((unsigned char *)from, 64 * 64 * 4, (unsigned *)out);
    CHECK(cudaMemcpy(bins, out, 64, cudaMemcpyDeviceToHost));
    unsigned all = 0;
    for (unsigned bin : bins) all += bin;
    say("histogram", all == 64 * 64 * 4);

    unsigned long long swapped;
    CHECK(cudaMemset(out, 0, 8));
    compare_and_swap<<<2, 100>>>((unsigned long long *)out);
    CHECK(cudaMemcpy(&swapped, out, 8, cudaMemcpyDeviceToHost));
    say("compare and swap", swapped == 2 * 4950);

    const char *name;
    CHECK(cudaMalloc((void **)&name, 16));
    CHECK(cudaMemcpy((void *)name, "device", 7, cudaMemcpyHostToDevice));
    speak<<<1, 2>>>(2, 3.14159, name);
    CHECK(cudaDeviceSynchronize());

    CHECK(cudaMemset(in, 0, 4));
    last_block<<<10, 32>>>((unsigned *)in, out);
    CHECK(cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost));
    say("last block", sum == 45);
    CHECK(cudaMemset(in, 0, 64));
    wait_for_neighbour<<<8, 1>>>(in);
    CHECK(cudaDeviceSynchronize());
    say("blocks wait for each other", true);

    cudaFuncAttributes of;
    CHECK(cudaFuncGetAttributes(&of, transpose));
    say("attributes", of.sharedSizeBytes >= 16 * 17 * 4 && of.sharedSizeBytes < 4096 && of.maxThreadsPerBlock > 0);
    int blocks;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, transpose, 256, 0));
    say("occupancy", blocks > 0 && blocks <= 32);
    CHECK(cudaFuncSetAttribute(reduce<int>, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000));
    reduce<int><<<1, 256, 100000>>>(in, out, 1);
    say("much shared memory", cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess);
    reduce<int><<<1, 2048, 64>>>(in, out, 1);
    cudaError_t refused = cudaGetLastError();
    say("too many threads", refused == cudaErrorInvalidConfiguration || refused == cudaErrorInvalidValue);
    printf("done\n");
}
