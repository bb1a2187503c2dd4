/* `signals_and_migration SECONDS`: threads allocate and free as fast as they can, while signals
 * interrupt them and their CPU changes all the time. Handlers do not allocate. Every block keeps
 * its contents and no two overlap. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 4, BLOCKS = 400 };

static atomic_int stop;
static atomic_long signals_seen, operations;
static _Atomic pid_t ids[THREADS];

static void on_signal(int number) {
    /* Some work on the interrupted stack, so that any data there is overwritten. */
    volatile char scratch[512];
    for (unsigned i = 0; i < sizeof scratch; i++) scratch[i] = (char)number;
    atomic_fetch_add(&signals_seen, 1);
}

static void *storm(void *argument) {
    uintptr_t index = (uintptr_t)argument;
    atomic_store(&ids[index], (pid_t)syscall(SYS_gettid));
    void *blocks[BLOCKS] = {NULL};
    size_t length[BLOCKS] = {0};
    uint64_t state = 0xabcdef + index, done = 0;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        int i = (int)(next_random(&state) % BLOCKS);
        uint64_t key = index * BLOCKS + (uint64_t)i;
        if (blocks[i]) CHECK(marked(blocks[i], length[i], key), "thread %d: a block of %zu bytes changed", (int)index, length[i]);
        /* Mostly one size, so that threads meet in the same lists. */
        size_t size = next_random(&state) % 8 ? 64 : random_size(&state) % 20000 + 1;
        if (next_random(&state) % 16 == 0) {
            blocks[i] = realloc(blocks[i], size);
        } else {
            free(blocks[i]);
            blocks[i] = malloc(size);
        }
        CHECK(blocks[i], "%zu bytes", size);
        length[i] = size;
        mark(blocks[i], size, key);
        done++;
    }
    for (int i = 0; i < BLOCKS; i++) free(blocks[i]);
    atomic_fetch_add(&operations, (long)done);
    return NULL;
}

int main(int argc, char **argv) {
    int seconds = argc > 1 ? atoi(argv[1]) : 2;
    CHECK(seconds > 0, "usage: signals_and_migration SECONDS");
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");

    cpu_set_t allowed;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0, "sched_getaffinity");
    int cpus[CPU_SETSIZE], count = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed)) cpus[count++] = cpu;

    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, storm, (void *)i) == 0, "thread");
    struct timespec now, end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += seconds;
    uint64_t state = 31;
    long moves = 0;
    do {
        unsigned i = (unsigned)(next_random(&state) % THREADS);
        CHECK(pthread_kill(threads[i], SIGUSR1) == 0, "pthread_kill");
        pid_t id = atomic_load(&ids[(i + 1) % THREADS]);
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpus[next_random(&state) % (unsigned)count], &one);
        if (id && sched_setaffinity(id, sizeof one, &one) == 0) moves++;
        if (next_random(&state) % 4 == 0) usleep(50);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
    atomic_store(&stop, 1);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    CHECK(signals_seen > 100 && moves > 100 && operations > 1000, "%ld signals, %ld moves, %ld operations", signals_seen, moves, operations);
    return finish();
}
