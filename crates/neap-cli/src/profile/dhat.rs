//! A profile in the format of Valgrind's DHAT (JSON, version 2), for the Firefox profiler.
//!
//! The Firefox profiler has no importer of pprof, but one of DHAT. Of DHAT's fields, it reads
//! `cmd`, `pid`, `ftbl` (frames) and `pps` (stacks), and makes a track of each sum of bytes:
//! allocated, largest, at the peak, and at the end. The other fields are for DHAT's own viewer. The
//! importer takes frames apart by their form `0xADDRESS: FUNCTION (FILE:LINE)`. Frames of another
//! form are names: those of a thread and of a memory group, which are outermost.

use std::collections::HashMap;
use std::io::{self, Write};
use std::rc::Rc;

use serde::Serialize;

use super::resolved::{Place, Profile, ProfileRow};
use super::symbols::SourceLine;

/// Bytes and blocks of a stack, and its frames.
#[derive(Serialize)]
struct ProgramPoint {
    /// Allocated bytes and blocks.
    #[serde(rename = "tb")]
    allocated: u64,
    #[serde(rename = "tbk")]
    allocated_blocks: u64,
    /// Sum of the lifetimes in microseconds.
    #[serde(rename = "tl")]
    lifetimes: u64,
    /// The largest known bytes and blocks: at the peak of the whole profile, or at the end.
    #[serde(rename = "mb")]
    most: u64,
    #[serde(rename = "mbk")]
    most_blocks: u64,
    #[serde(rename = "gb")]
    at_peak: u64,
    #[serde(rename = "gbk")]
    blocks_at_peak: u64,
    #[serde(rename = "eb")]
    live: u64,
    #[serde(rename = "ebk")]
    live_blocks: u64,
    /// Indexes of frames, the innermost first.
    #[serde(rename = "fs")]
    frames: Vec<usize>,
}

/// The first two frames: one that other readers of the format expect, and one in place of frames
/// for which the table has no room.
const FIRST: [&str; 2] = ["[root]", "[left out]"];

/// The table of frames. Each text is in it once.
struct FrameTable {
    texts: Vec<Rc<str>>,
    by_text: HashMap<Rc<str>, usize>,
    /// Bytes of text that the table may still get.
    room: usize,
}

impl FrameTable {
    fn index(&mut self, text: &str) -> usize {
        if let Some(&index) = self.by_text.get(text) {
            return index;
        }
        let Some(room) = self.room.checked_sub(text.len()) else { return 1 };
        self.room = room;
        let text: Rc<str> = text.into();
        self.texts.push(Rc::clone(&text));
        self.by_text.insert(text, self.texts.len() - 1);
        self.texts.len() - 1
    }
}

/// Returns the text of a frame.
fn frame(profile: &Profile, place: &Place, line: &SourceLine) -> String {
    let file = place.frame.file.and_then(|file| profile.files.get(file as usize));
    let address = place.frame.address.wrapping_add(file.map_or(0, |file| file.bias));
    let function = &line.function;
    match (&*line.source, file) {
        ("", Some(file)) => format!("0x{address:X}: {function} (in {})", file.path),
        ("", None) => format!("0x{address:X}: {function} (in ???)"),
        (source, _) => format!("0x{address:X}: {function} ({source}:{})", line.line),
    }
}

fn program_point(profile: &Profile, row: &ProfileRow, table: &mut FrameTable) -> ProgramPoint {
    let mut frames = Vec::new();
    for place in &profile.stacks[row.stack] {
        frames.extend(place.lines.iter().map(|line| table.index(&frame(profile, place, line))));
    }
    let outer = [&row.thread, &row.group].into_iter().filter(|name| !name.is_empty());
    frames.extend(outer.map(|name| table.index(name)));
    let rounded = |value: f64| value.round() as u64;
    let sums = &row.sums;
    let most = if sums.peak.bytes > sums.live.bytes { sums.peak } else { sums.live };
    ProgramPoint {
        allocated: rounded(sums.allocated.bytes),
        allocated_blocks: rounded(sums.allocated.objects),
        lifetimes: rounded(sums.freed.seconds * 1e6),
        most: rounded(most.bytes),
        most_blocks: rounded(most.objects),
        at_peak: rounded(sums.peak.bytes),
        blocks_at_peak: rounded(sums.peak.objects),
        live: rounded(sums.live.bytes),
        live_blocks: rounded(sums.live.objects),
        frames,
    }
}

