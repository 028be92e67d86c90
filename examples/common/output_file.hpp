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

}  // namespace example
