/* Guarded samples (`guard:1`): an overflow, an underflow, a use after free or a second free ends the
 * process with one report. Each case runs in a process of its own, and its standard error is read.
 * Other faults, and the program's own handlers, are as without neap. */
#define _GNU_SOURCE
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

enum { OWN_HANDLER = 43, FINE = 44 };

/* Volatile: the compiler knows what free means, and would drop some of these. */
static void (*volatile release)(void *) = free;
static void *(*volatile resize)(void *, size_t) = realloc;
static volatile char sink;

static size_t page(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* Whether a block of a size that no class has is a guarded one: it has as many bytes. */
static int is_guarded(void *block, size_t size) { return malloc_usable_size(block) == size; }

/* A guarded block at the end of its page, or at its start. */
static volatile char *guarded(size_t size, int at_end) {
    for (int i = 0; i < 100; i++) {
        char *block = malloc(size);
        int is_at_start = (uintptr_t)block % page() == 0;
        if (is_guarded(block, size) && is_at_start == !at_end) return block;
    }
    _exit(9);
}

static void overflow_write(void) { guarded(99, 1)[112] = 1; }
static void overflow_read(void) { sink = guarded(99, 1)[200]; }
static void overflow_slack(void) {
    volatile char *block = guarded(99, 1);
    block[99] = 0;
    release((char *)block);
}
static void overflow_start(void) {
    volatile char *block = guarded(99, 0);
    block[120] = 1;
    release((char *)block);
}
static void underflow_write(void) { guarded(99, 0)[-1] = 1; }
static void underflow_end(void) {
    volatile char *block = guarded(99, 1);
    block[-8] = 1;
    resize((char *)block, 1000);
}
static void after_free_read(void) {
    volatile char *block = guarded(99, 1);
    release((char *)block);
    sink = block[10];
}
static void after_free_write(void) {
    volatile char *block = guarded(99, 0);
    release((char *)block);
    for (int i = 0; i < 200; i++) release(malloc(50));
    block[98] = 1;
}
static void after_realloc(void) {
    volatile char *block = guarded(99, 1);
    memset((char *)block, 7, 99);
    char *moved = resize((char *)block, 50);
    for (int i = 0; i < 50; i++)
        if (moved[i] != 7) _exit(9);
    block[0] = 1;
}
static void twice(void) {
    volatile char *block = guarded(99, 1);
    release((char *)block);
    release((char *)block);
}
static void interior(void) { release((char *)guarded(99, 1) + 16); }
static void beyond_the_page(void) { release((char *)guarded(99, 0) + page() + 8); }
static void resize_after_free(void) {
    volatile char *block = guarded(99, 1);
    release((char *)block);
    resize((char *)block, 10);
}
static void *release_it(void *block) {
    release(block);
    return NULL;
}
static void freed_by_another(void) {
    volatile char *block = guarded(99, 1);
    pthread_t thread;
    if (pthread_create(&thread, NULL, release_it, (char *)block) || pthread_join(thread, NULL)) _exit(9);
    sink = block[0];
}
static void in_a_child(void) {
    volatile char *block = guarded(99, 1);
    pid_t child = fork();
    if (child == 0) {
        volatile char *own = guarded(99, 1);
        release((char *)block);
        release((char *)own);
        sink = block[3];
        _exit(0);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child) _exit(9);
    block[98] = 1; /* It is the parent's still. */
    release((char *)block);
    raise(WIFSIGNALED(status) ? WTERMSIG(status) : SIGILL);
}
static void on_a_small_stack(void) {
    static char stack[8192];
    stack_t small = {.ss_sp = stack, .ss_size = sizeof stack};
    if (sigaltstack(&small, NULL)) _exit(9);
    after_free_read();
}

static void handler(int signal) { _exit(signal == SIGSEGV ? OWN_HANDLER : 9); }
static void set_handler(void) {
    struct sigaction own = {.sa_handler = handler};
    if (sigaction(SIGSEGV, &own, NULL)) _exit(9);
}
static void own_handler_later(void) {
    set_handler();
    after_free_read();
}
static void elsewhere(void) { *(volatile char *)64 = 1; }
static void sent(void) {
    kill(getpid(), SIGSEGV);
    pause();
}

/* Without mprotect, samples are ordinary allocations. */
static void refused(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    volatile char *before = guarded(99, 1);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) _exit(FINE);
    release((char *)before);
    for (int i = 0; i < 2000; i++) {
        char *block = malloc(99);
        if (!block || is_guarded(block, 99)) _exit(9);
        memset(block, 1, 99);
        release(block);
    }
    _exit(FINE);
}

