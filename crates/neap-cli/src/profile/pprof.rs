//! A profile in the format of pprof: a protocol buffer, compressed by gzip.
//!
//! The messages are a subset of those of pprof's `profile.proto`. A file has the live and the
//! allocated bytes and objects. If the user requests the peak, the values at the peak replace the
//! live values, and a comment in the file states this. Two more values are the number of objects
//! freed during the profile, and the sum of their lifetimes.

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use super::resolved::{Place, Profile, ProfileRow};
use super::sums::{ProfileView, SampleSums};
use super::symbols::SourceLine as NamedLine;
use super::top_table::summary;

/// The number of objects freed while the profile was taken, and the sum of their lifetimes.
pub(crate) const FREED: [(&str, &str); 2] = [("freed_objects", "count"), ("freed_lifetime", "microseconds")];

/// The comment of a file with the bytes at the peak.
pub(crate) const AT_PEAK: &str = "inuse_objects and inuse_space are the values at the peak of live bytes";

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ValueType {
    #[prost(int64, tag = "1")]
    pub(crate) kind: i64,
    #[prost(int64, tag = "2")]
    pub(crate) unit: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Label {
    #[prost(int64, tag = "1")]
    pub(crate) key: i64,
    #[prost(int64, tag = "2")]
    pub(crate) text: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PprofSample {
    #[prost(uint64, repeated, tag = "1")]
    pub(crate) location_ids: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    pub(crate) values: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) labels: Vec<Label>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Mapping {
    #[prost(uint64, tag = "1")]
    pub(crate) id: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) start: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) limit: u64,
    #[prost(uint64, tag = "4")]
    pub(crate) offset: u64,
    #[prost(int64, tag = "5")]
    pub(crate) file: i64,
    #[prost(int64, tag = "6")]
    pub(crate) build_id: i64,
    #[prost(bool, tag = "7")]
    pub(crate) has_functions: bool,
    #[prost(bool, tag = "8")]
    pub(crate) has_files: bool,
    #[prost(bool, tag = "9")]
    pub(crate) has_lines: bool,
    #[prost(bool, tag = "10")]
    pub(crate) has_inlined: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PprofLine {
    #[prost(uint64, tag = "1")]
    pub(crate) function_id: u64,
    #[prost(int64, tag = "2")]
    pub(crate) line: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Location {
    #[prost(uint64, tag = "1")]
    pub(crate) id: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) mapping_id: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) address: u64,
    #[prost(message, repeated, tag = "4")]
    pub(crate) lines: Vec<PprofLine>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Function {
    #[prost(uint64, tag = "1")]
    pub(crate) id: u64,
    #[prost(int64, tag = "2")]
    pub(crate) name: i64,
    #[prost(int64, tag = "3")]
    pub(crate) system_name: i64,
    #[prost(int64, tag = "4")]
    pub(crate) file: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PprofProfile {
    #[prost(message, repeated, tag = "1")]
    pub(crate) sample_types: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) samples: Vec<PprofSample>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) mappings: Vec<Mapping>,
    #[prost(message, repeated, tag = "4")]
    pub(crate) locations: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) functions: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    pub(crate) strings: Vec<String>,
    #[prost(int64, tag = "9")]
    pub(crate) time_nanos: i64,
    #[prost(int64, tag = "10")]
    pub(crate) duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    pub(crate) period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    pub(crate) period: i64,
    #[prost(int64, repeated, tag = "13")]
    pub(crate) comments: Vec<i64>,
    #[prost(int64, tag = "14")]
    pub(crate) default_sample_type: i64,
}

/// Builds the tables of a message. Each text, function and place is in its table once.
#[derive(Default)]
struct Tables {
    strings: Vec<String>,
    by_string: HashMap<String, i64>,
    functions: Vec<Function>,
    by_function: HashMap<(i64, i64, i64), u64>,
    locations: Vec<Location>,
    /// Ids by file, address and number of functions, since inner functions may be left out.
    by_place: HashMap<(Option<u32>, u64, usize), u64>,
}

impl Tables {
    fn string(&mut self, text: &str) -> i64 {
        if let Some(&at) = self.by_string.get(text) {
            return at;
        }
        let at = self.strings.len() as i64;
        self.strings.push(text.to_string());
        self.by_string.insert(text.to_string(), at);
        at
    }

    fn value(&mut self, kind: &str, unit: &str) -> ValueType {
        ValueType { kind: self.string(kind), unit: self.string(unit) }
    }

