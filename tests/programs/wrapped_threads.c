/* A program with its own pthread_create, as profilers and collectors have: under its lock it
 * allocates and frees 40 MiB, and calls the next one. The allocator never calls it, and never
 * waits for its lock. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <pthread.h>

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static int foreign;

static void *body(void *argument) {
    for (int i = 0; i < 300; i++) free(malloc(30000));
    usleep(5000);
    return argument;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    static int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    enum { COUNT = 400 };
    char *blocks[COUNT];
    if (start != body) __atomic_add_fetch(&foreign, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&registry);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
    for (int i = 0; i < COUNT; i++) memset(blocks[i] = malloc(100000), 1, 100000);
    for (int i = 0; i < COUNT; i++) free(blocks[i]);
    for (int i = 0; i < COUNT; i++) memset(blocks[i] = malloc(700), 1, 700);
    for (int i = 0; i < COUNT; i++) free(blocks[i]);
    int answer = next(thread, attributes, start, argument);
    pthread_mutex_unlock(&registry);
    return answer;
}

int main(void) {
    alarm(HANG_SECONDS);
    for (int round = 0; round < 5; round++) {
        pthread_t threads[6];
        for (int i = 0; i < 6; i++) CHECK(pthread_create(&threads[i], NULL, body, NULL) == 0, "thread %d", i);
        for (int i = 0; i < 6; i++) pthread_join(threads[i], NULL);
    }
    CHECK(!foreign, "%d threads that the program did not make came through its wrapper", foreign);
    return finish();
}
