// Collectives against plain loops: every block size, several orders of threads.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "support/catch.hpp"
#include "support/emulator/machine.hpp"
#include "verkv/cuda/collectives.hpp"

namespace {

using emulator::machine;
using emulator::schedule;
namespace gpu = verkv::gpu;

/// What a block works out about its values, a result of each kind for each thread.
template <class T>
struct collectives_kernel {
    static constexpr unsigned most_threads = 1024;

    const T* values;  // [blocks, threads]
    T* sum;           // [blocks, threads], as all that follow
    T* largest;
    T* smallest;
    T* before;
    T* total;
    T* from;
    unsigned* rank;
    unsigned* kept;
    unsigned count;
    unsigned threads;

    [[nodiscard]] gpu::launch_shape shape() const {
        const auto scratch = gpu::shared_layout().array<T>(threads / 32).template array<unsigned>(threads / 32);
        return {.blocks_x = count, .threads = threads, .shared_bytes = scratch.bytes()};
    }

    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<T>(b.warps());
        auto counts = b.template allocate_shared<unsigned>(b.warps());
        const std::size_t i = std::size_t{b.block_index()} * b.threads() + b.thread();
        const T v = b.load_readonly(values + i);
        b.store_global(sum + i, gpu::block_sum(b, scratch, v));
        b.store_global(largest + i, gpu::block_max(b, scratch, v));
        b.store_global(smallest + i, gpu::block_min(b, scratch, v));
        const auto scan = gpu::block_exclusive_scan(b, scratch, v);
        b.store_global(before + i, scan.before);
        b.store_global(total + i, scan.total);
        b.store_global(from + i, gpu::block_broadcast(b, scratch, v, b.threads() * 2 / 3));
        const auto place = gpu::block_rank(b, counts, v > T{0});
        b.store_global(rank + i, place.before);
        b.store_global(kept + i, place.total);
    }
};

template <class T>
struct collectives_rig {
    collectives_rig(unsigned blocks, unsigned threads) : blocks_(blocks), threads_(threads) {
        std::mt19937 random(threads);
        values.resize(std::size_t{blocks} * threads);
        for (T& v : values) {
            if constexpr (std::is_floating_point_v<T>) {
                v = std::uniform_real_distribution<T>(T{-1}, T{1})(random);
            } else {
                v = static_cast<T>(random() % 1000);
            }
        }
    }

    void run(schedule order) {
        const std::size_t n = values.size();
        gpu.emplace();
        gpu->input("values", std::span<const T>(values));
        const auto of = [&](const char* name) { return gpu->template output<T>(name, n); };
        sum = of("sum");
        largest = of("largest");
        smallest = of("smallest");
        before = of("before");
        total = of("total");
        from = of("from");
        rank = gpu->template output<unsigned>("rank", n);
        kept = gpu->template output<unsigned>("kept", n);
        gpu->launch(collectives_kernel<T>{values.data(), sum.data(), largest.data(), smallest.data(), before.data(),
                                          total.data(), from.data(), rank.data(), kept.data(), blocks_, threads_},
                    order);
    }

    std::vector<T> values;
    std::span<T> sum, largest, smallest, before, total, from;
    std::span<unsigned> rank, kept;

private:
    unsigned blocks_;
    unsigned threads_;
    std::optional<machine> gpu;
};

}  // namespace

TEST_CASE("collectives of integers are those of plain loops", "[parity]") {
    for (unsigned threads = 32; threads <= 1024; threads += 32) {
        collectives_rig<std::uint64_t> rig(2, threads);
        rig.run(schedule::numbered(threads / 32));
        for (unsigned block = 0; block < 2; ++block) {
            std::uint64_t sum = 0;
            std::uint64_t largest = 0;
            std::uint64_t smallest = 1000;
            unsigned kept = 0;
            bool right = true;
            const std::size_t first = std::size_t{block} * threads;
            for (std::size_t i = first; i < first + threads; ++i) {
                right = right && rig.before[i] == sum && rig.rank[i] == kept;
                sum += rig.values[i];
                largest = (std::max)(largest, rig.values[i]);
                smallest = (std::min)(smallest, rig.values[i]);
                kept += rig.values[i] > 0 ? 1u : 0u;
            }
            for (std::size_t i = first; i < first + threads; ++i) {
                right = right && rig.sum[i] == sum && rig.total[i] == sum && rig.largest[i] == largest &&
                        rig.smallest[i] == smallest && rig.kept[i] == kept &&
                        rig.from[i] == rig.values[first + threads * 2 / 3];
            }
            INFO("block " << block << " of " << threads << " threads");
            CHECK(right);
        }
    }
}

