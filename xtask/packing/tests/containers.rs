//! Reads the Dockerfile and the Kubernetes examples of `contrib`. Their names must agree with each
//! other, with the workspace and with an installation. `cargo xtask container` builds the image.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use yaml_rust2::{Yaml, YamlLoader};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap()
}

/// The instructions of a Dockerfile, with continued lines joined.
fn instructions(text: &str) -> Vec<(String, String)> {
    let code: String =
        text.lines().filter(|line| !line.trim_start().starts_with('#')).map(|line| format!("{line}\n")).collect();
    let joined = code.replace("\\\n", " ");
    let lines = joined.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, rest) = line.split_once(' ').unwrap_or_else(|| panic!("`{line}` has no argument"));
            (name.to_string(), rest.trim().to_string())
        })
        .collect()
}

#[test]
fn dockerfile_builds_what_install_writes() {
    const KNOWN: &[&str] = &["ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"];
    let found = instructions(&read("contrib/container/Dockerfile"));
    let of = |wanted: &str| {
        found.iter().filter(|(name, _)| name == wanted).map(|(_, rest)| rest.as_str()).collect::<Vec<_>>()
    };
    assert!(found.iter().all(|(name, _)| KNOWN.contains(&name.as_str())), "{found:?}");
    let stages: BTreeSet<&str> =
        of("FROM").iter().filter_map(|line| line.split_once(" AS ")).map(|(_, name)| name).collect();
    let froms: Vec<&str> =
        of("COPY").iter().filter_map(|line| line.strip_prefix("--from=")?.split(' ').next()).collect();
    assert!(!froms.is_empty() && froms.iter().all(|stage| stages.contains(stage)), "{froms:?} of {stages:?}");
    let version = format!("RUST={}", env!("CARGO_PKG_RUST_VERSION"));
    assert!(of("ARG").contains(&version.as_str()), "the image's compiler is not the workspace's");
    let prefix = of("RUN").iter().find_map(|line| line.strip_prefix("cargo xtask install --prefix ")).unwrap();
    assert!(of("COPY").iter().any(|line| *line == format!("--from=build {prefix} {prefix}")));
    assert!(of("ENV").iter().any(|line| line.starts_with(&format!("PATH={prefix}/bin:"))));
    // A list is JSON.
    let command: Vec<String> = serde_json::from_str(of("CMD")[0]).unwrap();
    assert_eq!(command[0], "neap");
}

/// The items of a list.
fn list<'y>(of: &'y Yaml, key: &str) -> &'y [Yaml] {
    of[key].as_vec().map_or(&[], Vec::as_slice)
}

fn text<'y>(of: &'y Yaml, key: &str) -> &'y str {
    of[key].as_str().unwrap_or_else(|| panic!("no {key} in {of:?}"))
}

/// The path at which a container mounts a volume.
fn mounted<'y>(container: &'y Yaml, volume: &str) -> &'y str {
    text(list(container, "volumeMounts").iter().find(|mount| text(mount, "name") == volume).unwrap(), "mountPath")
}

#[test]
fn kubernetes_example_preloads_a_library_that_it_has() {
    let documents = YamlLoader::load_from_str(&read("contrib/kubernetes/preload.yml")).unwrap();
    assert_eq!(documents.len(), 1);
    let deployment = &documents[0];
    assert_eq!((text(deployment, "apiVersion"), text(deployment, "kind")), ("apps/v1", "Deployment"));
    let (template, selector) = (&deployment["spec"]["template"], &deployment["spec"]["selector"]["matchLabels"]);
    assert_eq!(selector, &template["metadata"]["labels"]);
    let pod = &template["spec"];
    let volume = text(&list(pod, "volumes")[0], "name");
    let (from, to) = (&list(pod, "initContainers")[0], &list(pod, "containers")[0]);
    // The init container copies from the image's prefix to the volume.
    let docker = instructions(&read("contrib/container/Dockerfile"));
    let prefix = docker.iter().find_map(|(_, line)| line.strip_prefix("cargo xtask install --prefix ")).unwrap();
    let copies = list(from, "command")[2].as_str().unwrap();
    let place = mounted(from, volume);
    assert!(copies.contains(&format!("cp -a {prefix}/lib/*.so* {place}/lib/")), "{copies}");
    // The library's name is that of its build script.
    let preload = list(to, "env").iter().find(|pair| text(pair, "name") == "LD_PRELOAD").unwrap();
    let soname = read("crates/neap-malloc/build.rs");
    let soname = soname.split("-soname,").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(text(preload, "value"), format!("{}/lib/{soname}", mounted(to, volume)));
    let ports: BTreeSet<&str> = list(to, "ports").iter().map(|port| text(port, "name")).collect();
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        assert!(ports.contains(text(&to[probe]["httpGet"], "port")), "{probe}");
    }
    for container in [from, to] {
        assert!(container["resources"]["limits"]["memory"].as_str().is_some(), "no limit: {container:?}");
    }
}
