#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/core/geometry.hpp"
#include "verkv/core/plan.hpp"
#include "verkv/core/prompt.hpp"
#include "verkv/core/report.hpp"
#include "verkv/core/tolerance.hpp"

namespace {

using support::refused;
using verkv::geometry;
using verkv::position_t;
using verkv::tolerance;

const double not_a_number = std::numeric_limits<double>::quiet_NaN();
const double infinity = std::numeric_limits<double>::infinity();

/// A sound prompt of three tokens, two KV heads and four query heads, whose parts a test may break.
struct small_prompt {
    std::vector<float> memory = std::vector<float>(256, 1.0f);
    std::vector<position_t> positions{0, 1, 5};
    std::vector<position_t> query_positions{4, 5};
    std::array<verkv::rows<float>, 2> keys{verkv::rows<float>{memory.data(), 8, 3, 8, nullptr},
                                           verkv::rows<float>{memory.data(), 8, 3, 8, nullptr}};
    std::array<verkv::rows<float>, 2> values{verkv::rows<float>{memory.data(), 6, 3, 6, nullptr},
                                             verkv::rows<float>{memory.data(), 6, 3, 6, nullptr}};
    verkv::prompt<float> parts() {
        return {.shape = {.query_heads = 4, .kv_heads = 2, .key_dim = 8, .value_dim = 6},
                .keys = keys,
                .values = values,
                .positions = positions,
                .queries = {memory.data(), 2, 4, 8, 32, 8},
                .query_positions = query_positions};
    }
};

}  // namespace

TEST_CASE("core: a tolerance outside its range is refused with the number") {
    CHECK_NOTHROW(verkv::validate(tolerance{}));
    CHECK_NOTHROW(verkv::validate(tolerance{.epsilon = 1e-300, .delta = 1e-300}));
    CHECK_NOTHROW(verkv::validate(tolerance{.epsilon = 7, .delta = 0.999}));
    for (const double epsilon : {0.0, -0.0, -0.05, not_a_number, infinity, -infinity}) {
        CHECK_THROWS_AS(verkv::validate(tolerance{epsilon, 0.1}), verkv::invalid_argument);
    }
    for (const double delta : {0.0, 1.0, -0.1, 1.5, not_a_number, infinity}) {
        CHECK_THROWS_AS(verkv::validate(tolerance{0.05, delta}), verkv::invalid_argument);
    }
    CHECK(refused([&] { verkv::validate(tolerance{-0.25, 0.1}); }, {"epsilon", "-0.25"}));
    CHECK(refused([&] { verkv::validate(tolerance{0.05, 1.5}); }, {"delta", "1.5"}));
    CHECK(tolerance{0.05, 0.1}.log_term() == Approx(2.9957322735539909).epsilon(1e-15));
    CHECK(tolerance{0.05, 1 - 0x1p-53}.log_term() == Approx(std::log(2.0)).epsilon(1e-15));
    // 2/delta is beyond the largest number below 2^-1023: ln(2 * 2^1074) and ln(2 * 2^1024).
    CHECK(tolerance{0.05, 5e-324}.log_term() == Approx(1075 * std::log(2.0)).epsilon(1e-15));
    CHECK(tolerance{0.05, 0x1p-1024}.log_term() == Approx(1025 * std::log(2.0)).epsilon(1e-15));
}

TEST_CASE("core: a geometry that no layer has is refused with the numbers") {
    const geometry sound{.query_heads = 12, .kv_heads = 4, .key_dim = 80, .value_dim = 64};
    CHECK_NOTHROW(verkv::validate(sound));
    CHECK(sound.group() == 3);
    for (const std::size_t group : {1u, 3u, 4u, 5u, 7u, 12u, 32u}) {
        const geometry g{.query_heads = 2 * group, .kv_heads = 2, .key_dim = 64, .value_dim = 128};
        CHECK_NOTHROW(verkv::validate(g));
        CHECK(g.group() == group);
    }
    CHECK(refused([&] { verkv::validate(geometry{.query_heads = 10, .kv_heads = 4, .key_dim = 1, .value_dim = 1}); },
                  {"10", "4"}));
    CHECK_THROWS_AS(verkv::validate(geometry{.query_heads = 0, .kv_heads = 4, .key_dim = 1, .value_dim = 1}),
                    verkv::invalid_argument);
    CHECK_THROWS_AS(verkv::validate(geometry{.query_heads = 4, .kv_heads = 0, .key_dim = 1, .value_dim = 1}),
                    verkv::invalid_argument);
    CHECK_THROWS_AS(verkv::validate(geometry{.key_dim = 0, .value_dim = 1}), verkv::invalid_argument);
    CHECK_THROWS_AS(verkv::validate(geometry{.key_dim = 1, .value_dim = 0}), verkv::invalid_argument);
    const std::size_t most = 0x7fffffff;
    CHECK_NOTHROW(verkv::validate(geometry{.query_heads = most, .key_dim = most, .value_dim = most}));
    for (const std::size_t size : {most + 1, std::size_t{1} << 33, std::numeric_limits<std::size_t>::max()}) {
        const std::string number = std::to_string(size);
        CHECK(refused([&] { verkv::validate(geometry{.query_heads = size, .key_dim = 1, .value_dim = 1}); }, {number}));
        CHECK(refused([&] { verkv::validate(geometry{.key_dim = size, .value_dim = 1}); }, {number}));
        CHECK(refused([&] { verkv::validate(geometry{.key_dim = 1, .value_dim = size}); }, {number}));
    }
    for (const float scale : {-1.0f, static_cast<float>(not_a_number), static_cast<float>(infinity)}) {
        CHECK(refused([&] { verkv::validate(geometry{.key_dim = 1, .value_dim = 1, .scale = scale}); }, {"scale"}));
    }
}

