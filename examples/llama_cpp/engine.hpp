// llama.cpp as the programs of this folder use it: a model, a context that calls verified_attention, and batches of one
// micro-batch.
#pragma once

#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "interrupt.hpp"
#include "verified_attention.hpp"

namespace example {

struct engine_options {
    std::string model;
    std::uint32_t context = 0;  ///< tokens of a sequence; 0: the model's
    std::uint32_t batch = 512;  ///< tokens of a micro-batch
    std::uint32_t sequences = 1;
    int threads = 0;  ///< 0: the library's default
    ggml_type keys = GGML_TYPE_F16, values = GGML_TYPE_F16;
    bool repack = true;  ///< weights in the engine's faster layout, whose results depend on the batch
};

class engine {
public:
    /// Loads the model. `attention` answers for the context from then on, and outlives it.
    engine(const engine_options& o, verified_attention& attention) : options_(o), attention_(attention) {
        if (!std::filesystem::is_regular_file(o.model)) {
            throw std::runtime_error("no model file " + o.model);
        }
        if (o.sequences > o.batch) {
            throw std::runtime_error(std::to_string(o.sequences) + " sequences do not fit a micro-batch of " +
                                     std::to_string(o.batch) + " tokens: raise --batch");
        }
        llama_log_set(
            [](ggml_log_level level, const char* text, void*) {
                if (level == GGML_LOG_LEVEL_ERROR) {
                    std::fputs(text, stderr);
                }
            },
            nullptr);
        llama_backend_init();
        llama_model_params model = llama_model_default_params();
        model.n_gpu_layers = 0;
        model.use_extra_bufts = o.repack;
        model_.reset(llama_model_load_from_file(o.model.c_str(), model));
        if (!model_) {
            throw std::runtime_error(o.model + " is no model that this llama.cpp can load");
        }
        if (llama_model_has_encoder(model_.get()) || !llama_model_has_decoder(model_.get())) {
            throw std::runtime_error(o.model + " has an encoder; these programs take decoders alone");
        }
        vocabulary_ = llama_model_get_vocab(model_.get());
        if (llama_vocab_type(vocabulary_) == LLAMA_VOCAB_TYPE_NONE) {
            throw std::runtime_error(o.model + " has no vocabulary to read a text with");
        }
        llama_context_params c = llama_context_default_params();
        options_.context = o.context > 0 ? o.context : trained_context();
        // Positions may be rows of a table, behind whose end the engine aborts.
        if (!has_rope() && options_.context > trained_context()) {
            throw std::runtime_error("a context of " + std::to_string(options_.context) +
                                     " tokens: the model, which has no RoPE, knows positions of " +
                                     std::to_string(trained_context()) + " only");
        }
        const std::uint64_t cells = std::uint64_t{options_.context} * o.sequences;
        if (cells > std::uint64_t{(std::numeric_limits<std::int32_t>::max)()} - 256) {
            throw std::runtime_error(std::to_string(o.sequences) + " sequences of " + std::to_string(options_.context) +
                                     " tokens are more than llama.cpp can count");
        }
        c.n_ctx = static_cast<std::uint32_t>(cells);
        c.n_batch = c.n_ubatch = o.batch;
        c.n_seq_max = o.sequences;
        c.kv_unified = true;
        if (o.threads > 0) {
            c.n_threads = c.n_threads_batch = o.threads;
        }
        c.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;  // its nodes are what is answered
        c.type_k = o.keys;
        c.type_v = o.values;
        c.cb_eval = &verified_attention::callback;
        c.cb_eval_user_data = &attention;
        context_.reset(llama_init_from_model(model_.get(), c));
        if (!context_) {
            throw std::runtime_error("llama.cpp makes no context of " + std::to_string(c.n_ctx) +
                                     " tokens with keys of " + ggml_type_name(o.keys) + " and values of " +
                                     ggml_type_name(o.values));
        }
        if (memory() == nullptr) {
            throw std::runtime_error(o.model + " keeps no cache of its tokens; these programs take decoders alone");
        }
        batch_ = llama_batch_init(static_cast<std::int32_t>(o.batch), 0, 1);
    }
    ~engine() { llama_batch_free(batch_); }
    engine(const engine&) = delete;
    engine& operator=(const engine&) = delete;

