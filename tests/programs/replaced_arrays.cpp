// A program with operators of its own for arrays and for alignments, and none of the plain ones:
// the forms that end in these get the right arguments.
#include "check.h"

#include <new>

static long arrays, aligned;

void *operator new[](std::size_t size) {
    arrays++;
    char *memory = (char *)malloc(size + 64);
    if (!memory) throw std::bad_alloc();
    return memory + 64;
}

void operator delete[](void *memory) noexcept {
    arrays--;
    free((char *)memory - 64);
}

static constexpr std::align_val_t BY{256};

void *operator new(std::size_t size, std::align_val_t by) {
    CHECK(by == BY, "new on a multiple of %zu", (std::size_t)by);
    aligned++;
    char *memory = (char *)aligned_alloc(256, (size + 511) / 256 * 256);
    if (!memory) throw std::bad_alloc();
    return memory + 256;
}

void operator delete(void *memory, std::align_val_t by) noexcept {
    CHECK(by == BY, "delete on a multiple of %zu", (std::size_t)by);
    aligned--;
    free((char *)memory - 256);
}

// The compiler may remove a pair of new and delete that it sees; these calls it cannot.
static void (*volatile sized_array)(void *, std::size_t) = ::operator delete[];
static void (*volatile nothrow_array_delete)(void *, const std::nothrow_t &) = ::operator delete[];
static void *(*volatile aligned_array)(std::size_t, std::align_val_t) = ::operator new[];
static void *(*volatile aligned_nothrow)(std::size_t, std::align_val_t, const std::nothrow_t &) = ::operator new;
static void *(*volatile aligned_array_nothrow)(std::size_t, std::align_val_t, const std::nothrow_t &) = ::operator new[];
static void (*volatile aligned_sized)(void *, std::size_t, std::align_val_t) = ::operator delete;
static void (*volatile aligned_array_sized)(void *, std::size_t, std::align_val_t) = ::operator delete[];
static void (*volatile aligned_array_delete)(void *, std::align_val_t) = ::operator delete[];
static void (*volatile aligned_nothrow_delete)(void *, std::align_val_t, const std::nothrow_t &) = ::operator delete;

static void *taken(void *memory, const char *form, const long &have, long expected) {
    CHECK(memory && have == expected, "%s went around the program's operator new", form);
    memset(memory, 1, 100);
    return memory;
}

static void given(const char *form, long have) { CHECK(have == 0, "%s went around the program's operator delete", form); }

int main() {
    for (std::size_t size = 100; size < 1000000; size *= 7) {
        void *memory = taken(::operator new[](size), "new[]", arrays, 1);
        sized_array(memory, size), given("sized delete[]", arrays);
        memory = taken(::operator new[](size), "new[]", arrays, 1);
        nothrow_array_delete(memory, std::nothrow), given("nothrow delete[]", arrays);
        memory = taken(aligned_array(size, BY), "aligned new[]", aligned, 1);
        aligned_array_sized(memory, size, BY), given("aligned sized delete[]", aligned);
        memory = taken(aligned_nothrow(size, BY, std::nothrow), "aligned nothrow new", aligned, 1);
        aligned_sized(memory, size, BY), given("aligned sized delete", aligned);
        memory = taken(aligned_array_nothrow(size, BY, std::nothrow), "aligned nothrow new[]", aligned, 1);
        aligned_array_delete(memory, BY), given("aligned delete[]", aligned);
        memory = taken(::operator new(size, BY), "aligned new", aligned, 1);
        aligned_nothrow_delete(memory, BY, std::nothrow), given("aligned nothrow delete", aligned);
    }
    return finish();
}
