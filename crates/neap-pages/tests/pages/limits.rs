//! The real system with a limit on address space: small segments, an error instead of a crash, and
//! use of all the address space.
//!
//! The limit is for a process of its own: this test program again under a shell that sets it.

use crate::machine::{Held, Opened, give, take_block, take_run};
use neap_base::{Linux, Platform};
use neap_pages::{MappingKind, Shape};
use std::process::Command;

const VARIABLE: &str = "NEAP_LIMITED";

#[test]
fn under_a_limit() {
    if std::env::var_os(VARIABLE).is_none() {
        return;
    }
    let platform = Linux::probe();
    assert!(platform.address_space_is_scarce());
    let o = Opened::new(&platform, &Shape { span: 1 << 44, ..crate::machine::shape(None) }).unwrap();
    let mut tables = 0;
    o.pages.each_mapping(&mut |part, _, length| tables += if part == MappingKind::OwnTables { length } else { 0 });
    assert!(tables < 1 << 20, "{tables} bytes of address space for the arena's own tables");
    let mut held: Vec<Held> = Vec::new();
    while let Ok(run) = take_run(&o, 900, 1, held.len() as u64) {
        held.push(run);
        if held.len().is_multiple_of(20) {
            o.pages.verify().unwrap();
        }
    }
    // Of 600 MiB: the test program, its thread and the tables (an eighth) have some.
    let bytes = held.len() * 900 * platform.page_size();
    assert!(bytes > 300 << 20, "{bytes} bytes only");
    o.pages.verify().unwrap();
    held.drain(..).for_each(|held| give(&o, held));
    while let Ok(block) = take_block(&o, 4, held.len() as u64) {
        held.push(block);
    }
    assert!(held.len() * 16 * platform.page_size() >= bytes);
    held.into_iter().for_each(|held| give(&o, held));
    assert!(!o.pages.release_all(&platform).left);
    o.pages.verify().unwrap();
    println!("reached the end");
}

#[test]
fn a_limit_on_address_space_is_used_up_and_survived() {
    let script = r#"ulimit -v 614400 && exec "$0" --exact limits::under_a_limit --nocapture --test-threads 1"#;
    let program = std::env::current_exe().unwrap();
    let answer = Command::new("sh").arg("-c").arg(script).arg(program).env(VARIABLE, "1").output().unwrap();
    let text = [answer.stdout, answer.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(answer.status.success() && text.contains("reached the end"), "{text}");
}
