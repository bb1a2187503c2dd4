//! The metrics of a reading, as text.
//!
//! Names, units and types follow Prometheus's conventions. A family without samples is left out.

use core::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::groups::{GroupShare, OTHER};
use super::reading::Scrape;
use crate::look::census::Unread;
use crate::look::totals::Totals;

/// The format of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    OpenMetrics,
    Prometheus,
}

impl Format {
    /// The type of content in HTTP.
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Prometheus => prometheus_text::CONTENT_TYPE,
        }
    }
}

/// Kind of a family's values.
#[derive(Clone, Copy)]
enum Measure {
    Bytes,
    /// Values in microseconds, which the text shows in seconds.
    Seconds,
    Count,
}

/// Name and meaning of a family. The text adds the unit to the name, and `_total` for a counter.
struct Family {
    name: &'static str,
    help: &'static str,
    measure: Measure,
    is_counter: bool,
}

const fn gauge(name: &'static str, measure: Measure, help: &'static str) -> Family {
    Family { name, help, measure, is_counter: false }
}

const fn counter(name: &'static str, measure: Measure, help: &'static str) -> Family {
    Family { name, help, measure, is_counter: true }
}

const PRESSURE: &str =
    "Pressure in the container: 0 is roomy, 1 is steady, 2 is low, 3 is medium, 4 is critical, 5 is imminent.";