static void *work(void *seed_of) {
    uint64_t seed = (uint64_t)(uintptr_t)seed_of;
    char *blocks[200] = {0};
    size_t sizes[200] = {0};
    for (int i = 0; i < 20000; i++) {
        size_t at = next_random(&seed) % 200, size = next_random(&seed) % 5000;
        if (blocks[at] && differs(blocks[at], sizes[at], at) != sizes[at]) _exit(9);
        if (blocks[at] && size % 3 == 0) {
            size_t kept = size + 1 < sizes[at] ? size + 1 : sizes[at];
            blocks[at] = realloc(blocks[at], size + 1);
            if (differs(blocks[at], kept, at) != kept) _exit(9);
        } else {
            free(blocks[at]);
            size_t align = (size_t)16 << next_random(&seed) % 9;
            blocks[at] = size % 3 == 1 ? calloc(1, size + 1) : aligned_alloc(align, size + 1);
            if (size % 3 == 1)
                for (size_t k = 0; k <= size; k++)
                    if (blocks[at][k]) _exit(9);
            if (size % 3 == 2 && (uintptr_t)blocks[at] % align) _exit(9);
        }
        sizes[at] = size + 1;
        if (malloc_usable_size(blocks[at]) < sizes[at]) _exit(9);
        fill(blocks[at], sizes[at], at);
    }
    for (int i = 0; i < 200; i++) free(blocks[i]);
    return NULL;
}

static void right(void) {
    all_sizes();
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++)
        if (pthread_create(&threads[i], NULL, work, (void *)(i + 1))) _exit(9);
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            work((void *)7);
            _exit(0);
        }
        end_child(child);
    }
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    _exit(FINE);
}

/* A signal, or an exit status and 1000. */
enum { EXIT = 1000 };

static const struct {
    const char *name;
    void (*run)(void);
    int ends_by;
    /* Begin of the report; NULL: there is none. */
    const char *report;
    const char *has;
} cases[] = {
    {"overflow, write", overflow_write, SIGSEGV, "overflow: ", "offset 112 of an allocation of 99 bytes"},
    {"overflow, read", overflow_read, SIGSEGV, "overflow: ", "offset 200 of an allocation of 99 bytes"},
    {"overflow, on the page", overflow_slack, SIGABRT, "overflow: found by free, ", "offset 99 of"},
    {"overflow, at the start", overflow_start, SIGABRT, "overflow: found by free, ", "offset 120 of"},
    {"underflow, write", underflow_write, SIGSEGV, "underflow: ", "offset -1 of an allocation of 99 bytes"},
    {"underflow, on the page", underflow_end, SIGABRT, "underflow: found by free, ", "offset -8 of"},
    {"use after free, read", after_free_read, SIGSEGV, "use after free: ", "offset 10 of an allocation of 99 bytes"},
    {"use after free, write", after_free_write, SIGSEGV, "use after free: ", "offset 98 of"},
    {"use after realloc", after_realloc, SIGSEGV, "use after free: ", "offset 0 of"},
    {"double free", twice, SIGABRT, "double free: free of ", "offset 0 of an allocation of 99 bytes"},
    {"free of block + 16", interior, SIGABRT, "bad free: free of ", "offset 16 of"},
    {"free beyond the page", beyond_the_page, SIGABRT, "bad free: free of ", ""},
    {"realloc after free", resize_after_free, SIGABRT, "double free: realloc of ", "offset 0 of"},
    {"freed by another thread", freed_by_another, SIGSEGV, "use after free: ", "offset 0 of"},
    {"use after free in a child", in_a_child, SIGSEGV, "use after free: ", "offset 3 of"},
    {"use after free on a small signal stack", on_a_small_stack, SIGSEGV, "use after free: ", "offset 10 of"},
    {"own handler later", own_handler_later, EXIT + OWN_HANDLER, NULL, ""},
    {"fault elsewhere", elsewhere, SIGSEGV, NULL, ""},
    {"signal of a process", sent, SIGSEGV, NULL, ""},
    {"mprotect is refused", refused, EXIT + FINE, NULL, ""},
    {"right program", right, EXIT + FINE, NULL, ""},
#ifdef __GLIBC__
    {"own handler before, use after free", after_free_read, EXIT + OWN_HANDLER, "use after free: ", "offset 10 of"},
    {"own handler before, fault elsewhere", elsewhere, EXIT + OWN_HANDLER, NULL, ""},
    {"own handler before, signal of a process", sent, EXIT + OWN_HANDLER, NULL, ""},
#endif
};

