// The device store's host side: pages and rows, fences before they are used again, sizes, refusals.
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "verkv/cuda/device_store.hpp"

namespace {

using support::refused;
using verkv::out_of_capacity;
using verkv::row_id;
using namespace verkv::gpu;

/// Work that is over when the test says so.
struct late_timeline {
    std::uint64_t marked = 0;
    std::uint64_t over = 0;
    std::uint64_t mark() { return ++marked; }
    [[nodiscard]] std::uint64_t completed() const { return over; }
};
static_assert(timeline<late_timeline> && timeline<host_timeline>);

/// Counts what is allocated.
struct counted_memory {
    std::map<void*, std::size_t>* live;
    void* allocate(std::size_t bytes) {
        void* p = host_memory().allocate(bytes);
        (*live)[p] = bytes;
        return p;
    }
    void deallocate(void* p, std::size_t bytes) {
        CHECK((*live)[p] == bytes);
        live->erase(p);
        host_memory().deallocate(p, bytes);
    }
};
static_assert(memory_resource<counted_memory> && memory_resource<host_memory>);

device_store_config small_store() {
    device_store_config c;
    c.requests = 2;
    c.kv_heads = 3;
    c.key_dim = 5;
    c.value_dim = 6;
    c.max_tokens = 100;
    c.page_rows = 8;
    c.resident_pages = 20;
    c.host_rows = 200;
    c.staging_rows = 7;
    return c;
}

using store = device_store<verkv::half, host_memory, host_memory, late_timeline>;

std::vector<row_id> take(fenced_rows<late_timeline>& rows, std::size_t n) {
    std::vector<row_id> ids(n);
    rows.allocate(ids);
    return ids;
}

}  // namespace

TEST_CASE("cuda store: a fresh stack hands out neighbours; fences are looked at when it is short") {
    late_timeline line;
    fenced_rows<late_timeline> rows(6, line, "test");
    CHECK(take(rows, 3) == std::vector<row_id>{0, 1, 2});
    rows.release(std::vector<row_id>{0, 2});
    line.over = line.marked;
    CHECK(take(rows, 2) == std::vector<row_id>{3, 4});
    CHECK(take(rows, 3) == std::vector<row_id>{0, 2, 5});
}

TEST_CASE("cuda store: a row that was freed while work is under way is not handed out") {
    late_timeline line;
    fenced_rows<late_timeline> rows(4, line, "test");
    const auto all = take(rows, 4);
    rows.release(std::vector<row_id>{1});
    CHECK(rows.free_rows() == 0);
    CHECK(rows.fenced() == 1);
    CHECK(refused<out_of_capacity>([&] { take(rows, 1); },
                                   {"test pool", "1 are needed", "0 of 4 are free", "1 wait for the device"}));
    rows.release(std::vector<row_id>{3});
    line.over = 1;  // the work before the first release, not that before the second
    CHECK(rows.free_rows() == 1);
    CHECK(refused<out_of_capacity>([&] { take(rows, 2); }, {"2 are needed, 1 of 4 are free, 1 wait"}));
    CHECK(take(rows, 1) == std::vector<row_id>{1});
    CHECK(refused<out_of_capacity>([&] { take(rows, 1); }, {"0 of 4 are free"}));
    line.over = 2;
    CHECK(take(rows, 1) == std::vector<row_id>{3});
}

TEST_CASE("cuda store: what is released has to be taken, and once") {
    late_timeline line;
    fenced_rows<late_timeline> rows(4, line, "test");
    CHECK(take(rows, 2).size() == 2);
    CHECK(refused([&] { rows.release(std::vector<row_id>{0, 3}); }, {"test pool", "3 is released but not taken"}));
    CHECK(refused([&] { rows.release(std::vector<row_id>{0, 1, 0}); }, {"0 is released but not taken"}));
    CHECK(refused([&] { rows.release(std::vector<row_id>{4}); }, {"4 is released"}));
    CHECK(line.marked == 0);
    rows.release(std::vector<row_id>{0, 1});
    CHECK(refused([&] { rows.release(std::vector<row_id>{1}); }, {"1 is released but not taken"}));  // still fenced
    CHECK(rows.fenced() == 2);
    rows.release({});
    CHECK(line.marked == 1);
}

