// What planning on a device cannot count is refused where it is launched.
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/cuda/find_levels.hpp"
#include "verkv/cuda/group_plan.hpp"

namespace {

using support::refused;

template <class Kernel>
void check_limits() {
    Kernel k;
    k.heads = 4;
    k.stride = verkv::gpu::most_tokens;
    CHECK_NOTHROW((void)k.shape());
    k.stride = verkv::gpu::most_tokens + 1;
    CHECK(refused([&] { (void)k.shape(); }, {"4194305 tokens", "at most 4194304"}));
    k.stride = 100;
    k.heads = 5;
    CHECK(refused([&] { (void)k.shape(); }, {"groups of 5", "compiled for 1 to 4"}));
    k.heads = 0;
    CHECK(refused([&] { (void)k.shape(); }, {"groups of 0"}));
}

}  // namespace

TEST_CASE("planning kernels say how many tokens and heads they count") {
    check_limits<verkv::gpu::find_levels_kernel<4>>();
    check_limits<verkv::gpu::group_plan_kernel<4>>();
}

// Bins: 2^22 parts of 2^40 units each, and a sign.
static_assert(verkv::gpu::most_tokens <= (std::uint64_t{1} << 63) / (std::uint64_t{1} << 40) / 2);
