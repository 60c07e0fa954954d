//! The commands, one file each; `overview` runs without a command.

pub mod bench;
pub mod compare;
pub mod conformance;
pub mod devices;
pub mod overview;
pub mod report;
pub mod run;
pub mod tune;
pub mod warm;
