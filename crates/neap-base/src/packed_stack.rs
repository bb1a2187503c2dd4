//! Unpacks kept stacks from their streams of words; see [`profile_area`](crate::profile_area).

use crate::profile_area::GROUP_WORDS;

/// Registers and length of a stack, without its words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpackedStack {
    /// Address of an instruction, the stack pointer and the frame pointer there.
    pub registers: [u64; 3],
    /// Number of words.
    pub words: usize,
}

/// Unpacks a stack from its stream, and writes its words to `to`. Reads at most four words, a mask
/// for each group of words, and as many words as it writes.
///
/// Returns `None` if the stream ends early, or its stack is longer than `to`.
pub fn unpack(stream: &mut dyn Iterator<Item = u64>, to: &mut [u64]) -> Option<UnpackedStack> {
    let registers = [stream.next()?, stream.next()?, stream.next()?];
    let words = usize::try_from(stream.next()?).ok()?;
    for group in to.get_mut(..words)?.chunks_mut(GROUP_WORDS) {
        let mask = stream.next()?;
        for (at, word) in group.iter_mut().enumerate() {
            *word = if mask >> at & 1 == 1 { stream.next()? } else { 0 };
        }
    }
    Some(UnpackedStack { registers, words })
}
