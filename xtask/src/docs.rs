//! `cargo xtask docs`: checks every link of the documentation and renders the book.
//!
//! # Design
//!
//! 1. The sources: each local link leads to a file, and each anchor to a heading of that file.
//!    SUMMARY.md names every page of `docs`. Each test that `docs/meetings.md` names exists, and
//!    each file of Rust that a page or a comment names ([`source_names`]).
//! 2. The book: the crate `neap-book` renders it into `target/book/docs`. Files outside `docs` to
//!    which pages link are copied to the same relative places below `target/book`.
//! 3. The rendered pages: each local address leads to a file, and each fragment to an `id` of it.
//!
//! Addresses with a scheme, such as `https:`, are not followed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::layout;
use crate::process::{cargo, run};
use crate::source_rules::links::{Page, html, markdown};
use crate::source_rules::source_names;

/// Pages outside `docs`, from the root.
const ROOT_PAGES: &[&str] = &["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];

const SUMMARY: &str = "docs/SUMMARY.md";
/// The page that names a test for each rule.
const MEETINGS: &str = "docs/meetings.md";

/// The folder of the rendered book.
fn site() -> PathBuf {
    layout::target().join("book")
}

/// Pages by their paths from a root, which hold the links and anchors to check.
struct Pages(BTreeMap<PathBuf, Page>);

/// The path with `.` and `..` resolved by name; `None` if it leaves the root.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir if !found.pop() => return None,
            Component::Normal(name) => found.push(name),
            _ => {}
        }
    }
    Some(found)
}

/// Returns true for an address with a scheme, such as `https://…` or `mailto:…`, or a host.
fn is_external(address: &str) -> bool {
    let scheme = address.split_once(':').map_or("", |(scheme, _)| scheme);
    address.starts_with("//")
        || !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

/// The file and the fragment of a local address on `page`. The file is `None` outside the root.
fn resolved<'a>(page: &Path, address: &'a str) -> (Option<PathBuf>, &'a str) {
    let (path, fragment) = address.split_once('#').unwrap_or((address, ""));
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    let file = match path {
        "" => Some(page.to_path_buf()),
        _ => normal(&page.parent().unwrap_or(Path::new("")).join(path)),
    };
    (file, fragment)
}

impl Pages {
    /// Every dead link, as `page:line: problem; remedy`. `exists` says whether a file that is not a
    /// page is there.
    fn dead(&self, exists: impl Fn(&Path) -> bool) -> Vec<String> {
        let mut found = Vec::new();
        for (path, page) in &self.0 {
            let local = page.links.iter().filter(|link| !is_external(&link.address));
            for link in local {
                let mut say = |problem: String| {
                    found.push(format!("{}:{}: link to `{}`: {problem}", path.display(), link.line, link.address));
                };
                let (Some(file), fragment) = resolved(path, &link.address) else {
                    say("leaves the repository; name a file in it".into());
                    continue;
                };
                match self.0.get(&file) {
                    None if !exists(&file) => say(format!("{} does not exist; correct the path", file.display())),
                    Some(target) if !fragment.is_empty() && !target.anchors.contains(fragment) => {
                        say(format!("{} has no heading for `#{fragment}`; correct the anchor", file.display()));
                    }
                    _ => {}
                }
            }
        }
        found
    }

    /// Pages below `docs` that SUMMARY.md does not link to.
    fn unlisted(&self) -> Vec<String> {
        let summary = Path::new(SUMMARY);
        let Some(page) = self.0.get(summary) else {
            return vec![format!("{SUMMARY}: the file does not exist; add one")];
        };
        let listed: BTreeSet<_> = page.links.iter().filter_map(|link| resolved(summary, &link.address).0).collect();
        let pages = self.0.keys().filter(|path| path.starts_with("docs") && *path != summary);
        pages
            .filter(|path| !listed.contains(*path))
            .map(|path| format!("{}: {SUMMARY} does not name the page; add it", path.display()))
            .collect()
    }

