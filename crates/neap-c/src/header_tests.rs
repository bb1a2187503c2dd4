//! Tests that the header agrees with the library. It compiles alone as C and as C++, and its
//! constants, structures and sizes equal those of this crate. (`cargo xtask symbols` compares the
//! declared functions with the finished libraries.)

use crate::charge::{AT_DEADLINE, AT_LIMIT, Charged, Holder, Refusal, TOO_LARGE};
use crate::counter::Counter;
use crate::error::Error;
use crate::event::Listens;
use crate::group::{GroupCount, GroupInfo, Inside};
use crate::headroom::Room;
use crate::histogram::Histogram;
use crate::instance::{ALL, Drained, Stats, Usage};
use crate::list::{List, VERDICTS, Walked};
use crate::reference::Ref;
use crate::shrinker::{BY_GROUP, BY_NODE, INLINE, NO_SEEKS, Reclaimed, Said};
use core::fmt::Write;
use core::mem::{align_of, offset_of, size_of};
use neap::Pressure;
use neap::groups::{Bound, Event, Group, UNLIMITED};
use neap::reclaim::{Asked, DONE, EMPTY, STOP};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const STRICT: [&str; 5] = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"];

fn include() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// Compiles a text that includes the header, with all installed compilers, at least two of them.
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
    let names =
        "ARGUMENT OWNER CHARGE WAIT FULL MEMORY HANDLE FENCE GROUP EXISTS NAME DEEP CHILDREN EVENTFD SHRINKER CALLBACK \
         FIXED PROFILE FILE"
            .split(' ');
    assert_eq!(names.clone().count(), Error::ALL.len());
    for (name, error) in names.zip(Error::ALL) {
        assert_eq!(format!("{error:?}").to_uppercase(), name);
        same(&format!("NEAP_E_{name}"), error as i128);
    }
    same("NEAP_OK", 0);
    same("NEAP_NO_OWNER", neap::percpu::Owner::NONE.to_bits().into());
    same("NEAP_LARGEST", neap::percpu::LARGEST as i128);
    same("NEAP_ROOT", Group::ROOT.id().to_bits().into());
    assert_eq!(UNLIMITED, u64::MAX);
    same("(NEAP_UNLIMITED == UINT64_MAX)", 1);
    for bound in Bound::ALL {
        same(&format!("NEAP_{}", bound.name().to_uppercase()), bound as i128);
    }
    for event in Event::ALL {
        same(&format!("NEAP_EVENT_{}", event.name().to_uppercase()), event as i128);
    }
    same("NEAP_EVENT_GONE", crate::event::GONE.into());
    for (number, level) in Pressure::ALL.iter().enumerate() {
        same(&format!("NEAP_PRESSURE_{}", level.name().to_uppercase()), number as i128);
    }
    // The header's object may be larger than the library's: room for later versions.
    let mut object = |name: &str, size: usize, align: usize, room: usize| {
        assert!(size <= room && align <= 8, "{name}: {size} bytes aligned to {align}, and {room} in the header");
        same(&format!("sizeof({name})"), room as i128);
        same(&format!("alignof({name})"), 8);
    };
    let marks = [Counter::MARK, Ref::MARK, Histogram::MARK, Inside::MARK, Listens::MARK, Charged::MARK, List::MARK];
    assert_eq!(marks.iter().collect::<BTreeSet<_>>().len(), marks.len(), "no kind is taken for another");
    object("neap_counter", size_of::<Counter>(), align_of::<Counter>(), 128);
    object("neap_ref", size_of::<Ref>(), align_of::<Ref>(), 128);
    object("neap_histogram", size_of::<Histogram>(), align_of::<Histogram>(), 4096);
    object("neap_entered", size_of::<Inside>(), align_of::<Inside>(), 32);
    object("neap_listener", size_of::<Listens>(), align_of::<Listens>(), 64);
    object("neap_charge", size_of::<Charged>(), align_of::<Charged>(), 32);
    object("neap_list", size_of::<List>(), align_of::<List>(), 32);
    object("neap_item", size_of::<neap::lru::Item>(), align_of::<neap::lru::Item>(), 24);
    same("(NEAP_ALL == UINT32_MAX)", (ALL == u32::MAX).into());
    same("sizeof(neap_drained)", size_of::<Drained>() as i128);
    same("sizeof(neap_stats)", size_of::<Stats>() as i128);
    same("sizeof(neap_usage)", size_of::<Usage>() as i128);
    same("sizeof(neap_group_info)", size_of::<GroupInfo>() as i128);
    same("sizeof(neap_group_count)", size_of::<GroupCount>() as i128);
    same("sizeof(neap_headroom)", size_of::<Room>() as i128);
    same("sizeof(neap_holder)", size_of::<Holder>() as i128);
    same("sizeof(neap_refusal)", size_of::<Refusal>() as i128);
    same("sizeof(neap_asked)", size_of::<Asked>() as i128);
    same("sizeof(neap_shrinker_spec)", size_of::<Said>() as i128);
    for (name, verdict) in "REMOVED ROTATE SKIP RETRY OVER".split(' ').zip(VERDICTS) {
        same(&format!("NEAP_{name}"), verdict as i128);
    }
    same("sizeof(neap_walked)", size_of::<Walked>() as i128);
    same("sizeof(neap_reclaimed)", size_of::<Reclaimed>() as i128);
    same("(NEAP_EMPTY == UINT64_MAX - 1)", (EMPTY == u64::MAX - 1).into());
    same("(NEAP_STOP == UINT64_MAX)", (STOP == u64::MAX).into());
    same("(NEAP_DONE == UINT64_MAX - 2)", (DONE == u64::MAX - 2).into());
    for (name, flag) in [("BY_NODE", BY_NODE), ("BY_GROUP", BY_GROUP), ("INLINE", INLINE), ("NO_SEEKS", NO_SEEKS)] {
        same(&format!("NEAP_{name}"), flag.into());
    }
    for (name, reason) in [("AT_LIMIT", AT_LIMIT), ("AT_DEADLINE", AT_DEADLINE), ("TOO_LARGE", TOO_LARGE)] {
        same(&format!("NEAP_{name}"), reason.into());
    }
    macro_rules! fields {
        ($name:literal, $layout:ty: $($field:ident)*) => {
            $(same(concat!("offsetof(", $name, ", ", stringify!($field), ")"), offset_of!($layout, $field) as i128);)*
        };
    }
    fields!("neap_usage", Usage: allocated_bytes populated_bytes empty_bytes reserve_bytes allocations owners);
    fields!("neap_stats", Stats: allocated_bytes active_bytes resident_bytes mapped_bytes retained_bytes metadata_bytes);
    fields!("neap_stats", Stats: stack_bytes barn_bytes slab_bytes page_list_bytes free_bytes percpu_bytes);
    fields!("neap_stats", Stats: percpu_free_bytes limit_bytes page_bytes nodes has_thread refused);
    fields!("neap_stats", Stats: sampled_every_bytes);
    fields!("neap_drained", Drained: page_bytes free_bytes objects cpus skipped);
    fields!("neap_group_info", GroupInfo: group parent name max_bytes high_bytes low_bytes min_bytes charged_bytes peak_bytes);
    fields!("neap_group_info", GroupInfo: pages_bytes objects_bytes percpu_bytes by_hand_bytes low_events high_events);
    fields!("neap_group_info", GroupInfo: max_events refused_events overcharged_events changed_events children);
    fields!("neap_group_count", GroupCount: live dying ids);
    fields!("neap_group_info", GroupInfo: pressure_low_events pressure_medium_events pressure_critical_events);
    fields!("neap_group_info", GroupInfo: local_low_events local_high_events local_max_events local_refused_events);
    fields!("neap_group_info", GroupInfo: local_overcharged_events local_changed_events local_pressure_low_events);
    fields!("neap_group_info", GroupInfo: local_pressure_medium_events local_pressure_critical_events stalled_us);
    fields!("neap_group_info", GroupInfo: container_events);
    fields!("neap_headroom", Room: limit_bytes used_bytes wall_ms limit_changes pressure reserved);
    fields!("neap_holder", Holder: group bytes);
    fields!("neap_asked", Asked: group node unsure to_scan scanned freed_bytes need deadline priority);
    fields!("neap_shrinker_spec", Said: name count scan gone data group batch seeks flags);
    fields!("neap_walked", Walked: scanned removed stopped);
    fields!("neap_reclaimed", Reclaimed: bytes scanned freed late);
    fields!("neap_refusal", Refusal: group max_bytes charged_bytes need_bytes holders reason reserved);
    for (name, bytes) in [
        ("neap_owner", 8),
        ("neap_percpu", 8),
        ("neap_group", 8),
        ("neap_shrinker", 8),
        ("bool", 1),
        ("size_t", size_of::<usize>()),
    ] {
        same(&format!("sizeof({name})"), bytes as i128);
    }
    text.push_str("int main(void) { return 0; }\n");
    compiles("layout", &text);
    let header = std::fs::read_to_string(include().join("neap.h")).unwrap();
    for line in [
        concat!("#define NEAP_VERSION \"", env!("CARGO_PKG_VERSION"), "\"\n"),
        concat!("#define NEAP_VERSION_MAJOR ", env!("CARGO_PKG_VERSION_MAJOR"), "\n"),
        concat!("#define NEAP_VERSION_MINOR ", env!("CARGO_PKG_VERSION_MINOR"), "\n"),
        concat!("#define NEAP_VERSION_PATCH ", env!("CARGO_PKG_VERSION_PATCH"), "\n"),
    ] {
        assert!(header.contains(line), "the header lacks {line}");
    }
}
