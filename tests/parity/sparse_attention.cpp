// Split attention over listed rows against a plain sum in double, and against attend().
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "verkv/attend/attend.hpp"
#include "verkv/cuda/merge_parts.hpp"
#include "verkv/cuda/sparse_attention.hpp"

namespace {

using verkv::row_id;
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float out = -std::numeric_limits<float>::infinity();
constexpr double u = 0x1p-24;

/// Where a scene's rows lie.
enum class lists { ids, pages, in_order };

struct sizes {
    unsigned tasks = 1;
    unsigned group = 4;
    unsigned key_dim = 128;
    unsigned value_dim = 128;
    std::vector<unsigned> counts = {100};  // of each task
    unsigned parts = 3;
    unsigned threads = 64;
    lists how = lists::ids;
    unsigned page_rows = 16;
    bool weighted = true;
    float strength = 1;  // of the queries
};

/// A pool of rows, tasks that read some of them, and what comes out.
template <class T>
struct scene {
    explicit scene(const sizes& given, unsigned seed) : s(given), random(seed) {
        most = *std::max_element(s.counts.begin(), s.counts.end());
        stride = (s.key_dim + s.value_dim + 7) / 8 * 8;
        const unsigned pages = (most + s.page_rows - 1) / s.page_rows;
        pool = s.how == lists::in_order ? most * s.tasks
               : s.how == lists::ids    ? most * s.tasks + 7
                                        : (pages * s.tasks + 3) * s.page_rows;
        std::normal_distribution<float> normal;
        rows.resize(std::size_t{pool} * stride);
        for (T& x : rows) {
            x = verkv::from_float<T>(normal(random));
        }
        queries.resize(std::size_t{s.tasks} * s.group * s.key_dim);
        for (float& x : queries) {
            x = s.strength * normal(random);
        }
        row_of.resize(s.tasks);
        weight_stride = most + 5;
        weights.assign(std::size_t{s.tasks} * s.group * weight_stride, not_a_number);  // between the lists: never used
        std::vector<row_id> all(pool);
        std::iota(all.begin(), all.end(), row_id{0});
        std::shuffle(all.begin(), all.end(), random);
        std::vector<std::uint32_t> free_pages(pool / s.page_rows);
        std::iota(free_pages.begin(), free_pages.end(), 0u);
        std::shuffle(free_pages.begin(), free_pages.end(), random);
        page_stride = s.how == lists::pages ? pages + 2 : most + 2;
        table.assign(std::size_t{s.tasks} * page_stride, 0xffffffffu);
        for (unsigned t = 0; t < s.tasks; ++t) {
            for (unsigned i = 0; i < s.counts[t]; ++i) {
                row_id row = t * most + i;
                if (s.how == lists::ids) {
                    row = table[t * page_stride + i] = all[t * most + i];
                } else if (s.how == lists::pages) {
                    std::uint32_t& page = table[t * page_stride + i / s.page_rows];
                    page = free_pages[t * pages + i / s.page_rows];
                    row = page * s.page_rows + i % s.page_rows;
                }
                row_of[t].push_back(row);
                bool used = false;
                for (unsigned g = 0; g < s.group; ++g) {
                    float& a = weight(t, g, i);
                    a = s.weighted ? random() % 3 == 0 ? out : static_cast<float>(random() % 100) * 0.03f : 0.0f;
                    used = used || a != out;
                }
                if (!used && random() % 2 == 0) {
                    std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(row * stride), stride,
                                verkv::from_float<T>(not_a_number));
                }
            }
        }
    }

