//! Charged bytes of freed objects in caches, in a process's memory.
//!
//! # Design
//!
//! `crates/neap-objects/src/charged.rs` says which objects these are, and `payers.rs` there how an
//! object leads to its owner. This module looks at every object on a stack of a CPU, and in the
//! full sheaves of barns:
//!
//! 1. It reads the word of each page with such objects. A page without owners has 0.
//! 2. It reads the state bytes of the objects on pages with owners.
//! 3. For objects that are still charged, it reads the owner in the page's vector, if it has one.
//!
//! The process may have any numbers in its memory. A number of objects is read at once, and the
//! [allowance](Allowance) bounds the time for all.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::super::ENTRY;
use crate::look::allowance::Allowance;
use crate::look::cpu_stacks::{self, SeenStack};
use crate::look::remote_memory::{MemoryLayout, RemoteMemory, long_at, words_of};
use crate::look::stat_reader::Page;

/// Objects, and cells of stacks, that are read at once.
const AT_ONCE: usize = 4096;
/// Most nodes, lists of sheaves in a barn, bytes of a sheaf before its cells, and bytes of a frame.
const NODES_MAX: usize = 1024;
const CHAINS_MAX: usize = 64;
const HEAD_MAX: usize = 256;
const FRAME_MAX: usize = 256;
/// Most words of state tables.
const ORIGINS_MAX: usize = 128;

/// A look at charged objects.
struct ChargedLook<'a> {
    memory: &'a RemoteMemory<'a>,
    allowance: &'a Allowance,
    layout: MemoryLayout<'a>,
    places: Places,
    origins: Vec<u64>,
    /// Objects of `size` bytes that were found and not yet looked at.
    objects: Vec<u64>,
    size: u64,
    /// Bytes by payer.
    kept: BTreeMap<u64, u64>,
}

/// Values of the layout that each object needs.
struct Places {
    arena: core::ops::Range<u64>,
    page_shift: usize,
    shift_bits: usize,
    behind: u64,
    paid: u64,
    sampled: u64,
    frames: u64,
    frame_length: usize,
    in_frame: usize,
    sole: u64,
    address_bits: usize,
    vector_shift: usize,
    grain: u64,
}

/// Returns the charged bytes in caches, by payer.
pub(super) fn read(
    memory: &RemoteMemory<'_>,
    layout: MemoryLayout<'_>,
    page: &Page,
    allowance: &Allowance,
) -> Result<BTreeMap<u64, u64>> {
    let sizes = page.live.class_sizes();
    if memory.read(vec![(layout.get("at_owned")?, 1)])? == [0] {
        return Ok(BTreeMap::new());
    }
    let mut look = ChargedLook::new(memory, layout, allowance)?;
    let mut class_of_last = 0;
    cpu_stacks::each(memory, cpu_stacks::layout(page)?, sizes.len(), &mut |stack| {
        if core::mem::replace(&mut class_of_last, stack.class) != stack.class {
            look.tally()?;
        }
        look.size = sizes[stack.class];
        look.stack(stack)
    })?;
    look.tally()?;
    for barns in barns(layout)? {
        for (class, &size) in sizes.iter().enumerate() {
            look.size = size;
            look.barn(barns.wrapping_add(layout.get("barn_stride")?.wrapping_mul(class as u64)))?;
            look.tally()?;
        }
    }
    Ok(look.kept)
}

/// Returns the addresses of the barns of each node.
fn barns(layout: MemoryLayout<'_>) -> Result<Vec<u64>> {
    let (others, stride) = (layout.get("other_barns_table")?, layout.get("other_barns_stride")?);
    let others = (0..).map(|other: u64| others.wrapping_add(stride.wrapping_mul(other)));
    let nodes = layout.size("nodes", NODES_MAX)?;
    Ok(core::iter::once(layout.get("barns_table")?).chain(others).take(nodes).collect())
}

