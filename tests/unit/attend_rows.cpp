// Attention over listed rows with log-weights, the running softmax, and the merge of two parts.
#include <cmath>
#include <limits>
#include <vector>

#include "support/attention_reference.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/attend/attend.hpp"
#include "verkv/attend/merge.hpp"

namespace {

using namespace support;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

struct answer {
    std::vector<float> output;
    std::vector<float> lse;
};

/// One call of attend(); log_weight is empty, [n] or [heads, n].
template <class T>
answer attention(const std::vector<float>& queries, std::size_t heads, float scale, verkv::rows<T> keys,
                 verkv::rows<T> values, const std::vector<float>& log_weight = {}) {
    const std::size_t n = keys.count;
    answer a{std::vector<float>(heads * values.width, -77), std::vector<float>(heads, -77)};
    verkv::attend_workspace workspace;
    const bool shared = log_weight.size() == n && heads > 1;
    const verkv::matrix_view<const float> add{log_weight.data(),
                                              log_weight.empty() ? 0
                                              : shared           ? 1
                                                                 : heads,
                                              n, static_cast<std::ptrdiff_t>(n)};
    verkv::attend(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(queries), keys.width), scale, keys,
                  values, add, workspace,
                  {a.output.data(), heads, values.width, static_cast<std::ptrdiff_t>(values.width)}, a.lse);
    return a;
}

template <class T>
void attend_against_double(std::size_t heads, std::size_t key_dim, std::size_t value_dim, std::size_t n,
                           rows_layout layout, int log_weights) {
    CAPTURE(heads, key_dim, value_dim, n, static_cast<int>(layout), log_weights);
    generator g(heads * 100000 + key_dim * 1000 + n + static_cast<std::size_t>(log_weights));
    const auto queries = g.normals<float>(heads * key_dim, 2);
    own_rows<T> keys(g.normals<T>(n * key_dim), n, key_dim, layout, 3);
    own_rows<T> values(g.normals<T>(n * value_dim), n, value_dim, layout, 4);
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(key_dim)));
    std::vector<float> add(log_weights == 0 ? 0 : log_weights == 1 ? n : heads * n);
    for (float& a : add) {
        const double u = g.uniform();
        a = u < 0.1 ? -infinity : u < 0.5 ? 0.0f : static_cast<float>(-std::log(u));
    }
    if (log_weights == 2 && n > 1) {
        std::fill_n(add.end() - static_cast<std::ptrdiff_t>(n), n, -infinity);
    }
    const answer a = attention(queries, heads, scale, keys.view(), values.view(), add);
    for (std::size_t h = 0; h < heads; ++h) {
        const auto exact = attend_in_double(
            queries.data() + h * key_dim, static_cast<double>(scale), keys.view(), values.view(), [&](std::size_t i) {
                return add.empty() ? 0.0f : add.size() == n && heads > 1 ? add[i] : add[h * n + i];
            });
        if (std::isinf(exact.lse)) {
            REQUIRE(a.lse[h] == -infinity);
        } else {
            REQUIRE(std::abs(static_cast<double>(a.lse[h]) - exact.lse) <= exact.lse_error);
        }
        double worst = 0;
        for (std::size_t c = 0; c < value_dim; ++c) {
            const double error = std::abs(static_cast<double>(a.output[h * value_dim + c]) - exact.output[c]);
            worst = std::max(worst, error - exact.output_error[c]);
        }
        REQUIRE(worst <= 0);
    }
}

}  // namespace

TEMPLATE_TEST_CASE("attend: against double for every group size and width", "", float, verkv::half, verkv::bfloat16) {
    for (const std::size_t heads : {1u, 3u, 4u, 5u, 7u, 12u, 32u}) {
        for (const std::size_t width : {64u, 80u, 128u, 256u, 1u, 3u, 17u}) {
            attend_against_double<TestType>(heads, width, width, 65, rows_layout::listed, 2);
        }
    }
    for (const std::size_t n : {0u, 1u, 63u, 64u, 65u, 1000u}) {
        for (const int log_weights : {0, 1, 2}) {
            attend_against_double<TestType>(5, 17, 80, n, rows_layout::dense, log_weights);
            attend_against_double<TestType>(3, 80, 3, n, rows_layout::strided, log_weights);
            attend_against_double<TestType>(4, 64, 33, n, rows_layout::listed, log_weights);
        }
    }
}

