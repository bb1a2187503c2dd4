/* realloc keeps the contents: up and down a ladder of sizes, in place or moved, with neighbours
 * in the way, and in random order. A failure prints the seed; `realloc_ladder SEED` repeats it. */
#include "check.h"

static void ladder(unsigned factor_percent, int with_neighbours) {
    size_t size = 1;
    unsigned char *block = malloc(size);
    CHECK(block, "1 byte");
    fill(block, size, 7);
    void *neighbours[200];
    int count = 0;
    while (size < (size_t)(factor_percent < 200 ? 8 : 48) << 20) {
        size_t larger = size * factor_percent / 100 + 1;
        if (with_neighbours && count < 200) neighbours[count++] = malloc(larger);
        block = realloc(block, larger);
        CHECK(block, "to %zu bytes", larger);
        size_t at = differs(block, size, 7);
        CHECK(at == size, "from %zu to %zu bytes, byte %zu", size, larger, at);
        fill(block, larger, 7);
        size = larger;
    }
    while (size > 1) {
        size_t smaller = size * 100 / factor_percent;
        block = realloc(block, smaller);
        CHECK(block, "to %zu bytes", smaller);
        size_t at = differs(block, smaller, 7);
        CHECK(at == smaller, "from %zu down to %zu bytes, byte %zu", size, smaller, at);
        size = smaller;
    }
    free(block);
    while (count > 0) free(neighbours[--count]);
}

static void random_walk(uint64_t seed) {
    enum { BLOCKS = 500, STEPS = 60000 };
    static void *blocks[BLOCKS];
    static size_t length[BLOCKS];
    uint64_t state = seed;
    for (int step = 0; step < STEPS; step++) {
        int i = (int)(next_random(&state) % BLOCKS);
        size_t size = random_size(&state);
        if (blocks[i]) CHECK(marked(blocks[i], length[i], i), "seed %llu, step %d: changed before", (unsigned long long)seed, step);
        void *block = realloc(blocks[i], size);
        CHECK(block, "seed %llu, step %d: to %zu bytes", (unsigned long long)seed, step, size);
        size_t common = blocks[i] ? (length[i] < size ? length[i] : size) : 0;
        if (common <= 4096 && length[i] <= 4096)
            CHECK(differs(block, common, i) == common, "seed %llu, step %d: %zu to %zu bytes", (unsigned long long)seed, step, length[i], size);
        mark(block, size, i);
        blocks[i] = block;
        length[i] = size;
    }
    for (int i = 0; i < BLOCKS; i++) {
        free(blocks[i]);
        blocks[i] = NULL;
        length[i] = 0;
    }
}

int main(int argc, char **argv) {
    if (argc > 1) {
        random_walk(strtoull(argv[1], NULL, 0));
        return finish();
    }
    const unsigned factors[] = {125, 150, 200, 400};
    for (int i = 0; i < 4; i++) {
        ladder(factors[i], 0);
        ladder(factors[i], 1);
    }
    for (uint64_t seed = 1; seed <= 5; seed++) random_walk(seed * 0x9e3779b97f4a7c15);
    return finish();
}
