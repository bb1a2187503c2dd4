/* Threads that the C library does not register for rseq are registered by neap, from their first
 * slow path on. In musl, which unmaps the memory of a detached thread while that runs, they are
 * registered up to a destructor of neap's. A thread that ends by the bare system call is registered
 * to its end. Where the C library has areas, neap registers none. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { THREADS = 3000, SPARE = 64, BYTES = 160 << 10, RAW = 20, STACK = 256 << 10 };

extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const char *gnu_get_libc_version(void) __attribute__((weak));

static int by_neap, musl;
static pthread_key_t late;
static int ended;

/* Whether the kernel has an area of this thread: it accepts no second one. */
static int registered(void) {
    static __thread struct { char bytes[32]; } area __attribute__((aligned(32)));
    const unsigned signature = 0x53053053;
    if (syscall(SYS_rseq, &area, 32, 0, signature) != 0) {
        CHECK(errno == EINVAL, "rseq");
        return 1;
    }
    CHECK(syscall(SYS_rseq, &area, 32, 1, signature) == 0, "unregister");
    return 0;
}

static void expect(int wanted, const char *where) {
    if (by_neap) CHECK(registered() == wanted, "%s: registered: %d", where, !wanted);
}

/* Whether neap's page of numbers says that malloc and free are sequences. */
static int sequences(void) {
    static char text[1 << 16];
    for (int file = 0; file < 1100; file++) {
        char path[50], target[100];
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length < 0) continue;
        target[length] = 0;
        if (!strstr(target, "neap-stat")) continue;
        length = pread(file, text, sizeof text, 0);
        return length > 0 && memmem(text, (size_t)length, "\"slots\":\"rseq\"", 14);
    }
    return 0;
}

static void use(void) {
    void *blocks[200];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 200; i++) CHECK((blocks[i] = malloc(40 + i)), "block");
        for (int i = 0; i < 200; i++) memset(blocks[i], i, 40 + i);
        for (int i = 0; i < 200; i++) free(blocks[i]);
    }
}

/* Its key is a later one than neap's, so it runs behind neap's destructor, twice. */
static void destroy(void *value) {
    expect(!musl, "a late destructor");
    use();
    expect(!musl, "a late destructor that has allocated");
    if (value == &late) CHECK(pthread_setspecific(late, &ended) == 0, "once more");
    else ended++;
}

static void *one(void *argument) {
    expect(0, "a new thread");
    use();
    expect(1, "a thread that has allocated");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        expect(1, "a child");
        use();
        _exit(0);
    }
    end_child(child);
    CHECK(pthread_setspecific(late, &late) == 0, "a value");
    return argument;
}

/* The child is the first that allocates. */
static void *parent(void *argument) {
    pid_t child = vfork();
    CHECK(child >= 0, "vfork");
    if (child == 0) {
        use();
        _exit(registered() ? 3 : 0);
    }
    end_child(child);
    expect(0, "a parent that has not allocated");
    use();
    expect(1, "a parent that has allocated");
    return argument;
}

/* Not registered while it may be ending, as far as the C library tells. */
static void *uncancelled(void *argument) {
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    use();
    expect(!musl, "a thread without cancellation");
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    use();
    expect(1, "a thread with cancellation");
    return argument;
}

static void run(void *(*body)(void *)) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, NULL) == 0, "a thread");
    CHECK(pthread_join(thread, NULL) == 0, "join");
}

static void *brief(void *argument) {
    use();
    sched_yield();
    return argument;
}

/* Ends by the system call alone, with all signals blocked: no destructor and no other code of the C
 * library runs. The thread is registered until the kernel has ended it. */
static void *raw(void *argument) {
    use();
    expect(1, "a thread before its raw exit");
    sigset_t all;
    CHECK(sigfillset(&all) == 0 && pthread_sigmask(SIG_BLOCK, &all, NULL) == 0, "block");
    use();
    atomic_store((_Atomic int *)argument, (int)syscall(SYS_gettid));
    syscall(SYS_exit, 0);
    return argument;
}

/* Threads with raw exits, on memory of the program's, which keeps their thread-local words. Once
 * the kernel has ended a thread, no byte there changes, and the other threads go on. */
static void raw_exits(void) {
    static _Atomic int ids[RAW];
    static char copy[STACK];
    for (int i = 0; i < RAW; i++) {
        pthread_t thread;
        pthread_attr_t attributes;
        char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(stack != MAP_FAILED && pthread_attr_init(&attributes) == 0, "a stack");
        CHECK(pthread_attr_setstack(&attributes, stack, STACK) == 0, "a stack of the program's");
        CHECK(pthread_create(&thread, &attributes, raw, (void *)&ids[i]) == 0, "thread %d", i);
        int id;
        while (!(id = atomic_load(&ids[i]))) use();
        while (syscall(SYS_tgkill, getpid(), id, 0) == 0) sched_yield();
        memcpy(copy, stack, STACK);
        run(brief);
        use();
        expect(1, "the first thread");
        CHECK(memcmp(copy, stack, STACK) == 0, "the memory of thread %d, which has ended, changed", i);
    }
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        use();
        _exit(0);
    }
    end_child(child);
}

/* Detached threads, whose memory is unmapped while they end. Where it was, others map memory, which
 * stays as it is. */
static void storm(void) {
    static char *spare[SPARE];
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        pthread_attr_t detached;
        CHECK(pthread_attr_init(&detached) == 0 && pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED) == 0, "attributes");
        int error;
        while ((error = pthread_create(&thread, &detached, brief, NULL)) == EAGAIN) usleep(1000);
        CHECK(error == 0, "thread %d", i);
        char **at = &spare[i % SPARE];
        if (*at) {
            for (int byte = 0; byte < BYTES; byte++) CHECK(!(*at)[byte], "byte %d of a new mapping is %d", byte, (*at)[byte]);
            CHECK(munmap(*at, BYTES) == 0, "munmap");
        }
        *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        CHECK(*at != MAP_FAILED, "mmap");
    }
}

int main(void) {
    const char *options = getenv("NEAP");
    use();
    musl = !gnu_get_libc_version;
    by_neap = !&__rseq_offset && getenv("LD_PRELOAD") && !(options && strstr(options, "rseq:off"));
    CHECK(pthread_key_create(&late, destroy) == 0, "a key");
    expect(1, "the first thread");
    if (by_neap) CHECK(sequences(), "malloc and free are no sequences");
    run(one);
    CHECK(ended == 1, "%d last destructors", ended);
    run(parent);
    run(uncancelled);
    raw_exits();
    storm();
    return finish();
}
