//! The check before timing: a result must be right.
//!
//! Outputs are filled with NaN, the call runs, and the first and the last rows are compared with
//! the bounds of math.md. dweight and dbias are sums over all rows; some of their columns are
//! checked. The host knows the inputs, so only checked outputs are downloaded. The copy is checked
//! in all elements.

use std::ops::Range;

use rmsnorm_core::conformance::Arithmetic;
use rmsnorm_core::conformance::bounds::{Mode, Model, Statistics};
use rmsnorm_core::conformance::judge::Verdict;
use rmsnorm_core::conformance::testing::{BackwardTruth, Bits, ForwardTruth, Gated, Given, QuantizedTruth};
use rmsnorm_core::quant::{QuantSpec, ScaleKind, ScaleLayout};
use rmsnorm_core::reference::{BackwardInputs, ForwardInputs};
use rmsnorm_core::{DType, Error, Norm, NormSpec, Tensor, TensorSet, TensorShape};

use crate::buffer::Buffer;
use crate::pattern::Pattern;
use crate::workload::{GIVEN_SCALE, problem, spec, tensors, unset_codes, unset_scales};
use crate::{Form, Measurable, Op, Operation, Quant, Shape, Workload};

/// The largest number of rows that are checked at each end of a result.
const JUDGED_ROWS: usize = 16;

/// The largest number of elements that are checked at each end of a result, but at least one row.
/// The device is idle during the check, which takes a tenth of a second.
const JUDGED_ELEMENTS: usize = 1 << 18;

/// The largest number of terms of the checked sums over rows, but at least two columns. It covers
/// all columns of 4096x256.
const JUDGED_TERMS: usize = 1 << 20;

/// The largest matrix whose whole backward is checked: 64 MiB of bf16, in about 3 GiB.
const JUDGED_WHOLE: usize = 1 << 25;

impl<D: Measurable> Workload<'_, D> {
    /// Runs the operation once. Returns the number of elements outside their error bounds.
    ///
    /// # Errors
    /// The backend's.
    pub fn wrong_elements(&mut self, operation: Operation) -> Result<usize, Error> {
        self.wrong_after(operation, &|workload, operation| workload.call(operation, 0))
    }

    /// [`wrong_elements`](Self::wrong_elements) of another backend on the same device, which has
    /// other plans.
    pub(crate) fn wrong_elements_on(&mut self, device: &D, operation: Operation) -> Result<usize, Error> {
        self.wrong_after(operation, &|workload, operation| workload.call_on(device, operation, 0))
    }

    /// The number of wrong elements of the first set, with `call` to run an operation.
    fn wrong_after(
        &mut self,
        operation: Operation,
        call: &dyn Fn(&mut Self, Operation) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        if is_whole(operation) && self.shape.elements() > JUDGED_WHOLE {
            let rule = format!("weight_first is checked as a whole: pass shapes of at most {JUDGED_WHOLE} elements");
            return Err(Error::Unsupported { rule });
        }
        self.poison(operation)?;
        if operation.op == Op::Backward {
            // Backward needs the statistics of x without a residual.
            call(self, Operation { op: Op::Forward, ..operation })?;
            self.poison_rows_of_out(operation)?;
        }
        call(self, operation)?;
        self.wrong_results(operation)
    }

    /// The number of elements of the first set outside their bounds. `operation` must be the last
    /// one that ran.
    fn wrong_results(&self, operation: Operation) -> Result<usize, Error> {
        let judge = Judge {
            operation,
            shape: self.shape,
            dtype: operation.form.dtypes(self.dtype).residual,
            tensors: problem(operation, self.dtype, self.shape).tensors,
            patterns: &self.patterns,
            slots: self.slots(operation.form),
            arithmetic: self.device.arithmetic(),
            results: self,
        };
        judge.wrong()
    }

    /// Copies the first and the last set in each of the device's ways, onto NaN. Returns the number
    /// of elements that were not copied. Every percentage in reports depends on the copy.
    ///
    /// # Errors
    /// The device's.
    pub fn wrong_copies(&mut self) -> Result<usize, Error> {
        let (len, last) = (self.shape.elements(), self.sets.len() - 1);
        let judged = if last == 0 { vec![0] } else { vec![0, last] };
        let mut wrong = 0;
        for way in 0..D::COPIES {
            for &set in &judged {
                // Freed before it is made again, since a device may not have room for both.
                // Uploaded, since the copy is under test.
                self.sets[set].out[0] = Buffer::nan(self.device, self.dtype, 0)?;
                self.sets[set].out[0] = Buffer::nan(self.device, self.dtype, len)?;
                self.copy(set, way)?;
                wrong += self.not_copied(set)?;
            }
        }
        Ok(wrong)
    }

    /// The number of elements in which a set's x and `out` differ, compared bit by bit.
    fn not_copied(&self, set: usize) -> Result<usize, Error> {
        self.sets[set].x[0].count_unlike(self.device, &self.sets[set].out[0])
    }

    /// Writes NaN to all checked results, so that an element that is not written fails.
    fn poison(&mut self, operation: Operation) -> Result<(), Error> {
        let (device, Shape { rows, cols }) = (self.device, self.shape);
        for (statistic, len) in [
            (&mut self.mean, self.lens.statistics),
            (&mut self.rstd, self.lens.statistics),
            (&mut self.next_mean, rows),
            (&mut self.next_rstd, rows),
        ] {
            *statistic = Buffer::nan(device, DType::F32, len)?;
        }
        for gradient in [&mut self.dweight, &mut self.dbias] {
            *gradient = [Buffer::nan(device, self.dtype, cols)?, Buffer::nan(device, DType::F32, cols)?];
        }
        [self.sets[0].codes, self.sets[0].codes_t] = unset_codes(device, &self.lens)?;
        self.scales = unset_scales(device, self.lens.scales)?;
        self.scales_along = unset_scales(device, self.lens.scales_along)?;
        self.amax = Buffer::nan(device, DType::F32, 1)?;
        for rows in judged_rows(operation, self.shape) {
            poison_rows(device, self.dtype, &mut self.sets[0].residual_out, elements(self.shape, &rows))?;
        }
        self.poison_rows_of_out(operation)
    }

    fn poison_rows_of_out(&mut self, operation: Operation) -> Result<(), Error> {
        judged_rows(operation, self.shape).into_iter().try_for_each(|rows| {
            let [out, of_f32] = &mut self.sets[0].out;
            if self.lens.of_f32 > 0 {
                poison_rows(self.device, DType::F32, of_f32, elements(self.shape, &rows))?;
            }
            poison_rows(self.device, self.dtype, out, elements(self.shape, &rows))
        })
    }
}

