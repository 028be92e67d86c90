// The C interface: what is refused comes back as a status and a message, and has changed nothing.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "support/c_cache.hpp"
#include "support/catch.hpp"

namespace {

using namespace support;

constexpr std::size_t tokens = 300;
constexpr std::size_t room = 320;

verkv::geometry shape() {
    return {.query_heads = 4, .kv_heads = 2, .key_dim = 8, .value_dim = 6};
}

/// Options of a cache whose construction is refused.
verkv_options spoilt(void (*spoil)(verkv_options&)) {
    verkv_options o = c_options(shape(), room);
    spoil(o);
    return o;
}

bool refused(void (*spoil)(verkv_options&), std::initializer_list<std::string> parts) {
    const verkv_options o = spoilt(spoil);
    verkv_cache* cache = reinterpret_cast<verkv_cache*>(&cache);
    const verkv_status status = verkv_create(&o, &cache);
    return failed(status, VERKV_INVALID_ARGUMENT, parts) && cache == nullptr;
}

/// A number where C has an enumeration: nothing keeps it to the names.
template <class Enum>
void set_number(Enum& e, unsigned number) {
    static_assert(sizeof(e) == sizeof(number));
    std::memcpy(&e, &number, sizeof(number));
}

/// A prompt of `tokens`, compressed, with room for a few more.
struct filled {
    c_text text{shape(), room, 5};
    c_cache cache;
    verkv_request id{};

    explicit filled(const verkv_options& o = c_options(shape(), room)) : cache(o) {
        REQUIRE(cache.status == VERKV_OK);
        REQUIRE(verkv_open(cache, 3, &id) == VERKV_OK);
        REQUIRE(prefill(cache, id, text, 0, tokens) == VERKV_OK);
        REQUIRE(verkv_compress(cache, id, nullptr, nullptr, 0, 0) == VERKV_OK);
    }

    step_answer step(verkv_status expected = VERKV_OK, double epsilon = 0.05, double delta = 0.1) {
        const auto queries = random_queries<float>(shape(), 1);
        step_answer answer;
        const verkv_step_item item = item_of(shape(), id, queries, answer);
        CHECK(verkv_step(cache, &item, 1, epsilon, delta) == expected);
        return answer;
    }
};

}  // namespace

TEST_CASE("C interface: options out of range are refused with their numbers") {
    CHECK(c_cache(c_options(shape(), room)).status == VERKV_OK);
    CHECK(refused([](verkv_options& o) { o.struct_size = 0; }, {"struct_size is 0", "verkv_default_options"}));
    CHECK(refused([](verkv_options& o) { o.struct_size += 8; }, {"struct_size"}));
    CHECK(refused([](verkv_options& o) { o.query_heads = 3; }, {"3 query heads", "2"}));
    CHECK(refused([](verkv_options& o) { o.kv_heads = 0; }, {"0 KV heads"}));
    CHECK(refused([](verkv_options& o) { o.key_dim = 0; }, {"key_dim 0"}));
    CHECK(refused([](verkv_options& o) { o.key_dim = 7; }, {"7 channels"}));
    CHECK(refused([](verkv_options& o) { o.value_dim = 0; }, {"value_dim 0"}));
    CHECK(refused([](verkv_options& o) { o.logit_scale = -1; }, {"scale -1"}));
    CHECK(refused([](verkv_options& o) { o.logit_scale = std::nanf(""); }, {"scale"}));
    CHECK(refused([](verkv_options& o) { o.max_requests = 0; }, {"max_requests is 0"}));
    CHECK(refused([](verkv_options& o) { o.max_requests = std::size_t(-1); }, {"max_requests"}));
    CHECK(refused([](verkv_options& o) { o.max_tokens = 0; }, {"max_tokens is 0"}));
    CHECK(refused([](verkv_options& o) { o.max_tokens = std::size_t(1) << 31; }, {"max_tokens is 2147483648"}));
    CHECK(refused([](verkv_options& o) { o.resident_rows = 0; }, {"resident_rows is 0"}));
    CHECK(refused([](verkv_options& o) { o.host_rows = std::size_t(1) << 33; }, {"host row"}));
    CHECK(refused([](verkv_options& o) { o.staging_rows = 63; }, {"staging_rows is 63"}));
    CHECK(refused([](verkv_options& o) { o.sketch_bits = 9; }, {"9 bits"}));
    CHECK(refused(
        [](verkv_options& o) {
            o.sketch = VERKV_SKETCH_ROTATED;
            o.sketch_bits = 5;
        },
        {"5 bits"}));
    CHECK(refused([](verkv_options& o) { o.sketch_share = 1.5f; }, {"1.5"}));
    CHECK(refused([](verkv_options& o) { o.carry_bounds = 1; }, {"carry_bounds"}));
    CHECK(refused([](verkv_options& o) { o.value_scale = 1; }, {"value_scale is 1", "OUTPUT"}));
    CHECK(refused(
        [](verkv_options& o) {
            o.target = VERKV_TARGET_OUTPUT;
            o.value_scale = -2;
        },
        {"value_scale is -2"}));
    CHECK(refused([](verkv_options& o) { o.check_rounds = 16; }, {"16 rounds", "15"}));
    CHECK(refused([](verkv_options& o) { o.kept = 0; }, {"kept fraction is 0"}));
    CHECK(refused([](verkv_options& o) { o.kept = 1.5; }, {"kept fraction is 1.5"}));
    CHECK(refused([](verkv_options& o) { o.threads = 5000; }, {"5000 threads"}));
    CHECK(refused([](verkv_options& o) { set_number(o.sketch, 3); }, {"sketch is 3"}));
    CHECK(refused([](verkv_options& o) { set_number(o.rope, 2); }, {"rope is 2"}));
    CHECK(refused([](verkv_options& o) { set_number(o.plan, 99); }, {"plan is 99"}));
    CHECK(refused([](verkv_options& o) { set_number(o.target, 0xffffffffu); }, {"target is"}));
}

