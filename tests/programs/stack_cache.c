/* Threads with large stacks end one after the other. The C library keeps 40 MiB of their stacks
 * and frees the rest, with their data, under the lock that it needs to make a thread. No work
 * after those frees may need that lock. Each child puts them at another distance from the frees
 * of some blocks that are worth releasing; one that hangs is ended by its alarm and named. */
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHILDREN = 64, THREADS = 16, BLOCKS = 30, STACK = 32 << 20 };

static pthread_barrier_t ready;

static void *brief(void *argument) {
    pthread_barrier_wait(&ready);
    return argument;
}

static void *stays(void *argument) {
    pause();
    return argument;
}

static void child(int number) {
    alarm(HANG_SECONDS);
    void *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(60000);
        CHECK(blocks[i], "block %d", i);
        memset(blocks[i], 1, 60000);
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_barrier_init(&ready, NULL, THREADS + 1);
    pthread_t other, threads[THREADS];
    CHECK(pthread_create(&other, NULL, stays, NULL) == 0, "a thread that stays");
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], &attributes, brief, NULL) == 0, "thread %d", i);
    for (int i = 0; i < number; i++) free(malloc(100));
    for (int i = 0; i < BLOCKS; i++) free(blocks[i]);
    pthread_barrier_wait(&ready);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0, "end of thread %d", i);
    _exit(0);
}

int main(void) {
    for (int number = 0; number < CHILDREN; number++) {
        pid_t pid = fork();
        CHECK(pid >= 0, "fork %d", number);
        if (pid == 0) child(number);
        int status;
        CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
        CHECK(status == 0, "child %d ended with status %#x%s", number, (unsigned)status,
              (status & 0x7f) == 14 ? ": it hung" : "");
    }
    return finish();
}
