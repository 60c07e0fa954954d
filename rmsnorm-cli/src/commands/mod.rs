//! One file per command, and `overview` for none.

pub mod bench;
pub mod compare;
pub mod conformance;
pub mod devices;
pub mod overview;
pub mod run;
pub mod tune;
pub mod warm;
