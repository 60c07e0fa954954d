//! Runs the steps of a plan through the driver.

use std::ffi::c_void;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{self, CUlaunchAttributeID_enum as AttributeId};
use rmsnorm_spec::{Error, Tensor};

use crate::error::device_error;
use crate::kernel::Kernels;
use crate::params::{Columns, Params};
use crate::plan::{Plan, Step};

/// A step of a plan, with its kernel.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    step: &'a Step,
    launch: Launch,
}

impl<'a> Work<'a> {
    /// Gets the kernel of a step of `plan`.
    pub(super) fn new(step: &'a Step, plan: &Plan, kernels: &Kernels) -> Result<Self, Error> {
        let launch = match *step {
            Step::Clear { key, grid, .. } => {
                let threads = key.tile.threads_per_row;
                let kernel = kernels.get(&key, plan)?;
                Launch { kernel, grid, groups: 1, threads, shared_bytes: 0, cluster: 1, is_cooperative: false }
            }
            Step::Launch { key, grid, cluster, threads, shared_bytes } => {
                let (kernel, groups, is_cooperative) = (kernels.get(&key, plan)?, plan.groups, key.tile.is_cooperative);
                Launch { kernel, grid, groups, threads, shared_bytes, cluster, is_cooperative }
            }
        };
        Ok(Work { step, launch })
    }

    /// `columns` is `Some` for a phase of a call on column-divided rows.
    pub(super) fn enqueue(
        self,
        stream: &CudaStream,
        params: &Params,
        columns: Option<&Columns>,
        overlap: bool,
    ) -> Result<(), Error> {
        let params = match self.step {
            Step::Clear { key, tensor, first, bytes, .. } => {
                // `clear.cu` zeroes `cols` bytes at `y`.
                let mut cleared = Params { cols: *bytes as u64, ..Params::default() };
                cleared[Tensor::Y].data = params[*tensor].data + *first as u64;
                cleared.pack(key)
            }
            Step::Launch { key, .. } => params.pack(key),
        };
        let mut arguments = [params.address(), columns.map_or(std::ptr::null_mut(), argument)];
        // SAFETY:
        // - kernel: `Kernels` hands out only kernels whose module stays loaded until the process
        //   ends, so the work may run whenever its stream or a graph comes to it, even after the
        //   backend was dropped;
        // - arguments: the kernel's first parameter is the struct that its key has packed. The phases
        //   of a call on column-divided rows have a second parameter, a `Columns`, which is passed
        //   with every such plan (`launch::columns`); with a kernel of one parameter the driver does
        //   not read the second address. Sizes were checked where the kernel was compiled;
        // - memory: addresses, lengths and strides come from a `Checked` call, so every access of
        //   the kernel for (rows, cols), and for the given number of parts of x, lies in a live
        //   tensor; a cleared range lies in the workspace, or in an output that has at least its
        //   bytes; the key has groups of rows exactly where the problem has, and their rows fit the
        //   32 bits in which the kernel counts them; it has groups of columns exactly where the grid
        //   has several, each with `cols` columns and a workspace of its own, or where rows are the
        //   groups, with the strides and the number of those; no output overlaps another; the workspace has the
        //   plan's length; statistics are as long as the ranks and rows of `Columns` and `Params`
        //   require;
        // - alignment: the key's access_bytes divide all addresses and strides; for codes, those
        //   times the size of the widest matrix's elements, as that many codes are one access.
        //   Kernels that clear, transpose codes, or make the columnwise codes, check addresses
        //   themselves;
        // - order: a kernel that reads data of an earlier kernel, such as rstd, first waits for
        //   that kernel (`wait_for_earlier_kernels`); cudarc's events, held in `Tensors`, order the
        //   accesses with those on other streams.
        unsafe { self.launch.call(stream, &mut arguments, overlap) }
    }
}

/// One kernel launch.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) kernel: sys::CUfunction,
    pub(crate) grid: u32,
    /// Groups of columns, each with a grid.
    pub(crate) groups: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) cluster: u32,
    /// Whether the driver must run all blocks at the same time.
    pub(crate) is_cooperative: bool,
}

impl Launch {
    /// `overlap`: the kernel may start while the previous kernel on the stream runs; it waits for
    /// that kernel itself before it accesses memory (programmatic dependent launch).
    ///
    /// # Safety
    /// - Kernel: it stays loaded until the work is done.
    /// - Arguments: at least as many addresses as the kernel has parameters, each of a value of its
    ///   parameter's type; the driver reads no further addresses.
    /// - Effects: the memory that the kernel reads and writes is allocated, aligned as the kernel
    ///   expects, and ordered with every other use of it.
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
        let cooperative = attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, |value| value.cooperative = 1);
        let ignored = attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_IGNORE, |_| {});
        let mut attributes = [
            if self.cluster > 1 { cluster } else { ignored },
            if overlap { overlapping } else { ignored },
            if self.is_cooperative { cooperative } else { ignored },
        ];
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid,
            gridDimY: self.groups,
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
        // - kernel, arguments and effects: the caller's promises; the driver copies the arguments
        //   before it returns;
        // - config: points to as many attributes as it says, each with the value that belongs to
        //   its id.
        unsafe { sys::cuLaunchKernelEx(&raw const config, self.kernel, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(device_error("cuLaunchKernelEx"))
    }
}

/// The address of a kernel's argument, for the driver, which only reads it.
pub(crate) const fn argument<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

fn attribute(id: AttributeId, set: impl FnOnce(&mut sys::CUlaunchAttributeValue)) -> sys::CUlaunchAttribute {
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    set(&mut value);
    sys::CUlaunchAttribute { id, pad: [0; 4], value }
}
