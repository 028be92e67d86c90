// A table in fixed-width text, and a line that tells how far a long computation is.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace example {

/// Characters that a UTF-8 text shows (code points: enough for Latin and Greek).
[[nodiscard]] inline std::size_t text_width(std::string_view text) {
    return static_cast<std::size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

/// A number with a fixed count of decimals; "-" for NaN.
[[nodiscard]] inline std::string number_text(double x, int decimals) {
    return std::isnan(x) ? "-" : fmt::format("{:.{}f}", x, decimals);
}

/// A share as per cent, "6.25 %"; "-" for NaN.
[[nodiscard]] inline std::string percent_text(double share, int decimals) {
    return std::isnan(share) ? "-" : fmt::format("{:.{}f} %", 100 * share, decimals);
}

enum class alignment { left, right };

/// A column of a table. The title may have several lines.
struct column {
    std::string title;
    alignment align = alignment::right;
};

/// Rows of text cells under titles, each column as wide as its widest cell.
class table {
public:
    explicit table(std::vector<column> columns) : columns_(std::move(columns)) {}

    /// Adds a row; cells that are missing stay empty, those beyond the last column are dropped.
    void add(std::vector<std::string> cells) {
        cells.resize(columns_.size());
        rows_.push_back(std::move(cells));
    }

    /// Adds a line across the table.
    void add_rule() { rows_.emplace_back(); }

    /// The table as text, each line ended by '\n' and without white space before it.
    [[nodiscard]] std::string text() const {
        std::vector<std::vector<std::string>> titles;
        std::size_t title_lines = 1;
        for (const column& c : columns_) {
            auto& lines = titles.emplace_back(1);
            for (const char ch : c.title) {
                ch == '\n' ? void(lines.emplace_back()) : lines.back().push_back(ch);
            }
            title_lines = (std::max)(title_lines, lines.size());
        }
        std::vector<std::size_t> widths(columns_.size());
        for (std::size_t c = 0; c < columns_.size(); ++c) {
            for (const std::string& line : titles[c]) {
                widths[c] = (std::max)(widths[c], text_width(line));
            }
            for (const auto& row : rows_) {
                widths[c] = (std::max)(widths[c], row.empty() ? 0 : text_width(row[c]));
            }
        }
        std::string out;
        const auto line_of = [&](auto&& cell) {
            std::string line;
            for (std::size_t c = 0; c < columns_.size(); ++c) {
                const std::string& text = cell(c);
                const std::string padding(widths[c] - text_width(text), ' ');
                line += c > 0 ? "  " : "";
                line += columns_[c].align == alignment::left ? text + padding : padding + text;
            }
            line.resize(line.find_last_not_of(' ') + 1);
            out += line + '\n';
        };
        const std::string rule = [&] {
            std::size_t width = columns_.empty() ? 0 : 2 * (columns_.size() - 1);
            for (const std::size_t w : widths) {
                width += w;
            }
            return std::string(width, '-') + '\n';
        }();
        const std::string nothing;
        for (std::size_t i = 0; i < title_lines; ++i) {  // the last lines of all titles stand side by side
            line_of([&](std::size_t c) -> const std::string& {
                const std::size_t skipped = title_lines - titles[c].size();
                return i < skipped ? nothing : titles[c][i - skipped];
            });
        }
        out += rule;
        for (const auto& row : rows_) {
            if (row.empty()) {
                out += rule;
            } else {
                line_of([&](std::size_t c) -> const std::string& { return row[c]; });
            }
        }
        return out;
    }

    void print(std::FILE* to = stdout) const {
        std::fputs(text().c_str(), to);
        std::fflush(to);
    }

private:
    std::vector<column> columns_;
    std::vector<std::vector<std::string>> rows_;
};

/// Tells on stderr how far a computation is: on a terminal as one line that rewrites itself, elsewhere as a line of its
/// own every ten seconds.
class progress {
public:
    explicit progress(std::string label, std::size_t total, std::FILE* to = stderr)
        : label_(std::move(label)), total_(total), to_(to), terminal_(isatty(fileno(to)) != 0) {}
    progress(const progress&) = delete;
    progress& operator=(const progress&) = delete;
    ~progress() { finish(); }

    /// `done` of the total is done; `detail` says what comes next.
    void update(std::size_t done, std::string_view detail = {}) {
        const auto now = std::chrono::steady_clock::now();
        if (now - shown_ < (terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(10'000))) {
            return;
        }
        shown_ = now;
        std::string line = fmt::format("{} {}/{}", label_, done, total_);
        if (!detail.empty()) {
            line += fmt::format("  {}", detail);
        }
        if (terminal_) {
            std::fputs(("\r\x1b[K" + line.substr(0, 100)).c_str(), to_);
            open_ = true;
        } else {
            std::fputs((line + '\n').c_str(), to_);
        }
        std::fflush(to_);
    }

    /// Takes the line off the terminal.
    void finish() {
        if (open_) {
            std::fputs("\r\x1b[K", to_);
            std::fflush(to_);
            open_ = false;
        }
    }

private:
    std::string label_;
    std::size_t total_;
    std::FILE* to_;
    bool terminal_;
    bool open_ = false;
    std::chrono::steady_clock::time_point shown_ = std::chrono::steady_clock::now() - std::chrono::milliseconds(9'000);
};

}  // namespace example
