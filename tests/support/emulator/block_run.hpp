// A block at work: its threads' fibers, who waits for what, its shared memory.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include "support/emulator/fault.hpp"
#include "support/emulator/fiber.hpp"
#include "support/emulator/memory.hpp"
#include "support/emulator/schedule.hpp"
#include "support/emulator/shadow.hpp"
#include "verkv/cuda/block.hpp"

namespace emulator {

class emulated_block;

/// What the blocks of a launch share.
struct launch_state {
    std::string kernel;
    verkv::gpu::launch_shape shape;
    emulator::schedule order;
    global_memory* memory = nullptr;
    std::uint32_t number = 0;
    dice random{0};
    std::uint64_t now = 0;
    std::uint64_t most_accesses = 0;
    std::vector<published> blocks;
};

/// What a thread is doing.
enum class doing { running, sync, sync_warp, shuffle, ballot, any, all, returned };

inline const char* name_of(doing d) {
    constexpr const char* names[] = {"running", "sync", "sync_warp", "shuffle", "ballot", "any", "all", "returned"};
    return names[static_cast<int>(d)];
}

/// A thread, as the block's scheduler sees it.
struct thread_state {
    fiber own;
    observer sees;
    doing what = doing::running;
    place at;
    unsigned mask = 0;
    unsigned source = 0;
    std::uint64_t value = 0;  // given to a shuffle or ballot, and what it returns
    std::uint32_t allocations = 0;
};

/// An array in shared memory.
struct shared_array {
    std::size_t first = 0;
    std::size_t count = 0;
    std::size_t element = 0;
    const std::type_info* type = nullptr;
    place at;
    std::vector<shadow_cell> cells;
};

/// One block of a launch. Blocks run one after another in the same object, whose fibers stay.
class block_run {
public:
    /// body(thread) runs the kernel; of the launch.
    void begin(launch_state& launch, std::uint32_t index, std::function<void(block_run&, std::uint32_t)> body) {
        launch_ = &launch;
        index_ = index;
        body_ = std::move(body);
        const std::size_t n = launch.shape.threads;
        while (threads_.size() < n) {
            threads_.push_back(std::make_unique<thread_state>());
        }
        count_ = n;
        for (std::uint32_t t = 0; t < n; ++t) {
            thread_state& thread = *threads_[t];
            thread.what = doing::running;
            thread.allocations = 0;
            thread.sees = {};
            thread.sees.block = index;
            thread.sees.thread = t;
            thread.sees.known[t % 32] = 1;
            if (thread.own.ended()) {
                thread.own.start([this, t] { live(t); });
            }
        }
        ready_.assign(n / 32, 0xffffffffu);
        waiting_.assign(n / 32, 0u);
        at_barrier_ = 0;
        returned_ = 0;
        barrier_time_ = 0;
        lanes_.clear();
        arrays_.clear();
        used_ = 0;
        memory_.assign(launch.shape.shared_bytes / sizeof(unit) + 1, {});
        failure_ = nullptr;
        current_warp_ = 0;
        world_ = {&launch.blocks, &lanes_, 0};
    }

    [[nodiscard]] bool ended() const { return returned_ == count_; }

    /// Lets one thread run as far as the schedule wants. Throws what it threw.
    void step() {
        const std::uint32_t t = choose();
        ready_[t / 32] &= ~(1u << (t % 32));
        threads_[t]->own.resume();
        if (failure_) {
            std::rethrow_exception(failure_);
        }
        if (ended()) {
            same_allocations();
        }
    }

    /// Unwinds all threads.
    void stop() {
        for (const auto& thread : threads_) {
            thread->own.stop();
        }
    }

    // What a thread asks for.
    [[nodiscard]] launch_state& launch() { return *launch_; }
    [[nodiscard]] std::uint32_t index() const { return index_; }
    [[nodiscard]] thread_state& thread(std::uint32_t t) { return *threads_[t]; }

