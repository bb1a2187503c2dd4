/*
 * Queries that wait for room in a pool, and a thread that polls for its events.
 *
 *   cc -o waiting waiting.c -pthread $(pkg-config --cflags --libs neap) && ./waiting
 *
 * Eight threads run queries of 3 MiB in a pool of 8 MiB: two at a time, the others wait, the oldest first. A function is told
 * when the limit changes; an eventfd tells an event loop that a query met the limit.
 */
#include <neap.h>

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { THREADS = 8, QUERIES = 20, MIB = 1 << 20 };

static neap_group pool;

static void check(int answer, const char *what) {
    if (answer < 0) {
        fprintf(stderr, "%s: %s\n", what, neap_error_text(answer));
        exit(EXIT_FAILURE);
    }
}

static void *run(void *argument) {
    for (int i = 0; i < QUERIES; i++) {
        neap_charge memory;
        /* A query that finds no room here is woken when others give room back. */
        check(neap_group_charge_wait(&memory, pool, 3 * MIB, NEAP_FOREVER, NULL), "room in the pool");
        usleep(200);
        check(neap_group_uncharge(&memory), "the end of a query");
    }
    return argument;
}

static void told(void *argument, neap_group group, int event, uint64_t times) {
    (void)group;
    if (event == NEAP_EVENT_LIMIT_CHANGED) __atomic_fetch_add((uint64_t *)argument, times, __ATOMIC_RELAXED);
}

int main(void) {
    check(neap_group_create("pool", &pool), "a group");
    check(neap_group_set(pool, NEAP_MAX, 8 * MIB, NULL), "a limit");
    uint64_t changes = 0;
    neap_listener changed, met;
    int limit_met = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    check(neap_group_subscribe(&changed, pool, 1u << NEAP_EVENT_LIMIT_CHANGED, told, &changes), "a function");
    check(neap_group_subscribe_fd(&met, pool, 1u << NEAP_EVENT_MAX, limit_met), "an eventfd");

    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, run, NULL) != 0) return EXIT_FAILURE;

    /* An event loop would have more to poll for. neap_tick() is for programs without neap's thread. */
    struct pollfd loop = {.fd = limit_met, .events = POLLIN};
    while (poll(&loop, 1, 10) == 0) neap_tick();
    check(neap_group_set(pool, NEAP_MAX, 16 * MIB, NULL), "a larger limit");
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    while (__atomic_load_n(&changes, __ATOMIC_RELAXED) == 0) {
        neap_tick();
        usleep(1000);
    }

    neap_group_info about;
    uint64_t used;
    check(neap_group_info_get(pool, &about, sizeof about), "numbers");
    check(neap_group_used(pool, &used), "what is used");
    printf("%d queries; the limit was met %llu times, at most %llu KiB were used, %llu are left\n", THREADS * QUERIES,
           (unsigned long long)about.max_events, (unsigned long long)about.peak_bytes / 1024, (unsigned long long)used);
    check(neap_group_unsubscribe(&changed), "the end of a listener");
    check(neap_group_unsubscribe(&met), "the end of a listener");
    check(neap_group_delete(pool), "the pool's end");
    close(limit_met);
    return about.peak_bytes <= 16 * MIB && used == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
