// The exception of everything in the examples that reads or writes a file.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>

namespace example {

/// A file cannot be used; what() is "FILE: what is wrong".
class file_error : public std::runtime_error {
public:
    file_error(std::filesystem::path file, std::string problem)
        : std::runtime_error(file.string() + ": " + problem), file_(std::move(file)), problem_(std::move(problem)) {}

    [[nodiscard]] const std::filesystem::path& file() const noexcept { return file_; }
    [[nodiscard]] const std::string& problem() const noexcept { return problem_; }

private:
    std::filesystem::path file_;
    std::string problem_;
};

}  // namespace example
