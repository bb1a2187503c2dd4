//! Options: one variable, `NEAP=key:value,key:value`.
//!
//! Parsing allocates nothing and refuses nothing. neap reports an unknown key or value once on
//! standard error, and ignores it. A typing error must not stop a server from starting. With
//! `strict:on` or `NEAP_STRICT=1` the process exits with [`REFUSED`] instead.
//!
//! [`DESCRIPTIONS`] is the one table of options.
//!
//! # Adding an option
//!
//! 1. Add a [`Description`], a field of [`Options`] and its value in [`Options::DEFAULT`].
//! 2. Add an arm to `Options::assign`. Raise `LONGEST_KEY` for a longer key. Set the field in the
//!    test `every_option_can_be_set`.
//! 3. Add the row to `docs/guide/options.md`, which `neap-cli/tests/options.rs` compares with the
//!    table.
//! 4. If a running process may change the option, add a `Setting` at the end of the enum, since
//!    `neap set` sends its number. Add it to the list in `settings.rs`, and to each match over
//!    settings.

use crate::limits::limit::Limit;
use core::ffi::CStr;
use neap_os::cpuset;
use neap_os::fatal::{say, stop};
use neap_os::nodes::MAX_NODES;
use neap_os::topology::{CpuSet, MAX_CPUS};
use neap_pages::{BATCH_SCALE, MOST_BATCH_SCALE};

pub(crate) mod change;
mod descriptions;
pub mod settings;

pub use descriptions::{DESCRIPTIONS, Description};

/// When neap has a thread that releases memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Background {
    /// Once the program has made a thread, or requests work that only a thread can do.
    Threaded,
    /// From the start.
    Always,
    /// Never.
    Never,
}

/// Options of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Use restartable sequences if they work.
    pub rseq: bool,
    /// When neap has a thread. Without it, ordinary calls release memory.
    pub background: Background,
    /// Use huge pages for fresh memory where much of it is used, or where the system gives them to
    /// all memory.
    pub huge: bool,
    /// The most bytes that may be in use at a time; 0 for no limit; [`AUTO`] to follow the
    /// container.
    pub limit: u64,
    /// The use above which neap releases memory in the background, as a number of
    /// [`Setting::High`]; 0 for no such bound.
    pub high: u64,
    /// Bytes that stay free below the limit, as a number of [`Setting::Reserve`].
    pub reserve: u64,
    /// Milliseconds between two ticks.
    pub interval: u32,
    /// Make the page of numbers that `neap stat` reads.
    pub stat: bool,
    /// Most pages that a CPU's page list keeps; `None`: tuned at run time.
    pub page_list_high: Option<u32>,
    /// The most doublings of the pages that move between a page list and the zone at once.
    pub page_batch_scale: u32,
    /// Number of simulated nodes, over which neap spreads the CPUs. 0 stands for the machine's own
    /// nodes. 1 treats all memory alike.
    pub nodes: u32,
    /// CPUs that neap does not interrupt, besides those that the kernel lists as isolated.
    pub isolated: CpuSet,
    /// Whether `malloc` in a group at its limit returns null.
    pub refuse: bool,
    /// Whether threads are put into groups of their own.
    pub groups: ThreadGroups,
    /// File of the [trace](crate::trace), which records pages that neap hands out and takes back.
    pub trace: Path,
    /// Bytes between two samples of allocations, on average; 0: no samples.
    pub profile: u64,
    /// File for heap profiles before an allocation is refused or the container's memory ends.
    pub profile_at_limit: Path,
    /// Whether writes beyond allocations and wrong frees are found.
    pub check: bool,
    /// Bytes between two guarded samples of allocations, on average; 0 for no samples.
    pub guard: u64,
    /// Whether an unknown option ends the process.
    pub strict: bool,
}

/// Exit status of a strict process with an unknown option; that of `neap run` for its own failures.
pub const REFUSED: i32 = 125;

/// The groups that an unmodified program's threads are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadGroups {
    /// None.
    Off,
    /// All threads with the same name are in one group.
    ByName,
    /// Each thread is in a group of its own.
    ByThread,
}

