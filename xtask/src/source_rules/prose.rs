//! Rules for comments and messages in `crates`, `xtask`, settings and scripts, each with a ceiling
//! for the number of lines that break it.
//!
//! `cargo xtask tidy` fails above a ceiling, and names a ceiling that can be lowered. `cargo xtask
//! prose` lists the lines.

use std::fs;

use anyhow::Result;

use crate::layout;
use crate::source_rules::sources;

/// A rule for the lines of a source file.
struct Rule {
    name: &'static str,
    breaks: fn(&str) -> bool,
    /// The most lines that may break the rule. It may only fall.
    ceiling: usize,
}

const RULES: &[Rule] = &[
    Rule { name: "names no actor (who, somebody, nobody)", breaks: names_no_actor, ceiling: 0 },
    Rule { name: "begins with `/// The same`", breaks: begins_the_same, ceiling: 0 },
    Rule { name: "SAFETY without its own proof (as above)", breaks: refers_above, ceiling: 0 },
    Rule { name: "comment over 100 columns", breaks: is_long, ceiling: 0 },
    Rule {
        name: "function name is over 60 characters, or names no actor (who, somebody, nobody)",
        breaks: is_misnamed,
        ceiling: 0,
    },
];

/// Words that stand for an actor without naming one.
const NO_ACTOR: &[&str] = &["who", "whoever", "somebody", "nobody", "anybody"];

/// Characters of a function's name.
const NAME: usize = 60;

/// Folders whose sources are judged.
const FOLDERS: &[&str] = &["crates/", "xtask/"];

/// Ends of the paths of settings and scripts, which are judged in every folder.
const SETTINGS: &[&str] = &[".toml", ".sh", ".ci/run"];

/// Columns of a comment line.
const COLUMNS: usize = 100;

/// The comment of a line, from its slashes on; empty without one.
fn comment(line: &str) -> &str {
    let line = line.trim_start();
    if line.starts_with("//") { line } else { line.find(" // ").map_or("", |at| &line[at + 1..]) }
}

fn names_no_actor(line: &str) -> bool {
    let is_one = |word: &str| NO_ACTOR.contains(&word.to_lowercase().as_str());
    // Names in code are no words of a message.
    comment(line).split(|c: char| !c.is_alphanumeric()).any(is_one)
        || line.split(|c: char| !c.is_alphanumeric() && c != '_').any(is_one)
}

fn begins_the_same(line: &str) -> bool {
    let text = comment(line).strip_prefix("/// The same");
    text.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
}

fn refers_above(line: &str) -> bool {
    comment(line).contains("SAFETY: as above")
}

fn is_long(line: &str) -> bool {
    let text = line.trim_start();
    (text.starts_with("//") || text.starts_with("# ")) && line.chars().count() > COLUMNS
}

/// Whether the line defines a function, mostly a test, whose name is too long or names no actor.
fn is_misnamed(line: &str) -> bool {
    let defined = line.trim_start().split_once("fn ").filter(|(before, _)| {
        before.split_whitespace().all(|word| ["async", "const", "unsafe"].contains(&word) || word.starts_with("pub"))
    });
    let name = defined.and_then(|(_, rest)| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next());
    name.is_some_and(|name| name.len() > NAME || name.split('_').any(|word| NO_ACTOR.contains(&word)))
}

/// The lines that break each rule, as `path:line`, in the order of `RULES`.
fn breaches() -> Result<Vec<Vec<String>>> {
    let root = layout::root();
    let mut found: Vec<Vec<String>> = RULES.iter().map(|_| Vec::new()).collect();
    for file in sources::files(&root)? {
        let path = file.strip_prefix(&root)?.to_string_lossy();
        let is_source = FOLDERS.iter().any(|folder| path.starts_with(folder)) && path.ends_with(".rs");
        let is_setting = SETTINGS.iter().any(|end| path.ends_with(end));
        // The tests of this file break every rule.
        if !is_source && !is_setting || path == "xtask/src/source_rules/prose.rs" {
            continue;
        }
        let text = fs::read_to_string(&file)?;
        for (at, line) in text.lines().enumerate() {
            for (rule, lines) in RULES.iter().zip(&mut found) {
                if (rule.breaks)(line) {
                    lines.push(format!("{path}:{}", at + 1));
                }
            }
        }
    }
    Ok(found)
}

/// The finding for a rule that `lines` lines break.
fn judged(rule: &Rule, lines: usize) -> Option<String> {
    let (name, ceiling) = (rule.name, rule.ceiling);
    (lines > ceiling).then(|| {
        format!("{name}: {lines} lines; at most {ceiling} may be; reword new ones (`cargo xtask prose` lists all)")
    })
}

/// Findings for rules above their ceilings. Prints ceilings that can be lowered.
pub(crate) fn findings() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (rule, lines) in RULES.iter().zip(breaches()?) {
        if lines.len() < rule.ceiling {
            println!(
                "{}: lower the ceiling in xtask/src/source_rules/prose.rs from {} to {}",
                rule.name,
                rule.ceiling,
                lines.len()
            );
        }
        found.extend(judged(rule, lines.len()));
    }
    Ok(found)
}

/// Lists every line that breaks a rule, then the number of lines by rule.
pub(crate) fn list() -> Result<()> {
    let breaches = breaches()?;
    for (rule, lines) in RULES.iter().zip(&breaches) {
        for line in lines {
            println!("{line}: {}", rule.name);
        }
    }
    for (rule, lines) in RULES.iter().zip(&breaches) {
        println!("{:>5} of {:>5}: {}", lines.len(), rule.ceiling, rule.name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_finds_its_lines() {
        let broken = |line: &str| RULES.iter().map(|rule| (rule.breaks)(line)).collect::<Vec<_>>();
        let only = |at: usize| (0..RULES.len()).map(|rule| rule == at).collect::<Vec<_>>();
        assert_eq!(broken("    // Nobody's lock."), only(0));
        assert_eq!(broken("let x = 1; // for whoever waits"), only(0));
        assert_eq!(broken("assert!(done, \"nobody waits\");"), only(0));
        assert_eq!(broken("/// The same, inside the gate."), only(1));
        assert_eq!(broken("    // SAFETY: as above."), only(2));
        assert_eq!(broken(&format!("//! {}", "é".repeat(COLUMNS - 3))), only(3));
        assert_eq!(broken(&format!("# {}", "é".repeat(COLUMNS - 1))), only(3));
        assert_eq!(broken("    pub(crate) async fn nobody_waits() {"), only(4));
        assert_eq!(broken(&format!("fn {}() {{", "n".repeat(NAME + 1))), only(4));
        let kept = [
            format!("//! {}", "é".repeat(COLUMNS - 4)),
            format!("# {}", "é".repeat(COLUMNS - 2)),
            "calls(nobody_waits)".into(),
            format!("fn {}() {{", "n".repeat(NAME)),
            "// A whole".into(),
            "/// The sameness".into(),
        ];
        assert!(kept.iter().all(|line| broken(line).iter().all(|found| !found)), "{kept:?}");
    }

    #[test]
    fn only_lines_above_the_ceiling_are_a_finding() {
        let rule = Rule { name: "rule", breaks: is_long, ceiling: 2 };
        assert_eq!((judged(&rule, 1), judged(&rule, 2)), (None, None));
        assert!(judged(&rule, 3).is_some_and(|finding| finding.starts_with("rule: 3 lines; at most 2")));
    }
}