TEST_CASE("attend: nothing to attend to gives 0 and -infinity") {
    const std::vector<float> queries(3 * 4, 1.0f);
    const std::vector<float> no_rows;
    const auto keys = verkv::contiguous_rows(std::span<const float>(no_rows), 4);
    const auto values = verkv::contiguous_rows(std::span<const float>(no_rows), 5);
    const answer a = attention(queries, 3, 1, keys, values);
    CHECK(a.output == std::vector<float>(15, 0.0f));
    CHECK(a.lse == std::vector<float>(3, -infinity));
    const std::vector<float> rows(8 * 5, 1.0f);
    const answer b =
        attention(queries, 3, 1, verkv::contiguous_rows(std::span<const float>(rows), 4).slice(0, 8),
                  verkv::contiguous_rows(std::span<const float>(rows), 5), std::vector<float>(8, -infinity));
    CHECK(b.output == std::vector<float>(15, 0.0f));
    CHECK(b.lse == std::vector<float>(3, -infinity));
}

TEST_CASE("attend: logits of plus and minus 60000") {
    // Two rows far above the others, in every place of a block; and everything far below zero.
    for (const std::size_t n : {2u, 64u, 65u, 200u}) {
        for (const float base : {-60000.0f, 0.0f, 60000.0f}) {
            std::vector<float> keys(n, base - 60000.0f);
            keys[n / 2] = base;
            keys[n - 1] = base;
            std::vector<float> values(n, 1000.0f);
            values[n / 2] = 1;
            values[n - 1] = n == 2 ? 1.0f : 3.0f;
            const answer a = attention({1.0f, 0.0f}, 2, 1, verkv::contiguous_rows(std::span<const float>(keys), 1),
                                       verkv::contiguous_rows(std::span<const float>(values), 1));
            CHECK(a.output[0] == (n == 2 ? 1.0f : 2.0f));
            CHECK(a.lse[0] == Approx(static_cast<double>(base) + std::log(n == 2 ? 1.0 : 2.0)).margin(0.004));
            CHECK(a.lse[1] == Approx(std::log(static_cast<double>(n))).epsilon(1e-6));
        }
    }
    // A log-weight of a token with a tiny r takes part whatever the logit.
    const std::vector<float> keys{60000, 60000};
    const std::vector<float> values{1, 3};
    const answer a =
        attention({1.0f}, 1, 1, verkv::contiguous_rows(std::span<const float>(keys), 1),
                  verkv::contiguous_rows(std::span<const float>(values), 1), {0.0f, static_cast<float>(std::log(3.0))});
    CHECK(a.output[0] == Approx(2.5).epsilon(2e-3));
}

TEST_CASE("attend: a NaN stays in its head") {
    constexpr std::size_t heads = 5;
    constexpr std::size_t width = 19;
    constexpr std::size_t n = 130;
    generator g(8);
    auto queries = g.normals<float>(heads * width);
    auto keys = g.normals<float>(n * width);
    auto values = g.normals<float>(n * width);
    // Head 3 alone uses row 70; nobody uses row 100; everybody uses the rest.
    std::vector<float> add(heads * n, 0.0f);
    for (std::size_t h = 0; h < heads; ++h) {
        add[h * n + 70] = h == 3 ? 0.0f : -infinity;
        add[h * n + 100] = -infinity;
    }
    const auto run = [&] {
        return attention(queries, heads, 0.2f, verkv::contiguous_rows(std::span<const float>(keys), width),
                         verkv::contiguous_rows(std::span<const float>(values), width), add);
    };
    const answer clean = run();
    const auto only_head_three_differs = [&](const answer& a) {
        for (std::size_t h = 0; h < heads; ++h) {
            const auto part = [&](const answer& x) {
                return bits_of(std::span<const float>(x.output).subspan(h * width, width));
            };
            if (h != 3) {
                CHECK(part(a) == part(clean));
                CHECK(a.lse[h] == clean.lse[h]);
            }
        }
    };
    for (const float bad : {not_a_number, infinity, -infinity}) {
        CAPTURE(bad);
        // In rows that nobody uses: no trace.
        std::fill_n(keys.begin() + 100 * width, width, bad);
        std::fill_n(values.begin() + 100 * width, width, bad);
        const answer unused = run();
        CHECK(bits_of(unused.output) == bits_of(clean.output));
        CHECK(bits_of(unused.lse) == bits_of(clean.lse));
        // In a value that one head uses.
        const float value = values[70 * width + 4];
        values[70 * width + 4] = bad;
        const answer a = run();
        only_head_three_differs(a);
        CHECK_FALSE(std::isfinite(a.output[3 * width + 4]));
        values[70 * width + 4] = value;
        // In its key.
        const float key = keys[70 * width];
        keys[70 * width] = not_a_number;
        const answer b = run();
        only_head_three_differs(b);
        CHECK(std::isnan(b.output[3 * width]));
        CHECK(std::isnan(b.lse[3]));
        keys[70 * width] = key;
    }
    // In a query.
    queries[3 * width + 18] = not_a_number;
    const answer c = run();
    only_head_three_differs(c);
    CHECK(std::isnan(c.output[3 * width + 7]));
}

