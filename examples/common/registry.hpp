// The library's scorers and sketches by name: one list of each. What a command line offers, what types a program has to
// be able to hold, and what flags make sense all follow from these; a new one is one line here.
#pragma once

#include <cstddef>
#include <functional>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "verkv/core/concepts.hpp"
#include "verkv/core/rope.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/score/accumulated_attention.hpp"
#include "verkv/score/anchor_coverage.hpp"
#include "verkv/score/compactor.hpp"
#include "verkv/score/expected_attention.hpp"
#include "verkv/score/key_norm.hpp"
#include "verkv/score/largest_attention.hpp"
#include "verkv/score/leverage.hpp"
#include "verkv/score/mean_attention.hpp"
#include "verkv/score/non_causal_attention.hpp"
#include "verkv/score/proportional.hpp"
#include "verkv/score/snapkv.hpp"
#include "verkv/score/span_boundary.hpp"
#include "verkv/score/streaming_llm.hpp"
#include "verkv/score/tova.hpp"
#include "verkv/sketch/anchors.hpp"
#include "verkv/sketch/exact.hpp"
#include "verkv/sketch/logit_map.hpp"
#include "verkv/sketch/low_rank.hpp"
#include "verkv/sketch/per_channel.hpp"
#include "verkv/sketch/product_quantised.hpp"
#include "verkv/sketch/quest_pages.hpp"
#include "verkv/sketch/rope_pairs.hpp"
#include "verkv/sketch/rotated.hpp"
#include "verkv/sketch/socket.hpp"
#include "verkv/sketch/spans.hpp"
#include "verkv/sketch/turbo_quant.hpp"

