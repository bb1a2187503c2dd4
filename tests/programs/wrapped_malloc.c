/* A program with a malloc family that counts calls and passes them on to the GNU C library's own
 * names. Those must not come back to the plain names, which are the program's. Functions that
 * the program does not have end in its functions. */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void __libc_free(void *);
void *__libc_memalign(size_t, size_t);

static int calls;

/* A malloc that makes a thread or registers a handler calls itself through the C library. A
 * deeper recursion of a wrapper would never end. */
enum { DEEP = 10 };

static __thread int inside;
#define WRAPPED(call)                                                                                                  \
    do {                                                                                                               \
        calls++;                                                                                                       \
        CHECK(inside++ < DEEP, "a name of the C library's has called the plain one");                                 \
        call;                                                                                                          \
        inside--;                                                                                                      \
    } while (0)

void *malloc(size_t size) {
    void *block;
    WRAPPED(block = __libc_malloc(size));
    return block;
}

void *calloc(size_t number, size_t size) {
    void *block;
    WRAPPED(block = __libc_calloc(number, size));
    return block;
}

void *realloc(void *old, size_t size) {
    void *block;
    WRAPPED(block = __libc_realloc(old, size));
    return block;
}

void free(void *block) { WRAPPED(__libc_free(block)); }

void *memalign(size_t align, size_t size) {
    void *block;
    WRAPPED(block = __libc_memalign(align, size));
    return block;
}

int main(void) {
    for (size_t size = 1; size < 9000000; size = size * 3 + 1) {
        int before = calls;
        char *blocks[] = {malloc(size), calloc(1, size), memalign(64, size), reallocarray(NULL, size, 1)};
        CHECK(calls >= before + 4, "four blocks of %zu bytes took %d calls", size, calls - before);
        for (int i = 0; i < 4; i++) {
            CHECK(blocks[i], "block %d of %zu bytes", i, size);
            mark(blocks[i], size, i);
            blocks[i] = i % 2 ? realloc(blocks[i], size + 100) : reallocarray(blocks[i], size + 100, 1);
            CHECK(blocks[i] && marked(blocks[i], size, i), "block %d of %zu bytes, made longer", i, size);
            free(blocks[i]);
        }
        CHECK(calls >= before + 12, "with their ends %d calls", calls - before);
    }
    return finish();
}