#ifdef __GLIBC__
/* Runs before the functions that libraries run at their start. */
static void before_all(int argc, char **argv, char **environment) {
    (void)environment;
    if (argc > 1 && strncmp(argv[1], "own handler before", 18) == 0) set_handler();
}
__attribute__((used, section(".preinit_array"))) static void (*first)(int, char **, char **) = before_all;
#endif

/* Lines of a report that begin as in neap's. */
static int count(const char *text, const char *line) {
    int found = 0;
    for (const char *at = text; (at = strstr(at, line)); at++) found++;
    return found;
}

static void check_case(int number) {
    const char *name = cases[number].name;
    int said;
    pid_t child = fork_heard(&said);
    if (child == 0) {
        execl("/proc/self/exe", "guard", name, NULL);
        _exit(9);
    }
    static char text[65536];
    int status = heard(child, said, text, sizeof text);
    int ended = WIFSIGNALED(status) ? WTERMSIG(status) : EXIT + WEXITSTATUS(status);
    CHECK(ended == cases[number].ends_by, "%s: ended by %d, stderr `%s`", name, ended, text);
    const char *report = cases[number].report;
    if (!report) {
        CHECK(!text[0], "%s: stderr `%s`", name, text);
        return;
    }
    char *end = strchr(text, '\n');
    CHECK(strncmp(text, "neap: ", 6) == 0 && strncmp(text + 6, report, strlen(report)) == 0 && end, "%s: stderr `%s`",
          name, text);
    *end = 0;
    CHECK(strstr(text, cases[number].has), "%s: no `%s` in `%s`", name, cases[number].has, text);
    *end = '\n';
    CHECK(count(text, "\nneap: allocated by thread ") == 1, "%s: stderr `%s`", name, text);
    int is_freed = count(text, "\nneap: freed by thread ");
    int was_freed = strncmp(report, "use after", 9) == 0 || strncmp(report, "double", 6) == 0;
    CHECK(is_freed == was_freed, "%s: stderr `%s`", name, text);
    /* Each stack has the function of the case and main, but for a thread that frees. */
    int calls = count(text, "guard+0x");
    CHECK(calls >= 2 * (2 + was_freed) - 1, "%s: %d calls in `%s`", name, calls, text);
    if (strcmp(name, "freed by another thread") == 0) {
        int access = atoi(strstr(text, "access by thread ") + 17), freed = atoi(strstr(text, "freed by thread ") + 16);
        CHECK(access > 0 && freed > 0 && access != freed, "%s: stderr `%s`", name, text);
    }
}

int main(int argc, char **argv) {
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        if (argc > 1 && strcmp(argv[1], cases[i].name) == 0) {
            cases[i].run();
            _exit(9);
        }
    const char *options = getenv("NEAP");
    char more[1000];
    snprintf(more, sizeof more, "%s%sguard:1", options ? options : "", options && *options ? "," : "");
    CHECK(setenv("NEAP", more, 1) == 0, "setenv");
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) check_case((int)i);
    return finish();
}
