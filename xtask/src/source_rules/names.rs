//! Type names: no more than two types of the crates have one name.

use std::collections::{BTreeMap, BTreeSet};

use crate::source_rules::sources::Source;

/// The most types with one name.
const MOST: usize = 2;

/// The name of the type that a line of code defines.
fn defined(line: &str) -> Option<&str> {
    let mut line = line.trim_start();
    if let Some(rest) = line.strip_prefix("pub") {
        line = match rest.strip_prefix('(') {
            Some(scope) => scope.split_once(") ")?.1,
            None => rest.strip_prefix(' ')?,
        };
    }
    let line = line.strip_prefix("unsafe ").unwrap_or(line);
    let name = ["struct ", "enum ", "trait ", "union "].iter().find_map(|keyword| line.strip_prefix(keyword))?;
    let end = name.find(|c: char| !c.is_alphanumeric()).unwrap_or(name.len());
    Some(&name[..end]).filter(|name| name.starts_with(char::is_uppercase))
}

/// The files that define a type of each name.
#[derive(Default)]
pub(crate) struct Names(BTreeMap<String, BTreeSet<String>>);

impl Names {
    /// Adds the types of a file, its tests left out.
    pub(crate) fn add(&mut self, source: &Source) {
        for name in source.code().filter_map(|(_, line)| defined(line)) {
            self.0.entry(name.into()).or_default().insert(source.path.into());
        }
    }

    /// A finding for each name that too many types have.
    pub(crate) fn findings(&self) -> impl Iterator<Item = String> {
        self.0.iter().filter(|(_, paths)| paths.len() > MOST).map(|(name, paths)| {
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            format!("{} types are named `{name}`; at most {MOST} may be: {}", paths.len(), paths.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_third_type_of_a_name_is_found() {
        let mut names = Names::default();
        let definitions =
            ["pub(super) struct Row<'a> {", "    enum Row {", "struct Rows;", "pub unsafe trait Row: Sync {}"];
        for (number, line) in definitions.iter().enumerate() {
            assert_eq!(names.findings().count(), 0);
            names.add(&Source::new(&format!("{number}.rs"), line));
        }
        let found: Vec<String> = names.findings().collect();
        assert_eq!(found, ["3 types are named `Row`; at most 2 may be: 0.rs, 1.rs, 3.rs"]);
    }

    #[test]
    fn only_definitions_of_types_have_names() {
        for line in ["structure();", "let struct_ = 1;", "pub struct record{number} {", "// struct A", "impl Row {"] {
            assert_eq!(defined(line), None, "{line}");
        }
    }
}
