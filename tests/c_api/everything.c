/* Every function of neap.h as a C program calls it: from threads, in a signal handler if
 * allowed, in a child of fork, and with invalid arguments. */
#include "../programs/check.h"

#include <neap.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 6, ROUNDS = 100000 };

static neap_counter counter;
static neap_histogram histogram;
static neap_ref shared;
static neap_percpu words;
static atomic_int releases;

static void released(neap_ref *ref, void *argument) {
    CHECK(ref == &shared && argument == &releases, "its own arguments");
    atomic_fetch_add(&releases, 1);
}

static void *work(void *argument) {
    for (int i = 0; i < ROUNDS; i++) {
        neap_counter_add(&counter, 3);
        neap_counter_add(&counter, -2);
        neap_histogram_record(&histogram, (uint64_t)i);
        if (neap_ref_try_get(&shared)) {
            CHECK(atomic_load(&releases) == 0, "released while it is referred to");
            neap_ref_put(&shared);
        }
        _Atomic uint64_t *word = neap_percpu_this_cpu(words);
        atomic_fetch_add_explicit(word, 1, memory_order_relaxed);
        if (i == ROUNDS / 2 && argument) CHECK(neap_ref_kill(&shared) >= 0, "a kill");
    }
    return NULL;
}

static int add_up(void *copy, unsigned cpu, void *argument) {
    CHECK(copy == neap_percpu_ptr(words, cpu), "the copy of CPU %u", cpu);
    *(uint64_t *)argument += *(uint64_t *)copy;
    return 0;
}

static volatile sig_atomic_t signals;

static void on_signal(int number) {
    (void)number;
    int before = errno;
    neap_counter_add(&counter, 1);
    neap_histogram_record(&histogram, 1);
    if (neap_ref_try_get(&shared)) neap_ref_put(&shared);
    if (neap_percpu_this_cpu(words)) signals++;
    errno = before;
}

static void in_threads(void) {
    CHECK(neap_counter_init(&counter, NEAP_NO_OWNER, 32, NEAP_FOREVER) == NEAP_OK, "a counter");
    CHECK(neap_histogram_init(&histogram, NEAP_NO_OWNER, NEAP_FOREVER) == NEAP_OK, "a histogram");
    CHECK(neap_ref_init(&shared, NEAP_NO_OWNER, released, &releases, NEAP_FOREVER) == NEAP_OK, "a reference");
    CHECK(neap_percpu_alloc(&words, NEAP_NO_OWNER, 8, 8, NEAP_FOREVER) == NEAP_OK, "words");
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, i < 2 ? &counter : NULL) == 0, "thread %zu", i);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    struct itimerval often = {.it_interval = {0, 200}, .it_value = {0, 200}}, never = {{0, 0}, {0, 0}};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0, "signals");
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0, "thread %zu", i);
    /* At least one came; else the test proves nothing. */
    while (signals == 0) usleep(1000);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0, "no more signals");
    int64_t expected = (int64_t)THREADS * ROUNDS;
    CHECK(neap_counter_exact(&counter) == expected + signals, "%lld", (long long)neap_counter_exact(&counter));
    CHECK(neap_histogram_count(&histogram) == (uint64_t)(expected + signals), "values");
    uint64_t sum = 0;
    CHECK(neap_percpu_each(words, add_up, &sum) == 0 && sum == (uint64_t)expected, "%llu", (unsigned long long)sum);
    CHECK(neap_ref_is_dead(&shared) && neap_ref_count(&shared) == 0 && releases == 1, "%d releases", releases);
}

static void in_a_child(void) {
    int64_t before = neap_counter_exact(&counter);
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        neap_counter_add(&counter, 10);
        CHECK(neap_counter_exact(&counter) == before + 10, "the child's own");
        neap_owner owner;
        neap_percpu data;
        CHECK(neap_owner_open(&owner) == NEAP_OK, "an owner in the child");
        CHECK(neap_percpu_alloc(&data, owner, NEAP_LARGEST, 4096, NEAP_FOREVER) == NEAP_OK, "memory in the child");
        memset(neap_percpu_this_cpu(data), 1, NEAP_LARGEST);
        size_t bytes;
        CHECK(neap_owner_close(owner, &bytes) == NEAP_OK && bytes == (size_t)NEAP_LARGEST * neap_cpus(), "%zu", bytes);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child's status %#x", (unsigned)status);
    CHECK(neap_counter_exact(&counter) == before, "what a child adds is its own");
}