fn poison_rows<D: Measurable>(
    device: &D,
    dtype: DType,
    matrix: &mut Buffer<D>,
    elements: Range<usize>,
) -> Result<(), Error> {
    let nan = Buffer::nan(device, dtype, elements.len())?;
    Buffer::copy(device, (&nan, 0..elements.len()), (matrix, elements), 0)
}

/// The first and the last rows, without duplicates; all where they are [judged as a whole](is_whole).
fn judged_rows(operation: Operation, shape: Shape) -> Vec<Range<usize>> {
    let Shape { rows, cols } = shape;
    let most = if is_whole(operation) { rows } else { (JUDGED_ELEMENTS / cols).clamp(1, JUDGED_ROWS) };
    let first = 0..most.min(rows);
    let last = rows.saturating_sub(most).max(first.end)..rows;
    [first, last].into_iter().filter(|rows| !rows.is_empty()).collect()
}

/// Whether all rows are judged: the sums of a row with a weight before the norm are in the gradient
/// of the weight, so that no column can be judged by itself.
fn is_whole(operation: Operation) -> bool {
    operation.op == Op::Backward && operation.form == Form::WeightFirst
}

fn elements(shape: Shape, rows: &Range<usize>) -> Range<usize> {
    rows.start * shape.cols..rows.end * shape.cols
}

/// The outputs of a call on a device.
trait Results {
    /// Some elements of an output of this operation.
    fn part(&self, operation: Operation, tensor: Tensor, elements: Range<usize>) -> Result<Bits, Error>;
}

