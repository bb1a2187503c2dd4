//! `cargo xtask install` and `uninstall`: copies the products of `build` to the places where
//! programs, compilers, debuggers, pkg-config and CMake look for them, and removes them. The tool
//! itself writes its man pages and completions.
//!
//! `--destdir FOLDER` puts a root in front of the prefix, for packages; files contain the prefix
//! only. Both commands need only the right to write there.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::build::{self, MALLCTL_SONAME, MALLOC_SONAME, SONAME};
use crate::layout;
use crate::library::debug_info::{objcopy, split};
use crate::packages::crates::{PRELOADED, SHIPPED, crates};
use crate::packages::manifest::{self, Installation, set_mode};
use crate::packages::places::Places;
use crate::process::{capture, command, need, run};
use crate::target::{MUSL, Target};

/// The installed version.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Treatment of debug information.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DebugInfo {
    /// Debug information goes to separate files.
    Split,
    /// Debug information stays in the programs, for a packager's tools to split.
    Kept,
}

/// `install --prefix FOLDER [--libdir FOLDER] [--debugdir FOLDER] [--destdir FOLDER]`.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let places = Places::parse(arguments)?;
    places.may_write()?;
    build::build()?;
    for file in install(&places, DebugInfo::Split)? {
        println!("{}", file.display());
    }
    if let Some(hint) = hint(&places) {
        println!("{hint}");
    }
    Ok(())
}

/// How the loader finds the installed libraries; nothing for an installation that moves on.
fn hint(places: &Places) -> Option<String> {
    (!places.are_staged()).then(|| {
        let lib = places.prefix.join(&places.libdir);
        let lib = lib.display();
        format!(
            "For programs that link libneap.so: if the loader searches {lib}, run `ldconfig` as root, else set \
             LD_LIBRARY_PATH={lib}"
        )
    })
}

/// `uninstall`, with the arguments of `install`.
pub(crate) fn uninstall(arguments: &[String]) -> Result<()> {
    for file in manifest::uninstall(&Places::parse(arguments)?)? {
        println!("{}", file.display());
    }
    Ok(())
}

/// Installs the built files, and returns their paths.
pub(crate) fn install(places: &Places, debug_info: DebugInfo) -> Result<Vec<PathBuf>> {
    need("objcopy", &["binutils"])?;
    whole(places, |installation| put_all(installation, debug_info))
}

/// Installs the preload library for musl alone, with `neap.h` and documents.
pub(crate) fn library_for_musl(places: &Places) -> Result<()> {
    need("objcopy", &["binutils"])?;
    let files = whole(places, |installation| {
        put_library(installation, DebugInfo::Split, &Target::Musl.library(), "libneap_malloc.so", MALLOC_SONAME)?;
        installation.copy(&layout::header(), Path::new("include/neap.h"), 0o644)?;
        put_documents(installation, &crates(PRELOADED, Some(MUSL))?)
    });
    files.map(|_| ())
}

/// Writes an installation with its manifest, also if `put` fails half-way: such a one can be
/// removed, too. Returns the paths of the files.
fn whole(places: &Places, put: impl FnOnce(&mut Installation) -> Result<()>) -> Result<Vec<PathBuf>> {
    let mut installation = Installation::begin(places)?;
    let outcome = put(&mut installation);
    let files = installation.finish()?;
    outcome.map(|()| files)
}

/// Writes every file.
fn put_all(installation: &mut Installation, debug_info: DebugInfo) -> Result<()> {
    let places = installation.places;
    let lib = places.libdir.as_path();
    let [shared, archive] = layout::c_libraries();
    put_code(installation, debug_info, &layout::tool(), Path::new("bin/neap"))?;
    for (from, name, soname) in [
        (shared, "libneap.so", SONAME),
        (layout::library(), "libneap_malloc.so", MALLOC_SONAME),
        (layout::mallctl(), "libneap_mallctl.so", MALLCTL_SONAME),
    ] {
        put_library(installation, debug_info, &from, name, soname)?;
    }
    for (archive, name) in [(archive, "libneap.a"), (layout::malloc_archive()?, "libneap_malloc.a")] {
        match debug_info {
            DebugInfo::Split => {
                let file = installation.make_room(&lib.join(name))?;
                objcopy(&["--strip-debug"], &archive, &file)?;
                set_mode(&file, 0o644)?;
            }
            DebugInfo::Kept => installation.copy(&archive, &lib.join(name), 0o644)?,
        }
    }
    installation.copy(&layout::header(), Path::new("include/neap.h"), 0o644)?;
    for (template, folder) in
        [("neap.pc", "pkgconfig"), ("neap-config.cmake", "cmake/neap"), ("neap-config-version.cmake", "cmake/neap")]
    {
        let text = fs::read_to_string(layout::root().join("crates/neap-c").join(format!("{template}.in")))?;
        installation.write(&filled(&text, places), &lib.join(folder).join(template))?;
    }
    put_documents(installation, &crates(SHIPPED, layout::other_target().as_deref())?)?;
    let pages = layout::target().join("pages");
    if pages.exists() {
        fs::remove_dir_all(&pages)?;
    }
    run(command(&layout::host_tool().to_string_lossy(), ["generate", &pages.to_string_lossy(), &date()?]))?;
    copy_all(installation, &pages, Path::new(""))
}

