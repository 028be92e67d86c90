// Lossless decoding: a compressed cache drafts, a dense pass checks, and what comes out is what dense decoding gives.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/host_device.hpp"

namespace verkv::inline v0 {

/// Decodes one token at a time through a compressed cache.
///
///     Token next = d.next(tokens)   // appends the tokens, mostly one, and returns the one it expects behind them
///     d.truncate(length)            // forgets all tokens from that position on; length is at most what it holds
template <class D, class Token>
concept drafter = requires(D& d, std::span<const Token> tokens, std::size_t length) {
    { d.next(tokens) } -> std::convertible_to<Token>;
    d.truncate(length);
};

/// Decodes many tokens in one pass over the whole cache.
///
///     v.verify(tokens, next)   // appends the tokens; next[i] becomes what dense decoding puts behind tokens[i]
///     v.truncate(length)       // forgets all tokens from that position on
template <class V, class Token>
concept verifier = requires(V& v, std::span<const Token> tokens, std::span<Token> next, std::size_t length) {
    v.verify(tokens, next);
    v.truncate(length);
};

/// What lossless decoding did.
struct lossless_report {
    std::size_t tokens = 0;    ///< that came out
    std::size_t drafted = 0;   ///< by the drafter
    std::size_t accepted = 0;  ///< of them: the verifier agreed, and they came out
    std::size_t passes = 0;    ///< of the verifier: dense decoding takes one for each token

    /// Tokens a dense pass yields: accepted ones and its own.
    [[nodiscard]] double tokens_per_pass() const {
        return passes == 0 ? 0 : static_cast<double>(tokens) / static_cast<double>(passes);
    }
};

/// Drafts up to `chunk` tokens, verifies them in one pass, takes the longest prefix that agrees and the verifier's own
/// token behind it, and rolls both back to what was taken (VeriCache). The tokens are those of the verifier decoding
/// alone, whatever the drafter says, as far as verify() gives the same for one token as for many.
template <class Token>
class lossless_decoder {
public:
    /// chunk: tokens drafted between two passes, below 2^32 - 1: memory for as many is taken here. Throws
    /// invalid_argument for another number.
    explicit lossless_decoder(std::size_t chunk) : chunk_(chunk) {
        detail::check(chunk > 0 && chunk < 0xffffffffu, "a chunk of ", chunk,
                      " drafted tokens; it must be 1 to 2^32 - 2");
        tokens_.reserve(chunk + 1);
        next_.resize(chunk + 1);
    }

    /// Decodes `count` tokens behind a context of `length` tokens, of which `last`, at position length - 1, is the only
    /// one that neither side holds yet. Calls emit(token), which returns whether to go on, for each token, in order;
    /// none after it returned false. Returns the length of the context then; its last token is again held by neither.
    /// An exception of a part leaves the two with different lengths: truncate() both to length - 1 to start again.
    /// Throws invalid_argument when the context is empty.
    template <class Draft, class Verify, class Emit>
    requires drafter<Draft, Token> && verifier<Verify, Token> && std::predicate<Emit&, const Token&> std::size_t
    generate(Draft& draft, Verify& verify, Token last, std::size_t length, std::size_t count, Emit&& emit) {
        detail::check(length > 0, "lossless decoding of an empty context");
        missing_.assign(1, last);
        bool more = true;
        for (std::size_t made = 0; made < count && more;) {
            // The pass gives one token more than agrees: the last of `count` needs no draft.
            const std::size_t drafts = smaller(chunk_, count - made - 1);
            tokens_.assign(1, missing_.back());
            const std::size_t first = length - 1;  // position of tokens_[0]
            for (std::size_t i = 0; i < drafts; ++i) {
                tokens_.push_back(draft.next(std::span<const Token>(missing_)));
                missing_.assign(1, tokens_.back());
            }
            const std::span<Token> next = std::span<Token>(next_).first(tokens_.size());
            verify.verify(std::span<const Token>(tokens_), next);
            std::size_t agreed = 0;
            while (agreed < drafts && tokens_[agreed + 1] == next[agreed]) {
                ++agreed;
            }
            std::size_t taken = 0;
            while (more && taken <= agreed) {
                more = emit(next[taken++]);
            }
            ++report_.passes;
            report_.drafted += drafts;
            report_.accepted += smaller(agreed, taken);
            report_.tokens += taken;
            made += taken;
            length += taken;
            verify.truncate(length - 1);
            if (drafts > 0) {
                // It holds the tokens that it went on from: all drafts but the last.
                const std::size_t right = smaller(drafts, taken);
                if (right < drafts) {
                    draft.truncate(first + right);
                }
                missing_.assign(tokens_.begin() + static_cast<std::ptrdiff_t>(right),
                                tokens_.begin() + static_cast<std::ptrdiff_t>(taken));
            }
            missing_.push_back(next[taken - 1]);
        }
        if (missing_.size() > 1) {
            draft.next(std::span<const Token>(missing_).first(missing_.size() - 1));
        }
        return length;
    }

    /// Sums over all calls.
    [[nodiscard]] const lossless_report& report() const { return report_; }

private:
    std::size_t chunk_;
    std::vector<Token> tokens_, next_;
    std::vector<Token> missing_;  // what the drafter does not hold yet, the last token included
    lossless_report report_;
};

}  // namespace verkv::inline v0
