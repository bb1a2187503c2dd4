/* Handlers of fork, registered before the first allocation and again in main, that allocate in
 * all sizes before and after. Those registered first run last before fork, when the allocator is
 * prepared for it already. */
#include "check.h"

#include <pthread.h>

static int before, after;

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
    alarm(HANG_SECONDS);
    all_sizes();
    CHECK(pthread_atfork(prepare, resume, resume) == 0, "late handlers");
    for (int i = 0; i < 50; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0, "fork %d", i);
        if (pid == 0) {
            alarm(HANG_SECONDS);
            CHECK(before == 2 * (i + 1) && after == 2 * (i + 1), "%d and %d handlers ran", before, after);
            all_sizes();
            _exit(0);
        }
        end_child(pid);
    }
    return finish();
}
