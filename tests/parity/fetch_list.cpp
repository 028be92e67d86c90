// Fetch lists, staging and gathered rows by the kernels, beside the CPU's for the same plans.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/device_cases.hpp"
#include "support/reference.hpp"
#include "verkv/cuda/fetch_list.hpp"
#include "verkv/cuda/gather_rows.hpp"
#include "verkv/verkv.hpp"

namespace {

constexpr std::uint32_t none = verkv::gpu::no_slot;
constexpr float out = -std::numeric_limits<float>::infinity();

struct rig_shape {
    std::size_t kv_heads = 2, rows = 1, tokens = 300, capacity = 40, width = 32, pad = 0;
    unsigned threads = 64, blocks = 3, seed = 0;
};

// Some KV heads' samples, and their staging on both sides.
template <class Device>
class rig {
public:
    rig(Device& device, const rig_shape& s) : shape(s), random(s.seed + 5), stride(s.tokens + 2), gpu(device) {
        const std::size_t k = s.kv_heads;
        r.assign(k * stride, 1.0f);
        u.assign(k * stride, 0.0f);
        resident_slot.assign(k * stride, none);
        host_row.assign(k * stride, none);
        base.assign(k * stride, 0.0f);
        log_weight.assign(k * s.rows * stride, -7.0f);
        residents.assign(k, 0);
        const std::size_t row_stride = s.width + s.pad;
        host.resize(k * s.tokens * row_stride + 8);
        for (verkv::half& x : host) {
            x.bits = static_cast<std::uint16_t>(random.below(65536));
        }
        staged.resize(k * s.capacity * row_stride);
        std::vector<verkv::row_id> order(k * s.tokens);
        std::iota(order.begin(), order.end(), verkv::row_id{0});
        random.shuffle(order);
        for (std::size_t kv = 0; kv < k; ++kv) {
            for (std::size_t i = 0; i < s.tokens; ++i) {
                const std::size_t at = kv * stride + i;
                r[at] = random.chance(0.1) ? 1.0f : static_cast<float>(random.log_between(0.01, 1));
                u[at] = static_cast<float>(random.uniform());
                if (verkv::sampled(static_cast<double>(r[at]), static_cast<double>(u[at]))) {
                    base[kv * stride + residents[kv]] = -std::log(r[at]);
                    resident_slot[at] = residents[kv]++;
                } else {
                    host_row[at] = order[kv * s.tokens + i];
                }
            }
            maps.emplace_back();
            std::vector<verkv::row_id> ring(s.capacity);
            std::iota(ring.begin(), ring.end(), static_cast<verkv::row_id>(kv * s.capacity));
            maps.back().open(ring, s.tokens);
        }
        token.assign(k * stride, 0);
        probability.assign(k * s.rows * stride, 0.0f);
        count.assign(k, 0);
        kernel.r = input("r", r);
        kernel.uniforms = input("u", u);
        kernel.resident_slot = input("resident slot", resident_slot);
        kernel.host_row = input("host row", host_row);
        kernel.resident_base = input("base", base);
        kernel.residents = input("residents", residents);
        kernel.staging = {filled("slot", k * stride, none),
                          filled("token", k * s.capacity, none),
                          filled("used", k * s.capacity, 0),
                          filled("hand", k, 0),
                          filled("step", k, 0),
                          stride,
                          static_cast<std::uint32_t>(s.capacity)};
        device_staged = gpu.in_out("staged", std::span<const verkv::half>(staged));
        device_arrived = gpu.in_out("arrived", std::span<const std::uint32_t>(std::vector<std::uint32_t>(k)));
        fetch_token = gpu.template output<verkv::token_index>("fetch token", k * stride);
        fetch_row = gpu.template output<verkv::row_id>("fetch row", k * stride);
        fetch_log_weight = gpu.template output<float>("fetch log weight", k * s.rows * stride);
        fetch_count = gpu.template output<std::uint32_t>("fetch count", k);
        copy_from = gpu.template output<verkv::row_id>("copy from", k * stride);
        copy_to = gpu.template output<verkv::row_id>("copy to", k * stride);
        copies_made = gpu.template output<std::uint32_t>("copies", k);
        rows_pinned = gpu.template output<std::uint32_t>("pinned", k);
        kernel.fetch = {.token = fetch_token.data(),
                        .row = fetch_row.data(),
                        .log_weight = fetch_log_weight.data(),
                        .count = fetch_count.data(),
                        .copy_from = copy_from.data(),
                        .copy_to = copy_to.data(),
                        .copies = copies_made.data(),
                        .pinned = rows_pinned.data(),
                        .stride = stride};
        kernel.counts = gpu.template output<std::uint32_t>("counts", k * s.blocks).data();
        kernel.missing = gpu.template output<std::uint32_t>("missing", k * stride).data();
        kernel.arrived = device_arrived.data();
        kernel.stride = stride;
        kernel.resident_stride = stride;
        kernel.kv_heads = static_cast<std::uint32_t>(k);
        kernel.blocks = s.blocks;
        kernel.threads = s.threads;
        gather.from = input("host", host);
        gather.to = device_staged.data();
        gather.copy_from = kernel.fetch.copy_from;
        gather.copy_to = kernel.fetch.copy_to;
        gather.copies = kernel.fetch.copies;
        gather.from_stride = gather.to_stride = row_stride;
        gather.list_stride = stride;
        gather.kv_heads = static_cast<std::uint32_t>(k);
        gather.width = static_cast<std::uint32_t>(s.width);
        gather.blocks = s.blocks;
        gather.threads = s.threads;
    }

