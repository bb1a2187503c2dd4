/* Handlers of fork, registered before anything was allocated and again in main, that allocate in all sizes before and
 * after: those registered first run last of all before fork, when the allocator has made itself ready for it. */
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static int before, after;

static void all_sizes(void) {
    for (size_t size = 1; size < 3000000; size += size / 3 + 1) {
        char *block = malloc(size);
        CHECK(block, "%zu bytes", size);
        block[0] = block[size - 1] = 1;
        free(block);
    }
}

static void prepare(void) {
    before++;
    all_sizes();
}

static void resume(void) {
    after++;
    all_sizes();
}

__attribute__((constructor(101))) static void early(void) {
    CHECK(pthread_atfork(prepare, resume, resume) == 0, "early handlers");
}

int main(void) {
    alarm(60);
    all_sizes();
    CHECK(pthread_atfork(prepare, resume, resume) == 0, "late handlers");
    for (int i = 0; i < 50; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0, "fork %d", i);
        if (pid == 0) {
            alarm(30);
            CHECK(before == 2 * (i + 1) && after == 2 * (i + 1), "%d and %d handlers ran", before, after);
            all_sizes();
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0, "child %d ended with status %#x", i, (unsigned)status);
    }
    return finish();
}
