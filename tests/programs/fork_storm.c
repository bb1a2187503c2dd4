/* `fork_storm COUNT`: forks COUNT times while four threads allocate and free. Each child uses
 * the allocator at once: it frees inherited blocks, allocates, starts a thread and ends by exit
 * or _exit. A child that hangs is ended by its alarm and named. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_int stop;

static void *churn(void *argument) {
    enum { BLOCKS = 256 };
    void *blocks[BLOCKS] = {NULL};
    size_t length[BLOCKS] = {0};
    uint64_t state = 1 + (uintptr_t)argument;
    for (unsigned round = 0; argument ? !atomic_load(&stop) : round < 2000; round++) {
        int i = (int)(next_random(&state) % BLOCKS);
        if (blocks[i]) CHECK(marked(blocks[i], length[i], i), "a block of %zu bytes changed", length[i]);
        free(blocks[i]);
        length[i] = random_size(&state) % 70000 + 1;
        blocks[i] = malloc(length[i]);
        CHECK(blocks[i], "%zu bytes", length[i]);
        mark(blocks[i], length[i], i);
    }
    for (int i = 0; i < BLOCKS; i++) free(blocks[i]);
    return NULL;
}

static void child(int number, void **inherited, int count) {
    alarm(HANG_SECONDS);
    for (int i = 0; i < count; i++) {
        CHECK(marked(inherited[i], 100 + (size_t)i * 50, (uint64_t)i), "inherited block %d changed", i);
        free(inherited[i]);
    }
    churn(NULL);
    if (number % 4 == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, churn, NULL) == 0, "a thread in child %d", number);
        CHECK(pthread_join(thread, NULL) == 0, "its end");
    }
    if (number % 8 == 0) {
        /* A child of a child. */
        pid_t pid = fork();
        CHECK(pid >= 0, "fork in child %d", number);
        if (pid == 0) {
            churn(NULL);
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0, "grandchild's status %#x", (unsigned)status);
    }
    if (number % 2)
        exit(0);
    else
        _exit(0);
}

int main(int argc, char **argv) {
    int forks = argc > 1 ? atoi(argv[1]) : 20;
    CHECK(forks > 0, "usage: fork_storm COUNT");
    enum { INHERITED = 200 };
    void *inherited[INHERITED];
    for (int i = 0; i < INHERITED; i++) {
        inherited[i] = malloc(100 + (size_t)i * 50);
        CHECK(inherited[i], "block %d", i);
        mark(inherited[i], 100 + (size_t)i * 50, (uint64_t)i);
    }
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0, "thread");
    for (int number = 0; number < forks; number++) {
        pid_t pid = fork();
        CHECK(pid >= 0, "fork %d", number);
        if (pid == 0) child(number, inherited, INHERITED);
        int status;
        CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
        CHECK(status == 0, "child %d of %d ended with status %#x%s", number, forks, (unsigned)status,
              (status & 0x7f) == 14 ? ": it hung" : "");
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < INHERITED; i++) free(inherited[i]);
    return finish();
}