    /// A plan that raises about `share` of the tokens, some to 1, some heads not at all.
    void draw_plan(double share) {
        for (std::size_t kv = 0; kv < shape.kv_heads; ++kv) {
            count[kv] = 0;
            for (std::size_t i = 0; i < shape.tokens; ++i) {
                if (r[kv * stride + i] < 1 && random.chance(share)) {
                    const std::size_t at = count[kv]++;
                    token[kv * stride + at] = static_cast<verkv::token_index>(i);
                    for (std::size_t row = 0; row < shape.rows; ++row) {
                        const auto low = static_cast<double>(r[kv * stride + i]);
                        probability[(kv * shape.rows + row) * stride + at] =
                            random.chance(0.3)   ? 0.0f
                            : random.chance(0.2) ? 1.0f
                                                 : static_cast<float>(random.between(low, 1));
                    }
                }
            }
        }
    }

    /// Runs a step on both sides. Returns how many rows are beyond the staging.
    std::size_t step() {
        kernel.plan = {gpu.in_out("plan token", std::span<const verkv::token_index>(token)).data(),
                       gpu.in_out("plan probability", std::span<const float>(probability)).data(),
                       gpu.in_out("plan count", std::span<const std::uint32_t>(count)).data(), stride,
                       static_cast<std::uint32_t>(shape.rows)};
        const auto device_weight = gpu.in_out("log weight", std::span<const float>(log_weight));
        kernel.resident_log_weight = device_weight.data();
        gpu.launch(kernel);
        gpu.launch(gather);
        const auto weight_found = gpu.download(device_weight);
        const auto listed_weight = gpu.download(fetch_log_weight);
        const auto listed_token = gpu.download(fetch_token);
        const auto listed_row = gpu.download(fetch_row);
        const auto listed_count = gpu.download(fetch_count);
        const auto from = gpu.download(copy_from);
        const auto to_row = gpu.download(copy_to);
        const auto copied = gpu.download(copies_made);
        const auto pinned_rows = gpu.download(rows_pinned);
        staged = gpu.download(device_staged);
        std::size_t wrong = 0, pinned = 0;
        for (std::size_t kv = 0; kv < shape.kv_heads; ++kv) {
            std::map<verkv::token_index, std::vector<float>> used;  // as step::use_plans() lists them
            std::vector<std::vector<float>> weights(shape.rows);
            for (std::size_t row = 0; row < shape.rows; ++row) {
                weights[row].assign(base.begin() + static_cast<std::ptrdiff_t>(kv * stride),
                                    base.begin() + static_cast<std::ptrdiff_t>(kv * stride + residents[kv]));
                for (std::size_t i = 0; i < count[kv]; ++i) {
                    const verkv::token_index t = token[kv * stride + i];
                    const float p = probability[(kv * shape.rows + row) * stride + i];
                    if (p == 0) {
                        continue;
                    }
                    const float w = static_cast<float>(std::log(1.0 / static_cast<double>(p)));
                    if (resident_slot[kv * stride + t] != none) {
                        weights[row][resident_slot[kv * stride + t]] = w;
                    } else if (p >= 1 ||
                               (p > r[kv * stride + t] &&
                                verkv::sampled(static_cast<double>(p), static_cast<double>(u[kv * stride + t])))) {
                        auto& of_token = used[t];
                        of_token.resize(shape.rows, out);
                        of_token[row] = w;
                    }
                }
                const float* const found = weight_found.data() + (kv * shape.rows + row) * stride;
                wrong += !std::equal(weights[row].begin(), weights[row].end(), found);
                wrong += found[residents[kv]] != -7.0f;
            }
            std::vector<verkv::token_index> tokens;
            for (const auto& [t, w] : used) {
                const std::size_t i = tokens.size();
                for (std::size_t row = 0; row < shape.rows; ++row) {
                    wrong += listed_weight[(kv * shape.rows + row) * stride + i] != w[row];
                }
                tokens.push_back(t);
            }
            wrong += listed_count[kv] != tokens.size() ||
                     !std::equal(tokens.begin(), tokens.end(), listed_token.data() + kv * stride);
            pinned += pinned_rows[kv];
            if (tokens.size() > shape.capacity) {
                wrong += pinned_rows[kv] != tokens.size() - shape.capacity;
                // Every listed row is somewhere, with what it has to hold.
                std::size_t unstaged = 0;
                for (std::size_t i = 0; i < tokens.size(); ++i) {
                    const verkv::row_id row = listed_row[kv * stride + i];
                    const verkv::row_id home = host_row[kv * stride + tokens[i]];
                    if ((row & verkv::gpu::pinned_row) != 0) {
                        wrong += row != (verkv::gpu::pinned_row | home);
                        ++unstaged;
                        continue;
                    }
                    const std::size_t row_stride = shape.width + shape.pad;
                    wrong += row < kv * shape.capacity || row >= (kv + 1) * shape.capacity;
                    for (std::size_t c = 0; c < shape.width; ++c) {
                        wrong += staged[row * row_stride + c].bits != host[home * row_stride + c].bits;
                    }
                }
                wrong += unstaged != pinned_rows[kv];
                continue;
            }
            std::vector<verkv::row_id> rows(tokens.size());
            std::size_t copies = 0;
            maps[kv].stage(tokens, rows, [&](verkv::token_index t, verkv::row_id to) {
                wrong += to_row[kv * stride + copies] != to || from[kv * stride + copies] != host_row[kv * stride + t];
                ++copies;
            });
            wrong += copied[kv] != copies || pinned_rows[kv] != 0 ||
                     !std::equal(rows.begin(), rows.end(), listed_row.data() + kv * stride);
            // Every used row is where the list says.
            for (std::size_t i = 0; i < tokens.size(); ++i) {
                for (std::size_t c = 0; c < shape.width; ++c) {
                    const std::size_t row_stride = shape.width + shape.pad;
                    wrong += staged[rows[i] * row_stride + c].bits !=
                             host[host_row[kv * stride + tokens[i]] * row_stride + c].bits;
                }
            }
        }
        CHECK(wrong == 0);
        CHECK(gpu.download(device_arrived) == std::vector<std::uint32_t>(shape.kv_heads));
        return pinned;
    }

