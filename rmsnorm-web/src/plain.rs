//! The plain operations of the network that trains: one simple kernel each.

use std::cell::RefCell;
use std::collections::HashMap;

use rmsnorm_wgpu::WgpuBackend;
use rmsnorm_wgpu::wgpu::{
    BindGroupDescriptor, BindGroupEntry, Buffer, BufferDescriptor, BufferUsages, CommandEncoder, ComputePipeline,
    ComputePipelineDescriptor, ShaderModuleDescriptor, ShaderSource,
};

/// Threads of a workgroup.
const THREADS: usize = 64;

/// The term of `a b`, a matrix product.
pub(crate) const AB: &str = "a[row * numbers.depth + k] * b[k * numbers.cols + col]";

/// The term of `relu(a) b`.
pub(crate) const RELU_AB: &str = "max(a[row * numbers.depth + k], 0.0) * b[k * numbers.cols + col]";

/// The term of `a^T b`.
pub(crate) const AT_B: &str = "a[k * u32(numbers.x) + row] * b[k * numbers.cols + col]";

/// The term of `a b^T`.
pub(crate) const A_BT: &str = "a[row * numbers.depth + k] * b[col * numbers.depth + k]";

/// Rows and columns of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Shape {
    const fn len(self) -> usize {
        self.rows * self.cols
    }
}

/// f32, row after row.
pub(crate) type Matrix = Buffer;

/// The kernels, by their text.
pub(crate) struct Plain<'b> {
    backend: &'b WgpuBackend,
    made: RefCell<HashMap<String, ComputePipeline>>,
}

/// The numbers of a dispatch: threads, the columns of a row, a length of sums, and factors.
#[derive(Clone, Copy, Default)]
struct Numbers {
    threads: usize,
    cols: usize,
    depth: usize,
    factors: [f32; 3],
}

impl<'b> Plain<'b> {
    pub(crate) fn new(backend: &'b WgpuBackend) -> Self {
        Plain { backend, made: RefCell::default() }
    }

    /// A matrix of `len` zeros. Commands that use it keep it alive.
    pub(crate) fn matrix(&self, len: usize) -> Matrix {
        self.buffer(4 * len, BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST)
    }

    /// A matrix of these values.
    pub(crate) fn upload(&self, values: &[f32]) -> Matrix {
        let matrix = self.matrix(values.len());
        self.backend.queue().write_buffer(&matrix, 0, bytemuck::cast_slice(values));
        matrix
    }

