/* Under a limit, neap keeps at most the limit and 4 MiB resident, whatever sizes a program uses
 * in turn, with one thread and with several, and still hands out most of it. Starts itself again
 * under each limit. */
#include "check.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define MIB (1 << 20)
#define MOST_THREADS 8

struct block {
    struct block *next;
};

static long limit, most;
static int threads;
static size_t size;
static atomic_long payload;
static pthread_barrier_t barrier;

/* Resident bytes of the process; allocates nothing. The kernel's counts, not a walk of the page
 * tables: during a walk, other threads release memory and take other memory. */
static long resident(void) {
    char text[128] = {0};
    int file = open("/proc/self/statm", O_RDONLY);
    CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0, "statm");
    close(file);
    return atol(strchr(text, ' ')) * sysconf(_SC_PAGESIZE);
}

/* Allocates blocks of one size until there are no more, and frees them, together with the other
 * threads. */
static void fill_up(int is_first) {
    struct block *blocks = NULL;
    long bytes = 0, usable = 0, looked = 0, peak = 0;
    for (struct block *block; (block = malloc(size)) != NULL; blocks = block) {
        memset(block, 1, size);
        block->next = blocks;
        bytes += (long)size;
        usable += (long)malloc_usable_size(block);
        if (is_first && bytes - looked >= MIB / 16) {
            long now = resident();
            if (now > peak) peak = now;
            looked = bytes;
        }
    }
    CHECK(peak <= most, "%d threads, blocks of %zu bytes: %ld KiB resident, at most %ld expected", threads, size,
          peak >> 10, most >> 10);
    /* A random size may use little of its block. */
    atomic_fetch_add(&payload, threads == 1 ? bytes : usable);
    pthread_barrier_wait(&barrier);
    while (blocks != NULL) {
        struct block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
    pthread_barrier_wait(&barrier);
}

static void *follow(void *unused) {
    for (;;) {
        pthread_barrier_wait(&barrier);
        if (size == 0) return unused;
        fill_up(0);
    }
}

/* Fills up with each size in turn. */
static void fill_in_turn(int count, const size_t *sizes, int sizes_count) {
    pthread_t others[MOST_THREADS];
    threads = count;
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int other = 1; other < threads; other++)
        CHECK(pthread_create(&others[other], NULL, follow, NULL) == 0, "pthread_create");
    for (int at = 0; at < sizes_count; at++) {
        size = sizes[at];
        payload = 0;
        pthread_barrier_wait(&barrier);
        fill_up(1);
        /* Each thread may miss one block at the end. Several threads leave more in caches. */
        long expected = limit / 100 * (threads == 1 ? 80 : 70) - threads * (long)size;
        CHECK(payload >= expected, "%d threads, blocks of %zu bytes: %ld KiB before the limit refused", threads, size,
              payload >> 10);
    }
    size = 0;
    pthread_barrier_wait(&barrier);
    for (int other = 1; other < threads; other++) pthread_join(others[other], NULL);
    pthread_barrier_destroy(&barrier);
}

int main(int count, char **arguments) {
    if (count == 1) {
        static const int limits[] = {192, 64};
        const char *now = getenv("NEAP");
        for (int at = 0; at < 2; at++) {
            char options[256], mib[16];
            snprintf(options, sizeof options, "%s%slimit:%dm", now != NULL ? now : "", now != NULL ? "," : "",
                     limits[at]);
            snprintf(mib, sizeof mib, "%d", limits[at]);
            pid_t child = fork();
            CHECK(child >= 0, "fork");
            if (child == 0) {
                setenv("NEAP", options, 1);
                execl("/proc/self/exe", arguments[0], mib, (char *)NULL);
                _exit(1);
            }
            int status;
            CHECK(waitpid(child, &status, 0) == child && status == 0, "limit of %d MiB: status %d", limits[at], status);
        }
        puts("ok");
        return 0;
    }
    limit = atol(arguments[1]) * MIB;
    most = resident() + limit + 4 * MIB;
    static const size_t orders[][5] = {
        {64, 1000, 20000, 300000, 16},
        {300000, 16, 20000, 1000, 64},
        {48, 70000, 5000, 1500000, 256},
    };
    for (size_t order = 0; order < sizeof orders / sizeof *orders; order++) fill_in_turn(1, orders[order], 5);
    /* Sizes of 16 B to 2 MiB, as many of each magnitude. */
    unsigned seed = (unsigned)time(NULL) ^ (unsigned)getpid();
    fprintf(stderr, "seed %u\n", seed);
    for (int several = 2; several <= MOST_THREADS; several *= 2) {
        size_t sizes[4];
        for (int at = 0; at < 4; at++) {
            unsigned random = (unsigned)rand_r(&seed);
            size_t magnitude = (size_t)16 << random % 17;
            sizes[at] = magnitude + (size_t)rand_r(&seed) % magnitude;
        }
        fill_in_turn(several, sizes, 4);
    }
    return 0;
}
