// A decode step of a layer on the device: a fixed sequence of launches, from queries to outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "verkv/cache/policies.hpp"
#include "verkv/core/detail/product.hpp"
#include "verkv/core/error.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/tolerance.hpp"
#include "verkv/cuda/block.hpp"
#include "verkv/cuda/calibrate_levels.hpp"
#include "verkv/cuda/check_sample.hpp"
#include "verkv/cuda/clear.hpp"
#include "verkv/cuda/fetch_list.hpp"
#include "verkv/cuda/find_levels.hpp"
#include "verkv/cuda/gather_rows.hpp"
#include "verkv/cuda/group_plan.hpp"
#include "verkv/cuda/lower_levels.hpp"
#include "verkv/cuda/memory.hpp"
#include "verkv/cuda/merge_parts.hpp"
#include "verkv/cuda/rope_pair_logits.hpp"
#include "verkv/cuda/row_list.hpp"
#include "verkv/cuda/row_logits.hpp"
#include "verkv/cuda/sparse_attention.hpp"
#include "verkv/cuda/token_arrays.hpp"
#include "verkv/cuda/weigh.hpp"

namespace verkv::inline v0::gpu {

/// What a layer_step is built for. A task is a KV head of a request of the batch.
struct layer_step_config {
    std::size_t tasks = 1;
    std::size_t heads = 1;  ///< query heads of a KV head, G
    std::size_t key_dim = 128;
    std::size_t value_dim = 128;
    std::size_t max_tokens = 0;     ///< of a task
    std::size_t max_residents = 0;  ///< of a task
    float scale = 1;                ///< of logits
    // The sketch, see rope_pair_codes.
    std::size_t channel_count = 0;
    std::size_t padded_channels = 0;
    std::size_t group_length = 128;
    tolerance promise = {};
    /// A round is six launches, which end as they begin where certificates hold; the last one reads everything over the
    /// bus: a round more costs less than what it may save.
    sample_check check = {.rounds = 12};
    // Shapes of launches. Results have the same bits for the same shapes.
    std::uint32_t blocks = 0;     ///< of a task in passes over its tokens or rows; 0: two a multiprocessor in all
    std::uint32_t parts = 0;      ///< that attention cuts a list into; 0: likewise
    std::uint32_t threads = 256;  ///< of a block; twice or four times as many where few blocks work
    std::uint32_t multiprocessors = 132;
};

/// What a step reads and writes, in device memory. Strides of `lists` are those of the configuration.
template <storage T>
struct layer_step_inputs {
    const device_rope_pairs* sketches = nullptr;  ///< [tasks]
    const float* queries = nullptr;               ///< rotated, [tasks, G, key_dim]
    token_arrays lists;                           ///< stride max_tokens, resident_stride max_residents
    const T* resident = nullptr;                  ///< rows: a key followed by its value
    row_list resident_rows;                       ///< as many as lists.residents says
    const T* host = nullptr;                      ///< pinned rows, as the device addresses them
    T* staging = nullptr;
    std::size_t row_stride = 0;  ///< elements from one row to the next, in all three memories
    device_staging staging_map;  ///< of the tasks, kept from step to step
    float* output = nullptr;     ///< [tasks, G, value_dim]
    float* lse = nullptr;        ///< [tasks, G]
};

/// What a step tells, in device memory; valid until the next one is enqueued.
struct layer_step_report {
    const head_decision* decision;       ///< of the plan that was carried out, [tasks, G]
    const sample_certificate* observed;  ///< [tasks, G]; undefined without a check
    const std::uint32_t* holds;          ///< whether observed is below epsilon, [tasks, G]; undefined without a check
    const std::uint32_t* rounds;         ///< fetches that the check asked for, [tasks]
    const std::uint32_t* fetched;        ///< rows beside the resident ones, [tasks]
    const std::uint32_t* copied;         ///< rows copied to staging, all rounds, [tasks]
    const std::uint32_t* pinned;         ///< rows read where they lie, for want of room, [tasks]
};

/// One decode step for a batch: sketch logits, plan (water-filling, joint for a group), fetch, check from the sample,
/// attention. What layer_cache::decode() does with a rope_pair_sketch, the denominator as its target, exact weights for
/// certain tokens and no shortlist [VerKV §4; beyond §1, §5, §6].
///
/// Everything is decided on the device: the host enqueues the same launches whatever comes out, waits for nothing and
/// allocates nothing, so that a step can be captured in a graph and replayed (with the same pointers in `in`). Rounds
/// of the check that a KV head does not need end as they begin. Rows that staging has no room for are read in pinned
/// memory. One layer_step serves all layers of a model, one after another on a stream; what is kept from step to step
/// is in `in`.
///
/// launch(kernel) puts a kernel on the stream: [&](const auto& k) { gpu::launch(stream, k); }
/// T: storage of rows. Bits: of the sketch. Heads: 1, 2, 4 or 8, at least G. KeyDim, ValueDim: see
/// sparse_attention_kernel; 0 for any.
/// Memory: 12 G + 36 bytes a token of each task, 4 (2 G + 1) a resident row, and parts.
template <storage T, unsigned Bits, unsigned Heads, unsigned KeyDim, unsigned ValueDim, memory_resource Device>
class layer_step {
public:
    /// Takes all the memory that steps need. Throws invalid_argument for sizes out of range; what the resource throws.
    layer_step(const layer_step_config& config, const Device& device)
        : config_(completed(config)),
          rows_(config.tasks * config.heads),
          edges_(find_levels_kernel<Heads>::edges_of(config.promise)),
          mass_(device, verkv::detail::product("masses", rows_, config.max_tokens)),
          listed_mass_(device, rows_ * config.max_tokens),
          fetched_logits_(device, config_.check.rounds > 0 ? rows_ * config.max_tokens : 0),
          per_token_(device, verkv::detail::product("lists", config.tasks, config.max_tokens, word_lists)),
          per_token_floats_(device, config.tasks * config.max_tokens * float_lists),
          resident_logits_(device, verkv::detail::product("resident rows", rows_, config.max_residents)),
          resident_weight_(device, config.tasks * config.max_residents),
          per_head_(device, rows_ * 4),
          partial_(device, rows_ * config_.blocks),
          decision_(device, rows_),
          level_(device, rows_),
          observed_(device, rows_),
          bins_(device, rows_ * edges_ * 3),
          bin_counts_(device, rows_ * edges_ * 2),
          variance_(device, config.tasks * config_.blocks * 2 * Heads),
          term_(device, config.tasks * config_.blocks * 2 * Heads),
          arrived_(device, rows_),
          counts_(device, config.tasks * config_.blocks),
          holds_(device, rows_),
          per_task_(device, config.tasks * task_words),
          cleared_(device, rows_ + config.tasks * (cleared_words + config_.check.rounds)),
          part_output_(device, rows_ * 2 * config_.parts * config.value_dim),
          part_lse_(device, rows_ * 2 * config_.parts) {}