    float& weight(unsigned t, unsigned g, unsigned i) {
        return weights[(std::size_t{t} * s.group + g) * weight_stride + i];
    }
    const T* key(unsigned t, unsigned i) const { return rows.data() + std::size_t{row_of[t][i]} * stride; }
    const T* value(unsigned t, unsigned i) const { return key(t, i) + s.key_dim; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(s.key_dim)); }

    template <unsigned KeyDim, unsigned ValueDim, unsigned Heads, class Device>
    void run(Device& gpu) {
        const auto upload = [&](const char* name, auto& v) {
            return gpu.input(name, std::span<const typename std::remove_reference_t<decltype(v)>::value_type>(v));
        };
        // Every third row of a list of ids lies in pinned memory, and nowhere else.
        std::vector<T> in_device = rows, in_pinned(rows.size(), verkv::from_float<T>(not_a_number));
        std::vector<std::uint32_t> listed = table;
        for (unsigned t = 0; t < s.tasks && s.how == lists::ids; ++t) {
            for (unsigned i = 0; i < s.counts[t]; i += 3) {
                const auto at = static_cast<std::ptrdiff_t>(std::size_t{row_of[t][i]} * stride);
                const auto width = static_cast<std::ptrdiff_t>(stride);
                std::swap_ranges(in_device.begin() + at, in_device.begin() + at + width, in_pinned.begin() + at);
                listed[t * page_stride + i] |= verkv::gpu::pinned_row;
            }
        }
        const auto pool_memory = upload("rows", in_device);
        const auto pinned_memory = upload("pinned rows", in_pinned);
        const auto query = upload("queries", queries);
        const auto counts = upload("counts", s.counts);
        const auto ids = upload("table", listed);
        const auto log_weight = upload("log-weights", weights);
        const std::size_t results = std::size_t{s.tasks} * s.group;
        const unsigned all_parts = s.parts + 1;  // the last one is empty: as of a list of nothing
        const auto part_output = gpu.template output<float>("part output", results * all_parts * s.value_dim);
        const auto part_lse = gpu.template output<float>("part lse", results * all_parts);
        const auto o = gpu.template output<float>("output", results * s.value_dim);
        const auto l = gpu.template output<float>("lse", results);
        using verkv::gpu::row_list;
        const row_list list = s.how == lists::ids ? row_list::of_ids(counts.data(), ids.data(), page_stride)
                              : s.how == lists::pages
                                  ? row_list::of_pages(counts.data(), ids.data(), page_stride, s.page_rows)
                                  : row_list::in_order(counts.data(), most);
        verkv::gpu::sparse_attention_kernel<T, KeyDim, ValueDim, Heads, 1024> k{
            query.data(),
            pool_memory.data(),
            pool_memory.data() + s.key_dim,
            stride,
            stride,
            list,
            s.weighted ? log_weight.data() : nullptr,
            s.group * weight_stride,
            weight_stride,
            part_output.data(),
            part_lse.data(),
            scale(),
            s.tasks,
            s.group,
            s.key_dim,
            s.value_dim,
            s.parts,
            0,
            all_parts,
            s.threads,
            pinned_memory.data(),
            pinned_memory.data() + s.key_dim};
        gpu.launch(k);
        std::vector<std::uint32_t> none(s.tasks);
        const auto no_rows = upload("no rows", none);
        k.list.count = no_rows.data();
        k.first_part = s.parts;
        k.parts = 1;
        gpu.launch(k);
        gpu.launch(verkv::gpu::merge_parts_kernel{part_output.data(), part_lse.data(), o.data(), l.data(), s.tasks,
                                                  s.group, s.value_dim, all_parts, s.threads});
        output = gpu.download(o);
        lse = gpu.download(l);
    }

    /// Whether outputs are within what the kernel promises of a sum in double.
    void compare() {
        const double warps = s.threads / 32;
        for (unsigned t = 0; t < s.tasks; ++t) {
            const double rows_of_part = std::ceil(std::ceil(s.counts[t] / 32.0) / s.parts) * 32;
            const double chain = std::ceil(rows_of_part / 32 / warps) * 32 + warps + 8;
            for (unsigned g = 0; g < s.group; ++g) {
                const float* q = queries.data() + (std::size_t{t} * s.group + g) * s.key_dim;
                double top = out;
                double error = 0;  // of a logit, and of its weight's exponential
                std::vector<double> logit(s.counts[t], out);
                for (unsigned i = 0; i < s.counts[t]; ++i) {
                    const float a = weight(t, g, i);
                    if (a == out) {
                        continue;
                    }
                    double dot = 0;
                    double size = 0;
                    for (unsigned c = 0; c < s.key_dim; ++c) {
                        const double x = double{q[c]} * double{verkv::to_float(key(t, i)[c])};
                        dot += x;
                        size += std::abs(x);
                    }
                    logit[i] = dot * double{scale()} + double{a};
                    top = (std::max)(top, logit[i]);
                    error =
                        (std::max)(error, u * ((s.key_dim + 8) * size * double{scale()} + std::abs(double{a}) + 100));
                }
                const double expected_lse = [&] {
                    double sum = 0;
                    for (const double x : logit) {
                        sum += x == double{out} ? 0 : std::exp(x - top);
                    }
                    return sum == 0 ? double{out} : top + std::log(sum);
                }();
                const std::size_t at = std::size_t{t} * s.group + g;
                if (expected_lse == double{out}) {
                    CHECK(lse[at] == out);
                    for (unsigned c = 0; c < s.value_dim; ++c) {
                        CHECK(output[at * s.value_dim + c] == 0);
                    }
                    continue;
                }
                const double room = 2 * error + 2 * chain * u;
                CHECK(std::abs(double{lse[at]} - expected_lse) <= room + 2 * u * std::abs(expected_lse));
                double worst = 0;
                for (unsigned c = 0; c < s.value_dim; ++c) {
                    double sum = 0;
                    double size = 0;
                    for (unsigned i = 0; i < s.counts[t]; ++i) {
                        if (logit[i] != double{out}) {
                            const double x =
                                std::exp(logit[i] - expected_lse) * double{verkv::to_float(value(t, i)[c])};
                            sum += x;
                            size += std::abs(x);
                        }
                    }
                    const double off = std::abs(double{output[at * s.value_dim + c]} - sum);
                    worst = (std::max)(worst, std::isnan(off) ? 1e300 : off / (2 * room * size));
                }
                INFO("task " << t << ", head " << g << ", " << s.counts[t] << " rows");
                CHECK(worst <= 1);
            }
        }
    }

    sizes s;
    std::mt19937 random;
    unsigned most = 0;
    std::size_t stride = 0;
    unsigned pool = 0;
    std::size_t page_stride = 0;
    std::size_t weight_stride = 0;
    std::vector<T> rows;
    std::vector<float> queries;
    std::vector<float> weights;
    std::vector<std::uint32_t> table;
    std::vector<std::vector<row_id>> row_of;
    std::vector<float> output;
    std::vector<float> lse;
};

