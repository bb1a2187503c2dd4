/* A library that allocates in its constructor is loaded and unloaded again and again, from
 * several threads. Blocks cross the border in both directions and outlive it. */
#include "check.h"

#include <dlfcn.h>
#include <pthread.h>

static void *load_and_unload(void *argument) {
    char *gifts[40];
    for (int i = 0; i < 40; i++) {
        void *library = dlopen("./dlopen_constructor_library.so", RTLD_NOW);
        CHECK(library, "%s", dlerror());
        int (*count)(void) = (int (*)(void))dlsym(library, "count_kept");
        char *(*give)(const char *) = (char *(*)(const char *))dlsym(library, "give");
        CHECK(count && give, "%s", dlerror());
        CHECK(count() == 1000, "only %d of 1000 blocks are intact", count());
        gifts[i] = give("kept after the library is gone");
        CHECK(dlclose(library) == 0, "%s", dlerror());
    }
    for (int i = 0; i < 40; i++) {
        CHECK(gifts[i] && strcmp(gifts[i], "kept after the library is gone") == 0, "gift %d", i);
        free(gifts[i]);
    }
    return argument;
}

int main(void) {
    load_and_unload(NULL);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, load_and_unload, NULL) == 0, "thread");
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    return finish();
}
