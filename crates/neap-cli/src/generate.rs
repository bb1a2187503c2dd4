//! `neap generate`: man pages and shell completions, made from the arguments that the command
//! itself parses. `cargo xtask install` runs it; `neap --help` does not list it.
//!
//! The paths of the files are those of an installation, below its prefix.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use roff::{Roff, roman};

/// Write man pages and completions for bash, zsh and fish.
#[derive(Args)]
pub(crate) struct GenerateOptions {
    /// Folder for `share/man/man1` and the folders of each shell
    folder: PathBuf,
    /// Date in the footer of each man page, such as 2026-11-27
    date: String,
}

/// Files of the completions, by the names that the shells look for.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "share/bash-completion/completions/neap"),
    (Shell::Zsh, "share/zsh/site-functions/_neap"),
    (Shell::Fish, "share/fish/vendor_completions.d/neap.fish"),
];

/// First line of a section of examples.
const EXAMPLES: &str = "Examples:";

/// Writes all files.
pub(crate) fn main(options: &GenerateOptions, command: &Command) -> Result<ExitCode> {
    let mut command = visible(command);
    for (shell, file) in COMPLETIONS {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command.clone(), "neap", &mut text);
        write(&options.folder.join(file), &text)?;
    }
    command = command.disable_help_subcommand(true);
    command.build();
    write_pages(&command, &options.folder.join("share/man/man1"), &options.date)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a file and the folders that it lies in.
fn write(file: &Path, text: &[u8]) -> Result<()> {
    fs::create_dir_all(file.parent().context("a file lies in a folder")?)?;
    fs::write(file, text).with_context(|| file.display().to_string())
}

/// Writes the man page of a command and those of its subcommands.
fn write_pages(command: &Command, folder: &Path, date: &str) -> Result<()> {
    // clap's own section for this text joins its lines.
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let page = Man::new(command.clone().after_help(None)).date(date).manual("neap");
    let page = page.source(format!("neap {}", env!("CARGO_PKG_VERSION")));
    let mut bytes = Vec::new();
    page.render(&mut bytes)?;
    notes(&text).to_writer(&mut bytes)?;
    write(&folder.join(page.get_filename()), &bytes)?;
    command.get_subcommands().try_for_each(|subcommand| write_pages(subcommand, folder, date))
}

/// Returns the section for the end of a help text. Fills its paragraphs, except those with indented
/// lines.
fn notes(text: &str) -> Roff {
    let mut roff = Roff::new();
    if text.trim().is_empty() {
        return roff;
    }
    let (heading, text) = match text.strip_prefix(EXAMPLES) {
        Some(rest) => ("EXAMPLES", rest.trim_start_matches('\n')),
        None => ("NOTES", text),
    };
    roff.control("SH", [heading]);
    for (at, paragraph) in text.split("\n\n").enumerate() {
        let as_it_is = paragraph.lines().any(|line| line.starts_with(' '));
        if at > 0 {
            roff.control("PP", []);
        }
        if as_it_is {
            roff.control("nf", []);
        }
        for line in paragraph.lines() {
            roff.text([roman(line)]);
        }
        if as_it_is {
            roff.control("fi", []);
        }
    }
    roff
}

/// Returns the command without its hidden subcommands, which shells would otherwise offer.
fn visible(command: &Command) -> Command {
    let mut visible = Command::new("neap").subcommand_required(true).version(env!("CARGO_PKG_VERSION"));
    visible = visible
        .about(command.get_about().cloned().unwrap_or_default())
        .after_help(command.get_after_help().cloned().unwrap_or_default());
    visible.subcommands(command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()).cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_lines_and_prose_does_not() {
        let text = "Examples:\n  neap a\n  neap -b\n\nSome words\nof prose.\n";
        let page = notes(text).to_roff();
        assert_eq!(page.matches(".nf").count(), 1, "{page}");
        let (examples, prose) = page.split_once(".fi").unwrap();
        assert!(examples.contains(".SH EXAMPLES\n.nf\n  neap a\n  neap \\-b\n"), "{page}");
        assert!(prose.contains(".PP\nSome words\nof prose.\n") && !page.contains("Examples:"), "{page}");
        assert_eq!(notes("").to_roff(), "");
    }

    #[test]
    fn hidden_subcommands_have_no_page() {
        let sub = |name: &'static str| Command::new(name);
        let command = Command::new("neap").subcommands([sub("seen"), sub("unseen").hide(true)]);
        let names: Vec<String> = visible(&command).get_subcommands().map(|sub| sub.get_name().to_string()).collect();
        assert_eq!(names, ["seen"]);
    }
}
