// Shared memory used wrongly, each beside a twin that does it right.
#include <cstdint>

#include "support/catch.hpp"
#include "support/emulator/toy.hpp"

using emulator::caught;
using emulator::first_fault;
using emulator::machine;
using emulator::toy;
using verkv::gpu::launch_shape;

namespace {

constexpr launch_shape shape_of(unsigned threads, std::size_t bytes) {
    return {.blocks_x = 3, .threads = threads, .shared_bytes = bytes};
}

}  // namespace

TEST_CASE("a missing barrier between write and read", "[emulator]") {
    machine gpu;
    for (unsigned threads : {32u, 64u, 1024u}) {
        const auto body = [](auto& b, bool barrier) {
            auto s = b.template allocate_shared<float>(b.threads());
            s.set(b.thread(), 1.0f);
            if (barrier) {
                b.sync();
            }
            (void)s.get((b.thread() + 1) % b.threads());
        };
        // Who reads first finds nothing there; who reads later races.
        const toy wrong{shape_of(threads, threads * 4), [body](auto& b) { body(b, false); }};
        CHECK_FALSE(first_fault(gpu, wrong).empty());
        const toy right{shape_of(threads, threads * 4), [body](auto& b) { body(b, true); }};
        CHECK(first_fault(gpu, right).empty());
    }
    const toy defined{shape_of(64, 256), [](auto& b) {
                          auto s = b.template allocate_shared<float>(64);
                          s.set(b.thread(), 1.0f);
                          b.sync();
                          s.set(b.thread(), 2.0f);
                          (void)s.get((b.thread() + 1) % 64);
                      }};
    CHECK(caught(gpu, defined, {"race on the shared array of emulator_shared.cpp", "without a barrier between"}));
}

TEST_CASE("a missing barrier between read and write", "[emulator]") {
    machine gpu;
    const auto body = [](auto& b, bool barrier) {
        auto s = b.template allocate_shared<float>(1);
        if (b.thread() == 0) {
            s.set(0, 1.0f);
        }
        b.sync();
        (void)s.get(0);
        if (barrier) {
            b.sync();
        }
        if (b.thread() == 17) {
            s.set(0, 2.0f);
        }
    };
    for (unsigned threads : {32u, 256u}) {
        const toy wrong{shape_of(threads, 4), [body](auto& b) { body(b, false); }};
        CHECK(caught(gpu, wrong, {"race on", "[0]", "write", "read"}));
        const toy right{shape_of(threads, 4), [body](auto& b) { body(b, true); }};
        CHECK(first_fault(gpu, right).empty());
    }
}

TEST_CASE("two threads that write one element", "[emulator]") {
    machine gpu;
    const toy wrong{shape_of(64, 256), [](auto& b) {
                        auto s = b.template allocate_shared<unsigned>(64);
                        s.set(b.thread() / 2, 1);
                    }};
    CHECK(caught(gpu, wrong, {"race on", "this write and an earlier write"}));
    const toy right{shape_of(64, 256), [](auto& b) {
                        auto s = b.template allocate_shared<unsigned>(64);
                        s.set(b.thread(), 1);
                        b.sync();
                        s.set(63 - b.thread(), 1);
                    }};
    CHECK(first_fault(gpu, right).empty());
}

