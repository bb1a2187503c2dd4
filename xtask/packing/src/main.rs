//! Packs a release: archives, checksums and the bill of materials. `cargo xtask release` runs it.
//!
//! Every output depends on its inputs alone: on no clock, user, folder or order of a directory. A
//! crate of its own, so that xtask is built without the libraries that only a release needs.

mod archive;
mod bill;
mod sums;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage: neap-packing COMMAND

  archive FOLDER NAME SECONDS FILE   FOLDER as FILE, a .tar.gz, below NAME; all times are SECONDS since 1970
  bill LOCK TARGET SECONDS FILE CRATE...
                                     the CycloneDX bill of materials of the products of crates; reads the output of
                                     `cargo metadata`
  sums FOLDER                        FOLDER/SHA256SUMS
";

fn dispatch(arguments: &[&str]) -> Result<()> {
    match arguments {
        ["archive", folder, name, seconds, file] => {
            archive::write(Path::new(folder), name, seconds.parse()?, Path::new(file))
        }
        ["bill", lock, target, seconds, file, shipped @ ..] => {
            let metadata = std::io::read_to_string(std::io::stdin())?;
            bill::write(&metadata, Path::new(lock), shipped, target, seconds, Path::new(file))
        }
        ["sums", folder] => sums::write(Path::new(folder)),
        _ => bail!("{USAGE}"),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("neap-packing: {error:#}");
            ExitCode::FAILURE
        }
    }
}
