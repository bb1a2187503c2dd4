/*
 * neap.h: per-CPU data, memory groups, LRU lists and shrinkers. C11 and C++17; link with
 * `pkg-config --cflags --libs neap`.
 *
 * Per-CPU data has one copy for each CPU that the machine may ever have, each on cache lines of its
 * own. Data that belongs together has an owner. Owners share pages as little as possible, so pages
 * become free when an owner ends. Free pages are released within a second, except for a reserve.
 *
 * Memory groups form a tree and count the memory of each part of a program. Their limits can change
 * at any time. A program can charge memory of any kind by hand. neap's malloc charges the
 * allocations of threads that have entered a group.
 *
 * Conventions, unless a function says otherwise:
 *
 * - A function that can fail returns a negative number of enum neap_error. Then nothing has
 *   changed. No function writes errno.
 * - Null and misaligned pointers, invalid handles, owners and groups, and objects that are zeroed or
 *   destroyed are found and refused. Functions that cannot fail return 0, false or NULL for them, or
 *   do nothing. Every other pointer leads to as many bytes as the function reads or writes.
 * - Functions may be called in any thread, and not in a signal handler. Functions marked
 *   "signal-safe" may be called in both, and never wait.
 * - A child of fork() has its own copy of everything, and may use all of it. A child of vfork() may
 *   use nothing.
 * - Callbacks run without a lock of neap, and may call all functions here. They must return: no
 *   exception, no longjmp.
 *
 * In a program with libneap_malloc.so preloaded, that library provides these functions as well, so
 * there is one instance. Both libraries must have the same version. A program that is linked with
 * libneap.a keeps an instance of its own.
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

/* The version of this header, as text and as numbers that the preprocessor can compare. */
#define NEAP_VERSION "0.1.0"
#define NEAP_VERSION_MAJOR 0
#define NEAP_VERSION_MINOR 1
#define NEAP_VERSION_PATCH 0

/* The version of the library. Signal-safe. */
const char *neap_version(void);

/* ---- Errors ---- */

enum neap_error {
    NEAP_OK = 0,
    /*
     * An invalid argument: a null pointer, a size of 0 or above NEAP_LARGEST, an alignment that is
     * not a power of two or exceeds a page, or an uninitialised object.
     */
    NEAP_E_ARGUMENT = -1,
    /* The owner does not exist: it was closed, or the number is invalid. */
    NEAP_E_OWNER = -2,
    /* A limit refuses the charge of the owner or group. */
    NEAP_E_CHARGE = -3,
    /* The operation would wait longer than the caller can. */
    NEAP_E_WAIT = -4,
    /* The address space for per-CPU data, or the table of owners or of groups, is full. */
    NEAP_E_FULL = -5,
    /* The system refused memory. */
    NEAP_E_MEMORY = -6,
    /* The handle has no allocation: it was freed, or the number is invalid. */
    NEAP_E_HANDLE = -7,
    /* The system forbids membarrier, which killing a reference needs. */
    NEAP_E_FENCE = -8,
    /* The group does not exist: it was deleted, or the number is invalid. */
    NEAP_E_GROUP = -9,
    /* A group of that name exists already. */
    NEAP_E_EXISTS = -10,
    /*
     * The name is invalid. A name has 1 to 56 bytes of printable UTF-8, no '/', and is not "." or
     * "..".
     */
    NEAP_E_NAME = -11,
    /* The path is too long: it can have at most 31 names. */
    NEAP_E_DEEP = -12,
    /* The group has groups below it, which must be deleted first. */
    NEAP_E_CHILDREN = -13,
    /* The descriptor is not an eventfd, or lacks EFD_NONBLOCK. */
    NEAP_E_EVENTFD = -14,
    /* The shrinker does not exist, or was ended. */
    NEAP_E_SHRINKER = -15,
    /* A shrinker's callback would wait for itself. */
    NEAP_E_CALLBACK = -16,
    /* The option is read at the start of the process only. */
    NEAP_E_FIXED = -17,
    /* Allocations are not sampled: the option `profile` is off. */
    NEAP_E_PROFILE = -18,
    /* The file could not be made or written. */
    NEAP_E_FILE = -19
};

/* Describes an error in a few words; never NULL. Signal-safe. */
const char *neap_error_text(int error);

/* ---- Owners and allocations ---- */

/*
 * An owner of per-CPU data, which neap places together. 0 is NEAP_NO_OWNER: data without an owner,
 * which shares cache lines with other such data.
 */
typedef uint64_t neap_owner;
#define NEAP_NO_OWNER UINT64_C(0)

/* An allocation: a copy of some bytes for each CPU. 0 is none. */
typedef uint64_t neap_percpu;

/* The largest allocation, in bytes per CPU. */
#define NEAP_LARGEST 32768

/*
 * Values of a wait time in nanoseconds. A process's first allocation must be able to wait.
 *
 * - NEAP_NEVER: use populated pages only (a reserve is kept for this). Makes no system call except
 *   one that wakes neap's thread.
 * - A number above 0: bounds the wait for other threads, but not for page faults or a fork in
 *   progress.
 * - NEAP_FOREVER: waits for page faults and other threads as long as needed.
 * - Any other negative number: NEAP_E_ARGUMENT, in all functions that take a time.
 */
#define NEAP_NEVER INT64_C(0)
#define NEAP_FOREVER INT64_C(-1)

/*
 * Creates an owner. May wait. NEAP_E_FULL with four million owners, fewer if address space is
 * scarce; NEAP_E_MEMORY.
 */
int neap_owner_open(neap_owner *owner);

/*
 * Ends an owner and frees all of its data. No thread may use the data any more, or allocate for the
 * owner during the call. The owner's counters, references and histograms end as well, and must not
 * be destroyed. Stores the freed bytes of all copies in `bytes`, which may be NULL. NEAP_E_OWNER;
 * NEAP_E_ARGUMENT for NEAP_NO_OWNER, which never ends.
 */
int neap_owner_close(neap_owner owner, size_t *bytes);

