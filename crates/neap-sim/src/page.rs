//! The comparison as one HTML page that loads no other file.
//!
//! # Design
//!
//! 1. A scatter for each scenario: lock acquisitions against pages in page lists, by policy.
//! 2. Cases in which `Adaptive` is worse than another policy.
//! 3. A table and plots over time for each scenario.
//! 4. Figures, published numbers and costs.
//!
//! A plot has at most [`POINTS`] points for each policy, so a scenario adds at most 96 KiB.

use core::fmt::Write;

use plotters::prelude::*;

use crate::compare::Comparison;
use crate::cost;
use crate::measure::{Outcome, Sample};
use crate::plots::{self, LegendEntry, Point, Titles};
use crate::policies::{self, Name};
use crate::scenarios::Scenario;

const SCATTER: (u32, u32) = (440, 340);
const PLOT: (u32, u32) = (440, 280);
/// Pixels of a legend.
const LEGEND: i32 = 104;
/// Most points of a line.
const POINTS: usize = 240;
/// Colours of the policies, in their order. Each is legible on a light and on a dark ground.
const COLOURS: [RGBColor; 7] = [
    RGBColor(119, 119, 119),
    RGBColor(179, 89, 0),
    RGBColor(0, 114, 178),
    RGBColor(220, 20, 20),
    RGBColor(0, 140, 100),
    RGBColor(190, 90, 150),
    RGBColor(130, 120, 0),
];
const STYLE: &str = ":root{color-scheme:light dark;--text:#1d2126;--ground:#fff;--line:#dfe4e8}\
    @media(prefers-color-scheme:dark){:root{--text:#e4e8ec;--ground:#14171a;--line:#30373d}}\
    body{font:14px/1.4 sans-serif;color:var(--text);background:var(--ground);max-width:100em;margin:2em auto;padding:0 1em}\
    table{border-collapse:collapse;margin:.5em 0}td,th{padding:.1em .6em;text-align:right;border-bottom:1px solid var(--line)}\
    td:first-child,th:first-child{text-align:left}a{color:inherit}figure{display:inline-block;margin:.5em .5em .5em 0}\
    figcaption{font-size:12px;text-align:center}";

/// The columns of a scenario's table.
pub const COLUMNS: [&str; 14] = [
    "policy",
    "lock takes",
    "per million",
    "lock share %",
    "from zone %",
    "GB/s",
    "pages listed",
    "pages held",
    "alloc p50 ns",
    "p99",
    "max",
    "free p50 ns",
    "p99",
    "max",
];

/// A policy's row.
pub fn row(policy: Name, outcome: &Outcome) -> Vec<String> {
    let times = [outcome.alloc_p50, outcome.alloc_p99, outcome.alloc_max];
    let times = times.into_iter().chain([outcome.free_p50, outcome.free_p99, outcome.free_max]);
    let mut row = vec![
        policy.text().to_string(),
        outcome.lock_takes.to_string(),
        format!("{:.1}", outcome.lock_takes_per_million),
        format!("{:.3}", outcome.lock_share * 100.0),
        format!("{:.1}", outcome.zone_share * 100.0),
        format!("{:.2}", outcome.gigabytes_per_second),
        format!("{:.0}", outcome.average_listed),
        format!("{:.0}", outcome.average_used),
    ];
    row.extend(times.map(|time| time.to_string()));
    row
}

/// Returns a scenario's table, with a row for each policy.
pub fn rows(comparison: &Comparison, scenario: Scenario) -> Vec<Vec<String>> {
    let found = |policy| Some(row(policy, &comparison.run(scenario, policy)?.outcome));
    policies::ALL.into_iter().filter_map(found).collect()
}

/// The page.
pub fn html(comparison: &Comparison, scenarios: &[Scenario]) -> String {
    let mut page = String::new();
    // Writing into a string does not fail.
    let _ = write_page(&mut page, comparison, scenarios);
    page
}

