//! Reads a heap profile that a process wrote when it reached a limit (`profile_at_limit`).
//!
//! The format is described in the crate `neap-base`, `profile_file`. Any process may have written
//! the file, so it is read like the [area](super::area) of a process. A function has a name only if
//! the file of its code still exists unchanged.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use neap_base::profile_area::FILE_OFFSET;
use neap_base::profile_file::{FIRST_LINE, LAST_LINE};

use super::area::{Area, RingRecord};
use super::code_source::CodeSource;
use super::collect::Collector;
use super::limits::ProfileLimits;
use super::maps::CodeMapping;
use super::resolved::{ChosenSamples, Profile, Subjected};
use super::session::{Losses, Summed};
use super::sums::ProfileView;
use super::unwind::{Callers, Unwinder};
use crate::look::foreign::escaped;

/// Files that a note names, at most.
const MOST_NAMED: usize = 5;

/// The lines of text.
#[derive(Debug, Default)]
struct WrittenLines {
    pid: i32,
    name: String,
    why: String,
    time: i64,
    now: u64,
    used: u64,
    mappings: Vec<CodeMapping>,
    threads: HashMap<u32, String>,
    groups: HashMap<u64, Rc<str>>,
    left_out: u64,
}

impl WrittenLines {
    fn parse(text: &[u8]) -> Result<WrittenLines> {
        let text = text.strip_prefix(FIRST_LINE.as_bytes()).context("its text is damaged")?;
        let end = text.windows(LAST_LINE.len() + 1).position(|window| {
            let (before, last) = window.split_at(1);
            before == b"\n" && last == LAST_LINE.as_bytes()
        });
        let mut lines = WrittenLines::default();
        for line in text[..end.context("it is not complete")?].split(|&byte| byte == b'\n') {
            let (key, value) = split(line);
            let number = || str::from_utf8(value).ok()?.parse::<u64>().ok();
            match key {
                b"pid" => lines.pid = number().and_then(|pid| i32::try_from(pid).ok()).unwrap_or(0),
                b"name" => lines.name = escaped(value),
                b"why" => lines.why = escaped(value),
                b"time" => lines.time = number().and_then(|time| i64::try_from(time).ok()).unwrap_or(0),
                b"now" => lines.now = number().unwrap_or(0),
                b"used" => lines.used = number().unwrap_or(0),
                b"left_out" => lines.left_out = number().unwrap_or(0),
                b"code" => lines.mappings.extend(CodeMapping::parse(value)),
                b"thread" | b"group" => {
                    let (id, name) = split(value);
                    let id = str::from_utf8(id).ok().and_then(|id| id.parse::<u64>().ok()).unwrap_or(0);
                    match (key, u32::try_from(id)) {
                        (b"thread", Ok(id)) => _ = lines.threads.insert(id, escaped(name)),
                        (b"thread", Err(_)) => {}
                        _ => {
                            _ = lines.groups.insert(id, if name.is_empty() { "/".into() } else { escaped(name).into() })
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(lines)
    }

    /// Returns the reason of the file and the missing parts of the profile, in a sentence each.
    fn notes(&self, unwinder: &Unwinder) -> Vec<String> {
        let mut notes = vec![match &*self.why {
            "refused" => "Written before an allocation was refused".to_string(),
            "imminent" => "Written when the container's memory was about to run out".to_string(),
            "requested" => "Written at the program's request".to_string(),
            other => format!("Written because of: {other}"),
        }];
        let changed = |path: &&[u8]| path.starts_with(b"/");
        let files = unwinder.files().iter().filter(|file| file.image.is_none()).map(|file| &file.path[..]);
        let files: Vec<String> = files.filter(changed).map(escaped).collect();
        if !files.is_empty() {
            let shown = files[..files.len().min(MOST_NAMED)].join(", ");
            let more = if files.len() > MOST_NAMED { " and others" } else { "" };
            notes.push(format!("Gone, or changed since, so without names: {shown}{more}"));
        }
        if self.left_out > 0 {
            notes.push(format!("{} lines on code, threads and groups found no room", self.left_out));
        }
        notes
    }
}

/// A line's first word, and the rest.
fn split(line: &[u8]) -> (&[u8], &[u8]) {
    match line.iter().position(|&byte| byte == b' ') {
        Some(at) => (&line[..at], &line[at + 1..]),
        None => (line, &[]),
    }
}

/// Whether a file begins as a heap profile does, or has zeros there, as an incomplete one does.
pub(super) fn is_recorded(file: &File) -> bool {
    let mut start = [0; FIRST_LINE.len()];
    file.read_exact_at(&mut start, 0).is_ok() && (start == FIRST_LINE.as_bytes() || start == [0; FIRST_LINE.len()])
}

/// Reads a heap profile from its file.
///
/// # Errors
/// Returns an error if the file is damaged or incomplete.
pub(super) fn read(file: File, memory: usize) -> Result<Profile> {
    let mut text = vec![0; FILE_OFFSET];
    file.read_exact_at(&mut text, 0).context("it is not complete")?;
    ensure!(text.starts_with(FIRST_LINE.as_bytes()), "it is not complete");
    let mut lines = WrittenLines::parse(&text)?;
    let limits = ProfileLimits::of_user(&file.metadata()?.uid().to_string()).with(memory);
    let mut area = Area::of(file)?;
    let mappings = core::mem::take(&mut lines.mappings);
    let mut unwinder = Unwinder::new(CodeSource::Written { mappings, at: lines.time }, limits);
    // With this start, no sample counts as allocated meanwhile.
    let mut collector = Collector::new(u64::MAX, limits);
    let thread = |id: u32| lines.threads.get(&id).map_or("(ended thread)", String::as_str);
    let head = area.drain(&mut |record| {
        if let RingRecord::Alloc(sample, stack) = record {
            let callers = if stack.bytes.is_empty() { Callers::default() } else { unwinder.callers(&stack) };
            collector.allocated(&sample, &callers, thread(sample.thread));
        }
    })?;
    for sample in collector.reconcile(|each| area.slots(each), u64::MAX, u64::MAX)? {
        collector.allocated(&sample, &Callers::default(), thread(sample.thread));
    }
    let losses = Losses {
        without_slot: head.without_slot,
        unreadable_stack: head.without_stack,
        damaged: area.damaged,
        left_out: collector.left_out,
        overwritten: 0,
        not_kept: 0,
    };
    let summed = Summed { unwinder: &unwinder, collector: &collector, groups: &lines.groups, every: head.mean, losses };
    let seconds = lines.now.saturating_sub(head.began) as f64 / 1e9;
    let of = Subjected { pid: lines.pid, name: lines.name.clone(), seconds, in_use: Some(lines.used) };
    let mut profile = Profile::of_sums(&summed, of, ProfileView::Live, ChosenSamples::default());
    profile.lacks = vec![ProfileView::Allocated, ProfileView::Peak];
    profile.notes.splice(0..0, lines.notes(&unwinder));
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed_and_texts_made_harmless() {
        let text = b"neap heap profile 1\npid 7\nname a\xffb\nwhy refused\ntime 9\nnow 8\nused 5\n\
            code 1000-2000 r-xp 00000000 fe:00 12   /bin/x\ncode junk\nthread 3 end\nthread x y\ngroup 4 t/\x1b\n\
            group 5\nleft_out 2\nend\nrest";
        let lines = WrittenLines::parse(text).unwrap();
        assert_eq!((lines.pid, &*lines.name, lines.time, lines.now, lines.used), (7, "a\\xffb", 9, 8, 5));
        assert_eq!((lines.mappings.len(), &*lines.threads[&3], lines.left_out), (1, "end", 2));
        assert_eq!((&*lines.groups[&4], &*lines.groups[&5]), ("t/\\u{1b}", "/"));
        assert!(WrittenLines::parse(&text[..text.len() - 10]).is_err() && WrittenLines::parse(b"x").is_err());
    }
}
