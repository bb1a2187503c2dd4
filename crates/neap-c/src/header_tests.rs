//! That the header says what the library is: it compiles alone as C and as C++, and its constants, structures and sizes are those
//! of this crate. (That each function it declares is there, and no other, `cargo xtask symbols` asks the finished libraries.)

use crate::counter::Counter;
use crate::error::Error;
use crate::histogram::Histogram;
use crate::instance::Usage;
use crate::reference::Ref;
use core::fmt::Write;
use core::mem::{align_of, offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

const STRICT: [&str; 5] = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"];

fn include() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// Compiles a text that includes the header, with whichever of the compilers are there; at least one is.
fn compiles(name: &str, text: &str) {
    let file = std::env::temp_dir().join(format!("neap-header-{}-{name}", std::process::id()));
    let (c, cxx) = (file.with_extension("c"), file.with_extension("cpp"));
    std::fs::write(&c, text).unwrap();
    std::fs::write(&cxx, text).unwrap();
    let mut ran = 0;
    for (compiler, standard, file) in [
        ("gcc", "-std=c11", &c),
        ("g++", "-std=c++17", &cxx),
        ("clang", "-std=c11", &c),
        ("clang++", "-std=c++17", &cxx),
    ] {
        let mut command = Command::new(compiler);
        command.args(STRICT).arg(standard).arg("-I").arg(include()).arg(file);
        match command.output() {
            Ok(done) => {
                assert!(done.status.success(), "{compiler}: {}\n{text}", String::from_utf8_lossy(&done.stderr));
                ran += 1;
            }
            Err(error) => println!("{compiler}: {error}"),
        }
    }
    assert!(ran >= 2, "neither gcc and g++ nor clang and clang++ are there");
    [c, cxx].iter().for_each(|file| std::fs::remove_file(file).unwrap());
}

#[test]
fn the_header_stands_alone_in_c_and_cxx() {
    compiles("twice", "#include <neap.h>\n#include <neap.h>\nint main(void) { return NEAP_OK; }\n");
}

#[test]
fn constants_and_layouts_are_those_of_the_library() {
    let mut text = String::from("#include <neap.h>\n#include <assert.h>\n#include <stdalign.h>\n");
    let mut same = |what: &str, value: i128| {
        writeln!(text, "static_assert({what} == {value}, \"{what}\");").unwrap();
    };
    let names = ["ARGUMENT", "OWNER", "CHARGE", "WAIT", "FULL", "MEMORY", "HANDLE", "FENCE"];
    for (name, error) in names.iter().zip(Error::ALL) {
        assert_eq!(format!("{error:?}").to_uppercase(), *name);
        same(&format!("NEAP_E_{name}"), error as i128);
    }
    same("NEAP_OK", 0);
    same("NEAP_NOBODY", neap::percpu::Owner::NOBODY.to_bits().into());
    same("NEAP_LARGEST", neap::percpu::LARGEST as i128);
    // What is shorter than the header's is room for later versions.
    let mut object = |name: &str, size: usize, align: usize, room: usize| {
        assert!(size <= room && align <= 8, "{name}: {size} bytes aligned to {align}, and {room} in the header");
        same(&format!("sizeof({name})"), room as i128);
        same(&format!("alignof({name})"), 8);
    };
    object("neap_counter", size_of::<Counter>(), align_of::<Counter>(), 128);
    object("neap_ref", size_of::<Ref>(), align_of::<Ref>(), 128);
    object("neap_histogram", size_of::<Histogram>(), align_of::<Histogram>(), 4096);
    same("sizeof(neap_usage)", size_of::<Usage>() as i128);
    for (field, offset) in [
        ("allocated_bytes", offset_of!(Usage, allocated_bytes)),
        ("populated_bytes", offset_of!(Usage, populated_bytes)),
        ("empty_bytes", offset_of!(Usage, empty_bytes)),
        ("reserve_bytes", offset_of!(Usage, reserve_bytes)),
        ("allocations", offset_of!(Usage, allocations)),
        ("owners", offset_of!(Usage, owners)),
    ] {
        same(&format!("offsetof(neap_usage, {field})"), offset as i128);
    }
    for (name, bytes) in [("neap_owner", 8), ("neap_percpu", 8), ("bool", 1), ("size_t", size_of::<usize>())] {
        same(&format!("sizeof({name})"), bytes as i128);
    }
    text.push_str("int main(void) { return 0; }\n");
    compiles("layout", &text);
    let header = std::fs::read_to_string(include().join("neap.h")).unwrap();
    assert!(header.contains(concat!("#define NEAP_VERSION \"", env!("CARGO_PKG_VERSION"), "\"")));
}