    [[nodiscard]] std::uint32_t trained_context() const {
        return static_cast<std::uint32_t>(llama_model_n_ctx_train(model_.get()));
    }
    /// Tokens of a sequence's context.
    [[nodiscard]] std::uint32_t context_tokens() const { return options_.context; }
    [[nodiscard]] std::size_t vocabulary_size() const {
        return static_cast<std::size_t>(llama_vocab_n_tokens(vocabulary_));
    }
    /// Whether RoPE pairs channel i with i + d/2 (else with its neighbour).
    [[nodiscard]] bool rope_by_halves() const { return llama_model_rope_type(model_.get()) != LLAMA_ROPE_TYPE_NORM; }
    [[nodiscard]] bool ends(llama_token t) const { return llama_vocab_is_eog(vocabulary_, t); }
    [[nodiscard]] bool has_rope() const { return llama_model_rope_type(model_.get()) != LLAMA_ROPE_TYPE_NONE; }
    [[nodiscard]] llama_memory_t memory() const { return llama_get_memory(context_.get()); }

    [[nodiscard]] std::vector<llama_token> tokens_of(const std::string& text, bool special) const {
        constexpr auto most = static_cast<std::size_t>((std::numeric_limits<std::int32_t>::max)());
        std::vector<llama_token> tokens((std::min)(text.size() + 8, most));
        const auto tokenize = [&] {
            if (text.size() > most) {
                return std::numeric_limits<std::int32_t>::min();
            }
            try {
                return llama_tokenize(vocabulary_, text.data(), static_cast<std::int32_t>(text.size()), tokens.data(),
                                      static_cast<std::int32_t>(tokens.size()), true, special);
            } catch (const std::exception& e) {
                throw std::runtime_error(std::string("the model's vocabulary cannot spell the text; is it UTF-8? (") +
                                         e.what() + ")");
            }
        };
        std::int32_t n = tokenize();
        if (n < 0 && n != std::numeric_limits<std::int32_t>::min()) {
            tokens.resize(static_cast<std::size_t>(-n));  // some vocabularies spell a character in several tokens
            n = tokenize();
        }
        if (n < 0) {
            throw std::runtime_error("the text has " + std::to_string(text.size()) +
                                     " bytes, more tokens than llama.cpp can count");
        }
        tokens.resize(static_cast<std::size_t>(n));
        return tokens;
    }

    [[nodiscard]] std::string text_of(llama_token t) const {
        std::string piece(32, '\0');
        int n = llama_token_to_piece(vocabulary_, t, piece.data(), static_cast<std::int32_t>(piece.size()), 0, false);
        if (n < 0) {
            piece.resize(static_cast<std::size_t>(-n));
            n = llama_token_to_piece(vocabulary_, t, piece.data(), static_cast<std::int32_t>(piece.size()), 0, false);
        }
        piece.resize(static_cast<std::size_t>((std::max)(n, 0)));
        return piece;
    }

    struct item {
        int sequence;
        std::int64_t position;
        llama_token token;
        bool logits;  ///< whether its logits are wanted
    };

    /// Computes a micro-batch.
    void decode(verified_attention::mode mode, std::span<const item> items) {
        if (items.size() > options_.batch) {
            throw std::runtime_error(std::to_string(items.size()) + " tokens in a micro-batch of " +
                                     std::to_string(options_.batch));
        }
        places_.clear();
        batch_.n_tokens = 0;
        for (const item& i : items) {
            const auto at = static_cast<std::size_t>(batch_.n_tokens++);
            batch_.token[at] = i.token;
            batch_.pos[at] = static_cast<llama_pos>(i.position);
            batch_.n_seq_id[at] = 1;
            batch_.seq_id[at][0] = i.sequence;
            batch_.logits[at] = i.logits ? 1 : 0;
            places_.push_back({i.sequence, i.position});
        }
        attention_.begin(mode, places_);
        const int code = llama_decode(context_.get(), batch_);
        attention_.check();
        if (code == 1) {
            throw std::runtime_error("the engine's cache of " + std::to_string(context_tokens()) + " tokens is full");
        }
        if (code != 0) {
            throw std::runtime_error("llama_decode() failed with " + std::to_string(code));
        }
    }

    /// Computes a micro-batch densely, a lone token together with another one that nobody sees: the engine takes other
    /// kernels for one token than for several, which round differently. Needs a second sequence.
    void decode_alike(std::span<const item> items) {
        if (items.size() > 1) {
            decode(verified_attention::mode::off, items);
            return;
        }
        const item pair[] = {items[0], {items[0].sequence + 1, 0, items[0].token, false}};
        decode(verified_attention::mode::off, pair);
        llama_memory_seq_rm(memory(), items[0].sequence + 1, -1, -1);
    }

