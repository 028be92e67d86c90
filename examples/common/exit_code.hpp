// How a program ends: with its exit code, or with what went wrong.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <stdexcept>

namespace example {

/// Sends what was printed on its way. Throws std::runtime_error where it does not arrive: a disk that is full, say.
inline void flush_output() {
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
        throw std::runtime_error("the standard output cannot be written");
    }
}

/// The end of main(): runs the program and returns its exit code; or says why it cannot, or why its output is not all
/// there, and returns 1.
template <class Run>
int exit_code_of(const char* program, Run&& run) {
    try {
        const int code = run();
        flush_output();
        return code;
    } catch (const std::exception& e) {
        std::fflush(stdout);
        fmt::print(stderr, "{}: {}\n", program, e.what());
        return 1;
    }
}

}  // namespace example