TEST_CASE("core: the scale of the logits is the caller's, or 1/sqrt(key_dim)") {
    CHECK(geometry{.key_dim = 64}.logit_scale() == 0.125f);
    CHECK(geometry{.key_dim = 80}.logit_scale() == Approx(1 / std::sqrt(80.0)));
    CHECK(geometry{.key_dim = 64, .scale = 0.5f}.logit_scale() == 0.5f);
}

TEST_CASE("core: a prompt whose parts do not belong together is refused with the numbers") {
    small_prompt p;
    CHECK_NOTHROW(verkv::validate(p.parts()));
    CHECK(p.parts().tokens() == 3);

    SECTION("no kept queries is sound") {
        auto parts = p.parts();
        parts.queries = {};
        parts.query_positions = {};
        CHECK_NOTHROW(verkv::validate(parts));
    }
    SECTION("no tokens is sound") {
        for (auto* rows : {&p.keys, &p.values}) {
            (*rows)[0].count = (*rows)[1].count = 0;
        }
        p.positions.clear();
        CHECK_NOTHROW(verkv::validate(p.parts()));
    }
    SECTION("heads") {
        auto parts = p.parts();
        parts.keys = parts.keys.first(1);
        CHECK(refused([&] { verkv::validate(parts); }, {"1", "2"}));
    }
    SECTION("counts") {
        p.values[1].count = 2;
        CHECK(refused([&] { verkv::validate(p.parts()); }, {"KV head 1", "3 keys", "2 values"}));
    }
    SECTION("widths") {
        p.keys[0].width = 7;
        CHECK(refused([&] { verkv::validate(p.parts()); }, {"KV head 0", "7", "8"}));
    }
    SECTION("positions that go back or stand still") {
        p.positions = {0, 5, 4};
        CHECK(refused([&] { verkv::validate(p.parts()); }, {"token 2", "4", "5"}));
        p.positions = {0, 5, 5};
        CHECK_THROWS_AS(verkv::validate(p.parts()), verkv::invalid_argument);
        p.positions = {0, 1, 5};
        p.query_positions = {5, 4};
        CHECK(refused([&] { verkv::validate(p.parts()); }, {"kept query 1"}));
    }
    SECTION("kept queries") {
        p.query_positions = {4};
        CHECK(refused([&] { verkv::validate(p.parts()); }, {"2 kept queries", "1 positions"}));
        p.query_positions = {4, 5};
        auto parts = p.parts();
        parts.queries.heads = 3;
        CHECK(refused([&] { verkv::validate(parts); }, {"3 heads", "4"}));
        parts = p.parts();
        parts.queries.token_stride = 31;
        CHECK(refused([&] { verkv::validate(parts); }, {"overlap"}));
    }
}

TEST_CASE("core: messages carry their numbers in full, and all errors have one base") {
    try {
        verkv::detail::raise<verkv::out_of_capacity>("need ", 12, " rows, have ", 0.1);
    } catch (const verkv::error& e) {
        CHECK(std::string(e.what()) == "verkv: need 12 rows, have 0.1");
    }
    CHECK_THROWS_AS(verkv::detail::check(false, "no"), verkv::invalid_argument);
    CHECK_THROWS_AS(verkv::detail::check<verkv::invalid_state>(false, "no"), verkv::invalid_state);
    CHECK_NOTHROW(verkv::detail::check(true, "yes"));
    static_assert(std::is_base_of_v<std::runtime_error, verkv::error>);
}

TEST_CASE("core: a cleared plan is as good as a new one") {
    verkv::plan p;
    p.entries = {{3, 1.0f, 1.0f}, {5, 0.5f, 0.75f}};
    p.certificate_before = 2;
    p.certificate_after = 1;
    p.raised = p.shrunk = 1;
    p.clear();
    CHECK(p.entries.empty());
    CHECK(p.certificate_before == 0);
    CHECK(p.certificate_after == 0);
    CHECK(p.raised + p.shrunk == 0);
}

TEST_CASE("core: a step's report is found by request and head") {
    verkv::step_report r;
    r.kv_heads = 2;
    r.query_heads = 6;
    r.per_kv_head.resize(3 * 2);
    r.per_query_head.resize(3 * 6);
    r.per_kv_head[2 * 2 + 1].tokens = 9;
    r.per_query_head[1 * 6 + 5].rows_planned = 4;
    CHECK(r.kv_head(2, 1).tokens == 9);
    CHECK(r.query_head(1, 5).rows_planned == 4);
}
