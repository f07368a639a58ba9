// Streams, events, host functions, capture and graphs.
#include "check.h"
#include <atomic>
#include <thread>

__global__ void add(int *data, int value) { data[threadIdx.x] += value; }
__global__ void times(int *data, int value) { data[threadIdx.x] *= value; }

static std::atomic<int> called{0};
static void count(void *by) { called += *(int *)by; }
static void CUDART_CB callback(cudaStream_t, cudaError_t status, void *by) { called += status == cudaSuccess ? *(int *)by : 1000; }

int main() {
    int *data, host[32];
    CHECK(cudaMalloc(&data, sizeof(host)));
    CHECK(cudaMemset(data, 0, sizeof(host)));
    cudaStream_t one, two;
    CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    int least, greatest;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(cudaStreamCreateWithPriority(&two, cudaStreamNonBlocking, greatest));
    int priority;
    CHECK(cudaStreamGetPriority(two, &priority));
    say("priority", least == 0 && priority == greatest && greatest < 0);
    cudaEvent_t start, end, done;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));

    CHECK(cudaEventRecord(start, one));
    add<<<1, 32, 0, one>>>(data, 2);
    CHECK(cudaEventRecord(done, one));
    CHECK(cudaStreamWaitEvent(two, done, 0));
    times<<<1, 32, 0, two>>>(data, 10);
    CHECK(cudaEventRecord(end, two));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, end));
    CHECK(cudaMemcpy(host, data, sizeof(host), cudaMemcpyDeviceToHost));
    say("order across streams", host[0] == 20 && host[31] == 20);
    say("elapsed time", ms > 0 && ms < 10000);
    say("no time of such events", cudaEventElapsedTime(&ms, start, done) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();

    int by = 7;
    CHECK(cudaLaunchHostFunc(one, count, &by));
    CHECK(cudaStreamAddCallback(one, callback, &by, 0));
    CHECK(cudaStreamSynchronize(one));
    say("host functions", called == 14);

    cudaGraph_t graph;
    cudaGraphExec_t instance;
    CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal));
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(one, &status));
    say("capturing", status == cudaStreamCaptureStatusActive);
    add<<<1, 32, 0, one>>>(data, 1);
    CHECK(cudaEventRecord(done, one));
    CHECK(cudaStreamWaitEvent(two, done, 0));
    times<<<1, 32, 0, two>>>(data, 2);
    CHECK(cudaEventRecord(done, two));
    CHECK(cudaStreamWaitEvent(one, done, 0));
    add<<<1, 32, 0, one>>>(data, 3);
    CHECK(cudaStreamEndCapture(one, &graph));
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    say("captured kernels", nodes == 3);
    CHECK(cudaMemcpy(host, data, sizeof(host), cudaMemcpyDeviceToHost));
    say("capture runs nothing", host[5] == 20);
    CHECK(cudaGraphInstantiate(&instance, graph, 0));
    for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(instance, two));
    CHECK(cudaStreamSynchronize(two));
    CHECK(cudaMemcpy(host, data, sizeof(host), cudaMemcpyDeviceToHost));
    say("graph launched twice", host[5] == ((20 + 1) * 2 + 3 + 1) * 2 + 3);
    CHECK(cudaGraphExecDestroy(instance));
    CHECK(cudaGraphDestroy(graph));

    // Each thread's own default stream and the legacy one.
    add<<<1, 32, 0, cudaStreamPerThread>>>(data, 1);
    CHECK(cudaStreamSynchronize(cudaStreamPerThread));
    std::thread([&] { add<<<1, 32, 0, cudaStreamLegacy>>>(data, 1); }).join();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(host, data, sizeof(host), cudaMemcpyDeviceToHost));
    say("default streams", host[0] == ((20 + 1) * 2 + 3 + 1) * 2 + 3 + 2);
    say("idle", cudaStreamQuery(one) == cudaSuccess && cudaEventQuery(end) == cudaSuccess);
    CHECK(cudaStreamDestroy(one));
    CHECK(cudaStreamDestroy(two));
    printf("done\n");
}