/// The most bytes of a [`Path`].
pub const LONGEST_PATH: usize = 255;

/// A file's absolute path, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path([u8; LONGEST_PATH + 1]);

impl Path {
    /// No file.
    pub const NONE: Path = Path([0; LONGEST_PATH + 1]);

    /// Returns the path in `bytes`, if it begins with a slash, contains no zero byte, and has at
    /// most [`LONGEST_PATH`] bytes.
    pub fn absolute(bytes: &[u8]) -> Option<Path> {
        let mut path = Path::NONE;
        path.0[..LONGEST_PATH].get_mut(..bytes.len())?.copy_from_slice(bytes);
        (bytes.first() == Some(&b'/') && !bytes.contains(&0)).then_some(path)
    }

    /// The path, if there is one.
    pub fn as_c_str(&self) -> Option<&CStr> {
        CStr::from_bytes_until_nul(&self.0).ok().filter(|path| !path.is_empty())
    }
}

/// Bytes between two samples with `profile:on` or `guard:on`.
const SAMPLE_MEAN: u64 = 512 << 10;
/// The numbers of bytes that `profile` accepts.
const PROFILE_MEANS: core::ops::RangeInclusive<u64> = 1 << 10..=1 << 40;
const NO_PATH: &str = "is not a path from / on of at most 255 bytes";
const NO_MEAN: &str = "is none of off, on, and a number of bytes from 1k to 1024g";

/// The number of a [`Setting`] whose value neap chooses at run time.
pub const AUTO: u64 = u64::MAX;

/// An option that may change while the process runs, with its value as a number. `neap set` sends
/// the number of the setting, so these numbers must not change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Setting {
    /// Bytes; 0 for no limit; [`AUTO`] to follow the container. 2^63 plus a percentage follows the
    /// container, too, and bounds the use by that part of the container's limit.
    Limit,
    /// Milliseconds.
    Interval,
    /// Pages; [`AUTO`]: tuned at run time.
    PageListHigh,
    /// 1: on; 0: off.
    Refuse,
    /// Doublings.
    PageBatchScale,
    /// Bytes between two samples; 0: none.
    Profile,
    /// Bytes, or 2^63 plus a percentage of the limit; 0 for no bound.
    High,
    /// Bytes, or 2^63 plus a percentage of the limit. With [`AUTO`], neap chooses a margin below
    /// the container's limit.
    Reserve,
}

/// Length of the longest key.
const LONGEST_KEY: usize = 16;

/// Returns the key that the one in `item` is most likely meant to be; `None` if `item` has a valid
/// key, or resembles no key.
pub fn nearest(item: &[u8]) -> Option<&'static str> {
    let typed = item.split(|&byte| byte == b':').next()?.trim_ascii();
    let likely = |key: &'static str| {
        let begins = typed.len() > 2 && (key.as_bytes().starts_with(typed) || typed.starts_with(key.as_bytes()));
        let away = edits(key.as_bytes(), typed)?;
        (begins || away * 3 <= key.len() + 1).then_some((away, key))
    };
    let (away, key) = DESCRIPTIONS.iter().filter_map(|option| likely(option.key)).min()?;
    (away > 0).then_some(key)
}

/// Returns the number of edits that turn `key` into `typed`; `None` if one of them is too long. An
/// edit inserts, removes or replaces a byte, or swaps two adjacent bytes.
fn edits(key: &[u8], typed: &[u8]) -> Option<usize> {
    if key.len() > LONGEST_KEY || typed.len() > 2 * LONGEST_KEY {
        return None;
    }
    // Rows of the table of edit distances, for the last two bytes of `typed` and the current one.
    // Column n is for the first n bytes of `key`.
    let mut older = [0; LONGEST_KEY + 1];
    let mut last: [usize; LONGEST_KEY + 1] = core::array::from_fn(|column| column);
    for (row, &byte) in typed.iter().enumerate() {
        let mut now = [row + 1; LONGEST_KEY + 1];
        for (column, &wanted) in key.iter().enumerate() {
            let replaced = last[column] + usize::from(byte != wanted);
            now[column + 1] = replaced.min(last[column + 1] + 1).min(now[column] + 1);
            let is_swapped = row > 0 && column > 0 && byte == key[column - 1] && typed[row - 1] == wanted;
            if is_swapped {
                now[column + 1] = now[column + 1].min(older[column - 1] + 1);
            }
        }
        (older, last) = (last, now);
    }
    Some(last[key.len()])
}