TEST_CASE("C interface: more rows than any memory has are refused") {
    verkv_options o = c_options(shape(), room);
    o.max_requests = std::size_t{1} << 61;
    o.host_rows = o.resident_rows = 64;
    c_cache cache(o);
    CHECK(failed(cache.status, VERKV_INVALID_ARGUMENT, {"staging rows", "2305843009213693952"}));
}

TEST_CASE("C interface: null pointers are refused") {
    filled f;
    const verkv_options options = c_options(shape(), room);
    verkv_cache* made = nullptr;
    verkv_request id{};
    verkv_head_report report{};
    const c_text& t = f.text;
    std::vector<float> queries(4 * 8), output(4 * 6);
    const std::int64_t at = tokens;
    const auto null = [](verkv_status status, const char* name) {
        return failed(status, VERKV_INVALID_ARGUMENT, {name, "null"});
    };
    verkv_default_options(nullptr);
    verkv_destroy(nullptr);
    CHECK(null(verkv_create(nullptr, &made), "options"));
    CHECK(null(verkv_create(&options, nullptr), "cache"));
    CHECK(null(verkv_open(nullptr, 1, &id), "cache"));
    CHECK(null(verkv_open(f.cache, 1, nullptr), "request"));
    CHECK(null(verkv_release(nullptr, f.id), "cache"));
    for (const auto add : {verkv_prefill, verkv_append}) {
        CHECK(null(add(nullptr, f.id, t.key(0), t.value(0), &at, 1), "cache"));
        CHECK(null(add(f.cache, f.id, nullptr, t.value(0), &at, 1), "keys"));
        CHECK(null(add(f.cache, f.id, t.key(0), nullptr, &at, 1), "values"));
        CHECK(null(add(f.cache, f.id, t.key(0), t.value(0), nullptr, 1), "positions"));
        CHECK(add(f.cache, f.id, nullptr, nullptr, nullptr, 0) == VERKV_OK);
    }
    CHECK(null(verkv_compress(nullptr, f.id, nullptr, nullptr, 0, 0), "cache"));
    CHECK(null(verkv_compress(f.cache, f.id, nullptr, &at, 1, 16), "queries"));
    CHECK(null(verkv_compress(f.cache, f.id, queries.data(), nullptr, 1, 16), "query_positions"));
    CHECK(null(verkv_truncate(nullptr, f.id, 0), "cache"));
    CHECK(null(verkv_remove(nullptr, f.id, 0, 1), "cache"));
    verkv_step_item item{f.id, queries.data(), output.data(), nullptr};
    CHECK(null(verkv_step(nullptr, &item, 1, 0.1, 0.1), "cache"));
    CHECK(null(verkv_step(f.cache, nullptr, 1, 0.1, 0.1), "items"));
    CHECK(verkv_step(f.cache, nullptr, 0, 0.1, 0.1) == VERKV_OK);
    CHECK(verkv_step(f.cache, &item, 1, 0.1, 0.1) == VERKV_OK);  // lse may be
    item.output = nullptr;
    CHECK(null(verkv_step(f.cache, &item, 1, 0.1, 0.1), "output"));
    item = {f.id, nullptr, output.data(), nullptr};
    CHECK(null(verkv_step(f.cache, &item, 1, 0.1, 0.1), "queries"));
    CHECK(null(verkv_report(nullptr, 0, 0, &report), "cache"));
    CHECK(null(verkv_report(f.cache, 0, 0, nullptr), "report"));
    CHECK(verkv_sketch_bytes(nullptr, f.id, 0) == 0);
    CHECK(std::string(verkv_last_error()).find("cache is null") != std::string::npos);
    CHECK(verkv_sketch_bytes_per_token(nullptr) == 0);
    CHECK(null(verkv_tokens(nullptr, f.id, nullptr, nullptr), "cache"));
    CHECK(verkv_tokens(f.cache, f.id, nullptr, nullptr) == VERKV_OK);
    CHECK(null(verkv_free_rows(nullptr, nullptr, nullptr), "cache"));
    CHECK(verkv_free_rows(f.cache, nullptr, nullptr) == VERKV_OK);
}

