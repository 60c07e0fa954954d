//! The device, devices with lower limits, and their data.

use std::sync::OnceLock;

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::{available, values};
use rmsnorm_wgpu::spec::{AnyElement, Element, NormSpec, Rows, bf16};
use rmsnorm_wgpu::{Backward, Forward, TestBuffer, WgpuBackend, WgpuSlice, wgpu};

/// A backend on the first adapter, shared by all tests. `None`, with the reason on stdout, if there
/// is no adapter and none is required.
pub fn open() -> Option<WgpuBackend> {
    static BACKEND: OnceLock<Option<WgpuBackend>> = OnceLock::new();
    let backend = BACKEND.get_or_init(open_another);
    if backend.is_none() {
        println!("skipped: there is no adapter");
    }
    backend.clone()
}

/// A backend on a new device.
pub fn open_another() -> Option<WgpuBackend> {
    available(WgpuBackend::new(0)).unwrap()
}

/// A backend on a device of the caller, with these limits and no features.
pub fn open_limited(limits: impl FnOnce(&mut wgpu::Limits)) -> Option<WgpuBackend> {
    let (device, queue) = limited_device(limits)?;
    Some(WgpuBackend::from_device(device, queue).unwrap())
}

/// A device of the caller, with these limits and no features.
pub fn limited_device(limits: impl FnOnce(&mut wgpu::Limits)) -> Option<(wgpu::Device, wgpu::Queue)> {
    // Prints the reason if there is none.
    open()?;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let adapter = adapters.first().unwrap();
    let mut required_limits = adapter.limits();
    limits(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
    Some(pollster::block_on(adapter.request_device(&descriptor)).unwrap())
}

/// [`values`] on the device.
pub fn upload<E: Element>(backend: &WgpuBackend, seed: u64, len: usize) -> TestBuffer<E> {
    backend.upload(&values::<E>(seed, len)).unwrap()
}

/// A zeroed buffer of `size` bytes with these usages.
pub fn buffer(backend: &WgpuBackend, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    backend.device().create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
}

/// All elements of a buffer.
pub fn whole<E: Element>(buffer: &TestBuffer<E>) -> WgpuSlice<'_, E> {
    WgpuSlice::whole(buffer.buffer())
}

/// The bits of a tensor on the device, including NaN payloads and signs of zeros.
pub fn bits<E: Element>(backend: &WgpuBackend, buffer: &TestBuffer<E>) -> Vec<u32> {
    backend.download(buffer).unwrap().into_iter().map(E::bits).collect()
}

/// The bits of y and rstd of an RMS forward call with weight, on new tensors.
pub fn forward<E: Element>(backend: &WgpuBackend, rows: usize, cols: usize) -> (Vec<u32>, Vec<u32>) {
    let (x, weight) = (upload::<E>(backend, 1, rows * cols), upload::<E>(backend, 2, cols));
    let (y, rstd) = (upload::<E>(backend, 3, rows * cols), upload::<f32>(backend, 4, rows));
    let views = (view(&x, rows * cols), view(&y, rows * cols), view(&weight, cols));
    let args = Forward::new(views.0, views.1).weight(views.2).rstd(whole(&rstd));
    backend.forward(&NormSpec::rms(rows, cols, 1e-5), args).unwrap();
    (bits(backend, &y), bits(backend, &rstd))
}

/// The bits of dx and the values of dweight and dbias of a layer norm's backward call, on new
/// tensors.
pub fn backward<E: Element>(backend: &WgpuBackend, rows: usize, cols: usize) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
    let layer = Layer::<E>::new(backend, rows, cols);
    let dx = upload::<E>(backend, 8, rows * cols);
    let (dweight, dbias) = (upload::<E>(backend, 9, cols), upload::<E>(backend, 10, cols));
    let args = layer.args(view(&dx, rows * cols)).dweight(view(&dweight, cols)).dbias(view(&dbias, cols));
    backend.backward(&layer.norm, args).unwrap();
    let values = |buffer: &TestBuffer<E>| backend.download(buffer).unwrap().into_iter().map(E::to_f32).collect();
    (bits(backend, &dx), values(&dweight), values(&dbias))
}

/// The inputs of a layer norm's backward call.
pub struct Layer<E> {
    pub norm: NormSpec,
    dy: TestBuffer<E>,
    x: TestBuffer<E>,
    weight: TestBuffer<E>,
    mean: TestBuffer<f32>,
    rstd: TestBuffer<f32>,
}

impl<E: Element> Layer<E> {
    pub fn new(backend: &WgpuBackend, rows: usize, cols: usize) -> Self {
        Layer {
            norm: NormSpec::layer(rows, cols, 1e-5),
            dy: upload(backend, 5, rows * cols),
            x: upload(backend, 1, rows * cols),
            weight: upload(backend, 2, cols),
            mean: upload(backend, 6, rows),
            rstd: upload(backend, 7, rows),
        }
    }

    /// A call without parameter gradients.
    pub fn args<'a>(&'a self, dx: impl Into<Rows<WgpuSlice<'a, E>>>) -> Backward<'a, E> {
        let len = self.norm.rows * self.norm.cols;
        let args = Backward::new(view(&self.dy, len), view(&self.x, len), whole(&self.rstd), dx);
        args.mean(whole(&self.mean)).weight(view(&self.weight, self.norm.cols))
    }
}

/// The first elements of a buffer, which may have one more than was uploaded.
pub fn view<E: AnyElement>(buffer: &TestBuffer<E>, len: usize) -> WgpuSlice<'_, E> {
    WgpuSlice::new(buffer.buffer(), 0, len)
}

/// Small bf16 tensors of a valid call.
pub struct Small {
    pub x: TestBuffer<bf16>,
    pub y: TestBuffer<bf16>,
    pub norm: NormSpec,
}

impl Small {
    pub fn new(backend: &WgpuBackend) -> Self {
        Small { x: upload(backend, 1, 64), y: upload(backend, 2, 64), norm: NormSpec::rms(4, 16, 1e-6) }
    }

    /// Checks that the backend still works.
    pub fn check(&self, backend: &WgpuBackend) {
        backend.forward(&self.norm, Forward::new(whole(&self.x), whole(&self.y))).unwrap();
        assert!(backend.download(&self.y).unwrap().iter().all(|y| y.to_f32().is_finite()));
    }
}
