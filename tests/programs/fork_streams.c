/* The first of three threads must get memory for its line, without a deadlock:
 * 1. A thread that reads a line holds its stream's lock.
 * 2. Another one flushes all streams: it holds the lock of their list, and waits for the first.
 * 3. A third one forks, for which the C library takes the list's lock. */
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LINE = 300000 };

static FILE *stream;

static void *read_line(void *unused) {
    (void)unused;
    char *line = NULL;
    size_t room = 0;
    CHECK(getline(&line, &room, stream) == LINE, "a line");
    free(line);
    return NULL;
}

static void *flush_all(void *unused) {
    (void)unused;
    CHECK(fflush(NULL) == 0, "fflush");
    return NULL;
}

static void *fork_once(void *unused) {
    (void)unused;
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        /* The list is usable here. */
        CHECK(fflush(NULL) == 0, "fflush in the child");
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "the child ended with status %#x", (unsigned)status);
    return NULL;
}

int main(void) {
    alarm(HANG_SECONDS);
    int ends[2];
    CHECK(pipe(ends) == 0 && (stream = fdopen(ends[0], "r")), "a pipe");
    void *(*const bodies[])(void *) = {read_line, flush_all, fork_once};
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_create(&threads[i], NULL, bodies[i], NULL) == 0, "thread %d", i);
        /* Until it waits, most likely. */
        usleep(100000);
    }
    static char text[LINE];
    memset(text, 'x', LINE);
    text[LINE - 1] = '\n';
    for (size_t done = 0; done < LINE;) {
        ssize_t written = write(ends[1], text + done, LINE - done);
        CHECK(written > 0, "write");
        done += (size_t)written;
    }
    for (int i = 0; i < 3; i++) CHECK(pthread_join(threads[i], NULL) == 0, "thread %d", i);
    return finish();
}
