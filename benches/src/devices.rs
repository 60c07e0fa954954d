//! The timer, the copies and the size limits of each backend.

mod cpu;
pub(crate) mod cuda;
mod gpu;
mod wgpu;
