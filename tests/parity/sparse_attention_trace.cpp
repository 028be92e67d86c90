// Split attention over the packaged trace: all tokens, and a sample of them, beside attend().
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/trace_decisions.hpp"
#include "verkv/cuda/merge_parts.hpp"
#include "verkv/cuda/sparse_attention.hpp"

namespace {

using verkv::half;
using verkv::row_id;

/// A decode step of all KV heads; lists[h]: tokens, with their log-weights.
struct trace_step {
    const example::trace<half>& t = support::packaged();
    std::size_t step = 0;
    std::vector<std::vector<row_id>> lists;
    std::vector<std::vector<float>> log_weight;
    std::vector<float> output, lse;

    template <unsigned Dim, class Device>
    void run(Device& gpu, unsigned parts, unsigned threads) {
        const auto heads = static_cast<unsigned>(t.shape.kv_heads);
        const auto group = static_cast<unsigned>(t.shape.group());
        const auto dim = static_cast<unsigned>(t.shape.key_dim);
        std::size_t stride = 0;
        std::vector<std::uint32_t> counts;
        for (const auto& list : lists) {
            stride = (std::max)(stride, list.size());
            counts.push_back(static_cast<std::uint32_t>(list.size()));
        }
        std::vector<row_id> ids(heads * stride);
        std::vector<float> weights(heads * stride);
        for (unsigned h = 0; h < heads; ++h) {
            for (std::size_t i = 0; i < lists[h].size(); ++i) {
                ids[h * stride + i] = lists[h][i] * heads + h;  // [token, head, channel]
                weights[h * stride + i] = log_weight[h][i];
            }
        }
        const std::vector<float> q = support::queries_at(t, step);
        const auto keys = gpu.input("keys", std::span<const half>(t.key_data));
        const auto values = gpu.input("values", std::span<const half>(t.value_data));
        const auto query = gpu.input("queries", std::span<const float>(q));
        const auto id = gpu.input("ids", std::span<const row_id>(ids));
        const auto weight = gpu.input("log-weights", std::span<const float>(weights));
        const auto count = gpu.input("counts", std::span<const std::uint32_t>(counts));
        const std::size_t results = heads * group;
        const auto part_output = gpu.template output<float>("part output", results * parts * dim);
        const auto part_lse = gpu.template output<float>("part lse", results * parts);
        const auto o = gpu.template output<float>("output", results * dim);
        const auto l = gpu.template output<float>("lse", results);
        gpu.launch(verkv::gpu::sparse_attention_kernel<half, Dim, Dim, 4>{
            query.data(),
            keys.data(),
            values.data(),
            dim,
            dim,
            verkv::gpu::row_list::of_ids(count.data(), id.data(), stride),
            weight.data(),
            stride,
            0,
            part_output.data(),
            part_lse.data(),
            t.shape.logit_scale(),
            heads,
            group,
            dim,
            dim,
            parts,
            0,
            parts,
            threads});
        gpu.launch(verkv::gpu::merge_parts_kernel{part_output.data(), part_lse.data(), o.data(), l.data(), heads, group,
                                                  dim, parts, threads});
        output = gpu.download(o);
        lse = gpu.download(l);
    }

