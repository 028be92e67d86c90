// Times kernels on a device; writes a JSON array to the file named. Bytes are those that a kernel has to move.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/kernels/sum_rows.hpp"
#include "verkv/cuda.cuh"

namespace {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorName(status));
        std::exit(1);
    }
}

/// Runs and collects measurements.
class timer {
public:
    timer() {
        check(cudaStreamCreate(&stream_), "stream");
        check(cudaEventCreate(&begin_), "event");
        check(cudaEventCreate(&end_), "event");
    }
    timer(const timer&) = delete;
    timer& operator=(const timer&) = delete;

    /// Median time of work(stream), in microseconds, over `runs` runs after three to warm up.
    template <class Work>
    void measure(const std::string& name, double bytes, Work work, int runs = 30) {
        std::vector<float> times;
        for (int k = -3; k < runs; ++k) {
            check(cudaEventRecord(begin_, stream_), "event");
            work(stream_);
            check(cudaEventRecord(end_, stream_), "event");
            check(cudaEventSynchronize(end_), name.c_str());
            float ms = 0;
            check(cudaEventElapsedTime(&ms, begin_, end_), "event");
            if (k >= 0) {
                times.push_back(ms * 1e3f);
            }
        }
        std::sort(times.begin(), times.end());
        const double median = static_cast<double>(times[times.size() / 2]);
        std::printf("%-40s %10.2f us  %8.1f GB/s\n", name.c_str(), median, bytes / median * 1e-3);
        char line[512];
        std::snprintf(line, sizeof(line),
                      "{\"name\": \"%s\", \"median_us\": %.3f, \"least_us\": %.3f, \"most_us\": %.3f, \"bytes\": %.0f, "
                      "\"gb_per_s\": %.2f, \"runs\": %d}",
                      name.c_str(), median, static_cast<double>(times.front()), static_cast<double>(times.back()),
                      bytes, bytes / median * 1e-3, runs);
        lines_ += (lines_.empty() ? "\n" : ",\n") + std::string(line);
    }

    [[nodiscard]] std::string json() const { return "[" + lines_ + "\n]\n"; }

private:
    cudaStream_t stream_{};
    cudaEvent_t begin_{};
    cudaEvent_t end_{};
    std::string lines_;
};

/// What a plain kernel reads: the bandwidth that the others are compared with.
void sum_rows(timer& t) {
    constexpr unsigned rows = 8192;
    constexpr unsigned columns = 16384;
    float* matrix = nullptr;
    float* sums = nullptr;
    constexpr std::size_t bytes = std::size_t{rows} * columns * sizeof(float);
    check(cudaMalloc(&matrix, bytes), "memory");
    check(cudaMalloc(&sums, rows * sizeof(float)), "memory");
    check(cudaMemset(matrix, 0, bytes), "memory");
    t.measure("a launch with nothing to do", 0, [&](cudaStream_t stream) {
        verkv::gpu::launch(stream, support::sum_rows_kernel{matrix, sums, 1, 0, 32});
    });
    for (unsigned threads : {256u, 1024u}) {
        t.measure("sum_rows, 512 MiB, " + std::to_string(threads) + " threads", static_cast<double>(bytes),
                  [&](cudaStream_t stream) {
                      verkv::gpu::launch(stream, support::sum_rows_kernel{matrix, sums, rows, columns, threads});
                  });
    }
    check(cudaFree(matrix), "memory");
    check(cudaFree(sums), "memory");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: benchmark FILE.json\n");
        return 2;
    }
    timer t;
    sum_rows(t);
    std::FILE* file = std::fopen(argv[1], "w");
    if (file == nullptr || std::fputs(t.json().c_str(), file) < 0 || std::fclose(file) != 0) {
        std::fprintf(stderr, "cannot write %s\n", argv[1]);
        return 1;
    }
}
