// A staging map that is made empty: of the KV heads asked for, and of no other.
#include <cstdint>
#include <span>
#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "verkv/cuda/reset_staging.hpp"

TEST_CASE("a staging map is empty after a reset", "[parity]") {
    constexpr std::uint32_t none = verkv::gpu::no_slot;
    constexpr std::uint32_t heads = 5;
    for (const std::uint32_t threads : {32u, 96u, 256u}) {
        for (const std::uint32_t blocks : {1u, 3u}) {
            support::on_devices(2, [&](auto& gpu) {
                verkv::gpu::device_staging map;
                map.stride = 777;
                map.capacity = 50;
                const std::vector<std::uint32_t> old(heads * map.stride, 9);
                const auto before = [&](const char* name, std::size_t n) {
                    return gpu.in_out(name, std::span<const std::uint32_t>(old).first(n));
                };
                const auto slot = before("slot", heads * map.stride);
                const auto token = before("token", heads * map.capacity);
                const auto used = before("used", heads * map.capacity);
                const auto hand = before("hand", heads);
                const auto step = before("step", heads);
                map.slot = slot.data();
                map.token = token.data();
                map.used = used.data();
                map.hand = hand.data();
                map.step = step.data();
                gpu.launch(verkv::gpu::reset_staging_kernel{map, 1, 3, blocks, threads});
                const auto is = [](const std::vector<std::uint32_t>& all, std::size_t of_head, std::uint32_t value) {
                    bool right = true;
                    for (std::size_t i = 0; i < all.size(); ++i) {
                        const std::size_t h = i / of_head;
                        right = right && all[i] == (h >= 1 && h < 4 ? value : 9u);
                    }
                    return right;
                };
                CHECK(is(gpu.download(slot), map.stride, none));
                CHECK(is(gpu.download(token), map.capacity, none));
                CHECK(is(gpu.download(used), map.capacity, 0));
                CHECK(is(gpu.download(hand), 1, 0));
                CHECK(is(gpu.download(step), 1, 0));
            });
        }
    }
}