TEST_CASE("lanes of a warp need sync_warp, and other warps need more", "[emulator]") {
    machine gpu;
    const auto body = [](auto& b, unsigned partner, bool sync) {
        auto s = b.template allocate_shared<unsigned>(64);
        s.set(b.thread(), b.thread());
        b.sync();
        for (unsigned k = 0; k < 3; ++k) {
            const unsigned other = s.get(b.thread() ^ partner);
            if (sync) {
                b.sync_warp();
            }
            s.set(b.thread(), other + 1);
            if (sync) {
                b.sync_warp();
            }
        }
    };
    const toy right{shape_of(64, 256), [body](auto& b) { body(b, 5, true); }};
    CHECK(first_fault(gpu, right).empty());
    const toy without{shape_of(64, 256), [body](auto& b) { body(b, 5, false); }};
    CHECK(caught(gpu, without, {"race on"}));
    const toy other_warp{shape_of(64, 256), [body](auto& b) { body(b, 32, true); }};
    CHECK(caught(gpu, other_warp, {"race on"}));
    // A shuffle orders no memory.
    const toy shuffled{shape_of(32, 128), [](auto& b) {
                           auto s = b.template allocate_shared<unsigned>(32);
                           s.set(b.lane(), 1);
                           b.sync();
                           s.set(b.lane(), 2);
                           (void)b.shuffle(1u, 0);
                           (void)s.get(b.lane() ^ 1);
                       }};
    CHECK(caught(gpu, shuffled, {"race on"}));
    // A mask orders its own lanes only.
    const auto halves = [](auto& b, unsigned partner) {
        auto s = b.template allocate_shared<unsigned>(32);
        s.set(b.lane(), 1);
        b.sync_warp(b.lane() < 16 ? 0xffffu : 0xffff0000u);
        (void)s.get(b.lane() ^ partner);
    };
    CHECK(first_fault(gpu, toy{shape_of(32, 128), [halves](auto& b) { halves(b, 15); }}).empty());
    CHECK_FALSE(first_fault(gpu, toy{shape_of(32, 128), [halves](auto& b) { halves(b, 16); }}).empty());
}

TEST_CASE("many readers in one warp before a write", "[emulator]") {
    machine gpu;
    const auto body = [](auto& b, bool sync) {
        auto s = b.template allocate_shared<unsigned>(2);
        if (b.lane() == 0) {
            s.set(b.warp(), 1);
        }
        b.sync_warp();
        (void)s.get(b.warp());
        if (sync) {
            b.sync_warp();
        }
        if (b.lane() == 31) {
            s.set(b.warp(), 2);
        }
    };
    CHECK(first_fault(gpu, toy{shape_of(64, 8), [body](auto& b) { body(b, true); }}).empty());
    CHECK(caught(gpu, toy{shape_of(64, 8), [body](auto& b) { body(b, false); }}, {"race on", "read"}));
}

TEST_CASE("atomics beside plain accesses", "[emulator]") {
    machine gpu;
    const auto out = gpu.output<unsigned>("out", 3);
    const auto body = [out = out.data()](auto& b, bool first, bool last) {
        auto s = b.template allocate_shared<unsigned>(1);
        if (b.thread() == 0) {
            s.set(0, 0);
        }
        if (first) {
            b.sync();
        }
        b.atomic_add(s, 0, 2);
        if (last) {
            b.sync();
        }
        if (b.thread() == 1) {
            b.store_global(out + b.block_index(), s.get(0));
        }
    };
    CHECK(first_fault(gpu, toy{shape_of(96, 4), [body](auto& b) { body(b, true, true); }}).empty());
    CHECK(out[2] == 192);
    CHECK_FALSE(first_fault(gpu, toy{shape_of(96, 4), [body](auto& b) { body(b, false, true); }}).empty());
    CHECK(caught(gpu, toy{shape_of(96, 4), [body](auto& b) { body(b, true, false); }}, {"race on", "atomic"}));
}

TEST_CASE("shared memory out of bounds", "[emulator]") {
    machine gpu;
    const toy wrong{shape_of(32, 1024), [](auto& b) {
                        auto s = b.template allocate_shared<float>(32);
                        s.set(b.thread() + 1, 1.0f);
                    }};
    CHECK(caught(gpu, wrong, {"shared memory out of bounds: write", "[32], which has 32 elements", "thread 31"}));
    const toy below{shape_of(32, 1024), [](auto& b) {
                        auto s = b.template allocate_shared<float>(32);
                        s.set(b.thread() - 1, 1.0f);
                    }};
    CHECK(caught(gpu, below, {"shared memory out of bounds", "[4294967295]"}));
    const toy right{shape_of(32, 1024), [](auto& b) {
                        auto s = b.template allocate_shared<float>(32);
                        s.set(b.thread(), 1.0f);
                    }};
    CHECK(first_fault(gpu, right).empty());
}

