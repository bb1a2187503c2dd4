//! Blocks for the program: runs of pages, reallocation, charges, checks, and room when memory is
//! short.

pub(crate) mod charged_alloc;
pub(crate) mod checked;
pub(crate) mod fresh;
pub(crate) mod large;
pub(crate) mod reallocate;
pub(crate) mod room;
pub(crate) mod splits;
