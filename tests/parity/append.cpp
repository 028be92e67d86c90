// Tokens appended on the device: rows, lists, and the sketch's codes, bit for bit the CPU's.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "verkv/cpu/executor.hpp"
#include "verkv/cuda/append.hpp"
#include "verkv/cuda/append_codes.hpp"
#include "verkv/sketch/rope_pairs.hpp"

namespace {

using verkv::bfloat16;
using verkv::half;
using verkv::row_id;

template <class T>
std::vector<T> random_rows(std::size_t n, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<T> x(n);
    for (T& v : x) {
        v = verkv::from_float<T>(normal(random));
    }
    return x;
}

template <class T>
void compare_rows(unsigned key_dim, unsigned value_dim, unsigned threads) {
    constexpr unsigned tasks = 3;
    constexpr unsigned steps = 5;
    constexpr std::size_t room = 20;
    std::mt19937 random(threads);
    const std::size_t stride = key_dim + value_dim + 3;
    const auto keys = random_rows<T>(steps * tasks * key_dim, random);
    const auto values = random_rows<T>(steps * tasks * value_dim, random);
    const std::vector<row_id> resident_row = {40, 7, 13, 41, 8, 14, 42, 9, 15, 3, 10, 30, 4, 11, 31};
    const std::vector<row_id> host_row = {0, 1, 2, 5, 4, 3, 10, 11, 12, 20, 19, 18, 7, 8, 9};
    std::vector<unsigned> tokens = {4, 0, 9};
    std::vector<unsigned> residents = {2, 0, 9};
    support::on_devices(3, [&](auto& gpu) {
        const auto k = gpu.input("keys", std::span<const T>(keys));
        const auto v = gpu.input("values", std::span<const T>(values));
        const auto to = gpu.input("resident row", std::span<const row_id>(resident_row));
        const auto to_host = gpu.input("host row", std::span<const row_id>(host_row));
        const auto device = gpu.template output<T>("resident", 50 * stride);
        const auto host = gpu.template output<T>("host", 21 * stride);
        const auto f = [&](const char* name) { return gpu.template output<float>(name, tasks * room); };
        const auto w = [&](const char* name) { return gpu.template output<std::uint32_t>(name, tasks * room); };
        const auto r = f("r");
        const auto odds = f("odds");
        const auto u = f("uniform");
        const auto log_weight = f("log-weight");
        const auto slot = w("slot");
        const auto row = w("host row of a token");
        const auto token = w("resident token");
        const auto n = gpu.in_out("tokens", std::span<const unsigned>(tokens));
        const auto m = gpu.in_out("residents", std::span<const unsigned>(residents));
        const verkv::gpu::token_arrays lists{r.data(),   odds.data(), u.data(),     slot.data(),
                                             row.data(), n.data(),    token.data(), log_weight.data(),
                                             m.data(),   room,        room};
        for (unsigned step = 0; step < steps; ++step) {
            gpu.launch(verkv::gpu::append_kernel<T>{
                k.data() + step * tasks * key_dim, v.data() + step * tasks * value_dim, key_dim, value_dim,
                to.data() + step * tasks, to_host.data() + step * tasks, device.data(), host.data(), stride, lists,
                tasks, key_dim, value_dim, threads});
        }
        CHECK(gpu.download(n) == std::vector<unsigned>{9, 5, 14});
        CHECK(gpu.download(m) == std::vector<unsigned>{7, 5, 14});
        const auto rows = gpu.download(device);
        const auto host_rows = gpu.download(host);
        bool right = true;
        for (unsigned step = 0; step < steps; ++step) {
            for (unsigned t = 0; t < tasks; ++t) {
                const std::size_t i = step * tasks + t;
                const auto is = [&](const std::vector<T>& memory, row_id at) {
                    const T* found = memory.data() + at * stride;
                    return std::equal(found, found + key_dim, keys.data() + i * key_dim) &&
                           std::equal(found + key_dim, found + key_dim + value_dim, values.data() + i * value_dim);
                };
                right = right && is(rows, resident_row[i]) && is(host_rows, host_row[i]);
                const std::size_t at = t * room + tokens[t] + step;
                const std::size_t place = t * room + residents[t] + step;
                right = right && gpu.download(r)[at] == 1 && gpu.download(odds)[at] == 0 && gpu.download(u)[at] == 0 &&
                        gpu.download(slot)[at] == residents[t] + step && gpu.download(row)[at] == host_row[i] &&
                        gpu.download(token)[place] == tokens[t] + step && gpu.download(log_weight)[place] == 0;
            }
        }
        CHECK(right);
    });
}

/// Appends `tokens` tokens one by one to a sketch that has `before`, on both sides.
template <class T>
void compare_codes(const verkv::rope_pair_options& options, std::size_t before, std::size_t tokens, unsigned threads,
                   bool special = false) {
    constexpr unsigned tasks = 2;
    std::mt19937 random(static_cast<unsigned>(before * 31 + tokens + threads));
    const std::size_t all = before + tokens;
    std::vector<std::vector<T>> keys;
    std::vector<verkv::rope_pair_sketch> cpu(tasks, verkv::rope_pair_sketch(options));
    for (unsigned t = 0; t < tasks; ++t) {
        keys.push_back(random_rows<T>(all * options.key_dim, random));
        if (special) {
            const float values[] = {0.0f, -0.0f, 1e-8f, 0.0f, -0.0f};
            for (T& x : keys[t]) {
                x = verkv::from_float<T>(values[random() % 5]);
            }
            keys[t][(all / 2) * options.key_dim + 1] = verkv::from_float<T>(std::numeric_limits<float>::quiet_NaN());
            keys[t][(all / 3) * options.key_dim + 2] = verkv::from_float<T>(60000.0f);
        }
        const auto rows = verkv::contiguous_rows(std::span<const T>(keys[t]), options.key_dim);
        cpu[t].fit(verkv::cpu{}, rows);
        cpu[t].append(verkv::cpu{}, rows.slice(0, before));
    }
    const verkv::rope_pair_codes shape = cpu[0].codes();
    const std::size_t groups = all / options.group_length + 2;
    const std::size_t raw_size = (options.group_length + 15) / 16 * 16 * shape.channel_count;
    support::on_devices(2, [&](auto& gpu) {
        std::vector<verkv::gpu::growing_rope_pairs> sketches;
        struct memory {
            support::device_span<std::uint32_t> codes, first, groups, open;
            support::device_span<half> parameters;
        };
        std::vector<memory> of;
        std::vector<verkv::rope_pair_sketch> own = cpu;
        std::vector<support::device_span<T>> rows;
        for (unsigned t = 0; t < tasks; ++t) {
            const verkv::rope_pair_codes c = own[t].codes();
            std::vector<std::uint32_t> codes(groups * c.slot_words);
            const std::size_t blocks = c.groups == 0 ? 0 : (c.tokens - c.first_token[c.groups - 1] + 15) / 16;
            const std::size_t used = c.groups == 0 ? 0 : (c.groups - 1) * c.slot_words + blocks * 16 * c.words;
            std::copy_n(c.codes, used, codes.begin());
            std::vector<half> parameters(groups * 2 * c.padded_channels, half{0u});
            std::copy_n(c.parameters, c.groups * 2 * c.padded_channels, parameters.begin());
            std::vector<std::uint32_t> first(groups + 1);
            std::copy_n(c.first_token, c.groups, first.begin());
            first[c.groups] = static_cast<std::uint32_t>(c.tokens);
            const std::size_t held = c.tokens % options.group_length;
            std::vector<float> raw(raw_size);
            for (std::size_t i = 0; i < held; ++i) {
                for (std::size_t k = 0; k < c.channel_count; ++k) {
                    raw[(i / 16 * c.channel_count + k) * 16 + i % 16] =
                        verkv::to_float(keys[t][(c.tokens - held + i) * options.key_dim + c.channels[k]]);
                }
            }
            const std::vector<std::uint32_t> count = {static_cast<std::uint32_t>(c.groups)};
            const std::vector<std::uint32_t> open = {static_cast<std::uint32_t>(held)};
            const auto upload = [&](const char* name, const auto& v) {
                using element = typename std::remove_cvref_t<decltype(v)>::value_type;
                return gpu.in_out(name, std::span<const element>(v));
            };
            const std::vector<std::uint32_t> channels(c.channels, c.channels + c.channel_count);
            of.push_back({upload("codes", codes), upload("first token", first), upload("groups", count),
                          upload("open", open), upload("parameters", parameters)});
            sketches.push_back({of[t].codes.data(), of[t].parameters.data(), of[t].first.data(),
                                upload("channels", channels).data(), upload("raw", raw).data(), of[t].groups.data(),
                                of[t].open.data()});
        }
        std::vector<T> both;  // [token][task]
        for (std::size_t i = before; i < all; ++i) {
            for (unsigned t = 0; t < tasks; ++t) {
                both.insert(both.end(), keys[t].begin() + static_cast<std::ptrdiff_t>(i * options.key_dim),
                            keys[t].begin() + static_cast<std::ptrdiff_t>((i + 1) * options.key_dim));
            }
        }
        const auto key = gpu.input("keys", std::span<const T>(both));
        const auto sketch = gpu.input("sketches", std::span<const verkv::gpu::growing_rope_pairs>(sketches));
        bool right = true;
        for (std::size_t i = 0; i < tokens; ++i) {
            gpu.launch(verkv::gpu::append_codes_kernel<T>{
                key.data() + i * tasks * options.key_dim, options.key_dim, sketch.data(), tasks,
                static_cast<unsigned>(shape.channel_count), static_cast<unsigned>(shape.padded_channels),
                static_cast<unsigned>(shape.words), static_cast<unsigned>(shape.slot_words),
                static_cast<unsigned>(options.group_length), options.bits, threads});
            for (unsigned t = 0; t < tasks; ++t) {
                own[t].append(
                    verkv::cpu{},
                    verkv::contiguous_rows(std::span<const T>(keys[t]), options.key_dim).slice(before + i, 1));
                if (i % 7 != 0 && i + 1 != tokens) {
                    continue;
                }
                const verkv::rope_pair_codes c = own[t].codes();
                const auto groups_now = gpu.download(of[t].groups);
                const auto first = gpu.download(of[t].first);
                const auto codes = gpu.download(of[t].codes);
                const auto parameters = gpu.download(of[t].parameters);
                const std::size_t blocks = (c.tokens - c.first_token[c.groups - 1] + 15) / 16;
                const std::size_t used = (c.groups - 1) * c.slot_words + blocks * 16 * c.words;
                right = right && groups_now[0] == c.groups && first[c.groups] == c.tokens &&
                        std::equal(c.first_token, c.first_token + c.groups, first.begin()) &&
                        std::equal(c.codes, c.codes + used, codes.begin()) &&
                        std::equal(c.parameters, c.parameters + c.groups * 2 * c.padded_channels, parameters.begin());
            }
        }
        INFO(options.bits << " bits, " << shape.channel_count << " channels, groups of " << options.group_length << ", "
                          << before << " + " << tokens << " tokens, " << threads << " threads");
        CHECK(right);
    });
}

}  // namespace

