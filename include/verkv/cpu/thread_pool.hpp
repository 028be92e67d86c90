// A fixed set of threads behind the executor interface.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/cpu/executor.hpp"

namespace verkv::inline v0 {

/// Threads that wait for work; the calling thread works along, as worker 0.
/// Tasks are handed out one by one, so uneven ones balance. run() allocates nothing. A run() that finds the pool at
/// work, for another thread or from one of its own tasks, does its tasks on the caller's thread.
class thread_pool final : public executor {
public:
    static constexpr std::size_t max_threads = 4096;  ///< the most that one pool takes

    /// threads: how many work at once, the caller included; 0 stands for the hardware's number.
    /// Throws invalid_argument for more than max_threads, out_of_capacity where the system starts fewer than asked for;
    /// those that had started have ended by then.
    explicit thread_pool(std::size_t threads = 0) {
        detail::check(threads <= max_threads, "a pool of ", threads, " threads; it takes at most ", max_threads);
        if (threads == 0) {
            const std::size_t hardware = std::thread::hardware_concurrency();
            threads = (std::min)((std::max)(std::size_t{1}, hardware), max_threads);
        }
        members_.reserve(threads - 1);
#if defined(__cpp_exceptions)
        try {
            start(threads);
        } catch (const std::system_error& e) {
            const std::size_t started = members_.size();
            end();
            detail::raise<out_of_capacity>("thread pool: the system started ", started, " of ", threads - 1,
                                           " threads beside the caller's (", e.what(), ")");
        } catch (...) {
            end();
            throw;
        }
#else
        start(threads);
#endif
    }

    ~thread_pool() override {
        end();
    }

    [[nodiscard]] std::size_t workers() const noexcept override {
        return members_.size() + 1;
    }

    void run(std::size_t tasks, void (*task)(void*, std::size_t, std::size_t), void* context) override {
        if (taken_.test_and_set(std::memory_order_acquire)) {
            for (std::size_t i = 0; i < tasks; ++i) {
                task(context, i, 0);
            }
            return;
        }
        {
            const std::lock_guard lock(mutex_);
            task_ = task;
            context_ = context;
            tasks_ = tasks;
            next_.store(0, std::memory_order_relaxed);
            busy_ = members_.size();
            ++round_;
        }
        wake_.notify_all();
        work(0);
        {
            std::unique_lock lock(mutex_);
            done_.wait(lock, [this] { return busy_ == 0; });
        }
        taken_.clear(std::memory_order_release);
    }

private:
    void start(std::size_t threads) {
        for (std::size_t worker = 1; worker < threads; ++worker) {
            members_.emplace_back([this, worker] { serve(worker); });
        }
    }

    void end() {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& member : members_) {
            member.join();
        }
        members_.clear();
    }

    void work(std::size_t worker) {
        for (std::size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) {
            task_(context_, i, worker);
        }
    }

    void serve(std::size_t worker) {
        std::size_t seen = 0;
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return stop_ || round_ != seen; });
            if (stop_) {
                return;
            }
            seen = round_;
            lock.unlock();
            work(worker);
            lock.lock();
            if (--busy_ == 0) {
                done_.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    std::atomic_flag taken_;
    std::atomic<std::size_t> next_{0};
    void (*task_)(void*, std::size_t, std::size_t) = nullptr;
    void* context_ = nullptr;
    std::size_t tasks_ = 0;
    std::size_t busy_ = 0;
    std::size_t round_ = 0;
    bool stop_ = false;
    std::vector<std::thread> members_;  // last: they use what stands above
};

}  // namespace verkv::inline v0
