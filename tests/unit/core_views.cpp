#include "verkv/core/views.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace {

using support::refused;
using verkv::heads_view;
using verkv::rows;

heads_view<float> view(const float* data, std::size_t tokens, std::size_t heads, std::size_t width,
                       std::ptrdiff_t token_stride, std::ptrdiff_t head_stride) {
    return {data, tokens, heads, width, token_stride, head_stride};
}

bool accepted(const heads_view<float>& v) {
    try {
        verkv::validate(v, "keys");
        return true;
    } catch (const verkv::invalid_argument&) {
        return false;
    }
}

/// Whether two rows share an element, by looking at all pairs of rows.
bool overlaps(const heads_view<float>& v) {
    std::vector<std::ptrdiff_t> starts;
    for (std::size_t t = 0; t < v.tokens; ++t) {
        for (std::size_t h = 0; h < v.heads; ++h) {
            starts.push_back(static_cast<std::ptrdiff_t>(t) * v.token_stride +
                             static_cast<std::ptrdiff_t>(h) * v.head_stride);
        }
    }
    std::sort(starts.begin(), starts.end());
    return std::adjacent_find(starts.begin(), starts.end(), [&](std::ptrdiff_t a, std::ptrdiff_t b) {
               return b < a + static_cast<std::ptrdiff_t>(v.width);
           }) != starts.end();
}

std::uintptr_t address(const void* p) {
    return reinterpret_cast<std::uintptr_t>(p);
}

}  // namespace

TEST_CASE("core: rows follow stride and list") {
    std::vector<float> data(40);
    std::iota(data.begin(), data.end(), 0.0f);
    const rows<float> plain{data.data(), 5, 8, 4, nullptr};
    CHECK(plain[0][0] == 0);
    CHECK(plain[7][3] == 38);

    const std::vector<verkv::row_id> ids{6, 0, 6, 3};
    const rows<float> listed{data.data(), 5, ids.size(), 4, ids.data()};
    CHECK(listed[0][0] == 30);
    CHECK(listed[1][0] == 0);
    CHECK(listed[2] == listed[0]);

    SECTION("a slice has the same rows") {
        const rows<float> middle = plain.slice(2, 3);
        REQUIRE(middle.count == 3);
        CHECK(middle.width == 4);
        CHECK(middle[0] == plain[2]);
        CHECK(middle[2] == plain[4]);
        const rows<float> tail = listed.slice(1, 3);
        REQUIRE(tail.count == 3);
        CHECK(tail[0] == listed[1]);
        CHECK(tail[2] == listed[3]);
        CHECK(listed.slice(4, 0).count == 0);
        CHECK(plain.slice(2, 5).slice(1, 2)[1] == plain[4]);
    }
    SECTION("rows of one channel of a wider array may be closer than their width") {
        const rows<float> sliding{data.data(), 1, 36, 4, nullptr};
        CHECK(sliding[35][3] == 38);
    }
}

TEST_CASE("core: contiguous rows need a whole number of rows") {
    std::vector<float> data(12);
    const rows<float> four = verkv::contiguous_rows(std::span<const float>(data), 3);
    CHECK(four.count == 4);
    CHECK(four.stride == 3);
    CHECK(four[3] == data.data() + 9);
    CHECK(verkv::contiguous_rows(std::span<const float>{}, 3).count == 0);
    CHECK(refused([&] { (void)verkv::contiguous_rows(std::span<float>(data), 5); }, {"12", "5"}));
    CHECK_THROWS_AS(verkv::contiguous_rows(std::span<float>(data), 0), verkv::invalid_argument);
}

TEST_CASE("core: a matrix view writes within its rows") {
    std::vector<float> data(12, 0.0f);
    const verkv::matrix_view<float> m{data.data(), 3, 2, 4};
    for (std::size_t k = 0; k < m.rows; ++k) {
        std::fill(m.row(k).begin(), m.row(k).end(), static_cast<float>(k + 1));
    }
    CHECK(data == std::vector<float>{1, 1, 0, 0, 2, 2, 0, 0, 3, 3, 0, 0});
}

