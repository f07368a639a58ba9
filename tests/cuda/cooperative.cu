// A grid whose blocks wait for each other.
#include "check.h"
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

__global__ void rounds(int *data, int *sums) {
    cg::grid_group grid = cg::this_grid();
    for (int round = 0; round < 3; round++) {
        if (threadIdx.x == 0) data[blockIdx.x] += 1;
        grid.sync();
        if (threadIdx.x == 0) {
            int sum = 0;
            for (int i = 0; i < gridDim.x; i++) sum += ((volatile int *)data)[i];
            sums[blockIdx.x] = sum;
        }
        grid.sync();
    }
}

int main() {
    int *data, *sums, host[8];
    CHECK(cudaMalloc(&data, 32));
    CHECK(cudaMalloc(&sums, 32));
    CHECK(cudaMemset(data, 0, 32));
    void *arguments[] = {&data, &sums};
    CHECK(cudaLaunchCooperativeKernel((void *)rounds, 8, 64, arguments, 0, 0));
    CHECK(cudaMemcpy(host, sums, 32, cudaMemcpyDeviceToHost));
    say("grid barrier", host[0] == 24 && host[7] == 24);
    printf("done\n");
}
