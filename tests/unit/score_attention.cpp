// SnapKV and largest attention against plain double sums.
#include <limits>

#include "support/catch.hpp"
#include "support/random_prompt.hpp"
#include "support/refusal.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/score/snapkv.hpp"

using namespace verkv;

namespace {

template <class T>
std::vector<double> snapkv_in_double(const prompt<T>& p, std::size_t head, std::size_t window, double* spread) {
    const std::size_t n = p.tokens();
    std::vector<double> out(n, 1.0);
    const std::size_t used = std::min(window, p.queries.tokens);
    const std::size_t scored = n - std::min(n, window);
    std::fill_n(out.begin(), scored, 0.0);
    for (std::size_t j = p.queries.tokens - used; scored > 0 && j < p.queries.tokens; ++j) {
        const auto a = attention_in_double(p, head, j, spread);
        for (std::size_t i = 0; i < scored; ++i) {
            out[i] += a[i] / static_cast<double>(used);
        }
    }
    return out;
}

template <class T>
std::vector<double> largest_in_double(const prompt<T>& p, std::size_t head, int distance, int stride, double* spread) {
    std::vector<double> out(p.tokens(), 0.0);
    for (int at = p.positions.back(); at > p.positions.front(); at -= stride) {
        const auto found = std::find(p.query_positions.begin(), p.query_positions.end(), at);
        if (found == p.query_positions.end()) {
            continue;
        }
        const auto a =
            attention_in_double(p, head, static_cast<std::size_t>(found - p.query_positions.begin()), spread);
        for (std::size_t i = 0; i < out.size(); ++i) {
            if (at - p.positions[i] >= distance) {
                out[i] = std::max(out[i], a[i]);
            }
        }
    }
    for (double& x : out) {
        x = std::clamp(x, 1e-6, 1.0);
    }
    return out;
}

// A logit is a float sum of d products, off by at most (d + 2) u times the sum of their sizes; an error e in every
// logit moves an attention by a factor exp(2e). Exponential, factor and product add a few u.
double tolerance_of(std::size_t d, double spread) {
    return 2 * static_cast<double>(d + 2) * 0x1p-24 * spread + 8 * 0x1p-24;
}

void check_close(const std::vector<float>& got, const std::vector<double>& expected, double relative) {
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
        INFO("token " << i << ": " << got[i] << ", expected " << expected[i] << ", tolerance " << relative);
        REQUIRE(std::abs(static_cast<double>(got[i]) - expected[i]) <= relative * expected[i]);
    }
}

template <class T>
void compare(geometry shape, std::vector<position_t> positions, std::vector<position_t> queries, std::size_t window,
             std::size_t distance, std::size_t stride, layout lie, unsigned seed) {
    const random_prompt<T> owner(shape, std::move(positions), std::move(queries), seed, lie);
    const prompt<T> p = owner.view();
    const cpu exec;
    std::vector<float> out(p.tokens());
    std::vector<float> group(p.tokens());
    const largest_attention largest{distance, stride};
    for (std::size_t kv = 0; kv < shape.kv_heads; ++kv) {
        std::vector<float> top(p.tokens(), 0.0f);
        for (std::size_t h = kv * shape.group(); h < (kv + 1) * shape.group(); ++h) {
            double spread = 0;
            const auto snap = snapkv_in_double(p, h, window, &spread);
            snapkv{window}.score_head(exec, p, h, out);
            check_close(out, snap, tolerance_of(shape.key_dim, spread));
            const auto expected =
                largest_in_double(p, h, static_cast<int>(distance), static_cast<int>(stride), &spread);
            largest.score_head(exec, p, h, out);
            check_close(out, expected, tolerance_of(shape.key_dim, spread));
            for (std::size_t i = 0; i < out.size(); ++i) {
                top[i] = std::max(top[i], out[i]);
            }
        }
        largest.score(exec, p, kv, group);
        CHECK(group == top);
        over_group<reduction::maximum>(largest).score(exec, p, kv, out);
        CHECK(group == out);
    }
}

}  // namespace

