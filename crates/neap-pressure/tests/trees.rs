//! Every tree of the table has its level, limit, used bytes and headroom.

#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod made;

use made::table::TABLE;
use made::{explained, name};
use neap_pressure::{MemoryLevel, Sensor, Subject};

#[test]
fn every_tree_has_its_answer() {
    assert!(TABLE.len() >= 40);
    let mut wrong = Vec::new();
    for case in TABLE {
        // Reads of few bytes find mistakes at the edges of buffers.
        for step in [0, 1, 7] {
            let mut tree = case.tree();
            tree.step = step;
            let mut sensor = Box::new(Sensor::new(Subject::Own));
            let report = sensor.survey(&tree);
            let text = explained(report);
            let wall = report.wall();
            let found = (
                wall.map_or(String::new(), |wall| name(report, wall)),
                report.limit().and_then(|level| level.limit),
                wall.and_then(MemoryLevel::used),
                wall.and_then(MemoryLevel::headroom),
            );
            let expected = (case.level.to_string(), Some(case.limit), Some(case.used), Some(case.headroom));
            if found != expected {
                wrong.push(format!("{}: {found:?} instead of {expected:?}\n{text}", case.name));
                break;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn names_of_the_table_are_unique() {
    let mut names: Vec<_> = TABLE.iter().map(|case| case.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), TABLE.len());
}
