// What an inference engine writes around verkv: a cache for each layer, many requests, and all that happens to them.
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <span>
#include <vector>

#include "fake_model.hpp"
#include "report_line.hpp"
#include "verkv/verkv.hpp"

namespace {

using layer_cache = verkv::layer_cache<half, verkv::rope_pair_sketch>;

constexpr verkv::tolerance promise{.epsilon = 0.1, .delta = 0.1};
constexpr std::size_t chunk = 512;      // prompt tokens that are processed at once
constexpr std::size_t tail_limit = 40;  // generated tokens, all of them resident, before a request is sampled again

struct sequence {
    fake_model model;
    std::vector<verkv::request_id> ids = {};  // in the cache of each layer
    std::size_t tokens = 0;                   // of the text, so far
    std::size_t tail = 0;                     // of them generated since the last compress
    position_t next = 0;                      // where the next token goes: not `tokens`, once the context was cut
    std::vector<half> queries = {};           // of the present step: decode() reads them where they are
    std::vector<float> output = std::vector<float>(shape.query_heads * shape.value_dim);

    [[nodiscard]] position_t moved() const { return next - static_cast<position_t>(tokens); }
};

class engine {
public:
    explicit engine(std::size_t tokens) : positions_(tokens) {
        std::iota(positions_.begin(), positions_.end(), position_t{0});
        layers_.reserve(layer_count);
        for (std::uint32_t layer = 0; layer < layer_count; ++layer) {
            layers_.emplace_back(
                verkv::cache_config{.shape = shape,
                                    .layer = layer,
                                    .max_requests = 4,
                                    .max_tokens = tokens,
                                    .host_rows = tokens * shape.kv_heads,
                                    .resident_rows = tokens / 4 * shape.kv_heads,  // an eighth, tails, and chance
                                    .staging_rows = 512},
                verkv::rope_pair_sketch({.key_dim = shape.key_dim, .pairing = verkv::rope_pairing::interleaved}),
                verkv::cpu{&pool_});
        }
    }

    void admit(sequence& s, std::uint64_t seed) try {
        for (layer_cache& layer : layers_) {
            s.ids.push_back(layer.open(seed));
        }
        while (s.tokens < s.model.prompt_tokens()) {
            const std::size_t count = std::min(chunk, s.model.prompt_tokens() - s.tokens);
            for (std::size_t l = 0; l < layer_count; ++l) {
                layers_[l].prefill(s.ids[l], s.model.keys(l, s.tokens, count), s.model.values(l, s.tokens, count),
                                   positions(s.next, count));
            }
            s.tokens += count;
            s.next += static_cast<position_t>(count);
        }
        compress(s);
    } catch (const verkv::error&) {
        release(s);  // the call that threw changed nothing, so undoing the calls before it undoes everything
        throw;
    }

    /// Samples a request anew. Its tail joins the rest, and the rows that are not drawn become free.
    void compress(sequence& s) {
        // An eighth; but of a short text that would not pay for the windows.
        const auto kept = verkv::budget::tokens(std::max<std::size_t>(s.tokens / 8, 160));
        for (std::size_t l = 0; l < layer_count; ++l) {
            layers_[l].compress(s.ids[l], verkv::make_snapkv(kept_queries), {kept, {.sink = 32, .local = 64}},
                                s.model.last_queries(l, s.tokens),
                                positions(s.next - static_cast<position_t>(kept_queries), kept_queries));
        }
        s.tail = 0;
    }

    /// One token for every request of a batch, layer by layer as a model goes.
    void step(std::span<sequence* const> batch, report_line& sums) try {
        for (std::size_t l = 0; l < layer_count; ++l) {
            items_.clear();
            for (sequence* const s : batch) {
                const std::vector<half> key = s->model.key(l, s->tokens, s->moved());
                layers_[l].append(s->ids[l], verkv::heads_of(std::span(key), 1, shape.kv_heads, shape.key_dim),
                                  s->model.values(l, s->tokens, 1), positions(s->next, 1));
                s->queries = s->model.query(l, s->tokens, s->moved());
                items_.push_back({s->ids[l], verkv::contiguous_rows(std::span(s->queries), shape.key_dim), s->output});
            }
            sums.add(layers_[l].decode(std::span<const verkv::decode_item<half>>(items_), promise));
            // ... s->output of each request goes on to the rest of the layer.
        }
        for (sequence* const s : batch) {
            ++s->tokens;
            ++s->tail;
            ++s->next;
        }
    } catch (const verkv::out_of_capacity&) {
        for (sequence* const s : batch) {
            take_back(*s, 0);  // where a layer holds the token already; elsewhere this changes nothing
        }
        throw;
    }

