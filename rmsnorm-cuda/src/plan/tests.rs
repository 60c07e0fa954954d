//! Plans as tables.
