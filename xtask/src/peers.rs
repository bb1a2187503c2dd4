//! `cargo xtask peers`: builds the allocators that the benchmarks compare neap with.
//!
//! Each becomes one preloadable shared library in `target/peers/`, compiled from the sources that
//! the package `peers` pins, with the flags of its own project's default release build.
//! `versions.json` beside them has their versions. A peer that fails to build is named and left
//! out, and the others are still built. Only crates are downloaded. A library for the same sources
//! and flags is kept.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::layout;
use crate::librseq;
use crate::process::{capture, cargo, command, need, run};

/// An allocator: the crate with its sources, and the function that builds it.
struct Peer {
    name: &'static str,
    package: &'static str,
    build: fn(&Job, &Path) -> Result<()>,
    version: fn(&Job) -> Result<String>,
}

const PEERS: &[Peer] = &[
    Peer { name: "jemalloc", package: "tikv-jemalloc-sys", build: jemalloc, version: jemalloc_version },
    Peer { name: "mimalloc2", package: "libmimalloc-sys", build: mimalloc, version: mimalloc_version },
    Peer { name: "mimalloc3", package: "libmimalloc-sys", build: mimalloc, version: mimalloc_version },
    Peer { name: "snmalloc", package: "snmalloc-sys", build: snmalloc, version: package_version },
    Peer { name: "tcmalloc", package: "libtcmalloc-sys", build: tcmalloc, version: tcmalloc_version },
];

/// Arguments of a build function: the unpacked crate, a scratch folder of its own, and the path of
/// the library.
struct Job {
    peer: &'static str,
    package: &'static str,
    package_version: String,
    sources: PathBuf,
    scratch: PathBuf,
    library: PathBuf,
}

/// Builds the peers named in `wanted`, or all of them.
pub(crate) fn build(wanted: &[String]) -> Result<()> {
    let known: Vec<_> = PEERS.iter().map(|peer| peer.name).chain([librseq::NAME]).collect();
    if let Some(unknown) = wanted.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("no peer is called `{unknown}`; there are {}", known.join(", "));
    }
    need("g++", &["g++", "libc6-dev"])?;
    need("make", &["make"])?;
    let folder = layout::target().join("peers");
    fs::create_dir_all(&folder)?;
    let manifest = layout::root().join("peers/Cargo.toml");
    let mut metadata = cargo(["metadata", "--format-version", "1", "--locked", "--manifest-path"]);
    metadata.arg(manifest);
    let metadata = capture(metadata)?;

    let mut versions = vec![("glibc".to_string(), glibc_version()?)];
    let mut failed = Vec::new();
    for peer in PEERS {
        let (package_version, sources) = locate(&metadata, peer.package)?;
        let job = Job {
            peer: peer.name,
            package: peer.package,
            package_version,
            sources,
            scratch: folder.join("build").join(peer.name),
            library: folder.join(format!("{}.so", peer.name)),
        };
        let chosen = wanted.is_empty() || wanted.iter().any(|name| name == peer.name);
        if chosen && let Err(error) = make(peer, &job) {
            println!("{}: FAILED: {error:#}", peer.name);
            failed.push(peer.name);
        }
        if job.library.exists() {
            versions.push((peer.name.to_string(), (peer.version)(&job)?));
        }
    }
    let chosen = wanted.is_empty() || wanted.iter().any(|name| name == librseq::NAME);
    match librseq::build(&folder, chosen) {
        Ok(version) => versions.extend(version.map(|version| (librseq::NAME.to_string(), version))),
        Err(error) => {
            println!("{}: FAILED: {error:#}", librseq::NAME);
            failed.push(librseq::NAME);
        }
    }
    let lines: Vec<_> = versions.iter().map(|(name, version)| format!("  \"{name}\": \"{version}\"")).collect();
    fs::write(folder.join("versions.json"), format!("{{\n{}\n}}\n", lines.join(",\n")))?;
    if !failed.is_empty() {
        bail!("not built: {}", failed.join(", "));
    }
    Ok(())
}

/// Builds one peer unless the library for these sources exists, and checks that it provides
/// `malloc` when preloaded.
fn make(peer: &Peer, job: &Job) -> Result<()> {
    let stamp = job.scratch.join("built-from");
    let origin = format!("{} {} recipe {}", job.package, job.package_version, RECIPE);
    if job.library.exists() && fs::read_to_string(&stamp).is_ok_and(|text| text == origin) {
        println!("{}: {} is there already", peer.name, (peer.version)(job)?);
        return Ok(());
    }
    println!("{}: building {}", peer.name, (peer.version)(job)?);
    let start = Instant::now();
    if job.scratch.exists() {
        fs::remove_dir_all(&job.scratch)?;
    }
    fs::create_dir_all(&job.scratch)?;
    // Built under another name first: a library that fails its check is not taken for a peer.
    let candidate = job.scratch.join(format!("{}.so", peer.name));
    (peer.build)(job, &candidate)?;
    check_preload(job, &candidate)?;
    fs::rename(&candidate, &job.library)?;
    fs::write(stamp, origin)?;
    println!("{}: done in {:.0} s", peer.name, start.elapsed().as_secs_f64());
    Ok(())
}

