//! A table of made trees. Each is named after the mistake that it guards against.
//!
//! A tree holds only the files that its case is about. The expected level, limit, used bytes and
//! headroom follow by hand from the numbers in it.

use super::{GIB, MIB, Tree};

/// 16 GiB, of which 12 GiB are available.
pub(crate) const MEMINFO: &str =
    "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 12582912 kB\nSwapFree: 2097152 kB\n";
const MOUNT_V1: &str = "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs rw\n35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
pub(crate) const MOUNT_V2: &str = "25 22 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const NONE_V1: &str = "9223372036854771712\n";

/// A group of version 2: path below the mount point, max, usage in MiB, lines of memory.stat.
pub(crate) type Group2 = (&'static str, &'static str, u64, &'static str);
/// A group of version 1: path, limit, usage in MiB, lines of memory.stat.
pub(crate) type Group1 = (&'static str, &'static str, u64, &'static str);

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) members: &'static str,
    pub(crate) mounts: &'static str,
    /// Groups of version 2 below a mount point.
    pub(crate) v2: (&'static str, &'static [Group2]),
    /// Groups of version 1 below a mount point.
    pub(crate) v1: (&'static str, &'static [Group1]),
    /// Further files; they replace the ones above.
    pub(crate) files: &'static [(&'static str, &'static str)],
    /// The level that binds: a directory, or "machine", "hidden", "address space", "data".
    pub(crate) level: &'static str,
    /// Smallest limit of all levels.
    pub(crate) limit: u64,
    /// Used bytes of the level that binds.
    pub(crate) used: u64,
    pub(crate) headroom: u64,
}

const CASE: Case = Case {
    name: "",
    members: "0::/a\n",
    mounts: MOUNT_V2,
    v2: ("/sys/fs/cgroup", &[]),
    v1: ("/sys/fs/cgroup/memory", &[]),
    files: &[],
    level: "machine",
    limit: 16 * GIB,
    used: 4 * GIB,
    headroom: 12 * GIB,
};

/// A group with a limit of 1 GiB that uses 100 MiB.
const USUAL: Case = Case { limit: GIB, used: 100 * MIB, headroom: 924 * MIB, ..CASE };

