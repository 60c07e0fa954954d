//! What `rmsnorm run` must write for given inputs: the f64 definition with an interval around every value.
//!
//! The intervals are those of f32 arithmetic in any order, then one rounding: with u = 2^-24, a sum over `cols` is off
//! by at most `cols * u` of the sum of its magnitudes, and 16 more roundings pay for the single steps around it.

use rmsnorm_core::reference::{self, BackwardInputs, ForwardInputs, ForwardOutputs, round_to};
use rmsnorm_core::{CastOrder, DType, Norm, NormSpec};

use crate::support::{Tensor, Tensors};

const U: f64 = 1.0 / (1u64 << 24) as f64;

/// The inputs of a run.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub norm: Norm,
    pub eps: f32,
    pub weight_offset: f32,
    pub cast_order: CastOrder,
    pub tensors: Tensors,
}

/// A tensor that is expected, with the lowest and the highest value of each element.
pub struct Expected {
    pub name: &'static str,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub intervals: Vec<(f64, f64)>,
}

impl Expected {
    fn new(name: &'static str, dtype: DType, shape: &[usize], values: impl Iterator<Item = (f64, f64)>) -> Self {
        let interval = |(value, error): (f64, f64)| (round_to(value - error, dtype), round_to(value + error, dtype));
        Expected { name, dtype, shape: shape.to_vec(), intervals: values.map(interval).collect() }
    }

    pub fn check(&self, got: &Tensor, context: &str) {
        assert_eq!((got.dtype, &got.shape), (self.dtype, &self.shape), "{} of {context}", self.name);
        assert_eq!(got.values.len(), self.intervals.len(), "{} of {context}", self.name);
        for (i, (&got, &(low, high))) in got.values.iter().zip(&self.intervals).enumerate() {
            assert!(low <= got && got <= high, "{}[{i}] of {context}: {got} is not in {low}..={high}", self.name);
        }
    }
}

/// The magnitudes that errors are proportional to.
struct Sizes {
    /// Relative error of a sum over a row and of the steps around it.
    k: f64,
    /// What the error of `x_hat` is a multiple of: itself, and for layer norm the mean before the subtraction.
    x_hat: Vec<f64>,
    /// The mean magnitude of a row.
    mean: Vec<f64>,
}

impl Sizes {
    fn new(spec: &NormSpec, out: &ForwardOutputs) -> Self {
        let mean: Vec<f64> = out.h.chunks(spec.cols).map(|row| average(row.iter().map(|h| h.abs()))).collect();
        let shift = |row: usize| if spec.norm == Norm::Layer { out.rstd[row] * mean[row] } else { 0.0 };
        let x_hat = out.x_hat.iter().enumerate().map(|(i, x_hat)| x_hat.abs() + shift(i / spec.cols)).collect();
        Sizes { k: (spec.cols as f64 + 16.0) * U, x_hat, mean }
    }
}

/// Every tensor that a run with these inputs writes.
pub fn expected(inputs: &Inputs) -> Vec<Expected> {
    let tensors = &inputs.tensors;
    let (x, residual) = (&tensors["x"], tensors.get("residual"));
    let norm_shape = match tensors.get("weight").or(tensors.get("bias")) {
        Some(tensor) => tensor.shape.clone(),
        None => x.shape[x.shape.len() - 1..].to_vec(),
    };
    let batch_shape = &x.shape[..x.shape.len() - norm_shape.len()];
    let spec = NormSpec {
        norm: inputs.norm,
        rows: batch_shape.iter().product(),
        cols: norm_shape.iter().product(),
        eps: inputs.eps,
        weight_offset: inputs.weight_offset,
        cast_order: inputs.cast_order,
    };
    let values = |name| tensors.get(name).map(|tensor: &Tensor| tensor.values.as_slice());
    let forward_inputs = ForwardInputs {
        x: &x.values,
        residual: residual.map(|residual| (residual.values.as_slice(), residual.dtype)),
        weight: values("weight"),
        bias: values("bias"),
    };
    let out = reference::forward(&spec, &forward_inputs);
    let sizes = Sizes::new(&spec, &out);

    let y = (0..x.values.len()).map(|i| y(&spec, x.dtype, &forward_inputs, (&out, &sizes), i));
    let rstd = out.rstd.iter().map(|&rstd| (rstd, sizes.k * rstd));
    let mut list = vec![Expected::new("y", x.dtype, &x.shape, y), Expected::new("rstd", DType::F32, batch_shape, rstd)];
    if inputs.norm == Norm::Layer {
        let mean = out.mean.iter().zip(&sizes.mean).map(|(&mean, &size)| (mean, sizes.k * size));
        list.push(Expected::new("mean", DType::F32, batch_shape, mean));
    }
    if let Some(residual) = residual {
        let h = out.h.iter().map(|&h| (h, 0.0));
        list.push(Expected::new("residual_out", residual.dtype, &x.shape, h));
    }
    if tensors.contains_key("dy") {
        list.extend(gradients(&spec, tensors, &norm_shape, (&out, &sizes)));
    }
    list
}

