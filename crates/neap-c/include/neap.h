/*
 * neap.h: per-CPU data that gives its pages back, memory groups, LRU lists, and caches that shrink. C11 and C++17; `pkg-config --cflags --libs neap` to link.
 *
 * Per-CPU data has one copy for each CPU that the machine may ever have, on cache lines of its own. What belongs together has an
 * owner, whose data shares pages with no other owner's as far as it can: so when an owner goes, pages go with it. What is freed is back
 * with the system within a second, but for a reserve of some pages.
 *
 * Memory groups say who holds what, in a tree, with limits that can change at any moment: for memory of any origin, charged by
 * hand, and for what threads allocate with neap's malloc.
 *
 * Conventions, where a function says nothing else:
 *   - Functions that can fail answer a negative number of enum neap_error, and then nothing has changed. None writes errno.
 *   - Null pointers, handles, owners and groups that are none, and objects that are all zeroes or were destroyed are found and refused;
 *     functions that cannot fail answer 0, false or NULL for them, or do nothing.
 *   - Context: any thread, no signal handler. Functions marked "signal-safe" may be called in both, and never wait.
 *   - A child of fork() has its own copies of everything and may use all of it. A child of vfork() may use nothing.
 *   - Callbacks are called without a lock and may call everything here. They must return: no exception, no longjmp.
 *
 * In a program that runs with libneap_malloc.so preloaded, that library serves these functions as well, so that everything is
 * one instance; both are to be of the same version. Programs that are linked with libneap.a keep an instance of their own.
 *
 * License: MIT OR Apache-2.0.
 */
#ifndef NEAP_H
#define NEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. */
#define NEAP_VERSION "0.1.0"

/* The version of the library. Signal-safe. */
const char *neap_version(void);

/* ---- Errors ---- */

enum neap_error {
    NEAP_OK = 0,
    /* A null pointer, a size of 0 or above NEAP_LARGEST, an alignment that is no power of two up to a page, an object that is none. */
    NEAP_E_ARGUMENT = -1,
    /* There is no such owner: closed, or made up. */
    NEAP_E_OWNER = -2,
    /* The owner, or the group, may not have more. */
    NEAP_E_CHARGE = -3,
    /* It would take longer than the caller can wait. */
    NEAP_E_WAIT = -4,
    /* The address space for per-CPU data, or the table of owners or of groups, is full. */
    NEAP_E_FULL = -5,
    /* The system gave no memory. */
    NEAP_E_MEMORY = -6,
    /* Nothing is allocated there: freed, or made up. */
    NEAP_E_HANDLE = -7,
    /* The system forbids what killing a reference takes (membarrier). */
    NEAP_E_FENCE = -8,
    /* There is no such group: deleted, or made up. */
    NEAP_E_GROUP = -9,
    /* A group of that name is there already. */
    NEAP_E_EXISTS = -10,
    /* A name has 1 to 56 bytes of UTF-8 that print, no '/', and is neither "." nor "..". */
    NEAP_E_NAME = -11,
    /* No group can be deeper: 31 names are the longest path. */
    NEAP_E_DEEP = -12,
    /* Groups below it have to go first. */
    NEAP_E_CHILDREN = -13,
    /* It is no eventfd, or one without EFD_NONBLOCK. */
    NEAP_E_EVENTFD = -14,
    /* There is no such shrinker, or it was ended. */
    NEAP_E_SHRINKER = -15,
    /* A shrinker's callback would wait for itself. */
    NEAP_E_CALLBACK = -16
};

/* What an answer means, in a few words; never NULL. Signal-safe. */
const char *neap_error_text(int error);

/* ---- Owners and allocations ---- */

/* Somebody whose data lies together. 0 is nobody in particular: data that shares cache lines with other data like it. */
typedef uint64_t neap_owner;
#define NEAP_NOBODY UINT64_C(0)

/* An allocation: a copy of some bytes for each CPU. 0 is none. */
typedef uint64_t neap_percpu;

/* The largest allocation, in bytes per CPU. */
#define NEAP_LARGEST 32768

/*
 * How long to wait for memory, in nanoseconds: NEAP_NEVER makes do with pages that are there already (a reserve is kept for this),
 * and makes no system call but one that wakes neap's thread; NEAP_FOREVER waits for page faults and other threads as long as it takes.
 * A number above 0 bounds the wait for threads that are at the same, not that for page faults or for a fork that is going on.
 * A process's first allocation has to be able to wait. Any other negative number is NEAP_E_ARGUMENT, here and wherever a time is asked for.
 */
#define NEAP_NEVER INT64_C(0)
#define NEAP_FOREVER INT64_C(-1)

/* Makes an owner. NEAP_E_FULL with four million of them, fewer where address space is scarce; NEAP_E_MEMORY. May wait. */
int neap_owner_open(neap_owner *owner);

