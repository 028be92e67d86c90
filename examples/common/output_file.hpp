// Results that cannot be written are worth knowing of before they are computed.
#pragma once

#include <filesystem>
#include <fstream>
#include <ios>
#include <string>
#include <system_error>
#include <vector>

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

/// A file for a result, as an option names it; empty where it was not asked for.
struct output_file {
    std::string option;
    std::filesystem::path file;
};

/// Refuses, before anything is computed, files that cannot be written, that are among what is read, or that are one
/// file under two names. Throws file_error.
inline void require_outputs(const std::vector<output_file>& outputs, const std::vector<std::filesystem::path>& inputs) {
    for (const output_file& out : outputs) {
        if (out.file.empty()) {
            continue;
        }
        require_writable(out.file);
        for (const std::filesystem::path& input : inputs) {
            if (same_file(out.file, input)) {
                throw file_error(out.file, "is " + input.string() + ", which is read, and would be overwritten");
            }
        }
        for (const output_file* other = outputs.data(); other != &out; ++other) {
            if (!other->file.empty() && same_file(out.file, other->file)) {
                throw file_error(out.file, "is the file of " + other->option + " and of " + out.option +
                                               "; one would overwrite the other");
            }
        }
    }
}

/// The files of a trace's folder.
[[nodiscard]] inline std::vector<std::filesystem::path> files_of_trace(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> files;
    for (const char* name : {"meta.json", "keys.npy", "values.npy", "queries.npy", "query_positions.npy"}) {
        files.push_back(folder / name);
    }
    return files;
}

}  // namespace example
