/* jemalloc's mallctl beside neap's malloc: values against allocations and neap.h, types and sizes,
 * the epoch, errors, numbers in place of names, heap profiles, and calls that release memory. With the argument
 * `absent`, without neap in the process: no name exists. */
#define _GNU_SOURCE
#include "check.h"

#include "../../crates/neap-c/include/neap.h"
#include <dlfcn.h>
#include <pthread.h>

#define MIB ((size_t)1 << 20)

static int (*ctl)(const char *, void *, size_t *, void *, size_t);
static int (*to_mib)(const char *, size_t *, size_t *);
static int (*by_mib)(const size_t *, size_t, void *, size_t *, void *, size_t);

static const char *const SIZES[] = {"stats.allocated", "stats.active",   "stats.metadata", "stats.resident",
                                    "stats.mapped",    "stats.retained", "arenas.page",    "arenas.quantum"};
#define COUNT(list) (sizeof list / sizeof *list)

static size_t value(const char *name) {
    size_t bytes = 0, length = sizeof bytes;
    CHECK(ctl(name, &bytes, &length, NULL, 0) == 0 && length == sizeof bytes, "%s", name);
    return bytes;
}

static uint64_t refresh(void) {
    uint64_t epoch = 1;
    size_t length = sizeof epoch;
    CHECK(ctl("epoch", &epoch, &length, &epoch, sizeof epoch) == 0, "a refresh");
    return epoch;
}

static int flag(const char *name) {
    unsigned char is_on = 2;
    size_t length = sizeof is_on;
    CHECK(ctl(name, &is_on, &length, NULL, 0) == 0 && is_on <= 1, "%s", name);
    return is_on;
}

static void values_are_those_of_the_last_epoch(void) {
    uint64_t first = refresh(), epoch = 0;
    size_t before = value("stats.allocated"), length = sizeof epoch;
    char *block = malloc(64 * MIB);
    CHECK(block, "memory");
    CHECK(value("stats.allocated") == before, "values change by themselves");
    CHECK(ctl("epoch", &epoch, &length, NULL, 0) == 0 && epoch == first, "a read changed the epoch");
    CHECK(refresh() == first + 1, "the next epoch");
    size_t now = value("stats.allocated");
    CHECK(now >= before + 64 * MIB && now < before + 66 * MIB, "%zu after %zu", now, before);
    CHECK(value("stats.active") >= now && value("stats.resident") > value("stats.active"), "more in use than there is");
    CHECK(value("stats.mapped") >= value("stats.active") && value("stats.metadata") > 0, "more in use than is mapped");
    free(block);
    CHECK(ctl("epoch", NULL, NULL, &epoch, sizeof epoch) == 0, "a refresh without a read");
    CHECK(value("stats.allocated") < before + 2 * MIB, "a free is not counted");
}

/* The first name whose value is not that of neap.h, or NULL. */
static const char *differing(const neap_stats *all) {
    const uint64_t expected[] = {all->allocated_bytes, all->active_bytes, all->metadata_bytes, all->resident_bytes,
                                 all->mapped_bytes - all->retained_bytes, all->retained_bytes, all->page_bytes, 16};
    for (size_t i = 0; i < COUNT(SIZES); i++)
        if (value(SIZES[i]) != expected[i]) return SIZES[i];
    return NULL;
}

static void values_are_those_of_neap(void) {
    int (*get)(neap_stats *, size_t) = dlsym(RTLD_DEFAULT, "neap_stats_get");
    neap_stats all;
    const char *other = "";
    /* neap's thread may release memory between the two. */
    for (int tries = 0; other && tries < 1000; tries++) {
        refresh();
        CHECK(get && get(&all, sizeof all) == NEAP_OK, "numbers");
        if ((other = differing(&all))) usleep(5000);
    }
    CHECK(!other, "%s: %zu", other, value(other));
    unsigned arenas = 0;
    size_t length = sizeof arenas;
    CHECK(ctl("arenas.narenas", &arenas, &length, NULL, 0) == 0 && arenas == all.nodes, "%u arenas", arenas);
    CHECK(ctl("opt.narenas", &arenas, &length, NULL, 0) == 0 && arenas == all.nodes, "%u arenas", arenas);
    CHECK(flag("background_thread") == (int)all.has_thread, "a thread or none");
    const char *version = NULL;
    length = sizeof version;
    CHECK(ctl("version", &version, &length, NULL, 0) == 0 && strcmp(version, "neap-" NEAP_VERSION) == 0, "%s", version);
}