/*
 * Ends an owner and frees all it has, whatever it is: nobody uses any of it any more, or allocates for the owner meanwhile. Counters,
 * references and histograms of the owner's are gone, and are not to be destroyed. `bytes`: where to put how many bytes that were,
 * all copies together; may be NULL. NEAP_E_OWNER; NEAP_E_ARGUMENT for NEAP_NOBODY, who has no end.
 */
int neap_owner_close(neap_owner owner, size_t *bytes);

/*
 * Allocates `size` bytes, 1 to NEAP_LARGEST, for each CPU, all zero. Every copy begins at a multiple of `align`, a power of two up to a
 * page. NEAP_E_ARGUMENT, NEAP_E_OWNER, NEAP_E_CHARGE, NEAP_E_WAIT, NEAP_E_FULL, NEAP_E_MEMORY.
 */
int neap_percpu_alloc(neap_percpu *data, neap_owner owner, size_t size, size_t align, int64_t wait_ns);

/*
 * Frees an allocation, which nobody uses any more; 0 is nothing. Waits for a fork that is going on; in a process without neap's thread it may do
 * that thread's work, as neap_tick does. NEAP_E_HANDLE.
 */
int neap_percpu_free(neap_percpu data);

/* How many copies everything has: one for each CPU, whether it exists or not; 0 before the first allocation. Signal-safe. */
unsigned neap_cpus(void);

/* The CPU that this thread is on, below neap_cpus() or 0: a hint, it may be on another one already. Signal-safe. */
unsigned neap_cpu(void);

/*
 * The copy of a CPU; NULL if there is no such CPU or allocation. (A handle whose allocation was freed is not found out here.) Copies
 * are plain memory: others may look at them at any time, and a thread may be moved to another CPU at any time, so what several
 * threads change needs atomic operations or locks. Signal-safe.
 */
void *neap_percpu_on(neap_percpu data, unsigned cpu);

/* The copy of the CPU that this thread is on, as a hint. Signal-safe. */
void *neap_percpu_here(neap_percpu data);

/*
 * Calls `each` with every CPU's copy until it answers something else than 0; answers that, or 0. NEAP_E_ARGUMENT, NEAP_E_HANDLE.
 * Signal-safe, if `each` is.
 */
int neap_percpu_each(neap_percpu data, int (*each)(void *copy, unsigned cpu, void *argument), void *argument);

/* ---- Counters ---- */

/* A counter that is added to on every CPU. To be initialised, and not to be moved or copied from then on. */
typedef struct neap_counter {
    uint64_t reserved[16];
} neap_counter;

/*
 * Makes a counter at 0. `batch`: what a CPU's part may be before it counts in the approximate value, 1 to 2^61, rounded down to
 * a power of two. Errors of neap_percpu_alloc.
 */
int neap_counter_init(neap_counter *counter, neap_owner owner, int64_t batch, int64_t wait_ns);

/* Frees what a counter has; all zeroes then. NEAP_E_ARGUMENT. */
int neap_counter_destroy(neap_counter *counter);

/* Adds, without a lock and without a locked instruction where the machine permits. Wraps around. Signal-safe. */
void neap_counter_add(neap_counter *counter, int64_t value);

/* Roughly the value: off by about the batch for each CPU, and by what was added while others read. One load. Signal-safe. */
int64_t neap_counter_approximate(const neap_counter *counter);

/* The value: every addition that has returned is in it, others may be. Looks at all CPUs' parts. */
int64_t neap_counter_exact(const neap_counter *counter);

/* ---- References ---- */

/* A reference count that is per-CPU until it is killed, and exact from then on. Not to be moved or copied once initialised. */
typedef struct neap_ref {
    uint64_t reserved[16];
} neap_ref;

/*
 * Called once, when a killed reference's count comes to 0, by the thread that put the last one. It may destroy the reference and free
 * what it is in.
 */
typedef void (*neap_ref_release)(neap_ref *ref, void *argument);

/*
 * Makes a count of one: the reference that neap_ref_kill puts. `release` and its `argument` may be NULL. Errors of neap_percpu_alloc.
 */
int neap_ref_init(neap_ref *ref, neap_owner owner, neap_ref_release release, void *argument, int64_t wait_ns);

/* Frees what a reference has, dead or not; all zeroes then. NEAP_E_ARGUMENT. */
int neap_ref_destroy(neap_ref *ref);

/* Takes a reference; the caller has one already, or knows that it was not killed. Signal-safe. */
void neap_ref_get(neap_ref *ref);

/* Takes a reference unless it was killed; whether it did. Signal-safe. */
bool neap_ref_try_get(neap_ref *ref);

/*
 * Puts a reference; whether it was the last of a killed one, after `release` has returned. Signal-safe, if `release` is.
 */
