// The conveniences around a cache: memory of the caller's, steps of one request, views.
#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "support/cache_rig.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/cpu/thread_pool.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/sketch/exact.hpp"

namespace {

using namespace verkv;
using cache_type = layer_cache<float, exact_sketch<float>>;

constexpr std::size_t tokens = 300;

geometry shape() {
    return {.query_heads = 4, .kv_heads = 2, .key_dim = 8, .value_dim = 4};
}

cache_config config() {
    return {.shape = shape(),
            .max_requests = 2,
            .max_tokens = 400,
            .host_rows = 1600,
            .resident_rows = 800,
            .staging_rows = 64};
}

/// Prefills and compresses `tokens` tokens.
request_id filled(cache_type& cache, const support::text<float>& text) {
    const request_id id = cache.open(3);
    cache.prefill(id, text.key_view(0, tokens), text.value_view(0, tokens), text.position_span(0, tokens));
    cache.compress(id, key_norm{}, {budget::fraction(0.2), {8, 8}});
    return id;
}

}  // namespace

TEST_CASE("cache: rows live in the caller's memory, if there is some") {
    const auto text = support::random_text<float>(shape(), tokens + 1, 5);
    std::vector<float> host(1600 * 12, -1.0f);
    std::vector<float> resident(800 * 12, -1.0f);
    std::vector<float> staging(2 * 2 * 64 * 12, -1.0f);
    const cache_memory<float> memory{host, resident, staging};
    cache_type own(config(), {});
    cache_type given(config(), {}, {}, {}, {}, {}, {}, memory);
    const request_id a = filled(own, text);
    const request_id b = filled(given, text);
    CHECK(std::equal(host.begin(), host.begin() + 8, text.keys.begin()));
    CHECK(std::count(resident.begin(), resident.end(), -1.0f) < std::ptrdiff_t{800 * 12});
    const auto queries = support::random_queries<float>(shape(), 1);
    std::vector<float> x(16), y(16);
    own.decode(decode_item<float>{a, contiguous_rows(std::span(queries), 8), x}, {0.01, 0.1});
    given.decode(decode_item<float>{b, contiguous_rows(std::span(queries), 8), y}, {0.01, 0.1});
    CHECK(x == y);
    CHECK(std::count(staging.begin(), staging.end(), -1.0f) < std::ptrdiff_t(staging.size()));
    CHECK(support::refused([&] { cache_type(config(), {}, {}, {}, {}, {}, {}, {std::span(host).first(12)}); },
                           {"host row", "12", "1600", "19200"}));
}

TEST_CASE("cache: one request, a vector and a span decode alike") {
    const auto text = support::random_text<float>(shape(), tokens, 6);
    cache_type cache(config(), {});
    const request_id id = filled(cache, text);
    const auto queries = support::random_queries<float>(shape(), 2);
    std::vector<float> x(16), y(16), z(16);
    std::vector<decode_item<float>> items{{id, contiguous_rows(std::span(queries), 8), x}};
    cache.decode(items);
    items[0].output = y;
    cache.decode(items[0]);
    items[0].output = z;
    cache.decode(std::span<const decode_item<float>>(items));
    CHECK(x == y);
    CHECK(x == z);
    CHECK(x != std::vector<float>(16));
}

TEST_CASE("cache: the tail is what was appended since the last draw") {
    const auto text = support::random_text<float>(shape(), tokens + 20, 7);
    cache_type cache(config(), {});
    const request_id id = filled(cache, text);
    CHECK(cache.tail(id) == 0);
    cache.append(id, text.key_view(tokens, 12), text.value_view(tokens, 12), text.position_span(tokens, 12));
    CHECK(cache.tail(id) == 12);
    cache.truncate(id, tokens + 5);
    CHECK(cache.tail(id) == 5);
    cache.remove(id, 10, 20);
    CHECK(cache.tail(id) == 5);
    cache.prefill(id, text.key_view(tokens + 12, 3), text.value_view(tokens + 12, 3),
                  text.position_span(tokens + 12, 3));
    CHECK(cache.tail(id) == 5);
    cache.compress(id, key_norm{}, {budget::fraction(0.2), {8, 8}});
    CHECK(cache.tail(id) == 0);
}

TEST_CASE("cache: an executor that has grown is refused") {
    class growing final : public executor {
    public:
        std::size_t now = 1;
        [[nodiscard]] std::size_t workers() const noexcept override { return now; }
        void run(std::size_t n, void (*task)(void*, std::size_t, std::size_t), void* context) override {
            for (std::size_t i = 0; i < n; ++i) {
                task(context, i, now - 1);
            }
        }
    } threads;
    const auto text = support::random_text<float>(shape(), tokens, 8);
    cache_type cache(config(), {}, cpu{&threads});
    const request_id id = filled(cache, text);
    const auto queries = support::random_queries<float>(shape(), 3);
    std::vector<float> x(16);
    const decode_item<float> item{id, contiguous_rows(std::span(queries), 8), x};
    threads.now = 2;
    CHECK(support::refused<invalid_state>([&] { cache.decode(item); }, {"2 workers", "built for 1"}));
    threads.now = 1;
    cache.decode(item);
    CHECK(x != std::vector<float>(16));
}

TEST_CASE("core: slices of tokens and rows of one token") {
    std::vector<float> data(5 * 3 * 2);
    for (std::size_t i = 0; i < data.size(); ++i) {
        data[i] = static_cast<float>(i);
    }
    const auto view = heads_of(std::span<const float>(data), 5, 3, 2);
    const auto part = view.slice(1, 3);
    CHECK(part.tokens == 3);
    CHECK(part.row(0, 2) == view.row(1, 2));
    CHECK(part.row(2, 1) == view.row(3, 1));
    const rows<float> token = view.token(4);
    CHECK(token.count == 3);
    CHECK(token[2] == view.row(4, 2));
    CHECK(matrix_of(std::span(data), 5, 6).row(2)[1] == 13);
    CHECK(support::refused([&] { (void)matrix_of(std::span(data), 5, 5); }, {"[5, 5]", "25", "30"}));
}

TEST_CASE("sample: a fraction with a least number of tokens") {
    const budget b = budget::fraction(1.0 / 16).at_least(160);
    CHECK(b.rows(100) == 100);
    CHECK(b.rows(1000) == 160);
    CHECK(b.rows(16000) == 1000);
    CHECK(budget::tokens(50).at_least(60).rows(1000) == 60);
}
