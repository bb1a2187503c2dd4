//! The schemas in `docs/schema` against the real output of every command with `--json`.
//!
//! The check knows the keywords that the schemas use, and refuses others. Unlike a schema, it also
//! finds keys that no schema describes, so that each is documented.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use running::{Program, object, until};
use serde_json::{Value, json};

/// Keywords that need no check.
const NOTES: [&str; 6] = ["$schema", "$id", "$defs", "title", "version", "description"];

/// Returns the first place where a value is not as its schema says.
fn mismatch(root: &Value, schema: &Value, value: &Value, path: &str) -> Option<String> {
    let is_of = |kind: &Value| match kind.as_str().unwrap_or_default() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64(),
        "null" => value.is_null(),
        _ => false,
    };
    let mut known = false;
    for (keyword, rule) in schema.as_object()? {
        let found = match keyword.as_str() {
            "$ref" => {
                known = true;
                let place = rule.as_str().unwrap_or_default().trim_start_matches('#');
                mismatch(root, root.pointer(place).unwrap_or(&Value::Null), value, path)
            }
            "anyOf" => {
                known = true;
                let all: Vec<_> = rule.as_array()?.iter().map(|schema| mismatch(root, schema, value, path)).collect();
                all.iter().all(Option::is_some).then(|| format!("{path}: {all:?}"))
            }
            "type" => {
                known = true;
                let fits = if let Some(kinds) = rule.as_array() { kinds.iter().any(is_of) } else { is_of(rule) };
                (!fits).then(|| format!("{path}: {value} is not of type {rule}"))
            }
            "minimum" => (value.as_f64() < rule.as_f64() && value.is_number()).then(|| format!("{path}: {value}")),
            "required" => {
                let missing = |key: &&Value| value.is_object() && value.get(key.as_str().unwrap_or_default()).is_none();
                rule.as_array()?.iter().find(missing).map(|key| format!("{path}: {key} is missing"))
            }
            "properties" => value.as_object().and_then(|entries| {
                entries.iter().find_map(|(key, value)| match rule.get(key) {
                    Some(schema) => mismatch(root, schema, value, &format!("{path}/{key}")),
                    None => Some(format!("{path}: {key} is not described")),
                })
            }),
            "additionalProperties" => value.as_object().and_then(|entries| {
                entries.iter().find_map(|(key, value)| mismatch(root, rule, value, &format!("{path}/{key}")))
            }),
            "items" => value.as_array().and_then(|items| {
                items.iter().enumerate().find_map(|(at, value)| mismatch(root, rule, value, &format!("{path}/{at}")))
            }),
            note if NOTES.contains(&note) => None,
            other => Some(format!("{path}: the keyword {other} is not known")),
        };
        if found.is_some() {
            return found;
        }
    }
    (!known).then(|| format!("{path}: no type is given"))
}

fn schema(name: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema");
    serde_json::from_str(&fs::read_to_string(folder.join(name).with_extension("json")).unwrap()).unwrap()
}

/// The name of a schema, the command, and its options.
const OUTPUTS: [(&str, &str, &[&str]); 13] = [
    ("ps", "ps", &["1"]),
    ("stat", "stat", &[]),
    ("groups", "stat", &["--groups"]),
    ("groups", "stat", &["--groups", "--dead"]),
    ("percpu", "stat", &["--percpu"]),
    ("shrinkers", "stat", &["--shrinkers"]),
    ("reconcile", "stat", &["--reconcile"]),
    ("drain", "drain", &[]),
    ("top", "top", &["--interval", "100"]),
    ("top", "top", &["--interval", "100", "--profile"]),
    ("pressure", "pressure", &[]),
    ("pressure-watch", "pressure", &["--watch=0.1", "--times", "1"]),
    ("profile", "profile", &["--seconds", "1", "--every", "64k"]),
];

/// Compares the output of each command on a process with its schema.
fn compare(mut program: Program) {
    program.hear("ready");
    for (name, command, options) in OUTPUTS {
        let (schema, output) = (schema(name), object(command, program.id(), options).unwrap());
        assert_eq!(
            (&output["schema"], &schema["$id"]),
            (&schema["version"], &json!(format!("urn:neap:schema:{name}:1")))
        );
        assert_eq!(mismatch(&schema, &schema, &output, ""), None, "{name}: {output}");
    }
}

#[test]
fn json_outputs_with_groups_and_limit_match_schemas() {
    compare(Program::start("threads", "groups:by-thread-name,interval:10,limit:1g,nodes:2", &[]));
}

#[test]
fn outputs_on_a_process_in_a_container_fit_their_schemas() {
    compare(Program::start("burst", "interval:10,limit:auto", &[]));
}

