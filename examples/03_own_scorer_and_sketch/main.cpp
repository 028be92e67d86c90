// Swaps the parts of mylab.hpp into a cache, and replays a real trace with them and with verkv's own.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include "common/table.hpp"
#include "common/trace.hpp"
#include "mylab.hpp"
#include "verkv/verkv.hpp"

namespace {

using example::percent_text;
using half_trace = example::trace<verkv::half>;

constexpr verkv::tolerance promise{.epsilon = 0.05, .delta = 0.1};
constexpr std::size_t steps = 25;

/// Tokens first ... last-1 of a trace's keys or values.
verkv::heads_view<verkv::half> part(verkv::heads_view<verkv::half> all, std::size_t first, std::size_t last) {
    all.data = all.row(first, 0);
    all.tokens = last - first;
    return all;
}

/// ln of every denominator, exactly: [step, query head].
std::vector<double> dense_lse(const half_trace& t) {
    using namespace verkv;
    const std::size_t group = t.shape.group();
    std::vector<double> all;
    std::vector<float> queries, output(group * t.shape.value_dim), lse(group);
    attend_workspace workspace;
    for (const std::size_t step : t.spread_steps(steps)) {
        const auto n = static_cast<std::size_t>(t.decode_position(step)) + 1;
        for (std::size_t h = 0; h < t.shape.kv_heads; ++h) {
            const half* const q = t.queries().row(t.decode_row(step), h * group);
            queries.resize(group * t.shape.key_dim);
            std::transform(q, q + queries.size(), queries.begin(), [](half x) { return to_float(x); });
            dense_attention(
                cpu{}, contiguous_rows(std::span<const float>(queries), t.shape.key_dim), t.shape.logit_scale(),
                t.keys().head(h).slice(0, n), t.values().head(h).slice(0, n), workspace,
                {output.data(), group, t.shape.value_dim, static_cast<std::ptrdiff_t>(t.shape.value_dim)}, lse);
            all.insert(all.end(), lse.begin(), lse.end());
        }
    }
    return all;
}

struct outcome {
    double sketch_share = 0;  ///< its bytes, of those of the KV cache
    double read = 0;          ///< rows, of the context, for a KV head
    double certificate = 0;
    double error = 0;  ///< true relative error of a denominator
    double fails = 0;  ///< share of decisions that are off by more than epsilon
};

/// The parts meet here, and only here.
template <class Scorer, class Sketch, class Planner>
outcome replay(const half_trace& t, const std::vector<double>& exact, const Scorer& scorer, const Sketch& sketch,
               const Planner& planner) {
    using namespace verkv;
    const std::size_t all_rows = t.shape.kv_heads * t.tokens;
    layer_cache<half, Sketch, Planner> cache({.shape = t.shape,
                                              .layer = t.layer,
                                              .max_tokens = t.tokens,
                                              .host_rows = all_rows,
                                              .resident_rows = all_rows / 4,
                                              .staging_rows = 1024},
                                             sketch, cpu{}, planner);
    std::vector<position_t> positions(t.tokens);
    std::iota(positions.begin(), positions.end(), position_t{0});
    const auto at = [&](std::size_t first, std::size_t last) {
        return std::span(positions).subspan(first, last - first);
    };

    std::size_t have = t.prefill_tokens;
    const request_id id = cache.open(/*seed=*/1);
    cache.prefill(id, part(t.keys(), 0, have), part(t.values(), 0, have), at(0, have));
    const auto seen = example::prompt_of(t, t.prompt_query_rows(16));
    cache.compress(id, scorer, {.kept = budget::fraction(1.0 / 16)}, seen.view().queries, seen.query_positions);

    outcome o;
    std::vector<float> output(t.shape.query_heads * t.shape.value_dim);
    std::size_t decisions = 0;
    for (const std::size_t step : t.spread_steps(steps)) {
        const auto n = static_cast<std::size_t>(t.decode_position(step)) + 1;
        cache.append(id, part(t.keys(), have, n), part(t.values(), have, n), at(have, n));
        have = n;
        const rows<half> queries{t.queries().row(t.decode_row(step), 0), t.queries().head_stride, t.shape.query_heads,
                                 t.shape.key_dim, nullptr};
        const decode_item<half> item{id, queries, output};
        const step_report& report = cache.decode(std::span(&item, 1), promise);
        for (const kv_head_report& head : report.per_kv_head) {
            o.read += static_cast<double>(head.rows_fetched) / static_cast<double>(n);
        }
        for (const query_head_report& head : report.per_query_head) {
            const double error = std::abs(std::expm1(head.denominator_lse - exact[decisions++]));
            o.error += error;
            o.fails += !(error <= promise.epsilon);
            o.certificate += head.certificate_after;
        }
    }
    const auto count = static_cast<double>(decisions);
    o.read /= count / static_cast<double>(t.shape.group());
    for (double* x : {&o.error, &o.fails, &o.certificate}) {
        *x /= count;
    }
    const std::size_t row_bytes = (t.shape.key_dim + t.shape.value_dim) * sizeof(half);
    o.sketch_share =
        static_cast<double>(cache.sketch_of(id, 0).bytes()) / static_cast<double>(t.prefill_tokens * row_bytes);
    return o;
}

}  // namespace