namespace example {

/// What scorers are made with.
struct scorer_options {
    std::function<verkv::rope()> rotation = {};  ///< asked only by scorers that need it; may throw
};

template <class Make>
struct named_scorer {
    std::string_view name;
    Make make;  ///< (const scorer_options&) -> a scorer
};
template <class Make>
named_scorer(std::string_view, Make) -> named_scorer<Make>;

/// Keys and queries of one KV head's prompt, for sketches that rank and have to learn what their ranks are as logits.
struct calibration_sample {
    std::size_t width = 0;
    std::vector<float> keys, queries;  ///< rows of `width`
};

/// What sketches are made with. What is left 0 is as the sketch's own options have it.
struct sketch_options {
    std::size_t key_dim = 0;
    unsigned bits = 0;  ///< of a code, where there is one
    double pairs = 0;   ///< share of the channel pairs that is kept, where some are left out
    std::function<verkv::rope_pairing()> pairing = {};              ///< asked only by sketches that need it; may throw
    std::function<std::vector<calibration_sample>()> samples = {};  ///< likewise; without it ranks stay ranks
};

template <class T>
constexpr T given_or(T given, T own) {
    return given != T{} ? given : own;
}

/// Sets a sketch's map from ranks to logits to the mean of those that fit each sample best: one sketch serves all
/// heads.
template <class Sketch>
void calibrate(Sketch& sketch, const sketch_options& o) {
    if (!o.samples) {
        return;
    }
    verkv::logit_map mean{0, 0};
    const std::vector<calibration_sample> samples = o.samples();
    for (const calibration_sample& s : samples) {
        const verkv::logit_map map =
            verkv::fit_logit_map(verkv::cpu{}, sketch, verkv::contiguous_rows(std::span<const float>(s.keys), s.width),
                                 verkv::contiguous_rows(std::span<const float>(s.queries), s.width));
        mean.intercept += map.intercept / static_cast<float>(samples.size());
        mean.slope += map.slope / static_cast<float>(samples.size());
    }
    sketch.set_map(mean);
}

/// Which of the options a sketch has a use for.
enum sketch_uses : unsigned { no_option = 0, uses_bits = 1, uses_pairs = 2 };

template <class Make>
struct named_sketch {
    std::string_view name;
    unsigned uses;
    Make make;  ///< (const sketch_options&) -> a sketch
};
template <class Make>
named_sketch(std::string_view, unsigned, Make) -> named_sketch<Make>;

/// What the programs take where nothing is said; docs/results.md says why.
inline constexpr const char* default_scorer = "mean-attention";
inline constexpr const char* default_sketch = "rope-pairs";

/// Those that look at nothing but keys, values and queries. Not here, as a trace does not hold what they need: kvzip
/// and kvzip_plus (a second pass), sink_gate and kvzap (hidden states and trained weights), entropy_boundary
/// (entropies); and compress_kv, whose heads are found on a model.
inline constexpr std::tuple scorers{
    named_scorer{"largest-attention", [](const scorer_options&) { return verkv::largest_attention{}; }},
    named_scorer{"snapkv", [](const scorer_options&) { return verkv::make_snapkv(); }},
    named_scorer{"snapkv-original",
                 [](const scorer_options&) { return verkv::make_snapkv<verkv::reduction::maximum>(32, 5); }},
    named_scorer{"tova", [](const scorer_options&) { return verkv::tova{}; }},
    named_scorer{"h2o", [](const scorer_options&) { return verkv::make_h2o(); }},
    named_scorer{"h2o-cached",
                 [](const scorer_options&) {
                     return verkv::make_h2o(verkv::portion::fraction(0.1), verkv::portion::fraction(0.1),
                                            verkv::attention_among::cached);
                 }},
    named_scorer{"mean-attention", [](const scorer_options&) { return verkv::mean_attention{}; }},
    named_scorer{"expected-attention",
                 [](const scorer_options& o) { return verkv::make_expected_attention({.rotation = o.rotation()}); }},
    named_scorer{"compactor",
                 [](const scorer_options& o) { return verkv::compactor{.leverage = {.rotation = o.rotation()}}; }},
    named_scorer{"leverage", [](const scorer_options& o) { return verkv::leverage_score{.rotation = o.rotation()}; }},
    named_scorer{"non-causal-attention",
                 [](const scorer_options&) { return verkv::proportional(verkv::non_causal_attention{}); }},
    named_scorer{"anchor-coverage", [](const scorer_options&) { return verkv::anchor_coverage{}; }},
    named_scorer{"span-boundary",
                 [](const scorer_options& o) { return verkv::span_boundary{.rotation = o.rotation()}; }},
    named_scorer{"streaming-llm", [](const scorer_options&) { return verkv::streaming_llm{}; }},
    named_scorer{"key-norm", [](const scorer_options&) { return verkv::key_norm{}; }},
};

/// T: storage of the keys. hash_attention_sketch is not here: its networks are trained.
template <verkv::storage T>
inline constexpr std::tuple sketches{
    named_sketch{"exact", no_option, [](const sketch_options&) { return verkv::exact_sketch<T>{}; }},
    named_sketch{"rope-pairs", uses_bits | uses_pairs,
                 [](const sketch_options& o) {
                     const verkv::rope_pair_options own;
                     return verkv::rope_pair_sketch({.key_dim = o.key_dim,
                                                     .pairing = o.pairing(),
                                                     .bits = given_or(o.bits, own.bits),
                                                     .pair_fraction = given_or(o.pairs, own.pair_fraction)});
                 }},
    named_sketch{"per-channel", uses_bits,
                 [](const sketch_options& o) {
                     return o.bits == 0 ? verkv::per_channel_sketch(o.key_dim)
                                        : verkv::per_channel_sketch(o.key_dim, o.bits);
                 }},
    named_sketch{"rotated", uses_bits,
                 [](const sketch_options& o) {
                     return verkv::rotated_sketch(
                         {.key_dim = o.key_dim, .bits = given_or(o.bits, verkv::rotated_options{}.bits)});
                 }},
    named_sketch{"quest-pages", no_option,
                 [](const sketch_options& o) { return verkv::quest_page_sketch({.key_dim = o.key_dim}); }},
    named_sketch{"turbo-quant", uses_bits,
                 [](const sketch_options& o) {
                     return verkv::turbo_quant_sketch(
                         {.key_dim = o.key_dim, .bits = given_or(o.bits, verkv::turbo_quant_options{}.bits)});
                 }},
    named_sketch{"turbo-quant-inner", uses_bits,
                 [](const sketch_options& o) {
                     return verkv::turbo_quant_sketch({o.key_dim, given_or(o.bits, verkv::turbo_quant_options{}.bits),
                                                       verkv::turbo_quant_form::inner_product, 0});
                 }},
    named_sketch{"product-quantised", no_option,
                 [](const sketch_options& o) {
                     verkv::product_quantised_options options;
                     options.key_dim = o.key_dim;
                     options.subspaces = std::gcd(o.key_dim, std::size_t{16});
                     return verkv::product_quantised_sketch(options);
                 }},
    named_sketch{"low-rank", no_option,
                 [](const sketch_options& o) {
                     return verkv::low_rank_sketch({.key_dim = o.key_dim, .rank = (o.key_dim + 3) / 4});
                 }},
    named_sketch{"anchors", uses_bits,
                 [](const sketch_options& o) {
                     return verkv::anchor_sketch(
                         {.key_dim = o.key_dim, .bits = given_or(o.bits, verkv::anchor_options{}.bits)});
                 }},
    named_sketch{"spans", no_option,
                 [](const sketch_options& o) { return verkv::span_sketch({.key_dim = o.key_dim}); }},
    named_sketch{"socket", no_option,
                 [](const sketch_options& o) {
                     verkv::socket_sketch sketch({.key_dim = o.key_dim});
                     calibrate(sketch, o);
                     return sketch;
                 }},
};

/// The names of a list, in its order.
template <class... Named>
[[nodiscard]] std::vector<std::string> names_of(const std::tuple<Named...>& list) {
    return std::apply([](const auto&... part) { return std::vector<std::string>{std::string(part.name)...}; }, list);
}

/// Calls use(part) with the part of that name. Throws std::invalid_argument where there is none.
template <class... Named, class Use>
void with_named(const std::tuple<Named...>& list, std::string_view name, Use&& use) {
    bool found = false;
    const auto look = [&](const auto& part) {
        if (part.name == name) {
            found = true;
            use(part);
        }
    };
    std::apply([&](const auto&... part) { (look(part), ...); }, list);
    if (!found) {
        throw std::invalid_argument("\"" + std::string(name) + "\" is not known");
    }
}

namespace detail {

template <class Held, class T>
struct with_type;
template <class... Held, class T>
struct with_type<std::variant<Held...>, T> {
    using type = std::conditional_t<(std::is_same_v<Held, T> || ...), std::variant<Held...>, std::variant<Held..., T>>;
};

template <class Held, class... Ts>
struct with_types {
    using type = Held;
};
template <class Held, class T, class... Ts>
struct with_types<Held, T, Ts...> : with_types<typename with_type<Held, T>::type, Ts...> {};

template <class Sketch>
constexpr bool is_exact() {
    if constexpr (requires { Sketch::exact; }) {
        return Sketch::exact;
    } else {
        return false;
    }
}

/// The types that the parts of a list make, each once; nothing of exact sketches, which are no choice at run time.
template <class List, class... Arguments>
struct made_by;
template <class... Named, class... Arguments>
struct made_by<std::tuple<Named...>, Arguments...> {
    template <class T>
    using unless_exact = std::conditional_t<is_exact<T>(), std::variant<>, std::variant<T>>;
    template <class Held, class... Variants>
    struct joined {
        using type = Held;
    };
    template <class Held, class... Ts, class... Variants>
    struct joined<Held, std::variant<Ts...>, Variants...>
        : joined<typename with_types<Held, Ts...>::type, Variants...> {};
    using type = typename joined<std::variant<>,
                                 unless_exact<std::invoke_result_t<decltype(Named::make), Arguments...>>...>::type;
};

}  // namespace detail

/// What is true of a sketch, by its name.
struct sketch_facts {
    std::string name;
    unsigned uses = no_option;
    bool exact = false;    ///< its estimate is the logit
    bool bounded = false;  ///< it bounds its error
};

/// Facts of all sketches, in the order of the list.
[[nodiscard]] inline std::vector<sketch_facts> all_sketch_facts() {
    std::vector<sketch_facts> all;
    std::apply(
        [&](const auto&... part) {
            const auto add = [&](const auto& p) {
                using made = std::invoke_result_t<decltype(p.make), const sketch_options&>;
                all.push_back({std::string(p.name), p.uses, detail::is_exact<made>(),
                               verkv::bounded_sketch<made, verkv::cpu, verkv::half>});
            };
            (add(part), ...);
        },
        sketches<verkv::half>);
    return all;
}

/// Facts of one of them. Throws std::invalid_argument for a name that there is not.
[[nodiscard]] inline const sketch_facts& facts_of_sketch(std::string_view name) {
    static const std::vector<sketch_facts> all = all_sketch_facts();
    for (const sketch_facts& facts : all) {
        if (facts.name == name) {
            return facts;
        }
    }
    throw std::invalid_argument("\"" + std::string(name) + "\" is not known");
}

/// A scorer that was chosen by name, as one type.
class chosen_scorer {
public:
    /// Throws std::invalid_argument for a name that there is not, and what the scorer's maker throws.
    chosen_scorer(std::string_view name, const scorer_options& options) : held_(make(name, options)) {}

