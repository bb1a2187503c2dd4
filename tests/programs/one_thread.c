/* In a program with one thread, where neap has none either, a first burst is released but for 16
 * MiB when its last free returns, for any size of blocks and order of frees. */
#include "check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { BURST = 96 << 20, MOST = 16 << 20 };

static long resident(void) {
    char text[128] = "";
    long all, pages = 0;
    int file = open("/proc/self/statm", O_RDONLY);
    CHECK(read(file, text, sizeof text - 1) > 0 && sscanf(text, "%ld %ld", &all, &pages) == 2, "/proc/self/statm");
    close(file);
    return pages * sysconf(_SC_PAGESIZE);
}

/* Not from malloc: only blocks are measured. */
static void *table(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    CHECK(memory != MAP_FAILED, "a table");
    return memory;
}

static void burst(size_t size, int order) {
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
    for (size_t i = 0; i < count; i++) {
        blocks[i] = malloc(size);
        CHECK(blocks[i], "%zu bytes", size);
        for (size_t at = 0; at < size; at += 4096) blocks[i][at] = 1;
    }
    for (size_t i = 0; i < count; i++) free(blocks[next[i]]);
    long left = resident() - before;
    CHECK(left <= MOST, "%ld KiB left of %zu bytes, order %d", left >> 10, size, order);
    struct stat tasks;
    CHECK(stat("/proc/self/task", &tasks) != 0 || tasks.st_nlink == 3, "%d threads", (int)tasks.st_nlink - 2);
}

int main(int argc, char **argv) {
    without_background(argc, argv);
    static const size_t sizes[] = {64, 512, 4000, 30000, 100000, 5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int order = 0; order < 3; order++) {
            /* A process for each, without an earlier burst. */
            pid_t child = fork();
            if (child == 0) {
                burst(sizes[i], order);
                _exit(0);
            }
            end_child(child);
        }
    }
    return finish();
}
