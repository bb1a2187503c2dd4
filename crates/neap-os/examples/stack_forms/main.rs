//! Measures a pop after a push, for stacks with a head pointer and with a count.
//!
//! Run by `cargo run --release -p neap-os --example stack_forms`. The forms are for x86-64.

#[cfg(target_arch = "x86_64")]
mod x86_64;

fn main() {
    #[cfg(target_arch = "x86_64")]
    x86_64::measure();
    #[cfg(not(target_arch = "x86_64"))]
    println!("the forms are for x86-64");
}
