/* The main thread ends before the others, in each of three ways, and the process ends with the
 * last of the program's own threads. A thread of the allocator does not keep it alive. Runs in
 * children: one that does not end is ended by its alarm. */
#include "check.h"

#include <pthread.h>
#include <threads.h>

static pthread_t main_thread;
static int cancels;

static void *worker(void *argument) {
    if (cancels) CHECK(pthread_cancel(main_thread) == 0, "cancel");
    void *blocks[2000];
    for (int i = 0; i < 200; i++) free(memset(malloc(200000), 1, 200000));
    for (int i = 0; i < 2000; i++) memset(blocks[i] = malloc(3000), 2, 3000);
    usleep(50000);
    for (int i = 0; i < 2000; i++) free(blocks[i]);
    /* A thread that is made after the main thread's end does not bring back one of the
     * allocator's. */
    if (argument) {
        pthread_t last;
        CHECK(pthread_create(&last, NULL, worker, NULL) == 0, "the last thread");
        pthread_detach(last);
    }
    return NULL;
}

static void child(int way) {
    pthread_t thread;
    alarm(HANG_SECONDS);
    main_thread = pthread_self();
    cancels = way == 2;
    CHECK(pthread_create(&thread, NULL, worker, way == 2 ? NULL : &thread) == 0, "a worker");
    pthread_detach(thread);
    usleep(10000);
    if (way == 0) pthread_exit(NULL);
    if (way == 1) thrd_exit(0);
    for (;;) pause();
}

int main(void) {
    const char *ways[] = {"pthread_exit", "thrd_exit", "cancellation"};
    for (int way = 0; way < 3; way++) {
        pid_t pid = fork();
        CHECK(pid >= 0, "fork");
        if (pid == 0) child(way);
        int status;
        CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
        CHECK(status == 0, "after the main thread's %s the process ended with status %#x%s", ways[way], (unsigned)status,
              (status & 0x7f) == 14 ? ": it hung" : "");
    }
    return finish();
}
