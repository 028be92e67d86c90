// Attention traces: what one layer's attention saw while a model read a prompt and decoded, from a folder of files.
// examples/data/README.md describes the folder.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "common/file_error.hpp"
#include "common/npy.hpp"
#include "verkv/core/geometry.hpp"
#include "verkv/core/prompt.hpp"
#include "verkv/core/rope.hpp"
#include "verkv/core/storage.hpp"
#include "verkv/core/views.hpp"

namespace example {

/// A trace folder cannot be used; what() is "FILE: what is wrong".
class trace_error : public file_error {
    using file_error::file_error;
};

using verkv::rope_pairing;

/// What a trace says about itself, without its arrays.
struct trace_info {
    std::string name;                     ///< last part of the folder's name
    std::string model;                    ///< as the folder says; may be empty
    std::uint32_t layer = 0;              ///< as the folder says; 0 where it says nothing
    verkv::geometry shape;                ///< heads, widths and the factor on <q, k>
    std::optional<rope_pairing> pairing;  ///< empty where the folder does not say
    std::optional<double> theta;          ///< base of the plain rotation; empty where the folder does not say
    std::size_t prefill_tokens = 0;       ///< tokens 0 ... prefill_tokens-1 are the prompt
    std::size_t tokens = 0;               ///< prompt and decoded tokens; token t is at position t
    std::vector<verkv::position_t> query_positions;  ///< of the query rows, ascending; not every position has one

    /// Which channels RoPE turns together. Throws trace_error where the folder does not say.
    [[nodiscard]] rope_pairing known_pairing() const {
        if (!pairing) {
            throw trace_error(name + "/meta.json", "says no \"rope.pairing\", which the rope-pairs sketch needs");
        }
        return *pairing;
    }

    /// The rotation of queries and keys. Throws trace_error where the folder does not say.
    [[nodiscard]] verkv::rope rotation() const {
        if (!pairing || !theta) {
            throw trace_error(name + "/meta.json",
                              "says no \"rope.pairing\" or no \"rope.theta\", which scorers need that turn keys and "
                              "queries back");
        }
        return verkv::rope::plain(shape.key_dim, *theta, *pairing);
    }

    [[nodiscard]] std::size_t query_rows() const { return query_positions.size(); }

    /// Query row of the first decode step. The rows from here on are the decode steps.
    [[nodiscard]] std::size_t first_decode_row() const {
        const auto first = std::lower_bound(query_positions.begin(), query_positions.end(),
                                            static_cast<verkv::position_t>(prefill_tokens));
        return static_cast<std::size_t>(first - query_positions.begin());
    }

    [[nodiscard]] std::size_t decode_steps() const { return query_rows() - first_decode_row(); }

    /// Query row of a decode step; at position p it sees the keys 0 ... p.
    [[nodiscard]] std::size_t decode_row(std::size_t step) const { return first_decode_row() + step; }
    [[nodiscard]] verkv::position_t decode_position(std::size_t step) const {
        return query_positions[decode_row(step)];
    }

    /// At most `count` decode steps, spread evenly from the first to the last.
    [[nodiscard]] std::vector<std::size_t> spread_steps(std::size_t count) const {
        const std::size_t all = decode_steps();
        count = verkv::smaller(count, all);
        std::vector<std::size_t> steps(count);
        for (std::size_t i = 0; i < count; ++i) {
            steps[i] = i == 0 ? 0 : i * (all - 1) / (count - 1);
        }
        return steps;
    }

    /// Query rows at prompt positions n-1, n-1-stride, ... above 0, as far as the trace has them; ascending.
    [[nodiscard]] std::vector<std::size_t> prompt_query_rows(std::size_t stride) const {
        std::vector<std::size_t> found;
        for (std::size_t row = 0; row < first_decode_row(); ++row) {
            const auto position = static_cast<std::size_t>(query_positions[row]);
            if (position > 0 && (prefill_tokens - 1 - position) % stride == 0) {
                found.push_back(row);
            }
        }
        return found;
    }

