//! `cargo xtask container`: builds the image of `contrib/container/Dockerfile` with buildah, and
//! runs it.
//!
//! The check makes the two images that the Dockerfile begins from, since a machine of tests may
//! reach no registry of images. mmdebstrap makes `debian:…-slim`. With a C compiler and the Rust
//! compiler in use, this image becomes `rust:…-slim`. All instructions run as they are. To save
//! time, two folders of this machine are mounted for them: crates that cargo has downloaded, and
//! what an earlier build compiled.
//!
//! The builder isolates by chroot, so the check can run inside a container, too.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::packages::install::VERSION;
use crate::process::{capture, command, need, run};
use crate::{Skipped, layout};

/// The Dockerfile, from the root of the sources.
const DOCKERFILE: &str = "contrib/container/Dockerfile";

/// The image's name.
const NAME: &str = "localhost/neap";

/// The variable that both of the images have, to which the Dockerfile adds a folder.
const SEARCHED: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Images and containers of one run.
struct Builder {
    folder: PathBuf,
}

impl Builder {
    /// An empty folder for images.
    fn new(folder: PathBuf) -> Result<Builder> {
        let builder = Builder { folder };
        builder.remove()?;
        fs::create_dir_all(&builder.folder)?;
        Ok(builder)
    }

    /// buildah with a subcommand.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut buildah = command("buildah", ["--root"]);
        buildah.arg(self.folder.join("images")).arg("--runroot").arg(self.folder.join("run")).args(arguments);
        buildah.env("BUILDAH_ISOLATION", "chroot");
        buildah
    }

    fn output(&self, arguments: &[&str]) -> Result<String> {
        capture(self.command(arguments))
    }

    /// Commits a container as an image.
    fn commit(&self, container: &str, image: &str) -> Result<()> {
        self.output(&["commit", "--quiet", "--rm", container, image]).map(|_| ())
    }

    /// Removes all images and containers.
    fn remove(&self) -> Result<()> {
        if self.folder.exists() {
            // An interrupted run left mounts.
            self.output(&["rm", "--all"])?;
            fs::remove_dir_all(&self.folder)?;
        }
        Ok(())
    }
}

impl Drop for Builder {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

/// The command.
pub(crate) fn check() -> Result<()> {
    if capture(command("id", ["-u"]))?.trim() != "0" {
        return Err(Skipped("container: SKIPPED, nothing was tested: root is needed".to_string()).into());
    }
    need("mmdebstrap", &["mmdebstrap"])?;
    need("buildah", &["buildah"])?;
    let text = fs::read_to_string(layout::root().join(DOCKERFILE))?;
    let debian = argument(&text, "DEBIAN").context("the Dockerfile names no release of Debian")?;
    let rust = argument(&text, "RUST").context("the Dockerfile names no version of Rust")?;
    let folder = layout::target().join("container");
    fs::create_dir_all(&folder)?;
    let folder = fs::canonicalize(folder)?;
    let builder = Builder::new(folder.join("builder"))?;
    let slim = format!("docker.io/library/debian:{debian}-slim");
    bases(&builder, debian, rust, &slim)?;
    println!("container: {DOCKERFILE}");
    build(&builder, &folder)?;
    image_runs(&builder)?;
    another_takes_the_libraries(&builder, &text, &slim)?;
    builder.remove()
}

/// The default value of a Dockerfile's argument.
fn argument<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| line.strip_prefix("ARG ")?.strip_prefix(name)?.strip_prefix('='))
}

/// Makes the images that the Dockerfile begins from.
fn bases(builder: &Builder, debian: &str, rust: &str, slim: &str) -> Result<()> {
    println!("container: {slim}, by mmdebstrap");
    let archive = builder.folder.join("root.tar");
    let mut root = command("mmdebstrap", ["--quiet", "--variant=minbase", debian]);
    root.arg(&archive);
    capture(root)?;
    builder.output(&["from", "--name", "debian", "scratch"])?;
    builder.output(&["add", "--quiet", "debian", &archive.to_string_lossy(), "/"])?;
    builder.output(&["config", "--env", SEARCHED, "debian"])?;
    builder.commit("debian", slim)?;
    fs::remove_file(&archive)?;

    let version = layout::rustc(["--version"])?;
    let image = format!("docker.io/library/rust:{rust}-slim-{debian}");
    println!("container: {image}, with {version}");
    ensure!(version.starts_with(&format!("rustc {rust}.")), "the Dockerfile asks for {rust}, and {version} is in use");
    builder.output(&["from", "--pull-never", "--name", "rust", slim])?;
    let install =
        "apt-get -qq update && apt-get -qq install --yes --no-install-recommends ca-certificates gcc libc6-dev";
    builder.output(&["run", "rust", "--", "sh", "-c", install])?;
    let sysroot = PathBuf::from(layout::rustc(["--print", "sysroot"])?);
    for folder in ["bin", "lib"] {
        let from = sysroot.join(folder);
        builder.output(&["copy", "--quiet", "rust", &from.to_string_lossy(), &format!("/usr/local/{folder}")])?;
    }
    builder.output(&["config", "--env", "CARGO_HOME=/usr/local/cargo", "rust"])?;
    builder.commit("rust", &image)
}

