/* The malloc family keeps the promises of its manual pages: alignment, usable size, zeroing,
 * overflow, failure with ENOMEM and the old block intact, errors of posix_memalign, errno kept
 * by free. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <malloc.h>
#include <unistd.h>

static const size_t sizes[] = {0,    1,    7,    8,     15,    16,    17,     24,     32,     48,      63,     64,      65,
                               100,  127,  128,  129,   255,   256,   257,    511,    512,    513,     1000,   1024,    1025,
                               2047, 2048, 2049, 4095,  4096,  4097,  8191,   8192,   8193,   10000,   16384,  16385,   32768,
                               32769, 65536, 65537, 131072, 131073, 262144, 524288, 1048576, 1048577, 3000000, 33554432, 33554433};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void sizes_and_alignment(void) {
    for (int i = 0; i < SIZES; i++) {
        size_t size = sizes[i];
        unsigned char *block = malloc(size);
        CHECK(block, "malloc(%zu)", size);
        size_t need = size >= 16 ? 16 : size >= 8 ? 8 : 1;
        CHECK((uintptr_t)block % need == 0, "malloc(%zu) gave %p", size, (void *)block);
        size_t usable = malloc_usable_size(block);
        CHECK(usable >= size, "malloc(%zu) has %zu usable", size, usable);
        mark(block, usable, size);
        CHECK(marked(block, usable, size), "malloc(%zu) does not keep its %zu usable bytes", size, usable);
        free(block);
    }
    CHECK(malloc_usable_size(NULL) == 0, "of NULL");
}

/* Thousands of live blocks of mixed sizes keep their contents: none overlaps another. */
static void no_overlap(void) {
    enum { BLOCKS = 20000 };
    static void *blocks[BLOCKS];
    static size_t length[BLOCKS];
    uint64_t seed = 0x9e3779b97f4a7c15;
    for (int i = 0; i < BLOCKS; i++) {
        length[i] = next_random(&seed) % 2000;
        blocks[i] = malloc(length[i]);
        CHECK(blocks[i], "block %d of %zu bytes", i, length[i]);
        fill(blocks[i], length[i], i);
    }
    for (int i = 0; i < BLOCKS; i += 2) free(blocks[i]);
    for (int i = 0; i < BLOCKS; i += 2) {
        blocks[i] = malloc(length[i] = next_random(&seed) % 2000);
        CHECK(blocks[i], "block %d anew", i);
        fill(blocks[i], length[i], i);
    }
    for (int i = 0; i < BLOCKS; i++) {
        size_t at = differs(blocks[i], length[i], i);
        CHECK(at == length[i], "block %d of %zu bytes was changed at %zu", i, length[i], at);
        free(blocks[i]);
    }
}

/* A pointer with a tag of the program's, where the processor ignores one. */
static void *tagged(void *block) {
#ifdef __aarch64__
    return (void *)((uintptr_t)block | (uintptr_t)0x5a << 56);
#else
    return block;
#endif
}

/* free_sized of C23, where the library has it. */
static void sized_free(void *block, size_t size) {
    void (*free_sized)(void *, size_t) = (void (*)(void *, size_t))dlsym(RTLD_DEFAULT, "free_sized");
    free_sized ? free_sized(block, size) : free(block);
}

static void tags_are_ignored(void) {
    for (int i = 0; i < SIZES; i++) {
        size_t size = sizes[i] + 1;
        unsigned char *block = malloc(size);
        CHECK(malloc_usable_size(tagged(block)) == malloc_usable_size(block), "of %zu", size);
        mark(tagged(block), size, size);
        unsigned char *larger = realloc(tagged(block), size * 3);
        CHECK(larger && marked(larger, size, size), "realloc of %zu", size);
        unsigned char *smaller = realloc(tagged(larger), size);
        CHECK(smaller && marked(smaller, size, size), "realloc back to %zu", size);
        free(tagged(smaller));
        sized_free(tagged(malloc(size)), size);
    }
}

static void zero_sized(void) {
    void *a = malloc(0), *b = malloc(0), *c = calloc(0, 8), *d = calloc(8, 0);
    CHECK(a && b && c && d && a != b && c != d, "blocks of no bytes: %p %p %p %p", a, b, c, d);
    free(a);
    free(b);
    free(c);
    free(d);
    free(NULL);
}

/* Memory that was used, dirtied and freed comes back from calloc as zeros. */
static void zeroing(void) {
    for (int i = 0; i < SIZES; i++) {
        for (int round = 0; round < 3; round++) {
            void *dirty[4];
            for (int k = 0; k < 4; k++) {
                dirty[k] = malloc(sizes[i]);
                CHECK(dirty[k], "malloc(%zu)", sizes[i]);
                memset(dirty[k], 0xa5, malloc_usable_size(dirty[k]));
            }
            for (int k = 0; k < 4; k++) free(dirty[k]);
            unsigned char *block = calloc(1, sizes[i]);
            CHECK(block, "calloc(1, %zu)", sizes[i]);
            for (size_t k = 0; k < sizes[i]; k++) CHECK(block[k] == 0, "calloc(1, %zu) byte %zu is %d", sizes[i], k, block[k]);
            free(block);
        }
    }
}

