// The draw on the device against poisson_draw() and what the cache makes of it.
#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "verkv/cache/detail/kv_head.hpp"
#include "verkv/cuda/poisson_draw.hpp"
#include "verkv/sample/poisson.hpp"

namespace {

using verkv::position_t;
using verkv::token_index;

struct draw_rig {
    std::vector<unsigned> counts;
    unsigned room;  // for residents
    unsigned threads;
    std::size_t stride = 0;
    std::vector<float> r;
    std::vector<position_t> positions;
    std::vector<verkv::uniform_stream> streams;
    std::vector<float> odds, uniform, log_weight;
    std::vector<std::uint32_t> slot, resident_token, residents;

    draw_rig(std::vector<unsigned> n, unsigned most, unsigned of_block, unsigned seed)
        : counts(std::move(n)), room(most), threads(of_block) {
        std::mt19937 random(seed);
        stride = *std::max_element(counts.begin(), counts.end()) + 3;
        r.resize(counts.size() * stride);
        positions.resize(r.size());
        for (std::size_t t = 0; t < counts.size(); ++t) {
            position_t at = 0;
            for (std::size_t i = 0; i < stride; ++i) {
                const auto kind = random() % 8;
                r[t * stride + i] = kind == 0   ? 1.0f
                                    : kind == 1 ? 0x1p-30f
                                                : std::uniform_real_distribution<float>(0.01f, 0.5f)(random);
                at += 1 + static_cast<position_t>(random() % 3);
                positions[t * stride + i] = at;
            }
            streams.push_back({random() * 0x100000001ull, 7, static_cast<std::uint32_t>(t), seed});
        }
    }

    template <class Device>
    void run(Device& gpu) {
        const std::size_t tasks = counts.size();
        const auto probability = gpu.input("r", std::span<const float>(r));
        const auto position = gpu.input("positions", std::span<const position_t>(positions));
        const auto stream = gpu.input("streams", std::span<const verkv::uniform_stream>(streams));
        const auto tokens = gpu.input("tokens", std::span<const unsigned>(counts));
        const auto o = gpu.template output<float>("odds", tasks * stride);
        const auto u = gpu.template output<float>("uniform", tasks * stride);
        const auto s = gpu.template output<std::uint32_t>("slot", tasks * stride);
        const auto listed = gpu.template output<std::uint32_t>("resident token", tasks * room);
        const auto weight = gpu.template output<float>("log-weight", tasks * room);
        const auto number = gpu.template output<std::uint32_t>("residents", tasks);
        verkv::gpu::token_arrays lists;
        lists.probability = probability.data();
        lists.odds = o.data();
        lists.uniform = u.data();
        lists.slot = s.data();
        lists.tokens = tokens.data();
        lists.resident_token = listed.data();
        lists.log_weight = weight.data();
        lists.residents = number.data();
        lists.stride = stride;
        lists.resident_stride = room;
        gpu.launch(verkv::gpu::poisson_draw_kernel{lists, position.data(), stride, stream.data(),
                                                   static_cast<unsigned>(tasks), threads});
        odds = gpu.download(o);
        uniform = gpu.download(u);
        slot = gpu.download(s);
        resident_token = gpu.download(listed);
        log_weight = gpu.download(weight);
        residents = gpu.download(number);
    }

    void compare() const {
        for (std::size_t t = 0; t < counts.size(); ++t) {
            const std::span<const float> own(r.data() + t * stride, counts[t]);
            std::vector<token_index> sample;
            verkv::poisson_draw(verkv::cpu{}, own,
                                std::span<const position_t>(positions.data() + t * stride, counts[t]), streams[t],
                                sample);
            REQUIRE(residents[t] == sample.size());
            verkv::detail::kv_head<int> head(0);
            for (std::size_t i = 0; i < own.size(); ++i) {
                head.add_offloaded(0);
            }
            head.replace_residents(sample, std::vector<verkv::row_id>(sample.size()), own);
            const std::size_t kept = (std::min)(sample.size(), std::size_t{room});
            const auto same = [](const auto& a, std::size_t from, const auto& b, std::size_t n) {
                return std::equal(b.begin(), b.begin() + static_cast<std::ptrdiff_t>(n),
                                  a.begin() + static_cast<std::ptrdiff_t>(from));
            };
            CHECK(same(odds, t * stride, head.odds, own.size()));
            CHECK(same(resident_token, t * room, sample, kept));
            CHECK(same(log_weight, t * room, head.log_weight, kept));
            bool right = true;
            for (std::size_t i = 0; i < own.size(); ++i) {
                const std::uint32_t expected = head.slot[i] < kept ? head.slot[i] : verkv::gpu::offloaded;
                right = right && slot[t * stride + i] == expected &&
                        uniform[t * stride + i] ==
                            static_cast<float>(verkv::uniform(streams[t], positions[t * stride + i]));
            }
            CHECK(right);
        }
    }
};

}  // namespace

TEST_CASE("the draw on the device is poisson_draw()'s, bit for bit", "[parity]") {
    for (const unsigned threads : {32u, 64u, 96u, 256u, 1024u}) {
        draw_rig rig({1000, 0, 1, 777, 31, 2049}, 2100, threads, threads);
        support::on_devices(3, [&](auto& gpu) {
            rig.run(gpu);
            rig.compare();
        });
    }
}

TEST_CASE("a draw of many tokens", "[parity]") {
    draw_rig rig({20000}, 20000, 512, 5);
    support::on_devices(2, [&](auto& gpu) {
        rig.run(gpu);
        rig.compare();
    });
}

TEST_CASE("a draw that does not fit says how many there are", "[parity]") {
    draw_rig rig({500, 400}, 60, 128, 6);
    support::on_devices(3, [&](auto& gpu) {
        rig.run(gpu);
        CHECK(rig.residents[0] > 60);
        rig.compare();
    });
}
