//! Reads a profile from a file. The file is in the format of pprof, from this command or another
//! program, or is a [heap profile](super::recorded) of a process at a limit.
//!
//! A file of pprof is untrusted. This module reads it up to a bound, checks the numbers of texts
//! and functions, and escapes all text. The file lacks single samples, so the standard errors
//! assume that all objects of a stack have one size.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use flate2::read::MultiGzDecoder;
use prost::Message;

use super::pprof::{AT_PEAK, FREED, PprofProfile};
use super::recorded;
use super::resolved::{MappedFile, Place, Profile, ProfileRow, Subjected};
use super::sums::{Amount, Lifetimes, ProfileView, SampleSums};
use super::symbols::SourceLine;
use super::unwind::CodePlace;
use crate::look::foreign::escaped;

/// Bytes of a file, decompressed, that are read.
const MOST_BYTES: u64 = 256 << 20;
/// Frames of all stacks that are kept.
const MOST_FRAMES: usize = 16 << 20;
/// Characters of a text that are kept.
const LONGEST: usize = 400;

const NO_PROFILE: &str = "it is no profile in the format of pprof";

/// Opens a file with a profile. The user may name any file. Opening a pipe does not block.
fn open(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    ensure!(file.metadata().is_ok_and(|about| about.is_file()), "{} is not a regular file", path.display());
    Ok(file)
}

/// Reads a profile from a file. Resolving a heap profile that a process wrote takes at most
/// `memory` bytes.
///
/// # Errors
/// Returns an error if the file cannot be read, or has no profile of memory.
pub(crate) fn read(path: &Path, memory: usize) -> Result<Profile> {
    let file = open(path)?;
    if recorded::is_recorded(&file) {
        return recorded::read(file, memory).with_context(|| path.display().to_string());
    }
    let mut bytes = Vec::new();
    let unpacked = MultiGzDecoder::new(file).take(MOST_BYTES + 1).read_to_end(&mut bytes);
    unpacked.context(NO_PROFILE).with_context(|| path.display().to_string())?;
    ensure!(bytes.len() as u64 <= MOST_BYTES, "{} is longer than {} MiB", path.display(), MOST_BYTES >> 20);
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    of_bytes(&bytes, &escaped(name)).with_context(|| path.display().to_string())
}

/// Reads a profile that is not compressed. `name` is the process's name, if the profile has none.
pub(super) fn of_bytes(bytes: &[u8], name: &str) -> Result<Profile> {
    of_message(&PprofProfile::decode(bytes).context(NO_PROFILE)?, name)
}

/// The texts of a message. Each is escaped once, when it is first used.
struct Texts<'a> {
    raw: &'a [String],
    safe: HashMap<i64, Rc<str>>,
}

impl Texts<'_> {
    fn get(&mut self, at: i64) -> Result<Rc<str>> {
        if let Some(safe) = self.safe.get(&at) {
            return Ok(Rc::clone(safe));
        }
        let raw = usize::try_from(at).ok().and_then(|at| self.raw.get(at)).context("a text is missing")?;
        let mut text = escaped(raw.as_bytes());
        if let Some((end, _)) = text.char_indices().nth(LONGEST) {
            text.truncate(end);
            text.push_str("...");
        }
        let safe: Rc<str> = text.into();
        self.safe.insert(at, Rc::clone(&safe));
        Ok(safe)
    }
}

/// The values of a sample that are used, by their places in it.
struct Columns {
    allocated: Option<[usize; 2]>,
    held: Option<[usize; 2]>,
    freed: Option<[usize; 2]>,
}

