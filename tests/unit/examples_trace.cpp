#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "common/synthetic.hpp"
#include "common/trace.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/temporary_folder.hpp"

namespace {

using example::any_trace;
using example::info;
using example::load_trace;
using example::load_trace_as;
using example::rope_pairing;
using example::synthetic_options;
using example::synthetic_trace;
using example::trace;
using example::trace_error;
using nlohmann::json;
using test_support::temporary_folder;

synthetic_options tiny() {
    synthetic_options o;
    o.shape = {6, 2, 8, 5, 0.25f};
    o.pairing = rope_pairing::half;
    o.prefill_tokens = 40;
    o.decode_tokens = 3;
    o.query_stride = 16;
    o.last_queries = 4;
    return o;
}

json read_meta(const std::filesystem::path& folder) {
    std::ifstream in(folder / "meta.json");
    return json::parse(in);
}

void write_text(const std::filesystem::path& file, const std::string& text) {
    std::ofstream(file, std::ios::binary) << text;
}

template <class T>
void write_array(const std::filesystem::path& file, std::vector<std::size_t> shape, T value = {}) {
    std::size_t count = 1;
    for (const std::size_t dimension : shape) {
        count *= dimension;
    }
    example::write_npy(file, std::span<const T>(std::vector<T>(count, value)), shape);
}

/// Makes a good trace folder, spoils it, and tells whether loading names the file and holds the words.
bool refused(const std::function<void(const std::filesystem::path&)>& spoil, const std::string& file,
             std::string_view words) {
    const temporary_folder folder;
    const std::filesystem::path path = folder / "trace";
    example::save_trace(synthetic_trace<verkv::half>(tiny()), path);
    (void)load_trace(path);
    spoil(path);
    try {
        (void)load_trace(path);
    } catch (const trace_error& e) {
        const std::string what = e.what();
        INFO(what);
        const std::filesystem::path expected = file.empty() ? path : path / file;
        CHECK(e.file() == expected);
        CHECK(what.find(words) != std::string::npos);
        return what.starts_with(expected.string() + ": ");
    }
    return false;
}

/// The same, with one field of meta.json replaced; null in place of a value removes the field.
bool meta_refused(const std::string& name, const json& value, std::string_view words) {
    return refused(
        [&](const std::filesystem::path& folder) {
            json meta = read_meta(folder);
            const json::json_pointer at("/" + name);
            if (value.is_null()) {
                meta[at.parent_pointer()].erase(at.back());
            } else {
                meta[at] = value;
            }
            write_text(folder / "meta.json", meta.dump());
        },
        "meta.json", words);
}

TEST_CASE("examples: the packaged trace loads and holds what its page says") {
    const any_trace loaded = load_trace(std::filesystem::path(VERKV_EXAMPLE_DATA_DIR) / "smollm2-8k-layer15");
    REQUIRE(std::holds_alternative<trace<verkv::half>>(loaded));
    const auto& t = std::get<trace<verkv::half>>(loaded);
    CHECK(&info(loaded) == &t);
    CHECK(t.name == "smollm2-8k-layer15");
    CHECK(t.layer == 15);
    CHECK(t.shape == verkv::geometry{9, 3, 64, 64, 0.125f});
    CHECK(t.pairing == rope_pairing::interleaved);
    CHECK(t.theta == 100000.0);
    CHECK(t.rotation().frequencies.size() == 32);
    CHECK(t.prefill_tokens == 8064);
    CHECK(t.tokens == 8164);
    CHECK(t.query_rows() == 664);
    CHECK(t.decode_steps() == 100);
    CHECK(t.decode_position(0) == 8064);
    CHECK(t.decode_position(99) == 8163);

    const auto sampled = t.prompt_query_rows(16);
    REQUIRE(sampled.size() == 504);  // every one that the largest-attention scorer looks at
    for (std::size_t i = 0; i < sampled.size(); ++i) {
        REQUIRE(t.query_positions[sampled[i]] == static_cast<verkv::position_t>(15 + 16 * i));
    }
    CHECK(t.last_prompt_query_rows(64).size() == 64);

    const auto kept = example::prompt_of(t, sampled);
    const verkv::prompt<verkv::half> p = kept.view();
    verkv::validate(p);
    CHECK(p.tokens() == 8064);
    CHECK(p.query_positions.back() == 8063);
    CHECK(p.queries.row(3, 7)[11] == t.queries().row(sampled[3], 7)[11]);
    CHECK(p.keys[2][8063][5] == t.keys().row(8063, 2)[5]);
    CHECK(p.values[1][17][63] == t.values().row(17, 1)[63]);
}

TEST_CASE("examples: a trace comes back as it was saved") {
    const auto check = []<class T>(const trace<T>& t) {
        const temporary_folder folder;
        example::save_trace(t, folder / "trace");
        const any_trace loaded = load_trace(folder / "trace");
        REQUIRE(std::holds_alternative<trace<T>>(loaded));
        const auto& back = std::get<trace<T>>(loaded);
        CHECK(back.name == "trace");
        CHECK(back.shape == t.shape);
        CHECK(back.pairing == t.pairing);
        CHECK(back.theta == t.theta);
        CHECK(back.layer == t.layer);
        CHECK(back.prefill_tokens == t.prefill_tokens);
        CHECK(back.tokens == t.tokens);
        CHECK(back.query_positions == t.query_positions);
        CHECK(back.key_data == t.key_data);
        CHECK(back.value_data == t.value_data);
        CHECK(back.query_data == t.query_data);
        CHECK(info(load_trace(folder / "trace/")).name == "trace");
    };
    check(synthetic_trace<verkv::half>(tiny()));
    auto o = tiny();
    o.shape = {5, 1, 7, 3, 0};  // an odd width has no pairs
    check(synthetic_trace<float>(o));
}

TEST_CASE("examples: without query_positions.npy query row t is at position t") {
    const temporary_folder folder;
    auto o = tiny();
    o.query_stride = 1;
    const auto t = synthetic_trace<float>(o);
    example::save_trace(t, folder.path());
    std::filesystem::remove(folder / "query_positions.npy");
    const auto back = load_trace_as<float>(folder.path());
    CHECK(back.query_positions == t.query_positions);
    CHECK(back.decode_steps() == 3);
    CHECK(back.first_decode_row() == 40);
}

TEST_CASE("examples: elements are half where all arrays are, else float") {
    const auto t = synthetic_trace<verkv::half>(tiny());
    for (const std::string name : {"keys", "values", "queries"}) {
        const temporary_folder folder;
        example::save_trace(t, folder.path());
        const auto& halves = name == "keys" ? t.key_data : name == "values" ? t.value_data : t.query_data;
        std::vector<float> floats;
        floats.reserve(halves.size());
        for (const verkv::half x : halves) {
            floats.push_back(verkv::to_float(x));
        }
        const auto shape = example::read_npy(folder / (name + ".npy")).shape;
        example::write_npy(folder / (name + ".npy"), std::span<const float>(floats), shape);
        const any_trace loaded = load_trace(folder.path());
        REQUIRE(std::holds_alternative<trace<float>>(loaded));
        const auto& f = std::get<trace<float>>(loaded);
        CHECK(f.key_data.size() == t.key_data.size());
        CHECK(f.key_data[7] == verkv::to_float(t.key_data[7]));
        CHECK(f.value_data[7] == verkv::to_float(t.value_data[7]));
        CHECK(f.query_data[7] == verkv::to_float(t.query_data[7]));
        CHECK(load_trace_as<verkv::half>(folder.path()).key_data == t.key_data);
        CHECK(load_trace_as<verkv::bfloat16>(folder.path()).key_data[7] ==
              verkv::from_float<verkv::bfloat16>(verkv::to_float(t.key_data[7])));

        floats[1] = 1e5f;
        example::write_npy(folder / (name + ".npy"), std::span<const float>(floats), shape);
        (void)load_trace(folder.path());
        CHECK_THROWS_AS(load_trace_as<verkv::half>(folder.path()), trace_error);
    }
}

TEST_CASE("examples: the rope object may be missing, and other fields are ignored") {
    const temporary_folder folder;
    example::save_trace(synthetic_trace<verkv::half>(tiny()), folder.path());
    json meta = read_meta(folder.path());
    for (const char* name : {"rope", "decode_tokens", "layer", "model"}) {
        meta.erase(name);
    }
    meta["something"] = {1, 2};
    write_text(folder / "meta.json", meta.dump());
    const auto t = load_trace_as<verkv::half>(folder.path());
    CHECK(!t.pairing);
    CHECK(support::refused<example::trace_error>([&] { (void)t.known_pairing(); }, {"meta.json", "rope.pairing"}));
    CHECK(support::refused<example::trace_error>([&] { (void)t.rotation(); }, {"meta.json", "rope.theta"}));
    CHECK(t.layer == 0);
    CHECK(t.model.empty());
}

TEST_CASE("examples: decode steps are spread evenly, first and last included") {
    auto o = tiny();
    o.decode_tokens = 100;
    const auto t = synthetic_trace<float>(o);
    CHECK(t.spread_steps(1) == std::vector<std::size_t>{0});
    CHECK(t.spread_steps(2) == std::vector<std::size_t>{0, 99});
    CHECK(t.spread_steps(4) == std::vector<std::size_t>{0, 33, 66, 99});
    CHECK(t.spread_steps(6) == std::vector<std::size_t>{0, 19, 39, 59, 79, 99});
    CHECK(t.spread_steps(0).empty());
    CHECK(t.spread_steps(1000).size() == 100);
}

TEST_CASE("examples: trace folders with files missing or unreadable are refused by name") {
    const auto removed = [](const char* name) {
        return [=](const std::filesystem::path& folder) { std::filesystem::remove(folder / name); };
    };
    CHECK(refused([](const auto& folder) { std::filesystem::remove_all(folder); }, "", "does not exist"));
    CHECK(refused(
        [](const auto& folder) {
            std::filesystem::remove_all(folder);
            write_text(folder, "a file");
        },
        "", "not a folder"));
    CHECK(refused(removed("meta.json"), "meta.json", "does not exist"));
    CHECK(refused(removed("keys.npy"), "keys.npy", "does not exist"));
    CHECK(refused(removed("values.npy"), "values.npy", "does not exist"));
    CHECK(refused(removed("queries.npy"), "queries.npy", "does not exist"));
    for (const char* name : {"keys.npy", "values.npy", "queries.npy", "query_positions.npy"}) {
        const auto truncate = [=](const std::filesystem::path& folder) {
            std::filesystem::resize_file(folder / name, std::filesystem::file_size(folder / name) - 1);
        };
        CHECK(refused(truncate, name, "truncated"));
    }
    const auto folder_instead = [](const std::filesystem::path& folder) {
        std::filesystem::remove(folder / "meta.json");
        std::filesystem::create_directory(folder / "meta.json");
    };
    CHECK(refused(folder_instead, "meta.json", "cannot be opened"));
    for (const char* text : {"", "{", "{\"a\": 1e999}", "{\"a\": \"\xff\"}", "not json"}) {
        CHECK(refused([=](const auto& folder) { write_text(folder / "meta.json", text); }, "meta.json", "no JSON"));
    }
    CHECK(refused([](const auto& folder) { write_text(folder / "meta.json", "[1]"); }, "meta.json", "array"));
}

TEST_CASE("examples: meta.json with a wrong field is refused by name") {
    for (const std::string name : {"query_heads", "kv_heads", "key_dim", "value_dim", "prefill_tokens"}) {
        const std::string quoted = "\"" + name + "\"";
        CHECK(meta_refused(name, nullptr, quoted + " is missing"));
        CHECK(meta_refused(name, "8", quoted + " is \"8\"; it must be an integer"));
        CHECK(meta_refused(name, 8.0, quoted + " is 8.0; it must be an integer"));
        CHECK(meta_refused(name, 0, quoted + " is 0;"));
        CHECK(meta_refused(name, -1, quoted + " is -1;"));
        CHECK(meta_refused(name, true, quoted));
        CHECK(meta_refused(name, json::array({1}), quoted + " is an array;"));
        CHECK(meta_refused(name, std::uint64_t{1} << 32, quoted));
        CHECK(meta_refused(name, (std::numeric_limits<std::uint64_t>::max)(), quoted));
    }
    CHECK(meta_refused("scale", nullptr, "\"scale\" is missing"));
    CHECK(meta_refused("scale", 0, "\"scale\" is 0; it must be a positive number"));
    CHECK(meta_refused("scale", -0.125, "positive"));
    CHECK(meta_refused("scale", "1", "positive"));
    CHECK(meta_refused("scale", 1e-60, "positive"));
    CHECK(meta_refused("scale", 1e60, "positive"));
    CHECK(meta_refused("layer", -1, "\"layer\""));
    CHECK(meta_refused("layer", "15", "\"layer\""));
    CHECK(meta_refused("model", 3, "\"model\" is 3; it must be a string"));
    CHECK(meta_refused("kv_heads", 4, "\"query_heads\" is 6, no multiple of \"kv_heads\", 4"));
    CHECK(meta_refused("rope", "half", "\"rope\" is \"half\"; it must be an object"));
    CHECK(meta_refused("rope/pairing", nullptr, "\"rope.pairing\" is missing"));
    CHECK(meta_refused("rope/pairing", "neox", "\"rope.pairing\" is \"neox\"; it must be"));
    CHECK(meta_refused("rope/pairing", 2, "\"rope.pairing\" is 2"));
    CHECK(meta_refused("rope/theta", -1, "\"rope.theta\" is -1; it must be a positive number"));
    CHECK(meta_refused("rope/theta", "big", "\"rope.theta\" is \"big\""));
    CHECK(meta_refused("rope/rotated", false, "\"rope.rotated\" is false"));
    CHECK(meta_refused("prefill_tokens", 44, "keys.npy has only 43 rows"));
    CHECK(meta_refused("prefill_tokens", 41, "but keys.npy has 43 rows"));
    CHECK(meta_refused("decode_tokens", 4, "but keys.npy has 43 rows"));
    CHECK(meta_refused("decode_tokens", -3, "\"decode_tokens\" is -3"));
}

TEST_CASE("examples: arrays that disagree with meta.json are refused by name") {
    const auto replaced = [](const std::string& name, const std::vector<std::size_t>& shape) {
        return [=](const std::filesystem::path& folder) { write_array<verkv::half>(folder / name, shape); };
    };
    CHECK(refused(replaced("keys.npy", {43, 3, 8}), "keys.npy", "has shape (43, 3, 8); meta.json asks for"));
    CHECK(refused(replaced("keys.npy", {43, 2, 9}), "keys.npy", "key_dim = 8"));
    CHECK(refused(replaced("keys.npy", {43, 16}), "keys.npy", "has shape (43, 16)"));
    CHECK(refused(replaced("keys.npy", {43, 2, 8, 1}), "keys.npy", "(43, 2, 8, 1)"));
    CHECK(refused(replaced("values.npy", {43, 2, 8}), "values.npy", "value_dim = 5"));
    CHECK(refused(replaced("values.npy", {42, 2, 5}), "values.npy", "has 42 rows, keys.npy has 43"));
    CHECK(refused(replaced("queries.npy", {9, 2, 8}), "queries.npy", "query_heads = 6"));
    CHECK(refused(replaced("keys.npy", {0, 2, 8}), "values.npy", "keys.npy has 0"));
    CHECK(refused(
        [](const auto& folder) {
            write_array<double>(folder / "keys.npy", {43, 2, 8});
        },
        "keys.npy", "float16 or float32"));
    CHECK(refused(
        [](const auto& folder) {
            write_array<std::int32_t>(folder / "queries.npy", {9, 6, 8});
        },
        "queries.npy", "float16 or float32"));
}

TEST_CASE("examples: query positions that cannot be are refused by name") {
    // The good ones are 7, 23, 36 ... 42, of 43 tokens.
    const std::vector<std::int32_t> good = {7, 23, 36, 37, 38, 39, 40, 41, 42};
    const auto with = [&](std::size_t at, std::int32_t value) {
        return [=](const std::filesystem::path& folder) {
            auto positions = good;
            REQUIRE(std::get<std::vector<std::int32_t>>(example::read_npy(folder / "query_positions.npy").elements) ==
                    good);
            positions[at] = value;
            example::write_npy(folder / "query_positions.npy", std::span<const std::int32_t>(positions),
                               std::vector<std::size_t>{9});
        };
    };
    const std::string name = "query_positions.npy";
    CHECK(refused(with(8, 43), name, "element 8 is 43; positions go from 0 to 42"));
    CHECK(refused(with(0, -1), name, "element 0 is -1"));
    CHECK(refused(with(1, 7), name, "element 1 is 7, not above the one before it, 7"));
    CHECK(refused(with(3, 35), name, "must ascend"));
    CHECK(refused([&](const auto& folder) { write_array<std::int32_t>(folder / name, {8}); }, name,
                  "has shape (8,); queries.npy has 9 rows"));
    CHECK(refused([&](const auto& folder) { write_array<std::int32_t>(folder / name, {9, 1}); }, name, "(9, 1)"));
    CHECK(refused([&](const auto& folder) { write_array<float>(folder / name, {9}); }, name, "int32"));
    CHECK(refused(
        [&](const auto& folder) {
            const std::vector<std::int64_t> far = {7, 23, 36, 37, 38, 39, 40, 41, (std::int64_t{1} << 32) + 42};
            example::write_npy(folder / name, std::span<const std::int64_t>(far), std::vector<std::size_t>{9});
        },
        name, "element 8 is 4294967338"));

    // Without the file the rows are at 0 ... 8: no decode step.
    CHECK(refused([&](const auto& folder) { std::filesystem::remove(folder / name); }, "queries.npy",
                  "there is no decode step"));
    CHECK(refused(
        [&](const auto& folder) {
            std::filesystem::remove(folder / name);
            write_array<verkv::half>(folder / "queries.npy", {44, 6, 8});
        },
        "queries.npy", "has 44 rows, keys.npy only 43"));
}

TEST_CASE("examples: NaN and infinity in a trace are refused with their place") {
    const auto spoiled = [](const std::string& name, std::size_t index, std::uint16_t bits) {
        return [=](const std::filesystem::path& folder) {
            auto array = example::read_npy(folder / name);
            auto& elements = std::get<std::vector<verkv::half>>(array.elements);
            elements[index].bits = bits;
            example::write_npy(folder / name, std::span<const verkv::half>(elements), array.shape);
        };
    };
    CHECK(refused(spoiled("keys.npy", (42 * 2 + 1) * 8 + 7, 0x7e01), "keys.npy", "row 42, head 1, channel 7 is NaN"));
    CHECK(refused(spoiled("values.npy", 3 * 2 * 5 + 4, 0xfc00), "values.npy", "row 3, head 0, channel 4 is infinite"));
    CHECK(refused(spoiled("queries.npy", std::size_t{8 * 6 + 5} * 8, 0x7c00), "queries.npy",
                  "row 8, head 5, channel 0 is infinite"));
    CHECK(refused(
        [](const auto& folder) {
            write_array<float>(folder / "keys.npy", {43, 2, 8}, std::numeric_limits<float>::quiet_NaN());
        },
        "keys.npy", "row 0, head 0, channel 0 is NaN"));
}

TEST_CASE("examples: synthetic traces have the logits they were asked for") {
    for (const auto pairing : {rope_pairing::interleaved, rope_pairing::half}) {
        for (const double deviation : {0.5, 3.0}) {
            synthetic_options o;
            o.shape = {4, 2, 80, 24, 0};
            o.pairing = pairing;
            o.prefill_tokens = 4096;
            o.decode_tokens = 4;
            o.logit_deviation = deviation;
            const auto t = synthetic_trace<float>(o);
            CHECK(t.tokens == 4100);
            CHECK(t.query_rows() == 256 - 4 + 64 + 4);
            CHECK(t.decode_steps() == 4);
            double sum = 0, squares = 0;
            for (std::size_t head = 0; head < 4; ++head) {
                for (std::size_t token = 0; token < t.tokens; ++token) {
                    double s = 0;
                    for (std::size_t c = 0; c < 80; ++c) {
                        s += double{t.queries().row(t.decode_row(2), head)[c]} * t.keys().row(token, head / 2)[c];
                    }
                    s *= double{t.shape.scale};
                    sum += s;
                    squares += s * s;
                }
            }
            const double count = 4 * 4100;  // standard error of the deviation: its 1/sqrt(2 * 4 * 4100), 0.6 %
            CHECK(std::sqrt(squares / count) == Approx(deviation).epsilon(0.04));
            CHECK(std::abs(sum / count) < 0.04 * deviation);

            std::size_t heavy = 0;  // channels: both of each of four pairs
            for (std::size_t c = 0; c < 80; ++c) {
                double energy = 0;
                for (std::size_t token = 0; token < t.tokens; ++token) {
                    energy += std::pow(double{t.keys().row(token, 1)[c]}, 2);
                }
                const bool this_one = energy / 4100 > 2.5;
                heavy += this_one ? 1 : 0;
                const std::size_t partner = pairing == rope_pairing::half ? (c + 40) % 80 : c ^ 1u;
                double partner_energy = 0;
                for (std::size_t token = 0; token < t.tokens; ++token) {
                    partner_energy += std::pow(double{t.keys().row(token, 1)[partner]}, 2);
                }
                CHECK((partner_energy / 4100 > 2.5) == this_one);
            }
            CHECK(heavy == 8);
        }
    }
}

TEST_CASE("examples: synthetic sinks and local tokens get the share they were asked for") {
    for (const auto pairing : {rope_pairing::interleaved, rope_pairing::half}) {
        auto o = example::peaked_attention();
        o.shape = {24, 8, 64, 4, 0};
        o.pairing = pairing;
        o.prefill_tokens = 4096;
        o.decode_tokens = 1;
        o.logit_deviation = 1.5;  // mild, so that few heads show the expected shares
        const auto t = synthetic_trace<float>(o);
        double sinks = 0, local = 0;
        for (std::size_t head = 0; head < 24; ++head) {
            double first = 0, last = 0, all = 0;
            for (std::size_t token = 0; token < t.prefill_tokens; ++token) {
                double s = 0;
                for (std::size_t c = 0; c < 64; ++c) {
                    s += double{t.queries().row(t.decode_row(0), head)[c]} * t.keys().row(token, head / 3)[c];
                }
                const double w = std::exp(s * double{t.shape.scale});
                all += w;
                first += token < 4 ? w : 0;
                last += token >= 4096 - 64 ? w : 0;
            }
            sinks += first / all / 24;
            local += last / all / 24;
        }
        CHECK(sinks == Approx(0.35).margin(0.04));
        CHECK(local == Approx(0.35).margin(0.04));
    }
    auto o = example::peaked_attention();
    o.sink_share = 0.7;
    CHECK_THROWS_AS(synthetic_trace<float>(o), verkv::invalid_argument);
    o = example::peaked_attention();
    o.shape = {2, 1, 3, 3, 0};
    CHECK_THROWS_AS(synthetic_trace<float>(o), verkv::invalid_argument);
    for (const std::size_t n : {1u, 3u, 4u, 60u, 68u, 69u}) {
        o = example::peaked_attention();
        o.shape = {2, 1, 4, 3, 0};
        o.prefill_tokens = n;
        const auto t = synthetic_trace<float>(o);
        for (const float x : t.key_data) {
            REQUIRE(std::isfinite(x));
        }
        for (const float x : t.query_data) {
            REQUIRE(std::isfinite(x));
        }
    }
}

TEST_CASE("examples: a synthetic token does not depend on how many there are") {
    auto o = tiny();
    const auto few = synthetic_trace<verkv::half>(o);
    o.decode_tokens = 50;
    o.query_stride = 1;
    const auto many = synthetic_trace<verkv::half>(o);
    CHECK(std::vector(many.key_data.begin(),
                      many.key_data.begin() + static_cast<std::ptrdiff_t>(few.key_data.size())) == few.key_data);
    for (std::size_t row = 0; row < few.query_rows(); ++row) {
        const auto position = static_cast<std::size_t>(few.query_positions[row]);
        CHECK(few.queries().row(row, 5)[3] == many.queries().row(position, 5)[3]);
    }
    o.seed = 2;
    CHECK(synthetic_trace<verkv::half>(o).key_data != many.key_data);
    o.shape.query_heads = 5;
    CHECK_THROWS_AS(synthetic_trace<verkv::half>(o), verkv::invalid_argument);
    o = tiny();
    o.prefill_tokens = 0;
    CHECK_THROWS_AS(synthetic_trace<verkv::half>(o), verkv::invalid_argument);
    o = tiny();
    o.query_stride = o.last_queries = 0;
    CHECK(synthetic_trace<verkv::half>(o).query_rows() == 3);
    o.shape = {1, 1, 1, 1, 0};
    CHECK(synthetic_trace<float>(o).key_data.size() == 43);
}

}  // namespace