/// Builds the Dockerfile's image.
fn build(builder: &Builder, folder: &Path) -> Result<()> {
    let (root, compiled) = (layout::root(), folder.join("target"));
    fs::create_dir_all(&compiled)?;
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home =
        home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo"))).context("cargo's home")?;
    let registry = home.join("registry");
    fs::create_dir_all(&registry)?;
    // The lock of this machine's cargo, which the one in the container does not see.
    let lock = fs::File::options().create(true).append(true).open(home.join(".package-cache"))?;
    lock.lock()?;
    let mut build = builder.command(&["build", "--pull-never", "--tag", NAME, "--file"]);
    build.arg(root.join(DOCKERFILE)).arg("--ignorefile").arg(root.join(format!("{DOCKERFILE}.dockerignore")));
    build.arg("--volume").arg(format!("{}:/usr/local/cargo/registry", registry.display()));
    build.arg("--volume").arg(format!("{}:/src/target", compiled.display()));
    build.arg(root);
    run(build)
}

/// Runs a command in a new container of an image, and returns its output.
fn in_container(builder: &Builder, image: &str, line: &[&str]) -> Result<String> {
    builder.output(&["from", "--quiet", "--pull-never", "--name", "user", image])?;
    let said = builder.output(&[&["run", "user", "--"], line].concat());
    builder.output(&["rm", "user"])?;
    said
}

/// Runs the image's own command, then others.
fn image_runs(builder: &Builder) -> Result<()> {
    let about: serde_json::Value = serde_json::from_str(&builder.output(&["inspect", "--type", "image", NAME])?)?;
    let of_image = about["OCIv1"]["config"]["Cmd"].as_array().context("the image has no command")?;
    let of_image: Vec<&str> = of_image.iter().filter_map(serde_json::Value::as_str).collect();
    let version = format!("neap {VERSION}\n");
    let preloaded = "LD_PRELOAD=/opt/neap/lib/libneap_malloc.so.0";
    for (line, text) in [
        (&of_image[..], "Usage: neap"),
        (&["neap", "--version"], &version),
        (&["neap", "demo"], "| neap  "),
        (&["neap", "run", "--", "cat", "/proc/self/maps"], "/opt/neap/lib/libneap_malloc.so.0"),
        (&["env", preloaded, "cat", "/proc/self/maps"], "/opt/neap/lib/libneap_malloc.so.0"),
        (&["id", "-u"], "65534\n"),
    ] {
        let said = in_container(builder, NAME, line)?;
        ensure!(said.contains(text), "`{}` in the image does not print `{text}`:\n{said}", line.join(" "));
        println!("container: {}: ok", line.join(" "));
    }
    Ok(())
}

/// The instructions in the Dockerfile's head by which another image takes the libraries.
fn instructions_for_others(text: &str) -> Vec<&str> {
    let code = text.lines().filter_map(|line| line.strip_prefix("#     "));
    code.filter(|line| line.starts_with("COPY ") || line.starts_with("ENV ")).collect()
}

/// Builds another image by the instructions in the Dockerfile's head. All of its programs have the
/// library.
fn another_takes_the_libraries(builder: &Builder, text: &str, slim: &str) -> Result<()> {
    let instructions = instructions_for_others(text);
    ensure!(instructions.len() == 2, "the Dockerfile's head has no COPY with ENV: {instructions:?}");
    let context = builder.folder.join("another");
    fs::create_dir_all(&context)?;
    let file = context.join("Dockerfile");
    fs::write(&file, format!("FROM {slim}\n{}\n", instructions.join("\n")))?;
    let name = "localhost/another";
    let mut build = builder.command(&["build", "--quiet", "--pull-never", "--tag", name, "--file"]);
    build.args([&file, &context]);
    capture(build)?;
    let said = in_container(builder, name, &["cat", "/proc/self/maps"])?;
    ensure!(
        said.contains("/opt/neap/lib/libneap_malloc.so.0"),
        "a program of another image lacks the library:\n{said}"
    );
    println!("container: an image that copies the libraries: ok");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dockerfile_names_its_bases_and_what_others_copy() {
        let text = fs::read_to_string(layout::root().join(DOCKERFILE)).unwrap();
        assert!(argument(&text, "RUST").unwrap().starts_with("1."));
        assert_eq!(argument(&text, "DEBIA"), None);
        let taken = instructions_for_others(&text);
        assert!(taken[0].starts_with("COPY --from=neap ") && taken[1].starts_with("ENV LD_PRELOAD="), "{taken:?}");
    }
}
