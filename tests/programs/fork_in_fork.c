/* A signal handler forks, and interrupts forks. Children of the handler continue in it or return
 * from it, into a fork of another process. All of them allocate. With several threads, neap's
 * own among them, the C library itself waits forever there, so neap's thread is switched off. */
#include "check.h"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

static volatile sig_atomic_t forking, nested, returned;

/* Ends a child that hangs; the one timer that there is interrupts it no more. */
static void guard_child(void) {
    CHECK(signal(SIGALRM, SIG_DFL) != SIG_ERR, "signal");
    alarm(HANG_SECONDS);
}

static void handler(int number) {
    (void)number;
    int error = errno;
    int inner = forking;
    pid_t pid = fork();
    if (pid == 0) {
        guard_child();
        /* Every second child that interrupted a fork returns into it. */
        if (inner && nested % 2) {
            returned = 1;
            return;
        }
        if (inner) all_sizes();
        _exit(0);
    }
    nested += inner;
    if (pid > 0) end_child(pid);
    errno = error;
}

int main(int argc, char **argv) {
    without_background(argc, argv);
    /* Enough to copy that most of a fork's time is in the kernel: signals arrive at its end. */
    size_t length = 64 << 20;
    char *memory = malloc(length);
    CHECK(memory, "%zu bytes", length);
    memset(memory, 1, length);
    CHECK(sigaction(SIGALRM, &(struct sigaction){.sa_handler = handler, .sa_flags = SA_RESTART}, NULL) == 0, "sigaction");
    for (int i = 0; i < 20000 && nested < 20; i++) {
        setitimer(ITIMER_REAL, &(struct itimerval){.it_value = {0, 100 + i % 100 * 20}}, NULL);
        forking = 1;
        pid_t pid = fork();
        forking = 0;
        if (returned) {
            all_sizes();
            if (pid > 0) _exit(0);
        }
        if (pid == 0) {
            guard_child();
            all_sizes();
            _exit(0);
        }
        CHECK(pid > 0, "fork %d", i);
        end_child(pid);
    }
    setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
    CHECK(nested > 0, "no signal came during a fork");
    all_sizes();
    free(memory);
    return finish();
}
