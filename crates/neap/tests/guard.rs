//! Guarded samples of a Rust program whose allocator is neap: a wrong one ends with a report, a
//! right one is left alone.
//!
//! Method: this program again, with `guard:1`.

use neap::groups::{Group, payer_of};
use neap::process::PROCESS;
use neap_testing::again::{again, case, succeeds};
use neap_testing::child::in_child;
use std::os::unix::process::ExitStatusExt;
use std::process::Output;

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

/// A size that no class has.
const SIZE: usize = 99;

/// Allocates until an allocation is guarded. `None` while others have most slots.
fn guarded() -> Option<Vec<u8>> {
    let is_guarded = |bytes: &Vec<u8>| PROCESS.usable_size(bytes.as_ptr()) == SIZE;
    (0..100).map(|_| vec![7; SIZE]).find(is_guarded)
}

#[test]
fn a_program() {
    match case().as_deref() {
        Some("after free") => {
            let mut bytes = guarded().unwrap();
            let pointer = bytes.as_mut_ptr();
            std::thread::spawn(move || drop(bytes)).join().unwrap();
            // SAFETY: unsound by design: the page has no access.
            unsafe { pointer.add(3).write_volatile(1) };
        }
        Some("elsewhere") => {
            // SAFETY: unsound by design: no page has access there.
            unsafe { core::ptr::without_provenance_mut::<u8>(4096).write_volatile(1) };
        }
        Some("right") => right(),
        _ => {}
    }
}

fn report(case: &str) -> (Output, Vec<String>) {
    let answer = again("a_program", case, "guard:1");
    let error = String::from_utf8_lossy(&answer.stderr).into_owned();
    let lines = error.lines().filter_map(|line| line.strip_prefix("neap: ")).map(String::from).collect();
    (answer, lines)
}

#[test]
fn use_after_free_is_reported() {
    let (answer, lines) = report("after free");
    assert_eq!(answer.status.signal(), Some(libc::SIGSEGV), "{lines:?}");
    let first = lines.first().unwrap();
    assert!(
        first.starts_with("use after free: ") && first.contains("offset 3 of an allocation of 99 bytes"),
        "{first}"
    );
    let thread = |call: &str| lines.iter().find_map(|line| line.strip_prefix(&format!("{call} by thread "))).unwrap();
    assert!(thread("access") == thread("allocated") && thread("access") != thread("freed"), "{lines:?}");
}

#[test]
fn fault_elsewhere_is_not_reported() {
    let (answer, lines) = report("elsewhere");
    assert_eq!((answer.status.signal(), lines), (Some(libc::SIGSEGV), Vec::new()));
}

#[test]
fn right_program_is_left_alone() {
    succeeds("a_program", "right", "guard:1");
    succeeds("a_program", "right", "guard:1,profile:1k");
}

/// Threads, groups and children.
fn right() {
    let tenant = Group::create("guard/tenant").unwrap();
    let work = move || {
        let inside = tenant.enter().unwrap();
        let kept: Vec<Vec<u8>> = (0..300).map(|n| vec![n as u8; n + 1]).collect();
        let paid = kept.iter().filter(|bytes| payer_of(&bytes[0]) == Some(tenant)).count();
        drop(inside);
        assert_eq!(paid, kept.len());
        let strings: Vec<String> = (0..20_000).map(|n| format!("number {n}")).collect();
        assert!(strings.iter().enumerate().all(|(n, string)| string[7..] == n.to_string()));
        assert!(kept.iter().enumerate().all(|(n, bytes)| bytes.iter().all(|&byte| byte == n as u8)));
        kept
    };
    let of_parent = guarded().unwrap();
    let threads: Vec<_> = (0..3).map(|_| std::thread::spawn(work)).collect();
    for _ in 0..5 {
        in_child(|| {
            work();
            // What threads of the parent had stays live in a child.
            assert!(guarded().is_none_or(|own| own[SIZE - 1] == 7) && of_parent[0] == 7);
        });
    }
    threads.into_iter().for_each(|thread| drop(thread.join().unwrap()));
    tenant.delete().unwrap();
}
