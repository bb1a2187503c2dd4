//! The command from outside: help, errors, and a benchmark that has only the C library to measure.
//!
//! Method: the executable is linked into an empty folder, so it finds neither neap's library nor
//! any peer. Every test only starts processes; none depends on their speed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The executable alone in `bin`, in a folder that is removed at the end.
struct Installed(PathBuf);

impl Installed {
    fn new(name: &str) -> Installed {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("neap-cli-{name}-{}", std::process::id()));
        fs::create_dir_all(folder.join("bin")).unwrap();
        // A link and not a copy: a file that was just written cannot be executed while another
        // test's child has it open.
        fs::hard_link(env!("CARGO_BIN_EXE_neap"), folder.join("bin/neap")).unwrap();
        Installed(folder.canonicalize().unwrap())
    }

    fn neap(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.0.join("bin/neap"));
        command.args(arguments).env_remove("LD_PRELOAD").env_remove("NEAP");
        command.output().unwrap()
    }

    /// Puts a preload library in place that changes nothing: the C library's mathematics, under
    /// neap's name.
    fn with_library(&self, folder: &str) -> PathBuf {
        let harmless = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6", "/usr/lib64/libm.so.6"];
        let harmless = harmless.into_iter().find(|path| Path::new(path).is_file()).expect("no libm.so.6");
        let library = self.0.join(folder).join("libneap_malloc.so");
        fs::create_dir_all(library.parent().unwrap()).unwrap();
        fs::copy(harmless, &library).unwrap();
        library
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn command_help_has_examples_and_hides_workloads() {
    let neap = Installed::new("help");
    let commands: [&[&str]; 8] = [
        &["--help"],
        &["run", "--help"],
        &["options", "--help"],
        &["top", "--help"],
        &["drain", "--help"],
        &["demo", "--help"],
        &["bench", "--help"],
        &["lab", "--help"],
    ];
    for command in commands {
        let output = neap.neap(command);
        assert!(output.status.success(), "{command:?}");
        assert!(text(&output.stdout).contains("Examples:\n  neap "), "{command:?}");
    }
    let top = text(&neap.neap(&["--help"]).stdout);
    for command in ["run", "options", "top", "drain", "demo", "bench", "lab"] {
        assert!(top.contains(&format!("\n  {command} ")), "{command} is not in the help:\n{top}");
    }
    assert!(!top.contains("\n  work "), "{top}");
}

#[test]
fn run_without_the_library_says_where_it_looked() {
    let neap = Installed::new("no-library");
    let output = neap.neap(&["run", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    let message = text(&output.stderr);
    for place in ["bin", "lib", "lib/x86_64-linux-gnu"] {
        let path = neap.0.join(place).join("libneap_malloc.so");
        assert!(message.contains(path.to_str().unwrap()), "{message}");
    }
    assert!(output.stdout.is_empty());
}

#[test]
fn run_without_a_command_is_a_usage_error() {
    let output = Installed::new("no-command").neap(&["run"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("COMMAND"), "{}", text(&output.stderr));
}

#[test]
fn run_names_a_command_it_cannot_run() {
    let neap = Installed::new("bad-command");
    neap.with_library("bin");
    let output = neap.neap(&["run", "--", "no-such-program-anywhere"]);
    assert_eq!(output.status.code(), Some(127));
    assert!(text(&output.stderr).contains("`no-such-program-anywhere`"));
    let file = neap.0.join("not-executable");
    fs::write(&file, "text").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let output = neap.neap(&["run", "--", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(126));
    assert!(text(&output.stderr).contains(file.to_str().unwrap()));
}

#[test]
fn run_becomes_the_program_with_both_variables_joined() {
    let neap = Installed::new("joined");
    let library = neap.with_library("lib");
    let script = "echo \"$LD_PRELOAD|$NEAP|$1\"; exit 7";
    let output = Command::new(neap.0.join("bin/neap"))
        .args(["run", "--neap", "rseq:off", "--", "sh", "-c", script, "sh", "--neap"])
        .env("LD_PRELOAD", "libm.so.6")
        .env("NEAP", "background:off")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7));
    let expected = format!("{}:libm.so.6|limit:auto,background:off,rseq:off|--neap\n", library.display());
    assert_eq!(text(&output.stdout), expected, "{}", text(&output.stderr));
}

#[test]
fn run_passes_a_limit_with_its_mark_and_reserve() {
    let neap = Installed::new("limits");
    neap.with_library("lib");
    let run = |high| {
        let limits = ["run", "--limit", "512M", "--high", high, "--reserve", "32M", "--", "sh", "-c", "echo \"$NEAP\""];
        Command::new(neap.0.join("bin/neap")).args(limits).env_remove("NEAP").output().unwrap()
    };
    let output = run("90%");
    assert_eq!(text(&output.stdout), "limit:auto,limit:512M,high:90%,reserve:32M\n", "{}", text(&output.stderr));
    let told = Command::new(neap.0.join("bin/neap")).args(["run", "-v", "--", "true"]).env("NEAP", "stat:off").output();
    let told = text(&told.unwrap().stderr);
    assert!(told.contains("libneap_malloc.so\nneap: NEAP=limit:auto,stat:off\n"), "{told}");
    assert!(told.contains("\nLimit: "), "{told}");
    let output = run("auto");
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("high:auto"), "{}", text(&output.stderr));
}

#[test]
fn run_takes_the_library_that_is_named_and_no_other_file() {
    let neap = Installed::new("named");
    let library = neap.with_library("elsewhere");
    let run =
        |file: &Path| neap.neap(&["run", "--library", file.to_str().unwrap(), "--", "sh", "-c", "echo $LD_PRELOAD"]);
    assert_eq!(text(&run(&library).stdout), format!("{}\n", library.display()));
    fs::write(neap.0.join("text"), "words").unwrap();
    for (file, said) in [("text", "not a shared library"), ("none", "No such file")] {
        let output = run(&neap.0.join(file));
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(125), String::new()));
        assert!(text(&output.stderr).contains(said), "{}", text(&output.stderr));
    }
}