TEST_CASE("cuda store: rows are one thing at a time, whenever work ends") {
    std::mt19937 random(3);
    for (int run = 0; run < 20; ++run) {
        late_timeline line;
        fenced_rows<late_timeline> rows(50, line, "test");
        std::set<row_id> held;
        std::map<row_id, std::uint64_t> fenced;
        bool sound = true;
        for (int step = 0; step < 2000; ++step) {
            const auto what = random() % 4;
            if (what == 0) {
                line.over += random() % (line.marked - line.over + 1);
                std::erase_if(fenced, [&](const auto& f) { return f.second <= line.over; });
            } else if (what == 1 && !held.empty()) {
                std::vector<row_id> some;
                for (const row_id id : held) {
                    if (random() % 3 == 0) {
                        some.push_back(id);
                    }
                }
                rows.release(some);
                for (const row_id id : some) {
                    held.erase(id);
                    fenced[id] = line.marked;
                }
            } else {
                const std::size_t n = random() % 9;
                const std::size_t free = 50 - held.size() - fenced.size();
                if (n > free) {
                    sound = sound && refused<out_of_capacity>([&] { take(rows, n); }, {"are needed"});
                    continue;
                }
                for (const row_id id : take(rows, n)) {
                    sound = sound && held.insert(id).second && !fenced.contains(id);
                }
            }
            sound = sound && rows.fenced() == fenced.size() && rows.free_rows() == 50 - held.size() - fenced.size();
        }
        CHECK(sound);
    }
}

TEST_CASE("cuda store: releases and allocations allocate no memory") {
    late_timeline line;
    fenced_rows<late_timeline> rows(100, line, "test");
    std::vector<row_id> ids(100);
    const std::size_t before = support::allocations();
    for (int k = 0; k < 50; ++k) {
        rows.allocate(ids);
        rows.release(ids);
        line.over = line.marked;
    }
    CHECK(support::allocations() == before);
}

TEST_CASE("cuda store: rows of a task lie in its pages, in order") {
    late_timeline line;
    store s(small_store(), {}, {}, line);
    CHECK(s.tasks() == 6);
    CHECK(s.row_stride() == 16);
    CHECK(s.most_pages() == 13);
    s.add_residents(0, 5);
    s.add_residents(4, 9);
    s.add_residents(0, 4);  // a second page
    CHECK(std::vector<row_id>(s.pages(0).begin(), s.pages(0).end()) == std::vector<row_id>{0, 3});
    CHECK(std::vector<row_id>(s.pages(4).begin(), s.pages(4).end()) == std::vector<row_id>{1, 2});
    CHECK(s.resident_row(0, 7) == 7);
    CHECK(s.resident_row(0, 8) == 24);
    CHECK(s.resident_row(4, 8) == 16);
    CHECK(s.residents(0) == 9);
    CHECK(s.free_pages() == 16);
    s.add_tokens(4, 20);
    CHECK(s.host_rows(4).size() == 20);
    CHECK(s.free_host_rows() == 180);
}

TEST_CASE("cuda store: a new draw takes new pages while the device reads the old ones") {
    late_timeline line;
    store s(small_store(), {}, {}, line);
    s.add_residents(1, 80);
    const std::set<row_id> old(s.pages(1).begin(), s.pages(1).end());
    s.replace_residents(1, 60);
    CHECK(s.residents(1) == 60);
    for (const row_id page : s.pages(1)) {
        CHECK_FALSE(old.contains(page));
    }
    CHECK(s.free_pages() == 2);
    CHECK(refused<out_of_capacity>([&] { s.replace_residents(1, 30); }, {"resident page", "4 are needed, 2 of 20"}));
    CHECK(s.residents(1) == 60);
    line.over = line.marked;
    s.replace_residents(1, 30);
    CHECK(s.pages(1).size() == 4);
}

