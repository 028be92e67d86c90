// The C interface: layer caches of every sketch and target behind one virtual interface, and no exception gets out.
// Compile it with the flags of the rest of your program (-march above all): takes a minute or two.
#include "verkv_c.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "verkv/verkv.hpp"

namespace {

using verkv::half;
using verkv::position_t;

constexpr std::size_t largest_size = (std::numeric_limits<std::size_t>::max)();

// In a fixed buffer: memory may be what is missing.
thread_local char last_error[1024] = "";

verkv_status fail(verkv_status status, const char* what) noexcept {
    std::snprintf(last_error, sizeof(last_error), "%s", what);
    return status;
}

/// Calls f; what it throws becomes a status and the thread's message.
template <class F>
verkv_status guarded(F&& f) noexcept {
    try {
        f();
        return VERKV_OK;
    } catch (const verkv::invalid_argument& e) {
        return fail(VERKV_INVALID_ARGUMENT, e.what());
    } catch (const verkv::out_of_capacity& e) {
        return fail(VERKV_OUT_OF_CAPACITY, e.what());
    } catch (const verkv::invalid_state& e) {
        return fail(VERKV_INVALID_STATE, e.what());
    } catch (const std::bad_alloc&) {
        return fail(VERKV_OUT_OF_MEMORY, "verkv: the system has no memory for this");
    } catch (const std::length_error&) {
        return fail(VERKV_OUT_OF_MEMORY, "verkv: more memory than any system has");
    } catch (const std::exception& e) {
        return fail(VERKV_INTERNAL, e.what());
    } catch (...) {
        return fail(VERKV_INTERNAL, "verkv: an exception of unknown type");
    }
}

template <class E = verkv::invalid_argument, class... Parts>
void require(bool ok, const Parts&... parts) {
    if (!ok) {
        verkv::detail::raise<E>(parts...);
    }
}

void require_pointer(const void* p, const char* name) {
    require(p != nullptr, name, " is null");
}

/// The number that an enumeration from C holds, which need not be one of its names.
template <class Enum>
auto number_of(const Enum& e) {
    std::underlying_type_t<Enum> n;
    std::memcpy(&n, &e, sizeof(n));
    return n;
}

/// The planners, one of them chosen. None of them knows the sketch, so the choice costs a branch and no instantiation.
class chosen_planner {
public:
    struct workspace {
        verkv::greedy<>::workspace simple;
        verkv::water_filling<>::workspace water;

        void reserve(std::size_t n, std::size_t heads = 1) {
            simple.reserve(n);
            water.reserve(n, heads);
        }
    };

    explicit chosen_planner(verkv_plan which = VERKV_PLAN_WATER_FILLING, bool joint = true)
        : which_(which), water_{joint ? verkv::group_plan::joint : verkv::group_plan::per_head} {}

    void plan(const verkv::cpu& exec, verkv::masses_view m, verkv::tolerance t, workspace& w, verkv::plan& out) const {
        switch (which_) {
            case VERKV_PLAN_GREEDY:
                verkv::greedy<>{}.plan(exec, m, t, w.simple, out);
                break;
            case VERKV_PLAN_NEVER:
                verkv::never_fetch<>{}.plan(exec, m, t, w.simple, out);
                break;
            default:
                water_.plan(exec, m, t, w.water, out);
        }
    }

    void plan_group(const verkv::cpu& exec, std::span<const verkv::masses_view> m, verkv::tolerance t, workspace& w,
                    std::span<verkv::plan> out) const {
        if (which_ == VERKV_PLAN_WATER_FILLING) {
            water_.plan_group(exec, m, t, w.water, out);
            return;
        }
        for (std::size_t h = 0; h < m.size(); ++h) {
            plan(exec, m[h], t, w, out[h]);
        }
    }