impl Columns {
    fn of(message: &PprofProfile, texts: &mut Texts<'_>) -> Result<Columns> {
        let mut kinds = Vec::new();
        for kind in &message.sample_types {
            kinds.push(texts.get(kind.kind)?);
        }
        let at = |name: &str| kinds.iter().position(|kind| **kind == *name);
        let pair = |objects: &str, bytes: &str| Some([at(objects)?, at(bytes)?]);
        let columns = Columns {
            allocated: pair("alloc_objects", "alloc_space"),
            held: pair("inuse_objects", "inuse_space"),
            freed: pair(FREED[0].0, FREED[1].0),
        };
        ensure!(columns.allocated.is_some() || columns.held.is_some(), "it has no numbers of memory");
        Ok(columns)
    }
}

fn of_message(message: &PprofProfile, name: &str) -> Result<Profile> {
    let mut texts = Texts { raw: &message.strings, safe: HashMap::new() };
    let columns = Columns::of(message, &mut texts)?;
    let mut comments = Vec::new();
    for &at in &message.comments {
        comments.push(texts.get(at)?.to_string());
    }
    let is_at_peak = comments.iter().any(|comment| comment == AT_PEAK);
    comments.retain(|comment| comment != AT_PEAK);
    let of = subject(&mut comments, name, message.duration_nanos.max(0) as f64 / 1e9);
    let held = if is_at_peak { ProfileView::Peak } else { ProfileView::Live };
    let shown = texts.get(message.default_sample_type)?;
    let is_allocated = columns.held.is_none() || shown.starts_with("alloc");
    let has = [columns.held.map(|_| held), columns.allocated.map(|_| ProfileView::Allocated)];
    let views = [ProfileView::Live, ProfileView::Allocated, ProfileView::Peak];
    let (files, by_mapping) = files(message, &mut texts)?;
    let places = places(message, &files, &by_mapping, &mut texts)?;
    let every = message.period.max(0) as u64;
    let mut profile = Profile {
        of,
        every,
        view: if is_allocated { ProfileView::Allocated } else { held },
        stacks: vec![Vec::new()],
        files,
        lacks: views.into_iter().filter(|view| !has.contains(&Some(*view))).collect(),
        notes: comments,
        ..Profile::default()
    };
    let (mut stacks, mut frames): (HashMap<&[u64], usize>, usize) = (HashMap::from([(&[][..], 0)]), 0);
    for sample in &message.samples {
        let stack = match stacks.get(&sample.location_ids[..]) {
            Some(&stack) => stack,
            None => {
                frames += sample.location_ids.len();
                ensure!(frames <= MOST_FRAMES, "it has more than {MOST_FRAMES} frames");
                let stack = sample.location_ids.iter().map(|id| places.get(id).cloned().context("a place is missing"));
                profile.stacks.push(stack.collect::<Result<_>>()?);
                stacks.insert(&sample.location_ids, profile.stacks.len() - 1);
                profile.stacks.len() - 1
            }
        };
        let mut labels = [Rc::from(""), Rc::from("")];
        for label in &sample.labels {
            let key = texts.get(label.key)?;
            if let Some(at) = ["group", "thread"].iter().position(|known| **known == *key) {
                labels[at] = texts.get(label.text)?;
            }
        }
        let value = |at: usize| sample.values.get(at).map_or(0.0, |&value| value.max(0) as f64);
        let amount = |pair: Option<[usize; 2]>| {
            pair.map_or(Amount::default(), |[objects, bytes]| Amount::of_sum(value(objects), value(bytes), every))
        };
        let (held, none) = (amount(columns.held), Amount::default());
        let freed = columns.freed.map_or(Lifetimes::default(), |[objects, lifetime]| Lifetimes {
            objects: value(objects),
            seconds: value(lifetime) / 1e6,
        });
        let [group, thread] = labels;
        let (live, peak) = if is_at_peak { (none, held) } else { (held, none) };
        let sums = SampleSums { live, allocated: amount(columns.allocated), peak, freed };
        profile.rows.push(ProfileRow { stack, group, thread, sums });
    }
    Ok(profile)
}

