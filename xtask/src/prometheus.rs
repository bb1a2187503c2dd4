//! `cargo xtask prometheus`: the files of `contrib` for Prometheus, Grafana and systemd, and the
//! metrics of real processes, checked by Prometheus and systemd themselves.
//!
//! # Design
//!
//! 1. promtool checks and tests the alert rules, and checks the scrape configuration.
//! 2. Each metric that rules and dashboard name is described in the guide.
//! 3. promtool finds nothing in the metrics of a Python program under neap.
//! 4. Prometheus scrapes `neap metrics --listen` by the configuration. A query finds the program
//!    and its groups, and Prometheus accepts every query of the dashboard.
//!
//! 5. `systemd.rs` checks the files for systemd.
//!
//! Without an installed Prometheus, Debian's package is unpacked into the target folder. Where that
//! fails, only the files for systemd are tested, and the command says so.

use core::time::Duration;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::packages::systemd;
use crate::process::{capture, command, which};
use crate::report::Report;
use crate::vm::packages::unpack;
use crate::{Skipped, build, layout};

/// Time within which a query of Prometheus must have a non-empty answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// Address of the server in the scrape configuration.
const EXAMPLE: &str = "127.0.0.1:9808";

/// A program with a thread, whose group by name holds some memory until standard input ends.
const PROGRAM: &str = "\
import sys, threading
def work():
    kept = [bytes(1000) for _ in range(10000)]
    sys.stdin.read()
thread = threading.Thread(target=work)
thread.start()
thread.join()
";

/// The programs of Prometheus.
struct Tools {
    prometheus: PathBuf,
    promtool: PathBuf,
}

impl Tools {
    fn obtain() -> Result<Tools> {
        if let (Some(prometheus), Some(promtool)) = (which("prometheus"), which("promtool")) {
            return Ok(Tools { prometheus, promtool });
        }
        let folder = layout::target().join("prometheus");
        let root = folder.join("root");
        let [prometheus, promtool] = ["usr/bin/prometheus", "usr/bin/promtool"].map(|file| root.join(file));
        if !prometheus.is_file() || !promtool.is_file() {
            unpack(&folder, &root, &["prometheus".to_string()])?;
        }
        Ok(Tools { prometheus, promtool })
    }

    fn promtool(&self, arguments: &[&str]) -> Command {
        let mut promtool = command(&self.promtool.to_string_lossy(), arguments);
        // Tests of rules name their rules from their own folder.
        promtool.current_dir(contrib("prometheus"));
        promtool
    }
}

fn contrib(path: &str) -> PathBuf {
    layout::root().join("contrib").join(path)
}

/// Builds the command `neap` and the libraries, and makes the checks.
pub(crate) fn command_alone() -> Result<()> {
    build::build()?;
    check()
}

/// Makes the checks with the built programs.
pub(crate) fn check() -> Result<()> {
    let mut report = Report::default();
    systemd::into(&mut report)?;
    let tools = match Tools::obtain() {
        Ok(tools) => tools,
        Err(error) => {
            report.close("files for systemd")?;
            return Err(Skipped(format!("prometheus: SKIPPED, Prometheus tested nothing: {error:#}")).into());
        }
    };
    for arguments in [
        &["check", "rules", "neap.rules.yml"][..],
        &["test", "rules", "neap.rules.test.yml"],
        &["check", "config", "prometheus.yml"],
    ] {
        report.check(&format!("promtool {}", arguments.join(" ")), capture(tools.promtool(arguments)).map(drop));
    }
    let queries = queries()?;
    report.check("metrics of rules and dashboard are in the guide", described(&queries));
    scrape(&tools, &queries, &mut report)?;
    report.close("prometheus")
}

/// The queries of the dashboard, with its variables replaced.
fn queries() -> Result<Vec<String>> {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(contrib("grafana/neap.json"))?)?;
    let panels = dashboard["panels"].as_array().context("the dashboard has no panels")?;
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries: Vec<String> = targets.filter_map(|target| target["expr"].as_str()).map(replaced).collect();
    ensure!(!queries.is_empty(), "the dashboard has no queries");
    Ok(queries)
}

fn replaced(query: &str) -> String {
    let replacements =
        [("$__rate_interval", "1m"), ("$__range", "1h"), ("$instance", ".*"), ("$command", ".*"), ("$pid", ".*")];
    replacements.iter().fold(query.to_string(), |query, (variable, value)| query.replace(variable, value))
}

/// Names of metrics in a text: words that begin with `neap_`.
fn metrics(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| letter != '_' && !letter.is_alphanumeric());
    words.filter(|word| word.starts_with("neap_")).collect()
}

fn described(queries: &[String]) -> Result<()> {
    let guide = fs::read_to_string(layout::root().join("docs/guide/metrics.md"))?;
    let (rules, known) = (fs::read_to_string(contrib("prometheus/neap.rules.yml"))?, metrics(&guide));
    let used = queries.iter().map(String::as_str).chain([rules.as_str()]).flat_map(metrics);
    let unknown: BTreeSet<&str> = used.filter(|name| !known.contains(name)).collect();
    ensure!(unknown.is_empty(), "not in docs/guide/metrics.md: {unknown:?}");
    Ok(())
}

