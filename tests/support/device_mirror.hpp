// A request of a layer_cache as it would lie on a device, and a step there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "support/device.hpp"
#include "support/reference.hpp"
#include "verkv/cuda/layer_step.hpp"
#include "verkv/cuda/reset_staging.hpp"
#include "verkv/verkv.hpp"

namespace support {

/// Device memory of a test, for what takes a memory resource. Goes with the device.
template <class Device>
struct test_memory {
    Device* gpu;

    [[nodiscard]] void* allocate(std::size_t bytes) const {
        return gpu->template output<std::uint32_t>("step " + std::to_string(bytes), (bytes + 3) / 4).data();
    }
    void deallocate(void*, std::size_t) const noexcept {}
};

/// What a step left.
struct device_outcome {
    std::vector<float> output, lse;
    std::vector<verkv::gpu::head_decision> decision;
    std::vector<verkv::gpu::sample_certificate> observed;
    std::vector<std::uint32_t> holds, rounds, fetched, copied, pinned;
    std::vector<std::vector<verkv::token_index>> listed;  ///< of each task
};

/// A request of a cache on a device: a task for each KV head, and one more that has no token. Rows lie in any order.
template <class Device, class T, unsigned Bits, unsigned Heads, unsigned Dim>
class device_mirror {
public:
    using step_type = verkv::gpu::layer_step<T, Bits, Heads, Dim, Dim, test_memory<Device>>;

    template <class Cache>
    device_mirror(Device& gpu, const Cache& cache, verkv::request_id id, std::size_t staging_rows,
                  verkv::tolerance promise, std::size_t rounds, unsigned blocks = 3, unsigned threads = 64)
        : gpu_(gpu),
          shape_(cache.config().shape),
          max_tokens_(cache.config().max_tokens),
          config_(config_of(cache, id, promise, rounds, blocks, threads)),
          step_(config_, test_memory<Device>{&gpu}) {
        step_.prepare(launcher());
        const std::size_t tasks = config_.tasks;
        auto& map = staging_map_;
        map.stride = max_tokens_;
        map.capacity = static_cast<std::uint32_t>(staging_rows);
        map.slot = undefined("slot", tasks * max_tokens_);
        map.token = undefined("token", tasks * staging_rows);
        map.used = undefined("used", tasks * staging_rows);
        map.hand = undefined("hand", tasks);
        map.step = undefined("step", tasks);
        verkv::gpu::reset_staging_kernel reset;
        reset.staging = map;
        reset.kv_heads = static_cast<std::uint32_t>(tasks);
        reset.blocks = 2;
        reset.threads = 64;
        gpu_.launch(reset);
        staging_ = gpu_.template output<T>("staging", tasks * staging_rows * row_width()).data();
    }

    [[nodiscard]] const verkv::gpu::layer_step_config& config() const { return config_; }
    [[nodiscard]] const step_type& step() const { return step_; }

    /// Uploads the request as it is now. seed, draws, drawn: of the draw, see layer_cache.
    template <class Cache>
    void upload(const Cache& cache, verkv::request_id id, std::uint64_t seed, std::uint32_t draws, std::size_t drawn) {
        const std::size_t n = cache.positions(id).size(), tasks = config_.tasks, width = row_width();
        dice random(seed + n);
        const std::size_t stride = max_tokens_;
        std::vector<float> r(tasks * stride, 1.0f), odds(tasks * stride), u(tasks * stride), base(tasks * stride);
        std::vector<std::uint32_t> slot(tasks * stride, verkv::gpu::offloaded), tokens(tasks), residents(tasks);
        std::vector<verkv::row_id> host_row(tasks * stride), resident_row(tasks * stride);
        std::vector<verkv::token_index> resident_token(tasks * stride);
        std::vector<T> host(shape_.kv_heads * n * width), resident(host.size());
        std::vector<verkv::row_id> order(shape_.kv_heads * n);
        std::iota(order.begin(), order.end(), verkv::row_id{0});
        random.shuffle(order);
        std::vector<verkv::gpu::device_rope_pairs> sketches(tasks);
        for (std::size_t h = 0; h < shape_.kv_heads; ++h) {
            tokens[h] = static_cast<std::uint32_t>(n);
            const verkv::uniform_stream stream{seed, cache.config().layer, static_cast<std::uint32_t>(h), draws};
            for (std::size_t i = 0; i < n; ++i) {
                const auto token = static_cast<verkv::token_index>(i);
                const std::size_t at = h * stride + i;
                const double p = static_cast<double>(r[at] = cache.probability(id, h, token));
                odds[at] = static_cast<float>((1 - p) / p);
                u[at] = i < drawn ? static_cast<float>(verkv::uniform(stream, cache.positions(id)[i])) : 0.0f;
                host_row[at] = order[h * n + i];
                const auto row = cache.host_row(id, h, token);
                std::copy(row.begin(), row.end(), host.begin() + static_cast<std::ptrdiff_t>(host_row[at] * width));
                if (cache.resident(id, h, token)) {
                    const std::size_t to = h * stride + residents[h];
                    slot[at] = residents[h]++;
                    resident_token[to] = token;
                    resident_row[to] = order[(h * n + i + 1) % order.size()];
                    base[to] = static_cast<float>(std::log1p(static_cast<double>(odds[at])));
                    std::copy(row.begin(), row.end(),
                              resident.begin() + static_cast<std::ptrdiff_t>(resident_row[to] * width));
                }
            }
            sketches[h] = upload_sketch(cache.sketch_of(id, h));
        }
        sketches.back() = sketches[0];
        sketches.back().groups = 0;
        in_.sketches = input("sketches", sketches);
        in_.lists.probability = changed("r", r);
        in_.lists.odds = changed("odds", odds);
        in_.lists.uniform = changed("uniform", u);
        in_.lists.slot = changed("slot", slot);
        in_.lists.host_row = changed("host row", host_row);
        in_.lists.tokens = changed("tokens", tokens);
        in_.lists.resident_token = changed("resident token", resident_token);
        in_.lists.log_weight = changed("log weight", base);
        in_.lists.residents = changed("residents", residents);
        in_.lists.stride = in_.lists.resident_stride = stride;
        in_.resident = input("resident rows", resident);
        in_.resident_rows =
            verkv::gpu::row_list::of_ids(in_.lists.residents, input("resident ids", resident_row), stride);
        in_.host = input("host rows", host);
        in_.staging = staging_;
        in_.row_stride = width;
        in_.staging_map = staging_map_;
    }

