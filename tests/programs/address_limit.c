/* A process with 256 MiB of address space, or of memory of its own in it, can use most of it,
 * gets ENOMEM at the limit, and goes on after freeing. The limit is set from the start, or
 * later, when address space may have been reserved. */
#include "check.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LIMIT_MIB = 256 };

/* Allocates until the result is NULL and prints how many MiB that were; then frees everything.
 * The blocks form a list. A process that reserved address space before it was limited may get
 * more than the limit: it stops there. */
static size_t until_refused(size_t size, int reserved_before) {
    void **list = NULL;
    size_t count = 0;
    for (;;) {
        errno = 0;
        void **block = malloc(size);
        if (!block) break;
        for (size_t at = 0; at < size; at += 4096) ((char *)block)[at] = 1;
        *block = list;
        list = block;
        if (++count * size > (size_t)LIMIT_MIB << 20) break;
    }
    if (count * size > (size_t)LIMIT_MIB << 20) {
        CHECK(reserved_before, "%zu blocks of %zu bytes are more than the limit", count, size);
    } else {
        CHECK(errno == ENOMEM, "refused, but errno is not ENOMEM");
        errno = 0;
        CHECK(!calloc(1, (size_t)LIMIT_MIB << 20) && errno == ENOMEM, "calloc of the whole limit");
    }
    while (list) {
        void **next = *list;
        free(list);
        list = next;
    }
    return count * size >> 20;
}

static void *small_blocks(void *argument) {
    for (int round = 0; round < 200; round++) {
        void *blocks[100];
        for (int i = 0; i < 100; i++) {
            blocks[i] = malloc((size_t)i * 40);
            CHECK(blocks[i], "block %d of round %d", i, round);
        }
        for (int i = 0; i < 100; i++) free(blocks[i]);
    }
    return argument;
}

static void threads(void) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_t running[8];
    for (int i = 0; i < 8; i++) CHECK(pthread_create(&running[i], &attributes, small_blocks, NULL) == 0, "thread %d", i);
    for (int i = 0; i < 8; i++) pthread_join(running[i], NULL);
}

/* Runs in a child of its own, so that one size does not meet the remains of another. */
static void one_size(size_t size) {
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        for (int round = 0; round < 2; round++) {
            size_t got = until_refused(size, 0);
            CHECK(got >= 96, "round %d: only %zu of %d MiB in blocks of %zu", round, got, LIMIT_MIB, size);
        }
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "blocks of %zu: status %#x", size, (unsigned)status);
}

static void inside(void) {
    const size_t sizes[] = {16, 100, 1000, 4096, 65536, 1 << 20, 5 << 20};
    for (int i = 0; i < 7; i++) one_size(sizes[i]);
    threads();
    /* Mixed: cached memory of one size may be missing for another, but nothing crashes. */
    for (int i = 0; i < 7; i++) until_refused(sizes[i], 0);
}

static void in_child(int resource, const char *program, const char *what) {
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        struct rlimit space = {(rlim_t)LIMIT_MIB << 20, (rlim_t)LIMIT_MIB << 20};
        CHECK(setrlimit(resource, &space) == 0, "setrlimit");
        if (program) {
            execl(program, program, "inside", (char *)NULL);
            CHECK(0, "exec of %s", program);
        }
        /* The rest depends on what was reserved before; only the manner of refusal is checked. */
        until_refused(1 << 20, 1);
        until_refused(3000, 1);
        small_blocks(NULL);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "%s: status %#x", what, (unsigned)status);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        inside();
        return 0;
    }
    free(malloc(1000));
    in_child(RLIMIT_AS, argv[0], "address space limited from the start");
    in_child(RLIMIT_AS, NULL, "address space limited later");
    in_child(RLIMIT_DATA, argv[0], "data limited from the start");
    in_child(RLIMIT_DATA, NULL, "data limited later");
    return finish();
}
