// Rows of a pool: handed out once, taken back once, far behind 2^31.
#include <algorithm>
#include <cstdint>
#include <new>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/store/row_pool.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define VERKV_TEST_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define VERKV_TEST_ADDRESS_SANITIZER 1
#endif
#endif

namespace {

using support::refused;
using verkv::row_id;

std::vector<row_id> take(verkv::row_pool<float>& pool, std::size_t n) {
    std::vector<row_id> ids(n);
    pool.allocate(ids);
    return ids;
}

}  // namespace

TEST_CASE("store: a fresh pool hands out neighbours, then what came back last") {
    verkv::row_pool<float> pool(5, 3, "test");
    CHECK(pool.capacity() == 5);
    CHECK(pool.free_rows() == 5);
    CHECK(pool.width() == 3);
    CHECK(take(pool, 3) == std::vector<row_id>{0, 1, 2});
    CHECK(pool.free_rows() == 2);
    CHECK(pool.row(2) == pool.row(0) + 6);
    pool.release(std::vector<row_id>{0, 2});
    CHECK(pool.free_rows() == 4);
    CHECK(take(pool, 1) == std::vector<row_id>{0});
    CHECK(take(pool, 3) == std::vector<row_id>{2, 3, 4});
    CHECK(pool.free_rows() == 0);
    CHECK(take(pool, 0).empty());
}

TEST_CASE("store: split rows lie apart: the first channels of all of them, then the others") {
    std::vector<float> memory(4 * 5, -1.0f);
    for (const std::size_t split : {0u, 1u, 3u, 4u}) {
        verkv::row_pool<float> pool(std::span<float>(memory), 5, "test", split);
        const auto ids = take(pool, 4);
        for (const row_id id : ids) {
            std::vector<float> row(5);
            std::iota(row.begin(), row.end(), 10.0f * static_cast<float>(id));
            pool.write(id, row.data());
        }
        const std::vector<row_id> some{2, 0, 3};
        for (std::size_t first = 0; first < 5; ++first) {
            for (std::size_t width = 0; first + width <= 5; ++width) {
                CAPTURE(split, first, width);
                if (first < split && first + width > split) {
                    CHECK(refused([&] { (void)pool.view(some, first, width); }, {"test", "split at"}));
                    continue;
                }
                const auto rows = pool.view(some, first, width);
                bool right = rows.count == 3 && rows.width == width;
                for (std::size_t i = 0; i < 3; ++i) {
                    for (std::size_t c = 0; c < width; ++c) {
                        right = right && rows[i][c] == static_cast<float>(10 * some[i] + first + c);
                    }
                }
                CHECK(right);
            }
        }
        CHECK(memory[1] == (split == 1 ? 10.0f : 1.0f));  // where the second row begins, if the first channel is alone
        if (split > 0) {
            CHECK(refused([&] { (void)pool.row(1); }, {"test", "row 1", "split at"}));
        } else {
            CHECK(pool.row(1)[0] == 10.0f);
        }
        CHECK(refused([&] { pool.write(4, memory.data()); }, {"test", "row 4 of 4"}));
    }
    CHECK(refused([] { verkv::row_pool<float>(3, 5, "test", 5); }, {"test", "width 5", "split at 5"}));
    CHECK(refused([&] { verkv::row_pool<float>(std::span(memory), 5, "test", 6); }, {"width 5", "split at 6"}));
}

TEST_CASE("store: a pool refuses and stays as it was") {
    verkv::row_pool<float> pool(4, 2, "test");
    const auto ids = take(pool, 3);
    const auto untouched = [&] { return pool.free_rows() == 1; };
    std::vector<row_id> two{77, 77};
    CHECK(refused<verkv::out_of_capacity>([&] { pool.allocate(two); }, {"test", "2", "1 of 4"}));
    CHECK(two == std::vector<row_id>{77, 77});
    CHECK(refused<verkv::out_of_capacity>([&] { pool.require(2); }, {"2"}));
    CHECK(untouched());
    CHECK(refused([&] { pool.release(std::vector<row_id>{0, 3}); }, {"row 3"}));  // 3 is free
    CHECK(refused([&] { pool.release(std::vector<row_id>{1, 4}); }, {"row 4"}));  // there is none
    CHECK(refused([&] { pool.release(std::vector<row_id>{1, 2, 1}); }, {"row 1"}));
    CHECK(refused([&] { pool.release(std::vector<row_id>{0xffffffffu}); }, {"4294967295"}));
    CHECK(untouched());
    // Each of the three is still taken: it can be given back once.
    pool.release(ids);
    CHECK(pool.free_rows() == 4);
    CHECK(refused([&] { pool.release(ids); }, {"row 0"}));
    CHECK(pool.free_rows() == 4);
    CHECK(take(pool, 4).size() == 4);

    CHECK(refused([] { verkv::row_pool<float>(3, 0, "test"); }, {"width 0"}));
    // 2^20 rows of 2^44 elements would be 0 of them, 2^40 of 2^60 too many rows, 2^62 floats 0 bytes.
    CHECK(refused([] { verkv::row_pool<float>(std::size_t{1} << 20, std::size_t{1} << 44, "test"); },
                  {"test", "1048576 * 17592186044416 * 4"}));
    CHECK(refused([] { verkv::row_pool<float>(1, std::size_t{1} << 62, "test"); }, {"test", "4611686018427387904"}));
    CHECK(refused([] { verkv::row_pool<float>(std::size_t{1} << 40, 1, "test"); }, {"1099511627776"}));
    CHECK(pool.row(3) == pool.row(0) + 6);
    for (const row_id id : {row_id{4}, row_id{0xffffffffu}}) {
        CHECK(refused([&] { (void)pool.row(id); }, {"test", "row " + std::to_string(id), "4"}));
        CHECK(refused([&] { (void)std::as_const(pool).row(id); }, {"row " + std::to_string(id)}));
    }
    CHECK(pool.view(ids, 2, 0).width == 0);
    for (const auto& [first, width] :
         std::vector<std::pair<std::size_t, std::size_t>>{{0, 3}, {1, 2}, {3, 0}, {SIZE_MAX, 2}, {1, SIZE_MAX}}) {
        CHECK(refused([&, f = first, n = width] { (void)pool.view(ids, f, n); }, {"test", "rows of 2"}));
    }
    std::vector<float> memory(10);
    CHECK(refused([&] { verkv::row_pool<float>(std::span<float>(memory), 3, "test"); }, {"10", "3"}));
    CHECK(refused([&] { verkv::row_pool<float>(std::span<float>(memory), 0, "test"); }, {"0"}));
}

