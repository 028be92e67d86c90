// Turns the reports of decode steps into a line of text.
#pragma once

#include <fmt/format.h>

#include "fake_model.hpp"
#include "verkv/core/report.hpp"

/// Steps since the last line, summed over KV heads.
struct report_line {
    double heads = 0, context = 0, resident = 0, read = 0, copied = 0, bytes = 0, seconds[4] = {};
    double decisions = 0, certificate = 0;

    void add(const verkv::step_report& report) {
        for (const verkv::kv_head_report& h : report.per_kv_head) {
            heads += 1;
            context += static_cast<double>(h.tokens);
            resident += static_cast<double>(h.rows_resident);
            read += static_cast<double>(h.rows_fetched);
            copied += static_cast<double>(h.rows_copied);
            bytes += static_cast<double>(h.bytes_moved);
            std::size_t at = 0;
            for (const double t : {h.sketch_seconds, h.decide_seconds, h.fetch_seconds, h.attend_seconds}) {
                seconds[at++] += t;
            }
        }
        for (const verkv::query_head_report& h : report.per_query_head) {
            decisions += 1;
            certificate += h.certificate_after;
        }
    }

    static void print_title() {
        fmt::print(
            "\nread: rows that plans fetched. copied: those of them that no earlier step had left in staging; one\n"
            "that had to make room counts again. moved: bytes from host memory, of what dense attention\n"
            "reads. certif.: the relative error that is certified.\n");
        fmt::print(
            "\n                        % of the context             mean       ms of a KV head\n"
            "step  context resident     read   copied    moved  certif.    sketch decide  fetch attend\n");
    }

    void print(int step, const char* note) {
        const auto share = [&](double rows) { return 100 * rows / context; };
        fmt::print("{:4} {:8.0f} {:8.1f} {:8.2f} {:8.2f} {:8.2f} {:8.3f}   {:7.3f} {:6.3f} {:6.3f} {:6.3f}   {}\n",
                   step, context / heads, share(resident), share(read), share(copied),
                   share(bytes / ((shape.key_dim + shape.value_dim) * sizeof(half))), certificate / decisions,
                   1e3 * seconds[0] / heads, 1e3 * seconds[1] / heads, 1e3 * seconds[2] / heads,
                   1e3 * seconds[3] / heads, note);
        *this = {};
    }
};