TEST_CASE("attend: the running softmax in pieces") {
    constexpr std::size_t heads = 3;
    constexpr std::size_t width = 40;
    constexpr std::size_t n = 512;
    generator g(9);
    const auto logits = g.normals<float>(heads * n, 4);
    const auto elements = g.normals<verkv::half>(n * width);
    const auto values = verkv::contiguous_rows(std::span<const verkv::half>(elements), width);
    const auto in_pieces = [&](std::vector<std::size_t> pieces) {
        verkv::softmax_sum sum;
        sum.reset(heads, width);
        std::size_t first = 0;
        for (const std::size_t piece : pieces) {
            std::vector<float> part;
            for (std::size_t h = 0; h < heads; ++h) {
                const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(h * n + first);
                part.insert(part.end(), begin, begin + static_cast<std::ptrdiff_t>(piece));
            }
            sum.add(verkv::cpu{}, {part.data(), heads, piece, static_cast<std::ptrdiff_t>(piece)},
                    values.slice(first, piece));
            first += piece;
        }
        REQUIRE(first == n);
        answer a{std::vector<float>(heads * width), std::vector<float>(heads)};
        sum.finish({a.output.data(), heads, width, width}, a.lse);
        for (std::size_t h = 0; h < heads; ++h) {
            REQUIRE(static_cast<float>(sum.log_sum(h)) == a.lse[h]);
        }
        return a;
    };
    const answer whole = in_pieces({n});
    // Pieces of whole blocks: the same bits. Others: up to rounding.
    for (const auto& pieces :
         {std::vector<std::size_t>{64, 448}, {128, 128, 256}, {64, 64, 64, 64, 64, 64, 64, 64}, {0, 512}}) {
        const answer a = in_pieces(pieces);
        CHECK(bits_of(a.output) == bits_of(whole.output));
        CHECK(bits_of(a.lse) == bits_of(whole.lse));
    }
    const answer odd = in_pieces({1, 62, 65, 100, 284});
    CHECK(bits_of(odd.output) == bits_of(in_pieces({1, 62, 65, 100, 284}).output));
    for (std::size_t h = 0; h < heads; ++h) {
        CHECK(odd.lse[h] == Approx(whole.lse[h]).epsilon(1e-6));
        for (std::size_t c = 0; c < width; ++c) {
            CHECK(odd.output[h * width + c] == Approx(whole.output[h * width + c]).epsilon(1e-4).margin(1e-5));
        }
    }
}

