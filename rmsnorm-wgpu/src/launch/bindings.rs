//! Tensors to bindings: the part of a buffer that a dispatch sees, and where in it the tensor begins.

use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use rmsnorm_spec::{Error, Tensor};
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindingResource, Buffer, BufferBinding, BufferDescriptor,
    BufferSize, BufferUsages, Device,
};

use super::tensors::{Shape, Tensors, View};
use super::workspace::Workspace;
use crate::backend::WgpuBackend;
use crate::error::{WgpuFailure, device_error, unsupported};
use crate::kernel::Kernel;
use crate::params::{Params, Place};
use crate::plan::Dispatch;
use crate::source::PARAMS_BINDING;

/// The bind groups of a call, whose numbers lie in one uniform buffer.
pub(super) struct Groups<'a> {
    device: &'a Device,
    tensors: &'a Tensors<'a>,
    workspace: Option<&'a Workspace>,
    /// Bytes that a binding's offset is a multiple of.
    alignment: u64,
    /// Bytes of the largest binding.
    most: u64,
    /// Bytes from the numbers of one dispatch to those of the next.
    params_stride: u64,
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
    /// Bytes from the binding's start to the tensor's.
    skipped: u64,
}

impl<'a> Groups<'a> {
    pub(super) fn new(backend: &'a WgpuBackend, tensors: &'a Tensors<'a>, workspace: Option<&'a Workspace>) -> Self {
        let (device, caps) = (backend.device(), backend.caps());
        let uniform_alignment = u64::from(device.limits().min_uniform_buffer_offset_alignment).max(16);
        Groups {
            device,
            tensors,
            workspace,
            alignment: u64::from(caps.offset_alignment),
            // What is bound whole is indexed by its bytes, in 32 bits.
            most: caps.binding_bytes.min(i32::MAX as u64 / 4 * 4),
            params_stride: (size_of::<Params>() as u64).next_multiple_of(uniform_alignment),
            groups: Vec::new(),
        }
    }

    /// One more group, for this dispatch of the kernel. `params`: all but where tensors begin.
    ///
    /// # Errors
    /// `Unsupported` if a part of a tensor is larger than a binding may be.
    pub(super) fn add(&mut self, kernel: &Arc<Kernel>, dispatch: &Dispatch, mut params: Params) -> Result<(), Error> {
        let mut bindings = Vec::with_capacity(kernel.bindings.len());
        for binding in &kernel.bindings {
            let part = if binding.tensor == Tensor::Workspace {
                self.workspace
                    .map(|workspace| self.part("workspace", &workspace.buffer, workspace.offset, workspace.len))
            } else {
                self.tensors.get(binding.tensor).map(|view| {
                    let bytes = bytes(view, &dispatch.rows, self.tensors.cols());
                    self.part(view.name, view.buffer, bytes.start, bytes.end - bytes.start)
                })
            };
            // A program binds what the plan was told is there.
            let part = part.unwrap_or_else(|| {
                Err(unsupported(format!(
                    "{} is bound by {:?} and not given",
                    binding.tensor.name(),
                    dispatch.key.program
                )))
            })?;
            let view = self.tensors.get(binding.tensor);
            place(&mut params, binding.tensor, view, &part, &dispatch.rows, self.tensors.rows_per_group());
            bindings.push((binding.number(), part));
        }
        self.groups.push(Group { kernel: Arc::clone(kernel), params, bindings });
        Ok(())
    }

