/* A page that the program maps behind any of the allocator's mappings, and an area there, leave
 * it room to grow: a gibibyte is available in every case, none of it overlaps, and the page
 * keeps its contents. */
#define _GNU_SOURCE
#include "check.h"

#include <sys/mman.h>

enum { MOST = 256, BLOCK = 1 << 20, BLOCKS = 1024 };

static unsigned long ends[MOST];

/* Ends of mappings without a name that no other mapping follows at once. */
static int mappings(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps, "/proc/self/maps");
    char line[512];
    int count = 0;
    while (fgets(line, sizeof line, maps) && count < MOST) {
        unsigned long start, end, inode;
        char rights[8];
        if (sscanf(line, "%lx-%lx %7s %*x %*s %lu", &start, &end, rights, &inode) != 4 || inode || strchr(line, '[')) continue;
        if (count > 0 && ends[count - 1] == start) count--;
        ends[count++] = end;
    }
    fclose(maps);
    return count;
}

static void grow_behind(unsigned long end, size_t length) {
    void *want = (void *)end;
    char *foreign = mmap(want, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (foreign == MAP_FAILED) return;
    CHECK(foreign == want, "a page at %p, and not %p", (void *)foreign, want);
    memset(foreign, 77, length);
    static char *blocks[BLOCKS], *small[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(BLOCK);
        small[i] = malloc(100 + i * 8);
        CHECK(blocks[i] && small[i], "block %d, with %zu bytes at %#lx", i, length, end);
        mark(blocks[i], 4096, i);
        blocks[i][BLOCK - 1] = 1;
        mark(small[i], 100 + i * 8, i);
    }
    for (int i = 0; i < BLOCKS; i++) {
        CHECK(marked(blocks[i], 4096, i) && marked(small[i], 100 + i * 8, i), "block %d, behind %#lx", i, end);
        free(blocks[i]);
        free(small[i]);
    }
    for (size_t at = 0; at < length; at++) CHECK(foreign[at] == 77, "byte %zu at %#lx", at, end);
}

int main(void) {
    free(malloc(100));
    int count = mappings();
    CHECK(count > 0, "no mappings");
    for (int i = 0; i < 2 * count; i++) {
        pid_t child = fork();
        CHECK(child >= 0, "fork");
        if (child == 0) {
            grow_behind(ends[i / 2], i % 2 ? 1 << 20 : 4096);
            _exit(0);
        }
        end_child(child);
    }
    return finish();
}