TEST_CASE("core: shapes whose size wraps are refused with their factors") {
    const std::size_t half_way = std::size_t{1} << 32;
    const std::size_t most = (std::numeric_limits<std::size_t>::max)();
    std::vector<float> data(6);
    const std::span<float> some(data);
    CHECK(refused([&] { (void)verkv::matrix_of(some.first(0), half_way, half_way); }, {"4294967296 * 4294967296"}));
    CHECK(
        refused([&] { (void)verkv::heads_of(some.first(0), half_way, half_way, 1); }, {"4294967296 * 4294967296 * 1"}));
    CHECK(refused([&] { (void)verkv::heads_of(some.first(0), 0, half_way, half_way); }, {"4294967296 * 4294967296"}));
    // (2^63 + 1) * 2 = 2 modulo 2^64.
    CHECK(refused([&] { (void)verkv::matrix_of(some.first(2), most / 2 + 2, 2); }, {"9223372036854775809 * 2"}));
    CHECK(refused([&] { (void)verkv::heads_of(some.first(2), 1, 2, most / 2 + 2); }, {"9223372036854775809"}));
    CHECK(refused([&] { (void)verkv::heads_of(some.first(0), 0, 0, most); }, {"18446744073709551615"}));
    CHECK(refused([&] { (void)verkv::matrix_of(some.first(0), 0, most); }, {"18446744073709551615"}));
    CHECK(verkv::matrix_of(some.first(0), most, 0).rows == most);

    using verkv::detail::farthest;
    using verkv::detail::product;
    const std::size_t one = 1;
    CHECK(product("x", farthest, one) == farthest);
    CHECK(product("x", farthest / 7, one * 7) == farthest);
    CHECK(refused([&] { (void)product("x", farthest / 7 + 1, one * 7); }, {"x: 1317624576693539402 * 7"}));
    CHECK(refused([&] { (void)product("x", most); }, {"x: 18446744073709551615 is"}));
    CHECK(product("x", most, most, one * 0) == 0);
}

TEST_CASE("core: which spans share memory") {
    std::vector<float> data(8);
    const std::span<float> all(data);
    const auto apart = [&](std::size_t a, std::size_t n, std::size_t b, std::size_t m) {
        const bool found = verkv::detail::disjoint(all.subspan(a, n), std::span<const float>(all.subspan(b, m)));
        CHECK(found == verkv::detail::disjoint(all.subspan(b, m), all.subspan(a, n)));
        return found;
    };
    CHECK(apart(0, 4, 4, 4));
    CHECK(apart(0, 3, 5, 3));
    CHECK(!apart(0, 4, 3, 4));
    CHECK(!apart(0, 8, 3, 1));
    CHECK(!apart(2, 4, 2, 4));
    CHECK(apart(2, 4, 3, 0));
    CHECK(!verkv::detail::disjoint(all.subspan(0, 4), std::as_bytes(all.subspan(3, 4))));
    CHECK(verkv::detail::same(all, std::span<const float>(all)));
    CHECK(!verkv::detail::same(all.first(7), all));
    CHECK(!verkv::detail::same(all.first(7), all.last(7)));
}

TEST_CASE("core: rows of heads in both layouts") {
    std::vector<float> data(4 * 3 * 2);
    std::iota(data.begin(), data.end(), 0.0f);

    const heads_view<float> token_major = verkv::heads_of(std::span<const float>(data), 4, 3, 2);
    CHECK(token_major.row(2, 1)[0] == 2 * 6 + 1 * 2);
    const heads_view<float> head_major = view(data.data(), 4, 3, 2, 2, 8);
    CHECK(head_major.row(2, 1)[0] == 1 * 8 + 2 * 2);
    for (const auto& v : {token_major, head_major}) {
        verkv::validate(v, "keys");
        for (std::size_t h = 0; h < 3; ++h) {
            const rows<float> head = v.head(h);
            CHECK(head.count == 4);
            CHECK(head.width == 2);
            for (std::size_t t = 0; t < 4; ++t) {
                CHECK(head[t] == v.row(t, h));
            }
        }
    }
    CHECK(refused([&] { (void)verkv::heads_of(std::span<const float>(data), 4, 3, 3); }, {"[4, 3, 3]", "36", "24"}));
}

