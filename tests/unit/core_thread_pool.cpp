#include "verkv/cpu/thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/refusal.hpp"

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if !defined(__has_feature)
#define VERKV_TEST_LIMITS_MEMORY 1
#elif !__has_feature(address_sanitizer) && !__has_feature(thread_sanitizer) && !__has_feature(memory_sanitizer)
#define VERKV_TEST_LIMITS_MEMORY 1
#endif
#endif

#if defined(VERKV_TEST_LIMITS_MEMORY)
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#endif

namespace {

/// An engine's own executor: one thread after the other, last index first.
class backwards final : public verkv::executor {
public:
    [[nodiscard]] std::size_t workers() const noexcept override { return 3; }
    void run(std::size_t tasks, void (*task)(void*, std::size_t, std::size_t), void* context) override {
        for (std::size_t k = tasks; k-- > 0;) {
            task(context, k, k % 3);
        }
    }
};

#if defined(VERKV_TEST_LIMITS_MEMORY)
/// Lets the process map so many more bytes and no further, while it lives.
class memory_limit {
public:
    explicit memory_limit(std::size_t more) {
        std::size_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        getrlimit(RLIMIT_AS, &before_);
        rlimit now = before_;
        now.rlim_cur = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + more;
        set_ = pages > 0 && now.rlim_cur < before_.rlim_max && setrlimit(RLIMIT_AS, &now) == 0;
    }
    memory_limit(const memory_limit&) = delete;
    memory_limit& operator=(const memory_limit&) = delete;
    ~memory_limit() { setrlimit(RLIMIT_AS, &before_); }

    [[nodiscard]] bool set() const { return set_; }

private:
    rlimit before_{};
    bool set_ = false;
};
#endif

}  // namespace