    template <class... Parts>
    [[noreturn]] void fail(std::uint32_t t, const Parts&... parts) const {
        const unsigned x = launch_->shape.blocks_x;
        const std::string row = launch_->shape.blocks_y > 1 ? joined(", ", index_ / x) : std::string();
        throw fault(joined("emulator: ", launch_->kernel, ", block ", index_ % x, row, ", thread ", t, " (warp ",
                           t / 32, ", lane ", t % 32, "): ", parts...));
    }

    /// Where the schedule may let another thread run.
    void access(std::uint32_t t) {
        if (++launch_->now > launch_->most_accesses) [[unlikely]] {
            fail(t, "more than ", launch_->most_accesses, " accesses in this launch: it seems to wait for ever");
        }
        if (launch_->order.grain == grain::accesses && launch_->random.roll(8) == 0) {
            ready_[t / 32] |= 1u << (t % 32);
            threads_[t]->own.suspend();
        }
    }

    template <class What>
    void touch(std::uint32_t t, shadow_cell& cell, act a, const What& what) {
        world_.now = launch_->now;
        conflict found;
        if (cell.touch(a, threads_[t]->sees, world_, found)) [[unlikely]] {
            constexpr const char* verb[] = {"read", "write", "atomic"};
            const bool here = found.by.block == index_;
            fail(t, "race on ", what(), ": this ", verb[static_cast<int>(a)], " and an earlier ",
                 verb[static_cast<int>(found.earlier)], " by thread ", found.by.thread,
                 here ? std::string(" without a barrier between")
                      : joined(" of block ", found.by.block, " without fence and atomic between"));
        }
    }

    void sync(std::uint32_t t, place at) {
        thread_state& me = *threads_[t];
        me.what = doing::sync;
        me.at = at;
        if (++at_barrier_ == count_) {
            for (std::uint32_t other = 0; other < count_; ++other) {
                if (!(threads_[other]->at == at)) {
                    fail(t, "divergent barrier: sync at ", at, ", but thread ", other, " is at sync at ",
                         threads_[other]->at);
                }
            }
            for (std::uint32_t other = 0; other < count_; ++other) {
                threads_[other]->what = doing::running;
                ++threads_[other]->sees.epoch;
            }
            at_barrier_ = 0;
            barrier_time_ = launch_->now;
            lanes_.clear();
            ready_.assign(ready_.size(), 0xffffffffu);
        }
        me.own.suspend();
    }

    /// Meets the lanes of a mask; returns what is meant for this one.
    std::uint64_t meet(std::uint32_t t, doing what, unsigned mask, place at, std::uint64_t value, unsigned source) {
        const unsigned lane = t % 32;
        const std::uint32_t first = t - lane;
        thread_state& me = *threads_[t];
        if ((mask >> lane & 1u) == 0) {
            fail(t, name_of(what), " at ", at, " with mask ", hex(mask), ", which does not hold the calling lane");
        }
        if (what == doing::shuffle && (source > 31 || (mask >> source & 1u) == 0)) {
            fail(t, "shuffle at ", at, " from lane ", source, ", which is not in mask ", hex(mask));
        }
        me.what = what;
        me.mask = mask;
        me.at = at;
        me.value = value;
        me.source = source;
        unsigned& waiting = waiting_[t / 32];
        waiting |= 1u << lane;
        if ((waiting & mask) == mask && agree(t, first, mask)) {
            exchange(first, what, mask);
            waiting &= ~mask;
            ready_[t / 32] |= mask;
        }
        me.own.suspend();
        return me.value;
    }

