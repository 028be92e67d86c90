// In which order the threads and blocks of a launch run.
#pragma once

#include <cstdint>

namespace emulator {

/// Where a thread may have to let another one run.
enum class grain {
    threads,  ///< where it waits: at barriers, shuffles, ballots; then any thread that can run
    warps,    ///< as threads, but the rest of the warp first, lanes in any order
    accesses  ///< at any access to memory as well
};

/// An order, by number: the same seed gives the same run. Seed 0 is what one expects: blocks and threads ascending, one
/// block after the other. Each other one shuffles blocks and threads; grain and the number of blocks that run at the
/// same time change with it, unless they are given.
struct schedule {
    std::uint64_t seed = 0;
    emulator::grain grain = grain::threads;
    unsigned resident_blocks = 1;

    static constexpr schedule numbered(std::uint64_t seed) {
        constexpr emulator::grain grains[] = {grain::threads, grain::warps, grain::accesses};
        return {seed, grains[seed % 3], seed == 0 ? 1u : 1u + static_cast<unsigned>(seed / 3 % 3)};
    }
};

/// A generator of small random numbers (SplitMix64; Steele, Lea and Flood 2014): what it decides is an order only.
class dice {
public:
    explicit dice(std::uint64_t seed) : state_(seed) {}

    /// One of 0 ... n-1.
    std::uint32_t roll(std::uint32_t n) {
        state_ += 0x9e3779b97f4a7c15u;
        std::uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return static_cast<std::uint32_t>((((z ^ (z >> 31)) >> 32) * n) >> 32);
    }

private:
    std::uint64_t state_;
};

}  // namespace emulator
