//! The modules of this package form no circle.

#[path = "../../rmsnorm-conformance/tests/circles.rs"]
mod circles;
