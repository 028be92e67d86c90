// Command-line options that CLI11 does not bring: fractions such as 1/16, counts that do not wrap, and lists checked
// element by element.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

namespace example {

/// The finite decimal number that a text holds from its first character to its last; nothing otherwise. The same in
/// every locale.
[[nodiscard]] inline std::optional<double> parse_number(std::string_view text) {
    double value = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || !std::isfinite(value)) {
        return std::nullopt;
    }
    return value;
}

/// A number, or the ratio of two: "0.0625", "1/16". Nothing for any other text, and for a ratio that is not finite.
[[nodiscard]] inline std::optional<double> parse_fraction(std::string_view text) {
    const std::size_t slash = text.find('/');
    if (slash == std::string_view::npos) {
        return parse_number(text);
    }
    const auto above = parse_number(text.substr(0, slash));
    const auto below = parse_number(text.substr(slash + 1));
    if (!above || !below || !std::isfinite(*above / *below)) {
        return std::nullopt;
    }
    return *above / *below;
}

/// The parts of a text between commas, empty ones included.
[[nodiscard]] inline std::vector<std::string> split_list(std::string_view text) {
    std::vector<std::string> parts;
    for (std::size_t comma; (comma = text.find(',')) != std::string_view::npos; text.remove_prefix(comma + 1)) {
        parts.emplace_back(text.substr(0, comma));
    }
    parts.emplace_back(text);
    return parts;
}

/// The numbers an option accepts: above `low` (or from it on), below `high` (or up to it).
struct interval {
    double low = 0;
    double high = 0;
    bool with_low = false;
    bool with_high = false;

    [[nodiscard]] bool contains(double x) const {
        return (with_low ? x >= low : x > low) && (with_high ? x <= high : x < high);
    }
    [[nodiscard]] std::string text() const {
        return std::isinf(high) ? fmt::format("{} {}", with_low ? "at least" : "above", low)
                                : fmt::format("in {}{}, {}{}", with_low ? '[' : '(', low, high, with_high ? ']' : ')');
    }
};

namespace detail {

/// The values with a separator between them. fmt::join would do, but for a false alarm of GCC 12 at -O3.
template <class Values>
std::string joined(const Values& values, std::string_view separator) {
    std::string text;
    for (const auto& value : values) {
        text += fmt::format("{}{}", text.empty() ? "" : separator, value);
    }
    return text;
}

inline double number_within(const std::string& name, const std::string& text, const interval& range) {
    const auto value = parse_fraction(text);
    if (!value) {
        throw CLI::ValidationError(name, fmt::format("\"{}\" is no number; write 0.0625 or 1/16", text));
    }
    if (!range.contains(*value)) {
        throw CLI::ValidationError(name, fmt::format("{} is out of range; it must be {}", text, range.text()));
    }
    return *value;
}

}  // namespace detail

/// Option for a number or a ratio of two. `value` holds the default and, after parsing, the result.
/// A text that is no number, or one outside the range, ends parsing with a message that names the option.
inline CLI::Option* add_fraction(CLI::App& app, const std::string& name, double& value, const interval& range,
                                 const std::string& description, const std::string& default_text = {}) {
    return app
        .add_option_function<std::string>(
            name, [=, &value](const std::string& text) { value = detail::number_within(name, text, range); },
            description)
        ->type_name("NUMBER")
        ->default_str(default_text.empty() ? fmt::format("{}", value) : default_text);
}

/// Option for a whole number from low to high, in decimal digits alone. `value` holds the default and, after parsing,
/// the result. Any other text, a sign included, ends parsing with a message that names the option and its range.
template <std::unsigned_integral T>
CLI::Option* add_count(CLI::App& app, const std::string& name, T& value, std::type_identity_t<T> low,
                       std::type_identity_t<T> high, const std::string& description) {
    return app
        .add_option_function<std::string>(
            name,
            [=, &value](const std::string& text) {
                T found = 0;
                const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), found);
                if (code != std::errc{} || end != text.data() + text.size() || found < low || found > high) {
                    throw CLI::ValidationError(name,
                                               fmt::format("\"{}\" is no whole number from {} to {}", text, low, high));
                }
                value = found;
            },
            description)
        ->type_name("COUNT")
        ->default_str(fmt::format("{}", value));
}

/// Option for the name of a file or folder; an empty one ends parsing with a message that names the option.
inline CLI::Option* add_path(CLI::App& app, const std::string& name, std::string& value,
                             const std::string& description) {
    return app
        .add_option_function<std::string>(
            name,
            [=, &value](const std::string& text) {
                if (text.empty()) {
                    throw CLI::ValidationError(name, "the name is empty");
                }
                value = text;
            },
            description)
        ->type_name("PATH")
        ->default_str(value);
}

/// Option for one or more numbers between commas, in the order given; each may occur once.
inline CLI::Option* add_numbers(CLI::App& app, const std::string& name, std::vector<double>& values,
                                const interval& range, const std::string& description) {
    return app
        .add_option_function<std::string>(
            name,
            [=, &values](const std::string& text) {
                std::vector<double> found;
                for (const std::string& part : split_list(text)) {
                    const double value = detail::number_within(name, part, range);
                    if (std::find(found.begin(), found.end(), value) != found.end()) {
                        throw CLI::ValidationError(name, fmt::format("{} occurs twice", part));
                    }
                    found.push_back(value);
                }
                values = found;
            },
            description)
        ->type_name("NUMBER,...")
        ->default_str(detail::joined(values, ","));
}

/// Option for one or more of the known names between commas, in the order given; each may occur once.
inline CLI::Option* add_names(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                              const std::vector<std::string>& known, const std::string& description) {
    return app
        .add_option_function<std::string>(
            name,
            [=, &values](const std::string& text) {
                std::vector<std::string> found;
                for (const std::string& part : split_list(text)) {
                    if (std::find(known.begin(), known.end(), part) == known.end()) {
                        throw CLI::ValidationError(name, fmt::format("\"{}\" is not known; choose from {}", part,
                                                                     detail::joined(known, ", ")));
                    }
                    if (std::find(found.begin(), found.end(), part) != found.end()) {
                        throw CLI::ValidationError(name, fmt::format("{} occurs twice", part));
                    }
                    found.push_back(part);
                }
                values = found;
            },
            fmt::format("{}: any of {}", description, detail::joined(known, ", ")))
        ->type_name("NAME,...")
        ->default_str(detail::joined(values, ","));
}

}  // namespace example
