/*
 * An event loop that hears how much memory its container has left.
 *
 *   cc -o headroom headroom.c $(pkg-config --cflags --libs neap) && ./headroom 60
 *
 * It prints a line for each event until the given number of seconds is over. Without a number it
 * ends after the first event. A server would resize its caches, or refuse requests, by the level.
 */
#include <neap.h>

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static const char *const LEVELS[] = {"roomy", "steady", "low", "medium", "critical", "imminent"};

static void check(int answer, const char *what) {
    if (answer < 0) {
        fprintf(stderr, "%s: %s\n", what, neap_error_text(answer));
        exit(EXIT_FAILURE);
    }
}

int main(int count, char **arguments) {
    time_t end = count > 1 ? time(NULL) + atoi(arguments[1]) : 0;
    int changed = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    neap_listener listener;
    check(neap_group_subscribe_fd(&listener, NEAP_ROOT, 1u << NEAP_EVENT_CONTAINER, changed), "a listener");
    do {
        /* An event loop would have more to poll for. neap_tick() is for programs without neap's thread. */
        struct pollfd loop = {.fd = changed, .events = POLLIN};
        if (poll(&loop, 1, 250) == 0) {
            neap_tick();
            continue;
        }
        uint64_t events;
        if (read(changed, &events, sizeof events) != (ssize_t)sizeof events) continue;
        neap_headroom room;
        check(neap_headroom_get(&room, sizeof room), "the headroom");
        printf("%s: %llu of %llu MiB used; the limit changed %llu times\n", LEVELS[room.pressure],
               (unsigned long long)(room.used_bytes >> 20), (unsigned long long)(room.limit_bytes >> 20),
               (unsigned long long)room.limit_changes);
        fflush(stdout);
        if (end == 0) break;
    } while (end == 0 || time(NULL) < end);
    check(neap_group_unsubscribe(&listener), "the end of a listener");
    close(changed);
    return EXIT_SUCCESS;
}