impl<D: Measurable> Results for Workload<'_, D> {
    fn part(&self, operation: Operation, tensor: Tensor, elements: Range<usize>) -> Result<Bits, Error> {
        let (set, quant) = (&self.sets[0], operation.op.quant().map(|quant| quant.spec(self.shape)));
        let scales = quant.map_or(0, |quant| quant.scale_type() as usize);
        let scales_along = quant.map_or(0, |quant| quant.columnwise().scale_type() as usize);
        let [of_x, of_y, of_weight] = self.slots(operation.form);
        let outputs = [
            (Tensor::Y, &set.out[of_y]),
            (Tensor::Dx, &set.out[of_x]),
            (Tensor::Dresidual, &set.out[of_x]),
            (Tensor::ResidualOut, &set.residual_out),
            (Tensor::Dgate, &set.residual_out),
            (Tensor::Codes, &set.codes),
            (Tensor::CodesT, &set.codes_t),
            (Tensor::CodesColumnwise, &set.codes_t),
            (Tensor::Mean, &self.mean),
            (Tensor::Rstd, &self.rstd),
            (Tensor::NextMean, &self.next_mean),
            (Tensor::NextRstd, &self.next_rstd),
            (Tensor::Dweight, &self.dweight[of_weight]),
            (Tensor::Dbias, &self.dbias[of_weight]),
            (Tensor::Amax, &self.amax),
            (Tensor::Scales, &self.scales[scales]),
            (Tensor::ScalesColumnwise, &self.scales_along[scales_along]),
        ];
        let found = outputs.into_iter().find(|(output, _)| *output == tensor);
        let (_, buffer) = found.ok_or(Error::Missing { arg: tensor.name(), why: "it is not an output" })?;
        buffer.download(self.device, elements)
    }
}

/// Judges the results of an operation, for any device.
struct Judge<'w> {
    operation: Operation,
    shape: Shape,
    /// The dtype of x.
    dtype: DType,
    /// The tensors of the operation.
    tensors: TensorSet,
    patterns: &'w [Pattern; 2],
    /// The patterns of [x, y, weight].
    slots: [usize; 3],
    arithmetic: Arithmetic,
    results: &'w dyn Results,
}

/// The inputs of forward for some rows, and the sum that the call has stored.
struct Inputs {
    x: Vec<f64>,
    residual: Option<Vec<f64>>,
    weight: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    gate: Option<Vec<f64>>,
    sum: Option<Vec<f64>>,
}

