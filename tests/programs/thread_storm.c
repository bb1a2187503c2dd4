/* `thread_storm COUNT`: COUNT short threads, eight at a time. Each leaves some blocks for the
 * next thread to free, as a server's connections do. The first quarter fills the caches of all size
 * classes. The rest leaves the resident size as it is, give or take 6 MiB. The address space grows
 * by less than 512 MiB, which the stacks of 7500 threads would exceed. */
#include "check.h"

#include <pthread.h>
#include <unistd.h>

enum { AT_ONCE = 8, LEFT = 16 };

static void *handed_over[AT_ONCE][LEFT];

static void *brief(void *argument) {
    void **left = argument;
    uint64_t state = 0x1234567 + (uintptr_t)left;
    void *blocks[64];
    for (int i = 0; i < 64; i++) {
        blocks[i] = malloc(next_random(&state) % 5000);
        CHECK(blocks[i], "block %d", i);
        *(char *)blocks[i] = 1;
    }
    for (int i = 0; i < 64; i++) free(blocks[i]);
    for (int i = 0; i < LEFT; i++) {
        free(left[i]);
        left[i] = malloc(8 + next_random(&state) % 2000);
        CHECK(left[i], "block to leave");
    }
    return NULL;
}

static void threads(int count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 128 << 10);
    pthread_t running[AT_ONCE];
    for (int done = 0; done < count; done += AT_ONCE) {
        for (int i = 0; i < AT_ONCE; i++)
            CHECK(pthread_create(&running[i], &attributes, brief, handed_over[i]) == 0, "thread %d", done + i);
        for (int i = 0; i < AT_ONCE; i++) CHECK(pthread_join(running[i], NULL) == 0, "end of thread %d", done + i);
    }
    pthread_attr_destroy(&attributes);
}

/* Pages: the address space and its resident part. */
static void footprint(long *total, long *resident) {
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld %ld", total, resident) == 2, "/proc/self/statm");
    fclose(file);
}

int main(int argc, char **argv) {
    int count = argc > 1 ? atoi(argv[1]) : 1000;
    CHECK(count >= 100, "usage: thread_storm COUNT, at least 100");
    long page = sysconf(_SC_PAGESIZE), total[2], resident[2];
    int first = (count / 4 + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    threads(first);
    footprint(&total[0], &resident[0]);
    threads(count - first);
    footprint(&total[1], &resident[1]);
    long grown = (resident[1] - resident[0]) * page >> 20, reserved = (total[1] - total[0]) * page >> 20;
    if (grown > 6) {
        /* Caches are fuller at one moment than at another. What threads leave for good stays. */
        threads(first);
        footprint(&total[1], &resident[1]);
        grown = (resident[1] - resident[0]) * page >> 20;
    }
    CHECK(grown <= 6, "%d threads left %ld MiB more resident than the first %d", count - first, grown, first);
    CHECK(reserved < 512, "%d threads left %ld MiB more address space than the first %d", count - first, reserved, first);
    return finish();
}
