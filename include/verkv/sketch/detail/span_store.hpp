// Summaries of closed spans: where they lie, how they are added and how tokens leave them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"
#include "verkv/cpu/span_estimate.hpp"
#include "verkv/sketch/detail/checks.hpp"
#include "verkv/sketch/detail/span_basis.hpp"

namespace verkv::inline v0::detail {

class span_store {
public:
    span_store(std::size_t key_dim, std::size_t rank)
        : key_dim_(key_dim), padded_((key_dim + 15) / 16 * 16), rank_(rank) {}

    [[nodiscard]] std::size_t spans() const noexcept { return first_token_.size(); }
    [[nodiscard]] std::size_t tokens() const noexcept { return outside_.size(); }

    /// Memory on the device of a span.
    [[nodiscard]] std::size_t span_bytes() const noexcept {
        return key_dim_ * sizeof(half) + sizeof(float) + sizeof(token_index);
    }

    /// Memory on the host of all spans.
    [[nodiscard]] std::size_t host_bytes() const noexcept {
        return spans() * rank_ * key_dim_ * sizeof(half) + tokens() * (rank_ * sizeof(half) + 2 * sizeof(float));
    }

    /// Sets what `s` has of closed spans.
    void show(span_codes& s) const noexcept {
        s.means = means_.data();
        s.radius = radius_.data();
        s.first_token = first_token_.data();
        s.basis = basis_.data();
        s.coefficients = coefficients_.data();
        s.outside = outside_.data();
        s.inside = inside_.data();
        s.spans = spans();
        s.closed_tokens = tokens();
        s.key_dim = key_dim_;
        s.padded_channels = padded_;
        s.rank = rank_;
    }

    void make_room(std::size_t spans, std::size_t tokens, bool geometric) {
        detail::make_room(first_token_, spans, geometric);
        detail::make_room(radius_, spans, geometric);
        detail::make_room(means_, spans * padded_, geometric);
        detail::make_room(basis_, spans * rank_ * padded_, geometric);
        detail::make_room(coefficients_, tokens * rank_, geometric);
        detail::make_room(outside_, tokens, geometric);
        detail::make_room(inside_, tokens, geometric);
    }

    /// Adds a span of `length` keys.
    void add(const float* keys, std::size_t length, span_scratch& scratch) {
        const std::size_t span = spans();
        const std::size_t token = tokens();
        first_token_.push_back(static_cast<token_index>(token));
        means_.resize((span + 1) * padded_);
        basis_.resize((span + 1) * rank_ * padded_);
        coefficients_.resize((token + length) * rank_);
        outside_.resize(token + length);
        inside_.resize(token + length);
        radius_.push_back(
            summarise_span(keys, length, key_dim_, padded_, rank_, scratch,
                           {means_.data() + span * padded_, basis_.data() + span * rank_ * padded_,
                            coefficients_.data() + token * rank_, outside_.data() + token, inside_.data() + token}));
    }

    /// Forgets tokens first ... last-1; spans that have none left go.
    void erase(std::size_t first, std::size_t last) {
        std::size_t kept = 0;
        std::size_t kept_tokens = 0;
        const std::size_t count = spans();
        for (std::size_t s = 0; s < count; ++s) {
            const std::size_t begin = first_token_[s];
            const std::size_t end = s + 1 < count ? first_token_[s + 1] : tokens();
            const std::size_t gone =
                (std::min)((std::max)(last, begin), end) - (std::min)((std::max)(first, begin), end);
            if (gone == end - begin) {
                continue;
            }
            if (s != kept) {
                radius_[kept] = radius_[s];
                move_row(means_, s, kept, padded_);
                move_row(basis_, s, kept, rank_ * padded_);
            }
            first_token_[kept++] = static_cast<token_index>(kept_tokens);
            kept_tokens += end - begin - gone;
        }
        first_token_.resize(kept);
        radius_.resize(kept);
        means_.resize(kept * padded_);
        basis_.resize(kept * rank_ * padded_);
        cut(coefficients_, first * rank_, last * rank_);
        cut(outside_, first, last);
        cut(inside_, first, last);
    }

    template <class V>
    static void cut(V& v, std::size_t first, std::size_t last) {
        v.erase(v.begin() + static_cast<std::ptrdiff_t>(first), v.begin() + static_cast<std::ptrdiff_t>(last));
    }

private:
    static void move_row(std::vector<half>& v, std::size_t from, std::size_t to, std::size_t width) {
        std::copy_n(v.begin() + static_cast<std::ptrdiff_t>(from * width), width,
                    v.begin() + static_cast<std::ptrdiff_t>(to * width));
    }

    std::size_t key_dim_;
    std::size_t padded_;
    std::size_t rank_;
    std::vector<half> means_;
    std::vector<float> radius_;
    std::vector<token_index> first_token_;
    std::vector<half> basis_;
    std::vector<half> coefficients_;
    std::vector<float> outside_;
    std::vector<float> inside_;
};

}  // namespace verkv::inline v0::detail
