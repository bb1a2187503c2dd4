/* Children of vfork that allocate while threads of the parent do. POSIX does not allow it, and
 * the C library's malloc permits it. Blocks carry their owner's number. A child frees its
 * blocks, but for one that its parent frees. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { CHURNERS = 4, FORKERS = 2, CHILDREN = 400 };

static atomic_int stop, children;

static void *churn(void *argument) {
    unsigned long me = (unsigned long)argument, *blocks[64] = {0};
    for (unsigned i = 0; !stop; i++) {
        unsigned at = i * 2654435761u >> 26;
        if (blocks[at]) CHECK(blocks[at][0] == (me << 32 | at), "a block of another thread");
        free(blocks[at]);
        blocks[at] = malloc(16 + (i * 40503u >> 7) % 200);
        blocks[at][0] = me << 32 | at;
    }
    for (int at = 0; at < 64; at++) free(blocks[at]);
    return NULL;
}

static void *start_children(void *argument) {
    void *volatile left = NULL;
    while (children < CHILDREN) {
        pid_t child = vfork();
        if (child == 0) {
            /* On one CPU or another, which the parent is not on. */
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(children % 2, &one);
            sched_setaffinity(0, sizeof one, &one);
            for (int i = 0; i < 300; i++) {
                unsigned long *block = malloc(16 + i % 200);
                block[0] = 99;
                for (volatile int turn = 0; turn < 100; turn++);
                if (block[0] != 99) _exit(1);
                free(block);
            }
            left = malloc(50);
            _exit(left == NULL);
        }
        int status;
        CHECK(child > 0 && waitpid(child, &status, 0) == child, "vfork");
        CHECK(status == 0, "a child's status is %#x", (unsigned)status);
        free(left);
        children++;
    }
    return argument;
}

int main(void) {
    pthread_t threads[CHURNERS + FORKERS];
    for (long i = 0; i < CHURNERS + FORKERS; i++) {
        void *(*body)(void *) = i < CHURNERS ? churn : start_children;
        CHECK(pthread_create(&threads[i], NULL, body, (void *)(i + 1)) == 0, "thread");
    }
    for (int i = CHURNERS; i < CHURNERS + FORKERS; i++) pthread_join(threads[i], NULL);
    stop = 1;
    for (int i = 0; i < CHURNERS; i++) pthread_join(threads[i], NULL);
    return finish();
}
