/* A profiler in front of every other malloc: it counts the calls, and passes them on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

unsigned long outer_mallocs, outer_aligned, outer_frees;

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

void *malloc(size_t size) {
    static void *(*inner)(size_t);
    if (!inner) inner = (void *(*)(size_t))next("malloc");
    __atomic_fetch_add(&outer_mallocs, 1, __ATOMIC_RELAXED);
    return inner(size);
}

void *aligned_alloc(size_t align, size_t size) {
    static void *(*inner)(size_t, size_t);
    if (!inner) inner = (void *(*)(size_t, size_t))next("aligned_alloc");
    __atomic_fetch_add(&outer_aligned, 1, __ATOMIC_RELAXED);
    return inner(align, size);
}

void free(void *memory) {
    static void (*inner)(void *);
    if (!inner) inner = (void (*)(void *))next("free");
    __atomic_fetch_add(&outer_frees, 1, __ATOMIC_RELAXED);
    inner(memory);
}