TEST_CASE("appended rows are in both memories, and in the lists", "[parity]") {
    compare_rows<bfloat16>(128, 128, 128);
    compare_rows<half>(7, 5, 32);
    compare_rows<float>(64, 32, 1024);
}

TEST_CASE("codes of appended tokens are the CPU's, bit for bit", "[parity]") {
    verkv::rope_pair_options o;
    o.key_dim = 32;
    o.group_length = 24;
    for (unsigned bits = 1; bits <= 8; ++bits) {
        o.bits = bits;
        o.pair_fraction = 0.6;
        compare_codes<half>(o, 17, 20, 64);
        compare_codes<bfloat16>(o, 0, 30, 96);
    }
    o.bits = 2;
    o.group_length = 1;
    compare_codes<float>(o, 3, 5, 32);
    o.group_length = 16;
    compare_codes<float>(o, 16, 33, 256);
}

TEST_CASE("codes of appended tokens: the paper's sketch, blocks of every size", "[parity]") {
    verkv::rope_pair_options o;
    o.key_dim = 128;
    for (const unsigned threads : {32u, 128u, 416u, 1024u}) {
        compare_codes<bfloat16>(o, 250, 8, threads);
    }
}

TEST_CASE("codes of appended tokens: zeros of both signs, NaN, constants", "[parity]") {
    verkv::rope_pair_options o;
    o.key_dim = 16;
    o.pair_fraction = 1;
    o.group_length = 20;
    for (std::size_t before = 0; before < 12; ++before) {
        compare_codes<float>(o, before, 24, 64, true);
        compare_codes<half>(o, before, 24, 64, true);
    }
}