/// A program that ends with this value.
struct Running {
    child: Child,
    /// Its standard input, if it waits for that.
    _input: Option<ChildStdin>,
}

impl Running {
    fn start(mut command: Command) -> Result<Running> {
        let mut child = command.spawn().with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Running { _input: child.stdin.take(), child })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lets Prometheus scrape a program under neap, and asks it.
fn scrape(tools: &Tools, queries: &[String], report: &mut Report) -> Result<()> {
    let tool = layout::tool();
    let neap = |arguments: &[&str]| command(&tool.to_string_lossy(), arguments);
    let options = "background:on,groups:by-thread-name,limit:1g";
    let mut program = neap(&["run", "--neap", options, "--", "python3", "-c", PROGRAM]);
    program.stdin(Stdio::piped());
    let _program = Running::start(program)?;
    let mut server = neap(&["metrics", "--all", "--listen", "127.0.0.1:0"]);
    server.stderr(Stdio::piped());
    let mut server = Running::start(server)?;
    let mut said = BufReader::new(server.child.stderr.take().context("no standard error")?).lines();
    let address = said.by_ref().map_while(Result::ok).find_map(|line| {
        let (_, rest) = line.split_once("metrics at http://")?;
        Some(rest.trim_end_matches("/metrics").to_string())
    });
    let address = address.context("neap metrics did not listen")?;

    let folder = layout::target().join("prometheus/run");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let [example, rules] = ["prometheus.yml", "neap.rules.yml"].map(|file| contrib("prometheus").join(file));
    fs::copy(rules, folder.join("neap.rules.yml"))?;
    let example = fs::read_to_string(example)?;
    ensure!(example.contains(EXAMPLE) && example.contains("15s"), "the scrape configuration has another form");
    fs::write(folder.join("prometheus.yml"), example.replace(EXAMPLE, &address).replace("15s", "1s"))?;
    // The port was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut prometheus = command(&tools.prometheus.to_string_lossy(), ["--config.file=prometheus.yml"]);
    prometheus.args(["--storage.tsdb.path=data", &format!("--web.listen-address=127.0.0.1:{port}")]);
    prometheus.current_dir(&folder).stdin(Stdio::null()).stderr(File::create(folder.join("log"))?);
    let _prometheus = Running::start(prometheus)?;

    let ask = |query: &str| capture(tools.promtool(&["query", "instant", &format!("http://127.0.0.1:{port}"), query]));
    for query in [
        r#"neap_in_use_bytes{command="python3"} > 5e6"#,
        r#"neap_group_used_bytes{command="python3",group!="/"} > 5e6"#,
        r#"up{job="neap"} == 1"#,
        "neap:headroom:ratio > 0.5",
    ] {
        report.check(&format!("Prometheus finds {query}"), until(|| ask(query), &folder));
    }
    for query in queries {
        report.check(&format!("Prometheus accepts {query}"), ask(query).map(drop));
    }
    report.check("promtool check metrics is silent", silent(tools, &capture(neap(&["metrics", "--all"]))?));
    Ok(())
}

/// Waits until a query has an answer that is not empty.
fn until(ask: impl Fn() -> Result<String>, folder: &Path) -> Result<()> {
    let start = Instant::now();
    loop {
        let answer = ask();
        if answer.as_ref().is_ok_and(|text| !text.trim().is_empty()) {
            return Ok(());
        }
        if start.elapsed() > PATIENCE {
            let log = folder.join("log");
            bail!("no answer in {} s: {answer:?}; see {}", PATIENCE.as_secs(), log.display());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Gives promtool metrics, of which it must say nothing.
fn silent(tools: &Tools, text: &str) -> Result<()> {
    ensure!(text.contains("neap_resident_bytes{"), "no process has metrics:\n{text}");
    let mut check = tools.promtool(&["check", "metrics"]);
    let mut child = check.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // The statement's end closes the pipe. If promtool does not read it, its status below shows
    // that.
    let _ = child.stdin.take().context("no standard input")?.write_all(text.as_bytes());
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success() && said.trim().is_empty(), "promtool says: {said}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_metrics_are_found_in_queries_and_tables() {
        let found = metrics("| `neap_a_bytes{kind}`, `neap_b` | sum(rate(neap_c_total[5m])) and neap:d:ratio, xneap_e");
        assert_eq!(found, BTreeSet::from(["neap_a_bytes", "neap_b", "neap_c_total"]));
    }

    #[test]
    fn queries_of_the_dashboard_have_no_variables_left() {
        let queries = queries().unwrap();
        assert!(queries.len() > 10 && queries.iter().all(|query| !query.contains('$')), "{queries:?}");
    }

    #[test]
    fn rules_and_dashboard_name_only_described_metrics() {
        described(&queries().unwrap()).unwrap();
        assert!(described(&["neap_no_such_metric".to_string()]).is_err());
    }
}
