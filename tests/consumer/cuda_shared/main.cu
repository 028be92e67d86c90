// Both libraries launch: on a device, each its own code; without one, both say so.
#include <cstdio>

#include "verkv/cuda.cuh"

bool left_launch(unsigned* at);
bool right_launch(unsigned* at);

int main() {
    unsigned* at = nullptr;
    if (cudaMalloc(&at, 2 * sizeof(unsigned)) != cudaSuccess) {
        std::printf("no device\n");
        return left_launch(at) && right_launch(at) ? 0 : 1;
    }
    unsigned words[2] = {1, 1};
    (void)cudaMemcpy(at, words, sizeof(words), cudaMemcpyHostToDevice);
    const bool refused = left_launch(at) || right_launch(at + 1);
    (void)cudaMemcpy(words, at, sizeof(words), cudaMemcpyDeviceToHost);
    return refused || words[0] != 0 || words[1] != 0 ? 1 : 0;
}
