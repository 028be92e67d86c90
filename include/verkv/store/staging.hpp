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
    void open(std::span<const row_id> rows, std::size_t max_tokens) {
        rows_.assign(rows.begin(), rows.end());
        token_.assign(rows.size(), none);
        used_.assign(rows.size(), 0);
        slot_.assign(max_tokens, none);
        hand_ = 0;
        step_ = 0;
    }

    [[nodiscard]] std::size_t capacity() const { return rows_.size(); }
    [[nodiscard]] std::span<const row_id> rows() const { return rows_; }
    [[nodiscard]] bool holds(token_index token) const { return slot_[token] != none; }
    [[nodiscard]] row_id row_of(token_index token) const { return rows_[slot_[token]]; }

    /// Number of tokens held.
    [[nodiscard]] std::size_t size() const {
        std::size_t n = 0;
        for (const std::uint32_t t : token_) {
            n += t != none;
        }
        return n;
    }

    /// Makes room for all of `tokens` (distinct, at most capacity()) at once: row[i] is where token i lies. Calls
    /// copy(token, row) for those that were not there; returns how many. O(|tokens| + capacity()); no allocation.
    /// Throws invalid_argument when there are more tokens than rows.
    template <class Copy>
    std::size_t stage(std::span<const token_index> tokens, std::span<row_id> row, Copy&& copy) {
        detail::check(tokens.size() <= rows_.size() && row.size() == tokens.size(), tokens.size(), " tokens for ",
                      rows_.size(), " staging rows");
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
    void erase(std::size_t first, std::size_t last, std::size_t count) {
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
    void advance() { hand_ = hand_ + 1 == rows_.size() ? 0 : hand_ + 1; }

    std::vector<row_id> rows_;
    std::vector<std::uint32_t> token_;  // of a slot
    std::vector<std::uint64_t> used_;   // step in which a slot was last needed
    std::vector<std::uint32_t> slot_;   // of a token
    std::size_t hand_ = 0;
    std::uint64_t step_ = 0;
};

}  // namespace verkv::inline v0