impl Options {
    /// The defaults.
    pub const DEFAULT: Options = Options {
        rseq: true,
        background: Background::Threaded,
        huge: true,
        limit: 0,
        high: 0,
        reserve: AUTO,
        interval: 250,
        stat: true,
        page_list_high: None,
        page_batch_scale: BATCH_SCALE,
        nodes: 0,
        isolated: CpuSet::EMPTY,
        refuse: false,
        groups: ThreadGroups::Off,
        trace: Path::NONE,
        profile: 0,
        profile_at_limit: Path::NONE,
        check: false,
        guard: 0,
        strict: false,
    };

    /// Parses `text`, and reports errors to `complain`.
    ///
    /// ```
    /// use neap::options::Options;
    /// let options = Options::parse(b"rseq:off,limit:64m", |_, _| unreachable!());
    /// assert!(!options.rseq && options.limit == 64 << 20);
    /// ```
    pub fn parse(text: &[u8], mut complain: impl FnMut(&[u8], &'static str)) -> Options {
        let (mut options, mut in_list) = (Options::DEFAULT, false);
        for item in text.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|item| !item.is_empty()) {
            // A list of CPUs contains commas. So an item after it that begins with a digit belongs
            // to the list.
            in_list = item.starts_with(b"isolated:") || in_list && item[0].is_ascii_digit();
            let outcome = match (in_list, item.strip_prefix(b"isolated:")) {
                (true, cpus) => options.isolate(cpus.unwrap_or(item)),
                (false, _) => options.set(item),
            };
            if let Err(wrong) = outcome {
                complain(item, wrong);
            }
        }
        options
    }

    /// Returns the options in `NEAP`, and reports errors on standard error. Returns the defaults
    /// for a program with more rights than its user. Ends the process at an error if `strict` or
    /// `NEAP_STRICT` is set.
    pub fn of_environment() -> Options {
        if neap_os::environment::is_privileged() {
            return Options::DEFAULT;
        }
        // SAFETY: the first allocation of the process calls this once, before the program can start
        // a thread that changes its environment. Only this function uses the values.
        let [text, strict] =
            ["NEAP", "NEAP_STRICT"].map(|name| unsafe { neap_os::environment::variable(name) }.unwrap_or_default());
        let is_strict = !matches!(strict, b"" | b"0" | b"off") || Options::parse(text, |_, _| ()).strict;
        Options::parse(text, |item, wrong| {
            let (near, end) = nearest(item).map_or(("", ""), |key| (key, "\"?)"));
            let begin = if near.is_empty() { "" } else { " (did you mean \"" };
            let said = item.escape_ascii();
            if is_strict {
                stop(REFUSED, format_args!("NEAP: \"{said}\" {wrong}{begin}{near}{end}; not started, as strict asks"));
            }
            say(format_args!("NEAP: \"{said}\" {wrong}{begin}{near}{end}; ignored"));
        })
    }

