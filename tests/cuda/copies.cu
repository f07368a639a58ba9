// Copies and sets of all shapes, by themselves, in streams and in graphs; launches by attributes.
#include "check.h"
#include <cstring>
#include <vector>

__global__ void fill(int *data, int n, int from) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) data[i] = from + i;
}

int main() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    const int n = 1 << 16;
    int *a, *b, *host;
    CHECK(cudaMalloc(&a, n * 4));
    CHECK(cudaMalloc(&b, n * 4));
    CHECK(cudaMallocHost(&host, n * 4));
    fill<<<1, 256, 0, stream>>>(a, n, 0);
    CHECK(cudaMemcpyAsync(b, a, n * 4, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaMemcpyAsync(host, b, n * 4, cudaMemcpyDefault, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("by way of another buffer", host[0] == 0 && host[n - 1] == n - 1);
    CHECK(cudaMemcpyPeerAsync(b, 0, a + 1, 0, 4, stream));
    CHECK(cudaMemcpyPeer(b + 1, 0, a + 2, 0, 4));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(host, b, 8, cudaMemcpyDeviceToHost));
    say("peer", host[0] == 1 && host[1] == 2);

    // A box of 8 x 4 x 3 bytes out of the middle of a volume.
    cudaExtent extent = make_cudaExtent(64, 16, 8);
    cudaPitchedPtr volume;
    CHECK(cudaMalloc3D(&volume, extent));
    CHECK(cudaMemset3D(volume, 1, extent));
    CHECK(cudaMemset3DAsync(volume, 2, make_cudaExtent(32, 16, 8), stream));
    CHECK(cudaStreamSynchronize(stream));
    char box[8 * 4 * 3];
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = volume;
    copy.srcPos = make_cudaPos(28, 2, 1);
    copy.dstPtr = make_cudaPitchedPtr(box, 8, 8, 4);
    copy.extent = make_cudaExtent(8, 4, 3);
    copy.kind = cudaMemcpyDeviceToHost;
    CHECK(cudaMemcpy3D(&copy));
    bool right = true;
    for (int i = 0; i < (int)sizeof(box); i++) right &= box[i] == (i % 8 < 4 ? 2 : 1);
    say("box", right);
    memset(box, 0, sizeof(box));
    CHECK(cudaMemcpy3DAsync(&copy, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("box in a stream", box[0] == 2 && box[7] == 1 && box[95] == 1);
    CHECK(cudaMemset2DAsync(a, 1024, 3, 16, 4, stream));
    CHECK(cudaMemcpy2DAsync(host, 16, a, 1024, 16, 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("rows in a stream", host[0] == 0x03030303 && host[15] == 0x03030303);

    // Sets by 8, 16 and 32 bits are one call each in the driver.
    CHECK(cudaMemsetAsync(a, 0xab, n * 4, stream));
    CHECK(cudaMemcpyAsync(host, a, n * 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("set", (unsigned)host[n - 1] == 0xabababab);

    // Managed memory goes where it is told, and is the same everywhere.
    int *managed;
    CHECK(cudaMallocManaged(&managed, n * 4));
    for (int i = 0; i < n; i++) managed[i] = 1;
    cudaMemLocation device = {cudaMemLocationTypeDevice, 0}, cpu = {cudaMemLocationTypeHost, 0};
    CHECK(cudaMemPrefetchAsync(managed, n * 4, device, 0, stream));
    fill<<<1, 256, 0, stream>>>(managed, n, 7);
    CHECK(cudaMemPrefetchAsync(managed, n * 4, cpu, 0, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("managed", managed[0] == 7 && managed[n - 1] == n + 6);

    // Copies and sets as nodes.
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemcpyAsync(a, host, 1024, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemsetAsync(a + 8, 0, 32, stream));
    CHECK(cudaMemcpyAsync(b, a, 1024, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaMemcpyAsync(host + 256, b, 1024, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&instance, graph, 0));
    CHECK(cudaGraphUpload(instance, stream));
    for (int round = 1; round < 3; round++) {
        for (int i = 0; i < 256; i++) host[i] = round * 1000 + i;
        CHECK(cudaGraphLaunch(instance, stream));
        CHECK(cudaStreamSynchronize(stream));
        say("copies of a graph", host[256] == round * 1000 && host[256 + 8] == 0 && host[511] == round * 1000 + 255);
    }

    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(128);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributePriority;
    attribute.val.priority = 0;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, fill, a, n, 9));
    CHECK(cudaMemcpyAsync(host, a, 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    say("launched by attributes", host[0] == 9);
    printf("done\n");
}