    /// For the check from the sample, which is off where another planner is chosen.
    void plan_at(const verkv::cpu& exec, std::span<const verkv::masses_view> m, std::span<const double> level,
                 verkv::tolerance t, workspace& w, std::span<verkv::plan> out) const {
        water_.plan_at(exec, m, level, t, w.water, out);
    }

private:
    verkv_plan which_;
    verkv::water_filling<> water_;
};

/// What compress() looks at beside the cache.
struct kept_queries {
    verkv::heads_view<half> queries;
    std::span<const position_t> positions;
};

/// A layer_cache of any sketch and target.
class any_layer {
public:
    any_layer() = default;
    any_layer(const any_layer&) = delete;
    any_layer& operator=(const any_layer&) = delete;
    virtual ~any_layer() = default;

    virtual verkv::request_id open(std::uint64_t seed) = 0;
    virtual void release(verkv::request_id id) = 0;
    virtual void prefill(verkv::request_id id, verkv::heads_view<half> keys, verkv::heads_view<half> values,
                         std::span<const position_t> positions) = 0;
    virtual void append(verkv::request_id id, verkv::heads_view<half> keys, verkv::heads_view<half> values,
                        std::span<const position_t> positions) = 0;
    virtual void compress(verkv::request_id id, const verkv::largest_attention& scorer, const verkv::compression& how,
                          const kept_queries& seen) = 0;
    virtual void compress(verkv::request_id id, const verkv::key_norm& scorer, const verkv::compression& how) = 0;
    virtual void remove(verkv::request_id id, position_t first, position_t last) = 0;
    virtual void truncate(verkv::request_id id, position_t position) = 0;
    virtual const verkv::step_report& decode(std::span<const verkv::decode_item<float>> batch, verkv::tolerance t) = 0;
    [[nodiscard]] virtual std::span<const position_t> positions(verkv::request_id id) const = 0;
    [[nodiscard]] virtual std::size_t tail(verkv::request_id id) const = 0;
    [[nodiscard]] virtual std::size_t sketch_bytes(verkv::request_id id, std::size_t kv_head) const = 0;
    [[nodiscard]] virtual double sketch_bytes_per_token() const = 0;
    [[nodiscard]] virtual std::size_t free_host_rows() const = 0;
    [[nodiscard]] virtual std::size_t free_resident_rows() const = 0;
};

/// What every layer_cache is built with.
struct parts {
    verkv::cache_config config;
    verkv::cpu exec;
    chosen_planner planner;
    verkv::exact_for_shortlist exact;
    verkv::step_policies policies;
};

template <class Sketch, class Target>
class layer_of final : public any_layer {
public:
    layer_of(const parts& p, const Sketch& sketch, const Target& target)
        : cache_(p.config, sketch, p.exec, p.planner, p.exact, target, p.policies) {
        Sketch trial = sketch;
        trial.fit(p.exec, verkv::rows<half>{nullptr, 0, 0, p.config.shape.key_dim, nullptr});
        bytes_per_token_ = trial.bytes_per_token();
    }

