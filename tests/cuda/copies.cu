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

    // Arrays take memory, and are copied to and from by rows.
    size_t before, after, total;
    CHECK(cudaMemGetInfo(&before, &total));
    cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
    cudaArray_t large, plane;
    CHECK(cudaMallocArray(&large, &format, 4096, 2048));
    CHECK(cudaMemGetInfo(&after, &total));
    say("arrays take memory", before - after >= 4096ull * 2048 * 4);
    CHECK(cudaFreeArray(large));
    CHECK(cudaMemGetInfo(&after, &total));
    say("and give it back", before == after);
    CHECK(cudaMallocArray(&plane, &format, 8, 4));
    cudaExtent of;
    unsigned flags;
    CHECK(cudaArrayGetInfo(&format, &of, &flags, plane));
    say("shape of an array", format.x == 32 && of.width == 8 && of.height == 4 && of.depth == 0);
    int rows[4][8], back[4][8] = {};
    for (int i = 0; i < 32; i++) rows[i / 8][i % 8] = i;
    CHECK(cudaMemcpy2DToArray(plane, 0, 0, rows, 32, 32, 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2DToArrayAsync(plane, 8, 1, &rows[3][0], 32, 8, 1, cudaMemcpyHostToDevice, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy2DFromArray(back, 32, plane, 0, 0, 32, 4, cudaMemcpyDeviceToHost));
    say("rows of an array", back[0][7] == 7 && back[1][1] == 9 && back[1][2] == 24 && back[1][3] == 25 && back[3][7] == 31);
    say("past its end", cudaMemcpy2DToArray(plane, 4, 0, rows, 32, 32, 4, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK(cudaFreeArray(plane));
    cudaMipmappedArray_t levels;
    CHECK(cudaMallocMipmappedArray(&levels, &format, make_cudaExtent(16, 8, 0), 3));
    CHECK(cudaGetMipmappedArrayLevel(&plane, levels, 1));
    CHECK(cudaArrayGetInfo(&format, &of, &flags, plane));
    say("a level", of.width == 8 && of.height == 4);
    CHECK(cudaFreeMipmappedArray(levels));

    // Hints for managed memory are checked.
    cudaMemLocation nowhere = {cudaMemLocationTypeDevice, 1000};
    say("prefetched to nowhere", cudaMemPrefetchAsync(managed, n * 4, nowhere, 0, stream) == cudaErrorInvalidDevice);
    say("no such advice", cudaMemAdvise(managed, n * 4, (cudaMemoryAdvise)100, device) == cudaErrorInvalidValue);
    say("not managed", cudaMemAdvise(a, n * 4, cudaMemAdviseSetReadMostly, device) == cudaErrorInvalidValue);
    cudaGetLastError();

    // A pool does not count what is freed, also before its stream has come to that.
    cudaMemPool_t pool;
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    unsigned long long used;
    int *pooled;
    CHECK(cudaMallocAsync(&pooled, n * 4, stream));
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    say("used of a pool", used >= n * 4);
    for (int i = 0; i < 100; i++) fill<<<1, 256, 0, stream>>>(a, n, 9);
    CHECK(cudaFreeAsync(pooled, stream));
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    say("freed in a pool", used == 0);
    CHECK(cudaStreamSynchronize(stream));

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
