/* Holds memory in known functions, by the first thread and by another, for a profile of it. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCKS = 2000, BYTES = 8192 };

static char *kept[2][BLOCKS];

__attribute__((noinline)) static void holds_here(int thread) {
    for (int i = 0; i < BLOCKS; i++) {
        kept[thread][i] = malloc(BYTES);
        memset(kept[thread][i], 1, BYTES);
    }
}

__attribute__((noinline)) static void asks_for_it(int thread) {
    holds_here(thread);
    __asm__ volatile("" ::: "memory"); /* no call at the end, which would leave no frame */
}

static void *other_thread(void *none) {
    asks_for_it(1);
    return none;
}

int main(void) {
    sleep(2); /* the profile begins */
    asks_for_it(0);
    pthread_t thread;
    pthread_create(&thread, NULL, other_thread, NULL);
    pthread_join(thread, NULL);
    sleep(1); /* its samples are read */
    return 0;
}
