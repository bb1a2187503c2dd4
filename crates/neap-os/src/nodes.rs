//! Finds the NUMA nodes that have memory and their distances, and places memory on a node.
//!
//! In this module a *node* is a NUMA node with memory. Nodes are numbered from 0 without gaps. The
//! kernel's own ids may have gaps, and name nodes without memory. A CPU of a node without memory
//! uses the nearest node with memory. If the kernel does not report its nodes, this module assumes
//! one node.

use crate::Errno;
use crate::environment::read_file;
use crate::syscall::{syscall5, syscall6};
use crate::topology::{CpuSet, MAX_CPUS};
use core::ffi::CStr;
use core::fmt::Write;

/// Maximum number of nodes. Nodes with a kernel id from this number on are treated as node 0.
pub const MAX_NODES: usize = 32;

/// The kernel's distance of a node from itself.
pub const LOCAL: u8 = 10;

/// The nodes with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    count: u8,
    /// The kernel's id, by node.
    ids: [u8; MAX_NODES],
    /// The nearest node, by the kernel's id.
    nearest: [u8; MAX_NODES],
    distances: [[u8; MAX_NODES]; MAX_NODES],
}

impl Nodes {
    /// A machine with one node.
    pub const ONE: Nodes =
        Nodes { count: 1, ids: [0; MAX_NODES], nearest: [0; MAX_NODES], distances: [[LOCAL; MAX_NODES]; MAX_NODES] };

    /// Reads `/sys`. Counts only nodes that the process may use. Returns one node if this thread's
    /// memory policy is not the default (`numactl`), since the user then decides where memory comes
    /// from.
    pub fn read() -> Nodes {
        /// `MPOL_F_MEMS_ALLOWED`.
        const ALLOWED: usize = 4;
        let mut text = [0; 256];
        let mut list = |path: &CStr| CpuSet::parse(read_file(path, &mut text).ok()?);
        let Some(memory) = list(c"/sys/devices/system/node/has_memory").filter(|set| set.count() > 1) else {
            return Nodes::ONE;
        };
        let Some(online) = list(c"/sys/devices/system/node/online") else { return Nodes::ONE };
        // A refused call (containers often refuse both) means the default policy, and every node.
        if get_mempolicy(0).is_ok_and(|policy| policy.mode != 0) {
            return Nodes::ONE;
        }
        let allowed = get_mempolicy(ALLOWED).map_or(u64::MAX, |policy| policy.nodes);
        let usable = |id: usize| memory.contains(id) && allowed >> id & 1 == 1;
        Nodes::describe(
            usable,
            |id| online.contains(id),
            |id, each| {
                let mut text = [0; 4096];
                let Some(text) = node_file(id, "distance", &mut text) else { return };
                let numbers = text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
                numbers
                    .map(|word| core::str::from_utf8(word).ok()?.parse().ok())
                    .for_each(|number| each(number.unwrap_or(u8::MAX)));
            },
        )
    }

    /// Describes the `usable` nodes. `line` calls its second argument with the distances of one
    /// kernel id from all ids that are `online`, in order.
    ///
    /// Not inlined, since `line` has a buffer. So the buffer lies on the stack of a process's first
    /// `malloc` only if there are several nodes.
    #[inline(never)]
    pub fn describe(
        usable: impl Fn(usize) -> bool,
        online: impl Fn(usize) -> bool,
        line: impl Fn(usize, &mut dyn FnMut(u8)),
    ) -> Nodes {
        let mut nodes = Nodes { count: 0, ..Nodes::ONE };
        for id in (0..MAX_NODES).filter(|&id| usable(id)) {
            nodes.ids[usize::from(nodes.count)] = id as u8;
            nodes.count += 1;
        }
        if nodes.count < 2 {
            return Nodes::ONE;
        }
        for id in (0..MAX_NODES).filter(|&id| online(id)) {
            let mut from = [u8::MAX; MAX_NODES];
            let mut others = (0..MAX_CPUS).filter(|&other| online(other));
            line(id, &mut |distance| {
                let node = others.next().and_then(|other| nodes.ids().position(|known| known == other));
                node.into_iter().for_each(|node| from[node] = distance);
            });
            // A node with memory is nearest to itself. For another node, the loop takes the first
            // of the nearest nodes with memory.
            let own = nodes.ids().position(|known| known == id);
            let nearest = own.or_else(|| (0..nodes.count()).min_by_key(|&node| from[node])).unwrap_or(0);
            nodes.nearest[id] = nearest as u8;
            if let Some(own) = own {
                nodes.distances[own] = from;
            }
        }
        nodes
    }

