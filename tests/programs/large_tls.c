/* A program with more thread-local variables than fit a small stack: the C library makes no
 * thread on one. Freed memory must be released all the same, without further calls of the
 * allocator. */
#include "check.h"

#include <unistd.h>

static __thread volatile char large[1 << 20];

static size_t resident_kib(void) {
    size_t pages = 0, resident = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    CHECK(statm && fscanf(statm, "%zu %zu", &pages, &resident) == 2, "/proc/self/statm");
    if (statm) fclose(statm);
    return resident * (size_t)sysconf(_SC_PAGESIZE) / 1024;
}

int main(void) {
    enum { BLOCKS = 1000, SIZE = 60000 };
    static char *blocks[BLOCKS];
    large[sizeof large - 1] = 1;
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(SIZE);
        CHECK(blocks[i], "block %d", i);
        fill(blocks[i], SIZE, i);
    }
    size_t before = resident_kib();
    for (int i = 0; i < BLOCKS; i++) free(blocks[i]);
    size_t after = before;
    const char *options = getenv("NEAP");
    int calls = options && strstr(options, "background:off");
    for (int i = 0; i < 200 && after + 50000 > before; i++) {
        /* No call of the allocator in this time, unless only calls release memory. */
        usleep(100000);
        for (int call = 0; calls && call < 100; call++) free(malloc(SIZE));
        if (i % 50 == 49) after = resident_kib();
    }
    CHECK(after + 50000 <= before, "%zu KiB resident before the blocks were freed, %zu afterwards", before, after);
    return finish();
}
