// expect: planner.*workspace
#include "verkv/core/concepts.hpp"
#include "verkv/cpu/executor.hpp"

struct model {
#ifndef VERKV_MUST_FAIL
    struct workspace {
        void reserve(std::size_t) {}
    };
    void plan(const verkv::cpu&, verkv::masses_view, verkv::tolerance, workspace&, verkv::plan&) const {}
#else
    void plan(const verkv::cpu&, verkv::masses_view, verkv::tolerance, verkv::plan&) const {}
#endif
};

static_assert(verkv::planner<model, verkv::cpu>);