    fn ids(&self) -> impl Iterator<Item = usize> {
        self.ids[..self.count()].iter().map(|&id| usize::from(id))
    }

    /// Number of nodes, at least 1.
    pub fn count(&self) -> usize {
        self.count.into()
    }

    /// Distance of node `to`'s memory from node `from`; [`LOCAL`] is the nearest.
    pub fn distance(&self, from: usize, to: usize) -> u8 {
        self.distances.get(from).and_then(|line| line.get(to)).copied().unwrap_or(u8::MAX)
    }

    /// The nearest node to the one with the kernel's `id`.
    pub fn nearest(&self, id: usize) -> usize {
        self.nearest.get(id).copied().unwrap_or(0).into()
    }

    /// Calls `each` with a CPU and its nearest node, for each CPU whose nearest node is not node 0.
    /// Reads `/sys`, and leaves out CPUs that are not listed there.
    pub fn each_cpu(&self, each: &mut dyn FnMut(usize, usize)) {
        for id in (0..MAX_NODES).filter(|&id| self.nearest(id) > 0) {
            let mut text = [0; 4096];
            let cpus = node_file(id, "cpulist", &mut text).and_then(CpuSet::parse).unwrap_or(CpuSet::EMPTY);
            (0..MAX_CPUS).filter(|&cpu| cpus.contains(cpu)).for_each(|cpu| each(cpu, self.nearest(id)));
        }
    }

    /// Requests that new memory of a range come from a node. This is a preference. If the node is
    /// full, the kernel uses another node instead of killing the program.
    ///
    /// # Errors
    /// `PERM` in a container that forbids the call, `INVAL` for a node that the process may not
    /// use, or `NOMEM`. The policy of the range is unchanged then.
    pub fn prefer(&self, address: usize, length: usize, node: usize) -> Result<(), Errno> {
        /// `MPOL_PREFERRED`.
        const PREFERRED: usize = 1;
        let id = self.ids[..self.count()].get(node).copied().ok_or(Errno::INVAL)?;
        let (number, mask) = (linux_raw_sys::general::__NR_mbind as usize, 1_u64 << id);
        // SAFETY: a policy changes no contents. The kernel reads the mask, which lives across the
        // call.
        unsafe { syscall6(number, address, length, PREFERRED, (&raw const mask).expose_provenance(), MASK_BITS, 0) }
            .map(|_| ())
    }
}

/// Length argument for a mask of one word. The kernel reads one bit fewer than this argument.
const MASK_BITS: usize = u64::BITS as usize + 1;

/// A memory policy.
struct MemoryPolicy {
    /// `MPOL_DEFAULT`, which is 0, or another mode.
    mode: i32,
    /// A bit for each of its nodes, by the kernel's ids.
    nodes: u64,
}

/// This thread's memory policy. With `MPOL_F_MEMS_ALLOWED`, the nodes are those that the process
/// may use. The kernel requires that the mask has room for every node that it supports.
fn get_mempolicy(flags: usize) -> Result<MemoryPolicy, Errno> {
    let (mut mode, mut mask) = (0_i32, [0_u64; 1024 / 64]);
    let number = linux_raw_sys::general::__NR_get_mempolicy as usize;
    let (at_mode, at_mask) = ((&raw mut mode).expose_provenance(), mask.as_mut_ptr().expose_provenance());
    // SAFETY: the kernel writes the mode, and at most as many bits of the mask as the call states.
    unsafe { syscall5(number, at_mode, at_mask, size_of_val(&mask) * 8, 0, flags) }?;
    Ok(MemoryPolicy { mode, nodes: mask[0] })
}

/// The memory node nearest to a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NearestNode {
    /// The node, a number below that of the platform's nodes.
    pub node: usize,
    /// Whether the node is permanently that of every thread on the same CPU.
    pub is_of_cpu: bool,
}

/// The CPU and the node on which a thread ran when it asked.
#[derive(Clone, Copy, Debug)]
pub struct Whereabouts {
    /// The CPU.
    pub cpu: usize,
    /// The kernel's id of the CPU's node.
    pub node: usize,
}

/// Returns the CPU and the node on which this thread runs. The thread may migrate at any time.
///
/// # Errors
/// The kernel's error if a sandbox refuses the call.
pub fn whereabouts() -> Result<Whereabouts, Errno> {
    let (mut cpu, mut node) = (0_u32, 0_u32);
    let number = linux_raw_sys::general::__NR_getcpu as usize;
    let (at_cpu, at_node) = ((&raw mut cpu).expose_provenance(), (&raw mut node).expose_provenance());
    // SAFETY: the kernel writes one `u32` to each address.
    unsafe { syscall5(number, at_cpu, at_node, 0, 0, 0) }?;
    Ok(Whereabouts { cpu: cpu as usize, node: node as usize })
}

