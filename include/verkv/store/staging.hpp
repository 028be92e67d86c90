// Fetched rows of one KV head, kept so that its query heads and later steps read each from host memory once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "verkv/core/error.hpp"
#include "verkv/core/views.hpp"

namespace verkv::inline v0 {

/// Which tokens of a KV head are staged, and where. Slots are reused in turn, oldest first, but never one that the
/// present step needs. Contents depend on the requests made to this object alone, not on other heads or threads.
class staging_map {
public:
    static constexpr std::uint32_t none = 0xffffffffu;

    /// rows: the staging rows it may fill; max_tokens: the most tokens it will ever see.
    /// Throws invalid_argument for more of either than 32 bits number.
    void open(std::span<const row_id> rows, std::size_t max_tokens) {
        detail::check(rows.size() < none && max_tokens <= none, "staging of ", max_tokens, " tokens in ", rows.size(),
                      " rows; 32 bits number both");
        rows_.assign(rows.begin(), rows.end());
        token_.assign(rows.size(), none);
        used_.assign(rows.size(), 0);
        slot_.assign(max_tokens, none);
        hand_ = 0;
        step_ = 0;
    }

    [[nodiscard]] std::size_t capacity() const { return rows_.size(); }
    [[nodiscard]] std::span<const row_id> rows() const { return rows_; }

    /// Whether a token is staged. Throws invalid_argument for one that is not below max_tokens.
    [[nodiscard]] bool holds(token_index token) const {
        check_token(token);
        return slot_[token] != none;
    }

    /// Row of a staged token. Throws invalid_argument for one that is not staged.
    [[nodiscard]] row_id row_of(token_index token) const {
        detail::check(holds(token), "token ", token, " is not staged");
        return rows_[slot_[token]];
    }

    /// Number of tokens held.
    [[nodiscard]] std::size_t size() const {
        std::size_t n = 0;
        for (const std::uint32_t t : token_) {
            n += t != none;
        }
        return n;
    }

    /// Makes room for all of `tokens` (at most capacity()) at once: row[i] is where tokens[i] lies; one that is listed
    /// twice lies in one row. Calls copy(token, row), which must not throw, for those that were not there; returns how
    /// many. O(|tokens| + capacity()); no allocation.
    /// Throws invalid_argument when there are more tokens than rows, or rows to write; for a token not below
    /// max_tokens.
    template <class Copy>
    std::size_t stage(std::span<const token_index> tokens, std::span<row_id> row, Copy&& copy) {
        detail::check(tokens.size() <= rows_.size() && row.size() == tokens.size(), tokens.size(), " tokens for ",
                      rows_.size(), " staging rows and a list of ", row.size());
        for (const token_index t : tokens) {
            check_token(t);
        }
        ++step_;
        for (const token_index t : tokens) {
            if (holds(t)) {
                used_[slot_[t]] = step_;
            }
        }
        std::size_t copied = 0;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            const token_index t = tokens[i];
            if (!holds(t)) {
                while (used_[hand_] == step_) {
                    advance();
                }
                if (token_[hand_] != none) {
                    slot_[token_[hand_]] = none;
                }
                token_[hand_] = t;
                slot_[t] = static_cast<std::uint32_t>(hand_);
                used_[hand_] = step_;
                copy(t, rows_[hand_]);
                advance();
                ++copied;
            }
            row[i] = row_of(t);
        }
        return copied;
    }

    /// Forgets everything staged.
    void clear() {
        for (std::uint32_t& t : token_) {
            if (t != none) {
                slot_[t] = none;
                t = none;
            }
        }
        hand_ = 0;
    }

    /// Forgets tokens first ... last-1 and renumbers those behind them; count is the number of tokens before.
    /// O(count - first + capacity()).
    /// Throws invalid_argument unless first <= last <= count <= max_tokens and every staged token is below count.
    void erase(std::size_t first, std::size_t last, std::size_t count) {
        detail::check(first <= last && last <= count && count <= slot_.size(), "erase tokens ", first, " to ", last,
                      " of ", count, ", of at most ", slot_.size());
        for (const std::uint32_t t : token_) {
            detail::check(t == none || t < count, "token ", t, " is staged, of ", count);
        }
        for (std::uint32_t& t : token_) {
            if (t == none) {
                continue;
            }
            if (t >= first && t < last) {
                t = none;
            } else if (t >= last) {
                t -= static_cast<std::uint32_t>(last - first);
            }
        }
        for (std::size_t i = first; i < count; ++i) {
            slot_[i] = none;
        }
        for (std::size_t s = 0; s < token_.size(); ++s) {
            if (token_[s] != none) {
                slot_[token_[s]] = static_cast<std::uint32_t>(s);
            }
        }
    }

private:
    void check_token(token_index token) const {
        detail::check(token < slot_.size(), "token ", token, " of at most ", slot_.size(), " is asked of the staging");
    }

    void advance() { hand_ = hand_ + 1 == rows_.size() ? 0 : hand_ + 1; }

    std::vector<row_id> rows_;
    std::vector<std::uint32_t> token_;  // of a slot
    std::vector<std::uint64_t> used_;   // step in which a slot was last needed
    std::vector<std::uint32_t> slot_;   // of a token
    std::size_t hand_ = 0;
    std::uint64_t step_ = 0;
};

}  // namespace verkv::inline v0
