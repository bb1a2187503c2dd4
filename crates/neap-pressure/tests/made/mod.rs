//! Trees of files in memory.
#![allow(dead_code, reason = "not every test file uses every piece")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};

use neap_pressure::{Access, Errno, FileKind, Files, LimitedBy, MemoryLevel, MemoryReport, Notify, Ready};

pub(crate) mod table;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// A file of a tree.
#[derive(Clone, Debug)]
pub(crate) enum Entry {
    /// Readable and writable.
    Text(Vec<u8>),
    /// Readable; writing fails for a reason.
    ReadOnly(Vec<u8>, Errno),
    /// Opening fails for a reason.
    Refused(Errno),
    /// It can be opened; reading fails for a reason.
    Unreadable(Errno),
    /// A FIFO, socket or directory.
    Special(FileKind),
}

/// Files by path.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    pub(crate) files: BTreeMap<Vec<u8>, Entry>,
    /// Most bytes of one read; 0 for no bound.
    pub(crate) step: usize,
    /// Files that were opened.
    pub(crate) opened: Cell<usize>,
    /// Paths and texts that were written.
    pub(crate) written: RefCell<Vec<(String, String)>>,
    /// Files that refuse to be written, and why.
    pub(crate) refusing: BTreeMap<String, Errno>,
}

impl Tree {
    pub(crate) fn of(files: &[(&str, &str)]) -> Tree {
        let mut tree = Tree::default();
        for (path, text) in files {
            tree.text(path, text);
        }
        tree
    }

    pub(crate) fn text(&mut self, path: &str, text: &str) {
        self.set(path, Entry::Text(text.as_bytes().to_vec()));
    }

    pub(crate) fn set(&mut self, path: &str, entry: Entry) {
        self.files.insert(path.as_bytes().to_vec(), entry);
    }
}

pub(crate) struct Open {
    path: String,
    text: Result<Vec<u8>, Errno>,
    at: usize,
}

impl Open {
    /// A FIFO, socket or eventfd with one notification.
    fn stream(path: &str) -> Open {
        Open { path: path.into(), text: Ok(vec![1; 8]), at: 0 }
    }
}

impl Files for Tree {
    type File = Open;

    fn open(&self, path: &CStr, access: Access) -> Result<Open, Errno> {
        self.opened.set(self.opened.get() + 1);
        let text = match self.files.get(path.to_bytes()) {
            None => return Err(Errno::NOENT),
            Some(Entry::Refused(error)) => return Err(*error),
            Some(Entry::ReadOnly(_, error)) if access != Access::Read => return Err(*error),
            Some(Entry::Text(text) | Entry::ReadOnly(text, _)) => Ok(text.clone()),
            Some(Entry::Unreadable(error)) => Err(*error),
            Some(Entry::Special(FileKind::Socket)) => return Err(Errno::NXIO),
            Some(Entry::Special(FileKind::Stream)) => return Ok(Open::stream(path.to_str().unwrap())),
            Some(Entry::Special(_)) => Ok(Vec::new()),
        };
        Ok(Open { path: path.to_str().unwrap_or_default().into(), text, at: 0 })
    }

    fn read(&self, file: &mut Open, buffer: &mut [u8]) -> Result<usize, Errno> {
        let text = file.text.as_ref().map_err(|error| *error)?;
        let rest = &text[file.at.min(text.len())..];
        if rest.is_empty() && text[..] == [1; 8] {
            return Err(Errno::AGAIN);
        }
        let most = if self.step == 0 { usize::MAX } else { self.step };
        let length = rest.len().min(buffer.len()).min(most);
        buffer[..length].copy_from_slice(&rest[..length]);
        file.at += length;
        Ok(length)
    }

    fn kind(&self, path: &CStr) -> Result<FileKind, Errno> {
        match self.files.get(path.to_bytes()) {
            None => Err(Errno::NOENT),
            Some(Entry::Special(kind)) => Ok(*kind),
            Some(_) if path.to_bytes().ends_with(b".pressure") => Ok(FileKind::Kernel),
            Some(_) => Ok(FileKind::Other),
        }
    }
}

impl Notify for Tree {
    fn write(&self, file: &mut Open, bytes: &[u8]) -> Result<(), Errno> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        self.written.borrow_mut().push((file.path.clone(), text));
        self.refusing.get(&file.path).map_or(Ok(()), |error| Err(*error))
    }

    fn read_anew(&self, file: &mut Open, buffer: &mut [u8]) -> Result<usize, Errno> {
        let path = CString::new(file.path.clone()).unwrap();
        self.read(&mut self.open(&path, Access::Read)?, buffer)
    }

    fn counter(&self) -> Result<Open, Errno> {
        Ok(Open::stream("eventfd"))
    }

    fn connect(&self, path: &CStr) -> Result<Open, Errno> {
        Ok(Open::stream(path.to_str().unwrap()))
    }

    fn number(&self, file: &Open) -> i32 {
        if file.path == "eventfd" { 1007 } else { 10 }
    }

    fn wait(&self, _: &Open, wanted: Ready, _: u32) -> Result<Ready, Errno> {
        Ok(wanted)
    }
}

/// Name of a level as in the table.
pub(crate) fn name(report: &MemoryReport, level: &MemoryLevel) -> String {
    match level.owner {
        LimitedBy::Group => report.path(level).escape_ascii().to_string(),
        LimitedBy::HiddenAncestor => "hidden".into(),
        LimitedBy::Machine => "machine".into(),
        LimitedBy::AddressSpace => "address space".into(),
        LimitedBy::Data => "data".into(),
    }
}

/// The explanation of a report.
pub(crate) fn explained(report: &MemoryReport) -> String {
    let mut text = String::new();
    report.explain(&mut text).unwrap();
    text
}
