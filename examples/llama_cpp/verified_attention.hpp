// Attention of an unmodified llama.cpp, answered by verkv: a callback of its graph that reads what an attention node
// has, keeps a verkv cache for each layer, and writes verkv's output over the engine's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "verkv_c.h"

namespace example {

/// What verkv does with a layer. Everything that depends on the model's shapes is filled in by the layers.
struct verification {
    verkv_options options{};
    double epsilon = 0.05;
    double delta = 0.1;
    std::size_t query_stride = 16;  ///< one in so many of the text's queries ranks the tokens
    std::uint64_t seed = 1;
    std::size_t compress_every = 1024;  ///< new tokens after which the sample is drawn anew; 0: never

    verification() { verkv_default_options(&options); }
};

/// Throws what every layer would refuse, whatever its heads and widths: worth knowing before a long prompt is read.
inline void require_possible(const verification& v) {
    verkv_options o = v.options;
    o.query_heads = o.kv_heads = 1;
    o.key_dim = o.value_dim = 64;
    o.max_requests = 1;
    o.max_tokens = o.host_rows = o.resident_rows = 64;
    const std::vector<float> query(64);
    std::vector<float> output(64);
    verkv_cache* cache = nullptr;
    verkv_status status = verkv_create(&o, &cache);
    verkv_step_item item{{}, query.data(), output.data(), nullptr};
    if (status == VERKV_OK) {
        status = verkv_open(cache, v.seed, &item.request);
    }
    if (status == VERKV_OK) {
        status = verkv_step(cache, &item, 1, v.epsilon, v.delta);
    }
    verkv_destroy(cache);
    if (status != VERKV_OK) {
        throw std::runtime_error(verkv_last_error());
    }
}

/// What is larger, and NaN where any is: an error that is no number is not to be overlooked.
inline double larger_or_nan(double a, double b) {
    return std::isnan(a) || a > b ? a : b;
}

/// Sums over steps, query heads and KV heads of a layer.
struct layer_totals {
    std::size_t steps = 0;
    double resident = 0;     ///< share of the rows, summed over KV heads and steps
    double fetched = 0;      ///< the same
    double keys_scored = 0;  ///< the same, of the shortlist
    double planned = 0;      ///< the same, of the rows that a query head asked for, summed over query heads
    double sketch = 0;       ///< bytes of the sketch for those of the rows, summed over KV heads and steps
    double rounds = 0;
    double certificate = 0;  ///< largest of a KV head's query heads, summed
    std::size_t kv_heads = 0;
    double error = 0;  ///< ||o - engine's||/||engine's||, summed over query heads
    double largest_error = 0;
    std::size_t query_heads = 0;
    double seconds = 0;

    layer_totals& operator+=(const layer_totals& o) {
        steps += o.steps;
        resident += o.resident;
        fetched += o.fetched;
        keys_scored += o.keys_scored;
        planned += o.planned;
        sketch += o.sketch;
        rounds += o.rounds;
        certificate += o.certificate;
        kv_heads += o.kv_heads;
        error += o.error;
        largest_error = larger_or_nan(o.largest_error, largest_error);
        query_heads += o.query_heads;
        seconds += o.seconds;
        return *this;
    }
};

/// A token of the batch that the engine is about to compute.
struct batch_token {
    int sequence = 0;
    std::int64_t position = 0;
};

/// The callback's state. One sequence of calls for each llama_decode(): begin(), llama_decode(), check().
///
/// In `dense` mode it only collects queries of the prompt. In `verified` mode it answers for the engine: the first such
/// step of a layer takes all rows that the token sees out of the engine's cache and compresses them; later ones append.
/// A layer whose tokens do not see all earlier ones (a sliding window, chunks), or whose attention verkv does not
/// compute, stays dense and says why. After shift(), or when rows that verkv knows are no longer visible (a sequence
/// removed behind its back), it starts anew from those that are.
class verified_attention {
public:
    enum class mode { off, dense, verified };

    explicit verified_attention(const verification& settings, std::size_t max_tokens, std::size_t max_sequences)
        : settings_(settings), max_tokens_(max_tokens), max_sequences_(max_sequences) {}

    /// Other settings from here on; the queries of the prompt stay.
    void restart(const verification& settings) {
        settings_ = settings;
        for (layer& l : layers_) {
            l.cache.reset();
            l.sequences.clear();
            l.totals = {};
        }
    }

