// NumPy's .npy files, as far as traces need them: numbers, little-endian, C order; formats 1.0, 2.0 and 3.0.
//
// The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "common/file_error.hpp"
#include "verkv/core/storage.hpp"

namespace example {

static_assert(std::endian::native == std::endian::little, "arrays are read as they lie in the file");

/// An array as a .npy file holds it: row-major, the last axis adjacent.
struct npy_array {
    std::vector<std::size_t> shape;
    std::variant<std::vector<verkv::half>, std::vector<float>, std::vector<double>, std::vector<std::int32_t>,
                 std::vector<std::int64_t>>
        elements;
};

/// NumPy's name for an element type: "<f2" for half and so on.
template <class T>
[[nodiscard]] constexpr std::string_view npy_descr() {
    if constexpr (std::is_same_v<T, verkv::half>) {
        return "<f2";
    } else if constexpr (std::is_same_v<T, float>) {
        return "<f4";
    } else if constexpr (std::is_same_v<T, double>) {
        return "<f8";
    } else if constexpr (std::is_same_v<T, std::int32_t>) {
        return "<i4";
    } else {
        static_assert(std::is_same_v<T, std::int64_t>);
        return "<i8";
    }
}

/// "(8164, 9, 64)", as NumPy writes a shape.
[[nodiscard]] inline std::string shape_text(std::span<const std::size_t> shape) {
    std::string text = "(";
    for (std::size_t i = 0; i < shape.size(); ++i) {
        text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
    }
    return text + (shape.size() == 1 ? ",)" : ")");
}

namespace detail {

struct npy_header {
    std::string descr;
    bool fortran_order = false;
    std::vector<std::size_t> shape;
};

/// Reads the header: a Python dict with exactly the keys descr, fortran_order and shape, in any order.
class npy_header_parser {
public:
    npy_header_parser(const std::filesystem::path& file, std::string_view text) : file_(file), text_(text) {}

    [[nodiscard]] npy_header parse() {
        std::optional<std::string> descr;
        std::optional<bool> fortran_order;
        std::optional<std::vector<std::size_t>> shape;
        expect('{');
        while (!accept('}')) {
            const std::string key = string();
            expect(':');
            if (key == "descr" && !descr) {
                if (peek() == '[' || peek() == '(') {
                    fail("has fields (a structured type); only plain numbers can be read");
                }
                descr = string();
            } else if (key == "fortran_order" && !fortran_order) {
                fortran_order = boolean();
            } else if (key == "shape" && !shape) {
                shape = dimensions();
            } else {
                fail("header has an unexpected or repeated key '" + key + "'");
            }
            if (!accept(',') && peek() != '}') {
                malformed();
            }
        }
        if (peek() != '\0' || !descr || !fortran_order || !shape) {
            fail("header must hold 'descr', 'fortran_order' and 'shape' and nothing else");
        }
        return {std::move(*descr), *fortran_order, std::move(*shape)};
    }

private:
    [[noreturn]] void fail(const std::string& problem) const { throw file_error(file_, problem); }
    [[noreturn]] void malformed() const { fail("header is malformed at byte " + std::to_string(at_) + " of its text"); }

    /// Next character that is no white space; '\0' at the end.
    char peek() {
        while (at_ < text_.size() && (text_[at_] == ' ' || (text_[at_] >= '\t' && text_[at_] <= '\r'))) {
            ++at_;
        }
        return at_ < text_.size() ? text_[at_] : '\0';
    }

    bool accept(char c) {
        const bool there = peek() == c;
        at_ += there ? 1 : 0;
        return there;
    }

    void expect(char c) {
        if (!accept(c)) {
            malformed();
        }
    }

    std::string string() {
        const char quote = peek();
        if (quote != '\'' && quote != '"') {
            malformed();
        }
        const std::size_t end = text_.find(quote, at_ + 1);
        if (end == std::string_view::npos) {
            malformed();
        }
        const std::size_t begin = std::exchange(at_, end + 1) + 1;
        return std::string(text_.substr(begin, end - begin));
    }

    bool boolean() {
        peek();
        for (const std::string_view word : {"True", "False"}) {
            if (text_.substr(at_, word.size()) == word) {
                at_ += word.size();
                return word == "True";
            }
        }
        malformed();
    }

    std::vector<std::size_t> dimensions() {
        std::vector<std::size_t> shape;
        expect('(');
        bool comma = true;
        while (!accept(')')) {
            if (!comma) {
                malformed();
            }
            shape.push_back(dimension());
            comma = accept(',');
        }
        if (shape.size() == 1 && !comma) {  // "(5)" is a number to Python, "(5,)" a shape
            malformed();
        }
        return shape;
    }

    std::size_t dimension() {
        if (peek() == '-') {
            fail("shape has a negative dimension");
        }
        const auto digit = [&] { return at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; };
        if (!digit()) {
            malformed();
        }
        constexpr std::size_t most = (std::numeric_limits<std::size_t>::max)();
        std::size_t value = 0;
        for (; digit(); ++at_) {
            const auto d = static_cast<std::size_t>(text_[at_] - '0');
            if (value > (most - d) / 10) {
                fail("shape has a dimension that overflows 64 bits");
            }
            value = value * 10 + d;
        }
        if (at_ < text_.size() && text_[at_] == 'L') {  // as Python 2 wrote its long integers
            ++at_;
        }
        return value;
    }

