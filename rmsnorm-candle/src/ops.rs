//! The operations, as candle's autograd sees them.
//!
//! A custom operation of candle has one result, and its `bwd` receives arguments, result and
//! gradient, but no other values that forward computed. Such values go into a cell of the
//! operation's struct. An instance is applied once and lives as long as its node of the graph, so
//! the cell is a saved tensor in PyTorch's sense.
//!
//! | operation | node | cell |
//! |---|---|---|
//! | [`normalize::Normalize`] | y from x, weight and bias; or from a sum, without computing | the statistics, and y until it is taken |
//! | [`gated::Gated`] | y from x or a sum, the parameters and the gate | as [`normalize::Normalize`] |
//! | [`sum`] | residual + x, or residual + norm(x); one kernel also computes y, if wanted | the statistics of the norm of x |
//! | [`differentiate`] | none: `bwd` runs it for the gradients | the parameters' gradients |
//! | [`in_place`] | none: overwrites x with y | |

/// Implements a custom operation on every device with kernels, with a method that takes the
/// operands; in place, the overwritten operand comes first.
macro_rules! on_devices {
    ($method:ident: $($storage:ident $layout:ident),+) => {
        fn cpu_fwd(&self, $($storage: &CpuStorage, $layout: &Layout),+) -> Result<(CpuStorage, Shape)> {
            self.$method([$(($storage, $layout)),+])
        }

        #[cfg(feature = "cuda")]
        fn cuda_fwd(
            &self,
            $($storage: &candle_core::CudaStorage, $layout: &Layout),+
        ) -> Result<(candle_core::CudaStorage, Shape)> {
            self.$method([$(($storage, $layout)),+])
        }
    };
    ($method:ident over $x:ident $x_layout:ident: $($storage:ident $layout:ident),+) => {
        fn cpu_fwd(
            &self,
            $x: &mut CpuStorage,
            $x_layout: &Layout,
            $($storage: &CpuStorage, $layout: &Layout),+
        ) -> Result<()> {
            self.$method(($x, $x_layout), [$(($storage, $layout)),+])
        }

        #[cfg(feature = "cuda")]
        fn cuda_fwd(
            &self,
            $x: &mut candle_core::CudaStorage,
            $x_layout: &Layout,
            $($storage: &candle_core::CudaStorage, $layout: &Layout),+
        ) -> Result<()> {
            self.$method(($x, $x_layout), [$(($storage, $layout)),+])
        }
    };
}

mod cell;
mod differentiate;
pub(crate) mod gated;
pub(crate) mod in_place;
mod lend;
pub(crate) mod normalize;
mod parameters;
pub(crate) mod sum;
