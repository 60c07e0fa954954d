//! Tensors to bindings: the part of a buffer that a dispatch uses, and the position of the tensor
//! in it.

use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use rmsnorm_spec::{Error, Tensor};
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindingResource, Buffer, BufferBinding, BufferDescriptor,
    BufferSize, BufferUsages, Device,
};

use super::tensors::{Shape, Tensors, View};
use super::workspace::{Workspace, bytes_of};
use crate::error::{WgpuFailure, device_error, unsupported};
use crate::kernel::Kernel;
use crate::params::{self, Numbers, Params, Place};
use crate::plan::{Dispatch, Moved};
use crate::shared::Shared;

/// The bind groups of a call. Their parameters share one uniform buffer.
pub(super) struct Groups<'a> {
    device: &'a Device,
    tensors: &'a Tensors<'a>,
    workspace: Option<&'a Workspace>,
    /// Alignment of binding offsets, in bytes.
    alignment: u64,
    /// Maximum bytes of a binding.
    most: u64,
    /// Alignment of the parameters of a dispatch, in bytes.
    uniform_alignment: u64,
    groups: Vec<Group<'a>>,
}

struct Group<'a> {
    kernel: Arc<Kernel>,
    params: Params,
    bindings: Vec<(u32, Part<'a>)>,
}

/// A part of a buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part<'a> {
    buffer: &'a Buffer,
    offset: u64,
    size: u64,
    /// Bytes from the start of the binding to the start of the tensor.
    skipped: u64,
}

impl<'a> Groups<'a> {
    pub(super) fn new(shared: &'a Shared, tensors: &'a Tensors<'a>, workspace: Option<&'a Workspace>) -> Self {
        let Shared { device, caps, .. } = shared;
        Groups {
            device,
            tensors,
            workspace,
            alignment: u64::from(caps.offset_alignment),
            // Whole bindings are indexed in bytes, in 32 bits.
            most: caps.binding_bytes.min(i32::MAX as u64 / 4 * 4),
            uniform_alignment: u64::from(device.limits().min_uniform_buffer_offset_alignment),
            groups: Vec::new(),
        }
    }

    /// Adds a bind group for a dispatch of the kernel.
    ///
    /// # Errors
    /// `Unsupported` if a part of a tensor exceeds the maximum binding.
    pub(super) fn add(&mut self, kernel: &Arc<Kernel>, dispatch: &Dispatch, numbers: Numbers) -> Result<(), Error> {
        let mut params = Params::new(numbers);
        let mut bindings = Vec::with_capacity(kernel.bindings.len());
        for binding in &kernel.bindings {
            let view = self.view(binding.tensor, dispatch);
            let part = if binding.tensor == Tensor::Workspace {
                self.workspace
                    .map(|workspace| self.part("workspace", &workspace.buffer, workspace.offset, workspace.len))
            } else {
                view.map(|view| {
                    let bytes = bytes(&view, &dispatch.rows, self.tensors.cols());
                    self.part(view.name, view.buffer, bytes.start, bytes.end - bytes.start)
                })
            };
            // A program binds only tensors that the plan was told of.
            let part = part.unwrap_or_else(|| {
                Err(unsupported(format!(
                    "{:?} needs the tensor {}, which this call does not have",
                    dispatch.key.program,
                    binding.tensor.name()
                )))
            })?;
            let skipped_rows = numbers.first_in_group;
            let place = place(view.as_ref(), &part, &dispatch.rows, self.tensors.rows_per_group(), skipped_rows);
            params.place(binding.tensor, place);
            if binding.tensor == Tensor::Workspace {
                for (tensor, at) in &dispatch.shared {
                    let element = self.tensors.get(*tensor).map_or(size_of::<f32>() as u64, View::element);
                    let first = (part.skipped + bytes_of(*at)) / element;
                    params.place(*tensor, Place { first: first as u32, ..Place::default() });
                }
            }
            bindings.push((binding.number(), part));
        }
        self.groups.push(Group { kernel: Arc::clone(kernel), params, bindings });
        Ok(())
    }

