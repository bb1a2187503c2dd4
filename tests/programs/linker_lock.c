/* Threads allocate and free within callbacks of dl_iterate_phdr, which hold a lock of the
 * dynamic linker. Meanwhile other threads load a library whose constructor and destructor
 * allocate and free too, make threads, and fork. None of them may hang.
 *
 * To find a process that hangs, its parent counts naps. A clock would also go on while the
 * machine is stopped, or busy with other programs. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>

/* Naps of 10 ms that a moment may take. */
enum { PATIENCE = 6000 };

static atomic_int stop;
/* Shared with the process of a moment: the thread that it waits for, for the message. */
static atomic_int *awaited;
static char library[4096];

static int each(struct dl_phdr_info *info, size_t size, void *data) {
    (void)info, (void)size, (void)data;
    void *blocks[200];
    for (int i = 0; i < 200; i++) memset(blocks[i] = malloc(3000 + i * 100), 1, 100);
    for (int i = 0; i < 200; i++) free(blocks[i]);
    free(memset(malloc(3 << 20), 1, 3 << 20));
    return 0;
}

static void *iterates(void *argument) {
    while (!stop) dl_iterate_phdr(each, NULL);
    return argument;
}

static void *loads(void *argument) {
    while (!stop) {
        void *handle = dlopen(library, RTLD_NOW);
        CHECK(handle, "%s", dlerror());
        dlclose(handle);
    }
    return argument;
}

static void *makes(void *argument) {
    while (!stop) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, (void *(*)(void *))free, malloc(100)) == 0, "a thread");
        pthread_join(thread, NULL);
    }
    return argument;
}

static void *forks(void *argument) {
    while (!stop) {
        pid_t pid = fork();
        CHECK(pid >= 0, "fork");
        if (pid == 0) {
            each(NULL, 0, NULL);
            _exit(0);
        }
        end_child(pid);
        usleep(5000);
    }
    return argument;
}

/* All of them for a moment; the dynamic linker is busy before the first memory comes and goes. */
static void moment(void) {
    void *(*const works[])(void *) = {loads, loads, iterates, iterates, makes, forks};
    enum { COUNT = sizeof works / sizeof *works };
    pthread_t threads[COUNT];
    for (int i = 0; i < COUNT; i++) {
        CHECK(pthread_create(&threads[i], NULL, works[i], NULL) == 0, "thread %d", i);
        if (i == 1) usleep(2000);
    }
    usleep(50000);
    stop = 1;
    for (int i = 0; i < COUNT; i++) {
        *awaited = i;
        pthread_join(threads[i], NULL);
    }
    _exit(0);
}

/* Waits for a moment. One that hangs is killed, with the children that its forks made. */
static void end_moment(pid_t pid) {
    int status = 0;
    pid_t ended = 0;
    for (int nap = 0; ended == 0 && nap < PATIENCE; nap++) {
        ended = waitpid(pid, &status, WNOHANG);
        if (ended == 0) usleep(10000);
    }
    if (ended == 0) kill(-pid, SIGKILL);
    CHECK(ended == pid, "a moment hangs, and waits for its thread %d (-1: makes them)", *awaited);
    CHECK(status == 0, "a moment ended with status %#x", (unsigned)status);
}

int main(int argc, char **argv) {
    CHECK(argc == 2, "usage: linker_lock TIMES");
    snprintf(library, sizeof library, "%s_library.so", argv[0]);
    awaited = mmap(NULL, sizeof *awaited, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(awaited != MAP_FAILED, "a shared page");
    for (int time = 0; time < atoi(argv[1]); time++) {
        *awaited = -1;
        pid_t pid = fork();
        CHECK(pid >= 0, "fork");
        setpgid(pid ? pid : 0, 0);
        if (pid == 0) moment();
        end_moment(pid);
    }
    return finish();
}
