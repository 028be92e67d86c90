// Global memory used wrongly, each beside a twin that does it right.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/emulator/toy.hpp"

using emulator::caught;
using emulator::first_fault;
using emulator::machine;
using emulator::toy;

TEST_CASE("global memory out of bounds", "[emulator]") {
    machine gpu;
    const std::vector<float> rows(100, 1.0f);
    gpu.input("rows", std::span<const float>(rows));
    const auto out = gpu.output<float>("out", 64);
    const float* in = rows.data();
    const auto reads = [in, out = out.data()](auto& b, std::size_t offset) {
        b.store_global(out + b.thread(), b.load_readonly(in + b.thread() + offset));
    };
    CHECK(caught(gpu, toy{{.threads = 64}, [reads](auto& b) { reads(b, 37); }},
                 {"global memory out of bounds: read of 4 bytes at byte 400 of rows, which has 400", "thread 63"}));
    CHECK(first_fault(gpu, toy{{.threads = 64}, [reads](auto& b) { reads(b, 36); }}).empty());
    const auto writes = [out = out.data()](auto& b, std::size_t offset) {
        b.store_global(out + b.thread() + offset, 1.0f);
    };
    CHECK(caught(gpu, toy{{.threads = 64}, [writes](auto& b) { writes(b, 1); }},
                 {"global memory out of bounds: write of 4 bytes at byte 256 of out"}));
    CHECK(first_fault(gpu, toy{{.threads = 64}, [writes](auto& b) { writes(b, 0); }}).empty());
    const auto wide = [out = out.data()](auto& b, unsigned n) {
        if (b.thread() < n) {
            b.store_vector(out + 4 * b.thread(), verkv::gpu::pack<float, 4>{});
        }
    };
    CHECK(
        caught(gpu, toy{{.threads = 32}, [wide](auto& b) { wide(b, 17); }}, {"write of 16 bytes at byte 256 of out"}));
    CHECK(first_fault(gpu, toy{{.threads = 32}, [wide](auto& b) { wide(b, 16); }}).empty());
    const toy null{{.threads = 32}, [](auto& b) { (void)b.load_global(static_cast<const float*>(nullptr)); }};
    CHECK(caught(gpu, null, {"global memory out of bounds", "before any buffer"}));
}

TEST_CASE("a vector load that is not aligned", "[emulator]") {
    machine gpu;
    const std::vector<std::uint16_t> sevens(1000, 7);
    const auto rows = gpu.copy_input("rows", std::span<const std::uint16_t>(sevens));
    const auto out = gpu.output<unsigned>("out", 32);
    const auto body = [in = rows.data(), out = out.data()](auto& b, std::size_t stride) {
        const auto v = b.template load_readonly_vector<16>(in + b.thread() * stride);
        b.store_global(out + b.thread(), unsigned{v.at[0]} + v.at[7]);
    };
    CHECK(caught(gpu, toy{{.threads = 32}, [body](auto& b) { body(b, 12); }},
                 {"misaligned read of 16 bytes at byte", "of rows", "multiple of 16"}));
    CHECK(first_fault(gpu, toy{{.threads = 32}, [body](auto& b) { body(b, 24); }}).empty());
    CHECK(out[31] == 14);
}

TEST_CASE("global memory that is read only, or that nobody wrote", "[emulator]") {
    machine gpu;
    std::vector<float> rows(32, 1.0f);
    gpu.input("rows", std::span<const float>(rows));
    const auto out = gpu.output<float>("out", 33);
    const toy writes{{.threads = 32}, [in = rows.data()](auto& b) { b.store_global(in + b.thread(), 1.0f); }};
    CHECK(caught(gpu, writes, {"write at byte", "of rows, which is read only"}));
    const toy reads{{.threads = 32}, [out = out.data()](auto& b) {
                        b.store_global(out + b.thread(), 1.0f);
                        b.sync();
                        (void)b.load_global(out + b.thread() + 1);
                    }};
    CHECK(caught(gpu, reads, {"uninitialised global memory: read of out[32]"}));
}

TEST_CASE("threads of a block that race on global memory", "[emulator]") {
    machine gpu;
    std::vector<unsigned> data(64);
    gpu.in_out("data", std::span<unsigned>(data));
    const auto body = [p = data.data()](auto& b, bool barrier) {
        b.store_global(p + b.thread(), b.thread());
        if (barrier) {
            b.sync();
        }
        (void)b.load_global(p + (b.thread() ^ 1));
    };
    CHECK(caught(gpu, toy{{.threads = 64}, [body](auto& b) { body(b, false); }}, {"race on global data["}));
    CHECK(first_fault(gpu, toy{{.threads = 64}, [body](auto& b) { body(b, true); }}).empty());
}

TEST_CASE("blocks that race on global memory", "[emulator]") {
    machine gpu;
    std::vector<unsigned> data(5);
    gpu.in_out("data", std::span<unsigned>(data));
    const toy same{{.blocks_x = 5, .threads = 32}, [p = data.data()](auto& b) {
                       if (b.thread() == 0) {
                           b.store_global(p, b.block_index());
                       }
                   }};
    CHECK(caught(gpu, same, {"race on global data[0]", "of block", "without fence and atomic between"}));
    const toy own{{.blocks_x = 5, .threads = 32}, [p = data.data()](auto& b) {
                      if (b.thread() == 0) {
                          b.store_global(p + b.block_index(), b.block_index());
                      }
                  }};
    CHECK(first_fault(gpu, own).empty());
    const toy added{{.blocks_x = 5, .threads = 32}, [p = data.data()](auto& b) { b.atomic_add(p, 1); }};
    data[0] = 0;
    CHECK(first_fault(gpu, added).empty());
    CHECK(data[0] == 5 * 32 * emulator::orders);
}

