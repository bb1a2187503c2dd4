/* System calls of calls that allocate or free, by situation. Once the program is under way, a
 * filter ends it at any system call but those in the table of docs/design/system-calls.md, with
 * the arguments that OpenSSH's sandbox permits. From then on the program itself makes only
 * `write` and `exit_group`, and reads the clock, which is no system call. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define ANSWER(what) BPF_STMT(BPF_RET | BPF_K, what)
#define UNLESS(value, skip) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)(value), 0, skip)

/* C libraries without it register no thread for rseq; neap does, at a thread's first slow path. */
extern const ptrdiff_t __rseq_offset __attribute__((weak));

/* Permits the calling thread harmless calls, and `more` of them. */
static void enter(const int *more, int count) {
    struct sock_filter code[100];
    unsigned short at = 0;
#define ADD(...) code[at++] = (struct sock_filter)__VA_ARGS__
    ADD(LOAD(nr));
    const int plain[] = {SYS_munmap, SYS_mremap, SYS_write, SYS_exit_group};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) {
        ADD(UNLESS(plain[i], 1));
        ADD(ANSWER(SECCOMP_RET_ALLOW));
    }
    if (!&__rseq_offset) {
        ADD(UNLESS(SYS_rseq, 1));
        ADD(ANSWER(SECCOMP_RET_ALLOW));
    }
    for (int i = 0; i < count; i++) {
        ADD(UNLESS(more[i], 1));
        ADD(ANSWER(SECCOMP_RET_ALLOW));
    }
    /* No memory that can be executed. */
    const int mapping[] = {SYS_mmap, SYS_mprotect};
    for (int i = 0; i < 2; i++) {
        ADD(UNLESS(mapping[i], 4));
        ADD(LOAD(args[2]));
        ADD(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, ~(PROT_READ | PROT_WRITE), 1, 0));
        ADD(ANSWER(SECCOMP_RET_ALLOW));
        ADD(ANSWER(SECCOMP_RET_TRAP));
    }
    const int advice[] = {MADV_NORMAL, MADV_FREE, MADV_DONTNEED, MADV_DONTFORK, MADV_DONTDUMP, MADV_WIPEONFORK};
    enum { ADVICE = sizeof advice / sizeof *advice };
    ADD(UNLESS(SYS_madvise, 2 + 2 * ADVICE));
    ADD(LOAD(args[2]));
    for (int i = 0; i < ADVICE; i++) {
        ADD(UNLESS(advice[i], 1));
        ADD(ANSWER(SECCOMP_RET_ALLOW));
    }
    ADD(ANSWER(SECCOMP_RET_ERRNO | EINVAL));
    const int futex[] = {0, 1, 9, 10}; /* WAIT, WAKE, and both with a mask. */
    ADD(UNLESS(SYS_futex, 3 + 2 * 4));
    ADD(LOAD(args[1]));
    ADD(BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 127));
    for (int i = 0; i < 4; i++) {
        ADD(UNLESS(futex[i], 1));
        ADD(ANSWER(SECCOMP_RET_ALLOW));
    }
    ADD(ANSWER(SECCOMP_RET_TRAP));
    ADD(ANSWER(SECCOMP_RET_TRAP));
    struct sock_fprog program = {at, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
          "a filter of %d instructions", at);
}

/* Ends the process at a system call that the filter traps, and names the call. */
static void trapped(int signal, siginfo_t *what, void *context) {
    char line[100];
    (void)signal, (void)context;
    int size = snprintf(line, sizeof line, "system call %d is not in the table\n", what->si_syscall);
    _exit(write(2, line, size) == size ? 5 : 6);
}

/* glibc's own malloc moves the break, and reads /proc/sys/vm/overcommit_memory before it first
 * shrinks the heap of a thread. */
static const int of_glibc[] = {SYS_brk, SYS_openat, SYS_read, SYS_close};

