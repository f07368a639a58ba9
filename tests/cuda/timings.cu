// What calls take: one JSON object per line, {"case", "mode", "values"}, with units in the names of the values.
#include "check.h"
#include <algorithm>
#include <chrono>
#include <cuda.h>
#include <vector>

using Clock = std::chrono::steady_clock;

static double us(Clock::time_point since) { return std::chrono::duration<double, std::micro>(Clock::now() - since).count(); }

static void report(const char *of, const char *mode, std::vector<double> times) {
    std::sort(times.begin(), times.end());
    auto quantile = [&](double part) { return times[std::min(times.size() - 1, size_t(part * times.size()))]; };
    printf("{\"case\": \"%s\", \"mode\": \"%s\", \"values\": {\"p50_us\": %.3f, \"p99_us\": %.3f}}\n", of, mode, quantile(0.5), quantile(0.99));
}

template <typename F> static void load(F *&function, const char *name) {
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion(name, (void **)&function, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) printf("%s: NO\n", name), exit(1);
}

#define DRIVER(call)                                                                               \
    do {                                                                                           \
        CUresult error_ = (call);                                                                  \
        if (error_ != CUDA_SUCCESS) printf("%s: %d\n", #call, error_), exit(1);                    \
    } while (0)

// Handles of one size: made, mapped, made accessible, and all of it undone.
static void virtual_memory(size_t megabytes, int count) {
    decltype(cuMemAddressReserve) *reserve;
    decltype(cuMemAddressFree) *unreserve;
    decltype(cuMemCreate) *create;
    decltype(cuMemRelease) *release;
    decltype(cuMemMap) *map;
    decltype(cuMemUnmap) *unmap;
    decltype(cuMemSetAccess) *set_access;
    load(reserve, "cuMemAddressReserve");
    load(unreserve, "cuMemAddressFree");
    load(create, "cuMemCreate");
    load(release, "cuMemRelease");
    load(map, "cuMemMap");
    load(unmap, "cuMemUnmap");
    load(set_access, "cuMemSetAccess");
    size_t size = megabytes << 20;
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUdeviceptr base;
    DRIVER(reserve(&base, size * count, 0, 0, 0));
    std::vector<CUmemGenericAllocationHandle> handles(count);
    std::vector<double> times[5];
    auto each = [&](int step, auto call) {
        for (int i = 0; i < count; i++) {
            auto begin = Clock::now();
            DRIVER(call(i));
            times[step].push_back(us(begin));
        }
    };
    each(0, [&](int i) { return create(&handles[i], size, &prop, 0); });
    each(1, [&](int i) { return map(base + i * size, size, 0, handles[i], 0); });
    each(2, [&](int i) { return set_access(base + i * size, size, &access, 1); });
    CHECK(cudaMemset((void *)base, 1, size));
    CHECK(cudaDeviceSynchronize());
    each(3, [&](int i) { return unmap(base + i * size, size); });
    each(4, [&](int i) { return release(handles[i]); });
    DRIVER(unreserve(base, size * count));
    char mode[32];
    snprintf(mode, sizeof(mode), "%zu MiB", megabytes);
    const char *cases[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"};
    for (int step = 0; step < 5; step++) report(cases[step], mode, times[step]);
}

// A copy's rate, by the device's clock and in the middle of several.
static void copies(const char *mode, void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times(5);
    for (float &ms : times) {
        CHECK(cudaEventRecord(start));
        CHECK(cudaMemcpyAsync(to, from, bytes, kind));
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms, start, end));
    }
    std::sort(times.begin(), times.end());
    printf("{\"case\": \"copy of 256 MiB\", \"mode\": \"%s\", \"values\": {\"gb_per_s\": %.2f}}\n", mode, bytes / times[2] / 1e6);
}

__global__ void nothing() {}

int main() {
    auto begin = Clock::now();
    CHECK(cudaFree(nullptr));
    printf("{\"case\": \"context\", \"mode\": \"first call\", \"values\": {\"ms\": %.1f}}\n", us(begin) / 1000);

    for (int megabytes : {2, 16, 64}) virtual_memory(megabytes, 32);

    const size_t bytes = 256 << 20;
    void *pinned, *device, *other;
    begin = Clock::now();
    CHECK(cudaMallocHost(&pinned, bytes));
    printf("{\"case\": \"cuMemHostAlloc\", \"mode\": \"256 MiB\", \"values\": {\"ms\": %.2f}}\n", us(begin) / 1000);
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMalloc(&other, bytes));
    copies("to the device", device, pinned, bytes, cudaMemcpyHostToDevice);
    copies("to the host", pinned, device, bytes, cudaMemcpyDeviceToHost);
    copies("on the device", other, device, bytes, cudaMemcpyDeviceToDevice);

    std::vector<double> launches, trips;
    nothing<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 50; i++) {
            begin = Clock::now();
            nothing<<<1, 1>>>();
            launches.push_back(us(begin));
        }
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < 10; i++) {
            begin = Clock::now();
            nothing<<<1, 1>>>();
            CHECK(cudaDeviceSynchronize());
            trips.push_back(us(begin));
        }
    }
    report("empty kernel", "launch", launches);
    report("empty kernel", "launch and wait", trips);
    printf("done\n");
}
