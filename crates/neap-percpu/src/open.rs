//! Address space of an instance: where memory and tables lie, and how far they are open.
//!
//! # Design
//!
//! All address space that an instance can use is reserved when it is made, so addresses are
//! arithmetic. The instance opens the space step by step from its start, before it uses it. If a
//! program locks its memory, the kernel does not fill unopened space. Core dumps do not contain it,
//! and a system without overcommit does not count it. Opened space stays open; its memory comes and
//! goes by the page.
//!
//! # Locking
//!
//! A thread opens a step while it holds the turn, and never under the state's lock.

use crate::chunk::{Chunks, Parts};
use crate::data::{Charge, PerCpuData, Refused};
use crate::depopulate::Work;
use crate::geometry::{Geometry, Layout, Shape};
use crate::pool::Pool;
use crate::rows::{Owner, Rows};
use crate::state::State;
use crate::tables::{Tables, most_owners};
use core::sync::atomic::AtomicBool;
use neap_base::mutex::Guard;
use neap_base::platform::Errno;
use neap_base::platform::memory::{HugePages, Range};
use neap_base::platform::nodes::MAX_NODES;
use neap_base::{Mutex, Platform};

/// Owners in a step.
const OWNERS_STEP: u32 = 1 << 14;
/// Bytes of a group's memory in a step, at least one chunk.
const STEP: usize = 1 << 20;

impl<C: Charge> PerCpuData<C> {
    /// Creates an instance. `node_of` returns the nearest node of a CPU, also for CPUs that do not
    /// exist yet. Their copies are made with all other copies, so nothing changes when such a CPU
    /// comes online.
    ///
    /// # Errors
    /// `INVAL` for an invalid shape. `NOMEM` or the platform's error if the system refuses address
    /// space or memory. Nothing stays mapped then.
    pub fn open<P: Platform>(
        platform: &P,
        shape: &Shape,
        node_of: impl Fn(usize) -> usize,
        charge: C,
    ) -> Result<PerCpuData<C>, Errno> {
        let cpu_major = shape.layout == Layout::CpuMajor;
        // Nodes without a CPU have no copies, so they are no groups.
        let (mut group_of, mut sizes, mut groups) = ([usize::MAX; MAX_NODES], [0; MAX_NODES], 0);
        for cpu in 0..shape.cpus {
            let node = node_of(cpu).min(MAX_NODES - 1);
            if group_of[node] == usize::MAX {
                group_of[node] = groups;
                groups += 1;
            }
            sizes[group_of[node]] += 1;
        }
        let columns = if cpu_major { 1 } else { sizes.iter().max().copied().unwrap_or(0) };
        let groups = if cpu_major { shape.cpus } else { groups };
        let geometry = Geometry::new(shape, platform.page_size(), groups, columns).ok_or(Errno::INVAL)?;

        let length = groups.checked_mul(geometry.group_span()).ok_or(Errno::NOMEM)?;
        let memory = Reserved::new(platform, length + geometry.page)?;
        let base = memory.range.start.next_multiple_of(geometry.page);
        let parts = Parts::new(&geometry, platform.page_size());
        let page = platform.page_size();
        let reserved = Reserved::new(platform, Tables::at(0, &geometry, &parts, page).end + page)?;
        // A simulated machine's pages may be larger than the alignment of its reservations.
        let first = reserved.range.start.next_multiple_of(page);
        let tables = Tables::at(first, &geometry, &parts, page);
        // SAFETY: each table has its own aligned piece of new zeroes, of the length that it needs.
        // All-zero memory is a valid row and a valid record.
        let (chunks, rows, work) = unsafe {
            let rows = Rows { rows: Pool::at(tables.rows), owners: Pool::at(tables.owners), grain: geometry.grain };
            (Chunks::at(geometry.clone(), parts, tables.chunks, tables.stack), rows, Work::at(tables.ranges))
        };
        let is_isolated = |cpu: usize| cpu < platform.cpus() && platform.is_isolated(cpu);
        let any_isolated = (0..shape.cpus).any(is_isolated);
        let fenced = if any_isolated { tables.fenced } else { tables.offsets };
        let data = PerCpuData {
            geometry,
            mappings: [memory.range, reserved.range],
            base,
            tables: Tables { fenced, ..tables },
            state: Mutex::new(State::new(chunks, rows)),
            turn: Mutex::new(work),
            wanted: AtomicBool::new(true),
            charge,
        };
        // SAFETY: the range lies in the tables' reservation.
        unsafe { platform.open(first, data.tables.chunks - first) }?;
        // A huge page would give memory to pages that do not count as populated.
        let _ = platform.huge_pages(base, length, HugePages::Forbidden);
        let (span, mut columns_used) = (data.geometry.group_span(), [0; MAX_NODES]);
        for cpu in 0..shape.cpus {
            let node = node_of(cpu).min(MAX_NODES - 1);
            let (group, column) = if cpu_major { (cpu, 0) } else { (group_of[node], columns_used[node]) };
            columns_used[node] += 1;
            if platform.nodes() > 1 && column == 0 {
                // The binding is only a preference: memory of another node is better than none.
                let _ = platform.bind(base + group * span, span, node);
            }
            // SAFETY: the tables have an entry for every CPU, and no other thread has the instance
            // yet.
            unsafe {
                data.tables.offsets.add(cpu).write(group * span);
                data.tables.fenced.add(cpu).write(if is_isolated(cpu) { usize::MAX } else { group * span });
                data.tables.columns.add(cpu).write(column);
            }
        }
        match data.open_owner(platform) {
            Ok(Owner::NONE) => {
                memory.keep();
                reserved.keep();
                Ok(data)
            }
            Err(Refused::Memory(error)) => Err(error),
            _ => Err(Errno::NOMEM),
        }
    }