    const std::filesystem::path& file_;
    std::string_view text_;
    std::size_t at_ = 0;
};

/// Product of the dimensions; nothing where it, or its size in bytes, overflows.
[[nodiscard]] inline std::optional<std::size_t> element_count(std::span<const std::size_t> shape,
                                                              std::size_t element_bytes) {
    std::size_t count = 1;
    for (const std::size_t dimension : shape) {
        if (dimension == 0) {
            return 0;
        }
        if (count >
            static_cast<std::size_t>((std::numeric_limits<std::ptrdiff_t>::max)()) / element_bytes / dimension) {
            return std::nullopt;
        }
        count *= dimension;
    }
    return count;
}

[[nodiscard]] inline std::string npy_type_problem(const std::string& descr) {
    if (descr.starts_with('>')) {
        return "elements are big-endian ('" + descr + "'); only little-endian ones can be read";
    }
    if (descr.find('O') != std::string::npos) {
        return "is an array of Python objects; only plain numbers can be read";
    }
    return "elements are of type '" + descr + "'; only '<f2', '<f4', '<f8', '<i4' and '<i8' can be read";
}

}  // namespace detail

/// Reads a .npy file. Nothing is allocated before the file's size has confirmed what its header says.
/// Throws file_error, naming the file and what is wrong: missing, no .npy file, another format version, a malformed
/// header, Fortran order, big-endian, object or other elements, a negative or overflowing shape, and a file that is
/// shorter or longer than its header says.
[[nodiscard]] inline npy_array read_npy(const std::filesystem::path& file) {
    const auto fail = [&](const std::string& problem) { throw file_error(file, problem); };
    std::error_code code;
    const auto kind = std::filesystem::status(file, code).type();
    if (kind == std::filesystem::file_type::not_found) {
        fail("does not exist");
    }
    if (kind != std::filesystem::file_type::regular) {
        fail("is not a regular file");
    }
    const std::size_t bytes = std::filesystem::file_size(file, code);
    std::ifstream in(file, std::ios::binary);
    if (code || !in) {
        fail("cannot be opened");
    }
    const auto read = [&](void* to, std::size_t n, const char* what) {
        if (!in.read(static_cast<char*>(to), static_cast<std::streamsize>(n))) {
            fail(std::string("ends within its ") + what);
        }
    };

    std::array<unsigned char, 8> magic{};
    if (bytes < magic.size()) {
        fail("is no .npy file: it has " + std::to_string(bytes) + " bytes");
    }
    read(magic.data(), magic.size(), "header");
    if (std::memcmp(magic.data(), "\x93NUMPY", 6) != 0) {
        fail("is no .npy file: it does not start with \\x93NUMPY");
    }
    const unsigned major = magic[6];
    const unsigned minor = magic[7];
    if (major < 1 || major > 3 || minor != 0) {
        fail("has format version " + std::to_string(major) + "." + std::to_string(minor) +
             "; 1.0, 2.0 and 3.0 can be read");
    }
    std::uint32_t header_bytes = 0;
    const std::size_t length_bytes = major == 1 ? 2 : 4;
    read(&header_bytes, length_bytes, "header");
    const std::size_t data_at = magic.size() + length_bytes + header_bytes;
    if (data_at > bytes) {
        fail("ends within its header");
    }
    std::string text(header_bytes, '\0');
    read(text.data(), text.size(), "header");
    const detail::npy_header header = detail::npy_header_parser(file, text).parse();
    if (header.fortran_order) {
        fail("is in Fortran order; write it in C order (numpy.ascontiguousarray)");
    }

    npy_array array;
    array.shape = header.shape;
    const auto read_as = [&]<class T>(T) {
        if (header.descr != npy_descr<T>()) {
            return false;
        }
        const auto count = detail::element_count(header.shape, sizeof(T));
        if (!count) {
            fail("shape " + shape_text(header.shape) + " has more elements than memory can hold");
        }
        const std::size_t expected = *count * sizeof(T);
        const std::size_t found = bytes - data_at;
        if (found != expected) {
            fail(std::string(found < expected ? "is truncated" : "is too long") + ": shape " +
                 shape_text(header.shape) + " of '" + header.descr + "' takes " + std::to_string(expected) +
                 " bytes, there are " + std::to_string(found));
        }
        std::vector<T> elements(*count);
        if (expected > 0) {
            read(elements.data(), expected, "data");
        }
        array.elements = std::move(elements);
        return true;
    };
    if (!(read_as(verkv::half{}) || read_as(float{}) || read_as(double{}) || read_as(std::int32_t{}) ||
          read_as(std::int64_t{}))) {
        fail(detail::npy_type_problem(header.descr));
    }
    return array;
}

/// Writes an array in format 1.0, as numpy.save does; an existing file is replaced.
/// Throws file_error when the shape does not match the number of elements or the file cannot be written.
template <class T>
void write_npy(const std::filesystem::path& file, std::span<const T> elements, std::span<const std::size_t> shape) {
    if (detail::element_count(shape, sizeof(T)) != elements.size()) {
        throw file_error(
            file, "shape " + shape_text(shape) + " does not hold " + std::to_string(elements.size()) + " elements");
    }
    std::string header = "{'descr': '" + std::string(npy_descr<T>()) +
                         "', 'fortran_order': False, 'shape': " + shape_text(shape) + ", }";
    constexpr std::size_t prefix = 10;
    header.append((64 - (prefix + header.size() + 1) % 64) % 64, ' ');  // the data starts at a multiple of 64 bytes
    header += '\n';
    if (header.size() > 0xffff) {
        throw file_error(file, "shape has too many dimensions");
    }
    std::ofstream out(file, std::ios::binary | std::ios::trunc);
    out.write("\x93NUMPY\x01\x00", 8);
    out.put(static_cast<char>(header.size() & 0xff)).put(static_cast<char>(header.size() >> 8));
    out << header;
    out.write(reinterpret_cast<const char*>(elements.data()), static_cast<std::streamsize>(elements.size_bytes()));
    out.flush();
    if (!out) {
        throw file_error(file, "cannot be written");
    }
}

}  // namespace example
