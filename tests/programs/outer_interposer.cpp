// A library that is loaded in front of the allocator and wraps malloc and free sees the calls of
// every form of operator new and delete, as with the C++ library's own operators.
#include "check.h"

#include <dlfcn.h>
#include <new>

namespace {

enum { ROUNDS = 1000 };

struct alignas(128) Wide {
    char bytes[128];
};

// Starts the program again with the library in front.
void again(char **arguments) {
    char line[8192];
    const char *preloaded = getenv("LD_PRELOAD");
    snprintf(line, sizeof line, "%s_library.so%s%s", arguments[0], preloaded ? " " : "", preloaded ? preloaded : "");
    CHECK(setenv("LD_PRELOAD", line, 1) == 0, "setenv");
    execl("/proc/self/exe", arguments[0], "again", static_cast<char *>(nullptr));
    CHECK(0, "exec");
}

unsigned long seen(const char *name) {
    void *count = dlsym(RTLD_DEFAULT, name);
    CHECK(count, "%s: the library is not in front", name);
    return *static_cast<unsigned long *>(count);
}

void check(const char *what, const char *name, unsigned long before, unsigned long calls) {
    unsigned long found = seen(name) - before;
    CHECK(found == calls, "%s: %s counts %lu calls, and not %lu", what, name, found, calls);
}

template <typename Make, typename End>
void form(const char *what, const char *count, Make make, End end) {
    static void *made[ROUNDS];
    unsigned long allocated = seen(count), freed = seen("outer_frees");
    for (int i = 0; i < ROUNDS; i++) {
        made[i] = make(i % 300 + 1);
        CHECK(made[i], "%s", what);
    }
    check(what, count, allocated, ROUNDS);
    for (int i = 0; i < ROUNDS; i++) end(made[i], i % 300 + 1);
    check(what, "outer_frees", freed, ROUNDS);
}

} // namespace

int main(int count, char **arguments) {
    if (count == 1) again(arguments);
    using std::align_val_t;
    using std::nothrow;
    const align_val_t wide = align_val_t(alignof(Wide));
    for (int round = 0; round < 2; round++) {
        form("new", "outer_mallocs", [](size_t n) { return operator new(n); }, [](void *p, size_t) { operator delete(p); });
        form("new[]", "outer_mallocs", [](size_t n) { return operator new[](n); }, [](void *p, size_t) { operator delete[](p); });
        form("nothrow", "outer_mallocs", [](size_t n) { return operator new(n, nothrow); },
             [](void *p, size_t) { operator delete(p, nothrow); });
        form("nothrow []", "outer_mallocs", [](size_t n) { return operator new[](n, nothrow); },
             [](void *p, size_t n) { operator delete[](p, n); });
        form("sized", "outer_mallocs", [](size_t n) { return operator new(n); }, [](void *p, size_t n) { operator delete(p, n); });
        form("aligned", "outer_aligned", [=](size_t n) { return operator new(n * 128, wide); },
             [=](void *p, size_t) { operator delete(p, wide); });
        form("aligned []", "outer_aligned", [=](size_t n) { return operator new[](n * 128, wide); },
             [=](void *p, size_t n) { operator delete[](p, n * 128, wide); });
    }
    return finish();
}