pub(crate) const TABLE: &[Case] = &[
    Case {
        name: "fixed path instead of the mount point",
        mounts: "25 22 0:22 / /run/groups rw - cgroup2 none rw\n",
        v2: ("/run/groups", &[("/a", "1073741824", 512, "")]),
        files: &[("/sys/fs/cgroup/memory.max", "5\n"), ("/sys/fs/cgroup/memory.current", "5\n")],
        level: "/run/groups/a",
        limit: GIB,
        used: 512 * MIB,
        headroom: 512 * MIB,
        ..CASE
    },
    Case {
        name: "only the leaf is read",
        members: "0::/a/b\n",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 1000, ""), ("/a/b", "2147483648", 100, "")]),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 1000 * MIB,
        headroom: 24 * MIB,
        ..CASE
    },
    Case {
        name: "only the root of the mount is read",
        members: "0::/a/b\n",
        v2: ("/sys/fs/cgroup", &[("/a", "max", 1000, ""), ("/a/b", "2147483648", 100, "")]),
        level: "/sys/fs/cgroup/a/b",
        limit: 2 * GIB,
        used: 100 * MIB,
        headroom: 1948 * MIB,
        ..CASE
    },
    Case {
        name: "max at the leaf is taken for unlimited",
        members: "0::/a/b/c\n",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 300, ""), ("/a/b", "max", 200, ""), ("/a/b/c", "max", 100, "")]),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 300 * MIB,
        headroom: 724 * MIB,
        ..CASE
    },
    Case {
        name: "the smallest limit is taken for the least headroom",
        members: "0::/a/b\n",
        v2: ("/sys/fs/cgroup", &[("/a", "4294967296", 4000, ""), ("/a/b", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 4000 * MIB,
        headroom: 96 * MIB,
        ..CASE
    },
    Case {
        name: "the middle of three levels is skipped",
        members: "0::/a/b/c\n",
        v2: (
            "/sys/fs/cgroup",
            &[("/a", "8589934592", 900, ""), ("/a/b", "1073741824", 800, ""), ("/a/b/c", "2147483648", 100, "")],
        ),
        level: "/sys/fs/cgroup/a/b",
        limit: GIB,
        used: 800 * MIB,
        headroom: 224 * MIB,
        ..CASE
    },
    Case {
        name: "0:: is taken for memory on version 2",
        members: "4:memory:/x\n0::/a\n",
        mounts: "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs rw\n35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        v1: ("/sys/fs/cgroup/memory", &[("/x", "1073741824", 100, ""), ("", NONE_V1, 5000, "")]),
        files: &[("/sys/fs/cgroup/unified/a/cgroup.procs", "1\n")],
        level: "/sys/fs/cgroup/memory/x",
        ..USUAL
    },
    Case {
        name: "hybrid with memory on version 2 is taken for version 1",
        members: "9:name=systemd:/x\n4:cpu:/x\n0::/a\n",
        mounts: "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        v2: ("/sys/fs/cgroup/unified", &[("/a", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup/unified/a",
        ..USUAL
    },
    Case {
        name: "a hierarchy named memory is taken for the controller",
        members: "3:name=memory:/x\n0::/a\n",
        mounts: "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,name=memory\n25 22 0:22 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n",
        v1: ("/sys/fs/cgroup/memory", &[("/x", "5", 100, "")]),
        v2: ("/sys/fs/cgroup/unified", &[("/a", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup/unified/a",
        ..USUAL
    },
    Case {
        name: "co-mounted controllers are not found",
        members: "5:cpuset,cpu,memory,pids:/x\n",
        mounts: "35 31 0:32 / /cgroup/all rw - cgroup none rw,cpuset,cpu,memory,pids\n",
        v1: ("/cgroup/all", &[("/x", "1073741824", 100, "")]),
        level: "/cgroup/all/x",
        ..USUAL
    },
    Case {
        name: "a version 1 line without a mount hides version 2",
        members: "4:memory:/x\n0::/a\n",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup/a",
        ..USUAL
    },
    Case {
        name: "the number for no limit of version 1 is taken for RAM",
        members: "4:memory:/x\n",
        mounts: MOUNT_V1,
        v1: ("/sys/fs/cgroup/memory", &[("/x", NONE_V1, 100, ""), ("", NONE_V1, 5000, "")]),
        ..CASE
    },
    Case {
        name: "the number for no limit with pages of 64 KiB is taken for RAM",
        members: "4:memory:/x\n",
        mounts: MOUNT_V1,
        v1: ("/sys/fs/cgroup/memory", &[("/x", "9223372036854710272\n", 100, "")]),
        ..CASE
    },
    Case { name: "a limit above RAM is believed", v2: ("/sys/fs/cgroup", &[("/a", "68719476736", 100, "")]), ..CASE },
    Case {
        name: "file cache is counted as used",
        v2: (
            "/sys/fs/cgroup",
            &[("/a", "1073741824", 1000, "anon 104857600\nactive_file 314572800\ninactive_file 524288000\n")],
        ),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 200 * MIB,
        headroom: 824 * MIB,
        ..CASE
    },
    Case {
        name: "reclaimable slab is counted as used",
        v2: (
            "/sys/fs/cgroup",
            &[("/a", "1073741824", 1000, "slab_unreclaimable 52428800\nslab_reclaimable 419430400\nslab 471859200\n")],
        ),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 600 * MIB,
        headroom: 424 * MIB,
        ..CASE
    },
    Case {
        name: "dirty file pages are counted as free",
        v2: (
            "/sys/fs/cgroup",
            &[("/a", "1073741824", 1000, "inactive_file 524288000\nfile_dirty 209715200\nfile_writeback 104857600\n")],
        ),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 800 * MIB,
        headroom: 224 * MIB,
        ..CASE
    },
    Case {
        name: "resident pages are taken for usage, without kernel memory and sockets",
        v2: (
            "/sys/fs/cgroup",
            &[("/a", "1073741824", 1000, "anon 104857600\nkernel 524288000\nsock 314572800\npercpu 104857600\n")],
        ),
        files: &[("/proc/self/status", "VmRSS: 102400 kB\n"), ("/proc/self/statm", "30000 25600 9 1 0 9 0\n")],
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 1000 * MIB,
        headroom: 24 * MIB,
        ..CASE
    },
    Case {
        name: "tmpfs and shared memory are counted as file cache",
        v2: (
            "/sys/fs/cgroup",
            &[("/a", "1073741824", 1000, "file 943718400\nshmem 943718400\ninactive_anon 943718400\nactive_file 0\n")],
        ),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 1000 * MIB,
        headroom: 24 * MIB,
        ..CASE
    },
    Case {
        name: "keys of memory.stat are taken by position",
        v2: (
            "/sys/fs/cgroup",
            &[(
                "/a",
                "1073741824",
                1000,
                "a_new_key 7\nworkingset_activate_file 9\nactive_file 419430400\nactive_file_new 1\n",
            )],
        ),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 600 * MIB,
        headroom: 424 * MIB,
        ..CASE
    },
    Case {
        name: "own sums of version 1 are taken for those of the hierarchy",
        members: "4:memory:/x\n",
        mounts: MOUNT_V1,
        v1: (
            "/sys/fs/cgroup/memory",
            &[(
                "/x",
                "1073741824",
                1000,
                "inactive_file 0\nactive_file 0\ntotal_inactive_file 209715200\ntotal_active_file 209715200\ntotal_dirty 104857600\ntotal_writeback 0\n",
            )],
        ),
        level: "/sys/fs/cgroup/memory/x",
        limit: GIB,
        used: 700 * MIB,
        headroom: 324 * MIB,
        ..CASE
    },
    Case {
        name: "old version 1 without sums of the hierarchy has no cache",
        members: "4:memory:/x\n",
        mounts: MOUNT_V1,
        v1: ("/sys/fs/cgroup/memory", &[("/x", "1073741824", 1000, "inactive_file 419430400\nactive_file 0\n")]),
        level: "/sys/fs/cgroup/memory/x",
        limit: GIB,
        used: 600 * MIB,
        headroom: 424 * MIB,
        ..CASE
    },
    Case {
        name: "a parent without use_hierarchy is counted",
        members: "4:memory:/x/y\n",
        mounts: MOUNT_V1,
        v1: ("/sys/fs/cgroup/memory", &[("/x/y", "2147483648", 100, ""), ("/x", "1073741824", 1000, "")]),
        files: &[("/sys/fs/cgroup/memory/x/memory.use_hierarchy", "0\n")],
        level: "/sys/fs/cgroup/memory/x/y",
        limit: 2 * GIB,
        used: 100 * MIB,
        headroom: 1948 * MIB,
        ..CASE
    },
    Case {
        name: "a parent with use_hierarchy is skipped",
        members: "4:memory:/x/y\n",
        mounts: MOUNT_V1,
        v1: ("/sys/fs/cgroup/memory", &[("/x/y", "2147483648", 100, ""), ("/x", "1073741824", 1000, "")]),
        files: &[("/sys/fs/cgroup/memory/x/memory.use_hierarchy", "1\n")],
        level: "/sys/fs/cgroup/memory/x",
        limit: GIB,
        used: 1000 * MIB,
        headroom: 24 * MIB,
        ..CASE
    },
    Case {
        name: "a grandparent behind a break of the hierarchy is counted",
        members: "4:memory:/w/x/y\n",
        mounts: MOUNT_V1,
        v1: (
            "/sys/fs/cgroup/memory",
            &[("/w/x/y", "2147483648", 100, ""), ("/w/x", NONE_V1, 100, ""), ("/w", "1073741824", 1000, "")],
        ),
        files: &[
            ("/sys/fs/cgroup/memory/w/x/memory.use_hierarchy", "0\n"),
            ("/sys/fs/cgroup/memory/w/memory.use_hierarchy", "1\n"),
        ],
        level: "/sys/fs/cgroup/memory/w/x/y",
        limit: 2 * GIB,
        used: 100 * MIB,
        headroom: 1948 * MIB,
        ..CASE
    },
    Case {
        name: "a limit above the mount is missed although version 1 shows it",
        members: "4:memory:/docker/x\n",
        mounts: "35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        v1: ("/sys/fs/cgroup/memory", &[("", NONE_V1, 100, "hierarchical_memory_limit 536870912\n")]),
        level: "hidden",
        limit: 512 * MIB,
        used: 100 * MIB,
        headroom: 412 * MIB,
        ..CASE
    },
    Case {
        name: "hierarchical_memory_limit of a visible level is counted as hidden",
        members: "4:memory:/x/y\n",
        mounts: MOUNT_V1,
        v1: (
            "/sys/fs/cgroup/memory",
            &[
                ("/x/y", NONE_V1, 100, "hierarchical_memory_limit 1073741824\n"),
                ("/x", "1073741824", 900, "hierarchical_memory_limit 1073741824\n"),
            ],
        ),
        level: "/sys/fs/cgroup/memory/x",
        limit: GIB,
        used: 900 * MIB,
        headroom: 124 * MIB,
        ..CASE
    },
    Case {
        name: "memory and swap together are full and memory is not",
        members: "4:memory:/x\n",
        mounts: MOUNT_V1,
        v1: ("/sys/fs/cgroup/memory", &[("/x", "1073741824", 500, "")]),
        files: &[
            ("/sys/fs/cgroup/memory/x/memory.memsw.limit_in_bytes", "1073741824\n"),
            ("/sys/fs/cgroup/memory/x/memory.memsw.usage_in_bytes", "1048576000\n"),
        ],
        level: "/sys/fs/cgroup/memory/x",
        limit: GIB,
        used: 500 * MIB,
        headroom: 24 * MIB,
        ..CASE
    },
    Case {
        name: "the group's path is not cut by the root of a bind mount",
        members: "4:memory:/docker/x\n",
        mounts: "35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        v1: ("/sys/fs/cgroup/memory", &[("", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup/memory",
        ..USUAL
    },
    Case {
        name: "a group below the root of a bind mount is not found",
        members: "4:memory:/docker/x/init\n",
        mounts: "35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        v1: ("/sys/fs/cgroup/memory", &[("/init", "1073741824", 100, ""), ("", "2147483648", 2000, "")]),
        level: "/sys/fs/cgroup/memory",
        limit: GIB,
        used: 2000 * MIB,
        headroom: 48 * MIB,
        ..CASE
    },
    Case {
        name: "the visible root of a namespace is taken for the real root",
        members: "0::/\n",
        v2: ("/sys/fs/cgroup", &[("", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup",
        ..USUAL
    },
    Case {
        name: "the host's path is not visible in a container",
        members: "0::/system.slice/docker-x.scope\n",
        v2: ("/sys/fs/cgroup", &[("", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup",
        ..USUAL
    },
    Case {
        name: "a directory of the container with the name of a host's is an ancestor",
        members: "0::/system.slice/docker-x.scope\n",
        v2: ("/sys/fs/cgroup", &[("", "1073741824", 100, ""), ("/system.slice", "5", 100, "")]),
        level: "/sys/fs/cgroup",
        ..USUAL
    },
    Case {
        name: "a group outside of the namespace is looked for at its root",
        members: "0::/../other\n",
        v2: ("/sys/fs/cgroup", &[("", "5", 100, ""), ("/other", "6", 100, "")]),
        ..CASE
    },
    Case {
        name: "a process that was moved above its mount has the mount's limit",
        members: "4:memory:/docker\n",
        mounts: "35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        v1: ("/sys/fs/cgroup/memory", &[("", "5", 100, "")]),
        ..CASE
    },
    Case {
        name: "a mount from outside of the namespace is taken for the namespace's root",
        members: "0::/\n",
        mounts: "25 22 0:22 /../.. /sys/fs/cgroup rw - cgroup2 none rw\n",
        v2: ("/sys/fs/cgroup", &[("", "1073741824", 1000, "")]),
        level: "/sys/fs/cgroup",
        limit: GIB,
        used: 1000 * MIB,
        headroom: 24 * MIB,
        ..CASE
    },
    Case {
        name: "a sibling is found below a mount from outside of the namespace",
        members: "0::/../b\n",
        mounts: "25 22 0:22 /.. /sys/fs/cgroup rw - cgroup2 none rw\n",
        v2: ("/sys/fs/cgroup", &[("/b", "1073741824", 100, ""), ("", "max", 100, "")]),
        level: "/sys/fs/cgroup/b",
        ..USUAL
    },
    Case {
        name: "escapes of a mount point are not replaced",
        members: "0::/a\n",
        mounts: "25 22 0:22 / /run/my\\040groups\\134x rw - cgroup2 none rw\n",
        v2: ("/run/my groups\\x", &[("/a", "1073741824", 100, "")]),
        level: "/run/my groups\\\\x/a",
        ..USUAL
    },
    Case {
        name: "escapes of a mount root are not replaced",
        members: "4:memory:/my group/x\n",
        mounts: "35 31 0:32 /my\\040group /cg rw - cgroup cgroup rw,memory\n",
        v1: ("/cg", &[("/x", "1073741824", 100, "")]),
        level: "/cg/x",
        ..USUAL
    },
    Case {
        name: "colons split the group's path",
        members: "0::/a:b:c\n",
        v2: ("/sys/fs/cgroup", &[("/a:b:c", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup/a:b:c",
        ..USUAL
    },
    Case {
        name: "optional fields and an empty source move the columns",
        mounts: "25 22 0:22 / /cg rw,relatime shared:4 master:1 propagate_from:2 unbindable - cgroup2  rw\n",
        v2: ("/cg", &[("/a", "1073741824", 100, "")]),
        level: "/cg/a",
        ..USUAL
    },
    Case {
        name: "the first of several mounts is taken",
        members: "4:memory:/docker/x\n",
        mounts: "34 31 0:32 /docker/x /mnt/own ro - cgroup cgroup rw,memory\n35 31 0:32 / /mnt/all ro - cgroup cgroup rw,memory\n",
        v1: ("/mnt/all", &[("/docker/x", NONE_V1, 100, ""), ("/docker", "1073741824", 1000, ""), ("", NONE_V1, 1, "")]),
        files: &[("/mnt/own/memory.limit_in_bytes", NONE_V1), ("/mnt/own/memory.usage_in_bytes", "104857600\n")],
        level: "/mnt/all/docker",
        limit: GIB,
        used: 1000 * MIB,
        headroom: 24 * MIB,
        ..CASE
    },
    Case {
        name: "a mount that is hidden by a later one is taken",
        members: "4:memory:/docker/x\n",
        mounts: "34 31 0:32 / /cg ro - cgroup cgroup rw,memory\n35 34 0:32 /docker/x /cg ro - cgroup cgroup rw,memory\n",
        v1: ("/cg", &[("", "1073741824", 100, "")]),
        files: &[],
        level: "/cg",
        ..USUAL
    },
    Case {
        name: "a mount that is hidden by one of another group is taken",
        members: "4:memory:/docker/x\n",
        mounts: "34 31 0:32 / /cg ro - cgroup cgroup rw,memory\n35 34 0:32 /other /cg ro - cgroup cgroup rw,memory\n",
        v1: ("/cg", &[("", "5", 100, "")]),
        ..CASE
    },
    Case {
        name: "a mount of another type on the point is read",
        mounts: "20 1 0:5 / /sys/fs/cgroup rw - tmpfs cgroup2 rw,memory\n25 20 0:22 / /cg rw - cgroup2 none rw\n",
        v2: ("/cg", &[("/a", "1073741824", 100, "")]),
        files: &[("/sys/fs/cgroup/a/memory.max", "5\n"), ("/sys/fs/cgroup/a/memory.current", "5\n")],
        level: "/cg/a",
        ..USUAL
    },
    Case {
        name: "a removed group has no ancestors",
        members: "0::/a/b (deleted)\n",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 100, "")]),
        level: "/sys/fs/cgroup/a",
        ..USUAL
    },
    Case {
        name: "a living group is called deleted and is taken for removed",
        members: "0::/a (deleted)\n",
        v2: ("/sys/fs/cgroup", &[("/a (deleted)", "1073741824", 100, ""), ("/a", "5", 100, "")]),
        level: "/sys/fs/cgroup/a (deleted)",
        ..USUAL
    },
    Case {
        name: "a group without the memory controller ends the search",
        members: "0::/a/b\n",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 100, "")]),
        files: &[("/sys/fs/cgroup/a/b/cgroup.procs", "1\n"), ("/sys/fs/cgroup/a/b/cgroup.type", "domain\n")],
        level: "/sys/fs/cgroup/a",
        ..USUAL
    },
    Case {
        name: "a threaded group is taken for the end of the tree",
        members: "0::/a/t1/t2\n",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 100, "")]),
        files: &[
            ("/sys/fs/cgroup/a/t1/t2/cgroup.type", "threaded\n"),
            ("/sys/fs/cgroup/a/t1/t2/cgroup.procs", ""),
            ("/sys/fs/cgroup/a/t1/cgroup.procs", ""),
        ],
        level: "/sys/fs/cgroup/a",
        ..USUAL
    },
    Case {
        name: "the machine has less than the group may use",
        v2: ("/sys/fs/cgroup", &[("/a", "8589934592", 100, "")]),
        files: &[("/proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 51200 kB\n")],
        level: "machine",
        limit: 8 * GIB,
        used: 16 * GIB - 50 * MIB,
        headroom: 50 * MIB,
        ..CASE
    },
    Case {
        name: "the host's MemAvailable is shown for a full container",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 1024, "")]),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: GIB,
        headroom: 0,
        ..CASE
    },
    Case {
        name: "an old kernel without MemAvailable has no memory",
        members: "",
        mounts: "",
        files: &[(
            "/proc/meminfo",
            "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nCached: 9999999 kB\nActive(file): 1048576 kB\nInactive(file): 2097152 kB\nDirty: 1048576 kB\nSReclaimable: 1048576 kB\n",
        )],
        used: 12 * GIB,
        headroom: 4 * GIB,
        ..CASE
    },
    Case {
        name: "usage above a limit that was cut underflows",
        v2: ("/sys/fs/cgroup", &[("/a", "104857600", 1000, "inactive_file 104857600\n")]),
        level: "/sys/fs/cgroup/a",
        limit: 100 * MIB,
        used: 900 * MIB,
        headroom: 0,
        ..CASE
    },
    Case {
        name: "more reclaimable than usage underflows",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 100, "inactive_file 999999999\n")]),
        level: "/sys/fs/cgroup/a",
        limit: GIB,
        used: 0,
        headroom: GIB,
        ..CASE
    },
    Case {
        name: "RLIMIT_AS is ignored",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 100, "")]),
        files: &[
            (
                "/proc/self/limits",
                "Limit   Soft Limit  Hard Limit  Units\nMax data size   unlimited  unlimited  bytes\nMax address space   536870912   unlimited   bytes\n",
            ),
            ("/proc/self/status", "Name: x\nVmSize: 409600 kB\nVmData: 1024 kB\n"),
        ],
        level: "address space",
        limit: 512 * MIB,
        used: 400 * MIB,
        headroom: 112 * MIB,
        ..CASE
    },
    Case {
        name: "RLIMIT_DATA is compared with address space",
        files: &[
            (
                "/proc/self/limits",
                "Max data size   1073741824  unlimited  bytes\nMax address space   unlimited   unlimited   bytes\n",
            ),
            ("/proc/self/status", "VmSize: 99999999 kB\nVmData: 102400 kB\n"),
        ],
        level: "data",
        ..USUAL
    },
    Case {
        name: "a limit that is no number is taken for 0",
        members: "0::/a/b\n",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 100, ""), ("/a/b", "0x10", 50, "")]),
        level: "/sys/fs/cgroup/a",
        ..USUAL
    },
    Case {
        name: "a limit without readable usage has all of it as headroom",
        v2: ("/sys/fs/cgroup", &[("/a", "1073741824", 100, "")]),
        files: &[("/sys/fs/cgroup/a/memory.current", "")],
        level: "machine",
        limit: GIB,
        ..CASE
    },
    Case {
        name: "a mount point of / doubles the slash",
        mounts: "1 0 0:22 / / rw - cgroup2 none rw\n",
        v2: ("", &[("/a", "1073741824", 100, "")]),
        level: "/a",
        ..USUAL
    },
];

