/* A plugin that is loaded with RTLD_DEEPBIND, as PHP loads its extensions, and the program pass
 * memory to each other. dlopen otherwise behaves as usual: a missing file is an error with a
 * text, and the program itself has a handle. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>

int main(int count, char **arguments) {
    (void)count;
    char path[4096];
    CHECK(!dlopen("./there-is-no-such.so", RTLD_NOW | RTLD_DEEPBIND) && dlerror(), "a file that is not there");
    CHECK(dlopen(NULL, RTLD_LAZY) && dlopen(NULL, RTLD_LAZY | RTLD_DEEPBIND), "the program itself");
    snprintf(path, sizeof path, "%s_library.so", arguments[0]);
    void *plugin = dlopen(path, RTLD_NOW | RTLD_GLOBAL | RTLD_DEEPBIND);
    CHECK(plugin, "%s", dlerror());
    char *(*makes)(const char *) = (char *(*)(const char *))dlsym(plugin, "plugin_makes");
    char *(*grows)(char *, size_t) = (char *(*)(char *, size_t))dlsym(plugin, "plugin_grows");
    void (*frees)(void *) = (void (*)(void *))dlsym(plugin, "plugin_frees");
    CHECK(makes && grows && frees, "the plugin's functions");
    for (size_t size = 10; size < 3000000; size *= 3) {
        char *text = makes("from the plugin");
        CHECK(text && !strcmp(text, "from the plugin"), "%s", text ? text : "no memory");
        text = realloc(text, size + 16);
        CHECK(text && !strcmp(text, "from the plugin"), "grown by the program");
        free(text);
        text = malloc(size);
        CHECK(text, "%zu bytes", size);
        strcpy(text, "program");
        text = grows(text, 2 * size);
        CHECK(text && !strcmp(text, "program"), "grown by the plugin");
        frees(text);
        free(makes("and back"));
        frees(strdup("from the C library"));
    }
    CHECK(dlclose(plugin) == 0, "%s", dlerror());
    return finish();
}