    verkv::request_id open(std::uint64_t seed) override { return cache_.open(seed); }
    void release(verkv::request_id id) override { cache_.release(id); }
    void prefill(verkv::request_id id, verkv::heads_view<half> keys, verkv::heads_view<half> values,
                 std::span<const position_t> positions) override {
        cache_.prefill(id, keys, values, positions);
    }
    void append(verkv::request_id id, verkv::heads_view<half> keys, verkv::heads_view<half> values,
                std::span<const position_t> positions) override {
        cache_.append(id, keys, values, positions);
    }
    void compress(verkv::request_id id, const verkv::largest_attention& scorer, const verkv::compression& how,
                  const kept_queries& seen) override {
        cache_.compress(id, scorer, how, seen.queries, seen.positions);
    }
    void compress(verkv::request_id id, const verkv::key_norm& scorer, const verkv::compression& how) override {
        cache_.compress(id, scorer, how);
    }
    void remove(verkv::request_id id, position_t first, position_t last) override { cache_.remove(id, first, last); }
    void truncate(verkv::request_id id, position_t position) override { cache_.truncate(id, position); }
    const verkv::step_report& decode(std::span<const verkv::decode_item<float>> batch, verkv::tolerance t) override {
        return cache_.decode(batch, t);
    }
    [[nodiscard]] std::span<const position_t> positions(verkv::request_id id) const override {
        return cache_.positions(id);
    }
    [[nodiscard]] std::size_t tail(verkv::request_id id) const override { return cache_.tail(id); }
    [[nodiscard]] std::size_t sketch_bytes(verkv::request_id id, std::size_t kv_head) const override {
        return cache_.sketch_of(id, kv_head).bytes();
    }
    [[nodiscard]] double sketch_bytes_per_token() const override { return bytes_per_token_; }
    [[nodiscard]] std::size_t free_host_rows() const override { return cache_.free_host_rows(); }
    [[nodiscard]] std::size_t free_resident_rows() const override { return cache_.free_resident_rows(); }

private:
    verkv::layer_cache<half, Sketch, chosen_planner, verkv::exact_for_shortlist, Target> cache_;
    double bytes_per_token_ = 0;
};

template <class Sketch>
std::unique_ptr<any_layer> layer_with(const parts& p, const Sketch& sketch, const verkv_options& o) {
    if (o.target == VERKV_TARGET_DENOMINATOR) {
        return std::make_unique<layer_of<Sketch, verkv::denominator>>(p, sketch, verkv::denominator{});
    }
    const verkv::output target{o.value_scale > 0 ? verkv::radius_rule::certain : verkv::radius_rule::estimated,
                               o.value_scale};
    return std::make_unique<layer_of<Sketch, verkv::output>>(p, sketch, target);
}

/// A pool for each number of threads, as long as a cache uses it: layers take turns, and need not have threads each.
std::shared_ptr<verkv::thread_pool> pool_of(std::uint32_t threads) {
    if (threads == 1) {
        return nullptr;
    }
    static std::mutex mutex;
    static std::map<std::uint32_t, std::weak_ptr<verkv::thread_pool>> pools;
    const std::lock_guard lock(mutex);
    std::weak_ptr<verkv::thread_pool>& known = pools[threads];
    std::shared_ptr<verkv::thread_pool> pool = known.lock();
    if (!pool) {
        pool = std::make_shared<verkv::thread_pool>(threads);
        known = pool;
    }
    return pool;
}

/// Refuses what the library would not see: numbers that are no name, and choices that would quietly do nothing.
void check_options(const verkv_options& o) {
    require(o.struct_size == sizeof(verkv_options), "struct_size is ", o.struct_size, ", not ", sizeof(verkv_options),
            ": the options were not filled in by verkv_default_options(), or come from another version of verkv_c.h");
    const auto check_name = [](const char* field, auto number, unsigned names) {
        require(number >= 0 && static_cast<unsigned>(number) < names, field, " is ", number, "; it has ", names,
                " values, from 0");
    };
    check_name("sketch", number_of(o.sketch), 3);
    check_name("rope", number_of(o.rope), 2);
    check_name("plan", number_of(o.plan), 3);
    check_name("target", number_of(o.target), 2);
    require(o.carry_bounds == 0 || o.sketch != VERKV_SKETCH_ROPE_PAIRS,
            "carry_bounds is set; a sketch of RoPE pairs has no bounds to carry");
    require(std::isfinite(o.value_scale) && o.value_scale >= 0, "value_scale is ", o.value_scale,
            "; it must be positive, or 0 for the output's norm");
    require(o.value_scale == 0 || o.target == VERKV_TARGET_OUTPUT, "value_scale is ", o.value_scale,
            "; it is for the target OUTPUT");
    require(o.resident_rows > 0, "resident_rows is 0");
}

/// Rows that hold every token of every request.
std::size_t all_rows(const verkv::cache_config& c) {
    const std::size_t of_request = c.shape.kv_heads * c.max_tokens;  // both have 32 bits, and were checked
    require(c.max_requests <= largest_size / of_request, "max_requests is ", c.max_requests, "; their rows are ",
            of_request, " each");
    return c.max_requests * of_request;
}

std::unique_ptr<any_layer> make_layer(const verkv_options& o, verkv::thread_pool* threads) {
    parts p;
    p.config = {.shape = {.query_heads = o.query_heads,
                          .kv_heads = o.kv_heads,
                          .key_dim = o.key_dim,
                          .value_dim = o.value_dim,
                          .scale = o.logit_scale},
                .layer = o.layer,
                .max_requests = o.max_requests,
                .max_tokens = o.max_tokens,
                .host_rows = o.host_rows,
                .resident_rows = o.resident_rows,
                .staging_rows = o.staging_rows};
    validate(p.config);
    if (o.host_rows == 0) {
        p.config.host_rows = all_rows(p.config);
    }
    p.exec = {threads};
    p.planner = chosen_planner(o.plan, o.joint != 0);
    p.exact.size = o.shortlist;
    p.policies.check.rounds = o.check_rounds;
    p.policies.bounds = o.carry_bounds != 0 ? verkv::bound_policy::carry : verkv::bound_policy::ignore;
    validate(p.policies);
    if (o.plan != VERKV_PLAN_WATER_FILLING) {
        p.policies.check.rounds = 0;  // the check lowers levels, which other plans have not
    }
    switch (o.sketch) {
        case VERKV_SKETCH_EXACT:
            return layer_with(p, verkv::exact_sketch<half>(), o);
        case VERKV_SKETCH_ROPE_PAIRS:
            return layer_with(
                p,
                verkv::rope_pair_sketch({.key_dim = o.key_dim,
                                         .pairing = o.rope == VERKV_ROPE_HALF ? verkv::rope_pairing::half
                                                                              : verkv::rope_pairing::interleaved,
                                         .bits = o.sketch_bits,
                                         .pair_fraction = static_cast<double>(o.sketch_share)}),
                o);
        default:
            return layer_with(p, verkv::rotated_sketch({.key_dim = o.key_dim, .bits = o.sketch_bits}), o);
    }
}

verkv::request_id id_of(verkv_request r) {
    return {r.slot, r.generation};
}

/// What is larger, and NaN where any is.
double larger_or_nan(double a, double b) {
    return a != a || a > b ? a : b;
}

/// Forgets the tokens at positions first ... last-1; both may be any number.
void forget(any_layer& layer, verkv::request_id id, std::int64_t first, std::int64_t last) {
    constexpr std::int64_t most = (std::numeric_limits<position_t>::max)();
    const auto from = static_cast<position_t>(std::clamp<std::int64_t>(first, 0, most));
    if (first > most) {
        (void)layer.positions(id);  // no token is there; but the request has to be
    } else if (last > most) {
        layer.truncate(id, from);
    } else {
        layer.remove(id, from, static_cast<position_t>((std::max)(last, std::int64_t{from})));
    }
}

}  // namespace