    /// Query rows at the last `count` prompt positions, as far as the trace has them; ascending.
    [[nodiscard]] std::vector<std::size_t> last_prompt_query_rows(std::size_t count) const {
        std::vector<std::size_t> found;
        for (std::size_t row = 0; row < first_decode_row(); ++row) {
            if (static_cast<std::size_t>(query_positions[row]) + count >= prefill_tokens) {
                found.push_back(row);
            }
        }
        return found;
    }
};

/// A trace with its arrays, each [token or query row, head, channel], queries and keys rotated.
template <verkv::storage T>
struct trace : trace_info {
    using element = T;

    std::vector<T> key_data;
    std::vector<T> value_data;
    std::vector<T> query_data;

    [[nodiscard]] verkv::heads_view<T> keys() const {
        return verkv::heads_of(std::span(key_data), tokens, shape.kv_heads, shape.key_dim);
    }
    [[nodiscard]] verkv::heads_view<T> values() const {
        return verkv::heads_of(std::span(value_data), tokens, shape.kv_heads, shape.value_dim);
    }
    [[nodiscard]] verkv::heads_view<T> queries() const {
        return verkv::heads_of(std::span(query_data), query_rows(), shape.query_heads, shape.key_dim);
    }
};

/// A trace with elements as its folder has them: half where all arrays are float16, else float.
using any_trace = std::variant<trace<verkv::half>, trace<float>>;

/// The part of a trace that does not depend on its element type.
[[nodiscard]] inline const trace_info& info(const any_trace& t) {
    return std::visit([](const auto& typed) -> const trace_info& { return typed; }, t);
}

/// A trace's prompt in the form that scorers take. Refers to the trace's memory; owns the kept queries.
template <verkv::storage T>
struct kept_prompt {
    verkv::geometry shape;
    std::vector<verkv::rows<T>> keys;
    std::vector<verkv::rows<T>> values;
    std::vector<verkv::position_t> positions;
    std::vector<T> query_data;
    std::vector<verkv::position_t> query_positions;

    [[nodiscard]] verkv::prompt<T> view() const {
        return {shape,
                keys,
                values,
                positions,
                verkv::heads_of(std::span(query_data), query_positions.size(), shape.query_heads, shape.key_dim),
                query_positions};
    }
};

/// Prompt of a trace, with the queries of the given rows (ascending; prompt_query_rows(16), say).
template <verkv::storage T>
[[nodiscard]] kept_prompt<T> prompt_of(const trace<T>& t, std::span<const std::size_t> query_rows) {
    kept_prompt<T> p;
    p.shape = t.shape;
    for (std::size_t head = 0; head < t.shape.kv_heads; ++head) {
        p.keys.push_back(t.keys().head(head).slice(0, t.prefill_tokens));
        p.values.push_back(t.values().head(head).slice(0, t.prefill_tokens));
    }
    p.positions.resize(t.prefill_tokens);
    std::iota(p.positions.begin(), p.positions.end(), verkv::position_t{0});
    const std::size_t row_size = t.shape.query_heads * t.shape.key_dim;
    p.query_data.reserve(query_rows.size() * row_size);
    for (const std::size_t row : query_rows) {
        const T* data = t.queries().row(row, 0);
        p.query_data.insert(p.query_data.end(), data, data + row_size);
        p.query_positions.push_back(t.query_positions[row]);
    }
    return p;
}

namespace detail {

using json = nlohmann::json;

/// meta.json, with errors that name it and the field.
class meta_reader {
public:
    explicit meta_reader(const std::filesystem::path& file) : file_(file) {
        std::error_code code;
        if (!std::filesystem::exists(file, code)) {
            fail("does not exist");
        }
        std::ifstream in(file, std::ios::binary);
        if (!std::filesystem::is_regular_file(file, code) || !in) {
            fail("cannot be opened");
        }
        try {
            root_ = json::parse(in);
        } catch (const json::exception& e) {
            fail(std::string("is no JSON: ") + e.what());
        }
        if (!root_.is_object()) {
            fail(std::string("must hold an object; it holds a value of type ") + root_.type_name());
        }
    }

