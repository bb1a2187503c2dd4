//! Which files of a crate import from which: the module graph behind `cargo xtask cycles`.
//!
//! # Design
//!
//! 1. An import is a path that begins with `crate`, `self` or `super`, inside or outside a `use`,
//!    or a `use` of a child module. Tests do not count. A call of a child module by its bare name
//!    is no import: a folder's file may dispatch to its children.
//! 2. A path leads to the file of its longest prefix that is a module. If that file only passes the
//!    name on by a `use`, the path leads to the file behind it.
//! 3. A `pub use` passes names on and counts as no import of its file.
//!
//! Inline modules belong to their file. Names of a glob `use` lead to the file with the glob.

use std::collections::{BTreeMap, BTreeSet};

/// A module: the names from the crate's root to it; none for the root.
pub(crate) type Module = Vec<String>;

/// The files of a crate by module, each with the modules that it imports from.
pub(crate) type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// A path in code, as it is written.
struct Import {
    path: Vec<String>,
    /// The name that a `use` binds.
    name: Option<String>,
    exported: bool,
}

/// Identifiers, `::` and single characters.
fn tokens(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
        let length = match word {
            0 if rest.starts_with("::") => 2,
            0 => first.len_utf8(),
            _ => word,
        };
        found.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    found
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c == '_' || c.is_alphabetic())
}

/// Reads the tree of a `use` from `at` on; returns the place behind it.
fn tree(tokens: &[&str], mut at: usize, prefix: &[String], exported: bool, found: &mut Vec<Import>) -> usize {
    let mut path = prefix.to_vec();
    loop {
        match tokens.get(at) {
            Some(&"{") => {
                at += 1;
                while tokens.get(at).is_some_and(|token| *token != "}") {
                    at = if tokens[at] == "," { at + 1 } else { tree(tokens, at, &path, exported, found) };
                }
                return at + 1;
            }
            Some(token) if is_word(token) || *token == "*" => path.push((*token).to_string()),
            _ => return at + 1,
        }
        at += 1;
        if tokens.get(at) != Some(&"::") {
            break;
        }
        at += 1;
    }
    if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
        path.pop();
    }
    let mut name = path.last().cloned();
    if tokens.get(at) == Some(&"as") {
        name = tokens.get(at + 1).map(ToString::to_string);
        at += 2;
    }
    found.push(Import { path, name, exported });
    at
}

/// Every `use`, and every path from `crate`, `self` or `super` on.
fn imports(code: &str) -> Vec<Import> {
    let tokens = tokens(code);
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let before = at.checked_sub(1).map_or("", |before| tokens[before]);
        if tokens[at] == "use" {
            at = tree(&tokens, at + 1, &[], before == "pub" || before == ")", &mut found);
        } else if ["crate", "self", "super"].contains(&tokens[at]) && tokens.get(at + 1) == Some(&"::") && before != "$"
        {
            let mut path = vec![tokens[at].to_string()];
            while tokens.get(at + 1) == Some(&"::") && tokens.get(at + 2).is_some_and(|next| is_word(next)) {
                path.push(tokens[at + 2].to_string());
                at += 2;
            }
            found.push(Import { path, name: None, exported: false });
            at += 1;
        } else {
            at += 1;
        }
    }
    found
}

/// The path from the crate's root; `None` for another crate's.
fn absolute(path: &[String], module: &Module, is_module: impl Fn(&[String]) -> bool) -> Option<Module> {
    let supers = path.iter().take_while(|name| *name == "super").count();
    let (mut found, rest) = match path.first()?.as_str() {
        "crate" => (Vec::new(), &path[1..]),
        "self" => (module.clone(), &path[1..]),
        "super" => (module[..module.len().saturating_sub(supers)].to_vec(), &path[supers..]),
        child => {
            let inside = [module.as_slice(), &[child.to_string()]].concat();
            if !is_module(&inside) {
                return None;
            }
            (module.clone(), path)
        }
    };
    found.extend_from_slice(rest);
    Some(found)
}

/// The module of a file from its path below `src`.
pub(crate) fn module(path: &str) -> Module {
    let mut names: Module = path.trim_end_matches(".rs").split('/').map(str::to_string).collect();
    if names.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        names.pop();
    }
    names
}

/// The graph of a crate, from the code of each module.
pub(crate) fn graph(files: &BTreeMap<Module, String>) -> Graph {
    let is_module = |path: &[String]| files.contains_key(path);
    let mut passed_on: BTreeMap<Module, Module> = BTreeMap::new();
    let mut imported: Vec<(&Module, Module)> = Vec::new();
    for (module, code) in files {
        for import in imports(code) {
            let Some(path) = absolute(&import.path, module, is_module) else {
                continue;
            };
            if let Some(name) = import.name {
                passed_on.insert([module.as_slice(), &[name]].concat(), path.clone());
            }
            if !import.exported {
                imported.push((module, path));
            }
        }
    }
    let home = |mut path: Module| {
        // Each step follows one `use`. The bound ends names that two files pass to each other.
        for _ in 0..8 {
            let length = (0..=path.len()).rev().find(|length| is_module(&path[..*length]))?;
            match path.get(..=length).and_then(|name| passed_on.get(name)) {
                Some(next) if *next != path => path = [next, &path[length + 1..]].concat(),
                _ => return Some(path[..length].to_vec()),
            }
        }
        None
    };
    let mut graph: Graph = files.keys().map(|module| (module.clone(), BTreeSet::new())).collect();
    for (module, path) in imported {
        if let (Some(to), Some(edges)) = (home(path), graph.get_mut(module))
            && to != *module
        {
            edges.insert(to);
        }
    }
    graph
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(files: &[(&str, &str)]) -> Vec<String> {
        let files = files.iter().map(|(path, code)| (module(path), (*code).to_string())).collect();
        let graph = graph(&files);
        let pairs = graph.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
        pairs.map(|(from, to)| format!("{} {}", from.join("/"), to.join("/"))).collect()
    }

    #[test]
    fn every_kind_of_path_is_an_edge() {
        let found = edges(&[
            ("lib.rs", "mod a; mod b; fn f() { b::g::<u8>() }"),
            ("a/mod.rs", "use std::b; use crate::{b::{self, X as Y}, c::*}; use super::d as e;"),
            ("a/x.rs", "fn f(x: &super::super::c::C) { self::y() } use super::T;"),
            ("b.rs", "$crate::d::m!(); pub(crate) fn f() {}"),
            ("c.rs", ""),
            ("d.rs", ""),
        ]);
        assert_eq!(found, ["a b", "a c", "a d", "a/x a", "a/x c"]);
    }

    #[test]
    fn names_passed_on_lead_to_their_own_file() {
        let found = edges(&[
            ("lib.rs", "pub use a::{T, inner::U}; pub(crate) use a::T as V; struct W;"),
            ("a/mod.rs", "pub use inner::T;"),
            ("a/inner.rs", "use crate::W;"),
            ("b.rs", "use crate::{T, U}; use crate::V;"),
        ]);
        assert_eq!(found, ["a/inner ", "b a/inner"]);
    }
}