    /// Counts from here on.
    void forget_totals() {
        for (layer& l : layers_) {
            l.totals = {};
        }
    }

    /// Declares the tokens of the next llama_decode(), which must be one micro-batch.
    void begin(mode m, std::span<const batch_token> batch) {
        mode_ = m;
        batch_.assign(batch.begin(), batch.end());
        next_layer_ = 0;
    }

    /// Throws what went wrong in the callback, which C code called.
    void check() {
        if (!failure_.empty()) {
            const std::string text = std::exchange(failure_, {});
            throw std::runtime_error(text);
        }
    }

    /// How many tokens come before the first that verkv answers for. Their queries rank them, counted back from the
    /// last.
    void expect_prompt(std::size_t tokens) { prompt_tokens_ = tokens; }

    /// Another sequence goes on from the tokens of this one, as the engine has copied it: their queries are its own.
    void copy_queries(int from, int to) {
        for (layer& l : layers_) {
            l.query_positions[to] = l.query_positions[from];
            l.queries[to] = l.queries[from];
        }
    }

    /// Forgets a sequence's tokens from a position on, as the engine has.
    void truncate(int name, std::int64_t position) {
        for (layer& l : layers_) {
            drop_queries(l, name, position);
            const auto found = l.sequences.find(name);
            if (found == l.sequences.end() || found->second.cells.size() <= static_cast<std::size_t>(position)) {
                continue;
            }
            sequence& s = found->second;
            require(verkv_truncate(l.cache.get(), s.request, position));
            s.appended -= (std::min)(s.appended, s.cells.size() - static_cast<std::size_t>(position));
            forget_cells(s, static_cast<std::size_t>(position), s.cells.size());
        }
    }

    /// Forgets a sequence's tokens at positions first ... last-1, as the engine has, which moved those behind to their
    /// places and rotated their keys: all rows are read again. From here on this sequence's tokens are ranked without
    /// its queries, which stood elsewhere.
    void shift(int name, std::int64_t first, std::int64_t last) {
        moved_.insert(name);
        for (layer& l : layers_) {
            drop_queries(l, name, 0);
            const auto found = l.sequences.find(name);
            if (found != l.sequences.end()) {
                forget_cells(found->second, static_cast<std::size_t>(first), static_cast<std::size_t>(last));
                start_anew(l, found->second, name);
            }
        }
    }

    /// llama_context_params::cb_eval, with this object as user data.
    static bool callback(ggml_tensor* t, bool ask, void* self) {
        auto& me = *static_cast<verified_attention*>(self);
        if (ask) {
            return me.mode_ != mode::off && attention_node::is(t);
        }
        if (attention_node::is(t) && me.failure_.empty()) {
            try {
                me.visit(attention_node(t));
            } catch (const std::exception& e) {
                me.failure_ = e.what();
                return false;
            }
        }
        return true;
    }

    /// Attention layers of the model: numbers below count these.
    [[nodiscard]] std::size_t layers() const { return layers_.size(); }
    [[nodiscard]] const layer_totals& totals(std::size_t l) const { return layers_[l].totals; }
    /// Why a layer stays dense; empty for one that does not.
    [[nodiscard]] const std::string& dense_because(std::size_t l) const { return layers_[l].dense; }
    /// What layers stay dense, a line for each reason; empty where none does.
    [[nodiscard]] std::string dense_layers() const {
        if (layers_.empty()) {
            return "The engine computed no flash attention: nothing for verkv to answer.\n";
        }
        std::map<std::string, std::string> numbers;  // of a reason
        for (std::size_t l = 0; l < layers_.size(); ++l) {
            if (!layers_[l].dense.empty()) {
                std::string& all = numbers[layers_[l].dense];
                all += (all.empty() ? "" : ", ") + std::to_string(l);
            }
        }
        std::string text;
        for (const auto& [reason, all] : numbers) {
            text += "Dense: " + reason + ". Layers " + all + ".\n";
        }
        return text;
    }
    /// Heads and their widths, of the layers that do not stay dense: each shape once.
    [[nodiscard]] std::string shapes() const {
        std::set<std::string> all;
        for (const layer& l : layers_) {
            if (l.dense.empty()) {
                const verkv_options& o = l.options;
                all.insert(std::to_string(o.query_heads) + " query and " + std::to_string(o.kv_heads) +
                           " KV heads of " + std::to_string(o.key_dim) +
                           (o.key_dim == o.value_dim ? "" : "/" + std::to_string(o.value_dim)) + " channels");
            }
        }
        std::string text;
        for (const std::string& shape : all) {
            text += (text.empty() ? "" : "; ") + shape;
        }
        return text;
    }
    /// How often a layer read all rows of a sequence again.
    [[nodiscard]] std::size_t resyncs() const { return resyncs_; }

private:
    struct destroy {
        void operator()(verkv_cache* c) const { verkv_destroy(c); }
    };

