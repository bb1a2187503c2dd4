/* Prints, for the most used functions of the malloc family, the shared object that provides
 * each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int main(void) {
    static const char *const names[] = {"malloc", "calloc",         "realloc",       "free",
                                        "memalign", "posix_memalign", "aligned_alloc", "malloc_usable_size"};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        void *address = dlsym(RTLD_DEFAULT, names[i]);
        Dl_info info;
        if (!address || !dladdr(address, &info)) {
            printf("%s is in nothing\n", names[i]);
            return 1;
        }
        printf("%s is in %s\n", names[i], info.dli_fname);
    }
    return 0;
}
