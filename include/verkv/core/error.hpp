// Errors: what a caller can catch, and the one place that throws.
#pragma once

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "verkv/core/version.hpp"

namespace verkv::inline v0 {

/// Base of every exception that verkv throws. A call that throws has changed nothing.
class error : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// An argument is outside its documented range; the message holds the numbers.
class invalid_argument : public error {
    using error::error;
};

/// A pool has fewer rows, or the system fewer threads, than a call needs; the message says how many there are and how
/// many it takes.
class out_of_capacity : public error {
    using error::error;
};

/// A call that is right in itself came at a time when it cannot work (decode before compress, say).
class invalid_state : public error {
    using error::error;
};

namespace detail {

/// A part of a message; a floating-point number in the fewest digits that tell it from its neighbours.
template <class Part>
void write(std::ostream& text, const Part& part) {
    if constexpr (std::is_floating_point_v<Part>) {
        char digits[40];
        const auto end = std::to_chars(digits, digits + sizeof(digits), part).ptr;
        text.write(digits, end - digits);
    } else {
        text << part;
    }
}

/// Throws E with the parts joined to a message; prints it and aborts where exceptions are switched off.
template <class E, class... Parts>
[[noreturn]] void raise(const Parts&... parts) {
    std::ostringstream text;
    text << "verkv: ";
    (write(text, parts), ...);
#if defined(__cpp_exceptions)
    throw E(text.str());
#else
    std::fprintf(stderr, "%s\n", text.str().c_str());
    std::abort();
#endif
}

/// Raises E unless ok. The message is only put together when it is needed.
template <class E = invalid_argument, class... Parts>
void check(bool ok, const Parts&... parts) {
    if (!ok) [[unlikely]] {
        raise<E>(parts...);
    }
}

}  // namespace detail
}  // namespace verkv::inline v0
