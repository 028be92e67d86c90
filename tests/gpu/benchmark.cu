// Times kernels on a device; writes a JSON array to the file named. Bytes are those that a kernel has to move.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
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

/// Device memory that goes with the benchmark.
template <class T>
T* upload(const std::vector<T>& host) {
    T* p = nullptr;
    check(cudaMalloc(&p, host.size() * sizeof(T)), "memory");
    check(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
    return p;
}

/// A step of a layer of random rows: 8 KV heads of 4 query heads, 128 + 128 channels of bfloat16, a sixteenth resident.
/// Steps are alike: once all rows are staged, they stay so. One measurement forgets them before each step.
void layer_step(timer& t, std::uint32_t n, std::size_t rounds) {
    using verkv::bfloat16;
    constexpr std::uint32_t heads = 4, tasks = 8, dim = 128, channels = 32, group_length = 128, words = 2;
    using step_type = verkv::gpu::layer_step<bfloat16, 2, heads, dim, dim, verkv::gpu::device_memory>;
    const std::uint32_t groups = n / group_length, slot_words = group_length * words, residents = n / 16;
    std::uint64_t state = 1;
    const auto random = [&] { return state = state * 6364136223846793005u + 1442695040888963407u, state >> 33; };
    const auto unit = [&] { return static_cast<float>(random()) * 0x1p-31f; };

    std::vector<std::uint32_t> codes(std::size_t{tasks} * groups * slot_words), first(groups + 1), kept(channels);
    for (auto& c : codes) {
        c = static_cast<std::uint32_t>(random() ^ random() << 16);
    }
    std::vector<verkv::half> parameters(std::size_t{groups} * 2 * channels);
    for (std::uint32_t g = 0; g < groups; ++g) {
        first[g] = g * group_length;
        for (std::uint32_t c = 0; c < channels; ++c) {
            parameters[(2 * g) * channels + c] = verkv::from_float<verkv::half>(-3.0f);
            parameters[(2 * g + 1) * channels + c] = verkv::from_float<verkv::half>(2.0f);
        }
    }
    first[groups] = n;
    for (std::uint32_t c = 0; c < channels; ++c) {
        kept[c] = c;
    }
    const std::uint32_t* const device_codes = upload(codes);
    std::vector<verkv::gpu::device_rope_pairs> sketches;
    for (std::uint32_t k = 0; k < tasks; ++k) {
        sketches.push_back({device_codes + std::size_t{k} * groups * slot_words, upload(parameters), upload(first),
                            upload(kept), groups, slot_words});
    }
    std::vector<float> queries(tasks * heads * dim), r(std::size_t{tasks} * n, 1.0f / 16), odds(r.size(), 15.0f),
        u(r.size()), base(std::size_t{tasks} * residents, std::log(16.0f));
    std::vector<std::uint32_t> slot(r.size(), verkv::gpu::offloaded), host_row(r.size()), token(base.size()),
        row(base.size());
    for (float& q : queries) {
        q = 2 * unit() - 1;
    }
    for (std::uint32_t k = 0; k < tasks; ++k) {
        for (std::uint32_t i = 0; i < n; ++i) {
            const bool resident = i % 16 == 5;
            u[std::size_t{k} * n + i] = (resident ? 0.0f : 1.0f / 16) + unit() * (resident ? 1.0f : 15.0f) / 16;
            host_row[std::size_t{k} * n + i] = (i * 7919u % n) * tasks + k;
            if (resident) {
                const std::size_t at = std::size_t{k} * residents + i / 16;
                slot[std::size_t{k} * n + i] = i / 16;
                token[at] = i;
                row[at] = static_cast<std::uint32_t>(at);
            }
        }
    }
    const std::size_t width = 2 * dim;
    bfloat16* host = nullptr;
    check(cudaHostAlloc(&host, std::size_t{tasks} * n * width * sizeof(bfloat16), cudaHostAllocMapped),
          "pinned memory");
    for (std::size_t i = 0; i < std::size_t{tasks} * n * width; ++i) {
        host[i] = verkv::from_float<bfloat16>(static_cast<float>(i * 2654435761u % 257u) / 128.0f - 1.0f);
    }
    std::vector<bfloat16> rows(std::size_t{tasks} * residents * width);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i] = verkv::from_float<bfloat16>(static_cast<float>(i * 2246822519u % 257u) / 128.0f - 1.0f);
    }

    verkv::gpu::layer_step_config c;
    c.tasks = tasks;
    c.heads = heads;
    c.max_tokens = n;
    c.max_residents = residents;
    c.scale = 0.088f;
    c.channel_count = c.padded_channels = channels;
    c.check.rounds = rounds;
    const step_type step(c, {});
    const std::uint32_t capacity = n / 16;
    verkv::gpu::device_staging map;
    map.stride = n;
    map.capacity = capacity;
    map.slot = upload(std::vector<std::uint32_t>(std::size_t{tasks} * n));
    map.token = upload(std::vector<std::uint32_t>(std::size_t{tasks} * capacity));
    map.used = upload(std::vector<std::uint32_t>(std::size_t{tasks} * capacity));
    map.hand = upload(std::vector<std::uint32_t>(tasks));
    map.step = upload(std::vector<std::uint32_t>(tasks));
    verkv::gpu::reset_staging_kernel reset;
    reset.staging = map;
    reset.kv_heads = tasks;
    reset.blocks = 32;

    verkv::gpu::layer_step_inputs<bfloat16> in;
    in.sketches = upload(sketches);
    in.queries = upload(queries);
    in.lists.probability = upload(r);
    in.lists.odds = upload(odds);
    in.lists.uniform = upload(u);
    in.lists.slot = upload(slot);
    in.lists.host_row = upload(host_row);
    in.lists.tokens = upload(std::vector<std::uint32_t>(tasks, n));
    in.lists.resident_token = upload(token);
    in.lists.log_weight = upload(base);
    in.lists.residents = upload(std::vector<std::uint32_t>(tasks, residents));
    in.lists.stride = n;
    in.lists.resident_stride = residents;
    in.resident = upload(rows);
    in.resident_rows = verkv::gpu::row_list::of_ids(in.lists.residents, upload(row), residents);
    in.host = host;
    in.staging = upload(std::vector<bfloat16>(std::size_t{tasks} * capacity * width));
    in.row_stride = width;
    in.staging_map = map;
    in.output = upload(std::vector<float>(tasks * heads * dim));
    in.lse = upload(std::vector<float>(tasks * heads));

    const auto on = [](cudaStream_t stream) {
        return [stream](const auto& kernel) { verkv::gpu::launch(stream, kernel); };
    };
    step.prepare(on(nullptr));
    check(cudaDeviceSynchronize(), "prepare");
    const std::string name = "step, n = " + std::to_string(n) + ", " + std::to_string(rounds) + " rounds";
    const double dense = static_cast<double>(std::size_t{tasks} * n * width * sizeof(bfloat16));
    t.measure(name + ", nothing staged", dense, [&](cudaStream_t stream) {
        verkv::gpu::launch(stream, reset);
        step.enqueue(on(stream), in);
    });
    t.measure(name + ", all staged", dense, [&](cudaStream_t stream) { step.enqueue(on(stream), in); });

    cudaStream_t capturing{};
    cudaGraph_t graph{};
    cudaGraphExec_t runs{};
    check(cudaStreamCreate(&capturing), "stream");
    check(cudaStreamBeginCapture(capturing, cudaStreamCaptureModeGlobal), "capture");
    step.enqueue(on(capturing), in);
    check(cudaStreamEndCapture(capturing, &graph), "capture");
    check(cudaGraphInstantiate(&runs, graph, 0), "graph");
    t.measure(name + ", all staged, as a graph", dense,
              [&](cudaStream_t stream) { check(cudaGraphLaunch(runs, stream), "graph"); });
    const verkv::gpu::layer_step_report report = step.report();
    std::vector<std::uint32_t> counts(3 * tasks);
    check(cudaMemcpy(counts.data(), report.rounds, tasks * 4, cudaMemcpyDeviceToHost), "report");
    check(cudaMemcpy(counts.data() + tasks, report.fetched, tasks * 4, cudaMemcpyDeviceToHost), "report");
    check(cudaMemcpy(counts.data() + 2 * tasks, report.pinned, tasks * 4, cudaMemcpyDeviceToHost), "report");
    std::printf("    KV head 0: %u rounds, %u rows fetched, %u of them in pinned memory\n", counts[0], counts[tasks],
                counts[2 * tasks]);
    check(cudaGraphExecDestroy(runs), "graph");
    check(cudaGraphDestroy(graph), "graph");
    check(cudaStreamDestroy(capturing), "stream");
    check(cudaFreeHost(host), "memory");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: benchmark FILE.json\n");
        return 2;
    }
    timer t;
    sum_rows(t);
    for (const std::size_t rounds : {std::size_t{0}, std::size_t{4}}) {
        layer_step(t, 32768, rounds);
        layer_step(t, 131072, rounds);
    }
    std::FILE* file = std::fopen(argv[1], "w");
    if (file == nullptr || std::fputs(t.json().c_str(), file) < 0 || std::fclose(file) != 0) {
        std::fprintf(stderr, "cannot write %s\n", argv[1]);
        return 1;
    }
}
