/*
 * One cache for several tenants, whose objects are on an LRU list by tenant: the tenant at its limit gives up what it has not used for longest, and
 * what a tenant that is deleted has cached is at once its parent's to give up.
 *
 *   cc -o lists lists.c -pthread $(pkg-config --cflags --libs neap) && ./lists
 *
 * A page has its neap_item inside it, so the list needs no memory for it. A lookup does not move a page on the list, but
 * marks it as used; the list gives such a page a second turn. A page belongs to the table under its tenant's mutex, and
 * to the thread that takes it off the list after that.
 */
#include <neap.h>

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { TENANTS = 2, KEYS = 1024, HOT = 16, ROUNDS = 4000, BYTES = 64 << 10, LIMIT = 8 << 20 };

typedef struct tenant tenant;

typedef struct {
    neap_item item;
    neap_charge charge;
    tenant *of;
    unsigned key;
    bool used;
    char bytes[BYTES];
} page;

struct tenant {
    const char *path;
    neap_group group;
    pthread_mutex_t mutex;
    page *table[KEYS];
    unsigned long hits, misses, evicted, refused;
};

static tenant tenants[TENANTS] = {{.path = "sites/one", .mutex = PTHREAD_MUTEX_INITIALIZER},
                                  {.path = "sites/two", .mutex = PTHREAD_MUTEX_INITIALIZER}};
static neap_list pages;

static void check(int answer, const char *what) {
    if (answer < 0) {
        fprintf(stderr, "%s: %s\n", what, neap_error_text(answer));
        exit(EXIT_FAILURE);
    }
}

static page *page_of(neap_item *item) {
    return (page *)((char *)item - offsetof(page, item));
}

/* Under the list's lock, so the mutex, which others hold while they wait for that one, is only tried. */
static int isolate(neap_item *item, void *argument) {
    page *oldest = page_of(item);
    tenant *of = oldest->of;
    (void)argument;
    if (pthread_mutex_trylock(&of->mutex) != 0) return NEAP_SKIP;
    int verdict = oldest->used ? NEAP_ROTATE : NEAP_REMOVED;
    oldest->used = false;
    if (verdict == NEAP_REMOVED) {
        of->table[oldest->key] = NULL;
        of->evicted++;
    }
    pthread_mutex_unlock(&of->mutex);
    return verdict;
}

/* Without a lock. No other thread knows the page any more. */
static void dispose(neap_item *item, void *argument) {
    page *gone = page_of(item);
    (void)argument;
    check(neap_group_uncharge(&gone->charge), "the end of a charge");
    free(gone);
}

/* The list marks the shrinker when a group gets its first page, so it need not be asked about groups without any. */
static uint64_t count(void *data, const neap_asked *asked) {
    (void)data;
    size_t objects = neap_list_count(&pages, asked->group, asked->node);
    return objects == 0 ? NEAP_EMPTY : objects;
}

static uint64_t scan(void *data, neap_asked *asked) {
    neap_walked walked;
    (void)data;
    if (neap_list_walk(&pages, asked->group, asked->node, asked->to_scan, isolate, dispose, NULL, &walked) < 0) return NEAP_STOP;
    asked->scanned = walked.scanned;
    return walked.removed;
}

/* Looks a page up, and makes it if it is not there: what takes a mutex here holds nothing while it charges. */
static void use(tenant *of, unsigned key) {
    pthread_mutex_lock(&of->mutex);
    page *found = of->table[key];
    if (found != NULL) found->used = true;
    pthread_mutex_unlock(&of->mutex);
    if (found != NULL) {
        of->hits++;
        return;
    }
    of->misses++;
    page *new_one = calloc(1, sizeof *new_one);
    if (new_one == NULL) exit(EXIT_FAILURE);
    if (neap_group_charge(&new_one->charge, of->group, sizeof *new_one, NEAP_INLINE_CHARGE, NULL) < 0) {
        of->refused++;
        free(new_one);
        return;
    }
    new_one->of = of;
    new_one->key = key;
    pthread_mutex_lock(&of->mutex);
    of->table[key] = new_one;
    check(neap_list_add(&pages, of->group, 0, &new_one->item), "a page on the list");
    pthread_mutex_unlock(&of->mutex);
}

