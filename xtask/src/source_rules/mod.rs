//! Rules about the sources, and the search of links and imports in them.

pub(crate) mod cycles;
pub(crate) mod imports;
pub(crate) mod links;
pub(crate) mod names;
pub(crate) mod prose;
pub(crate) mod source_names;
pub(crate) mod sources;
pub(crate) mod tidy;
