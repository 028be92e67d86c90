// Lossless decoding: verkv's cache drafts, the engine's dense pass checks a chunk at a time, and the text is that of
// dense greedy decoding: as far as the engine gives the same logits for a token whatever else is in its batch.
// llama.cpp does on the CPU where weights are not repacked and no batch has a single token (decode_alike()).
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "engine.hpp"
#include "settings.hpp"
#include "verkv/cache/lossless.hpp"

namespace {

using example::engine;
using example::verified_attention;

struct settings {
    example::engine_options engine;
    example::verification_choice verification;
    example::prompt_choice prompt;
    std::size_t predict = 512;
    std::size_t chunk = 8;
    bool compare = false;
};

/// Both sides of lossless decoding on one engine. Drafts are computed with verkv's attention and put their rows into
/// the engine's cache, as any token does; the verifier takes them out again before its dense pass writes its own.
class shared_engine {
public:
    /// `held` tokens are in the engine's cache, all of them computed densely.
    shared_engine(engine& e, std::size_t held) : engine_(e), held_(held), dense_(held), drafted_(held) {}

    llama_token draft(std::span<const llama_token> tokens) {
        if (example::interrupted) {
            throw example::interruption("interrupted");
        }
        // What a dense pass left is there already.
        for (std::size_t i = held_ - drafted_; i < tokens.size(); ++i) {
            const engine::item item{0, static_cast<std::int64_t>(held_), tokens[i], true};
            engine_.decode(verified_attention::mode::verified, std::span(&item, 1));
            best_ = example::most_likely(engine_.logits());
            ++held_;
        }
        drafted_ += tokens.size();
        return best_;
    }
    void truncate_draft(std::size_t length) { drafted_ = (std::min)(drafted_, length); }

    void verify(std::span<const llama_token> tokens, std::span<llama_token> next) {
        truncate_engine(dense_);
        items_.clear();
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            items_.push_back({0, static_cast<std::int64_t>(held_ + i), tokens[i], true});
        }
        engine_.decode_alike(items_);
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            next[i] = example::most_likely(engine_.logits(static_cast<int>(i)));
        }
        held_ += tokens.size();
    }
    void truncate_dense(std::size_t length) {
        truncate_engine(length);
        dense_ = length;
    }

private:
    void truncate_engine(std::size_t length) {
        if (length < held_) {
            engine_.truncate(0, length);
            held_ = length;
        }
    }

    engine& engine_;
    std::size_t held_;     // tokens in the engine's cache
    std::size_t dense_;    // of them computed densely
    std::size_t drafted_;  // that the decoder counts as the drafter's
    llama_token best_ = 0;
    std::vector<engine::item> items_;
};

struct draft_side {
    shared_engine& both;
    llama_token next(std::span<const llama_token> tokens) { return both.draft(tokens); }
    void truncate(std::size_t length) { both.truncate_draft(length); }
};

struct dense_side {
    shared_engine& both;
    void verify(std::span<const llama_token> tokens, std::span<llama_token> next) { both.verify(tokens, next); }
    void truncate(std::size_t length) { both.truncate_dense(length); }
};

std::vector<llama_token> dense_tokens(engine& e, std::span<const llama_token> text, std::size_t count,
                                      std::vector<float>& gaps) {
    std::vector<llama_token> out;
    llama_token last = text.back();
    for (std::size_t i = 0; i < count; ++i) {
        const engine::item item{0, static_cast<std::int64_t>(text.size() - 1 + i), last, true};
        e.decode_alike(std::span(&item, 1));
        const auto logits = e.logits(0);
        last = example::most_likely(logits);
        float second = -std::numeric_limits<float>::infinity();
        for (std::size_t t = 0; t < logits.size(); ++t) {
            second = static_cast<llama_token>(t) != last ? (std::max)(second, logits[t]) : second;
        }
        gaps.push_back(logits[static_cast<std::size_t>(last)] - second);
        out.push_back(last);
        if (e.ends(last)) {
            break;
        }
    }
    return out;
}