#[test]
fn run_says_that_a_static_program_cannot_be_preloaded() {
    let neap = Installed::new("static");
    neap.with_library("bin");
    // A program of one segment, without an interpreter.
    let mut program = b"\x7fELF\x02\x01\x01".to_vec();
    program.resize(64 + 56, 0);
    (program[16], program[18], program[32], program[54], program[56], program[64]) = (2, 62, 64, 56, 1, 1);
    let file = neap.0.join("program");
    fs::write(&file, program).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    let script = neap.0.join("script");
    fs::write(&script, format!("#!{}\n", file.display())).unwrap();
    for command in [&file, &script] {
        let output = neap.neap(&["run", "--", command.to_str().unwrap()]);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{message}");
        assert!(message.contains(&format!("{} is statically linked", file.display())), "{message}");
        assert!(message.contains("libneap_malloc.a"), "no remedy: {message}");
    }
    // The loader has no interpreter either, and preloads.
    let loader = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
    let loader = loader.into_iter().find(|path| Path::new(path).is_file()).expect("no loader");
    let output = neap.neap(&["run", "--", loader, "--version"]);
    assert_ne!(output.status.code(), Some(125), "{}", text(&output.stderr));
}

#[test]
fn reader_that_closes_the_pipe_ends_every_command_quietly() {
    let neap = Installed::new("pipe");
    for arguments in
        [&["--help"][..], &["options"], &["options", "--json"], &["lab", "show", "bursts 3 s apart", "--quick"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(neap.0.join("bin/neap"));
        let output = command.args(arguments).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        drop(command);
        let output = output.wait_with_output().unwrap();
        let (signal, said) = (output.status.signal(), text(&output.stderr));
        assert!(signal == Some(libc::SIGPIPE) && !said.contains("panicked"), "{arguments:?}: {signal:?}, {said}");
    }
}

#[test]
fn run_hands_on_the_signal_state_that_it_was_started_with() {
    let neap = Installed::new("signals");
    neap.with_library("bin");
    let bits = |disposition, blocked| {
        let mut command = Command::new(neap.0.join("bin/neap"));
        command.args(["run", "--", "grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]);
        // SAFETY: system calls alone between fork and exec.
        unsafe {
            command.pre_exec(move || {
                let mut set: libc::sigset_t = core::mem::zeroed();
                libc::sigaddset(&raw mut set, blocked);
                libc::sigprocmask(libc::SIG_SETMASK, &raw const set, core::ptr::null_mut());
                libc::signal(libc::SIGPIPE, disposition);
                Ok(())
            })
        };
        let output = text(&command.output().unwrap().stdout);
        let field = |name: &str| {
            let value = output.lines().find_map(|line| line.strip_prefix(name)).expect("a field of the status");
            u64::from_str_radix(value.trim(), 16).unwrap()
        };
        (field("SigIgn:") & 1 << (libc::SIGPIPE - 1) != 0, field("SigBlk:"))
    };
    assert_eq!(bits(libc::SIG_IGN, libc::SIGUSR1), (true, 1 << (libc::SIGUSR1 - 1)));
    assert_eq!(bits(libc::SIG_DFL, libc::SIGUSR2), (false, 1 << (libc::SIGUSR2 - 1)));
}

#[test]
fn demo_without_the_library_fails_plainly() {
    let output = Installed::new("demo").neap(&["demo"]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("libneap_malloc.so"));
    assert!(output.stdout.is_empty());
}

#[test]
fn bench_with_glibc_alone_reports_no_figures() {
    let neap = Installed::new("bench");
    let output = neap.neap(&["bench", "pair", "--quick", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    assert_eq!(stdout.lines().count(), 1);
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["bench"], "pair");
    assert_eq!(report["figures"], serde_json::json!({}), "figures need neap and a peer");
    let missing: Vec<&str> = report["missing"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    for name in ["neap", "neap-no-rseq", "jemalloc", "mimalloc2", "mimalloc3", "snmalloc", "tcmalloc"] {
        assert!(missing.contains(&name), "{name} is not in {missing:?}");
        assert!(text(&output.stderr).contains(&format!("without {name}: ")));
    }
    for workload in ["pair", "batch", "batch-fifo", "mixed", "threads"] {
        let results = &report["variants"]["glibc"][workload];
        assert_eq!(results["raw"].as_array().unwrap().len(), 2, "{workload}");
        let value = |name: &str| results[name].as_f64().unwrap();
        assert!(0.0 < value("min") && value("min") <= value("median") && value("median") <= value("max"));
        assert!(results["raw"][0]["malloc_from"].as_str().unwrap().contains("libc"), "{workload}");
    }
    for fact in ["cpus", "model", "kernel", "memory", "thp", "glibc"] {
        assert!(!report["machine"][fact].is_null(), "{fact}");
    }
    assert_eq!(report["versions"]["neap"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn bench_of_internal_parts_reports_figures_without_libraries() {
    let neap = Installed::new("parts");
    for (bench, figures) in [
        ("page-fault", &["zone_lock_ratio", "throughput_ratio"][..]),
        ("pft", &["lock_cost_ratio", "bypasses_per_million"]),
        ("drain", &["throughput_ratio", "p999_ratio", "fences", "added_interrupts", "added_switches"]),
        (
            "charge",
            &["charge_ratio", "charge_ratio_sharded_64", "level_ratio_hit", "level_ratio_miss", "shared_ops_ratio_16"],
        ),
        ("churn", &["metadata_growth_bytes", "dying_after_1s", "delete_p99_us", "bytes_per_group", "walk_ratio"]),
        (
            "shrink",
            &[
                "registry_share.lockless",
                "registry_share.rwlock",
                "throughput_ratio_64",
                "one_percent_pass_ratio",
                "empty_pass_us",
                "direct_p99_us",
            ],
        ),
        ("register", &["reclaim_ratio", "srcu_ratio", "foreign_waits", "foreign_waits.srcu", "register_us"]),
        ("counter", &["add_ns", "add_ratio_thread_local", "add_ratio_atomic_crowd", "read_ns"]),
        (
            "percpu",
            &["return_ratio.rows", "return_ratio.cpu_major", "return_bound", "waste", "alloc_free_ns", "left_kib"],
        ),
    ] {
        let mut arguments = vec!["bench", bench, "--quick", "--pairs", "1", "--json"];
        if bench == "percpu" {
            arguments.extend(["--cpus", "3", "--page", "16384"]);
        }
        let output = neap.neap(&arguments);
        if bench == "drain" && text(&output.stderr).contains("need two CPUs") {
            continue;
        }
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["bench"], &report["failed"]), (&bench.into(), &serde_json::json!([])));
        for figure in figures {
            assert!(report["figures"][figure].as_f64().is_some_and(|figure| figure >= 0.0), "{figure}: {report}");
        }
        if bench == "drain" {
            assert_eq!(
                (&report["figures"]["fences"], &report["figures"]["fences_isolated"]),
                (&0.0.into(), &0.0.into())
            );
            let raw = &report["variants"]["neap"]["isolated"]["raw"][0]["counts"];
            assert!(raw["drains"].as_f64() > Some(1.0), "{raw}");
        }
    }
}

/// Makes `files` small files below the folder.
fn with_files(folder: &Path, files: usize) -> PathBuf {
    let root = folder.join("files");
    for file in 0..files {
        let directory = root.join(format!("d{}", file / 16));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join(format!("f{file}.h")), vec![b'x'; 100 + file * 37 % 4000]).unwrap();
    }
    root
}

#[test]
fn metadata_of_a_small_directory_has_its_figures() {
    let neap = Installed::new("metadata");
    let root = with_files(&neap.0, 600);
    let output =
        neap.neap(&["bench", "metadata", "--quick", "--pairs", "1", "--json", "--directory", root.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["bench"], &report["failed"]), (&"metadata".into(), &serde_json::json!([])));
    for figure in ["elapsed_ratio", "cpu_ratio", "hit_drop_points", "hit_drop_points_global", "hit_drop_points_worst"] {
        assert!(report["figures"][figure].is_f64(), "{figure}: {report}");
    }
    assert!(report["machine"]["cpus"].is_u64() && report["versions"]["neap"].is_string());
    for (variant, workload) in
        ["global", "node", "group", "refuse"].map(|variant| [(variant, "build"), (variant, "flood")]).as_flattened()
    {
        let raw = &report["variants"][variant][workload]["raw"][0];
        let counts = &raw["counts"];
        let rate = counts["hit_rate_innocent"].as_f64().unwrap();
        assert!((1.0..=100.0).contains(&rate), "{variant}, {workload}: {raw}");
        for name in
            ["hit_rate", "hit_rate_flooding", "hit_rate_innocent_worst", "user_s", "system_s", "evictions", "refused"]
        {
            assert!(counts[name].is_f64(), "{name}: {raw}");
        }
        assert!(raw["voluntary_switches"].is_u64() && raw["involuntary_switches"].is_u64());
        assert_eq!(counts["evictions"].as_f64() > Some(0.0), *variant != "refuse", "{variant}, {workload}: {raw}");
        let sum =
            |variant: &str, workload: &str| report["variants"][variant][workload]["raw"][0]["counts"]["sum"].clone();
        assert_eq!(counts["sum"], sum("global", "build"), "{variant}, {workload}");
    }
}

#[test]
fn bench_metadata_with_bad_directory_names_it_and_the_option() {
    let neap = Installed::new("metadata-errors");
    let (absent, few) = (neap.0.join("absent"), with_files(&neap.0, 3));
    for (directory, problem) in [(absent, "cannot read directory"), (few, "has 3 files")] {
        let output = neap.neap(&["bench", "metadata", "--directory", directory.to_str().unwrap()]);
        let message = text(&output.stderr);
        assert!(!output.status.success() && message.contains(problem), "{message}");
        assert!(message.contains(directory.to_str().unwrap()) && message.contains("--directory"), "{message}");
    }
}

#[test]
fn bench_of_library_without_malloc_fails_for_neap() {
    let neap = Installed::new("impostor");
    neap.with_library("bin");
    let output = neap.neap(&["bench", "page", "--quick", "--json", "--against", "glibc"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["missing"], serde_json::json!([]));
    assert_eq!(report["failed"][0]["variant"], "neap");
    assert!(!output.status.success(), "neap was there and did not work");
    assert!(text(&output.stderr).contains("the loader did not take"), "{}", text(&output.stderr));
}

#[test]
fn unknown_names_are_refused_with_the_known_ones() {
    let neap = Installed::new("unknown");
    let output = neap.neap(&["bench", "pair", "--against", "hoard"]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("`hoard`") && text(&output.stderr).contains("snmalloc"));
    let output = neap.neap(&["bench", "programs", "--against", "glibc", "--programs", "emacs"]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("`emacs`") && text(&output.stderr).contains("sqlite3"));
}

#[test]
fn a_missing_program_is_named_with_its_package() {
    let neap = Installed::new("package");
    let mut command = Command::new(neap.0.join("bin/neap"));
    command.args(["bench", "programs", "--json", "--programs", "db_bench,lua"]).env("PATH", &neap.0);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    for reason in ["`db_bench` is not installed (apt-get install rocksdb-tools)", "(apt-get install lua5.4)"] {
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
    }
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let missing: Vec<&str> = report["missing"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(missing.contains(&"db_bench") && missing.contains(&"lua"), "{missing:?}");
}

#[test]
fn a_program_under_the_c_library_alone_is_measured() {
    let neap = Installed::new("programs");
    let output = neap.neap(&["bench", "programs", "--quick", "--json", "--programs", "sort"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let raw = &report["variants"]["glibc"]["sort"]["raw"][0];
    assert!(raw["output"].as_str().unwrap().starts_with("exit status: 0, "), "{raw}");
    assert!(raw["peak_rss_kib"].as_u64().unwrap() > 0);
    assert!(report["figures"].get("programs_differing").is_none(), "nothing ran under neap");
}

#[test]
fn phases_have_a_peak_for_each_variation() {
    let neap = Installed::new("phases");
    let output = neap.neap(&["bench", "phases", "--quick", "--pairs", "1", "--live", "2", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let variations = report["variants"]["glibc"].as_object().unwrap();
    assert_eq!(variations.len(), 25);
    for (name, results) in variations {
        assert!(results["median"].as_f64().unwrap() >= 0.9, "{name}: {results}");
    }
    assert_eq!(report["figures"], serde_json::json!({}), "figures need neap and a peer");
}

#[test]
fn steady_state_has_the_seeds_of_its_rounds() {
    let neap = Installed::new("steady");
    let output = neap.neap(&["bench", "steady", "--quick", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let raw = report["variants"]["glibc"]["steady"]["raw"].as_array().unwrap();
    let seeds: Vec<f64> = raw.iter().map(|outcome| outcome["counts"]["seed"].as_f64().unwrap()).collect();
    assert_eq!(seeds, [1.0, 2.0]);
}

#[test]
fn phases_limit_is_found_or_the_missing_right_is_named() {
    let neap = Installed::new("limit");
    let output = neap.neap(&["bench", "phases", "--limit", "--live", "24", "--json"]);
    if output.status.code() == Some(77) {
        assert!(text(&output.stderr).contains("limits are not measured: "), "{}", text(&output.stderr));
        assert!(output.stdout.is_empty());
        return;
    }
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = &report["variants"]["glibc"]["8 sizes, stride, 2 t, limit"]["median"];
    let too_much = report["failed"][0]["reason"].as_str().is_some_and(|reason| reason.contains("is not enough"));
    assert!(found.as_f64().is_some_and(|limit| limit > 1.0) || too_much, "{report}");
}

#[test]
fn a_cut_limit_is_measured_or_the_missing_right_is_named() {
    let neap = Installed::new("wall");
    let output = neap.neap(&["bench", "wall", "--limit=256", "--pairs", "1", "--json"]);
    if output.status.code() == Some(77) {
        assert!(text(&output.stderr).contains("not measured: "), "{}", text(&output.stderr));
        assert!(output.stdout.is_empty());
        return;
    }
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["failed"], &report["figures"]["runs"]), (&serde_json::json!([]), &1.0.into()));
    for variant in ["neap-auto", "glibc-fixed", "glibc-poller"] {
        let counts = &report["variants"][variant]["cut"]["raw"][0]["counts"];
        assert!(counts["killed"] == 1.0 || counts["cut_p999_us"].as_f64() > Some(0.0), "{variant}: {report}");
    }
}

#[test]
fn workers_share_a_cut_limit_or_the_missing_right_is_named() {
    let neap = Installed::new("workers");
    let output = neap.neap(&["bench", "workers", "--limit=256", "--pairs", "1", "--json"]);
    if output.status.code() == Some(77) {
        assert!(text(&output.stderr).contains("not measured: "), "{}", text(&output.stderr));
        return;
    }
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["failed"], &report["figures"]["runs"]), (&serde_json::json!([]), &1.0.into()));
    for variant in ["neap-auto", "glibc-poller"] {
        let counts = &report["variants"][variant]["cut"]["raw"][0]["counts"];
        assert!(counts["killed"].as_f64() > Some(0.0) || counts["cached_mib_4"].as_f64() > Some(0.0), "{report}");
    }
}

#[test]
fn lab_show_lists_all_policies_and_repeats_for_same_seed() {
    let neap = Installed::new("lab");
    let show = |seed| neap.neap(&["lab", "show", "bursts 3 s apart", "--quick", "--seed", seed]);
    let (first, second, other) = (show("5"), show("5"), show("6"));
    assert!(first.status.success(), "{}", text(&first.stderr));
    for policy in ["fixed", "depth", "upstream", "adaptive", "double-halve", "idle-guard", "pid"] {
        assert!(text(&first.stdout).contains(&format!("\n| {policy} ")), "{policy}");
    }
    assert_eq!(first.stdout, second.stdout);
    assert_ne!(first.stdout, other.stdout);
    let unknown = neap.neap(&["lab", "show", "naps"]);
    assert!(!unknown.status.success());
    assert!(text(&unknown.stderr).contains("`naps`") && text(&unknown.stderr).contains("kernel build"));
}

#[test]
fn lab_replay_reads_recording_and_refuses_other_file() {
    let neap = Installed::new("replay");
    let file = neap.0.join("a.trace");
    // One CPU allocates page 5 and frees it a millisecond later.
    let mut bytes = b"neaptrc2".to_vec();
    [77_u32, 3, 2, 0, 1 | 12 << 16].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    bytes.resize(64, 0);
    for (at, what) in [(1_u64, 5 | 1 << 32), (1_000_001, 5 | 1 << 32 | 1 << 63), (0, 0)] {
        bytes.extend((at << 16).to_le_bytes());
        bytes.extend(u64::to_le_bytes(what));
    }
    fs::write(&file, &bytes).unwrap();
    let output = neap.neap(&["lab", "replay", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    assert!(stdout.contains("\n| adaptive ") && stdout.contains("2 events of 1 CPUs, pages of 4096 bytes"), "{stdout}");
    fs::write(&file, &bytes[1..]).unwrap();
    let output = neap.neap(&["lab", "replay", file.to_str().unwrap()]);
    assert!(!output.status.success() && output.stdout.is_empty());
    assert!(text(&output.stderr).contains(file.to_str().unwrap()), "{}", text(&output.stderr));
}
