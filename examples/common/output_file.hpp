// Results that cannot be written are worth knowing of before they are computed.
#pragma once

#include <filesystem>
#include <fstream>
#include <ios>
#include <system_error>

#include "common/file_error.hpp"

namespace example {

/// Checks that a file can be written, and leaves it as it is; one that does not exist still does not afterwards.
/// Throws file_error where that is not possible.
inline void require_writable(const std::filesystem::path& file) {
    std::error_code ignored;
    const bool existed = std::filesystem::exists(file, ignored);
    const bool opened = std::ofstream(file, std::ios::binary | std::ios::app).is_open();
    if (!opened) {
        throw file_error(file, "cannot be written");
    }
    if (!existed) {
        std::filesystem::remove(file, ignored);
    }
}

/// Whether two names are those of one file, be it there or not.
[[nodiscard]] inline bool same_file(const std::filesystem::path& a, const std::filesystem::path& b) {
    std::error_code missing;
    if (std::filesystem::equivalent(a, b, missing)) {
        return true;
    }
    const auto whole = [](const std::filesystem::path& p) {
        std::error_code unknown;
        return std::filesystem::weakly_canonical(std::filesystem::absolute(p, unknown), unknown).lexically_normal();
    };
    return whole(a) == whole(b);
}

}  // namespace example