/* Calls that the allocator may make beyond the harmless ones. */
static void enter_alone(void) { enter(of_glibc, getenv("LD_PRELOAD") ? 0 : sizeof of_glibc / sizeof *of_glibc); }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Objects of many sizes come and go for some seconds: long enough for several of neap's
 * intervals. */
static void churn(int count, double seconds) {
    void **blocks = malloc(count * sizeof *blocks);
    double end = now() + seconds;
    for (unsigned round = 1; now() < end; round++) {
        for (int i = 0; i < count; i++) {
            size_t size = 100 + (i * round) % 900;
            blocks[i] = malloc(size);
            if (!blocks[i]) _exit(3);
            memset(blocks[i], 1, size);
        }
        for (int i = 0; i < count; i++) free(blocks[i]);
    }
    free(blocks);
}

/* Large blocks, which grow, and sizes that change from phase to phase. */
static void burst(void) {
    static void *blocks[20000];
    for (int i = 0; i < 10; i++) {
        char *block = memset(malloc(3 << 20), 1, 3 << 20);
        free(realloc(block, 9 << 20));
    }
    for (size_t size = 48; size < 3000; size += size / 2) {
        for (int i = 0; i < 20000; i++) memset(blocks[i] = malloc(size), 1, size);
        for (int i = 0; i < 20000; i++) free(blocks[i]);
    }
    for (int i = 0; i < 500; i++) free(malloc(50000 + i * 40));
}

static void one_with_objects(void) {
    churn(1000, 0);
    enter_alone();
    churn(2000, 1.2);
    _exit(0);
}

static void one_with_a_burst(void) {
    churn(1000, 0);
    enter_alone();
    for (int i = 0; i < 3; i++) {
        burst();
        churn(50000, 0.4);
    }
    _exit(0);
}

static atomic_int done;
enum { THREADS = 4 };
static _Atomic(void *) post[THREADS][256];
static pthread_mutex_t never = PTHREAD_MUTEX_INITIALIZER;

static void *works(void *argument) {
    long number = (long)argument;
    enter_alone();
    double end = now() + 1.2;
    for (unsigned round = 0; now() < end; round++) {
        /* Each thread frees blocks of the other. */
        for (int i = 0; i < 256; i++) {
            size_t size = 16 << (round + i) % 12;
            void *block = malloc(size);
            if (!block) _exit(3);
            memset(block, 1, size);
            free(atomic_exchange(&post[(number + 1) % THREADS][i], block));
        }
        for (int i = 0; i < 256; i++) free(atomic_exchange(&post[number][i], NULL));
        if (round % 8 == 0) free(realloc(memset(malloc(1 << 20), 1, 1 << 20), 3 << 20));
    }
    churn(20000, 0.2);
    atomic_fetch_add(&done, 1);
    /* The end of a thread makes other calls, of the C library's: so threads last until the
     * process ends. */
    pthread_mutex_lock(&never);
    return argument;
}

static void several(void) {
    pthread_t thread;
    pthread_mutex_lock(&never);
    for (long i = 0; i < THREADS; i++) CHECK(pthread_create(&thread, NULL, works, (void *)i) == 0, "thread %ld", i);
    enter_alone();
    churn(5000, 1.0);
    burst();
    while (atomic_load(&done) < THREADS) churn(100, 0.01);
    _exit(0);
}

static void *waits(void *argument) {
    for (;;) pause();
    return argument;
}

static void child_of_fork(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, waits, NULL) == 0, "a thread");
    churn(2000, 0.3);
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        enter_alone();
        churn(2000, 0.6);
        burst();
        churn(50000, 0.4);
        _exit(0);
    }
    end_child(pid);
    _exit(0);
}

static void child_of_vfork(void) {
    churn(2000, 0.1);
    pid_t pid = vfork();
    if (pid == 0) {
        enter_alone();
        churn(200, 0.3);
        _exit(0);
    }
    CHECK(pid > 0, "vfork");
    end_child(pid);
    _exit(0);
}

