//! Lines of `/proc/PID/cgroup` and `/proc/PID/mountinfo`, and the translation of a group's path.

use crate::text::{lists, unescape};

/// A line of `/proc/PID/cgroup`: `ID:CONTROLLERS:PATH`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Membership<'a> {
    /// Number of the hierarchy; 0 for version 2.
    pub hierarchy: &'a [u8],
    /// Controllers, separated by commas; empty for version 2.
    pub controllers: &'a [u8],
    /// Path of the group, relative to the reader's cgroup namespace. It may hold colons.
    pub path: &'a [u8],
}

impl<'a> Membership<'a> {
    /// Splits a line. `None` if it has another format.
    #[must_use]
    pub fn parse(line: &'a [u8]) -> Option<Membership<'a>> {
        let mut parts = line.splitn(3, |byte| *byte == b':');
        let (hierarchy, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        path.starts_with(b"/").then_some(Membership { hierarchy, controllers, path })
    }

    /// Returns whether the line names the group of version 2.
    #[must_use]
    pub fn is_version_2(&self) -> bool {
        self.hierarchy == b"0" && self.controllers.is_empty()
    }

    /// Returns whether the line names the group of a version 1 hierarchy with the controller
    /// `memory`. A hierarchy with that name (`name=memory`) does not count.
    #[must_use]
    pub fn has_memory(&self) -> bool {
        lists(self.controllers, b"memory")
    }
}

/// A line of `/proc/PID/mountinfo`, with unescaped paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mount<'a> {
    /// Directory of the file system that is mounted.
    pub root: &'a [u8],
    /// Directory that it is mounted on.
    pub point: &'a [u8],
    /// Type of the file system.
    pub kind: &'a [u8],
    /// Options of the file system.
    pub options: &'a [u8],
}

impl<'a> Mount<'a> {
    /// Splits a line and unescapes the paths in place. `None` if it has another format.
    #[must_use]
    pub fn parse(line: &'a mut [u8]) -> Option<Mount<'a>> {
        // Fields: id, parent, device, root, point, options, optional fields, a lone dash, type,
        // source, options of the file system. An empty source leaves two spaces in a row.
        let mut fields = line.split_mut(|byte| *byte == b' ');
        let root = fields.nth(3)?;
        let point = fields.next()?;
        fields.next()?;
        fields.find(|field| **field == *b"-")?;
        let kind = fields.next()?;
        let options = fields.nth(1)?;
        let root_end = unescape(root);
        let point_end = unescape(point);
        let (root, point) = (root.get(..root_end)?, point.get(..point_end)?);
        let absolute = root.starts_with(b"/") && point.starts_with(b"/");
        absolute.then_some(Mount { root, point, kind, options })
    }

    /// Returns whether cgroup version 2 is mounted here.
    #[must_use]
    pub fn is_version_2(&self) -> bool {
        self.kind == b"cgroup2"
    }

    /// Returns whether a version 1 hierarchy with the controller `memory` is mounted here.
    #[must_use]
    pub fn has_memory(&self) -> bool {
        self.kind == b"cgroup" && lists(self.options, b"memory")
    }
}

/// Position of a process's group relative to a mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Position<'a> {
    /// The group lies below the mount point, by this path. The path is empty or begins with a
    /// slash.
    Below(&'a [u8]),
    /// The group lies below the mount point, by a path with unknown names. The mount shows only its
    /// ancestors.
    Unnamed,
    /// The group does not lie below the mount point.
    Outside,
}

/// Finds the group with the path `path` in a mount whose root is `root`.
///
/// Both are relative to the reader's cgroup namespace. A path that leads out of the namespace
/// begins with `/..`.
#[must_use]
pub fn position<'a>(root: &[u8], path: &'a [u8]) -> Position<'a> {
    let mut rest = path;
    let mut ups_only = true;
    let mut names = root.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
    while let Some(name) = names.next() {
        match first(rest) {
            Some((same, behind)) if same == name => rest = behind,
            // The mount begins higher above the namespace's root than the group's path does. The
            // names between the two are not shown.
            _ if name == b".." && ups_only && names.all(|name| name == b"..") => return Position::Unnamed,
            _ => return Position::Outside,
        }
        ups_only &= name == b"..";
    }
    let mut behind = rest;
    while let Some((name, more)) = first(behind) {
        if name == b".." || name == b"." {
            return Position::Outside;
        }
        behind = more;
    }
    // Slashes at the end name no further group.
    let end = rest.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    Position::Below(rest.get(..end).unwrap_or_default())
}