    /// The array that a thread's next call makes, or that another thread's made before.
    std::uint32_t allocate(std::uint32_t t, std::size_t n, std::size_t element, std::size_t place_of,
                           const std::type_info& type, place at) {
        const std::uint32_t k = threads_[t]->allocations++;
        if (k < arrays_.size()) {
            const shared_array& a = arrays_[k];
            if (a.count != n || *a.type != type) {
                fail(t, "allocate_shared at ", at, " of ", n, " elements of ", element,
                     " bytes differs from the one at ", a.at, " of another thread: ", a.count, " elements of ",
                     a.element, " bytes");
            }
            return k;
        }
        const std::size_t bytes = launch_->shape.shared_bytes;
        if (place_of > bytes || n > (bytes - place_of) / element) {
            fail(t, "allocate_shared at ", at, " of ", n, " elements of ", element, " bytes after ", used_,
                 " bytes: the launch has ", bytes, " bytes of shared memory");
        }
        arrays_.push_back({place_of, n, element, &type, at, std::vector<shadow_cell>(n)});
        used_ = place_of + n * element;
        return k;
    }
    [[nodiscard]] std::size_t shared_used(std::uint32_t t) const {
        const std::uint32_t k = threads_[t]->allocations;
        return k == 0 ? 0 : arrays_[k - 1].first + arrays_[k - 1].count * arrays_[k - 1].element;
    }
    [[nodiscard]] shared_array& array(std::uint32_t k) { return arrays_[k]; }
    [[nodiscard]] unsigned char* shared_bytes() { return memory_.data()->bytes; }

    void fence(std::uint32_t t) {
        published& mine = launch_->blocks[index_];
        mine.by_thread.resize(count_);
        mine.by_thread[t] = launch_->now;
        mine.by_fence = barrier_time_;
    }
    void global_atomic() { launch_->blocks[index_].last_atomic = launch_->now; }

private:
    struct alignas(16) unit {
        unsigned char bytes[16];
    };

    static std::string hex(unsigned mask) { return joined("0x", std::hex, mask); }

    /// A fiber's life: the kernel once for each block.
    void live(std::uint32_t t) {
        for (;;) {
            try {
                body_(*this, t);
            } catch (const std::exception&) {
                failure_ = std::current_exception();
            }
            threads_[t]->what = doing::returned;
            ++returned_;
            threads_[t]->own.suspend();
        }
    }

    [[nodiscard]] std::uint32_t choose() {
        const bool in_order = launch_->order.seed == 0;
        const auto warps = static_cast<std::uint32_t>(ready_.size());
        if (launch_->order.grain != grain::warps || ready_[current_warp_] == 0 || in_order) {
            std::uint32_t from = in_order ? 0 : launch_->random.roll(warps);
            std::uint32_t seen = 0;
            while (seen < warps && ready_[from] == 0) {
                from = from + 1 == warps ? 0 : from + 1;
                ++seen;
            }
            if (seen == warps) {
                stuck();
            }
            current_warp_ = from;
        }
        unsigned lanes = ready_[current_warp_];
        if (!in_order) {
            for (auto skip = launch_->random.roll(static_cast<std::uint32_t>(std::popcount(lanes))); skip > 0; --skip) {
                lanes &= lanes - 1;
            }
        }
        return current_warp_ * 32 + static_cast<std::uint32_t>(std::countr_zero(lanes));
    }

    /// Whether the lanes of a mask, which all wait, wait for the same thing.
    [[nodiscard]] bool agree(std::uint32_t t, std::uint32_t first, unsigned mask) const {
        const thread_state& me = *threads_[t];
        for (unsigned left = mask; left != 0; left &= left - 1) {
            const std::uint32_t other = first + static_cast<std::uint32_t>(std::countr_zero(left));
            const thread_state& it = *threads_[other];
            if (it.what != me.what || it.mask != mask) {
                return false;  // perhaps once others have come; else stuck() tells
            }
            if (!(it.at == me.at)) {
                fail(t, "divergence: ", name_of(me.what), " at ", me.at, " with mask ", hex(mask), ", but lane ",
                     other % 32, " of the mask is at ", name_of(it.what), " at ", it.at);
            }
        }
        return true;
    }

