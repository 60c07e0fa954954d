//! What the backends of rmsnorm for GPUs share: what a program is, what of their plans is the same, what is kept on disk, and
//! the calls that plans are tested with. No device and no unsafe code.
//!
//! A backend for another kind of GPU brings what is its own: tiles, texts, compiled kernels and launches.
//!
//! | here | role |
//! |---|---|
//! | [`text`] | the files that programs are made of |
//! | [`program`] | what a program computes, from which tensors, and what of a call its code depends on |
//! | [`reduction`] | the second stage of the gradients: partial rows, and the threads that add them up |
//! | [`chain`] | additions one after the other, which error bounds follow from |
//! | [`tuning`] | tables of what was measured to be best, by the length of a row |
//! | [`describe`] | plans in words |
//! | [`cache`] | what was compiled, on disk |
//! | [`parallel`] | compiling on several threads |
//! | `testing` | calls of every kind without a device, and what every backend's plans are held to (`plan_tests!`); with the feature `testing` |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod cache;
pub mod chain;
pub mod describe;
pub mod parallel;
pub mod program;
pub mod reduction;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;
pub mod tuning;