    template <class Backend, class T>
    void score(const Backend& exec, const verkv::prompt<T>& p, std::size_t kv_head, std::span<float> out) const {
        std::visit([&](const auto& scorer) { scorer.score(exec, p, kv_head, out); }, held_);
    }

private:
    using any = detail::made_by<std::remove_const_t<decltype(scorers)>, const scorer_options&>::type;

    static any make(std::string_view name, const scorer_options& options) {
        std::vector<any> made;  // of one: not every scorer can be assigned to
        with_named(scorers, name, [&](const auto& part) { made.push_back(any(part.make(options))); });
        return made.front();
    }

    any held_;
};

static_assert(verkv::scorer<chosen_scorer, verkv::cpu, verkv::half>);

/// One of the approximate sketches, as one type.
template <verkv::storage T>
class chosen_sketch {
public:
    /// Throws std::invalid_argument for a name that there is not or of an exact sketch, and what the sketch throws.
    chosen_sketch(std::string_view name, const sketch_options& options) : held_(make(name, options)) {}

    void fit(const verkv::cpu& exec, verkv::rows<T> keys) {
        std::visit([&](auto& sketch) { sketch.fit(exec, keys); }, held_);
    }
    void append(const verkv::cpu& exec, verkv::rows<T> keys) {
        std::visit([&](auto& sketch) { sketch.append(exec, keys); }, held_);
    }
    void estimate(const verkv::cpu& exec, verkv::rows<float> queries, float scale,
                  verkv::matrix_view<float> logits) const {
        std::visit([&](const auto& sketch) { sketch.estimate(exec, queries, scale, logits); }, held_);
    }
    void estimate(const verkv::cpu& exec, verkv::rows<float> queries, float scale, verkv::matrix_view<float> logits,
                  verkv::matrix_view<float> bounds) const {
        std::visit(
            [&](const auto& sketch) {
                using held = std::remove_cvref_t<decltype(sketch)>;
                if constexpr (verkv::bounded_sketch<held, verkv::cpu, T>) {
                    sketch.estimate(exec, queries, scale, logits, bounds);
                } else {
                    throw std::logic_error("this sketch has no bounds");
                }
            },
            held_);
    }
    [[nodiscard]] double bound_failure() const {
        return std::visit(
            [](const auto& sketch) {
                using held = std::remove_cvref_t<decltype(sketch)>;
                if constexpr (verkv::bounded_sketch<held, verkv::cpu, T>) {
                    return static_cast<double>(sketch.bound_failure());
                } else {
                    return 0.0;
                }
            },
            held_);
    }
    [[nodiscard]] std::size_t size() const {
        return std::visit([](const auto& sketch) { return sketch.size(); }, held_);
    }
    [[nodiscard]] std::size_t bytes() const {
        return std::visit([](const auto& sketch) { return sketch.bytes(); }, held_);
    }
    void erase(std::size_t first, std::size_t last) {
        std::visit([&](auto& sketch) { sketch.erase(first, last); }, held_);
    }

private:
    using any = typename detail::made_by<std::remove_const_t<decltype(sketches<T>)>, const sketch_options&>::type;

    static any make(std::string_view name, const sketch_options& options) {
        std::vector<any> made;
        with_named(sketches<T>, name, [&](const auto& part) {
            using type = std::invoke_result_t<decltype(part.make), const sketch_options&>;
            if constexpr (!detail::is_exact<type>()) {
                made.push_back(any(part.make(options)));
            }
        });
        if (made.empty()) {
            throw std::invalid_argument("the sketch \"" + std::string(name) + "\" is exact, and a type of its own");
        }
        return made.front();
    }

    any held_;
};

/// Calls use(sketch) with that of a name: an exact one as its own type, of which a cache asks less.
template <verkv::storage T, class Use>
auto with_sketch(std::string_view name, const sketch_options& options, Use&& use) {
    return facts_of_sketch(name).exact ? use(verkv::exact_sketch<T>{}) : use(chosen_sketch<T>(name, options));
}

}  // namespace example