    void exchange(std::uint32_t first, doing what, unsigned mask) {
        std::array<std::uint64_t, 32> given{};
        unsigned said = 0;
        std::array<std::uint32_t, 32> known{};
        for (unsigned left = mask; left != 0; left &= left - 1) {
            const auto l = static_cast<std::uint32_t>(std::countr_zero(left));
            thread_state& it = *threads_[first + l];
            given[l] = it.value;
            said |= it.value != 0 ? 1u << l : 0u;
            for (std::size_t k = 0; what == doing::sync_warp && k < 32; ++k) {
                known[k] = it.sees.known[k] > known[k] ? it.sees.known[k] : known[k];
            }
        }
        for (unsigned left = mask; left != 0; left &= left - 1) {
            const auto l = static_cast<std::uint32_t>(std::countr_zero(left));
            thread_state& it = *threads_[first + l];
            it.what = doing::running;
            if (what == doing::shuffle) {
                it.value = given[it.source];
            } else if (what == doing::sync_warp) {
                it.sees.known = known;
                ++it.sees.known[l];
            } else {
                it.value = what == doing::ballot ? said : what == doing::any ? said != 0 : said == mask;
            }
        }
    }

    [[nodiscard]] std::string where_is(std::uint32_t t) const {
        const thread_state& it = *threads_[t];
        if (it.what == doing::returned) {
            return "has returned";
        }
        const std::string masked = it.what == doing::sync ? std::string() : joined(" with mask ", hex(it.mask));
        return joined("waits at ", name_of(it.what), " at ", it.at, masked);
    }

    /// Nobody can go on.
    [[noreturn]] void stuck() const {
        for (std::uint32_t t = 0; t < count_; ++t) {
            const thread_state& it = *threads_[t];
            if (it.what == doing::sync || it.what == doing::returned) {
                continue;
            }
            for (unsigned left = it.mask; left != 0; left &= left - 1) {
                const std::uint32_t other = t - t % 32 + static_cast<std::uint32_t>(std::countr_zero(left));
                const thread_state& that = *threads_[other];
                if (that.what != it.what || that.mask != it.mask) {
                    fail(t, "inactive lane: ", name_of(it.what), " at ", it.at, " with mask ", hex(it.mask),
                         ", but lane ", other % 32, " ", where_is(other));
                }
            }
        }
        std::uint32_t waits = 0;
        std::uint32_t other = 0;
        for (std::uint32_t t = 0; t < count_; ++t) {
            (threads_[t]->what == doing::sync ? waits : other) = t;
        }
        fail(waits, "divergent barrier: ", at_barrier_, " threads wait at sync at ", threads_[waits]->at,
             ", but thread ", other, " ", where_is(other));
    }

    void same_allocations() const {
        for (std::uint32_t t = 0; t < count_; ++t) {
            if (threads_[t]->allocations != arrays_.size()) {
                fail(t, "allocate_shared was called ", threads_[t]->allocations, " times, by another thread ",
                     arrays_.size(), " times");
            }
        }
    }

    launch_state* launch_ = nullptr;
    std::uint32_t index_ = 0;
    std::function<void(block_run&, std::uint32_t)> body_;
    std::vector<std::unique_ptr<thread_state>> threads_;
    std::size_t count_ = 0;
    std::vector<unsigned> ready_;    // lanes of each warp that can run
    std::vector<unsigned> waiting_;  // lanes of each warp that wait for lanes
    std::size_t at_barrier_ = 0;
    std::size_t returned_ = 0;
    std::uint64_t barrier_time_ = 0;
    std::uint32_t current_warp_ = 0;
    std::vector<std::array<std::uint32_t, 32>> lanes_;
    std::vector<shared_array> arrays_;
    std::size_t used_ = 0;
    std::vector<unit> memory_;
    std::exception_ptr failure_;
    shadow_world world_;
};

}  // namespace emulator