/// Installs a shared library, and the links to it.
fn put_library(
    installation: &mut Installation,
    debug_info: DebugInfo,
    from: &Path,
    name: &str,
    soname: &str,
) -> Result<()> {
    let lib = installation.places.libdir.as_path();
    let file = format!("{name}.{VERSION}");
    put_code(installation, debug_info, from, &lib.join(&file))?;
    installation.link(&file, &lib.join(soname))?;
    installation.link(soname, &lib.join(name))
}

/// Installs licences, the list of changes, and the list of other projects' crates.
fn put_documents(installation: &mut Installation, crates: &str) -> Result<()> {
    let folder = Path::new("share/doc/neap");
    for name in ["LICENSE-APACHE", "LICENSE-MIT", "CHANGELOG.md"] {
        installation.copy(&layout::root().join(name), &folder.join(name), 0o644)?;
    }
    installation.write(crates, &folder.join("rust-crates"))
}

/// Installs a program or a shared library.
fn put_code(installation: &mut Installation, debug_info: DebugInfo, from: &Path, place: &Path) -> Result<()> {
    match debug_info {
        DebugInfo::Split => split(installation, from, place),
        DebugInfo::Kept => installation.copy(from, place, 0o755),
    }
}

/// Installs all files below a folder, whose paths from there are those from the prefix.
fn copy_all(installation: &mut Installation, from: &Path, place: &Path) -> Result<()> {
    for entry in fs::read_dir(from.join(place))? {
        let place = place.join(entry?.file_name());
        if from.join(&place).is_dir() {
            copy_all(installation, from, &place)?;
        } else {
            installation.copy(&from.join(&place), &place, 0o644)?;
        }
    }
    Ok(())
}

/// The day of `SOURCE_DATE_EPOCH` or of the commit, or today without both.
fn date() -> Result<String> {
    if let Ok(seconds) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(capture(command("date", ["-u", "+%F", &format!("--date=@{seconds}")]))?.trim().to_string());
    }
    let commit = command("git", ["-C", &layout::root().to_string_lossy(), "log", "-1", "--format=%cs"]);
    let day = capture(commit).or_else(|_| capture(command("date", ["-u", "+%F"])))?;
    Ok(day.trim().to_string())
}

/// A template with the names between `@` replaced.
fn filled(template: &str, places: &Places) -> String {
    let lib = places.libdir.to_string_lossy();
    // From lib/cmake/neap to the prefix.
    let up = vec![".."; places.libdir.components().count() + 2].join("/");
    let names = [
        ("@prefix@", &*places.prefix.to_string_lossy()),
        ("@libdir@", &*lib),
        ("@up@", &*up),
        ("@version@", VERSION),
        ("@soname@", SONAME),
    ];
    names.iter().fold(template.to_string(), |text, (name, value)| text.replace(name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_installation_in_its_place_has_a_hint_for_the_loader() {
        let places = |line: &str| Places::parse(&line.split(' ').map(str::to_string).collect::<Vec<_>>()).unwrap();
        let said = hint(&places("--prefix /usr/local --libdir lib64")).unwrap();
        assert!(said.contains("if the loader searches /usr/local/lib64, run `ldconfig`"), "{said}");
        assert!(said.ends_with("else set LD_LIBRARY_PATH=/usr/local/lib64"), "{said}");
        assert_eq!(hint(&places("--prefix /usr --destdir /stage")), None);
    }

    #[test]
    fn installation_that_fails_half_way_can_be_removed() {
        let prefix = std::env::temp_dir().join(format!("neap-install-{}", std::process::id()));
        let places = Places::below(&prefix);
        let outcome = whole(&places, |installation| {
            installation.write("", Path::new("bin/neap"))?;
            anyhow::bail!("no space")
        });
        assert_eq!(outcome.unwrap_err().to_string(), "no space");
        manifest::uninstall(&places).unwrap();
        assert!(!prefix.exists());
    }

    #[test]
    fn template_leads_from_its_folder_to_the_prefix() {
        let places = Places::parse(&["--prefix", "/p", "--libdir", "lib/arch"].map(str::to_string)).unwrap();
        assert_eq!(filled("@prefix@ @libdir@ @up@ @soname@", &places), "/p lib/arch ../../../.. libneap.so.0");
    }
}
