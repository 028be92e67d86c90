// The method on twenty words, a free function at a time. No cache, no engine: spans go in, numbers come out.
#include <fmt/format.h>

#include <Eigen/Core>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "common/table.hpp"
#include "verkv/verkv.hpp"

namespace {

// An attention head that asks "who?", "what?" or "where?". A word's key says how well it answers each; the fourth
// channel is what first words have for every query. To keep the story small, its value is its key's first three.
struct word {
    const char* text;
    float who, what, where, any;
};
constexpr word story[] = {
    {"Once", 0, 0, 0, 5},      {"upon", 0, 0, 0.5f, 2},      {"a", 0, 0, 0, 1},           {"time", 0.5f, 0.5f, 1, 1},
    {"the", 0, 0, 0, 0},       {"old", 2, 0.5f, 0.5f, 0},    {"gardener", 6, 0.5f, 1, 0}, {"hid", 1, 2, 2, 0},
    {"a", 0, 1, 0, 0},         {"silver", 0, 4.5f, 0.5f, 0}, {"key", 0.5f, 6, 1, 0},      {"under", 0, 0.5f, 4, 0},
    {"the", 0, 0.5f, 1, 0},    {"oak", 0.5f, 1, 6, 0},       {"tree", 1, 1, 5, 0},        {"and", 0, 0, 0, 0},
    {"nobody", 3, 0, 0.5f, 0}, {"ever", 0, 0, 1.5f, 0},      {"found", 1, 1.5f, 2.5f, 0}, {"it", 1, 3, 0.5f, 0.5f}};
constexpr std::size_t n = std::size(story), key_dim = 4, value_dim = 3;

void step(int number, const char* title, const char* formula) {
    fmt::print("\n{}. {}\n   {}\n\n", number, title, formula);
}

std::string text(double x) {
    return example::number_text(x, 3);
}

}  // namespace

