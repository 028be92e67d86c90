// Line plots as SVG files: panels side by side, one legend below them.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/file_error.hpp"
#include "common/table.hpp"

namespace example {

/// An axis. What is not given comes from the data.
struct plot_axis {
    std::string title;
    bool logarithmic = false;
    bool percent = false;  ///< values are shares; labels are per cent
    std::optional<double> low;
    std::optional<double> high;
    std::vector<double> ticks;  ///< where to put labels; labels that would overlap are left out
};

/// A line through points, in the order given. Series of one name look the same in all panels.
/// A NaN breaks the line. On a logarithmic axis a value of 0 or less sits, hollow, on the axis's lower end; that of the
/// y axis is then labelled 0.
struct plot_series {
    std::string name;
    std::vector<double> x = {};
    std::vector<double> y = {};
    std::string colour_key = {};  ///< series of one key have one colour and one marker; empty: a key of its own
    std::string dash_key = {};  ///< series of one key have the same dashes; empty: dashes once the colours are used up
    bool named = false;         ///< its name stands beside its last point
};

/// A horizontal line to compare with.
struct plot_reference {
    double y;
    std::string label;
};

struct plot_panel {
    std::string title;
    plot_axis x;
    plot_axis y;
    std::vector<plot_series> series;
    std::vector<plot_reference> references;
};

struct plot_figure {
    std::string title;
    std::vector<plot_panel> panels;
};

namespace detail {

inline std::string xml_text(std::string_view text) {
    std::string out;
    for (const char c : text) {
        out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '"' ? "&quot;" : std::string(1, c);
    }
    return out;
}

/// Where values of an axis lie on the page.
struct plot_scale {
    bool logarithmic = false;
    double low = 0, high = 1;   // in data units, logarithms on a logarithmic axis
    double start = 0, end = 1;  // on the page
    std::vector<double> ticks;
    bool zero_at_start = false;  // some values have no logarithm

