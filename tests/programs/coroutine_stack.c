/* The first use of malloc, and every other call of the family, on a coroutine's stack of 16 KiB
 * with a page without access below. The part of the stack that malloc and the C library's
 * functions below it touch stays below a bound; a signal handler would need more. */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>
#include <sys/mman.h>
#include <ucontext.h>

enum { STACK = 16384, PAINT = 0xa5, MOST = 8192 };

static ucontext_t back, there;
static const char *complaint;

static void work(void) {
    void *first = malloc(10);
    uint64_t state = 5;
    void *blocks[64] = {NULL};
    for (int step = 0; step < 5000 && first; step++) {
        int i = (int)(next_random(&state) % 64);
        size_t size = random_size(&state);
        blocks[i] = step % 3 == 0 ? realloc(blocks[i], size) : (free(blocks[i]), step % 3 == 1 ? calloc(1, size) : malloc(size));
        if (!blocks[i]) complaint = "an allocation failed";
    }
    for (int i = 0; i < 64; i++) free(blocks[i]);
    malloc_trim(0);
    free(first);
    if (!first) complaint = "the first allocation failed";
}

int main(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *memory = mmap(NULL, STACK + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && mprotect(memory, page, PROT_NONE) == 0, "stack");
    memset(memory + page, PAINT, STACK);
    CHECK(getcontext(&there) == 0, "context");
    there.uc_stack.ss_sp = memory + page;
    there.uc_stack.ss_size = STACK;
    there.uc_link = &back;
    makecontext(&there, work, 0);
    CHECK(swapcontext(&back, &there) == 0, "switch");
    CHECK(!complaint, "%s", complaint);
    size_t untouched = 0;
    while (untouched < STACK && memory[page + untouched] == PAINT) untouched++;
    CHECK(STACK - untouched <= MOST, "%zu bytes of the stack were used", STACK - untouched);
    return finish();
}