struct verkv_cache {
    std::shared_ptr<verkv::thread_pool> threads;
    std::unique_ptr<any_layer> layer;  // uses them
    verkv::geometry shape;
    std::size_t max_requests = 0;
    std::size_t max_tokens = 0;
    verkv::compression how;
    std::vector<position_t> positions;  // of the call
    std::vector<verkv::decode_item<float>> items;
    std::vector<verkv_head_report> reports;  // of the last step that succeeded: [item][KV head]
    std::size_t reported = 0;                // its items
    bool stepped = false;

    explicit verkv_cache(const verkv_options& o)
        : threads(pool_of(o.threads)),
          layer(make_layer(o, threads.get())),
          shape{o.query_heads, o.kv_heads, o.key_dim, o.value_dim, o.logit_scale},
          max_requests(o.max_requests),
          max_tokens(o.max_tokens),
          how{verkv::budget::fraction(o.kept).at_least(o.kept_at_least), {o.sink, o.local}} {
        items.reserve(max_requests);
        reports.reserve(max_requests * shape.kv_heads);
    }

    /// The positions of a call, as the library stores them.
    void take_positions(const std::int64_t* from, std::size_t count) {
        positions.clear();
        positions.reserve(count);
        for (std::size_t i = 0; i < count; ++i) {
            require(from[i] >= 0 && from[i] <= (std::numeric_limits<position_t>::max)(), "position ", i, " is ",
                    from[i], "; it must lie in [0, 2^31 - 1]");
            positions.push_back(static_cast<position_t>(from[i]));
        }
    }