bool neap_ref_put(neap_ref *ref);

/*
 * Kills a reference and puts the one it was made with: neap_ref_try_get fails from then on, and the last neap_ref_put is noticed.
 * Answers 1, or 0 if it was killed before, or another thread is about to (neap_ref_is_dead says when it has). NEAP_E_ARGUMENT;
 * NEAP_E_FENCE, and it lives on. Interrupts the CPUs that run the process, once, but isolated ones.
 */
int neap_ref_kill(neap_ref *ref);

/*
 * The same for `count` different references with one interrupt for all; answers how many were killed. NULL among them is nothing. If the
 * `release` of one calls this for several, none of them is another of the list.
 */
int neap_ref_kill_all(neap_ref *const *refs, size_t count);

/* Whether it was killed. Signal-safe. */
bool neap_ref_is_dead(const neap_ref *ref);

/* References left, once it was killed; -1 before. Signal-safe. */
int64_t neap_ref_count(const neap_ref *ref);

/* ---- Histograms ---- */

/* How often which values occurred: 8 buckets to each doubling, 4 KiB for each CPU. Not to be moved or copied once initialised. */
typedef struct neap_histogram {
    uint64_t reserved[512];
} neap_histogram;

/* Makes an empty histogram. Errors of neap_percpu_alloc. */
int neap_histogram_init(neap_histogram *histogram, neap_owner owner, int64_t wait_ns);

/* Frees what a histogram has; all zeroes then. NEAP_E_ARGUMENT. */
int neap_histogram_destroy(neap_histogram *histogram);

/* Counts a value. Signal-safe. */
void neap_histogram_record(neap_histogram *histogram, uint64_t value);

/* How many values were counted. Signal-safe. */
uint64_t neap_histogram_count(const neap_histogram *histogram);

/*
 * Puts into `value` the smallest value of the bucket that this part of all values, in millionths (500000 is the median), lies below
 * or in; false if there is none. At most an eighth too small. Signal-safe.
 */
bool neap_histogram_quantile(const neap_histogram *histogram, uint32_t millionths, uint64_t *value);

/*
 * Calls `each` with the smallest value of every bucket that is not empty, in order, and how many values are in it, until it answers
 * something else than 0; answers that, or 0. NEAP_E_ARGUMENT. Signal-safe, if `each` is.
 */
int neap_histogram_each(const neap_histogram *histogram, int (*each)(uint64_t lowest, uint64_t count, void *argument),
                        void *argument);

/* ---- Memory groups ---- */

/*
 * A group, by its number, which keeps nothing alive. Once the group is deleted every function answers NEAP_E_GROUP for it, also if
 * another one has the same path later. 0 is none.
 */
typedef uint64_t neap_group;

/* What all groups are below: it is charged for all of them together. Its path is "". */
#define NEAP_ROOT UINT64_C(0x200000)

/*
 * Makes the group at a path such as "tenant/acme": names with a '/' between them; and those above it that are not there yet, which
 * stay also when the answer is an error. May wait. NEAP_E_EXISTS, NEAP_E_NAME, NEAP_E_DEEP, NEAP_E_FULL with two million of them,
 * NEAP_E_MEMORY.
 */
int neap_group_create(const char *path, neap_group *group);

/* The group at a path. NEAP_E_GROUP; the first use of groups makes the root, and may wait and answer NEAP_E_MEMORY. */
int neap_group_find(const char *path, neap_group *group);

/* The same, but makes it where it is not there: errors of neap_group_create, but NEAP_E_EXISTS. */
int neap_group_find_or_create(const char *path, neap_group *group);

/*
 * Deletes a group, which has no groups below it. At once what it is charged for is its parent's, where what is given back later
 * goes as well, and its path is free. NEAP_E_CHILDREN, NEAP_E_GROUP; NEAP_E_ARGUMENT for the root, which stays.
 */
int neap_group_delete(neap_group group);

/*
 * Deletes a group and all groups below it, the lowest first, also those that other threads make
 * meanwhile. NEAP_E_GROUP; NEAP_E_ARGUMENT for the root, where nothing has changed.
 */
int neap_group_delete_all(neap_group group);

/* Lets the group's `peak_bytes` begin again at what it is charged for at this moment. NEAP_E_GROUP. */
int neap_group_reset_peak(neap_group group);

/*
 * The group that has its charges and list items: itself, or the next group above that is there once
 * it is deleted. 0 once no charge is left that was made to a deleted group.
 */
neap_group neap_group_heir(neap_group group);

/*
 * Steps through the groups right below one: puts the one behind `*child` into `*child`, or the first if that is 0. Answers 1, and
 * at the end 0, with `*child` 0. NEAP_E_GROUP if the parent is gone, or `*child` is not right below it any more: then begin again.
 */