/* Freed memory is released without another call, or by ticks if neap has no thread. */
static void comes_back(int ticks) {
    enum { MANY = 4000 };
    static neap_percpu data[MANY];
    neap_owner owner;
    neap_usage before, now;
    CHECK(neap_owner_open(&owner) == NEAP_OK && neap_usage_get(&before) == NEAP_OK, "an owner");
    for (int i = 0; i < MANY; i++) CHECK(neap_percpu_alloc(&data[i], owner, 4096, 8, NEAP_FOREVER) == NEAP_OK, "%d", i);
    CHECK(neap_usage_get(&now) == NEAP_OK && now.allocations == before.allocations + MANY, "numbers");
    CHECK(now.populated_bytes >= (uint64_t)MANY * 4096 * neap_cpus(), "%llu", (unsigned long long)now.populated_bytes);
    for (int i = 0; i < MANY; i++) CHECK(neap_percpu_free(data[i]) == NEAP_OK, "%d", i);
    CHECK(neap_percpu_free(data[0]) == NEAP_E_HANDLE, "freed twice");
    uint64_t enough = before.populated_bytes + before.reserve_bytes;
    for (int waits = 0; now.populated_bytes > enough; waits++) {
        CHECK(waits < 2000, "%llu bytes stay of %llu", (unsigned long long)now.populated_bytes, (unsigned long long)enough);
        if (ticks) neap_tick();
        usleep(10000);
        CHECK(neap_usage_get(&now) == NEAP_OK, "numbers");
    }
    CHECK(neap_owner_close(owner, NULL) == NEAP_OK && neap_owner_close(owner, NULL) == NEAP_E_OWNER, "its end");
    neap_release();
}

static void who_cannot_wait(void) {
    static neap_percpu data[4096];
    int got = 0;
    while (got < 4096 && neap_percpu_alloc(&data[got], NEAP_NO_OWNER, 4096, 8, NEAP_NEVER) == NEAP_OK) got++;
    CHECK(got < 4096, "there is an end to what is there");
    neap_counter small;
    int answer = neap_counter_init(&small, NEAP_NO_OWNER, 1, NEAP_NEVER);
    CHECK(answer == NEAP_OK || answer == NEAP_E_WAIT, "%s", neap_error_text(answer));
    if (answer == NEAP_OK) CHECK(neap_counter_destroy(&small) == NEAP_OK, "its end");
    CHECK(neap_percpu_alloc(&data[got], NEAP_NO_OWNER, 4096, 8, INT64_C(10000000000)) == NEAP_OK, "a waiting allocation gets it");
    for (; got >= 0; got--) CHECK(neap_percpu_free(data[got]) == NEAP_OK, "%d", got);
}

static void what_is_none(void) {
    neap_counter none = {{0}};
    neap_counter_add(&none, 1);
    neap_counter_add(NULL, 1);
    CHECK(neap_counter_exact(&none) == 0 && neap_counter_exact(NULL) == 0, "nothing is nothing");
    CHECK(neap_counter_destroy(&none) == NEAP_E_ARGUMENT && neap_ref_kill(NULL) == NEAP_E_ARGUMENT, "errors");
    CHECK(neap_percpu_ptr(0, 0) == NULL && neap_percpu_ptr(words, ~0u) == NULL && neap_percpu_free(0) == NEAP_OK, "no copy");
    CHECK(neap_percpu_alloc(NULL, NEAP_NO_OWNER, 8, 8, NEAP_FOREVER) == NEAP_E_ARGUMENT, "nowhere");
    CHECK(neap_percpu_alloc(&words, UINT64_C(99) << 32, 8, 8, NEAP_FOREVER) == NEAP_E_OWNER, "no owner");
    CHECK(strcmp(neap_version(), NEAP_VERSION) == 0, "header %s, library %s", NEAP_VERSION, neap_version());
}

/* The process's memory by state: sums agree while one thread runs. malloc is counted if it is
 * neap's. */
static void memory_by_state(void) {
    neap_stats before, now;
    CHECK(neap_stats_get(&before, sizeof before) == NEAP_OK, "numbers");
    char *volatile block = malloc(64 << 20);
    CHECK(block && neap_stats_get(&now, sizeof now) == NEAP_OK, "numbers");
    uint64_t grown = now.allocated_bytes - before.allocated_bytes;
    CHECK(grown >= 64 << 20 || grown == 0, "%llu bytes more", (unsigned long long)grown);
    CHECK(now.active_bytes >= now.allocated_bytes && now.resident_bytes >= now.active_bytes, "more in use than there is");
    CHECK(now.mapped_bytes >= now.active_bytes + now.page_list_bytes + now.free_bytes, "more than is mapped");
    CHECK(now.page_bytes == (uint64_t)sysconf(_SC_PAGESIZE) && now.nodes > 0, "constants");
    CHECK(now.percpu_bytes > 0 && now.limit_bytes == NEAP_UNLIMITED, "per-CPU data, and no limit");
    free(block);
    CHECK(neap_stats_get(NULL, sizeof now) == NEAP_E_ARGUMENT && neap_stats_get(&now, 0) == NEAP_E_ARGUMENT, "no place");
}

int main(int argc, char **argv) {
    (void)argv;
    errno = 4711;
    CHECK(neap_cpus() == 0 && neap_percpu_alloc(&words, NEAP_NO_OWNER, 8, 8, NEAP_NEVER) == NEAP_E_WAIT, "nothing yet");
    in_threads();
    in_a_child();
    memory_by_state();
    comes_back(argc > 1);
    who_cannot_wait();
    what_is_none();
    CHECK(neap_ref_destroy(&shared) == NEAP_OK && neap_histogram_destroy(&histogram) == NEAP_OK, "ends");
    CHECK(neap_counter_destroy(&counter) == NEAP_OK && neap_percpu_free(words) == NEAP_OK, "ends");
    return finish();
}
