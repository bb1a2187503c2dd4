//! Links the library without a C compiler's start files: their constructor and destructor do
//! nothing for it, and cost every process that loads it four page faults (a thirtieth of
//! /bin/true). And so that it stays once it is loaded: its thread and its fork handlers run its
//! code. And so that what the dynamic linker writes to begins with a page: it has a page less to
//! copy than where it begins within one. Linkers that do not know that option say so and go on.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,separate-loadable-segments");
}