    [[noreturn]] void fail(const std::string& problem) const { throw trace_error(file_, problem); }

    /// An integer that must be there, at least `least` and below 2^31 (positions are 32 bits wide).
    [[nodiscard]] std::size_t count(const char* name, std::size_t least = 1) const {
        const json& value = required(root_, name, name);
        const std::size_t most = 0x7fffffff;
        const bool integer = value.is_number_integer();
        if (!integer || !value.is_number_unsigned() || value.get<std::uint64_t>() < least ||
            value.get<std::uint64_t>() > most) {
            fail(std::string("\"") + name + "\" is " + shown(value) + "; it must be an integer of " +
                 std::to_string(least) + " to " + std::to_string(most));
        }
        return value.get<std::size_t>();
    }

    [[nodiscard]] bool has(const char* name) const { return root_.contains(name) && !root_[name].is_null(); }

    [[nodiscard]] float positive(const char* name) const {
        const json& value = required(root_, name, name);
        const float x = value.is_number() ? value.get<float>() : 0.0f;
        if (!(x > 0) || !std::isfinite(x)) {
            fail(std::string("\"") + name + "\" is " + shown(value) + "; it must be a positive number");
        }
        return x;
    }

    [[nodiscard]] std::string text(const char* name) const {
        const json& value = required(root_, name, name);
        if (!value.is_string()) {
            fail(std::string("\"") + name + "\" is " + shown(value) + "; it must be a string");
        }
        return value.get<std::string>();
    }

    [[nodiscard]] std::optional<rope_pairing> pairing() const {
        if (!has("rope")) {
            return std::nullopt;
        }
        const json& rope = root_["rope"];
        if (!rope.is_object()) {
            fail("\"rope\" is " + shown(rope) + "; it must be an object");
        }
        if (rope.contains("rotated") && rope["rotated"] != json(true)) {
            fail("\"rope.rotated\" is " + shown(rope["rotated"]) + "; queries and keys must be rotated already");
        }
        const json& value = required(rope, "pairing", "rope.pairing");
        if (value == json("interleaved")) {
            return rope_pairing::interleaved;
        }
        if (value == json("half")) {
            return rope_pairing::half;
        }
        fail("\"rope.pairing\" is " + shown(value) + "; it must be \"interleaved\" or \"half\"");
    }

    [[nodiscard]] std::optional<double> theta() const {
        if (!has("rope") || !root_["rope"].contains("theta")) {
            return std::nullopt;
        }
        const json& value = root_["rope"]["theta"];
        const double theta = value.is_number() ? value.get<double>() : 0;
        if (!(theta > 0) || !std::isfinite(theta)) {
            fail("\"rope.theta\" is " + shown(value) + "; it must be a positive number");
        }
        return theta;
    }

private:
    const json& required(const json& object, const char* name, const char* full_name) const {
        const auto found = object.find(name);
        if (found == object.end()) {
            fail(std::string("\"") + full_name + "\" is missing");
        }
        return *found;
    }

    static std::string shown(const json& value) {
        if (value.is_structured()) {
            return std::string("an ") + value.type_name();
        }
        std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
        if (text.size() > 60) {
            text.resize(60);
            text += "...";
        }
        return text;
    }

    std::filesystem::path file_;
    json root_;
};

struct trace_array {
    std::filesystem::path file;
    npy_array array;

