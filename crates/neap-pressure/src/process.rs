//! The process that a sensor looks at, and the levels that are not groups: the machine and the
//! limits of the process.

use crate::files::Files;
use crate::groups::Reader;
use crate::level::{LimitedBy, MemoryLevel};
use crate::text::kib;

/// A process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Subject {
    /// The process that uses the sensor.
    Own,
    /// A process, by its id in the pid namespace of the sensor's process.
    Other(u32),
}

/// Longest path of a process's folder below `/proc`.
const LONGEST: usize = 16;

/// Folder of a process in `/proc`.
#[derive(Clone, Copy)]
pub(crate) struct Folder {
    bytes: [u8; LONGEST],
    length: usize,
}

impl Folder {
    pub(crate) fn of(process: Subject) -> Folder {
        let mut folder = Folder { bytes: *b"/proc/self\0\0\0\0\0\0", length: 10 };
        if let Subject::Other(mut id) = process {
            let mut digits = [0_u8; 10];
            let mut at = digits.len();
            while at > 0 && (id > 0 || at == digits.len()) {
                at -= 1;
                if let Some(digit) = digits.get_mut(at) {
                    *digit = b'0' + (id % 10) as u8;
                }
                id /= 10;
            }
            let digits = digits.get(at..).unwrap_or_default();
            folder.length = 6 + digits.len();
            if let Some(place) = folder.bytes.get_mut(6..folder.length) {
                place.copy_from_slice(digits);
            }
        }
        folder
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// The machine's memory.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct MachineMemory {
    pub(crate) level: Option<MemoryLevel>,
    /// Free swap in bytes.
    pub(crate) swap_free: Option<u64>,
    pub(crate) has_available: bool,
}

/// Facts of `/proc/PID/status` and `/proc/PID/limits`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct ProcessFacts {
    pub(crate) address_space: Option<MemoryLevel>,
    pub(crate) data: Option<MemoryLevel>,
    /// Whether the process may ask for pressure windows of any length (CAP_SYS_RESOURCE).
    pub(crate) is_privileged: bool,
}

/// Bit of CAP_SYS_RESOURCE in a set of capabilities.
const SYS_RESOURCE: u32 = 24;

impl<F: Files> Reader<'_, F> {
    /// Reads `/proc/meminfo`.
    pub(crate) fn machine(&mut self) -> MachineMemory {
        let mut found = [None; 8];
        const KEYS: [&[u8]; 8] = [
            b"MemTotal",
            b"MemFree",
            b"MemAvailable",
            b"Active(file)",
            b"Inactive(file)",
            b"SReclaimable",
            b"SwapFree",
            b"Dirty",
        ];
        self.values(&[b"/proc/meminfo"], |key, value| {
            if let Some((_, place)) = KEYS.iter().zip(&mut found).find(|(name, _)| **name == key) {
                *place = kib(value);
            }
        });
        let [total, free, available, active, inactive, slab, swap_free, dirty] = found;
        // Kernels before 3.14 have no MemAvailable.
        let estimated = || {
            let file = active.unwrap_or(0).saturating_add(inactive.unwrap_or(0)).saturating_sub(dirty.unwrap_or(0));
            Some(free?.saturating_add(file).saturating_add(slab.unwrap_or(0)))
        };
        let level = total.map(|total| {
            let mut level = MemoryLevel::new(LimitedBy::Machine);
            level.limit = Some(total);
            if let Some(available) = available.or_else(estimated).map(|available| available.min(total)) {
                let free = free.unwrap_or(0).min(available);
                level.usage = Some(total - free);
                level.reclaimable = available - free;
            }
            level
        });
        MachineMemory { level, swap_free, has_available: available.is_some() }
    }

    /// Reads the limits of a process and its use of them.
    pub(crate) fn own(&mut self, folder: &Folder) -> ProcessFacts {
        let (mut size, mut data, mut capabilities) = (None, None, 0);
        self.values(&[folder.as_bytes(), b"/status"], |key, value| match key {
            b"VmSize" => size = kib(value),
            b"VmData" => data = kib(value),
            b"CapEff" => capabilities = hexadecimal(value).unwrap_or(0),
            _ => {}
        });
        let (mut most_size, mut most_data) = (None, None);
        // Lines are columns: "Max address space         unlimited            unlimited   bytes".
        self.values(&[folder.as_bytes(), b"/limits"], |_, value| {
            if let Some(columns) = value.strip_prefix(b"address space") {
                most_size = soft_limit(columns);
            } else if let Some(columns) = value.strip_prefix(b"data size") {
                most_data = soft_limit(columns);
            }
        });
        let level = |owner, limit: Option<u64>, usage| {
            limit.map(|limit| MemoryLevel { limit: Some(limit), usage, ..MemoryLevel::new(owner) })
        };
        ProcessFacts {
            address_space: level(LimitedBy::AddressSpace, most_size, size),
            data: level(LimitedBy::Data, most_data, data),
            is_privileged: capabilities >> SYS_RESOURCE & 1 == 1,
        }
    }
}

/// Returns the number in the first column. `None` for "unlimited".
fn soft_limit(columns: &[u8]) -> Option<u64> {
    let word = columns.trim_ascii().split(u8::is_ascii_whitespace).next()?;
    crate::text::limit(word).flatten()
}

fn hexadecimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 16 {
        return None;
    }
    text.iter().try_fold(0, |value: u64, byte| {
        let digit = char::from(*byte).to_digit(16)?;
        Some(value << 4 | u64::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_name_the_process() {
        assert_eq!(Folder::of(Subject::Own).as_bytes(), b"/proc/self");
        assert_eq!(Folder::of(Subject::Other(7)).as_bytes(), b"/proc/7");
        assert_eq!(Folder::of(Subject::Other(0)).as_bytes(), b"/proc/0");
        assert_eq!(Folder::of(Subject::Other(u32::MAX)).as_bytes(), b"/proc/4294967295");
    }

    #[test]
    fn columns_and_capabilities_are_read() {
        assert_eq!(soft_limit(b"   unlimited    unlimited   bytes"), None);
        assert_eq!(soft_limit(b"   4096         unlimited   bytes"), Some(4096));
        assert_eq!(hexadecimal(b"000001ffffffffff"), Some(0x1ff_ffff_ffff));
        assert_eq!(hexadecimal(b"11111111111111111"), None);
    }
}
