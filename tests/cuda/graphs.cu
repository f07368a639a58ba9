// Graphs that are built node by node, changed, cloned and updated; many copies by one call.
#include "check.h"
#include <vector>

__global__ void add(int *data, int value) { data[threadIdx.x] += value; }
__global__ void times(int *data, int value) { data[threadIdx.x] *= value; }
static void count(void *by) { ++*(int *)by; }

static cudaGraphNode_t kernel(cudaGraph_t graph, std::vector<cudaGraphNode_t> after, void (*function)(int *, int), int *data, int value) {
    void *arguments[] = {&data, &value};
    cudaKernelNodeParams params = {};
    params.func = (void *)function;
    params.gridDim = dim3(1);
    params.blockDim = dim3(32);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after.data(), after.size(), &params));
    return node;
}

int main() {
    int *data, *other, *host, calls = 0;
    CHECK(cudaMalloc(&data, 128));
    CHECK(cudaMalloc(&other, 128));
    CHECK(cudaMallocHost(&host, 128));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));

    // Set, then (x + 2) * 5 by an edge that comes later, then out, and told.
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t multiplied = kernel(graph, {}, times, data, 5);
    cudaGraphNode_t added = kernel(graph, {}, add, data, 2);
    cudaMemsetParams zero = {};
    zero.dst = data;
    zero.elementSize = 4;
    zero.width = 32;
    zero.height = 1;
    zero.value = 1;
    cudaGraphNode_t set, copied, told, empty;
    CHECK(cudaGraphAddMemsetNode(&set, graph, nullptr, 0, &zero));
    CHECK(cudaGraphAddDependencies(graph, &set, &added, nullptr, 1));
    CHECK(cudaGraphAddDependencies(graph, &added, &multiplied, nullptr, 1));
    CHECK(cudaGraphAddEmptyNode(&empty, graph, &multiplied, 1));
    CHECK(cudaGraphAddMemcpyNode1D(&copied, graph, &empty, 1, host, data, 128, cudaMemcpyDefault));
    cudaHostNodeParams call = {count, &calls};
    CHECK(cudaGraphAddHostNode(&told, graph, &copied, 1, &call));
    size_t nodes = 0, roots = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    CHECK(cudaGraphGetRootNodes(graph, nullptr, &roots));
    say("nodes and roots", nodes == 6 && roots == 1);
    cudaGraphNodeType type;
    CHECK(cudaGraphNodeGetType(copied, &type));
    say("type", type == cudaGraphNodeTypeMemcpy);
    cudaGraphExec_t instance;
    CHECK(cudaGraphInstantiate(&instance, graph, 0));
    for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(instance, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("built", host[0] == 15 && host[31] == 15 && calls == 2);

    // Another argument in place.
    int seven = 7;
    void *arguments[] = {&data, &seven};
    cudaKernelNodeParams params = {};
    params.func = (void *)times;
    params.gridDim = dim3(1);
    params.blockDim = dim3(32);
    params.kernelParams = arguments;
    CHECK(cudaGraphExecKernelNodeSetParams(instance, multiplied, &params));
    CHECK(cudaGraphLaunch(instance, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("changed", host[0] == 21 && calls == 3);

    // A clone keeps what the original was, and can be part of another graph.
    cudaGraph_t clone, outer;
    CHECK(cudaGraphClone(&clone, graph));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphCreate(&outer, 0));
    cudaGraphNode_t child, last;
    CHECK(cudaGraphAddChildGraphNode(&child, outer, nullptr, 0, clone));
    last = kernel(outer, {child}, add, data, 100);
    cudaGraphExec_t whole;
    CHECK(cudaGraphInstantiate(&whole, outer, 0));
    CHECK(cudaGraphLaunch(whole, stream));
    CHECK(cudaMemcpyAsync(host, data, 128, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("child", host[0] == 115 && calls == 4);
    CHECK(cudaGraphDestroyNode(last));
    CHECK(cudaGraphGetNodes(outer, nullptr, &nodes));
    say("node destroyed", nodes == 1);

    // A capture of the same shape replaces what was captured before.
    cudaGraph_t captured[2];
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        CHECK(cudaMemsetAsync(data, 0, 128, stream));
        add<<<1, 32, 0, stream>>>(data, 10 + i);
        CHECK(cudaStreamEndCapture(stream, &captured[i]));
    }
    cudaGraphExec_t updated;
    CHECK(cudaGraphInstantiate(&updated, captured[0], 0));
    cudaGraphExecUpdateResultInfo info;
    CHECK(cudaGraphExecUpdate(updated, captured[1], &info));
    CHECK(cudaGraphLaunch(updated, stream));
    CHECK(cudaMemcpyAsync(host, data, 128, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("updated", info.result == cudaGraphExecUpdateSuccess && host[0] == 11);
    say("not updated", cudaGraphExecUpdate(updated, outer, &info) == cudaErrorGraphExecUpdateFailure && info.result != cudaGraphExecUpdateSuccess);
    cudaGetLastError();

    // Two copies by one call.
    void *to[] = {other, other + 16};
    const void *from[] = {data + 8, data};
    size_t sizes[] = {64, 64}, first = 0;
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    CHECK(cudaMemcpyBatchAsync(to, from, sizes, 2, &attributes, &first, 1, stream));
    CHECK(cudaMemcpyAsync(host, other, 128, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("batch", host[0] == 11 && host[31] == 11);
    for (auto it : {instance, whole, updated}) CHECK(cudaGraphExecDestroy(it));
    for (auto it : {clone, outer, captured[0], captured[1]}) CHECK(cudaGraphDestroy(it));
    printf("done\n");
}
