//! Whether a device's own conversions of f16 can be relied on. WGSL lets them round either way and flush subnormals, so the device
//! is asked: a shader compares them with integer arithmetic wherever they could differ.

use rmsnorm_spec::Error;
use wgpu::{
    BindGroupDescriptor, BindGroupEntry, Buffer, BufferDescriptor, BufferUsages, CommandEncoderDescriptor,
    ComputePassDescriptor, ComputePipelineDescriptor, Device, Features, MapMode, PipelineCompilationOptions, PollType,
    Queue, ShaderModuleDescriptor, ShaderSource,
};

use crate::error::{WgpuFailure, device_error, scoped};
use crate::source;

/// How programs convert f16. Conversions have the same bits, but for those of NaN; where a compiler joins one with a multiplication and an
/// addition, which then round once, results may differ within their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum F16 {
    /// By integers.
    Integers,
    /// By integers, but for `unpack2x16float` where no value is subnormal: wgpu leaves it out of a few software devices.
    Unpacks,
    /// By `unpack2x16float` and `pack2x16float`.
    Converts,
}

/// Magnitudes of f16, each a thread of `check_f16.wgsl`.
const MAGNITUDES: u32 = 1 << 15;

/// Threads of a workgroup of it.
const WORKGROUP: u32 = 128;

/// Of the buffer that it counts in.
const BYTES: u64 = 8;

impl F16 {
    /// What holds for a device. Only one with `Features::SHADER_F16` has instructions for f16 that are worth the question.
    pub(super) fn of(device: &Device, queue: &Queue) -> Self {
        if !validates(device, source::UNPACKS_F16) {
            F16::Integers
        } else if device.features().contains(Features::SHADER_F16) && is_right(device, queue).unwrap_or(false) {
            F16::Converts
        } else {
            F16::Unpacks
        }
    }

    /// The same without relying on the device's conversions.
    pub(crate) const fn without_conversions(self) -> Self {
        match self {
            F16::Converts => F16::Unpacks,
            F16::Unpacks | F16::Integers => self,
        }
    }
}

/// Whether the device takes this shader: wgpu tells what an adapter lacks of WebGPU, and not what a device does.
fn validates(device: &Device, wgsl: &'static str) -> bool {
    let descriptor = ShaderModuleDescriptor { label: None, source: ShaderSource::Wgsl(wgsl.into()) };
    scoped(device, "a question", || Ok(device.create_shader_module(descriptor))).is_ok()
}

/// Whether the device's conversions are those of integer arithmetic. Waits for it, and so for what was submitted before.
fn is_right(device: &Device, queue: &Queue) -> Result<bool, Error> {
    const OPERATION: &str = "checking conversions of f16";
    let answer = scoped(device, OPERATION, || Ok(ask(device, queue)))?;
    let failure = |error: &dyn std::error::Error| device_error(WgpuFailure::internal(OPERATION, error));
    device.poll(PollType::wait_indefinitely()).map_err(|error| failure(&error))?;
    let mapped = answer.get_mapped_range(..).map_err(|error| failure(&error))?;
    Ok(mapped.iter().copied().eq(u64::from(MAGNITUDES).to_le_bytes()))
}

/// Runs the shader; the buffer in which its count arrives.
fn ask(device: &Device, queue: &Queue) -> Buffer {
    let buffer = |usage| {
        device.create_buffer(&BufferDescriptor { label: Some("f16"), size: BYTES, usage, mapped_at_creation: false })
    };
    let module = device.create_shader_module(ShaderModuleDescriptor {
        label: Some("check_f16"),
        source: ShaderSource::Wgsl(source::check_f16().into()),
    });
    let pipeline = device.create_compute_pipeline(&ComputePipelineDescriptor {
        label: Some("check_f16"),
        layout: None,
        module: &module,
        entry_point: Some(source::ENTRY),
        compilation_options: PipelineCompilationOptions::default(),
        cache: None,
    });
    let (right, answer) = (
        buffer(BufferUsages::STORAGE | BufferUsages::COPY_SRC),
        buffer(BufferUsages::MAP_READ | BufferUsages::COPY_DST),
    );
    let entries = [BindGroupEntry { binding: 0, resource: right.as_entire_binding() }];
    let layout = pipeline.get_bind_group_layout(0);
    let group =
        device.create_bind_group(&BindGroupDescriptor { label: Some("check_f16"), layout: &layout, entries: &entries });
    let mut encoder = device.create_command_encoder(&CommandEncoderDescriptor { label: Some("check_f16") });
    {
        let mut pass =
            encoder.begin_compute_pass(&ComputePassDescriptor { label: Some("check_f16"), timestamp_writes: None });
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(MAGNITUDES / WORKGROUP, 1, 1);
    }
    encoder.copy_buffer_to_buffer(&right, 0, &answer, 0, BYTES);
    queue.submit([encoder.finish()]);
    // The outcome is that of `get_mapped_range`.
    answer.map_async(MapMode::Read, .., |_| {});
    answer
}
