//! The tensors of one shape and dtype, in several sets, and the calls that are timed on them.

use super::{Op, Shape};
use crate::conformance::{Harness, bounds, judge};
use crate::reference::{self, BackwardInputs, ForwardInputs};
use crate::{
    Backward, CastOrder, Element, Error, Forward, GradReduction, Norm, NormBackend, NormSpec, Present, Problem, Stage,
};

/// Input and output of all sets exceed this many bytes together: several times any processor's last-level cache.
const COLD_BYTES: usize = 512 << 20;

/// Below this size of a matrix the call is a decode step, whose tensors are in the cache.
const HOT_BYTES: usize = 128 << 10;

/// Rows at the start of a result that are judged.
const JUDGED_ROWS: usize = 16;

const EPS: f32 = 1e-6;

/// One set: inputs and outputs of every operation.
struct Set<H: Harness, T: Element> {
    /// x of forward; x of backward.
    x: H::Buffer<T>,
    /// The residual of forward; dy of backward.
    second: H::Buffer<T>,
    /// y of forward; dx of backward.
    out: H::Buffer<T>,
    residual_out: H::Buffer<T>,
}

/// Sets that are visited in turn, and the vectors they share.
pub struct Workload<'h, H: Harness, T: Element> {
    harness: &'h H,
    shape: Shape,
    sets: Vec<Set<H, T>>,
    weight: H::Buffer<T>,
    bias: H::Buffer<T>,
    mean: H::Buffer<f32>,
    rstd: H::Buffer<f32>,
    dweight: H::Buffer<T>,
    dbias: H::Buffer<T>,
    workspace: H::Buffer<f32>,
    workspace_len: usize,
}

impl<'h, H: Harness, T: Element> Workload<'h, H, T> {
    /// Tensors of that shape, as many sets as a cold measurement needs.
    ///
    /// # Errors
    /// If the device has no room for them.
    pub fn new(harness: &'h H, shape: Shape) -> Result<Self, Error> {
        let bytes = shape.bytes(T::DTYPE);
        let sets = if bytes < HOT_BYTES { 1 } else { COLD_BYTES.div_ceil(2 * bytes).max(2) };
        let matrices: [Vec<T>; 4] = [1, 2, 3, 4].map(|seed| tensor(seed, shape.elements()));
        let set = |_| -> Result<Set<H, T>, Error> {
            let [x, second, out, residual_out] = &matrices;
            Ok(Set {
                x: harness.upload(x)?,
                second: harness.upload(second)?,
                out: harness.upload(out)?,
                residual_out: harness.upload(residual_out)?,
            })
        };
        let vector = |seed| harness.upload(&tensor::<T>(seed, shape.cols));
        let statistics = || harness.upload(&vec![0.0; shape.rows]);
        let workspace_len = Norm::ALL.map(|norm| harness.backend().workspace_len(&backward_problem::<T>(norm, shape)));
        let workspace_len = workspace_len.into_iter().fold(0, usize::max);
        Ok(Workload {
            harness,
            shape,
            sets: (0..sets).map(set).collect::<Result<_, _>>()?,
            weight: vector(7)?,
            bias: vector(8)?,
            mean: statistics()?,
            rstd: statistics()?,
            dweight: vector(9)?,
            dbias: vector(10)?,
            workspace: harness.upload(&vec![0.0; workspace_len])?,
            workspace_len,
        })
    }

    /// How many sets there are; 1 where the tensors stay in the cache.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// One call, on the set of that number modulo their count. Enqueues, like the backend's own calls.
    ///
    /// # Errors
    /// What the backend says.
    pub fn call(&mut self, op: Op, norm: Norm, set: usize) -> Result<(), Error> {
        match op {
            Op::Forward => self.forward(norm, set, false),
            Op::AddForward => self.forward(norm, set, true),
            Op::Backward => self.backward(norm, set),
        }
    }

