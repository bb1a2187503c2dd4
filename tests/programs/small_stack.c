/* Threads with 16 KiB of stack, a page without access below it, and the thread's own data inside
 * it: every call of the family works there, its slow paths too. */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

enum { STACK = 16384 };

/* The C library's minimum is 16 KiB, unless the CPU saves more than usual on a signal. */
static size_t stack_size(void) {
    long least = sysconf(_SC_THREAD_STACK_MIN);
    return least > STACK ? (size_t)least : STACK;
}

static void *work(void *argument) {
    uint64_t state = 99 + (uintptr_t)argument;
    void *blocks[64] = {NULL};
    for (int step = 0; step < 20000; step++) {
        int i = (int)(next_random(&state) % 64);
        size_t size = random_size(&state);
        switch (step % 5) {
        case 0:
            free(blocks[i]);
            blocks[i] = calloc(1, size);
            break;
        case 1:
            blocks[i] = realloc(blocks[i], size);
            break;
        case 2:
            free(blocks[i]);
            blocks[i] = memalign((size_t)1 << (next_random(&state) % 17), size % 100000 + 1);
            break;
        default:
            free(blocks[i]);
            blocks[i] = malloc(size);
        }
        if (!blocks[i]) return "an allocation failed";
        *(volatile char *)blocks[i] = 1;
    }
    malloc_trim(0);
    for (int i = 0; i < 64; i++) free(blocks[i]);
    return NULL;
}

int main(void) {
    size_t size = stack_size(), page = (size_t)sysconf(_SC_PAGESIZE);
    enum { THREADS = 6 };
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) {
        char *memory = mmap(NULL, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED && mprotect(memory, page, PROT_NONE) == 0, "stack");
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        CHECK(pthread_attr_setstack(&attributes, memory + page, size) == 0, "a stack of %zu bytes", size);
        CHECK(pthread_create(&threads[i], &attributes, work, (void *)i) == 0, "thread %d", (int)i);
        pthread_attr_destroy(&attributes);
    }
    for (int i = 0; i < THREADS; i++) {
        void *complaint;
        CHECK(pthread_join(threads[i], &complaint) == 0 && !complaint, "thread %d: %s", i, (char *)complaint);
    }
    return finish();
}