    /// Unmaps all memory and tables.
    ///
    /// # Safety
    /// No thread uses the instance or its allocations any more.
    pub unsafe fn close<P: Platform>(&self, platform: &P) {
        for Range { start, length } in self.mappings {
            // SAFETY: `open` reserved these ranges, and the caller promises that no thread uses
            // them any more.
            unsafe { platform.unmap(start, length) };
        }
    }

    /// Creates a chunk. Its tables get memory first, so no page fault happens under the state's
    /// lock. The caller holds the turn; the state's lock is released meanwhile.
    ///
    /// # Errors
    /// [`Refused::Full`] if the instance's address space is used up, [`Refused::Memory`] if the
    /// system refuses memory. No chunk is created then.
    pub(crate) fn grow<'a, P: Platform>(
        &'a self,
        platform: &P,
        mut state: Guard<'a, State>,
    ) -> Result<Guard<'a, State>, Refused> {
        loop {
            let Some(chunk) = state.chunks.next() else {
                state = self.open_chunks(platform, state)?;
                continue;
            };
            let tables = state.chunks.tables(chunk)..state.chunks.tables(chunk + 1);
            drop(state);
            populate(platform, tables)?;
            self.ready_rows(platform)?; // The rows that were opened with it.
            state = self.state.lock();
            if state.grow() {
                return Ok(state);
            }
        }
    }

    /// Populates the entries of the rows that will be used next, as many as have room in the pages
    /// of the reserve. Callers that may not wait then find entries with memory. The caller holds
    /// the turn.
    ///
    /// # Errors
    /// [`Refused::Memory`] if the system refuses memory.
    pub(crate) fn ready_rows<P: Platform>(&self, platform: &P) -> Result<(), Refused> {
        let state = self.state.lock();
        let rows = state.rows.rows.unready((self.geometry.high * self.geometry.page / self.geometry.stripe) as u32);
        let places = state.rows.rows.places(rows.clone());
        drop(state);
        if !rows.is_empty() {
            populate(platform, places)?;
            self.state.lock().rows.rows.note_ready(rows.end);
        }
        Ok(())
    }

    /// Opens address space for more chunks, and for as many rows as these have grains. The caller
    /// holds the turn; the state's lock is released meanwhile.
    ///
    /// # Errors
    /// [`Refused::Full`] if all address space is open, [`Refused::Memory`] if the system refuses.
    /// The number of chunks that may be created is unchanged then.
    fn open_chunks<'a, P: Platform>(
        &'a self,
        platform: &P,
        state: Guard<'a, State>,
    ) -> Result<Guard<'a, State>, Refused> {
        let Geometry { chunk, chunks, grains, groups, .. } = self.geometry;
        let from = state.chunks.opened() as usize;
        let end = (from + (STEP / chunk).max(1)).min(chunks);
        if from == end {
            return Err(Refused::Full);
        }
        let tables = state.chunks.tables(from as u32)..state.chunks.tables(end as u32);
        let rows = state.rows.rows.places((from * grains) as u32..(end * grains) as u32);
        drop(state);
        let memory = (0..groups).map(|group| {
            let start = self.pages_at(group, from as u32, 0);
            start..start + (end - from) * chunk
        });
        memory.chain([tables, rows]).try_for_each(|part| open_pages(platform, part))?;
        let mut state = self.state.lock();
        // SAFETY: the new chunks' tables and memory and the new rows were opened above, and earlier
        // ones by earlier holders of the turn.
        unsafe {
            state.chunks.open(end as u32);
            state.rows.rows.open((end * grains) as u32);
        }
        Ok(state)
    }

    /// Opens address space for more than `opened` owners, unless another thread has done so
    /// meanwhile.
    ///
    /// # Errors
    /// [`Refused::Full`] if all address space is open, [`Refused::Memory`] if the system refuses.
    pub(crate) fn open_owners<P: Platform>(&self, platform: &P, opened: u32) -> Result<(), Refused> {
        let _turn = self.turn.lock();
        let state = self.state.lock();
        let from = state.rows.owners.opened();
        let end = (from + OWNERS_STEP).min(most_owners(&self.geometry));
        let places = state.rows.owners.places(from..end);
        drop(state);
        if from > opened {
            return Ok(());
        }
        if from == end {
            return Err(Refused::Full);
        }
        open_pages(platform, places)?;
        // SAFETY: the records up to `end` were opened above, and earlier ones by earlier holders of
        // the turn.
        unsafe { self.state.lock().rows.owners.open(end) };
        Ok(())
    }
}