    fn forward(&mut self, norm: Norm, set: usize, add: bool) -> Result<(), Error> {
        let (harness, spec, count) = (self.harness, spec(norm, self.shape), self.sets.len());
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..self.shape.cols, 0..self.shape.rows);
        let x = harness.view(&set.x, matrix.clone());
        let mut args = Forward::<H::Backend, T>::new(x, harness.view_mut(&mut set.out, matrix.clone()))
            .weight(harness.view(&self.weight, row.clone()))
            .rstd(harness.view_mut(&mut self.rstd, stat.clone()));
        if norm == Norm::Layer {
            args = args.bias(harness.view(&self.bias, row)).mean(harness.view_mut(&mut self.mean, stat));
        }
        if add {
            args = args
                .residual(harness.view(&set.second, matrix.clone()))
                .residual_out(harness.view_mut(&mut set.residual_out, matrix));
        }
        harness.backend().forward(&spec, args)
    }

    fn backward(&mut self, norm: Norm, set: usize) -> Result<(), Error> {
        let (harness, spec, count) = (self.harness, spec(norm, self.shape), self.sets.len());
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..self.shape.cols, 0..self.shape.rows);
        let (dy, x) = (harness.view(&set.second, matrix.clone()), harness.view(&set.x, matrix.clone()));
        let mut args = Backward::<H::Backend, T>::new(dy, x, harness.view_mut(&mut set.out, matrix))
            .weight(harness.view(&self.weight, row.clone()))
            .rstd(harness.view(&self.rstd, stat.clone()))
            .dweight(harness.view_mut(&mut self.dweight, row.clone()))
            .workspace(harness.view_mut(&mut self.workspace, 0..self.workspace_len));
        if norm == Norm::Layer {
            args = args.mean(harness.view(&self.mean, stat)).dbias(harness.view_mut(&mut self.dbias, row));
        }
        harness.backend().backward(&spec, args)
    }

    /// Runs the operation once and judges the first rows of y or dx; what is timed must be right. Gives the number of
    /// elements outside their error bounds.
    ///
    /// # Errors
    /// What the backend says.
    pub fn wrong_elements(&mut self, op: Op, norm: Norm) -> Result<usize, Error> {
        if op == Op::Backward {
            // It needs the statistics of x alone.
            self.call(Op::Forward, norm, 0)?;
        }
        self.call(op, norm, 0)?;

        let judged = Shape { rows: self.shape.rows.min(JUDGED_ROWS), ..self.shape };
        let (expected, errors) = match op {
            Op::Forward => self.expected_y(norm, judged, false)?,
            Op::AddForward => self.expected_y(norm, judged, true)?,
            Op::Backward => self.expected_dx(norm, judged)?,
        };
        let out = self.harness.download(&self.sets[0].out)?;
        Ok(judge::judge(&out[..judged.elements()], &expected, &errors, &self.harness.arithmetic()).failures)
    }

    /// The first rows of y, and how far off each element may be.
    fn expected_y(&self, norm: Norm, judged: Shape, add: bool) -> Result<(Vec<f64>, Vec<f64>), Error> {
        let (set, spec) = (&self.sets[0], spec(norm, judged));
        let (x, residual) = (self.wide(&set.x, judged.elements())?, self.wide(&set.second, judged.elements())?);
        let (weight, bias) = (self.wide(&self.weight, judged.cols)?, self.wide(&self.bias, judged.cols)?);
        let inputs = ForwardInputs {
            x: &x,
            residual: add.then_some((&*residual, T::DTYPE)),
            weight: Some(&weight),
            bias: (norm == Norm::Layer).then_some(&*bias),
        };
        let outputs = reference::forward(&spec, &inputs);
        let arithmetic = self.harness.arithmetic();
        let model = bounds::Model { arithmetic: &arithmetic, mode: bounds::Mode::Worst };
        let errors = bounds::forward(&spec, &inputs, T::DTYPE, &outputs, model);
        Ok((outputs.y, errors.y))
    }

    /// The first rows of dx, and how far off each element may be.
    fn expected_dx(&self, norm: Norm, judged: Shape) -> Result<(Vec<f64>, Vec<f64>), Error> {
        let (set, spec) = (&self.sets[0], spec(norm, judged));
        let (dy, x) = (self.wide(&set.second, judged.elements())?, self.wide(&set.x, judged.elements())?);
        let weight = self.wide(&self.weight, judged.cols)?;
        let rstd = self.wide(&self.rstd, judged.rows)?;
        let mean = match norm {
            Norm::Rms => vec![0.0; judged.rows],
            Norm::Layer => self.wide(&self.mean, judged.rows)?,
        };
        let inputs =
            BackwardInputs { dy: &dy, x: &x, weight: Some(&weight), mean: &mean, rstd: &rstd, dresidual_out: None };
        let outputs = reference::backward(&spec, &inputs);
        let arithmetic = self.harness.arithmetic();
        let model = bounds::Model { arithmetic: &arithmetic, mode: bounds::Mode::Worst };
        let errors = bounds::backward(&spec, &inputs, &outputs, bounds::Statistics::Given, model);
        Ok((outputs.dx, errors.dx))
    }

    /// The first elements of a buffer, in f64.
    fn wide<E: Element>(&self, buffer: &H::Buffer<E>, len: usize) -> Result<Vec<f64>, Error> {
        let elements = self.harness.download(buffer)?;
        Ok(elements.iter().take(len).map(|element| f64::from(element.to_f32())).collect())
    }
}

