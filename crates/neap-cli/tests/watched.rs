//! systemd's variables of memory pressure belong to the program, also while neap follows its
//! container.
//!
//! Method: a shell under neap reads the FIFO that the variable names.
#![allow(clippy::std_instead_of_core, reason = "tests are ordinary programs on std")]

mod running;

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use running::library;

#[test]
fn a_watched_file_and_its_variables_stay_the_programs() {
    let fifo = std::env::temp_dir().join(format!("neap-watch-{}", std::process::id()));
    let path = CString::new(fifo.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a string.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    let script = "exec 3<>\"$MEMORY_PRESSURE_WATCH\"; echo up; read line <&3; echo \"$line $MEMORY_PRESSURE_WRITE\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).env("LD_PRELOAD", library()).env("NEAP", "limit:auto,background:on,interval:10");
    command.env("MEMORY_PRESSURE_WATCH", &fifo).env("MEMORY_PRESSURE_WRITE", "c29tZQ==");
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    // The shell waits, and neap looks meanwhile.
    std::thread::sleep(Duration::from_millis(1500));
    let descriptors = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
    let is_watched =
        |entry: std::io::Result<fs::DirEntry>| fs::read_link(entry.unwrap().path()).is_ok_and(|target| target == fifo);
    let holders = descriptors.filter_map(|entry| is_watched(entry).then_some(())).count();
    OpenOptions::new().write(true).open(&fifo).unwrap().write_all(b"pressed\n").unwrap();
    line.clear();
    output.read_line(&mut line).unwrap();
    assert_eq!((line.as_str(), child.wait().unwrap().code()), ("pressed c29tZQ==\n", Some(0)));
    fs::remove_file(&fifo).unwrap();
    assert_eq!(holders, 2, "the shell's own, and the standard input of its `read`");
}