    fn isolate(&mut self, text: &[u8]) -> Result<(), &'static str> {
        let mut highest = None;
        let parsed = cpuset::parse(text, |_, high| highest = highest.max(Some(high as usize)));
        let (Ok(()), Some(highest), Some(set)) = (parsed, highest, CpuSet::parse(text)) else {
            return Err("is not a list of CPUs");
        };
        if highest >= MAX_CPUS {
            return Err("has CPUs beyond 1023, the last that can be named");
        }
        self.isolated.insert_all(&set);
        Ok(())
    }

    fn set(&mut self, item: &[u8]) -> Result<(), &'static str> {
        let colon = item.iter().position(|&byte| byte == b':').ok_or("has no colon")?;
        self.assign(&item[..colon], &item[colon + 1..])
    }

    /// Sets the option `key` to `value`.
    ///
    /// # Errors
    /// The fault of the key or of the value.
    pub(crate) fn assign(&mut self, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
        let switch = || match value {
            b"on" => Ok(true),
            b"off" => Ok(false),
            _ => Err("is neither on nor off"),
        };
        match key {
            b"rseq" => self.rseq = switch()?,
            b"background" => {
                self.background = match value {
                    b"auto" => Background::Threaded,
                    b"on" => Background::Always,
                    b"off" => Background::Never,
                    _ => return Err("is none of auto, on and off"),
                }
            }
            b"huge" => self.huge = switch()?,
            b"stat" => self.stat = switch()?,
            b"refuse" => self.refuse = switch()?,
            b"strict" => self.strict = switch()?,
            b"check" => self.check = switch()?,
            b"guard" => {
                let mean = mean(value).filter(|&mean| mean <= 1 << 40 && value != b"0");
                self.guard = mean.ok_or("is none of off, on, and a number of bytes from 1 to 1024g")?;
            }
            b"groups" => {
                self.groups = match value {
                    b"off" => ThreadGroups::Off,
                    b"by-thread-name" => ThreadGroups::ByName,
                    b"by-thread" => ThreadGroups::ByThread,
                    _ => return Err("is none of off, by-thread-name and by-thread"),
                }
            }
            b"trace" => self.trace = Path::absolute(value).ok_or(NO_PATH)?,
            b"profile_at_limit" => self.profile_at_limit = Path::absolute(value).ok_or(NO_PATH)?,
            b"limit" => {
                let limit = Limit::parse(value, bytes);
                self.limit = limit.ok_or("is none of none, auto, 1% to 100%, and a number of bytes")?.number();
            }
            b"high" => {
                let high = Limit::parse(value, bytes).filter(|&high| high != Limit::Auto);
                self.high = high.ok_or("is none of none, 1% to 100%, and a number of bytes")?.number();
            }
            b"reserve" => {
                let reserve = Limit::parse(value, bytes).filter(|&reserve| reserve != Limit::None);
                self.reserve = reserve.ok_or("is none of auto, 1% to 100%, and a number of bytes")?.number();
            }
            b"interval" => self.set_number(Setting::Interval, bytes(value).unwrap_or(0))?,
            b"page_list_high" if value == b"auto" => self.page_list_high = None,
            b"page_list_high" => {
                let pages = bytes(value).ok_or("is neither auto nor a number of pages")?;
                self.set_number(Setting::PageListHigh, pages.min(u32::MAX.into()))?;
            }
            b"page_batch_scale" => self.set_number(Setting::PageBatchScale, bytes(value).unwrap_or(u64::MAX))?,
            b"profile" => self.set_number(Setting::Profile, mean(value).ok_or(NO_MEAN)?)?,
            b"nodes" if value == b"auto" => self.nodes = 0,
            b"nodes" => {
                let count = bytes(value).filter(|count| (1..=MAX_NODES as u64).contains(count));
                self.nodes = count.ok_or("is neither auto nor a number from 1 to 32")? as u32;
            }
            _ => return Err("is not an option"),
        }
        Ok(())
    }
}

impl Options {
    /// The value of an option that may change, as a number: see [`Setting`].
    pub fn number(&self, setting: Setting) -> u64 {
        match setting {
            Setting::Limit => self.limit,
            Setting::Interval => self.interval.into(),
            Setting::PageListHigh => self.page_list_high.map_or(AUTO, u64::from),
            Setting::PageBatchScale => self.page_batch_scale.into(),
            Setting::Refuse => self.refuse.into(),
            Setting::Profile => self.profile,
            Setting::High => self.high,
            Setting::Reserve => self.reserve,
        }
    }