    /// Computes tokens [first, last) of a text, at their positions, in micro-batches; logits of the last one. Throws
    /// interruption between two of them once the program was interrupted.
    void read(verified_attention::mode mode, int sequence, std::span<const llama_token> text, std::size_t first,
              std::size_t last) {
        const std::size_t most = mode == verified_attention::mode::verified ? 1 : options_.batch;
        for (std::size_t from = first; from < last; from += most) {
            if (interrupted) {
                throw interruption("interrupted after " + std::to_string(from) + " of " + std::to_string(text.size()) +
                                   " tokens of the text");
            }
            const std::size_t to = (std::min)(from + most, last);
            items_.clear();
            for (std::size_t i = from; i < to; ++i) {
                items_.push_back({sequence, static_cast<std::int64_t>(i), text[i], i + 1 == last});
            }
            decode(mode, items_);
        }
    }

    /// Logits of the i-th item of the last batch; -1: of the last one. None is NaN, nor all -infinity.
    [[nodiscard]] std::span<const float> logits(int i = -1) const {
        const float* p = llama_get_logits_ith(context_.get(), i);
        if (p == nullptr) {
            throw std::runtime_error("no logits were computed");
        }
        const std::span<const float> all(p, vocabulary_size());
        const bool numbers = std::none_of(all.begin(), all.end(), [](float x) { return std::isnan(x); });
        if (!numbers || !std::isfinite(*std::max_element(all.begin(), all.end()))) {
            throw std::runtime_error("the model's logits are not finite numbers");
        }
        return all;
    }

    /// Forgets a sequence's tokens from a position on, in the engine and in verkv.
    void truncate(int sequence, std::size_t position) {
        if (!llama_memory_seq_rm(memory(), sequence, static_cast<llama_pos>(position), -1)) {
            throw std::runtime_error("this model's memory cannot go back to position " + std::to_string(position));
        }
        attention_.truncate(sequence, static_cast<std::int64_t>(position));
    }

    /// Makes `to` a sequence with the tokens of `from`.
    void copy(int from, int to) {
        llama_memory_seq_cp(memory(), from, to, -1, -1);
        attention_.copy_queries(from, to);
    }

    /// Throws where shift() cannot work once the context is full.
    void check_shift(std::size_t keep) const {
        if (!llama_memory_can_shift(memory())) {
            throw std::runtime_error("this model's memory cannot shift its context");
        }
        if (keep + 2 > context_tokens()) {
            throw std::runtime_error("a sink of " + std::to_string(keep) +
                                     " tokens leaves nothing to drop of a context of " +
                                     std::to_string(context_tokens()));
        }
    }

    /// Drops half of the tokens behind the first `keep` and moves those after them there, in sequences of one length,
    /// keep + 2 at least; returns the new length. All sequences that share cells at once: the engine moves a cell for
    /// everyone who has it, so it may be moved once only.
    std::size_t shift(std::span<const int> sequences, std::size_t keep, std::size_t length) {
        const std::size_t dropped = (length - keep) / 2;
        const auto first = static_cast<llama_pos>(keep);
        const auto last = static_cast<llama_pos>(keep + dropped);
        for (const int s : sequences) {
            if (!llama_memory_seq_rm(memory(), s, first, last)) {
                throw std::runtime_error("this model's memory cannot drop positions " + std::to_string(first) + " to " +
                                         std::to_string(last - 1));
            }
        }
        for (const int s : sequences) {
            // A shared cell that another sequence moved is below `last` by now.
            llama_memory_seq_add(memory(), s, last, -1, -static_cast<llama_pos>(dropped));
            attention_.shift(s, first, last);
        }
        return length - dropped;
    }

private:
    struct free_model {
        void operator()(llama_model* m) const { llama_model_free(m); }
    };
    struct free_context {
        void operator()(llama_context* c) const { llama_free(c); }
    };

    engine_options options_;
    verified_attention& attention_;
    std::unique_ptr<llama_model, free_model> model_;
    std::unique_ptr<llama_context, free_context> context_;
    const llama_vocab* vocabulary_ = nullptr;
    llama_batch batch_{};
    std::vector<batch_token> places_;
    std::vector<item> items_;
};

/// The most likely token.
inline llama_token most_likely(std::span<const float> logits) {
    return static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

inline std::string read_text(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    if (!in) {
        throw std::runtime_error("cannot read " + file);
    }
    std::ostringstream text;
    text << in.rdbuf();
    if (!in || text.str().empty()) {
        throw std::runtime_error("no text in " + file);
    }
    return text.str();
}

}  // namespace example