    [[nodiscard]] const layer_step_config& config() const { return config_; }

    /// Enqueues what has to come before the first step, and before the next one where a launch has failed.
    template <class Launch>
    void prepare(Launch&& launch) const {
        launch(clear_kernel<std::uint64_t>{bins_.data(), bins_.size(), 1, config_.threads});
        launch(clear_kernel<std::uint32_t>{bin_counts_.data(), bin_counts_.size(), 1, config_.threads});
        launch(clear_kernel<std::uint32_t>{arrived_.data(), arrived_.size(), 1, config_.threads});
    }

    /// Enqueues a step: 11 launches, and with a check 4 + 6 for each round more. Throws invalid_argument where strides
    /// are not those of the configuration; what launch() throws.
    template <class Launch>
    void enqueue(Launch&& launch, const layer_step_inputs<T>& in) const {
        check_inputs(in);
        launch(clear_kernel<std::uint32_t>{cleared_.data(), cleared_.size(), 1, config_.threads});
        weigh_tokens(launch, in);
        plan(launch, in);
        if (config_.check.rounds > 0) {
            launch(calibrate(in));
            launch(plan_at(in, 0));
        }
        fetch(launch, in, nullptr);
        if (config_.check.rounds > 0) {
            look(launch, in, nullptr);
        }
        for (std::uint32_t round = 1; round <= config_.check.rounds; ++round) {
            launch(lower(in, round));
            launch(plan_at(in, round));
            fetch(launch, in, work(round));
            look(launch, in, work(round));
        }
        attend(launch, in);
    }

