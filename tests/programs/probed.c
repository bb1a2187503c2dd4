/* Allocations of a known size, which a tracer counts, and a last one, at which it ends. */
#include <stdlib.h>

enum { BLOCKS = 200, BYTES = 100003, LAST = 200003 };

int main(void) {
    void *volatile block;
    for (int i = 0; i < BLOCKS; i++) {
        block = malloc(BYTES);
        free(block);
    }
    block = malloc(LAST);
    free(block);
    return 0;
}
