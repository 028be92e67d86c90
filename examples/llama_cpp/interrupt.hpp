// Ctrl-C, or a polite kill: a program stops where it can still tell what it has done.
#pragma once

#include <atomic>
#include <csignal>
#include <stdexcept>

namespace example {

inline std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal's handler may set it");

/// Makes SIGINT and SIGTERM set `interrupted`; a second one ends the program at once.
inline void stop_at_signals() {
    for (const int number : {SIGINT, SIGTERM}) {
        std::signal(number, [](int n) {
            interrupted = true;
            std::signal(n, SIG_DFL);
        });
    }
}

/// A program was interrupted where it has nothing to tell yet.
class interruption : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace example
