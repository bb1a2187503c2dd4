//! The state of a terminal after a panic.

use std::process::Command;

use ratatui::crossterm::event;

use super::live::Screen;
use neap_testing::terminal::Terminal;

/// Variable that is set for the test `panics` below.
const ROLE: &str = "NEAP_TEST_ROLE";

#[test]
fn a_panic_gives_the_terminal_back_though_nothing_is_unwound() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "top::live_tests::panics", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, "panics");
    let mut terminal = Terminal::run(command, 80, 24);
    terminal.wait_for("screen", |screen| screen.contains("drawn"));
    assert!(terminal.alternate && !terminal.cursor && terminal.is_raw());
    terminal.press("x");
    let (status, screen) = terminal.end();
    assert!(!status.success() && screen.contains("on purpose"), "{status}: {screen}");
    terminal.assert_restored();
}

#[test]
#[ignore = "a role that the test above starts"]
fn panics() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    // In a build whose panics abort, no value is dropped. This hook aborts, too.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::abort();
    }));
    let mut screen = Screen::open().unwrap();
    screen.0.draw(|frame| frame.render_widget("drawn", frame.area())).unwrap();
    event::read().unwrap();
    panic!("on purpose");
}
