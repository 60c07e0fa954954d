//! The operations as candle's autograd knows them.
//!
//! A custom operation of candle has one result, and its `bwd` is given arguments, result and gradient: there is no place for
//! what forward computed beside y. Such values go into a cell of the operation's own struct. An instance is applied once and
//! lives exactly as long as its node of the graph, so the cell is what PyTorch calls a saved tensor.
//!
//! | operation | is a node that gives | its cell has |
//! |---|---|---|
//! | [`normalize::Normalize`] | y from x, weight and bias, or from the sum and without any work | the statistics, y until it is taken |
//! | [`sum`] | the sum of residual and x, or of residual and the norm of x, from one kernel with y, if that is wanted | the statistics of the norm of x |
//! | [`differentiate`] | no node: `bwd` runs it for the gradients | the parameters' gradients |
//! | [`in_place`] | no node: y over x | |

/// A custom operation on every device that there are kernels on: by this method, which takes the operands;
/// in place, the one that is overwritten first.
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
pub(crate) mod in_place;
mod lend;
pub(crate) mod normalize;
pub(crate) mod sum;
