// What a step on the device is predicted to take, from bytes, instructions and launches: the table of
// docs/performance.md. Computed, never measured. Plain C++: predict_step prints the table, predict_step FILE says
// whether FILE has it.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct machine {
    const char* name;
    double memory;        // bytes a second
    double bus = 55e9;    // of pinned memory
    double cache = 5e12;  // L2
    double multiprocessors = 132;
    double issue = 4 * 0.6 * 1.7e9;  // warp instructions a second and multiprocessor, 60 % of the slots
    double launch = 1.5e-6;          // least time of a launch within a graph
};

struct cost {
    double memory = 0, cache = 0, bus = 0, lane_slots = 0;  // of the whole launch
    double alone = 0;                                       // seconds in which one block works
};

/// A layer of 8 KV heads of 4 query heads, 128 + 128 channels of 2 bytes, a sixteenth resident, 2-bit codes of a
/// quarter of the channels.
struct layer {
    double n;
    double kv_heads = 8, group = 4, channels = 256, element = 2;
    double resident = n / 16;
    double listed = 1000 * n / 32768 > 4000 ? 4000 : 1000 * n / 32768;  // that the plan may raise
    double fetched = 0.5 * listed;                                      // that it uses beside the resident ones
    double copied = 0.25 * listed;                                      // of them not staged by an earlier step

    /// Bytes of masses and logits, which lie in an L2 cache of 50 MB as long as they fit.
    [[nodiscard]] cost masses(double per_kv_head) const;
    [[nodiscard]] double all(double per_kv_head) const { return per_kv_head * kv_heads; }
};

cost layer::masses(double per_kv_head) const {
    const bool fit = all(4 * group * n) < 50e6;
    return {fit ? 0 : all(per_kv_head), fit ? all(per_kv_head) : 0};
}

/// The same with instructions, and a block that works alone.
cost with(cost c, double lane_slots, double alone = 0) {
    c.lane_slots = lane_slots;
    c.alone = alone;
    return c;
}

double seconds(const cost& c, const machine& m) {
    const double busy = std::max(
        {c.memory / m.memory, c.cache / m.cache, c.bus / m.bus, c.lane_slots / 32 / (m.multiprocessors * m.issue)});
    return m.launch + busy + c.alone;
}

/// A look of the last block of a plan: 512 threads, two barriers and the trees of 8 sums beside the tokens.
double look(const layer& l) {
    return 0.55e-6 + 0.15e-6 * l.listed / 1000;
}

struct part {
    const char* name;
    bool decides;
    std::vector<cost> launches;
};

std::vector<part> step(const layer& l) {
    const double n = l.n, g = l.group, row = l.channels * l.element, key = row / 2;
    const auto pass = [&](double looks) {  // over the masses of all tokens, then the last block
        return with(l.masses(4 * (g + 1) * n), l.all(22 * g * n), looks * look(l));
    };
    const cost lists{0, l.all(20 * l.listed + 60 * l.fetched), 0, 0, 3.5e-6};
    return {
        {"clear", false, {{}}},
        {"sketch logits", false, {{l.all(n * (8 + 1 + 4)), l.all(4 * g * n), 0, l.all(300 * n)}}},
        {"resident logits", false, {{l.all((key + 12) * l.resident), 0, 0, l.all(l.resident * key * g / 2)}}},
        {"weights", true, {with(l.masses(8 * g * n), l.all(20 * g * n))}},
        {"levels", true, {pass(2)}},
        {"plan", true, {pass(22)}},
        {"fetch list", true, {lists}},
        {"gather", false, {{0, 0, l.all(row * l.copied), 0, 2e-6}}},
        {"attention",
         false,
         {{l.all((row + 8) * l.resident)}, {l.all((row + 8) * l.fetched)}, {0, l.all(2 * 33 * 4 * g * (row / 4 + 1))}}},
        {"check: calibrate", true, {{0, l.all(16 * g * l.resident), 0, 0, 4e-6}, pass(3)}},
        {"check: first look",
         true,
         {{0, l.all(key * l.fetched)}, {0, l.all(16 * g * (l.resident + l.fetched)), 0, 0, 6e-6}}},
        {"check: a round",
         true,
         {{0, 0, 0, 0, 1e-6},
          pass(3),
          lists,
          {0, 0, l.all(row * 0.5 * l.copied), 0, 2e-6},
          {0, l.all(key * l.fetched)},
          {0, l.all(16 * g * (l.resident + l.fetched)), 0, 0, 6e-6}}},
        {"check: a round that holds", true, std::vector<cost>(6)},
    };
}