    [[nodiscard]] layer_step_report report() const {
        return {decision_.data(), observed_.data(), holds_.data(), rounds(), task_word(1), copied(), task_word(3)};
    }
    /// Rows beside the resident ones, of the last plan: for who wants to see them.
    [[nodiscard]] device_fetch fetched() const {
        device_fetch f;
        f.token = list(1);
        f.row = list(2);
        f.log_weight = float_list(2);
        f.count = task_word(1);
        f.copy_from = list(3);
        f.copy_to = list(4);
        f.copies = task_word(2);
        f.copied = copied();
        f.pinned = task_word(3);
        f.stride = config_.max_tokens;
        return f;
    }

private:
    static constexpr std::size_t word_lists = 6;     // plan, fetch: token, row, from, to, without a slot
    static constexpr std::size_t float_lists = 3;    // plan: r', odds; fetch: log-weight
    static constexpr std::size_t task_words = 4;     // plan: count; fetch: count, copies, pinned
    static constexpr std::size_t cleared_words = 3;  // of a task: rounds, copied, work of the calibration

    static layer_step_config completed(layer_step_config c) {
        namespace d = verkv::detail;
        validate(c.promise);
        validate(step_policies{.check = c.check});
        d::check(c.tasks > 0 && c.heads > 0 && c.heads <= Heads, c.tasks, " KV heads of ", c.heads,
                 " query heads; this step was compiled for 1 to ", Heads, " query heads");
        d::check(c.tasks <= most_blocks_y / c.heads, c.tasks, " KV heads of ", c.heads, " query heads; a launch takes ",
                 most_blocks_y, " query heads");
        d::check(c.key_dim > 0 && c.value_dim > 0 && (KeyDim == 0 || c.key_dim == KeyDim) &&
                     (ValueDim == 0 || c.value_dim == ValueDim),
                 "rows of ", c.key_dim, " + ", c.value_dim, " channels; this step was compiled for ", KeyDim, " + ",
                 ValueDim, " (0: any)");
        d::check(c.max_tokens > 0 && c.max_tokens <= most_tokens, c.max_tokens, " tokens of a KV head; 1 to ",
                 most_tokens, " can be planned for");
        d::check(c.max_residents <= c.max_tokens, c.max_residents, " resident rows of ", c.max_tokens, " tokens");
        d::check(c.channel_count > 0 && c.channel_count <= c.key_dim && c.padded_channels >= c.channel_count &&
                     c.group_length > 0,
                 "a sketch of ", c.channel_count, " channels, padded to ", c.padded_channels, ", of keys of ",
                 c.key_dim, ", in groups of ", c.group_length, " tokens");
        d::check(c.threads > 0 && c.threads % warp_size == 0 && c.threads <= 256, "blocks of ", c.threads,
                 " threads; a multiple of ", warp_size, " up to 256 is needed");
        const auto all = static_cast<std::uint32_t>(2 * std::size_t{c.multiprocessors});
        const auto share = static_cast<std::uint32_t>(all / c.tasks + 1);
        c.blocks = c.blocks > 0 ? c.blocks : share;
        c.parts = c.parts > 0 ? c.parts : share;
        return c;
    }

    void check_inputs(const layer_step_inputs<T>& in) const {
        namespace d = verkv::detail;
        d::check(in.lists.stride == config_.max_tokens && in.lists.resident_stride == config_.max_residents,
                 "lists with room for ", in.lists.stride, " tokens and ", in.lists.resident_stride,
                 " resident rows; the step was built for ", config_.max_tokens, " and ", config_.max_residents);
        d::check(in.staging_map.stride >= config_.max_tokens, "a staging map of ", in.staging_map.stride,
                 " tokens; the step was built for ", config_.max_tokens);
        d::check(in.row_stride >= config_.key_dim + config_.value_dim, "rows ", in.row_stride,
                 " elements apart; they have ", config_.key_dim + config_.value_dim);
    }

