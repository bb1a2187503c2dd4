/* Children made in every way that programs use (posix_spawn, popen, system, vfork with exec),
 * from several threads, while other threads allocate. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static atomic_int stop;

static void *churn(void *argument) {
    uint64_t state = 77 + (uintptr_t)argument;
    while (!atomic_load(&stop)) {
        size_t size = random_size(&state);
        void *block = malloc(size);
        CHECK(block, "%zu bytes", size);
        mark(block, size, size);
        CHECK(marked(block, size, size), "%zu bytes changed", size);
        free(block);
    }
    return NULL;
}

static void wait_for(pid_t child, int expected, const char *how) {
    int status;
    CHECK(waitpid(child, &status, 0) == child, "%s: waitpid", how);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == expected, "%s: status %#x", how, (unsigned)status);
}

static void *start_children(void *argument) {
    for (int i = 0; i < 10; i++) {
        char *arguments[] = {"sh", "-c", "exit 5", NULL};
        pid_t child;
        posix_spawn_file_actions_t actions;
        CHECK(posix_spawn_file_actions_init(&actions) == 0, "file actions");
        CHECK(posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", 0, 0) == 0, "file actions");
        CHECK(posix_spawnp(&child, "sh", &actions, NULL, arguments, environ) == 0, "posix_spawnp");
        posix_spawn_file_actions_destroy(&actions);
        wait_for(child, 5, "posix_spawnp");

        char line[64] = "";
        FILE *pipe = popen("echo from the child", "r");
        CHECK(pipe && fgets(line, sizeof line, pipe), "popen");
        CHECK(strcmp(line, "from the child\n") == 0, "popen gave `%s`", line);
        CHECK(pclose(pipe) == 0, "pclose");

        child = vfork();
        if (child == 0) {
            execl("/bin/sh", "sh", "-c", "exit 6", (char *)NULL);
            _exit(127);
        }
        CHECK(child > 0, "vfork");
        wait_for(child, 6, "vfork");

        int status = system("exit 7");
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7, "system: status %#x", (unsigned)status);
    }
    return argument;
}

int main(void) {
    pthread_t churners[2], starters[3];
    for (uintptr_t i = 0; i < 2; i++) CHECK(pthread_create(&churners[i], NULL, churn, (void *)i) == 0, "thread");
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&starters[i], NULL, start_children, NULL) == 0, "thread");
    for (int i = 0; i < 3; i++) pthread_join(starters[i], NULL);
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) pthread_join(churners[i], NULL);
    return finish();
}