    /// Sets an option that may change to a number: see [`Setting`].
    ///
    /// # Errors
    /// The fault of the number.
    pub fn set_number(&mut self, setting: Setting, number: u64) -> Result<(), &'static str> {
        match setting {
            Setting::Limit if !Limit::is_number(number) => return Err("is no limit"),
            Setting::Limit => self.limit = number,
            Setting::High if !Limit::is_number(number) || number == AUTO => return Err("is no mark"),
            Setting::High => self.high = number,
            Setting::Reserve if !Limit::is_number(number) || number == 0 => return Err("is no reserve"),
            Setting::Reserve => self.reserve = number,
            Setting::Interval if !(10..=60_000).contains(&number) => return Err("is not a number from 10 to 60000"),
            Setting::Interval => self.interval = number as u32,
            Setting::PageListHigh if number == AUTO => self.page_list_high = None,
            Setting::PageListHigh => {
                self.page_list_high = Some(u32::try_from(number).map_err(|_| "is more than 4294967295 pages")?);
            }
            Setting::PageBatchScale if number > MOST_BATCH_SCALE.into() => return Err("is not a number from 0 to 6"),
            Setting::PageBatchScale => self.page_batch_scale = number as u32,
            Setting::Refuse if number > 1 => return Err("is neither on nor off"),
            Setting::Refuse => self.refuse = number == 1,
            Setting::Profile if number != 0 && !PROFILE_MEANS.contains(&number) => return Err(NO_MEAN),
            Setting::Profile => self.profile = number,
        }
        Ok(())
    }
}

/// Parses the bytes between two samples: `off`, `on` or a number.
fn mean(text: &[u8]) -> Option<u64> {
    match text {
        b"off" => Some(0),
        b"on" => Some(SAMPLE_MEAN),
        _ => bytes(text),
    }
}