/// A value of a process, and its `kind` if the family has several.
type ProcessValue = (&'static str, fn(&Totals) -> Option<u64>);

/// Families with one value of each process, or with one value of each process and kind.
const OF_PROCESSES: &[(Family, &[ProcessValue])] = &[
    (
        gauge("neap_resident", Measure::Bytes, "Resident memory of the whole process, by the kernel."),
        &[("", |process| Some(process.resident))],
    ),
    (
        gauge("neap_in_use", Measure::Bytes, "Objects and runs of pages that the program has."),
        &[("", |process| Some(process.in_use))],
    ),
    (
        gauge(
            "neap_cached",
            Measure::Bytes,
            "Free objects in slabs and caches, pages in page lists, and empty pages of per-CPU data.",
        ),
        &[
            ("objects", |process| Some(process.cached_objects)),
            ("pages", |process| Some(process.cached_pages)),
            ("per_cpu", |process| Some(process.cached_per_cpu)),
        ],
    ),
    (gauge("neap_free", Measure::Bytes, "Free pages that have memory."), &[("", |process| Some(process.free))]),
    (
        gauge("neap_limit", Measure::Bytes, "Most resident memory of the heap; absent without a limit."),
        &[("", |process| process.limit)],
    ),
    (
        gauge("neap_headroom", Measure::Bytes, "Limit less used memory and tables; absent without a limit."),
        &[("", Totals::headroom)],
    ),
    (
        gauge("neap_container_limit", Measure::Bytes, "Memory limit of the container that the limit follows."),
        &[("", |process| process.container.map(|container| container.limit))],
    ),
    (
        gauge("neap_container_used", Measure::Bytes, "Used memory of the container that the limit follows."),
        &[("", |process| process.container.map(|container| container.used))],
    ),
    (
        gauge("neap_container_pressure", Measure::Count, PRESSURE),
        &[("", |process| Some(process.container?.pressure? as u64))],
    ),
    (
        gauge(
            "neap_container_time_to_wall",
            Measure::Seconds,
            "Time until the container's limit is reached at the observed growth; absent without growth.",
        ),
        &[("", |process| Some(process.container?.ms_to_wall?.saturating_mul(1000)))],
    ),
    (
        gauge(
            "neap_numbers_age",
            Measure::Seconds,
            "Age of the numbers that are not live: ticks, page lists and the container.",
        ),
        &[("", |process| Some(process.age / 1000))],
    ),
    (counter("neap_ticks", Measure::Count, "Rounds of maintenance."), &[("", |process| Some(process.ticks))]),
    (
        counter("neap_released", Measure::Bytes, "Memory released to the operating system."),
        &[("", |process| Some(process.released))],
    ),
    (
        counter(
            "neap_reclaimed",
            Measure::Bytes,
            "Memory taken from page lists for allocations that found no free page.",
        ),
        &[("", |process| Some(process.reclaimed))],
    ),
    (
        counter(
            "neap_shortages",
            Measure::Count,
            "Allocations that found no free page until all page lists were drained.",
        ),
        &[("", |process| Some(process.shortages))],
    ),
    (
        counter(
            "neap_refusals",
            Measure::Count,
            "Allocations that were refused by the limit, by a group's max with refuse:on, or by the system.",
        ),
        &[("", |process| Some(process.refused))],
    ),
    (
        counter("neap_shrunk_objects", Measure::Count, "Objects that the program's shrinkers freed."),
        &[("", |process| Some(process.shrunk))],
    ),
    (
        counter("neap_page_faults", Measure::Count, "Page faults without and with a read from disk, by the kernel."),
        &[("minor", |process| Some(process.minor_faults)), ("major", |process| Some(process.major_faults))],
    ),
];

/// A value of a memory group.
type GroupValue = fn(&GroupShare) -> Option<u64>;

/// Families with a value of each memory group.
const OF_GROUPS: &[(Family, GroupValue)] = &[
    (
        gauge(
            "neap_group_used",
            Measure::Bytes,
            "Memory that a group and those below it use; (other) sums smaller groups.",
        ),
        |group| Some(group.used),
    ),
    (
        gauge("neap_group_limit", Measure::Bytes, "The bound `max` of a group; absent if the group has no `max`."),
        |group| group.limit,
    ),
    (counter("neap_group_refusals", Measure::Count, "Charges that a group or those below it refused."), |group| {
        Some(group.refused)
    }),
    (
        counter("neap_group_limit_hits", Measure::Count, "Charges that found a group or those below it at its max."),
        |group| Some(group.at_limit),
    ),
    (
        counter(
            "neap_group_stalled",
            Measure::Seconds,
            "Time in which a group or those below it were stalled on memory.",
        ),
        |group| Some(group.stalled_us),
    ),
];

/// A value, and its labels.
type Sample<'a> = (Vec<(&'a str, &'a str)>, u64);

impl Family {
    fn encode(&self, encoder: &mut DescriptorEncoder<'_>, samples: &[Sample<'_>]) -> fmt::Result {
        if samples.is_empty() {
            return Ok(());
        }
        let unit = match self.measure {
            Measure::Bytes => Some(Unit::Bytes),
            Measure::Seconds => Some(Unit::Seconds),
            Measure::Count => None,
        };
        let kind = if self.is_counter { MetricType::Counter } else { MetricType::Gauge };
        let mut family = encoder.encode_descriptor(self.name, self.help, unit.as_ref(), kind)?;
        for (labels, value) in samples {
            let labels = labels.as_slice();
            let sample = family.encode_family(&labels)?;
            match (self.measure, self.is_counter) {
                (Measure::Seconds, true) => ConstCounter::new(*value as f64 / 1e6).encode(sample)?,
                (Measure::Seconds, false) => ConstGauge::new(*value as f64 / 1e6).encode(sample)?,
                (_, true) => ConstCounter::new(*value).encode(sample)?,
                (_, false) => ConstGauge::new(*value).encode(sample)?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").finish_non_exhaustive()
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let pids: Vec<String> = self.processes.iter().map(|process| process.totals.pid.to_string()).collect();
        let labels = |at: usize, more: &[(&'static str, &'static str)]| {
            let command = self.processes[at].totals.command.as_str();
            [&[("pid", pids[at].as_str()), ("command", command)], more].concat()
        };
        for (family, values) in OF_PROCESSES {
            let mut samples: Vec<Sample<'_>> = Vec::new();
            for (at, process) in self.processes.iter().enumerate() {
                for (kind, value) in *values {
                    let kind = [("kind", *kind)];
                    let kind = if kind[0].1.is_empty() { &[] } else { &kind[..] };
                    samples.extend(value(&process.totals).map(|value| (labels(at, kind), value)));
                }
            }
            family.encode(&mut encoder, &samples)?;
        }
        for (family, value) in OF_GROUPS {
            let mut samples: Vec<Sample<'_>> = Vec::new();
            for (at, process) in self.processes.iter().enumerate() {
                let Some(shares) = &process.groups else { continue };
                for group in &shares.groups {
                    let mut labels: Vec<(&str, &str)> = labels(at, &[]);
                    labels.push(("group", &group.path));
                    samples.extend(value(group).map(|value| (labels, value)));
                }
                // Only usage has a sum. The sum of counters would fall when a group is deleted, and
                // a counter may only grow.
                if family.name == "neap_group_used" && shares.other() > 0 {
                    samples.push((labels(at, &[("group", OTHER)]), shares.other()));
                }
            }
            family.encode(&mut encoder, &samples)?;
        }
        self.encode_information(&mut encoder, &pids)?;
        self.encode_own(&mut encoder)
    }
}

impl Scrape {
    /// Versions and modes, as labels.
    fn encode_information(&self, encoder: &mut DescriptorEncoder<'_>, pids: &[String]) -> fmt::Result {
        if self.processes.is_empty() {
            return Ok(());
        }
        let help = "Version of the library, kind of its slots, and the number of the user.";
        let mut family = encoder.encode_descriptor("neap_process", help, None, MetricType::Info)?;
        for (process, pid) in self.processes.iter().zip(pids) {
            let Totals { command, user, version, slots, .. } = &process.totals;
            let labels = [("pid", pid), ("command", command), ("user", user), ("version", version), ("slots", slots)];
            family.encode_info(&labels)?;
        }
        let containers = self.processes.iter().zip(pids).filter_map(|(process, pid)| {
            let Totals { command, container, .. } = &process.totals;
            Some([("pid", pid.as_str()), ("command", command), ("limited_by", container.as_ref()?.limited_by?.name())])
        });
        let mut containers = containers.peekable();
        if containers.peek().is_none() {
            return Ok(());
        }
        let help = "Kind of the level whose limit leaves the least room: group, hidden ancestor or machine.";
        let mut family = encoder.encode_descriptor("neap_container", help, None, MetricType::Info)?;
        containers.try_for_each(|labels| family.encode_info(&labels))
    }

    /// Numbers of the reading itself.
    fn encode_own(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let one = |value: u64| [(Vec::new(), value)];
        gauge("neap_processes", Measure::Count, "Processes under neap that were read.")
            .encode(encoder, &one(self.processes.len() as u64 + self.left_out))?;
        gauge("neap_left_out_processes", Measure::Count, "Processes that were read and are too small to have metrics.")
            .encode(encoder, &one(self.left_out))?;
        let unread = Unread::ALL.map(|reason| {
            (vec![("reason", reason.name())], self.unread.get(&reason).map_or(0, |count| count.processes))
        });
        gauge("neap_unread_processes", Measure::Count, "Processes that could not be read.").encode(encoder, &unread)?;
        gauge("neap_unread_groups_processes", Measure::Count, "Processes whose memory groups could not be read.")
            .encode(encoder, &one(self.without_groups))?;
        gauge("neap_reading_duration", Measure::Seconds, "Time that this reading took.")
            .encode(encoder, &one(self.took.as_micros() as u64))
    }

    /// Writes the metrics.
    pub(super) fn text(self, format: Format) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Arc::new(self)));
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = match format {
            Format::OpenMetrics => text::encode(&mut text, &registry),
            Format::Prometheus => prometheus_text::encode(&mut text, &registry),
        };
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;
    use std::collections::{BTreeMap, BTreeSet};

    use crate::look::census::UnreadCount;
    use crate::look::totals::tests::totals;
    use crate::metrics::groups::tests::shares;
    use crate::metrics::reading::MeasuredProcess;
    use neap_pressure::Pressure;

    /// A reading of a process with groups and a limit, and of one with neither and a hostile name.
    fn reading() -> Scrape {
        let mut first = totals(
            r#"{"version":"9.9","mode":{"slots":"rseq","page_size":4096},"bytes":{"used":100,"cached":20,"tables":50},
            "pages":{"listed":3,"backed_free":4,"budget":2},"released":{"pages":5},"lists":{"need_pages":6},"refused":138,"shrunk":21}"#,
        );
        (first.age, first.minor_faults, first.major_faults) = (1_500_000_000, 70, 7);
        let mut second = totals("{}");
        (second.pid, second.command) = (13, "a\"b\\u{9b}".into());
        let mut groups = shares(&[(1, 0, "", 90), (2, 1, "tenant\"", 50), (3, 1, "(other)", 30)]);
        groups.groups[0].path = "/".into();
        let first = MeasuredProcess { totals: first, groups: Some(groups) };
        let second = MeasuredProcess { totals: second, groups: None };
        let unread = BTreeMap::from([(Unread::NotPermitted, UnreadCount { processes: 3, example: String::new() })]);
        let took = Duration::from_micros(2500);
        Scrape { processes: vec![first, second], left_out: 4, unread, without_groups: 1, took }
    }

    fn names(text: &str, word: &str) -> Vec<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(word));
        lines.map(|line| line.split(' ').next().unwrap_or_default().to_string()).collect()
    }

    #[test]
    fn values_have_units_and_labels_of_their_process_and_group() {
        let text = reading().text(Format::Prometheus);
        for line in [
            r#"neap_resident_bytes{pid="12",command="server"} 2097152"#,
            r#"neap_cached_bytes{pid="12",command="server",kind="objects"} 20"#,
            r#"neap_cached_bytes{pid="12",command="server",kind="pages"} 12288"#,
            r#"neap_free_bytes{pid="12",command="server"} 16384"#,
            r#"neap_limit_bytes{pid="12",command="server"} 8192"#,
            r#"neap_headroom_bytes{pid="12",command="server"} 8042"#,
            r#"neap_released_bytes_total{pid="12",command="server"} 20480"#,
            r#"neap_reclaimed_bytes_total{pid="12",command="server"} 24576"#,
            r#"neap_refusals_total{pid="12",command="server"} 138"#,
            r#"neap_refusals_total{pid="13",command="a\"b\\u{9b}"} 0"#,
            r#"neap_shrunk_objects_total{pid="12",command="server"} 21"#,
            r#"neap_numbers_age_seconds{pid="12",command="server"} 1.5"#,
            r#"neap_page_faults_total{pid="12",command="server",kind="major"} 7"#,
            r#"neap_resident_bytes{pid="13",command="a\"b\\u{9b}"} 2097152"#,
            r#"neap_group_used_bytes{pid="12",command="server",group="/"} 90"#,
            r#"neap_group_used_bytes{pid="12",command="server",group="tenant\""} 50"#,
            r#"neap_group_used_bytes{pid="12",command="server",group="(other)"} 30"#,
            r#"neap_group_limit_bytes{pid="12",command="server",group="tenant\""} 1000"#,
            r#"neap_group_refusals_total{pid="12",command="server",group="tenant\""} 4"#,
            r#"neap_group_limit_hits_total{pid="12",command="server",group="tenant\""} 2"#,
            r#"neap_group_stalled_seconds_total{pid="12",command="server",group="tenant\""} 1.0"#,
            r#"neap_process_info{pid="12",command="server",user="0",version="9.9",slots="rseq"} 1"#,
            "neap_processes 6",
            "neap_left_out_processes 4",
            r#"neap_unread_processes{reason="not permitted"} 3"#,
            r#"neap_unread_processes{reason="failed"} 0"#,
            "neap_unread_groups_processes 1",
            "neap_reading_duration_seconds 0.0025",
        ] {
            assert!(text.lines().any(|each| each == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains(r#"neap_limit_bytes{pid="13""#), "{text}");
        assert_eq!(text.matches(r#"group="(other)""#).count(), 1, "a sum has no counters: {text}");
    }

    #[test]
    fn metric_families_have_one_help_and_type_before_samples() {
        let text = reading().text(Format::Prometheus);
        let (helps, types) = (names(&text, "# HELP "), names(&text, "# TYPE "));
        assert_eq!(helps, types);
        assert_eq!(helps.len(), OF_PROCESSES.len() - 4 + OF_GROUPS.len() + 6, "no container is known: {helps:?}");
        assert_eq!(helps.iter().collect::<BTreeSet<_>>().len(), helps.len());
        let mut current = "";
        for line in text.lines() {
            match line.strip_prefix("# TYPE ") {
                Some(rest) => current = rest,
                None if line.starts_with('#') => {}
                None => {
                    let name = line.split(['{', ' ']).next().unwrap();
                    assert_eq!(current.split(' ').next(), Some(name), "{line}");
                    assert_eq!(current.ends_with(" counter"), name.ends_with("_total"), "{line}");
                }
            }
        }
        // Two samples with one set of labels are one series.
        let series: Vec<&str> =
            text.lines().filter(|line| !line.starts_with('#')).map(|line| line.rsplit_once(' ').unwrap().0).collect();
        assert_eq!(series.iter().collect::<BTreeSet<_>>().len(), series.len());
    }

    #[test]
    fn container_has_pressure_cause_and_time_to_its_limit() {
        let of = |growth: &str| {
            let text = format!(
                r#"{{"container":{{"limit":9,"used":8,"looks":1,"pressure":"medium","limited_by":"machine"{growth}}}}}"#
            );
            let totals = totals(&text);
            Scrape { processes: vec![MeasuredProcess { totals, groups: None }], ..reading() }.text(Format::OpenMetrics)
        };
        let text = of(r#","ms_to_wall":2500"#);
        for line in [
            r#"neap_container_limit_bytes{pid="12",command="server"} 9"#,
            r#"neap_container_pressure{pid="12",command="server"} 3"#,
            r#"neap_container_time_to_wall_seconds{pid="12",command="server"} 2.5"#,
            r#"neap_container_info{pid="12",command="server",limited_by="machine"} 1"#,
        ] {
            assert!(text.lines().any(|each| each == line), "{line} is not in\n{text}");
        }
        let text = of("");
        assert!(!text.contains("time_to_wall") && text.contains("neap_container_pressure"), "{text}");
    }

    #[test]
    fn help_of_pressure_names_all_values() {
        for (value, level) in Pressure::ALL.into_iter().enumerate() {
            assert!(
                PRESSURE.contains(&format!("{value} is {}", level.name())) && level as usize == value,
                "{PRESSURE}"
            );
        }
    }

    #[test]
    fn open_metrics_has_units_and_an_end() {
        let text = reading().text(Format::OpenMetrics);
        for line in [
            "# TYPE neap_released_bytes counter",
            "# UNIT neap_released_bytes bytes",
            r#"neap_released_bytes_total{pid="12",command="server"} 20480"#,
            "# UNIT neap_group_stalled_seconds seconds",
        ] {
            assert!(text.lines().any(|each| each == line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("\n# EOF\n"), "{text}");
    }

    #[test]
    fn machine_without_processes_has_metrics_of_the_reading_alone() {
        let took = Duration::ZERO;
        let reading = Scrape { processes: Vec::new(), left_out: 0, unread: BTreeMap::new(), without_groups: 0, took };
        let text = reading.text(Format::Prometheus);
        assert_eq!(names(&text, "# TYPE ").len(), 5, "{text}");
    }
}
