/* Shared by the self-checking programs: a check that reports an error, a generator of sizes from
 * a seed, and patterns that show when two live blocks overlap. Programs print only `ok` on
 * standard output. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef __GLIBC__
/* Functions that musl lacks, with their constants. A preloaded library that has them serves the
 * program. */
__asm__(".weak malloc_trim, mallopt, pvalloc, __libc_malloc, __libc_calloc, __libc_realloc, __libc_free, __libc_memalign, "
        "__libc_valloc, __libc_pvalloc");
int malloc_trim(size_t);
int mallopt(int, int);
void *pvalloc(size_t);
enum { M_TRIM_THRESHOLD = -1, M_MMAP_THRESHOLD = -3, M_MMAP_MAX = -4, M_PERTURB = -6, M_ARENA_MAX = -8 };
#endif

/* Time after which a child hangs for certain, on a busy machine too. Less than its runner allows. */
enum { HANG_SECONDS = 240 };

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            int error_ = errno;                                                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, " (errno %d)\n", error_);                                                                  \
            _Exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Forks a child that leaves no core file, and whose standard error `heard` reads from `*said`. Returns 0 in it. */
static inline pid_t fork_heard(int *said) {
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        dup2(ends[1], 2);
        close(ends[0]);
    }
    close(ends[1]);
    *said = ends[0];
    return child;
}

/* Reads what a child writes to its end, into `size` bytes. Returns its status. */
static inline int heard(pid_t child, int said, char *text, size_t size) {
    size_t length = 0;
    for (ssize_t got; length < size - 1 && (got = read(said, text + length, size - 1 - length)) > 0;) length += (size_t)got;
    text[length] = 0;
    close(said);
    int status;
    CHECK(waitpid(child, &status, 0) == child, "waitpid");
    return status;
}

/* xorshift: one seed always gives one sequence. */
static inline uint64_t next_random(uint64_t *state) {
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

/* Mostly small sizes, some of a few pages, a few large. */
static inline size_t random_size(uint64_t *state) {
    uint64_t kind = next_random(state) % 1000;
    if (kind < 900) return 1 + next_random(state) % 1024;
    if (kind < 995) return 1 + next_random(state) % 65536;
    return 1 + next_random(state) % (2 << 20);
}

/* A byte of the pattern that a block carries from its first byte to its last. */
static inline unsigned char pattern(uint64_t key, size_t at) {
    return (unsigned char)((key * 167 + at * 31) >> (at & 1));
}

static inline void fill(void *block, size_t size, uint64_t key) {
    unsigned char *bytes = (unsigned char *)block;
    for (size_t i = 0; i < size; i++) bytes[i] = pattern(key, i);
}

/* The first byte that is not the pattern's, or `size`. */
static inline size_t differs(const void *block, size_t size, uint64_t key) {
    const unsigned char *bytes = (const unsigned char *)block;
    size_t i = 0;
    while (i < size && bytes[i] == pattern(key, i)) i++;
    return i;
}

/* Large blocks are marked at both ends and once a page: enough to see an overlap, and faster. */
static inline void mark(void *block, size_t size, uint64_t key) {
    unsigned char *bytes = (unsigned char *)block;
    if (size <= 4096) {
        fill(block, size, key);
        return;
    }
    for (size_t i = 0; i < size; i += 4096) bytes[i] = pattern(key, i);
    bytes[size - 1] = pattern(key, size - 1);
}

static inline int marked(const void *block, size_t size, uint64_t key) {
    const unsigned char *bytes = (const unsigned char *)block;
    if (size <= 4096) return differs(block, size, key) == size;
    for (size_t i = 0; i < size; i += 4096)
        if (bytes[i] != pattern(key, i)) return 0;
    return bytes[size - 1] == pattern(key, size - 1);
}

/* A block of every kind, one after the other. */
static inline void all_sizes(void) {
    for (size_t size = 1; size < 3000000; size += size / 3 + 1) {
        char *block = (char *)malloc(size);
        CHECK(block, "%zu bytes", size);
        block[0] = block[size - 1] = 1;
        free(block);
    }
}

/* Waits for a child, which must succeed. */
static inline void end_child(pid_t pid) {
    int status;
    pid_t ended;
    while ((ended = waitpid(pid, &status, 0)) < 0 && errno == EINTR) {}
    CHECK(ended == pid && status == 0, "a child ended with status %#x", (unsigned)status);
}

/* Runs the program again in a mode where neap has no thread of its own. */
static inline void without_background(int argc, char **argv) {
    const char *options = getenv("NEAP");
    if (argc > 1 || (options && strstr(options, "background:off"))) return;
    char more[1000], again[] = "again", *arguments[] = {argv[0], again, NULL};
    snprintf(more, sizeof more, "%s%sbackground:off", options ? options : "", options && *options ? "," : "");
    CHECK(setenv("NEAP", more, 1) == 0, "setenv");
    execv("/proc/self/exe", arguments);
    CHECK(0, "exec");
}

static inline int finish(void) {
    puts("ok");
    return 0;
}

#endif
