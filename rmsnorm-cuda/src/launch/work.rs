//! The steps of a plan as calls to the driver.

use std::ffi::c_void;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{self, CUlaunchAttributeID_enum as AttributeId};
use rmsnorm_spec::{Error, Tensor};

use crate::error::device_error;
use crate::kernel::Kernels;
use crate::params::{Columns, Matrix, Params};
use crate::plan::{Plan, Step};

/// A step with its kernel at hand.
#[derive(Clone, Copy)]
pub(super) enum Work {
    Clear { launch: Launch, tensor: Tensor, first: usize, bytes: usize },
    Launch(Launch),
}

impl Work {
    /// A step of that plan.
    pub(super) fn new(step: Step, plan: &Plan, kernels: &Kernels) -> Result<Self, Error> {
        Ok(match step {
            Step::Clear { key, grid, tensor, first, bytes } => {
                let threads = key.tile.threads_per_row;
                let launch = Launch { kernel: kernels.get(&key, plan)?, grid, threads, shared_bytes: 0, cluster: 1 };
                Work::Clear { launch, tensor, first, bytes }
            }
            Step::Launch { key, grid, cluster, threads, shared_bytes } => {
                Work::Launch(Launch { kernel: kernels.get(&key, plan)?, grid, threads, shared_bytes, cluster })
            }
        })
    }

    /// `columns` is there where the plan is of a half on a rank's columns.
    pub(super) fn enqueue(
        self,
        stream: &CudaStream,
        params: &Params,
        columns: Option<&Columns>,
        overlap: bool,
    ) -> Result<(), Error> {
        match self {
            Work::Clear { launch, tensor, first, bytes } => {
                // What it zeroes, in the words of `clear.cu`.
                let y = Matrix { data: params.tensor(tensor).data + first as u64, row_stride: 0 };
                launch.enqueue(stream, &Params { y, cols: bytes as u64, ..Params::default() }, None, overlap)
            }
            Work::Launch(launch) => launch.enqueue(stream, params, columns, overlap),
        }
    }
}

/// One kernel launch.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) kernel: sys::CUfunction,
    pub(crate) grid: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) cluster: u32,
}

impl Launch {
    fn enqueue(
        self,
        stream: &CudaStream,
        params: &Params,
        columns: Option<&Columns>,
        overlap: bool,
    ) -> Result<(), Error> {
        let columns = columns.map_or(std::ptr::null(), std::ptr::from_ref);
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast(), columns.cast_mut().cast()];
        // SAFETY:
        // - kernel: `Kernels` hands out only kernels whose module stays loaded until the process ends, so the work may run
        //   whenever its stream or a graph comes to it, be the backend dropped by then or not;
        // - arguments: the kernel's first parameter is a `Params`, or, where no rows lie in groups, no codes are written, nothing is
        //   normed twice or x is no sum of parts, what comes before the fields of those (`Params::bytes`). Halves on a rank's columns
        //   have a second, a `Columns`, which is there with every plan of theirs (`launch::columns`); where a kernel has one parameter,
        //   the driver does not look at the second address. Sizes were checked where it was compiled;
        // - memory: addresses, lengths and strides come from a `Checked` call, so every access that the kernel makes for (rows, cols),
        //   and for so many parts of x, lies in a live tensor; what is cleared lies in the workspace, or in an output of that many bytes; its key
        //   has groups exactly where the problem has, and their rows fit the 32 bits that it counts them in; no output overlaps
        //   another; the workspace has the plan's length; statistics are as long as the ranks and rows that `Columns` and `Params` say;
        // - alignment: the key's access_bytes divide all addresses and strides, those of codes times the size of the widest
        //   matrix's elements, as many codes being one access; what clears, transposes codes, or makes those along columns,
        //   looks at them itself;
        // - order: a kernel that reads what one before it has written, rstd among others, waits for it first
        //   (`wait_for_earlier_kernels`); cudarc's events, held in `Tensors`, order the accesses with those on other streams.
        unsafe { self.call(stream, &mut arguments, overlap) }
    }

    /// `overlap`: the kernel may start while the one before it on the stream still runs, and waits for it itself before
    /// it touches memory (programmatic dependent launch).
    ///
    /// # Safety
    /// - Kernel: it stays loaded until the work is done.
    /// - Arguments: addresses of at least as many values as it has parameters, each of its parameter's type; the driver looks at no
    ///   more.
    /// - What it does with them is sound: memory that it reads and writes is there and aligned as it expects, and ordered with
    ///   all else that uses it.
    pub(crate) unsafe fn call(
        self,
        stream: &CudaStream,
        arguments: &mut [*mut c_void],
        overlap: bool,
    ) -> Result<(), Error> {
        let cluster = attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, |value| {
            value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 };
        });
        let overlapping = attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, |value| {
            value.programmaticStreamSerializationAllowed = 1;
        });
        let ignored = attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_IGNORE, |_| {});
        let mut attributes =
            [if self.cluster > 1 { cluster } else { ignored }, if overlap { overlapping } else { ignored }];
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY:
        // - kernel, arguments and what it does: the caller's promises; the driver copies the arguments before it returns;
        // - config: points to as many attributes as it says, each with the value that belongs to its id.
        unsafe { sys::cuLaunchKernelEx(&raw const config, self.kernel, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(device_error("cuLaunchKernelEx"))
    }
}

fn attribute(id: AttributeId, set: impl FnOnce(&mut sys::CUlaunchAttributeValue)) -> sys::CUlaunchAttribute {
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    set(&mut value);
    sys::CUlaunchAttribute { id, pad: [0; 4], value }
}