int neap_group_next(neap_group parent, neap_group *child);

/* What bounds a group's memory, with that of all below it, in bytes. */
enum neap_bound {
    /* Never more than this: what is charged beyond it is refused, unless it must not be. NEAP_UNLIMITED at first. */
    NEAP_MAX = 0,
    /* Above this who charges is slowed down. NEAP_UNLIMITED at first. */
    NEAP_HIGH = 1,
    /* Below `low` memory is taken away only if there is none elsewhere, below `min` never. 0 at first. */
    NEAP_LOW = 2,
    NEAP_MIN = 3
};
#define NEAP_UNLIMITED UINT64_MAX

/*
 * Changes one of enum neap_bound, and puts what it was into `before`, which may be NULL. Takes effect at once, and does not wait: a
 * group that is charged for more than its new `max` keeps that, and may use again what it gives back, but gets no more until there
 * is room. NEAP_E_GROUP; NEAP_E_ARGUMENT for other bounds.
 */
int neap_group_set(neap_group group, int bound, uint64_t bytes, uint64_t *before);

/*
 * Bytes that a group and those below it use. Exact while nobody charges, allocates or frees: what is charged, less what CPUs have in
 * stock, which is up to 256 KiB for each group and 2 MiB for all groups together on each CPU, and less what neap's caches keep of small
 * memory (up to 32 KiB) that was freed, which is as much as they keep. Looks at all that caches have, for all groups, which takes some
 * nanoseconds for each piece. NEAP_E_GROUP.
 */
int neap_group_used(neap_group group, uint64_t *bytes);

/* What is known of a group. Later versions may have more at the end. */
typedef struct neap_group_info {
    neap_group group;
    /* The one above it; 0 for the root. */
    neap_group parent;
    /* Its name below that, and a 0; empty for the root. */
    char name[64];
    /* What bounds it. */
    uint64_t max_bytes;
    uint64_t high_bytes;
    uint64_t low_bytes;
    uint64_t min_bytes;
    /* What it and all below it are charged for, with stocks and what caches keep, and the most that ever was. */
    uint64_t charged_bytes;
    uint64_t peak_bytes;
    /* What it alone is charged for, with stocks and what caches keep: allocations above 32 KiB, smaller ones, per-CPU data, and by hand. */
    uint64_t pages_bytes;
    uint64_t objects_bytes;
    uint64_t percpu_bytes;
    uint64_t by_hand_bytes;
    /*
     * How often, for it or one below it: memory was taken below `low`; somebody was slowed down above `high`; memory was looked for
     * at `max`; a charge was refused; one went beyond `max`; a bound was changed.
     */
    uint64_t low_events;
    uint64_t high_events;
    uint64_t max_events;
    uint64_t refused_events;
    uint64_t overcharged_events;
    uint64_t changed_events;
    /* Groups right below it. */
    uint64_t children;
    /*
     * How often, for it or one below it, memory was looked for and: there was enough; of what was looked at, less than two fifths was
     * given; nearly nothing was.
     */
    uint64_t pressure_low_events;
    uint64_t pressure_medium_events;
    uint64_t pressure_critical_events;
} neap_group_info;

/*
 * The numbers of this moment. `size`: of `info` as the caller knows it, sizeof(neap_group_info); what the library does not know of
 * is 0. NEAP_E_GROUP; NEAP_E_ARGUMENT for a size of 0.
 */
int neap_group_info_get(neap_group group, neap_group_info *info, size_t size);

/*
 * How much of what a group has is protected from being taken away, in bytes: by `min`, and by `low`, after what the groups above it have
 * to give. NEAP_E_GROUP.
 */
int neap_group_protection(neap_group group, uint64_t *min, uint64_t *low);

/*
 * Gives back what CPUs have in stock for a group and those below it, and what caches keep of theirs. What it is charged for is what it
 * uses then, if nobody charges, allocates or frees meanwhile, and but for what other threads of neap's have in hands at that moment.
 * NEAP_E_GROUP.
 */
int neap_group_drain(neap_group group);

/* How many groups there are. */
typedef struct neap_group_count {
    /* In the tree, with the root. */
    uint64_t live;
    /* Deleted a moment ago, and not quite gone. */
    uint64_t dying;
    /* Ids in use: groups, and deleted ones that something is still charged under. */
    uint64_t ids;
} neap_group_count;

/* The numbers of this moment. NEAP_E_MEMORY where there were no groups, and cannot be. */
int neap_group_count_get(neap_group_count *count);

/* Room for any group's path. */
#define NEAP_PATH_SIZE 2048

/*
 * Writes a group's path, as much of it as fits into `size` bytes with a 0 at its end. Answers how many bytes it has, without the 0.
 * `text` may be NULL if `size` is 0. NEAP_E_GROUP.
 */