fn write_page(page: &mut String, comparison: &Comparison, scenarios: &[Scenario]) -> core::fmt::Result {
    write!(page, "<!DOCTYPE html><html lang=en><meta charset=utf-8><meta name=color-scheme content='light dark'>")?;
    write!(page, "<title>neap lab</title><style>{STYLE}{}</style>", plots::STYLE)?;
    write!(page, "<h1>Lock acquisitions against pages in page lists</h1>")?;
    write!(
        page,
        "<p>A point is one policy. Lower is better, and so is further left. Both axes are logarithmic; values below 0.1 are "
    )?;
    write!(page, "drawn at 0.1. ")?;
    write!(page, "Page lists, policies and the zone are the library's; CPUs, time and waiting are simulated. ")?;
    write!(page, "Seed {}.</p>", comparison.seed)?;
    for (number, &scenario) in scenarios.iter().enumerate() {
        let figure = scatter(comparison, scenario);
        write!(page, "<figure>{figure}<figcaption><a href='#s{number}'>table, and plots over time</a>")?;
        write!(page, "</figcaption></figure>")?;
    }
    write!(page, "<h2>Where adaptive is worse</h2>")?;
    write!(page, "<p>{} cases in which another policy is better on both axes; ", comparison.dominated.len())?;
    write!(page, "{} in which adaptive is more than 5 % above upstream on one.</p><ul>", comparison.worse.len())?;
    for violation in comparison.violations() {
        write!(page, "<li>{violation}")?;
    }
    write!(page, "</ul>")?;
    for (number, &scenario) in scenarios.iter().enumerate() {
        write!(page, "<h2 id=s{number}>{}</h2>", scenario.name())?;
        write_table(page, &COLUMNS, rows(comparison, scenario))?;
        for (title, y, value) in PLOTS {
            write!(page, "<figure>{}</figure>", over_time(comparison, scenario, title, y, value))?;
        }
    }
    write!(page, "<h2>Figures</h2>")?;
    let figures = comparison.figures.iter().map(|(name, value)| vec![name.clone(), format!("{value:.4}")]);
    write_table(page, &["figure", "value"], figures)?;
    write!(page, "<h2>Published and simulated numbers</h2>")?;
    write_table(page, &CHECK_COLUMNS, check_rows(comparison))?;
    write!(page, "<h2>Costs</h2>")?;
    let costs = cost::table();
    let costs = costs.iter().map(|cost| vec![cost.name.into(), format!("{:.1}", cost.value), cost.source.into()]);
    write_table(page, &["cost", "ns", "source"], costs)?;
    write!(page, "</html>")
}

/// The columns of the table of published numbers.
pub const CHECK_COLUMNS: [&str; 4] = ["published number", "published", "simulated", "error"];

/// Rows of the table of published numbers.
pub fn check_rows(comparison: &Comparison) -> Vec<Vec<String>> {
    let row = |check: &crate::validate::Check| {
        let error = check.error.map_or("calibrated".to_string(), |error| format!("{:.0} %", error * 100.0));
        let to = check.to.map_or(String::new(), |to| format!(" to {to:.2}"));
        vec![check.what.to_string(), check.published.to_string(), format!("{:.2}{to}", check.simulated), error]
    };
    comparison.checks.iter().map(row).collect()
}

