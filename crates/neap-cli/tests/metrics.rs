//! `neap metrics` on real processes: on standard output, in a file, and by HTTP.
//!
//! No test depends on speed: expected states are waited for, up to a minute.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};

use running::{Program, compiled, library, neap, object, until};

/// The value of a series of a process.
fn value(text: &str, series: &str, pid: u32, labels: &str) -> Option<f64> {
    let start = format!("{series}{{pid=\"{pid}\",command=\"");
    let line = text.lines().find(|line| line.starts_with(&start) && line.contains(labels))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

fn metrics(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_neap")).arg("metrics").args(arguments).output().unwrap()
}

/// A server; it ends with the test.
struct Served {
    child: Child,
    address: String,
    /// What it said before the address.
    said: String,
    /// Its errors, which would end it if they had no reader.
    _errors: BufReader<std::process::ChildStderr>,
}

impl Served {
    fn start(address: &str) -> Served {
        let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
        #[allow(clippy::zombie_processes, reason = "the child is waited for when this value goes")]
        let mut child = neap.args(["metrics", "--all", "--listen", address]).stderr(Stdio::piped()).spawn().unwrap();
        let (mut errors, mut said) = (BufReader::new(child.stderr.take().unwrap()), String::new());
        loop {
            let mut line = String::new();
            assert_ne!(errors.read_line(&mut line).unwrap(), 0, "the server ended: {said}");
            if let Some((_, rest)) = line.split_once("metrics at http://") {
                let address = rest.trim().trim_end_matches("/metrics").to_string();
                return Served { child, address, said, _errors: errors };
            }
            said += &line;
        }
    }

    /// Sends a request, and returns the head and the body of the answer.
    fn ask(&self, line: &str, header: &str) -> (String, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "{line} HTTP/1.0\r\nHost: localhost\r\n{header}\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        (head.to_string(), body.to_string())
    }

    fn get(&self) -> String {
        let (head, body) = self.ask("GET /metrics", "");
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("text/plain; version=0.0.4"), "{head}");
        body
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn server_shows_processes_and_groups_while_they_live() {
    let mut program = Program::start("threads", "groups:by-thread-name,interval:10,limit:1g", &[]);
    program.hear("ready");
    let (pid, served) = (program.id(), Served::start("127.0.0.1:0"));
    let text = until("metrics of its groups", || {
        let text = served.get();
        (value(&text, "neap_group_used_bytes", pid, "group=\"alpha\"") > Some(f64::from(8 << 20))).then_some(text)
    });
    assert_eq!(value(&text, "neap_limit_bytes", pid, ""), Some(f64::from(1 << 30)), "{text}");
    for series in ["neap_resident_bytes", "neap_in_use_bytes"] {
        assert!(value(&text, series, pid, "") > Some(f64::from(11 << 20)), "{series} in {text}");
    }
    assert!(value(&text, "neap_group_used_bytes", pid, "group=\"/\"") > Some(f64::from(11 << 20)), "{text}");
    assert!(value(&text, "neap_page_faults_total", pid, "kind=\"minor\"") > Some(100.0), "{text}");
    assert!(value(&text, "neap_group_refusals_total", pid, "group=\"beta\"") == Some(0.0), "{text}");
    // A bound that is set between two scrapes is a series of the second one.
    assert_eq!(value(&text, "neap_group_limit_bytes", pid, "group=\"beta\""), None);
    assert!(neap("group", pid, &["beta", "max=64m"]).status.success());
    let text = served.get();
    assert_eq!(value(&text, "neap_group_limit_bytes", pid, "group=\"beta\""), Some(f64::from(64 << 20)), "{text}");
    // A process that ended is gone.
    drop(program);
    assert!(!served.get().contains(&format!("pid=\"{pid}\"")));
}

/// A program that goes on to ask for memory beyond its limit, and prints how often it gets none.
const REFUSED: &str = r#"
#include <stdio.h>
#include <stdlib.h>
int main(void) {
  int refused = 0;
  for (int n = 0; n < 200; n++) refused += malloc(1 << 20) == 0;
  printf("refused %d\n", refused); fflush(stdout);
  getchar();
  return 0;
}
"#;

#[test]
fn refusals_of_a_process_without_groups_are_counted_at_once() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("metrics-refused");
    fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(compiled(&folder, "refused", REFUSED));
    // Without a thread of neap's, no tick follows the last refusal.
    command.env("NEAP", "limit:64m,refuse:on,background:off").env("LD_PRELOAD", library());
    let mut program = Program::run(command);
    let refused: u64 = program.hear("refused ").parse().unwrap();
    assert!(refused > 100, "{refused}");
    let text = String::from_utf8(metrics(&[&program.id().to_string()]).stdout).unwrap();
    assert_eq!(value(&text, "neap_refusals_total", program.id(), ""), Some(refused as f64), "{text}");
    assert!(!text.contains("neap_group_refusals_total"), "{text}");
    assert_eq!(object("stat", program.id(), &[]).unwrap()["refused"], refused);
    let stat = String::from_utf8(neap("stat", program.id(), &[]).stdout).unwrap();
    let row = stat.lines().find(|line| line.contains("allocations refused so far")).unwrap_or_else(|| panic!("{stat}"));
    assert!(row.contains(&format!(" {refused} ")), "{stat}");
}

#[test]
fn server_answers_its_path_in_the_format_that_is_asked_for() {
    let served = Served::start("127.0.0.1:0");
    assert_eq!(served.said, "", "no warning on the loopback");
    let (head, body) =
        served.ask("GET /metrics?x=1", "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.3\r\n");
    assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(body.ends_with("# EOF\n") && body.contains("# UNIT neap_reading_duration_seconds seconds"), "{body}");
    for (line, status) in
        [("GET /", "404"), ("GET /metrics/../metrics", "404"), ("POST /metrics", "405"), ("HEAD /metrics", "200")]
    {
        let (head, body) = served.ask(line, "");
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{line}: {head}");
        assert!(!body.contains("neap_"), "{line}: {body}");
    }
    // Clients that say or read nothing keep no other client waiting.
    let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(&served.address).unwrap()).collect();
    for mut stream in &silent[..4] {
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    }
    assert!(served.get().contains("neap_processes"));
}

