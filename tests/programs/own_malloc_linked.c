/* A library that resizes its program's memory. */
#define _GNU_SOURCE
#include <stdlib.h>

void *library_grows(void *block, size_t count, size_t size) { return reallocarray(block, count, size); }
