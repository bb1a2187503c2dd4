/* A program that forbids itself system calls by seccomp, with EPERM. After it has started and
 * allocated: membarrier and process_madvise, with threads made later; rseq as well, with threads
 * made before. Before it starts, by a filter that lasts across exec: rseq, membarrier and
 * process_madvise. Then all files, with a limit that follows the container, which neap looks at again
 * and again. Last, calls are not refused but raise SIGSYS in all threads, whose handler refuses them.
 * Allocation goes on in each case. */
#define _GNU_SOURCE
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef SYS_rseq
#define SYS_rseq 334
#endif
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

/* arm64 has only the later forms. */
#ifndef SYS_open
#define SYS_open SYS_openat
#define SYS_readlink SYS_readlinkat
#endif

/* Calls get `answer`, in threads that are made later or, with `flags`, in all. */
static void install(int count, const int *calls, unsigned answer, unsigned flags) {
    struct sock_filter code[64] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    unsigned short length = 1;
    for (int i = 0; i < count; i++) {
        code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1);
        code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answer);
    }
    code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {length, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) == 0, "seccomp");
    CHECK(syscall(calls[0], 0, 0, 0, 0, 0) == -1 && errno == EPERM, "the filter lets call %d through", calls[0]);
}

static void forbid(int count, const int *calls) { install(count, calls, SECCOMP_RET_ERRNO | EPERM, 0); }

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
        alarm(HANG_SECONDS);
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

/* Without a limit that it could see, the heap may grow. */
static void inside_without_files(void) {
    churn(NULL);
    forbid(5, (int[]){SYS_openat, SYS_open, SYS_readlink, SYS_newfstatat, SYS_statx});
    pthread_t threads[3];
    start(threads, NULL);
    for (int second = 0; second < 3; second++) {
        void *block = malloc(100 << 20);
        CHECK(block, "100 MiB");
        memset(block, 1, 100 << 20);
        free(block);
        churn(NULL);
        usleep(500000);
    }
    join(threads);
}

static atomic_int traps;

static void refuse(int signal, siginfo_t *info, void *context) {
    mcontext_t *registers = &((ucontext_t *)context)->uc_mcontext;
#ifdef __x86_64__
    registers->gregs[REG_RAX] = -EPERM;
#else
    registers->regs[0] = -EPERM;
#endif
    atomic_fetch_add(&traps, signal == SIGSYS && info->si_code > 0);
}

/* neap's thread, which the second thread brought, opens files once a second; without it calls do. */
static void inside_with_traps(void) {
    struct sigaction action = {.sa_sigaction = refuse, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSYS, &action, NULL) == 0, "sigaction");
    pthread_t threads[3];
    start(threads, &go);
    churn(NULL);
    int calls[] = {SYS_openat, SYS_membarrier, SYS_process_madvise};
    install(3, calls, SECCOMP_RET_TRAP, SECCOMP_FILTER_FLAG_TSYNC);
    int own = atomic_load(&traps);
    atomic_store(&go, 1);
    for (int i = 0; i < 100 && atomic_load(&traps) == own; i++) {
        churn(NULL);
        usleep(50000);
    }
    CHECK(!getenv("LD_PRELOAD") || atomic_load(&traps) > own, "neap made no forbidden call: this tests nothing");
    join(threads);
}

static void inside(const char *how) {
    const char *before = getenv("NEAP");
    char options[256];
    snprintf(options, sizeof options, "%s%slimit:auto,high:90%%,refuse:on", before ? before : "", before ? "," : "");
    CHECK(setenv("NEAP", options, 1) == 0, "setenv");
    execl(self, self, how, (char *)NULL);
    CHECK(0, "exec of %s", self);
}

static void without_files(void) { inside("files"); }

static void with_traps(void) { inside("traps"); }

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "files")) {
        inside_without_files();
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "traps")) {
        inside_with_traps();
        return 0;
    }
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
    in_child(without_files, "files, after the start");
    in_child(with_traps, "files and others raise SIGSYS, after the start");
    return finish();
}
