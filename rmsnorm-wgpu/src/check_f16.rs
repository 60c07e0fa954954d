//! Checks a device's f16 conversions. WGSL lets them round in either direction and flush
//! subnormals. So a shader compares them with integer arithmetic on all inputs where they could
//! differ.

use rmsnorm_spec::Error;
use wgpu::{
    BindGroupDescriptor, BindGroupEntry, Buffer, BufferDescriptor, BufferUsages, CommandEncoderDescriptor,
    ComputePassDescriptor, ComputePipelineDescriptor, Device, Features, PipelineCompilationOptions, Queue,
    ShaderModuleDescriptor, ShaderSource,
};

use crate::caps::F16;
use crate::download::read;
use crate::error::scoped_async;
use crate::source;

/// Magnitudes of f16; `check_f16.wgsl` uses a thread for each.
const MAGNITUDES: u32 = 1 << 15;

/// Threads of a workgroup of `check_f16.wgsl`.
const WORKGROUP: u32 = 128;

/// Size of the counter buffer.
const BYTES: u64 = 8;

/// The best form for a device. Only devices with `Features::SHADER_F16` have f16 instructions that
/// are worth checking.
pub(crate) async fn best_form(device: &Device, queue: &Queue) -> F16 {
    if !validates(device, source::UNPACKS_F16).await {
        F16::Integers
    } else if device.features().contains(Features::SHADER_F16) && is_right(device, queue).await.unwrap_or(false) {
        F16::Converts
    } else {
        F16::Unpacks
    }
}

/// Whether the device compiles this shader. wgpu reports WebGPU features that an adapter lacks, but
/// not whether a device has this function.
async fn validates(device: &Device, wgsl: &'static str) -> bool {
    let descriptor = ShaderModuleDescriptor { label: None, source: ShaderSource::Wgsl(wgsl.into()) };
    scoped_async(device, "a question", || Ok(device.create_shader_module(descriptor))).await.is_ok()
}

/// Whether the device's conversions match integer arithmetic. Waits for all work submitted so far.
async fn is_right(device: &Device, queue: &Queue) -> Result<bool, Error> {
    const OPERATION: &str = "checking conversions of f16";
    let answer = scoped_async(device, OPERATION, || Ok(ask(device, queue))).await?;
    let bytes = read(device, &answer, OPERATION).await?;
    Ok(bytes.iter().copied().eq(u64::from(MAGNITUDES).to_le_bytes()))
}

/// Runs the shader and returns the buffer that will hold its counter.
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
    answer
}
