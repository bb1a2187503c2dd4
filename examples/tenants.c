/*
 * Tenants that come and go, each with counters, a histogram and a block of its own on every CPU; and what becomes of their memory.
 *
 *   cc -o tenants tenants.c -pthread $(pkg-config --cflags --libs neap) && ./tenants
 *
 * Most tenants leave, every eleventh stays. With one allocator for all, those that stay would keep nearly every page; here a tenant is
 * an owner, whose data lies together, so the pages of tenants that left go back to the system.
 */
#include <neap.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TENANTS = 11000, STAYS = 11, THREADS = 4, REQUESTS = 200000, CACHE = 1400 };

typedef struct {
    neap_owner owner;
    neap_counter requests;
    neap_counter bytes;
    neap_percpu cache;
} tenant;

static tenant tenants[TENANTS];
static neap_histogram sizes;

static void check(int answer, const char *what) {
    if (answer < 0) {
        fprintf(stderr, "%s: %s\n", what, neap_error_text(answer));
        exit(EXIT_FAILURE);
    }
}

static void open_tenant(tenant *new_one) {
    check(neap_owner_open(&new_one->owner), "an owner");
    check(neap_counter_init(&new_one->requests, new_one->owner, 64, NEAP_FOREVER), "a counter");
    check(neap_counter_init(&new_one->bytes, new_one->owner, 1 << 20, NEAP_FOREVER), "a counter");
    check(neap_percpu_alloc(&new_one->cache, new_one->owner, CACHE, 64, NEAP_FOREVER), "a cache on every CPU");
}

/* One free for all that the tenant has; its counters go with it. */
static void close_tenant(tenant *old_one) {
    check(neap_owner_close(old_one->owner, NULL), "the end of an owner");
    *old_one = (tenant){0};
}

static void *serve(void *argument) {
    unsigned state = 1 + (unsigned)(size_t)argument;
    for (int i = 0; i < REQUESTS; i++) {
        state = state * 1664525u + 1013904223u;
        tenant *of = &tenants[state >> 8 & 1023];
        int64_t length = (state >> 20) + 1;
        /* Neither takes a lock, nor writes to memory that another CPU uses. */
        neap_counter_add(&of->requests, 1);
        neap_counter_add(&of->bytes, length);
        neap_histogram_record(&sizes, (uint64_t)length);
    }
    return NULL;
}

static double populated(void) {
    neap_usage usage;
    check(neap_usage_get(&usage), "numbers");
    return (double)usage.populated_bytes / 1024;
}

int main(void) {
    check(neap_histogram_init(&sizes, NEAP_NO_OWNER, NEAP_FOREVER), "a histogram");
    double before = populated();
    for (int i = 0; i < TENANTS; i++) open_tenant(&tenants[i]);
    double full = populated();

    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, serve, (void *)i) != 0) return EXIT_FAILURE;
    for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);

    int64_t requests = 0;
    for (int i = 0; i < TENANTS; i++) requests += neap_counter_exact(&tenants[i].requests);
    uint64_t median = 0;
    if (requests != (int64_t)THREADS * REQUESTS || neap_histogram_count(&sizes) != (uint64_t)requests ||
        !neap_histogram_quantile(&sizes, 500000, &median)) {
        fprintf(stderr, "%lld requests were counted\n", (long long)requests);
        return EXIT_FAILURE;
    }
    printf("%lld requests, half of them up to about %llu bytes\n", (long long)requests, (unsigned long long)median);

    for (int i = 0; i < TENANTS; i++)
        if (i % STAYS != 0) close_tenant(&tenants[i]);
    /* The pages go within a second; a program without neap's thread would call neap_tick(). */
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    double left = populated();
    printf("KiB on %u CPUs: %.0f before, %.0f with %d tenants, %.0f with every %dth\n", neap_cpus(), before, full, TENANTS, left,
           STAYS);
    for (int i = 0; i < TENANTS; i += STAYS) close_tenant(&tenants[i]);
    check(neap_histogram_destroy(&sizes), "the histogram's end");
    return left <= full / 2 ? EXIT_SUCCESS : EXIT_FAILURE;
}
