/* Registers each thread's rseq area as glibc does from 2.41 on: with the thread-local variables,
 * which lie in front of the thread pointer. To be preloaded if the C library was told to
 * register none. At exit it reports on standard error if malloc did not use it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_rseq
#define SYS_rseq 334
#endif

/* As the kernel defines it. */
struct area {
    uint32_t cpu_id_start, cpu_id;
    uint64_t rseq_cs;
    uint32_t flags, more[3];
} __attribute__((aligned(32)));

static __thread volatile struct area area __attribute__((tls_model("initial-exec"))) = {.cpu_id = (uint32_t)-1};

/* The C library's names. */
ptrdiff_t __rseq_offset;
unsigned __rseq_size, __rseq_flags;

/* Whether there is membarrier, without which there are no sequences. Asked at the start: by its
 * end a program may be in a sandbox that has none. */
static int has_membarrier;

static int enter(void) { return (int)syscall(SYS_rseq, &area, sizeof area, 0, 0x53053053); }

__attribute__((constructor)) static void begin(void) {
    if (enter() != 0) {
        /* The kernel or a sandbox has none; anything else is an error of this file. */
        if (errno != ENOSYS && errno != EPERM) fprintf(stderr, "neap: rseq area not registered: %s\n", strerror(errno));
        return;
    }
    __rseq_offset = (ptrdiff_t)((char *)&area - (char *)__builtin_thread_pointer());
    __rseq_size = sizeof area;
    has_membarrier = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0) > 0;
}

struct start {
    void *(*body)(void *);
    void *argument;
};

static void *run(void *argument) {
    struct start start = *(struct start *)argument;
    free(argument);
    if (__rseq_size != 0 && enter() != 0) abort(); /* As the C library does. */
    return start.body(start.argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument) {
    static __typeof__(pthread_create) *next;
    if (!next) next = (__typeof__(pthread_create) *)dlsym(RTLD_NEXT, "pthread_create");
    struct start *start = malloc(sizeof *start);
    if (!start) return EAGAIN;
    *start = (struct start){body, argument};
    int answer = next(thread, attributes, run, start);
    if (answer != 0) free(start);
    return answer;
}

__attribute__((destructor)) static void end(void) {
    /* A program may have a malloc of its own. */
    Dl_info malloc_is;
    const char *preloaded = getenv("LD_PRELOAD");
    if (!preloaded || !dladdr(dlsym(RTLD_DEFAULT, "malloc"), &malloc_is)) return;
    if (strncmp(preloaded, malloc_is.dli_fname, strlen(malloc_is.dli_fname)) != 0) return;
    if (__rseq_size == 0 || !has_membarrier) return;
    for (int i = 0; i < 1000; i++) {
        area.rseq_cs = 0;
        free(malloc(64));
        if (area.rseq_cs != 0) return;
    }
    fprintf(stderr, "neap: rseq area at %td not used\n", __rseq_offset);
}
