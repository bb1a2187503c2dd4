/* Memory groups as a C program uses them: charged by hand from threads while limits change and
 * groups come and go, in a child of fork, and by neap's malloc. The program counts the charges
 * of each thread itself, so an error on either side shows. */
#include "../programs/check.h"

#include <dlfcn.h>
#include <neap.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, TENANTS = 3, HELD = 64, ROUNDS = 200000, VISITORS = 2000, MAX = 1 << 20 };

static neap_group tenants[TENANTS];
static _Atomic int64_t held_bytes[TENANTS];
static _Atomic uint64_t refusals;
static atomic_bool done;

static uint64_t used(neap_group group) {
    uint64_t bytes = UINT64_MAX;
    CHECK(neap_group_used(group, &bytes) == NEAP_OK, "group %#llx", (unsigned long long)group);
    return bytes;
}

static neap_group_info info(neap_group group) {
    neap_group_info info;
    CHECK(neap_group_info_get(group, &info, sizeof info) == NEAP_OK && info.group == group, "info");
    return info;
}

static void took(int tenant, uint64_t bytes) {
    int64_t now = atomic_fetch_add(&held_bytes[tenant], (int64_t)bytes) + (int64_t)bytes;
    CHECK(now <= MAX, "tenant %d holds %lld bytes", tenant, (long long)now);
}

static void gives(int tenant, uint64_t bytes) { atomic_fetch_sub(&held_bytes[tenant], (int64_t)bytes); }

/* Holds charges of all tenants, and splits, merges, moves and ends them at random. An end is
 * counted before it is made, a charge after, so the count is never more than neap's. */
static void *work(void *argument) {
    uint64_t state = 1 + (uint64_t)(size_t)argument;
    neap_charge charges[HELD] = {{{0}}}, part;
    int whose[HELD] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        int at = (int)(next_random(&state) % HELD), tenant = (int)(next_random(&state) % TENANTS);
        neap_charge *charge = &charges[at];
        uint64_t bytes = neap_charge_bytes(charge);
        neap_refusal refusal;
        if (neap_charge_group(charge) == 0) {
            bytes = next_random(&state) % 4 == 0 ? next_random(&state) % (1 << 20) : 1 + next_random(&state) % 5000;
            int answer = neap_group_charge(charge, tenants[tenant], bytes, NEAP_REFUSE, &refusal);
            if (answer == NEAP_OK) {
                whose[at] = tenant;
                took(tenant, bytes);
            } else {
                CHECK(answer == NEAP_E_CHARGE && refusal.group == tenants[tenant], "%s", neap_error_text(answer));
                CHECK(refusal.need_bytes == bytes && refusal.max_bytes <= MAX, "%llu", (unsigned long long)refusal.max_bytes);
                atomic_fetch_add(&refusals, 1);
            }
        } else if (next_random(&state) % 8 == 0) {
            CHECK(neap_charge_split(charge, &part, bytes / 2) == NEAP_OK && neap_charge_bytes(&part) == bytes / 2, "a part");
            CHECK(neap_charge_merge(charge, &part) == NEAP_OK && neap_charge_bytes(charge) == bytes, "whole again");
        } else if (next_random(&state) % 8 == 0) {
            gives(whose[at], bytes);
            int answer = neap_charge_move(charge, tenants[tenant], NULL);
            CHECK(answer == NEAP_OK || answer == NEAP_E_CHARGE, "%s", neap_error_text(answer));
            if (answer == NEAP_OK) whose[at] = tenant;
            CHECK(neap_charge_group(charge) == tenants[whose[at]], "whose it is");
            took(whose[at], bytes);
        } else {
            gives(whose[at], bytes);
            CHECK(neap_group_uncharge(charge) == NEAP_OK && neap_group_uncharge(charge) == NEAP_E_ARGUMENT, "given back once");
        }
    }
    for (int at = 0; at < HELD; at++) {
        if (neap_charge_group(&charges[at]) == 0) continue;
        gives(whose[at], neap_charge_bytes(&charges[at]));
        CHECK(neap_group_uncharge(&charges[at]) == NEAP_OK, "given back");
    }
    return NULL;
}

