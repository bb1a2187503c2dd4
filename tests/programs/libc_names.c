/* The GNU C library's own names of its functions, mixed with the plain ones: they are the same
 * functions. */
#include "check.h"

#include <malloc.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void __libc_free(void *);
void *__libc_memalign(size_t, size_t);
void *__libc_valloc(size_t);
void *__libc_pvalloc(size_t);

/* A block of `size` bytes on a multiple of `align` that plain names resize and free. */
static void use(const char *name, char *block, size_t align, size_t size) {
    CHECK(block && (uintptr_t)block % align == 0, "%s(%zu) answered %p", name, size, (void *)block);
    CHECK(malloc_usable_size(block) >= size, "%s(%zu) has %zu bytes", name, size, malloc_usable_size(block));
    mark(block, size, size);
    block = realloc(block, 2 * size);
    CHECK(block && marked(block, size, size), "realloc of what %s(%zu) answered", name, size);
    free(block);
}

int main(void) {
    for (size_t size = 16; size < 9000000; size *= 5) {
        use("malloc", __libc_malloc(size), 16, size);
        use("memalign", __libc_memalign(256, size), 256, size);
        use("valloc", __libc_valloc(size), 4096, size);
        use("pvalloc", __libc_pvalloc(size), 4096, (size + 4095) / 4096 * 4096);
        char *zeroes = __libc_calloc(size, 1);
        for (size_t i = 0; i < size; i++) CHECK(zeroes[i] == 0, "byte %zu of calloc(%zu)", i, size);
        use("calloc", zeroes, 16, size);
        char *block = malloc(size);
        mark(block, size, size);
        block = __libc_realloc(block, 2 * size);
        CHECK(block && marked(block, size, size), "realloc(%zu)", size);
        use("realloc", block, 16, 2 * size);
        __libc_free(malloc(size));
        __libc_free(calloc(1, size));
    }
    __libc_free(NULL);
    volatile size_t half = SIZE_MAX / 2;
    errno = 0;
    CHECK(!__libc_calloc(half, 3) && errno == ENOMEM, "a size that overflows");
    return finish();
}
