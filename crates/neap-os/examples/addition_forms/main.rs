//! Measures a counter's addition in several forms, against a plain addition.
//!
//! Run by `cargo run --release -p neap-os --example addition_forms`. The forms are for x86-64.

#[cfg(target_arch = "x86_64")]
mod x86_64;

fn main() {
    #[cfg(target_arch = "x86_64")]
    x86_64::measure();
    #[cfg(not(target_arch = "x86_64"))]
    println!("the forms are for x86-64");
}