/* Groups that come and go meanwhile, deleted before their charges end, and limits that change. */
static void *visit(void *argument) {
    (void)argument;
    uint64_t state = 99;
    neap_group last = 0;
    for (int i = 0; i < VISITORS || !done; i++) {
        neap_group group = 0;
        neap_charge charge;
        uint64_t before;
        CHECK(neap_group_create("tenant/0/visitor", &group) == NEAP_OK && group != last, "a visitor");
        CHECK(neap_group_charge(&charge, group, 1 + next_random(&state) % 100000, NEAP_OVERCHARGE, NULL) == NEAP_OK, "over");
        CHECK(neap_group_delete(group) == NEAP_OK && neap_group_delete(group) == NEAP_E_GROUP, "its end");
        CHECK(neap_group_uncharge(&charge) == NEAP_OK, "to its heir");
        last = group;
        uint64_t limit = MAX / 2 + next_random(&state) % (MAX / 2 + 1);
        CHECK(neap_group_set(tenants[i % TENANTS], NEAP_MAX, limit, &before) == NEAP_OK && before <= MAX, "a limit");
    }
    return NULL;
}

static void in_threads(void) {
    char path[NEAP_PATH_SIZE];
    for (int i = 0; i < TENANTS; i++) {
        snprintf(path, sizeof path, "tenant/%d", i);
        CHECK(neap_group_find_or_create(path, &tenants[i]) == NEAP_OK, "%s", path);
        CHECK(neap_group_set(tenants[i], NEAP_MAX, MAX, NULL) == NEAP_OK, "%s", path);
    }
    pthread_t threads[THREADS], visitor;
    CHECK(pthread_create(&visitor, NULL, visit, NULL) == 0, "a thread");
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0, "thread %zu", i);
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0, "thread %zu", i);
    done = true;
    CHECK(pthread_join(visitor, NULL) == 0, "the visitor");
    uint64_t refused = 0;
    for (int i = 0; i < TENANTS; i++) {
        neap_group_info about = info(tenants[i]);
        CHECK(used(tenants[i]) == 0 && held_bytes[i] == 0, "%llu stay", (unsigned long long)used(tenants[i]));
        CHECK(about.peak_bytes > 0 && about.changed_events >= VISITORS / TENANTS && about.children == 0, "what happened");
        refused += about.refused_events;
    }
    CHECK(refusals > 0 && refused >= refusals, "%llu of %llu", (unsigned long long)refused, (unsigned long long)refusals);
    CHECK(used(NEAP_ROOT) == 0, "%llu stay", (unsigned long long)used(NEAP_ROOT));
}

static void in_a_child(void) {
    neap_charge charge;
    CHECK(neap_group_charge(&charge, tenants[1], 1000, NEAP_REFUSE, NULL) == NEAP_OK, "a charge");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        neap_charge more;
        neap_group group;
        CHECK(neap_group_charge(&more, tenants[1], 500, NEAP_REFUSE, NULL) == NEAP_OK && used(tenants[1]) == 1500, "its own");
        CHECK(neap_group_uncharge(&charge) == NEAP_OK && used(NEAP_ROOT) == 500, "its copy");
        CHECK(neap_group_create("tenant/child", &group) == NEAP_OK && neap_group_delete(group) == NEAP_OK, "its group");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child's status %#x", (unsigned)status);
    CHECK(used(tenants[1]) == 1000 && neap_group_uncharge(&charge) == NEAP_OK && used(tenants[1]) == 0, "the parent's own");
}

static void *frees(void *block) {
    free(block);
    return NULL;
}