TEST_CASE("C interface: calls in the wrong order are refused") {
    const c_text t(shape(), room, 6);
    c_cache cache(c_options(shape(), room));
    verkv_request id{};
    verkv_head_report report{};
    const auto queries = random_queries<float>(shape(), 1);
    step_answer answer;
    REQUIRE(verkv_open(cache, 1, &id) == VERKV_OK);
    const verkv_step_item item = item_of(shape(), id, queries, answer);
    CHECK(failed(verkv_report(cache, 0, 0, &report), VERKV_INVALID_STATE, {"first step"}));
    REQUIRE(prefill(cache, id, t, 0, 10) == VERKV_OK);
    CHECK(failed(verkv_step(cache, &item, 1, 0.1, 0.1), VERKV_INVALID_STATE, {"10 prefilled tokens"}));
    CHECK(failed(append(cache, id, t, 10, 1), VERKV_INVALID_STATE, {"10 prefilled tokens"}));
    CHECK(failed(verkv_report(cache, 0, 0, &report), VERKV_INVALID_STATE, {"first step"}));
    REQUIRE(verkv_compress(cache, id, nullptr, nullptr, 0, 0) == VERKV_OK);
    CHECK(verkv_step(cache, &item, 1, 0.1, 0.1) == VERKV_OK);
    CHECK(verkv_report(cache, 0, 1, &report) == VERKV_OK);
    CHECK(report.tokens == 10);
    CHECK(failed(verkv_report(cache, 1, 0, &report), VERKV_INVALID_ARGUMENT, {"item 1", "1 items"}));
    CHECK(failed(verkv_report(cache, 0, 2, &report), VERKV_INVALID_ARGUMENT, {"KV head 2", "2 KV heads"}));
}