/*
 * Allocates `size` zeroed bytes, 1 to NEAP_LARGEST, for each CPU. Every copy begins at a multiple
 * of `align`, a power of two up to a page. NEAP_E_ARGUMENT, NEAP_E_OWNER, NEAP_E_CHARGE,
 * NEAP_E_WAIT, NEAP_E_FULL, NEAP_E_MEMORY.
 */
int neap_percpu_alloc(neap_percpu *data, neap_owner owner, size_t size, size_t align, int64_t wait_ns);

/*
 * Frees an allocation, which no thread uses any more; 0 does nothing. Waits for a fork in progress.
 * In a process without neap's thread it may do that thread's work, as neap_tick does.
 * NEAP_E_HANDLE.
 */
int neap_percpu_free(neap_percpu data);

/*
 * Number of copies of every allocation: one for each CPU, whether it exists or not. 0 before the
 * first allocation. Signal-safe.
 */
unsigned neap_cpus(void);

/*
 * The CPU that this thread is on, below neap_cpus(), or 0. A hint: the thread may be on another CPU
 * already. Signal-safe.
 */
unsigned neap_cpu(void);

/*
 * The copy of a CPU; NULL if there is no such CPU or allocation. A freed handle is not detected.
 * Copies are plain memory. Other threads may access them at any time, and a thread may move to
 * another CPU at any time. So data that several threads change needs atomic operations or locks.
 * Signal-safe.
 */
void *neap_percpu_ptr(neap_percpu data, unsigned cpu);

/* The copy of the CPU that this thread is on, as a hint. Signal-safe. */
void *neap_percpu_this_cpu(neap_percpu data);

/*
 * Calls `each` with every CPU's copy until it returns a number other than 0. Returns that number,
 * or 0. NEAP_E_ARGUMENT, NEAP_E_HANDLE. Signal-safe if `each` is.
 */
int neap_percpu_each(neap_percpu data, int (*each)(void *copy, unsigned cpu, void *argument), void *argument);

/* ---- Counters ---- */

/*
 * A counter that threads add to on every CPU. It must be initialised, and must not be moved or
 * copied afterwards.
 */
typedef struct neap_counter {
    uint64_t reserved[16];
} neap_counter;

/*
 * Initialises a counter to 0. The approximate value may lack up to `batch` of what was added on
 * each CPU. `batch` is 1 to 2^61, rounded down to a power of two. Errors of neap_percpu_alloc.
 */
int neap_counter_init(neap_counter *counter, neap_owner owner, int64_t batch, int64_t wait_ns);

/* Frees a counter, and zeroes it. NEAP_E_ARGUMENT. */
int neap_counter_destroy(neap_counter *counter);

/*
 * Adds `value`; wraps around. Takes no lock, and no locked instruction if the machine permits.
 * Signal-safe.
 */
void neap_counter_add(neap_counter *counter, int64_t value);

/*
 * The approximate value, by one load. It is off by at most about one batch for each CPU, and by
 * additions made while other threads read. Signal-safe.
 */
int64_t neap_counter_approximate(const neap_counter *counter);

/*
 * The exact value. It contains every addition that has returned, and may contain additions in
 * progress. The call reads the parts of all CPUs.
 */
int64_t neap_counter_exact(const neap_counter *counter);

/* ---- References ---- */

/*
 * A reference count that is per-CPU until it is killed, and exact afterwards. It must not be moved
 * or copied once initialised.
 */
typedef struct neap_ref {
    uint64_t reserved[16];
} neap_ref;

/*
 * Called once, when a killed reference's count reaches 0, by the thread that put the last
 * reference. It may destroy the reference and free the memory that it is in.
 */
typedef void (*neap_ref_release)(neap_ref *ref, void *argument);

/*
 * Initialises a count of one: the reference that neap_ref_kill puts. `release` and `argument` may
 * be NULL. Errors of neap_percpu_alloc.
 */
int neap_ref_init(neap_ref *ref, neap_owner owner, neap_ref_release release, void *argument, int64_t wait_ns);

/* Frees a reference, dead or not, and zeroes it. NEAP_E_ARGUMENT. */
int neap_ref_destroy(neap_ref *ref);

/*
 * Takes a reference. The caller has one already, or knows that the count was not killed.
 * Signal-safe.
 */
void neap_ref_get(neap_ref *ref);

/* Takes a reference unless the count was killed; returns whether it took one. Signal-safe. */
bool neap_ref_try_get(neap_ref *ref);

/*
 * Puts a reference. Returns whether it was the last reference of a killed count, after `release`
 * has returned. Signal-safe if `release` is.
 */
bool neap_ref_put(neap_ref *ref);

/*
 * Kills a count, and puts the reference that it was initialised with. From then on neap_ref_try_get
 * fails, and the last neap_ref_put is detected. Returns 1; or 0 if the count was killed before, or
 * another thread is killing it (neap_ref_is_dead tells when that is done). Interrupts once the CPUs
 * that run the process, except isolated ones. NEAP_E_ARGUMENT; NEAP_E_FENCE: the count was not
 * killed.
 */
int neap_ref_kill(neap_ref *ref);

/*
 * Kills `count` different references with one interrupt for all; returns how many were killed. NULL
 * entries are skipped. If a `release` callback calls this function in turn, its list must have no
 * reference of the outer call's list.
 */
int neap_ref_kill_all(neap_ref *const *refs, size_t count);

/* Whether a reference was killed. Signal-safe. */
bool neap_ref_is_dead(const neap_ref *ref);

/* Number of references of a killed count; -1 before the kill. Signal-safe. */
int64_t neap_ref_count(const neap_ref *ref);

/* ---- Histograms ---- */

/*
 * A histogram of values: 8 buckets for each doubling, 4 KiB for each CPU. It must not be moved or
 * copied once initialised.
 */
typedef struct neap_histogram {
    uint64_t reserved[512];
} neap_histogram;

/* Initialises an empty histogram. Errors of neap_percpu_alloc. */
int neap_histogram_init(neap_histogram *histogram, neap_owner owner, int64_t wait_ns);

/* Frees a histogram, and zeroes it. NEAP_E_ARGUMENT. */
int neap_histogram_destroy(neap_histogram *histogram);

/* Counts a value. Signal-safe. */
void neap_histogram_record(neap_histogram *histogram, uint64_t value);