    rig_shape shape;

private:
    std::uint32_t* filled(const char* name, std::size_t n, std::uint32_t value) {
        const std::vector<std::uint32_t> v(n, value);
        return gpu.in_out(name, std::span<const std::uint32_t>(v)).data();
    }
    template <class T>
    const T* input(const char* name, const std::vector<T>& v) {
        return gpu.input(name, std::span<const T>(v)).data();
    }

    support::dice random;
    std::size_t stride;
    Device& gpu;
    support::device_span<verkv::half> device_staged;
    support::device_span<std::uint32_t> device_arrived, fetch_token, fetch_row, fetch_count, copy_from, copy_to,
        copies_made, rows_pinned;
    support::device_span<float> fetch_log_weight;
    std::vector<float> r, u, base, log_weight, probability;
    std::vector<std::uint32_t> resident_slot, residents, count;
    std::vector<verkv::row_id> host_row;
    std::vector<verkv::token_index> token;
    std::vector<verkv::half> host, staged;
    std::vector<verkv::staging_map> maps;
    verkv::gpu::fetch_list_kernel kernel;
    verkv::gpu::gather_rows_kernel<verkv::half> gather;
};

}  // namespace

TEST_CASE("fetch lists, staging and rows are the CPU's, step after step", "[parity]") {
    support::on_cases(18, [](auto& gpu, unsigned seed) {
        INFO("seed " << seed);
        rig_shape s;
        s.seed = seed;
        s.rows = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 4 : 3;
        s.tokens = 200 + 71 * seed;
        s.capacity = 60 + 9 * seed;
        s.threads = 32u << (seed % 6);
        s.blocks = 1 + seed % 4;
        s.width = seed % 4 == 3 ? 13 : 32 * (1 + seed % 5);
        s.pad = seed % 4 == 1 ? 3 : 0;
        rig both(gpu, s);
        for (unsigned step = 0; step < 6; ++step) {
            both.draw_plan(step == 2 ? 0.0 : 0.02 + 0.04 * step / (s.rows > 1 ? 2 : 1));
            CHECK(both.step() == 0);
        }
    });
}

TEST_CASE("fetch lists of many tokens", "[parity]") {
    support::on_cases(1, [](auto& gpu, unsigned) {
        rig both(gpu, rig_shape{1, 1, 50'000, 4000, 8, 0, 256, 7, 3});
        for (unsigned step = 0; step < 2; ++step) {
            both.draw_plan(0.05);
            CHECK(both.step() == 0);
        }
    });
}

TEST_CASE("rows beyond the staging are listed where they lie", "[parity]") {
    support::on_cases(3, [](auto& gpu, unsigned seed) {
        rig both(gpu, rig_shape{2, 1, 400, 10, 32, 0, 64, 2, seed});
        both.draw_plan(0.5);
        CHECK(both.step() > 0);
    });
}

TEST_CASE("no token, no row", "[parity]") {
    support::on_cases(1, [](auto& gpu, unsigned) {
        rig both(gpu, rig_shape{1, 1, 0, 5, 32, 0, 32, 2, 1});
        both.draw_plan(1);
        CHECK(both.step() == 0);
    });
}
