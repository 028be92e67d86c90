// expect: this scorer needs hidden states: pass hidden_states<T>\{rows\} after the query positions
#include "verkv/cache/layer_cache.hpp"
#include "verkv/sketch/exact.hpp"

struct model {
    template <class T>
    using needs = verkv::inputs<verkv::hidden_states<T>>;

    template <class Backend, class P>
    requires verkv::carries<P, verkv::hidden_states<typename P::element>>
    void score(const Backend&, const P&, std::size_t, std::span<float>) const {}
};

void f(verkv::layer_cache<float, verkv::exact_sketch<float>>& cache, verkv::request_id id) {
#ifdef VERKV_MUST_FAIL
    cache.compress(id, model{}, {}, {}, {});
#else
    cache.compress(id, model{}, {}, {}, {}, verkv::hidden_states<float>{});
#endif
}
