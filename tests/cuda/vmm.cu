// Virtual memory of the driver: addresses, handles, what moves between them, sharing by file.
#include "check.h"
#include <cuda.h>
#include <unistd.h>
#include <vector>

__global__ void add(int *data, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += value;
}

#define DRIVER(call)                                                                               \
    do {                                                                                           \
        CUresult error_ = (call);                                                                  \
        if (error_ != CUDA_SUCCESS) printf("%s: NO, %d\n", #call, error_), exit(1);                \
    } while (0)

template <typename F> static F *entry(const char *name) {
    void *found;
    cudaDriverEntryPointQueryResult result;
    CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) printf("%s: NO\n", name), exit(1);
    return (F *)found;
}
#define ENTRY(name) static auto *name##_ = entry<decltype(name)>(#name)

int main() {
    CHECK(cudaFree(nullptr));
    ENTRY(cuMemAddressReserve);
    ENTRY(cuMemAddressFree);
    ENTRY(cuMemCreate);
    ENTRY(cuMemRelease);
    ENTRY(cuMemMap);
    ENTRY(cuMemUnmap);
    ENTRY(cuMemSetAccess);
    ENTRY(cuMemGetAccess);
    ENTRY(cuMemGetAllocationGranularity);
    ENTRY(cuMemGetAllocationPropertiesFromHandle);
    ENTRY(cuMemRetainAllocationHandle);
    ENTRY(cuMemExportToShareableHandle);
    ENTRY(cuMemImportFromShareableHandle);
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    size_t size;
    DRIVER(cuMemGetAllocationGranularity_(&size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    say("granularity", size == 2 << 20);

    CUdeviceptr base, other;
    DRIVER(cuMemAddressReserve_(&base, 4 * size, 0, 0, 0));
    DRIVER(cuMemAddressReserve_(&other, 4 * size, 0, 0, 0));
    CUmemGenericAllocationHandle handles[2];
    for (auto &handle : handles) DRIVER(cuMemCreate_(&handle, size, &prop, 0));
    for (int i = 0; i < 2; i++) DRIVER(cuMemMap_(base + i * size, size, 0, handles[i], 0));
    DRIVER(cuMemSetAccess_(base, 2 * size, &access, 1));
    unsigned long long flags;
    DRIVER(cuMemGetAccess_(&flags, &access.location, base + size));
    say("access", flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemAllocationProp found;
    DRIVER(cuMemGetAllocationPropertiesFromHandle_(&found, handles[0]));
    say("properties", found.type == prop.type && found.location.type == prop.location.type && found.location.id == 0);

    // One range over two handles.
    int n = 2 * size / sizeof(int);
    CHECK(cudaMemset((void *)base, 0, 2 * size));
    add<<<(n + 255) / 256, 256>>>((int *)base, n, 5);
    std::vector<int> host(n);
    CHECK(cudaMemcpy(host.data(), (void *)base, 2 * size, cudaMemcpyDeviceToHost));
    bool fives = true;
    for (int value : host) fives &= value == 5;
    say("a kernel over two handles", fives);

    // The second handle moves and keeps what is in it; the first is seen in two places.
    DRIVER(cuMemUnmap_(base + size, size));
    DRIVER(cuMemMap_(other, size, 0, handles[1], 0));
    DRIVER(cuMemMap_(other + size, size, 0, handles[0], 0));
    DRIVER(cuMemSetAccess_(other, 2 * size, &access, 1));
    add<<<1, 256>>>((int *)base, 256, 1);
    CHECK(cudaMemcpy(host.data(), (void *)other, 2 * size, cudaMemcpyDeviceToHost));
    say("moved", host[0] == 5 && host[n / 2 - 1] == 5);
    say("seen twice", host[n / 2] == 6 && host[n / 2 + 256] == 5);

    CUmemGenericAllocationHandle again, imported;
    DRIVER(cuMemRetainAllocationHandle_(&again, (void *)(other + 4096)));
    say("handle of an address", again == handles[1]);
    DRIVER(cuMemRelease_(again));
    int file;
    DRIVER(cuMemExportToShareableHandle_(&file, handles[1], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    DRIVER(cuMemImportFromShareableHandle_(&imported, (void *)(long)file, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    say("file", close(file) == 0);
    DRIVER(cuMemMap_(base + size, size, 0, imported, 0));
    DRIVER(cuMemSetAccess_(base + size, size, &access, 1));
    CHECK(cudaMemset((void *)other, 1, 4));
    int shared;
    CHECK(cudaMemcpy(&shared, (void *)(base + size), 4, cudaMemcpyDeviceToHost));
    say("shared by file", shared == 0x01010101);

    // Mistakes.
    CUmemGenericAllocationHandle wrong;
    say("size that is not a multiple", cuMemCreate_(&wrong, size + 4096, &prop, 0) == CUDA_ERROR_INVALID_VALUE);
    say("mapped twice", cuMemMap_(base, size, 0, handles[0], 0) != CUDA_SUCCESS);
    say("too large", cuMemCreate_(&wrong, 1ull << 40, &prop, 0) == CUDA_ERROR_OUT_OF_MEMORY);

    // A handle lives as long as it is mapped.
    DRIVER(cuMemRelease_(handles[0]));
    CHECK(cudaMemcpy(&shared, (void *)(other + size), 4, cudaMemcpyDeviceToHost));
    say("released and still mapped", shared == 6);
    for (CUdeviceptr at : {base, base + size, other, other + size}) DRIVER(cuMemUnmap_(at, size));
    DRIVER(cuMemRelease_(handles[1]));
    DRIVER(cuMemRelease_(imported));
    DRIVER(cuMemAddressFree_(base, 4 * size));
    DRIVER(cuMemAddressFree_(other, 4 * size));
    printf("done\n");
}