/// One value of `y`, with its error.
fn y(
    spec: &NormSpec,
    dtype: DType,
    inputs: &ForwardInputs<'_>,
    (out, sizes): (&ForwardOutputs, &Sizes),
    i: usize,
) -> (f64, f64) {
    let weight = inputs.weight.map_or(1.0, |weight| weight[i % spec.cols] + f64::from(spec.weight_offset));
    let bias = inputs.bias.map_or(0.0, |bias| bias[i % spec.cols]);
    let (x_hat, x_hat_error) = (out.x_hat[i], sizes.k * sizes.x_hat[i]);
    match spec.cast_order {
        CastOrder::AtStore => (out.y[i], weight.abs() * x_hat_error + 4.0 * U * ((x_hat * weight).abs() + bias.abs())),
        CastOrder::BeforeWeight => {
            let low = round_to(x_hat - x_hat_error, dtype) * weight + bias;
            let high = round_to(x_hat + x_hat_error, dtype) * weight + bias;
            (f64::midpoint(low, high), (high - low).abs() / 2.0 + 4.0 * U * (low.abs() + bias.abs()))
        }
    }
}

fn gradients(
    spec: &NormSpec,
    tensors: &Tensors,
    norm_shape: &[usize],
    (out, sizes): (&ForwardOutputs, &Sizes),
) -> Vec<Expected> {
    let (x, dy, cols) = (&tensors["x"], &tensors["dy"].values, spec.cols);
    let weight = tensors.get("weight");
    let dresidual_out = tensors.get("dresidual_out").map(|tensor| tensor.values.as_slice());
    let inputs = BackwardInputs {
        dy,
        x: &out.h,
        weight: weight.map(|weight| weight.values.as_slice()),
        mean: &out.mean,
        rstd: &out.rstd,
        dresidual_out,
    };
    let grad = reference::backward(spec, &inputs);

    let wdy = |i: usize| {
        let weight = weight.map_or(1.0, |weight| weight.values[i % cols] + f64::from(spec.weight_offset));
        (dy[i] * weight).abs()
    };
    let dx_error = |i: usize| {
        let row = i / cols * cols..(i / cols + 1) * cols;
        let (c1, c2) = (average(row.clone().map(wdy)), average(row.map(|i| wdy(i) * sizes.x_hat[i])));
        let added = dresidual_out.map_or(0.0, |added| added[i].abs());
        4.0 * sizes.k * (out.rstd[i / cols] * (wdy(i) + c1 + sizes.x_hat[i] * c2) + added)
    };
    let column = |col: usize, term: &dyn Fn(usize) -> f64| {
        (sizes.k + spec.rows as f64 * U) * (0..spec.rows).map(|row| term(row * cols + col)).sum::<f64>()
    };

    let dx = grad.dx.iter().enumerate().map(|(i, &dx)| (dx, dx_error(i)));
    let mut list = vec![Expected::new("dx", x.dtype, &x.shape, dx)];
    if let Some(weight) = weight {
        let error = |col| column(col, &|i| dy[i].abs() * sizes.x_hat[i]);
        let dweight = grad.dweight.iter().enumerate().map(|(col, &dweight)| (dweight, error(col)));
        list.push(Expected::new("dweight", weight.dtype, norm_shape, dweight));
    }
    if let Some(bias) = tensors.get("bias") {
        let dbias = grad.dbias.iter().enumerate().map(|(col, &dbias)| (dbias, column(col, &|i| dy[i].abs())));
        list.push(Expected::new("dbias", bias.dtype, norm_shape, dbias));
    }
    list
}

fn average(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}
