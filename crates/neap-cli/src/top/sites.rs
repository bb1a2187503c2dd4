//! The profile pane: the allocation sites with the most live bytes, estimated from samples.
//!
//! The thread of [`profiling`](super::profiling) makes its tables.

use anyhow::Result;
use serde_json::{Value, json};

use super::listing::{Cell, Listing, size};
use super::reading::Reading;
use crate::profile::{HotSite, SiteTable, amount, named_place};
use crate::report::{number, rounded};

/// The profile of a process, while the user wants one.
#[derive(Default)]
pub(super) struct ProfilePane {
    /// Number of times that the user switched the pane on or off. It is on if this is odd.
    pub(super) turn: u64,
    table: Option<SiteTable>,
    /// The reason why the profile has ended or could not begin.
    failed: Option<String>,
}

/// A row of the pane.
struct SiteRow {
    live: f64,
    error: f64,
    samples: u64,
    name: String,
}

impl ProfilePane {
    pub(super) fn is_on(&self) -> bool {
        self.turn % 2 == 1
    }

    /// Switches the pane on or off. It begins without a table.
    pub(super) fn turn(&mut self) {
        *self = ProfilePane { turn: self.turn + 1, ..ProfilePane::default() };
    }

    /// Takes a new table, or the reason why there will be none.
    pub(super) fn follow(&mut self, news: Result<SiteTable>) {
        match news {
            Ok(table) => self.table = Some(table),
            Err(error) => (self.table, self.failed) = (None, Some(format!("{error:#}"))),
        }
    }

    /// Returns the pane's rows. One row is for memory that is in no sample, so that the shares add
    /// up to the bytes in use.
    pub(super) fn listing(&self, now: &Reading) -> Listing {
        let rows = self.table.as_ref().map(|table| rows(table, now)).unwrap_or_default();
        let title = self.table.as_ref().map_or_else(|| "Profile".to_string(), title);
        let empty = match (&self.failed, &self.table) {
            (Some(failed), _) => failed.as_str(),
            (None, None) => "The first samples are being read.",
            (None, Some(_)) => "No live allocation has been sampled.",
        };
        let total: f64 = rows.iter().map(|row| row.live).sum();
        let bytes = |bytes: f64| Cell::Bytes(bytes.max(0.0) as u64);
        Listing::of(title, empty, &rows, |row| row.name.clone())
            .column("live", "bytes", |row| bytes(row.live))
            .column("share %", "share", |row| Cell::Rate(Some(100.0 * row.live / total.max(1.0))))
            .column("+-", "standard_error_bytes", |row| bytes(row.error))
            .column("samples", "samples", |row| Cell::Number(row.samples))
            .column("function", "function", |row| Cell::Text(row.name.clone()))
            .listing
    }

    /// Returns the profile as a JSON object, and the reason if there is none. Both are null while
    /// the pane is off.
    pub(super) fn json(&self, now: &Reading) -> (Value, Value) {
        let site = |site: &HotSite| {
            let mut object = amount(site.live);
            object["function"] = json!(site.function);
            object["file"] = json!(site.source);
            object["line"] = json!(site.line);
            object
        };
        let object = |table: &SiteTable| {
            json!({
                "seconds": rounded(table.seconds), "every_bytes": table.every, "live": amount(table.live),
                "unsampled_bytes": unsampled(table, now).unwrap_or(0.0) as u64, "samples_lost": table.lost,
                "has_lines": table.has_lines, "places_without_lines": table.without_lines, "sites": table.sites.iter().map(site).collect::<Vec<_>>(),
                "sites_left_out": table.others,
            })
        };
        (self.table.as_ref().map_or(Value::Null, object), json!(self.failed))
    }
}

/// Bytes in use that no sample stands for; `None` if there are none beyond the standard error.
fn unsampled(table: &SiteTable, now: &Reading) -> Option<f64> {
    let bytes = now.numbers.bytes.used as f64 - table.live.bytes;
    (bytes > table.live.error()).then_some(bytes)
}

fn title(table: &SiteTable) -> String {
    let mut title = format!("Profile of {} s, a sample every {}", number(table.seconds, 0), size(table.every));
    if table.lost > 0 {
        title += &format!(", {} lost", table.lost);
    }
    if table.without_lines > 0 {
        title += &format!(", {} places without lines", table.without_lines);
    }
    if !table.has_lines {
        title += ", functions only";
    }
    title
}