impl<'a> ChargedLook<'a> {
    fn new(
        memory: &'a RemoteMemory<'a>,
        layout: MemoryLayout<'a>,
        allowance: &'a Allowance,
    ) -> Result<ChargedLook<'a>> {
        let bits = |name: &str| layout.size(name, 63);
        let ([pages], page_shift) = (memory.shorts([layout.get("at_arena_pages")?])?, layout.size("page_shift", 31)?);
        let base = layout.get("arena_base")?;
        let places = Places {
            arena: base..base.saturating_add(pages << page_shift),
            page_shift,
            shift_bits: bits("shift_bits")?,
            behind: layout.get("behind")?,
            paid: layout.get("paid")?,
            sampled: layout.get("sampled")?,
            frames: layout.get("frames_from_zero")?,
            frame_length: layout.size("frame_length", FRAME_MAX)?,
            in_frame: layout.size("in_frame_word", FRAME_MAX)?,
            sole: 1 << bits("sole_bit")?,
            address_bits: bits("vector_address_bits")?,
            vector_shift: bits("vector_shift")?,
            grain: layout.get("grain")?,
        };
        ensure!(places.grain > 0 && places.shift_bits <= 6, "its page has a layout of charged objects that is damaged");
        let origins = memory.words(layout.get("origins_table")?, layout.size("origins", ORIGINS_MAX)?)?;
        let (objects, kept) = (Vec::new(), BTreeMap::new());
        Ok(ChargedLook { memory, allowance, layout, places, origins, objects, size: 0, kept })
    }

    /// Adds an object. Those outside the arena are none.
    fn see(&mut self, object: u64) -> Result<()> {
        if self.places.arena.contains(&object) {
            self.objects.push(object);
            if self.objects.len() == AT_ONCE {
                return self.tally();
            }
        }
        Ok(())
    }

    fn stack(&mut self, stack: SeenStack) -> Result<()> {
        let mut from = 0;
        while from < stack.count {
            let count = (stack.count - from).min(AT_ONCE as u64);
            let cells = self.memory.words(stack.bottom.wrapping_add(8 * from), count as usize)?;
            cells.into_iter().try_for_each(|object| self.see(object))?;
            from += count;
        }
        Ok(())
    }

    /// Adds the objects of a barn's full sheaves.
    fn barn(&mut self, barn: u64) -> Result<()> {
        let layout = self.layout;
        let at = |name: &str| layout.size(name, HEAD_MAX);
        let (next, count_at, capacity_at) = (at("in_sheaf_next")?, at("in_sheaf_count")?, at("in_sheaf_capacity")?);
        let (head, bits) = (at("in_sheaf_contents")?, layout.size("run_address_bits", 63)?);
        let chains = barn.wrapping_add(layout.get("in_barn_chains")?);
        for mut sheaf in self.memory.words(chains, layout.size("chains", CHAINS_MAX)?)? {
            while sheaf != 0 {
                let bytes = self.memory.read(vec![(sheaf, head)])?;
                let [count, capacity] = [count_at, capacity_at].map(|at| half_at(&bytes, at));
                for word in self.memory.words(sheaf.wrapping_add(head as u64), count)? {
                    if capacity > 0 { self.see(word)? } else { self.run(word, bits)? }
                }
                sheaf = long_at(&bytes, next);
            }
        }
        Ok(())
    }

    /// Adds the objects of a strided run.
    fn run(&mut self, word: u64, address_bits: usize) -> Result<()> {
        let (first, length) = (word & ((1 << address_bits) - 1), word.cast_signed() >> address_bits);
        let step = if length < 0 { self.size.wrapping_neg() } else { self.size };
        // Longer runs are damaged.
        let count = length.unsigned_abs().min(1 << 16);
        (0..count).try_for_each(|number| self.see(first.wrapping_add(step.wrapping_mul(number))))
    }

    /// Looks at the objects that were added, all of `size` bytes.
    fn tally(&mut self) -> Result<()> {
        let mut objects = core::mem::take(&mut self.objects);
        objects.sort_unstable();
        let places = &self.places;
        let mut pages: Vec<u64> = objects.iter().map(|object| object >> places.page_shift).collect();
        pages.dedup();
        let frame = |page: u64| places.frames.wrapping_add(page.wrapping_mul(places.frame_length as u64));
        let words = pages.iter().map(|&page| (frame(page).wrapping_add(places.in_frame as u64), 8)).collect();
        let words = words_of(&self.memory.read(words)?);
        let word = |object: u64| pages.binary_search(&(object >> places.page_shift)).map_or(0, |at| words[at]);
        objects.retain(|&object| word(object) != 0);
        let states = self.memory.read(objects.iter().map(|&object| (self.state_of(object), 1)).collect())?;
        // Payers by vectors are read together.
        let (mut payers, mut entries) = (Vec::new(), Vec::new());
        for (&object, &state) in objects.iter().zip(&states) {
            let word = word(object);
            match u64::from(state) & !places.sampled == places.paid {
                true if word & places.sole != 0 => payers.push(word & !places.sole),
                true => entries.push((places.entry(word, object), 8)),
                false => {}
            }
        }
        payers.extend(words_of(&self.memory.read(entries)?));
        for payer in payers {
            if !self.kept.contains_key(&payer) {
                self.allowance.take(ENTRY)?;
            }
            let bytes = self.kept.entry(payer).or_default();
            *bytes = bytes.saturating_add(self.size);
        }
        objects.clear();
        self.objects = objects;
        Ok(())
    }

    /// Address of the state byte of an object.
    fn state_of(&self, object: u64) -> u64 {
        let origin = self.origins.get(object.trailing_zeros() as usize).copied().unwrap_or_default();
        let shift = origin & ((1 << self.places.shift_bits) - 1);
        origin.wrapping_add(object >> shift).wrapping_sub(self.places.behind)
    }
}

impl Places {
    /// Address of an object's entry in the vector of its page.
    fn entry(&self, vector: u64, object: u64) -> u64 {
        let grain = (object & ((1 << self.page_shift) - 1)) / self.grain;
        let entry = grain.wrapping_mul(vector & ((1 << self.address_bits) - 1)) >> self.vector_shift;
        (vector >> self.address_bits).wrapping_add(entry.wrapping_mul(8))
    }
}

/// Returns the 16 bits at an offset; 0 beyond the end.
fn half_at(bytes: &[u8], at: usize) -> usize {
    let part = bytes.get(at..).and_then(|part| part.first_chunk());
    part.copied().map_or(0, u16::from_ne_bytes).into()
}