    struct sequence {
        verkv_request request{};
        std::vector<std::uint32_t> cells;  // of the engine, in the order of tokens
        std::vector<unsigned char> known;  // of a cell: whether it is one of them
        std::size_t appended = 0;          // since the last compress()
        bool filled = false;               // whether verkv has the rows of the cells
    };

    struct layer {
        const ggml_tensor* store = nullptr;
        std::string dense;
        verkv_options options{};
        float scale = 0;
        std::unique_ptr<verkv_cache, destroy> cache;
        std::map<int, sequence> sequences;
        std::map<int, std::vector<std::int64_t>> query_positions;  // ascending
        std::map<int, std::vector<float>> queries;
        layer_totals totals;
    };

    static void require(verkv_status status) {
        if (status != VERKV_OK) {
            throw std::runtime_error(verkv_last_error());
        }
    }

    layer& layer_of(const attention_node& node) {
        const std::size_t index = next_layer_++;
        if (index == layers_.size()) {
            layer l;
            l.store = node.key_store();
            l.dense = node.unsupported();
            l.scale = node.scale();
            layers_.push_back(std::move(l));
        }
        layer& l = layers_[index];
        if (l.store != node.key_store()) {
            throw std::runtime_error(
                "attention node " + std::to_string(index) +
                " reads another layer's cache than before: is the batch more than one micro-batch?");
        }
        l.options.query_heads = static_cast<std::uint32_t>(node.query_heads());
        l.options.kv_heads = static_cast<std::uint32_t>(node.kv_heads());
        l.options.key_dim = static_cast<std::uint32_t>(node.key_dim());
        l.options.value_dim = static_cast<std::uint32_t>(node.value_dim());
        return l;
    }

    void visit(attention_node node) {
        const std::size_t index = next_layer_;
        layer& l = layer_of(node);
        if (!l.dense.empty()) {
            return;
        }
        if (node.tokens() != batch_.size()) {
            throw std::runtime_error("the engine computes " + std::to_string(node.tokens()) + " tokens of a batch of " +
                                     std::to_string(batch_.size()) + " at once: raise n_ubatch");
        }
        for (std::size_t t = 0; t < batch_.size() && l.dense.empty(); ++t) {
            collect(l, node, t);
            if (mode_ == mode::verified) {
                answer(l, index, node, t);
            }
        }
    }

    /// Keeps the queries that rank tokens: every query_stride-th, so that the last before verkv answers is one of them.
    void collect(layer& l, attention_node& node, std::size_t t) {
        const auto [name, position] = batch_[t];
        const auto back = static_cast<std::int64_t>(prompt_tokens_) - 1 - position;
        if (moved_.contains(name) || back % static_cast<std::int64_t>(settings_.query_stride) != 0) {
            return;
        }
        const std::size_t width = node.query_heads() * node.key_dim();
        drop_queries(l, name, position);
        auto& queries = l.queries[name];
        l.query_positions[name].push_back(position);
        queries.resize(queries.size() + width);
        node.read_queries(t, queries.data() + queries.size() - width);
    }

    /// Forgets the queries kept of a sequence from a position on.
    static void drop_queries(layer& l, int name, std::int64_t position) {
        auto& positions = l.query_positions[name];
        while (!positions.empty() && positions.back() >= position) {
            positions.pop_back();
        }
        l.queries[name].resize(positions.size() * l.options.query_heads * l.options.key_dim);
    }

    /// Forgets the cells of a sequence's tokens number first ... last-1.
    static void forget_cells(sequence& s, std::size_t first, std::size_t last) {
        for (std::size_t i = first; i < last; ++i) {
            s.known[s.cells[i]] = 0;
        }
        s.cells.erase(s.cells.begin() + static_cast<std::ptrdiff_t>(first),
                      s.cells.begin() + static_cast<std::ptrdiff_t>(last));
    }