    fn function(&mut self, line: &NamedLine) -> u64 {
        let key = (self.string(&line.function), self.string(&line.system_name), self.string(&line.source));
        let functions = &mut self.functions;
        *self.by_function.entry(key).or_insert_with(|| {
            let id = functions.len() as u64 + 1;
            functions.push(Function { id, name: key.0, system_name: key.1, file: key.2 });
            id
        })
    }

    fn location(&mut self, profile: &Profile, place: &Place) -> u64 {
        let key = (place.frame.file, place.frame.address, place.lines.len());
        if let Some(&id) = self.by_place.get(&key) {
            return id;
        }
        let id = self.locations.len() as u64 + 1;
        let lines = place.lines.iter();
        let lines = lines.map(|line| PprofLine { function_id: self.function(line), line: i64::from(line.line) });
        let lines = lines.collect();
        let bias = place.frame.file.and_then(|file| profile.files.get(file as usize)).map_or(0, |file| file.bias);
        let mapping_id = place.frame.file.map_or(0, |file| u64::from(file) + 1);
        self.locations.push(Location { id, mapping_id, address: place.frame.address.wrapping_add(bias), lines });
        self.by_place.insert(key, id);
        id
    }
}

/// Returns the message.
pub(crate) fn message(profile: &Profile) -> PprofProfile {
    let mut tables = Tables::default();
    tables.string("");
    let kinds =
        [("alloc_objects", "count"), ("alloc_space", "bytes"), ("inuse_objects", "count"), ("inuse_space", "bytes")];
    let kinds = [&kinds[..], &FREED].concat();
    let sample_types = kinds.iter().map(|(kind, unit)| tables.value(kind, unit)).collect();
    let mappings = profile.files.iter().enumerate().map(|(at, file)| Mapping {
        id: at as u64 + 1,
        start: file.start,
        limit: file.end,
        offset: file.offset,
        file: tables.string(&file.path),
        build_id: tables.string(&file.build_id),
        has_functions: true,
        has_files: file.has_lines,
        has_lines: file.has_lines,
        has_inlined: file.has_lines,
    });
    let mappings = mappings.collect();
    let samples = profile.rows.iter().filter_map(|row| sample(&mut tables, profile, row)).collect();
    let period_type = tables.value("space", "bytes");
    let mut comments = summary(profile);
    if profile.view == ProfileView::Peak {
        comments.push(AT_PEAK.to_string());
    }
    let comments = comments.iter().map(|text| tables.string(text)).collect();
    let shown = if profile.view == ProfileView::Allocated { "alloc_space" } else { "inuse_space" };
    let default_sample_type = tables.string(shown);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as i64);
    let duration_nanos = (profile.of.seconds * 1e9) as i64;
    PprofProfile {
        sample_types,
        samples,
        mappings,
        locations: tables.locations,
        functions: tables.functions,
        strings: tables.strings,
        time_nanos: now - duration_nanos,
        duration_nanos,
        period_type: Some(period_type),
        period: profile.every as i64,
        comments,
        default_sample_type,
    }
}

fn sample(tables: &mut Tables, profile: &Profile, row: &ProfileRow) -> Option<PprofSample> {
    let SampleSums { live, allocated, peak, freed } = row.sums;
    let held = if profile.view == ProfileView::Peak { peak } else { live };
    let rounded = |value: f64| value.round() as i64;
    let freed = [freed.objects, freed.seconds * 1e6];
    let values = [allocated.objects, allocated.bytes, held.objects, held.bytes, freed[0], freed[1]].map(rounded);
    if values == [0; 6] {
        return None;
    }
    let location_ids = profile.stacks[row.stack].iter().map(|place| tables.location(profile, place)).collect();
    let labels = [("group", &row.group), ("thread", &row.thread)].into_iter().filter(|(_, text)| !text.is_empty());
    let labels = labels.map(|(key, text)| Label { key: tables.string(key), text: tables.string(text) }).collect();
    Some(PprofSample { location_ids, values: values.to_vec(), labels })
}

/// Writes the compressed message.
pub(crate) fn write(output: &mut dyn Write, profile: &Profile) -> io::Result<()> {
    let mut packed = GzEncoder::new(output, Compression::default());
    packed.write_all(&message(profile).encode_to_vec())?;
    packed.finish()?;
    Ok(())
}