/// Splits the first name off a path. The rest begins with a slash or is empty.
fn first(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let start = path.iter().position(|byte| *byte != b'/')?;
    let name = path.get(start..)?;
    let end = name.iter().position(|byte| *byte == b'/').unwrap_or(name.len());
    Some(name.split_at(end))
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn memberships_are_split_at_two_colons() {
        let line = Membership::parse(b"4:cpu,memory:/a:b").unwrap();
        assert_eq!((line.has_memory(), line.is_version_2(), line.path), (true, false, &b"/a:b"[..]));
        assert!(Membership::parse(b"0::/").unwrap().is_version_2());
        assert!(!Membership::parse(b"3:name=memory:/a").unwrap().has_memory());
        assert!(!Membership::parse(b"3::/a").unwrap().is_version_2());
        for bad in ["", "0:", "0:/a", "0::a", "no line"] {
            assert_eq!(Membership::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn mounts_are_split_behind_the_lone_dash() {
        let mut line = *b"35 31 0:32 /d\\040x /sys/fs/c\\134y rw shared:1 master:2 - cgroup  rw,cpu,memory";
        let mount = Mount::parse(&mut line).unwrap();
        assert_eq!((mount.root, mount.point), (&b"/d x"[..], &b"/sys/fs/c\\y"[..]));
        assert!(mount.has_memory() && !mount.is_version_2());
        assert!(Mount::parse(&mut b"1 2 0:3 / /x rw - cgroup2 none rw,nsdelegate".to_vec()).unwrap().is_version_2());
        let mut named = b"1 2 0:3 / /x rw - cgroup none rw,name=memory".to_vec();
        assert!(!Mount::parse(&mut named).unwrap().has_memory());
        for bad in ["", "1 2 3 4", "1 2 0:3 / /x rw cgroup none rw", "1 2 0:3 x /x rw - cgroup none rw"] {
            assert_eq!(Mount::parse(&mut bad.as_bytes().to_vec()), None, "{bad}");
        }
    }

    #[test]
    fn positions_follow_the_namespace() {
        use Position::{Below, Outside, Unnamed};
        let cases: [(&str, &str, Position<'static>); 19] = [
            ("/", "/", Below(b"")),
            ("/", "/a/b", Below(b"/a/b")),
            ("/", "/a/b/", Below(b"/a/b")),
            ("/docker/x", "/docker/x", Below(b"")),
            ("/docker/x", "/docker/x/y", Below(b"/y")),
            ("/docker/x", "/docker/xy", Outside),
            ("/docker/x", "/docker", Outside),
            ("/docker/x", "/", Outside),
            ("/", "/..", Outside),
            ("/", "/../b", Outside),
            ("/..", "/..", Below(b"")),
            ("/..", "/../b", Below(b"/b")),
            ("/..", "/../..", Outside),
            ("/..", "/", Unnamed),
            ("/../..", "/a", Unnamed),
            ("/../..", "/../b", Unnamed),
            ("/../../c", "/", Outside),
            ("/../c", "/../c/d", Below(b"/d")),
            ("/a", "/a/../b", Outside),
        ];
        for (root, path, expected) in cases {
            assert_eq!(position(root.as_bytes(), path.as_bytes()), expected, "{root} {path}");
        }
    }
}
