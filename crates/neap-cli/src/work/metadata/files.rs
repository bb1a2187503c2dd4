//! Results of system calls on paths: the cached values.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::tree::SMALL;

/// Approximate bytes of a value beside its path and content: its entry on a list, its place in a
/// map, and the allocator's own.
const ENTRY: u64 = 256;

/// Kind of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum ValueKind {
    /// Result of `stat`, found or not.
    Stat,
    /// Content of a small file.
    Content,
}

#[derive(Debug)]
enum Found {
    Missing,
    Stat { bytes: u64, modified: i64 },
    Content(Box<[u8]>),
}

/// A path, and the result of system calls on it.
#[derive(Debug)]
pub(super) struct Value {
    pub(super) what: ValueKind,
    pub(super) path: Arc<OsStr>,
    found: Found,
}

/// Bytes of a value with this path and so many bytes of content.
pub(super) fn bytes_of(path: &OsStr, content: u64) -> u64 {
    ENTRY + path.len() as u64 + content
}

impl Value {
    /// Makes the system calls: `statx`, or `open`, `statx`, `read` and `close`.
    pub(super) fn read(what: ValueKind, path: &OsStr) -> Value {
        let found = match what {
            ValueKind::Stat => {
                fs::metadata(path).ok().map(|stat| Found::Stat { bytes: stat.len(), modified: stat.mtime() })
            }
            ValueKind::Content => content(path).map(Found::Content),
        };
        Value { what, path: path.into(), found: found.unwrap_or(Found::Missing) }
    }

    pub(super) fn bytes(&self) -> u64 {
        let content = if let Found::Content(content) = &self.found { content.len() } else { 0 };
        bytes_of(&self.path, content as u64)
    }

    /// Reads all of the value. Returns a sum of it.
    pub(super) fn sum(&self) -> u64 {
        match &self.found {
            Found::Missing => 0,
            Found::Stat { bytes, modified } => bytes ^ *modified as u64,
            Found::Content(content) => {
                let (words, rest) = content.as_chunks::<8>();
                let words = words.iter().fold(0_u64, |sum, word| sum.rotate_left(5) ^ u64::from_le_bytes(*word));
                rest.iter().fold(words, |sum, byte| sum.rotate_left(5) ^ u64::from(*byte))
            }
        }
    }
}

/// The content of a regular file, up to `SMALL` bytes.
fn content(path: &OsStr) -> Option<Box<[u8]>> {
    let mut file = File::open(path).ok()?;
    let stat = file.metadata().ok().filter(fs::Metadata::is_file)?;
    let mut content = vec![0; stat.len().min(SMALL) as usize];
    let read = file.read(&mut content).ok()?;
    content.truncate(read);
    Some(content.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use super::super::made::Made;
    use super::*;

    #[test]
    fn values_tell_files_apart_from_what_is_missing() {
        let made = Made::new("files", 4);
        let path = made.0.join("d0/f3.h").into_os_string();
        let [stat, content] = [ValueKind::Stat, ValueKind::Content].map(|what| Value::read(what, &path));
        assert!(matches!(stat.found, Found::Stat { bytes: 211, .. }), "{stat:?}");
        assert!(matches!(&content.found, Found::Content(content) if **content == [3; 211]), "{content:?}");
        assert_eq!([&stat, &content].map(Value::bytes), [0, 211].map(|bytes| bytes_of(&path, bytes)));
        let absent = made.0.join("d0/absent").into_os_string();
        for (what, path) in
            [(ValueKind::Stat, &absent), (ValueKind::Content, &absent), (ValueKind::Content, &made.0.clone().into())]
        {
            assert!(matches!(Value::read(what, path).found, Found::Missing), "{what:?} of {path:?}");
        }
    }
}