    /// Takes the last tokens back, as after rejected speculation.
    void take_back(sequence& s, std::size_t count) {
        s.tokens -= count;
        s.tail -= std::min(s.tail, count);
        s.next -= static_cast<position_t>(count);
        for (std::size_t l = 0; l < layer_count; ++l) {
            layers_[l].truncate(s.ids[l], s.next);
        }
    }

    /// Drops the tokens at positions first ... last-1 and closes the gap.
    void cut(sequence& s, position_t first, position_t last) {
        for (std::size_t l = 0; l < layer_count; ++l) {
            layers_[l].remove(s.ids[l], first, last);
            layers_[l].shift(s.ids[l], last, s.next, first - last, rotate);  // keys are rotated by their position
        }
        s.next -= last - first;
    }

    void release(sequence& s) {
        for (std::size_t l = 0; l < s.ids.size(); ++l) {
            layers_[l].release(s.ids[l]);
        }
        s = {std::move(s.model)};
    }

    void print_free(const char* what) const {
        fmt::print("{:<46} {:5} host rows and {:4} resident rows free in a layer\n", what, layers_[0].free_host_rows(),
                   layers_[0].free_resident_rows());
    }

private:
    [[nodiscard]] std::span<const position_t> positions(position_t first, std::size_t count) const {
        return std::span(positions_).subspan(static_cast<std::size_t>(first), count);
    }

    verkv::thread_pool pool_;  // an engine that has threads implements verkv::executor over them
    std::vector<layer_cache> layers_;
    std::vector<verkv::decode_item<half>> items_;
    std::vector<position_t> positions_;
};

}  // namespace

int main() try {
    engine e(6144);
    sequence a{fake_model(3000, 10)}, b{fake_model(1800, 20)}, c{fake_model(700, 30)}, d{fake_model(1500, 40)};
    e.print_free("empty");
    e.admit(a, 1);
    e.admit(b, 2);
    e.admit(c, 3);
    e.print_free("A, B, C prefilled and sampled");
    try {
        e.admit(d, 4);
    } catch (const verkv::out_of_capacity& problem) {
        fmt::print("D has to wait: {}\n", problem.what());
    }
    e.print_free("as if D had never been");

    report_line::print_title();
    report_line sums;
    const auto steps = [&](int from, int to, std::vector<sequence*> batch, const char* note) {
        for (int i = from; i <= to; ++i) {
            e.step(batch, sums);
            for (sequence* const s : batch) {
                if (s->tail >= tail_limit) {
                    e.compress(*s);
                }
            }
        }
        sums.print(to, note);
    };
    steps(1, 20, {&a, &b, &c}, "A, B, C");
    steps(21, 40, {&a, &b, &c}, "A, B, C; then their tails are long: sampled again");
    e.release(b);
    e.admit(d, 4);
    steps(41, 60, {&a, &c, &d}, "B is done, and D has its rows");
    steps(61, 64, {&a}, "A alone, four tokens of a draft");
    e.take_back(a, 3);
    steps(62, 65, {&a}, "three of them were rejected; four more");
    e.cut(a, 64, 1088);
    steps(66, 70, {&a, &c, &d}, "1024 tokens of A were dropped, from behind its sink");
    fmt::print("\n");
    e.print_free("A, C, D still run");
    e.release(a);
    e.release(c);
    e.release(d);
    e.print_free("all released");
} catch (const std::exception& problem) {
    fmt::print(stderr, "engine_loop: {}\n", problem.what());
    return 1;
}
