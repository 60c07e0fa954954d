//! The tensors of one shape and dtype, in several sets, and the calls that are timed on them.

use rmsnorm_core::conformance::{Harness, bounds, judge};
use rmsnorm_core::cpu::{Backward, CpuBackend, Forward};
use rmsnorm_core::reference::{self, BackwardInputs, ForwardInputs};
use rmsnorm_core::{Element, Error, Norm, NormBackend, NormSpec};

use super::{Op, Shape};
use crate::failure::Failure;

/// The sets of a cold measurement exceed this many bytes together: several times any processor's last-level cache.
const COLD_BYTES: usize = 512 << 20;

/// Below this size of a matrix the call is a decode step, whose tensors are in the cache.
const HOT_BYTES: usize = 128 << 10;

/// Rows at the start of a result that are checked.
const CHECKED_ROWS: usize = 16;

const EPS: f32 = 1e-6;

/// One set: inputs and outputs of every operation.
struct Set<T> {
    /// x of forward; x of backward.
    x: Vec<T>,
    /// The residual of forward; dy of backward.
    second: Vec<T>,
    /// y of forward; dx of backward.
    out: Vec<T>,
    residual_out: Vec<T>,
}

/// Sets that are visited in turn, and the vectors they share.
pub struct Workload<T> {
    shape: Shape,
    sets: Vec<Set<T>>,
    copies: Vec<(Vec<f32>, Vec<f32>)>,
    weight: Vec<T>,
    bias: Vec<T>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
    dweight: Vec<T>,
    dbias: Vec<T>,
    workspace: Vec<f32>,
}

impl<T: Element> Workload<T> {
    /// Tensors of that shape, as many sets as a cold measurement needs.
    pub fn new(shape: Shape) -> Self {
        let Shape { rows, cols } = shape;
        let (elements, bytes) = (rows * cols, shape.bytes(T::DTYPE));
        let sets = if bytes < HOT_BYTES { 1 } else { COLD_BYTES.div_ceil(2 * bytes).max(2) };
        let set = |_| Set {
            x: tensor(1, elements),
            second: tensor(2, elements),
            out: tensor(3, elements),
            residual_out: tensor(4, elements),
        };
        let floats = bytes.div_ceil(size_of::<f32>());
        Workload {
            shape,
            sets: (0..sets).map(set).collect(),
            copies: (0..sets).map(|_| (tensor(5, floats), tensor(6, floats))).collect(),
            weight: tensor(7, cols),
            bias: tensor(8, cols),
            mean: vec![0.0; rows],
            rstd: vec![0.0; rows],
            dweight: tensor(9, cols),
            dbias: tensor(10, cols),
            workspace: Vec::new(),
        }
    }

    /// Whether the sets exceed the caches.
    pub fn is_cold(&self) -> bool {
        self.sets.len() > 1
    }

    /// One call, on a set of that number modulo their count.
    ///
    /// # Errors
    /// What the backend says.
    pub fn call(&mut self, backend: &CpuBackend, op: Op, norm: Norm, set: usize) -> Result<(), Error> {
        let (spec, count) = (self.spec(norm), self.sets.len());
        let set = &mut self.sets[set % count];
        let is_layer = norm == Norm::Layer;
        match op {
            Op::Forward | Op::AddForward => {
                let mut args = Forward::new(&set.x, &mut set.out).weight(&self.weight).rstd(&mut self.rstd);
                if is_layer {
                    args = args.bias(&self.bias).mean(&mut self.mean);
                }
                if op == Op::AddForward {
                    args = args.residual(&set.second).residual_out(&mut set.residual_out);
                }
                backend.forward(&spec, args)
            }
            Op::Backward => {
                let mut args = Backward::new(&set.second, &set.x, &mut set.out).weight(&self.weight).rstd(&self.rstd);
                args = args.dweight(&mut self.dweight).workspace(&mut self.workspace);
                if is_layer {
                    args = args.mean(&self.mean).dbias(&mut self.dbias);
                }
                backend.backward(&spec, args)
            }
        }
    }