TEST_CASE("sums of floats are pairwise, and the same bits in any order and every thread", "[parity]") {
    for (unsigned threads : {32u, 64u, 96u, 256u, 480u, 1024u}) {
        collectives_rig<float> rig(1, threads);
        rig.run({});
        const std::vector<float> sum(rig.sum.begin(), rig.sum.end());
        const std::vector<float> before(rig.before.begin(), rig.before.end());
        double exact = 0;
        double size = 0;
        for (std::size_t i = 0; i < threads; ++i) {
            // Ten additions of at most 2^-24 each on the way of any value, and the sums' sums: |error| <= depth u S.
            CHECK(std::abs(before[i] - exact) <= 12 * 0x1p-24 * size);
            CHECK(sum[i] == sum[0]);
            exact += static_cast<double>(rig.values[i]);
            size += std::abs(static_cast<double>(rig.values[i]));
        }
        CHECK(std::abs(sum[0] - exact) <= 10 * 0x1p-24 * size);
        for (unsigned seed = 1; seed < 9; ++seed) {
            rig.run(schedule::numbered(seed));
            CHECK(std::equal(sum.begin(), sum.end(), rig.sum.begin()));
            CHECK(std::equal(before.begin(), before.end(), rig.before.begin()));
        }
    }
}

TEST_CASE("a maximum passes over NaN", "[parity]") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (unsigned at = 0; at < 96; ++at) {
        collectives_rig<float> rig(1, 96);
        rig.values.assign(96, nan);
        rig.run(schedule::numbered(at));
        CHECK(std::isnan(rig.largest[5]));
        rig.values[at] = -3;
        rig.values[95 - at] = -4;
        rig.run(schedule::numbered(at));
        CHECK(rig.largest[at / 2] == -3);
        CHECK(rig.smallest[at / 2] == -4);
    }
}

namespace {

struct compact_kernel {
    static constexpr unsigned most_threads = 1024;

    const unsigned* keys;
    unsigned* list;
    unsigned* count;
    unsigned n;
    unsigned modulus;
    unsigned threads;

    [[nodiscard]] gpu::launch_shape shape() const {
        return {.threads = threads, .shared_bytes = gpu::shared_layout().array<unsigned>(threads / 32).bytes()};
    }
    template <class Block>
    VERKV_HOST_DEVICE void operator()(Block& b) const {
        auto scratch = b.template allocate_shared<unsigned>(b.warps());
        const unsigned kept = gpu::block_compact(
            b, scratch, n, [&](unsigned i) { return b.load_readonly(keys + i) % modulus == 0; },
            [&](unsigned i, unsigned place) { b.store_global(list + place, i); });
        if (b.thread() == 0) {
            b.store_global(count, kept);
        }
    }
};

}  // namespace

TEST_CASE("compaction keeps the order", "[parity]") {
    std::mt19937 random(7);
    for (unsigned threads : {32u, 64u, 224u, 1024u}) {
        for (unsigned n : {0u, 1u, 31u, threads - 1, threads, threads + 1, 5 * threads, 2500u}) {
            for (unsigned modulus : {1u, 2u, 7u, 1000000u}) {
                std::vector<unsigned> keys(n);
                std::vector<unsigned> expected;
                for (unsigned i = 0; i < n; ++i) {
                    keys[i] = static_cast<unsigned>(random()) | 1u;
                    if (i % modulus == 0) {
                        keys[i] = modulus * (static_cast<unsigned>(random()) % 100);
                    }
                    if (keys[i] % modulus == 0) {
                        expected.push_back(i);
                    }
                }
                machine gpu;
                gpu.input("keys", std::span<const unsigned>(keys));
                const auto list = gpu.output<unsigned>("list", expected.size());
                const auto count = gpu.output<unsigned>("count", 1);
                gpu.launch(compact_kernel{keys.data(), list.data(), count.data(), n, modulus, threads},
                           schedule::numbered(n + modulus));
                CHECK(count[0] == expected.size());
                CHECK(std::equal(expected.begin(), expected.end(), list.begin()));
            }
        }
    }
}
