// C++ on top of malloc: new and delete in all their forms, the new-handler loop, bad_alloc,
// containers, exceptions and threads.
#include "check.h"

#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

// The compiler may remove a pair of new and delete that it sees; these calls it cannot.
static void *(*volatile plain_new)(std::size_t) = ::operator new;
static void *(*volatile array_new)(std::size_t) = ::operator new[];

static int handler_calls;
static void handler() {
    if (++handler_calls == 3) std::set_new_handler(nullptr);
}

static void failure() {
    volatile std::size_t huge = PTRDIFF_MAX;
    for (int array = 0; array < 2; array++) {
        handler_calls = 0;
        std::set_new_handler(handler);
        bool thrown = false;
        try {
            (array ? array_new : plain_new)(huge);
        } catch (const std::bad_alloc &) {
            thrown = true;
        }
        CHECK(thrown, "new of %zu bytes did not throw", (std::size_t)huge);
        CHECK(handler_calls == 3, "the new-handler was called %d times", handler_calls);
    }
    void *none = ::operator new(huge, std::nothrow);
    CHECK(!none, "nothrow new gave %p", none);
    bool thrown = false;
    try {
        volatile long count = -1;
        int *array = new int[count];
        delete[] array;
    } catch (const std::bad_alloc &) {
        thrown = true;
    }
    CHECK(thrown, "an array of -1");
}

template <std::size_t Align> struct alignas(Align) Aligned {
    char bytes[Align * 2];
};

template <std::size_t Align> static void aligned() {
    std::vector<std::unique_ptr<Aligned<Align>>> kept;
    for (int i = 0; i < 50; i++) {
        kept.emplace_back(new Aligned<Align>);
        CHECK((uintptr_t)kept.back().get() % Align == 0, "alignment %zu: %p", Align, (void *)kept.back().get());
        fill(kept.back()->bytes, sizeof kept.back()->bytes, i);
    }
    for (int i = 0; i < 50; i++)
        CHECK(differs(kept[i]->bytes, sizeof kept[i]->bytes, i) == sizeof kept[i]->bytes, "alignment %zu overlaps", Align);
    auto *array = new Aligned<Align>[7];
    CHECK((uintptr_t)array % Align == 0, "array of alignment %zu: %p", Align, (void *)array);
    delete[] array;
}

static void every_delete() {
    for (std::size_t size = 0; size < 70000; size = size * 3 / 2 + 1) {
        std::align_val_t by{64};
        ::operator delete(plain_new(size));
        ::operator delete(plain_new(size), size);
        ::operator delete[](array_new(size));
        ::operator delete[](array_new(size), size);
        ::operator delete(::operator new(size, std::nothrow), std::nothrow);
        ::operator delete(::operator new(size, by), by);
        ::operator delete(::operator new(size, by), size, by);
        ::operator delete[](::operator new[](size, by), by);
        ::operator delete[](::operator new[](size, by), size, by);
        // C's free takes blocks of new if new is built on malloc, as libstdc++'s is.
        free(plain_new(size));
    }
    ::operator delete(nullptr);
    ::operator delete(nullptr, std::size_t{8});
}

static long containers(unsigned seed) {
    std::map<std::string, std::vector<std::string>> words;
    for (unsigned i = 0; i < 20000; i++) {
        seed = seed * 1664525 + 1013904223;
        words["key number " + std::to_string(seed % 3000)].push_back(std::string(seed % 200, 'x'));
        if (i % 7 == 0 && !words.empty()) words.erase(words.begin());
    }
    long sum = 0;
    for (const auto &[key, list] : words)
        for (const auto &word : list) sum += (long)(key.size() + word.size());
    return sum;
}

static void exceptions_on_threads() {
    long expected = containers(42), sums[4] = {};
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; n++)
        threads.emplace_back([n, &sums] {
            for (int i = 0; i < 1000; i++) {
                try {
                    throw std::string(100 + i, 'e');
                } catch (const std::string &text) {
                    CHECK(text.size() == 100u + (unsigned)i, "the exception's text");
                }
            }
            sums[n] = containers(42);
        });
    for (auto &thread : threads) thread.join();
    for (long sum : sums) CHECK(sum == expected, "%ld instead of %ld", sum, expected);
}

int main() {
    failure();
    aligned<16>();
    aligned<64>();
    aligned<512>();
    aligned<4096>();
    every_delete();
    exceptions_on_threads();
    return finish();
}
