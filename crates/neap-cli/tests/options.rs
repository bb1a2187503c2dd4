//! The options of the library in the places where users meet them: `neap options`, `neap run`, the
//! guide, and a strict program.
//!
//! Method: the command is run from its build folder, with the library that the other tests use.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::process::{Command, Output};

use neap::options::{LONGEST_PATH, TABLE};
use running::library;
use serde_json::Value;

fn neap() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.env_remove("NEAP").env_remove("NEAP_STRICT").env_remove("LD_PRELOAD");
    command
}

/// `neap run` of a program that prints that it runs.
fn run(options: &str) -> Output {
    let mut command = neap();
    command.args(["run", "--library"]).arg(library()).args(["--neap", options, "--", "sh", "-c", "echo runs"]);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn options_page_has_the_table_of_options() {
    let page = include_str!("../../../docs/guide/options.md");
    let rows = page.lines().skip_while(|line| !line.starts_with("| key | values ")).skip(2);
    let rows: Vec<&str> = rows.take_while(|line| line.starts_with('|')).collect();
    let row = |option: &neap::options::OptionRow| {
        let changes = if option.setting.is_some() { "yes" } else { "no" };
        format!("| `{}` | {} | {} | {changes} | {} |", option.key, option.values, option.default, option.text)
    };
    assert_eq!(rows, TABLE.iter().map(row).collect::<Vec<_>>());
}

#[test]
fn every_option_is_listed_in_every_form() {
    let list = text(&neap().arg("options").output().unwrap().stdout);
    let help = text(&neap().args(["run", "--help"]).output().unwrap().stdout);
    let json: Value = serde_json::from_slice(&neap().args(["options", "--json"]).output().unwrap().stdout).unwrap();
    assert_eq!(json["options"].as_array().unwrap().len(), TABLE.len());
    for (option, json) in TABLE.iter().zip(json["options"].as_array().unwrap()) {
        let changes = if option.setting.is_some() { "; may change" } else { "" };
        let line = format!("\n  {:<18}{} (default: {}){changes}\n", option.key, option.values, option.default);
        assert!(list.contains(&line) && help.contains(&line), "{line}{list}{help}");
        let fields = ["key", "values", "default", "text"].map(|field| json[field].as_str().unwrap());
        assert_eq!(fields, [option.key, option.values, option.default, option.text]);
        assert_eq!(json["changes"].as_bool(), Some(option.setting.is_some()));
    }
    assert!(list.lines().all(|line| line.chars().count() <= 100), "{list}");
}

#[test]
fn run_refuses_what_the_library_would_ignore() {
    let long = format!("trace:/{}", "a".repeat(LONGEST_PATH));
    for (options, said) in [
        ("limt:1g", "NEAP: \"limt:1g\" is not an option (did you mean \"limit\"?)"),
        ("stat:off,interval:5", "NEAP: \"interval:5\" is not a number from 10 to 60000;"),
        ("colour:red", "NEAP: \"colour:red\" is not an option;"),
        (&long, "is not a path"),
    ] {
        let output = run(options);
        let message = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(125), String::new()), "{message}");
        assert!(message.contains(said) && message.lines().count() == 1, "{message}");
    }
    let output = run("limit:1g,strict:on");
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("runs\n".into(), String::new()));
}

#[test]
fn strict_program_with_unknown_option_does_not_start() {
    let start = |options: &str, strict: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", "echo runs"]).env("LD_PRELOAD", library()).env("NEAP", options).env("NEAP_STRICT", strict);
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let warning = "neap: NEAP: \"limt:1g\" is not an option (did you mean \"limit\"?); ignored\n";
    for strict in ["", "0", "off"] {
        assert_eq!(start("limt:1g", strict), (Some(0), "runs\n".into(), warning.into()));
    }
    let refusal = "neap: NEAP: \"limt:1g\" is not an option (did you mean \"limit\"?); not started, as strict asks\n";
    for (options, strict) in [("limt:1g,strict:on", ""), ("strict:on,limt:1g,colour:red", ""), ("limt:1g", "1")] {
        assert_eq!(start(options, strict), (Some(125), String::new(), refusal.into()), "{options}");
    }
    assert_eq!(start("limit:1g,strict:on", "1"), (Some(0), "runs\n".into(), String::new()));
}
