// Logits by the kernels, beside the CPU's: from the codes of a sketch, and of listed rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/device_cases.hpp"
#include "support/reference.hpp"
#include "verkv/cuda/rope_pair_logits.hpp"
#include "verkv/cuda/row_logits.hpp"
#include "verkv/verkv.hpp"

namespace {

using verkv::half;

constexpr float nowhere = -12345.0f;

struct rope_case {
    std::size_t tokens = 0, kv_heads = 1, heads = 1, key_dim = 16, group_length = 128;
    double pair_fraction = 0.25;
    bool odds = false, poisoned = false, erased = false;
    unsigned threads = 128, blocks = 2, seed = 0;
};

// Sketches of random keys, and all that a launch needs, in a machine's memory.
template <unsigned Bits, unsigned Heads, class Device>
void check_case(Device& gpu, const rope_case& c) {
    INFO("tokens " << c.tokens << " kv_heads " << c.kv_heads << " heads " << c.heads << " key_dim " << c.key_dim
                   << " group " << c.group_length << " threads " << c.threads << " blocks " << c.blocks << " seed "
                   << c.seed << " bits " << Bits);
    support::dice d(c.seed + 17);
    const std::size_t stride = c.tokens + 5;
    std::vector<float> queries(c.kv_heads * c.heads * c.key_dim);
    for (float& q : queries) {
        q = static_cast<float>(d.normal());
    }
    std::vector<float> odds(c.kv_heads * stride, 15.0f);
    for (float& o : odds) {
        o = d.chance(0.2) ? 0.0f : o;
    }
    const float scale = 0.25f;

    std::vector<verkv::rope_pair_sketch> sketches;
    std::vector<std::vector<std::uint32_t>> first(c.kv_heads);
    std::vector<verkv::gpu::device_rope_pairs> described;
    verkv::rope_pair_codes codes;
    for (std::size_t kv = 0; kv < c.kv_heads; ++kv) {
        std::vector<half> keys((c.tokens + 40) * c.key_dim);
        for (half& k : keys) {
            k = verkv::from_float<half>(static_cast<float>(d.normal()));
        }
        if (c.poisoned && !keys.empty()) {
            keys[keys.size() / 2] = verkv::from_float<half>(std::numeric_limits<float>::quiet_NaN());
        }
        sketches.emplace_back(verkv::rope_pair_options{.key_dim = c.key_dim,
                                                       .pairing = verkv::rope_pairing::half,
                                                       .bits = Bits,
                                                       .pair_fraction = c.pair_fraction,
                                                       .group_length = c.group_length});
        verkv::rope_pair_sketch& s = sketches.back();
        const auto rows = verkv::contiguous_rows(std::span<const half>(keys), c.key_dim);
        s.fit(verkv::cpu{}, rows);
        s.append(verkv::cpu{}, rows);
        s.erase(0, c.erased ? 7 : 0);
        const std::size_t rest = s.size() - c.tokens;
        s.erase(s.size() / 2 - (std::min)(s.size() / 2, rest / 2),
                s.size() / 2 - (std::min)(s.size() / 2, rest / 2) + rest);
        REQUIRE(s.size() == c.tokens);
    }
    for (std::size_t kv = 0; kv < c.kv_heads; ++kv) {
        codes = sketches[kv].codes();
        const std::string name = std::to_string(kv);
        first[kv] = verkv::gpu::device_first_tokens(codes);
        const std::size_t words = codes.groups == 0 ? 0 : (codes.groups - 1) * codes.slot_words;
        const std::size_t last = codes.groups == 0 ? 0 : codes.tokens - codes.first_token[codes.groups - 1];
        const std::size_t code_words = words + (last + 15) / 16 * 16 * codes.words;
        const auto on_device = [&](const char* what, auto data) { return gpu.input(what + name, data).data(); };
        described.push_back(
            {on_device("codes ", std::span<const std::uint32_t>(codes.codes, code_words)),
             on_device("parameters ",
                       std::span<const half>(codes.parameters, codes.groups * 2 * codes.padded_channels)),
             on_device("first ", std::span<const std::uint32_t>(first[kv])),
             on_device("channels ", std::span<const std::uint32_t>(codes.channels, codes.channel_count)),
             static_cast<std::uint32_t>(codes.groups), static_cast<std::uint32_t>(codes.slot_words)});
    }
    const std::vector<float> blank(c.kv_heads * c.heads * stride, nowhere);
    const std::vector<std::uint32_t> no_top(c.kv_heads * c.heads);
    const auto device_logits = gpu.in_out("logits", std::span<const float>(blank));
    const auto device_top = gpu.in_out("top", std::span<const std::uint32_t>(no_top));

    verkv::gpu::rope_pair_logits_kernel<Bits, Heads> k;
    k.sketch = gpu.input("sketches", std::span<const verkv::gpu::device_rope_pairs>(described)).data();
    k.queries = gpu.input("queries", std::span<const float>(queries)).data();
    k.odds = c.odds ? gpu.input("odds", std::span<const float>(odds)).data() : nullptr;
    k.logits = device_logits.data();
    k.top = device_top.data();
    k.stride = stride;
    k.kv_heads = static_cast<unsigned>(c.kv_heads);
    k.heads = static_cast<unsigned>(c.heads);
    k.key_dim = static_cast<unsigned>(c.key_dim);
    k.channel_count = static_cast<unsigned>(codes.channel_count);
    k.padded_channels = static_cast<unsigned>(codes.padded_channels);
    k.group_length = static_cast<unsigned>(c.group_length);
    k.scale = scale;
    k.blocks = c.blocks;
    k.threads = c.threads;
    gpu.launch(k);
    const std::vector<float> logits = gpu.download(device_logits);
    const std::vector<std::uint32_t> top = gpu.download(device_top);

    std::size_t wrong = 0;
    for (std::size_t kv = 0; kv < c.kv_heads; ++kv) {
        const verkv::rope_pair_codes s = sketches[kv].codes();
        std::vector<float> expected(c.heads * c.tokens);
        const verkv::rows<float> q{queries.data() + kv * c.heads * c.key_dim, static_cast<std::ptrdiff_t>(c.key_dim),
                                   c.heads, c.key_dim, nullptr};
        sketches[kv].estimate(verkv::cpu{}, q, scale, verkv::matrix_of(std::span<float>(expected), c.heads, c.tokens));
        for (std::size_t h = 0; h < c.heads; ++h) {
            float largest = -std::numeric_limits<float>::infinity();
            constexpr double levels = (1u << Bits) - 1;
            for (std::size_t g = 0; g < s.groups; ++g) {
                // Both sides have the error that is stated.
                double bound = 0;
                double largest_factor = 0;
                for (std::size_t ch = 0; ch < s.channel_count; ++ch) {
                    const half* zeros = s.parameters + g * 2 * s.padded_channels;
                    const double own = std::abs(static_cast<double>(q[h][s.channels[ch]]));
                    const auto step = static_cast<double>(verkv::to_float(zeros[s.padded_channels + ch]));
                    bound += own * (std::abs(static_cast<double>(verkv::to_float(zeros[ch]))) + levels * step);
                    largest_factor = (std::max)(largest_factor, own * step);
                }
                bound *= 2 * static_cast<double>(s.channel_count + 3) * 0x1p-23 * static_cast<double>(scale);
                if (verkv::detail::by_bytes(Bits)) {
                    bound += 0x1p-13 * largest_factor * static_cast<double>(scale) * levels *
                             static_cast<double>(s.channel_count);
                }
                for (std::size_t i = first[kv][g]; i < first[kv][g + 1]; ++i) {
                    const float found = logits[(kv * c.heads + h) * stride + i];
                    const float right = expected[h * c.tokens + i];
                    if (c.odds && odds[kv * stride + i] == 0) {
                        wrong += found != nowhere;
                        continue;
                    }
                    wrong += std::isnan(right)
                                 ? !std::isnan(found)
                                 : !(std::abs(static_cast<double>(found) - static_cast<double>(right)) <= bound);
                    largest = verkv::larger(found, largest);
                }
            }
            for (std::size_t i = c.tokens; i < stride; ++i) {
                wrong += logits[(kv * c.heads + h) * stride + i] != nowhere;
            }
            CHECK(verkv::gpu::from_ordered_bits(top[kv * c.heads + h]) == largest);
        }
    }
    CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("logits from the codes of a sketch are the CPU's", "[parity]") {
    support::on_cases(9, [](auto& gpu, unsigned seed) {
        const unsigned threads = 32u << (seed % 6);
        check_case<2, 4>(gpu, {1000 + 37 * seed, 2, 4, 64, 128, 0.25, seed % 2 == 0, false, false, threads, 3, seed});
        check_case<2, 1>(gpu, {77, 1, 1, 32, 16 + seed, 0.5, true, false, true, threads, 1, seed});
        check_case<2, 4>(gpu, {511, 1, 3, 24, 100, 1.0, false, seed % 2 == 1, true, threads, 2, seed});
        check_case<4, 8>(gpu, {300 + seed, 2, 8, 64, 64, 0.25, false, false, false, threads, 5, seed});
        check_case<8, 4>(gpu, {129, 1, 6, 64, 128, 0.3, true, true, true, threads, 2, seed});
        check_case<1, 2>(gpu, {260, 1, 5, 128, 48, 0.4, false, false, true, threads, 2, seed});
    });
}

TEST_CASE("logits of no, one and many tokens", "[parity]") {
    support::on_cases(3, [](auto& gpu, unsigned c) {
        const std::size_t sizes[] = {0, 1, 50'000};
        check_case<2, 4>(gpu, {sizes[c], 1, 4, 64, 128, 0.25, c != 1, false, false, 256, 13, c});
    });
}

namespace {

template <class T, unsigned Heads, class Device>
void check_rows(Device& gpu, std::size_t count, std::size_t heads, std::size_t key_dim, std::size_t pad, bool with_odds,
                unsigned threads, unsigned blocks, unsigned seed) {
    INFO("rows " << count << " heads " << heads << " key_dim " << key_dim << " threads " << threads << " seed "
                 << seed);
    support::dice d(seed + 3);
    const std::size_t kv_heads = 2, pool = 2 * count + 3, row_stride = key_dim + pad, tokens = 3 * count + 1;
    std::vector<T> rows(pool * row_stride);
    for (T& x : rows) {
        x = verkv::from_float<T>(static_cast<float>(d.normal()));
    }
    std::vector<float> queries(kv_heads * heads * key_dim), odds(kv_heads * tokens);
    for (float& q : queries) {
        q = static_cast<float>(d.normal());
    }
    for (float& o : odds) {
        o = d.chance(0.5) ? 0.0f : 3.0f;
    }
    std::vector<verkv::row_id> ids, order(pool);
    std::iota(order.begin(), order.end(), verkv::row_id{0});
    std::vector<verkv::token_index> token, all(tokens);
    std::iota(all.begin(), all.end(), verkv::token_index{0});
    for (std::size_t kv = 0; kv < kv_heads; ++kv) {
        d.shuffle(order);
        d.shuffle(all);
        ids.insert(ids.end(), order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count + 1));
        token.insert(token.end(), all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
        token.push_back(0);
    }
    // Every third row lies in pinned memory, and nowhere else.
    std::vector<T> in_device = rows, in_pinned(rows.size(), verkv::from_float<T>(nowhere));
    std::vector<verkv::row_id> listed_ids = ids;
    std::vector<bool> moved(pool);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::size_t row = ids[i];
        if (row % 3 == 0) {
            const auto at = static_cast<std::ptrdiff_t>(row * row_stride);
            const auto width = static_cast<std::ptrdiff_t>(row_stride);
            if (!moved[row]) {
                std::swap_ranges(in_device.begin() + at, in_device.begin() + at + width, in_pinned.begin() + at);
                moved[row] = true;
            }
            listed_ids[i] |= verkv::gpu::pinned_row;
        }
    }
    const std::vector<std::uint32_t> counts = {static_cast<std::uint32_t>(count),
                                               static_cast<std::uint32_t>(count / 2)};
    const std::vector<float> no_list(kv_heads * heads * (count + 1), nowhere);
    const std::vector<float> no_logits(kv_heads * heads * tokens, nowhere);
    const std::vector<std::uint32_t> no_top(kv_heads * heads);
    const auto device_listed = gpu.in_out("listed", std::span<const float>(no_list));
    const auto device_logits = gpu.in_out("logits", std::span<const float>(no_logits));
    const auto device_top = gpu.in_out("top", std::span<const std::uint32_t>(no_top));
    verkv::gpu::row_logits_kernel<T, Heads> k;
    k.rows = gpu.input("rows", std::span<const T>(in_device)).data();
    k.list =
        verkv::gpu::row_list::of_ids(gpu.input("count", std::span<const std::uint32_t>(counts)).data(),
                                     gpu.input("ids", std::span<const verkv::row_id>(listed_ids)).data(), count + 1);
    k.tokens = gpu.input("tokens", std::span<const verkv::token_index>(token)).data();
    k.queries = gpu.input("queries", std::span<const float>(queries)).data();
    k.odds = with_odds ? gpu.input("odds", std::span<const float>(odds)).data() : nullptr;
    k.listed = device_listed.data();
    k.logits = device_logits.data();
    k.top = device_top.data();
    k.pinned_rows = gpu.input("pinned rows", std::span<const T>(in_pinned)).data();
    k.row_stride = row_stride;
    k.list_stride = count + 1;
    k.stride = tokens;
    k.kv_heads = static_cast<unsigned>(kv_heads);
    k.heads = static_cast<unsigned>(heads);
    k.key_dim = static_cast<unsigned>(key_dim);
    k.scale = 0.125f;
    k.blocks = blocks;
    k.threads = threads;
    gpu.launch(k);
    const std::vector<float> listed = gpu.download(device_listed), logits = gpu.download(device_logits);
    const std::vector<std::uint32_t> top = gpu.download(device_top);

    std::size_t wrong = 0;
    for (std::size_t kv = 0; kv < kv_heads; ++kv) {
        for (std::size_t h = 0; h < heads; ++h) {
            std::vector<float> expected(tokens, nowhere);
            float largest = -std::numeric_limits<float>::infinity();
            for (std::size_t i = 0; i < count + 1; ++i) {
                const float found = listed[(kv * heads + h) * (count + 1) + i];
                if (i >= counts[kv]) {
                    wrong += found != nowhere;
                    continue;
                }
                double right = 0, sum = 0;
                for (std::size_t c = 0; c < key_dim; ++c) {
                    const double p =
                        static_cast<double>(queries[(kv * heads + h) * key_dim + c]) *
                        static_cast<double>(verkv::to_float(rows[ids[kv * (count + 1) + i] * row_stride + c]));
                    right += p;
                    sum += std::abs(p);
                }
                wrong += !(std::abs(static_cast<double>(found) - 0.125 * right) <=
                           (static_cast<double>(key_dim) / 8 + 8) * 0x1p-24 * 0.125 * sum);
                const verkv::token_index t = token[kv * (count + 1) + i];
                if (!with_odds || odds[kv * tokens + t] == 0) {
                    expected[t] = found;
                    largest = std::max(largest, found);
                }
            }
            wrong += !std::equal(expected.begin(), expected.end(),
                                 logits.begin() + static_cast<std::ptrdiff_t>((kv * heads + h) * tokens));
            wrong += verkv::gpu::from_ordered_bits(top[kv * heads + h]) != largest;
        }
    }
    CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("logits of listed rows are the products", "[parity]") {
    support::on_cases(18, [](auto& gpu, unsigned seed) {
        const unsigned threads = 32u << (seed % 6);
        check_rows<half, 4>(gpu, 200 + seed, 4, 128, 128, true, threads, 3, seed);
        check_rows<verkv::bfloat16, 8>(gpu, 100, 8, 64, 0, seed % 2 == 0, threads, 2, seed);
        check_rows<float, 1>(gpu, 33, 1, 256, 4, false, threads, 2, seed);
        check_rows<half, 4>(gpu, 50, 6, 80, 3, true, threads, 1, seed);  // rows that no wide load can read
        check_rows<float, 1>(gpu, 20, 3, 7, 0, true, threads, 1, seed);
        check_rows<half, 4>(gpu, 40, 4, 8, 0, true, threads, 1, seed);
    });
    support::on_cases(3, [](auto& gpu, unsigned c) {
        const std::size_t sizes[] = {0, 1, 3000};
        check_rows<half, 4>(gpu, sizes[c], 4, 128, 128, true, 256, 7, c);
    });
}