/// Reads one of the kernel's files about the node with its id `id`.
fn node_file<'b>(id: usize, name: &str, text: &'b mut [u8]) -> Option<&'b [u8]> {
    let mut path = Path { text: [0; 64], length: 0 };
    // The buffer holds the longest such path, so the write cannot fail.
    let _ = write!(path, "/sys/devices/system/node/node{id}/{name}\0");
    read_file(path.as_c_str()?, text).ok()
}

/// A path under construction.
struct Path {
    text: [u8; 64],
    length: usize,
}

impl Path {
    fn as_c_str(&self) -> Option<&CStr> {
        CStr::from_bytes_with_nul(self.text.get(..self.length)?).ok()
    }
}

impl Write for Path {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.length + text.len();
        self.text.get_mut(self.length..end).ok_or(core::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Nodes from a list of usable ids and lines of distances by id.
    fn nodes(usable: &[usize], lines: &[(usize, &[u8])]) -> Nodes {
        let line = |id: usize, each: &mut dyn FnMut(u8)| {
            lines.iter().filter(|line| line.0 == id).for_each(|line| line.1.iter().for_each(|&number| each(number)));
        };
        Nodes::describe(|id| usable.contains(&id), |id| lines.iter().any(|line| line.0 == id), line)
    }

    #[test]
    fn numbers_have_no_gaps_and_distances_go_by_what_is_online() {
        let found = nodes(
            &[0, 2, 5],
            &[(0, &[10, 12, 20, 30]), (2, &[12, 10, 15, 31]), (3, &[20, 15, 10, 11]), (5, &[30, 31, 11, 10])],
        );
        assert_eq!(found.count(), 3);
        let lines: Vec<Vec<u8>> = (0..3).map(|from| (0..3).map(|to| found.distance(from, to)).collect()).collect();
        assert_eq!(lines, [[10, 12, 30], [12, 10, 31], [30, 31, 10]]);
        let nearest: Vec<usize> = [0, 2, 5].map(|id| found.nearest(id)).into();
        assert_eq!(nearest, [0, 1, 2], "a node with memory is nearest to itself");
        assert_eq!(found.nearest(3), 2, "a node without is nearest to the one that the distances say");
        assert_eq!((found.nearest(7), found.nearest(5000)), (0, 0), "unknown nodes");
    }

    #[test]
    fn with_memory_in_one_place_there_is_one_node() {
        let lines: [(usize, &[u8]); 2] = [(0, &[10, 20]), (1, &[20, 10])];
        assert_eq!((nodes(&[], &lines), nodes(&[1], &lines)), (Nodes::ONE, Nodes::ONE));
        assert_eq!((Nodes::ONE.nearest(1), Nodes::ONE.distance(0, 0)), (0, LOCAL));
    }

    #[test]
    fn short_or_long_distance_line_makes_no_node_near() {
        let found = nodes(&[0, 1], &[(0, &[10]), (1, &[20, 10, 7, 7])]);
        assert_eq!((found.distance(0, 1), found.distance(1, 0), found.distance(1, 1)), (u8::MAX, 20, 10));
    }

    #[test]
    fn this_machine_has_a_node_and_this_thread_is_on_a_cpu() {
        let nodes = Nodes::read();
        assert!(nodes.count() >= 1 && nodes.distance(0, 0) == LOCAL);
        let Whereabouts { cpu, node } = whereabouts().unwrap();
        assert!(cpu < crate::topology::nameable() && nodes.nearest(node) < nodes.count());
        let mut named = 0;
        nodes.each_cpu(&mut |cpu, node| {
            assert!(cpu < crate::topology::nameable() && (1..nodes.count()).contains(&node));
            named += 1;
        });
        assert_eq!(named > 0, nodes.count() > 1);
    }

    #[test]
    fn memory_may_be_asked_of_a_node_that_there_is_only() {
        let (here, length) = (crate::memory::map(1 << 20).unwrap(), 1 << 20);
        // A machine without such nodes, or a container, may refuse; the range stays usable.
        let _ = Nodes::ONE.prefer(here, length, 0);
        assert_eq!(Nodes::ONE.prefer(here, length, 1), Err(Errno::INVAL));
        // SAFETY: mapped above, used by no other code.
        unsafe {
            core::ptr::with_exposed_provenance_mut::<u8>(here).write(1);
            crate::memory::unmap(here, length).unwrap();
        }
    }
}