/// Parses a number with an optional k, m or g for powers of 1024.
pub(crate) fn bytes(text: &[u8]) -> Option<u64> {
    let (digits, shift) = match text.last()?.to_ascii_lowercase() {
        b'k' => (&text[..text.len() - 1], 10),
        b'm' => (&text[..text.len() - 1], 20),
        b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number =
        digits.iter().try_fold(0_u64, |number, digit| number.checked_mul(10)?.checked_add(u64::from(digit - b'0')))?;
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;
    use std::vec::Vec;

    fn parse(text: &str) -> (Options, Vec<(String, &'static str)>) {
        let mut complaints = Vec::new();
        let options = Options::parse(text.as_bytes(), |item, wrong| {
            complaints.push((String::from_utf8(item.to_vec()).unwrap(), wrong));
        });
        (options, complaints)
    }

    #[test]
    fn nothing_said_means_the_defaults() {
        assert_eq!(parse(""), (Options::DEFAULT, Vec::new()));
        assert_eq!(parse(" , ,"), (Options::DEFAULT, Vec::new()));
    }

    #[test]
    fn every_option_can_be_set() {
        let (options, complaints) = parse(
            "rseq:off,background:off,isolated:1,3-5,huge:off,stat:off,limit:3g,high:90%,reserve:32m,interval:1000,page_list_high:0,page_batch_scale:1,nodes:3,\
             refuse:on,groups:by-thread,trace:/a/b,profile:64k,profile_at_limit:/c,check:on,guard:9,strict:on",
        );
        let expected = Options {
            rseq: false,
            background: Background::Never,
            huge: false,
            limit: 3 << 30,
            high: Limit::Percent(90).number(),
            reserve: 32 << 20,
            interval: 1000,
            stat: false,
            page_list_high: Some(0),
            page_batch_scale: 1,
            nodes: 3,
            isolated: CpuSet::parse(b"1,3-5").unwrap(),
            refuse: true,
            groups: ThreadGroups::ByThread,
            trace: Path::absolute(b"/a/b").unwrap(),
            profile: 64 << 10,
            profile_at_limit: Path::absolute(b"/c").unwrap(),
            check: true,
            guard: 9,
            strict: true,
        };
        assert_eq!((options.trace.as_c_str(), Options::DEFAULT.trace.as_c_str()), (Some(c"/a/b"), None));
        assert_eq!((options, complaints), (expected, Vec::new()));
        assert_eq!(parse("groups:by-thread-name").0.groups, ThreadGroups::ByName);
        let text = "page_list_high:99,page_list_high:auto,nodes:2,nodes:auto,groups:by-thread,groups:off,profile:on,profile:off,guard:on,guard:off,high:1,high:none,reserve:1,reserve:auto";
        let (options, complaints) = parse(text);
        assert_eq!((options, complaints), (Options::DEFAULT, Vec::new()));
        for description in DESCRIPTIONS {
            let (_, complaints) = parse(&std::format!("{}:x", description.key));
            assert_eq!(complaints.len(), 1, "{} is a key, and x not a value of it", description.key);
            assert_ne!(complaints[0].1, "is not an option");
        }
    }

    #[test]
    fn mistyped_key_has_a_nearest_one() {
        for (typed, key) in [
            ("limt:1g", "limit"),
            ("limti:1g", "limit"),
            ("LIMIT:1g", ""),
            ("stats:off", "stat"),
            ("node", "nodes"),
            ("pagelisthigh:3", "page_list_high"),
            ("batch_scale:3", "page_batch_scale"),
            ("back:off", "background"),
            ("hugepages:off", "huge"),
            (" trce:/a", "trace"),
            ("strcit:on", "strict"),
            ("limit:x", ""),
            ("colour:red", ""),
            ("x", ""),
            ("", ""),
            ("a-key-that-is-longer-than-any-that-there-is:on", ""),
        ] {
            assert_eq!(nearest(typed.as_bytes()).unwrap_or_default(), key, "{typed}");
        }
        assert_eq!(DESCRIPTIONS.iter().map(|option| option.key.len()).max(), Some(LONGEST_KEY));
    }

    #[test]
    fn a_list_of_cpus_ends_where_another_option_begins() {
        let isolated = |text: &str| (parse(text).0.isolated, parse(text).1);
        let set = |text: &str| CpuSet::parse(text.as_bytes()).unwrap();
        assert_eq!(isolated("isolated:7"), (set("7"), Vec::new()));
        assert_eq!(isolated("isolated:0-1, 4 ,stat:off,isolated:9"), (set("0-1,4,9"), Vec::new()));
        assert_eq!(isolated("stat:off,3").1, [("3".into(), "has no colon")]);
        for wrong in ["isolated:", "isolated:x", "isolated:3-1", "isolated:1,2x", "isolated:1-"] {
            assert_eq!(
                isolated(wrong).1.iter().map(|(_, wrong)| *wrong).collect::<Vec<_>>(),
                ["is not a list of CPUs"]
            );
        }
        for beyond in ["isolated:1020-2000", "isolated:2000"] {
            let complaints = std::vec![(beyond.into(), "has CPUs beyond 1023, the last that can be named")];
            assert_eq!(isolated(beyond), (CpuSet::EMPTY, complaints));
        }
    }

    #[test]
    fn a_path_is_absolute_and_not_too_long() {
        let path = |length: usize| std::vec![b'/'; length];
        assert_eq!(Path::absolute(&path(255)).unwrap().as_c_str().unwrap().to_bytes(), path(255));
        assert_eq!((Path::absolute(&path(256)), Path::absolute(b"a/b"), Path::absolute(b"")), (None, None, None));
        assert_eq!(Path::absolute(b"/a\0b"), None);
    }

    #[test]
    fn what_is_not_known_is_named_and_left_out() {
        let (options, complaints) =
            parse("colour:red,rseq,interval:5,limit:99999999999g,rseq:off,nodes:0,nodes:33,high:auto,reserve:none");
        assert_eq!(options, Options { rseq: false, ..Options::DEFAULT });
        let wrong: Vec<&str> = complaints.iter().map(|(item, _)| item.as_str()).collect();
        assert_eq!(
            wrong,
            [
                "colour:red",
                "rseq",
                "interval:5",
                "limit:99999999999g",
                "nodes:0",
                "nodes:33",
                "high:auto",
                "reserve:none"
            ]
        );
    }
}