    [[nodiscard]] verkv::heads_view<half> rows_of(const std::uint16_t* bits, std::size_t tokens,
                                                  std::size_t width) const {
        static_assert(sizeof(half) == sizeof(std::uint16_t) && alignof(half) == alignof(std::uint16_t));
        return {reinterpret_cast<const half*>(bits),
                tokens,
                shape.kv_heads,
                width,
                static_cast<std::ptrdiff_t>(shape.kv_heads * width),
                static_cast<std::ptrdiff_t>(width)};
    }

    /// Tokens for prefill() and append().
    template <class Add>
    void add(const std::uint16_t* keys, const std::uint16_t* values, const std::int64_t* at, std::size_t tokens,
             Add&& add_to) {
        if (tokens > 0) {
            require_pointer(keys, "keys");
            require_pointer(values, "values");
            require_pointer(at, "positions");
            require<verkv::out_of_capacity>(tokens <= max_tokens, tokens, " tokens; max_tokens is ", max_tokens);
        }
        take_positions(at, tokens);
        add_to(rows_of(keys, tokens, shape.key_dim), rows_of(values, tokens, shape.value_dim),
               std::span<const position_t>(positions));
    }

    /// compress() by attention. Only the queries that the scorer looks at are copied.
    void compress_by_attention(verkv::request_id id, const float* queries, const std::int64_t* at, std::size_t count,
                               std::size_t stride) {
        if (count > 0) {
            require_pointer(at, "query_positions");
        }
        require(stride > 0, "stride is 0");
        const verkv::largest_attention scorer{.stride = stride};
        const std::span<const position_t> text = layer->positions(id);
        const std::size_t width = shape.query_heads * shape.key_dim;
        std::vector<half> kept;
        std::vector<position_t> kept_at;
        for (std::size_t i = 0; i < count; ++i) {
            require(at[i] >= 0 && (i == 0 || at[i - 1] < at[i]), "query_positions[", i, "] is ", at[i],
                    "; they must ascend from 0");
            if (text.empty() || at[i] <= text.front() || at[i] > text.back() ||
                static_cast<std::uint64_t>(text.back() - at[i]) % stride != 0) {
                continue;
            }
            kept_at.push_back(static_cast<position_t>(at[i]));
            for (std::size_t c = 0; c < width; ++c) {
                const float x = queries[i * width + c];
                const half h = verkv::from_float<half>(x);
                require(std::isfinite(verkv::to_float(h)), "queries[", i, "] has ", x, " in head ", c / shape.key_dim,
                        "; it must be a number within half precision, 65504");
                kept.push_back(h);
            }
        }
        const bool looks_far =
            text.size() > 1 && static_cast<std::size_t>(text.back() - text.front()) >= scorer.min_distance;
        require(!looks_far || !kept_at.empty(), "none of ", count, " queries stands at position ",
                looks_far ? text.back() : 0, " or every ", stride, " before it");
        layer->compress(
            id, scorer, how,
            {verkv::heads_of(std::span<const half>(kept), kept_at.size(), shape.query_heads, shape.key_dim), kept_at});
    }

    void step(const verkv_step_item* from, std::size_t count, verkv::tolerance promise) {
        require(count <= max_requests, count, " items; max_requests is ", max_requests);
        items.clear();
        for (std::size_t i = 0; i < count; ++i) {
            require(from[i].queries != nullptr && from[i].output != nullptr, "items[", i, "] has null for its ",
                    from[i].queries == nullptr ? "queries" : "output");
            items.push_back({id_of(from[i].request),
                             {from[i].queries, static_cast<std::ptrdiff_t>(shape.key_dim), shape.query_heads,
                              shape.key_dim, nullptr},
                             {from[i].output, shape.query_heads * shape.value_dim},
                             from[i].lse ? std::span<float>(from[i].lse, shape.query_heads) : std::span<float>()});
        }
        note(layer->decode(items, promise), count);
    }

