/* Children of the bare system call clone, which runs no fork handler. A child that was made
 * while another thread of its parent was inside malloc or free forks itself, and must not wait
 * for that thread. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>

enum { CHILDREN = 150 };

static atomic_int stop;

static void *churn(void *argument) {
    while (!stop) free(malloc(300000));
    return argument;
}

int main(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, churn, NULL) == 0, "thread");
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, NULL, NULL, 0);
        CHECK(child >= 0, "clone");
        if (child == 0) {
            /* It ends with a status of its own if it waits for a thread that it does not have. */
            alarm(HANG_SECONDS);
            pid_t grandchild = fork();
            if (grandchild == 0) _exit(5);
            int status;
            if (grandchild < 0 || waitpid(grandchild, &status, 0) != grandchild) _exit(6);
            _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 7);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child, "waitpid");
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 5, "child %d: status %#x", i, (unsigned)status);
    }
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0, "join");
    return finish();
}
