// The tokens that a water-filling plan may raise, picked out of all in one pass, and their moments, on the CPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "verkv/certify/tail.hpp"
#include "verkv/core/plan.hpp"
#include "verkv/cpu/lanes.hpp"

namespace verkv::inline v0::detail {

/// Picked tokens, field by field; `mass` has a column for each query head. Padded, so that whole vectors may be read:
/// beyond count() lie tokens of odds 0 and mass 0 after seal().
class raised_tokens {
public:
    void reserve(std::size_t n, std::size_t heads) {
        room_ = n + 2 * most_lanes;
        token_.resize(room_);
        odds_.resize(room_);
        wish_.resize(room_);
        mass_.resize(room_ * heads);
    }
    void reset(std::size_t n, std::size_t heads) {
        if (n + 2 * most_lanes > room_ || heads * room_ > mass_.size()) {
            reserve(n, heads);
        }
        count_ = 0;
    }

    [[nodiscard]] std::size_t count() const { return count_; }
    /// Adds a token; its masses and its wish are the caller's to set. Returns its place.
    std::size_t add(std::size_t token, float odds) {
        token_[count_] = static_cast<token_index>(token);
        odds_[count_] = odds;
        return count_++;
    }
    /// Adds the tokens first + (bit set) of a single head. A call of its own: few vectors of tokens have any, and what
    /// is added up of the others stays in registers.
    [[gnu::noinline]] void add(std::uint32_t bits, std::size_t first, const float* mass, const float* odds,
                               float inverse) {
        token_index* const token_out = token_.data();
        float* const odds_out = odds_.data();
        float* const mass_out = mass_.data();
        std::size_t at = count_;
        for (; bits != 0; bits &= bits - 1, ++at) {
            const std::size_t token = first + static_cast<std::size_t>(std::countr_zero(bits));
            token_out[at] = static_cast<token_index>(token);
            odds_out[at] = odds[token];
            mass_out[at] = mass[token] * inverse;
        }
        count_ = at;
    }
    /// The same for a group of heads.
    [[gnu::noinline]] void add(std::uint32_t bits, std::size_t first, std::span<const masses_view> m,
                               std::span<const float> inverse) {
        const float* const odds = m[0].odds.data();
        for (; bits != 0; bits &= bits - 1) {
            const std::size_t token = first + static_cast<std::size_t>(std::countr_zero(bits));
            const std::size_t at = add(token, odds[token]);
            for (std::size_t h = 0; h < m.size(); ++h) {
                mass(h)[at] = m[h].mass[token] * inverse[h];
            }
        }
    }
    [[nodiscard]] const token_index* token() const { return token_.data(); }
    [[nodiscard]] const float* odds() const { return odds_.data(); }
    [[nodiscard]] float* wish() { return wish_.data(); }  ///< r' that a group asks for, before the cut at 1
    [[nodiscard]] const float* wish() const { return wish_.data(); }
    [[nodiscard]] float* mass(std::size_t head) { return mass_.data() + head * room_; }
    [[nodiscard]] const float* mass(std::size_t head) const { return mass_.data() + head * room_; }