static void alignments(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t align = sizeof(void *); align <= 4 << 20; align *= 2) {
        const size_t some[] = {1, 24, 100, 1000, 5000, 70000, 300000};
        for (unsigned i = 0; i < sizeof some / sizeof *some; i++) {
            void *blocks[3] = {NULL, NULL, NULL};
            CHECK(posix_memalign(&blocks[0], align, some[i]) == 0, "posix_memalign(%zu, %zu)", align, some[i]);
            blocks[1] = aligned_alloc(align, (some[i] + align - 1) / align * align);
            blocks[2] = memalign(align, some[i]);
            for (int k = 0; k < 3; k++) {
                CHECK(blocks[k] && (uintptr_t)blocks[k] % align == 0, "form %d, align %zu, size %zu: %p", k, align, some[i], blocks[k]);
                CHECK(malloc_usable_size(blocks[k]) >= some[i], "form %d, align %zu, size %zu", k, align, some[i]);
                mark(blocks[k], some[i], k);
            }
            for (int k = 0; k < 3; k++) {
                CHECK(marked(blocks[k], some[i], k), "form %d, align %zu, size %zu overlaps", k, align, some[i]);
                /* An aligned block may be resized like any other. */
                if (k == 1) {
                    blocks[k] = realloc(blocks[k], some[i] * 2);
                    CHECK(blocks[k] && marked(blocks[k], some[i] <= 4096 ? some[i] : 4096, k) + (some[i] > 4096), "realloc of an aligned block");
                }
                free(blocks[k]);
            }
        }
    }
    void *block = NULL;
    const size_t bad[] = {0, 1, 2, 4, 3, 24, 4097};
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(posix_memalign(&block, bad[i], 64) == EINVAL, "alignment %zu", bad[i]);
    void *v = valloc(100), *p = pvalloc(page + 1);
    CHECK(v && (uintptr_t)v % page == 0, "valloc gave %p", v);
    CHECK(p && (uintptr_t)p % page == 0 && malloc_usable_size(p) >= 2 * page, "pvalloc gave %p", p);
    memset(p, 1, 2 * page);
    free(v);
    free(p);
}

/* Sizes that no machine has: NULL and ENOMEM, and a block that was to grow is unchanged. */
static void impossible(void) {
    volatile size_t huge = (size_t)PTRDIFF_MAX + 1, most = SIZE_MAX;
    const size_t wanted[] = {huge, huge + 4096, most - 4096, most - 16, most};
    unsigned char *kept = malloc(300);
    CHECK(kept, "300 bytes");
    fill(kept, 300, 1);
    for (unsigned i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        size_t size = wanted[i];
        void *block = kept;
#define REFUSED(call)                                                                                                  \
    errno = 0;                                                                                                         \
    block = (call);                                                                                                    \
    CHECK(!block && errno == ENOMEM, #call " of %zu gave %p", size, block)
        REFUSED(malloc(size));
        REFUSED(calloc(1, size));
        REFUSED(calloc(size, 1));
        REFUSED(realloc(kept, size));
        REFUSED(reallocarray(kept, size, 1));
        REFUSED(aligned_alloc(64, size & ~(size_t)63));
        REFUSED(memalign(4096, size));
        CHECK(posix_memalign(&block, 64, size) == ENOMEM, "posix_memalign(64, %zu)", size);
    }
    volatile size_t half = SIZE_MAX / 2, root = (size_t)1 << 32;
    void *block;
    size_t size = half;
    REFUSED(calloc(half, 3));
    REFUSED(calloc(root, root));
    REFUSED(reallocarray(kept, half, 3));
    REFUSED(reallocarray(NULL, root, root));
    CHECK(differs(kept, 300, 1) == 300, "a refused realloc changed the block");
    free(kept);
}

static void errno_is_kept(void) {
    for (int i = 0; i < SIZES; i++) {
        void *block = malloc(sizes[i]);
        CHECK(block, "malloc(%zu)", sizes[i]);
        errno = 1234;
        free(block);
        CHECK(errno == 1234, "free of %zu bytes changed errno", sizes[i]);
    }
    errno = 1234;
    free(NULL);
    CHECK(errno == 1234, "free(NULL) changed errno");
}

/* Calls that report or tune: defined, harmless, and the sized forms of free release blocks of
 * malloc. */
static void the_rest(void) {
    unsigned char *array = reallocarray(NULL, 100, 10);
    CHECK(array, "reallocarray(NULL, 100, 10)");
    fill(array, 1000, 5);
    array = reallocarray(array, 100, 40);
    CHECK(array && differs(array, 1000, 5) == 1000, "reallocarray to 4000 bytes");
    sized_free(array, 4000);
    void (*free_aligned)(void *, size_t, size_t) = (void (*)(void *, size_t, size_t))dlsym(RTLD_DEFAULT, "free_aligned_sized");
    void *aligned = aligned_alloc(256, 1024);
    CHECK(aligned, "aligned_alloc(256, 1024)");
    if (free_aligned)
        free_aligned(aligned, 256, 1024);
    else
        free(aligned);
    void (*cfree)(void *) = (void (*)(void *))dlsym(RTLD_DEFAULT, "cfree");
    if (cfree) cfree(malloc(10));

    void *live = malloc(10 << 20);
    CHECK(live, "10 MiB");
#ifdef __GLIBC__
    struct mallinfo2 info = mallinfo2();
    (void)info;
    malloc_trim(0);
    CHECK(mallopt(M_TRIM_THRESHOLD, 128 * 1024) == 1, "mallopt");
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    CHECK(stream, "open_memstream");
    CHECK(malloc_info(0, stream) == 0, "malloc_info");
    fclose(stream);
    CHECK(length > 10 && strstr(text, "<malloc"), "malloc_info wrote `%s`", text);
    free(text);
#endif
    free(live);
}

int main(void) {
    sizes_and_alignment();
    no_overlap();
    tags_are_ignored();
    zero_sized();
    zeroing();
    alignments();
    impossible();
    errno_is_kept();
    the_rest();
    return finish();
}
