//! The comparison as one HTML page with tables, and plots as inline SVG. The page loads no other
//! file. All its text comes from this project, so nothing is escaped.

use core::fmt::Write;

use crate::compare::Comparison;
use crate::cost;
use crate::measure::{Outcome, Sample};
use crate::policies::{self, Name};
use crate::scenarios::Scenario;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 180.0;
/// Most points of a line.
const POINTS: usize = 240;
/// Colours of lines, in the order of the policies.
const COLOURS: [&str; 7] = ["#555", "#b35900", "#0072b2", "#d00000", "#009e73", "#cc79a7", "#8a7f00"];
const STYLE: &str = "body{font:14px/1.4 sans-serif;max-width:86em;margin:2em auto;padding:0 1em}table{border-collapse:collapse;\
    margin:.5em 0}td,th{padding:.1em .6em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}\
    figure{display:inline-block;margin:.5em 1em .5em 0}figcaption{font-size:12px}svg{background:#fafafa}";

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
    write!(page, "<!DOCTYPE html><html lang=en><meta charset=utf-8><title>neap lab</title><style>{STYLE}</style>")?;
    write!(page, "<h1>Page lists under {} policies</h1><p>Seed {}. ", policies::ALL.len(), comparison.seed)?;
    write!(page, "The lists, policies and zone are the library's; CPUs, time and waiting are simulated. Colours: ")?;
    for (policy, colour) in policies::ALL.iter().zip(COLOURS) {
        write!(page, "<b style=color:{colour}>{}</b> ", policy.text())?;
    }
    write!(page, "</p><h2>Figures</h2>")?;
    let figures = comparison.figures.iter().map(|(name, value)| vec![name.clone(), format!("{value:.4}")]);
    write_table(page, &["figure", "value"], figures)?;
    write!(page, "<h2>What was published, and what is simulated</h2>")?;
    write_table(page, &CHECK_COLUMNS, check_rows(comparison))?;
    write!(page, "<h2>Violations</h2><ul>")?;
    for violation in comparison.violations() {
        write!(page, "<li>{violation}")?;
    }
    write!(page, "</ul>")?;
    for &scenario in scenarios {
        write!(page, "<h2>{}</h2>", scenario.name())?;
        write_table(page, &COLUMNS, rows(comparison, scenario))?;
        plot(page, comparison, scenario, "pages in lists", |_, sample| sample.listed as f64)?;
        plot(page, comparison, scenario, "pages held, lists and programs", |_, sample| sample.used as f64)?;
        plot(page, comparison, scenario, "waiting for the zone's lock, ms a CPU and second", |before, sample| {
            let waited = sample.waited.saturating_sub(before.waited) as f64;
            waited / (sample.at - before.at).max(1) as f64 * 1e3
        })?;
    }
    write!(page, "<h2>Costs</h2>")?;
    let costs = cost::table();
    let costs = costs.iter().map(|cost| vec![cost.name.into(), format!("{:.1}", cost.value), cost.source.into()]);
    write_table(page, &["what", "ns", "source"], costs)?;
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
            write!(page, "<td>{cell}")?;
        }
    }
    write!(page, "</table>")
}

/// Plots a line for each policy: `value` of each sample and the one before it.
fn plot(
    page: &mut String,
    comparison: &Comparison,
    scenario: Scenario,
    title: &str,
    value: impl Fn(&Sample, &Sample) -> f64,
) -> core::fmt::Result {
    let mut lines = Vec::new();
    for (policy, colour) in policies::ALL.into_iter().zip(COLOURS) {
        let Some(run) = comparison.run(scenario, policy) else { continue };
        let mut line = Vec::new();
        // Counters restart where measuring begins.
        for samples in [&run.warm.samples, &run.costs.samples] {
            let step = samples.len().div_ceil(POINTS / 2).max(1);
            let points: Vec<&Sample> = samples.iter().step_by(step).collect();
            let cpus = run.costs.cpus as f64;
            let scale = if title.contains("waiting") { cpus } else { 1.0 };
            line.extend(points.windows(2).map(|pair| (pair[1].at as f64 / 1e9, value(pair[0], pair[1]) / scale)));
        }
        lines.push((colour, line));
    }
    let all = || lines.iter().flat_map(|(_, line)| line);
    let (start, end) = all().fold((f64::MAX, 0.0_f64), |(start, end), point| (start.min(point.0), end.max(point.0)));
    let most = all().fold(1e-9, |most: f64, point| most.max(point.1));
    write!(page, "<figure><svg width={WIDTH} height={HEIGHT} viewBox='0 0 {WIDTH} {HEIGHT}'>")?;
    for (colour, line) in &lines {
        write!(page, "<polyline fill=none stroke={colour} points='")?;
        for (at, value) in line {
            let x = (at - start) / (end - start).max(1e-9) * WIDTH;
            write!(page, "{x:.1},{:.1} ", HEIGHT - 2.0 - value / most * (HEIGHT - 6.0))?;
        }
        write!(page, "'/>")?;
    }
    write!(page, "</svg><figcaption>{title}: 0 to {most:.0}, {start:.1} s to {end:.1} s</figcaption></figure>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare;
    use crate::scenarios::Size;

    #[test]
    fn the_page_has_a_line_for_each_policy_and_loads_nothing() {
        let comparison = compare::only(1, Size::Quick, Scenario::Bursts, &|_| {});
        let page = html(&comparison, &[Scenario::Bursts]);
        assert_eq!(page.matches("<polyline").count(), 3 * policies::ALL.len());
        assert!(page.contains("<td>adaptive") && page.contains(&Scenario::Bursts.name()));
        for foreign in ["http", "src=", "<script", "@import", "url(", "NaN", "inf"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }
}