    /// Files and folders outside `docs` to which pages below `docs` link; other pages left out.
    fn linked_sources(&self) -> BTreeSet<PathBuf> {
        let pages = self.0.iter().filter(|(path, _)| path.starts_with("docs"));
        let local = pages.flat_map(|(path, page)| page.links.iter().map(move |link| (path, &link.address)));
        let files = local.filter(|(_, address)| !is_external(address)).filter_map(|(path, to)| resolved(path, to).0);
        files.filter(|file| !file.starts_with("docs") && !self.0.contains_key(file)).collect()
    }
}

/// Reads the files with an ending below `folder`; paths are from `root`.
fn read(root: &Path, folder: &Path, ending: &str, parse: fn(&str) -> Page, pages: &mut Pages) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            read(root, &path, ending, parse, pages)?;
        } else if path.extension().is_some_and(|found| found == ending) {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            pages.0.insert(path.strip_prefix(root)?.to_path_buf(), parse(&text));
        }
    }
    Ok(())
}

/// Returns the tests in back quotes, as `file::test` or `crate/file::test`, that `exists` does not
/// know by crate, file and test. Without a crate any may have the file.
fn missing_tests(text: &str, exists: impl Fn(Option<&str>, &str, &str) -> bool) -> Vec<String> {
    let lines = text.lines().enumerate();
    let quoted = lines.flat_map(|(line, text)| text.split('`').skip(1).step_by(2).map(move |name| (line + 1, name)));
    let named = quoted.filter_map(|(line, name)| name.split_once("::").map(|(file, test)| (line, name, file, test)));
    let missing = named.filter(|(_, _, file, test)| {
        let (of, file) = file.split_once('/').map_or((None, *file), |(of, file)| (Some(of), file));
        !exists(of, file, test)
    });
    missing
        .map(|(line, name, ..)| format!("{MEETINGS}:{line}: test `{name}` does not exist; correct the name"))
        .collect()
}

/// Returns whether a crate, or any, has a test in a file of its folder `tests`, or of a folder in
/// that.
fn has_test(root: &Path, of: Option<&str>, file: &str, test: &str) -> bool {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let crates = entries(&root.join("crates")).filter(|entry| of.is_none_or(|of| entry.file_name() == of));
    let tests: Vec<PathBuf> = crates.map(|entry| entry.path().join("tests")).collect();
    let inner = tests.iter().flat_map(|tests| entries(tests)).map(|entry| entry.path());
    let folders: Vec<PathBuf> = inner.filter(|path| path.is_dir()).chain(tests.iter().cloned()).collect();
    let wanted = format!("fn {test}(");
    let texts = folders.iter().filter_map(|folder| fs::read_to_string(folder.join(file).with_extension("rs")).ok());
    texts.into_iter().any(|text| text.contains(&wanted))
}

/// Prints the findings; an error if there is one.
fn judge(what: &str, findings: &[String], pages: &Pages) -> Result<()> {
    for finding in findings {
        println!("{finding}");
    }
    ensure!(findings.is_empty(), "docs: {} findings in {what}", findings.len());
    let links: usize = pages.0.values().map(|page| page.links.len()).sum();
    println!("docs: {links} links on {} pages of {what}, no findings", pages.0.len());
    Ok(())
}

/// Checks the sources of the documentation.
fn check_sources(root: &Path) -> Result<Pages> {
    let mut pages = Pages(BTreeMap::new());
    for name in ROOT_PAGES {
        let text = fs::read_to_string(root.join(name)).with_context(|| format!("cannot read {name}"))?;
        pages.0.insert(name.into(), markdown(&text));
    }
    read(root, &root.join("docs"), "md", markdown, &mut pages)?;
    let mut findings = pages.dead(|path| root.join(path).exists());
    findings.extend(pages.unlisted());
    let meetings = fs::read_to_string(root.join(MEETINGS)).with_context(|| format!("cannot read {MEETINGS}"))?;
    findings.extend(missing_tests(&meetings, |of, file, test| has_test(root, of, file, test)));
    findings.extend(source_names::findings(root)?);
    judge("the sources", &findings, &pages)?;
    Ok(pages)
}

/// Copies a file, or a folder with its files.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    let folder = to.parent().context("no folder")?;
    fs::create_dir_all(folder)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Renders the book, and puts the sources to which it links beside it.
