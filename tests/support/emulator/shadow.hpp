// Who touched an element last, and whether that is ordered before what happens now.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

/// What happens to an element.
enum class act { read, write, atomic };

/// By way of which cache a value is read.
enum class path {
    plain,      ///< one that other blocks' writes do not reach
    read_only,  ///< one that no write of the launch reaches
    coherent    ///< the one that all blocks share
};

/// A thread's view of what has happened before: its block's barriers, its warp's, and what other blocks published.
struct observer {
    std::uint32_t block = 0;   ///< of the launch
    std::uint32_t thread = 0;  ///< of the block
    std::uint32_t epoch = 0;   ///< barriers passed by the block
    /// Clock of each lane of the warp that this one is ordered after, and its own: they meet at sync_warp().
    std::array<std::uint32_t, 32> known{};

    [[nodiscard]] std::uint32_t lane() const { return thread % 32; }
    [[nodiscard]] std::uint32_t warp() const { return thread / 32; }
};

/// Of a block, as others need it: times count the accesses of a launch.
struct published {
    std::uint64_t by_fence = 0;            ///< what the block did before this time, fences cover
    std::uint64_t last_atomic = 0;         ///< on global memory
    std::vector<std::uint64_t> by_thread;  ///< as by_fence, of one thread's own doing
};

/// An access.
struct stamp {
    std::uint64_t time = 0;  ///< 0: none
    std::uint32_t block = 0;
    std::uint32_t thread = 0;
    std::uint32_t epoch = 0;
    std::uint32_t clock = 0;
};

/// What a shadow needs of its surroundings.
struct shadow_world {
    std::vector<published>* blocks = nullptr;
    /// Of the running block: clocks of lanes, for elements that several lanes of one warp touched since a barrier.
    std::vector<std::array<std::uint32_t, 32>>* lanes = nullptr;
    std::uint64_t now = 0;
};

/// Accesses of one kind that may be concurrent with each other: reads, or atomics.
class access_set {
public:
    void add(const observer& t, shadow_world& w) {
        const std::uint32_t clock = t.known[t.lane()];
        if (last_.time != 0 && last_.block != t.block) {
            others_ = last_.time > others_ ? last_.time : others_;
            last_.time = 0;
        }
        if (last_.time == 0 || last_.epoch != t.epoch) {
            many_warps_ = false;
            lanes_ = none;
        } else if (last_.thread != t.thread && !many_warps_) {
            if (last_.thread / 32 != t.warp()) {
                many_warps_ = true;
            } else if (lanes_ == none) {
                lanes_ = static_cast<std::uint32_t>(w.lanes->size());
                w.lanes->emplace_back();
                w.lanes->back()[last_.thread % 32] = last_.clock;
            }
        }
        if (lanes_ != none && !many_warps_) {
            (*w.lanes)[lanes_][t.lane()] = clock;
        }
        last_ = {w.now, t.block, t.thread, t.epoch, clock};
    }

    /// Whether all of them are ordered before what t does now; `which` is one that is not.
    [[nodiscard]] bool before(const observer& t, const shadow_world& w, stamp& which) const {
        if (last_.time == 0 && others_ == 0) {
            return true;
        }
        if (others_ == 0 && lanes_ == none && !many_warps_ && last_.thread == t.thread && last_.block == t.block) {
            return true;
        }
        return ordered(t, w, which);
    }

    /// Whether another block did one.
    [[nodiscard]] bool by_others(const observer& t) const {
        return others_ != 0 || (last_.time != 0 && last_.block != t.block);
    }
    [[nodiscard]] bool empty() const { return last_.time == 0 && others_ == 0; }

    void clear() {
        if (last_.time != 0 || others_ != 0) {
            *this = {};
        }
    }

private:
    static constexpr std::uint32_t none = 0xffffffffu;

    [[nodiscard]] bool ordered(const observer& t, const shadow_world& w, stamp& which) const {
        which = last_;
        const std::uint64_t seen = (*w.blocks)[t.block].last_atomic;
        if (others_ != 0 && seen <= others_) {
            return false;
        }
        if (last_.block != t.block) {
            return seen > last_.time;
        }
        if (last_.epoch < t.epoch) {
            return true;
        }
        if (many_warps_ || last_.thread / 32 != t.warp()) {
            return false;
        }
        if (lanes_ == none) {
            return last_.thread == t.thread || last_.clock <= t.known[last_.thread % 32];
        }
        const auto& clocks = (*w.lanes)[lanes_];
        for (std::uint32_t l = 0; l < 32; ++l) {
            if (l != t.lane() && clocks[l] > t.known[l]) {
                which.thread = t.warp() * 32 + l;
                return false;
            }
        }
        return true;
    }

    stamp last_;
    std::uint64_t others_ = 0;  // latest time of another block than that of last_
    std::uint32_t lanes_ = none;
    bool many_warps_ = false;
};

/// What is wrong with an access.
struct conflict {
    act earlier = act::read;
    stamp by;
};

/// The shadow of one element.
class shadow_cell {
public:
    bool written = false;

    /// Records an access; true, and what it is in conflict with, where two threads race.
    bool touch(act a, const observer& t, shadow_world& w, conflict& found) {
        const bool own = write_.thread == t.thread && write_.block == t.block;
        if (!own && write_.time != 0 && !write_before(t, w)) {
            found = {act::write, write_};
            return true;
        }
        if (a != act::atomic && !atomics_.before(t, w, found.by)) {
            found.earlier = act::atomic;
            return true;
        }
        if (a != act::read && !reads_.before(t, w, found.by)) {
            found.earlier = act::read;
            return true;
        }
        if (a == act::read) {
            reads_.add(t, w);
            return false;
        }
        written = true;
        reads_.clear();
        if (a == act::atomic) {
            atomics_.add(t, w);
            return false;
        }
        atomics_.clear();
        write_ = {w.now, t.block, t.thread, t.epoch, t.known[t.lane()]};
        return false;
    }

    /// Why a value must not be read that way, or what was read that way be changed now; null where it may.
    [[nodiscard]] const char* stale(act a, path by, const observer& t) {
        const bool changed = write_.time != 0 || !atomics_.empty();
        if (a != act::read) {
            return read_only_ ? "was read by a read-only load in this launch" : nullptr;
        }
        if (by == path::read_only) {
            read_only_ = true;
            return changed ? "was changed in this launch, which a read-only load may not see" : nullptr;
        }
        const bool others = (write_.time != 0 && write_.block != t.block) || atomics_.by_others(t);
        return by == path::plain && others ? "was changed by another block, which takes a coherent load to see"
                                           : nullptr;
    }

    /// A new launch: everything before it is ordered.
    void forget_accesses() {
        read_only_ = false;
        write_ = {};
        reads_.clear();
        atomics_.clear();
    }

private:
    [[nodiscard]] bool write_before(const observer& t, const shadow_world& w) const {
        if (write_.block == t.block) {
            return write_.thread == t.thread || write_.epoch < t.epoch ||
                   (write_.thread / 32 == t.warp() && write_.clock <= t.known[write_.thread % 32]);
        }
        const published& writer = (*w.blocks)[write_.block];
        const bool fenced = write_.time <= writer.by_fence ||
                            (write_.thread < writer.by_thread.size() && write_.time <= writer.by_thread[write_.thread]);
        return fenced && (*w.blocks)[t.block].last_atomic > write_.time;
    }

    bool read_only_ = false;
    stamp write_;
    access_set reads_;
    access_set atomics_;
};

}  // namespace emulator