    [[nodiscard]] bool is_half() const { return std::holds_alternative<std::vector<verkv::half>>(array.elements); }
};

inline npy_array read_trace_npy(const std::filesystem::path& file) {
    try {
        return read_npy(file);
    } catch (const file_error& e) {
        throw trace_error(e.file(), e.problem());
    }
}

/// An array [?, heads, width] of float16 or float32.
inline trace_array read_trace_array(const std::filesystem::path& file, const char* heads_name, std::size_t heads,
                                    const char* width_name, std::size_t width) {
    trace_array a{file, read_trace_npy(file)};
    if (!a.is_half() && !std::holds_alternative<std::vector<float>>(a.array.elements)) {
        throw trace_error(file, "elements must be float16 or float32 ('<f2' or '<f4')");
    }
    const auto& shape = a.array.shape;
    if (shape.size() != 3 || shape[1] != heads || shape[2] != width) {
        throw trace_error(file, "has shape " + shape_text(shape) + "; meta.json asks for (rows, " + heads_name + " = " +
                                    std::to_string(heads) + ", " + width_name + " = " + std::to_string(width) + ")");
    }
    return a;
}

/// The elements as T, all of them finite.
template <class T>
std::vector<T> take_elements(trace_array&& a) {
    return std::visit(
        [&]<class S>(std::vector<S>& from) -> std::vector<T> {
            if constexpr (std::is_same_v<S, verkv::half> || std::is_same_v<S, float>) {
                const auto refuse = [&](std::size_t i, const std::string& problem) {
                    const std::size_t width = a.array.shape[2];
                    const std::size_t heads = a.array.shape[1];
                    throw trace_error(a.file, "row " + std::to_string(i / width / heads) + ", head " +
                                                  std::to_string(i / width % heads) + ", channel " +
                                                  std::to_string(i % width) + " is " + problem);
                };
                for (std::size_t i = 0; i < from.size(); ++i) {
                    const float x = verkv::to_float(from[i]);
                    if (!std::isfinite(x)) {
                        refuse(i, std::isnan(x) ? "NaN" : "infinite");
                    }
                }
                if constexpr (std::is_same_v<S, T>) {
                    return std::move(from);
                } else {
                    std::vector<T> to(from.size());
                    for (std::size_t i = 0; i < from.size(); ++i) {
                        to[i] = verkv::from_float<T>(verkv::to_float(from[i]));
                        if (!std::isfinite(verkv::to_float(to[i]))) {
                            refuse(i, std::to_string(verkv::to_float(from[i])) + ", too large for 16 bits");
                        }
                    }
                    return to;
                }
            } else {
                return {};  // read_trace_array has refused it
            }
        },
        a.array.elements);
}

/// A folder that has been read and checked, but for the values of its elements.
struct trace_parts {
    trace_info info;
    trace_array keys, values, queries;
};

inline std::vector<verkv::position_t> read_query_positions(const std::filesystem::path& file, std::size_t query_rows,
                                                           std::size_t tokens) {
    const npy_array array = read_trace_npy(file);
    std::vector<verkv::position_t> positions;
    const auto fail = [&](const std::string& problem) { throw trace_error(file, problem); };
    std::visit(
        [&]<class S>(const std::vector<S>& elements) {
            if constexpr (std::is_integral_v<S>) {
                if (array.shape.size() != 1 || elements.size() != query_rows) {
                    fail("has shape " + shape_text(array.shape) + "; queries.npy has " + std::to_string(query_rows) +
                         " rows");
                }
                for (std::size_t i = 0; i < elements.size(); ++i) {
                    const auto position = static_cast<std::int64_t>(elements[i]);
                    if (position < 0 || position >= static_cast<std::int64_t>(tokens)) {
                        fail("element " + std::to_string(i) + " is " + std::to_string(position) +
                             "; positions go from 0 to " + std::to_string(tokens - 1) + ", as keys.npy has rows");
                    }
                    if (i > 0 && elements[i - 1] >= elements[i]) {
                        fail("element " + std::to_string(i) + " is " + std::to_string(position) +
                             ", not above the one before it, " + std::to_string(elements[i - 1]) +
                             "; positions must ascend");
                    }
                    positions.push_back(static_cast<verkv::position_t>(position));
                }
            } else {
                fail("elements must be int32 ('<i4')");
            }
        },
        array.elements);
    return positions;
}

inline trace_parts read_trace_parts(const std::filesystem::path& folder) {
    std::error_code code;
    if (!std::filesystem::exists(folder, code)) {
        throw trace_error(folder, "does not exist");
    }
    if (!std::filesystem::is_directory(folder, code)) {
        throw trace_error(folder, "is not a folder");
    }
    trace_parts parts;
    trace_info& t = parts.info;
    const std::filesystem::path whole = std::filesystem::weakly_canonical(folder, code);
    t.name = (whole.has_filename() ? whole : whole.parent_path()).filename().string();

    const meta_reader meta(folder / "meta.json");
    t.shape.query_heads = meta.count("query_heads");
    t.shape.kv_heads = meta.count("kv_heads");
    t.shape.key_dim = meta.count("key_dim");
    t.shape.value_dim = meta.count("value_dim");
    t.shape.scale = meta.positive("scale");
    t.prefill_tokens = meta.count("prefill_tokens");
    t.layer = meta.has("layer") ? static_cast<std::uint32_t>(meta.count("layer", 0)) : 0;
    t.model = meta.has("model") ? meta.text("model") : "";
    t.pairing = meta.pairing();
    t.theta = meta.theta();
    if (t.shape.query_heads % t.shape.kv_heads != 0) {
        meta.fail("\"query_heads\" is " + std::to_string(t.shape.query_heads) + ", no multiple of \"kv_heads\", " +
                  std::to_string(t.shape.kv_heads));
    }
    if (t.pairing && t.shape.key_dim % 2 != 0) {
        meta.fail("\"rope.pairing\" is given, but \"key_dim\" is odd (" + std::to_string(t.shape.key_dim) + ")");
    }

    parts.keys = read_trace_array(folder / "keys.npy", "kv_heads", t.shape.kv_heads, "key_dim", t.shape.key_dim);
    parts.values =
        read_trace_array(folder / "values.npy", "kv_heads", t.shape.kv_heads, "value_dim", t.shape.value_dim);
    parts.queries =
        read_trace_array(folder / "queries.npy", "query_heads", t.shape.query_heads, "key_dim", t.shape.key_dim);
    t.tokens = parts.keys.array.shape[0];
    const std::size_t query_rows = parts.queries.array.shape[0];
    if (t.tokens > 0x7fffffff) {
        throw trace_error(parts.keys.file, "has " + std::to_string(t.tokens) + " rows; positions are 32 bits wide");
    }
    if (parts.values.array.shape[0] != t.tokens) {
        throw trace_error(parts.values.file, "has " + std::to_string(parts.values.array.shape[0]) +
                                                 " rows, keys.npy has " + std::to_string(t.tokens));
    }
    if (t.prefill_tokens > t.tokens) {
        meta.fail("\"prefill_tokens\" is " + std::to_string(t.prefill_tokens) + ", but keys.npy has only " +
                  std::to_string(t.tokens) + " rows");
    }
    if (meta.has("decode_tokens") && meta.count("decode_tokens", 0) != t.tokens - t.prefill_tokens) {
        meta.fail("\"prefill_tokens\" and \"decode_tokens\" are " + std::to_string(t.prefill_tokens) + " and " +
                  std::to_string(meta.count("decode_tokens", 0)) + ", but keys.npy has " + std::to_string(t.tokens) +
                  " rows");
    }

    const std::filesystem::path positions_file = folder / "query_positions.npy";
    if (std::filesystem::exists(positions_file, code)) {
        t.query_positions = read_query_positions(positions_file, query_rows, t.tokens);
    } else {
        if (query_rows > t.tokens) {
            throw trace_error(parts.queries.file, "has " + std::to_string(query_rows) + " rows, keys.npy only " +
                                                      std::to_string(t.tokens) +
                                                      ": without query_positions.npy row t is at position t");
        }
        t.query_positions.resize(query_rows);
        std::iota(t.query_positions.begin(), t.query_positions.end(), verkv::position_t{0});
    }
    if (t.decode_steps() == 0) {
        throw trace_error(parts.queries.file, "has no row at a position from prefill_tokens (" +
                                                  std::to_string(t.prefill_tokens) + ") on: there is no decode step");
    }
    return parts;
}

template <class T>
trace<T> assemble(trace_parts&& parts) {
    trace<T> t;
    static_cast<trace_info&>(t) = std::move(parts.info);
    t.key_data = take_elements<T>(std::move(parts.keys));
    t.value_data = take_elements<T>(std::move(parts.values));
    t.query_data = take_elements<T>(std::move(parts.queries));
    return t;
}

}  // namespace detail

/// Reads a trace folder. Elements are half where all three arrays are float16, else float.
/// Throws trace_error, naming the file and what is wrong, for anything that is missing, malformed, contradictory, NaN
/// or infinite.
[[nodiscard]] inline any_trace load_trace(const std::filesystem::path& folder) {
    detail::trace_parts parts = detail::read_trace_parts(folder);
    if (parts.keys.is_half() && parts.values.is_half() && parts.queries.is_half()) {
        return detail::assemble<verkv::half>(std::move(parts));
    }
    return detail::assemble<float>(std::move(parts));
}

/// Reads a trace folder with elements of the given type, rounded to nearest where it is narrower than the folder's.
/// Throws trace_error as load_trace does, and for elements that T cannot hold.
template <verkv::storage T>
[[nodiscard]] trace<T> load_trace_as(const std::filesystem::path& folder) {
    return detail::assemble<T>(detail::read_trace_parts(folder));
}

/// Writes a trace folder that load_trace reads; files that are there are replaced.
/// Throws file_error when something cannot be written.
template <class T>
requires(std::is_same_v<T, verkv::half> ||
         std::is_same_v<T, float>) void save_trace(const trace<T>& t, const std::filesystem::path& folder) {
    std::error_code code;
    std::filesystem::create_directories(folder, code);
    detail::json meta = {{"model", t.model},
                         {"layer", t.layer},
                         {"query_heads", t.shape.query_heads},
                         {"kv_heads", t.shape.kv_heads},
                         {"key_dim", t.shape.key_dim},
                         {"value_dim", t.shape.value_dim},
                         {"scale", t.shape.logit_scale()},
                         {"prefill_tokens", t.prefill_tokens},
                         {"decode_tokens", t.tokens - t.prefill_tokens}};
    if (t.pairing) {
        meta["rope"] = {{"pairing", *t.pairing == rope_pairing::interleaved ? "interleaved" : "half"},
                        {"rotated", true}};
        if (t.theta) {
            meta["rope"]["theta"] = *t.theta;
        }
    }
    std::ofstream out(folder / "meta.json", std::ios::binary | std::ios::trunc);
    out << meta.dump(1) << '\n';
    out.flush();
    if (!out) {
        throw file_error(folder / "meta.json", "cannot be written");
    }
    const auto write = [&](const char* name, const std::vector<T>& data, std::size_t rows, std::size_t heads,
                           std::size_t width) {
        write_npy(folder / name, std::span<const T>(data), std::vector<std::size_t>{rows, heads, width});
    };
    write("keys.npy", t.key_data, t.tokens, t.shape.kv_heads, t.shape.key_dim);
    write("values.npy", t.value_data, t.tokens, t.shape.kv_heads, t.shape.value_dim);
    write("queries.npy", t.query_data, t.query_rows(), t.shape.query_heads, t.shape.key_dim);
    write_npy(folder / "query_positions.npy", std::span<const verkv::position_t>(t.query_positions),
              std::vector<std::size_t>{t.query_rows()});
}

}  // namespace example
