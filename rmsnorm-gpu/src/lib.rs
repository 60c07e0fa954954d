//! The parts that rmsnorm's GPU backends share: descriptions of programs, common parts of plans,
//! the cache of compiled kernels, and calls for testing plans. It needs no device and has no unsafe
//! code.
//!
//! A backend for another kind of GPU adds its tiles, texts, compiler and launches.
//!
//! | here | role |
//! |---|---|
//! | [`text`] | the files that programs are made of |
//! | [`program`] | what a program computes, its tensors, and the properties of a call that its code depends on |
//! | [`reduction`] | the second stage of the gradients: partial rows and the threads that add them |
//! | [`chain`] | lengths of chains of additions, for error bounds |
//! | [`tuning`] | tables of the fastest measured settings per row length |
//! | [`describe`] | plans as text |
//! | [`cache`] | compiled kernels on disk |
//! | [`parallel`] | compiling on several threads |
//! | `testing` | calls of every kind, and the tests that every backend's plans must pass (`plan_tests!`); needs the feature `testing` |
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
