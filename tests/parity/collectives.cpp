// Collectives against plain loops: every block size, several orders of threads.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/kernels/collectives.hpp"

namespace {

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

    template <class Device>
    void run(Device& gpu) {
        const std::size_t n = values.size();
        const auto in = gpu.input("values", std::span<const T>(values));
        const auto of = [&](const char* name) { return gpu.template output<T>(name, n); };
        const auto sums = of("sum");
        const auto most = of("largest");
        const auto least = of("smallest");
        const auto below = of("before");
        const auto all = of("total");
        const auto one = of("from");
        const auto places = gpu.template output<unsigned>("rank", n);
        const auto number = gpu.template output<unsigned>("kept", n);
        gpu.launch(support::collectives_kernel<T>{in.data(), sums.data(), most.data(), least.data(), below.data(),
                                                  all.data(), one.data(), places.data(), number.data(), blocks_,
                                                  threads_});
        sum = gpu.download(sums);
        largest = gpu.download(most);
        smallest = gpu.download(least);
        before = gpu.download(below);
        total = gpu.download(all);
        from = gpu.download(one);
        rank = gpu.download(places);
        kept = gpu.download(number);
    }

    std::vector<T> values;
    std::vector<T> sum, largest, smallest, before, total, from;
    std::vector<unsigned> rank, kept;

private:
    unsigned blocks_;
    unsigned threads_;
};

}  // namespace

TEST_CASE("collectives of integers are those of plain loops", "[parity]") {
    for (unsigned threads = 32; threads <= 1024; threads += 32) {
        collectives_rig<std::uint64_t> rig(2, threads);
        support::on_devices(3, [&](auto& gpu) {
            rig.run(gpu);
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
        });
    }
}

TEST_CASE("sums of floats are pairwise, and the same bits in any order and every thread", "[parity]") {
    for (unsigned threads : {32u, 64u, 96u, 256u, 480u, 1024u}) {
        collectives_rig<float> rig(1, threads);
        std::vector<float> sum;
        std::vector<float> before;
        support::on_devices(9, [&](auto& gpu) {
            rig.run(gpu);
            if (sum.empty()) {
                sum = rig.sum;
                before = rig.before;
            }
            CHECK(rig.sum == sum);
            CHECK(rig.before == before);
        });
        double exact = 0;
        double size = 0;
        for (std::size_t i = 0; i < threads; ++i) {
            // At most ten additions are on the way of a value, and two more join the parts: |error| <= depth u S.
            CHECK(std::abs(static_cast<double>(before[i]) - exact) <= 12 * 0x1p-24 * size);
            CHECK(sum[i] == sum[0]);
            exact += static_cast<double>(rig.values[i]);
            size += std::abs(static_cast<double>(rig.values[i]));
        }
        CHECK(std::abs(static_cast<double>(sum[0]) - exact) <= 10 * 0x1p-24 * size);
    }
}

TEST_CASE("a maximum passes over NaN", "[parity]") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (unsigned at = 0; at < 96; ++at) {
        collectives_rig<float> rig(1, 96);
        rig.values.assign(96, nan);
        support::on_devices(1, [&](auto& gpu) { rig.run(gpu); });
        CHECK(std::isnan(rig.largest[5]));
        rig.values[at] = -3;
        rig.values[95 - at] = -4;
        support::on_devices(2, [&](auto& gpu) {
            rig.run(gpu);
            CHECK(rig.largest[at / 2] == -3);
            CHECK(rig.smallest[at / 2] == -4);
        });
    }
}

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
                support::on_devices(3, [&](auto& gpu) {
                    const auto in = gpu.input("keys", std::span<const unsigned>(keys));
                    const auto list = gpu.template output<unsigned>("list", expected.size());
                    const auto count = gpu.template output<unsigned>("count", 1);
                    gpu.launch(support::compact_kernel{in.data(), list.data(), count.data(), n, modulus, threads});
                    CHECK(gpu.download(count)[0] == expected.size());
                    CHECK(gpu.download(list) == expected);
                });
            }
        }
    }
}