    void seal(std::size_t heads) {
        for (std::size_t i = count_; i < count_ + most_lanes; ++i) {
            odds_[i] = 0;
            wish_[i] = 0;
            for (std::size_t h = 0; h < heads; ++h) {
                mass(h)[i] = 0;
            }
        }
    }

private:
    static constexpr std::size_t most_lanes = 16;
    std::size_t room_ = 0;
    std::size_t count_ = 0;
    std::vector<token_index> token_;
    std::vector<float> odds_, wish_, mass_;
};

/// How several heads' wishes x_h a_h for r' make one: the largest, or the root of the sum of squares.
enum class combine { largest, root_sum_square };

inline namespace VERKV_LANES_NAMESPACE {

inline constexpr std::size_t sum_block = 1024;  // tokens that are added up in float

VERKV_ALWAYS_INLINE lanes load_some(const float* p, std::size_t count) {
    return count >= lane_count ? load(p) : load_first(p, count);
}

VERKV_ALWAYS_INLINE lanes square_root(const lanes& x) {
#if VERKV_LANES_WIDTH == 16
    return lanes_cast<lanes>(_mm512_maskz_sqrt_ps(0xffff, lanes_cast<__m512>(x)));
#elif VERKV_LANES_WIDTH == 8
    return lanes_cast<lanes>(_mm256_sqrt_ps(lanes_cast<__m256>(x)));
#else
    lanes y{};
    for (std::size_t i = 0; i < lane_count; ++i) {
        y[i] = __builtin_sqrtf(x[i]);
    }
    return y;
#endif
}

/// x where the mask's lane is set, else 0.
VERKV_ALWAYS_INLINE lanes masked(const int_lanes& mask, const lanes& x) {
    return lanes_cast<lanes>(mask & lanes_cast<int_lanes>(x));
}

/// Calls use(i, lanes left) for i = first, first + lane_count, ...: lanes left is a constant but for the last ones.
template <class Use>
VERKV_ALWAYS_INLINE void for_lanes(std::size_t first, std::size_t last, Use&& use) {
    std::size_t i = first;
    for (; i + lane_count <= last; i += lane_count) {
        use(i, std::size_t{lane_count});
    }
    if (i < last) {
        use(i, last - i);
    }
}

/// Sum over [0, count) of the lanes that term(i, lanes left) gives: in float over 1024 tokens, those sums in double.
template <class Term>
VERKV_ALWAYS_INLINE double blockwise_sum(std::size_t count, Term&& term) {
    double total = 0;
    for (std::size_t first = 0; first < count; first += sum_block) {
        lanes sums{};
        for_lanes(
            first,
            smaller(first + sum_block, count), [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
                sums += term(i, left);
            });
        total += static_cast<double>(sum(sums));
    }
    return total;
}

/// Sum of x over L, x = m/R.
inline double mass_of_candidates(const masses_view& m, float inverse) {
    return blockwise_sum(
        m.mass.size(), [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
            const lanes x = load_some(m.mass.data() + i, left) * inverse;
            return load_some(m.odds.data() + i, left) > 0.0f ? x : lanes{};
        });
}

/// V of all of L at some levels, and b at r, as every eighth block of tokens has them; few tokens are all looked at.
inline constexpr std::size_t probe_levels = 4;
struct probed {
    double variance[probe_levels] = {};
    double largest = 0;
};
inline probed probe(const masses_view& m, float inverse, const float (&kappa)[probe_levels]) {
    constexpr std::size_t block = 64;
    const std::size_t n = m.mass.size();
    const std::size_t stride = n < 128 * block ? block : 8 * block;
    probed found;
    std::size_t seen = 0;
    const float* mass = m.mass.data();
    const float* odds = m.odds.data();
    lanes top{};
    for (std::size_t first = 0; first < n; first += stride) {
        const std::size_t last = smaller(first + block, n);
        lanes sums[probe_levels] = {};
        for_lanes(
            first, last, [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
                const lanes x = load_some(mass + i, left) * inverse;
                const lanes full = x * load_some(odds + i, left);
                for (std::size_t k = 0; k < probe_levels; ++k) {
                    const lanes room = kappa[k] - x;
                    sums[k] += x * larger_of(room < full ? room : full, lanes{});
                }
                top = larger_of(full > 0.0f ? larger_of(x, full) : lanes{}, top);
            });
        for (std::size_t k = 0; k < probe_levels; ++k) {
            found.variance[k] += static_cast<double>(sum(sums[k]));
        }
        seen += last - first;
    }
    for (double& v : found.variance) {
        v *= static_cast<double>(n) / static_cast<double>((std::max)(seen, std::size_t{1}));
    }
    found.largest = static_cast<double>(largest(top));
    return found;
}

/// Moments of picked tokens for every head of a group at r' = max(r, min(1, wish/factor)), added to `out`.
inline void add_group_moments(const raised_tokens& picked, float factor, std::span<bernstein_moments> out) {
    for (std::size_t group = 0; group < out.size(); group += 4) {
        const std::size_t some = smaller<std::size_t>(4, out.size() - group);
        lanes tops[4] = {};
        for (std::size_t first = 0; first < picked.count(); first += sum_block) {
            const std::size_t last = smaller(first + sum_block, picked.count());
            lanes sums[4] = {};
            for (std::size_t i = first; i < last; i += lane_count) {
                const lanes wish = load(picked.wish() + i);
                const lanes own = load(picked.odds() + i);
                const lanes raised = (factor - wish) / wish;  // padding: infinite, and own is 0
                const lanes odds = larger_of(raised < own ? raised : own, lanes{});
                for (std::size_t h = 0; h < some; ++h) {
                    const lanes x = load(picked.mass(group + h) + i);
                    const lanes lift = x * odds;
                    sums[h] += x * lift;
                    tops[h] = larger_of(odds > 0.0f ? larger_of(x, lift) : lanes{}, tops[h]);
                }
            }
            for (std::size_t h = 0; h < some; ++h) {
                out[group + h].variance += static_cast<double>(sum(sums[h]));
            }
        }
        for (std::size_t h = 0; h < some; ++h) {
            out[group + h].largest = larger(static_cast<double>(largest(tops[h])), out[group + h].largest);
        }
    }
}

/// Sums over the tokens that are not picked, a run of them at a time, for a tail's summary.
template <class Summary>
struct flat_run {
    // Bernstein's inequality needs sums alone; tails that resolve the size of terms get shorter runs.
    static constexpr bool sums_alone = std::is_same_v<Summary, bernstein_tail::summary>;
    static constexpr std::size_t length = sums_alone ? sum_block : 64;

    lanes variance{}, term{}, lift{}, mass{};

    /// Tokens of mass x and x o = up, but for those that are picked. `estimated` are the others of L. What is not a
    /// number stays one in the variance.
    VERKV_ALWAYS_INLINE void add(const int_lanes& picked, const int_lanes& estimated, const lanes& x, const lanes& up) {
        variance += masked(~picked, x) * up;
        term = larger_of(masked(estimated, larger_of(x, up)), term);
        if constexpr (!sums_alone) {
            lift = larger_of(masked(estimated, up), lift);
            mass = larger_of(masked(estimated, x), mass);
        }
    }

    VERKV_ALWAYS_INLINE void close(Summary& to) {
        const float top = largest(term);
        const float spread = sum(variance);
        if (!(top == 0 && spread == 0)) {
            to.add_block(length, static_cast<double>(spread), static_cast<double>(largest(lift)),
                         static_cast<double>(largest(mass)), static_cast<double>(top));
        }
        *this = {};
    }
};

/// Picks the tokens of L with x (1 + o) > floor; adds the others, at r, to `rest`. O(n), 8 bytes a token.
template <class Summary>
void pick_raised(const masses_view& m, float inverse, float floor, raised_tokens& picked, Summary& rest) {
    const std::size_t n = m.mass.size();
    const float* mass = m.mass.data();
    const float* odds = m.odds.data();
    picked.reset(n, 1);
    rest = {};
    for (std::size_t first = 0; first < n; first += flat_run<Summary>::length) {
        flat_run<Summary> run;
        for_lanes(
            first, smaller(first + run.length, n), [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
                const lanes x = load_some(mass + i, left) * inverse;
                const lanes o = load_some(odds + i, left);
                const lanes up = x * o;
                const int_lanes in = o > 0.0f;
                const int_lanes above = x + up > floor;
                const int_lanes hit = in & above;
                run.add(hit, in & ~above, x, up);
                if (const std::uint32_t bits = bits_of(hit); bits != 0) {
                    picked.add(bits, i, mass, odds, inverse);
                }
            });
        run.close(rest);
    }
    picked.seal(1);
}

VERKV_ALWAYS_INLINE lanes combined(combine how, const lanes& own, const lanes& wish) {
    return how == combine::largest ? larger_of(own, wish) : wish + own * own;
}

/// A run of tokens first ... last-1 of pick_raised() for a group: sums of `Heads` heads from `from` on, in registers;
/// the picked tokens too where `listing`.
template <std::size_t Heads, class Summary>
VERKV_ALWAYS_INLINE void pick_run(std::span<const masses_view> m, std::span<const float> inverse,
                                  std::span<const float> a, combine how, std::size_t from, bool listing,
                                  std::size_t first, std::size_t last, raised_tokens& picked, std::span<Summary> rest) {
    const std::size_t heads = m.size();
    const bool alone = heads == Heads;
    const float* mass[Heads];
    lanes unit[Heads], share[Heads];
    for (std::size_t h = 0; h < Heads; ++h) {
        mass[h] = m[from + h].mass.data();
        unit[h] = broadcast(inverse[from + h]);
        share[h] = broadcast(inverse[from + h] * a[from + h]);
    }
    const float* const odds = m[0].odds.data();
    flat_run<Summary> run[Heads];
    for_lanes(
        first, last, [&](std::size_t i, std::size_t left) __attribute__((always_inline)) {
            const lanes o = load_some(odds + i, left);
            lanes x[Heads];
            for (std::size_t h = 0; h < Heads; ++h) {
                x[h] = load_some(mass[h] + i, left);
            }
            lanes wish{};
            if (alone) {
                for (std::size_t h = 0; h < Heads; ++h) {
                    wish = combined(how, x[h] * share[h], wish);
                }
            } else {
                for (std::size_t h = 0; h < heads; ++h) {
                    wish = combined(how, load_some(m[h].mass.data() + i, left) * (inverse[h] * a[h]), wish);
                }
            }
            const lanes most = 1.0f + o;  // of 1/r
            const lanes scaled = wish * (how == combine::largest ? most : most * most);
            const int_lanes in = o > 0.0f;
            const int_lanes above = scaled > 1.0f;
            const int_lanes hit = in & above;
            for (std::size_t h = 0; h < Heads; ++h) {
                x[h] *= unit[h];
                run[h].add(hit, in & ~above, x[h], x[h] * o);
            }
            if (const std::uint32_t bits = listing ? bits_of(hit) : 0; bits != 0) {
                picked.add(bits, i, m, inverse);
            }
        });
    for (std::size_t h = 0; h < Heads; ++h) {
        run[h].close(rest[from + h]);
    }
}

/// Picks the tokens that a group raises at multipliers a (r' = combined x_h a_h above r), with the masses of all heads,
/// and adds the others, at r, to each head's `rest`. Wishes are set_wishes()'s to write. O(n heads), 4 (heads + 1)
/// bytes a token.
template <class Summary>
void pick_raised(std::span<const masses_view> m, std::span<const float> inverse, std::span<const float> a, combine how,
                 raised_tokens& picked, std::span<Summary> rest) {
    const std::size_t n = m[0].mass.size();
    const std::size_t heads = m.size();
    picked.reset(n, heads);
    for (std::size_t h = 0; h < heads; ++h) {
        rest[h] = {};
    }
    constexpr std::size_t length = flat_run<Summary>::length;
    for (std::size_t first = 0; first < n; first += length) {
        const std::size_t last = smaller(first + length, n);
        // Which tokens are raised is found anew for every four heads: their sums stay in registers.
        for (std::size_t from = 0; from < heads; from += 4) {
            const auto run = [&](auto some) {
                pick_run<some()>(m, inverse, a, how, from, from == 0, first, last, picked, rest);
            };
            switch (smaller<std::size_t>(4, heads - from)) {
                case 1:
                    run(std::integral_constant<std::size_t, 1>{});
                    break;
                case 2:
                    run(std::integral_constant<std::size_t, 2>{});
                    break;
                case 3:
                    run(std::integral_constant<std::size_t, 3>{});
                    break;
                default:
                    run(std::integral_constant<std::size_t, 4>{});
            }
        }
    }
    picked.seal(heads);
}

/// Moments of the picked tokens as a head has them by itself, at level kappa: odds' = min(o, kappa/x - 1) where that is
/// positive, x odds' = min(x o, kappa - x) without a division.
inline bernstein_moments moments_at(const raised_tokens& picked, std::size_t head, float kappa) {
    lanes top{};
    const float* const mass = picked.mass(head);
    const double variance = blockwise_sum(
        picked.count(), [&](std::size_t i, std::size_t) __attribute__((always_inline)) {
            const lanes x = load(mass + i);
            const lanes full = x * load(picked.odds() + i);
            const lanes room = kappa - x;
            const lanes lift = larger_of(room < full ? room : full, lanes{});
            top = larger_of(lift > 0.0f ? larger_of(x, lift) : lanes{}, top);
            return x * lift;
        });
    return {0, variance, static_cast<double>(largest(top))};
}

/// Puts the picked tokens of a head into bins: those that no level of the window raises into the first, with `rest`.
template <class Bins>
void add_to_bins(const raised_tokens& picked, std::size_t head, bernstein_moments rest, Bins& bins) {
    const float floor = bins.edge(0);
    const float* const mass = picked.mass(head);
    const float* const odds = picked.odds();
    lanes top{};
    rest.variance += blockwise_sum(
        picked.count(), [&](std::size_t i, std::size_t) __attribute__((always_inline)) {
            const lanes x = load(mass + i);
            const lanes o = load(odds + i);
            const lanes up = x * o;
            const int_lanes raised = x + up > floor;
            for (std::uint32_t bits = bits_of(raised); bits != 0; bits &= bits - 1) {
                const std::size_t at = i + static_cast<std::size_t>(std::countr_zero(bits));
                bins.add(mass[at], odds[at]);
            }
            top = larger_of(masked(~raised, o > 0.0f ? larger_of(x, up) : lanes{}), top);
            return masked(~raised, x * up);
        });
    bins.add_flat(rest.variance, larger(static_cast<double>(largest(top)), rest.largest));
}

/// Sets wish = combined x_h a_h, no more than 2^100.
inline void set_wishes(raised_tokens& picked, std::span<const float> a, combine how) {
    const lanes most = broadcast(0x1p100f);
    for (std::size_t i = 0; i < picked.count(); i += lane_count) {
        lanes wish{};
        for (std::size_t h = 0; h < a.size(); ++h) {
            wish = combined(how, load(picked.mass(h) + i) * a[h], wish);
        }
        wish = how == combine::root_sum_square ? square_root(wish) : wish;
        store(picked.wish() + i, wish < most ? wish : most);
    }
}

/// Calls use(token, r') for the picked tokens that a wish times `factor` raises, r' = raised_probability() bit for bit,
/// by index.
template <class Use>
VERKV_ALWAYS_INLINE void for_each_raised(const raised_tokens& picked, const float* wish, float factor, Use&& use) {
    using wide_lanes = double __attribute__((vector_size(VERKV_LANES_WIDTH * 8)));
    const lanes below_one = broadcast(1.0f - 0x1p-24f);
    for (std::size_t i = 0; i < picked.count(); i += lane_count) {
        const lanes wanted = load(wish + i) * factor;
        const lanes odds = load(picked.odds() + i);
        std::uint32_t bits = bits_of((wanted + wanted * odds > 1.0f) & (odds > 0.0f));
        if (bits == 0) {
            continue;
        }
        const wide_lanes exact = 1.0 / (1.0 + __builtin_convertvector(odds, wide_lanes));
        const lanes rounded = __builtin_convertvector(exact, lanes);
        const lanes own = rounded < below_one ? rounded : below_one;
        float raised[lane_count];
        store(raised, larger_of(select(lanes_cast<int_lanes>(wanted > 1 - 0x1p-20f), broadcast(1), wanted), own));
        for (; bits != 0; bits &= bits - 1) {
            const auto lane = static_cast<std::size_t>(std::countr_zero(bits));
            use(picked.token()[i + lane], raised[lane]);
        }
    }
}

/// Sum of max(0, min(1, wish/factor) - r): rows that are expected to be fetched.
inline double expected_rows(const raised_tokens& picked, float factor) {
    return blockwise_sum(
        picked.count(), [&](std::size_t i, std::size_t) __attribute__((always_inline)) {
            const lanes wish = load(picked.wish() + i) / factor;
            const lanes more = (wish < 1.0f ? wish : broadcast(1.0f)) - 1.0f / (1.0f + load(picked.odds() + i));
            return more > 0.0f ? more : lanes{};  // padding has r = 1
        });
}

}  // namespace VERKV_LANES_NAMESPACE
}  // namespace verkv::inline v0::detail