fn spec(norm: Norm, shape: Shape) -> NormSpec {
    match norm {
        Norm::Rms => NormSpec::rms(shape.rows, shape.cols, EPS),
        Norm::Layer => NormSpec::layer(shape.rows, shape.cols, EPS),
    }
}

/// The problem of a workload's backward call.
fn backward_problem<T: Element>(norm: Norm, shape: Shape) -> Problem {
    let is_layer = norm == Norm::Layer;
    Problem {
        stage: Stage::Backward,
        norm,
        rows: shape.rows,
        cols: shape.cols,
        activation: T::DTYPE,
        weight: T::DTYPE,
        residual: T::DTYPE,
        has_weight_offset: false,
        cast_order: CastOrder::default(),
        grad_reduction: GradReduction::default(),
        present: Present {
            weight: true,
            mean: is_layer,
            rstd: true,
            dweight: true,
            dbias: is_layer,
            workspace: true,
            ..Present::default()
        },
    }
}

/// Values between -2 and 2 without structure: a constant tensor would flatter a branch or a denormal.
pub fn tensor<E: Element>(seed: u32, len: usize) -> Vec<E> {
    let hash = |index: usize| (index as u32 ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    (0..len).map(|index| E::from_f32((hash(index) >> 8) as f32 / (1 << 22) as f32 - 2.0)).collect()
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::cpu::CpuBackend;

    #[test]
    fn every_operation_runs_and_is_within_its_bounds() {
        let backend = CpuBackend::new();
        let mut workload = Workload::<_, crate::bf16>::new(&backend, Shape { rows: 20, cols: 100 }).unwrap();
        assert_eq!(workload.sets(), 1, "2 kB stay in the cache");
        for norm in Norm::ALL {
            for op in Op::ALL {
                assert_eq!(workload.wrong_elements(op, norm).unwrap(), 0, "{} {}", norm.name(), op.name());
            }
        }
    }

    #[test]
    fn expected_values_tell_the_norms_apart() {
        let backend = CpuBackend::new();
        let mut workload = Workload::<_, f32>::new(&backend, Shape { rows: 2, cols: 100 }).unwrap();
        workload.call(Op::Forward, Norm::Rms, 0).unwrap();
        let (expected, errors) = workload.expected_y(Norm::Layer, workload.shape, false).unwrap();
        let y = backend.download(&workload.sets[0].out).unwrap();
        let verdict = judge::judge(&y, &expected, &errors, &backend.arithmetic());
        assert!(verdict.failures > 100, "an RMS norm is no layer norm");
    }
}