impl Case {
    /// The files of the case.
    pub(crate) fn tree(&self) -> Tree {
        let mut tree = Tree::of(&[
            ("/proc/self/cgroup", self.members),
            ("/proc/self/mountinfo", self.mounts),
            ("/proc/meminfo", MEMINFO),
        ]);
        for (path, max, mib, stat) in self.v2.1 {
            let mut set = |name: &str, text: &str| tree.text(&format!("{}{path}/{name}", self.v2.0), text);
            set("cgroup.procs", "1\n");
            set("cgroup.type", "domain\n");
            set("memory.max", &format!("{max}\n"));
            set("memory.current", &format!("{}\n", mib * MIB));
            set("memory.stat", stat);
        }
        for (path, limit, mib, stat) in self.v1.1 {
            let mut set = |name: &str, text: &str| tree.text(&format!("{}{path}/{name}", self.v1.0), text);
            set("cgroup.procs", "1\n");
            set("memory.limit_in_bytes", &format!("{}\n", limit.trim()));
            set("memory.usage_in_bytes", &format!("{}\n", mib * MIB));
            set("memory.stat", stat);
        }
        for (path, text) in self.files {
            tree.text(path, text);
        }
        tree
    }
}

/// The case with a name.
pub(crate) fn case(name: &str) -> &'static Case {
    TABLE.iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no tree {name}"))
}
