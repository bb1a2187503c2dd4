//! Programs of C++ and C with heaps of their own shapes: a solver, a renderer of pages and a
//! key-value store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::ordinary::scattered;
use super::scratch::Scratch;
use super::{LIMIT, Method, Output, Program, tool};
use crate::process;
use crate::variant::Variant;
use crate::work::Outcome;

pub(super) fn programs() -> Vec<Program> {
    let through = Method::Through;
    vec![
        Program { name: "z3", needs: &["z3"], prepare: prepare_z3, run: through(z3) },
        Program { name: "ghostscript", needs: &["gs"], prepare: prepare_ghostscript, run: through(ghostscript) },
        Program { name: "db_bench", needs: &["db_bench"], prepare: |_| Ok(()), run: Method::Own(db_bench) },
    ]
}

/// Writes the solver's input: products of pairs of 14-bit numbers. A remainder ties each pair to
/// the previous one.
fn prepare_z3(scratch: &Scratch) -> Result<()> {
    let pairs = scratch.amount(60);
    scratch.file("products.smt2", |file| {
        writeln!(file, "(set-logic QF_BV)")?;
        for pair in 0..pairs {
            let product = (scattered(pair + 1) % (1 << 14)) | 1;
            writeln!(
                file,
                "(declare-const a{pair} (_ BitVec 14))
                 (declare-const b{pair} (_ BitVec 14))
                 (assert (= (bvmul a{pair} b{pair}) (_ bv{product} 14)))
                 (assert (and (bvugt a{pair} (_ bv256 14)) (bvugt b{pair} (_ bv512 14))))"
            )?;
            if let Some(last) = pair.checked_sub(1) {
                writeln!(file, "(assert (= (bvurem a{pair} (_ bv7 14)) (bvurem b{last} (_ bv7 14))))")?;
            }
        }
        writeln!(file, "(check-sat)")
    })
}

fn z3(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "z3")?;
    command.arg("products.smt2");
    Ok(command)
}

/// Pages of text, curves and an image.
const PAGES: &str = "\
/Helvetica findfont 9 scalefont setfont
1 1 pages {
  /page exch def
  0 1 60 {
    /row exch def
    36 760 row 12 mul sub moveto
    page 100 mul row add 20 string cvs show ( line of text with the number ) show
    row page mul 7919 mul 4096 mod 20 string cvs show
  } for
  0 1 400 {
    /n exch def
    newpath n 37 mul 595 mod n 91 mul 842 mod moveto
    n 53 mul 595 mod n 17 mul 842 mod n 71 mul 595 mod n 29 mul 842 mod n 97 mul 595 mod page n mul 842 mod curveto
    n 10 mod 10 div n 7 mod 7 div n 3 mod 3 div setrgbcolor n 5 mod 0.2 add setlinewidth stroke
  } for
  /dots 256 string def
  0 1 255 { dots exch dup page mul 256 mod put } for
  gsave 300 100 translate 200 200 scale 64 64 8 [64 0 0 -64 0 64] { dots } image grestore
  showpage
} for
";

fn prepare_ghostscript(scratch: &Scratch) -> Result<()> {
    let pages = scratch.amount(24);
    scratch.file("pages.ps", |file| write!(file, "%!PS\n/pages {pages} def\n{PAGES}"))
}

fn ghostscript(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "gs")?;
    command.args(["-q", "-dSAFER", "-dBATCH", "-dNOPAUSE", "-sDEVICE=ppmraw", "-r150", "-sOutputFile=-", "pages.ps"]);
    command.env_remove("GS_OPTIONS");
    Ok(command)
}

/// Folder of a database in memory (tmpfs), removed with this value.
struct Database(PathBuf);

impl Database {
    fn new() -> Result<Database> {
        let folder = Path::new("/dev/shm").join(format!("neap-bench-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Database(folder))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("neap bench programs: cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Runs RocksDB's benchmark without its write-ahead log. The benchmark prints times, so only the
/// number of keys that it found is compared between allocators.
fn db_bench(scratch: &Scratch, variant: &Variant) -> Result<Outcome> {
    let database = Database::new()?;
    let mut command = tool(scratch, "db_bench")?;
    command.args(["--benchmarks=fillrandom,readrandom", "--disable_wal=1", "--seed=1"]);
    command.arg(format!("--num={}", scratch.amount(400_000))).arg(format!("--db={}", database.0.display()));
    variant.apply(&mut command);
    command.stderr(scratch.errors()?);
    let mut text = Vec::new();
    let finished = process::run(command, LIMIT, |bytes| text.extend_from_slice(bytes))?;
    if !finished.status.success() {
        scratch.show_errors();
    }
    let mut output = Output::default();
    output.add(keys_found(&String::from_utf8_lossy(&text)).unwrap_or_default().as_bytes());
    Ok(output.outcome(&finished))
}

/// Returns the `N of M` that the benchmark of random reads prints at the end of its line.
fn keys_found(text: &str) -> Option<&str> {
    let (before, _) = text.rsplit_once(" found)")?;
    Some(before.rsplit_once('(')?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_found_leaves_times_out() {
        let text = "Keys: 16 bytes (8 more)\nfillrandom : 17.8 micros/op 56262 ops/sec; 6.2 MB/s\n\
                    readrandom : 22.1 micros/op 45289 ops/sec; 3.2 MB/s (253472 of 400000 found)\n\n";
        assert_eq!(keys_found(text), Some("253472 of 400000"));
        assert_eq!(keys_found("fillrandom : 17.8 micros/op"), None);
    }

    #[test]
    fn database_goes_with_its_contents() {
        let Ok(database) = Database::new() else { return };
        let folder = database.0.clone();
        fs::write(folder.join("file"), "text").unwrap();
        drop(database);
        assert!(!folder.exists());
    }
}