/// The process that the first comment names. Removes this comment, and the next one on its bytes.
fn subject(comments: &mut Vec<String>, name: &str, seconds: f64) -> Subjected {
    let named = comments.first().and_then(|comment| {
        let (pid, rest) = comment.strip_prefix("Process ")?.split_once(" (")?;
        Some((pid.parse().ok()?, rest.rsplit_once("), ")?.0.to_string()))
    });
    let (pid, name) = match named {
        Some(named) => {
            comments.drain(..comments.len().min(2));
            named
        }
        None => (0, name.to_string()),
    };
    Subjected { pid, name, seconds, in_use: None }
}

type ByMapping = HashMap<u64, u32>;

fn files(message: &PprofProfile, texts: &mut Texts<'_>) -> Result<(Vec<MappedFile>, ByMapping)> {
    let (mut files, mut by_mapping) = (Vec::new(), ByMapping::new());
    for mapping in &message.mappings {
        by_mapping.insert(mapping.id, files.len() as u32);
        files.push(MappedFile {
            path: texts.get(mapping.file)?.to_string(),
            build_id: texts.get(mapping.build_id)?.to_string(),
            start: mapping.start,
            end: mapping.limit,
            offset: mapping.offset,
            bias: 0,
            has_lines: mapping.has_lines,
        });
    }
    Ok((files, by_mapping))
}