/* Number of values that were counted. Signal-safe. */
uint64_t neap_histogram_count(const neap_histogram *histogram);

/*
 * Stores a quantile in `value`: the smallest value of the bucket in which `millionths` of all
 * values are reached (500000: the median). It is at most an eighth too small. Returns false if
 * there are no values. Signal-safe.
 */
bool neap_histogram_quantile(const neap_histogram *histogram, uint32_t millionths, uint64_t *value);

/*
 * Calls `each` with the smallest value of every nonempty bucket and its count, in order, until it
 * returns a number other than 0. Returns that number, or 0. NEAP_E_ARGUMENT. Signal-safe if `each`
 * is.
 */
int neap_histogram_each(const neap_histogram *histogram, int (*each)(uint64_t lowest, uint64_t count, void *argument),
                        void *argument);

/* ---- Memory groups ---- */

/*
 * A group's number, which does not keep the group alive. Once the group is deleted, every function
 * returns NEAP_E_GROUP for it, even if another group has the same path later. 0 is none.
 */
typedef uint64_t neap_group;

/* The root of all groups, which is charged for all of them together. Its path is "". */
#define NEAP_ROOT UINT64_C(0x200000)

/*
 * Creates the group at a path such as "tenant/acme": names with '/' between them. Creates missing
 * groups above it, which stay even after an error. May wait. NEAP_E_EXISTS, NEAP_E_NAME,
 * NEAP_E_DEEP, NEAP_E_FULL with two million groups, NEAP_E_MEMORY.
 */
int neap_group_create(const char *path, neap_group *group);

/*
 * Finds the group at a path. NEAP_E_GROUP. The first use of groups creates the root, and may wait
 * and return NEAP_E_MEMORY.
 */
int neap_group_find(const char *path, neap_group *group);

/* Finds the group at a path, or creates it. Errors of neap_group_create, except NEAP_E_EXISTS. */
int neap_group_find_or_create(const char *path, neap_group *group);

/*
 * Deletes a group without groups below it. From then on its charges are its parent's, later
 * uncharges reduce the parent's charge, and its path is free. NEAP_E_CHILDREN, NEAP_E_GROUP;
 * NEAP_E_ARGUMENT for the root.
 */
int neap_group_delete(neap_group group);

/*
 * Deletes a group and all groups below it, the lowest first, also those that other threads make
 * meanwhile. NEAP_E_GROUP; NEAP_E_ARGUMENT for the root, where nothing has changed.
 */
int neap_group_delete_all(neap_group group);

/* Resets the group's `peak_bytes` to its charge at this moment. NEAP_E_GROUP. */
int neap_group_reset_peak(neap_group group);

/*
 * Returns the group that has its charges and list items: itself, or the next group above that
 * exists once it is deleted. Returns 0 for a deleted group once none of its charges is left.
 */
neap_group neap_group_heir(neap_group group);

/*
 * Steps through the groups directly below `parent`: replaces `*child` by the next one, or 0 by the
 * first. Returns 1, or 0 at the end, with `*child` 0. NEAP_E_GROUP if the parent is gone, or
 * `*child` is no longer directly below it: then start again.
 */
int neap_group_next(neap_group parent, neap_group *child);

/* Bounds of a group's memory, including all groups below it, in bytes. */
enum neap_bound {
    /* Charges beyond this are refused, except those that must not fail. Default: NEAP_UNLIMITED. */
    NEAP_MAX = 0,
    /* Above this, charging threads are throttled. Default: NEAP_UNLIMITED. */
    NEAP_HIGH = 1,
    /*
     * Below `low`, memory is reclaimed only if none is found elsewhere; below `min`, never.
     * Default: 0.
     */
    NEAP_LOW = 2,
    NEAP_MIN = 3
};
#define NEAP_UNLIMITED UINT64_MAX

/*
 * Sets a bound of enum neap_bound, and stores its previous value in `before`, which may be NULL.
 * The bound takes effect at once; the call does not wait. A group that exceeds its new `max` keeps
 * its memory, and may reuse memory that it frees, but gets no more until there is room.
 * NEAP_E_GROUP; NEAP_E_ARGUMENT for other bounds.
 */
int neap_group_set(neap_group group, int bound, uint64_t bytes, uint64_t *before);

/*
 * Stores the bytes that a group and those below it use. This is the charge minus two parts: stocks
 * of CPUs, and freed blocks of up to 32 KiB that neap's caches keep. Stocks are up to 256 KiB for
 * each group and CPU, and 2 MiB for all groups on a CPU. The number is exact while no thread
 * charges, allocates or frees. The call examines the caches of all groups, which takes some
 * nanoseconds for each entry. NEAP_E_GROUP.
 */
int neap_group_used(neap_group group, uint64_t *bytes);

/* Information about a group. Later versions may add fields at the end. */
typedef struct neap_group_info {
    neap_group group;
    /* The group above it; 0 for the root. */
    neap_group parent;
    /* Its name, and a 0; empty for the root. */
    char name[64];
    /* Its bounds. */
    uint64_t max_bytes;
    uint64_t high_bytes;
    uint64_t low_bytes;
    uint64_t min_bytes;
    /* Bytes charged to it and all groups below, with stocks and cached objects; and their peak. */
    uint64_t charged_bytes;
    uint64_t peak_bytes;
    /*
     * Bytes charged to it alone, with stocks and cached objects: allocations above 32 KiB, smaller
     * ones, per-CPU data, and charges by hand.
     */
    uint64_t pages_bytes;
    uint64_t objects_bytes;
    uint64_t percpu_bytes;
    uint64_t by_hand_bytes;
    /*
     * Numbers of events of the group and of those below it: memory was reclaimed below `low`; a
     * thread was throttled above `high`; memory was reclaimed at `max`; a charge was refused; a
     * charge exceeded `max`; a bound was changed.
     */
    uint64_t low_events;
    uint64_t high_events;
    uint64_t max_events;
    uint64_t refused_events;
    uint64_t overcharged_events;
    uint64_t changed_events;
    /* Number of groups directly below it. */
    uint64_t children;
    /*
     * Numbers of reclaims of the group and of those below it, by result: enough objects were freed;
     * less than two fifths of the examined objects were freed; nearly none was freed.
     */
    uint64_t pressure_low_events;
    uint64_t pressure_medium_events;
    uint64_t pressure_critical_events;
    /* Numbers of the events above that met the group's own bounds or reclaim, not those below. */
    uint64_t local_low_events;
    uint64_t local_high_events;
    uint64_t local_max_events;
    uint64_t local_refused_events;
    uint64_t local_overcharged_events;
    uint64_t local_changed_events;
    uint64_t local_pressure_low_events;
    uint64_t local_pressure_medium_events;
    uint64_t local_pressure_critical_events;
    /*
     * Microseconds in which a thread of the group, or of one below, was stalled on memory: it
     * waited for room, was throttled above `high`, or reclaimed within a charge. Stalls that
     * overlap count once.
     */
    uint64_t stalled_us;
    /* Of the root alone: number of changes of the container's level or limit, and of new listeners. */
    uint64_t container_events;
} neap_group_info;

