// Reads .npy files of little-endian float32 in C order, format 1.0: what tests/golden/generate.py writes.
#pragma once

#include <cstddef>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <cstring>

struct npy_array {
    std::vector<std::size_t> shape;
    std::vector<float> data;
};

inline npy_array read_npy(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const auto need = [&](bool ok, const char* what) {
        if (!ok) {
            throw std::runtime_error(path + ": " + what);
        }
    };
    need(bytes.size() >= 10 && bytes.compare(0, 8, std::string("\x93NUMPY\x01\x00", 8)) == 0, "no .npy file of 1.0");
    const std::size_t length = static_cast<unsigned char>(bytes[8]) + 256u * static_cast<unsigned char>(bytes[9]);
    need(bytes.size() >= 10 + length, "cut off in its header");
    const std::string header = bytes.substr(10, length);
    need(header.find("'<f4'") != std::string::npos, "not little-endian float32");
    need(header.find("'fortran_order': False") != std::string::npos, "not in C order");
    npy_array array;
    std::size_t count = 1;
    std::size_t at = header.find('(', header.find("'shape'")) + 1;
    while (header[at] != ')') {
        std::size_t digits = 0;
        array.shape.push_back(std::stoul(header.substr(at), &digits));
        count *= array.shape.back();
        at = header.find_first_of("0123456789)", at + digits);
    }
    need(bytes.size() == 10 + length + 4 * count, "data do not fit the shape");
    array.data.resize(count);
    std::memcpy(array.data.data(), bytes.data() + 10 + length, 4 * count);
    return array;
}
