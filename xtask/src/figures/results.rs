//! Results of `neap bench … --json`: values by allocator and round.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The object that one benchmark printed.
pub(crate) struct Bench {
    pub(crate) name: String,
    object: Value,
}

/// A value of one run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Wall time for one operation in nanoseconds.
    NsEach,
    /// Wall time in seconds.
    Seconds,
    /// The largest resident memory of the workload in MiB.
    Peak,
    /// Resident memory in MiB at a sample of `rss_kib`.
    Resident(usize),
}

impl Reading {
    fn of(self, run: &Value) -> Option<f64> {
        let number = |name: &str| run.get(name)?.as_f64();
        match self {
            Reading::NsEach => Some(number("wall_ns")? / number("operations")?),
            Reading::Seconds => Some(number("wall_ns")? / 1e9),
            Reading::Peak => Some(run.get("counts")?.get("peak_kib")?.as_f64()? / 1024.0),
            Reading::Resident(sample) => Some(run.get("rss_kib")?.get(sample)?.as_f64()? / 1024.0),
        }
    }
}

/// The middle of some values; `None` without any.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

impl Bench {
    /// Reads a file with one object of `neap bench`.
    pub(crate) fn read(path: &Path) -> Result<Bench> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Bench::parsed(&text).with_context(|| format!("{}: no output of `neap bench … --json`", path.display()))
    }

    /// Takes the object from its text.
    pub(crate) fn parsed(text: &str) -> Result<Bench> {
        let object: Value = serde_json::from_str(text)?;
        let name = object.get("bench").and_then(Value::as_str).context("`bench` is missing")?.to_string();
        ensure!(object.get("variants").is_some_and(Value::is_object), "`variants` is missing");
        Ok(Bench { name, object })
    }

    /// One field of the machine's description.
    pub(crate) fn machine(&self, field: &str) -> String {
        match self.object.get("machine").and_then(|machine| machine.get(field)) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => "unknown".into(),
        }
    }

    /// Allocators and their versions.
    pub(crate) fn versions(&self) -> BTreeMap<String, String> {
        let versions = self.object.get("versions").and_then(Value::as_object);
        let text = |(name, version): (&String, &Value)| Some((name.clone(), version.as_str()?.to_string()));
        versions.into_iter().flatten().filter_map(text).collect()
    }

    /// A value by round; empty for an allocator that was not measured or failed.
    pub(crate) fn rounds(&self, variant: &str, workload: &str, reading: Reading) -> BTreeMap<u64, f64> {
        let runs = self.object["variants"].get(variant).and_then(|workloads| workloads.get(workload)?.get("raw"));
        let value = |run: &Value| Some((run.get("round")?.as_u64()?, reading.of(run)?));
        runs.and_then(Value::as_array).into_iter().flatten().filter_map(value).collect()
    }

    /// The median over the rounds.
    pub(crate) fn median(&self, variant: &str, workload: &str, reading: Reading) -> Option<f64> {
        median(self.rounds(variant, workload, reading).into_values().collect())
    }

    /// The median of the ratios of paired rounds.
    pub(crate) fn ratio(&self, variant: &str, against: &str, workload: &str, reading: Reading) -> Option<f64> {
        let others = self.rounds(against, workload, reading);
        let pairs = self.rounds(variant, workload, reading).into_iter();
        median(pairs.filter_map(|(round, value)| Some(value / others.get(&round)?)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) const TEXT: &str = r#"{"bench": "pair", "machine": {"cpus": 2, "model": "M"},
        "variants": {"neap": {"w": {"raw": [
            {"round": 0, "wall_ns": 10, "operations": 2, "rss_kib": [1024, 2048], "counts": {"peak_kib": 3072.0}},
            {"round": 1, "wall_ns": 30, "operations": 2},
            {"round": 2, "wall_ns": 50, "operations": 2}]}},
        "glibc": {"w": {"raw": [
            {"round": 1, "wall_ns": 60, "operations": 2}, {"round": 2, "wall_ns": 25, "operations": 2}]}}}}"#;

    #[test]
    fn values_are_medians_and_ratios_of_pairs() {
        let bench = Bench::parsed(TEXT).unwrap();
        assert_eq!(bench.median("neap", "w", Reading::NsEach), Some(15.0));
        assert_eq!(bench.ratio("neap", "glibc", "w", Reading::NsEach), Some(1.25));
        assert_eq!(bench.median("neap", "w", Reading::Resident(1)), Some(2.0));
        assert_eq!(bench.median("neap", "w", Reading::Peak), Some(3.0));
        assert_eq!(bench.median("tcmalloc", "w", Reading::Seconds), None);
        assert_eq!((bench.machine("cpus"), bench.machine("load")), ("2".into(), "unknown".into()));
    }

    #[test]
    fn other_files_are_refused() {
        assert!(Bench::parsed("{}").is_err_and(|error| error.to_string().contains("`bench` is missing")));
        assert!(Bench::parsed("text").is_err());
    }
}
