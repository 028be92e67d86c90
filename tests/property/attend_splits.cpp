// Attention over random rows does not depend on how they are ordered, cut and merged, up to the error that is stated.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/attention_reference.hpp"
#include "support/catch.hpp"
#include "verkv/attend/attend.hpp"
#include "verkv/attend/merge.hpp"

namespace {

using namespace support;

constexpr float infinity = std::numeric_limits<float>::infinity();

struct rows_and_weights {
    std::size_t heads;
    std::size_t key_dim;
    std::size_t value_dim;
    std::vector<float> queries;
    std::vector<verkv::half> keys;
    std::vector<verkv::half> values;
    std::vector<float> log_weight;  // [heads, n]
    std::size_t n;
};

struct part {
    std::vector<float> output;
    std::vector<float> lse;
};

/// Attention over the rows listed.
part attend_listed(const rows_and_weights& x, const std::vector<verkv::row_id>& ids) {
    std::vector<float> add;
    for (std::size_t h = 0; h < x.heads; ++h) {
        for (const verkv::row_id id : ids) {
            add.push_back(x.log_weight[h * x.n + id]);
        }
    }
    part p{std::vector<float>(x.heads * x.value_dim), std::vector<float>(x.heads)};
    verkv::attend_workspace workspace;
    const auto stride = [](std::size_t width) { return static_cast<std::ptrdiff_t>(width); };
    verkv::attend<verkv::half>(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(x.queries), x.key_dim), 0.3f,
                               {x.keys.data(), stride(x.key_dim), ids.size(), x.key_dim, ids.data()},
                               {x.values.data(), stride(x.value_dim), ids.size(), x.value_dim, ids.data()},
                               {add.data(), x.heads, ids.size(), stride(ids.size())}, workspace,
                               {p.output.data(), x.heads, x.value_dim, stride(x.value_dim)}, p.lse);
    return p;
}

}  // namespace

TEST_CASE("attend: any order, any parts") {
    generator g(21);
    for (int trial = 0; trial < 300; ++trial) {
        CAPTURE(trial);
        rows_and_weights x{1 + g.below(9), 1 + g.below(70), 1 + g.below(70), {}, {}, {}, {}, g.below(400)};
        x.queries = g.normals<float>(x.heads * x.key_dim, 1 + 3 * g.uniform());
        x.keys = g.normals<verkv::half>(x.n * x.key_dim);
        x.values = g.normals<verkv::half>(x.n * x.value_dim);
        for (std::size_t i = 0; i < x.heads * x.n; ++i) {
            x.log_weight.push_back(g.uniform() < 0.2 ? -infinity : static_cast<float>(10 * g.uniform()));
        }
        std::vector<verkv::row_id> ids(x.n);
        std::iota(ids.begin(), ids.end(), verkv::row_id{0});
        for (std::size_t i = x.n; i > 1; --i) {
            std::swap(ids[i - 1], ids[g.below(i)]);
        }
        const part whole = attend_listed(x, ids);
        // Cut into up to five parts, merged from the left.
        part merged{std::vector<float>(x.heads * x.value_dim, 0.0f), std::vector<float>(x.heads, -infinity)};
        std::vector<std::size_t> cuts{0, x.n};
        for (std::size_t i = g.below(5); i > 0; --i) {
            cuts.push_back(g.below(x.n + 1));
        }
        std::sort(cuts.begin(), cuts.end());
        for (std::size_t i = 1; i < cuts.size(); ++i) {
            const part p = attend_listed(x, {ids.begin() + static_cast<std::ptrdiff_t>(cuts[i - 1]),
                                             ids.begin() + static_cast<std::ptrdiff_t>(cuts[i])});
            for (std::size_t h = 0; h < x.heads; ++h) {
                verkv::merge_attention(
                    std::span<float>(merged.output).subspan(h * x.value_dim, x.value_dim), merged.lse[h],
                    std::span<const float>(p.output).subspan(h * x.value_dim, x.value_dim), p.lse[h]);
            }
        }
        for (std::size_t h = 0; h < x.heads; ++h) {
            const auto exact = attend_in_double<verkv::half>(
                x.queries.data() + h * x.key_dim, static_cast<double>(0.3f),
                {x.keys.data(), static_cast<std::ptrdiff_t>(x.key_dim), x.n, x.key_dim, nullptr},
                {x.values.data(), static_cast<std::ptrdiff_t>(x.value_dim), x.n, x.value_dim, nullptr},
                [&](std::size_t i) { return x.log_weight[h * x.n + i]; });
            if (std::isinf(exact.lse)) {
                REQUIRE(whole.lse[h] == -infinity);
                REQUIRE(merged.lse[h] == -infinity);
                continue;
            }
            // A part's lse is a float: its share, and the merged lse, are off by that rounding each time.
            const double rounding = 12 * 0x1p-24 * (std::abs(exact.lse) + 12);
            REQUIRE(std::abs(static_cast<double>(whole.lse[h]) - exact.lse) <= exact.lse_error);
            REQUIRE(std::abs(static_cast<double>(merged.lse[h]) - exact.lse) <= exact.lse_error + rounding);
            for (std::size_t c = 0; c < x.value_dim; ++c) {
                const std::size_t at = h * x.value_dim + c;
                REQUIRE(std::abs(static_cast<double>(whole.output[at]) - exact.output[c]) <= exact.output_error[c]);
                REQUIRE(std::abs(static_cast<double>(merged.output[at]) - exact.output[c]) <=
                        2 * exact.output_error[c] + 8 * rounding);
            }
        }
    }
}

TEST_CASE("attend: a hundred thousand rows with weights over twelve decades") {
    constexpr std::size_t n = 100000;
    generator g(22);
    std::vector<float> keys(n);
    std::vector<float> values(n);
    for (std::size_t i = 0; i < n; ++i) {
        keys[i] = static_cast<float>(-std::log(10.0) * 12 * g.uniform());
        values[i] = static_cast<float>(1 + 0.1 * g.normal());
    }
    for (const bool sorted : {false, true}) {
        if (sorted) {
            // Rising: the shift has to move again and again.
            std::sort(keys.begin(), keys.end());
        }
        const auto k = verkv::contiguous_rows(std::span<const float>(keys), 1);
        const auto v = verkv::contiguous_rows(std::span<const float>(values), 1);
        const std::vector<float> query{1};
        const auto exact = attend_in_double(query.data(), 1, k, v);
        std::vector<float> output(1);
        std::vector<float> lse(1);
        verkv::attend_workspace workspace;
        verkv::dense_attention(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(query), 1), 1.0f, k, v,
                               workspace, {output.data(), 1, 1, 1}, lse);
        CHECK(std::abs(static_cast<double>(output[0]) - exact.output[0]) <= exact.output_error[0]);
        CHECK(std::abs(static_cast<double>(lse[0]) - exact.lse) <= exact.lse_error);
        CHECK(output[0] == Approx(exact.output[0]).epsilon(2e-5));
    }
}
