// Barriers that not all threads reach, each beside a twin that does it right.
#include <string>

#include "support/catch.hpp"
#include "support/emulator/toy.hpp"

using emulator::caught;
using emulator::first_fault;
using emulator::machine;
using emulator::toy;

TEST_CASE("a barrier that some threads pass by", "[emulator]") {
    machine gpu;
    for (unsigned threads : {32u, 96u, 1024u}) {
        const toy wrong{{.threads = threads}, [](auto& b) {
                            if (b.thread() != 5) {
                                b.sync();
                            }
                        }};
        CHECK(
            caught(gpu, wrong,
                   {"divergent barrier", std::to_string(threads - 1) + " threads wait at sync at emulator_barriers.cpp",
                    "thread 5 has returned"}));
        const toy right{{.threads = threads}, [](auto& b) { b.sync(); }};
        CHECK(first_fault(gpu, right).empty());
    }
}

TEST_CASE("an early return before a barrier", "[emulator]") {
    machine gpu;
    const toy wrong{{.threads = 128}, [](auto& b) {
                        b.sync();
                        if (b.warp() == 2) {
                            return;
                        }
                        b.sync();
                    }};
    CHECK(caught(gpu, wrong, {"divergent barrier", "96 threads", "has returned"}));
    const toy right{{.threads = 128}, [](auto& b) {
                        b.sync();
                        b.sync();
                        if (b.warp() == 2) {
                            return;
                        }
                    }};
    CHECK(first_fault(gpu, right).empty());
}

TEST_CASE("threads at barriers in different places", "[emulator]") {
    machine gpu;
    const toy wrong{{.threads = 64}, [](auto& b) {
                        if (b.thread() < 32) {
                            b.sync();
                        } else {
                            b.sync();
                        }
                    }};
    CHECK(caught(gpu, wrong, {"divergent barrier", "is at sync at emulator_barriers.cpp"}));
    // One place, reached on two ways, and a loop whose turns all threads share.
    const toy right{{.threads = 64}, [](auto& b) {
                        for (unsigned k = 0; k < 3; ++k) {
                            b.sync();
                        }
                    }};
    CHECK(first_fault(gpu, right).empty());
}

TEST_CASE("a loop with more barriers for some threads than for others", "[emulator]") {
    machine gpu;
    const toy wrong{{.threads = 64}, [](auto& b) {
                        for (unsigned k = 0; k < 1 + b.thread() / 63; ++k) {
                            b.sync();
                        }
                    }};
    CHECK(caught(gpu, wrong, {"divergent barrier", "thread 63", "1 threads wait", "has returned"}));
}

TEST_CASE("a barrier of the block while the warp waits for a lane", "[emulator]") {
    machine gpu;
    const toy wrong{{.threads = 64}, [](auto& b) {
                        if (b.thread() == 40) {
                            b.sync();
                        } else {
                            b.sync_warp();
                            b.sync();
                        }
                    }};
    CHECK(caught(gpu, wrong, {"inactive lane", "sync_warp at emulator_barriers.cpp", "lane 8 waits at sync at"}));
}

TEST_CASE("a machine goes on after a fault", "[emulator]") {
    machine gpu;
    const auto out = gpu.output<unsigned>("out", 4);
    const toy wrong{{.blocks_x = 4, .threads = 64}, [](auto& b) {
                        if (b.block_index() == 2 && b.thread() == 0) {
                            return;
                        }
                        b.sync();
                    }};
    const toy right{{.blocks_x = 4, .threads = 64}, [out = out.data()](auto& b) {
                        b.sync();
                        if (b.thread() == 0) {
                            b.store_global(out + b.block_index(), b.block_index() + 1);
                        }
                    }};
    for (int k = 0; k < 3; ++k) {
        CHECK(caught(gpu, wrong, {"block 2"}));
        CHECK(first_fault(gpu, right).empty());
        CHECK(out[3] == 4);
    }
}

TEST_CASE("launches that no device takes", "[emulator]") {
    machine gpu;
    const auto nothing = [](auto&) {};
    CHECK(caught(gpu, toy{{.threads = 48}, nothing}, {"48 threads", "multiple of 32"}));
    CHECK(caught(gpu, toy{{.threads = 0}, nothing}, {"0 threads"}));
    CHECK(caught(gpu, toy{{.threads = 2048}, nothing}, {"2048 threads", "at most 1024"}));
    CHECK(caught(gpu, toy{{.threads = 32, .shared_bytes = 300000}, nothing}, {"300000 bytes of shared memory"}));
    CHECK(caught(gpu, toy{{.blocks_y = 70000, .threads = 32}, nothing}, {"70000 blocks"}));
    CHECK(first_fault(gpu, toy{{.blocks_x = 0, .threads = 32}, nothing}).empty());
}