/// Incremented when a build function below changes, so that old libraries are rebuilt.
const RECIPE: u32 = 1;

/// Version and folder of a crate, read from `cargo metadata`: in a package's object the name comes
/// first, then the version, later the manifest.
fn locate(metadata: &str, package: &str) -> Result<(String, PathBuf)> {
    let up_to_quote = |text: &str| text.find('"').map(|end| text[..end].to_string());
    let found = metadata.split_once(&format!("\"name\":\"{package}\",\"version\":\"")).and_then(|(_, rest)| {
        let (_, manifest) = rest.split_once("\"manifest_path\":\"")?;
        Some((up_to_quote(rest)?, PathBuf::from(up_to_quote(manifest)?)))
    });
    let (version, manifest) = found.with_context(|| format!("cargo does not know the crate `{package}`"))?;
    let folder = manifest.parent().context("a manifest without a folder")?;
    Ok((version, folder.to_path_buf()))
}

/// Preloads the library into a small program that asks the loader where its `malloc`, `free`,
/// `realloc` and `posix_memalign` come from.
fn check_preload(job: &Job, library: &Path) -> Result<()> {
    let source = layout::root().join("tests/programs/whose_malloc.c");
    let program = job.scratch.join("whose_malloc");
    let mut cc = command("cc", ["-O1", "-fno-builtin", "-o"]);
    cc.arg(&program).arg(source);
    run(cc)?;
    let mut ask = command(&program.to_string_lossy(), [""; 0]);
    ask.env("LD_PRELOAD", library);
    let answer = capture(ask)?;
    for line in answer.lines() {
        let from = line.rsplit(' ').next().unwrap_or_default();
        if Path::new(from) != library {
            bail!("{} is preloaded, but {line}", library.display());
        }
    }
    Ok(())
}

/// The version of the C library in use.
fn glibc_version() -> Result<String> {
    let text = capture(command("getconf", ["GNU_LIBC_VERSION"]))?;
    Ok(text.trim().trim_start_matches("glibc ").to_string())
}

/// The crate's version is the allocator's.
fn package_version(job: &Job) -> Result<String> {
    Ok(job.package_version.clone())
}

/// tcmalloc has no versions: the day of the crate's release identifies its state.
fn tcmalloc_version(job: &Job) -> Result<String> {
    let changes = fs::read_to_string(job.sources.join("CHANGELOG.md"))?;
    let heading = format!("## [{}]", job.package_version);
    let day = changes.lines().find(|line| line.starts_with(&heading)).and_then(|line| line.rsplit(' ').next());
    Ok(day.with_context(|| format!("no `{heading}` in the change log of {}", job.package))?.to_string())
}

/// The part of the crate's version after `+`: `5.3.1-0-g...`, which jemalloc's own configure script
/// expects as well.
fn jemalloc_full_version(job: &Job) -> Result<&str> {
    let version = job.package_version.split_once('+').map(|(_, jemalloc)| jemalloc);
    version.with_context(|| format!("no jemalloc version in `{}`", job.package_version))
}

fn jemalloc_version(job: &Job) -> Result<String> {
    let full = jemalloc_full_version(job)?;
    Ok(full.split('-').next().unwrap_or(full).to_string())
}