    fn buffer(&self, size: usize, usage: BufferUsages) -> Buffer {
        let size = size as u64;
        self.backend.device().create_buffer(&BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    }

    /// Records a kernel: `body` computes for thread `i`. Buffers in `read` are called a, b and c, those
    /// in `written` p, q and r.
    fn run(&self, encoder: &mut CommandEncoder, body: &str, read: &[&Matrix], written: &[&Matrix], numbers: Numbers) {
        let device = self.backend.device();
        let names = ["a", "b", "c"].iter().take(read.len()).map(|name| (*name, "read"));
        let names: Vec<_> =
            names.chain(["p", "q", "r"].iter().take(written.len()).map(|name| (*name, "read_write"))).collect();
        let declared: String = names
            .iter()
            .enumerate()
            .map(|(i, (name, access))| {
                format!("@group(0) @binding({}) var<storage, {access}> {name}: array<f32>;\n", i + 1)
            })
            .collect();
        let text = format!(
            "struct Numbers {{ threads: u32, cols: u32, depth: u32, x: f32, y: f32, z: f32 }}
@group(0) @binding(0) var<uniform> numbers: Numbers;
{declared}
@compute @workgroup_size({THREADS})
fn main(@builtin(global_invocation_id) me: vec3<u32>) {{
    let i = me.x;
    if i >= numbers.threads {{ return; }}
    let row = i / numbers.cols;
    let col = i % numbers.cols;
    {body}
}}
"
        );
        let mut made = self.made.borrow_mut();
        let pipeline = made.entry(text).or_insert_with_key(|text| {
            let source = ShaderSource::Wgsl(text.into());
            let module = device.create_shader_module(ShaderModuleDescriptor { label: None, source });
            device.create_compute_pipeline(&ComputePipelineDescriptor {
                label: None,
                layout: None,
                module: &module,
                entry_point: Some("main"),
                compilation_options: Default::default(),
                cache: None,
            })
        });
        let Numbers { threads, cols, depth, factors } = numbers;
        let mut bytes: Vec<u8> = [threads, cols, depth].iter().flat_map(|n| (*n as u32).to_le_bytes()).collect();
        bytes.extend(factors.iter().flat_map(|factor| factor.to_le_bytes()));
        let uniform = self.buffer(bytes.len(), BufferUsages::UNIFORM | BufferUsages::COPY_DST);
        self.backend.queue().write_buffer(&uniform, 0, &bytes);
        let buffers = std::iter::once(&uniform).chain(read.iter().chain(written).copied());
        let entries: Vec<_> = (0..)
            .zip(buffers)
            .map(|(binding, buffer)| BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let layout = pipeline.get_bind_group_layout(0);
        let group = device.create_bind_group(&BindGroupDescriptor { label: None, layout: &layout, entries: &entries });
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(threads.div_ceil(THREADS) as u32, 1, 1);
    }

    /// `p[i] = VALUE` for each element of a matrix.
    fn each(&self, encoder: &mut CommandEncoder, value: &str, read: &[&Matrix], shape: Shape) -> Matrix {
        let made = self.matrix(shape.len());
        let numbers = Numbers { threads: shape.len(), cols: shape.cols, ..Numbers::default() };
        self.run(encoder, &format!("p[i] = {value};"), read, &[&made], numbers);
        made
    }

    /// A matrix product: the columns of `c` are `shape[2]`, its rows `shape[0]`, and each number is the
    /// sum of `shape[1]` terms.
    pub(crate) fn product(
        &self,
        encoder: &mut CommandEncoder,
        term: &str,
        [a, b]: [&Matrix; 2],
        c: &Matrix,
        [rows, depth, cols]: [usize; 3],
    ) {
        let body = format!("var sum = 0.0; for (var k = 0u; k < numbers.depth; k++) {{ sum += {term}; }} p[i] = sum;");
        let factors = [rows as f32, 0.0, 0.0];
        self.run(encoder, &body, &[a, b], &[c], Numbers { threads: rows * cols, cols, depth, factors });
    }

    pub(crate) fn relu(&self, encoder: &mut CommandEncoder, a: &Matrix, len: usize) -> Matrix {
        self.each(encoder, "max(a[i], 0.0)", &[a], Shape { rows: 1, cols: len })
    }

    /// The gradient of `a` from that of `relu(a)`.
    pub(crate) fn relu_gradient(&self, encoder: &mut CommandEncoder, dr: &Matrix, a: &Matrix, len: usize) -> Matrix {
        self.each(encoder, "select(0.0, a[i], b[i] > 0.0)", &[dr, a], Shape { rows: 1, cols: len })
    }

    /// The mean of each row.
    pub(crate) fn row_mean(&self, encoder: &mut CommandEncoder, a: &Matrix, means: &Matrix, shape: Shape) {
        let body = "var sum = 0.0; for (var k = 0u; k < numbers.depth; k++) { sum += a[i * numbers.depth + k]; } p[i] = sum / f32(numbers.depth);";
        let numbers = Numbers { threads: shape.rows, cols: 1, depth: shape.cols, ..Numbers::default() };
        self.run(encoder, body, &[a], &[means], numbers);
    }

    fn col_sum(&self, encoder: &mut CommandEncoder, a: &Matrix, sums: &Matrix, shape: Shape) {
        let body =
            "var sum = 0.0; for (var k = 0u; k < numbers.depth; k++) { sum += a[k * numbers.cols + i]; } p[i] = sum;";
        let numbers = Numbers { threads: shape.cols, cols: shape.cols, depth: shape.rows, ..Numbers::default() };
        self.run(encoder, body, &[a], &[sums], numbers);
    }

    /// The loss of each row: the logarithm of the sum of the exponentials, less the logit of the label.
    pub(crate) fn cross_entropy(
        &self,
        encoder: &mut CommandEncoder,
        logits: &Matrix,
        labels: &Matrix,
        losses: &Matrix,
        shape: Shape,
    ) {
        let body = "let first = i * numbers.depth;
    var most = a[first];
    for (var k = 1u; k < numbers.depth; k++) { most = max(most, a[first + k]); }
    var sum = 0.0;
    for (var k = 0u; k < numbers.depth; k++) { sum += exp(a[first + k] - most); }
    p[i] = log(sum) + most - a[first + u32(b[i])];";
        let numbers = Numbers { threads: shape.rows, cols: 1, depth: shape.cols, ..Numbers::default() };
        self.run(encoder, body, &[logits, labels], &[losses], numbers);
    }

    /// The gradient of the mean loss.
    pub(crate) fn cross_entropy_gradient(
        &self,
        encoder: &mut CommandEncoder,
        logits: &Matrix,
        labels: &Matrix,
        shape: Shape,
    ) -> Matrix {
        let made = self.matrix(shape.len());
        let body = "var sum = 0.0;
    for (var k = 0u; k < numbers.cols; k++) { sum += exp(a[row * numbers.cols + k] - a[i]); }
    p[i] = (1.0 / sum - select(0.0, 1.0, u32(b[row]) == col)) * numbers.x;";
        let factors = [1.0 / shape.rows as f32, 0.0, 0.0];
        let numbers = Numbers { threads: shape.len(), cols: shape.cols, depth: 0, factors };
        self.run(encoder, body, &[logits, labels], &[&made], numbers);
        made
    }

    /// A step of Adam.
    pub(crate) fn adam(
        &self,
        encoder: &mut CommandEncoder,
        [values, gradient, first, second]: [&Matrix; 4],
        len: usize,
        rate: f32,
        number: usize,
    ) {
        let body = "q[i] = 0.9 * q[i] + 0.1 * a[i];
    r[i] = 0.999 * r[i] + 0.001 * a[i] * a[i];
    p[i] -= numbers.x * (q[i] / numbers.y) / (sqrt(r[i] / numbers.z) + 1e-8);";
        let [y, z] = [0.9_f32, 0.999].map(|decay| 1.0 - decay.powi(number as i32));
        let numbers = Numbers { threads: len, cols: 1, depth: 0, factors: [rate, y, z] };
        self.run(encoder, body, &[gradient], &[values, first, second], numbers);
    }

    /// RMS norm of `h` by five operations, after `h` became the sum of two matrices, if any.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a norm")]
    pub(crate) fn norm(
        &self,
        encoder: &mut CommandEncoder,
        sum: Option<(&Matrix, &Matrix)>,
        h: &Matrix,
        weight: &Matrix,
        n: &Matrix,
        rstd: &Matrix,
        shape: Shape,
        eps: f32,
    ) {
        let numbers = Numbers { threads: shape.len(), cols: shape.cols, ..Numbers::default() };
        if let Some((branch, before)) = sum {
            self.run(encoder, "p[i] = a[i] + b[i];", &[branch, before], &[h], numbers);
        }
        let squares = self.each(encoder, "a[i] * a[i]", &[h], shape);
        let means = self.matrix(shape.rows);
        self.row_mean(encoder, &squares, &means, shape);
        let factors = [eps, 0.0, 0.0];
        let rows = Numbers { threads: shape.rows, cols: 1, depth: 0, factors };
        self.run(encoder, "p[i] = inverseSqrt(a[i] + numbers.x);", &[&means], &[rstd], rows);
        let x_hat = self.each(encoder, "a[i] * b[row]", &[h, rstd], shape);
        self.run(encoder, "p[i] = a[i] * b[col];", &[&x_hat, weight], &[n], numbers);
    }

    /// The gradients of [`norm`](Self::norm), from dn, h, rstd and weight. `past` is added.
    pub(crate) fn norm_backward(
        &self,
        encoder: &mut CommandEncoder,
        [dn, h, rstd, weight]: [&Matrix; 4],
        past: Option<&Matrix>,
        dx: &Matrix,
        dweight: &Matrix,
        shape: Shape,
    ) {
        let x_hat = self.each(encoder, "a[i] * b[row]", &[h, rstd], shape);
        let of_weight = self.each(encoder, "a[i] * b[i]", &[dn, &x_hat], shape);
        self.col_sum(encoder, &of_weight, dweight, shape);
        let g = self.each(encoder, "a[i] * b[col]", &[dn, weight], shape);
        let products = self.each(encoder, "a[i] * b[i]", &[&g, &x_hat], shape);
        let means = self.matrix(shape.rows);
        self.row_mean(encoder, &products, &means, shape);
        let inner = self.each(encoder, "a[i] - b[i] * c[row]", &[&g, &x_hat, &means], shape);
        let numbers = Numbers { threads: shape.len(), cols: shape.cols, ..Numbers::default() };
        match past {
            None => self.run(encoder, "p[i] = a[i] * b[row];", &[&inner, rstd], &[dx], numbers),
            Some(past) => {
                let through = self.each(encoder, "a[i] * b[row]", &[&inner, rstd], shape);
                self.run(encoder, "p[i] = a[i] + b[i];", &[&through, past], &[dx], numbers);
            }
        }
    }
}