fn places(
    message: &PprofProfile,
    files: &[MappedFile],
    by_mapping: &ByMapping,
    texts: &mut Texts<'_>,
) -> Result<HashMap<u64, Place>> {
    let mut functions = HashMap::new();
    for function in &message.functions {
        let line = SourceLine {
            function: texts.get(function.name)?,
            system_name: texts.get(function.system_name)?,
            source: texts.get(function.file)?,
            line: 0,
        };
        functions.insert(function.id, line);
    }
    let mut places = HashMap::new();
    for location in &message.locations {
        let file = by_mapping.get(&location.mapping_id).copied();
        let mut lines = Vec::new();
        for line in &location.lines {
            let Some(known) = functions.get(&line.function_id) else { bail!("a function is missing") };
            lines.push(SourceLine { line: line.line.clamp(0, u32::MAX.into()) as u32, ..known.clone() });
        }
        if lines.is_empty() {
            let path = file.map_or("", |file| &files[file as usize].path);
            let name = path.rsplit('/').next().unwrap_or_default();
            let function = format!("{name}+{:#x}", location.address).into();
            lines.push(SourceLine { function, ..SourceLine::default() });
        }
        let frame = CodePlace { file, address: location.address };
        places.insert(location.id, Place { frame, lines: lines.into() });
    }
    Ok(places)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::pprof::message;
    use super::*;

    /// A row: functions with their lines, the innermost first; the group; and the bytes.
    pub(crate) type TestRow<'a> = (&'a [(&'a str, u32)], &'a str, f64);

    /// A profile with rows of stacks in a file of a build.
    pub(crate) fn profile(build_id: &str, rows: &[TestRow<'_>]) -> Profile {
        let file = MappedFile {
            path: "/bin/x".to_string(),
            build_id: build_id.to_string(),
            start: 0x1000,
            end: 0x9000,
            offset: 0,
            bias: 0x1000,
            has_lines: true,
        };
        let of = Subjected { pid: 7, name: "a (b), c".to_string(), seconds: 2.0, in_use: Some(9 << 20) };
        let mut profile = Profile { of, every: 1 << 16, files: vec![file], ..Profile::default() };
        profile.stacks.push(Vec::new());
        for &(names, group, bytes) in rows {
            let place = |&(name, line): &(&str, u32)| {
                let line = SourceLine { function: name.into(), system_name: name.into(), source: "x.c".into(), line };
                let address = u64::from(line.line) * 16 + name.len() as u64;
                Place { frame: CodePlace { file: Some(0), address }, lines: [line].into() }
            };
            profile.stacks.push(names.iter().map(place).collect());
            let amount = Amount::of_sum(bytes / 100.0, bytes, 1 << 16);
            profile.rows.push(ProfileRow {
                stack: profile.stacks.len() - 1,
                group: group.into(),
                thread: "t".into(),
                sums: SampleSums {
                    live: amount,
                    allocated: amount,
                    peak: amount,
                    freed: Lifetimes::of(2.0, 0, 3_000_000),
                },
            });
        }
        profile
    }

    #[test]
    fn written_profile_is_read_as_it_was() {
        let mut written = profile("ab", &[(&[("f", 3), ("main", 9)], "g", 1e6), (&[("h", 4), ("main", 9)], "", 2e6)]);
        let read = of_message(&message(&written), "file").unwrap();
        assert_eq!((read.of.pid, &*read.of.name, read.of.seconds, read.every), (7, "a (b), c", 2.0, 1 << 16));
        assert_eq!((read.view, read.lacks.as_slice()), (ProfileView::Live, &[ProfileView::Peak][..]));
        assert_eq!(read.notes.len(), 1, "the bytes in use: {:?}", read.notes);
        assert_eq!(read.rows.iter().map(|row| &*row.group).collect::<Vec<_>>(), ["g", ""]);
        for (one, other) in written.rows.iter().zip(&read.rows) {
            assert_eq!(written.site(one), read.site(other));
            let (one, sums) = (one.sums, other.sums);
            assert_eq!((one.live.bytes, sums.live.bytes), (sums.allocated.bytes, one.live.bytes));
            assert!((one.live.error() / sums.live.error() - 1.0).abs() < 1e-3);
            assert_eq!(sums.freed, one.freed);
            assert_eq!(read.stacks[other.stack].len(), 2);
        }
        // What is read is written as it was.
        let again = of_message(&message(&read), "file").unwrap();
        assert_eq!(again.total().live.bytes, 3e6);
        written.view = ProfileView::Peak;
        let mut read = of_message(&message(&written), "file").unwrap();
        assert_eq!((read.view, read.lacks.as_slice()), (ProfileView::Peak, &[ProfileView::Live][..]));
        let error = read.choose(Some(ProfileView::Live), None).unwrap_err().to_string();
        assert!(error.contains("allocated (--allocated) and those live at the peak (--peak)"), "{error}");
        read.choose(Some(ProfileView::Allocated), Some("g")).unwrap();
        assert_eq!(read.rows.len(), 1);
    }

    #[test]
    fn damaged_messages_are_refused_and_texts_made_harmless() {
        let sound = message(&profile("ab", &[(&[("f\u{9b}x", 3)], "", 1e6)]));
        let read = of_message(&sound, "file").unwrap();
        assert_eq!(&*read.site(&read.rows[0]).function, "f\\u{9b}x");
        let damage: [fn(&mut PprofProfile); 6] = [
            |message| message.samples[0].location_ids[0] = 99,
            |message| message.locations[0].lines[0].function_id = 99,
            |message| message.functions[0].name = -1,
            |message| message.strings.truncate(3),
            |message| message.sample_types.truncate(1),
            |message| message.samples[0].labels[0].text = i64::MAX,
        ];
        for (at, damage) in damage.into_iter().enumerate() {
            let mut message = sound.clone();
            damage(&mut message);
            assert!(of_message(&message, "file").is_err(), "{at}");
        }
        let mut odd = sound.clone();
        odd.samples[0].values = vec![i64::MIN, i64::MIN];
        odd.comments.clear();
        odd.locations[0].lines.clear();
        let read = of_message(&odd, "file").unwrap();
        assert_eq!((read.of.pid, &*read.of.name, read.total().live.bytes), (0, "file", 0.0));
        assert!(read.site(&read.rows[0]).function.starts_with("x+0x"), "{:?}", read.site(&read.rows[0]));
    }

    #[test]
    fn files_of_other_kinds_are_refused() {
        for path in ["/dev/null", "/", "/proc/self/exe", "/no such file"] {
            assert!(read(Path::new(path), 64 << 20).is_err(), "{path}");
        }
    }
}