    /// Makes the bind groups, in order.
    ///
    /// # Errors
    /// `Device` if the device is lost; what else wgpu reports is caught by the caller.
    pub(super) fn make(self) -> Result<Vec<BindGroup>, Error> {
        if self.groups.is_empty() {
            return Ok(Vec::new());
        }
        let params = self.upload_params()?;
        let make = |(index, group): (usize, &Group<'a>)| {
            let (offset, size) = (index as u64 * self.params_stride, size_of::<Params>() as u64);
            let uniform = entry(PARAMS_BINDING, &params, offset, size);
            let storage =
                group.bindings.iter().map(|(number, part)| entry(*number, part.buffer, part.offset, part.size));
            let entries: Vec<_> = std::iter::once(uniform).chain(storage).collect();
            let descriptor =
                BindGroupDescriptor { label: Some("rmsnorm"), layout: &group.kernel.layout, entries: &entries };
            self.device.create_bind_group(&descriptor)
        };
        // The one place where the caller's buffers enter wgpu, which panics about one that it has never heard of.
        let all = || self.groups.iter().enumerate().map(make).collect();
        panic::catch_unwind(AssertUnwindSafe(all)).map_err(|_| {
            let description = "wgpu does not know a buffer of the call: it is of another wgpu::Instance";
            device_error(WgpuFailure::internal("binding", description))
        })
    }

    /// A fresh buffer for every call: one that is shared would hold, for every command of a submission, what was written
    /// last before it.
    fn upload_params(&self) -> Result<Buffer, Error> {
        let size = self.params_stride * self.groups.len() as u64;
        let buffer = self.device.create_buffer(&BufferDescriptor {
            label: Some("rmsnorm params"),
            size,
            usage: BufferUsages::UNIFORM,
            mapped_at_creation: true,
        });
        // A lost device says nothing, and has nothing to map.
        let mut mapped = buffer
            .get_mapped_range_mut(..)
            .map_err(|error| device_error(WgpuFailure::lost("mapping a new buffer", error.to_string())))?;
        for (index, group) in self.groups.iter().enumerate() {
            let start = index * self.params_stride as usize;
            mapped.slice(start..start + size_of::<Params>()).copy_from_slice(bytemuck::bytes_of(&group.params));
        }
        drop(mapped);
        buffer.unmap();
        Ok(buffer)
    }

    /// The binding for these bytes: from the multiple of the alignment before, in whole words.
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

/// The bytes of the tensor's buffer that a dispatch with these rows has.
fn bytes(view: &View<'_>, rows: &Range<u64>, cols: u64) -> Range<u64> {
    let count = rows.end - rows.start;
    let (first, len) = match view.shape {
        Shape::Rows(layout) => {
            let start = |row: u64| layout.start(row as usize) as u64;
            let first = start(rows.start);
            (first, start(rows.end.max(rows.start + 1) - 1) - first + cols)
        }
        Shape::Columns => (0, cols),
        Shape::PerRow | Shape::Elements => (rows.start, count),
        Shape::Workspace | Shape::Whole => (0, view.len),
    };
    let start = view.offset + first * view.element();
    start..start + len * view.element()
}

/// Tells a program where a tensor begins in its binding.
fn place(
    params: &mut Params,
    tensor: Tensor,
    view: Option<&View<'_>>,
    part: &Part<'_>,
    rows: &Range<u64>,
    rows_per_group: Option<usize>,
) {
    let element = view.map_or(size_of::<f32>() as u64, View::element);
    // Less than the alignment of offsets.
    let first = (part.skipped / element) as u32;
    let (row_stride, group_stride) = match view.map(|view| view.shape) {
        // More rows than one lie in a binding, whose elements 32 bits can count. A stride that 32 bits do not hold is right
        // modulo 2^32, as is the sum.
        Some(Shape::Rows(layout)) if rows.end - rows.start > 1 => {
            (layout.row_stride as u32, layout.group_stride(rows_per_group) as u32)
        }
        // Within a binding, hence within 32 bits, unless there is one row only.
        Some(Shape::Whole) => (view.map_or(0, |view| view.row_stride) as u32, 0),
        _ => (0, 0),
    };
    let is_in_groups = !matches!(view.map(|view| view.shape), Some(Shape::Whole));
    let skipped_rows = if is_in_groups { params.first_in_group } else { 0 };
    let first = first.wrapping_sub(skipped_rows.wrapping_mul(row_stride));
    params.place(tensor, Place { first, row_stride }, group_stride);
}

fn entry(binding: u32, buffer: &Buffer, offset: u64, size: u64) -> BindGroupEntry<'_> {
    BindGroupEntry {
        binding,
        resource: BindingResource::Buffer(BufferBinding { buffer, offset, size: BufferSize::new(size) }),
    }
}