static void errors_have_numbers(void) {
    const char *const unknown[] = {"",          "stats",         "stats.allocate", "stats.allocated.", "prof.dumps",
                                   "arena.0",   "arena.x.purge", "arena..purge",   "arena.-1.purge",   "arena.9999.purge",
                                   "opt.lg_prof_sample", "thread.tcache", "arena.+0.purge", "Epoch",            "\xff"};
    size_t bytes = 7, length = sizeof bytes;
    for (size_t i = 0; i < COUNT(unknown); i++) {
        CHECK(ctl(unknown[i], &bytes, &length, NULL, 0) == ENOENT && bytes == 7, "%s", unknown[i]);
    }
    for (size_t i = 0; i < COUNT(SIZES); i++) {
        length = sizeof bytes;
        CHECK(ctl(SIZES[i], &bytes, &length, &bytes, sizeof bytes) == EPERM, "%s is written", SIZES[i]);
        CHECK(ctl(SIZES[i], NULL, NULL, NULL, 0) == 0, "%s without a read", SIZES[i]);
    }
    /* Another size: what fits is read, and its length. */
    unsigned char place[16];
    memset(place, 9, sizeof place);
    length = 4;
    CHECK(ctl("arenas.page", place, &length, NULL, 0) == EINVAL && length == 4 && place[4] == 9, "four bytes");
    uint32_t low;
    memcpy(&low, place, sizeof low);
    CHECK(low == (uint32_t)sysconf(_SC_PAGESIZE), "%u", low);
    length = sizeof place;
    CHECK(ctl("arenas.page", place, &length, NULL, 0) == EINVAL && length == 8 && place[8] == 9, "16 bytes");
    length = 1;
    CHECK(ctl("arenas.narenas", place, &length, NULL, 0) == EINVAL && length == 1, "an unsigned");
    uint32_t half = 1;
    uint64_t epoch = refresh();
    CHECK(ctl("epoch", NULL, NULL, &half, sizeof half) == EINVAL && refresh() == epoch + 1, "half an epoch");
    CHECK(ctl("background_thread", NULL, NULL, place, 1) == EPERM, "the thread is written");
    length = sizeof bytes;
    CHECK(ctl("arena.0.purge", &bytes, &length, NULL, 0) == EPERM, "a purge has no value");
    CHECK(ctl("arena.0.purge", NULL, NULL, &bytes, sizeof bytes) == EPERM, "a purge takes no value");
}

static void numbers_stand_for_names(void) {
    for (size_t i = 0; i < COUNT(SIZES); i++) {
        size_t mib[8], parts = COUNT(mib), bytes = 0, length = sizeof bytes;
        CHECK(to_mib(SIZES[i], mib, &parts) == 0 && parts == 2, "%s has %zu parts", SIZES[i], parts);
        CHECK(by_mib(mib, parts, &bytes, &length, NULL, 0) == 0 && bytes == value(SIZES[i]), "%s", SIZES[i]);
        CHECK(by_mib(mib, 1, &bytes, &length, NULL, 0) == ENOENT, "half of %s", SIZES[i]);
        mib[1]++;
        CHECK(by_mib(mib, 2, &bytes, &length, NULL, 0) == ENOENT, "no numbers of %s", SIZES[i]);
    }
    size_t mib[3] = {0, 0, 77}, parts = 2;
    CHECK(to_mib("arena.5.purge", mib, &parts) == 0 && parts == 2 && mib[1] == 5 && mib[2] == 77, "a part of the numbers");
    parts = 3;
    CHECK(to_mib("arena.5.purge", mib, &parts) == 0 && parts == 3 && mib[1] == 5, "all numbers");
    mib[1] = 0;
    CHECK(by_mib(mib, 3, NULL, NULL, NULL, 0) == 0, "the first arena");
    mib[1] = 4096;
    CHECK(by_mib(mib, 3, NULL, NULL, NULL, 0) == 0, "all arenas");
    mib[1] = 4095;
    CHECK(by_mib(mib, 3, NULL, NULL, NULL, 0) == ENOENT, "no such arena");
    CHECK(by_mib(mib, 0, NULL, NULL, NULL, 0) == ENOENT && by_mib(mib, 100, NULL, NULL, NULL, 0) == ENOENT, "no length");
    parts = 3;
    CHECK(to_mib("no.such.name", mib, &parts) == ENOENT && parts == 3, "an unknown name");
}

static void purge_releases(void) {
    enum { MANY = 100000 };
    static void *blocks[MANY];
    for (int i = 0; i < MANY; i++) CHECK((blocks[i] = malloc(300)), "memory");
    for (int i = 0; i < MANY; i++) free(blocks[i]);
    CHECK(ctl("arena.0.decay", NULL, NULL, NULL, 0) == 0 && ctl("thread.tcache.flush", NULL, NULL, NULL, 0) == 0, "calls");
    CHECK(ctl("arena.4096.purge", NULL, NULL, NULL, 0) == 0, "a purge");
    refresh();
    size_t kept = value("stats.resident") - value("stats.metadata") - value("stats.allocated");
    CHECK(kept < 2 * MIB, "%zu bytes are kept", kept);
    CHECK(value("stats.retained") > 16 * MIB, "%zu bytes are retained", value("stats.retained"));
}

