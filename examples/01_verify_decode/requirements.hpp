// What is refused before anything is computed.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "common/output_file.hpp"
#include "common/trace.hpp"
#include "settings.hpp"
#include "verkv/sample/inclusion.hpp"

/// Refuses files that would cost a result, or the trace. Throws example::file_error.
inline void require_outputs(const settings& s) {
    example::require_outputs({{"--json", s.json}, {"--plot", s.plot}}, example::files_of_trace(s.trace));
}

/// Refuses flags that leave nothing to draw a sample with. Throws std::invalid_argument, which names them.
inline void require_budget(const example::trace_info& t, const settings& s) {
    const verkv::windows fixed{s.sink, s.local};
    const auto n = static_cast<double>(t.prefill_tokens);
    const double rows = verkv::budget::fraction(s.kept).rows(t.prefill_tokens);
    const std::size_t certain = fixed.fixed_count(t.prefill_tokens);
    const double free_tokens = n - static_cast<double>(certain);
    if (rows < n && free_tokens > 0 && !(rows - static_cast<double>(certain) > verkv::importance_floor * free_tokens)) {
        throw std::invalid_argument(fmt::format(
            "--kept {} of {} prompt tokens is {:.6g} rows, but --sink {} and --local {} take {} of them and "
            "leave none to sample: raise --kept, or lower --sink and --local",
            s.was_given("--kept") ? s.given.at("--kept") : "1/16", t.prefill_tokens, rows, s.sink, s.local, certain));
    }
}
