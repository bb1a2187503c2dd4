/* Handlers of fork that take a lock, registered before neap's first use. The thread that holds
 * the lock meanwhile may be inside neap. */
#include "../programs/check.h"

#include <neap.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int ends;

static void lock(void) { pthread_mutex_lock(&mutex); }

static void unlock(void) { pthread_mutex_unlock(&mutex); }

static void *work(void *counter) {
    while (!__atomic_load_n(&ends, __ATOMIC_RELAXED)) {
        neap_percpu data;
        lock();
        neap_counter_exact(counter);
        CHECK(neap_percpu_alloc(&data, NEAP_NO_OWNER, 64, 8, NEAP_FOREVER) == NEAP_OK, "64 bytes");
        neap_percpu_free(data);
        unlock();
    }
    return NULL;
}

int main(void) {
    alarm(240);
    CHECK(pthread_atfork(lock, unlock, unlock) == 0, "handlers");
    neap_counter counter;
    CHECK(neap_counter_init(&counter, NEAP_NO_OWNER, 1, NEAP_FOREVER) == NEAP_OK, "a counter");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, &counter) == 0, "a thread");
    for (int i = 0; i < 200; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0, "fork %d", i);
        if (pid == 0) {
            alarm(240);
            neap_counter_add(&counter, 1);
            _exit(neap_counter_exact(&counter) == 1 ? 0 : 1);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0, "child %d ended with status %#x", i, (unsigned)status);
    }
    __atomic_store_n(&ends, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0, "the thread");
    return finish();
}