/// Writes a profile, stack by stack.
pub(crate) fn write(output: &mut dyn Write, profile: &Profile) -> io::Result<()> {
    let texts: Vec<Rc<str>> = FIRST.map(Rc::from).to_vec();
    let mut table = FrameTable { texts, by_text: HashMap::new(), room: profile.limits.folded_bytes };
    let (name, end) = (serde_json::to_string(&profile.of.name)?, (profile.of.seconds * 1e6).round() as u64);
    write!(output, "{{\"dhatFileVersion\":2,\"mode\":\"neap\",\"verb\":\"Allocated\",\"bklt\":true,\"bkacc\":false,")?;
    write!(output, "\"tu\":\"µs\",\"Mtu\":\"s\",\"tuth\":10,\"cmd\":{name},\"pid\":{},", profile.of.pid)?;
    write!(output, "\"te\":{end},\"tg\":{end},\"pps\":[")?;
    for (at, row) in profile.rows.iter().enumerate() {
        output.write_all(if at > 0 { b",\n" } else { b"\n" })?;
        serde_json::to_writer(&mut *output, &program_point(profile, row, &mut table))?;
    }
    output.write_all(b"],\n\"ftbl\":")?;
    serde_json::to_writer(&mut *output, &table.texts.iter().map(|text| &**text).collect::<Vec<&str>>())?;
    output.write_all(b"}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::saved::tests::profile;
    use serde_json::{Value, json};

    /// Takes a frame apart, as the importer of the Firefox profiler does: address, function and
    /// file.
    fn parts(text: &str) -> Option<[&str; 3]> {
        let (address, rest) = text.strip_prefix("0x")?.split_once(": ")?;
        let (function, file) = rest.strip_suffix(')')?.rsplit_once(" (")?;
        u64::from_str_radix(address, 16).ok()?;
        Some([address, function, file])
    }

    #[test]
    fn file_has_the_fields_that_the_firefox_profiler_reads() {
        let mut profile =
            profile("ab", &[(&[("f", 3), ("main", 9)], "g", 1e6), (&[("operator()", 4), ("main", 9)], "", 2e6)]);
        profile.rows.push(ProfileRow { stack: 0, thread: "".into(), group: "".into(), ..profile.rows[0].clone() });
        let mut text = Vec::new();
        write(&mut text, &profile).unwrap();
        // The importer recognises JSON by this letter, and DHAT by the number.
        assert!(text.starts_with(b"{"));
        let object: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(
            [&object["dhatFileVersion"], &object["cmd"], &object["pid"]],
            [&json!(2), &json!("a (b), c"), &json!(7)]
        );
        let frames: Vec<&str> =
            object["ftbl"].as_array().unwrap().iter().map(|frame| frame.as_str().unwrap()).collect();
        let stacks: Vec<Vec<&str>> = object["pps"]
            .as_array()
            .unwrap()
            .iter()
            .map(|point| {
                for sum in ["tb", "mb", "gb", "eb"] {
                    assert!(point[sum].as_u64().unwrap() > 0, "{sum} in {point}");
                }
                point["fs"].as_array().unwrap().iter().map(|at| frames[at.as_u64().unwrap() as usize]).collect()
            })
            .collect();
        assert_eq!(object["pps"][1]["eb"], 2_000_000);
        let functions = |stack: &[&str]| -> Vec<String> {
            stack.iter().map(|frame| parts(frame).map_or(*frame, |[_, function, _]| function).to_string()).collect()
        };
        assert_eq!(functions(&stacks[0]), ["f", "main", "t", "g"]);
        assert_eq!(functions(&stacks[1]), ["operator()", "main", "t"]);
        assert!(stacks[2].is_empty());
        assert_eq!(parts(stacks[0][0]).unwrap()[2], "x.c:3");
        assert_eq!(u64::from_str_radix(parts(stacks[0][0]).unwrap()[0], 16).unwrap(), 0x1000 + 3 * 16 + 1);
    }

    #[test]
    fn frames_beyond_the_bounds_are_one() {
        let mut profile = profile("ab", &[(&[("f", 3), ("main", 9)], "", 1e6)]);
        profile.limits.folded_bytes = 20;
        let mut text = Vec::new();
        write(&mut text, &profile).unwrap();
        let object: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(object["ftbl"], json!(["[root]", "[left out]", "0x1031: f (x.c:3)", "t"]));
        assert_eq!(object["pps"][0]["fs"], json!([2, 1, 3]));
    }

    #[test]
    fn frame_without_a_line_names_its_file() {
        let mut profile = profile("ab", &[(&[("f", 3)], "", 1e6)]);
        let mut place = profile.stacks[1][0].clone();
        let line = SourceLine { source: "".into(), ..place.lines[0].clone() };
        place.lines = [line].into();
        profile.stacks[1][0] = place.clone();
        assert_eq!(frame(&profile, &place, &place.lines[0]), "0x1031: f (in /bin/x)");
        place.frame.file = None;
        assert_eq!(frame(&profile, &place, &place.lines[0]), "0x31: f (in ???)");
    }
}
