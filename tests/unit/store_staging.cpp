// Which tokens of a KV head are staged: each read once, none lost that the step needs.
#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/store/staging.hpp"

namespace {

using support::refused;
using verkv::row_id;
using verkv::token_index;
using tokens = std::vector<token_index>;

/// A staging map of rows 100, 101, ... and what each row holds.
class watched {
public:
    watched(std::size_t rows, std::size_t max_tokens) {
        std::vector<row_id> ids(rows);
        std::iota(ids.begin(), ids.end(), row_id{100});
        map.open(ids, max_tokens);
    }

    /// Stages tokens whose contents are content[token]; returns what was copied.
    tokens stage(const tokens& list, const std::vector<int>& content) {
        tokens copied;
        std::vector<row_id> rows(list.size());
        const std::size_t n = map.stage(list, rows, [&](token_index t, row_id to) {
            copied.push_back(t);
            memory[to] = content[t];
        });
        CHECK(n == copied.size());
        std::set<row_id> distinct(rows.begin(), rows.end());
        CHECK(distinct.size() == list.size());
        for (std::size_t i = 0; i < list.size(); ++i) {
            CHECK(map.holds(list[i]));
            CHECK(map.row_of(list[i]) == rows[i]);
            CHECK(memory.at(rows[i]) == content[list[i]]);
        }
        return copied;
    }

    verkv::staging_map map;
    std::map<row_id, int> memory;
};

std::vector<int> counted(std::size_t n) {
    std::vector<int> content(n);
    std::iota(content.begin(), content.end(), 0);
    return content;
}

}  // namespace

TEST_CASE("store: a staged token is copied once") {
    watched w(4, 20);
    const auto content = counted(20);
    CHECK(w.map.capacity() == 4);
    CHECK(w.stage({3, 7}, content) == tokens{3, 7});
    CHECK(w.stage({3, 7}, content).empty());
    CHECK(w.stage({7, 9}, content) == tokens{9});
    CHECK(w.map.size() == 3);
    CHECK(w.map.holds(3));
    // Full: the oldest slots go first, never one that the step needs.
    CHECK(w.stage({3, 12, 13}, content) == tokens{12, 13});
    CHECK(w.map.size() == 4);
    CHECK_FALSE(w.map.holds(7));
    CHECK(w.map.holds(9));
    CHECK(w.stage({1, 2, 4, 5}, content).size() == 4);
    CHECK(w.stage({}, content).empty());
    CHECK(w.stage({5, 4, 2, 1}, content).empty());
    w.map.clear();
    CHECK(w.map.size() == 0);
    CHECK(w.stage({5, 4}, content) == tokens{5, 4});
}

TEST_CASE("store: staging refuses more tokens than it has rows, and stays as it was") {
    watched w(2, 10);
    w.stage({1, 2}, counted(10));
    std::vector<row_id> rows(3);
    const tokens three{3, 4, 5};
    CHECK(refused([&] { w.map.stage(three, rows, [](token_index, row_id) {}); }, {"3", "2"}));
    CHECK(w.map.holds(1));
    CHECK(w.map.holds(2));
    CHECK(w.stage({1, 2}, counted(10)).empty());
}

TEST_CASE("store: staging refuses tokens it cannot hold, and stays as it was") {
    verkv::staging_map closed;
    CHECK(refused([&] { (void)closed.holds(0); }, {"token 0"}));
    CHECK(refused([&] { closed.erase(0, 0, 1); }, {"of 1"}));
    const std::vector<row_id> none;
    CHECK(refused([&] { closed.open(none, std::size_t{1} << 32); }, {"4294967296"}));

    watched w(3, 10);
    w.stage({8, 2}, counted(10));
    const auto nothing = [](token_index, row_id) { FAIL("a copy for a call that is refused"); };
    std::vector<row_id> rows(3, 77);
    for (const token_index far : {token_index{10}, token_index{0x7fffffff}, verkv::staging_map::none}) {
        const std::string name = "token " + std::to_string(far);
        CHECK(refused([&] { (void)w.map.holds(far); }, {name, "10"}));
        CHECK(refused([&] { (void)w.map.row_of(far); }, {name}));
        CHECK(refused([&] { w.map.stage(tokens{1, 3, far}, rows, nothing); }, {name}));
    }
    CHECK(refused([&] { (void)w.map.row_of(3); }, {"token 3 is not staged"}));
    CHECK(refused([&] { w.map.stage(tokens{1, 3}, rows, nothing); }, {"2 tokens", "list of 3"}));
    CHECK(rows == std::vector<row_id>(3, 77));
    CHECK(refused([&] { w.map.erase(4, 3, 10); }, {"4 to 3"}));
    CHECK(refused([&] { w.map.erase(4, 10, 9); }, {"4 to 10 of 9"}));
    CHECK(refused([&] { w.map.erase(4, 11, 11); }, {"of 11", "at most 10"}));
    CHECK(refused([&] { w.map.erase(0, 1, 8); }, {"token 8 is staged, of 8"}));
    CHECK(w.map.size() == 2);
    CHECK(w.stage({2, 8}, counted(10)).empty());
}

