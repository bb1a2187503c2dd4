//! Labels and lists of the blocks of a checked program. [`checked`](crate::allocation::checked) has
//! the design.
//!
//! A label lies in a block that the layers below have handed out to the checks. No other code of
//! neap uses the block. A wrong program may overwrite labels. So each label has a checksum, and
//! every reader compares it.

use neap_os::fatal::die;

/// Data of a block, right before the program's part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Label {
    /// Bytes that the program asked for.
    pub(crate) size: usize,
    /// Bytes from the start of the block to the program's part.
    pub(crate) front: usize,
    /// [`LIVE`] or [`GONE`].
    pub(crate) state: usize,
    /// Addresses of the labels that were added to the list right before and right after this one;
    /// 0: none.
    pub(crate) older: usize,
    pub(crate) newer: usize,
    /// Checksum over the other fields and the label's address.
    pub(crate) sum: usize,
}

/// The program has the allocation.
pub(crate) const LIVE: usize = 0x4c49_5645;
/// The program has freed it.
pub(crate) const GONE: usize = 0x474f_4e45;

impl Label {
    /// The sum of a label at an address: FNV-1a over the words.
    pub(crate) fn sum_at(&self, address: usize) -> usize {
        let words = [address, self.size, self.front, self.state, self.older, self.newer];
        words.iter().fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ word).wrapping_mul(0x100_0000_01b3))
    }
}

/// A list of blocks. A block is named by the address of its label; 0 means none.
#[derive(Debug)]
pub(crate) struct BlockList {
    pub(crate) oldest: usize,
    pub(crate) newest: usize,
    pub(crate) bytes: usize,
}

/// The size that a caller of a sized free names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedSize {
    /// The bytes that the program asked for.
    Exact(usize),
    /// Any number from this one up to the usable size of the allocation.
    Within(usize),
}

/// Blocks that the program has, and blocks that it freed.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) live: BlockList,
    pub(crate) gone: BlockList,
}

impl Checked {
    pub(crate) const fn new() -> Checked {
        const EMPTY: BlockList = BlockList { oldest: 0, newest: 0, bytes: 0 };
        Checked { live: EMPTY, gone: EMPTY }
    }
}

/// An address as a pointer.
pub(crate) fn pointer<T>(address: usize) -> *mut T {
    core::ptr::with_exposed_provenance_mut(address)
}

/// Reads the label of a block in a list. Ends the process if the label was overwritten.
///
/// # Safety
/// `address` is that of a label, in a block that the layers below have handed out to the checks.
pub(crate) unsafe fn label(address: usize, call: &str) -> Label {
    // SAFETY: the label lies in memory of the checks (the caller's promise).
    let label = unsafe { pointer::<Label>(address).read() };
    if label.sum != label.sum_at(address) {
        let start = address + size_of::<Label>();
        die(format_args!(
            "write before the start: {call}: the bytes before {start:#x} were overwritten (or those behind the \
             allocation before it)"
        ));
    }
    label
}

/// Writes a label, with its sum.
///
/// # Safety
/// `address` lies in a block that the layers below have handed out to the checks, with room for a
/// label. The label need not be valid yet.
pub(crate) unsafe fn write(address: usize, mut label: Label) {
    label.sum = label.sum_at(address);
    // SAFETY: the label lies in memory of the checks (the caller's promise).
    unsafe { pointer::<Label>(address).write(label) };
}

impl BlockList {
    /// Adds the block with the label at an address, whose links are not valid yet.
    ///
    /// # Safety
    /// `address` satisfies the condition of [`write`]. The block is not freed while it is in the
    /// list.
    pub(crate) unsafe fn add(&mut self, address: usize, new: Label, call: &str) {
        // SAFETY: `address` has room for a label (the caller's promise). By the promise of earlier
        // calls, the other blocks of the list are not freed, and have labels.
        unsafe {
            write(address, Label { older: self.newest, newer: 0, ..new });
            match self.newest {
                0 => self.oldest = address,
                newest => write(newest, Label { newer: address, ..label(newest, call) }),
            }
        }
        self.newest = address;
        self.bytes += new.front + new.size;
    }

    /// Removes the block with the label at an address.
    ///
    /// # Safety
    /// The block is in the list.
    pub(crate) unsafe fn remove(&mut self, address: usize, call: &str) {
        // SAFETY: blocks in the list are not freed, and have labels (the promise of the callers of
        // `add`).
        unsafe {
            let Label { older, newer, front, size, .. } = label(address, call);
            match older {
                0 => self.oldest = newer,
                older => write(older, Label { newer, ..label(older, call) }),
            }
            match newer {
                0 => self.newest = older,
                newer => write(newer, Label { older, ..label(newer, call) }),
            }
            self.bytes -= front + size;
        }
    }

    /// Calls `each` for every block, the oldest first.
    pub(crate) fn each(&self, call: &str, mut each: impl FnMut(usize, Label)) {
        let mut at = self.oldest;
        while at != 0 {
            // SAFETY: blocks in the list are not freed, and have labels (the promise of the callers
            // of `add`).
            let label = unsafe { label(at, call) };
            each(at, label);
            at = label.newer;
        }
    }
}