impl Judge<'_> {
    /// The number of elements outside their bounds.
    fn wrong(&self) -> Result<usize, Error> {
        match self.operation.op {
            Op::Backward => self.wrong_in_backward(),
            Op::Forward | Op::AddForward | Op::ForwardAdd | Op::ForwardAddForward => self.wrong_in_forward(),
            Op::QuantizedForward(quant) | Op::AddQuantizedForward(quant) => self.wrong_in_codes(quant),
        }
    }

    fn wrong_in_forward(&self) -> Result<usize, Error> {
        let is_after = matches!(self.operation.op, Op::ForwardAdd | Op::ForwardAddForward);
        let mut wrong = 0;
        for rows in judged_rows(self.operation, self.shape) {
            let inputs = self.inputs(&rows)?;
            let truth = self.truth(&rows, &inputs);
            wrong += self.wrong_rows(&truth, &rows, &SUM_AND_STATISTICS)?;
            let (next_weight, next_bias) = (self.vector(tensors::NEXT_WEIGHT), self.vector(tensors::NEXT_BIAS));
            match &inputs.sum {
                // The next norm's input is the sum as it was stored.
                Some(sum) if is_after => {
                    let bias = (self.operation.norm == Norm::Layer).then_some(&*next_bias);
                    let inputs = ForwardInputs { x: sum, residual: None, weight: Some(&next_weight), bias };
                    let alone = Operation { op: Op::Forward, ..self.operation };
                    let spec = spec(alone, Shape { rows: rows.len(), ..self.shape });
                    let truth = ForwardTruth::new(&spec, inputs, self.dtype, None, self.model());
                    wrong += self.wrong_rows(&truth, &rows, &NEXT)?;
                }
                Some(_) | None => wrong += self.wrong_rows(&truth, &rows, &[(Tensor::Y, Tensor::Y)])?,
            }
        }
        Ok(wrong)
    }

    /// Checks codes with the returned scales, and the scales of rows and blocks with the largest
    /// results. A tensor's `amax` and its own scale must not be smaller than the checked rows
    /// require.
    fn wrong_in_codes(&self, quant: Quant) -> Result<usize, Error> {
        let Shape { rows: count, cols } = self.shape;
        let (asked, groups) = (quant.spec(self.shape), quant.spec(self.shape).scale.groups(cols));
        let scales = self.all(Tensor::Scales, asked.scales_len(count, cols).unwrap_or(0))?;
        let codes_t = self.all(Tensor::CodesT, self.shape.elements())?;
        let amax = self.all(Tensor::Amax, 1)?;
        let mut wrong = 0;
        for rows in judged_rows(self.operation, self.shape) {
            let inputs = self.inputs(&rows)?;
            let truth = self.truth(&rows, &inputs);
            wrong += self.wrong_rows(&truth, &rows, &SUM_AND_STATISTICS)?;
            // The checked rows are treated as a whole matrix with row-major scales, and a scale of
            // the tensor as a given one.
            let (of_rows, scale) = match groups {
                Some(_) => (asked.layout(ScaleLayout::RowMajor), f64::from(GIVEN_SCALE)),
                None => {
                    let is_found = quant == Quant::Current;
                    let scale = if is_found { scales.value(0) } else { f64::from(GIVEN_SCALE) };
                    (QuantSpec::new(asked.codes, ScaleKind::Given), scale)
                }
            };
            let truth = self.quantized(&rows, of_rows, scale, &truth)?;
            let place = |row: usize| {
                (0..groups.unwrap_or(0)).map(move |group| asked.layout.index(groups.unwrap_or(0), row, group))
            };
            let got_scales = groups.map(|_| pick(&scales, rows.clone().flat_map(place)));
            if let Some(scales) = &got_scales {
                wrong += failures(&truth.judge_scales(scales));
            }
            let codes = self.rows_of(Tensor::Codes, &rows)?;
            wrong += failures(&truth.judge_codes(&codes, got_scales.as_ref()));
            if self.tensors.has(Tensor::CodesT) {
                let transposed = |index: usize| codes_t.bits[index % cols * count + rows.start + index / cols];
                wrong += codes.bits.iter().enumerate().filter(|&(index, code)| transposed(index) != *code).count();
            }
            let least = truth.least_amax();
            let most = f64::from(asked.codes.largest()) * scale * (1.0 + 1e-6);
            wrong += amax.values().iter().filter(|amax| !(**amax >= least && amax.is_finite())).count();
            wrong += usize::from(quant == Quant::Current && most < least);
        }
        if self.tensors.has(Tensor::CodesColumnwise) {
            wrong += self.wrong_along_columns(quant)?;
        }
        Ok(wrong)
    }

    /// Checks the columnwise codes and scales of the first block of rows.
    fn wrong_along_columns(&self, quant: Quant) -> Result<usize, Error> {
        let Shape { rows: count, cols } = self.shape;
        let along = quant.spec(self.shape).columnwise();
        let (Some(height), Some(groups)) = (along.scale.set_cols(count), along.scale.groups(count)) else {
            return Ok(0);
        };
        let rows = 0..height.min(count);
        let inputs = self.inputs(&rows)?;
        // The block is treated as a whole matrix.
        let alone = quant.spec(self.shape).layout(ScaleLayout::RowMajor).columnwise_layout(ScaleLayout::RowMajor);
        let truth = self.truth(&rows, &inputs);
        let truth = self.quantized(&rows, alone, f64::from(GIVEN_SCALE), &truth)?.columnwise();
        let scales = self.all(Tensor::ScalesColumnwise, along.scales_len(cols, count).unwrap_or(0))?;
        let scales = pick(&scales, (0..cols).map(|col| along.layout.index(groups, col, 0)));
        let codes = self.all(Tensor::CodesColumnwise, self.shape.elements())?;
        let codes = pick(&codes, (0..cols).flat_map(|col| rows.clone().map(move |row| col * count + row)));
        Ok(failures(&truth.judge_scales(&scales)) + failures(&truth.judge_codes(&codes, Some(&scales))))
    }

    fn wrong_in_backward(&self) -> Result<usize, Error> {
        // The statistics that backward has read; the mean of all but layer norm is zero.
        let count = self.shape.rows * self.groups();
        let rstd = self.results.part(self.operation, Tensor::Rstd, 0..count)?.values();
        let mean = match self.operation.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => vec![0.0; count],
            Norm::Layer => self.results.part(self.operation, Tensor::Mean, 0..count)?.values(),
        };
        let weight = self.tensors.has(Tensor::Weight).then(|| self.vector(tensors::WEIGHT));
        let weight = weight.as_deref();
        // Counted here, since a NaN input would excuse a NaN result.
        let mut wrong = rstd.iter().chain(&mean).filter(|value| !value.is_finite()).count();
        let is_whole = is_whole(self.operation);
        let of_rows = [Tensor::Dx, Tensor::Dresidual, Tensor::Dgate];
        let judged = of_rows.into_iter().chain(SUMS.into_iter().filter(|_| is_whole));
        let judged: Vec<_> = judged.filter(|tensor| self.tensors.has(*tensor)).collect();
        for rows in judged_rows(self.operation, self.shape) {
            let elements = elements(self.shape, &rows);
            let (dy, x) = (self.values(tensors::SECOND, elements.clone()), self.values(tensors::X, elements.clone()));
            let (z, bias) = (self.of_gate(elements), self.vector(tensors::BIAS));
            let (mean, rstd) = (&mean[self.statistics(&rows)], &rstd[self.statistics(&rows)]);
            let inputs = BackwardInputs { dy: &dy, x: &x, weight, mean, rstd, dresidual_out: None };
            let gated = self.gated(&z).map(|gated| (gated, self.tensors.has(Tensor::Bias).then_some(&*bias)));
            let truth = self.gradients(&self.spec(&rows), &inputs, gated);
            for &gradient in &judged {
                wrong += failures(&truth.judge_bits(gradient, &self.rows_of(gradient, &rows)?));
            }
        }
        Ok(if is_whole { wrong } else { wrong + self.wrong_in_columns(&mean, &rstd)? })
    }

    /// Checks the sums over all rows, in evenly spaced columns from the first to the last. With
    /// given statistics a column's sum depends on no other column, so the columns are checked as a
    /// matrix of their own, in which each column is a group.
    fn wrong_in_columns(&self, mean: &[f64], rstd: &[f64]) -> Result<usize, Error> {
        let Shape { rows, cols } = self.shape;
        let count = (JUDGED_TERMS / rows).clamp(2, cols.max(2)).min(cols);
        let columns = || (0..count).map(move |i| i * (cols - 1) / (count - 1).max(1));
        let gather = |tensor| self.values(tensor, (0..rows).flat_map(|row| columns().map(move |col| row * cols + col)));
        let (dy, x) = (gather(tensors::SECOND), gather(tensors::X));
        let z = if self.operation.form.has_gate() { gather(tensors::GATE) } else { Vec::new() };
        let of_columns = |values: &[f64]| -> Vec<f64> {
            let groups = || columns().map(|col| col * self.groups() / cols);
            values.chunks(self.groups()).flat_map(|row| groups().map(|group| row[group])).collect()
        };
        let (mean, rstd) = (&of_columns(mean)[..], &of_columns(rstd)[..]);
        let inputs = BackwardInputs { dy: &dy, x: &x, weight: None, mean, rstd, dresidual_out: None };
        let of_columns = spec(self.operation, Shape { rows, cols: count }).groups(count);
        let truth = self.gradients(&of_columns, &inputs, self.gated(&z).map(|gated| (gated, None)));
        let mut wrong = 0;
        for gradient in SUMS.into_iter().filter(|tensor| self.tensors.has(*tensor)) {
            wrong += failures(&truth.judge_bits(gradient, &pick(&self.all(gradient, cols)?, columns())));
        }
        Ok(wrong)
    }

    /// The inputs for some rows.
    fn inputs(&self, rows: &Range<usize>) -> Result<Inputs, Error> {
        let elements = elements(self.shape, rows);
        let adds = self.operation.op.has_residual();
        Ok(Inputs {
            x: self.values(tensors::X, elements.clone()),
            residual: adds.then(|| self.values(tensors::SECOND, elements.clone())),
            weight: self.tensors.has(Tensor::Weight).then(|| self.vector(tensors::WEIGHT)),
            bias: self.tensors.has(Tensor::Bias).then(|| self.vector(tensors::BIAS)),
            gate: self.operation.form.has_gate().then(|| self.values(tensors::GATE, elements.clone())),
            sum: adds.then(|| Ok::<_, Error>(self.rows_of(Tensor::ResidualOut, rows)?.values())).transpose()?,
        })
    }

    /// The expected results of forward for these inputs.
    fn truth<'a>(&'a self, rows: &Range<usize>, inputs: &'a Inputs) -> ForwardTruth<'a> {
        let Inputs { x, residual, weight, bias, gate, sum } = inputs;
        let residual = residual.as_deref().map(|residual| (residual, self.dtype));
        let inputs = ForwardInputs { x, residual, weight: weight.as_deref(), bias: bias.as_deref() };
        let gated = gate.as_deref().and_then(|z| self.gated(z));
        ForwardTruth::gated(&self.spec(rows), inputs, gated, self.dtype, sum.as_deref(), self.model())
    }

    /// These elements of the gate, if the operation has one.
    fn of_gate(&self, elements: Range<usize>) -> Vec<f64> {
        if self.operation.form.has_gate() { self.values(tensors::GATE, elements) } else { Vec::new() }
    }

    /// The gate of the operation, with these values.
    fn gated<'a>(&self, z: &'a [f64]) -> Option<Gated<'a>> {
        Some(Gated { gate: spec(self.operation, self.shape).gate?, z, wide: self.dtype })
    }

    /// The expected codes and scales. `scale` is used if `quant` has a given scale.
    fn quantized<'a>(
        &'a self,
        rows: &Range<usize>,
        quant: QuantSpec,
        scale: f64,
        truth: &ForwardTruth<'a>,
    ) -> Result<QuantizedTruth<'a>, Error> {
        let (rstd, given) = (self.rows_of(Tensor::Rstd, rows)?, Given { scale, amax: 0.0 });
        let stored = (self.dtype, Some(&rstd));
        Ok(QuantizedTruth::new(&self.spec(rows), quant, given, truth, stored, &self.arithmetic))
    }

    fn gradients(
        &self,
        spec: &NormSpec,
        inputs: &BackwardInputs<'_>,
        gated: Option<(Gated<'_>, Option<&[f64]>)>,
    ) -> BackwardTruth {
        let reduction = self.operation.reduction;
        BackwardTruth::gated(spec, inputs, gated, self.dtype, Statistics::Given, reduction, self.model())
    }

    /// Groups of columns.
    fn groups(&self) -> usize {
        spec(self.operation, self.shape).groups
    }

    /// The elements of some rows in `mean` and `rstd`.
    fn statistics(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.groups()..rows.end * self.groups()
    }

    /// The number of wrong elements in some rows of outputs. A pair is (the tensor with whose
    /// bounds it is checked, the output). Outputs that the operation does not have are skipped.
    fn wrong_rows(
        &self,
        truth: &ForwardTruth<'_>,
        rows: &Range<usize>,
        outputs: &[(Tensor, Tensor)],
    ) -> Result<usize, Error> {
        let there = outputs.iter().filter(|(_, tensor)| self.tensors.has(*tensor));
        there.map(|&(judged, tensor)| Ok(failures(&truth.judge_bits(judged, &self.rows_of(tensor, rows)?)))).sum()
    }

    /// Downloads some rows of a matrix or of statistics, or a whole vector.
    fn rows_of(&self, tensor: Tensor, rows: &Range<usize>) -> Result<Bits, Error> {
        let elements = if tensor.shape() == TensorShape::Rows {
            self.statistics(rows)
        } else if tensor.shape() == TensorShape::Cols {
            0..self.shape.cols
        } else {
            elements(self.shape, rows)
        };
        self.results.part(self.operation, tensor, elements)
    }

    /// Downloads all `len` elements of a tensor; none if the operation does not have the tensor.
    fn all(&self, tensor: Tensor, len: usize) -> Result<Bits, Error> {
        self.results.part(self.operation, tensor, 0..if self.tensors.has(tensor) { len } else { 0 })
    }

    /// The spec of a call on these rows only.
    fn spec(&self, rows: &Range<usize>) -> NormSpec {
        spec(self.operation, Shape { rows: rows.len(), ..self.shape })
    }

    fn model(&self) -> Model<'_> {
        Model { arithmetic: &self.arithmetic, mode: Mode::Worst }
    }

    fn vector(&self, tensor: usize) -> Vec<f64> {
        self.values(tensor, 0..self.shape.cols)
    }

    fn values(&self, tensor: usize, elements: impl Iterator<Item = usize>) -> Vec<f64> {
        let [of_x, of_y, of_weight] = self.slots;
        let slot = match tensor {
            tensors::X => of_x,
            tensors::WEIGHT | tensors::BIAS => of_weight,
            // A cast has dy, but no residual, gate or next norm.
            _ => of_y,
        };
        elements.map(|index| self.patterns[slot].value(tensor, index)).collect()
    }
}

