/* In a program with one thread, where neap has none either, what a first burst leaves beyond 16 MiB is back with the system when
 * its last free returns, whatever the size of the blocks and the order of the frees. A burst that comes again finds its memory. */
#include "check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { BURST = 96 << 20, MOST = 16 << 20, FEW = BURST / 4096 / 16 };

static int two_nodes;

static long resident(void) {
    char text[128] = "";
    long all, pages = 0;
    int file = open("/proc/self/statm", O_RDONLY);
    CHECK(read(file, text, sizeof text - 1) > 0 && sscanf(text, "%ld %ld", &all, &pages) == 2, "/proc/self/statm");
    close(file);
    return pages * sysconf(_SC_PAGESIZE);
}

static long faults(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
}

/* No memory of malloc's: only blocks are measured. */
static void *table(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    CHECK(memory != MAP_FAILED, "a table");
    return memory;
}

static void bursts(size_t size, int order) {
    size_t count = BURST / size;
    char **blocks = table(count * sizeof *blocks);
    uint32_t *next = table(count * sizeof *next);
    uint64_t seed = 88172645463325252u;
    for (size_t i = 0; i < count; i++) next[i] = order == 1 ? count - 1 - i : i;
    for (size_t i = count - 1; order == 2 && i > 0; i--) {
        size_t other = next_random(&seed) % (i + 1);
        uint32_t moved = next[i];
        next[i] = next[other];
        next[other] = moved;
    }
    long before = resident();
    for (int round = 0; round < (order == 2 ? 1 : 3); round++) {
        long start = faults();
        for (size_t i = 0; i < count; i++) {
            blocks[i] = malloc(size);
            CHECK(blocks[i], "%zu bytes", size);
            for (size_t at = 0; at < size; at += 4096) blocks[i][at] = 1;
        }
        long taken = faults() - start;
        /* What is near one node does not serve the other. */
        CHECK(round < 2 || two_nodes || taken < FEW, "%ld faults in the third burst of %zu bytes", taken, size);
        for (size_t i = 0; i < count; i++) free(blocks[next[i]]);
        long left = resident() - before;
        CHECK(round > 0 || left <= MOST, "%ld KiB left of %zu bytes, order %d", left >> 10, size, order);
    }
    struct stat tasks;
    CHECK(stat("/proc/self/task", &tasks) != 0 || tasks.st_nlink == 3, "%d threads", (int)tasks.st_nlink - 2);
}

int main(int argc, char **argv) {
    without_background(argc, argv);
    two_nodes = getenv("NEAP") && strstr(getenv("NEAP"), "nodes:");
    static const size_t sizes[] = {64, 512, 4000, 30000, 100000, 5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int order = 0; order < 3; order++) {
            /* A process for each, which has had no burst before. */
            pid_t child = fork();
            if (child == 0) {
                bursts(sizes[i], order);
                _exit(0);
            }
            end_child(child);
        }
    }
    return finish();
}