/* malloc charges the group that the thread is in, if malloc and groups are of one library. */
static void in_a_group(void) {
    Dl_info library = {0};
    bool ours = dladdr((void *)(uintptr_t)neap_group_enter, &library) && strstr(library.dli_fname, "libneap_malloc.so");
    neap_group group, below;
    neap_entered outer, inner;
    CHECK(neap_group_create("query/17", &group) == NEAP_OK && neap_group_create("query/17/sort", &below) == NEAP_OK, "groups");
    char *outside = malloc(1000);
    CHECK(neap_group_enter(&outer, group) == NEAP_OK, "in");
    char *small = malloc(1000), *large = calloc(1, 1 << 20);
    CHECK(neap_group_enter(&inner, below) == NEAP_OK, "further in");
    char *sorted = malloc(300000);
    CHECK(neap_group_leave(&inner) == NEAP_OK && neap_group_leave(&inner) == NEAP_E_ARGUMENT, "out once");
    small = realloc(small, 5000);
    CHECK(outside && small && large && sorted, "memory");
    fill(small, 5000, 1);
    CHECK(neap_group_leave(&outer) == NEAP_OK, "out");
    char *after = malloc(1000);
    uint64_t all = used(group), sorting = used(below), least = (1 << 20) + 5000;
    CHECK(ours ? sorting >= 300000 && sorting < 400000 : sorting == 0, "%llu", (unsigned long long)sorting);
    CHECK(ours ? all >= sorting + least && all < sorting + least + 100000 : all == 0, "%llu", (unsigned long long)all);
    CHECK(!ours || (info(group).objects_bytes >= 5000 && info(group).pages_bytes >= 1 << 20), "by kind");
    /* A group may go before its memory does, and other threads may free that. */
    CHECK(neap_group_delete(below) == NEAP_OK && used(group) == all, "inherited");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, frees, large) == 0 && pthread_join(thread, NULL) == 0, "a thread");
    CHECK(differs(small, 5000, 1) == 5000, "contents");
    free(small);
    free(sorted);
    free(outside);
    free(after);
    CHECK(used(group) == 0, "%llu stay", (unsigned long long)used(group));
    CHECK(neap_group_delete(group) == NEAP_OK && neap_group_find("query", &group) == NEAP_OK, "ends");
    CHECK(neap_group_delete(group) == NEAP_OK, "ends");
}

/* Ticks remove the remains of deleted groups: this program has one thread by now, so neap need
 * not have one. */
static void nothing_stays(uint64_t owners) {
    neap_group tenant, child = 0;
    int left = 0;
    char path[NEAP_PATH_SIZE];
    CHECK(neap_group_find("tenant", &tenant) == NEAP_OK, "the tenants");
    for (; neap_group_next(tenant, &child) == 1; left++)
        CHECK(neap_group_path(child, path, sizeof path) == 8 && strncmp(path, "tenant/", 7) == 0, "%s", path);
    CHECK(left == TENANTS && info(tenant).children == TENANTS && child == 0, "%d tenants", left);
    for (int i = 0; i < TENANTS; i++) CHECK(neap_group_delete(tenants[i]) == NEAP_OK, "tenant %d", i);
    CHECK(neap_group_delete(tenant) == NEAP_OK && neap_group_find("tenant", &tenant) == NEAP_E_GROUP, "all of them");
    neap_usage now;
    for (int waits = 0; neap_usage_get(&now) == NEAP_OK && now.owners > owners; waits++) {
        CHECK(waits < 2000, "%llu groups stay", (unsigned long long)(now.owners - owners));
        neap_tick();
        usleep(1000);
    }
}

static void what_is_none(void) {
    neap_charge none = {{0}};
    neap_group group = 1;
    neap_group_info about;
    CHECK(neap_group_uncharge(&none) == NEAP_E_ARGUMENT && neap_group_uncharge(NULL) == NEAP_E_ARGUMENT, "no charge");
    CHECK(neap_group_charge(&none, 12345, 1, NEAP_REFUSE, NULL) == NEAP_E_GROUP, "no group");
    CHECK(neap_group_delete(NEAP_ROOT) == NEAP_E_ARGUMENT && neap_group_delete(0) == NEAP_E_GROUP, "no end");
    CHECK(neap_group_create("a//b", &group) == NEAP_E_NAME && neap_group_create(NULL, &group) == NEAP_E_ARGUMENT, "no name");
    CHECK(neap_group_find("nowhere", &group) == NEAP_E_GROUP && group == 1, "nothing is written");
    CHECK(neap_group_info_get(NEAP_ROOT, &about, 0) == NEAP_E_ARGUMENT, "no size");
    CHECK(errno == 4711, "errno is not neap's to write");
}

int main(void) {
    errno = 4711;
    neap_usage first;
    what_is_none();
    CHECK(used(NEAP_ROOT) == 0 && neap_usage_get(&first) == NEAP_OK, "the root");
    in_threads();
    in_a_child();
    in_a_group();
    nothing_stays(first.owners);
    return finish();
}
