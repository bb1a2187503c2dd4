//! The machine on which figures were measured: processor, kernel, memory, C library.
//!
//! A value that cannot be read is "unknown". No function here fails.

use std::ffi::CStr;
use std::fs;

use serde::Serialize;

/// The machine in a report. `load` is the one-minute load average when the command looked. If it is
/// above zero, other programs ran before.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpus: usize,
    pub(crate) model: String,
    pub(crate) kernel: String,
    /// Physical memory in MiB.
    pub(crate) memory: u64,
    /// Mode of transparent huge pages.
    pub(crate) thp: String,
    pub(crate) glibc: String,
    pub(crate) load: String,
}

impl Machine {
    pub(crate) fn look() -> Machine {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Machine {
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            model: known(field(&read("/proc/cpuinfo"), "model name")),
            kernel: known(Some(read("/proc/sys/kernel/osrelease"))),
            memory: field(&read("/proc/meminfo"), "MemTotal").and_then(|text| kib(&text)).unwrap_or(0) / 1024,
            thp: known(chosen(&read("/sys/kernel/mm/transparent_hugepage/enabled"))),
            glibc: glibc(),
            load: known(read("/proc/loadavg").split(' ').next().map(str::to_string)),
        }
    }

    /// One line for the foot of a table.
    pub(crate) fn line(&self) -> String {
        format!(
            "{} x {}, {} MiB, Linux {}, glibc {}, transparent huge pages: {}, load at start {}",
            self.cpus, self.model, self.memory, self.kernel, self.glibc, self.thp, self.load
        )
    }
}

fn glibc() -> String {
    // SAFETY: the function takes nothing. It returns a static string that ends with a NUL and never
    // changes.
    let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    version.to_string_lossy().into_owned()
}

fn known(text: Option<String>) -> String {
    text.map(|text| text.trim().to_string()).filter(|text| !text.is_empty()).unwrap_or_else(|| "unknown".to_string())
}

/// The value of the first `name: value` line.
fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_string())
    })
}

/// The number of a `123 kB` value.
fn kib(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// The bracketed word of a sysfs choice.
fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_choices_are_found() {
        let cpuinfo = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nmodel name\t: other\n";
        assert_eq!(field(cpuinfo, "model name").as_deref(), Some("A CPU @ 2 GHz"));
        assert_eq!(field(cpuinfo, "model"), None);
        assert_eq!(kib("24576 kB"), Some(24576));
        assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("gone"), None);
    }

    #[test]
    fn the_machine_is_never_blank() {
        let machine = Machine::look();
        assert!(machine.cpus > 0 && machine.memory > 0);
        assert!(!machine.kernel.is_empty() && machine.glibc.contains('.'));
    }
}
