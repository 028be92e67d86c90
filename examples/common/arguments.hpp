// Command-line options that CLI11 does not bring: fractions such as 1/16, counts that do not wrap, and lists checked
// element by element.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <concepts>
#include <map>
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

/// A text without the blanks around it.
[[nodiscard]] inline std::string_view trimmed(std::string_view text) {
    constexpr std::string_view blanks = " \t\r\n";
    const std::size_t first = (std::min)(text.find_first_not_of(blanks), text.size());
    return text.substr(first, text.find_last_not_of(blanks) + 1 - first);
}

/// The parts of a text between commas without the blanks around them, empty ones included.
[[nodiscard]] inline std::vector<std::string> split_list(std::string_view text) {
    std::vector<std::string> parts;
    for (std::size_t comma; (comma = text.find(',')) != std::string_view::npos; text.remove_prefix(comma + 1)) {
        parts.emplace_back(trimmed(text.substr(0, comma)));
    }
    parts.emplace_back(trimmed(text));
    return parts;
}

/// The arguments of a list option as one text with commas, whether they came as "a,b", "a, b", a b, a, b or after the
/// option's name each time it was given.
[[nodiscard]] inline std::string joined_list(const std::vector<std::string>& arguments) {
    std::string text;
    for (const std::string& argument : arguments) {
        const std::string_view part = trimmed(argument);
        const bool has_comma = text.empty() || text.ends_with(',') || part.starts_with(',');
        text += (has_comma ? "" : ",") + std::string(part);
    }
    return text;
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

namespace detail {

template <std::unsigned_integral T>
T count_within(const std::string& name, const std::string& text, T low, T high) {
    T found = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), found);
    if (code != std::errc{} || end != text.data() + text.size() || found < low || found > high) {
        throw CLI::ValidationError(name, fmt::format("\"{}\" is no whole number from {} to {}", text, low, high));
    }
    return found;
}

}  // namespace detail

/// Option for a whole number from low to high, in decimal digits alone. `value` holds the default and, after parsing,
/// the result. Any other text, a sign included, ends parsing with a message that names the option and its range.
template <std::unsigned_integral T>
CLI::Option* add_count(CLI::App& app, const std::string& name, T& value, std::type_identity_t<T> low,
                       std::type_identity_t<T> high, const std::string& description) {
    return app
        .add_option_function<std::string>(
            name, [=, &value](const std::string& text) { value = detail::count_within<T>(name, text, low, high); },
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

namespace detail {

/// Option for a list: of one argument or more, given once or more often; `take` gets the parts of all of them.
template <class Take>
CLI::Option* add_list(CLI::App& app, const std::string& name, const std::string& description, Take take) {
    return app
        .add_option(
            name,
            [take](const CLI::results_t& arguments) {
                take(split_list(joined_list(arguments)));
                return true;
            },
            description)
        ->expected(-1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

/// Adds a value that may occur once.
template <class T>
void add_once(const std::string& name, std::vector<T>& found, const T& value, const std::string& text) {
    if (std::find(found.begin(), found.end(), value) != found.end()) {
        throw CLI::ValidationError(name, fmt::format("{} occurs twice", text));
    }
    found.push_back(value);
}

}  // namespace detail

/// Option for one or more numbers, in the order given; each may occur once. They stand between commas or blanks, and
/// those of a repeated option are added.
inline CLI::Option* add_numbers(CLI::App& app, const std::string& name, std::vector<double>& values,
                                const interval& range, const std::string& description) {
    return detail::add_list(app, name, description,
                            [=, &values](const std::vector<std::string>& parts) {
                                std::vector<double> found;
                                for (const std::string& part : parts) {
                                    detail::add_once(name, found, detail::number_within(name, part, range), part);
                                }
                                values = found;
                            })
        ->type_name("NUMBER,...")
        ->default_str(detail::joined(values, ","));
}

/// Option for one or more whole numbers; as add_numbers().
template <std::unsigned_integral T>
CLI::Option* add_counts(CLI::App& app, const std::string& name, std::vector<T>& values, std::type_identity_t<T> low,
                        std::type_identity_t<T> high, const std::string& description) {
    return detail::add_list(app, name, description,
                            [=, &values](const std::vector<std::string>& parts) {
                                std::vector<T> found;
                                for (const std::string& part : parts) {
                                    detail::add_once(name, found, detail::count_within<T>(name, part, low, high), part);
                                }
                                values = found;
                            })
        ->type_name("COUNT,...")
        ->default_str(detail::joined(values, ","));
}

/// Option for one or more of the known names, in the order given; as add_numbers().
inline CLI::Option* add_names(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                              const std::vector<std::string>& known, const std::string& description) {
    return detail::add_list(app, name, fmt::format("{}: any of {}", description, detail::joined(known, ", ")),
                            [=, &values](const std::vector<std::string>& parts) {
                                std::vector<std::string> found;
                                for (const std::string& part : parts) {
                                    if (std::find(known.begin(), known.end(), part) == known.end()) {
                                        throw CLI::ValidationError(
                                            name, fmt::format("\"{}\" is not known; choose from {}", part,
                                                              detail::joined(known, ", ")));
                                    }
                                    detail::add_once(name, found, part, part);
                                }
                                values = found;
                            })
        ->type_name("NAME,...")
        ->default_str(detail::joined(values, ","));
}

/// The options that were given, by name, with their arguments as one text.
[[nodiscard]] inline std::map<std::string, std::string> given_options(const CLI::App& app) {
    std::map<std::string, std::string> given;
    for (const CLI::Option* option : app.get_options()) {
        if (option->count() > 0) {
            given[option->get_name()] = joined_list(option->results());
        }
    }
    return given;
}

}  // namespace example