TEST_CASE("C interface: a request that is not open is refused by every call") {
    filled f;
    const verkv_request gone = f.id;
    REQUIRE(verkv_release(f.cache, gone) == VERKV_OK);
    verkv_request next{};
    REQUIRE(verkv_open(f.cache, 4, &next) == VERKV_OK);
    CHECK(next.slot == gone.slot);
    const auto queries = random_queries<float>(shape(), 1);
    step_answer answer;
    for (const verkv_request id : {gone, verkv_request{7, 0}}) {
        const auto void_id = [&](verkv_status status) {
            return failed(status, VERKV_INVALID_ARGUMENT, {"request " + std::to_string(id.slot), "is not open"});
        };
        const verkv_step_item item = item_of(shape(), id, queries, answer);
        const std::int64_t at = 0;
        CHECK(void_id(verkv_release(f.cache, id)));
        CHECK(void_id(prefill(f.cache, id, f.text, 0, 1)));
        CHECK(void_id(append(f.cache, id, f.text, 0, 1)));
        CHECK(void_id(verkv_compress(f.cache, id, nullptr, nullptr, 0, 0)));
        CHECK(void_id(verkv_compress(f.cache, id, queries.data(), &at, 1, 1)));
        CHECK(void_id(verkv_truncate(f.cache, id, 0)));
        CHECK(void_id(verkv_truncate(f.cache, id, std::numeric_limits<std::int64_t>::max())));
        CHECK(void_id(verkv_remove(f.cache, id, 0, 1)));
        CHECK(void_id(verkv_step(f.cache, &item, 1, 0.1, 0.1)));
        CHECK(void_id(verkv_tokens(f.cache, id, nullptr, nullptr)));
        CHECK(verkv_sketch_bytes(f.cache, id, 0) == 0);
    }
}

TEST_CASE("C interface: a cache that is full says what is missing") {
    const c_text t(shape(), room + 10, 7);
    verkv_options o = c_options(shape(), room, 2);
    o.host_rows = 2 * room;
    o.resident_rows = 2 * 100;
    o.kept_at_least = 0;
    o.kept = 0.25;
    o.sink = o.local = 4;
    c_cache cache(o);
    verkv_request a{}, b{}, c{};
    std::size_t host = 0, resident = 0, held = 0, tail = 0;
    REQUIRE(verkv_open(cache, 1, &a) == VERKV_OK);
    REQUIRE(verkv_open(cache, 2, &b) == VERKV_OK);
    CHECK(failed(verkv_open(cache, 3, &c), VERKV_OUT_OF_CAPACITY, {"all 2 requests"}));
    REQUIRE(prefill(cache, a, t, 0, 250) == VERKV_OK);
    REQUIRE(verkv_free_rows(cache, &host, &resident) == VERKV_OK);
    CHECK(host == 2 * 70);
    CHECK(resident == 200);
    CHECK(failed(prefill(cache, a, t, 250, 71), VERKV_OUT_OF_CAPACITY, {"250", "71", "max_tokens is 320"}));
    CHECK(failed(prefill(cache, b, t, 0, 71), VERKV_OUT_OF_CAPACITY, {"host row", "142", "140"}));
    CHECK(failed(prefill(cache, b, t, 0, std::size_t(-1)), VERKV_OUT_OF_CAPACITY, {"max_tokens is 320"}));
    REQUIRE(verkv_compress(cache, a, nullptr, nullptr, 0, 0) == VERKV_OK);
    REQUIRE(verkv_free_rows(cache, nullptr, &resident) == VERKV_OK);
    CHECK(resident < 200 - 2 * 40);
    CHECK(failed(append(cache, b, t, 0, 70), VERKV_OUT_OF_CAPACITY, {"resident row", "140"}));
    REQUIRE(append(cache, b, t, 0, 10) == VERKV_OK);
    REQUIRE(verkv_tokens(cache, b, &held, &tail) == VERKV_OK);
    CHECK(held == 10);
    CHECK(tail == 10);

    o.kept = 0.9;
    c_cache small(o);
    REQUIRE(verkv_open(small, 1, &a) == VERKV_OK);
    REQUIRE(prefill(small, a, t, 0, 300) == VERKV_OK);
    CHECK(failed(verkv_compress(small, a, nullptr, nullptr, 0, 0), VERKV_OUT_OF_CAPACITY, {"300 tokens", "200"}));
}