#[test]
fn outputs_on_a_process_with_per_cpu_data_fit_their_schemas() {
    compare(Program::start_alone("percpu", "interval:10,background:on"));
}

#[test]
fn outputs_on_a_process_with_a_cache_fit_their_schemas() {
    compare(Program::start_alone("cache", "interval:10,background:on"));
}

#[test]
fn reconciliation_without_an_answer_fits_its_schema() {
    let mut program = Program::start("burst", "background:off", &[]);
    program.hear("ready");
    let output = until("reading without an answer", || {
        object("stat", program.id(), &["--reconcile"]).ok().filter(|output| !output["in_arena"].is_null())
    });
    let schema = schema("reconcile");
    assert_eq!(mismatch(&schema, &schema, &output, ""), None, "{output}");
}

#[test]
fn outputs_on_files_of_profiles_fit_their_schemas() {
    let mut program = Program::start("threads", "groups:by-thread-name,profile:16k", &[]);
    program.hear("ready");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let [old, new] = ["schema-old.pb.gz", "schema-new.pb.gz"].map(|name| folder.join(name));
    let [old, new] = [&old, &new].map(|path| path.to_str().unwrap());
    for file in [old, new] {
        assert!(running::neap("profile", program.id(), &["--seconds", "1", "-o", file]).status.success());
    }
    let read = |name: &str, options: &[&str]| {
        let mut neap = std::process::Command::new(env!("CARGO_BIN_EXE_neap"));
        let output = neap.args(["profile", "--json", "--read", new]).args(options).output().unwrap();
        let output: Value = serde_json::from_slice(&output.stdout).unwrap();
        let schema = schema(name);
        assert_eq!(mismatch(&schema, &schema, &output, ""), None, "{name}: {output}");
    };
    read("profile", &[]);
    read("profile-compare", &["--compare", old]);
}

#[test]
fn outputs_on_no_process_fit_their_schemas() {
    // As installed: the demo takes the library beside the command.
    let folder = running::folder("schema");
    fs::hard_link(env!("CARGO_BIN_EXE_neap"), folder.join("neap")).unwrap();
    symlink(running::library(), folder.join("libneap_malloc.so")).unwrap();
    for (name, arguments) in [
        ("bench", &["demo", "--size", "65536", "--json"][..]),
        ("options", &["options", "--json"]),
        ("ps", &["top", "--json"]),
        ("pressure-watch", &["pressure", "--watch=0.1", "--times", "1", "--json"]),
        ("bench", &["bench", "page", "--quick", "--json", "--against", "glibc"]),
        ("bench", &["bench", "programs", "--quick", "--json", "--programs", "sort"]),
        ("lab", &["lab", "show", "bursts 3 s apart", "--quick", "--json"]),
    ] {
        let mut neap = std::process::Command::new(folder.join("neap"));
        let output = neap.args(arguments).output().unwrap();
        let output: Value = serde_json::from_slice(&output.stdout).unwrap();
        let schema = schema(name);
        assert_eq!(output["schema"], schema["version"], "{arguments:?}");
        assert_eq!(mismatch(&schema, &schema, &output, ""), None, "{arguments:?}: {output}");
    }
}

#[test]
fn outputs_that_do_not_fit_are_found() {
    let schema = json!({
        "type": "object", "required": ["a"], "$defs": {"c": {"type": ["integer", "null"], "minimum": 0}},
        "properties": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/c"}},
            "b": {"type": "object", "additionalProperties": {"type": "string"}},
            "d": {"anyOf": [{"type": "null"}, {"type": "number"}]},
        },
    });
    let found = |value: &Value| mismatch(&schema, &schema, value, "").unwrap_or_default();
    assert_eq!(found(&json!({"a": [1, null], "b": {"x": "y"}, "d": 0.5})), "");
    for (value, expected) in [
        (json!([]), ": [] is not of type \"object\""),
        (json!({}), ": \"a\" is missing"),
        (json!({"a": [1, "x"]}), "/a/1: \"x\" is not of type"),
        (json!({"a": [0.5]}), "/a/0: 0.5 is not of type"),
        (json!({"a": [-1]}), "/a/0: -1"),
        (json!({"a": [], "b": {"x": 1}}), "/b/x: 1 is not of type"),
        (json!({"a": [], "c": 1}), ": c is not described"),
        (json!({"a": [], "d": "x"}), "/d: "),
    ] {
        assert!(found(&value).starts_with(expected), "{value}: {}", found(&value));
    }
    for schema in [json!({"type": "object", "pattern": "x"}), json!({"description": "anything"})] {
        assert!(mismatch(&schema, &schema, &json!({}), "").is_some(), "{schema}");
    }
}
