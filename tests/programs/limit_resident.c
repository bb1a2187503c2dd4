/* Under a limit, neap keeps at most the limit and 4 MiB resident, whatever sizes a program uses
 * in turn, and still hands out most of it. Starts itself again under a limit. */
#include "check.h"

#include <fcntl.h>

#define LIMIT_MIB 192
#define MIB (1 << 20)

struct block {
    struct block *next;
};

/* Resident bytes of the process; allocates nothing. */
static long resident(void) {
    char text[128] = {0};
    int file = open("/proc/self/statm", O_RDONLY);
    CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0, "statm");
    close(file);
    return atol(strchr(text, ' ')) * sysconf(_SC_PAGESIZE);
}

/* Allocates blocks of one size until there are no more, and frees them. */
static void fill_up(size_t size, long most) {
    struct block *blocks = NULL;
    long payload = 0, peak = 0, count = 0;
    for (struct block *block; (block = malloc(size)) != NULL; blocks = block) {
        memset(block, 1, size);
        block->next = blocks;
        payload += (long)size;
        if (++count % 1024 == 0 || size >= 65536) {
            long now = resident();
            if (now > peak) peak = now;
        }
    }
    CHECK(peak <= most, "blocks of %zu bytes: %ld KiB resident, at most %ld expected", size, peak >> 10, most >> 10);
    CHECK(payload >= (long)LIMIT_MIB * MIB / 100 * 80, "blocks of %zu bytes: %ld KiB before the limit refused", size,
          payload >> 10);
    while (blocks != NULL) {
        struct block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
}

int main(int count, char **arguments) {
    if (count == 1) {
        char options[256];
        const char *now = getenv("NEAP");
        snprintf(options, sizeof options, "%s%slimit:%dm", now != NULL ? now : "", now != NULL ? "," : "", LIMIT_MIB);
        setenv("NEAP", options, 1);
        execl("/proc/self/exe", arguments[0], "limited", (char *)NULL);
        CHECK(0, "execl");
    }
    static const size_t orders[][5] = {
        {64, 1000, 20000, 300000, 16},
        {300000, 16, 20000, 1000, 64},
        {48, 70000, 5000, 1500000, 256},
    };
    const char *options = getenv("NEAP");
    /* Nodes do not see each other's free pages. */
    long slack = options != NULL && strstr(options, "nodes:") != NULL ? 20 : 4;
    long most = resident() + (LIMIT_MIB + slack) * MIB;
    for (size_t order = 0; order < sizeof orders / sizeof *orders; order++)
        for (size_t at = 0; at < 5; at++) fill_up(orders[order][at], most);
    puts("ok");
    return 0;
}