    void answer(layer& l, std::size_t index, attention_node& node, std::size_t t) {
        const int name = batch_[t].sequence;
        node.visible(t, seen_);
        const auto tokens = static_cast<std::size_t>(std::count(seen_.begin(), seen_.end(), 1));
        const auto before = static_cast<std::size_t>(batch_[t].position) + 1;
        if (tokens != before) {
            l.dense = "a token sees " + std::to_string(tokens) + " of " + std::to_string(before) + " tokens (" +
                      (tokens < before ? "sliding window or chunks" : "later ones too") + ")";
            l.cache.reset();
            l.sequences.clear();
            l.query_positions.clear();
            l.queries.clear();
            return;
        }
        if (!l.cache) {
            build(l, index);
        }
        sequence& s = sequence_of(l, name, tokens);
        take_new_rows(l, s, node, t, name);
        queries_.resize(node.query_heads() * node.key_dim());
        node.read_queries(t, queries_.data());
        own_.resize(node.query_heads() * node.value_dim());
        theirs_.resize(own_.size());
        const verkv_step_item item{s.request, queries_.data(), own_.data(), nullptr};
        require(verkv_step(l.cache.get(), &item, 1, settings_.epsilon, settings_.delta));
        node.read_output(t, theirs_.data());
        note(l, node, tokens);
        node.write_output(t, own_.data());
    }

    void build(layer& l, std::size_t index) {
        verkv_options o = settings_.options;
        o.query_heads = l.options.query_heads;
        o.kv_heads = l.options.kv_heads;
        o.key_dim = l.options.key_dim;
        o.value_dim = l.options.value_dim;
        o.logit_scale = l.scale;
        o.layer = static_cast<std::uint32_t>(index);
        o.max_requests = max_sequences_;
        o.max_tokens = max_tokens_;
        o.host_rows = max_sequences_ * max_tokens_ * o.kv_heads;
        o.resident_rows = o.host_rows;
        verkv_cache* made = nullptr;
        require(verkv_create(&o, &made));
        l.cache.reset(made);
        l.options = o;
    }

    /// The sequence, to be filled anew where rows that verkv knows are no longer what the engine has.
    sequence& sequence_of(layer& l, int name, std::size_t tokens) {
        const auto [found, opened] = l.sequences.try_emplace(name);
        sequence& s = found->second;
        if (opened) {
            require(verkv_open(l.cache.get(), settings_.seed + static_cast<std::uint64_t>(name), &s.request));
            return s;
        }
        const auto gone = [&](std::uint32_t c) { return c >= seen_.size() || seen_[c] == 0; };
        if (s.cells.size() > tokens || std::any_of(s.cells.begin(), s.cells.end(), gone)) {
            for (std::size_t i = s.cells.size(); i-- > 0;) {
                if (gone(s.cells[i])) {
                    forget_cells(s, i, i + 1);
                }
            }
            moved_.insert(name);
            drop_queries(l, name, 0);
            start_anew(l, s, name);
        }
        return s;
    }

    /// Takes a sequence's rows from verkv; the order of its cells stays.
    void start_anew(layer& l, sequence& s, int name) {
        ++resyncs_;
        require(verkv_release(l.cache.get(), s.request));
        require(verkv_open(l.cache.get(), settings_.seed + static_cast<std::uint64_t>(name), &s.request));
        s.appended = 0;
        s.filled = false;
    }

