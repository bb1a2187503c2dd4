//! librseq for `neap bench percpu`: a shared library in `target/peers/`, from a checkout that the
//! variable `LIBRSEQ` names.
//!
//! No crate carries its sources and Debian 12 has no package. It is compiled with the flags of its
//! own default build; nothing of it is copied into the project. Without the variable it is not
//! built, and an earlier library stays.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::{capture, command};

pub(crate) const NAME: &str = "librseq";
const VARIABLE: &str = "LIBRSEQ";

/// Builds the library if it was `chosen` and its sources are named. Returns its version if the
/// library exists.
pub(crate) fn build(folder: &Path, chosen: bool) -> Result<Option<String>> {
    let (library, stated) = (folder.join("librseq.so"), folder.join("librseq.version"));
    match std::env::var_os(VARIABLE).map(PathBuf::from).filter(|_| chosen) {
        Some(sources) => {
            let version = version(&sources)?;
            println!("{NAME}: building {version}");
            let mut cc = command("cc", "-O2 -g -fPIC -shared -w -D_GNU_SOURCE".split_whitespace());
            for include in ["include", "src"] {
                cc.arg("-I").arg(sources.join(include));
            }
            cc.args(["rseq.c", "rseq-mempool.c", "smp.c"].map(|file| sources.join("src").join(file)));
            cc.arg("-o").arg(&library).args(["-lpthread", "-ldl"]);
            capture(cc)?;
            fs::write(&stated, version)?;
        }
        None if chosen && !library.exists() => {
            println!("{NAME}: left out: no package carries it; name a checkout of its sources by {VARIABLE}=FOLDER");
        }
        None => {}
    }
    Ok(library.exists().then(|| fs::read_to_string(stated).unwrap_or_default()))
}

/// The version that its configure script states.
fn version(sources: &Path) -> Result<String> {
    let script = sources.join("configure.ac");
    let text = fs::read_to_string(&script).with_context(|| format!("{VARIABLE}: {}", script.display()))?;
    let part = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("m4_define([rseq_version_{name}], [")));
        line.and_then(|rest| rest.strip_suffix("])"))
            .with_context(|| format!("no {name} version in {}", script.display()))
    };
    Ok(format!("{}.{}.{}{}", part("major")?, part("minor")?, part("patch")?, part("dev_stage")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_what_the_configure_script_states() {
        let folder = std::env::temp_dir().join(format!("neap-librseq-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let text = "m4_define([rseq_version_major], [0])\nm4_define([rseq_version_minor], [1])\n\
                    m4_define([rseq_version_patch], [7])\nm4_define([rseq_version_dev_stage], [-pre])\n";
        fs::write(folder.join("configure.ac"), text).unwrap();
        assert_eq!(version(&folder).unwrap(), "0.1.7-pre");
        fs::write(folder.join("configure.ac"), "").unwrap();
        assert!(format!("{:#}", version(&folder).unwrap_err()).contains("major"));
        fs::remove_dir_all(folder).unwrap();
    }
}
