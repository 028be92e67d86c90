// A folder of its own for a test, removed at the end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>

namespace test_support {

/// An empty folder below the system's temporary one, with all that is put into it removed by the destructor.
class temporary_folder {
public:
    temporary_folder() {
        std::random_device random;
        do {
            path_ = std::filesystem::temp_directory_path() /
                    ("verkv-test-" + std::to_string((std::uint64_t{random()} << 32) | random()));
        } while (!std::filesystem::create_directory(path_));
    }
    temporary_folder(const temporary_folder&) = delete;
    temporary_folder& operator=(const temporary_folder&) = delete;
    ~temporary_folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    [[nodiscard]] const std::filesystem::path& path() const { return path_; }
    friend std::filesystem::path operator/(const temporary_folder& folder, const std::filesystem::path& name) {
        return folder.path_ / name;
    }

private:
    std::filesystem::path path_;
};

}  // namespace test_support