int neap_group_path(neap_group group, char *text, size_t size);

/* Being in a group, as one thread is from neap_group_enter to neap_group_leave. */
typedef struct neap_entered {
    uint64_t reserved[4];
} neap_entered;

/*
 * Lets this thread be in a group: all that it allocates from now on by malloc, C++'s new or the like is charged to the group, and
 * goes back to it when it is freed, by whichever thread; small memory when neap's caches give it up, which they do before a limit
 * refuses anything for it. That goes beyond a limit, counted, unless NEAP=refuse:on is set; then
 * malloc answers NULL. Of use where malloc is neap's, preloaded; others' malloc charges nobody. From the first call on, every
 * thread's malloc looks whether the thread is in a group: a nanosecond. NEAP_E_GROUP.
 */
int neap_group_enter(neap_entered *entered, neap_group group);

/*
 * Lets the thread that entered be where it was before, in another group or in none; last in, first out. All zeroes then.
 * NEAP_E_ARGUMENT: it left already.
 */
int neap_group_leave(neap_entered *entered);

/*
 * Makes an owner of per-CPU data that is charged to a group: whatever is allocated for the owner, all copies, from then until it is
 * freed, by whichever thread; counters, references and histograms as well. NEAP_E_CHARGE from those functions: a limit, or the group is
 * gone; what the owner has is then its heir's to pay. With NEAP_NEVER no room is made at a limit, and what other CPUs have in stock,
 * up to 256 KiB each, is not to be had. NEAP_E_GROUP, NEAP_E_FULL. May wait.
 */
int neap_owner_open_in(neap_group group, neap_owner *owner);

/* ---- Charges by hand ---- */

/*
 * Bytes that a group, and all above it, are charged for, whatever they are: a cache, a mapping, memory of a GPU. One thread at a
 * time may use it. It may be moved in memory; of two copies only one may be used.
 */
typedef struct neap_charge {
    uint64_t reserved[4];
} neap_charge;

/* Somebody who holds memory, and how much of it. */
typedef struct neap_holder {
    neap_group group;
    uint64_t bytes;
} neap_holder;

/* The limit that a charge was refused at. */
typedef struct neap_refusal {
    /* Whose limit it is: the group that was to be charged, or one above it. */
    neap_group group;
    /* Its `max`, what it is charged for, and what was asked for. */
    uint64_t max_bytes;
    uint64_t charged_bytes;
    uint64_t need_bytes;
    /* Who holds most of it: groups right below it, or itself; largest first, the rest 0. */
    neap_holder holders[3];
    /* NEAP_AT_LIMIT, NEAP_AT_DEADLINE or NEAP_TOO_LARGE. */
    uint64_t reason;
    uint64_t reserved[5];
} neap_refusal;

/* Why a charge was refused: a limit was reached, and reclaim brought too little; a limit was reached
 * until the time was over; or more was asked for than the limit, so waiting is in vain. */
#define NEAP_AT_LIMIT 0u
#define NEAP_AT_DEADLINE 1u
#define NEAP_TOO_LARGE 2u

/*
 * What becomes of a charge beyond a limit, once shrinkers have given what they can: it is refused, or granted and counted, for somebody
 * who must not fail. NEAP_INLINE_CHARGE: refused, but shrinkers with NEAP_INLINE are called in this thread, which holds nothing that
 * they wait for.
 */
#define NEAP_REFUSE 0u
#define NEAP_OVERCHARGE 1u
#define NEAP_INLINE_CHARGE 4u

/*
 * Charges a group and all above it, and puts the charge into `charge`, over whatever is there. While the CPU has some in stock this
 * takes no lock, and no locked instruction where the machine permits; above a `high` it waits, up to two seconds. NEAP_E_CHARGE, and
 * then `refusal`, which may be NULL, says whose limit it was; NEAP_E_GROUP; NEAP_E_ARGUMENT for other flags.
 */
int neap_group_charge(neap_charge *charge, neap_group group, uint64_t bytes, unsigned flags, neap_refusal *refusal);

/*
 * The same, but where a limit is reached it waits for room, up to so many nanoseconds (NEAP_FOREVER): the oldest first; what is small may pass now
 * and then. What is more than a limit is refused at once. The caller holds nothing that others need to make room.
 */
int neap_group_charge_wait(neap_charge *charge, neap_group group, uint64_t bytes, int64_t wait_ns, neap_refusal *refusal);

/* Gives a charge back to who paid, or to its heir; all zeroes then. NEAP_E_ARGUMENT: it was given back already. */
int neap_group_uncharge(neap_charge *charge);

/* How many bytes it is; 0 if it is none. Signal-safe. */
uint64_t neap_charge_bytes(const neap_charge *charge);

