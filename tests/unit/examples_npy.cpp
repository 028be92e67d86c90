#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/npy.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

namespace {

using example::file_error;
using example::read_npy;
using example::write_npy;
using test_support::temporary_folder;

void write_bytes(const std::filesystem::path& file, std::string_view bytes) {
    std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// A .npy file with the given version, header text and data.
std::string npy_bytes(unsigned major, const std::string& header, std::string_view data) {
    std::string bytes = "\x93NUMPY";
    bytes += static_cast<char>(major);
    bytes += '\0';
    for (unsigned i = 0; i < (major == 1 ? 2u : 4u); ++i) {
        bytes += static_cast<char>((header.size() >> (8 * i)) & 0xff);
    }
    return bytes + header + std::string(data);
}

std::string header(const std::string& descr, const std::string& order, const std::string& shape) {
    return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

/// Whether reading fails with a message that holds the file's name and the expected words.
bool refused(const std::filesystem::path& file, std::string_view words) {
    try {
        (void)read_npy(file);
    } catch (const file_error& e) {
        const std::string what = e.what();
        INFO(what);
        CHECK(what.find(words) != std::string::npos);
        CHECK(e.file() == file);
        return what.find(file.string()) != std::string::npos;
    }
    return false;
}

template <class T>
void check_round_trip(const std::vector<T>& elements, const std::vector<std::size_t>& shape) {
    const temporary_folder folder;
    const auto file = folder / "array.npy";
    write_npy(file, std::span<const T>(elements), shape);
    const auto array = read_npy(file);
    CHECK(array.shape == shape);
    REQUIRE(std::holds_alternative<std::vector<T>>(array.elements));
    CHECK(std::get<std::vector<T>>(array.elements) == elements);
    const auto bytes = std::filesystem::file_size(file);
    CHECK((bytes - elements.size() * sizeof(T)) % 64 == 0);
}

TEST_CASE("examples: npy files come back as they were written") {
    check_round_trip<float>({1, -2, 3.5f, 0, 1e-40f, -1e38f}, {1, 2, 3});
    check_round_trip<double>({1, 2}, {2});
    using verkv::half;
    check_round_trip<half>({half{0x3c00u}, half{0x0001u}, half{0xfbffu}, half{0x8000u}}, {4, 1});
    check_round_trip<std::int32_t>({0, -1, 2147483647}, {3});
    check_round_trip<std::int64_t>({std::numeric_limits<std::int64_t>::min()}, {});
    check_round_trip<float>({}, {0, 3});
    check_round_trip<float>({}, {std::size_t{1} << 40, 0, std::size_t{1} << 40});

    const temporary_folder folder;
    const std::vector<float> three(3);
    const auto write = [&](const std::filesystem::path& file, std::vector<std::size_t> shape) {
        write_npy(file, std::span<const float>(three), shape);
    };
    CHECK_THROWS_AS(write(folder / "a.npy", {4}), file_error);
    CHECK_THROWS_AS(write(folder / "a.npy", {std::size_t{1} << 32, std::size_t{1} << 32}), file_error);
    CHECK_THROWS_AS(write(folder / "nowhere" / "a.npy", {3}), file_error);
}

TEST_CASE("examples: npy headers of all versions and spellings are read") {
    const temporary_folder folder;
    const auto file = folder / "a.npy";
    const std::string data("\x00\x00\x80\x3f\x00\x00\x00\x40", 8);  // 1, 2
    const auto reads = [&](const std::string& bytes, const std::vector<std::size_t>& shape) {
        write_bytes(file, bytes);
        const auto array = read_npy(file);
        return array.shape == shape && std::get<std::vector<float>>(array.elements) == std::vector<float>{1, 2};
    };
    for (const unsigned version : {1u, 2u, 3u}) {
        CHECK(reads(npy_bytes(version, header("<f4", "False", "(2,)"), data), {2}));
    }
    CHECK(reads(npy_bytes(1, header("<f4", "False", "(1, 2)"), data), {1, 2}));
    CHECK(reads(npy_bytes(1, header("<f4", "False", "(2L, 1L)"), data), {2, 1}));
    CHECK(reads(npy_bytes(1, "{\"shape\":(2,1,) ,\"fortran_order\":False,\"descr\":\"<f4\"}", data), {2, 1}));
    CHECK(reads(npy_bytes(1, header("<f4", "False", "( 2 ,\t1 )") + std::string(70, ' ') + "\n", data), {2, 1}));
}

TEST_CASE("examples: npy files that cannot be read are refused by name") {
    const temporary_folder folder;
    const auto file = folder / "bad.npy";
    const std::string data(8, '\0');
    const auto refuses = [&](const std::string& bytes, std::string_view words) {
        write_bytes(file, bytes);
        return refused(file, words);
    };
    const auto refuses_header = [&](const std::string& text, std::string_view words) {
        return refuses(npy_bytes(1, text, data), words);
    };

    CHECK(refused(folder / "missing.npy", "does not exist"));
    std::filesystem::create_directory(folder / "folder.npy");
    CHECK(refused(folder / "folder.npy", "not a regular file"));
    CHECK(refuses("", "has 0 bytes"));
    CHECK(refuses("\x93NUM", "has 4 bytes"));
    CHECK(refuses("PK\x03\x04 a zip file", "does not start with"));
    CHECK(refuses(npy_bytes(4, header("<f4", "False", "(2,)"), data), "version 4.0"));
    CHECK(refuses(std::string("\x93NUMPY\x01\x00\x40", 9), "ends within its header"));
    CHECK(refuses(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{", 13), "ends within its header"));

    const std::string whole = npy_bytes(1, header("<f4", "False", "(2,)"), data);
    CHECK(refuses(whole.substr(0, whole.size() - 1), "truncated: shape (2,) of '<f4' takes 8 bytes, there are 7"));
    CHECK(refuses(whole + "x", "too long: shape (2,) of '<f4' takes 8 bytes, there are 9"));

    CHECK(refuses_header(header("<f4", "True", "(2,)"), "Fortran order"));
    CHECK(refuses_header(header(">f4", "False", "(2,)"), "big-endian"));
    CHECK(refuses_header(header("|O", "False", "(2,)"), "Python objects"));
    CHECK(refuses_header(header("<c8", "False", "(1,)"), "type '<c8'"));
    CHECK(refuses_header(header("<f4 ", "False", "(2,)"), "type '<f4 '"));
    CHECK(refuses_header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", "fields"));
    CHECK(refuses_header(header("<f4", "False", "(-2,)"), "negative"));
    CHECK(refuses_header(header("<f4", "False", "(18446744073709551616,)"), "overflows"));
    CHECK(refuses_header(header("<f4", "False", "(18446744073709551615,)"), "memory"));
    CHECK(refuses_header(header("<f4", "False", "(4294967296, 4294967296)"), "memory"));
    CHECK(refuses_header(header("<f4", "False", "(4611686018427387906,)"), "memory"));  // 2^62 + 2: 8 bytes modulo 2^64
    CHECK(refuses_header(header("<f4", "False", "(1000000000000,)"), "truncated"));
    for (const char* shape : {"(2)", "2", "(2,,)", "(,)", "(2 1)", "(2.0,)", "(2,", "(0x2,)", "(a,)", "[2]", ""}) {
        INFO(shape);
        CHECK(refuses_header(header("<f4", "False", shape), "malformed"));
    }
    CHECK(refuses_header(header("<f4", "false", "(2,)"), "malformed"));
    CHECK(refuses_header("", "malformed"));
    CHECK(refuses_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)", "malformed"));
    CHECK(refuses_header("{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}", "malformed"));
    CHECK(refuses_header("{'descr': '<f4, 'fortran_order': False, 'shape': (2,)}", "malformed"));
    CHECK(refuses_header("{'descr': '<f4', 'fortran_order': False}", "must hold"));
    CHECK(refuses_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x", "must hold"));
    CHECK(refuses_header("{'descr': '<f4', 'shape': (2,), 'shape': (2,), 'fortran_order': False}", "repeated key"));
    CHECK(refuses_header("{'descr': '<f4', 'shape': (2,), 'fortran_order': False, 'x': 1}", "key 'x'"));
}

TEST_CASE("examples: no prefix of a npy file and no changed header byte does harm") {
    const temporary_folder folder;
    const auto file = folder / "bad.npy";
    const std::string whole = npy_bytes(1, header("<f4", "False", "(2,)"), std::string(8, '\0'));
    for (std::size_t n = 0; n < whole.size(); ++n) {
        write_bytes(file, whole.substr(0, n));
        CHECK_THROWS_AS(read_npy(file), file_error);
    }
    std::size_t read = 0;
    for (std::size_t at = 0; at < whole.size() - 8; ++at) {
        for (const int value : {0, 1, 10, 32, 39, 40, 41, 44, 45, 48, 57, 58, 127, 255}) {
            std::string changed = whole;
            changed[at] = static_cast<char>(value);
            write_bytes(file, changed);
            try {
                const auto array = read_npy(file);
                CHECK(std::get<std::vector<float>>(array.elements).size() == 2);
                ++read;
            } catch (const file_error&) {
            }
        }
    }
    CHECK(read < 250);  // those that change a byte into itself, or white space
}

}  // namespace
