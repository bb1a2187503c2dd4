//! Names of functions, from the symbol table of an ELF file.
//!
//! A table may be larger than the memory of this command. So this module reads it in blocks, once
//! for all addresses, and keeps only the best symbol of each address. It reads the names one by one
//! at the end.

use object::LittleEndian;
use object::elf::{self, Sym64};

use super::elf::{ElfImage, FilePart};

/// Bytes of a name that are kept.
const LONGEST: usize = 8 << 10;
/// Length in bytes assumed for a symbol without one.
const UNSIZED: u64 = 4096;
/// Bytes of an entry, and entries that are read at a time.
const ENTRY: usize = size_of::<Sym64<LittleEndian>>();
const ENTRIES: usize = 2 << 10;

/// A function of a symbol table.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    address: u64,
    bytes: u64,
    /// Offset of the name in the strings.
    name: u32,
}

impl Symbol {
    /// Parses an entry. `None` if the symbol is not a function.
    fn parse(entry: &[u8]) -> Option<Symbol> {
        let (symbol, _) = object::pod::from_bytes::<Sym64<LittleEndian>>(entry).ok()?;
        let is_code = matches!(symbol.st_info & 0xf, elf::STT_FUNC | elf::STT_GNU_IFUNC | elf::STT_NOTYPE);
        let address = symbol.st_value.get(LittleEndian);
        let is_defined = address != 0 && symbol.st_shndx.get(LittleEndian) != elf::SHN_UNDEF;
        let (bytes, name) = (symbol.st_size.get(LittleEndian), symbol.st_name.get(LittleEndian));
        // On arm64 an untyped symbol without a length may mark where code begins behind data.
        let is_mark = cfg!(target_arch = "aarch64") && bytes == 0 && symbol.st_info & 0xf == elf::STT_NOTYPE;
        (is_code && is_defined && !is_mark).then_some(Symbol { address, bytes, name })
    }

    /// Of symbols at one address, the last one that has a length counts.
    fn order(&self) -> (u64, bool) {
        (self.address, self.bytes > 0)
    }

    fn contains(&self, address: u64) -> bool {
        address - self.address < if self.bytes > 0 { self.bytes } else { UNSIZED }
    }
}

/// Calls `found` with the names of the functions at addresses of a file, as the linker knows them.
/// `addresses` are sorted. Names come from the table of symbols. In a stripped file they come from
/// the table for the dynamic linker. A table with more than `left` bytes is not read. The bytes of
/// read tables are subtracted from `left`.
pub(crate) fn names(image: &ElfImage, addresses: &[u64], left: &mut u64, found: &mut dyn FnMut(u64, &[u8])) {
    for (table, strings) in [(".symtab", ".strtab"), (".dynsym", ".dynstr")] {
        let (Some(table), Some(strings)) = (image.place(table), image.place(strings)) else { continue };
        let Some(rest) = left.checked_sub(table.bytes) else { continue };
        *left = rest;
        if let Some(symbols) = symbols_at(table, addresses) {
            let mut name = vec![0; LONGEST];
            for (&address, symbol) in addresses.iter().zip(symbols) {
                let Some(symbol) = symbol.filter(|symbol| symbol.contains(address)) else { continue };
                let read = strings.read(&mut name, u64::from(symbol.name));
                let end = name[..read].iter().position(|&byte| byte == 0).unwrap_or(read);
                if end > 0 {
                    found(address, &name[..end]);
                }
            }
            return;
        }
    }
}

/// Returns the last symbol at or below each address. `None` if the table has no functions.
fn symbols_at(table: FilePart<'_>, addresses: &[u64]) -> Option<Vec<Option<Symbol>>> {
    let mut best: Vec<Option<Symbol>> = vec![None; addresses.len()];
    let (mut block, mut at, mut is_any) = (vec![0; ENTRIES * ENTRY], 0, false);
    loop {
        let read = table.read(&mut block, at);
        for symbol in block[..read].chunks_exact(ENTRY).filter_map(Symbol::parse) {
            is_any = true;
            // The loop below copies the symbol to later addresses.
            let first = addresses.partition_point(|&address| address < symbol.address);
            if let Some(best) = best.get_mut(first)
                && best.is_none_or(|best| best.order() <= symbol.order())
            {
                *best = Some(symbol);
            }
        }
        if read < block.len() {
            break;
        }
        at += read as u64;
    }
    let mut before = None;
    for best in &mut best {
        *best = best.or(before);
        before = *best;
    }
    is_any.then_some(best)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::profile::elf::Budget;

    #[test]
    fn functions_of_the_own_executable_have_names() {
        let image = ElfImage::open(Path::new("/proc/self/exe"), &Budget::new(32 << 20)).unwrap();
        let text = image.range(".text").unwrap();
        let mut places: Vec<u64> = text.clone().step_by((text.end - text.start) as usize / 100).collect();
        places.insert(0, 1);
        places.push(u64::MAX);
        let (mut named, mut left) = (Vec::new(), u64::MAX);
        names(&image, &places, &mut left, &mut |address, name| named.push((address, name.to_vec())));
        // How many of the places lie in gaps, or in code without a symbol, depends on the build.
        assert!(named.len() > 50 && named.len() < 102, "between functions there are gaps: {}", named.len());
        assert!(named.iter().all(|(address, name)| text.contains(address) && !name.is_empty()));
        assert_eq!(u64::MAX - left, image.place(".symtab").unwrap().bytes);
        // A table of the dynamic linker has few of them.
        let mut fewer = 0;
        names(&image, &places, &mut 100, &mut |_, _| fewer += 1);
        assert_eq!(fewer, 0);
    }
}