TEMPLATE_TEST_CASE("score: attention scorers agree with double sums", "", float, half, bfloat16) {
    for (const std::size_t group : {1u, 3u, 5u, 12u}) {
        for (const std::size_t d : {64u, 80u}) {
            const geometry shape{2 * group, 2, d, 8, group == 3 ? 0.25f : 0.0f};
            const auto lie = group == 1 ? layout::dense : group == 5 ? layout::strided : layout::listed;
            compare<TestType>(shape, positions_from(0, 150), positions_from(5, 150, 2), 20, 16, 8, lie,
                              static_cast<unsigned>(group + d));
        }
    }
}

TEST_CASE("score: attention scorers across tile and block edges") {
    const geometry shape{1, 1, 64, 64, 0};
    for (const int n : {65, 511, 512, 513, 1024, 1040}) {
        CAPTURE(n);
        // More queries than a tile, and a tile that is not full.
        compare<float>(shape, positions_from(0, n), positions_from(0, n), 65, 64, 4, layout::listed, 7);
        compare<float>(shape, positions_from(0, n), positions_from(n - 40, n), 130, 0, 1, layout::dense, 8);
    }
}

TEST_CASE("score: attention scorers go by position, not by index") {
    // Tokens at 10, 13, 16, ...: a removed and shifted text. Queries sit on and between them.
    const geometry shape{2, 1, 64, 16, 0};
    compare<float>(shape, positions_from(10, 400, 3), positions_from(11, 399), 16, 50, 5, layout::strided, 3);
    compare<half>(shape, positions_from(10, 400, 3), positions_from(10, 400, 3), 16, 64, 6, layout::dense, 4);
}

TEST_CASE("score: layout and threads change no bit") {
    const geometry shape{6, 2, 80, 16, 0};
    const auto positions = positions_from(0, 1300);
    const auto queries = positions_from(3, 1300, 4);
    const random_prompt<float> a(shape, positions, queries, 11, layout::dense);
    const random_prompt<float> b(shape, positions, queries, 11, layout::listed);
    thread_pool pool(3);
    std::vector<float> x(positions.size());
    std::vector<float> y(positions.size());
    largest_attention{}.score(cpu{}, a.view(), 1, x);
    largest_attention{}.score(cpu{&pool}, b.view(), 1, y);
    CHECK(x == y);
    make_snapkv().score(cpu{}, a.view(), 0, x);
    make_snapkv().score(cpu{&pool}, b.view(), 0, y);
    CHECK(x == y);
}

TEST_CASE("score: prompts of a few tokens") {
    const geometry shape{3, 1, 64, 16, 0};
    for (const int n : {0, 1, 3}) {
        CAPTURE(n);
        const auto size = static_cast<std::size_t>(n);
        const random_prompt<half> owner(shape, positions_from(0, n), positions_from(0, n), 5);
        std::vector<float> out(size);
        snapkv{}.score_head(cpu{}, owner.view(), 2, out);
        CHECK(out == std::vector<float>(size, 1.0f));
        make_snapkv().score(cpu{}, owner.view(), 0, out);
        CHECK(out == std::vector<float>(size, 1.0f));
        largest_attention{}.score(cpu{}, owner.view(), 0, out);
        CHECK(out == std::vector<float>(size, 1e-6f));
    }
    // Three tokens and no kept query: nothing has to be scored.
    const random_prompt<half> none(shape, positions_from(0, 3), {}, 5);
    std::vector<float> out(3);
    make_snapkv().score(cpu{}, none.view(), 0, out);
    CHECK(out == std::vector<float>(3, 1.0f));
    largest_attention{}.score(cpu{}, none.view(), 0, out);
    CHECK(out == std::vector<float>(3, 1e-6f));
    // Window and distance of one look at the three tokens.
    compare<float>(shape, positions_from(0, 3), positions_from(0, 3), 1, 1, 1, layout::dense, 9);
    compare<float>(shape, positions_from(0, 3), positions_from(0, 3), 1, 0, 1, layout::dense, 9);
}

