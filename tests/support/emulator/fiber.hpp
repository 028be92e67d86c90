// Fibers: a thread of an emulated block each, switched by hand.
#pragma once

#include <sys/mman.h>

#include <boost/context/fiber.hpp>
#include <cstddef>
#include <functional>
#include <new>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#define VERKV_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define VERKV_EMULATOR_ASAN 1
#endif
#endif
#if defined(VERKV_EMULATOR_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

/// Memory for the stack of a fiber, with a page below it that nobody may touch.
class fiber_stack {
public:
    fiber_stack() {
        bottom_ =
            ::mmap(nullptr, size + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (bottom_ == MAP_FAILED) {
            throw std::bad_alloc();
        }
        (void)::mprotect(bottom_, guard, PROT_NONE);
    }
    fiber_stack(const fiber_stack&) = delete;
    fiber_stack& operator=(const fiber_stack&) = delete;
    ~fiber_stack() { (void)::munmap(bottom_, size + guard); }

    static constexpr std::size_t size = 256 * 1024;
    static constexpr std::size_t guard = 4096;

    [[nodiscard]] char* bottom() const { return static_cast<char*>(bottom_) + guard; }

private:
    void* bottom_;
};

/// Code with a stack of its own: resume() runs it until it calls suspend() or ends. Destroying one that has not ended
/// unwinds it.
class fiber {
public:
    fiber() = default;
    fiber(const fiber&) = delete;
    fiber& operator=(const fiber&) = delete;
    ~fiber() { stop(); }

    /// body throws nothing but what suspend() threw.
    void start(std::function<void()> body) {
        stop();
        body_ = std::move(body);
        ended_ = false;
        stopping_ = false;
        const boost::context::stack_context whole = on_stack();
        inside_ = boost::context::fiber(std::allocator_arg, boost::context::preallocated(whole.sp, whole.size, whole),
                                        owner{}, [this](boost::context::fiber&& outside) {
                                            outside_ = std::move(outside);
                                            entered();
                                            try {
                                                body_();
                                            } catch (const stopped&) {
                                            }
                                            ended_ = true;
                                            leaving_for_good();
                                            return std::move(outside_);
                                        });
    }

    [[nodiscard]] bool ended() const { return ended_; }

    /// From outside.
    void resume() {
#if defined(VERKV_EMULATOR_ASAN)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, stack_.bottom(), fiber_stack::size);
#endif
        inside_ = std::move(inside_).resume();
#if defined(VERKV_EMULATOR_ASAN)
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    }

    /// From inside.
    void suspend() {
#if defined(VERKV_EMULATOR_ASAN)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, outside_bottom_, outside_size_);
#endif
        outside_ = std::move(outside_).resume();
#if defined(VERKV_EMULATOR_ASAN)
        __sanitizer_finish_switch_fiber(fake, &outside_bottom_, &outside_size_);
#endif
        if (stopping_) {
            throw stopped();
        }
    }

    /// From outside: unwinds what has not ended.
    void stop() {
        if (!ended_) {
            stopping_ = true;
            resume();
        }
    }

private:
    struct stopped {};
    struct owner {  // of the stack: not the fiber's own code
        static boost::context::stack_context allocate() { return {}; }
        static void deallocate(boost::context::stack_context&) noexcept {}
    };

    [[nodiscard]] boost::context::stack_context on_stack() {
#if defined(VERKV_EMULATOR_ASAN)
        __asan_unpoison_memory_region(stack_.bottom(), fiber_stack::size);
#endif
        boost::context::stack_context whole;
        whole.sp = stack_.bottom() + fiber_stack::size;
        whole.size = fiber_stack::size;
        return whole;
    }
    void entered() {
#if defined(VERKV_EMULATOR_ASAN)
        __sanitizer_finish_switch_fiber(nullptr, &outside_bottom_, &outside_size_);
#endif
        if (stopping_) {
            body_ = [] {};
        }
    }
    void leaving_for_good() const {
#if defined(VERKV_EMULATOR_ASAN)
        __sanitizer_start_switch_fiber(nullptr, outside_bottom_, outside_size_);
#endif
    }

    fiber_stack stack_;
    boost::context::fiber inside_;
    boost::context::fiber outside_;
    std::function<void()> body_;
    bool ended_ = true;
    bool stopping_ = false;
    [[maybe_unused]] const void* outside_bottom_ = nullptr;
    [[maybe_unused]] std::size_t outside_size_ = 0;
};

}  // namespace emulator
