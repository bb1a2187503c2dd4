/* `producer_consumer PAIRS MESSAGES`: each of PAIRS threads allocates messages; another thread
 * checks, sometimes resizes, and frees them. Memory flows one way only, so it must flow back
 * inside the allocator: the resident size at the end is far below the sum of all allocations. */
#include "check.h"

#include <pthread.h>
#include <unistd.h>

enum { SLOTS = 512 };

struct queue {
    pthread_mutex_t lock;
    pthread_cond_t not_empty, not_full;
    void *messages[SLOTS];
    size_t length[SLOTS];
    unsigned head, tail;
    int total;
};

static void put(struct queue *queue, void *message, size_t length) {
    pthread_mutex_lock(&queue->lock);
    while (queue->tail - queue->head == SLOTS) pthread_cond_wait(&queue->not_full, &queue->lock);
    queue->messages[queue->tail % SLOTS] = message;
    queue->length[queue->tail++ % SLOTS] = length;
    pthread_cond_signal(&queue->not_empty);
    pthread_mutex_unlock(&queue->lock);
}

static void *take(struct queue *queue, size_t *length) {
    pthread_mutex_lock(&queue->lock);
    while (queue->tail == queue->head) pthread_cond_wait(&queue->not_empty, &queue->lock);
    void *message = queue->messages[queue->head % SLOTS];
    *length = queue->length[queue->head++ % SLOTS];
    pthread_cond_signal(&queue->not_full);
    pthread_mutex_unlock(&queue->lock);
    return message;
}

static void *produce(void *argument) {
    struct queue *queue = argument;
    uint64_t state = 5;
    for (int i = 0; i < queue->total; i++) {
        size_t length = 1 + next_random(&state) % (i % 100 == 0 ? 100000 : 600);
        void *message = malloc(length);
        CHECK(message, "message %d of %zu bytes", i, length);
        mark(message, length, (uint64_t)i);
        put(queue, message, length);
    }
    return NULL;
}

static void *consume(void *argument) {
    struct queue *queue = argument;
    for (int i = 0; i < queue->total; i++) {
        size_t length;
        void *message = take(queue, &length);
        CHECK(marked(message, length, (uint64_t)i), "message %d of %zu bytes changed", i, length);
        if (i % 16 == 0 && length <= 600) {
            message = realloc(message, length + 400);
            CHECK(message && marked(message, length, (uint64_t)i), "message %d grew wrong", i);
        }
        free(message);
    }
    return NULL;
}

int main(int argc, char **argv) {
    int pairs = argc > 1 ? atoi(argv[1]) : 2, messages = argc > 2 ? atoi(argv[2]) : 100000;
    CHECK(pairs > 0 && pairs <= 64 && messages > 0, "usage: producer_consumer PAIRS MESSAGES");
    static struct queue queues[64];
    pthread_t threads[128];
    for (int i = 0; i < pairs; i++) {
        pthread_mutex_init(&queues[i].lock, NULL);
        pthread_cond_init(&queues[i].not_empty, NULL);
        pthread_cond_init(&queues[i].not_full, NULL);
        queues[i].total = messages;
        CHECK(pthread_create(&threads[2 * i], NULL, produce, &queues[i]) == 0, "producer %d", i);
        CHECK(pthread_create(&threads[2 * i + 1], NULL, consume, &queues[i]) == 0, "consumer %d", i);
    }
    for (int i = 0; i < 2 * pairs; i++) pthread_join(threads[i], NULL);
    /* About 300 bytes a message and 500 bytes more for the few large ones. */
    long allocated = (long)pairs * messages / 1024 * 800 / 1024, resident, total;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld %ld", &total, &resident) == 2, "/proc/self/statm");
    fclose(file);
    resident = resident * sysconf(_SC_PAGESIZE) >> 20;
    CHECK(resident < 96 || resident < allocated / 4, "%ld MiB resident after %ld MiB of messages", resident, allocated);
    return finish();
}