template <class T, unsigned KeyDim, unsigned ValueDim, unsigned Heads>
void parity(const sizes& s, unsigned seed, unsigned orders = 3) {
    scene<T> rig(s, seed);
    std::vector<float> first;
    support::on_devices(orders, [&](auto& gpu) {
        rig.template run<KeyDim, ValueDim, Heads>(gpu);
        if (first.empty()) {
            first = rig.output;
            rig.compare();
        }
        CHECK(std::equal(first.begin(), first.end(), rig.output.begin(), rig.output.end()));
    });
}

}  // namespace

TEST_CASE("attention over lists of every kind", "[parity]") {
    for (const lists how : {lists::ids, lists::pages, lists::in_order}) {
        for (const bool weighted : {true, false}) {
            sizes s;
            s.tasks = 3;
            s.counts = {100, 0, 33};
            s.how = how;
            s.weighted = weighted;
            parity<verkv::bfloat16, 128, 128, 4>(s, 1);
            s.page_rows = 5;
            s.threads = 96;
            parity<float, 0, 0, 4>(s, 2);
        }
    }
}

TEST_CASE("attention in rows of every kind", "[parity]") {
    sizes s;
    s.counts = {150};
    const auto all = [&](auto element) {
        using T = decltype(element);
        s.key_dim = s.value_dim = 64;
        parity<T, 64, 64, 4>(s, 3, 1);
        s.key_dim = s.value_dim = 128;
        parity<T, 128, 128, 4>(s, 4, 1);
        s.key_dim = s.value_dim = 256;
        parity<T, 256, 256, 4>(s, 5, 1);
        s.key_dim = 128;
        parity<T, 128, 256, 4>(s, 6, 1);
        s.key_dim = 192;
        s.value_dim = 128;
        parity<T, 0, 128, 4>(s, 7, 1);
        s.key_dim = 33;
        s.value_dim = 7;
        parity<T, 0, 0, 4>(s, 8, 1);
        s.key_dim = s.value_dim = 1;
        parity<T, 0, 0, 4>(s, 9, 1);
    };
    all(verkv::half{});
    all(verkv::bfloat16{});
    all(float{});
}

TEST_CASE("attention of groups of every size", "[parity]") {
    sizes s;
    s.counts = {77, 40};
    s.tasks = 2;
    for (const unsigned group : {1u, 2u, 3u, 4u, 5u, 8u, 11u}) {
        s.group = group;
        parity<verkv::bfloat16, 128, 128, 1>(s, 20 + group, 1);
        parity<verkv::bfloat16, 128, 128, 2>(s, 30 + group, 1);
        parity<verkv::half, 128, 128, 4>(s, 40 + group, 2);
        parity<verkv::bfloat16, 128, 128, 8>(s, 50 + group, 2);
    }
}

TEST_CASE("attention in blocks of every size, however it is split", "[parity]") {
    std::mt19937 random(5);
    for (const unsigned threads : {32u, 64u, 160u, 256u, 384u, 1024u}) {
        for (const unsigned parts : {1u, 2u, 7u}) {
            sizes s;
            s.key_dim = s.value_dim = 64;
            s.threads = threads;
            s.parts = parts;
            s.counts = {static_cast<unsigned>(random() % 700)};
            parity<verkv::half, 64, 64, 4>(s, threads + parts, 2);
            s.key_dim = 20;
            s.value_dim = 24;
            s.how = lists::pages;
            parity<verkv::half, 0, 0, 4>(s, threads + parts, 1);
        }
    }
}