/* Who was charged, and may be gone; 0 if it is none. Signal-safe. */
neap_group neap_charge_group(const neap_charge *charge);

/* Takes some of its bytes off into a charge of their own, over whatever is in `part`. NEAP_E_ARGUMENT if it has fewer. */
int neap_charge_split(neap_charge *charge, neap_charge *part, uint64_t bytes);

/* Adds what another has, which is all zeroes then. NEAP_E_ARGUMENT if that is of another group. */
int neap_charge_merge(neap_charge *charge, neap_charge *other);

/* Moves it to another group. Errors of neap_group_charge; then it is where it was. */
int neap_charge_move(neap_charge *charge, neap_group to, neap_refusal *refusal);

/* ---- Events ---- */

/* What happens to groups; counted in neap_group_info, where it says what each is. */
enum neap_event {
    NEAP_EVENT_LOW = 0,
    NEAP_EVENT_HIGH = 1,
    NEAP_EVENT_MAX = 2,
    NEAP_EVENT_REFUSED = 3,
    NEAP_EVENT_OVERCHARGED = 4,
    NEAP_EVENT_LIMIT_CHANGED = 5,
    /* How hard it is to have memory of it, as reclaim finds. */
    NEAP_EVENT_PRESSURE_LOW = 6,
    NEAP_EVENT_PRESSURE_MEDIUM = 7,
    NEAP_EVENT_PRESSURE_CRITICAL = 8,
    /* The group is gone: the last that is told. */
    NEAP_EVENT_GONE = -1
};

/* Somebody who is told. Stays where it is until neap_group_unsubscribe. */
typedef struct neap_listener {
    uint64_t reserved[8];
} neap_listener;

/*
 * Told that something happened, so many times since it was last told: to the group that was subscribed to, or to one below it. Runs on
 * neap's thread, or in neap_tick() where there is none; may do anything, also unsubscribe.
 */
typedef void (*neap_told)(void *argument, neap_group group, int event, uint64_t times);

/*
 * Has a function called for events of a group and of all below it, from now on, and when the group is gone. `events`: a bit for each,
 * 1u << NEAP_EVENT_MAX and so on, at least one. NEAP_E_GROUP, NEAP_E_MEMORY, NEAP_E_ARGUMENT.
 */
int neap_group_subscribe(neap_listener *listener, neap_group group, unsigned events, neap_told told, void *argument);

/*
 * Has 1 added to an eventfd instead, for poll() and the like; neap_group_info_get says what it was. It has EFD_NONBLOCK, and stays open until
 * neap_group_unsubscribe. NEAP_E_EVENTFD, and those above.
 */
int neap_group_subscribe_fd(neap_listener *listener, neap_group group, unsigned events, int eventfd);

/*
 * Nobody is told any more when this returns: where the function runs on another thread this waits for it. Also for groups that are gone.
 * All zeroes then. NEAP_E_ARGUMENT: it has ended already.
 */
int neap_group_unsubscribe(neap_listener *listener);

/* ---- Shrinkers and reclaim ---- */

/*
 * A cache that can shrink: two functions, of which one says how many objects there are, and the other gives some of them up. They are
 * called when the group that pays for the cache, or one above it, is at its limit; when the process is at its own; and by
 * neap_reclaim. Within malloc and neap_group_charge neap's own threads call them, since the caller may hold the very lock that they
 * take, and the caller waits 200 ms at most each time that it asks; they come into being with the first shrinker. A shrinker with a callback that has
 * not come back after 100 ms is not called before it is back. One that had a CPU for that long, or waited for so long three times in a row, or answers what cannot be true, is not
 * called for a second, and for twice as long each further time. A charge in a callback may go an eighth beyond a limit, and is not held up above a `high`.
 */
typedef uint64_t neap_shrinker;

/* What a callback is asked. Not to be kept. */
typedef struct neap_asked {
    /* The group and the node whose objects are meant. */
    neap_group group;
    uint32_t node;
    /* Not 0 where a scan that frees nothing cannot say whether it was busy or looked at objects; 0 unless it says otherwise. */
    uint32_t unsure;
    /* How many objects to look at; 0 for a count. */
    uint64_t to_scan;
    /* How many were: `to_scan`, unless the callback says otherwise. */
    uint64_t scanned;
    /* How many bytes were freed, if the callback says so. Of what is charged to groups it is known without that. */
    uint64_t freed_bytes;
    /* Bytes that are still needed; UINT64_MAX: all that there are. */
    uint64_t need;
    /* When the caller gives up, in nanoseconds of CLOCK_MONOTONIC; UINT64_MAX: it does not. */
    uint64_t deadline;
    /* How hard memory is to get: from 12 down to 0, where all is asked for. */
    uint32_t priority;
    /* 0. */
    uint32_t reserved;
} neap_asked;