    [[nodiscard]] std::uint32_t tasks() const { return static_cast<std::uint32_t>(config_.tasks); }
    [[nodiscard]] std::uint32_t heads() const { return static_cast<std::uint32_t>(config_.heads); }
    [[nodiscard]] std::uint32_t* list(std::size_t k) const {
        return per_token_.data() + k * config_.tasks * config_.max_tokens;
    }
    [[nodiscard]] float* float_list(std::size_t k) const {
        return per_token_floats_.data() + k * config_.tasks * config_.max_tokens;
    }
    [[nodiscard]] double* of_heads(std::size_t k) const { return per_head_.data() + k * rows_; }
    [[nodiscard]] std::uint32_t* task_word(std::size_t k) const { return per_task_.data() + k * config_.tasks; }
    // Cleared at the beginning of a step.
    [[nodiscard]] std::uint32_t* top() const { return cleared_.data(); }
    [[nodiscard]] std::uint32_t* rounds() const { return top() + rows_; }
    [[nodiscard]] std::uint32_t* copied() const { return rounds() + config_.tasks; }
    /// Of a round; 0: of the calibration.
    [[nodiscard]] std::uint32_t* work(std::uint32_t round) const { return copied() + (1 + round) * config_.tasks; }
    // Of query heads.
    [[nodiscard]] double* total() const { return of_heads(0); }
    [[nodiscard]] double* level() const { return of_heads(1); }

    [[nodiscard]] plan_lists planned() const { return {list(0), float_list(0), task_word(0), config_.max_tokens, 1}; }

    /// Masses of all tokens relative to the largest, and their sum.
    template <class Launch>
    void weigh_tokens(Launch&& launch, const layer_step_inputs<T>& in) const {
        rope_pair_logits_kernel<Bits, Heads> sketched;
        sketched.sketch = in.sketches;
        sketched.queries = in.queries;
        sketched.odds = in.lists.odds;
        sketched.logits = mass_.data();
        sketched.top = top();
        sketched.stride = config_.max_tokens;
        sketched.kv_heads = tasks();
        sketched.heads = heads();
        sketched.key_dim = static_cast<std::uint32_t>(config_.key_dim);
        sketched.channel_count = static_cast<std::uint32_t>(config_.channel_count);
        sketched.padded_channels = static_cast<std::uint32_t>(config_.padded_channels);
        sketched.group_length = static_cast<std::uint32_t>(config_.group_length);
        sketched.scale = config_.scale;
        sketched.blocks = config_.blocks;
        sketched.threads = config_.threads;
        launch(sketched);

        row_logits_kernel<T, Heads> exact = logits_of(in);
        exact.rows = in.resident;
        exact.list = in.resident_rows;
        exact.tokens = in.lists.resident_token;
        exact.odds = in.lists.odds;
        exact.listed = resident_logits_.data();
        exact.logits = mass_.data();
        exact.top = top();
        exact.list_stride = config_.max_residents;
        launch(exact);

        weigh_kernel w;
        w.logits = mass_.data();
        w.tokens = in.lists.tokens;
        w.top = top();
        w.partial = partial_.data();
        w.total = total();
        w.arrived = arrived_.data();
        w.stride = config_.max_tokens;
        w.kv_heads = tasks();
        w.heads = heads();
        w.blocks = (config_.blocks + heads() - 1) / heads();
        w.threads = config_.threads;
        launch(w);
    }

    [[nodiscard]] row_logits_kernel<T, Heads> logits_of(const layer_step_inputs<T>& in) const {
        row_logits_kernel<T, Heads> k;
        k.queries = in.queries;
        k.row_stride = in.row_stride;
        k.stride = config_.max_tokens;
        k.kv_heads = tasks();
        k.heads = heads();
        k.key_dim = static_cast<std::uint32_t>(config_.key_dim);
        k.scale = config_.scale;
        k.blocks = config_.blocks;
        k.threads = config_.threads;
        return k;
    }

    template <class Launch>
    void plan(Launch&& launch, const layer_step_inputs<T>& in) const {
        find_levels_kernel<Heads> levels;
        levels.mass = mass_.data();
        levels.odds = in.lists.odds;
        levels.tokens = in.lists.tokens;
        levels.reference = levels.total = total();
        levels.level = level_.data();
        levels.sums = bins_.data();
        levels.counts = bin_counts_.data();
        levels.variance = variance_.data();
        levels.term = term_.data();
        levels.arrived = arrived_.data();
        levels.stride = config_.max_tokens;
        levels.kv_heads = tasks();
        levels.heads = heads();
        levels.edges = edges_;
        levels.epsilon = config_.promise.epsilon;
        levels.log_term = config_.promise.log_term();
        levels.blocks = config_.blocks;
        levels.threads = config_.threads;
        launch(levels);
        launch(plan_kernel(in));
    }