int run(const settings& s) {
    example::require_possible(s.verification.made(true));
    verified_attention attention({}, 1, 1);
    example::engine_options options = s.engine;
    options.sequences = 2;
    options.repack = false;
    engine e(options, attention);
    attention = verified_attention(s.verification.made(e.rope_by_halves()), e.context_tokens(), 1);
    const std::vector<llama_token> text = example::prompt_of(e, s.prompt);
    // The last token is never computed.
    if (text.size() + s.predict - 1 > e.context_tokens()) {
        throw std::runtime_error(fmt::format("{} tokens of prompt and {} to generate are more than the context of {}",
                                             text.size(), s.predict, e.context_tokens()));
    }
    if (s.chunk + 1 > s.engine.batch) {
        throw std::runtime_error(fmt::format("a pass checks {} tokens, a chunk and one more: raise --batch from {}",
                                             s.chunk + 1, s.engine.batch));
    }
    const std::size_t held = text.size() - 1;
    attention.expect_prompt(held);
    e.read(verified_attention::mode::dense, 0, text, 0, held);

    shared_engine both(e, held);
    draft_side draft{both};
    dense_side dense_pass{both};
    verkv::lossless_decoder<llama_token> decoder(s.chunk);
    std::vector<llama_token> made;
    const auto began = std::chrono::steady_clock::now();
    try {
        decoder.generate(draft, dense_pass, text.back(), text.size(), s.predict, [&](llama_token t) {
            made.push_back(t);
            const std::string piece = e.text_of(t);
            std::fwrite(piece.data(), 1, piece.size(), stdout);
            example::flush_output();
            return !e.ends(t) && !example::interrupted;
        });
    } catch (const example::interruption&) {
        // What came out so far stands.
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    const verkv::lossless_report& r = decoder.report();
    fmt::print(
        "\n\n{} tokens in {:.1f} s. {} drafted, {} accepted ({:.1f} %); {} dense passes of up to {} tokens, {:.2f} "
        "tokens a pass: "
        "{} passes saved.\n",
        r.tokens, seconds, r.drafted, r.accepted,
        r.drafted > 0 ? 100.0 * static_cast<double>(r.accepted) / static_cast<double>(r.drafted) : 0.0, r.passes,
        s.chunk + 1, r.tokens_per_pass(), r.tokens - r.passes);
    fmt::print("{}", attention.dense_layers());
    if (example::interrupted) {
        fmt::print("Interrupted.\n");
        return 0;
    }
    if (!s.compare) {
        return 0;
    }
    e.truncate(0, held);
    std::vector<float> gaps;
    const std::vector<llama_token> dense = dense_tokens(e, text, made.size(), gaps);
    for (std::size_t i = 0; i < made.size(); ++i) {
        if (i >= dense.size() || made[i] != dense[i]) {
            fmt::print("Dense greedy decoding differs from token {} on; its two best logits are {:.2g} apart there.\n",
                       i, i < gaps.size() ? gaps[i] : 0.0f);
            return 1;
        }
    }
    fmt::print("Dense greedy decoding gives the same {} tokens.\n", made.size());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    settings s;
    CLI::App app("Dense greedy decoding, drafted by verkv's cache and checked in chunks.");
    example::add_engine_options(app, s.engine);
    example::add_verification_options(app, s.verification, true);
    example::add_prompt_options(app, s.prompt);
    example::add_count(app, "--predict", s.predict, 1, std::size_t{1} << 30, "tokens to generate");
    example::add_count(app, "--chunk", s.chunk, 1, 4096, "tokens drafted between two dense passes");
    app.add_flag("--compare", s.compare, "decode densely as well, and compare token for token");
    CLI11_PARSE(app, argc, argv);
    example::stop_at_signals();
    return example::exit_code_of("verkv_lossless", [&] { return run(s); });
}
