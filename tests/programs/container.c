/* A program whose memory limit follows its container (`limit:auto`). `cargo xtask smoke` runs it in
 * control groups of version 1, and the virtual machine of `cargo xtask vm` in those of version 2.
 *
 *   container fill THREADS LEAST MOST   allocates until malloc fails, which it must between LEAST
 *                                       and MOST MiB
 *   container keep SIZE LEAST MOST FILE frees SIZE MiB that malloc is told to keep, writes "keeps"
 *                                       to FILE, and waits until at most MOST MiB are left; a
 *                                       second later at least LEAST must be */
#include "check.h"

#include <malloc.h>
#include <pthread.h>

enum { BLOCK = 100000 };

static void *waits(void *argument) {
    pause();
    return argument;
}

static void fill_up(int threads, long least, long most) {
    pthread_t thread;
    for (int i = 1; i < threads; i++) CHECK(pthread_create(&thread, NULL, waits, NULL) == 0, "thread %d", i);
    long bytes = 0;
    char *block;
    while ((block = malloc(BLOCK)) && bytes >> 20 <= most) {
        memset(block, 1, BLOCK);
        bytes += BLOCK;
    }
    CHECK(bytes >> 20 >= least && bytes >> 20 <= most, "malloc gave %ld MiB, not %ld to %ld", bytes >> 20, least, most);
}

/* Resident MiB of the process. */
static long resident(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%*d %ld", &pages) == 1, "/proc/self/statm");
    fclose(file);
    return pages * sysconf(_SC_PAGESIZE) >> 20;
}

static void keep(long size, long least, long most, const char *path) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, waits, NULL) == 0, "a thread");
    CHECK(mallopt(M_TRIM_THRESHOLD, 1 << 30) == 1, "mallopt");
    long count = (size << 20) / BLOCK;
    char **blocks = malloc(count * sizeof *blocks);
    for (long i = 0; i < count; i++) memset(blocks[i] = malloc(BLOCK), 1, BLOCK);
    for (long i = 0; i < count; i++) free(blocks[i]);
    CHECK(resident() > size * 9 / 10, "%ld MiB of %ld are kept", resident(), size);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs("keeps\n", file) >= 0 && fclose(file) == 0, "%s", path);
    /* The caller's time limit ends the wait. */
    while (resident() > most) usleep(100000);
    sleep(1);
    CHECK(resident() >= least && resident() <= most, "%ld MiB are left of %ld to %ld", resident(), least, most);
}

int main(int argc, char **argv) {
    if (argc == 5 && !strcmp(argv[1], "fill")) {
        fill_up(atoi(argv[2]), atol(argv[3]), atol(argv[4]));
    } else {
        CHECK(argc == 6 && !strcmp(argv[1], "keep"), "container fill THREADS LEAST MOST, or keep SIZE LEAST MOST FILE");
        keep(atol(argv[2]), atol(argv[3]), atol(argv[4]), argv[5]);
    }
    return finish();
}
