//! Options: one variable, `NEAP=key:value,key:value`.
//!
//! Parsing allocates nothing and refuses nothing. neap reports an unknown key or value once on
//! standard error, and ignores it. A typing error must not stop a server from starting. With
//! `strict:on` or `NEAP_STRICT=1` the process exits with [`REFUSED`] instead.
//!
//! [`TABLE`] is the one table of options.
//!
//! # Adding an option
//!
//! 1. Add a row to the table in `table.rs`, which makes the field of [`Options`], too. Use a kind
//!    of `kinds.rs` for its values, or add one. Set the field in the test
//!    `every_option_can_be_set`.
//! 2. Add the row to `docs/guide/options.md`, which `neap-cli/tests/options.rs` compares with the
//!    table.
//! 3. If a running process may change the option, add a [`Setting`] at the end of the enum,
//!    since `neap set` sends its number. Name it in the row.
//! 4. Read the field where it takes effect: in `Core::options` for a fixed option, in `settings.rs`
//!    for one with a [`Setting`].

use neap_os::fatal::{say, stop};
use table::LONGEST_KEY;

pub(crate) mod change;
mod kinds;
pub mod settings;
mod table;
mod types;

pub use table::{OptionRow, Options, TABLE};
pub use types::{AUTO, Background, LONGEST_PATH, Path, Setting, ThreadGroups};

/// Exit status of a strict process with an unknown option; that of `neap run` for its own failures.
pub const REFUSED: i32 = 125;

/// Returns the key that the one in `item` is most likely meant to be; `None` if `item` has a valid
/// key, or resembles no key.
pub fn nearest(item: &[u8]) -> Option<&'static str> {
    let typed = item.split(|&byte| byte == b':').next()?.trim_ascii();
    let likely = |key: &'static str| {
        let begins = typed.len() > 2 && (key.as_bytes().starts_with(typed) || typed.starts_with(key.as_bytes()));
        let away = edits(key.as_bytes(), typed)?;
        (begins || away * 3 <= key.len() + 1).then_some((away, key))
    };
    let (away, key) = TABLE.iter().filter_map(|row| likely(row.key)).min()?;
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
            let goes_on = in_list && item[0].is_ascii_digit();
            in_list = goes_on || item.starts_with(b"isolated:");
            let outcome = if goes_on { options.assign(b"isolated", item) } else { options.set(item) };
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

    fn set(&mut self, item: &[u8]) -> Result<(), &'static str> {
        let colon = item.iter().position(|&byte| byte == b':').ok_or("has no colon")?;
        self.assign(&item[..colon], &item[colon + 1..])
    }

    /// Sets the option `key` to `value`.
    ///
    /// # Errors
    /// The fault of the key or of the value.
    pub(crate) fn assign(&mut self, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
        let row = TABLE.iter().find(|row| row.key.as_bytes() == key);
        row.ok_or("is not an option")?.assign(self, value)
    }

    /// The value of an option that may change, as a number: see [`Setting`].
    pub fn number(&self, setting: Setting) -> u64 {
        setting.row().field(&mut { *self }).number()
    }

    /// Sets an option that may change to a number: see [`Setting`].
    ///
    /// # Errors
    /// The fault of the number.
    pub fn set_number(&mut self, setting: Setting, number: u64) -> Result<(), &'static str> {
        let row = setting.row();
        row.field(self).set(row.kind.check(number)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::limit::PERCENT;
    use neap_os::topology::CpuSet;
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
            high: PERCENT + 90,
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
        for row in &TABLE {
            let complaint = (std::format!("{}:x", row.key), row.kind.wrong);
            assert_eq!(parse(&complaint.0).1, [complaint]);
        }
    }

    #[test]
    fn default_in_the_table_is_the_default_value() {
        let has_value = |row: &&OptionRow| !["isolated", "trace", "profile_at_limit"].contains(&row.key);
        for row in TABLE.iter().filter(has_value) {
            assert_eq!(parse(&std::format!("{}:{}", row.key, row.default)), (Options::DEFAULT, Vec::new()));
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