TEST_CASE("the last block adds up what the others left", "[emulator]") {
    machine gpu;
    constexpr unsigned blocks = 6;
    std::vector<unsigned> part(blocks);
    std::vector<unsigned> counter(1);
    std::vector<unsigned> sum(1);
    gpu.in_out("part", std::span<unsigned>(part));
    gpu.in_out("counter", std::span<unsigned>(counter));
    gpu.in_out("sum", std::span<unsigned>(sum));
    const auto body = [=, part = part.data(), counter = counter.data(), sum = sum.data()](auto& b, bool fence) {
        auto last = b.template allocate_shared<unsigned>(1);
        if (b.thread() == 0) {
            b.store_global(part + b.block_index(), b.block_index() + 1);
            if (fence) {
                b.fence();
            }
            last[0] = b.atomic_add(counter, 1) == b.blocks() - 1 ? 1u : 0u;
        }
        b.sync();
        if (last.get(0) == 0) {
            return;
        }
        if (b.thread() == 1) {
            unsigned all = 0;
            for (unsigned k = 0; k < b.blocks(); ++k) {
                all += b.load_coherent(part + k);
            }
            b.store_global(sum, all);
            b.store_global(counter, 0u);
        }
    };
    const verkv::gpu::launch_shape shape{.blocks_x = blocks, .threads = 64, .shared_bytes = 4};
    CHECK(first_fault(gpu, toy{shape, [body](auto& b) { body(b, true); }}).empty());
    CHECK(sum[0] == 21);
    const toy without{shape, [body](auto& b) { body(b, false); }};
    for (unsigned seed = 0; seed < emulator::orders; ++seed) {
        counter[0] = 0;
        CHECK(fault_of(gpu, without, emulator::schedule::numbered(seed)).find("race on global part[") !=
              std::string::npos);
    }
}

TEST_CASE("caches that do not see what was written", "[emulator]") {
    machine gpu;
    std::vector<unsigned> data(64, 5);
    std::vector<unsigned> counter(1);
    gpu.in_out("data", std::span<unsigned>(data));
    gpu.in_out("counter", std::span<unsigned>(counter));
    const auto body = [p = data.data()](auto& b, auto load) {
        b.store_global(p + b.thread(), b.thread());
        b.sync();
        (void)load(b, p + (b.thread() ^ 1));
    };
    const auto plain = [](auto& b, const unsigned* p) { return b.load_global(p); };
    const auto read_only = [](auto& b, const unsigned* p) { return b.load_readonly(p); };
    CHECK(first_fault(gpu, toy{{.threads = 64}, [=](auto& b) { body(b, plain); }}).empty());
    CHECK(caught(gpu, toy{{.threads = 64}, [=](auto& b) { body(b, read_only); }},
                 {"stale cache: read of global data[", "changed in this launch"}));
    const toy later{{.threads = 64}, [p = data.data()](auto& b) {
                        (void)b.load_readonly(p + b.thread());
                        b.store_global(p + b.thread(), 1u);
                    }};
    CHECK(caught(gpu, later, {"stale cache: write of global data[", "read-only load"}));
    // The last block has to read what others wrote from the cache that they share.
    const auto last = [=, p = data.data(), counter = counter.data()](auto& b, auto load) {
        if (b.thread() == 0) {
            b.store_global(p + b.block_index(), 1u);
            b.fence();
            if (b.atomic_add(counter, 1) % 3 == 2) {
                (void)load(b, p + (b.block_index() + 1) % 3);
            }
        }
    };
    const auto coherent = [](auto& b, const unsigned* p) { return b.load_coherent(p); };
    const auto wide = [](auto& b, const unsigned* p) { return b.template load_coherent_vector<4>(p).at[0]; };
    CHECK(first_fault(gpu, toy{{.blocks_x = 3, .threads = 32}, [=](auto& b) { last(b, coherent); }}).empty());
    CHECK(first_fault(gpu, toy{{.blocks_x = 3, .threads = 32}, [=](auto& b) { last(b, wide); }}).empty());
    counter[0] = 0;
    CHECK(fault_of(gpu, toy{{.blocks_x = 3, .threads = 32}, [=](auto& b) { last(b, plain); }}).find("coherent load") !=
          std::string::npos);
}

TEST_CASE("a thread that waits for another one for ever", "[emulator]") {
    machine gpu;
    std::vector<unsigned> flag(1);
    gpu.in_out("flag", std::span<unsigned>(flag));
    gpu.most_accesses = 10000;
    const toy spins{{.blocks_x = 2, .threads = 32}, [p = flag.data()](auto& b) {
                        while (b.atomic_add(p, 0) == 0) {
                        }
                    }};
    CHECK(caught(gpu, spins, {"more than 10000 accesses", "wait for ever"}));
    flag[0] = 1;
    CHECK(first_fault(gpu, spins).empty());
}
