//! Checks of an installation beyond its libraries: debug information, man pages, completions, the
//! command's own search for its library, and that `uninstall` leaves nothing.

use core::time::Duration;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::library::debug_info::{build_id, file_for};
use crate::packages::install::VERSION;
use crate::packages::manifest;
use crate::packages::places::Places;
use crate::process::{capture, command, observe, which};
use crate::report::Report;

/// Completions, and the shells that read them.
const COMPLETIONS: [(&str, &[&str], &str); 3] = [
    // The options in force are those of strict scripts.
    ("bash", &["-euc", "source \"$0\" && complete -p neap"], "share/bash-completion/completions/neap"),
    ("zsh", &["-n"], "share/zsh/site-functions/_neap"),
    ("fish", &["--no-execute"], "share/fish/vendor_completions.d/neap.fish"),
];

/// Runs the checks, counted in `report`, and removes the installation.
pub(crate) fn into(report: &mut Report, places: &Places) {
    let libraries = ["libneap", "libneap_malloc", "libneap_mallctl"].map(|name| format!("lib/{name}.so.{VERSION}"));
    for file in ["bin/neap".into()].into_iter().chain(libraries) {
        report.check(&format!("debug information of {file}"), debug_information(places, &file));
    }
    if which("man").is_some() {
        report.check("man pages", pages(&places.prefix));
    } else {
        report.skip("man pages", "install it with `apt-get install man-db`");
    }
    for (shell, arguments, file) in COMPLETIONS {
        let name = format!("completions of {shell}");
        if which(shell).is_none() {
            report.skip(&name, &format!("install it with `apt-get install {shell}`"));
            continue;
        }
        let mut line = command(shell, arguments);
        line.arg(places.prefix.join(file));
        report.check(&name, capture(line).map(|_| ()));
    }
    report.check("neap run", run(&places.prefix));
    report.check("uninstall leaves nothing", uninstalled(places));
}

/// Checks that the installed code and its debug information lie in two files that belong together.
fn debug_information(places: &Places, file: &str) -> Result<()> {
    let code = places.prefix.join(file);
    let id = build_id(&code)?;
    let debug = places.prefix.join(&places.debugdir).join(file_for(&id));
    let sections = |file: &Path| capture(command("readelf", ["-SW", &file.to_string_lossy()]));
    let (stripped, split) = (sections(&code)?, sections(&debug)?);
    ensure!(!stripped.contains(".debug_line"), "debug information is still in {}", code.display());
    ensure!(stripped.contains(".gnu_debuglink"), "{} does not name its debug information", code.display());
    ensure!(split.contains(".debug_line"), "{} has no debug information", debug.display());
    ensure!(build_id(&debug)? == id, "{} is of another build", debug.display());
    Ok(())
}

/// Formats every man page: one for the command and one for each of its subcommands.
fn pages(prefix: &Path) -> Result<()> {
    let folder = prefix.join("share/man/man1");
    let help = capture(command(&prefix.join("bin/neap").to_string_lossy(), ["--help"]))?;
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = commands.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    let mut files: Vec<PathBuf> = names.map(|name| folder.join(format!("neap-{name}.1"))).collect();
    ensure!(!files.is_empty(), "`neap --help` lists no command");
    for file in &files {
        ensure!(file.exists(), "{} is not there", file.display());
    }
    files = fs::read_dir(&folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    for file in files {
        let mut line = command("man", ["--warnings", "-E", "UTF-8", "-l", "-Tutf8"]);
        line.arg(&file).env("LC_ALL", "C.UTF-8");
        let found = observe(line, Duration::from_secs(60))?;
        ensure!(found.success() && found.stderr.is_empty(), "{}: {}", file.display(), found.summary());
        ensure!(!found.stdout.is_empty(), "{} is empty", file.display());
    }
    Ok(())
}

/// Runs a program by the installed command, which has to find the installed library.
pub(crate) fn run(prefix: &Path) -> Result<()> {
    let script = "grep -o '[^/]*libneap_malloc[^ ]*' /proc/self/maps | head -1";
    let said = capture(command(&prefix.join("bin/neap").to_string_lossy(), ["run", "--", "sh", "-c", script]))?;
    ensure!(said.trim() == format!("libneap_malloc.so.{VERSION}"), "the program has `{}`", said.trim());
    Ok(())
}

/// Uninstalls, and checks that nothing is left.
fn uninstalled(places: &Places) -> Result<()> {
    manifest::uninstall(places)?;
    ensure!(!places.prefix.exists(), "something is left in {}", places.prefix.display());
    Ok(())
}