    /// Rows that the token sees and verkv does not have. The last one is the token's own; where verkv has none, those
    /// before it are the prompt.
    void take_new_rows(layer& l, sequence& s, attention_node& node, std::size_t t, int name) {
        s.known.resize(seen_.size(), 0);
        std::size_t from = s.filled ? s.cells.size() : 0;
        for (std::uint32_t c = 0; c < seen_.size(); ++c) {
            if (seen_[c] != 0 && s.known[c] == 0) {
                s.known[c] = 1;
                s.cells.push_back(c);
            }
        }
        const std::size_t prompt = s.filled ? 0 : s.cells.size() - 1;
        s.filled = true;
        if (prompt > 0) {
            read_rows(l, s, node, t, 0, prompt);
            require(verkv_prefill(l.cache.get(), s.request, keys_.data(), values_.data(), positions_.data(), prompt));
            compress(l, s, name);
            from = prompt;
        }
        read_rows(l, s, node, t, from, s.cells.size());
        require(verkv_append(l.cache.get(), s.request, keys_.data(), values_.data(), positions_.data(),
                             s.cells.size() - from));
        s.appended += s.cells.size() - from;
        // Queries were kept at every query_stride-th position: the last token has to stand at one of them.
        const auto back = static_cast<std::int64_t>(s.cells.size()) - static_cast<std::int64_t>(prompt_tokens_);
        const bool in_step = moved_.contains(name) || back % static_cast<std::int64_t>(settings_.query_stride) == 0;
        if (settings_.compress_every > 0 && s.appended >= settings_.compress_every && in_step) {
            compress(l, s, name);
        }
    }

    void compress(layer& l, sequence& s, int name) {
        const auto& positions = l.query_positions[name];
        const auto& queries = l.queries[name];
        require(verkv_compress(l.cache.get(), s.request, queries.empty() ? nullptr : queries.data(), positions.data(),
                               positions.size(), settings_.query_stride));
        s.appended = 0;
    }

    void read_rows(const layer& l, const sequence& s, attention_node& node, std::size_t t, std::size_t first,
                   std::size_t last) {
        const std::size_t key = l.options.kv_heads * l.options.key_dim;
        const std::size_t value = l.options.kv_heads * l.options.value_dim;
        keys_.resize((last - first) * key);
        values_.resize((last - first) * value);
        positions_.resize(last - first);
        for (std::size_t i = first; i < last; ++i) {
            node.read_cell(t, s.cells[i], keys_.data() + (i - first) * key, values_.data() + (i - first) * value);
            positions_[i - first] = static_cast<std::int64_t>(i);
        }
    }

    void note(layer& l, const attention_node& node, std::size_t tokens) {
        layer_totals& sum = l.totals;
        ++sum.steps;
        const auto all = static_cast<double>(tokens);
        for (std::uint32_t h = 0; h < l.options.kv_heads; ++h) {
            verkv_head_report r;
            require(verkv_report(l.cache.get(), 0, h, &r));
            sum.resident += static_cast<double>(r.rows_resident) / all;
            sum.fetched += static_cast<double>(r.rows_fetched) / all;
            sum.keys_scored += static_cast<double>(r.shortlist_keys_read) / all;
            sum.planned += static_cast<double>(r.rows_planned) / all;
            sum.sketch += verkv_sketch_bytes_per_token(l.cache.get()) /
                          static_cast<double>(sizeof(std::uint16_t) * (l.options.key_dim + l.options.value_dim));
            sum.rounds += r.rounds;
            sum.certificate += r.certificate_observed > 0 ? r.certificate_observed : r.certificate_after;
            sum.seconds += r.sketch_seconds + r.decide_seconds + r.fetch_seconds + r.attend_seconds;
            ++sum.kv_heads;
        }
        const std::size_t width = node.value_dim();
        for (std::size_t h = 0; h < node.query_heads(); ++h) {
            double square = 0, norm = 0;
            for (std::size_t c = h * width; c < (h + 1) * width; ++c) {
                const double d = static_cast<double>(own_[c]) - static_cast<double>(theirs_[c]);
                square += d * d;
                norm += static_cast<double>(theirs_[c]) * static_cast<double>(theirs_[c]);
            }
            const double error = square == 0 ? 0 : std::sqrt(square / norm);
            sum.error += error;
            sum.largest_error = larger_or_nan(error, sum.largest_error);
            ++sum.query_heads;
        }
    }

    verification settings_;
    std::size_t max_tokens_, max_sequences_;
    std::size_t prompt_tokens_ = 0;
    mode mode_ = mode::off;
    std::vector<batch_token> batch_;
    std::size_t next_layer_ = 0;
    std::vector<layer> layers_;
    std::set<int> moved_;  // sequences whose positions have changed since their queries were kept
    std::string failure_;
    std::size_t resyncs_ = 0;
    // Of the token at hand.
    std::vector<unsigned char> seen_;
    std::vector<std::uint16_t> keys_, values_;
    std::vector<std::int64_t> positions_;
    std::vector<float> queries_, own_, theirs_;
};

}  // namespace example