/// `MI_MALLOC_VERSION`: the major number and two digits each of minor and patch.
fn mimalloc_version(job: &Job) -> Result<String> {
    let header = mimalloc_folder(job).join("include/mimalloc.h");
    let text = fs::read_to_string(&header)?;
    let number = text
        .lines()
        .find_map(|line| line.strip_prefix("#define MI_MALLOC_VERSION"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u32>().ok())
        .with_context(|| format!("no MI_MALLOC_VERSION in {}", header.display()))?;
    Ok(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

fn mimalloc_folder(job: &Job) -> PathBuf {
    let line = if job.peer == "mimalloc2" { "v2" } else { "v3" };
    job.sources.join("c_src/mimalloc").join(line)
}

/// jemalloc's own configure and make, in a copy of the sources because they are built in place.
fn jemalloc(job: &Job, library: &Path) -> Result<()> {
    let tree = job.scratch.join("jemalloc");
    let mut copy = command("cp", ["-r"]);
    copy.arg(job.sources.join("jemalloc")).arg(&tree);
    run(copy)?;
    fs::copy(job.sources.join("configure/configure"), tree.join("configure"))?;
    let version = format!("--with-version={}", jemalloc_full_version(job)?);
    let mut configure = command("sh", ["configure", "--quiet", "--disable-doc", &version]);
    configure.current_dir(&tree);
    capture(configure)?;
    let jobs = format!("-j{}", parallel());
    let mut make = command("make", [jobs.as_str(), "--silent", "build_lib_shared"]);
    make.current_dir(&tree);
    capture(make)?;
    fs::copy(tree.join("lib/libjemalloc.so.2"), library)?;
    Ok(())
}

/// mimalloc is one translation unit: `static.c` includes the rest.
fn mimalloc(job: &Job, library: &Path) -> Result<()> {
    let folder = mimalloc_folder(job);
    let flags = "-std=gnu11 -O3 -DNDEBUG -fPIC -shared -w -fvisibility=hidden -ftls-model=initial-exec \
        -fno-builtin-malloc -DMI_SHARED_LIB -DMI_SHARED_LIB_EXPORT -DMI_MALLOC_OVERRIDE -DMI_BUILD_RELEASE";
    let mut cc = command("cc", flags.split_whitespace());
    cc.arg("-I").arg(folder.join("include")).arg("-I").arg(folder.join("src"));
    cc.arg(folder.join("src/static.c")).arg("-o").arg(library).arg("-lpthread");
    capture(cc).map(drop)
}

/// snmalloc's shim: the C family and the C++ operators. The defines are what its CMake file finds
/// on Linux with glibc.
fn snmalloc(job: &Job, library: &Path) -> Result<()> {
    let folder = job.sources.join("upstream/src");
    let flags = "-std=c++20 -O3 -DNDEBUG -fPIC -shared -w -fvisibility=hidden -ftls-model=initial-exec \
        -fomit-frame-pointer -ffunction-sections -DSNMALLOC_EXPORT=__attribute__((visibility(\"default\"))) \
        -DSNMALLOC_USE_CXX11_THREAD_ATEXIT_DIRECT -DSNMALLOC_USE_WAIT_ON_ADDRESS=1 \
        -DSNMALLOC_PLATFORM_HAS_GETENTROPY -DSNMALLOC_PTHREAD_ATFORK_WORKS -DSNMALLOC_HAS_LINUX_RANDOM_H \
        -DSNMALLOC_HAS_LINUX_FUTEX_H -DSNMALLOC_NO_REALLOCARRAY -DSNMALLOC_NO_REALLOCARR \
        -DSNMALLOC_CHECK_LOADS=false -DSNMALLOC_PAGEID=false";
    let mut cxx = command("g++", flags.split_whitespace());
    if cfg!(target_arch = "x86_64") {
        cxx.args(["-mcx16", "-mprfchw"]);
    }
    cxx.arg("-I").arg(&folder);
    for file in ["malloc.cc", "new.cc"] {
        cxx.arg(folder.join("snmalloc/override").join(file));
    }
    cxx.arg("-static-libstdc++").arg("-o").arg(library);
    capture(cxx).map(drop)
}

/// tcmalloc and the part of Abseil under it. The crate's build script holds the list of files as
/// string literals; its two bridges, which make the Rust interface, are left out and `tcmalloc.cc`
/// itself, which makes the malloc family, put in.
fn tcmalloc(job: &Job, library: &Path) -> Result<()> {
    let script = fs::read_to_string(job.sources.join("build.rs"))?;
    let mut files: Vec<&str> = script
        .split('"')
        .filter(|text| text.starts_with("c_src/") && (text.ends_with(".cc") || text.ends_with(".S")))
        .filter(|text| !text.ends_with("_bridge.cc"))
        .collect();
    files.push("c_src/tcmalloc/tcmalloc/tcmalloc.cc");
    files.sort_unstable();
    files.dedup();
    let object = |file: &str| job.scratch.join(format!("{}.o", file.replace('/', "_")));
    let compile = |file: &str| -> Result<()> {
        let flags = "-std=c++17 -O2 -DNDEBUG -fPIC -w -fno-omit-frame-pointer -ffunction-sections \
            -DTCMALLOC_INTERNAL_8K_PAGES -c -o";
        let mut cxx = command("g++", flags.split_whitespace());
        cxx.arg(object(file)).arg(job.sources.join(file));
        for include in ["c_src/abseil-cpp", "c_src/tcmalloc"] {
            cxx.arg("-I").arg(job.sources.join(include));
        }
        capture(cxx).map(drop)
    };
    each_in_parallel(&files, compile)?;
    let mut link = command("g++", ["-shared", "-pthread", "-Wl,--gc-sections", "-o"]);
    link.arg(library);
    let objects: Vec<OsString> = files.iter().map(|file| object(file).into_os_string()).collect();
    link.args(objects);
    capture(link).map(drop)
}

/// Number of compilers that run at once: one per CPU that this process may use.
fn parallel() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Applies `work` to every item on as many threads as there are CPUs, with a line of progress per
/// 20 items; the first error ends it.
fn each_in_parallel<T: Sync + Copy>(items: &[T], work: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    let state = Mutex::new((0, None));
    std::thread::scope(|scope| {
        for _ in 0..parallel() {
            scope.spawn(|| {
                loop {
                    let next = {
                        let mut state = state.lock().unwrap_or_else(|poison| poison.into_inner());
                        let (index, error) = &mut *state;
                        if error.is_some() || *index == items.len() {
                            return;
                        }
                        *index += 1;
                        if *index % 20 == 0 {
                            println!("  {index} of {} files", items.len());
                        }
                        items[*index - 1]
                    };
                    if let Err(error) = work(next) {
                        state.lock().unwrap_or_else(|poison| poison.into_inner()).1 = Some(error);
                    }
                }
            });
        }
    });
    match state.into_inner().unwrap_or_else(|poison| poison.into_inner()).1 {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
