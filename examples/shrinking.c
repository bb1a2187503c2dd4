/*
 * Two tenants with a cache each, in groups with a limit: at the limit the cache shrinks, instead of a charge that is refused, and what
 * one tenant does costs the other nothing.
 *
 *   cc -o shrinking shrinking.c -pthread $(pkg-config --cflags --libs neap) && ./shrinking
 *
 * The cache is an ordinary one: a ring of blocks from malloc, the oldest first, under a mutex. That the callbacks only try the mutex is what
 * lets them run within a charge (NEAP_INLINE): the charging thread may hold it.
 */
#include <neap.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { SLOTS = 4096, BLOCK = 64 << 10, PUTS = 3000, LIMIT = 8 << 20 };

typedef struct {
    void *memory;
    neap_charge charge;
} block;

typedef struct {
    const char *path;
    neap_group group;
    neap_shrinker shrinker;
    pthread_mutex_t mutex;
    block blocks[SLOTS];
    unsigned oldest, count;
    unsigned long evicted, refused;
} cache;

static cache caches[2] = {{.path = "tenants/one", .mutex = PTHREAD_MUTEX_INITIALIZER},
                          {.path = "tenants/two", .mutex = PTHREAD_MUTEX_INITIALIZER}};

static void check(int answer, const char *what) {
    if (answer < 0) {
        fprintf(stderr, "%s: %s\n", what, neap_error_text(answer));
        exit(EXIT_FAILURE);
    }
}

/* The oldest goes. Under the mutex. */
static void drop_one(cache *of) {
    block *old_one = &of->blocks[of->oldest];
    of->oldest = (of->oldest + 1) % SLOTS;
    of->count--;
    free(old_one->memory);
    check(neap_group_uncharge(&old_one->charge), "the end of a charge");
}

static uint64_t count(void *data, const neap_asked *asked) {
    cache *of = data;
    (void)asked;
    if (pthread_mutex_trylock(&of->mutex) != 0) return 0;
    uint64_t objects = of->count;
    pthread_mutex_unlock(&of->mutex);
    return objects;
}

static uint64_t scan(void *data, neap_asked *asked) {
    cache *of = data;
    if (pthread_mutex_trylock(&of->mutex) != 0) return NEAP_STOP;
    uint64_t freed = 0;
    while (freed < asked->to_scan && of->count > 0) {
        drop_one(of);
        freed++;
    }
    of->evicted += freed;
    pthread_mutex_unlock(&of->mutex);
    return freed;
}

static void put(cache *into) {
    block new_one;
    if (neap_group_charge(&new_one.charge, into->group, BLOCK, NEAP_INLINE_CHARGE, NULL) < 0) {
        into->refused++;
        return;
    }
    if ((new_one.memory = malloc(BLOCK)) == NULL) exit(EXIT_FAILURE);
    pthread_mutex_lock(&into->mutex);
    if (into->count == SLOTS) drop_one(into);
    into->blocks[(into->oldest + into->count) % SLOTS] = new_one;
    into->count++;
    pthread_mutex_unlock(&into->mutex);
}

int main(void) {
    for (int i = 0; i < 2; i++) {
        cache *new_one = &caches[i];
        check(neap_group_create(new_one->path, &new_one->group), "a group");
        check(neap_group_set(new_one->group, NEAP_MAX, LIMIT, NULL), "a limit");
        neap_shrinker_spec spec = {.name = "blocks", .count = count, .scan = scan, .data = new_one,
                                   .group = new_one->group, .batch = 8, .flags = NEAP_INLINE};
        check(neap_shrinker_register(&new_one->shrinker, &spec, sizeof spec), "a shrinker");
    }
    /* The second tenant has half of what it may have; the first wants thirty times as much as it may. */
    for (int i = 0; i < LIMIT / BLOCK / 2; i++) put(&caches[1]);
    for (int i = 0; i < PUTS; i++) put(&caches[0]);

    int wrong = 0;
    for (int i = 0; i < 2; i++) {
        neap_group_info info;
        check(neap_group_info_get(caches[i].group, &info, sizeof info), "numbers");
        printf("%s: %u blocks cached, %lu evicted, %lu refused; %.1f of %.1f MiB charged\n", caches[i].path, caches[i].count,
               caches[i].evicted, caches[i].refused, (double)info.charged_bytes / (1 << 20), (double)LIMIT / (1 << 20));
        wrong += caches[i].refused > 0 || info.peak_bytes > LIMIT;
    }
    wrong += caches[1].evicted > 0 || caches[0].evicted == 0;

    /* Any thread may ask for memory back, and say how long that may take. */
    neap_reclaimed reclaimed;
    check(neap_reclaim(caches[0].group, 1 << 20, NEAP_FOREVER, &reclaimed, sizeof reclaimed), "reclaim");
    printf("asked for 1.0 MiB: %llu blocks, %.1f MiB\n", (unsigned long long)reclaimed.freed,
           (double)reclaimed.bytes / (1 << 20));
    wrong += reclaimed.bytes < 1 << 20;

    for (int i = 0; i < 2; i++) {
        check(neap_shrinker_unregister(caches[i].shrinker), "the end of a shrinker");
        while (caches[i].count > 0) drop_one(&caches[i]);
    }
    return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