/// The sums over the rows.
const SUMS: [Tensor; 2] = [Tensor::Dweight, Tensor::Dbias];

const SUM_AND_STATISTICS: [(Tensor, Tensor); 3] =
    [(Tensor::ResidualOut, Tensor::ResidualOut), (Tensor::Rstd, Tensor::Rstd), (Tensor::Mean, Tensor::Mean)];

/// The next norm's outputs.
const NEXT: [(Tensor, Tensor); 3] =
    [(Tensor::Y, Tensor::Y), (Tensor::Rstd, Tensor::NextRstd), (Tensor::Mean, Tensor::NextMean)];

/// The elements at these indices.
fn pick(elements: &Bits, places: impl Iterator<Item = usize>) -> Bits {
    Bits { storage: elements.storage, bits: places.map(|place| elements.bits[place]).collect() }
}

/// The number of elements outside their bounds, including elements without a verdict: inputs are
/// finite and small, so every element has a bound.
const fn failures(verdict: &Verdict) -> usize {
    verdict.failures + verdict.open
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_core::GradReduction;
    use rmsnorm_core::cpu::CpuBackend;

    /// The operations on rows of this length.
    fn operations(cols: usize) -> Vec<Operation> {
        let of_form = |form| {
            let ops = match form {
                Form::Plain => Op::all(),
                Form::GateAfter | Form::Groups | Form::BeforeWeight | Form::RstdFirst | Form::NoWeight => {
                    Op::USUAL.to_vec()
                }
                // These have no residual.
                Form::GateBefore | Form::GateBeforeGroups | Form::WeightFirst | Form::ToF32 | Form::FromF32 => {
                    vec![Op::Forward, Op::Backward]
                }
            };
            Operation::product(&Norm::ALL, &ops, &[form], &[GradReduction::Partials])
        };
        let divides = |form: &Form| cols.is_multiple_of(form.of(NormSpec::rms(1, cols, 0.0)).groups);
        Form::ALL.into_iter().filter(divides).flat_map(of_form).collect()
    }

    type OnCpu<'a> = Workload<'a, CpuBackend>;

    fn workload(backend: &CpuBackend, dtype: DType, rows: usize, cols: usize) -> OnCpu<'_> {
        Workload::new(backend, Shape { rows, cols }, dtype, &operations(cols)).unwrap()
    }

    #[test]
    fn every_operation_is_within_its_bounds() {
        let backend = CpuBackend::new();
        for (rows, cols) in [(1, 1), (1, 104), (20, 104), (40, 33), (3000, 7)] {
            for dtype in DType::ALL {
                let mut workload = workload(&backend, dtype, rows, cols);
                for operation in operations(cols) {
                    let wrong = workload.wrong_elements(operation).unwrap();
                    assert_eq!(wrong, 0, "{operation:?} {dtype} {rows}x{cols}");
                }
            }
        }
    }

    /// Judges results that no operation has written.
    #[test]
    fn what_is_not_written_is_wrong() {
        let backend = CpuBackend::new();
        let mut workload = workload(&backend, DType::Bf16, 100, 8);
        workload.poison(Operation::new(Norm::Rms, Op::Forward)).unwrap();
        let judged = 2 * JUDGED_ROWS;
        let forward = Operation::new;
        assert_eq!(workload.wrong_results(forward(Norm::Rms, Op::Forward)).unwrap(), judged * 8 + judged);
        let added = workload.wrong_results(forward(Norm::Layer, Op::AddForward));
        assert_eq!(added.unwrap(), 2 * judged * 8 + 2 * judged);
        for operation in operations(8).into_iter().filter(|operation| operation.op == Op::Backward) {
            workload.poison(operation).unwrap();
            workload.call(Operation { op: Op::Forward, ..operation }, 0).unwrap();
            workload.poison_rows_of_out(operation).unwrap();
            let of_norm = if operation.norm == Norm::Layer { 16 } else { 8 };
            let sums = if operation.form.has_weight() { of_norm } else { 0 };
            let matrices = if operation.form.has_gate() { 2 } else { 1 };
            let rows = if operation.form == Form::WeightFirst { 100 } else { judged };
            assert_eq!(workload.wrong_results(operation).unwrap(), matrices * rows * 8 + sums);
        }
    }

    /// Right results of an earlier call do not pass as the results of a call that writes nothing.
    #[test]
    fn what_an_earlier_call_left_is_wrong() {
        let backend = CpuBackend::new();
        let mut workload = workload(&backend, DType::F32, 20, 104);
        for operation in operations(104) {
            assert_eq!(workload.wrong_elements(operation).unwrap(), 0);
            // All 20 rows are checked. Backward gets its statistics.
            let all_but_this = |workload: &mut OnCpu<'_>, made: Operation| {
                if made.op == operation.op { Ok(()) } else { workload.call(made, 0) }
            };
            let wrong = workload.wrong_after(operation, &all_but_this).unwrap();
            assert!(wrong >= 20 * 104, "{operation:?}: {wrong}");
        }
    }

    /// NaN in the statistics that backward reads does not excuse NaN in its results.
    #[test]
    fn statistics_that_are_not_numbers_are_wrong() {
        let backend = CpuBackend::new();
        let mut workload = workload(&backend, DType::F32, 20, 104);
        for operation in operations(104).into_iter().filter(|operation| operation.op == Op::Backward) {
            let backward_alone = |workload: &mut OnCpu<'_>, made: Operation| {
                if made.op == Op::Backward { workload.call(made, 0) } else { Ok(()) }
            };
            let wrong = workload.wrong_after(operation, &backward_alone).unwrap();
            assert!(wrong >= 20, "{operation:?}: {wrong}");
        }
    }

    #[test]
    fn every_way_to_copy_copies_every_element() {
        let backend = CpuBackend::new();
        for (rows, cols) in [(1, 1), (3, 7), (100, 1031), (1500, 2049)] {
            assert_eq!(workload(&backend, DType::F32, rows, cols).wrong_copies().unwrap(), 0, "{rows}x{cols}");
            assert_eq!(workload(&backend, DType::Bf16, rows, cols).wrong_copies().unwrap(), 0, "{rows}x{cols}");
        }
    }

    #[test]
    fn elements_that_are_not_copied_are_counted() {
        let backend = CpuBackend::new();
        let mut workload = workload(&backend, DType::F16, 10, 10);
        let upload = |bits: Bits| Buffer::upload(&backend, &bits).unwrap();
        workload.sets[0].out[0] = Buffer::nan(&backend, DType::F16, 100).unwrap();
        assert_eq!(workload.not_copied(0).unwrap(), 100);
        let mut last = workload.sets[0].x[0].download(&backend, 0..100).unwrap();
        last.bits[99] ^= 1;
        workload.sets[0].out[0] = upload(last.clone());
        assert_eq!(workload.not_copied(0).unwrap(), 1);
        last.bits.truncate(99);
        workload.sets[0].out[0] = upload(last);
        assert_eq!(workload.not_copied(0).unwrap(), 1);
    }

    /// Each call copies the next set, and only this set: copying one set again would measure the
    /// cache.
    #[test]
    fn a_copy_is_of_the_set_that_is_asked_for() {
        let backend = CpuBackend::new();
        let mut workload = workload(&backend, DType::F32, 128, 256);
        let count = workload.sets.len();
        assert!(count > 2, "{count}");
        for set in [0, 1, count - 1] {
            for way in 0..CpuBackend::COPIES {
                for set in &mut workload.sets {
                    set.out[0] = Buffer::nan(&backend, DType::F32, 128 * 256).unwrap();
                }
                workload.copy(set + count, way).unwrap();
                for other in [0, 1, count - 1] {
                    let expected = if other == set { 0 } else { 128 * 256 };
                    assert_eq!(workload.not_copied(other).unwrap(), expected, "set {set}, way {way}");
                }
            }
        }
    }

    #[test]
    fn norms_are_told_apart() {
        let backend = CpuBackend::new();
        let mut workload = workload(&backend, DType::F32, 2, 100);
        let layer = Operation::new(Norm::Layer, Op::Forward);
        workload.poison(layer).unwrap();
        workload.call(layer, 0).unwrap();
        assert_eq!(workload.wrong_results(layer).unwrap(), 0);
        let rms = Operation { norm: Norm::Rms, ..layer };
        assert!(workload.wrong_results(rms).unwrap() > 100, "a layer norm is no RMS norm");
    }

    #[test]
    fn a_row_that_is_missing_from_the_sums_is_seen() {
        let backend = CpuBackend::new();
        let [rows, cols] = [500, 12];
        let whole = Operation::new(Norm::Layer, Op::Backward);
        let mut workload = workload(&backend, DType::F32, rows, cols);
        assert_eq!(workload.wrong_elements(whole).unwrap(), 0);
        // The same sums, without the last row.
        workload.shape.rows = rows - 1;
        workload.call(whole, 0).unwrap();
        workload.shape.rows = rows;
        assert_eq!(workload.wrong_results(whole).unwrap(), 2 * cols);
    }

    #[test]
    fn judged_rows_are_both_ends_and_none_twice() {
        let ends =
            [(1, vec![[0, 1]]), (16, vec![[0, 16]]), (20, vec![[0, 16], [16, 20]]), (99, vec![[0, 16], [83, 99]])];
        for (rows, expected) in ends {
            let judged: Vec<_> = judged_rows(Operation::new(Norm::Rms, Op::Forward), Shape { rows, cols: 3 })
                .iter()
                .map(|rows| [rows.start, rows.end])
                .collect();
            assert_eq!(judged, expected);
        }
    }
}