    /// A step for queries [query head, key_dim]; the task without tokens has queries of zeros.
    device_outcome run(std::span<const float> queries) {
        const std::size_t heads = config_.tasks * config_.heads;
        std::vector<float> q(queries.begin(), queries.end());
        q.resize(heads * shape_.key_dim);
        in_.queries = input("queries", q);
        const auto output = gpu_.template output<float>("output", heads * shape_.value_dim);
        const auto lse = gpu_.template output<float>("lse", heads);
        in_.output = output.data();
        in_.lse = lse.data();
        step_.enqueue(launcher(), in_);
        const verkv::gpu::layer_step_report r = step_.report();
        const bool checks = config_.check.rounds > 0;
        device_outcome out;
        out.output = gpu_.download(output);
        out.lse = gpu_.download(lse);
        out.decision = read(r.decision, heads);
        out.observed = read(r.observed, checks ? heads : 0);
        out.holds = read(r.holds, checks ? heads : 0);
        out.rounds = read(r.rounds, config_.tasks);
        out.fetched = read(r.fetched, config_.tasks);
        out.copied = read(r.copied, config_.tasks);
        out.pinned = read(r.pinned, config_.tasks);
        for (std::size_t t = 0; t < config_.tasks; ++t) {
            out.listed.push_back(read(step_.fetched().token + t * max_tokens_, out.fetched[t]));
        }
        return out;
    }

private:
    template <class Cache>
    static verkv::gpu::layer_step_config config_of(const Cache& cache, verkv::request_id id, verkv::tolerance promise,
                                                   std::size_t rounds, unsigned blocks, unsigned threads) {
        const verkv::geometry& g = cache.config().shape;
        const auto codes = cache.sketch_of(id, 0).codes();
        verkv::gpu::layer_step_config c;
        c.tasks = g.kv_heads + 1;
        c.heads = g.group();
        c.key_dim = g.key_dim;
        c.value_dim = g.value_dim;
        c.max_tokens = c.max_residents = cache.config().max_tokens;
        c.scale = g.logit_scale();
        c.channel_count = codes.channel_count;
        c.padded_channels = codes.padded_channels;
        c.group_length = codes.group_length;
        c.promise = promise;
        c.check.rounds = rounds;
        c.blocks = c.parts = blocks;
        c.threads = threads;
        return c;
    }

    [[nodiscard]] auto launcher() {
        return [this](const auto& kernel) { gpu_.launch(kernel); };
    }
    [[nodiscard]] std::size_t row_width() const { return shape_.key_dim + shape_.value_dim; }

    template <class E>
    const E* input(const char* name, const std::vector<E>& v) {
        return gpu_.input(name, std::span<const E>(v)).data();
    }
    template <class E>
    E* changed(const char* name, const std::vector<E>& v) {
        return gpu_.in_out(name, std::span<const E>(v)).data();
    }
    std::uint32_t* undefined(const char* name, std::size_t n) {
        return gpu_.template output<std::uint32_t>(name, n).data();
    }
    template <class E>
    std::vector<E> read(const E* first, std::size_t n) {
        return gpu_.download(device_span<E>{const_cast<E*>(first), n});
    }

    template <class Sketch>
    verkv::gpu::device_rope_pairs upload_sketch(const Sketch& sketch) {
        const auto codes = sketch.codes();
        const std::size_t last = codes.groups == 0 ? 0 : codes.tokens - codes.first_token[codes.groups - 1];
        const std::size_t words =
            codes.groups == 0 ? 0 : (codes.groups - 1) * codes.slot_words + (last + 15) / 16 * 16 * codes.words;
        const std::vector<std::uint32_t> first = verkv::gpu::device_first_tokens(codes);
        return {gpu_.input("codes", std::span<const std::uint32_t>(codes.codes, words)).data(),
                gpu_.input("parameters",
                           std::span<const verkv::half>(codes.parameters, codes.groups * 2 * codes.padded_channels))
                    .data(),
                input("first token", first),
                gpu_.input("channels", std::span<const std::uint32_t>(codes.channels, codes.channel_count)).data(),
                static_cast<std::uint32_t>(codes.groups),
                static_cast<std::uint32_t>(codes.slot_words)};
    }

    Device& gpu_;
    verkv::geometry shape_;
    std::size_t max_tokens_;
    verkv::gpu::layer_step_config config_;
    step_type step_;
    verkv::gpu::device_staging staging_map_;
    T* staging_ = nullptr;
    verkv::gpu::layer_step_inputs<T> in_;
};

}  // namespace support