TEST_CASE("attend: refuses shapes that disagree") {
    const std::vector<float> memory(64, 0.0f);
    const auto rows_of = [&](std::size_t count, std::size_t width) {
        return verkv::rows<float>{memory.data(), static_cast<std::ptrdiff_t>(width), count, width, nullptr};
    };
    std::vector<float> output(64);
    std::vector<float> lse(8);
    verkv::attend_workspace workspace;
    const auto call = [&](verkv::rows<float> queries, verkv::rows<float> keys, verkv::rows<float> values,
                          verkv::matrix_view<const float> add, std::size_t rows, std::size_t columns,
                          std::size_t lses) {
        return [=, &workspace, &output, &lse] {
            verkv::attend(verkv::cpu{}, queries, 1.0f, keys, values, add, workspace,
                          {output.data(), rows, columns, static_cast<std::ptrdiff_t>(columns)},
                          std::span<float>(lse).first(lses));
        };
    };
    const verkv::matrix_view<const float> none{};
    CHECK(message_of(call(rows_of(2, 4), rows_of(3, 4), rows_of(3, 5), none, 2, 5, 2)).empty());
    CHECK(refused(call(rows_of(2, 3), rows_of(3, 4), rows_of(3, 5), none, 2, 5, 2), {"3", "4"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), rows_of(2, 5), none, 2, 5, 2), {"3 keys", "2 values"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), rows_of(3, 5), {memory.data(), 2, 4, 4}, 2, 5, 2), {"[2, 4]"}));
    CHECK(refused(call(rows_of(3, 4), rows_of(3, 4), rows_of(3, 5), {memory.data(), 2, 3, 3}, 3, 5, 3), {"[2, 3]"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), rows_of(3, 5), none, 3, 5, 2), {"[3, 5]"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), rows_of(3, 5), none, 2, 4, 2), {"[2, 4]"}));
    CHECK(refused(call(rows_of(2, 4), rows_of(3, 4), rows_of(3, 5), none, 2, 5, 3), {"[3]"}));
    // What is in the right shape, but not there or in the way of itself.
    using verkv::matrix_view;
    using verkv::rows;
    struct arguments {
        rows<float> queries, keys, values;
        matrix_view<const float> add;
        matrix_view<float> output;
        float scale = 1;
    };
    const auto with = [&](auto change) {
        arguments a{rows_of(2, 4), rows_of(3, 4), rows_of(3, 5), {memory.data(), 2, 3, 3}, {output.data(), 2, 5, 5}};
        change(a);
        return [=, &workspace, &lse] {
            verkv::attend(verkv::cpu{}, a.queries, a.scale, a.keys, a.values, a.add, workspace, a.output,
                          std::span<float>(lse).first(2));
        };
    };
    CHECK(message_of(with([](arguments&) {})).empty());
    CHECK(refused(with([](arguments& a) { a.queries.data = nullptr; }), {"queries", "null"}));
    CHECK(refused(with([](arguments& a) { a.keys.data = nullptr; }), {"keys", "null"}));
    CHECK(refused(with([](arguments& a) { a.values.data = nullptr; }), {"values", "null"}));
    CHECK(refused(with([](arguments& a) { a.add.data = nullptr; }), {"log-weights", "null"}));
    CHECK(refused(with([](arguments& a) { a.output.data = nullptr; }), {"output", "null"}));
    CHECK(refused(with([](arguments& a) { a.output.stride = 4; }), {"output", "stride 4", "5 elements"}));
    CHECK(refused(with([](arguments& a) { a.keys.stride = 0; }), {"keys", "stride 0"}));
    CHECK(refused(with([](arguments& a) { a.add.stride = -3; }), {"log-weights", "stride -3"}));
    for (const float scale : {not_a_number, infinity, -infinity}) {
        CHECK(refused(with([&](arguments& a) { a.scale = scale; }), {"scale"}));
    }
    CHECK(message_of(with([](arguments& a) { a.scale = -1; })).empty());
    CHECK(refused([&] { workspace.reserve(std::size_t{1} << 58, 1); }, {"288230376151711744 * 64"}));
    CHECK(refused(
        [&] {
            verkv::dense_attention(verkv::cpu{}, rows_of(2, 4), 1.0f, rows<float>{nullptr, 4, 3, 4, nullptr},
                                   rows_of(3, 5), workspace, {output.data(), 2, 5, 5}, std::span<float>(lse).first(2));
        },
        {"keys", "null"}));
    float one = 0;
    CHECK(refused(
        [&] {
            verkv::merge_attention(std::span<float>(output).first(3), one, {memory.data(), 4}, 0);
        },
        {"3", "4"}));
}

