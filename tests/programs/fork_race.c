/* `fork_race COUNT`: three threads fork at the same time, COUNT times each, while two more
 * allocate and free. The C library lets handlers of two forks run at once. Each child allocates
 * in all sizes, frees inherited blocks, and releases free memory. A child that hangs is ended by
 * its alarm and named. */
#include "check.h"

#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FORKERS = 4, CHURNERS = 4, INHERITED = 300 };

static atomic_int stop;
static int forks;
static void *inherited[INHERITED];

static size_t inherited_size(int i) {
    return 20 + (size_t)i * 300;
}

static void *churn(void *argument) {
    enum { BLOCKS = 512 };
    void *blocks[BLOCKS] = {NULL};
    size_t length[BLOCKS] = {0};
    uint64_t state = 1 + (uintptr_t)argument;
    for (unsigned round = 0; argument ? !atomic_load(&stop) : round < 300; round++) {
        int i = (int)(next_random(&state) % BLOCKS);
        if (blocks[i]) CHECK(marked(blocks[i], length[i], i), "a block of %zu bytes changed", length[i]);
        free(blocks[i]);
        length[i] = random_size(&state);
        blocks[i] = malloc(length[i]);
        CHECK(blocks[i], "%zu bytes", length[i]);
        mark(blocks[i], length[i], i);
    }
    for (int i = 0; i < BLOCKS; i++) free(blocks[i]);
    return NULL;
}

static void child(void) {
    alarm(HANG_SECONDS);
    for (int i = 0; i < INHERITED; i++) {
        CHECK(marked(inherited[i], inherited_size(i), (uint64_t)i), "inherited block %d changed", i);
        free(inherited[i]);
    }
    churn(NULL);
    malloc_trim(0);
    _exit(0);
}

static void *forker(void *argument) {
    for (int number = 0; number < forks; number++) {
        pid_t pid = fork();
        CHECK(pid >= 0, "fork %d", number);
        if (pid == 0) child();
        int status;
        CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
        CHECK(status == 0, "child %d ended with status %#x%s", number, (unsigned)status,
              (status & 0x7f) == 14 ? ": it hung" : "");
    }
    return argument;
}

int main(int argc, char **argv) {
    forks = argc > 1 ? atoi(argv[1]) : 20;
    CHECK(forks > 0, "usage: fork_race COUNT");
    for (int i = 0; i < INHERITED; i++) {
        inherited[i] = malloc(inherited_size(i));
        CHECK(inherited[i], "block %d", i);
        mark(inherited[i], inherited_size(i), (uint64_t)i);
    }
    pthread_t churners[CHURNERS], forkers[FORKERS];
    for (uintptr_t i = 0; i < CHURNERS; i++)
        CHECK(pthread_create(&churners[i], NULL, churn, (void *)(i + 1)) == 0, "thread");
    for (int i = 0; i < FORKERS; i++) CHECK(pthread_create(&forkers[i], NULL, forker, NULL) == 0, "thread");
    for (int i = 0; i < FORKERS; i++) pthread_join(forkers[i], NULL);
    atomic_store(&stop, 1);
    for (int i = 0; i < CHURNERS; i++) pthread_join(churners[i], NULL);
    for (int i = 0; i < INHERITED; i++) free(inherited[i]);
    return finish();
}
