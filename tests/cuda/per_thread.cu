// nvcc: --default-stream per-thread
// Every call in the form for default streams per thread.
#include "check.h"
#include <cstring>
#include <thread>
#include <vector>

__global__ void add(int *data, int value) { data[threadIdx.x] += value; }
static void set(void *flag) { *(int *)flag = 1; }

static void work(int *sum, int value) {
    int *data, *pinned;
    cudaEvent_t done;
    CHECK(cudaMalloc(&data, 128));
    CHECK(cudaMallocHost(&pinned, 128));
    CHECK(cudaEventCreate(&done));
    CHECK(cudaMemset(data, 0, 128));
    CHECK(cudaMemsetAsync(data, 0, 128, 0));
    for (int i = 0; i < 10; i++) add<<<1, 32>>>(data, value);
    CHECK(cudaMemcpyAsync(pinned, data, 128, cudaMemcpyDeviceToHost, 0));
    CHECK(cudaEventRecord(done, 0));
    CHECK(cudaEventSynchronize(done));
    *sum = pinned[0] + pinned[31];
    int told = 0;
    CHECK(cudaLaunchHostFunc(0, set, &told));
    CHECK(cudaStreamSynchronize(0));
    if (!told) *sum = -1;
    cudaLaunchConfig_t config = {};
    config.gridDim = config.blockDim = dim3(1);
    CHECK(cudaLaunchKernelEx(&config, add, data, 1));
    CHECK(cudaMemcpy(pinned, data, 4, cudaMemcpyDeviceToHost));
    if (pinned[0] != 10 * value + 1) *sum = -2;
    if (cudaStreamQuery(0) != cudaSuccess) *sum = -3;
    int *pooled;
    CHECK(cudaMallocAsync(&pooled, 1 << 20, 0));
    CHECK(cudaMemcpyAsync(pooled, data, 128, cudaMemcpyDeviceToDevice, 0));
    CHECK(cudaMemcpy2DAsync(pinned, 8, pooled, 16, 8, 4, cudaMemcpyDeviceToHost, 0));
    CHECK(cudaFreeAsync(pooled, 0));
    CHECK(cudaStreamSynchronize(0));
    if (pinned[2] != 10 * value) *sum = -4;
    CHECK(cudaFree(data));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaEventDestroy(done));
}

int main() {
    std::vector<int> sums(8);
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++) threads.emplace_back(work, &sums[i], i + 1);
    for (auto &thread : threads) thread.join();
    bool right = true;
    for (int i = 0; i < 8; i++) right &= sums[i] == 20 * (i + 1);
    say("eight threads", right);

    cudaGraph_t graph;
    cudaGraphExec_t instance;
    int *data, host[32];
    CHECK(cudaMalloc(&data, 128));
    CHECK(cudaMemset(data, 0, 128));
    CHECK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeThreadLocal));
    add<<<1, 32>>>(data, 3);
    CHECK(cudaStreamEndCapture(cudaStreamPerThread, &graph));
    CHECK(cudaGraphInstantiate(&instance, graph, 0));
    for (int i = 0; i < 5; i++) CHECK(cudaGraphLaunch(instance, 0));
    CHECK(cudaMemcpy(host, data, 128, cudaMemcpyDeviceToHost));
    say("graph", host[0] == 15 && host[31] == 15);
    printf("done\n");
}