TEST_CASE("attend: the running softmax refuses other shapes than it was told of, and keeps what it has") {
    std::vector<float> logits(6, 0.0f);
    const std::vector<float> elements{1, 2, 3, 4, 5, 6};
    const auto values = verkv::contiguous_rows(std::span<const float>(elements), 2);
    std::vector<float> output(8);
    std::vector<float> lse(3);
    verkv::softmax_sum sum;
    sum.reset(2, 2);
    sum.add(verkv::cpu{}, {logits.data(), 2, 3, 3}, values);
    const auto add = [&](verkv::matrix_view<float> l, verkv::rows<float> v) {
        return [&sum, l, v] { sum.add(verkv::cpu{}, l, v); };
    };
    CHECK(refused(add({logits.data(), 1, 3, 3}, values), {"[1, 3]", "2 heads"}));
    CHECK(refused(add({logits.data(), 3, 2, 2}, values.slice(0, 2)), {"[3, 2]", "2 heads"}));
    CHECK(refused(add({logits.data(), 2, 2, 2}, values), {"[2, 2]", "[3, 2]"}));
    CHECK(refused(add({logits.data(), 2, 2, 2}, verkv::contiguous_rows(std::span<const float>(elements), 3)),
                  {"[2, 3]", "2 channels"}));
    CHECK(refused(add({logits.data(), 2, 3, 2}, values), {"logits", "stride 2"}));
    CHECK(refused(add({nullptr, 2, 3, 3}, values), {"logits", "null"}));
    CHECK(refused(add({logits.data(), 2, 3, 3}, {nullptr, 2, 3, 2, nullptr}), {"values", "null"}));
    const auto finish = [&](verkv::matrix_view<float> o, std::size_t lses) {
        return [&sum, &lse, o, lses] { sum.finish(o, std::span<float>(lse).first(lses)); };
    };
    CHECK(refused(finish({output.data(), 2, 2, 2}, 1), {"[1]"}));
    CHECK(refused(finish({output.data(), 2, 2, 2}, 3), {"[3]"}));
    CHECK(refused(finish({output.data(), 1, 2, 2}, 2), {"[1, 2]"}));
    CHECK(refused(finish({output.data(), 2, 1, 1}, 2), {"[2, 1]"}));
    CHECK(refused(finish({output.data(), 2, 2, 1}, 2), {"output", "stride 1"}));
    CHECK(refused(finish({nullptr, 2, 2, 2}, 2), {"output", "null"}));
    CHECK(refused([&] { (void)sum.log_sum(2); }, {"head 2 of 2"}));
    CHECK(refused([&] { sum.reset(std::size_t{1} << 33, std::size_t{1} << 33); }, {"8589934592 * 8589934592"}));
    CHECK(output == std::vector<float>(8, 0.0f));
    sum.finish({output.data(), 2, 2, 2}, std::span<float>(lse).first(2));
    CHECK(output == std::vector<float>{3, 4, 3, 4, 0, 0, 0, 0});
}

TEST_CASE("attend: parts merge to the whole, in any order") {
    constexpr std::size_t width = 24;
    constexpr std::size_t n = 300;
    generator g(10);
    for (const double spread : {0.5, 5.0, 60.0}) {
        const auto queries = g.normals<float>(width, spread);
        const auto keys = g.normals<float>(n * width);
        const auto values = g.normals<float>(n * width);
        const auto all_keys = verkv::contiguous_rows(std::span<const float>(keys), width);
        const auto all_values = verkv::contiguous_rows(std::span<const float>(values), width);
        const auto exact = attend_in_double(queries.data(), 0.2, all_keys, all_values);
        const auto part = [&](std::size_t first, std::size_t last) {
            return attention(queries, 1, 0.2f, all_keys.slice(first, last - first),
                             all_values.slice(first, last - first));
        };
        const auto merge = [](answer a, const answer& b) {
            verkv::merge_attention(a.output, a.lse[0], b.output, b.lse[0]);
            return a;
        };
        const answer a = part(0, 10);
        const answer b = part(10, 11);
        const answer c = part(11, n);
        for (const answer& m : {merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a)),
                                merge(merge(part(0, 0), a), merge(c, b))}) {
            CHECK(std::abs(static_cast<double>(m.lse[0]) - exact.lse) <=
                  3 * exact.lse_error + 4 * 0x1p-24 * std::abs(exact.lse));
            for (std::size_t i = 0; i < width; ++i) {
                // Each part's lse is rounded to a float: its share is off by that much.
                const double share_error = 4 * 0x1p-24 * std::abs(exact.lse);
                CHECK(std::abs(static_cast<double>(m.output[i]) - exact.output[i]) <=
                      4 * exact.output_error[i] + share_error * 4);
            }
        }
    }
}

TEST_CASE("attend: merging far apart, with NaN, with nothing") {
    std::vector<float> o{1, 2};
    float lse = 5;
    verkv::merge_attention(o, lse, std::vector<float>{7, 7}, -1000);
    CHECK(o == std::vector<float>{1, 2});
    CHECK(lse == 5);
    verkv::merge_attention(o, lse, std::vector<float>{7, 8}, 100000);
    CHECK(o == std::vector<float>{7, 8});
    CHECK(lse == 100000);
    // An empty part changes no bit, not even of a NaN or a negative zero.
    std::vector<float> odd{-0.0f, not_a_number, 1e-45f};
    const auto before = bits_of(odd);
    verkv::merge_attention(odd, lse, std::vector<float>{0, 0, 0}, -infinity);
    CHECK(bits_of(odd) == before);
    std::vector<float> empty{0, 0, 0};
    float none = -infinity;
    verkv::merge_attention(empty, none, odd, 3);
    CHECK(bits_of(empty) == before);
    CHECK(none == 3);
    verkv::merge_attention(o, lse, std::vector<float>{1, 1}, not_a_number);
    CHECK(std::isnan(lse));
    CHECK(std::isnan(o[0]));
}
