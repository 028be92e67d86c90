// In which order threads and blocks run, and how long it takes.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/emulator/toy.hpp"

using emulator::grain;
using emulator::machine;
using emulator::schedule;
using emulator::toy;

namespace {

constexpr unsigned blocks = 3;
constexpr unsigned threads = 64;
constexpr unsigned turns = 4;

/// Threads in the order in which they did something, `turns` things each; block * threads + thread.
std::vector<unsigned> order_of(schedule order) {
    machine gpu;
    std::vector<unsigned> log(std::size_t{blocks} * threads * turns);
    std::vector<unsigned> counter(1);
    gpu.in_out("log", std::span<unsigned>(log));
    gpu.in_out("counter", std::span<unsigned>(counter));
    const toy kernel{{.blocks_x = blocks, .threads = threads}, [log = log.data(), counter = counter.data()](auto& b) {
                         for (unsigned k = 0; k < turns; ++k) {
                             b.store_global(log + b.atomic_add(counter, 1), b.block_index() * threads + b.thread());
                         }
                     }};
    gpu.launch(kernel, order);
    return log;
}

/// How often the next one is not the one before.
std::size_t switches(const std::vector<unsigned>& log) {
    std::size_t n = 0;
    for (std::size_t i = 1; i < log.size(); ++i) {
        n += log[i] != log[i - 1] ? 1u : 0u;
    }
    return n;
}

/// How often the block changes.
std::size_t block_switches(std::vector<unsigned> log) {
    for (unsigned& entry : log) {
        entry /= threads;
    }
    return switches(log);
}

}  // namespace

TEST_CASE("seed 0 is ascending, others are not, and each is always the same", "[emulator]") {
    const std::vector<unsigned> first = order_of({});
    CHECK(std::is_sorted(first.begin(), first.end()));
    std::set<std::vector<unsigned>> seen;
    for (unsigned seed = 0; seed < emulator::orders; ++seed) {
        const std::vector<unsigned> log = order_of(schedule::numbered(seed));
        CHECK(log == order_of(schedule::numbered(seed)));
        seen.insert(log);
        std::vector<unsigned> sorted = log;
        std::sort(sorted.begin(), sorted.end());
        CHECK(sorted == first);
    }
    CHECK(seen.size() == emulator::orders);
}

TEST_CASE("grains and resident blocks", "[emulator]") {
    // Threads run through where nothing makes them wait; lanes of a warp follow each other.
    CHECK(switches(order_of({5, grain::threads, 1})) == blocks * threads - 1);
    std::vector<unsigned> by_warp = order_of({5, grain::warps, 1});
    CHECK(switches(by_warp) == blocks * threads - 1);
    for (unsigned& entry : by_warp) {
        entry /= 32;
    }
    CHECK(switches(by_warp) == blocks * threads / 32 - 1);
    CHECK(switches(order_of({5, grain::accesses, 1})) > blocks * threads);
    CHECK(block_switches(order_of({5, grain::accesses, 1})) == blocks - 1);
    CHECK(block_switches(order_of({5, grain::accesses, 3})) > 2 * blocks);
}

TEST_CASE("a lost update shows where accesses interleave", "[emulator]") {
    // Two threads of different blocks would be a race; here the emulator's own memory is bypassed to see the order.
    std::vector<unsigned> counter(1);
    machine gpu;
    gpu.in_out("counter", std::span<unsigned>(counter));
    const auto lost = [&](schedule order) {
        unsigned seen = 0;
        const toy kernel{{.threads = 32}, [p = counter.data(), seen = &seen](auto& b) {
                             const unsigned before = *seen;
                             (void)b.atomic_add(p, 1);
                             *seen = before + 1;
                         }};
        gpu.launch(kernel, order);
        return 32 - seen;
    };
    CHECK(lost({3, grain::threads, 1}) == 0);
    CHECK(lost({3, grain::accesses, 1}) > 0);
}

TEST_CASE("a block of 256 threads with thousands of accesses each takes milliseconds", "[emulator]") {
    machine gpu;
    constexpr unsigned n = 2000;
    const std::vector<float> data(std::size_t{256} * n, 1.0f);
    gpu.input("data", std::span<const float>(data));
    const auto out = gpu.output<float>("out", 256);
    const toy kernel{{.threads = 256, .shared_bytes = 1024}, [in = data.data(), out = out.data()](auto& b) {
                         auto s = b.template allocate_shared<float>(256);
                         s.set(b.thread(), 0.0f);
                         for (unsigned k = 0; k < n; ++k) {
                             s[b.thread()] += b.load_readonly(in + k * 256 + b.thread());
                         }
                         b.sync();
                         b.store_global(out + b.thread(), s.get(b.thread()) + b.shuffle_xor(0.0f, 1));
                     }};
    for (const schedule order : {schedule{}, schedule{1, grain::warps, 1}, schedule{1, grain::accesses, 1}}) {
        const auto start = std::chrono::steady_clock::now();
        gpu.launch(kernel, order);
        const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
        INFO("grain " << static_cast<int>(order.grain) << ": " << ms << " ms for " << 256 * n * 3 << " accesses");
        CHECK(out[255] == static_cast<float>(n));
        // Twenty times what it takes, for slow machines and sanitizers: nothing quadratic.
        CHECK(ms < 2000);
#if defined(VERKV_EMULATOR_TIMES)
        std::printf("grain %d: %g ms\n", static_cast<int>(order.grain), ms);
#endif
    }
}