TEST_CASE("core: a pool runs every index once, in many rounds") {
    for (const std::size_t threads : {1u, 2u, 3u, 8u}) {
        verkv::thread_pool pool(threads);
        REQUIRE(pool.workers() == threads);
        const verkv::cpu exec{&pool};
        CHECK(verkv::workers(exec) == threads);
        std::size_t wrong = 0;
        for (std::size_t round = 0; round < 400; ++round) {
            const std::size_t tasks = round % 37;
            // Plain counts: an index that two threads ran, or that run() did not wait for, is a race as well.
            std::vector<int> times(tasks, 0);
            std::atomic<std::size_t> worker_out_of_range{0};
            verkv::for_each_task(exec, tasks, [&](std::size_t index, std::size_t worker) {
                ++times[index];
                worker_out_of_range += worker >= threads;
            });
            for (const int t : times) {
                wrong += t != 1;
            }
            wrong += worker_out_of_range;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("core: tasks that run at once have different workers") {
    verkv::thread_pool pool(4);
    std::vector<std::atomic<int>> busy(pool.workers());
    std::atomic<int> clashes{0};
    for (int round = 0; round < 50; ++round) {
        verkv::for_each_task(verkv::cpu{&pool}, 64, [&](std::size_t, std::size_t worker) {
            clashes += busy[worker].fetch_add(1) != 0;
            std::this_thread::yield();
            busy[worker].fetch_sub(1);
        });
    }
    CHECK(clashes == 0);
}

TEST_CASE("core: run() returns when the slowest thread is done, not when the caller is") {
    verkv::thread_pool pool(2);
    for (int round = 0; round < 3; ++round) {
        std::atomic<int> begun{0};
        std::atomic<int> finished{0};
        verkv::for_each_task(verkv::cpu{&pool}, 2, [&](std::size_t, std::size_t worker) {
            ++begun;
            if (worker == 0) {  // leave the other task to the other thread, if it wakes within a second
                for (int k = 0; begun < 2 && k < 1000; ++k) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
            } else {
                std::this_thread::sleep_for(std::chrono::milliseconds(30));
            }
            ++finished;
        });
        CHECK(finished == 2);
    }
}

TEST_CASE("core: the calling thread works along, and sees what the others wrote") {
    verkv::thread_pool pool(2);
    std::vector<std::size_t> squares(1000);
    std::vector<std::thread::id> who(2);
    for (int round = 0; round < 20; ++round) {
        std::fill(squares.begin(), squares.end(), std::size_t{0});
        verkv::for_each_task(verkv::cpu{&pool}, squares.size(), [&](std::size_t index, std::size_t worker) {
            squares[index] = index * index;
            who[worker] = std::this_thread::get_id();
        });
        std::size_t wrong = 0;
        for (std::size_t k = 0; k < squares.size(); ++k) {
            wrong += squares[k] != k * k;
        }
        REQUIRE(wrong == 0);
    }
    if (who[0] != std::thread::id{}) {  // the others may have been quicker
        CHECK(who[0] == std::this_thread::get_id());
    }
    CHECK(who[1] != std::this_thread::get_id());
}

TEST_CASE("core: a run from inside a task, or beside another run, is done on the caller's thread") {
    verkv::thread_pool pool(3);
    const verkv::cpu exec{&pool};
    std::atomic<int> done{0};
    verkv::for_each_task(exec, 8, [&](std::size_t, std::size_t) {
        const auto self = std::this_thread::get_id();
        verkv::for_each_task(exec, 5, [&](std::size_t, std::size_t worker) {
            done += std::this_thread::get_id() == self && worker == 0;
        });
    });
    CHECK(done == 40);
    std::atomic<int> both{0};
    const auto many = [&] {
        for (int round = 0; round < 200; ++round) {
            verkv::for_each_task(exec, 7, [&](std::size_t, std::size_t) { ++both; });
        }
    };
    std::thread other(many);
    many();
    other.join();
    CHECK(both == 2 * 200 * 7);
}

TEST_CASE("core: without an executor tasks run in order on the caller's thread") {
    std::vector<std::size_t> order;
    verkv::for_each_task(verkv::cpu{}, 5, [&](std::size_t index, std::size_t worker) {
        CHECK(worker == 0);
        order.push_back(index);
    });
    CHECK(order == std::vector<std::size_t>{0, 1, 2, 3, 4});
    CHECK(verkv::workers(verkv::cpu{}) == 1);
    verkv::for_each_task(verkv::cpu{}, 0, [](std::size_t, std::size_t) { FAIL("there are no tasks"); });
}

TEST_CASE("core: an engine's own executor takes the tasks") {
    backwards own;
    const verkv::cpu exec{&own};
    CHECK(verkv::workers(exec) == 3);
    std::vector<std::size_t> order;
    const auto note = [&order](std::size_t index, std::size_t worker) {
        CHECK(worker == index % 3);
        order.push_back(index);
    };
    verkv::for_each_task(exec, 4, note);  // a const function object
    CHECK(order == std::vector<std::size_t>{3, 2, 1, 0});
}

TEST_CASE("core: a pool of no stated size has the hardware's, and one that never worked goes away") {
    const verkv::thread_pool pool;
    CHECK(pool.workers() >= 1);
    for (int k = 0; k < 50; ++k) {
        const verkv::thread_pool idle(3);
    }
}

TEST_CASE("core: a pool of more threads than it takes is refused, not tried") {
    const std::size_t most = verkv::thread_pool::max_threads;
    for (const std::size_t threads : {most + 1, std::size_t{1} << 40, (std::numeric_limits<std::size_t>::max)()}) {
        CHECK(support::refused([&] { const verkv::thread_pool pool(threads); },
                               {std::to_string(threads), std::to_string(most)}));
    }
}

TEST_CASE("core: a pool whose threads do not all start ends those that did, and says so") {
#if defined(VERKV_TEST_LIMITS_MEMORY)
    // Room for the stacks of some threads, not of all.
    std::string message;
    bool limited = false;
    {
        const memory_limit limit(std::size_t{192} << 20);
        limited = limit.set();
        if (limited) {
            message = support::message_of<verkv::out_of_capacity>(
                [] { const verkv::thread_pool pool(verkv::thread_pool::max_threads); });
        }
    }
    if (limited) {
        CAPTURE(message);
        CHECK(message.find(" of 4095 threads") != std::string::npos);
        CHECK(message.find("started 0 of") == std::string::npos);
    } else {
        WARN("left out: this system sets no limit");
    }
#else
    WARN("left out: no limit can be set here");
#endif
    verkv::thread_pool pool(3);
    std::atomic<int> done{0};
    verkv::for_each_task(verkv::cpu{&pool}, 10, [&](std::size_t, std::size_t) { ++done; });
    CHECK(done == 10);
}
