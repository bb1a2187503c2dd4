/* Steps through malloc and free, and unwinds at each of their instructions to the function here
 * that has called them; its frame must be at its known place. First with restartable sequences
 * that the kernel aborts at every step. Then with ones that complete: the kernel no longer knows
 * the thread's area, and the thread, the only one and bound to a CPU, writes its CPU itself. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unwind.h>

#ifndef SYS_rseq
#define SYS_rseq 334
#endif

static uintptr_t low, high, frame;
static unsigned long steps, lost;
static void *places[4];
/* Number of unwinds from each instruction. */
enum { LOOKS = 16, MOST_STEPS = 200000 };
static unsigned char seen[4 << 20];
static void driver(void);

/* The unwinder's address of a frame is the end of the called function's frame. */
static _Unwind_Reason_Code look(struct _Unwind_Context *context, void *argument) {
    enum { BELOW, IN_DRIVER, ARRIVED } *state = argument;
    if (*state == IN_DRIVER) {
        if (_Unwind_GetCFA(context) == frame) *state = ARRIVED;
        return _URC_END_OF_STACK;
    }
    if (_Unwind_GetRegionStart(context) == (uintptr_t)driver) *state = IN_DRIVER;
    return _URC_NO_REASON;
}

static void on_step(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    uintptr_t at = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    if (at < low || at >= high) return;
    /* The rest of the round runs without steps. */
    if (++steps == MOST_STEPS) ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~0x100;
    unsigned char *times = at - low < sizeof seen ? &seen[at - low] : seen;
    if (*times == LOOKS) return;
    (*times)++;
    int state = 0;
    _Unwind_Backtrace(look, &state);
    if (state != 2 && lost++ < 4) places[lost - 1] = (void *)(at - low);
}

static inline void set_trap(int on) {
    if (on) __asm__ volatile("pushfq\n\torl $0x100, (%%rsp)\n\tpopfq" ::: "memory", "cc");
    else __asm__ volatile("pushfq\n\tandl $~0x100, (%%rsp)\n\tpopfq" ::: "memory", "cc");
}

/* Has a frame pointer, so that its frame is known while flags are on the stack. */
__attribute__((noinline, optimize("no-omit-frame-pointer"))) static void driver(void) {
    void *blocks[40];
    frame = (uintptr_t)__builtin_dwarf_cfa();
    set_trap(1);
    for (int i = 0; i < 40; i++) blocks[i] = i % 4 == 0 ? calloc(1, 100) : malloc(i % 4 == 1 ? 4000 : 16 * i);
    for (int i = 0; i < 40; i += 3) blocks[i] = realloc(blocks[i], 3000);
    for (int i = 0; i < 40; i++) free(blocks[i]);
    free(aligned_alloc(4096, 100));
    free(malloc(100000));
    set_trap(0);
}

/* The part of a mapping with code that contains a function. */
static void find_code(void *function) {
    Dl_info library;
    CHECK(dladdr(function, &library) != 0, "malloc is in no library");
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL, "/proc/self/maps");
    char line[4096], rights[5];
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        CHECK(sscanf(line, "%lx-%lx %4s", &from, &to, rights) == 3, "%s", line);
        if ((uintptr_t)function >= from && (uintptr_t)function < to) low = from, high = to;
    }
    fclose(maps);
    CHECK(low < high, "malloc is nowhere");
}

/* Has the thread write its CPU instead of the kernel; 0: it has no area, or one of another size. */
static int say_cpu(void) {
    ptrdiff_t *offset = dlsym(RTLD_DEFAULT, "__rseq_offset");
    unsigned *size = dlsym(RTLD_DEFAULT, "__rseq_size");
    if (!offset || !size || *size == 0) return 0;
    unsigned cpu;
    cpu_set_t one;
    CPU_ZERO(&one);
    CHECK(syscall(SYS_getcpu, &cpu, NULL, NULL) == 0, "CPU");
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) return 0;
    volatile uint32_t *area = (volatile uint32_t *)((char *)__builtin_thread_pointer() + *offset);
    if (syscall(SYS_rseq, area, *size < 32 ? 32 : *size, 1, 0x53053053) != 0) return 0;
    area[0] = area[1] = cpu;
    return 1;
}

int main(void) {
    int nothing = 0;
    _Unwind_Backtrace(look, &nothing); /* Loads what it needs. */
    find_code(dlsym(RTLD_DEFAULT, "malloc"));
    struct sigaction action = {.sa_sigaction = on_step, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGTRAP, &action, NULL) == 0, "handler");
    for (int round = 0; round < 2; round++) {
        steps = 0;
        if (round == 0 || say_cpu()) {
            driver();
            CHECK(lost == 0, "round %d: %lu of %lu steps are lost, the first at %p %p %p %p of its code", round, lost, steps,
                  places[0], places[1], places[2], places[3]);
            CHECK(steps > 1000, "round %d: only %lu steps", round, steps);
        }
    }
    return finish();
}