TEST_CASE("shared memory beyond what the launch has", "[emulator]") {
    machine gpu;
    const auto body = [](auto& b) {
        auto bytes = b.template allocate_shared<std::uint8_t>(3);
        auto s = b.template allocate_shared<double>(4);
        bytes.set(b.thread() % 3 == b.thread() ? b.thread() : 0, 1);
        (void)s;
    };
    const auto once = [body](auto& b) {
        if (b.thread() < 3) {
            body(b);
        } else {
            (void)b.template allocate_shared<std::uint8_t>(3);
            (void)b.template allocate_shared<double>(4);
        }
    };
    constexpr std::size_t needed = verkv::gpu::shared_layout().array<std::uint8_t>(3).array<double>(4).bytes();
    static_assert(needed == 40);
    CHECK(caught(gpu, toy{shape_of(32, needed - 1), once},
                 {"4 elements of 8 bytes after 3 bytes: the launch has 39 bytes"}));
    CHECK(first_fault(gpu, toy{shape_of(32, needed), once}).empty());
}

TEST_CASE("shared memory read before it is written", "[emulator]") {
    machine gpu;
    const auto body = [](auto& b, unsigned from) {
        auto s = b.template allocate_shared<float>(64);
        if (b.thread() >= from) {
            s.set(b.thread(), 0.0f);
        }
        b.sync();
        (void)s.get(63 - b.thread());
    };
    CHECK(caught(gpu, toy{shape_of(64, 256), [body](auto& b) { body(b, 1); }},
                 {"uninitialised shared memory: read of", "[0]", "thread 63"}));
    CHECK(first_fault(gpu, toy{shape_of(64, 256), [body](auto& b) { body(b, 0); }}).empty());
    const toy atomic{shape_of(32, 4), [](auto& b) {
                         auto s = b.template allocate_shared<unsigned>(1);
                         b.atomic_add(s, 0, 1);
                     }};
    CHECK(caught(gpu, atomic, {"uninitialised shared memory: atomic"}));
}

TEST_CASE("threads that allocate differently", "[emulator]") {
    machine gpu;
    const toy size{shape_of(64, 1024),
                   [](auto& b) { (void)b.template allocate_shared<float>(b.thread() == 33 ? 2 : 1); }};
    CHECK(caught(gpu, size, {"allocate_shared at emulator_shared.cpp", "differs from the one at"}));
    const toy type{shape_of(64, 1024), [](auto& b) {
                       if (b.lane() == 3) {
                           (void)b.template allocate_shared<float>(1);
                       } else {
                           (void)b.template allocate_shared<unsigned>(1);
                       }
                   }};
    CHECK(caught(gpu, type, {"allocate_shared", "differs"}));
    const toy number{shape_of(64, 1024), [](auto& b) {
                         (void)b.template allocate_shared<float>(1);
                         if (b.warp() == 1) {
                             (void)b.template allocate_shared<float>(1);
                         }
                     }};
    CHECK(caught(gpu, number, {"allocate_shared was called 1 times, by another thread 2 times"}));
}

TEST_CASE("a reference to shared memory reads and writes as one", "[emulator]") {
    machine gpu;
    const auto out = gpu.output<int>("out", 3);
    const toy kernel{shape_of(32, 8), [out = out.data()](auto& b) {
                         auto s = b.template allocate_shared<int>(2);
                         if (b.thread() == 0) {
                             s[0] = 5;
                             s[1] = s[0];
                             s[0] += 4;
                             s[0] *= 3;
                             ++s[1];
                             const int difference = s[0] - s[1];
                             b.store_global(out + b.block_index(), difference);
                         }
                     }};
    CHECK(first_fault(gpu, kernel).empty());
    CHECK(out[0] == 21);
}