TEST_CASE("core: strides that make rows overlap are refused with the numbers") {
    std::vector<float> data(1000);
    const float* p = data.data();

    SECTION("accepted: both layouts, dense and padded") {
        CHECK(accepted(view(p, 4, 2, 8, 16, 8)));
        CHECK(accepted(view(p, 4, 2, 8, 8, 32)));
        CHECK(accepted(view(p, 4, 2, 8, 40, 10)));
        CHECK(accepted(view(p, 4, 2, 8, 10, 99)));
        CHECK(accepted(view(p, 1, 2, 8, 0, 8)));   // one token: its stride is never used
        CHECK(accepted(view(p, 4, 1, 8, 8, -1)));  // one head
        CHECK(accepted(view(p, 1, 1, 8, 0, 0)));
        CHECK(accepted(view(nullptr, 0, 2, 8, 0, 0)));
        CHECK(accepted(view(nullptr, 4, 0, 8, 0, 0)));
    }
    SECTION("refused") {
        CHECK(!accepted(view(nullptr, 4, 2, 8, 16, 8)));
        CHECK(!accepted(view(p, 4, 2, 8, 15, 8)));
        CHECK(!accepted(view(p, 4, 2, 8, 16, 7)));
        CHECK(!accepted(view(p, 4, 2, 8, 8, 31)));
        CHECK(!accepted(view(p, 4, 2, 8, 7, 32)));
        CHECK(!accepted(view(p, 4, 2, 8, 0, 8)));
        CHECK(!accepted(view(p, 4, 2, 8, -16, 8)));
        CHECK(!accepted(view(p, 4, 2, 8, 16, -8)));
        CHECK(!accepted(view(p, 4, 1, 8, 0, 8)));
        CHECK(!accepted(view(p, 1, 2, 8, 16, 0)));
        CHECK(refused([&] { verkv::validate(view(p, 4, 2, 8, 15, 7), "queries"); },
                      {"queries", "15", "7", "8 elements"}));
    }
    SECTION("whatever is accepted overlaps nowhere, and every nested layout is accepted") {
        std::size_t wrong = 0;
        for (std::size_t tokens = 1; tokens <= 3; ++tokens) {
            for (std::size_t heads = 1; heads <= 3; ++heads) {
                for (std::size_t width = 1; width <= 3; ++width) {
                    for (std::ptrdiff_t ts = -3; ts <= 12; ++ts) {
                        for (std::ptrdiff_t hs = -3; hs <= 12; ++hs) {
                            const auto v = view(p + 100, tokens, heads, width, ts, hs);
                            const auto w = static_cast<std::ptrdiff_t>(width);
                            const auto n = static_cast<std::ptrdiff_t>(tokens);
                            const auto g = static_cast<std::ptrdiff_t>(heads);
                            const bool nested = (hs >= w && ts >= hs * g) || (ts >= w && hs >= ts * n);
                            wrong += accepted(v) && overlaps(v);
                            wrong += nested && !accepted(v);
                        }
                    }
                }
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("core: strides whose products wrap are refused, and those that just fit are not") {
    const float origin = 0;
    const float* p = &origin;
    constexpr std::ptrdiff_t most = PTRDIFF_MAX;
    constexpr std::ptrdiff_t quarter = std::ptrdiff_t{1} << 62;
    constexpr std::size_t all = SIZE_MAX;
    // 4 * 2^62 is 0 modulo 2^64, 2 * 2^62 a negative number.
    CHECK(!accepted(view(p, 4, 5, 8, 8, quarter)));
    CHECK(!accepted(view(p, 5, 4, 8, quarter, 8)));
    CHECK(!accepted(view(p, 4, 3, 8, 64, quarter)));
    for (const std::ptrdiff_t far : {most, -most, -most - 1, quarter, -quarter}) {
        for (const std::ptrdiff_t near : {far, std::ptrdiff_t{8}, std::ptrdiff_t{-8}, std::ptrdiff_t{0}}) {
            CAPTURE(far, near);
            CHECK(!accepted(view(p, 4, 5, 8, far, near)));
            CHECK(!accepted(view(p, 4, 5, 8, near, far)));
            CHECK(!accepted(view(p, 4, 5, 0, far, near)));
            CHECK(!accepted(view(p, 4, 1, 8, far, near)));
            CHECK(!accepted(view(p, 1, 5, 8, near, far)));
            CHECK(accepted(view(p, 1, 1, 8, near, far)));
        }
    }
    CHECK(!accepted(view(p, all, 5, 8, 40, 8)));
    CHECK(!accepted(view(p, all, 1, 8, 8, 0)));
    CHECK(!accepted(view(p, 4, all, 8, most, 8)));
    CHECK(!accepted(view(p, 4, 5, all, most, most)));
    CHECK(!accepted(view(p, 1, 1, all, 0, 0)));
    CHECK(!accepted(view(p, 1, 1, std::size_t{1} << 62, 0, 0)));  // 2^64 bytes
    CHECK(refused([&] { verkv::validate(view(p, 3, 1, 8, quarter, 0), "keys"); }, {"keys", "2 * 4611686018427387904"}));
    // 2^63 - 1 bytes hold 2^61 - 1 floats: three rows 2^60 - 4 apart end at 2^61 - 8 + width.
    constexpr std::ptrdiff_t stride = (std::ptrdiff_t{1} << 60) - 4;
    CHECK(accepted(view(p, 3, 1, 7, stride, 0)));
    CHECK(!accepted(view(p, 3, 1, 8, stride, 0)));
    CHECK(accepted(view(p, 3, 2, 3, stride, 4)));
    CHECK(!accepted(view(p, 3, 2, 4, stride, 4)));
    CHECK(accepted(view(p, 2, 3, 3, 4, stride)));
    CHECK(!accepted(view(p, 2, 3, 4, 4, stride)));
}

TEST_CASE("core: rows and matrices without memory or with rows that overlap are refused") {
    std::vector<float> data(64);
    const std::vector<verkv::row_id> ids{3, 3, 0};
    const auto sound = [](const auto& v) { return support::message_of([&] { verkv::validate(v, "x"); }).empty(); };
    const auto both = [&](float* p, std::size_t count, std::size_t width, std::ptrdiff_t stride) {
        const bool as_rows = sound(rows<float>{p, stride, count, width, nullptr});
        CHECK(as_rows == sound(verkv::matrix_view<float>{p, count, width, stride}));
        CHECK(as_rows == sound(verkv::matrix_view<const float>{p, count, width, stride}));
        return as_rows;
    };
    CHECK(both(data.data(), 4, 8, 8));
    CHECK(both(data.data(), 4, 8, 16));
    CHECK(both(data.data(), 1, 8, -1));
    CHECK(both(nullptr, 0, 8, 8));
    CHECK(both(nullptr, 8, 0, 0));
    CHECK(!both(nullptr, 4, 8, 8));
    CHECK(!both(nullptr, 1, 1, 1));
    for (const std::ptrdiff_t stride : {std::ptrdiff_t{7}, std::ptrdiff_t{0}, std::ptrdiff_t{-8}, PTRDIFF_MIN}) {
        CHECK(!both(data.data(), 2, 8, stride));
    }
    CHECK(!both(data.data(), 2, SIZE_MAX, PTRDIFF_MAX));
    CHECK(!both(data.data(), 1, SIZE_MAX, 0));
    CHECK(!both(data.data(), SIZE_MAX, 1, 8));
    CHECK(!both(data.data(), 3, 8, PTRDIFF_MAX));
    // 2^63 - 1 bytes hold 2^61 - 1 floats.
    CHECK(both(data.data(), 2, 7, (std::ptrdiff_t{1} << 61) - 8));
    CHECK(!both(data.data(), 2, 8, (std::ptrdiff_t{1} << 61) - 8));
    // A list may name a row twice.
    CHECK(sound(rows<float>{data.data(), 8, 3, 8, ids.data()}));
    CHECK(sound(rows<float>{data.data(), 1, 3, 8, ids.data()}));
    CHECK(!sound(rows<float>{nullptr, 8, 3, 8, ids.data()}));
    CHECK(refused([&] { verkv::validate(rows<float>{data.data(), 7, 2, 8, nullptr}, "keys"); }, {"keys", "7", "8"}));
    CHECK(refused([&] { verkv::validate(rows<float>{nullptr, 8, 2, 8, nullptr}, "keys"); }, {"keys", "null"}));
}

// Nothing is read: only where the rows would lie.
TEST_CASE("core: offsets beyond 2^31 elements") {
    const float origin = 0;
    const float* volatile known_to_nobody = &origin;  // else compilers warn of rows outside of `origin`
    const float* p = known_to_nobody;
    const std::size_t n = std::size_t{1} << 26;
    constexpr std::size_t row_bytes = 128 * sizeof(float);

    const rows<float> plain{p, 128, n, 128, nullptr};
    CHECK(address(plain[n - 1]) - address(p) == (n - 1) * row_bytes);
    CHECK(address(plain.slice(n - 2, 2)[1]) - address(p) == (n - 1) * row_bytes);

    const verkv::row_id far = 0xffffffffu;
    const rows<float> listed{p, 128, 1, 128, &far};
    CHECK(address(listed[0]) - address(p) == std::uint64_t{0xffffffffu} * row_bytes);

    const heads_view<float> heads = view(p, n, 8, 128, 8 * 128, 128);
    CHECK_NOTHROW(verkv::validate(heads, "keys"));
    CHECK(address(heads.row(n - 1, 7)) - address(p) == ((n - 1) * 8 + 7) * row_bytes);
    CHECK(heads.head(7)[n - 1] == heads.row(n - 1, 7));
    CHECK(accepted(view(p, n, 8, 128, 128, static_cast<std::ptrdiff_t>(n * 128))));

    const verkv::matrix_view<float> m{const_cast<float*>(p), n, 8, 128};
    CHECK(address(m.row(n - 1).data()) - address(p) == (n - 1) * row_bytes);
}
