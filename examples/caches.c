/*
 * A cache for each tenant that charges itself to the tenant's memory group, and makes room when the group is full; and a query whose
 * malloc is charged to a group of its own.
 *
 *   cc -o caches caches.c $(pkg-config --cflags --libs neap) && LD_PRELOAD=.../libneap_malloc.so ./caches
 *
 * Without the preloaded library all but the query's memory is counted: then malloc is the C library's, which knows no groups.
 */
#include <neap.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENANTS = 3, ENTRIES = 4096, PUTS = 30000, ROWS = 2000 };

typedef struct {
    void *block;
    neap_charge charge;
} entry;

/* The oldest entry is at `first`, the newest before `end`; both only grow. */
typedef struct {
    neap_group group;
    entry entries[ENTRIES];
    unsigned first, end;
    uint64_t evicted;
} cache;

static cache caches[TENANTS];

static int check(int answer, const char *what) {
    if (answer < 0) {
        fprintf(stderr, "%s: %s\n", what, neap_error_text(answer));
        exit(EXIT_FAILURE);
    }
    return answer;
}

static double kib(uint64_t bytes) { return (double)bytes / 1024; }

static void evict(cache *of) {
    entry *oldest = &of->entries[of->first++ % ENTRIES];
    free(oldest->block);
    check(neap_group_uncharge(&oldest->charge), "an entry's charge");
    of->evicted++;
}

/* Memory is charged before it is there, so a tenant never has more than it may. */
static void put(cache *to, size_t size) {
    entry *newest = &to->entries[to->end % ENTRIES];
    if (to->end - to->first == ENTRIES) evict(to);
    neap_refusal refusal;
    int answer;
    while ((answer = neap_group_charge(&newest->charge, to->group, size, NEAP_REFUSE, &refusal)) == NEAP_E_CHARGE) {
        if (to->first == to->end) {
            /* Nothing of its own to give: another group fills one above it. */
            fprintf(stderr, "no room for %llu bytes\n", (unsigned long long)refusal.need_bytes);
            exit(EXIT_FAILURE);
        }
        evict(to);
    }
    check(answer, "an entry's charge");
    newest->block = malloc(size);
    if (!newest->block) exit(EXIT_FAILURE);
    memset(newest->block, 1, size);
    to->end++;
}

/* The groups below one, and what each has of what it may have. */
static void show(neap_group parent) {
    char path[NEAP_PATH_SIZE];
    for (neap_group child = 0; check(neap_group_next(parent, &child), "a group") > 0;) {
        neap_group_info info;
        uint64_t used;
        check(neap_group_path(child, path, sizeof path), "a path");
        check(neap_group_info_get(child, &info, sizeof info), path);
        check(neap_group_used(child, &used), path);
        printf("%-20s %8.0f KiB", path, kib(used));
        if (info.max_bytes != NEAP_UNLIMITED) {
            printf(" of %5.0f, %llu refused", kib(info.max_bytes), (unsigned long long)info.refused_events);
        }
        putchar('\n');
        show(child);
    }
}

/* All that this thread allocates in here is the query's; it ends with it. */
static uint64_t query(neap_group group) {
    neap_entered entered;
    static char *rows[ROWS];
    uint64_t used;
    check(neap_group_enter(&entered, group), "a query");
    for (int i = 0; i < ROWS; i++) rows[i] = malloc(500);
    check(neap_group_leave(&entered), "a query's end");
    check(neap_group_used(group, &used), "a query");
    for (int i = 0; i < ROWS; i++) free(rows[i]);
    return used;
}

int main(void) {
    char path[NEAP_PATH_SIZE];
    for (int i = 0; i < TENANTS; i++) {
        snprintf(path, sizeof path, "tenants/%d", i);
        check(neap_group_create(path, &caches[i].group), path);
        check(neap_group_set(caches[i].group, NEAP_MAX, UINT64_C(1) << (20 + i), NULL), "a limit");
    }
    neap_group of_query;
    check(neap_group_create("queries/17", &of_query), "a group for a query");

    unsigned state = 1;
    for (int i = 0; i < PUTS; i++) {
        state = state * 1664525u + 1013904223u;
        put(&caches[i % TENANTS], 16 + (state >> 20));
    }
    uint64_t rows = query(of_query);
    show(NEAP_ROOT);
    printf("the query had %.0f KiB%s\n", kib(rows), rows ? "" : ": its malloc is not neap's");

    /* A limit can change at any moment. What is above it then stays, and may be used again, until a thread gives it back. */
    uint64_t used, evicted = caches[2].evicted;
    check(neap_group_set(caches[2].group, NEAP_MAX, 1 << 20, NULL), "a new limit");
    while (check(neap_group_used(caches[2].group, &used), "a tenant") == NEAP_OK && used > 1 << 20) evict(&caches[2]);
    evicted = caches[2].evicted - evicted;
    printf("a quarter of the limit leaves it %.0f KiB and %llu entries fewer\n", kib(used), (unsigned long long)evicted);
    if (evicted == 0) return EXIT_FAILURE;

    for (int i = 0; i < TENANTS; i++) {
        while (caches[i].first != caches[i].end) evict(&caches[i]);
        check(neap_group_used(caches[i].group, &used), "a tenant");
        if (used != 0) return EXIT_FAILURE;
        check(neap_group_delete(caches[i].group), "a tenant's end");
    }
    check(neap_group_delete(of_query), "the query's end");
    check(neap_group_used(NEAP_ROOT, &used), "all groups");
    return used == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
