// A C program with a plugin in C++. The C++ library is visible to the plugin only. Without memory
// the plugin's operator new throws all the same.
#include "check.h"

#include <dlfcn.h>

int main(int count, char **arguments) {
    (void)count;
    char path[4096];
    snprintf(path, sizeof path, "%s_library.so", arguments[0]);
    void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(plugin, "%s", plugin ? "" : dlerror());
    int (*forms)(void) = plugin ? (int (*)(void))dlsym(plugin, "forms_that_do_not_fail") : NULL;
    CHECK(forms, "the plugin's function");
    if (forms) {
        CHECK(!dlsym(RTLD_DEFAULT, "_ZSt9terminatev"), "the C++ library is everybody's");
        for (int round = 0; round < 3; round++) CHECK(forms() == 0, "forms %#x", forms());
    }
    return finish();
}