TEST_CASE("store: a token that is listed twice is copied once") {
    watched w(4, 10);
    w.stage({5, 6}, counted(10));
    std::vector<row_id> rows(4);
    tokens copied;
    const auto copy = [&](token_index t, row_id) { copied.push_back(t); };
    CHECK(w.map.stage(tokens{7, 5, 7, 5}, rows, copy) == 1);
    CHECK(copied == tokens{7});
    CHECK(rows[0] == rows[2]);
    CHECK(rows[1] == rows[3]);
    CHECK(rows[0] != rows[1]);
    CHECK(w.map.holds(6));
    CHECK(w.map.size() == 3);
}

TEST_CASE("store: staged tokens follow removals, and are read anew after a roll-back") {
    watched w(8, 20);
    auto content = counted(20);
    w.stage({0, 4, 5, 6, 9, 11}, content);
    // Tokens 5 and 6 go; 9 becomes 7, 11 becomes 9.
    w.map.erase(5, 7, 20);
    content.erase(content.begin() + 5, content.begin() + 7);
    CHECK(w.map.size() == 4);
    CHECK_FALSE(w.map.holds(5));
    CHECK(w.stage({0, 4, 7, 9}, content).empty());
    CHECK(w.stage({5, 6}, content) == tokens{5, 6});
    // Cut at 6, then other tokens come to the same indices.
    w.map.erase(6, 18, 18);
    content.resize(6);
    content.insert(content.end(), {500, 501, 502, 503});
    CHECK(w.stage({0, 4, 5}, content).empty());
    CHECK(w.stage({6, 7, 9}, content) == tokens{6, 7, 9});
}

TEST_CASE("store: staging against a model, and without allocations") {
    constexpr std::size_t rows = 16;
    std::mt19937 random(3);
    watched w(rows, 60);
    std::vector<int> content = counted(60);
    int next = 1000;
    std::set<int> held;
    for (int step = 0; step < 4000; ++step) {
        const std::size_t n = content.size();
        const auto what = random() % 20;
        if (what == 0) {
            w.map.clear();
            held.clear();
        } else if (what == 1 && n > 20) {
            const std::size_t first = random() % n;
            const std::size_t last = first + random() % (n - first + 1);
            w.map.erase(first, last, n);
            for (std::size_t i = first; i < last; ++i) {
                held.erase(content[i]);
            }
            content.erase(content.begin() + static_cast<std::ptrdiff_t>(first),
                          content.begin() + static_cast<std::ptrdiff_t>(last));
        } else {
            while (content.size() < 60 && random() % 2) {
                content.push_back(next++);
            }
            tokens all(content.size());
            std::iota(all.begin(), all.end(), token_index{0});
            std::shuffle(all.begin(), all.end(), random);
            all.resize(std::min(all.size(), std::size_t{random() % (rows + 1)}));
            std::sort(all.begin(), all.end());
            tokens missing;
            for (const token_index t : all) {
                if (!held.count(content[t])) {
                    missing.push_back(t);
                }
            }
            REQUIRE(w.stage(all, content) == missing);
            held.clear();
            for (token_index t = 0; t < content.size(); ++t) {
                if (w.map.holds(t)) {
                    held.insert(content[t]);
                    REQUIRE(w.memory.at(w.map.row_of(t)) == content[t]);
                }
            }
            REQUIRE(held.size() <= rows);
        }
        REQUIRE(w.map.size() == held.size());
    }
    std::vector<row_id> out(8);
    CHECK(support::allocations_of([&] {
              for (token_index first = 0; first < 20; ++first) {
                  token_index list[8];
                  std::iota(std::begin(list), std::end(list), first);
                  w.map.stage(list, out, [](token_index, row_id) {});
                  w.map.erase(3, 5, 60);
              }
              w.map.clear();
          }) == 0);
}
