//! Links the library without a C compiler's start files, whose constructor and destructor do
//! nothing for it but cost every process that loads it page faults. It also stays loaded
//! (`nodelete`), since its thread and its fork handlers run its code. The part that the dynamic
//! linker writes to begins with a page, so that one page less is copied. Linkers that do not know
//! that option say so and go on.
//! Debuggers find split debug information by the build id, which `musl-gcc` makes only if asked.
//!
//! The SONAME counts incompatible changes of the exported functions. Programs that preload the
//! library name its file; the SONAME is what a program linked with it asks for.
//!
//! `cargo xtask build` names the folder of a stub of the C library, so that the library loads with
//! versions of glibc that are older than that of the building machine.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--build-id");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libneap_malloc.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,separate-loadable-segments");
    println!("cargo:rerun-if-env-changed=NEAP_STUB_LIBC");
    if let Ok(folder) = std::env::var("NEAP_STUB_LIBC") {
        println!("cargo:rustc-cdylib-link-arg=-L{folder}");
        // Names a function that the stub lacks.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    }
}