TEST_CASE("score: SnapKV's rules for the window, the group and pooling") {
    const geometry shape{6, 2, 64, 16, 0};
    const std::size_t n = 300;
    const std::size_t window = 16;
    const random_prompt<float> owner(shape, positions_from(0, 300), positions_from(270, 300), 17);
    const prompt<float> p = owner.view();
    std::vector<float> mean(n);
    std::vector<float> other(n);
    double spread = 0;
    std::vector<std::vector<double>> pooled;  // of each query head of KV head 1: maxima over 3 neighbours of the mean
    for (std::size_t h = 3; h < 6; ++h) {
        const auto expected = snapkv_in_double(p, h, window, &spread);
        snapkv{window}.score_head(cpu{}, p, h, mean);
        snapkv{window, 1, reduction::sum}.score_head(cpu{}, p, h, other);
        for (std::size_t i = 0; i < n - window; ++i) {
            REQUIRE(other[i] == Approx(16 * mean[i]).epsilon(1e-6));
        }
        std::vector<double> top(n, 0.0);
        for (std::size_t j = p.queries.tokens - window; j < p.queries.tokens; ++j) {
            const auto a = attention_in_double(p, h, j, &spread);
            for (std::size_t i = 0; i < n; ++i) {
                top[i] = std::max(top[i], a[i]);
            }
        }
        snapkv{window, 1, reduction::maximum}.score_head(cpu{}, p, h, other);
        for (std::size_t i = 0; i < n - window; ++i) {
            REQUIRE(static_cast<double>(other[i]) == Approx(top[i]).epsilon(tolerance_of(64, spread)));
        }
        std::vector<double> maxima(n, 0.0);
        for (std::size_t i = 0; i < n - window; ++i) {
            for (std::size_t j = i > 0 ? i - 1 : 0; j <= std::min(i + 1, n - window - 1); ++j) {
                maxima[i] = std::max(maxima[i], expected[j]);
            }
        }
        pooled.push_back(maxima);
    }
    make_snapkv<reduction::maximum>(window, 3, pooling::maximum).score(cpu{}, p, 1, other);
    make_snapkv<reduction::mean>(window, 3, pooling::maximum).score(cpu{}, p, 1, mean);
    for (std::size_t i = 0; i < n - window; ++i) {
        const double largest = std::max({pooled[0][i], pooled[1][i], pooled[2][i]});
        const double average = (pooled[0][i] + pooled[1][i] + pooled[2][i]) / 3;
        REQUIRE(static_cast<double>(other[i]) == Approx(largest).epsilon(tolerance_of(64, spread)));
        REQUIRE(static_cast<double>(mean[i]) == Approx(average).epsilon(2 * tolerance_of(64, spread)));
    }
    CHECK(std::all_of(other.end() - 16, other.end(), [](float x) { return x == 1.0f; }));
}

TEST_CASE("score: largest attention selects the queries at last, last - stride, ...") {
    const geometry shape{1, 1, 64, 64, 0};
    const auto positions = positions_from(0, 200);
    const random_prompt<float> all(shape, positions, positions_from(0, 200), 21);
    const prompt<float> p = all.view();
    std::vector<float> full(200);
    largest_attention{64, 16}.score(cpu{}, p, 0, full);
    // The same with just the queries at 199, 183, ...: the others were not looked at.
    prompt<float> thinned = p;
    const auto kept = positions_from(199 % 16, 200, 16);
    thinned.query_positions = kept;
    thinned.queries.data = p.queries.row(199 % 16, 0);
    thinned.queries.tokens = kept.size();
    thinned.queries.token_stride = p.queries.token_stride * 16;
    std::vector<float> few(200);
    largest_attention{64, 16}.score(cpu{}, thinned, 0, few);
    CHECK(full == few);
    // Tokens that no query is 64 positions past.
    for (std::size_t i = 136; i < 200; ++i) {
        CHECK(full[i] == 1e-6f);
    }
    CHECK(full[135] > 1e-6f);
}

TEST_CASE("score: extreme logits stay in [0, 1]") {
    const geometry shape{1, 1, 64, 64, 1.0f};
    random_prompt<float> owner(shape, positions_from(0, 700), positions_from(0, 700), 31, layout::dense, 30);
    std::vector<float> out(700);
    largest_attention{}.score(cpu{}, owner.view(), 0, out);
    CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x >= 1e-6f && x <= 1; }));
    CHECK(*std::max_element(out.begin(), out.end()) > 0.5f);
    make_snapkv().score(cpu{}, owner.view(), 0, out);
    CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x >= 0 && x <= 1; }));
    // One key that takes everything: attention exactly 1.
    for (std::size_t i = 0; i < 700; ++i) {
        std::fill_n(owner.key(0, i), 64, 0.0f);
    }
    const prompt<float> p = owner.view();
    std::vector<float> ones(64, 1.0f);
    prompt<float> single = p;
    const std::vector<position_t> last{699};
    single.query_positions = last;
    single.queries = {ones.data(), 1, 1, 64, 64, 64};
    std::fill_n(owner.key(0, 100), 64, 1000.0f);
    largest_attention{}.score(cpu{}, single, 0, out);
    CHECK(out[100] == 1.0f);
    CHECK(out[99] == 1e-6f);
}

