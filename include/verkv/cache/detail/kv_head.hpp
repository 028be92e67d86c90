// One KV head of one request: where its tokens lie, and how likely each was to be resident.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "verkv/core/views.hpp"
#include "verkv/plan/stage.hpp"
#include "verkv/store/row_pool.hpp"
#include "verkv/store/staging.hpp"

namespace verkv::inline v0::detail {

template <class Sketch>
struct kv_head {
    static constexpr std::uint32_t offloaded = 0xffffffffu;

    // Per token, in the order of positions.
    std::vector<row_id> host;
    std::vector<std::uint32_t> slot;  // index among the resident rows, or offloaded
    std::vector<float> probability;   // r
    std::vector<float> odds;          // (1 - r)/r
    std::vector<float> uniform;       // U of the draw; of one that was adopted, some U that agrees with it
    std::vector<float> radius;        // ||v - centre||, where a target asks for it
    // Per resident row, in the order of tokens.
    std::vector<row_id> resident;
    std::vector<token_index> resident_token;
    std::vector<float> log_weight;  // ln(1/r)

    std::vector<float> centre;  // of the values, [value_dim]: their mean at the draw
    staging_map staging;
    Sketch sketch;

    explicit kv_head(const Sketch& prototype) : sketch(prototype) {}

    void reserve(std::size_t tokens) {
        host.reserve(tokens);
        slot.reserve(tokens);
        probability.reserve(tokens);
        odds.reserve(tokens);
        uniform.reserve(tokens);
        radius.reserve(tokens);
        resident.reserve(tokens);
        resident_token.reserve(tokens);
        log_weight.reserve(tokens);
    }

    /// A token in host memory only.
    void add_offloaded(row_id host_row) {
        host.push_back(host_row);
        slot.push_back(offloaded);
        probability.push_back(1);
        odds.push_back(0);
        uniform.push_back(0);
        radius.push_back(0);
    }

    /// A token that is resident for certain.
    void add_resident(row_id host_row, row_id resident_row) {
        const std::size_t token = host.size();
        add_offloaded(host_row);
        slot[token] = static_cast<std::uint32_t>(resident.size());
        resident.push_back(resident_row);
        resident_token.push_back(static_cast<token_index>(token));
        log_weight.push_back(0);
    }

    /// Forgets who is resident and takes a new sample: rows[i] holds token sample[i].
    void replace_residents(std::span<const token_index> sample, std::span<const row_id> rows,
                           std::span<const float> r) {
        resident.assign(rows.begin(), rows.end());
        resident_token.assign(sample.begin(), sample.end());
        log_weight.resize(sample.size());
        for (std::size_t i = 0; i < r.size(); ++i) {
            const double p = static_cast<double>(r[i]);
            slot[i] = offloaded;
            probability[i] = r[i];
            odds[i] = static_cast<float>((1 - p) / p);
        }
        for (std::size_t i = 0; i < sample.size(); ++i) {
            slot[sample[i]] = static_cast<std::uint32_t>(i);
            log_weight[i] = static_cast<float>(std::log1p(static_cast<double>(odds[sample[i]])));
        }
    }

    /// Removes tokens first ... last-1. Their rows are the caller's to release.
    void erase(std::size_t first, std::size_t last) {
        const auto cut = [&](auto& v) {
            v.erase(v.begin() + static_cast<std::ptrdiff_t>(first), v.begin() + static_cast<std::ptrdiff_t>(last));
        };
        staging.erase(first, last, host.size());
        cut(host);
        cut(slot);
        cut(probability);
        cut(odds);
        cut(uniform);
        cut(radius);
        std::size_t kept = 0;
        for (std::size_t i = 0; i < resident.size(); ++i) {
            token_index token = resident_token[i];
            if (token >= first && token < last) {
                continue;
            }
            if (token >= last) {
                token -= static_cast<token_index>(last - first);
            }
            resident[kept] = resident[i];
            resident_token[kept] = token;
            log_weight[kept] = log_weight[i];
            slot[token] = static_cast<std::uint32_t>(kept);
            ++kept;
        }
        resident.resize(kept);
        resident_token.resize(kept);
        log_weight.resize(kept);
    }

    void clear() {
        host.clear();
        slot.clear();
        probability.clear();
        odds.clear();
        uniform.clear();
        radius.clear();
        resident.clear();
        resident_token.clear();
        log_weight.clear();
    }
};

}  // namespace verkv::inline v0::detail