/* A few pages are used all the time, and all others in their turn. */
static void *serve(void *argument) {
    tenant *of = argument;
    for (unsigned round = 0; round < ROUNDS; round++) {
        use(of, round % HOT);
        use(of, HOT + round % (KEYS - HOT));
    }
    return NULL;
}

static uint64_t used(neap_group group) {
    uint64_t bytes;
    check(neap_group_used(group, &bytes), "what is used");
    return bytes;
}

int main(void) {
    neap_shrinker shrinker;
    neap_group sites;
    neap_shrinker_spec spec = {.name = "pages", .count = count, .scan = scan, .batch = 16, .flags = NEAP_BY_GROUP | NEAP_INLINE};
    check(neap_shrinker_register(&shrinker, &spec, sizeof spec), "a shrinker");
    check(neap_list_init(&pages, NEAP_BY_GROUP, shrinker), "a list");
    pthread_t threads[TENANTS];
    for (int i = 0; i < TENANTS; i++) {
        check(neap_group_create(tenants[i].path, &tenants[i].group), "a group");
        check(neap_group_set(tenants[i].group, NEAP_MAX, LIMIT, NULL), "a limit");
    }
    check(neap_group_find("sites", &sites), "the group above");
    for (int i = 0; i < TENANTS; i++) {
        if (pthread_create(&threads[i], NULL, serve, &tenants[i]) != 0) return EXIT_FAILURE;
    }
    for (int i = 0; i < TENANTS; i++) pthread_join(threads[i], NULL);

    int wrong = 0;
    for (int i = 0; i < TENANTS; i++) {
        tenant *of = &tenants[i];
        size_t cached = neap_list_count(&pages, of->group, 0);
        printf("%s: %zu pages cached, %lu hits, %lu evicted, %lu refused; %.1f of %.1f MiB used\n", of->path, cached, of->hits,
               of->evicted, of->refused, (double)used(of->group) / (1 << 20), (double)LIMIT / (1 << 20));
        /* Of two uses one is of a page that is used all the time, and stays. */
        wrong += of->refused > 0 || of->evicted == 0 || of->hits < ROUNDS * 9 / 10 || used(of->group) > LIMIT;
    }

    /* What a tenant that is gone has cached is the parent's, and is given up like anything else. */
    size_t cached = neap_list_count(&pages, tenants[0].group, 0);
    check(neap_group_delete(tenants[0].group), "a group's end");
    size_t inherited = neap_list_count(&pages, sites, 0);
    uint64_t before = used(sites);
    neap_reclaimed reclaimed;
    check(neap_reclaim(sites, 4 << 20, NEAP_FOREVER, &reclaimed, sizeof reclaimed), "reclaim");
    printf("%s is deleted: %zu of its %zu pages are its parent's; asked for 4.0 MiB: %llu pages, %.1f MiB\n", tenants[0].path, inherited,
           cached, (unsigned long long)reclaimed.freed, (double)(before - used(sites)) / (1 << 20));
    wrong += inherited != cached || neap_list_count(&pages, sites, 0) >= cached || used(sites) + (4 << 20) > before;

    check(neap_shrinker_unregister(shrinker), "the end of a shrinker");
    for (int i = 0; i < TENANTS; i++) {
        for (int key = 0; key < KEYS; key++) {
            page *left = tenants[i].table[key];
            if (left != NULL && neap_list_del(&pages, &left->item)) dispose(&left->item, NULL);
        }
    }
    wrong += used(sites) != 0;
    check(neap_list_destroy(&pages), "the end of a list");
    return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
