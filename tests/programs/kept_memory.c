/* Memory that a program keeps is not released: with a trim threshold of -1, or if all memory is
 * locked, a burst that is used again takes no page fault, however long after. Options without an
 * effect are not accepted. */
#include "check.h"

#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* A burst has 6145 pages, and a chunk 1024: small blocks may take a kept one if there is no
 * fresh one. */
enum { BURST = 24 << 20, FEW = 1100 };

static long faults(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
}

static void burst(void) {
    char *block = malloc(BURST);
    CHECK(block, "%d bytes", BURST);
    memset(block, 1, BURST);
    free(block);
}

/* Calls of the kind that release memory, for some intervals. */
static void rest(void) {
    for (int i = 0; i < 60; i++) {
        for (int size = 3000; size < 60000; size += 3000) free(malloc(size));
        usleep(10000);
    }
}

static void keeps(const char *why) {
    /* Small blocks may take a part of the memory of the first bursts. */
    for (int i = 0; i < 3; i++) {
        burst();
        rest();
    }
    long before = faults();
    burst();
    long taken = faults() - before;
    CHECK(taken < FEW, "%s: %ld faults for memory that was there", why, taken);
}

int main(void) {
    CHECK(mallopt(M_MMAP_THRESHOLD, 1 << 20) == 0, "a threshold for mappings is accepted");
    CHECK(mallopt(M_PERTURB, 1) == 0 && mallopt(-1000, 1) == 0, "an option without effect is accepted");
    CHECK(mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_MMAP_MAX, 1) == 0, "blocks are no mappings of their own");
    CHECK(mallopt(M_ARENA_MAX, 1) == 1, "there is one heap");
    CHECK(mallopt(M_TRIM_THRESHOLD, -1) == 1, "a trim threshold");
    keeps("a threshold of -1");
    CHECK(mallopt(M_TRIM_THRESHOLD, 0) == 1, "no trim threshold");
    malloc_trim(0);
    if (mlockall(MCL_CURRENT | MCL_FUTURE) == 0) keeps("locked memory");
    return finish();
}
