//! The modules of this package form no circle: the check of rmsnorm-conformance.

#[path = "../../rmsnorm-conformance/tests/circles.rs"]
mod circles;