#[test]
fn server_ends_by_a_signal_and_names_an_address_that_is_in_use() {
    let mut served = Served::start("127.0.0.1:0");
    let second = metrics(&["--all", "--listen", &served.address]);
    let complaint = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(complaint.starts_with(&format!("neap: cannot listen on {}: ", served.address)), "{complaint}");
    assert!(complaint.contains("in use") && complaint.lines().count() == 1, "{complaint}");
    // SAFETY: signals a child that was not waited for.
    unsafe { libc::kill(served.child.id() as i32, libc::SIGTERM) };
    assert_eq!(served.child.wait().unwrap().signal(), Some(libc::SIGTERM));
    drop(TcpListener::bind(&served.address).unwrap());
}

#[test]
fn server_that_other_machines_reach_says_so() {
    let served = Served::start("0.0.0.0:0");
    assert!(served.said.starts_with("neap: warning: 0.0.0.0:") && served.said.lines().count() == 1, "{}", served.said);
}

#[test]
fn file_and_standard_output_have_the_metrics_once() {
    let mut program = Program::start("burst", "", &[]);
    program.hear("ready");
    let folder = std::env::temp_dir().join(format!("neap-metrics-test-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("neap.prom");
    fs::write(&file, "old").unwrap();
    let pid = program.id().to_string();
    let output = metrics(&[&pid, "--textfile", file.to_str().unwrap()]);
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no other file stays");
    fs::remove_dir_all(&folder).unwrap();
    let output = metrics(&[&pid, &i32::MAX.to_string()]);
    let (shown, said) = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).into();
    assert!(output.status.success() && said.starts_with("Not read: 1 not under neap (there is no process"), "{said}");
    for text in [text, shown] {
        assert!(value(&text, "neap_resident_bytes", program.id(), "") > Some(0.0), "{text}");
        assert!(text.contains("neap_processes 1\n") && !text.contains("# EOF"), "{text}");
    }
    assert_eq!(metrics(&[&i32::MAX.to_string()]).status.code(), Some(1), "no process was read");
    assert_eq!([metrics(&[]), metrics(&["1", "--all"])].map(|output| output.status.code()), [Some(2); 2]);
    let refused = metrics(&["--all", "--textfile", "/proc/neap.prom"]);
    let complaint = String::from_utf8(refused.stderr).unwrap();
    assert!(complaint.starts_with("neap: cannot write /proc/neap.prom"), "{complaint}");
}