/*
 * Stores information about a group. `size` is the size of `info` in the caller's version,
 * sizeof(neap_group_info). Fields that the library does not know are 0. NEAP_E_GROUP;
 * NEAP_E_ARGUMENT for a size of 0.
 */
int neap_group_info_get(neap_group group, neap_group_info *info, size_t size);

/*
 * Stores how many bytes of a group are protected from reclaim: by `min`, and by `low`, as limited
 * by the groups above it. NEAP_E_GROUP.
 */
int neap_group_protection(neap_group group, uint64_t *min, uint64_t *low);

/*
 * Uncharges the stocks of CPUs for a group and those below it, and empties caches of their freed
 * objects. Afterwards the charge equals the usage, if no thread charges, allocates or frees
 * meanwhile, except for objects that neap's threads hold at that moment. NEAP_E_GROUP.
 */
int neap_group_drain(neap_group group);

/* Numbers of groups. */
typedef struct neap_group_count {
    /* Groups in the tree, with the root. */
    uint64_t live;
    /* Groups that were deleted just now, and are not ended yet. */
    uint64_t dying;
    /* Ids in use: groups, and deleted ones that are still charged. */
    uint64_t ids;
} neap_group_count;

/*
 * Stores the numbers of groups. NEAP_E_MEMORY if there were no groups, and they cannot be created.
 */
int neap_group_count_get(neap_group_count *count);

/*
 * Returns the group that pays for the memory at an address: the group of the thread that allocated
 * it by neap's malloc, or the heir of that group. The address lies anywhere in a block of up to
 * 32 KiB, or on the first page of a larger one; the block is not freed during the call. 0 if no
 * group pays, or the memory is not neap's.
 */
neap_group neap_group_of(const void *memory);

/* Size of a buffer for any group's path. */
#define NEAP_PATH_SIZE 2048

/*
 * Writes a group's path, as much as fits into `size` bytes, with a 0 at its end. Returns the path's
 * length without the 0. `text` may be NULL if `size` is 0. NEAP_E_GROUP.
 */
int neap_group_path(neap_group group, char *text, size_t size);

/* A thread's stay in a group, from neap_group_enter to neap_group_leave. */
typedef struct neap_entered {
    uint64_t reserved[4];
} neap_entered;

/*
 * Enters a group: this thread's allocations by malloc, C++'s new and the like are charged to it. A
 * block above 32 KiB is uncharged when any thread frees it. A smaller block stays charged until
 * neap's caches give it up, which they do before a limit refuses a charge. These charges may exceed
 * a limit, which is counted. With NEAP=refuse:on malloc returns NULL instead. Requires neap's
 * malloc, preloaded; other mallocs are not charged. From the first call on, every thread's malloc
 * checks whether its thread is in a group, which takes a nanosecond. NEAP_E_GROUP, NEAP_E_MEMORY.
 */
int neap_group_enter(neap_entered *entered, neap_group group);

/*
 * Leaves a group. The thread that entered it calls this, for its groups in any order. The thread is
 * then in the group that it entered last of those that it did not leave, or in none. Zeroes
 * `entered`. NEAP_E_ARGUMENT if it was left already.
 */
int neap_group_leave(neap_entered *entered);

/*
 * Creates an owner of per-CPU data that is charged to a group. Allocations of the owner, with all
 * copies and with its counters, references and histograms, are charged until they are freed. An
 * allocation returns NEAP_E_CHARGE at a limit, or if the group is gone; the owner's data is then
 * charged to the heir. With NEAP_NEVER an allocation makes no room at a limit, and does not use the
 * stocks of other CPUs, which have up to 256 KiB each. May wait. NEAP_E_GROUP, NEAP_E_FULL.
 */
int neap_owner_open_in(neap_group group, neap_owner *owner);

/* ---- Charges by hand ---- */

/*
 * Bytes that are charged to a group and all above it, for memory of any kind: a cache, a mapping,
 * GPU memory. One thread at a time may use a charge. It may be moved in memory; of two copies only
 * one may be used.
 */
typedef struct neap_charge {
    uint64_t reserved[4];
} neap_charge;

/* A group that holds memory, and its bytes. */
typedef struct neap_holder {
    neap_group group;
    uint64_t bytes;
} neap_holder;

/* The limit that refused a charge. */
typedef struct neap_refusal {
    /* The group with the limit: the charged group, or one above it. */
    neap_group group;
    /* Its `max`, its charge, and the requested bytes. */
    uint64_t max_bytes;
    uint64_t charged_bytes;
    uint64_t need_bytes;
    /* The largest holders: groups directly below it, or itself; largest first, the rest 0. */
    neap_holder holders[3];
    /* NEAP_AT_LIMIT, NEAP_AT_DEADLINE or NEAP_TOO_LARGE. */
    uint64_t reason;
    uint64_t reserved[5];
} neap_refusal;

/*
 * Why a charge was refused.
 *
 * - NEAP_AT_LIMIT: a limit was reached, and reclaim freed too little.
 * - NEAP_AT_DEADLINE: there was too little room below a limit until the wait time was over.
 * - NEAP_TOO_LARGE: the charge is larger than a limit, so the caller need not wait.
 */