TEST_CASE("store: a pool over the caller's memory") {
    std::vector<float> memory(12, 1.0f);
    verkv::row_pool<float> pool(std::span<float>(memory), 4, "mapped");
    const auto ids = take(pool, 3);
    for (const row_id id : ids) {
        std::iota(pool.row(id), pool.row(id) + 4, static_cast<float>(10 * id));
    }
    CHECK(memory[5] == 11);
    const std::vector<row_id> listed{2, 0};
    const auto part = pool.view(listed, 1, 2);
    CHECK(part.count == 2);
    CHECK(part.width == 2);
    CHECK(part[0][0] == 21);
    CHECK(part[1][1] == 2);
}

TEST_CASE("store: a million cycles do not grow and give no row to two owners") {
    verkv::row_pool<float> pool(1000, 1, "test");
    std::mt19937 random(5);
    std::vector<std::vector<row_id>> owners(40);
    for (auto& o : owners) {
        o.reserve(25);
    }
    std::vector<std::uint8_t> taken(1000, 0);
    bool sound = true;
    const std::size_t allocations = support::allocations_of([&] {
        for (int cycle = 0; cycle < 1000000; ++cycle) {
            auto& mine = owners[random() % owners.size()];
            if (mine.empty()) {
                mine.resize(1 + random() % 25);
                pool.allocate(mine);
                for (const row_id id : mine) {
                    sound = sound && id < 1000 && taken[id] == 0;
                    taken[id] = 1;
                }
            } else {
                pool.release(mine);
                for (const row_id id : mine) {
                    taken[id] = 0;
                }
                mine.clear();
            }
        }
    });
    CHECK(sound);
    CHECK(allocations == 0);
    for (const auto& mine : owners) {
        pool.release(mine);
    }
    CHECK(pool.free_rows() == 1000);
}

TEST_CASE("store: offsets beyond 2^32 elements") {
#if defined(VERKV_TEST_ADDRESS_SANITIZER)
    WARN("left out under the address sanitizer, which would touch a gigabyte of shadow memory");
#else
    // 2^32 + 2^25 halves, of which a few rows are ever touched.
    constexpr std::size_t width = std::size_t{1} << 16;
    constexpr std::size_t rows = (std::size_t{1} << 16) + (std::size_t{1} << 9);
    try {
        verkv::row_pool<verkv::half> pool(rows, width, "large");
        std::vector<row_id> ids(rows);
        pool.allocate(ids);
        const std::vector<row_id> last{static_cast<row_id>(rows - 1), 65536, 65535, 32768, 32767, 0};
        for (const row_id id : last) {
            pool.row(id)[0] = verkv::from_float<verkv::half>(static_cast<float>(id % 1000));
            pool.row(id)[width - 1] = verkv::from_float<verkv::half>(static_cast<float>(id % 1000 + 1));
        }
        CHECK(pool.row(static_cast<row_id>(rows - 1)) - pool.row(0) == static_cast<std::ptrdiff_t>((rows - 1) * width));
        const auto view = pool.view(last, width - 1, 1);
        const auto front = pool.view(last, 0, 1);
        for (std::size_t i = 0; i < last.size(); ++i) {
            CHECK(verkv::to_float(front[i][0]) == static_cast<float>(last[i] % 1000));
            CHECK(verkv::to_float(view[i][0]) == static_cast<float>(last[i] % 1000 + 1));
        }
    } catch (const std::bad_alloc&) {
        WARN("left out: this machine does not lend 8 GiB of address space");
    }
#endif
}