/// Reserved address space, which is unmapped when this is dropped, unless it is kept.
struct Reserved<'p, P: Platform> {
    platform: &'p P,
    range: Range,
}

impl<'p, P: Platform> Reserved<'p, P> {
    fn new(platform: &'p P, length: usize) -> Result<Reserved<'p, P>, Errno> {
        Ok(Reserved { platform, range: Range { start: platform.reserve(length)?, length } })
    }

    /// Leaves the range reserved.
    fn keep(self) {
        core::mem::forget(self);
    }
}

impl<P: Platform> Drop for Reserved<'_, P> {
    fn drop(&mut self) {
        // SAFETY: `new` reserved the range. It is dropped before the instance was handed out, so no
        // other code uses it.
        unsafe { self.platform.unmap(self.range.start, self.range.length) };
    }
}

/// Opens every page that overlaps a range.
fn open_pages<P: Platform>(platform: &P, range: core::ops::Range<usize>) -> Result<(), Refused> {
    let Range { start, length } = pages(platform, range);
    // SAFETY: the range lies in an instance's reservation, and so do the pages that it overlaps.
    unsafe { platform.open(start, length) }.map_err(Refused::Memory)
}

/// Populates every page that overlaps a range.
fn populate<P: Platform>(platform: &P, range: core::ops::Range<usize>) -> Result<(), Refused> {
    let Range { start, length } = pages(platform, range);
    match platform.populate(start, length) {
        // The kernel has no such call: pages come when they are touched.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(Refused::Memory(error)),
    }
}

/// The pages that overlap a range.
fn pages<P: Platform>(platform: &P, range: core::ops::Range<usize>) -> Range {
    let page = platform.page_size();
    let (start, end) = (range.start / page * page, range.end.next_multiple_of(page));
    Range { start, length: end - start }
}
