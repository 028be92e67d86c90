// What the emulator throws, and places in a kernel's text.
#pragma once

#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

namespace emulator {

/// A kernel did what a device would not report: the message says which kernel, block and thread, what, and where.
class fault : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// A place in a source file; as a default argument, that of the call.
struct place {
    const char* file = "?";
    int line = 0;

    [[nodiscard]] static constexpr place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
    friend bool operator==(const place& a, const place& b) {
        return a.line == b.line && std::strcmp(a.file, b.file) == 0;
    }
};

inline std::ostream& operator<<(std::ostream& text, const place& p) {
    const char* slash = std::strrchr(p.file, '/');
    return text << (slash != nullptr ? slash + 1 : p.file) << ':' << p.line;
}

/// The parts, joined.
template <class... Parts>
std::string joined(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

}  // namespace emulator