fn write_table(page: &mut String, header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> core::fmt::Result {
    write!(page, "<table><tr>")?;
    for cell in header {
        write!(page, "<th>{cell}")?;
    }
    for row in rows {
        write!(page, "<tr>")?;
        for cell in row {
            debug_assert!(!cell.contains(['<', '&']), "a text of this project that needs escaping: {cell}");
            write!(page, "<td>{cell}")?;
        }
    }
    write!(page, "</table>")
}

/// A value over time: a sample, the sample before it, and the number of CPUs.
type Value = fn(&Sample, &Sample, f64) -> f64;

/// Title, vertical axis and value of each plot over time.
const PLOTS: [(&str, &str, Value); 3] = [
    ("pages in page lists", "pages", |_, sample, _| sample.listed as f64),
    ("pages held by page lists and programs", "pages", |_, sample, _| sample.used as f64),
    ("wait for the zone lock", "ms per CPU and second", |before, sample, cpus| {
        let waited = sample.waited.saturating_sub(before.waited) as f64;
        waited / (sample.at - before.at).max(1) as f64 * 1e3 / cpus
    }),
];

/// The policies that ran in a scenario, with their runs and colours.
fn ran(comparison: &Comparison, scenario: Scenario) -> impl Iterator<Item = (LegendEntry<'static>, &policies::Run)> {
    let entry = |(policy, colour): (Name, RGBColor)| LegendEntry { name: policy.text(), colour };
    let found = move |named: (Name, RGBColor)| Some((entry(named), comparison.run(scenario, named.0)?));
    policies::ALL.into_iter().zip(COLOURS).filter_map(found)
}

/// Draws a figure beside its legend.
fn figure(
    comparison: &Comparison,
    scenario: Scenario,
    size: (u32, u32),
    draw: impl FnOnce(&plots::Area<'_>) -> plots::Drawn,
) -> String {
    plots::inline(size, |area| {
        let (left, right) = area.split_horizontally(size.0 as i32 - LEGEND);
        draw(&left)?;
        plots::legend(&right.margin(24, 0, 0, 0), ran(comparison, scenario).map(|(entry, _)| entry))
    })
}

/// Plots lock acquisitions against pages in page lists, with a point for each policy.
fn scatter(comparison: &Comparison, scenario: Scenario) -> String {
    let titles = Titles {
        title: &scenario.name(),
        x: "pages in page lists (average over time)",
        y: "lock acquisitions per million operations",
        labels: 60,
    };
    let point = |(entry, run): (_, &policies::Run)| Point {
        entry,
        x: run.outcome.average_listed,
        y: run.outcome.lock_takes_per_million,
    };
    let points: Vec<Point<'_>> = ran(comparison, scenario).map(point).collect();
    figure(comparison, scenario, SCATTER, |area| plots::scatter(area, &titles, &points))
}

/// Plots a value over time, with a line for each policy.
fn over_time(comparison: &Comparison, scenario: Scenario, title: &str, y: &str, value: Value) -> String {
    let (mut lines, mut measured_from) = (Vec::new(), 0.0);
    for (entry, run) in ran(comparison, scenario) {
        let mut line = Vec::new();
        // Counters restart where measuring begins.
        for samples in [&run.warm.samples, &run.costs.samples] {
            let step = samples.len().div_ceil(POINTS / 2).max(1);
            let points: Vec<&Sample> = samples.iter().step_by(step).collect();
            let cpus = run.costs.cpus as f64;
            line.extend(points.windows(2).map(|pair| (pair[1].at as f64 / 1e9, value(pair[0], pair[1], cpus))));
        }
        measured_from = run.warm_time as f64 / 1e9;
        lines.push((entry.colour, line));
    }
    let x = format!("simulated time (s); measured from {} s", plots::short(measured_from));
    let titles = Titles { title, x: &x, y, labels: 60 };
    figure(comparison, scenario, PLOT, |area| plots::lines(area, &titles, &lines))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare;
    use crate::scenarios::Size;

    #[test]
    fn page_opens_with_scatter_names_policies_and_loads_nothing() {
        let comparison = compare::only(1, Size::Quick, Scenario::Bursts, &|_| {});
        let page = html(&comparison, &[Scenario::Bursts]);
        let first = page.split("</svg>").next().unwrap();
        assert!(first.contains("<svg") && !first.contains("<table"), "the page opens with a scatter");
        let svgs: Vec<&str> = page.split("<svg").skip(1).map(|svg| svg.split("</svg>").next().unwrap()).collect();
        let [scatter, plots @ ..] = &svgs[..] else { panic!("no figure") };
        assert_eq!((scatter.matches("<circle").count(), plots.len()), (policies::ALL.len(), PLOTS.len()));
        let name = Scenario::Bursts.name();
        let texts =
            [name.as_str(), "pages in page lists (average over time)", "lock acquisitions per million operations"];
        assert!(texts.iter().all(|text| scatter.contains(text)), "one of {texts:?} is missing");
        for (plot, (title, y, _)) in plots.iter().zip(PLOTS) {
            assert!(
                [title, y, "simulated time (s); measured from 4 s"].iter().all(|text| plot.contains(text)),
                "a title of {title:?} is missing"
            );
        }
        let named = |svg: &str, policy: Name| svg.matches(&format!(">\n{}\n</text>", policy.text())).count();
        for policy in policies::ALL {
            // In the legend, and beside the point.
            assert_eq!(named(scatter, policy), 2, "{policy:?}");
            assert!(plots.iter().all(|plot| named(plot, policy) == 1), "{policy:?}");
        }
        for (plot, colour) in plots.iter().flat_map(|plot| COLOURS.map(|colour| (plot, colour))) {
            let stroke = format!("stroke=\"#{:02X}{:02X}{:02X}\"", colour.0, colour.1, colour.2);
            assert_eq!(plot.matches(&stroke).count(), 1, "{stroke}");
        }
        assert!(page.len() < 96 << 10, "{} bytes", page.len());
        assert!(page.contains("<td>adaptive") && page.contains(&name));
        for foreign in ["http", "src=", "<script", "@import", "url(", "NaN", "inf"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }

    #[test]
    fn colours_are_legible_on_light_and_dark_grounds() {
        let luminance = |RGBColor(red, green, blue): RGBColor| {
            let linear = |part: u8| (f64::from(part) / 255.0).powf(2.2);
            0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)
        };
        // Contrast of graphical objects by WCAG 2: at least 3 to 1.
        let contrast = |a: f64, b: f64| (a.max(b) + 0.05) / (a.min(b) + 0.05);
        for ground in [RGBColor(0xff, 0xff, 0xff), RGBColor(0x14, 0x17, 0x1a)] {
            for colour in COLOURS {
                let contrast = contrast(luminance(colour), luminance(ground));
                assert!(contrast >= 3.0, "{colour:?} on {ground:?}: {contrast:.2}");
            }
        }
    }
}