#define NEAP_AT_LIMIT 0u
#define NEAP_AT_DEADLINE 1u
#define NEAP_TOO_LARGE 2u

/*
 * What happens to a charge beyond a limit, after shrinkers have freed what they can.
 *
 * - NEAP_REFUSE: it is refused.
 * - NEAP_OVERCHARGE: it is granted and counted, for callers that must not fail.
 * - NEAP_INLINE_CHARGE: it is refused, but shrinkers with NEAP_INLINE run in this thread, which
 *   holds nothing that they wait for.
 */
#define NEAP_REFUSE 0u
#define NEAP_OVERCHARGE 1u
#define NEAP_INLINE_CHARGE 4u

/*
 * Charges a group and all above it, and stores the charge in `charge`, over any contents. While the
 * CPU has a stock, the call takes no lock, and no locked instruction if the machine permits. Above
 * a `high` the call waits, up to two seconds. NEAP_E_CHARGE, with the limit in `refusal`, which may
 * be NULL; NEAP_E_GROUP; NEAP_E_ARGUMENT for other flags.
 */
int neap_group_charge(neap_charge *charge, neap_group group, uint64_t bytes, unsigned flags, neap_refusal *refusal);

/*
 * Charges a group and all above it. At a limit the call waits for room, up to `wait_ns` nanoseconds
 * or NEAP_FOREVER. The oldest waiter is admitted first; a small charge may now and then be admitted
 * before it. A charge larger than a limit is refused at once. The caller holds nothing that other
 * threads need to make room. Errors of neap_group_charge.
 */
int neap_group_charge_wait(neap_charge *charge, neap_group group, uint64_t bytes, int64_t wait_ns, neap_refusal *refusal);

/*
 * Uncharges: returns a charge to the group that paid, or to its heir, and zeroes it.
 * NEAP_E_ARGUMENT if it was uncharged already.
 */
int neap_group_uncharge(neap_charge *charge);

/* Bytes of a charge; 0 if there is none. Signal-safe. */
uint64_t neap_charge_bytes(const neap_charge *charge);

/* The group that was charged, which may be gone; 0 if there is no charge. Signal-safe. */
neap_group neap_charge_group(const neap_charge *charge);

/*
 * Splits `bytes` off a charge into `part`, over any contents. NEAP_E_ARGUMENT if the charge has
 * fewer.
 */
int neap_charge_split(neap_charge *charge, neap_charge *part, uint64_t bytes);

/* Merges `other` into `charge`, and zeroes it. NEAP_E_ARGUMENT if they are of different groups. */
int neap_charge_merge(neap_charge *charge, neap_charge *other);

/* Moves a charge to another group. Errors of neap_group_charge; the charge is unchanged then. */
int neap_charge_move(neap_charge *charge, neap_group to, neap_refusal *refusal);

/* ---- Events ---- */

/* Events of groups. neap_group_info counts them, and says what each is. */
enum neap_event {
    NEAP_EVENT_LOW = 0,
    NEAP_EVENT_HIGH = 1,
    NEAP_EVENT_MAX = 2,
    NEAP_EVENT_REFUSED = 3,
    NEAP_EVENT_OVERCHARGED = 4,
    NEAP_EVENT_LIMIT_CHANGED = 5,
    /* Memory pressure of the group, as reclaim finds it. */
    NEAP_EVENT_PRESSURE_LOW = 6,
    NEAP_EVENT_PRESSURE_MEDIUM = 7,
    NEAP_EVENT_PRESSURE_CRITICAL = 8,
    /*
     * Of NEAP_ROOT alone: the container's level of pressure or its limit changed, or a listener is
     * new. neap_headroom_get has the numbers. While a listener wants this event, neap looks at the
     * container once a second.
     */
    NEAP_EVENT_CONTAINER = 9,
    /* The group is gone: the last event of a listener. */
    NEAP_EVENT_GONE = -1
};

/* A listener. It must not be moved until neap_group_unsubscribe. */
typedef struct neap_listener {
    uint64_t reserved[8];
} neap_listener;

/*
 * Called for an event of the subscribed group or of one below it, with the number of times since
 * the last call. Runs on neap's thread, or in neap_tick() without one. May do anything, even
 * unsubscribe.
 */
typedef void (*neap_told)(void *argument, neap_group group, int event, uint64_t times);

/*
 * Subscribes a function to events of a group and all below it, from now on, and to the group's end.
 * `events` has a bit for each event, 1u << NEAP_EVENT_MAX and so on, at least one. NEAP_E_GROUP,
 * NEAP_E_MEMORY, NEAP_E_ARGUMENT.
 */
int neap_group_subscribe(neap_listener *listener, neap_group group, unsigned events, neap_told told, void *argument);

/*
 * Subscribes an eventfd, for poll() and the like. neap adds 1 to it where it would call a function.
 * The numbers of neap_group_info_get show which event happened. The eventfd must have EFD_NONBLOCK,
 * and stay open until neap_group_unsubscribe. NEAP_E_EVENTFD, and errors of neap_group_subscribe.
 */
int neap_group_subscribe_fd(neap_listener *listener, neap_group group, unsigned events, int eventfd);

/*
 * Ends a subscription, even of a group that is gone, and zeroes the listener. Waits for a call that
 * runs on another thread; afterwards no call is made. NEAP_E_ARGUMENT if it has ended already.
 */
int neap_group_unsubscribe(neap_listener *listener);

/* ---- The container ---- */

/* Levels of memory pressure, by the room below the nearest limit and the time until it is used. */
enum neap_pressure {
    /* There is room, or no limit is visible: caches may grow. */
    NEAP_PRESSURE_ROOMY = 0,
    /* Caches keep their size. */
    NEAP_PRESSURE_STEADY = 1,
    NEAP_PRESSURE_LOW = 2,
    NEAP_PRESSURE_MEDIUM = 3,
    NEAP_PRESSURE_CRITICAL = 4,
    /* Memory is about to run out. */
    NEAP_PRESSURE_IMMINENT = 5
};

