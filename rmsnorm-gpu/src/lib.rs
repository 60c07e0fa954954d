//! What the backends of rmsnorm for GPUs share: what a program is, how additions chain, what is kept on disk, and the calls
//! that their plans are tested with. No device and no unsafe code.
//!
//! A backend for another kind of GPU brings what is its own: tiles, texts, compiled kernels and launches.
//!
//! | here | role |
//! |---|---|
//! | [`program`] | what a program computes, from which tensors, and which of them its code may leave out |
//! | [`chain`] | additions one after the other, which error bounds follow from |
//! | [`cache`] | what was compiled, on disk |
//! | `testing` | calls of every kind without a device, for tests of plans; with the feature `testing` |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

pub mod cache;
pub mod chain;
pub mod program;
#[cfg(feature = "testing")]
pub mod testing;
