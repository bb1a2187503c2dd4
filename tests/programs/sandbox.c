/* A program that forbids itself system calls by seccomp, with EPERM. After it has started and
 * allocated: membarrier and process_madvise, with threads made later; rseq as well, with threads
 * made before. Before it starts, by a filter that lasts across exec: rseq, membarrier and
 * process_madvise. Allocation goes on in each case. */
#define _GNU_SOURCE
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_rseq
#define SYS_rseq 334
#endif
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

static void forbid(int count, const int *calls) {
    struct sock_filter code[64] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    unsigned short length = 1;
    for (int i = 0; i < count; i++) {
        code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1);
        code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    }
    code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {length, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "seccomp");
    CHECK(syscall(calls[0], 0, 0, 0, 0, 0) == -1 && errno == EPERM, "the filter lets call %d through", calls[0]);
}

static atomic_int go;

static void *churn(void *argument) {
    while (argument && !atomic_load(&go)) usleep(1000);
    enum { BLOCKS = 1000 };
    static __thread void *blocks[BLOCKS];
    static __thread size_t length[BLOCKS];
    uint64_t state = 3;
    for (int round = 0; round < 60000; round++) {
        int i = (int)(next_random(&state) % BLOCKS);
        if (blocks[i]) CHECK(marked(blocks[i], length[i], i), "a block of %zu bytes changed", length[i]);
        free(blocks[i]);
        length[i] = random_size(&state);
        blocks[i] = malloc(length[i]);
        CHECK(blocks[i], "%zu bytes", length[i]);
        mark(blocks[i], length[i], i);
    }
    for (int i = 0; i < BLOCKS; i++) {
        free(blocks[i]);
        blocks[i] = NULL;
    }
    malloc_trim(0);
    return NULL;
}

static void start(pthread_t *threads, void *argument) {
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, churn, argument) == 0, "thread %d", i);
}

static void join(pthread_t *threads) {
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
}

static void in_child(void (*run)(void), const char *what) {
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        alarm(60);
        run();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "%s: status %#x", what, (unsigned)status);
}

static void with_later_threads(void) {
    churn(NULL);
    forbid(2, (int[]){SYS_membarrier, SYS_process_madvise});
    pthread_t threads[3];
    start(threads, NULL);
    churn(NULL);
    join(threads);
}

static void with_earlier_threads(void) {
    /* glibc ends a process if a new thread cannot register rseq after the first could, so these
     * are made before. */
    pthread_t threads[3];
    start(threads, &go);
    churn(NULL);
    forbid(3, (int[]){SYS_membarrier, SYS_process_madvise, SYS_rseq});
    atomic_store(&go, 1);
    churn(NULL);
    join(threads);
}

static const char *self;
static void from_the_start(void) {
    forbid(3, (int[]){SYS_membarrier, SYS_process_madvise, SYS_rseq});
    execl(self, self, "inside", (char *)NULL);
    CHECK(0, "exec of %s", self);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        pthread_t threads[3];
        start(threads, NULL);
        churn(NULL);
        join(threads);
        return 0;
    }
    self = argv[0];
    in_child(with_later_threads, "membarrier and process_madvise forbidden after the start");
    in_child(with_earlier_threads, "rseq too, after the start");
    in_child(from_the_start, "all three from the start");
    return finish();
}
