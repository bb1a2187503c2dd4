//! Whether this process gets huge pages: the system's settings and the process's own.
//!
//! A call that allows huge pages in a range succeeds even if the kernel will supply none. So
//! [`supply`] reads the settings.

use crate::environment::read_file;
use crate::memory::{HugePages, huge_pages};
use crate::syscall::syscall5;

/// What the kernel does with huge pages of 2 MiB for this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HugePageSupply {
    /// The kernel supplies no huge pages.
    None,
    /// The kernel supplies huge pages in ranges that allow them.
    OnRequest,
    /// The kernel supplies huge pages in every range that does not forbid them.
    Everywhere,
}

/// Bit of the answer of `PR_GET_THP_DISABLE` since Linux 6.18: the process has huge pages on
/// request only. Without this bit, an answer other than 0 means no huge pages.
const EXCEPT_ADVISED: usize = 2;

/// Reads what the kernel does with huge pages for this process. Settings that change later are not
/// noticed. Settings that cannot be read count as "on request".
pub fn supply() -> HugePageSupply {
    // With a length of 0 the kernel only checks whether it knows the advice.
    if huge_pages(0, 0, HugePages::Allowed).is_err() {
        return HugePageSupply::None;
    }
    let (number, option) =
        (linux_raw_sys::general::__NR_prctl as usize, linux_raw_sys::prctl::PR_GET_THP_DISABLE as usize);
    // SAFETY: the call has no pointers.
    let disabled = unsafe { syscall5(number, option, 0, 0, 0, 0) }.unwrap_or(0);
    let (mut size, mut all) = ([0; 48], [0; 48]);
    // Since Linux 6.8, each size has a setting, which may refer to the common one.
    let size = read_file(c"/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled", &mut size).unwrap_or(b"");
    let all = read_file(c"/sys/kernel/mm/transparent_hugepage/enabled", &mut all).unwrap_or(b"");
    decide(disabled, size, all)
}

/// Decides by the answer of `PR_GET_THP_DISABLE`, the setting of the size, and the common setting.
fn decide(disabled: usize, size: &[u8], all: &[u8]) -> HugePageSupply {
    let setting = match chosen(size) {
        b"" | b"inherit" => chosen(all),
        setting => setting,
    };
    let supply = match setting {
        b"always" => HugePageSupply::Everywhere,
        b"never" => HugePageSupply::None,
        _ => HugePageSupply::OnRequest,
    };
    match disabled {
        0 => supply,
        _ if disabled & EXCEPT_ADVISED > 0 => supply.min(HugePageSupply::OnRequest),
        _ => HugePageSupply::None,
    }
}

/// The word in brackets, as in `always [madvise] never`. Empty if there is none.
fn chosen(setting: &[u8]) -> &[u8] {
    let word = setting.split(|&byte| byte == b'[').nth(1);
    word.and_then(|word| word.split(|&byte| byte == b']').next()).unwrap_or(b"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_system_size_and_process_decide_together() {
        use HugePageSupply::{Everywhere, None, OnRequest};
        let sized = |size: &str| decide(0, size.as_bytes(), b"[always] madvise never\n");
        assert_eq!(sized(""), Everywhere, "before Linux 6.8");
        assert_eq!(sized("always [inherit] madvise never\n"), Everywhere);
        assert_eq!(sized("always inherit [madvise] never\n"), OnRequest);
        assert_eq!(sized("always inherit madvise [never]\n"), None);
        let common = |all: &str| [0, 1, 1 | EXCEPT_ADVISED].map(|flags| decide(flags, b"", all.as_bytes()));
        assert_eq!(common("[always] madvise never\n"), [Everywhere, None, OnRequest]);
        assert_eq!(common("always [madvise] never\n"), [OnRequest, None, OnRequest]);
        assert_eq!(common("always madvise [never]\n"), [None; 3]);
        assert_eq!(common(""), [OnRequest, None, OnRequest], "without /sys");
        assert_eq!(decide(0, b"[always] inherit madvise never", b"always madvise [never]"), Everywhere);
    }
}
