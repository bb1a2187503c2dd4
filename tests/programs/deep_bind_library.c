/* A plugin that allocates for the program, frees what the program gave it, and grows it. */
#include <stdlib.h>
#include <string.h>

char *plugin_makes(const char *text) {
    char *copy = malloc(strlen(text) + 1);
    return copy ? strcpy(copy, text) : NULL;
}

char *plugin_grows(char *text, size_t size) { return realloc(text, size); }

void plugin_frees(void *memory) { free(memory); }
