//! A norm between your own commands: your device, your encoder, one submission.
//!
//!     cargo run -p rmsnorm-core --features wgpu --example wgpu_encoder

use rmsnorm_core::NormSpec;
use rmsnorm_core::wgpu::wgpu::{self, BufferUsages};
use rmsnorm_core::wgpu::{Forward, WgpuBackend, WgpuSlice};

const ROWS: usize = 4;
const COLS: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let Ok(adapter) = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default())) else {
        println!("skipped: wgpu finds no adapter here");
        return Ok(());
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor::default()))?;
    let backend = WgpuBackend::from_device(device.clone(), queue.clone())?;
    println!("{backend}");

    let bytes = (ROWS * COLS * size_of::<f32>()) as u64;
    let buffer = |usage| {
        device.create_buffer(&wgpu::BufferDescriptor { label: None, size: bytes, usage, mapped_at_creation: false })
    };
    let x = buffer(BufferUsages::STORAGE | BufferUsages::COPY_DST);
    let y = buffer(BufferUsages::STORAGE | BufferUsages::COPY_SRC);
    let download = buffer(BufferUsages::MAP_READ | BufferUsages::COPY_DST);
    let values: Vec<f32> = (0..ROWS * COLS).map(|i| (i % 5) as f32 - 1.0).collect();
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    queue.write_buffer(&x, 0, &data);

    // Records the norm, to run in order with your other commands.
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let norm = NormSpec::layer(ROWS, COLS, 1e-5);
    let args = Forward::new(WgpuSlice::<f32>::whole(&x), WgpuSlice::whole(&y));
    backend.encode_forward(&mut encoder, &norm, args)?;
    encoder.copy_buffer_to_buffer(&y, 0, &download, 0, None);
    queue.submit([encoder.finish()]);

    // If mapping fails, `get_mapped_range` below returns the error.
    download.map_async(wgpu::MapMode::Read, .., |_| ());
    device.poll(wgpu::PollType::wait_indefinitely())?;
    let y: Vec<f32> = {
        let mapped = download.get_mapped_range(..)?;
        mapped.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
    };
    for row in y.chunks(COLS) {
        let (mean, square) =
            (row.iter().sum::<f32>() / COLS as f32, row.iter().map(|y| y * y).sum::<f32>() / COLS as f32);
        println!("mean {mean:+.1e}, mean square {square:.6}");
        assert!(mean.abs() < 1e-5 && (square - 1.0).abs() < 1e-3);
    }
    Ok(())
}