fn render(root: &Path, sources: &Pages) -> Result<()> {
    if site().exists() {
        fs::remove_dir_all(site())?;
    }
    let mut book = cargo(["run", "--quiet", "--package", "neap-book", "--"]);
    // The variable overrides `build-dir` of book.toml: CARGO_TARGET_DIR may move the folder.
    book.arg(root).env("MDBOOK_BUILD__BUILD_DIR", site().join("docs")).current_dir(root);
    run(book)?;
    for path in sources.linked_sources() {
        copy(&root.join(&path), &site().join(&path))?;
    }
    Ok(())
}

/// Checks the rendered pages.
fn check_rendered() -> Result<()> {
    let site = site();
    let mut pages = Pages(BTreeMap::new());
    read(&site, &site.join("docs"), "html", html, &mut pages)?;
    if pages.0.is_empty() {
        bail!("docs: the renderer wrote no page into {}", site.display());
    }
    judge("the book", &pages.dead(|path| site.join(path).exists()), &pages)
}

/// Checks the sources, renders the book, and checks its pages.
pub(crate) fn build() -> Result<()> {
    let root = layout::root();
    let sources = check_sources(&root)?;
    render(&root, &sources)?;
    check_rendered()?;
    println!("docs: {}", site().join("docs/index.html").display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(files: &[(&str, &str)]) -> Pages {
        Pages(files.iter().map(|(path, text)| (path.into(), markdown(text))).collect())
    }

    #[test]
    fn dead_links_and_anchors_are_named_with_their_line() {
        let pages = pages(&[
            ("README.md", "# A\n\n[b](docs/b.md#two-words) [c](docs/c.md)\n[up](../x.md) [w](https://a.example/b)\n"),
            ("docs/b.md", "# Two words\n\n[a](../README.md#a) [self](#three) [s](../src/x.c) [t](../src/y.c)\n"),
        ]);
        let found = pages.dead(|path| path == Path::new("src/x.c"));
        let expected = [
            "README.md:3: link to `docs/c.md`",
            "README.md:4: link to `../x.md`",
            "docs/b.md:3: link to `#three`",
            "docs/b.md:3: link to `../src/y.c`",
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        assert!(found.iter().zip(expected).all(|(found, expected)| found.starts_with(expected)), "{found:#?}");
    }

    #[test]
    fn test_that_does_not_exist_is_named() {
        let exists = |of: Option<&str>, file: &str, test: &str| {
            [(None, "asking", "a"), (Some("neap"), "asking", "b")].contains(&(of, file, test))
        };
        let found = missing_tests("`max`\n`asking::a`, `neap/asking::b`\n| x | `asking::b` |\n", exists);
        assert_eq!(found, ["docs/meetings.md:3: test `asking::b` does not exist; correct the name"]);
    }

    #[test]
    fn page_missing_from_summary_is_named() {
        let listed =
            pages(&[(SUMMARY, "- [A](a.md)\n- [B](guide/b.md)\n"), ("docs/a.md", ""), ("docs/guide/b.md", "")]);
        assert_eq!(listed.unlisted(), [""; 0]);
        let missing =
            pages(&[(SUMMARY, "- [A](a.md)\n"), ("docs/a.md", ""), ("docs/guide/b.md", ""), ("README.md", "")]);
        let found = missing.unlisted();
        assert!(found.len() == 1 && found[0].starts_with("docs/guide/b.md: "), "{found:?}");
    }

    #[test]
    fn only_sources_outside_docs_are_copied() {
        let pages =
            pages(&[("docs/a.md", "[b](b.md) [s](../examples/s.c#L1) [r](../README.md)"), ("README.md", "[x](x.c)")]);
        assert_eq!(pages.linked_sources().into_iter().collect::<Vec<_>>(), [PathBuf::from("examples/s.c")]);
    }

    #[test]
    fn addresses_with_a_scheme_are_external() {
        assert!(["https://a.example", "mailto:a@b", "//host/x"].iter().all(|address| is_external(address)));
        assert!(!["a.md", "#a", "a.md#x:y", "../a:b.md"].iter().any(|address| is_external(address)));
    }
}