    /// Keeps what a step said about itself. Does not throw: there is room.
    void note(const verkv::step_report& report, std::size_t count) {
        reports.clear();
        for (std::size_t i = 0; i < count * shape.kv_heads; ++i) {
            const verkv::kv_head_report& h = report.per_kv_head[i];
            verkv_head_report r{};
            r.tokens = h.tokens;
            r.rows_resident = h.rows_resident;
            r.rows_fetched = h.rows_fetched;
            r.rows_copied = h.rows_copied;
            r.shortlist_keys_read = h.shortlist_keys_read;
            r.bytes_moved = h.bytes_moved;
            r.rounds = static_cast<std::uint32_t>(h.rounds);
            for (std::size_t g = 0; g < shape.group(); ++g) {
                const verkv::query_head_report& q = report.per_query_head[i * shape.group() + g];
                r.rows_planned += q.rows_planned;
                r.certificate_before = larger_or_nan(q.certificate_before, r.certificate_before);
                r.certificate_after = larger_or_nan(q.certificate_after, r.certificate_after);
                r.certificate_observed = larger_or_nan(q.certificate_observed, r.certificate_observed);
            }
            r.sketch_seconds = h.sketch_seconds;
            r.decide_seconds = h.decide_seconds;
            r.fetch_seconds = h.fetch_seconds;
            r.attend_seconds = h.attend_seconds;
            reports.push_back(r);
        }
        reported = count;
        stepped = true;
    }
};

void verkv_default_options(verkv_options* options) {
    if (options == nullptr) {
        return;
    }
    const verkv::rope_pair_options pairs{};
    const verkv::windows fixed{};
    *options = {};
    options->struct_size = sizeof(verkv_options);
    options->max_requests = 1;
    options->sketch = VERKV_SKETCH_ROPE_PAIRS;
    options->sketch_bits = pairs.bits;
    options->sketch_share = static_cast<float>(pairs.pair_fraction);
    options->rope = VERKV_ROPE_HALF;
    options->shortlist = static_cast<std::uint32_t>(verkv::exact_for_shortlist{}.size);
    options->plan = VERKV_PLAN_WATER_FILLING;
    options->joint = 1;
    options->target = VERKV_TARGET_DENOMINATOR;
    options->check_rounds = static_cast<std::uint32_t>(verkv::sample_check{}.rounds);
    options->kept = 1.0 / 16;  // as verkv::compression's, which does not tell
    options->kept_at_least = 256;
    options->sink = fixed.sink;
    options->local = fixed.local;
    options->threads = 1;
}

const char* verkv_last_error(void) {
    return last_error;
}

verkv_status verkv_create(const verkv_options* options, verkv_cache** cache) {
    if (cache != nullptr) {
        *cache = nullptr;
    }
    return guarded([&] {
        require_pointer(options, "options");
        require_pointer(cache, "cache");
        check_options(*options);
        *cache = new verkv_cache(*options);
    });
}

void verkv_destroy(verkv_cache* cache) {
    delete cache;
}

verkv_status verkv_open(verkv_cache* cache, uint64_t seed, verkv_request* request) {
    return guarded([&] {
        require_pointer(cache, "cache");
        require_pointer(request, "request");
        const verkv::request_id id = cache->layer->open(seed);
        *request = {id.slot, id.generation};
    });
}

verkv_status verkv_release(verkv_cache* cache, verkv_request request) {
    return guarded([&] {
        require_pointer(cache, "cache");
        cache->layer->release(id_of(request));
    });
}

