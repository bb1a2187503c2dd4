/* `burst_idle THREADS MIB LIMIT`: each thread allocates MIB mebibytes in blocks of one size,
 * frees them and waits. 2.5 s later at most LIMIT MiB are resident, with the threads still there
 * and no call made meanwhile. If the environment says that nothing runs in the background, calls
 * release memory, so the main thread does some ordinary work. */
#include "check.h"

#include <pthread.h>
#include <unistd.h>

static pthread_barrier_t full, empty, over;
static size_t block_size, bytes_each;

static long resident_mib(void) {
    long total, resident;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld %ld", &total, &resident) == 2, "/proc/self/statm");
    fclose(file);
    return resident * sysconf(_SC_PAGESIZE) >> 20;
}

static void *burst(void *argument) {
    /* The blocks form a list, so that nothing but the blocks is allocated. */
    void **list = NULL;
    for (size_t got = 0; got < bytes_each; got += block_size) {
        void **block = malloc(block_size);
        CHECK(block, "a block of %zu bytes after %zu", block_size, got);
        for (size_t at = 0; at < block_size; at += 4096) ((char *)block)[at] = 1;
        *block = list;
        list = block;
    }
    pthread_barrier_wait(&full);
    pthread_barrier_wait(&full);
    while (list) {
        void **next = *list;
        free(list);
        list = next;
    }
    pthread_barrier_wait(&empty);
    pthread_barrier_wait(&over);
    return argument;
}

/* A thousand blocks of mixed sizes, 9 MiB or so, allocated and freed. */
static void ordinary_work(uint64_t seed) {
    void *blocks[1000];
    for (int i = 0; i < 1000; i++) {
        size_t size = 1 + next_random(&seed) % (i % 4 ? 2000 : 40000);
        blocks[i] = malloc(size);
        CHECK(blocks[i], "%zu bytes", size);
        *(char *)blocks[i] = 1;
    }
    for (int i = 0; i < 1000; i++) free(blocks[i]);
}

int main(int argc, char **argv) {
    CHECK(argc == 4, "usage: burst_idle THREADS MIB LIMIT");
    unsigned count = (unsigned)atoi(argv[1]);
    bytes_each = (size_t)atoi(argv[2]) << 20;
    long limit = atoi(argv[3]), peak = (long)count * atoi(argv[2]);
    const char *options = getenv("NEAP");
    int calls = options && strstr(options, "background:off");
    /* A call releases 16 MiB at most, and may not fence other CPUs; their stacks then keep
     * slabs. */
    if (calls) limit *= 3;
    const size_t sizes[] = {64, 512, 4096, 32768};
    pthread_t threads[256];
    CHECK(count > 0 && count <= 256, "%u threads", count);
    for (int i = 0; i < 4; i++) {
        block_size = sizes[i];
        pthread_barrier_init(&full, NULL, count + 1);
        pthread_barrier_init(&empty, NULL, count + 1);
        pthread_barrier_init(&over, NULL, count + 1);
        for (unsigned k = 0; k < count; k++) CHECK(pthread_create(&threads[k], NULL, burst, NULL) == 0, "thread %u", k);
        pthread_barrier_wait(&full);
        long during = resident_mib();
        CHECK(during >= peak, "blocks of %zu: only %ld MiB resident while %ld MiB are in use", sizes[i], during, peak);
        pthread_barrier_wait(&full);
        pthread_barrier_wait(&empty);
        for (int pause = 0; pause < 25; pause++) {
            usleep(100000);
            if (calls) ordinary_work((uint64_t)pause + 1);
        }
        long after = resident_mib();
        CHECK(after <= limit, "blocks of %zu: %ld MiB resident 2.5 s after %ld MiB were freed; the limit is %ld", sizes[i], after, during, limit);
        pthread_barrier_wait(&over);
        for (unsigned k = 0; k < count; k++) pthread_join(threads[k], NULL);
    }
    return finish();
}
