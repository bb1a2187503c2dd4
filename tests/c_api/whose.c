/* `whose WORD...`: prints the file that the functions of neap.h come from. Fails unless its name
 * contains one of the words. With neap's malloc preloaded, everything must be one instance. */
#include "../programs/check.h"

#include <dlfcn.h>
#include <neap.h>

int main(int argc, char **argv) {
    neap_counter counter;
    CHECK(neap_counter_init(&counter, NEAP_NO_OWNER, 1, NEAP_FOREVER) == NEAP_OK, "a counter");
    /* Two addresses of one library would show that it is half of one and half of another. */
    Dl_info first, second;
    CHECK(dladdr((void *)(uintptr_t)neap_counter_init, &first) && dladdr((void *)(uintptr_t)neap_release, &second), "dladdr");
    CHECK(strcmp(first.dli_fname, second.dli_fname) == 0, "%s and %s", first.dli_fname, second.dli_fname);
    const char *name = strrchr(first.dli_fname, '/');
    name = name ? name + 1 : first.dli_fname;
    for (int i = 1; i < argc; i++)
        if (strncmp(name, argv[i], strlen(argv[i])) == 0) return finish();
    CHECK(0, "they come from %s", first.dli_fname);
}