/* The message of an abort is written, and the signal is sent to the thread itself. */
static void fatal(void) {
    char *volatile block = malloc(100);
    int null = open("/dev/null", O_WRONLY);
    CHECK(null >= 0 && dup2(null, 2) == 2, "/dev/null");
    const int more[] = {SYS_getpid, SYS_gettid, SYS_tgkill};
    enter(more, sizeof more / sizeof *more);
    free(block);
    free(block);
    _exit(4);
}

static void traced(void) {
    const int more[] = {SYS_process_vm_writev};
    churn(1000, 0);
    enter(more, 1);
    churn(20000, 0.3);
    burst();
    _exit(0);
}

/* Allocates all that the limit leaves, in blocks of a size, and frees it. */
static void to_the_limit(size_t size) {
    void **list = NULL, **block;
    while ((block = malloc(size))) {
        memset(block, 1, size);
        *block = list;
        list = (void **)block;
    }
    while (list) {
        void **next = *list;
        free(list);
        list = next;
    }
}

static atomic_int at_limit;

static void *meets_the_limit(void *argument) {
    enter_alone();
    for (int round = 0; round < 4; round++) to_the_limit(500 << round * 2);
    if (!argument) return NULL;
    atomic_fetch_add(&at_limit, 1);
    pthread_mutex_lock(&never);
    return NULL;
}

static void limited_alone(void) {
    churn(1000, 0);
    meets_the_limit(NULL);
    _exit(0);
}

static void limited_together(void) {
    pthread_t thread;
    pthread_mutex_lock(&never);
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&thread, NULL, meets_the_limit, &never) == 0, "thread %d", i);
    meets_the_limit(NULL);
    while (atomic_load(&at_limit) < 3) __asm__ volatile("" ::: "memory");
    _exit(0);
}

static void in_child(void (*work)(void), const char *what, int signal) {
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) work();
    int status;
    CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
    int right = signal ? WIFSIGNALED(status) && WTERMSIG(status) == signal : status == 0;
    CHECK(right, "%s: it ended with status %#x", what, (unsigned)status);
}

/* Runs the program again with an option of neap's, and `what` as its argument. */
static void again(const char *option, char *self, char *what) {
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        const char *options = getenv("NEAP");
        char more[6000], *arguments[] = {self, what, NULL};
        snprintf(more, sizeof more, "%s%s%s", options ? options : "", options && *options ? "," : "", option);
        CHECK(setenv("NEAP", more, 1) == 0, "setenv");
        execv("/proc/self/exe", arguments);
        CHECK(0, "exec");
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
    CHECK(status == 0, "with %s it ended with status %#x", option, (unsigned)status);
}

int main(int argc, char **argv) {
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSYS, &action, NULL) == 0, "a handler");
    if (argc > 1 && !strcmp(argv[1], "traced")) traced();
    if (argc > 1) {
        in_child(limited_alone, "one thread at a limit", 0);
        in_child(limited_together, "several threads at a limit", 0);
        return 0;
    }
    in_child(one_with_objects, "one thread with 2000 objects", 0);
    in_child(one_with_a_burst, "one thread with a burst", 0);
    in_child(several, "several threads", 0);
    in_child(child_of_fork, "a child of fork", 0);
    in_child(child_of_vfork, "a child of vfork", 0);
    if (getenv("LD_PRELOAD")) {
        in_child(fatal, "a fatal message", SIGABRT);
        again("limit:48m", argv[0], "limited");
        char folder[] = "/tmp/neap-trace-XXXXXX", option[100], *file = option + strlen("trace:");
        CHECK(mkdtemp(folder), "a folder for a trace");
        snprintf(option, sizeof option, "trace:%s/trace", folder);
        again(option, argv[0], "traced");
        CHECK(unlink(file) == 0 && rmdir(folder) == 0, "%s", file);
    }
    return finish();
}
