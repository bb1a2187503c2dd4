/* The library that dlopen_constructor.c loads: it allocates in its constructor, keeps data per
 * thread, and frees in its destructor. */
#include <stdlib.h>
#include <string.h>

static char *kept[1000];
static __thread char per_thread[4000];

__attribute__((constructor)) static void begin(void) {
    for (int i = 0; i < 1000; i++) {
        kept[i] = malloc(16 + (size_t)i);
        if (kept[i]) memset(kept[i], i, 16 + (size_t)i);
    }
}

__attribute__((destructor)) static void end(void) {
    for (int i = 0; i < 1000; i++) free(kept[i]);
}

/* The number of blocks that still hold the data of the constructor. */
int count_kept(void) {
    int good = 0;
    for (int i = 0; i < 1000; i++) {
        int same = kept[i] != NULL;
        for (int k = 0; same && k < 16 + i; k++) same = kept[i][k] == (char)i;
        good += same;
    }
    memset(per_thread, good, sizeof per_thread);
    return good + per_thread[5] - (char)good;
}

/* A block that another object frees, even after this library is gone. */
char *give(const char *text) { return strdup(text); }