int main() {
    using namespace verkv;
    const cpu exec{};  // where to compute: here, on this thread

    // The boundary: memory is the caller's. verkv looks at it through `rows` and std::span, Eigen through a Map.
    std::vector<float> memory;  // [word, channel]
    for (const word& w : story) {
        memory.insert(memory.end(), {w.who, w.what, w.where, w.any});
    }
    const rows<float> keys{memory.data(), key_dim, n, key_dim, nullptr};
    const rows<float> values{memory.data(), key_dim, n, value_dim, nullptr};
    const Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, key_dim, Eigen::RowMajor>> K(memory.data(), n, key_dim);
    std::vector<position_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    const geometry shape{.query_heads = 1, .kv_heads = 1, .key_dim = key_dim, .value_dim = value_dim};

    step(1, "Importance, before the next query is known",
         "tau_i = the largest softmax(<q, k_i> / sqrt(d)) that a query of the prompt gave word i");
    const std::vector<float> asked = {1, 0, 0, 0.8f, /* who? */ 0, 1, 0, 0.8f /* what? */};
    const std::vector<position_t> asked_at = {18, 19};
    const prompt<float> seen{
        shape,   std::span(&keys, 1), std::span(&values, 1), positions, heads_of(std::span(asked), 2, 1, key_dim),
        asked_at};
    std::vector<float> tau(n);
    largest_attention{.min_distance = 1, .stride = 1, .floor = 1e-3f}.score(exec, seen, 0, tau);
    fmt::print("   The prompt asked \"who?\" and \"what?\": gardener has {}, key {}, but oak only {}.\n", text(tau[6]),
               text(tau[10]), text(tau[13]));

    step(2, "Inclusion probabilities that spend the budget",
         "r_i = min(1, c tau_i) with sum r = 8 rows; r = 1 for the first two words (sink) and the last two (local)");
    std::vector<float> r(n);
    const auto spent = inclusion_probabilities(exec, tau, budget::tokens(8), {.sink = 2, .local = 2}, r);
    fmt::print("   c = {}, sum r = {}, and {} words are kept for certain.\n", text(spent.scale),
               text(spent.expected_rows), spent.certain);

    step(3, "The Poisson draw: who stays on the device", "word i stays when its uniform U_i < r_i");
    uniform_stream stream{.seed = 76};
    std::vector<token_index> stayed;
    poisson_draw(exec, r, positions, stream, stayed);

    // Now a query that the prompt never asked: "where?". Its weights are exact here; a cache has a sketch's estimates.
    const std::vector<float> query = {0, 0.1f, 1.5f, 0.8f};
    const rows<float> queries = contiguous_rows(std::span(query), key_dim);
    std::vector<float> w(n);
    score_rows(exec, queries, shape.logit_scale(), keys, matrix_view<float>{w.data(), 1, n, n});
    const float shift = weigh(exec, w).shift;  // w_i = e^(s_i - shift)
    const double D = std::accumulate(w.begin(), w.end(), 0.0);
    example::table words({{"word", example::alignment::left}, {"tau"}, {"r"}, {"U"}, {"stays"}, {"w, for \"where?\""}});
    std::vector<const char*> stays(n, "");
    for (const token_index i : stayed) {
        stays[i] = "yes";
    }
    for (std::size_t i = 0; i < n; ++i) {
        words.add({story[i].text, text(tau[i]), text(r[i]), text(uniform(stream, positions[i])), stays[i], text(w[i])});
    }
    words.print();

    step(4, "Estimates of the softmax denominator D = sum w, from the words that stayed",
         "D^ = sum of lambda_i w_i / r_i over them;  MSE = (sum w (1-lambda))^2 + sum (lambda w)^2 (1-r)/r");
    std::vector<float> one(n, 1.0f), binary(n), bounded(n);
    shrink(exec, binary_shrinkage{}, w, r, binary);    // lambda is r or 1: the paper's rule
    shrink(exec, bounded_shrinkage{}, w, r, bounded);  // the best lambda between r and 1
    example::table estimates({{"estimator", example::alignment::left},
                              {"D^, this draw"},
                              {"sqrt(MSE)"},
                              {"20000 draws:\nmean D^"},
                              {"\nrms error"}});
    const auto try_out = [&](const char* name, std::span<const float> lambda) {
        double sum = 0, squares = 0;
        std::vector<token_index> sample;
        for (stream.draw = 1; stream.draw <= 20000; ++stream.draw) {
            poisson_draw(exec, r, positions, stream, sample);
            const double estimate = estimate_sum(exec, w, r, lambda, sample);
            sum += estimate;
            squares += (estimate - D) * (estimate - D);
        }
        stream.draw = 0;
        estimates.add({name, text(estimate_sum(exec, w, r, lambda, stayed)),
                       text(std::sqrt(mean_squared_error(exec, w, r, lambda))), text(sum / 20000),
                       text(std::sqrt(squares / 20000))});
    };
    try_out("Horvitz-Thompson (lambda = 1)", one);
    try_out("binary shrinkage", binary);
    try_out("bounded shrinkage", bounded);
    estimates.print();
    fmt::print(
        "\n   D is {}. lambda = 1 is right on average, yet no single draw is; shrinkage pays a bias to err less.\n",
        text(D));

    step(5, "The certificate: how far off, before looking at the draw (Bernstein)",
         "|D^ - D| / D <= (beta + b l/3 + sqrt((b l/3)^2 + 2 V l)) / D with probability 1 - delta; l = ln(2/delta)");
    const tolerance promise{.epsilon = 0.5, .delta = 0.1};
    const bernstein_moments m = moments(exec, w, r, binary);
    fmt::print(
        "   binary: bias beta = {}, variance V = {}, largest term b = {} give {}\n   lambda = 1: {}, bounded: {}\n   "
        "Promised is {} with delta = {}: some words have to be fetched.\n",
        text(m.bias), text(m.variance), text(m.largest), text(certificate(exec, w, r, binary, promise)),
        text(certificate(exec, w, r, one, promise)), text(certificate(exec, w, r, bounded, promise)), promise.epsilon,
        promise.delta);

    step(6, "The greedy plan: fetch the fewest words that let the rest be certified",
         "by falling gain e(L) - e(L without i), until e(what is left) < epsilon; it never asks who stayed");
    std::vector<float> odds(n);
    inclusion_odds(exec, r, odds);
    greedy<binary_shrinkage>::workspace workspace;
    plan decision;
    greedy<binary_shrinkage>{}.plan(exec, denominator{}.masses(w, odds, D), promise, workspace, decision);
    std::vector<float> raised = r, lambda = one;
    for (const plan_entry& e : decision.entries) {  // every other word has (r, 1)
        raised[e.token] = e.probability;
        lambda[e.token] = e.shrinkage;
        fmt::print("   {:<6} r' = {}, lambda = {}: {}\n", story[e.token].text, text(e.probability), text(e.shrinkage),
                   e.probability < 1      ? "counts once if it is here, not 1/r times"
                   : *stays[e.token] != 0 ? "is here already; counts once from now on"
                                          : "fetched from host memory");
    }
    fmt::print("   certificate: {} before, {} after\n", text(decision.certificate_before),
               text(decision.certificate_after));

    step(7, "Attention over the rows that are here now",
         "o = sum e^(s_i + ln(lambda_i / r'_i)) v_i / D^: an additive log-weight in any softmax kernel");
    std::vector<token_index> here;  // the same uniforms, the plan's probabilities
    poisson_draw(exec, raised, positions, stream, here);
    std::vector<float> log_weight, output(value_dim);
    for (const token_index i : here) {
        log_weight.push_back(std::log(lambda[i] / raised[i]));
    }
    const rows<float> keys_here{keys.data, keys.stride, here.size(), key_dim, here.data()};
    const rows<float> values_here{values.data, values.stride, here.size(), value_dim, here.data()};
    float lse = 0;
    attend_workspace memory_of_attend;
    attend(exec, queries, shape.logit_scale(), keys_here, values_here, {log_weight.data(), 1, here.size(), n},
           memory_of_attend, {output.data(), 1, value_dim, value_dim}, {&lse, 1});
    const double verified = std::exp(static_cast<double>(lse) - static_cast<double>(shift));

    const Eigen::Map<const Eigen::Vector4f> q(query.data());
    const Eigen::VectorXf dense = (shape.logit_scale() * (K * q).array() - shift).exp();
    const Eigen::Vector3f dense_output = K.leftCols<value_dim>().transpose() * dense / dense.sum();
    example::table answers({{"", example::alignment::left}, {"rows"}, {"D"}, {"who"}, {"what"}, {"where"}});
    const auto add = [&](const char* name, std::size_t count, double d, const float* o) {
        answers.add({name, std::to_string(count), text(d), text(o[0]), text(o[1]), text(o[2])});
    };
    add("verified", here.size(), verified, output.data());
    add("dense, by Eigen", n, dense.sum(), dense_output.data());
    answers.print();
    fmt::print("\n   The denominator is off by {}; {} were promised. Under the oak tree it is.\n",
               example::percent_text(std::abs(verified / D - 1), 1), example::percent_text(promise.epsilon, 0));
}
