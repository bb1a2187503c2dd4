//! Renders the book that a `book.toml` describes, for `cargo xtask docs`.
//!
//! A crate of its own: the renderer has 130 dependencies, and no other command of xtask waits for
//! their compilation.

use anyhow::{Context, Result};
use mdbook_driver::MDBook;

fn main() -> Result<()> {
    let root = std::env::args_os().nth(1).context("usage: neap-book FOLDER-OF-BOOK.TOML")?;
    let book = MDBook::load(&root)?;
    book.build()
}
