/* A program with a malloc family of its own but no reallocarray, which must resize the program's
 * memory, also when a library calls it. The C library's goes through the symbol `realloc`. */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>

static char pool[8 << 20] __attribute__((aligned(4096)));
static size_t used;

/* The size lies in front of each block. No memory is reused. */
static void *take(size_t align, size_t size) {
    if (align < 16) align = 16;
    size_t start = (used + 16 + align - 1) / align * align;
    if (size > sizeof pool - start) {
        errno = ENOMEM;
        return NULL;
    }
    memcpy(pool + start - sizeof size, &size, sizeof size);
    used = start + size;
    return pool + start;
}

static int is_mine(const void *block) { return (const char *)block >= pool && (const char *)block < pool + sizeof pool; }

size_t malloc_usable_size(void *block) {
    size_t size = 0;
    if (block) memcpy(&size, (char *)block - sizeof size, sizeof size);
    return size;
}

void *malloc(size_t size) { return take(16, size); }

void *calloc(size_t count, size_t size) { return take(16, count * size); }

void free(void *block) { CHECK(!block || is_mine(block), "free of %p", block); }

void *realloc(void *block, size_t size) {
    CHECK(!block || is_mine(block), "realloc of %p", block);
    void *moved = take(16, size);
    size_t before = malloc_usable_size(block);
    if (moved && block) memcpy(moved, block, before < size ? before : size);
    return moved;
}

void *memalign(size_t align, size_t size) { return take(align, size); }

void *aligned_alloc(size_t align, size_t size) { return take(align, size); }

int posix_memalign(void **block, size_t align, size_t size) {
    *block = take(align, size);
    return *block ? 0 : ENOMEM;
}

void *library_grows(void *block, size_t count, size_t size);

int main(void) {
    char *block = malloc(20);
    fill(block, 20, 1);
    block = reallocarray(block, 50, 10);
    CHECK(block && is_mine(block) && differs(block, 20, 1) == 20, "reallocarray answered %p", (void *)block);
    block = library_grows(block, 300, 10);
    CHECK(block && is_mine(block) && differs(block, 20, 1) == 20, "in a library it answered %p", (void *)block);
    char *fresh = reallocarray(NULL, 5, 5);
    CHECK(fresh && is_mine(fresh), "reallocarray(NULL) answered %p", (void *)fresh);
    volatile size_t half = SIZE_MAX / 2;
    errno = 0;
    CHECK(!reallocarray(fresh, half, 3) && errno == ENOMEM, "a size that overflows");
    free(block);
    free(fresh);
    return finish();
}
