/* The library of linker_lock.c: it allocates and frees when it is loaded and unloaded. */
#include <stdlib.h>
#include <string.h>

static void burst(void) {
    void *blocks[300];
    for (int i = 0; i < 300; i++) blocks[i] = memset(malloc(20000), 1, 20000);
    for (int i = 0; i < 300; i++) free(blocks[i]);
    free(malloc(5 << 20));
}

__attribute__((constructor)) static void comes(void) { burst(); }
__attribute__((destructor)) static void goes(void) { burst(); }
