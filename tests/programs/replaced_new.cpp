// A program with its own operator new and delete, in the plain forms only: every other form without
// alignment must end there, as the standard says. Their memory is not from malloc, so a form that
// goes another way is found.
#include "check.h"

#include <new>
#include <string>
#include <vector>

static long held;

static constexpr std::size_t HEAD = 64;

void *operator new(std::size_t size) {
    char *memory = size < PTRDIFF_MAX ? (char *)malloc(size + HEAD) : nullptr;
    if (!memory) throw std::bad_alloc();
    held++;
    return memory + HEAD;
}

void operator delete(void *memory) noexcept {
    if (!memory) return;
    held--;
    free((char *)memory - HEAD);
}

// The compiler may remove a pair of new and delete that it sees; these calls it cannot.
static void *(*volatile array_new)(std::size_t) = ::operator new[];
static void *(*volatile nothrow_new)(std::size_t, const std::nothrow_t &) = ::operator new;
static void *(*volatile nothrow_array_new)(std::size_t, const std::nothrow_t &) = ::operator new[];
static void (*volatile array_delete)(void *) = ::operator delete[];
static void (*volatile sized_delete)(void *, std::size_t) = ::operator delete;
static void (*volatile sized_array_delete)(void *, std::size_t) = ::operator delete[];
static void (*volatile nothrow_delete)(void *, const std::nothrow_t &) = ::operator delete;
static void (*volatile nothrow_array_delete)(void *, const std::nothrow_t &) = ::operator delete[];

static void *taken(void *memory, long before, const char *form) {
    CHECK(memory && held == before + 1, "%s went around the program's operator new", form);
    memset(memory, 1, 100);
    return memory;
}

static void given(long before, const char *form) {
    CHECK(held == before - 1, "%s went around the program's operator delete", form);
}

int main() {
    for (std::size_t size = 100; size < 1000000; size *= 7) {
        long now = held;
        array_delete(taken(array_new(size), now, "new[]")), given(now + 1, "delete[]");
        sized_delete(taken(nothrow_new(size, std::nothrow), now, "nothrow new"), size), given(now + 1, "sized delete");
        sized_array_delete(taken(nothrow_array_new(size, std::nothrow), now, "nothrow new[]"), size);
        given(now + 1, "sized delete[]");
        nothrow_delete(taken(::operator new(size), now, "new"), std::nothrow), given(now + 1, "nothrow delete");
        nothrow_array_delete(taken(array_new(size), now, "new[]"), std::nothrow), given(now + 1, "nothrow delete[]");
    }
    volatile std::size_t huge = PTRDIFF_MAX;
    CHECK(!nothrow_new(huge, std::nothrow) && !nothrow_array_new(huge, std::nothrow), "nothrow new of too much");
    bool thrown = false;
    try {
        array_new(huge);
    } catch (const std::bad_alloc &) {
        thrown = true;
    }
    CHECK(thrown, "new[] of too much did not throw");
    {
        std::vector<std::string> words;
        for (int i = 0; i < 5000; i++) words.push_back(std::string(i % 300, 'x'));
    }
    CHECK(held == 0, "%ld objects are left", held);
    return finish();
}
