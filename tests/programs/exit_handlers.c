/* Code that runs late still frees and allocates: atexit and on_exit handlers, destructors of the
 * program, destructors of thread-specific data, threads that never stop. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static void *blocks[4][500];

static void allocate(int set) {
    for (int i = 0; i < 500; i++) {
        blocks[set][i] = malloc((size_t)i * (set + 1) * 8);
        CHECK(blocks[set][i], "set %d, block %d", set, i);
        fill(blocks[set][i], (size_t)i * (set + 1) * 8, i);
    }
}

static void release(int set) {
    for (int i = 0; i < 500; i++) {
        size_t length = (size_t)i * (set + 1) * 8;
        CHECK(differs(blocks[set][i], length, i) == length, "set %d, block %d changed", set, i);
        free(blocks[set][i]);
    }
    /* And the allocator still works. */
    void *more = malloc(100000);
    CHECK(more, "100 kB in a handler");
    memset(more, 1, 100000);
    free(more);
}

static void at_exit(void) { release(0); }
static void on_the_exit(int status, void *argument) {
    (void)status;
    (void)argument;
    release(1);
}
__attribute__((destructor)) static void at_the_end(void) { release(2); }

static void of_a_thread(void *block) {
    free(block);
    /* A destructor that allocates for its own key runs again, as POSIX says, a few times. */
    free(malloc(333));
}

static void *with_specific_data(void *key) {
    void *block = malloc(2000);
    CHECK(block && pthread_setspecific(*(pthread_key_t *)key, block) == 0, "thread-specific data");
    return NULL;
}

static void *never_stops(void *argument) {
    for (;;) {
        void *block = malloc(700);
        CHECK(block, "700 bytes");
        memset(block, 2, 700);
        free(block);
    }
    return argument;
}

int main(void) {
    for (int run = 0; run < 10; run++) {
        pid_t child = fork();
        CHECK(child >= 0, "fork");
        if (child == 0) {
            for (int set = 0; set < 3; set++) allocate(set);
            CHECK(atexit(at_exit) == 0 && on_exit(on_the_exit, NULL) == 0, "handlers");
            pthread_key_t key;
            CHECK(pthread_key_create(&key, of_a_thread) == 0, "key");
            pthread_t thread;
            for (int i = 0; i < 4; i++) {
                CHECK(pthread_create(&thread, NULL, with_specific_data, &key) == 0, "thread");
                CHECK(pthread_join(thread, NULL) == 0, "join");
            }
            for (int i = 0; i < 2; i++) CHECK(pthread_create(&thread, NULL, never_stops, NULL) == 0, "thread");
            alarm(HANG_SECONDS);
            exit(7);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child, "waitpid");
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7, "run %d ended with status %#x", run, (unsigned)status);
    }
    /* This process' own destructor finds its set too. */
    allocate(2);
    return finish();
}
