// The example kernel, in any order of threads and blocks.
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/emulator/machine.hpp"
#include "support/kernels/sum_rows.hpp"

TEST_CASE("the example kernel sums rows whatever the order", "[emulator]") {
    for (unsigned threads = 32; threads <= 1024; threads *= 2) {
        for (unsigned seed = 0; seed < 9; ++seed) {
            const unsigned rows = 7;
            const unsigned columns = 300;
            std::vector<float> matrix(rows * columns);
            for (std::size_t i = 0; i < matrix.size(); ++i) {
                matrix[i] = static_cast<float>(i % 17);
            }
            emulator::machine gpu;
            gpu.input("matrix", std::span<const float>(matrix));
            const auto sums = gpu.output<float>("sums", rows);
            const support::sum_rows_kernel kernel{matrix.data(), sums.data(), rows, columns, threads};
            gpu.launch(kernel, emulator::schedule::numbered(seed));
            for (unsigned r = 0; r < rows; ++r) {
                float expected = 0;
                for (unsigned c = 0; c < columns; ++c) {
                    expected += matrix[r * columns + c];
                }
                CHECK(sums[r] == expected);
            }
        }
    }
}
