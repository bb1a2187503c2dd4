//! `cargo xtask fuzz`: libFuzzer chooses inputs for the readers of the command `neap`.
//!
//! The unit tests of neap-cli are built with the engine (the crate libfuzzer-sys) and with counters
//! of all branches, in a target folder of their own. `fuzz_targets.rs` of neap-cli has the targets.
//! A run begins with the committed inputs in `crates/neap-cli/tests/corpus`. Inputs that reach new
//! code are kept in `target/fuzz/corpus` for the next run. An input that fails is kept there as
//! `crash-...`: copy it to the committed inputs, which the unit tests give to the targets.
//! `ci` has no such run, but checks that this code compiles ([`check`]), and has tests with random
//! mutations of the same data. `docs/decisions-allocator.md` says why there is no cargo-fuzz.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{cargo, command, need, run};
use crate::{layout, test_programs};

const TARGETS: [&str; 5] = ["page", "report", "samples", "profile", "trace"];

/// Inputs of each target, unless another number is given.
const INPUTS: &str = "1000000";

/// A counter for each branch, and the operands of comparisons.
const COUNTERS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// `fuzz [--inputs N] [TARGET...]`.
pub(crate) fn command_line(arguments: &[String]) -> Result<()> {
    let (inputs, names) = match arguments {
        [option, inputs, names @ ..] if option == "--inputs" => {
            inputs.parse::<u64>().with_context(|| format!("--inputs needs a number, and got `{inputs}`"))?;
            (inputs.as_str(), names)
        }
        [option] if option == "--inputs" => bail!("--inputs needs a number"),
        names => (INPUTS, names),
    };
    if let Some(unknown) = names.iter().find(|name| !TARGETS.contains(&name.as_str())) {
        bail!("there is no target `{unknown}`; the targets are {}", TARGETS.join(", "));
    }
    need("g++", &["g++"])?;
    let program = build()?;
    for target in TARGETS.iter().filter(|target| names.is_empty() || names.iter().any(|name| name == *target)) {
        let corpus = layout::target().join("fuzz/corpus").join(target);
        fs::create_dir_all(&corpus)?;
        println!("fuzz: {inputs} inputs of {target}, corpus in {}", corpus.display());
        let words = format!(
            "-runs={inputs} -max_len=16384 -timeout=10 -rss_limit_mb=512 -print_final_stats=1 -print_funcs=0 {} {}",
            corpus.display(),
            layout::root().join("crates/neap-cli/tests/corpus").join(target).display()
        );
        let mut fuzz =
            command(&program.to_string_lossy(), ["--exact", "fuzz_engine::fuzz", "--ignored", "--nocapture"]);
        fuzz.current_dir(&corpus).env("NEAP_FUZZ", target).env("NEAP_FUZZ_WORDS", words);
        run(fuzz)?;
    }
    Ok(())
}

/// The target of the builds here. With a target, flags do not apply to build scripts and macros.
fn target() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// Checks that the code with `cfg(fuzzing)` compiles. Builds and links nothing, so it needs neither
/// the engine's C++ nor its counters.
pub(crate) fn check() -> Result<()> {
    let mut check = cargo(["check", "--package", "neap-cli", "--bin", "neap", "--profile", "test"]);
    check.args(["--target", &target()]).current_dir(layout::root());
    // The build script of libfuzzer-sys compiles the engine unless this names a library.
    check.env("RUSTFLAGS", "--cfg fuzzing -D warnings").env("CUSTOM_LIBFUZZER_PATH", "/libfuzzer.a");
    run(check)
}

/// Builds the unit tests of the command.
fn build() -> Result<PathBuf> {
    let mut test = cargo(["test", "--package", "neap-cli", "--bin", "neap", "--target", &target()]);
    test.current_dir(layout::root());
    test.env("CARGO_TARGET_DIR", layout::target().join("fuzz")).env("RUSTFLAGS", COUNTERS);
    // The code is optimised, since counters in other code cost more than the code itself.
    for package in ["TEST", "DEV"] {
        test.env(format!("CARGO_PROFILE_{package}_OPT_LEVEL"), "1");
    }
    let programs = test_programs::build(test)?;
    ensure!(programs.len() == 1, "cargo built {} programs", programs.len());
    Ok(programs[0].file.clone())
}