static int dump(const char *file) {
    return ctl("prof.dump", NULL, NULL, &file, sizeof file);
}

static void is_profile(const char *file) {
    char start[20] = "";
    FILE *stream = fopen(file, "r");
    CHECK(stream && fread(start, 1, sizeof start, stream) == sizeof start, "%s", file);
    fclose(stream);
    CHECK(memcmp(start, "neap heap profile 1\n", sizeof start) == 0, "%s is no heap profile", file);
    CHECK(unlink(file) == 0, "%s", file);
}

static void heap_profile_is_dumped(void) {
    static char *blocks[100];
    int (*set)(const char *, const char *) = dlsym(RTLD_DEFAULT, "neap_set");
    char folder[] = "/tmp/neap-mallctl-XXXXXX", name[64];
    CHECK(set && mkdtemp(folder) && chdir(folder) == 0, "a folder");
    CHECK(dump("file") == ENOENT && ctl("prof.dump", NULL, NULL, NULL, 0) == ENOENT, "a dump without samples");
    CHECK(flag("opt.prof") == 0 && flag("prof.active") == 0, "samples");
    CHECK(set("profile", "64k") == NEAP_OK, "the option");
    for (int i = 0; i < 100; i++) CHECK((blocks[i] = malloc(100000)), "memory");
    CHECK(flag("opt.prof") == 1 && flag("prof.active") == 1, "no samples");
    errno = 4711;
    CHECK(dump("file") == 0 && dump("file") == 0 && ctl("prof.dump", NULL, NULL, NULL, 0) == 0, "dumps");
    size_t mib[2], parts = 2;
    CHECK(to_mib("prof.dump", mib, &parts) == 0 && by_mib(mib, 2, NULL, NULL, NULL, 0) == 0, "a dump by numbers");
    CHECK(dump("/no/such/folder/file") == EFAULT && dump("") == EFAULT && dump(folder) == EFAULT, "no file");
    CHECK(errno == 4711, "errno was written");
    is_profile("file");
    for (int i = 1; i <= 2; i++) {
        snprintf(name, sizeof name, "neap.%d.%d.heap", (int)getpid(), i);
        is_profile(name);
    }
    unsigned char place[8];
    size_t length = sizeof place;
    CHECK(ctl("prof.dump", place, &length, NULL, 0) == EPERM, "a dump is read");
    CHECK(ctl("prof.dump", NULL, NULL, place, 1) == EINVAL, "a name of one byte");
    CHECK(ctl("prof.active", NULL, NULL, place, 1) == EPERM && ctl("opt.prof", NULL, NULL, place, 1) == EPERM, "a write");
    CHECK(set("profile", "off") == NEAP_OK && dump("file") == ENOENT && flag("prof.active") == 0, "the end");
    for (int i = 0; i < 100; i++) free(blocks[i]);
    CHECK(chdir("/") == 0 && rmdir(folder) == 0, "%s holds another file", folder);
}

static void *refreshes(void *argument) {
    for (int i = 0; i < 2000; i++) {
        refresh();
        CHECK(value("stats.allocated") > 0 && value("arenas.page") == (size_t)sysconf(_SC_PAGESIZE), "torn values");
        free(malloc(i));
    }
    return argument;
}

static void threads_refresh_at_once(void) {
    pthread_t threads[4];
    uint64_t first = refresh();
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, refreshes, NULL) == 0, "a thread");
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0, "its end");
    CHECK(refresh() == first + 8001, "an epoch was lost");
}

int main(int argc, char **argv) {
    ctl = dlsym(RTLD_DEFAULT, "mallctl");
    to_mib = dlsym(RTLD_DEFAULT, "mallctlnametomib");
    by_mib = dlsym(RTLD_DEFAULT, "mallctlbymib");
    CHECK(ctl && to_mib && by_mib, "a function is missing");
    errno = 4711;
    if (argc > 1 && strcmp(argv[1], "absent") == 0) {
        size_t bytes, length = sizeof bytes, mib[3] = {0}, parts = 3;
        for (size_t i = 0; i < COUNT(SIZES); i++) CHECK(ctl(SIZES[i], &bytes, &length, NULL, 0) == ENOENT, "%s", SIZES[i]);
        CHECK(ctl("epoch", NULL, NULL, &length, sizeof length) == ENOENT && ctl("version", NULL, NULL, NULL, 0) == ENOENT, "names");
        CHECK(to_mib("epoch", mib, &parts) == ENOENT && by_mib(mib, 1, NULL, NULL, NULL, 0) == ENOENT, "numbers");
        return finish();
    }
    values_are_those_of_the_last_epoch();
    values_are_those_of_neap();
    errors_have_numbers();
    numbers_stand_for_names();
    purge_releases();
    CHECK(errno == 4711, "errno was written");
    heap_profile_is_dumped();
    threads_refresh_at_once();
    return finish();
}