TEST_CASE("C interface: positions that cannot be are refused") {
    filled f;
    const auto add = [&](std::vector<std::int64_t> at) {
        return verkv_append(f.cache, f.id, f.text.key(0), f.text.value(0), at.data(), at.size());
    };
    const auto refused_at = [&](std::vector<std::int64_t> at, std::initializer_list<std::string> parts) {
        return failed(add(std::move(at)), VERKV_INVALID_ARGUMENT, parts);
    };
    CHECK(refused_at({-1}, {"position 0 is -1"}));
    CHECK(refused_at({300, std::int64_t{1} << 31}, {"position 1 is 2147483648"}));
    CHECK(refused_at({299}, {"299"}));
    CHECK(refused_at({301, 301}, {"301"}));
    std::size_t held = 0;
    REQUIRE(verkv_tokens(f.cache, f.id, &held, nullptr) == VERKV_OK);
    CHECK(held == tokens);
    CHECK(add({(std::int64_t{1} << 31) - 1}) == VERKV_OK);
}

TEST_CASE("C interface: tokens are forgotten by position, whatever the position") {
    const auto held = [](filled& f) {
        std::size_t n = 0;
        CHECK(verkv_tokens(f.cache, f.id, &n, nullptr) == VERKV_OK);
        return n;
    };
    filled f;
    const std::int64_t last = (std::int64_t{1} << 31) - 1;
    REQUIRE(verkv_append(f.cache, f.id, f.text.key(0), f.text.value(0), &last, 1) == VERKV_OK);
    CHECK(verkv_truncate(f.cache, f.id, last + 1) == VERKV_OK);
    CHECK(verkv_remove(f.cache, f.id, last + 1, last + 5) == VERKV_OK);
    CHECK(verkv_remove(f.cache, f.id, 20, 10) == VERKV_OK);
    CHECK(verkv_remove(f.cache, f.id, -5, -2) == VERKV_OK);
    CHECK(held(f) == tokens + 1);
    CHECK(verkv_remove(f.cache, f.id, last, last + 1) == VERKV_OK);
    CHECK(held(f) == tokens);
    CHECK(verkv_remove(f.cache, f.id, -5, 10) == VERKV_OK);
    CHECK(held(f) == tokens - 10);
    CHECK(verkv_truncate(f.cache, f.id, 290) == VERKV_OK);
    CHECK(held(f) == 280);
    CHECK(verkv_truncate(f.cache, f.id, -1) == VERKV_OK);
    CHECK(held(f) == 0);
}

TEST_CASE("C interface: queries that compress cannot use are refused") {
    filled f;
    std::vector<float> queries(3 * 4 * 8, 0.5f);
    const auto compress = [&](std::vector<std::int64_t> at, std::size_t stride) {
        return verkv_compress(f.cache, f.id, queries.data(), at.data(), at.size(), stride);
    };
    CHECK(compress({267, 283, 299}, 16) == VERKV_OK);
    CHECK(failed(compress({299}, 0), VERKV_INVALID_ARGUMENT, {"stride is 0"}));
    CHECK(failed(compress({297, 298}, 16), VERKV_INVALID_ARGUMENT, {"none of 2 queries", "299", "16"}));
    CHECK(failed(compress({}, 16), VERKV_INVALID_ARGUMENT, {"none of 0 queries"}));
    CHECK(failed(compress({283, 283}, 16), VERKV_INVALID_ARGUMENT, {"query_positions[1] is 283"}));
    CHECK(failed(compress({-1, 299}, 16), VERKV_INVALID_ARGUMENT, {"query_positions[0] is -1"}));
    queries[2 * 4 * 8 + 9] = 70000;
    CHECK(compress({267, 283, 298}, 16) == VERKV_OK);  // not looked at
    CHECK(failed(compress({267, 283, 299}, 16), VERKV_INVALID_ARGUMENT, {"queries[2]", "70000", "head 1"}));
    queries[2 * 4 * 8 + 9] = std::nanf("");
    CHECK(failed(compress({267, 283, 299}, 16), VERKV_INVALID_ARGUMENT, {"queries[2]", "nan"}));
}