TEST_CASE("attention over lists of every length", "[parity]") {
    sizes s;
    s.key_dim = s.value_dim = 64;
    for (const unsigned n : {0u, 1u, 2u, 31u, 32u, 33u, 63u, 64u, 65u, 96u, 97u, 1000u}) {
        s.counts = {n};
        parity<verkv::bfloat16, 64, 64, 4>(s, n, 2);
    }
    s.counts = {20000};
    s.parts = 16;
    s.threads = 128;
    s.group = 3;
    parity<verkv::bfloat16, 64, 64, 4>(s, 99, 1);
}

TEST_CASE("attention with one row far above the others", "[parity]") {
    sizes s;
    s.counts = {300};
    s.strength = 30;
    parity<verkv::bfloat16, 128, 128, 4>(s, 1);
    parity<verkv::bfloat16, 0, 0, 4>(s, 1);
}

TEST_CASE("NaN is its own head's, and of rows in use alone", "[parity]") {
    sizes s;
    s.counts = {90};
    s.group = 3;
    s.weighted = false;  // so no row is NaN
    scene<float> rig(s, 3);
    rig.s.weighted = true;
    for (unsigned i = 0; i < 90; ++i) {
        rig.weight(0, 0, i) = 0;
        rig.weight(0, 1, i) = i == 50 ? out : 0;
        rig.weight(0, 2, i) = i == 50 ? -300.0f : 0;  // its weight is 0
    }
    rig.rows[rig.row_of[0][50] * rig.stride + s.key_dim + 3] = not_a_number;
    const auto check = [&](auto& gpu) {
        const auto is_nan = [&](unsigned g, unsigned c) { return std::isnan(rig.output[g * s.value_dim + c]); };
        rig.run<128, 128, 4>(gpu);
        CHECK(is_nan(0, 3));
        CHECK_FALSE(is_nan(0, 4));
        for (unsigned c = 0; c < s.value_dim; ++c) {
            CHECK_FALSE(is_nan(1, c));
            CHECK_FALSE(is_nan(2, c));
        }
        rig.run<0, 0, 4>(gpu);
        CHECK(is_nan(0, 3));
        CHECK_FALSE(is_nan(1, 3));
        CHECK_FALSE(is_nan(2, 3));
    };
    support::on_devices(2, check);
    // A key, now: all of the head, and its lse.
    rig.rows[rig.row_of[0][50] * rig.stride] = not_a_number;
    support::on_devices(2, [&](auto& gpu) {
        rig.run<128, 128, 4>(gpu);
        CHECK(std::isnan(rig.lse[0]));
        CHECK(std::isnan(rig.output[0]));
        CHECK_FALSE(std::isnan(rig.lse[1]));
        CHECK_FALSE(std::isnan(rig.output[s.value_dim]));
        CHECK(std::isnan(rig.lse[2]));
    });
}

TEST_CASE("a kernel's attention is attend()'s", "[parity]") {
    sizes s;
    s.counts = {257};
    scene<verkv::half> rig(s, 8);
    support::on_devices(1, [&](auto& gpu) { rig.run<128, 128, 4>(gpu); });
    verkv::attend_workspace w;
    std::vector<float> o(s.group * s.value_dim);
    std::vector<float> lse(s.group);
    const auto stride = static_cast<std::ptrdiff_t>(rig.stride);
    const verkv::rows<verkv::half> keys{rig.rows.data(), stride, 257, s.key_dim, rig.row_of[0].data()};
    const verkv::rows<verkv::half> values{rig.rows.data() + s.key_dim, stride, 257, s.value_dim, rig.row_of[0].data()};
    verkv::attend(verkv::cpu{}, verkv::contiguous_rows(std::span<const float>(rig.queries), s.key_dim), rig.scale(),
                  keys, values, {rig.weights.data(), s.group, 257, static_cast<std::ptrdiff_t>(rig.weight_stride)}, w,
                  verkv::matrix_of(std::span<float>(o), s.group, s.value_dim), lse);
    for (unsigned g = 0; g < s.group; ++g) {
        CHECK(std::abs(lse[g] - rig.lse[g]) < 1e-5f);
    }
    for (std::size_t c = 0; c < o.size(); ++c) {
        CHECK(std::abs(o[c] - rig.output[c]) < 1e-5f);
    }
}