/* The room in the container or, without one, in the machine. Later versions may add fields at the end. */
typedef struct neap_headroom {
    /* The nearest limit, and the bytes used of it by all processes that share it. */
    uint64_t limit_bytes;
    uint64_t used_bytes;
    /* Milliseconds until the limit is reached at the observed growth; UINT64_MAX without growth. */
    uint64_t wall_ms;
    /* Number of times that the limit changed, or another became the nearest. */
    uint64_t limit_changes;
    /*
     * An enum neap_pressure. A level begins at one mark and ends at a wider one, so it does not
     * change each time that the room moves around a mark.
     */
    uint32_t pressure;
    uint32_t reserved;
} neap_headroom;

/*
 * Stores the room in the container, at most a second old. May read files of /proc and of control
 * groups, for about half a millisecond. Without a visible limit, `limit_bytes` is 0. `size` is
 * sizeof(neap_headroom) in the caller's version; fields that the library does not know are 0.
 * NEAP_E_ARGUMENT, also for a size of 0.
 *
 * An event loop subscribes an eventfd to NEAP_EVENT_CONTAINER of NEAP_ROOT, and calls this after
 * each read of the eventfd. The first read follows the subscription.
 */
int neap_headroom_get(neap_headroom *headroom, size_t size);

/* ---- Shrinkers and reclaim ---- */

/*
 * A shrinker: a cache's two functions. One returns the number of objects, the other frees some of
 * them.
 *
 * neap calls them when the group that pays for the cache, or one above it, is at its limit; when
 * the process is at its own limit; and in neap_reclaim. In malloc and neap_group_charge, neap's own
 * threads call them, since the caller may hold a lock that they take. The caller waits at most 200
 * ms for each request. These threads are created with the first shrinker.
 *
 * A shrinker is not called while one of its callbacks has run for more than 100 ms. In three cases
 * it is not called for a second, and for twice as long each further time: a callback used more than
 * 100 ms of CPU time; callbacks took more than 100 ms three times in a row, even without CPU time;
 * or a callback returned a number that cannot be true. A charge in a callback may exceed a limit by
 * an eighth, and is not throttled above a `high`.
 */
typedef uint64_t neap_shrinker;

/* A request to a callback. It must not be kept. */
typedef struct neap_asked {
    /* The group and the node of the objects in question. */
    neap_group group;
    uint32_t node;
    /*
     * 0 at first. A scan sets it if it frees nothing and cannot tell whether it was busy or
     * examined objects.
     */
    uint32_t unsure;
    /* Number of objects to examine; 0 for a count. */
    uint64_t to_scan;
    /* Number of objects examined. `to_scan`, unless the callback changes it. */
    uint64_t scanned;
    /* Bytes freed, which the callback may set. Not needed for memory that is charged to groups. */
    uint64_t freed_bytes;
    /* Bytes that are still needed; UINT64_MAX: all that there are. */
    uint64_t need;
    /* When the caller gives up, in nanoseconds of CLOCK_MONOTONIC; UINT64_MAX: it does not. */
    uint64_t deadline;
    /* How hard memory is to get: from 12 down to 0, where neap asks for all objects. */
    uint32_t priority;
    /* 0. */
    uint32_t reserved;
} neap_asked;

/*
 * Returns the approximate number of objects, without waiting. 0: there is none for now. NEAP_EMPTY:
 * there is none until neap_shrinker_mark. NEAP_STOP: it cannot count, because a lock is held.
 */
typedef uint64_t (*neap_count_fn)(void *data, const neap_asked *asked);
/*
 * Frees up to `to_scan` objects, and returns how many it freed. NEAP_STOP: it cannot free any,
 * because a lock is held. NEAP_EMPTY: there is none until neap_shrinker_mark. NEAP_DONE: it
 * examined all objects and frees none; neap does not call it again in this visit.
 */
typedef uint64_t (*neap_scan_fn)(void *data, neap_asked *asked);
/* Called once, after the last call of the other functions: `data` can be freed. */
typedef void (*neap_gone_fn)(void *data);

#define NEAP_EMPTY (UINT64_MAX - 1)
#define NEAP_STOP UINT64_MAX
#define NEAP_DONE (UINT64_MAX - 2)

/* The shrinker is called for each node; otherwise for node 0 only. */
#define NEAP_BY_NODE 1u
/* The shrinker is called for the groups that it has marked. */
#define NEAP_BY_GROUP 2u
/* The callbacks wait for nothing that a charging thread may hold. */
#define NEAP_INLINE 4u
/* For `seeks`: objects cost nothing to recreate. */
#define NEAP_NO_SEEKS UINT32_MAX

/* Description of a shrinker. Zero it first: later versions may add fields at the end. */
typedef struct neap_shrinker_spec {
    /* 1 to 56 bytes, no '/'. */
    const char *name;
    neap_count_fn count;
    neap_scan_fn scan;
    /* May be NULL. */
    neap_gone_fn gone;
    /* Argument of these functions. Any thread may call them, and several at a time. */
    void *data;
    /*
     * The group that pays for the cached objects, or whose heir does. Without NEAP_BY_GROUP the
     * shrinker is called for this group only. 0: no group pays, or several do.
     */
    neap_group group;
    /* Objects for each scan; 0: 128. Choose few if they are large. */
    uint64_t batch;
    /* Cost of recreating an object; 0: 2. */
    uint32_t seeks;
    /* NEAP_BY_NODE, NEAP_BY_GROUP, NEAP_INLINE. */
    uint32_t flags;
} neap_shrinker_spec;

/*
 * Registers a shrinker. `size` is the size of `spec`, sizeof(neap_shrinker_spec). NEAP_E_ARGUMENT,
 * NEAP_E_NAME, NEAP_E_GROUP, NEAP_E_FULL, NEAP_E_MEMORY. After an error `gone` is not called.
 */
int neap_shrinker_register(neap_shrinker *shrinker, const neap_shrinker_spec *spec, size_t size);

/*
 * Ends a shrinker, from any thread, even in a callback: no call of it begins from now on. Waits for
 * the shrinker's running calls only. Returns 0; or 1 in a callback of the shrinker, which does not
 * wait: `gone` is called when the running calls have ended. The caller holds nothing that the
 * callbacks take. NEAP_E_SHRINKER, also for neap's own shrinkers; NEAP_E_FENCE: the shrinker stays
 * registered.
 */