TEST_CASE("cuda store: what is cut off is free when the device is done") {
    late_timeline line;
    store s(small_store(), {}, {}, line);
    s.add_residents(2, 20);
    s.add_tokens(2, 50);
    s.truncate(2, 16, 30);
    CHECK(s.pages(2).size() == 2);
    CHECK(s.tokens(2) == 30);
    CHECK(s.free_pages() == 17);
    CHECK(s.free_host_rows() == 150);
    line.over = line.marked;
    CHECK(s.free_pages() == 18);
    CHECK(s.free_host_rows() == 170);
    CHECK(refused([&] { s.truncate(2, 17, 30); }, {"task 2 has 16 residents of 30 tokens", "17 of 30"}));
    s.truncate(2, 0, 0);
    CHECK(s.pages(2).empty());
}

TEST_CASE("cuda store: refusals have numbers and change nothing") {
    late_timeline line;
    store s(small_store(), {}, {}, line);
    CHECK(refused([&] { s.add_tokens(6, 1); }, {"task 6 of 6"}));
    CHECK(refused([&] { (void)s.pages(7); }, {"task 7 of 6"}));
    CHECK(refused<out_of_capacity>([&] { s.add_tokens(0, 101); }, {"is to have 101 more", "max_tokens is 100"}));
    s.add_tokens(0, 100);
    s.add_tokens(1, 60);
    CHECK(refused<out_of_capacity>([&] { s.add_tokens(2, 41); }, {"host row pool", "41 are needed, 40 of 200"}));
    CHECK(s.tokens(2) == 0);
    s.add_residents(0, 100);
    CHECK(refused<out_of_capacity>([&] { s.add_residents(1, 57); }, {"resident page pool", "8 are needed, 7 of 20"}));
    CHECK(s.residents(1) == 0);
    CHECK(s.free_pages() == 7);
    CHECK(refused([&] { (void)s.resident_row(0, 100); }, {"resident 100 of 100"}));
    const auto bad = [&](auto change, std::initializer_list<std::string> parts) {
        device_store_config c = small_store();
        change(c);
        return refused([&] { store(c, {}, {}, line); }, parts);
    };
    CHECK(bad([](auto& c) { c.kv_heads = 0; }, {"2 requests of 0 KV heads"}));
    CHECK(bad([](auto& c) { c.value_dim = 0; }, {"5 + 0 channels"}));
    CHECK(bad([](auto& c) { c.page_rows = 0; }, {"pages of 0 rows"}));
    CHECK(bad([](auto& c) { c.max_tokens = (std::size_t{1} << 22) + 1; }, {"4194305 tokens", "at most 4194304"}));
    CHECK(bad([](auto& c) { c.host_rows = (std::size_t{1} << 31) + 1; }, {"2147483649 host rows", "31 bits"}));
    CHECK(bad([](auto& c) { c.resident_pages = std::size_t{1} << 30; }, {"1073741824 pages of 8 rows"}));
    CHECK(bad([](auto& c) { c.staging_rows = std::size_t{1} << 30; }, {"1073741824 staging rows"}));
}

TEST_CASE("cuda store: memory is the caller's, and goes back") {
    late_timeline line;
    std::map<void*, std::size_t> device;
    std::map<void*, std::size_t> pinned;
    {
        const device_store<float, counted_memory, counted_memory, late_timeline> s(
            small_store(), counted_memory{&device}, counted_memory{&pinned}, line);
        CHECK(s.row_stride() == 12);
        CHECK(device.size() == 3);
        CHECK(device[s.resident()] == 20 * 8 * 12 * sizeof(float));
        CHECK(device[s.staging()] == 6 * 7 * 12 * sizeof(float));
        CHECK(pinned[s.host()] == 200 * 12 * sizeof(float));
        const device_staging map = s.staging_map();
        CHECK(device[map.slot] == 6 * (100 + 7 + 7 + 2) * sizeof(std::uint32_t));
        CHECK(map.step + 6 == map.slot + 6 * (100 + 7 + 7 + 2));
    }
    CHECK(device.empty());
    CHECK(pinned.empty());
}