int main() {
    try {
        const auto t = example::load_trace_as<verkv::half>(VERKV_EXAMPLE_DATA_DIR "/smollm2-8k-layer15");
        const std::vector<double> exact = dense_lse(t);
        example::table table({{"scorer", example::alignment::left},
                              {"sketch", example::alignment::left},
                              {"planner", example::alignment::left},
                              {"sketch\nbytes"},
                              {"rows read,\nKV head"},
                              {"mean\ncertificate"},
                              {"mean true\nerror of D"},
                              {"error above\nepsilon"}});
        const auto run = [&](const char* scorer_name, const char* sketch_name, const char* planner_name,
                             const auto& scorer, const auto& sketch, const auto& planner) {
            const outcome o = replay(t, exact, scorer, sketch, planner);
            table.add({scorer_name, sketch_name, planner_name, percent_text(o.sketch_share, 1), percent_text(o.read, 2),
                       example::number_text(o.certificate, 3), percent_text(o.error, 2), percent_text(o.fails, 1)});
        };
        const verkv::largest_attention attention;
        const mylab::value_norm norm;
        const verkv::exact_sketch<verkv::half> perfect;
        const verkv::rope_pair_sketch pairs({.key_dim = t.shape.key_dim, .pairing = verkv::rope_pairing::interleaved});
        const mylab::sign_bits signs(t.shape.key_dim);
        const verkv::greedy<> greedy;
        const mylab::fetch_heaviest heaviest{.count = 256};
        run("largest attention", "exact", "greedy", attention, perfect, greedy);
        run("mylab::value_norm", "exact", "greedy", norm, perfect, greedy);
        table.add_rule();
        run("largest attention", "RoPE pairs", "greedy", attention, pairs, greedy);
        run("largest attention", "mylab::sign_bits", "greedy", attention, signs, greedy);
        run("mylab::value_norm", "RoPE pairs", "greedy", norm, pairs, greedy);
        run("mylab::value_norm", "mylab::sign_bits", "greedy", norm, signs, greedy);
        table.add_rule();
        run("largest attention", "mylab::sign_bits", "mylab::fetch_heaviest", attention, signs, heaviest);
        run("mylab::value_norm", "mylab::sign_bits", "mylab::fetch_heaviest", norm, signs, heaviest);
        fmt::print("{}: {} of its decode steps, 1/16 of the rows resident, epsilon = {}, delta = {}\n\n", t.name, steps,
                   promise.epsilon, promise.delta);
        table.print();
        fmt::print(
            "\nThe scorer decides how much has to be read. The sketch decides whether the certificate is true: it "
            "takes the\n"
            "sketch's weights for exact, so only with an exact one do errors above epsilon have to stay under delta.\n"
            "A planner that always reads the same number of rows promises nothing; its certificate tells what they "
            "bought.\n");
    } catch (const std::exception& e) {
        fmt::print(stderr, "own_scorer_and_sketch: {}\n", e.what());
        return 1;
    }
}