TEST_CASE("C interface: a key that is not a number is refused by compress, and shows in the certificate") {
    c_text t(shape(), room, 8);
    t.rows.keys[5 * 16].bits = 0x7e00;
    c_cache cache(c_options(shape(), room));
    verkv_request id{};
    REQUIRE(verkv_open(cache, 1, &id) == VERKV_OK);
    REQUIRE(prefill(cache, id, t, 0, tokens) == VERKV_OK);
    CHECK(failed(verkv_compress(cache, id, nullptr, nullptr, 0, 0), VERKV_INVALID_ARGUMENT, {"token 5", "nan"}));
    REQUIRE(verkv_truncate(cache, id, 0) == VERKV_OK);
    REQUIRE(append(cache, id, t, 0, 10) == VERKV_OK);
    const auto queries = random_queries<float>(shape(), 1);
    step_answer answer;
    const verkv_step_item item = item_of(shape(), id, queries, answer);
    REQUIRE(verkv_step(cache, &item, 1, 0.1, 0.1) == VERKV_OK);
    verkv_head_report report{};
    REQUIRE(verkv_report(cache, 0, 0, &report) == VERKV_OK);
    CHECK(std::isnan(report.certificate_after));
    REQUIRE(verkv_report(cache, 0, 1, &report) == VERKV_OK);
    CHECK(report.certificate_after == 0);
}

TEST_CASE("C interface: steps that cannot be are refused, and leave the report of the last one") {
    verkv_options o = c_options(shape(), room, 2);
    filled f(o);
    const step_answer first = f.step();
    verkv_head_report before{}, after{};
    REQUIRE(verkv_report(f.cache, 0, 0, &before) == VERKV_OK);
    f.step(VERKV_INVALID_ARGUMENT, 0);
    CHECK(failed(VERKV_INVALID_ARGUMENT, VERKV_INVALID_ARGUMENT, {"epsilon is 0"}));
    f.step(VERKV_INVALID_ARGUMENT, 0.1, 1);
    CHECK(failed(VERKV_INVALID_ARGUMENT, VERKV_INVALID_ARGUMENT, {"delta is 1"}));
    const auto queries = random_queries<float>(shape(), 1);
    step_answer a, b;
    verkv_step_item items[3] = {item_of(shape(), f.id, queries, a), item_of(shape(), f.id, queries, b), {}};
    items[2] = items[1];
    CHECK(failed(verkv_step(f.cache, items, 2, 0.1, 0.1), VERKV_INVALID_ARGUMENT, {"same request"}));
    CHECK(failed(verkv_step(f.cache, items, 3, 0.1, 0.1), VERKV_INVALID_ARGUMENT, {"3 items", "max_requests is 2"}));
    REQUIRE(verkv_open(f.cache, 5, &items[1].request) == VERKV_OK);
    items[1].output = items[0].output;
    CHECK(failed(verkv_step(f.cache, items, 2, 0.1, 0.1), VERKV_INVALID_ARGUMENT, {"same memory"}));
    items[0].lse = items[0].output;
    CHECK(failed(verkv_step(f.cache, items, 1, 0.1, 0.1), VERKV_INVALID_ARGUMENT, {"output and lse"}));
    REQUIRE(verkv_report(f.cache, 0, 0, &after) == VERKV_OK);
    CHECK(std::memcmp(&before, &after, sizeof(before)) == 0);
    CHECK(f.step() == first);
}

TEST_CASE("C interface: bounds that fail as often as the promise may are refused at the step") {
    verkv_options o = c_options(shape(), room);
    o.sketch = VERKV_SKETCH_ROTATED;
    o.carry_bounds = 1;
    filled f(o);
    f.step(VERKV_INVALID_ARGUMENT, 0.1, 1e-4);
    CHECK(std::string(verkv_last_error()).find("bounds fail") != std::string::npos);
    f.step(VERKV_OK, 0.1, 0.1);
}

TEST_CASE("C interface: each thread has its own message, and it stays until the next failure") {
    std::string fresh = "?", theirs;
    CHECK(verkv_open(nullptr, 0, nullptr) == VERKV_INVALID_ARGUMENT);
    const std::string mine = verkv_last_error();
    std::thread([&] {
        fresh = verkv_last_error();
        verkv_step(nullptr, nullptr, 0, 0.1, 0.1);
        filled f;
        verkv_release(f.cache, {9, 9});
        theirs = verkv_last_error();
    }).join();
    CHECK(fresh.empty());
    CHECK(theirs.find("request 9") != std::string::npos);
    filled f;
    CHECK(verkv_last_error() == mine);
}