fn rows(table: &SiteTable, now: &Reading) -> Vec<SiteRow> {
    let row = |site: &HotSite| SiteRow {
        live: site.live.bytes,
        error: site.live.error(),
        samples: site.live.samples,
        name: named_place(&site.function, &site.source, site.line),
    };
    let mut rows: Vec<SiteRow> = table.sites.iter().map(row).collect();
    if table.others > 0 {
        let name = format!("[{} more sites]", table.others);
        let other = table.other;
        rows.push(SiteRow { live: other.bytes, error: other.error(), samples: other.samples, name });
    }
    if let Some(live) = unsampled(table, now) {
        let name = "[in no sample: allocated before sampling]".to_string();
        rows.push(SiteRow { live, error: table.live.error(), samples: 0, name });
    }
    rows.sort_by(|one, other| other.live.total_cmp(&one.live));
    rows
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::profile::Amount;
    use crate::top::reading::tests::readings;
    use anyhow::anyhow;

    /// Two sites with 36 of the 60 MiB that the readings have in use, and one more.
    pub(in crate::top) fn pane() -> ProfilePane {
        let live = |bytes: u64| Amount::of_sum(1000.0, (bytes << 20) as f64, 512 << 10);
        let site = |function: &str, source: &str, line: u32, bytes: u64| HotSite {
            function: function.into(),
            source: source.into(),
            line,
            live: live(bytes),
        };
        let sites = vec![site("parse", "/src/server/parse.c", 12, 32), site("_sdsnewlen", "", 0, 4)];
        let mut sum = live(2);
        sites.iter().for_each(|site| sum.add(site.live));
        let mut pane = ProfilePane { turn: 1, ..ProfilePane::default() };
        let table = SiteTable { seconds: 12.4, every: 512 << 10, has_lines: true, ..SiteTable::default() };
        pane.follow(Ok(SiteTable { live: sum, sites, others: 1, other: live(2), lost: 3, ..table }));
        pane
    }

    #[test]
    fn shares_add_up_to_the_bytes_in_use() {
        let [_, now] = &readings();
        let listing = pane().listing(now);
        assert_eq!(listing.title, "Profile of 12 s, a sample every 512.0K, 3 lost");
        let table = SiteTable { without_lines: 7, ..SiteTable::default() };
        assert!(title(&table).ends_with(", 7 places without lines, functions only"));
        let (heads, rows) = listing.lines(100);
        assert_eq!(heads, " live  share %       +-  samples  function");
        let expected = [
            "32.0M     53.3     3.9M       62  parse (server/parse.c:12)",
            "22.0M     36.7     4.3M        0  [in no sample: allocated before sampling]",
            " 4.0M      6.7     1.4M        8  _sdsnewlen",
            " 2.0M      3.3  1023.0K        4  [1 more sites]",
        ];
        assert_eq!(rows, expected);
        let (object, failed) = pane().json(now);
        assert_eq!(
            (&object["unsampled_bytes"], &object["sites_left_out"], failed),
            (&json!(22 << 20), &json!(1), Value::Null)
        );
        let site = &object["sites"][0];
        assert_eq!(
            (&site["file"], &site["line"], &site["bytes"]),
            (&json!("/src/server/parse.c"), &json!(12), &json!(32 << 20))
        );
    }

    #[test]
    fn estimate_above_the_bytes_in_use_leaves_none_unsampled() {
        let [_, mut now] = readings();
        now.numbers.bytes.used = 37 << 20;
        let (object, _) = pane().json(&now);
        assert_eq!(object["unsampled_bytes"], 0);
        assert_eq!(pane().listing(&now).keys().len(), 3);
    }

    #[test]
    fn failed_profile_pane_shows_reason_until_switched_on_again() {
        let [_, now] = &readings();
        let mut pane = pane();
        pane.follow(Err(anyhow!("process 7 has ended").context("no profile")));
        assert_eq!(pane.listing(now).lines(100).0, "no profile: process 7 has ended");
        assert_eq!(pane.json(now), (Value::Null, json!("no profile: process 7 has ended")));
        pane.turn();
        assert!(!pane.is_on());
        pane.turn();
        assert!(pane.is_on());
        assert_eq!(pane.listing(now).lines(100).0, "The first samples are being read.");
        assert_eq!(pane.json(now), (Value::Null, Value::Null));
    }
}
