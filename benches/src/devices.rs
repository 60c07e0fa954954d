//! How each backend is measured: its clock, its copies, and what it has room for.

mod cpu;
pub(crate) mod cuda;
mod gpu;
mod wgpu;
