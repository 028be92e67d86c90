// expect: sketch.*estimate
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/executor.hpp"

#ifdef VERKV_MUST_FAIL
#define CONST_IF_SOUND
#else
#define CONST_IF_SOUND const
#endif

struct model {
    void fit(const verkv::cpu&, verkv::rows<float>) {}
    void append(const verkv::cpu&, verkv::rows<float>) {}
    void estimate(const verkv::cpu&, verkv::rows<float>, float, verkv::matrix_view<float>) CONST_IF_SOUND {}
    std::size_t size() const { return 0; }
    std::size_t bytes() const { return 0; }
};

static_assert(verkv::sketch<model, verkv::cpu, float>);
