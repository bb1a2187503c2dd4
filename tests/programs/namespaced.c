/* Runs a command in namespaces of its own for control groups and mounts, where the mount of version 2
 * begins at the group of the process: namespaced COMMAND ARGUMENTS. The virtual machine of
 * `cargo xtask vm` runs it. */
#define _GNU_SOURCE
#include "check.h"

#include <sched.h>
#include <sys/mount.h>

int main(int argc, char **argv) {
    CHECK(argc > 1, "namespaced COMMAND ARGUMENTS");
    CHECK(unshare(CLONE_NEWCGROUP | CLONE_NEWNS) == 0, "unshare");
    CHECK(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0, "private mounts");
    CHECK(umount2("/sys/fs/cgroup", MNT_DETACH) == 0, "umount");
    CHECK(mount("none", "/sys/fs/cgroup", "cgroup2", 0, NULL) == 0, "mount");
    execv(argv[1], argv + 1);
    CHECK(0, "exec of %s", argv[1]);
    return finish();
}
