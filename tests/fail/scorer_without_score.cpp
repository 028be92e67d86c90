// expect: scorer.*score
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/executor.hpp"

struct model {
#ifdef VERKV_MUST_FAIL
    void rate(const verkv::cpu&, const verkv::prompt<float>&, std::size_t, std::span<float>) const {}
#else
    void score(const verkv::cpu&, const verkv::prompt<float>&, std::size_t, std::span<float>) const {}
#endif
};

static_assert(verkv::scorer<model, verkv::cpu, float>);
