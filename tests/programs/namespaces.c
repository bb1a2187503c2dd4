/* A program with one thread may make a user namespace, as only such programs may, also after it
 * has allocated and freed memory. */
#define _GNU_SOURCE
#include "check.h"

#include <sched.h>

static void *blocks[100000];

static int may_unshare(void) {
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) _exit(unshare(CLONE_NEWUSER) != 0);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
    return status == 0;
}

int main(void) {
    /* A container may refuse it to every program. */
    int may = may_unshare();
    for (int i = 0; i < 100000; i++) memset(blocks[i] = malloc(1000), 1, 1000);
    for (int i = 0; i < 100000; i++) free(blocks[i]);
    usleep(100000);
    CHECK(!may || unshare(CLONE_NEWUSER) == 0, "the process has more than one thread");
    return finish();
}
