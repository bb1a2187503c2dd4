//! A pseudo terminal for programs, and the text on its screen.
//!
//! It implements what programs by crossterm use: text, places, clearing, the alternate screen and
//! the cursor. Other sequences are ignored.

use core::time::Duration;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

/// A program in a terminal; it ends with this.
pub struct Terminal {
    /// The program.
    pub child: Child,
    master: File,
    /// The program's side, to check its settings.
    slave: OwnedFd,
    before: libc::termios,
    cells: Vec<Vec<char>>,
    at: (usize, usize),
    /// Input that is not a whole sequence yet.
    rest: Vec<u8>,
    /// All output so far, with its sequences.
    pub output: Vec<u8>,
    /// Whether the alternate screen is shown.
    pub alternate: bool,
    /// Whether the cursor is shown.
    pub cursor: bool,
}

fn settings(terminal: &OwnedFd) -> libc::termios {
    // SAFETY: all-zero bytes are a valid termios, and it is written by the call.
    unsafe {
        let mut settings = core::mem::zeroed();
        assert_eq!(libc::tcgetattr(terminal.as_raw_fd(), &raw mut settings), 0);
        settings
    }
}

impl Terminal {
    /// Runs `command` in a terminal with the given columns and rows.
    pub fn run(mut command: Command, columns: u16, rows: u16) -> Terminal {
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let (mut master, mut slave) = (-1, -1);
        let none = core::ptr::null_mut();
        // SAFETY: two descriptors are written to live locals; the rest is read.
        let opened = unsafe { libc::openpty(&raw mut master, &raw mut slave, none, none.cast(), &raw const size) };
        assert_eq!(opened, 0, "no pseudo terminal: {}", std::io::Error::last_os_error());
        // SAFETY: both descriptors are new and have no other owner.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        for descriptor in [master.as_raw_fd(), slave.as_raw_fd()] {
            // SAFETY: other children of this process are not to keep the terminal open.
            unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        // SAFETY: changes a flag of a descriptor of this process: reads fail instead of waiting.
        unsafe { libc::fcntl(master.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        let side = || Stdio::from(slave.try_clone().unwrap());
        command.stdin(side()).stdout(side()).stderr(side()).env("TERM", "xterm");
        // SAFETY: between fork and exec only system calls are made, which are async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let before = settings(&slave);
        let cells = vec![vec![' '; columns.into()]; rows.into()];
        let child = command.spawn().unwrap();
        let (rest, output) = (Vec::new(), Vec::new());
        Terminal { child, master, slave, before, cells, at: (0, 0), rest, output, alternate: false, cursor: true }
    }

    /// Types keys.
    pub fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Returns the text on the screen.
    pub fn screen(&mut self) -> String {
        self.listen();
        let lines = self.cells.iter().map(|line| line.iter().collect::<String>());
        lines.map(|line| format!("{}\n", line.trim_end())).collect()
    }

    /// Waits until the screen is as `wanted`, up to a minute.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let screen = self.screen();
            if wanted(&screen) {
                return screen;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no {what} in a minute:\n{screen}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the program's end. Returns its status and its last output.
    pub fn end(&mut self) -> (ExitStatus, String) {
        let start = Instant::now();
        loop {
            // Its output must be read, or it would wait.
            self.listen();
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, self.screen());
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no end in a minute");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Panics unless the terminal has its initial settings.
    pub fn assert_restored(&mut self) {
        self.listen();
        let now = settings(&self.slave);
        let flags = |of: &libc::termios| [of.c_iflag, of.c_oflag, of.c_cflag, of.c_lflag];
        assert_eq!(flags(&now), flags(&self.before), "the terminal's settings");
        assert_eq!((self.alternate, self.cursor), (false, true), "the alternate screen, and the cursor");
    }

    /// Whether the terminal is in raw mode.
    pub fn is_raw(&self) -> bool {
        settings(&self.slave).c_lflag & (libc::ICANON | libc::ECHO) == 0
    }

    fn listen(&mut self) {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = self.master.read(&mut bytes) {
            self.rest.extend_from_slice(&bytes[..length]);
            self.output.extend_from_slice(&bytes[..length]);
        }
        let heard = core::mem::take(&mut self.rest);
        let mut at = 0;
        while at < heard.len() {
            match self.take(&heard[at..]) {
                Some(length) => at += length,
                None => break,
            }
        }
        self.rest = heard[at..].to_vec();
    }

    /// Executes the first sequence, and returns its length; `None` if it is not whole.
    fn take(&mut self, bytes: &[u8]) -> Option<usize> {
        match bytes {
            [0x1b, b'[', more @ ..] => {
                let length = more.iter().position(|byte| (0x40..=0x7e).contains(byte))?;
                let text = String::from_utf8_lossy(&more[..length]).into_owned();
                self.control(&text, more[length]);
                Some(length + 3)
            }
            [0x1b, ..] => (bytes.len() > 1).then_some(2),
            [b'\n', ..] => {
                self.at = (self.at.0 + 1, self.at.1);
                if self.at.0 == self.cells.len() {
                    self.at.0 -= 1;
                    self.cells.rotate_left(1);
                    self.cells.last_mut().unwrap().fill(' ');
                }
                Some(1)
            }
            [b'\r', ..] => {
                self.at.1 = 0;
                Some(1)
            }
            [byte, ..] => {
                let columns = self.cells[0].len();
                if self.at.1 == columns {
                    self.at.1 = 0;
                    self.take(b"\n");
                }
                self.cells[self.at.0][self.at.1] = char::from(*byte);
                self.at.1 += 1;
                Some(1)
            }
            [] => None,
        }
    }

    fn control(&mut self, text: &str, what: u8) {
        let mut numbers = text.split(';').map(|number| number.parse::<usize>().unwrap_or(1));
        match (what, text) {
            (b'H', _) => {
                let mut next = |most: usize| numbers.next().unwrap_or(1).clamp(1, most) - 1;
                self.at = (next(self.cells.len()), next(self.cells[0].len()));
            }
            (b'J', "2") => self.cells.iter_mut().for_each(|line| line.fill(' ')),
            (b'h' | b'l', "?1049") => {
                self.alternate = what == b'h';
                // The contents of the other screen are not needed.
                self.cells.iter_mut().for_each(|line| line.fill(' '));
                self.at = (0, 0);
            }
            (b'h' | b'l', "?25") => self.cursor = what == b'h',
            _ => {}
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