int neap_shrinker_unregister(neap_shrinker shrinker);

/*
 * Marks a group, or its heir, on a node for a shrinker with NEAP_BY_GROUP. Call it when the group
 * has its first object there, after `count` sees the object. May be called in callbacks.
 * NEAP_E_GROUP.
 */
int neap_shrinker_mark(neap_shrinker shrinker, neap_group group, unsigned node);

/*
 * Waits for all callbacks that run at the moment. NEAP_E_CALLBACK if the caller is one;
 * NEAP_E_FENCE.
 */
int neap_shrinkers_synchronize(void);

/*
 * For `scan` of a cache with several lists, which have `total` objects together: the part of
 * `to_scan` objects for the list with `count` of them. At least 1 for a list with objects, so that
 * a small list beside large ones is asked as well. Signal-safe.
 */
uint64_t neap_share(uint64_t to_scan, uint64_t count, uint64_t total);

/* Result of reclaim. Later versions may add fields at the end. */
typedef struct neap_reclaimed {
    uint64_t bytes;
    /* Objects that callbacks examined, and freed, as they reported. */
    uint64_t scanned;
    uint64_t freed;
    /* Not 0 if the time ran out. */
    uint64_t late;
} neap_reclaimed;

/*
 * Reclaims `bytes` from a group and all below it, for `nanoseconds` at most, or NEAP_FOREVER.
 * Shrinkers run in this thread, which holds nothing that they take. Returns 1 if any memory was
 * freed, or 0; always 0 in a callback. Stores the result in `reclaimed`, which may be NULL.
 * NEAP_E_GROUP.
 */
int neap_reclaim(neap_group group, uint64_t bytes, int64_t nanoseconds, neap_reclaimed *reclaimed, size_t size);

/* ---- LRU lists ---- */

/*
 * An LRU list: cached objects by group and node, oldest first. So a cache can evict the oldest
 * objects of a group. Each group's and node's part has a lock of its own, and is made at its first
 * use. When the group is deleted, its parts are its parent's at once. Objects are linked by a
 * neap_item inside them, so a list allocates memory for its parts only.
 */
typedef struct neap_list {
    uint64_t reserved[4];
} neap_list;

/* Link inside an object. All zeroes before it is first added to a list, and while it is on none. */
typedef struct neap_item {
    uint64_t reserved[3];
} neap_item;

/*
 * Initialises a list, over any contents. `flags` is NEAP_BY_GROUP, or 0: all items are the root's.
 * `shrinker` is one with NEAP_BY_GROUP, which is marked for a group with its first item on a node;
 * 0: none. NEAP_E_ARGUMENT, NEAP_E_MEMORY.
 */
int neap_list_init(neap_list *list, unsigned flags, neap_shrinker shrinker);

/*
 * Ends a list, which no thread uses any more. Items on it are on no list then: zero them before
 * they are used again. NEAP_E_ARGUMENT.
 */
int neap_list_destroy(neap_list *list);

/*
 * Adds an item as the newest of a group, or its heir, on a node. Returns 1, or 0 if the item is on
 * a list already. The item must not be moved until neap_list_del has returned true for it, or a
 * walk's `dispose` has got it. NEAP_E_GROUP: the group is gone, and its heir is not known;
 * NEAP_E_ARGUMENT.
 */
int neap_list_add(const neap_list *list, neap_group group, unsigned node, neap_item *item);

/*
 * Adds an item as neap_list_add does, for the group that pays for the item's memory (neap_group_of)
 * and on the node of that memory; for the root if no group pays. NEAP_E_ARGUMENT.
 */
int neap_list_add_by_memory(const neap_list *list, neap_item *item);

/*
 * Removes an item, whichever group it belongs to by now; returns whether this call did. If not, the
 * item is on no list or on another, or a walk has removed it and passes it to `dispose`. Only the
 * caller that got the item, here or in `dispose`, may free it.
 */
bool neap_list_del(const neap_list *list, neap_item *item);

/*
 * Makes an item that was used the newest of the group that has it now, on its node. Returns whether
 * it did so. It does not if the item is on no list, or on another, or a walk has taken it off. The
 * item must not have been freed.
 */
bool neap_list_touch(const neap_list *list, neap_item *item);

/*
 * Number of items of a group on a node at this moment, without those of groups below it; 0 if the
 * group is gone. Takes no lock.
 */
size_t neap_list_count(const neap_list *list, neap_group group, unsigned node);

/* What becomes of an item in a walk. */
enum neap_lru_status {
    /* The item is removed, and passed to `dispose`. */
    NEAP_REMOVED = 0,
    /* The item was in use, and becomes the newest. */
    NEAP_ROTATE = 1,
    /* The item stays where it is. */
    NEAP_SKIP = 2,
    /*
     * No verdict: the item's owner is locked. The list's lock is released for a moment, and the
     * walk starts again.
     */
    NEAP_RETRY = 3,
    /* The walk ends. */
    NEAP_OVER = 4
};

/* Result of a walk: verdicts requested, items removed, and 1 if a verdict ended it. */
typedef struct neap_walked {
    uint64_t scanned;
    uint64_t removed;
    uint64_t stopped;
} neap_walked;

/*
 * Walks the items of a group on a node, without those of groups below it. Passes up to `most` items
 * to `isolate`, the oldest first; at most 65536, unless all of them are removed. The walk visits
 * each item once, except for retries.
 *
 * - `isolate` runs under the items' lock, which fork waits for. It calls no function of neap,
 *   allocates and frees nothing, and only tries its own locks.
 * - `dispose` is called afterwards, without a lock, for each removed item. It may free the object.
 *
 * `walked` may be NULL. NEAP_E_GROUP, NEAP_E_ARGUMENT.
 */
int neap_list_walk(const neap_list *list, neap_group group, unsigned node, size_t most,
                   int (*isolate)(neap_item *item, void *argument), void (*dispose)(neap_item *item, void *argument),
                   void *argument, neap_walked *walked);

/* Whether an item is on a list, or was removed by a walk and not disposed of yet. Signal-safe. */
bool neap_item_is_linked(const neap_item *item);

