//! A C library to link with, that has only the functions which the libraries need, with their
//! oldest versions.
//!
//! The linker takes versions from the C library of the building machine. glibc 2.34 gave new ones
//! to functions that it moved, so a library that is linked there loads with no older glibc. All
//! imports that are not in this list are weak and without a version: glibc versions that lack the
//! symbol load the library, too.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::process::{capture, command};

/// The functions that must exist, with their first version on x86-64. None of them allocates.
pub(crate) const REQUIRED: &[(&str, &str)] = &[
    ("__errno_location", "GLIBC_2.2.5"),
    ("__libc_current_sigrtmin", "GLIBC_2.2.5"),
    ("bcmp", "GLIBC_2.2.5"),
    ("getauxval", "GLIBC_2.16"),
    ("memcmp", "GLIBC_2.2.5"),
    ("memcpy", "GLIBC_2.14"),
    ("memmove", "GLIBC_2.2.5"),
    ("memset", "GLIBC_2.2.5"),
    ("pthread_attr_destroy", "GLIBC_2.2.5"),
    ("pthread_attr_init", "GLIBC_2.2.5"),
    ("pthread_attr_setdetachstate", "GLIBC_2.2.5"),
    ("strlen", "GLIBC_2.2.5"),
];

/// Variables that must exist, with their first version on x86-64.
pub(crate) const VARIABLES: &[(&str, &str)] = &[("environ", "GLIBC_2.2.5")];

/// The version of all these symbols in glibc's first release for a processor, if that is a later
/// one.
fn first_of(architecture: &str) -> Result<Option<&'static str>> {
    match architecture {
        "x86_64" => Ok(None),
        "aarch64" => Ok(Some("GLIBC_2.17")),
        other => bail!("the first version of glibc for {other} is not known"),
    }
}

/// The text of the stub for the assembler, and its list of versions for the linker.
fn texts(architecture: &str) -> Result<(String, String)> {
    let first = first_of(architecture)?;
    let mut code = String::new();
    let mut versions: BTreeMap<&str, String> = BTreeMap::new();
    for (symbols, kind) in [(REQUIRED, "function"), (VARIABLES, "object")] {
        for (name, version) in symbols {
            let section = if kind == "object" { ".data" } else { ".text" };
            code += &format!("{section}\n.globl {name}\n.type {name}, %{kind}\n{name}: .quad 0\n.size {name}, 8\n");
            *versions.entry(first.unwrap_or(version)).or_default() += &format!("    {name};\n");
        }
    }
    code += ".section .note.GNU-stack,\"\",%progbits\n";
    let map = versions.iter().map(|(version, names)| format!("{version} {{ global:\n{names}}};\n")).collect();
    Ok((code, map))
}

/// Makes the stub in `folder`, and returns that folder for the option `-L` of the linker.
pub(crate) fn make(folder: &Path, target: &str, compiler: &str) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let (code, map) = texts(target.split('-').next().unwrap_or_default())?;
    let (source, versions) = (folder.join("libc.s"), folder.join("libc.map"));
    fs::write(&source, code)?;
    fs::write(&versions, map)?;
    let mut link = command(compiler, ["-shared", "-nostdlib", "-Wl,-soname,libc.so.6", "-o"]);
    link.arg(folder.join("libc.so")).arg(&source).arg(format!("-Wl,--version-script={}", versions.display()));
    capture(link)?;
    Ok(folder.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stub_has_the_oldest_versions_of_each_processor() {
        let (_, map) = texts("x86_64").unwrap();
        assert!(map.contains("GLIBC_2.14 { global:\n    memcpy;\n};\n"), "{map}");
        let (code, map) = texts("aarch64").unwrap();
        assert!(map.starts_with("GLIBC_2.17 {") && map.matches('{').count() == 1, "{map}");
        assert!(code.contains(".type environ, %object") && code.contains(".type memcpy, %function"));
        assert!(texts("riscv64").is_err());
    }

    #[test]
    fn stub_can_be_linked_with() {
        let folder = std::env::temp_dir().join(format!("neap-stub-{}", std::process::id()));
        make(&folder, "x86_64-unknown-linux-gnu", "cc").unwrap();
        let said = capture(command("nm", ["-D", &folder.join("libc.so").to_string_lossy()])).unwrap();
        assert!(said.contains("memcpy@@GLIBC_2.14") && said.contains("environ@@GLIBC_2.2.5"), "{said}");
        fs::remove_dir_all(folder).unwrap();
    }
}
