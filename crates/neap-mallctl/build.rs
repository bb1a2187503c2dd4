//! Links the library without a C compiler's start files, which do nothing for it. It keeps no code
//! running, so `dlclose` may unload it. The SONAME counts incompatible changes of the exported
//! functions.
//!
//! `cargo xtask build` names the folder of a stub of the C library, so that the library loads with
//! versions of glibc that are older than that of the building machine.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libneap_mallctl.so.0");
    println!("cargo:rerun-if-env-changed=NEAP_STUB_LIBC");
    if let Ok(folder) = std::env::var("NEAP_STUB_LIBC") {
        println!("cargo:rustc-cdylib-link-arg=-L{folder}");
        // Names a function that the stub lacks.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    }
}
