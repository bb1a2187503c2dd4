/* neap's own thread does not disturb the program. A process with one thread has none, whatever
 * came and went. A process with several has one of normal policy, on the CPUs that the process
 * was given, with the signals of the C library only, and with the user that the program changes
 * to. With the option against it there is none. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>

/* musl has these functions, but refuses them. */
static int set_policy(int policy, struct sched_param *priority) {
    return (int)syscall(SYS_sched_setscheduler, 0, policy, priority);
}

static int policy_of(int thread) {
    return (int)syscall(SYS_sched_getscheduler, thread);
}

static void burst(void) {
    enum { MANY = 100000 };
    static void *blocks[MANY];
    for (int i = 0; i < MANY; i++) {
        blocks[i] = malloc(1000);
        CHECK(blocks[i], "block %d", i);
        memset(blocks[i], 1, 1000);
    }
    for (int i = 0; i < MANY; i++) free(blocks[i]);
    free(memset(malloc(40 << 20), 1, 40 << 20));
    for (int i = 0; i < 300; i++) free(malloc(5000 + i * 40));
}

/* The ids of the process's threads, and that of neap's among them, or 0. */
static int threads(int *own) {
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder, "/proc/self/task");
    int count = 0;
    *own = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char path[300], name[32] = "";
        if (entry->d_name[0] == '.') continue;
        count++;
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "r");
        if (file && fgets(name, sizeof name, file) && !strcmp(name, "neap\n")) *own = atoi(entry->d_name);
        if (file) fclose(file);
    }
    closedir(folder);
    return count;
}

/* A line of a thread's status, without its name. */
static void status(int thread, const char *key, char *value, size_t length) {
    char path[100], line[300];
    snprintf(path, sizeof path, "/proc/self/task/%d/status", thread);
    FILE *file = fopen(path, "r");
    CHECK(file, "%s", path);
    *value = 0;
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, key, strlen(key))) snprintf(value, length, "%s", line + strlen(key));
    fclose(file);
}

static void *bound(void *argument) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    burst();
    return argument;
}

/* The program's first thread is made by one that has the lowest policy, or the highest if
 * permitted, and one CPU. */
static void settled(int threaded) {
    cpu_set_t before, after;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0, "affinity");
    struct sched_param priority = {.sched_priority = 40}, none = {0};
    int realtime = set_policy(SCHED_FIFO, &priority) == 0;
    pthread_t first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0, "one CPU");
    CHECK(pthread_create(&first, NULL, bound, NULL) == 0, "the first thread");
    CHECK(pthread_join(first, NULL) == 0, "join");
    if (realtime) CHECK(set_policy(SCHED_OTHER, &none) == 0, "ordinary again");
    int own, wait = 0;
    while (threads(&own) > 1 && wait++ < 1000 && !own) usleep(1000);
    if (!threaded) {
        CHECK(threads(&own) == 1, "a thread that is not wanted");
        return;
    }
    CHECK(own, "no thread of neap's in a process that has made one");
    /* It settles after it has got its name. */
    for (wait = 0; wait < 1000; wait++) {
        CHECK(sched_getaffinity(own, sizeof after, &after) == 0, "affinity of neap's thread");
        if (policy_of(own) == SCHED_OTHER && CPU_EQUAL(&before, &after)) break;
        usleep(1000);
    }
    CHECK(policy_of(own) == SCHED_OTHER, "policy %d", policy_of(own));
    CHECK(CPU_EQUAL(&before, &after), "%d CPUs of %d", CPU_COUNT(&after), CPU_COUNT(&before));
    char blocked[100];
    status(own, "SigBlk:", blocked, sizeof blocked);
    unsigned long long mask = strtoull(blocked, NULL, 16), internal = (1ull << (SIGRTMIN - 1)) - (1ull << 31);
    CHECK((mask & internal) == 0, "signals of the C library are blocked: %llx", mask);
    /* All but KILL, STOP and SYS. */
    CHECK((mask | internal) == ~(1ull << 8 | 1ull << 18 | 1ull << 30), "signals of the program are not: %llx", mask);
    if (geteuid() == 0) {
        char user[100];
        CHECK(setuid(65534) == 0, "setuid");
        status(own, "Uid:", user, sizeof user);
        CHECK(strtol(user, NULL, 10) == 65534, "neap's thread has the user %s", user);
    }
}

int main(void) {
    const char *options = getenv("NEAP");
    int own, threaded = getenv("LD_PRELOAD") != NULL && !(options && strstr(options, "background:off"));
    burst();
    usleep(50000);
    CHECK(threads(&own) == 1, "%d threads in a program that has made none", threads(&own));
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        settled(threaded);
        _exit(0);
    }
    end_child(pid);
    settled(threaded);
    pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
        burst();
        usleep(50000);
        CHECK(threads(&own) == 1, "%d threads in a child that has made none", threads(&own));
        _exit(0);
    }
    end_child(pid);
    return finish();
}
