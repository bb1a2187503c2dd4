//! Links the library without a C compiler's start files, which do nothing for it. It keeps no code
//! running, so `dlclose` may unload it. The SONAME counts incompatible changes of the exported
//! functions.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libneap_mallctl.so.0");
}
