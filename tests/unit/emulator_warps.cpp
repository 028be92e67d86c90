// Shuffles and ballots among lanes that do not all take part, each beside a twin that does it right.
#include <cstdint>

#include "support/catch.hpp"
#include "support/emulator/toy.hpp"

using emulator::caught;
using emulator::first_fault;
using emulator::machine;
using emulator::toy;

TEST_CASE("shuffles and votes give what a warp's do", "[emulator]") {
    machine gpu;
    constexpr unsigned threads = 96;
    const auto out = gpu.output<unsigned>("out", threads * 8);
    const auto wide = gpu.output<double>("wide", threads);
    const toy kernel{{.threads = threads}, [out = out.data(), wide = wide.data()](auto& b) {
                         const unsigned t = b.thread();
                         unsigned* mine = out + std::size_t{t} * 8;
                         b.store_global(mine, b.shuffle(t, 7));
                         b.store_global(mine + 1, b.shuffle_xor(t, 5));
                         b.store_global(mine + 2, b.shuffle_down(t, 3));
                         b.store_global(mine + 3, b.shuffle_up(t, 3));
                         b.store_global(mine + 4, b.ballot(t % 3 == 0));
                         b.store_global(mine + 5, b.any(t == 40) ? 1u : 0u);
                         b.store_global(mine + 6, b.all(t != 40) ? 1u : 0u);
                         b.store_global(mine + 7, b.shuffle(t, b.lane() / 2));
                         b.store_global(wide + t, b.shuffle_xor(t + 0.25, 16));
                     }};
    REQUIRE(first_fault(gpu, kernel).empty());
    for (unsigned t = 0; t < threads; ++t) {
        const unsigned lane = t % 32;
        const unsigned first = t - lane;
        unsigned thirds = 0;
        for (unsigned l = 0; l < 32; ++l) {
            thirds |= (first + l) % 3 == 0 ? 1u << l : 0u;
        }
        CHECK(out[t * 8] == first + 7);
        CHECK(out[t * 8 + 1] == (t ^ 5));
        CHECK(out[t * 8 + 2] == (lane + 3 < 32 ? t + 3 : t));
        CHECK(out[t * 8 + 3] == (lane >= 3 ? t - 3 : t));
        CHECK(out[t * 8 + 4] == thirds);
        CHECK(out[t * 8 + 5] == (first == 32 ? 1u : 0u));
        CHECK(out[t * 8 + 6] == (first == 32 ? 0u : 1u));
        CHECK(out[t * 8 + 7] == first + lane / 2);
        CHECK(wide[t] == (t ^ 16) + 0.25);
    }
}

TEST_CASE("a shuffle whose source has left", "[emulator]") {
    machine gpu;
    const toy wrong{{.threads = 64}, [](auto& b) {
                        if (b.lane() != 9) {
                            (void)b.shuffle(1.0f, 9);
                        }
                    }};
    CHECK(caught(gpu, wrong, {"inactive lane", "shuffle at emulator_warps.cpp", "lane 9 has returned"}));
    const toy outside{{.threads = 64}, [](auto& b) {
                          if (b.lane() != 9) {
                              (void)b.shuffle(1.0f, 9, ~(1u << 9));
                          }
                      }};
    CHECK(caught(gpu, outside, {"from lane 9, which is not in mask 0xfffffdff"}));
    const toy beyond{{.threads = 64}, [](auto& b) { (void)b.shuffle(1.0f, 32); }};
    CHECK(caught(gpu, beyond, {"from lane 32"}));
    const toy right{{.threads = 64}, [](auto& b) {
                        if (b.lane() != 9) {
                            (void)b.shuffle(1.0f, 8, ~(1u << 9));
                        }
                    }};
    CHECK(first_fault(gpu, right).empty());
}

TEST_CASE("a mask that is not that of the lanes that come", "[emulator]") {
    machine gpu;
    const toy lacks_self{{.threads = 32}, [](auto& b) { b.sync_warp(0x0000ffffu); }};
    CHECK(caught(gpu, lacks_self, {"sync_warp", "mask 0xffff, which does not hold the calling lane"}));
    const toy partial{{.threads = 32}, [](auto& b) {
                          const unsigned mask = b.lane() < 16 ? 0x0000ffffu : 0xffffffffu;
                          (void)b.shuffle_xor(1u, 1, mask);
                      }};
    CHECK(caught(gpu, partial, {"inactive lane", "with mask"}));
    const toy right{{.threads = 32}, [](auto& b) {
                        const unsigned mask = b.lane() < 16 ? 0x0000ffffu : 0xffff0000u;
                        (void)b.shuffle_xor(1u, 1, mask);
                        b.sync_warp(mask);
                    }};
    CHECK(first_fault(gpu, right).empty());
}

TEST_CASE("a ballot in divergent code", "[emulator]") {
    machine gpu;
    const toy half_the_warp{{.threads = 64}, [](auto& b) {
                                if (b.lane() < 16) {
                                    (void)b.ballot(true);
                                }
                                b.sync();
                            }};
    CHECK(caught(gpu, half_the_warp, {"inactive lane", "ballot at emulator_warps.cpp", "waits at sync at"}));
    const toy two_places{{.threads = 64}, [](auto& b) {
                             if (b.lane() < 16) {
                                 (void)b.ballot(true);
                             } else {
                                 (void)b.ballot(false);
                             }
                         }};
    CHECK(caught(gpu, two_places, {"divergence", "ballot at emulator_warps.cpp"}));
    const toy two_kinds{{.threads = 64}, [](auto& b) {
                            if (b.lane() < 16) {
                                (void)b.ballot(true);
                            } else {
                                (void)b.any(true);
                            }
                        }};
    CHECK(caught(gpu, two_kinds, {"inactive lane", "ballot at", "any at"}));
    const toy right{{.threads = 64}, [](auto& b) {
                        (void)b.ballot(b.lane() < 16);
                        if (b.lane() < 16) {
                            (void)b.ballot(true, 0xffffu);
                        }
                        b.sync();
                    }};
    CHECK(first_fault(gpu, right).empty());
}

TEST_CASE("a loop that lanes leave one by one", "[emulator]") {
    machine gpu;
    const toy wrong{{.threads = 32}, [](auto& b) {
                        for (unsigned k = 0; k < b.lane(); ++k) {
                            (void)b.any(true);
                        }
                    }};
    CHECK(caught(gpu, wrong, {"inactive lane", "any at"}));
    const toy right{{.threads = 32}, [](auto& b) {
                        for (unsigned k = 0; b.any(k < b.lane()); ++k) {
                        }
                    }};
    CHECK(first_fault(gpu, right).empty());
}
