/* jemalloc's functions with flags, as a program finds them that is linked with it: sizes,
 * alignments, zeroes, and blocks allocated by these and freed or measured by malloc's, and the
 * other way round. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <malloc.h>

#define ZERO 0x40
/* More than pointers can differ by. */
#define BEYOND (SIZE_MAX / 2 + 1)
/* Any thread cache and arena: bits that mean nothing to another allocator. */
#define CACHE_AND_ARENA (5 << 8 | 3 << 20)

static void *(*volatile mallocx_)(size_t, int);
static void *(*volatile rallocx_)(void *, size_t, int);
static size_t (*volatile xallocx_)(void *, size_t, size_t, int);
static size_t (*volatile sallocx_)(const void *, int);
static size_t (*volatile nallocx_)(size_t, int);
static void (*volatile dallocx_)(void *, int);
static void (*volatile sdallocx_)(void *, size_t, int);

static void all_bytes(const unsigned char *block, size_t from, size_t to, unsigned char value) {
    for (size_t i = from; i < to; i++) CHECK(block[i] == value, "byte %zu is %d instead of %d", i, block[i], value);
}

/* Leaves memory that is not zero in the caches. */
static void soil(size_t size) {
    unsigned char *blocks[8];
    for (int i = 0; i < 8; i++) {
        blocks[i] = malloc(size);
        memset(blocks[i], 0xa5, malloc_usable_size(blocks[i]));
    }
    for (int i = 0; i < 8; i++) free(blocks[i]);
}

int main(void) {
    mallocx_ = dlsym(RTLD_DEFAULT, "mallocx");
    rallocx_ = dlsym(RTLD_DEFAULT, "rallocx");
    xallocx_ = dlsym(RTLD_DEFAULT, "xallocx");
    sallocx_ = dlsym(RTLD_DEFAULT, "sallocx");
    nallocx_ = dlsym(RTLD_DEFAULT, "nallocx");
    dallocx_ = dlsym(RTLD_DEFAULT, "dallocx");
    sdallocx_ = dlsym(RTLD_DEFAULT, "sdallocx");
    CHECK(mallocx_ && rallocx_ && xallocx_ && sallocx_ && nallocx_ && dallocx_ && sdallocx_, "a function is missing");
    const size_t sizes[] = {1, 16, 100, 512, 5000, 40000, 70000, 300000, 3 << 20};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int power = 0; power <= 21; power++) {
            size_t size = sizes[s], align = (size_t)1 << power;
            soil(size);
            int flags = power | ZERO | CACHE_AND_ARENA;
            unsigned char *block = mallocx_(size, flags);
            CHECK(block && (uintptr_t)block % align == 0, "%zu bytes on %zu: %p", size, align, block);
            size_t usable = sallocx_(block, 0);
            all_bytes(block, 0, usable, 0);
            CHECK(usable >= size && usable == malloc_usable_size(block), "%zu bytes are %zu", size, usable);
            CHECK(usable == nallocx_(size, flags), "%zu on %zu: %zu, foreseen %zu", size, align, usable, nallocx_(size, flags));
            CHECK(xallocx_(block, size, 0, 0) == usable, "the size where it is");
            /* Larger and smaller: the real size before counts, not the requested one. */
            memset(block, 7, size);
            soil(2 * usable);
            block = rallocx_(block, 2 * usable, flags);
            CHECK(block && (uintptr_t)block % align == 0, "%zu bytes on %zu: %p", 2 * usable, align, block);
            all_bytes(block, 0, size, 7);
            all_bytes(block, size, 2 * usable, 0);
            block = rallocx_(block, size, flags);
            usable = sallocx_(block, 0);
            block = rallocx_(block, 2 * usable, flags);
            all_bytes(block, 0, size, 7);
            all_bytes(block, size, 2 * usable, 0);
            if (s % 2) sdallocx_(block, size, 0); else free(block);
            /* Blocks of malloc, on more than the requested alignment, measured and freed here. */
            block = malloc(size);
            CHECK(sallocx_(block, 0) == malloc_usable_size(block), "one size");
            memset(block, 9, size);
            block = rallocx_(block, size, power);
            CHECK(block && (uintptr_t)block % align == 0, "moved onto %zu: %p", align, block);
            all_bytes(block, 0, size, 9);
            dallocx_(block, CACHE_AND_ARENA);
        }
    char *block = malloc(100);
    memset(block, 1, 100);
    CHECK(!mallocx_(BEYOND, 0) && !mallocx_(1, 63) && !rallocx_(block, BEYOND, 0), "there is no such memory");
    CHECK(!rallocx_(block, 100, 62) && nallocx_(BEYOND, 0) == 0 && nallocx_(1, 63) == 0, "nor alignment");
    all_bytes((unsigned char *)block, 0, 100, 1);
    free(block);
    puts("ok");
    return 0;
}