    [[nodiscard]] group_plan_kernel<Heads> plan_kernel(const layer_step_inputs<T>& in) const {
        group_plan_kernel<Heads> k;
        k.mass = mass_.data();
        k.odds = in.lists.odds;
        k.tokens = in.lists.tokens;
        k.reference = total();
        k.level = level_.data();
        k.lists = planned();
        k.decision = decision_.data();
        k.listed_odds = float_list(1);
        k.listed_mass = listed_mass_.data();
        k.counts = counts_.data();
        k.variance = variance_.data();
        k.term = term_.data();
        k.arrived = arrived_.data();
        k.stride = config_.max_tokens;
        k.kv_heads = tasks();
        k.heads = heads();
        k.epsilon = config_.promise.epsilon;
        k.log_term = config_.promise.log_term();
        k.blocks = config_.blocks;
        k.threads = 2 * config_.threads;  // its last block works alone
        return k;
    }

    /// A plan at levels that are lower than those found.
    [[nodiscard]] group_plan_kernel<Heads> plan_at(const layer_step_inputs<T>& in, std::uint32_t round) const {
        group_plan_kernel<Heads> k = plan_kernel(in);
        k.given = level();
        k.work = work(round);
        return k;
    }

    [[nodiscard]] sample_rows resident_sample(const layer_step_inputs<T>& in) const {
        return {in.lists.residents,
                in.lists.resident_token,
                resident_logits_.data(),
                resident_weight_.data(),
                config_.max_residents,
                config_.max_residents,
                0};
    }

    [[nodiscard]] calibrate_levels_kernel calibrate(const layer_step_inputs<T>& in) const {
        calibrate_levels_kernel k;
        k.resident = resident_sample(in);
        k.mass = mass_.data();
        k.odds = in.lists.odds;
        k.top = top();
        k.total = total();
        k.decision = decision_.data();
        k.raised = planned().count;
        k.level = level();
        k.steps_down = of_heads(2);
        k.before = of_heads(3);
        k.work = work(0);
        k.stride = config_.max_tokens;
        k.ratio = config_.check.step;
        k.kv_heads = tasks();
        k.heads = heads();
        k.threads = 4 * config_.threads;
        return k;
    }

    [[nodiscard]] lower_levels_kernel lower(const layer_step_inputs<T>& in, std::uint32_t round) const {
        lower_levels_kernel k;
        k.holds = holds_.data();
        k.observed = observed_.data();
        k.decision = decision_.data();
        k.mass = mass_.data();
        k.odds = in.lists.odds;
        k.tokens = in.lists.tokens;
        k.reference = total();
        k.level = level();
        k.steps = of_heads(2);
        k.before = of_heads(3);
        k.work = work(round);
        k.rounds = rounds();
        k.stride = config_.max_tokens;
        k.epsilon = config_.promise.epsilon;
        k.log_term = config_.promise.log_term();
        k.ratio = config_.check.step;
        k.kv_heads = tasks();
        k.heads = heads();
        k.round = round;
        k.last = round == config_.check.rounds ? 1 : 0;
        k.threads = config_.threads;
        return k;
    }

    /// Lists the rows that the plan uses, and brings them to the device.
    template <class Launch>
    void fetch(Launch&& launch, const layer_step_inputs<T>& in, const std::uint32_t* work_of_round) const {
        fetch_list_kernel k;
        k.plan = planned();
        k.r = in.lists.probability;
        k.uniforms = in.lists.uniform;
        k.resident_slot = in.lists.slot;
        k.host_row = in.lists.host_row;
        k.resident_base = in.lists.log_weight;
        k.resident_log_weight = resident_weight_.data();
        k.residents = in.lists.residents;
        k.staging = in.staging_map;
        k.fetch = fetched();
        k.work = work_of_round;
        k.counts = counts_.data();
        k.missing = list(5);
        k.arrived = arrived_.data();
        k.stride = config_.max_tokens;
        k.resident_stride = config_.max_residents;
        k.kv_heads = tasks();
        k.blocks = config_.blocks;
        k.threads = config_.threads;
        launch(k);

        gather_rows_kernel<T> g;
        g.from = in.host;
        g.to = in.staging;
        g.copy_from = k.fetch.copy_from;
        g.copy_to = k.fetch.copy_to;
        g.copies = k.fetch.copies;
        g.work = work_of_round;
        g.from_stride = g.to_stride = in.row_stride;
        g.list_stride = k.fetch.stride;
        g.kv_heads = tasks();
        g.width = static_cast<std::uint32_t>(config_.key_dim + config_.value_dim);
        g.blocks = config_.blocks;
        g.threads = config_.threads;
        launch(g);
    }