TEST_CASE("score: a NaN key is seen and stays in its KV head") {
    const geometry shape{4, 2, 64, 64, 0};
    const auto positions = positions_from(0, 900);
    random_prompt<float> owner(shape, positions, positions, 41);
    std::vector<float> clean(900);
    std::vector<float> out(900);
    for (const std::size_t token : {0u, 300u, 520u, 820u}) {
        CAPTURE(token);
        largest_attention{}.score(cpu{}, owner.view(), 0, clean);
        float& element = owner.key(1, token)[17];
        const float before = element;
        element = std::numeric_limits<float>::quiet_NaN();
        largest_attention{}.score(cpu{}, owner.view(), 0, out);
        CHECK(out == clean);
        largest_attention{}.score(cpu{}, owner.view(), 1, out);
        CHECK(std::isnan(out[0]));
        CHECK(support::refused([&] { to_importance(cpu{}, out); }, {"token 0 is nan"}));
        snapkv{}.score_head(cpu{}, owner.view(), 2, out);
        CHECK(std::isnan(out[5]));
        const std::vector<float> untouched(900, 0.25f);
        out = untouched;
        CHECK_THROWS_AS(make_snapkv().score(cpu{}, owner.view(), 1, out), invalid_argument);
        CHECK(out == untouched);
        element = before;
    }
    owner.key(1, 300)[3] = std::numeric_limits<float>::infinity();
    largest_attention{}.score(cpu{}, owner.view(), 1, out);  // ends, and is refused or finite later
    CHECK(std::isnan(out[0]));
}

TEST_CASE("score: attention scorers refuse what they cannot score") {
    const geometry shape{2, 1, 64, 64, 0};
    const random_prompt<float> owner(shape, positions_from(0, 200), positions_from(0, 200, 16), 51);
    const random_prompt<float> none(shape, positions_from(0, 200), {}, 51);
    const prompt<float> p = owner.view();
    std::vector<float> out(200, 0.5f);
    const auto untouched = out;
    std::vector<float> short_out(199);
    const cpu exec;
    CHECK_THROWS_AS(snapkv{}.score_head(exec, p, 0, short_out), invalid_argument);
    CHECK_THROWS_AS(snapkv{}.score_head(exec, p, 2, out), invalid_argument);
    CHECK_THROWS_AS(snapkv{0}.score_head(exec, p, 0, out), invalid_argument);
    CHECK(support::refused([&] { snapkv{}.score_head(exec, none.view(), 0, out); }, {"200 tokens; there are none"}));
    CHECK_THROWS_AS(largest_attention{}.score(exec, p, 1, out), invalid_argument);
    CHECK_THROWS_AS(largest_attention{}.score_head(exec, p, 2, out), invalid_argument);
    CHECK_THROWS_AS((largest_attention{64, 0}.score(exec, p, 0, out)), invalid_argument);
    CHECK_THROWS_AS((largest_attention{64, 16, std::nanf("")}.score(exec, p, 0, out)), invalid_argument);
    // Queries at 0, 16, ..., 192; wanted are 199, 183, ...
    CHECK(support::refused([&] { largest_attention{}.score(exec, p, 0, out); }, {"position 199 and every 16"}));
    CHECK_THROWS_AS(largest_attention{}.score(exec, none.view(), 0, out), invalid_argument);
    CHECK_NOTHROW(largest_attention{64, 1}.score(exec, p, 0, short_out = std::vector<float>(200)));
    CHECK(out == untouched);
    // A distance larger than any position must not wrap.
    CHECK_NOTHROW(largest_attention{std::numeric_limits<std::size_t>::max(), 1}.score(exec, p, 0, out));
    CHECK(out == std::vector<float>(200, 1e-6f));
}