    /// Both sides are within what they promise of the exact sum, so within the sum of the two of each other.
    void compare(unsigned parts, unsigned threads) const {
        constexpr double u = 0x1p-24;
        const std::size_t dim = t.shape.key_dim;
        const std::size_t group = t.shape.group();
        const std::vector<float> q = support::queries_at(t, step);
        for (std::size_t h = 0; h < t.shape.kv_heads; ++h) {
            const std::size_t n = lists[h].size();
            std::vector<row_id> ids(n);
            for (std::size_t i = 0; i < n; ++i) {
                ids[i] = static_cast<row_id>(lists[h][i] * t.shape.kv_heads + h);
            }
            const auto stride = static_cast<std::ptrdiff_t>(dim);
            verkv::attend_workspace w;
            std::vector<float> expected(group * dim);
            std::vector<float> expected_lse(group);
            const verkv::rows<half> keys{t.key_data.data(), stride, n, dim, ids.data()};
            const verkv::rows<half> values{t.value_data.data(), stride, n, dim, ids.data()};
            verkv::attend(verkv::cpu{},
                          verkv::contiguous_rows(std::span<const float>(q).subspan(h * group * dim, group * dim), dim),
                          t.shape.logit_scale(), keys, values,
                          {log_weight[h].data(), 1, n, static_cast<std::ptrdiff_t>(n)}, w,
                          verkv::matrix_of(std::span<float>(expected), group, dim), expected_lse);
            const double of_warp = std::ceil(std::ceil(static_cast<double>(n) / 32 / parts) / (threads / 32)) * 32;
            for (std::size_t g = 0; g < group; ++g) {
                const float* query = q.data() + (h * group + g) * dim;
                double largest = 0;
                std::vector<double> weight(n);
                for (std::size_t i = 0; i < n; ++i) {
                    double dot = 0;
                    double size = 0;
                    for (std::size_t c = 0; c < dim; ++c) {
                        const double x =
                            static_cast<double>(query[c]) * static_cast<double>(verkv::to_float(keys[i][c]));
                        dot += x;
                        size += std::abs(x);
                    }
                    const auto scale = static_cast<double>(t.shape.logit_scale());
                    const auto a = static_cast<double>(log_weight[h][i]);
                    largest = (std::max)(largest, (static_cast<double>(dim) + 8) * size * scale + a + 100);
                    weight[i] = std::exp(dot * scale + a - static_cast<double>(expected_lse[g]));
                }
                const double room = 2 * (2 * largest + 2 * of_warp + 100) * u;
                CHECK(std::abs(static_cast<double>(lse[h * group + g]) - static_cast<double>(expected_lse[g])) <= room);
                double worst = 0;
                for (std::size_t c = 0; c < dim; ++c) {
                    double size = 0;
                    for (std::size_t i = 0; i < n; ++i) {
                        size += weight[i] * std::abs(static_cast<double>(verkv::to_float(values[i][c])));
                    }
                    const double off = std::abs(static_cast<double>(output[(h * group + g) * dim + c]) -
                                                static_cast<double>(expected[g * dim + c]));
                    worst = (std::max)(worst, off / (2 * room * size));
                }
                INFO("KV head " << h << ", query head " << g << ", " << n << " rows");
                CHECK(worst <= 1);
            }
        }
    }
};

}  // namespace

TEST_CASE("dense attention over the packaged trace", "[parity]") {
    trace_step s;
    REQUIRE(s.t.shape.key_dim == 64);
    const auto n = static_cast<std::size_t>(s.t.decode_position(0)) + 1;
    for (std::size_t h = 0; h < s.t.shape.kv_heads; ++h) {
        s.lists.emplace_back(n);
        std::iota(s.lists[h].begin(), s.lists[h].end(), row_id{0});
        s.log_weight.emplace_back(n, 0.0f);
    }
    support::on_devices(1, [&](auto& gpu) {
        s.run<64>(gpu, 8, 128);
        s.compare(8, 128);
    });
}

TEST_CASE("attention over samples of the packaged trace", "[parity]") {
    trace_step s;
    s.step = s.t.decode_steps() - 1;
    for (std::size_t h = 0; h < s.t.shape.kv_heads; ++h) {
        const std::vector<float> r = support::trace_probabilities(s.t, h);
        std::vector<verkv::position_t> positions(r.size());
        std::iota(positions.begin(), positions.end(), 0);
        std::vector<verkv::token_index> sample;
        verkv::poisson_draw(verkv::cpu{}, r, positions, verkv::uniform_stream{1, 15, static_cast<std::uint32_t>(h), 0},
                            sample);
        s.lists.push_back(sample);
        s.log_weight.emplace_back();
        for (const verkv::token_index i : sample) {
            s.log_weight[h].push_back(static_cast<float>(-std::log(static_cast<double>(r[i]))));
        }
    }
    for (const unsigned threads : {32u, 96u, 256u}) {
        support::on_devices(2, [&](auto& gpu) {
            s.run<64>(gpu, 5, threads);
            s.compare(5, threads);
        });
    }
    support::on_devices(1, [&](auto& gpu) {
        s.run<0>(gpu, 5, 64);
        s.compare(5, 64);
    });
}
