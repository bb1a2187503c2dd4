/* A signal handler stops a thread inside malloc for longer than a fork likes to wait: the fork
 * continues when the thread does, and the child has all of malloc. A handler that has
 * interrupted malloc forks itself: the fork does not wait for that thread, and the thread
 * continues in both processes, also while a third thread forks. (The system's own malloc waits
 * for itself there.) */
#include "check.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

enum { TRIES = 200, FORKS = 300, CHILD = 2 };

static volatile sig_atomic_t stopped, gone, forked, was_inside, waited, forks, over;
static int words; /* Where what is written to standard error can be read. */

static void nap(int milliseconds) {
    poll(NULL, 0, milliseconds);
}

/* Stays until the fork is over, or prints that it waits, and then for a while: it must not go
 * on. */
static void stay(int number) {
    (void)number;
    int error = errno;
    stopped = 1;
    for (int i = 0; i < 6000 && !forked && !was_inside; i++) was_inside = poll(&(struct pollfd){.fd = words, .events = POLLIN}, 1, 10) == 1;
    CHECK(was_inside || forked, "a fork waits for ever and does not say so");
    if (was_inside) nap(500);
    waited = !forked;
    gone = 1;
    errno = error;
}

/* A child allocates, and has children of its own. */
static void live(void) {
    alarm(HANG_SECONDS);
    all_sizes();
    pid_t pid = fork();
    all_sizes();
    if (pid == 0) _exit(0);
    CHECK(pid > 0, "fork");
    end_child(pid);
}

static void fork_here(int number) {
    (void)number;
    int error = errno;
    pid_t pid = fork();
    if (pid == 0) over = CHILD;
    if (pid > 0) end_child(pid);
    forks++;
    errno = error;
}

/* Runs of pages have no fast path, so most of the time the thread is inside. */
static void *allocate(void *unused) {
    while (!over) free(malloc(100000));
    if (over == CHILD) {
        live();
        _exit(0);
    }
    return unused;
}

static void *fork_on(void *unused) {
    while (!over) {
        pid_t pid = fork();
        if (pid == 0) _exit(0);
        CHECK(pid > 0, "fork");
        end_child(pid);
    }
    return unused;
}

static void handle(void (*handler)(int)) {
    CHECK(sigaction(SIGUSR1, &(struct sigaction){.sa_handler = handler, .sa_flags = SA_RESTART}, NULL) == 0, "sigaction");
}

int main(int argc, char **argv) {
    /* This thread might wait, with another lock held, for a lock of a handler's thread: a child
     * would never get that one. */
    without_background(argc, argv);
    int ends[2], errors = dup(2);
    CHECK(errors > 2 && pipe(ends) == 0 && dup2(ends[1], 2) == 2, "pipe");
    words = ends[0];
    handle(stay);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, allocate, NULL) == 0, "thread");
    for (int i = 0; i < TRIES && !was_inside; i++) {
        stopped = gone = forked = 0;
        CHECK(pthread_kill(thread, SIGUSR1) == 0, "signal");
        while (!stopped) nap(1);
        pid_t pid = fork();
        forked = 1;
        if (pid == 0) {
            dup2(errors, 2);
            live();
            _exit(0);
        }
        CHECK(pid > 0, "fork");
        end_child(pid);
        while (!gone) nap(1);
    }
    over = 1;
    CHECK(pthread_join(thread, NULL) == 0, "join");
    dup2(errors, 2);
    CHECK(was_inside, "never was the thread inside malloc, or the fork did not say that it waits");
    CHECK(waited, "the fork did not wait for a thread that was inside malloc");

    over = 0;
    handle(fork_here);
    CHECK(pthread_create(&thread, NULL, allocate, NULL) == 0, "thread");
    alarm(HANG_SECONDS);
    pthread_t forking;
    for (int i = 0; i < FORKS; i++) {
        /* From half way on another thread forks, and waits for the thread that the handler has
         * interrupted. */
        if (i == FORKS / 2) CHECK(pthread_create(&forking, NULL, fork_on, NULL) == 0, "thread");
        int before = forks;
        CHECK(pthread_kill(thread, SIGUSR1) == 0, "signal");
        while (forks == before) nap(1);
    }
    over = 1;
    CHECK(pthread_join(thread, NULL) == 0 && pthread_join(forking, NULL) == 0, "join");
    return finish();
}