    /// Copies the bytes of one matrix.
    ///
    /// # Errors
    /// None that can happen: the lengths are equal.
    pub fn copy(&mut self, backend: &CpuBackend, set: usize, streaming: bool) -> Result<(), Error> {
        let count = self.copies.len();
        let (from, to) = &mut self.copies[set % count];
        backend.copy(from, to, streaming)
    }

    /// Runs the operation once and judges its first rows by their error bounds; what is timed must be right.
    ///
    /// # Errors
    /// If the call is refused, or an element is outside its bound.
    pub fn check(&mut self, backend: &CpuBackend, op: Op, norm: Norm) -> Result<(), Failure> {
        let cols = self.shape.cols;
        let rows = self.shape.rows.min(CHECKED_ROWS);
        // Two partial rows for each block of at least one row are always enough.
        self.workspace.resize(2 * cols * (self.shape.rows + 1).min(4 * self.shape.rows.isqrt() + 16), 0.0);
        // The backward pass needs the statistics of x alone.
        let first = if op == Op::Backward { Op::Forward } else { op };
        self.call(backend, first, norm, 0)?;
        if op == Op::Backward {
            self.call(backend, op, norm, 0)?;
        }

        let set = &self.sets[0];
        let wide = |values: &[T], len: usize| -> Vec<f64> {
            values[..len].iter().map(|value| f64::from(value.to_f32())).collect()
        };
        let spec = NormSpec { rows, ..self.spec(norm) };
        let (x, second) = (wide(&set.x, rows * cols), wide(&set.second, rows * cols));
        let (weight, bias) = (wide(&self.weight, cols), wide(&self.bias, cols));
        let arithmetic = backend.arithmetic();
        let model = bounds::Model { arithmetic: &arithmetic, mode: bounds::Mode::Worst };
        let verdict = match op {
            Op::Forward | Op::AddForward => {
                let inputs = ForwardInputs {
                    x: &x,
                    residual: (op == Op::AddForward).then_some((&*second, T::DTYPE)),
                    weight: Some(&weight),
                    bias: (norm == Norm::Layer).then_some(&*bias),
                };
                let outputs = reference::forward(&spec, &inputs);
                let errors = bounds::forward(&spec, &inputs, T::DTYPE, &outputs, model);
                judge::judge(&set.out[..rows * cols], &outputs.y, &errors.y, &arithmetic)
            }
            Op::Backward => {
                let statistics =
                    |values: &[f32]| -> Vec<f64> { values[..rows].iter().copied().map(f64::from).collect() };
                let (mean, rstd) = (statistics(&self.mean), statistics(&self.rstd));
                let mean = if norm == Norm::Layer { mean } else { vec![0.0; rows] };
                let inputs = BackwardInputs {
                    dy: &second,
                    x: &x,
                    weight: Some(&weight),
                    mean: &mean,
                    rstd: &rstd,
                    dresidual_out: None,
                };
                let outputs = reference::backward(&spec, &inputs);
                let errors = bounds::backward(&spec, &inputs, &outputs, bounds::Statistics::Given, model);
                judge::judge(&set.out[..rows * cols], &outputs.dx, &errors.dx, &arithmetic)
            }
        };
        if verdict.failures > 0 {
            let (norm, op) = (norm.name(), op.name());
            println!("{norm} {op} {}: {} elements outside their bounds", T::DTYPE, verdict.failures);
            return Err(Failure::Check);
        }
        Ok(())
    }

    fn spec(&self, norm: Norm) -> NormSpec {
        let rms = NormSpec::rms(self.shape.rows, self.shape.cols, EPS);
        NormSpec { norm, ..rms }
    }
}

/// Values between -2 and 2 without structure: a constant tensor would flatter a branch or a denormal.
fn tensor<E: Element>(seed: u32, len: usize) -> Vec<E> {
    let hash = |index: usize| (index as u32 ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    (0..len).map(|index| E::from_f32((hash(index) >> 8) as f32 / (1 << 22) as f32 - 2.0)).collect()
}
