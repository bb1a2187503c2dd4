/* A program of another C library, musl, that is started with the library preloaded: it allocates
 * from several threads, forks, and frees blocks that its C library has allocated. */
#include "check.h"

#include <pthread.h>

static void *churn(void *argument) {
    uint64_t seed = 1 + (uintptr_t)argument;
    char *held[50] = {0};
    size_t sizes[50] = {0};
    for (int i = 0; i < 20000; i++) {
        int at = i % 50;
        CHECK(!held[at] || marked(held[at], sizes[at], at), "block %d", i);
        free(held[at]);
        sizes[at] = random_size(&seed);
        held[at] = malloc(sizes[at]);
        CHECK(held[at], "%zu bytes", sizes[at]);
        mark(held[at], sizes[at], at);
    }
    for (int i = 0; i < 50; i++) free(held[i]);
    return NULL;
}

int main(void) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, churn, (void *)i) == 0, "thread %zu", (size_t)i);
    for (int round = 0; round < 20; round++) {
        pid_t child = fork();
        CHECK(child >= 0, "fork");
        if (child == 0) {
            all_sizes();
            _exit(0);
        }
        end_child(child);
    }
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    char *line = NULL;
    size_t room = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    CHECK(file && getline(&line, &room, file) > 0, "a line that the C library allocates");
    CHECK((line = realloc(line, 100000)), "grown");
    free(line);
    fclose(file);
    all_sizes();
    return finish();
}