    /// The view that a dispatch binds as this tensor.
    fn view(&self, tensor: Tensor, dispatch: &Dispatch) -> Option<View<'a>> {
        let Some(Moved { tensor: moved, first, at, is_input }) = dispatch.moved else {
            return self.tensors.get(tensor).copied();
        };
        let view = self.tensors.get(moved)?;
        if (tensor == Tensor::X) == is_input {
            return Some(view.elements(view.buffer, view.offset + first * view.element()));
        }
        let workspace = self.workspace?;
        Some(view.elements(&workspace.buffer, workspace.offset + bytes_of(at)))
    }

    /// Creates the bind groups, in order.
    ///
    /// # Errors
    /// `Device` if the device is lost. The caller catches other errors that wgpu reports.
    pub(super) fn make(self) -> Result<Vec<BindGroup>, Error> {
        if self.groups.is_empty() {
            return Ok(Vec::new());
        }
        let (params, stride) = self.upload_params()?;
        let make = |(index, group): (usize, &Group<'a>)| {
            let uniform = entry(params::BINDING, &params, index as u64 * stride, group.kernel.uniform.size());
            let storage =
                group.bindings.iter().map(|(number, part)| entry(*number, part.buffer, part.offset, part.size));
            let entries: Vec<_> = std::iter::once(uniform).chain(storage).collect();
            let descriptor =
                BindGroupDescriptor { label: Some("rmsnorm"), layout: &group.kernel.layout, entries: &entries };
            self.device.create_bind_group(&descriptor)
        };
        // The caller's buffers enter wgpu only here; wgpu panics if a buffer belongs to another
        // instance.
        let all = || self.groups.iter().enumerate().map(make).collect();
        panic::catch_unwind(AssertUnwindSafe(all)).map_err(|_| {
            let description =
                "wgpu does not know a buffer of this call, which belongs to another wgpu::Instance: use one instance";
            device_error(WgpuFailure::internal("binding", description))
        })
    }

    /// A new buffer for every call, and the bytes from one dispatch to the next: all commands of a
    /// submission would see the last contents written to a shared buffer.
    fn upload_params(&self) -> Result<(Buffer, u64), Error> {
        let most = self.groups.iter().map(|group| group.kernel.uniform.size()).max().unwrap_or_default();
        let stride = most.next_multiple_of(self.uniform_alignment);
        let size = stride * self.groups.len() as u64;
        let buffer = self.device.create_buffer(&BufferDescriptor {
            label: Some("rmsnorm params"),
            size,
            usage: BufferUsages::UNIFORM,
            mapped_at_creation: true,
        });
        // A lost device reports nothing, but mapping fails.
        let mut mapped = buffer
            .get_mapped_range_mut(..)
            .map_err(|error| device_error(WgpuFailure::lost("mapping a new buffer", error.to_string())))?;
        for (index, group) in self.groups.iter().enumerate() {
            let (start, bytes) = (index * stride as usize, group.kernel.uniform.pack(&group.params));
            mapped.slice(start..start + bytes.len()).copy_from_slice(&bytes);
        }
        drop(mapped);
        buffer.unmap();
        Ok((buffer, stride))
    }

    /// The binding for these bytes: it starts at the previous multiple of the alignment and has
    /// whole words.
    fn part<'b>(&self, name: &str, buffer: &'b Buffer, start: u64, bytes: u64) -> Result<Part<'b>, Error> {
        let offset = start / self.alignment * self.alignment;
        let skipped = start - offset;
        let size = (skipped + bytes).next_multiple_of(4);
        if size > self.most {
            let rule = format!("a binding of this device has at most {} bytes, got {name} with {size}", self.most);
            return Err(unsupported(rule));
        }
        Ok(Part { buffer, offset, size, skipped })
    }
}

/// The bytes of the tensor's buffer that a dispatch on these rows uses.
fn bytes(view: &View<'_>, rows: &Range<u64>, cols: u64) -> Range<u64> {
    let count = rows.end - rows.start;
    let (first, len) = match view.shape {
        Shape::Rows(layout) => {
            let start = |row: u64| layout.start(row as usize) as u64;
            let first = start(rows.start);
            (first, start(rows.end.max(rows.start + 1) - 1) - first + cols)
        }
        Shape::Columns => (0, cols),
        Shape::PerRow(each) => (rows.start * each as u64, count * each as u64),
        Shape::Whole => (0, view.len),
    };
    let start = view.offset + first * view.element();
    start..start + len * view.element()
}

/// The place of a tensor in its binding. `skipped_rows`: rows of the first group that belong to
/// earlier dispatches.
fn place(
    view: Option<&View<'_>>,
    part: &Part<'_>,
    rows: &Range<u64>,
    rows_per_group: Option<usize>,
    skipped_rows: u32,
) -> Place {
    let element = view.map_or(size_of::<f32>() as u64, View::element);
    // Less than the alignment of offsets.
    let first = (part.skipped / element) as u32;
    let (row_stride, group_stride) = match view.map(|view| view.shape) {
        // Several rows fit one binding, so their indexes fit 32 bits. A stride that exceeds 32 bits
        // is correct modulo 2^32, and so is the index.
        Some(Shape::Rows(layout)) if rows.end - rows.start > 1 => {
            (layout.row_stride as u32, layout.group_stride(rows_per_group) as u32)
        }
        // The stride fits a binding and hence 32 bits, unless there is only one row.
        Some(Shape::Whole) => (view.map_or(0, |view| view.row_stride) as u32, 0),
        _ => (0, 0),
    };
    let is_in_groups = !matches!(view.map(|view| view.shape), Some(Shape::Whole));
    let skipped_rows = if is_in_groups { skipped_rows } else { 0 };
    let first = first.wrapping_sub(skipped_rows.wrapping_mul(row_stride));
    Place { first, row_stride, group_stride }
}

fn entry(binding: u32, buffer: &Buffer, offset: u64, size: u64) -> BindGroupEntry<'_> {
    BindGroupEntry {
        binding,
        resource: BindingResource::Buffer(BufferBinding { buffer, offset, size: BufferSize::new(size) }),
    }
}