/*
 * How many objects there are, about and at once; 0: none for now; NEAP_EMPTY: none until
 * neap_shrinker_mark; NEAP_STOP: it cannot say, because a lock is held.
 */
typedef uint64_t (*neap_count_fn)(void *data, const neap_asked *asked);
/*
 * Gives up so many objects, and answers how many it has; NEAP_STOP: it cannot, because a lock is
 * held; NEAP_EMPTY: there is nothing until neap_shrinker_mark; NEAP_DONE: it looked at all of them,
 * frees none, and is not to be called again in this visit.
 */
typedef uint64_t (*neap_scan_fn)(void *data, neap_asked *asked);
/* Is called once, when nobody will ever call the others again: `data` can go. */
typedef void (*neap_gone_fn)(void *data);

#define NEAP_EMPTY (UINT64_MAX - 1)
#define NEAP_STOP UINT64_MAX
#define NEAP_DONE (UINT64_MAX - 2)

/* It knows nodes: it is called for each, and otherwise for node 0. */
#define NEAP_BY_NODE 1u
/* It knows groups: it is called for those that it has marked. */
#define NEAP_BY_GROUP 2u
/* It waits for nothing that a thread which charges may hold. */
#define NEAP_INLINE 4u
/* For `seeks`: objects cost nothing to make again. */
#define NEAP_NO_SEEKS UINT32_MAX

/* What is said of a cache. All zeroes first: later versions may have more at the end. */
typedef struct neap_shrinker_spec {
    /* 1 to 56 bytes, no '/'. */
    const char *name;
    neap_count_fn count;
    neap_scan_fn scan;
    /* May be NULL. */
    neap_gone_fn gone;
    /* What these get. They may be called by any thread, and by several at a time. */
    void *data;
    /* Who pays for what is cached, or its heir: the one that it is called for, unless it knows groups. 0: nobody, or several. */
    neap_group group;
    /* Objects to ask for at a time; 0: 128. Few where they are large. */
    uint64_t batch;
    /* What it costs to make an object again; 0: 2. */
    uint32_t seeks;
    /* NEAP_BY_NODE, NEAP_BY_GROUP, NEAP_INLINE. */
    uint32_t flags;
} neap_shrinker_spec;

/*
 * Registers a cache. `size`: of `spec`, sizeof(neap_shrinker_spec). NEAP_E_ARGUMENT, NEAP_E_NAME, NEAP_E_GROUP, NEAP_E_FULL, NEAP_E_MEMORY; `gone` is
 * not called then.
 */
int neap_shrinker_register(neap_shrinker *shrinker, const neap_shrinker_spec *spec, size_t size);

/*
 * Ends it, from any thread, also in a callback: no call of it begins from now on. Waits for those that run, and for no others; 1: it is in
 * a callback itself, does not wait, and `gone` is called when they have ended. The caller holds nothing that the callbacks take.
 * NEAP_E_SHRINKER, also for neap's own; NEAP_E_FENCE, and it goes on.
 */
int neap_shrinker_unregister(neap_shrinker shrinker);

/*
 * Says that a shrinker with NEAP_BY_GROUP may have something of a group, or its heir, on a node: when the first object is there,
 * after `count` sees it. NEAP_E_GROUP. In callbacks, too.
 */
int neap_shrinker_mark(neap_shrinker shrinker, neap_group group, unsigned node);

/* Waits for all callbacks that run at the moment. NEAP_E_CALLBACK: the caller is one; NEAP_E_FENCE. */
int neap_shrinkers_synchronize(void);

/* What came back. Later versions may have more at the end. */
typedef struct neap_reclaimed {
    uint64_t bytes;
    /* Objects that callbacks looked at, and freed, as they said. */
    uint64_t scanned;
    uint64_t freed;
    /* Not 0: the time was over. */
    uint64_t late;
} neap_reclaimed;

/*
 * Asks a group, and all below it, for so many bytes, for so long at most; NEAP_FOREVER for no end. Shrinkers are called in this thread, which
 * holds nothing that they take. Whether anything came back; `reclaimed`, which may be NULL, is told what. 0 in a callback. NEAP_E_GROUP.
 */
int neap_reclaim(neap_group group, uint64_t bytes, int64_t nanoseconds, neap_reclaimed *reclaimed, size_t size);

/* ---- LRU lists ---- */

/*
 * What is cached, oldest first, by group and node, so that whoever wants memory back from a group finds its oldest. Each group's and
 * node's part has a lock of its own and is made when it is first used; when the group is deleted it is its parent's at once.
 * Objects are on a list by a neap_item inside them. All memory that a list takes is for its parts.
 */
typedef struct neap_list {
    uint64_t reserved[4];
} neap_list;

