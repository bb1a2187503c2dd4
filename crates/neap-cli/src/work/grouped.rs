//! Puts the thread of a workload into a memory group, and measures blocks that are charged to the
//! group.
//!
//! This module looks the C functions of the preloaded neap up by name, since the groups in this
//! executable are not those of that library. It has no lock.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use super::Outcome;
use super::meter::{BlockTable, Meter, own_rss_kib, take};

#[derive(Args)]
pub(super) struct GroupedOptions {
    #[arg(long, default_value_t = 64)]
    size: usize,
    #[arg(long, default_value_t = 500_000)]
    blocks: usize,
    /// Be in this group
    #[arg(long)]
    group: Option<String>,
}

/// Returns the address of a function of the preloaded library.
fn find(name: &CStr) -> Result<*mut c_void> {
    // SAFETY: the name is a C string. The returned address is only compared with null here.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    ensure!(!address.is_null(), "this malloc has no {}", name.to_string_lossy());
    Ok(address)
}

/// Puts this thread into the group at a path for good.
pub(super) fn enter(path: &str) -> Result<()> {
    let _ = entered(path)?;
    Ok(())
}

/// Puts this thread into the group at a path, and takes it out again.
pub(super) fn visit(path: &str) -> Result<()> {
    let mut entered = entered(path)?;
    // SAFETY: neap.h declares `neap_group_leave` with this type.
    let leave: extern "C" fn(*mut [u64; 4]) -> c_int = unsafe { std::mem::transmute(find(c"neap_group_leave")?) };
    ensure!(leave(&mut entered) == 0, "group `{path}` cannot be left");
    Ok(())
}

/// Puts this thread into the group at a path. Returns the words by which it leaves the group.
fn entered(path: &str) -> Result<[u64; 4]> {
    let (create, enter) = (find(c"neap_group_find_or_create")?, find(c"neap_group_enter")?);
    // SAFETY: neap.h declares `neap_group_find_or_create` with this type.
    let create: extern "C" fn(*const c_char, *mut u64) -> c_int = unsafe { std::mem::transmute(create) };
    // SAFETY: neap.h declares `neap_group_enter` with this type; the first argument has four words.
    let enter: extern "C" fn(*mut [u64; 4], u64) -> c_int = unsafe { std::mem::transmute(enter) };
    let text = CString::new(path).with_context(|| format!("`{path}` is no path of a group"))?;
    let (mut group, mut entered) = (0, [0; 4]);
    let answers = [create(text.as_ptr(), &mut group), enter(&mut entered, group)];
    if answers != [0, 0] {
        bail!("group `{path}` cannot be made and entered: {answers:?}");
    }
    Ok(entered)
}

/// Measures resident memory before and after the blocks are allocated.
pub(super) fn run(options: &GroupedOptions) -> Result<Outcome> {
    let mut table = BlockTable::new(options.blocks)?;
    options.group.as_deref().map_or(Ok(()), enter)?;
    // Memory that the heap takes with the first block does not count as memory of blocks.
    table[0] = take(options.size);
    let meter = Meter::start();
    let before = own_rss_kib()?;
    table[1..].iter_mut().for_each(|block| *block = take(options.size));
    let rss_kib = vec![before, own_rss_kib()?];
    Ok(Outcome { rss_kib, ..meter.stop().outcome(options.blocks as u64) })
}
