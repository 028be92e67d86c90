// expect: sketch.*estimate
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/executor.hpp"

struct model {
    void fit(const verkv::cpu&, verkv::rows<verkv::half>) {}
    void append(const verkv::cpu&, verkv::rows<verkv::half>) {}
#ifndef VERKV_MUST_FAIL
    void estimate(const verkv::cpu&, verkv::rows<float>, float, verkv::matrix_view<float>) const {}
#endif
    std::size_t size() const {
        return 0;
    }
    std::size_t bytes() const {
        return 0;
    }
};

static_assert(verkv::sketch<model, verkv::cpu, verkv::half>);
