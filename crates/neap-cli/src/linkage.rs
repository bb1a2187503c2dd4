//! Tells whether the dynamic loader starts a program. If it does not, preloading has no effect.
//!
//! [`static_file`] reads the file that the kernel would execute. For a script, that is the
//! interpreter. A file that cannot be read, or has an unknown format, counts as one that the loader
//! starts.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Most scripts that [`static_file`] follows, each the interpreter of the one before.
const MOST_SCRIPTS: usize = 5;
/// Most bytes of a script's first line that this command reads. The kernel reads fewer.
const FIRST_LINE: u64 = 4096;
/// Search path of programs without `PATH`, as in execvp(3).
const DEFAULT_PATH: &str = "/bin:/usr/bin";

const EXECUTABLE: u16 = 2;
const SHARED: u16 = 3;
const DYNAMIC: u32 = 2;
const INTERPRETER: u32 = 3;
const FLAGS_1: u64 = 0x6fff_fffb;
const IS_PROGRAM: u64 = 0x0800_0000;

/// Returns the statically linked file that the kernel would execute for `program`. The file is the
/// program itself or a script's interpreter.
pub(crate) fn static_file(program: &OsStr) -> Option<PathBuf> {
    let mut path = located(program)?;
    for _ in 0..MOST_SCRIPTS {
        match interpreter(&path) {
            Some(interpreter) => path = interpreter,
            None => return is_static(&path).then_some(path),
        }
    }
    None
}

/// Whether `path` is an object that the loader can load into a program.
pub(crate) fn is_shared_object(path: &Path) -> bool {
    Elf::open(path).is_some_and(|elf| elf.kind == SHARED)
}

/// The file that execvp(3) takes for `program`.
fn located(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    let is_program = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    env::split_paths(&path).map(|folder| folder.join(program)).find(is_program)
}

/// Returns the interpreter in a script's first line. `None` for a file that is no script.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    regular(path)?.take(FIRST_LINE).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let name = line.trim_ascii().split(u8::is_ascii_whitespace).next()?;
    Some(OsString::from_vec(name.to_vec()).into())
}

/// Returns whether `path` is a program that names no interpreter. False for the loader itself,
/// which can be run with a program as its argument.
fn is_static(path: &Path) -> bool {
    let Some(elf) = Elf::open(path) else { return false };
    let Some(segments) = elf.segments() else { return false };
    let of_kind = |kind| segments.iter().find(|segment| segment.kind == kind);
    if of_kind(INTERPRETER).is_some() {
        return false;
    }
    match elf.kind {
        EXECUTABLE => true,
        SHARED => of_kind(DYNAMIC).is_some_and(|dynamic| elf.is_marked_a_program(dynamic)),
        _ => false,
    }
}

/// Opens `path` if it is a regular file. To open a pipe could wait for a writer.
fn regular(path: &Path) -> Option<File> {
    fs::metadata(path).ok()?.is_file().then(|| File::open(path).ok())?
}

/// A 64-bit little-endian ELF file.
struct Elf {
    file: File,
    kind: u16,
    segments_at: u64,
    segment_size: usize,
    segments: usize,
}

struct Segment {
    kind: u32,
    at: u64,
    length: u64,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + N].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

impl Elf {
    fn open(path: &Path) -> Option<Elf> {
        let (file, mut header) = (regular(path)?, [0; 64]);
        file.read_exact_at(&mut header, 0).ok()?;
        header.starts_with(b"\x7fELF\x02\x01").then(|| Elf {
            file,
            kind: number::<2>(&header, 16) as u16,
            segments_at: number::<8>(&header, 32),
            segment_size: number::<2>(&header, 54) as usize,
            segments: number::<2>(&header, 56) as usize,
        })
    }

    fn segments(&self) -> Option<Vec<Segment>> {
        let mut bytes = vec![0; self.segment_size * self.segments];
        self.file.read_exact_at(&mut bytes, self.segments_at).ok()?;
        let read = |bytes: &[u8]| Segment {
            kind: number::<4>(bytes, 0) as u32,
            at: number::<8>(bytes, 8),
            length: number::<8>(bytes, 32),
        };
        (self.segment_size >= 56).then(|| bytes.chunks_exact(self.segment_size).map(read).collect())
    }

    /// Whether the dynamic section has the flag by which the linker marks a program (`DF_1_PIE`).
    fn is_marked_a_program(&self, dynamic: &Segment) -> bool {
        let mut bytes = vec![0; dynamic.length.min(1 << 16) as usize];
        let read = self.file.read_exact_at(&mut bytes, dynamic.at);
        let is_mark = |entry: &[u8]| number::<8>(entry, 0) == FLAGS_1 && number::<8>(entry, 8) & IS_PROGRAM != 0;
        read.is_ok() && bytes.chunks_exact(16).any(is_mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one segment of each kind and a dynamic section of one entry.
    fn elf(kind: u16, segments: &[u32], flags: u64) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01".to_vec();
        bytes.resize(64, 0);
        bytes[16..18].copy_from_slice(&kind.to_le_bytes());
        bytes[32..40].copy_from_slice(&64_u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56_u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&(segments.len() as u16).to_le_bytes());
        let dynamic = 64 + 56 * segments.len() as u64;
        for segment in segments {
            let mut header = segment.to_le_bytes().to_vec();
            header.resize(56, 0);
            header[8..16].copy_from_slice(&dynamic.to_le_bytes());
            header[32..40].copy_from_slice(&16_u64.to_le_bytes());
            bytes.extend(header);
        }
        bytes.extend(FLAGS_1.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes
    }

    #[test]
    fn a_program_is_static_without_an_interpreter() {
        let folder = env::temp_dir().join(format!("neap-linkage-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, bytes: &[u8]| {
            fs::write(folder.join(name), bytes).unwrap();
            folder.join(name)
        };
        for (name, kind, segments, flags, expected) in [
            ("dynamic", EXECUTABLE, &[1, INTERPRETER, DYNAMIC][..], 0, false),
            ("position-independent", SHARED, &[1, INTERPRETER, DYNAMIC], IS_PROGRAM, false),
            ("static", EXECUTABLE, &[1], 0, true),
            ("static-pie", SHARED, &[1, DYNAMIC], IS_PROGRAM, true),
            ("loader", SHARED, &[1, DYNAMIC], 0, false),
        ] {
            let path = file(name, &elf(kind, segments, flags));
            assert_eq!(static_file(path.as_os_str()), expected.then(|| path.clone()), "{name}");
            assert_eq!(is_shared_object(&path), kind == SHARED, "{name}");
        }
        let interpreter = folder.join("static");
        let script = file("script", format!("#! {} -x\nwords", interpreter.display()).as_bytes());
        let outer = file("outer", format!("#!{}", script.display()).as_bytes());
        assert_eq!(static_file(script.as_os_str()), Some(interpreter.clone()));
        assert_eq!(static_file(outer.as_os_str()), Some(interpreter));
        let endless = folder.join("endless");
        file("endless", format!("#!{}", endless.display()).as_bytes());
        let cut = elf(EXECUTABLE, &[1], 0);
        for path in [endless, file("text", b"words"), file("cut", &cut[..100]), folder.join("none"), folder.clone()] {
            assert_eq!(static_file(path.as_os_str()), None, "{}", path.display());
        }
        assert_eq!(static_file(OsStr::new("sh")), None, "found in PATH, and dynamic or not there");
        fs::remove_dir_all(&folder).unwrap();
    }
}