/*
 * For `dispose`: lets the item be added to a list again, instead of freeing it. Returns whether a
 * walk had removed it. Signal-safe.
 */
bool neap_item_leave_hands(neap_item *item);

/* ---- The instance ---- */

/* Memory of per-CPU data. */
typedef struct neap_usage {
    /* Requested bytes, all copies together. */
    uint64_t allocated_bytes;
    /*
     * Bytes of populated pages; of populated pages without data; and of the reserve for NEAP_NEVER.
     */
    uint64_t populated_bytes;
    uint64_t empty_bytes;
    uint64_t reserve_bytes;
    /* Numbers of allocations, and of owners, not counting NEAP_NO_OWNER. */
    uint64_t allocations;
    uint64_t owners;
} neap_usage;

/*
 * Stores the current numbers; zeroes before the first allocation. May wait for a pass of neap's
 * thread. NEAP_E_ARGUMENT.
 */
int neap_usage_get(neap_usage *usage);

/*
 * Memory of the process in neap, in bytes. Later versions may add fields at the end. While no thread
 * allocates or frees:
 *
 * - mapped = active + page_list + free + retained;
 * - active = allocated + stack + barn + slab.
 */
typedef struct neap_stats {
    /*
     * In use by the program: objects by the size of their class, the ends of their slabs, and runs
     * of pages.
     */
    uint64_t allocated_bytes;
    /* Pages with memory in use: those of slabs and runs. */
    uint64_t active_bytes;
    /*
     * Resident memory of the heap, as the option `limit` counts it: active, cached and free pages,
     * and metadata. Pages of runs that the program has not touched count, too. Per-CPU data does
     * not.
     */
    uint64_t resident_bytes;
    /*
     * Address space from which memory was handed out so far; and its part without memory, which was
     * released or never touched.
     */
    uint64_t mapped_bytes;
    uint64_t retained_bytes;
    /* Tables beside the heap, as the option `limit` counts them. */
    uint64_t metadata_bytes;
    /*
     * Cached: free objects on the stacks of CPUs, in barns, and in slabs that are partly used; pages
     * in the page lists of CPUs.
     */
    uint64_t stack_bytes;
    uint64_t barn_bytes;
    uint64_t slab_bytes;
    uint64_t page_list_bytes;
    /* Free pages with memory, outside of page lists. */
    uint64_t free_bytes;
    /* Populated pages of per-CPU data, with and without data. neap_usage has more. */
    uint64_t percpu_bytes;
    uint64_t percpu_free_bytes;
    /* The limit in force, or NEAP_UNLIMITED. */
    uint64_t limit_bytes;
    /* Bytes of a page. */
    uint64_t page_bytes;
    /* NUMA nodes on which memory is kept apart. */
    uint32_t nodes;
    /* 1 if neap has a thread, which releases memory while all other threads are idle; else 0. */
    uint32_t has_thread;
    /*
     * Allocations that were refused so far: the limit, the max of a group with refuse:on, or the
     * system left no memory. Sizes that no allocation can have do not count.
     */
    uint64_t refused;
    /* Bytes between two samples of allocations, on average, by the option `profile`; 0: none. */
    uint64_t sampled_every_bytes;
} neap_stats;

/*
 * Stores the current numbers; zeroes before the first allocation, and the limit NEAP_UNLIMITED.
 * `size` is the size of `stats` in the caller's version, sizeof(neap_stats). Fields that the
 * library does not know are 0. Allocates nothing and reclaims nothing; may run every second.
 * NEAP_E_ARGUMENT, also for a size of 0.
 */
int neap_stats_get(neap_stats *stats, size_t size);

/*
 * Changes the option `key` of the process to `value`, both as in the variable NEAP: "limit" to
 * "512m". `neap options` lists the options that may change. The change takes effect at once. A
 * limit below the memory in use takes none of it away, but starts reclaim. NEAP_E_ARGUMENT for an
 * unknown key or value, NEAP_E_FIXED, NEAP_E_MEMORY.
 */
int neap_set(const char *key, const char *value);

/*
 * Writes a heap profile, the live samples of allocations, to a file for `neap profile --read`. The
 * content of an existing `file` is replaced. A new file is for its owner alone. NULL stands for
 * neap.PID.N.heap in the current folder, where N is the number of such calls so far or, if the file
 * exists, a later one. Needs the option `profile`. Allocates nothing. NEAP_E_PROFILE, NEAP_E_FILE.
 */
int neap_profile_dump(const char *file);

/*
 * Does the work that neap's thread does every 250 ms, for programs without this thread
 * (NEAP=background:off, one thread, or no preloaded library and no NEAP=background:on). Returns
 * whether a later call may find more work.
 */
bool neap_tick(void);

/* For neap_drain: every CPU, or every node. */
#define NEAP_ALL UINT32_MAX

/* The result of a drain. */
typedef struct neap_drained {
    /* Bytes of pages that left page lists, and that are free now. */
    uint64_t page_bytes;
    uint64_t free_bytes;
    /* Objects that went from stacks and barns to their slabs. */
    uint64_t objects;
    /*
     * CPUs of the scope; and lists and stacks that another thread held at each try, which are
     * unchanged.
     */
    uint32_t cpus;
    uint32_t skipped;
} neap_drained;

/*
 * Moves memory that CPUs cache to the free pages. `cpu` is the number of a CPU, from 0, or
 * NEAP_ALL; `node` is that of a node, or NEAP_ALL. Barns belong to no CPU, and are drained for
 * NEAP_ALL CPUs only. The drain ends once `until` bytes are free; with UINT64_MAX it does not end
 * early. It stops no thread. If another thread holds a list or a stack, it tries again for some
 * milliseconds. neap's ticks, or neap_release, release the memory to the system. Stores the result
 * in `drained`, which may be NULL; `size` is its size. NEAP_E_ARGUMENT for a CPU or node that does
 * not exist; nothing is drained then.
 */
int neap_drain(uint32_t cpu, uint32_t node, uint64_t until, neap_drained *drained, size_t size);

/* Releases all free memory to the system, except the reserve; returns whether there was any. */
bool neap_release(void);

#ifdef __cplusplus
}
#endif

#endif
