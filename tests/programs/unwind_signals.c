/* A profiler's signals while threads allocate and free: each handler unwinds the interrupted
 * code, and must reach the thread's first function. Signals abort restartable sequences, so many
 * of them hit the abort exits. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>
#include <unwind.h>

#ifdef __aarch64__
#define INSTRUCTION(context) ((ucontext_t *)(context))->uc_mcontext.pc
/* Linkage tables of all libraries have no unwind information on arm64. Each entry has four
 * instructions, the last of which is `br x17`. */
static int is_linkage(uintptr_t at) {
    for (int i = 0; i < 4; i++)
        if (((const uint32_t *)at)[i] == 0xd61f0220) return 1;
    return 0;
}
#else
#define INSTRUCTION(context) ((ucontext_t *)(context))->uc_mcontext.gregs[REG_RIP]
#define is_linkage(at) 0
#endif

enum { THREADS = 4, SAMPLES = 2000 };

static atomic_ulong samples, lost;
/* Places of the first that did not reach the end. */
static _Atomic(void *) places[4];

static void *work(void *argument);

static _Unwind_Reason_Code look(struct _Unwind_Context *context, void *argument) {
    if (_Unwind_GetRegionStart(context) != (uintptr_t)work) return _URC_NO_REASON;
    *(int *)argument = 1;
    return _URC_END_OF_STACK;
}

static void on_signal(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    int arrived = 0;
    _Unwind_Backtrace(look, &arrived);
    samples++;
    if (arrived || is_linkage(INSTRUCTION(context))) return;
    unsigned long n = lost++;
    if (n < 4) places[n] = (void *)INSTRUCTION(context);
}

/* Signals are for threads inside the test function, with known stacks. */
static void *work(void *argument) {
    sigset_t profile;
    sigemptyset(&profile);
    sigaddset(&profile, SIGPROF);
    pthread_sigmask(SIG_UNBLOCK, &profile, NULL);
    uint64_t state = 7 + (uintptr_t)argument;
    void *blocks[64] = {NULL};
    while (samples < SAMPLES) {
        for (int step = 0; step < 1000; step++) {
            int i = (int)(next_random(&state) % 64);
            free(blocks[i]);
            size_t size = random_size(&state) % 40000;
            blocks[i] = step % 8 == 0 ? calloc(1, size) : step % 8 == 1 ? realloc(malloc(10), size) : malloc(size);
        }
        sched_yield();
    }
    for (int i = 0; i < 64; i++) free(blocks[i]);
    pthread_sigmask(SIG_BLOCK, &profile, NULL);
    return NULL;
}

int main(void) {
    int nothing = 0;
    _Unwind_Backtrace(look, &nothing); /* Loads what it needs. */
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigset_t profile;
    sigemptyset(&profile);
    sigaddset(&profile, SIGPROF);
    CHECK(sigaction(SIGPROF, &action, NULL) == 0, "handler");
    pthread_sigmask(SIG_BLOCK, &profile, NULL);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0, "thread");
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_PROF, &often, NULL) == 0, "timer");
    /* A timer of processor time fires with the kernel's tick only: more signals by hand. */
    while (samples < SAMPLES) {
        for (int i = 0; i < THREADS; i++) pthread_kill(threads[i], SIGPROF);
        usleep(300);
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0, "join");
    setitimer(ITIMER_PROF, &never, NULL);
    CHECK(lost == 0, "%lu of %lu stacks are lost, the first at %p %p %p %p", lost, samples, places[0], places[1], places[2],
          places[3]);
    return finish();
}