std::string table(const machine& m) {
    const std::vector<double> lengths = {32768, 131072, 1048576};
    std::ostringstream out;
    const auto line = [&](const char* name, auto value, const char* format) {
        out << "| " << name;
        for (const double n : lengths) {
            char cell[32];
            std::snprintf(cell, sizeof(cell), format, value(layer{n}));
            out << " | " << cell;
        }
        out << " |\n";
    };
    const auto of_part = [&](const part& p) {
        double sum = 0;
        for (const cost& c : p.launches) {
            sum += seconds(c, m) * 1e6;
        }
        return sum;
    };
    const auto over_bus = [&](const layer& l) { return l.all(l.n * l.channels * l.element) / m.bus * 1e6; };
    const auto dense = [&](const layer& l) { return l.all(l.n * l.channels * l.element) / m.memory * 1e6; };
    /// Without the check; with it, two rounds that work and ten that hold.
    const auto sum = [&](const layer& l, bool checked, bool deciding) {
        double all = 0;
        const std::vector<part> parts = step(l);
        for (const part& p : parts) {
            const std::string name = p.name;
            const bool of_check = name.starts_with("check");
            const double times = name == "check: a round" ? 2 : name == "check: a round that holds" ? 10 : 1;
            all += (of_check && !checked) || (deciding && !p.decides) ? 0 : times * of_part(p);
        }
        return all;
    };
    out << "| " << m.name << " | n = 32K | n = 128K | n = 1M |\n| --- | --- | --- | --- |\n";
    for (std::size_t k = 0; k < step(layer{1}).size(); ++k) {
        line(
            step(layer{1})[k].name, [&](const layer& l) { return of_part(step(l)[k]); }, "%.1f");
    }
    line("dense attention, by its bytes", dense, "%.0f");
    line("dense attention of rows in pinned memory", over_bus, "%.0f");
    line(
        "step without a check", [&](const layer& l) { return sum(l, false, false); }, "%.0f");
    line(
        "step with two rounds, ten more that hold", [&](const layer& l) { return sum(l, true, false); }, "%.0f");
    line(
        "deciding over dense, without a check", [&](const layer& l) { return sum(l, false, true) / dense(l); }, "%.2f");
    line(
        "deciding over dense, with it", [&](const layer& l) { return sum(l, true, true) / dense(l); }, "%.2f");
    line(
        "pinned dense over step, without a check", [&](const layer& l) { return over_bus(l) / sum(l, false, false); },
        "%.1f");
    line(
        "pinned dense over step, with it", [&](const layer& l) { return over_bus(l) / sum(l, true, false); }, "%.1f");
    line(
        "dense over step, without a check", [&](const layer& l) { return dense(l) / sum(l, false, false); }, "%.2f");
    line(
        "dense over step, with it", [&](const layer& l) { return dense(l) / sum(l, true, false); }, "%.2f");
    return out.str();
}

}  // namespace

int main(int argc, char** argv) {
    const std::string text = table({"H100, microseconds", 3.35e12}) + "\n" + table({"H200, microseconds", 4.8e12});
    if (argc == 1) {
        std::cout << text;
        return 0;
    }
    std::ifstream file(argv[1]);
    const std::string have((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (have.find(text) == std::string::npos) {
        std::cerr << argv[1] << " does not have this table:\n" << text;
        return 1;
    }
    return 0;
}
