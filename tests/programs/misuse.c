/* Wrong frees end the process with one line that starts with `neap: ` and names the address,
 * before any block is handed out twice. Each case runs in a child, which must die of SIGABRT. */
#define _GNU_SOURCE
#include "check.h"

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HANDED_OUT_TWICE = 3, NOT_NOTICED = 4 };

/* The address that the line must name, told to the parent through a pipe. */
static int tell;
static void *named(void *address) {
    uintptr_t value = (uintptr_t)address;
    if (write(tell, &value, sizeof value) != sizeof value) _exit(9);
    return address;
}

/* Volatile: the compiler knows what free means and would drop or warn about some of these. */
static void (*volatile release)(void *) = free;
static void *(*volatile resize)(void *, size_t) = realloc;

/* Uses the allocator until every cache has been flushed. Blocks handed out twice while live are
 * the failure that the detection must prevent. */
static void flush_caches(size_t size) {
    enum { BLOCKS = 20000 };
    static void *blocks[BLOCKS];
    int count = size > 65536 ? 200 : BLOCKS;
    for (int i = 0; i < count; i++) {
        blocks[i] = malloc(size);
        if (!blocks[i]) _exit(9);
        *(int *)blocks[i] = i;
    }
    for (int i = 0; i < count; i++)
        if (*(int *)blocks[i] != i) _exit(HANDED_OUT_TWICE);
    for (int i = 0; i < count; i++) free(blocks[i]);
}

static void of_static(void) {
    static char memory[256];
    release(named(memory + 64));
}

static void of_stack(void) {
    char memory[256];
    release(named((void *)(((uintptr_t)memory + 63) & ~(uintptr_t)63)));
}

static void of_mmap(void) {
    void *memory = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    release(named((char *)memory + 4096));
}

static void of_a_small_number(void) { release(named((void *)0x1230)); }

static void resize_of_mmap(void) {
    void *memory = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    resize(named(memory), 100);
}

static void interior(size_t size, size_t offset) {
    char *block = malloc(size);
    release(named(block + offset));
    flush_caches(size);
}
static void interior_1(void) { interior(256, 1); }
static void interior_16(void) { interior(256, 16); }
static void interior_page(void) { interior(40000, 4096); }
static void interior_large(void) { interior(8 << 20, 1 << 20); }
static void interior_resize(void) {
    char *block = malloc(512);
    resize(named(block + 32), 2000);
}

static void twice(size_t size) {
    void *block = malloc(size);
    release(block);
    release(named(block));
    flush_caches(size);
}
static void twice_16(void) { twice(16); }
static void twice_100(void) { twice(100); }
static void twice_4096(void) { twice(4096); }
static void twice_40000(void) { twice(40000); }
static void twice_2m(void) { twice(2 << 20); }
static void twice_64m(void) { twice(64 << 20); }

static void twice_with_others_between(void) {
    void *blocks[64];
    for (int i = 0; i < 64; i++) blocks[i] = malloc(100);
    for (int i = 0; i < 64; i++) release(blocks[i]);
    release(named(blocks[20]));
    flush_caches(100);
}

static void twice_after_flush(void) {
    void *block = malloc(200);
    void *others[5000];
    for (int i = 0; i < 5000; i++) others[i] = malloc(200);
    release(block);
    for (int i = 0; i < 5000; i++) release(others[i]);
    malloc_trim(0);
    release(named(block));
    flush_caches(200);
}

static void *release_it(void *block) {
    release(block);
    return NULL;
}

static void twice_on_two_threads(void) {
    pthread_t thread;
    /*
     * neap makes its own thread with the first one. That allocates, and may get a block that was
     * just freed.
     */
    if (pthread_create(&thread, NULL, release_it, NULL)) _exit(9);
    pthread_join(thread, NULL);
    void *block = malloc(300);
    if (pthread_create(&thread, NULL, release_it, block)) _exit(9);
    pthread_join(thread, NULL);
    release(named(block));
    flush_caches(300);
}

static void resize_after_release(void) {
    void *block = malloc(128);
    release(block);
    resize(named(block), 10000);
    flush_caches(128);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"free of a static", of_static},
    {"free of a stack address", of_stack},
    {"free of mmap's memory", of_mmap},
    {"free of a small number", of_a_small_number},
    {"realloc of mmap's memory", resize_of_mmap},
    {"free of block + 1", interior_1},
    {"free of block + 16", interior_16},
    {"free of a page inside", interior_page},
    {"free of a megabyte inside", interior_large},
    {"realloc of block + 32", interior_resize},
    {"double free of 16 bytes", twice_16},
    {"double free of 100 bytes", twice_100},
    {"double free of 4096 bytes", twice_4096},
    {"double free of 40000 bytes", twice_40000},
    {"double free of 2 MiB", twice_2m},
    {"double free of 64 MiB", twice_64m},
    {"double free with others between", twice_with_others_between},
    {"double free after a flush", twice_after_flush},
    {"double free on two threads", twice_on_two_threads},
    {"realloc after free", resize_after_release},
};

static void check_case(int number) {
    const char *name = cases[number].name;
    int said, address[2];
    CHECK(pipe(address) == 0, "pipe");
    pid_t child = fork_heard(&said);
    if (child == 0) {
        tell = address[1];
        close(address[0]);
        cases[number].run();
        _exit(NOT_NOTICED);
    }
    close(address[1]);
    char text[4096];
    int status = heard(child, said, text, sizeof text);
    uintptr_t wanted = 0;
    CHECK(read(address[0], &wanted, sizeof wanted) == sizeof wanted, "%s: the child named no address", name);
    close(address[0]);
    CHECK(!(WIFEXITED(status) && WEXITSTATUS(status) == HANDED_OUT_TWICE), "%s: a block was handed out twice", name);
    CHECK(!(WIFEXITED(status) && WEXITSTATUS(status) == NOT_NOTICED), "%s: not noticed", name);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "%s: status %#x, stderr `%s`", name, (unsigned)status, text);
    CHECK(strncmp(text, "neap: ", 6) == 0, "%s: stderr `%s`", name, text);
    char *end = strchr(text, '\n');
    CHECK(end && end[1] == 0, "%s: more or less than one line: `%s`", name, text);
    char digits[32];
    snprintf(digits, sizeof digits, "%lx", (unsigned long)wanted);
    CHECK(strstr(text, digits), "%s: the line does not name %s: `%s`", name, digits, text);
}

int main(void) {
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) check_case((int)i);
    return finish();
}
