//! The panes of `neap top`, and the rows of each.
//!
//! To add a pane, add a variant with its columns, and the condition for showing it, if any.

use neap_base::listed_enum;

use super::events::EventRow;
use super::listing::{Cell, Listing, SortOrder};
use super::reading::Pair;
use super::state::View;
use crate::look::stat_model::{Cpu, Node};

listed_enum! {
    /// A part of the screen with rows. The variants are in the order from the top down.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(super) enum Pane {
        Groups = "groups",
        Profile = "profile",
        Zones = "zones",
        Cpus = "cpus",
        Events = "events",
    }
}

impl Pane {
    /// The panes with content, from the top down.
    pub(super) fn shown(pair: Pair<'_>, state: &View) -> Vec<Pane> {
        let is_shown = |pane: &Pane| match pane {
            Pane::Groups => pair.current.numbers.groups.is_some(),
            Pane::Profile => state.profile.is_on(),
            Pane::Zones | Pane::Cpus | Pane::Events => true,
        };
        Pane::ALL.into_iter().filter(is_shown).collect()
    }

    /// The pane's rows.
    pub(super) fn listing(self, pair: Pair<'_>, state: &View) -> Listing {
        match self {
            Pane::Groups => {
                state.groups.listing(pair.current.at, state.interval, state.order(self) == SortOrder::default())
            }
            Pane::Profile => state.profile.listing(pair.current),
            Pane::Zones => zones(pair),
            Pane::Cpus => cpus(pair),
            Pane::Events => log(state.log.events()),
        }
    }
}

fn zones(pair: Pair<'_>) -> Listing {
    let numbers = &pair.current.numbers;
    let before = &pair.previous.numbers.nodes;
    let bytes = |pages| Cell::Bytes(pair.current.bytes(pages));
    let waits = |node: &Node| {
        let old = before.iter().find(|old| old.node == node.node).map_or(node.zone_waits, |old| old.zone_waits);
        Cell::Rate(pair.rate(node.zone_waits.saturating_sub(old)))
    };
    let mut rows = Listing::of("Zones", "No zone is known.", &numbers.nodes, |node| node.node.to_string())
        .column("node", "node", |node| Cell::Number(node.node.into()))
        .column("managed", "managed_bytes", |node| bytes(node.managed))
        .column("used", "used_bytes", |node| bytes(node.used))
        .column("free", "free_bytes", |node| bytes(node.free))
        .column("resident", "free_resident_bytes", |node| bytes(node.backed_free))
        .column("in lists", "listed_bytes", |node| bytes(node.listed))
        .column("may keep", "highs_bytes", |node| bytes(node.highs))
        .column("waits/s", "zone_waits_per_s", waits);
    if numbers.pages.budget.is_some() {
        rows = rows
            .column("low", "low_bytes", |node| bytes(node.watermarks.low))
            .column("high", "high_bytes", |node| bytes(node.watermarks.high))
            .column("min", "min_bytes", |node| bytes(node.watermarks.min));
    }
    if numbers.nodes.len() > 1 {
        rows = rows.column("misses", "misses", |node| Cell::Number(node.misses));
    }
    rows.listing
}

fn cpus(pair: Pair<'_>) -> Listing {
    let (now, before) = (pair.current, &pair.previous.numbers.cpus);
    let total = |cpu: &Cpu| cpu.cached_bytes.saturating_add(now.bytes(cpu.page_list));
    let change = |cpu: &Cpu| {
        let old = before.iter().find(|old| old.cpu == cpu.cpu).map_or(0, total);
        Cell::Change(total(cpu).wrapping_sub(old) as i64)
    };
    Listing::of("CPU caches", "No CPU caches anything.", &now.numbers.cpus, |cpu| cpu.cpu.to_string())
        .column("CPU", "cpu", |cpu| Cell::Number(cpu.cpu.into()))
        .column("cached", "cached_bytes", |cpu| Cell::Bytes(total(cpu)))
        .column("change", "change_bytes", change)
        .column("objects", "object_bytes", |cpu| Cell::Bytes(cpu.cached_bytes))
        .column("stacks", "stacks", |cpu| Cell::Number(cpu.stacks))
        .column("page list", "listed_bytes", |cpu| Cell::Bytes(now.bytes(cpu.page_list)))
        .column("may keep", "high_bytes", |cpu| Cell::Bytes(now.bytes(cpu.list_high)))
        .column("slots", "slots", |cpu| Cell::Text(cpu.kind.clone()))
        .listing
}

fn log(events: &[EventRow]) -> Listing {
    Listing::of("Events", "Nothing has happened yet.", events, |event| event.number.to_string())
        .column("time", "time", |event| Cell::Text(event.clock.clone()))
        .column("event", "event", |event| Cell::Text(event.kind.to_string()))
        .column("what", "what", |event| Cell::Text(event.what.clone()))
        .listing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::reading::tests::{reading, readings};
    use serde_json::json;

    #[test]
    fn zone_columns_depend_on_limit_and_node_count() {
        let [previous, current] = &readings();
        let (heads, rows) = zones(Pair { previous, current }).lines(200);
        assert_eq!(
            heads,
            "node  managed   used   free  resident  in lists  may keep  waits/s     low  high     min  misses"
        );
        assert_eq!(
            rows[1],
            "   1    78.1M  46.9M  31.2M      3.9M      1.2M      2.7M     60.0  800.0K  1.2M  400.0K       3"
        );
        let alone =
            reading(10_000, &json!({"mode": {"page_size": 4096}, "nodes": [{"node": 0, "used": 3, "zone_waits": 9}]}));
        let (heads, rows) = zones(Pair { previous: &alone, current: &alone }).lines(200);
        assert_eq!(heads, "node  managed   used  free  resident  in lists  may keep  waits/s");
        assert_eq!(rows, ["   0        0  12.0K     0         0         0         0        -"]);
    }

    #[test]
    fn cpus_are_compared_with_themselves() {
        let [previous, current] = &readings();
        let listing = cpus(Pair { previous, current });
        let object = listing.json();
        let changes: Vec<_> = object.as_array().unwrap().iter().map(|row| &row["change_bytes"]).collect();
        assert_eq!(changes, [&json!(36_864), &json!(300 + (252 << 12)), &json!(-8000)]);
        let expected = json!({
            "cpu": 1, "cached_bytes": 300 + (252 << 12), "change_bytes": 300 + (252 << 12), "object_bytes": 300, "stacks": 2,
            "listed_bytes": 252 << 12, "high_bytes": 504 << 12, "slots": "rseq",
        });
        assert_eq!(object[1], expected);
        assert_eq!(listing.keys().collect::<Vec<_>>(), ["0", "1", "2"]);
    }
}