/* Part of an object. All zeroes before it is first put on a list, and where it is on none. */
typedef struct neap_item {
    uint64_t reserved[3];
} neap_item;

/*
 * Makes a list, over whatever is there. `flags`: NEAP_BY_GROUP; without it all items are the root's. `shrinker`: one with NEAP_BY_GROUP that
 * is marked for a group when it gets its first item on a node; 0 for none. NEAP_E_ARGUMENT, NEAP_E_MEMORY.
 */
int neap_list_init(neap_list *list, unsigned flags, neap_shrinker shrinker);

/* Ends it; nobody uses it any more. Items on it are no list's: make them all zeroes before they are used again. NEAP_E_ARGUMENT. */
int neap_list_destroy(neap_list *list);

/*
 * Puts an item on it, as the newest of a group, or its heir, on a node. Answers 1; 0 if the item is on a list already. It stays where it
 * is until neap_list_del has answered true, or a walk's `dispose` has got it. NEAP_E_GROUP: the group is gone, and nobody is known to
 * be its heir; NEAP_E_ARGUMENT.
 */
int neap_list_add(const neap_list *list, neap_group group, unsigned node, neap_item *item);

/*
 * Takes an item off, whichever group's it is by now; whether this call did. If not, it is on no list, or on another, or a walk has taken it off,
 * whose `dispose` gets it. Who got it, here or there, and nobody else, may free it.
 */
bool neap_list_del(const neap_list *list, neap_item *item);

/*
 * Makes an item that was used the newest of the group that has it by now, on its node; whether this
 * was done: not where it is on no list, or on another, or a walk has taken it off. The item is there.
 */
bool neap_list_touch(const neap_list *list, neap_item *item);

/* Items of a group alone on a node, at this moment; 0 where it is gone. Takes no lock. */
size_t neap_list_count(const neap_list *list, neap_group group, unsigned node);

/* What becomes of an item that a walk has come to. */
enum neap_verdict {
    /* It is taken off, and handed to `dispose`. */
    NEAP_REMOVED = 0,
    /* It was in use: it is the newest from now on. */
    NEAP_ROTATE = 1,
    /* It stays where it is. */
    NEAP_SKIP = 2,
    /* It cannot be said: its owner's lock is held. The list's lock is let go for a moment, and the walk begins again. */
    NEAP_RETRY = 3,
    /* The walk is over. */
    NEAP_OVER = 4
};

/* What a walk did: verdicts asked for, items taken off, and 1 if a verdict ended it. */
typedef struct neap_walked {
    uint64_t scanned;
    uint64_t removed;
    uint64_t stopped;
} neap_walked;

/*
 * Asks `isolate` about up to `most` items of a group alone on a node, or 65536 where not all are taken off, oldest first and each once but for
 * retries, and does what it answers.
 * `isolate` is called under the lock of the items, and fork waits for it: it calls nothing of neap's, allocates and frees nothing, and only
 * tries its own locks. Then `dispose` is called, without a lock, for each that was taken off: it may free the object.
 * `walked` may be NULL. NEAP_E_GROUP, NEAP_E_ARGUMENT.
 */
int neap_list_walk(const neap_list *list, neap_group group, unsigned node, size_t most,
                   int (*isolate)(neap_item *item, void *argument), void (*dispose)(neap_item *item, void *argument),
                   void *argument, neap_walked *walked);

/* Whether an item is on a list, or in hands of a walk that has taken it off. Signal-safe. */
bool neap_item_is_linked(const neap_item *item);

/* For `dispose`: lets the item be put on a list again, instead of freeing it. Whether it was in hands. Signal-safe. */
bool neap_item_leave_hands(neap_item *item);

/* ---- The instance ---- */

/* Where the memory of per-CPU data is. */
typedef struct neap_usage {
    /* Bytes that were asked for, all copies together. */
    uint64_t allocated_bytes;
    /* Bytes of pages with memory behind them; those of them in which nothing is; and what of these is kept for NEAP_NEVER. */
    uint64_t populated_bytes;
    uint64_t empty_bytes;
    uint64_t reserve_bytes;
    /* Allocations, and owners besides nobody. */
    uint64_t allocations;
    uint64_t owners;
} neap_usage;

/* The numbers of this moment; zeroes before the first allocation. May wait for a pass of neap's thread. NEAP_E_ARGUMENT. */
int neap_usage_get(neap_usage *usage);

/*
 * Does what neap's thread does every 250 ms: for programs that have no such thread (NEAP=background:off, one thread, or no preloaded
 * library and no NEAP=background:on). Whether a later call may find more to do.
 */
bool neap_tick(void);

/* Gives all that is free back to the system, but for the reserve; whether there was any. */
bool neap_release(void);

#ifdef __cplusplus
}
#endif

#endif