    [[nodiscard]] double operator()(double value) const {
        const double v = !logarithmic ? value : value > 0 ? std::log10(value) : low;
        return start + (std::clamp(v, low, high) - low) / (high - low) * (end - start);
    }
};

/// Scale for an axis and the values it has to show.
inline plot_scale make_scale(const plot_axis& axis, const std::vector<double>& values, double start, double end) {
    const bool logarithmic = axis.logarithmic;
    plot_scale s;
    s.logarithmic = logarithmic;
    s.low = std::numeric_limits<double>::infinity();
    s.high = -s.low;
    s.start = start;
    s.end = end;
    s.ticks = axis.ticks;
    const auto include = [&](double v) {
        if (std::isfinite(v) && (!logarithmic || v > 0)) {
            s.low = (std::min)(s.low, logarithmic ? std::log10(v) : v);
            s.high = (std::max)(s.high, logarithmic ? std::log10(v) : v);
        }
    };
    std::for_each(values.begin(), values.end(), include);
    std::for_each(axis.ticks.begin(), axis.ticks.end(), include);
    if (!logarithmic && s.low >= 0) {
        s.low = 0;
    }
    if (!(s.low <= s.high)) {
        s.low = 0, s.high = 1;
    }
    const double margin = s.high > s.low ? 0.06 * (s.high - s.low)
                          : logarithmic  ? 0.5
                                         : (std::max)(1e-9, 0.5 * std::abs(s.high));
    s.high += margin;
    s.low -= logarithmic || s.low < 0 ? margin : 0;
    s.zero_at_start = logarithmic && std::any_of(values.begin(), values.end(), [](double v) { return v <= 0; });
    s.low -= s.zero_at_start ? 2 * margin : 0;
    const auto given = [&](const std::optional<double>& bound, double& at) {
        if (bound && (!logarithmic || *bound > 0)) {
            at = logarithmic ? std::log10(*bound) : *bound;
        }
    };
    given(axis.low, s.low);
    given(axis.high, s.high);
    if (!(s.high > s.low)) {
        s.high = s.low + 1;
    }
    if (s.ticks.empty() && logarithmic) {
        const bool wide = s.high - s.low > 2.5;
        for (int decade = static_cast<int>(std::floor(s.low)); decade <= s.high; ++decade) {
            for (const double digit : {1.0, 2.0, 5.0}) {
                if (digit == 1 || !wide) {
                    s.ticks.push_back(digit * std::pow(10.0, decade));
                }
            }
        }
    } else if (s.ticks.empty()) {
        const double rough = (s.high - s.low) / 6;
        const double decade = std::pow(10.0, std::floor(std::log10(rough)));
        const double step = decade * (rough > 5 * decade ? 10 : rough > 2 * decade ? 5 : rough > decade ? 2 : 1);
        const double first = std::ceil(s.low / step);
        for (int i = 0; i < 8; ++i) {  // more than fit
            s.ticks.push_back((first + i) * step);
        }
    }
    std::erase_if(s.ticks, [&](double tick) {
        const double v = logarithmic ? (tick > 0 ? std::log10(tick) : -1e300) : tick;
        return !(v >= s.low + (s.zero_at_start ? 1.5 * margin : -1e-9) && v <= s.high + 1e-9);
    });
    return s;
}

/// Colour (after Okabe and Ito: told apart by colour-blind readers too), dashes and marker of a series.
struct plot_style {
    const char* colour;
    const char* dashes;
    std::size_t marker;
};
inline constexpr std::array<const char*, 7> plot_colours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                            "#e69f00", "#56b4e9", "#555555"};
inline constexpr std::array<const char*, 3> plot_dashes = {"none", "7 3", "2 3"};

/// The styles of a figure's series, by name.
class plot_styles {
public:
    explicit plot_styles(const plot_figure& figure) {
        std::vector<std::string> colours;
        std::vector<std::string> dashes;
        for (const plot_panel& panel : figure.panels) {
            for (const plot_series& s : panel.series) {
                if (position(names_, s.name) < names_.size()) {
                    continue;
                }
                names_.push_back(s.name);
                const std::size_t c = entry(colours, s.colour_key.empty() ? "series " + s.name : s.colour_key);
                const std::size_t d = s.dash_key.empty() ? c / plot_colours.size() : entry(dashes, s.dash_key);
                styles_.push_back({plot_colours[c % plot_colours.size()], plot_dashes[d % plot_dashes.size()], c % 4});
            }
        }
    }

    /// In order of their first appearance.
    [[nodiscard]] const std::vector<std::string>& names() const { return names_; }
    [[nodiscard]] const plot_style& of(const std::string& name) const { return styles_[position(names_, name)]; }

private:
    static std::size_t position(const std::vector<std::string>& list, const std::string& text) {
        return static_cast<std::size_t>(std::find(list.begin(), list.end(), text) - list.begin());
    }
    static std::size_t entry(std::vector<std::string>& list, const std::string& text) {
        const std::size_t at = position(list, text);
        if (at == list.size()) {
            list.push_back(text);
        }
        return at;
    }

    std::vector<std::string> names_;
    std::vector<plot_style> styles_;
};

inline std::string marker(const plot_style& style, double x, double y, bool hollow, const std::string& hint) {
    const std::string paint = hollow ? fmt::format("fill=\"#fff\" stroke=\"{}\" stroke-width=\"1.6\"", style.colour)
                                     : fmt::format("fill=\"{}\" stroke=\"#fff\" stroke-width=\"1\"", style.colour);
    const std::string title = hint.empty() ? "" : "<title>" + xml_text(hint) + "</title>";
    switch (style.marker) {
        case 0:
            return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" {}>{}</circle>\n", x, y, paint, title);
        case 1:
            return fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"7.4\" height=\"7.4\" {}>{}</rect>\n", x - 3.7,
                               y - 3.7, paint, title);
        case 2:
            return fmt::format("<path d=\"M{:.1f} {:.1f}l5 8.6h-10z\" {}>{}</path>\n", x, y - 5.4, paint, title);
        default:
            return fmt::format("<path d=\"M{:.1f} {:.1f}l5.2 5.2l-5.2 5.2l-5.2 -5.2z\" {}>{}</path>\n", x, y - 5.2,
                               paint, title);
    }
}

}  // namespace detail