verkv_status verkv_prefill(verkv_cache* cache, verkv_request request, const uint16_t* keys, const uint16_t* values,
                           const int64_t* positions, size_t tokens) {
    return guarded([&] {
        require_pointer(cache, "cache");
        cache->add(keys, values, positions, tokens,
                   [&](const auto& k, const auto& v, auto at) { cache->layer->prefill(id_of(request), k, v, at); });
    });
}

verkv_status verkv_append(verkv_cache* cache, verkv_request request, const uint16_t* keys, const uint16_t* values,
                          const int64_t* positions, size_t tokens) {
    return guarded([&] {
        require_pointer(cache, "cache");
        cache->add(keys, values, positions, tokens,
                   [&](const auto& k, const auto& v, auto at) { cache->layer->append(id_of(request), k, v, at); });
    });
}

verkv_status verkv_compress(verkv_cache* cache, verkv_request request, const float* queries,
                            const int64_t* query_positions, size_t count, size_t stride) {
    return guarded([&] {
        require_pointer(cache, "cache");
        if (queries != nullptr) {
            cache->compress_by_attention(id_of(request), queries, query_positions, count, stride);
            return;
        }
        require(count == 0, "queries is null for ", count, " queries");
        cache->layer->compress(id_of(request), verkv::key_norm{}, cache->how);
    });
}

verkv_status verkv_truncate(verkv_cache* cache, verkv_request request, int64_t position) {
    return guarded([&] {
        require_pointer(cache, "cache");
        forget(*cache->layer, id_of(request), position, (std::numeric_limits<std::int64_t>::max)());
    });
}

verkv_status verkv_remove(verkv_cache* cache, verkv_request request, int64_t first, int64_t last) {
    return guarded([&] {
        require_pointer(cache, "cache");
        forget(*cache->layer, id_of(request), first, last);
    });
}

verkv_status verkv_step(verkv_cache* cache, const verkv_step_item* items, size_t count, double epsilon, double delta) {
    return guarded([&] {
        require_pointer(cache, "cache");
        require(items != nullptr || count == 0, "items is null for ", count, " items");
        cache->step(items, count, {.epsilon = epsilon, .delta = delta});
    });
}

verkv_status verkv_report(const verkv_cache* cache, size_t item, uint32_t kv_head, verkv_head_report* report) {
    return guarded([&] {
        require_pointer(cache, "cache");
        require_pointer(report, "report");
        require<verkv::invalid_state>(cache->stepped, "a report before the first step");
        require(item < cache->reported && kv_head < cache->shape.kv_heads, "item ", item, " and KV head ", kv_head,
                "; the last step had ", cache->reported, " items of ", cache->shape.kv_heads, " KV heads");
        *report = cache->reports[item * cache->shape.kv_heads + kv_head];
    });
}

size_t verkv_sketch_bytes(const verkv_cache* cache, verkv_request request, uint32_t kv_head) {
    std::size_t bytes = 0;
    guarded([&] {
        require_pointer(cache, "cache");
        bytes = cache->layer->sketch_bytes(id_of(request), kv_head);
    });
    return bytes;
}

double verkv_sketch_bytes_per_token(const verkv_cache* cache) {
    return cache == nullptr ? 0 : cache->layer->sketch_bytes_per_token();
}

verkv_status verkv_tokens(const verkv_cache* cache, verkv_request request, size_t* tokens, size_t* appended) {
    return guarded([&] {
        require_pointer(cache, "cache");
        const std::size_t all = cache->layer->positions(id_of(request)).size();
        if (tokens != nullptr) {
            *tokens = all;
        }
        if (appended != nullptr) {
            *appended = cache->layer->tail(id_of(request));
        }
    });
}

verkv_status verkv_free_rows(const verkv_cache* cache, size_t* host, size_t* resident) {
    return guarded([&] {
        require_pointer(cache, "cache");
        if (host != nullptr) {
            *host = cache->layer->free_host_rows();
        }
        if (resident != nullptr) {
            *resident = cache->layer->free_resident_rows();
        }
    });
}
