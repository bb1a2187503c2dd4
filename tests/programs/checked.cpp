// Under check:on, each of 252 wrong programs ends by SIGABRT with one line that names its error:
// writes beyond an allocation, before it and after its free, and frees that name a wrong size, by
// each function of C and C++ that takes one. A right program ends well. Each is this program again.
#include "check.h"

#include <cstddef>
#include <new>
#include <string>
#include <vector>

extern "C" {
void free_sized(void *, size_t) __attribute__((weak));
void free_aligned_sized(void *, size_t, size_t) __attribute__((weak));
void sdallocx(void *, size_t, int) __attribute__((weak));
}

// The compiler may remove a pair of new and delete that it sees; these calls it cannot. No pointer is
// to an operator itself: ld of binutils 2.35 then gives a program that also calls the operator an
// address of its own for it, which neap takes for an operator of the program.
static void *(*volatile allocate)(size_t) = malloc;
static void (*volatile release)(void *) = free;
static void (*volatile sized_delete)(void *, size_t) = [](void *block, size_t size) { ::operator delete(block, size); };
static void (*volatile sized_array_delete)(void *, size_t) = [](void *block, size_t size) { ::operator delete[](block, size); };
static void (*volatile aligned_delete)(void *, size_t, std::align_val_t) =
    [](void *block, size_t size, std::align_val_t align) { ::operator delete(block, size, align); };
static void (*volatile aligned_array_delete)(void *, size_t, std::align_val_t) =
    [](void *block, size_t size, std::align_val_t align) { ::operator delete[](block, size, align); };
static void *(*volatile plain_new)(size_t) = [](size_t size) { return ::operator new(size); };
static void *(*volatile array_new)(size_t) = [](size_t size) { return ::operator new[](size); };
static void *(*volatile aligned_new)(size_t, std::align_val_t) =
    [](size_t size, std::align_val_t align) { return ::operator new(size, align); };
static void *(*volatile aligned_array_new)(size_t, std::align_val_t) =
    [](size_t size, std::align_val_t align) { return ::operator new[](size, align); };

enum { KINDS = 4, SIZES = 9, PLACES = 7, CASES = KINDS * SIZES * PLACES };
static const size_t sizes[SIZES] = {1, 16, 100, 1000, 4096, 30000, 32768, 100000, 300000};
static const size_t beyond[PLACES] = {0, 1, 2, 3, 7, 8, 15};
static const size_t before[PLACES] = {1, 2, 8, 16, 24, 40, 63};
static const size_t after[PLACES] = {0, 1, 2, 3, 8, 16, 64};
static const char *const errors[KINDS] = {"write beyond the end", "write before the start", "write after free", "size mismatch"};

static void scribble(void *block, std::ptrdiff_t at) { ((volatile unsigned char *)block)[at] ^= 0x11; }

static const std::align_val_t ALIGN{64};

// Allocates `size` bytes, and frees them as `named` bytes, by one of the pairs of functions.
static void pair(int form, size_t size, size_t named) {
    switch (form) {
    case 0: return sized_delete(plain_new(size), named);
    case 1: return sized_array_delete(array_new(size), named);
    case 2: return aligned_delete(aligned_new(size, ALIGN), named, ALIGN);
    case 3: return aligned_array_delete(aligned_array_new(size, ALIGN), named, ALIGN);
    case 4: return free_sized(allocate(size), named);
    case 5: return free_aligned_sized(aligned_alloc(64, size), 64, named);
    default: return sdallocx(allocate(size), named, 0);
    }
}

static void wrong(int number) {
    int kind = number / (SIZES * PLACES), place = number % PLACES;
    size_t size = sizes[number / PLACES % SIZES];
    // sdallocx may name any size up to the usable one.
    if (kind == 3) return pair(place, size, place == 6 ? 2 * size + 4096 : size + 1);
    char *block = (char *)allocate(size);
    memset(block, 1, size);
    if (kind == 2) release(block);
    if (kind == 0) scribble(block, (std::ptrdiff_t)(size + beyond[place]));
    if (kind == 1) scribble(block, -(std::ptrdiff_t)before[place]);
    if (kind == 2) scribble(block, (std::ptrdiff_t)(after[place] < size ? after[place] : size - 1));
    // Half of them are found at the end of the process.
    if (kind != 2 && number % 2) release(block);
}

struct Large {
    virtual ~Large() = default;
    std::vector<std::string> words;
};

static void right() {
    for (size_t size : sizes)
        for (int form = 0; form < PLACES; form++) pair(form, size, size);
    sized_delete(nullptr, 8);
    for (int i = 1; i < 300; i++) {
        Large *large = new Large;
        for (int n = 0; n < i; n++) large->words.push_back(std::string((size_t)n, 'x'));
        delete large;
        delete[] new Large[(size_t)i % 9 + 1];
    }
}

// Runs this program again with an argument. Returns its status, and its standard error in `text`.
static int again(const std::string &argument, char *text, size_t bytes) {
    int said;
    pid_t child = fork_heard(&said);
    if (child == 0) {
        const char *options = getenv("NEAP");
        setenv("NEAP", (options && *options ? std::string(options) + ",check:on" : std::string("check:on")).c_str(), 1);
        execl("/proc/self/exe", "checked", argument.c_str(), (char *)nullptr);
        _exit(9);
    }
    return heard(child, said, text, bytes);
}

int main(int count, char **words) {
    if (count > 1) {
        strcmp(words[1], "right") ? wrong(atoi(words[1])) : right();
        return 0;
    }
    char text[4096];
    int status = again("right", text, sizeof text);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0 && !text[0], "the right program: status %#x, `%s`", (unsigned)status, text);
    for (int number = 0; number < CASES; number++) {
        status = again(std::to_string(number), text, sizeof text);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "case %d: status %#x, `%s`", number, (unsigned)status, text);
        const char *error = errors[number / (SIZES * PLACES)], *end = strchr(text, '\n');
        CHECK(strncmp(text, "neap: ", 6) == 0 && strstr(text, error) && end && end[1] == 0, "case %d: `%s`", number, text);
    }
    return finish();
}