    [[nodiscard]] row_list fetched_rows() const { return row_list::of_ids(task_word(1), list(2), config_.max_tokens); }

    /// What the sample certifies by itself.
    template <class Launch>
    void look(Launch&& launch, const layer_step_inputs<T>& in, const std::uint32_t* work_of_round) const {
        row_logits_kernel<T, Heads> exact = logits_of(in);
        exact.rows = in.staging;
        exact.pinned_rows = in.host;
        exact.list = fetched_rows();
        exact.listed = fetched_logits_.data();
        exact.work = work_of_round;
        exact.list_stride = config_.max_tokens;
        launch(exact);

        const device_fetch f = fetched();
        launch(check_sample_kernel{resident_sample(in),
                                   {f.count, f.token, fetched_logits_.data(), f.log_weight, f.stride, f.stride, 0},
                                   mass_.data(),
                                   config_.max_tokens,
                                   top(),
                                   total(),
                                   &decision_.data()->variance,
                                   &decision_.data()->certificate_after,
                                   sizeof(head_decision) / sizeof(double),
                                   config_.promise.epsilon,
                                   config_.promise.log_term(),
                                   observed_.data(),
                                   holds_.data(),
                                   tasks(),
                                   heads(),
                                   4 * config_.threads,
                                   work_of_round});
    }

    template <class Launch>
    void attend(Launch&& launch, const layer_step_inputs<T>& in) const {
        sparse_attention_kernel<T, KeyDim, ValueDim, Heads> k{in.queries,
                                                              in.resident,
                                                              in.resident + config_.key_dim,
                                                              in.row_stride,
                                                              in.row_stride,
                                                              in.resident_rows,
                                                              resident_weight_.data(),
                                                              config_.max_residents,
                                                              0,
                                                              part_output_.data(),
                                                              part_lse_.data(),
                                                              config_.scale,
                                                              tasks(),
                                                              heads(),
                                                              static_cast<unsigned>(config_.key_dim),
                                                              static_cast<unsigned>(config_.value_dim),
                                                              config_.parts,
                                                              0,
                                                              2 * config_.parts,
                                                              config_.threads};
        launch(k);
        k.keys = in.staging;
        k.values = in.staging + config_.key_dim;
        k.pinned_keys = in.host;
        k.pinned_values = in.host + config_.key_dim;
        k.list = fetched_rows();
        k.log_weight = fetched().log_weight;
        k.weight_task_stride = config_.max_tokens;
        k.first_part = config_.parts;
        launch(k);
        launch(merge_parts_kernel{part_output_.data(), part_lse_.data(), in.output, in.lse, tasks(), heads(),
                                  static_cast<unsigned>(config_.value_dim), 2 * config_.parts, config_.threads,
                                  total()});
    }

    layer_step_config config_;
    std::size_t rows_;  // query heads
    std::uint32_t edges_;
    buffer<float, Device> mass_, listed_mass_, fetched_logits_;
    buffer<std::uint32_t, Device> per_token_;
    buffer<float, Device> per_token_floats_, resident_logits_, resident_weight_;
    buffer<double, Device> per_head_, partial_;
    buffer<head_decision, Device> decision_;
    buffer<head_level, Device> level_;
    buffer<sample_certificate, Device> observed_;
    buffer<std::uint64_t, Device> bins_;
    buffer<std::uint32_t, Device> bin_counts_;
    buffer<double, Device> variance_;
    buffer<float, Device> term_;
    buffer<std::uint32_t, Device> arrived_, counts_, holds_, per_task_, cleared_;
    buffer<float, Device> part_output_, part_lse_;
};

}  // namespace verkv::inline v0::gpu
