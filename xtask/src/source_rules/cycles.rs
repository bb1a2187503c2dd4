//! `cargo xtask cycles`: groups of files of a crate that import each other in a circle.
//!
//! Two files may import each other; more may not.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, bail};

use crate::layout;
use crate::source_rules::imports::{self, Graph, Module};
use crate::source_rules::sources::{self, Source};

/// Most files in a cycle that is permitted.
const ALLOWED: usize = 2;

/// Tarjan's search for strongly connected components.
struct Search<'a> {
    graph: &'a Graph,
    /// Order of discovery.
    index: BTreeMap<&'a Module, usize>,
    /// Lowest index on the stack that is reachable.
    lowest: BTreeMap<&'a Module, usize>,
    stack: Vec<&'a Module>,
    found: Vec<BTreeSet<&'a Module>>,
}

impl<'a> Search<'a> {
    fn visit(&mut self, module: &'a Module) {
        let index = self.index.len();
        self.index.insert(module, index);
        self.lowest.insert(module, index);
        self.stack.push(module);
        for next in &self.graph[module] {
            let reachable = if !self.index.contains_key(next) {
                self.visit(next);
                self.lowest[next]
            } else if self.stack.contains(&next) {
                self.index[next]
            } else {
                continue;
            };
            self.lowest.insert(module, self.lowest[module].min(reachable));
        }
        if self.lowest[module] == index
            && let Some(start) = self.stack.iter().position(|on_stack| *on_stack == module)
        {
            self.found.push(self.stack.split_off(start).into_iter().collect());
        }
    }
}

/// Cycles of more than `ALLOWED` files.
fn cycles(graph: &Graph) -> Vec<BTreeSet<&Module>> {
    let (index, lowest) = (BTreeMap::new(), BTreeMap::new());
    let mut search = Search { graph, index, lowest, stack: Vec::new(), found: Vec::new() };
    for module in graph.keys() {
        if !search.index.contains_key(module) {
            search.visit(module);
        }
    }
    search.found.retain(|cycle| cycle.len() > ALLOWED);
    search.found
}

/// The name of a module in a listing.
fn spelled(module: &Module) -> String {
    if module.is_empty() { "the root".into() } else { module.join("::") }
}

/// The imports inside each cycle, a line for each file.
fn listing(graph: &Graph, cycles: &[BTreeSet<&Module>]) -> String {
    let mut text = String::new();
    for cycle in cycles {
        text += &format!("  {} files in a cycle:\n", cycle.len());
        for module in cycle {
            let inside = graph[*module].iter().filter(|to| cycle.contains(to)).map(spelled);
            text += &format!("    {} imports {}\n", spelled(module), inside.collect::<Vec<_>>().join(", "));
        }
    }
    text
}

/// The crates' import graphs by name.
fn graphs() -> Result<BTreeMap<String, Graph>> {
    let root = layout::root();
    let mut crates: BTreeMap<String, BTreeMap<Module, String>> = BTreeMap::new();
    for file in sources::files(&root)? {
        let path = file.strip_prefix(&root)?.to_string_lossy();
        let Some((folder, inside)) = path.split_once("/src/").filter(|_| path.ends_with(".rs")) else {
            continue;
        };
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {path}"))?;
        let source = Source::new(&path, &text);
        let code: Vec<&str> = source.code().map(|(_, line)| line.split(" // ").next().unwrap_or(line)).collect();
        if !code.is_empty() {
            let name = folder.trim_start_matches("crates/").to_string();
            crates.entry(name).or_default().insert(imports::module(inside), code.join("\n"));
        }
    }
    Ok(crates.into_iter().map(|(name, files)| (name, imports::graph(&files))).collect())
}

/// Cycles of more than two files: a finding for each crate that has any.
pub(crate) fn findings() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (name, graph) in graphs()? {
        let cycles = cycles(&graph);
        if !cycles.is_empty() {
            found.push(format!("{name}: files import each other in a circle\n{}", listing(&graph, &cycles)));
        }
    }
    Ok(found)
}

/// Prints every cycle of more than two files; an error if there is any.
pub(crate) fn check() -> Result<()> {
    let findings = findings()?;
    findings.iter().for_each(|finding| print!("{finding}"));
    if !findings.is_empty() {
        bail!("cycles: {} crates have files that import each other in a circle", findings.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(edges: &[(&str, &str)]) -> Vec<String> {
        let mut graph = Graph::new();
        for (from, to) in edges {
            graph.entry(vec![(*from).into()]).or_default().insert(vec![(*to).into()]);
            graph.entry(vec![(*to).into()]).or_default();
        }
        let spell = |cycle: BTreeSet<&Module>| cycle.into_iter().map(spelled).collect::<Vec<_>>().join(" ");
        cycles(&graph).into_iter().map(spell).collect()
    }

    #[test]
    fn cycles_of_more_than_two_files_are_found() {
        assert_eq!(found(&[("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")]), [""; 0]);
        assert_eq!(found(&[("a", "b"), ("b", "a"), ("b", "c"), ("c", "d"), ("d", "c")]), [""; 0]);
        let edges = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("x", "a"), ("d", "e"), ("e", "f"), ("f", "d")];
        let mut both = found(&edges);
        both.sort();
        assert_eq!(both, ["a b c", "d e f"]);
    }
}