/// The figure as a complete SVG document. Its background is white whatever page it stands on.
[[nodiscard]] inline std::string svg_text(const plot_figure& figure) {
    constexpr double panel_width = 440, panel_height = 300, left = 66, right = 20, top = 40, bottom = 54;
    const double header = figure.title.empty() ? 6 : 40;
    const auto count = static_cast<double>((std::max)(figure.panels.size(), std::size_t{1}));
    const double width = count * panel_width;
    const auto text_size = [](std::string_view text) { return 6.6 * static_cast<double>(text_width(text)); };

    const detail::plot_styles styles(figure);
    std::string body;
    const auto put = [&]<class... Parts>(fmt::format_string<const Parts&...> format, const Parts&... parts) {
        fmt::format_to(std::back_inserter(body), format, parts...);
    };
    if (!figure.title.empty()) {
        put("<text x=\"{:.1f}\" y=\"28\" text-anchor=\"middle\" font-size=\"16\" font-weight=\"600\">{}</text>\n",
            width / 2, detail::xml_text(figure.title));
    }
    for (std::size_t p = 0; p < figure.panels.size(); ++p) {
        const plot_panel& panel = figure.panels[p];
        const double x0 = static_cast<double>(p) * panel_width + left;
        const double y0 = header + panel_height - bottom;
        const double y1 = header + top;
        std::vector<double> xs, ys;
        for (const plot_series& s : panel.series) {
            xs.insert(xs.end(), s.x.begin(), s.x.end());
            ys.insert(ys.end(), s.y.begin(), s.y.end());
        }
        double beside = 0;  // room for the labels of reference lines
        for (const plot_reference& r : panel.references) {
            ys.push_back(r.y);
            beside = (std::max)(beside, text_size(r.label) - 8);
        }
        const double x1 = static_cast<double>(p + 1) * panel_width - right - beside;
        const detail::plot_scale sx = detail::make_scale(panel.x, xs, x0, x1);
        const detail::plot_scale sy = detail::make_scale(panel.y, ys, y0, y1);
        const auto label = [](const plot_axis& axis, double v) {
            v = std::abs(v) < 1e-12 ? 0 : v;
            return axis.percent ? fmt::format("{:.4g} %", 100 * v) : fmt::format("{:.4g}", v);
        };

        put("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"13\" font-weight=\"600\">{}</text>\n", x0, y1 - 14,
            detail::xml_text(panel.title));
        double free_from = -1e9;
        for (const double tick : sx.ticks) {
            const double x = sx(tick);
            const std::string text = label(panel.x, tick);
            put("<path d=\"M{:.1f} {:.1f}V{:.1f}\" stroke=\"#e6e6e6\"/>\n", x, y0, y1);
            if (x - text_size(text) / 2 >= free_from) {
                put("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n", x, y0 + 17, text);
                free_from = x + text_size(text) / 2 + 6;
            }
        }
        double free_below = 1e9;
        if (sy.zero_at_start) {
            put("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">0</text>\n", x0 - 7, y0 + 4);
            free_below = y0 - 14;
        }
        for (const double tick : sy.ticks) {
            const double y = sy(tick);
            put("<path d=\"M{:.1f} {:.1f}H{:.1f}\" stroke=\"#e6e6e6\"/>\n", x0, y, x1);
            if (y <= free_below) {
                put("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", x0 - 7, y + 4,
                    label(panel.y, tick));
                free_below = y - 14;
            }
        }
        put("<path d=\"M{:.1f} {:.1f}V{:.1f}H{:.1f}\" fill=\"none\" stroke=\"#777\"/>\n", x0, y1, y0, x1);
        put("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n", (x0 + x1) / 2, y0 + 39,
            detail::xml_text(panel.x.title));
        put("<text transform=\"translate({:.1f} {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n", x0 - 50,
            (y0 + y1) / 2, detail::xml_text(panel.y.title));
        for (const plot_reference& r : panel.references) {
            put("<path d=\"M{:.1f} {:.1f}H{:.1f}\" stroke=\"#333\" stroke-width=\"1.2\" stroke-dasharray=\"5 4\"/>\n",
                x0, sy(r.y), x1);
            put("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x1 + 5, sy(r.y) + 4, detail::xml_text(r.label));
        }

        std::string markers;
        std::vector<std::array<double, 3>> labels;  // of series: from, to, base line
        for (const plot_series& s : panel.series) {
            const detail::plot_style style = styles.of(s.name);
            std::string path;
            bool drawing = false;
            std::optional<std::pair<double, double>> last;
            for (std::size_t i = 0; i < (std::min)(s.x.size(), s.y.size()); ++i) {
                if (!std::isfinite(s.x[i]) || !std::isfinite(s.y[i])) {
                    drawing = false;
                    continue;
                }
                const double x = sx(s.x[i]);
                const double y = sy(s.y[i]);
                path += fmt::format("{}{:.1f} {:.1f}", drawing ? 'L' : 'M', x, y);
                drawing = true;
                last = {x, y};
                const bool hollow = (sx.logarithmic && s.x[i] <= 0) || (sy.logarithmic && s.y[i] <= 0);
                markers += detail::marker(style, x, y, hollow,
                                          s.name + ": " + label(panel.x, s.x[i]) + ", " + label(panel.y, s.y[i]));
            }
            if (s.named && last) {  // beside the point, as far off it as other names ask for
                const double wide = 5.5 * static_cast<double>(text_width(s.name));
                const bool before = last->first + 8 + wide > x1;
                const double from = before ? last->first - 7 - wide : last->first + 7;
                double y = last->second + 3.5;
                double step = 9.5;
                for (bool moved = true; moved;) {
                    moved = false;
                    for (const auto& [left_end, right_end, base] : labels) {
                        if (from < right_end && from + wide > left_end && std::abs(y - base) < 9) {
                            step = base + step > y0 - 3 ? -9.5 : step;  // no room below: above
                            y = base + step;
                            moved = true;
                        }
                    }
                }
                labels.push_back({from, from + wide, y});
                put("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"10\" fill=\"{}\">{}</text>\n", from, y, style.colour,
                    detail::xml_text(s.name));
            }
            put("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{}\" "
                "stroke-linejoin=\"round\"/>\n",
                path, style.colour, style.dashes);
        }
        body += markers;
    }

    const std::size_t entries = styles.names().size();  // of the legend, in columns as wide as the widest
    double entry_width = 1;
    for (const std::string& name : styles.names()) {
        entry_width = (std::max)(entry_width, 56 + text_size(name));
    }
    const auto columns = static_cast<std::size_t>((std::max)(1.0, std::floor((width - left) / entry_width)));
    const std::size_t lines = (entries + columns - 1) / columns;
    const double legend = header + panel_height + 14;
    for (std::size_t i = 0; i < entries; ++i) {
        const std::string& name = styles.names()[i];
        const detail::plot_style style = styles.of(name);
        const double x = left + static_cast<double>(i / lines) * entry_width;
        const double y = legend + 21 * static_cast<double>(i % lines);
        put("<path d=\"M{:.1f} {:.1f}h30\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{}\"/>\n", x, y,
            style.colour, style.dashes);
        body += detail::marker(style, x + 15, y, false, "");
        put("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x + 37, y + 4, detail::xml_text(name));
    }
    const double height = entries == 0 ? header + panel_height : legend + 21 * static_cast<double>(lines - 1) + 18;
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
               "{1:.0f}\" role=\"img\" font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, "
               "sans-serif\" font-size=\"12\" fill=\"#222\">\n<title>{2}</title>\n"
               "<rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#fff\"/>\n",
               width, height, detail::xml_text(figure.title.empty() ? "plot" : figure.title)) +
           body + "</svg>\n";
}

/// Writes the figure to a file, replacing it. Throws file_error when that is not possible.
inline void write_svg(const plot_figure& figure, const std::filesystem::path& file) {
    std::ofstream out(file, std::ios::binary | std::ios::trunc);
    out << svg_text(figure);
    out.flush();
    if (!out) {
        throw file_error(file, "cannot be written");
    }
}

}  // namespace example
